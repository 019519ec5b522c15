"""The page: what it loads, holds and hides, read back by a parser of its own."""

import base64
import dataclasses
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from vitprobe import report, results
from vitprobe.report import number, write_report

VOID = {"meta", "link", "img", "br", "wbr"}
HOSTILE = "<script>alert('1')</script> & \"quoted\""


@dataclasses.dataclass
class Table:
    section: str
    folded: bool
    caption: str = ""
    names: list[str] = dataclasses.field(default_factory=list)
    rows: list[list[str]] = dataclasses.field(default_factory=list)


class Reader(HTMLParser):
    """Balanced tags, attributes, text and tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.tables: list[Table] = []
        self.section = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len({key for key, _ in attrs}) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attrs)["id"]
        elif tag == "table":
            self.tables.append(Table(self.section, "details" in self.open))
        elif tag == "tr" and "tbody" in self.open:
            self.tables[-1].rows.append([])
        elif tag == "td":
            self.tables[-1].rows[-1].append("")
        elif tag == "th":
            self.tables[-1].names.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.text += data
        if self.open[-1:] == ["caption"]:
            self.tables[-1].caption += data
        elif "td" in self.open:
            self.tables[-1].rows[-1][-1] += data
        elif "th" in self.open and self.open[-1] == "code":
            self.tables[-1].names[-1] += data

    def summary(self, section: str, variable: str) -> Table:
        """The one open table of a section with a column of this variable."""
        (table,) = [t for t in self.tables if t.section == section and not t.folded and variable in t.names]
        return table


def read(page: Path) -> Reader:
    return Reader(page.read_text(encoding="utf-8"))


def variable(dims, values, name="made up", units="1"):
    return (dims, values, {"long_name": name, "units": units})


def fourier(layers: int = 4, frequencies: int = 9, seed: int = 0, name: str = "blocks", **attributes) -> xr.Dataset:
    rng = np.random.default_rng(seed)
    amplitude = rng.normal(-3, 1, (layers, frequencies))
    amplitude[1, 1::2] = np.nan  # a smaller grid lacks every other frequency
    error = np.abs(rng.normal(0, 0.05, (layers, frequencies)))
    return xr.Dataset(
        {
            "relative_log_amplitude": variable(("layer", "frequency"), amplitude),
            "relative_log_amplitude_se": variable(
                ("layer", "frequency"), error, "standard error over images of relative_log_amplitude"
            ),
            "high_frequency_amplitude": variable("layer", amplitude[:, -1]),
            "high_frequency_amplitude_se": variable("layer", error[:, -1]),
        },
        {
            "layer": np.arange(layers),
            "layer_name": ("layer", [f"{name}.{index}" for index in range(layers)]),
            "kind": ("layer", ["msa", "mlp"] * (layers // 2)),
            "depth": ("layer", np.linspace(0, 1, layers)),
            "grid_h": ("layer", [8, 4, *[8] * (layers - 2)]),
            "frequency": ("frequency", np.linspace(0, 1, frequencies), {"units": "pi rad/patch"}),
        },
        results.provenance(
            title="Fourier amplitude", references="a paper", config={"definition": "corrected"}, seed=seed,
            **{"probe": "fourier", "model": "vit_micro", "images": 64, "skipped": "[]"} | attributes,
        ),
    )  # fmt: skip


def nonlocality(layers: int = 12, heads: int = 3) -> xr.Dataset:
    values = np.random.default_rng(1).uniform(1, 4, (layers, heads))
    return xr.Dataset(
        {
            "nonlocality": variable(("layer", "head"), values, units="patches"),
            "nonlocality_se": variable(("layer", "head"), values / 100, units="patches"),
        },
        {"layer": np.arange(layers), "layer_name": ("layer", [f"b{i}" for i in range(layers)]), "head": range(heads)},
        results.provenance(title="Reach", probe="no_figure_of_it", model="vit_micro", images=64, skipped="[]"),
    )


def overall() -> xr.Dataset:
    data = {"accuracy": 0.5, "ece": 0.04567, "ece_low": 0.0123, "ece_high": 0.0789, "nll": 1.23456, "nll_se": 0.0345}
    return xr.Dataset(
        {name: variable((), value) for name, value in data.items()}
        | {"share": variable("bin", np.array([0.25, np.nan, 0.75]))}
        | {"word": ("bin", ["a", "", "c"], {"long_name": "a text"})},
        {"bin": np.arange(3)},
        results.provenance(title="Calibration", probe="other", nep=0.25, nep_low=0.1, nep_high=0.4)
        | {"trace_mean": 348.57, "trace_se": 148.99},
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    datasets = {"fourier": fourier(), "nonlocality": nonlocality(), "overall": overall()}
    return write_report(datasets, folder, left_out={"cka": "cka: four images are wanted."})


def test_the_folder_holds_page_figures_and_data(page):
    names = {file.name for file in page.parent.iterdir()}
    assert names == {"index.html", "fourier.nc", "fourier.png", "nonlocality.nc", "overall.nc"}
    assert results.load(page.parent / "fourier.nc").identical(
        fourier().assign_attrs(results.load(page.parent / "fourier.nc").attrs)
    )


def test_the_page_loads_nothing(page):
    text, tags = page.read_text(encoding="utf-8"), read(page).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"fourier", "nonlocality", "overall", "left-out", "provenance"} <= set(ids)
    assert not {"script", "iframe", "object", "embed", "video"} & {tag for tag, _ in tags}
    assert "@import" not in text and "url(" not in text
    for tag, attributes in tags:
        assert attributes.get("src", "data:").startswith("data:")
        link = attributes.get("href", "#provenance")
        if tag == "link":
            assert link == "data:,"
        elif link.startswith("#"):
            assert link[1:] in ids
        else:
            assert (page.parent / link).is_file()


def test_the_figure_in_the_page_is_the_file(page):
    (image,) = [attributes for tag, attributes in read(page).tags if tag == "img"]
    kind, data = image["src"].split(",")
    assert kind == "data:image/png;base64"
    content = (page.parent / "fourier.png").read_bytes()
    assert base64.b64decode(data) == content
    width, height = (int.from_bytes(content[start : start + 4]) for start in (16, 20))
    assert int(image["width"]) / int(image["height"]) == pytest.approx(width / height, rel=0.01)
    assert "Fourier amplitude" in image["alt"]


@pytest.mark.parametrize("name", ["fourier", "nonlocality", "overall"])
def test_every_variable_is_there_to_seven_digits(page, name):
    ds = results.load(page.parent / f"{name}.nc")
    missing = set(ds.variables)
    for table in read(page).tables:
        if table.section != name or not table.folded:
            continue
        if table.caption == "Overall":
            columns = {label: [cell] for label, cell in table.rows}
        else:
            columns = dict(zip(table.names, zip(*table.rows, strict=True), strict=True))
        dims = [key for key in columns if key in ds.dims]
        for key, cells in columns.items():
            for row, cell in enumerate(cells):
                where = {dim: float(columns[dim][row]) for dim in dims if dim in ds[key].dims}
                value = ds[key].sel(where, method="nearest").item()
                if isinstance(value, str) or math.isnan(value):
                    assert cell == (value if isinstance(value, str) else "–")
                else:
                    assert float(cell) == pytest.approx(value, rel=1e-6)
        missing -= set(columns)
    assert missing == set()


def shown(cell: str) -> tuple[float, float, float]:
    """Value and error of `"-1.23 ± 0.45"`, and half a unit in the last place."""
    value, error = cell.split(" ± ")
    return float(value), float(error), 0.5 * 10.0 ** -len(value.partition(".")[2])


def test_a_summary_has_the_ends_of_a_spectrum(page):
    ds = fourier()
    rows = read(page).summary("fourier", "relative_log_amplitude").rows
    assert [row[:3] for row in rows] == [[str(i), f"blocks.{i}", kind] for i, kind in enumerate(ds.kind.values)]
    for i, row in enumerate(rows):
        for cell, entry in zip(row[3:], ((i, -1), (i, 0), (i, -1)), strict=True):
            value, error, half = shown(cell)
            assert abs(value - ds.relative_log_amplitude.values[entry]) <= half * 1.001
            assert abs(error - ds.relative_log_amplitude_se.values[entry]) <= half * 1.001


def test_a_summary_has_the_mean_of_heads_and_their_range(page):
    ds = nonlocality()
    rows = read(page).summary("nonlocality", "nonlocality").rows
    for row, heads in zip(rows, ds.nonlocality.values, strict=True):
        mean, low, high = map(float, re.findall(r"[\d.]+", row[-1]))
        assert (mean, low, high) == pytest.approx((heads.mean(), heads.min(), heads.max()), abs=6e-4)


def test_numbers_for_all_images_have_their_intervals(page):
    (table,) = [table for table in read(page).tables if table.caption == "Overall" and not table.folded]
    assert {label.removeprefix("made up"): cell for label, cell in table.rows} == {
        "accuracy": "0.5000",
        "ece": "0.046 [0.012, 0.079]",
        "nll": "1.235 ± 0.035",
        "nep": "0.25 [0.10, 0.40]",
        "trace_mean": "349 ± 149",
    }


def test_a_place_without_a_value_has_its_row(page):
    table = read(page).summary("overall", "share")
    assert table.rows == [["0", "0.2500", "a"], ["1", "–", ""], ["2", "0.7500", "c"]]


def test_what_was_left_out_is_said(tmp_path):
    first = fourier(
        probe="no_figure",
        left_out='{"noise": "noise: no labels.", "other": "measured after all"}',
        skipped='["blocks.3: no grid"]',
    )
    page = write_report({"fourier": first, "other": overall()}, tmp_path, left_out={"cka": "too few images"})
    text = read(page).text
    for words in ("no labels.", "too few images", "blocks.3: no grid"):
        assert words in text.split("Left out")[-1].split("Provenance")[0]
    assert "measured after all" not in text.split("Left out")[-1].split("Provenance")[0]
    page = write_report({"other": overall()}, tmp_path)
    assert "Left out" not in read(page).text


def test_provenance_is_told_once_and_what_differs_apart(page):
    text = read(page).text
    shared = text.split("Provenance")[-1]
    assert text.count("netCDF4 = ") == 1 and "netCDF4 = " in shared
    assert "vit_micro" not in shared  # the calibration does not say its model
    assert "definition corrected" in text.split("Reach")[1]
    assert "definition = corrected" in text


def test_hostile_text_is_shown_and_not_run(tmp_path, monkeypatch):
    ds = fourier(name=HOSTILE, title_of_it=HOSTILE, model=HOSTILE)
    ds.attrs |= {"title": HOSTILE, "references": HOSTILE, "probe": HOSTILE, "history": HOSTILE}
    ds["high_frequency_amplitude"].attrs |= {"long_name": HOSTILE, "units": HOSTILE}
    reader = read(write_report({HOSTILE: ds}, tmp_path, left_out={HOSTILE + "2": HOSTILE}))
    assert "script" not in {tag for tag, _ in reader.tags}
    assert not [key for _, attributes in reader.tags for key in attributes if key.startswith("on")]
    assert reader.text.count(HOSTILE) > 20
    monkeypatch.setattr(report, "draw", lambda ds: Figure())
    reader = read(write_report({"fourier": ds.assign_attrs(probe="fourier")}, tmp_path / "drawn"))
    (image,) = [attributes for tag, attributes in reader.tags if tag == "img"]
    assert set(image) == {"src", "width", "height", "alt"} and image["alt"].startswith(HOSTILE)
    assert Reader(report._element("p", HOSTILE, title=HOSTILE)).tags == [("p", {"title": HOSTILE})]
    # A name is a file's too, and stays inside the folder.
    assert {file.suffix for file in tmp_path.iterdir() if file.is_file()} == {".nc", ".html"}
    assert write_report({"../up": fourier()}, tmp_path / "in").parent == tmp_path / "in"
    assert not (tmp_path / "up.nc").exists()


def test_stacked_runs_have_a_row_each_and_no_padding(tmp_path):
    shapes = ((4, "vit_micro"), (6, "convit_micro"), (4, "vit_micro"))
    runs = [fourier(n, seed=seed, model=model, probe="no_figure") for seed, (n, model) in enumerate(shapes)]
    ds = results.stack_runs(runs, accuracy=[60.5, 61.5, 62.5])
    reader = read(write_report({"fourier": ds}, tmp_path))
    summary = reader.summary("fourier", "relative_log_amplitude")
    rows = summary.rows
    assert summary.names[:6] == ["run", "seed", "model", "layer", "layer_name", "kind"] and len(rows) == 4 + 6 + 4
    assert [row[2] for row in rows] == ["vit_micro"] * 4 + ["convit_micro"] * 6 + ["vit_micro"] * 4
    value, _, half = shown(rows[7][6])
    assert abs(value - runs[1].high_frequency_amplitude.values[3]) <= half * 1.001
    (table,) = [table for table in reader.tables if table.caption == "Runs"]
    assert [row[table.names.index("accuracy")] for row in table.rows] == ["60.5", "61.5", "62.5"]
    assert "ViT micro, ConViT micro" in reader.text


def test_the_order_of_dimensions_in_the_file_changes_nothing(tmp_path):
    ds = fourier(probe="no_figure")
    pages = [
        read(write_report({"fourier": one}, tmp_path / name))
        for name, one in {"as_is": ds, "turned": ds.transpose("frequency", "layer")}.items()
    ]
    assert pages[0].tables == pages[1].tables


def test_long_tables_are_folded_and_cut(tmp_path):
    reader = read(write_report({"fourier": fourier(80, 9, probe="no_figure")}, tmp_path))
    assert "By layer: 80 rows" in reader.text
    (cut,) = [table for table in reader.tables if "first" in table.caption]
    present = int(fourier(80, 9).relative_log_amplitude_se.notnull().sum())
    assert cut.caption == f"By layer and frequency: the first 500 of {present} rows; fourier.nc has all"
    assert len(cut.rows) == 500


def test_a_figure_that_fails_costs_itself_only(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda ds: Figure())
    write_report({"one": fourier(), "two": fourier()}, tmp_path)

    def broken(ds):
        if ds.attrs["seed"]:
            raise KeyError("frequency")
        return Figure()

    monkeypatch.setattr(report, "draw", broken)
    with pytest.warns(UserWarning, match="one: the figure could not be drawn: KeyError: 'frequency'"):
        page = write_report({"one": fourier(seed=1), "two": fourier()}, tmp_path)
    reader = read(page)
    assert "The figure could not be drawn: KeyError: 'frequency'" in reader.text
    assert [tag for tag, _ in reader.tags].count("img") == 1
    # The older figure shows other values than the file now has.
    assert not (tmp_path / "one.png").exists() and (tmp_path / "two.png").exists()
    assert results.load(tmp_path / "one.nc").attrs["seed"] == 1


def test_a_failure_leaves_the_old_page_whole(tmp_path, monkeypatch):
    page = write_report({"other": overall()}, tmp_path)
    old = page.read_bytes()
    write = Path.write_text

    def half(self, text, **options):
        write(self, text[: len(text) // 2], **options)
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space left"):
        write_report({"other": overall(), "more": nonlocality()}, tmp_path)
    assert page.read_bytes() == old
    assert {file.name for file in tmp_path.iterdir()} == {"index.html", "other.nc", "more.nc"}


def test_the_same_data_give_the_same_page_and_are_not_written_again(tmp_path):
    ds = overall()
    first = write_report({"other": ds}, tmp_path).read_bytes()
    stamp = (tmp_path / "other.nc").stat().st_mtime_ns
    assert write_report({"other": results.load(tmp_path / "other.nc")}, tmp_path).read_bytes() == first
    assert (tmp_path / "other.nc").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("datasets", "said"),
    [
        ({}, "nothing to report"),
        ({"a b": overall(), "a-b": overall()}, "same file"),
        ({"bare": overall().assign_attrs(vitprobe_schema=0)}, "schema"),
    ],
)
def test_what_cannot_be_reported(datasets, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        write_report(datasets, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-5.84904, 0.02884, "-5.849 ± 0.029"),
        (741.6123, math.nan, "741.6"),
        (348.57, 148.99, "349 ± 149"),
        (0.99961, 0.00996, "1.000 ± 0.010"),
        (-0.0001, 0.31, "0.00 ± 0.31"),
        (12.0, 0.0, "12 ± 0"),
        (269722, math.nan, "269722"),
        (0.0001234567, math.nan, "1.235e-04"),
        (0.0001234567, 0.0000012, "(1.235 ± 0.012)e-4"),
        (-0.00051, 0.00057, "-0.00051 ± 0.00057"),
        (4.9e7, 3.1e5, "(4.900 ± 0.031)e7"),
        (1.5, 1e-12, "1.5 ± 1.0e-12"),
        (math.nan, 0.1, "–"),
        (math.inf, math.nan, "inf"),
    ],
)
def test_numbers_are_rounded_by_their_error(value, error, text):
    assert number(value, error) == text


@given(st.floats(-1e12, 1e12), st.floats(1e-12, 1e12))
def test_no_number_is_off_by_more_than_its_last_digit(value, error):
    parts = re.fullmatch(r"\(?(.*) ± (.*?)(?:\)e(-?\d+))?", number(value, error))
    assert parts is not None
    power = 10.0 ** int(parts[3] or 0)
    assert float(parts[1]) * power == pytest.approx(value, abs=0.051 * error + 1e-9 * abs(value))
    assert float(parts[2]) * power == pytest.approx(error, rel=0.051)


def test_pages_are_made_without_torch(tmp_path):
    results.save(fourier(probe="no_figure"), tmp_path / "in" / "fourier.nc")
    code = (
        "import sys; from vitprobe.cli import main; code = main(sys.argv[1:]); "
        "print(code, sorted({'torch', 'timm', 'sklearn'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "report", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(tmp_path / "out" / "index.html"), "0 []"]
