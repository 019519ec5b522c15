"""A study's cache, failures, interruption and files, with a toy measurement and an executor in this process."""

from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from vitprobe.claims import CLAIMS, decide, verdicts_from_json
from vitprobe.results import load, provenance
from vitprobe.study import Settings, Study, exit_code, find_verdicts, run_study, write_claims

MEASURED: list[str] = []


@dataclass(frozen=True)
class ToyRun:
    model: str
    seed: int
    fails: bool = False

    @property
    def label(self) -> str:
        return f"{self.model} seed {self.seed}"

    def config(self):
        return {"model": self.model, "seed": self.seed}

    def fraction(self, cache: Path | None) -> float:
        return 0.0


class Inline:
    """An executor that runs at once, in this process."""

    def submit(self, function, *arguments):
        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


def measure(run: ToyRun, settings: Settings) -> xr.Dataset:
    if run.fails:
        raise ZeroDivisionError(f"{run.label} broke")
    MEASURED.append(run.label)
    values = np.random.default_rng(run.seed).normal(1.0, 0.1, 3)
    return xr.Dataset(
        {"value": ("layer", values, {"long_name": "a value", "units": "1"})},
        coords={"layer": ("layer", np.arange(3), {"long_name": "layer", "units": "1"})},
        attrs=provenance(title="toy", config=run.config(), seed=run.seed, probe="toy"),
    )


def verdicts(ds: xr.Dataset):
    return [decide(CLAIMS["E14"], ds.value.mean("layer").values, threshold=0.0)]


def toy(*runs: ToyRun) -> Study:
    def draw(ds: xr.Dataset) -> Figure:
        figure = Figure()
        figure.subplots().plot(ds.value.values.T)
        return figure

    return Study("toys/toy", "Toys", lambda settings: list(runs), measure, draw, verdicts)


@pytest.fixture
def settings(tmp_path):
    MEASURED.clear()
    return Settings(scale="smoke", out=tmp_path / "results", cache=tmp_path / "cache")


def test_measures_saves_draws_and_judges(settings, capsys):
    path = run_study(toy(ToyRun("a", 0), ToyRun("a", 1), ToyRun("b", 0)), settings, executor=Inline())
    ds = load(path)
    assert path.name == "toy_smoke.nc"
    assert ds.model.values.tolist() == ["a", "a", "b"]
    assert ds.seed.values.tolist() == [0, 1, 0]
    assert ds.attrs["scale"] == "smoke"
    assert verdicts_from_json(ds.attrs["verdicts"])[0].verdict == "supported"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "**supported**" in (path.parent / "claims_smoke.md").read_text()
    assert "supported" in capsys.readouterr().out


def test_repeats_nothing_that_is_done(settings):
    study = toy(ToyRun("a", 0), ToyRun("a", 1))
    run_study(study, settings, executor=Inline())
    run_study(study, settings, executor=Inline())
    assert MEASURED == ["a seed 0", "a seed 1"]
    run_study(toy(ToyRun("a", 0), ToyRun("a", 2)), settings, executor=Inline())
    assert MEASURED[2:] == ["a seed 2"]


def test_recompute_measures_again(settings):
    study = toy(ToyRun("a", 0), ToyRun("a", 1))
    run_study(study, settings, executor=Inline())
    run_study(study, Settings(scale="smoke", out=settings.out, cache=settings.cache, recompute=True), executor=Inline())
    assert len(MEASURED) == 4


def test_redraw_measures_nothing(settings):
    """A result that somebody else measured can be drawn and judged here, by a rule that has changed."""
    study = toy(ToyRun("a", 0), ToyRun("a", 1))
    elsewhere = replace(settings, redraw=True, cache=settings.out / "empty")
    with pytest.raises(FileNotFoundError, match="run the study that makes it"):
        run_study(study, elsewhere)
    path = run_study(study, settings, executor=Inline())
    before = load(path)
    path.with_suffix(".png").unlink()
    run_study(replace(study, verdicts=lambda ds: []), elsewhere)
    after = load(path)
    assert len(MEASURED) == 2 and path.with_suffix(".png").exists()
    assert before.identical(after.assign_attrs(before.attrs)) and after.attrs["verdicts"] == "[]"
    with pytest.raises(ValueError, match="give one of them"):
        replace(elsewhere, recompute=True)


def test_measurements_of_other_sizes_and_scales_are_other_ones(settings):
    """A measurement may look at as many images as the settings say, of whatever the network was trained on."""
    study = toy(ToyRun("a", 0))
    others = [
        replace(settings, test_size=20),
        replace(settings, train_size=20),
        replace(settings, scale="quick"),
        replace(settings, download=False),  # which no number depends on
    ]
    for one in (settings, *others):
        run_study(study, one, executor=Inline())
    assert len(MEASURED) == 4


@pytest.mark.parametrize("name", ["seeds", "train_size", "test_size", "workers"])
def test_a_number_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name} is 0: give 1 or more"):
        Settings(**{name: 0})


def test_the_same_numbers_but_for_the_time(settings, tmp_path):
    study = toy(ToyRun("a", 0), ToyRun("a", 1))
    first = load(run_study(study, settings, executor=Inline()))
    other = Settings(scale="smoke", out=tmp_path / "again", cache=tmp_path / "another_cache")
    second = load(run_study(study, other, executor=Inline()))
    for ds in (first, second):
        del ds.attrs["history"]
    xr.testing.assert_identical(first, second)


def test_a_damaged_measurement_is_made_again(settings):
    study = toy(ToyRun("a", 0), ToyRun("a", 1))
    run_study(study, settings, executor=Inline())
    next((settings.cache / "measured").glob("*.nc")).write_bytes(b"not netCDF")
    run_study(study, settings, executor=Inline())
    assert len(MEASURED) == 3


def test_a_failed_run_costs_only_itself(settings):
    broken = ToyRun("b", 1, fails=True)
    with pytest.raises(
        RuntimeError, match=r"1 of 3 runs failed, 2 are kept; the first, b seed 1: ZeroDivisionError"
    ) as raised:
        run_study(toy(ToyRun("a", 0), broken, ToyRun("a", 1)), settings, executor=Inline())
    assert str(raised.value).endswith("b seed 1 broke. The same command goes on, and repeats nothing that is done.")
    assert not (settings.out / "toy_smoke.nc").exists()
    run_study(toy(ToyRun("a", 0), ToyRun("b", 1), ToyRun("a", 1)), settings, executor=Inline())
    assert MEASURED == ["a seed 0", "a seed 1", "b seed 1"]


def test_an_executor_that_takes_no_more_costs_only_the_rest(settings):
    class Full(Inline):
        def submit(self, function, *arguments):
            if MEASURED:
                raise OSError("the queue is full")
            return super().submit(function, *arguments)

    with pytest.raises(RuntimeError, match="1 of 2 runs failed, 1 are kept; the first, a seed 1: OSError: the queue"):
        run_study(toy(ToyRun("a", 0), ToyRun("a", 1)), settings, executor=Full())
    assert len(list((settings.cache / "measured").glob("*.nc"))) == 1


def test_a_measurement_that_another_has_made_by_now_is_taken(settings):
    class Late(Inline):
        def submit(self, function, *arguments):
            super().submit(function, *arguments)
            return super().submit(function, *arguments)

    run_study(toy(ToyRun("a", 0)), settings, executor=Late())
    assert MEASURED == ["a seed 0"]


def test_paths_mean_the_same_in_another_folder(tmp_path, monkeypatch):
    seen = []

    def grid(settings):
        seen.append(settings)
        return []

    monkeypatch.chdir(tmp_path)
    given = Settings(data="npz:a.npz,b.npz", data_root=Path("data"), cache=Path("cache"))
    with pytest.raises(ValueError, match="no datasets to stack"):
        run_study(replace(toy(), grid=grid), given)
    (got,) = seen
    assert got.data == f"npz:{tmp_path / 'a.npz'},{tmp_path / 'b.npz'}"
    assert (got.data_root, got.cache) == (tmp_path / "data", tmp_path / "cache")


def test_claims_are_gathered_from_all_files_of_a_folder(settings):
    run_study(toy(ToyRun("a", 0), ToyRun("a", 1)), settings, executor=Inline())
    text = write_claims(settings.out, "smoke").read_text()
    assert "## Toys (smoke scale, [toy_smoke.nc](toy_smoke.nc))" in text


def test_claims_of_studies_that_end_together(settings, monkeypatch):
    """The second is written while the first one is."""
    settings.out.mkdir()
    real, texts = Path.write_text, []

    def write(path, text):
        real(path, text)
        texts.append(text)
        if len(texts) == 1:
            write_claims(settings.out, "smoke")

    monkeypatch.setattr(Path, "write_text", write)
    assert write_claims(settings.out, "smoke").is_file()
    assert len(texts) == 2 and [file.name for file in settings.out.iterdir()] == ["claims_smoke.md"]


def test_foreign_and_damaged_files_stop_no_claims(settings, capsys):
    run_study(toy(ToyRun("a", 0), ToyRun("a", 1)), settings, executor=Inline())
    (settings.out / "damaged.nc").write_bytes(b"CDF")
    xr.Dataset({"x": 1}).to_netcdf(settings.out / "foreign.nc")
    half = load(settings.out / "toy_smoke.nc").assign_attrs(verdicts="[{}]")
    half.to_netcdf(settings.out / "half.nc")
    capsys.readouterr()
    assert len(find_verdicts(settings.out)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [Path(line.split()[3].rstrip(":")).name for line in lines] == ["damaged.nc", "foreign.nc", "half.nc"]


def test_a_small_scale_leaves_the_evidence_alone(settings):
    study = toy(ToyRun("a", 0), ToyRun("a", 1))
    run_study(study, replace(settings, scale="cpu"), executor=Inline())
    evidence = (settings.out / "claims.md").read_text()
    run_study(study, replace(settings, scale="quick"), executor=Inline())
    assert (settings.out / "claims.md").read_text() == evidence
    assert "cpu scale" in evidence and "quick scale" not in evidence
    assert "quick scale" in (settings.out / "claims_quick.md").read_text()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad"), 2),
        (FileNotFoundError("gone"), 2),
        (FileExistsError(17, "File exists", "x"), 2),
        (IsADirectoryError(21, "Is a directory", "x"), 2),
        (NotADirectoryError("x is a file"), 2),
        (PermissionError(13, "Permission denied", "x"), 2),
        (RuntimeError("failed"), 1),
        (FloatingPointError("the loss is nan"), 1),
        (OSError(28, "No space left on device"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes_are_one_sentence(error, code, capsys):
    def action():
        raise error

    assert exit_code(action) == code
    assert capsys.readouterr().err.strip().startswith("vitprobe: ")


@pytest.mark.parametrize("name", ["fourier", "a/b/c", "park_kim/", "/fourier"])
def test_a_name_says_where_the_results_go(name):
    with pytest.raises(ValueError, match="'paper/figure'"):
        Study(name, "Toys", lambda settings: [], measure, lambda ds: Figure(), verdicts)
