"""The command line: what it prints, writes and returns."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from PIL import Image

import vitprobe as vp
from vitprobe import cli
from vitprobe.claims import CLAIMS, decide, verdicts_to_json
from vitprobe.cli import list_studies, main, studies_root


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITPROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])


def call(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as leave:  # how tyro leaves after --help and on wrong flags
        return int(leave.code or 0)


def test_list_names_everything(capsys):
    assert call("list") == 0
    out = capsys.readouterr().out
    for name in ("park_kim/fourier", "vit_micro", "nonlocality", "digits", "cifar10"):
        assert name in out


def test_a_reader_that_leaves_gets_no_traceback():
    command = f"'{sys.executable}' -c 'from vitprobe.cli import main; import sys; sys.exit(main())' list | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_studies_are_those_of_the_folder():
    maps = [f"initial_maps/{name}" for name in ("filters", "gpsa", "impulse")]
    assert {*maps, "park_kim/fourier", "park_kim/variance"} <= set(list_studies())
    assert not {"initial_maps/drawn", "park_kim/families"} & set(list_studies())  # what studies share
    assert (studies_root() / "studies" / "park_kim" / "fourier.py").is_file()


@pytest.mark.parametrize(
    "command", [[], ["run"], ["list"], ["claims"], ["train"], ["runs"], ["probe"], ["show"], ["report"]]
)
def test_help(command, capsys):
    assert call(*command, "--help") == 0
    assert "--help" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "park_kim/furier"], "Did you mean 'park_kim/fourier'"),
        (["run", "park_kin"], "Did you mean 'park_kim'"),
        (["claims", "gone"], "no folder gone"),
        (["run", "park_kim/fourier", "--data", "cifar11"], "cifar10"),
        (["run", "park_kim/fourier", "--data", "cifar10", "--data-root", "nowhere", "--no-download"], "nowhere"),
        (["probe", "vit_nanno", "-o", "x.nc"], "Did you mean 'vit_nano'"),
        (["probe", "vit_nano", "-o", "x.csv"], "use -o x.nc"),
        (["probe", "vit_nano", "-o", "x.csv"], "-o x for a folder"),
        (["probe", "vit_nano", "--probes", "all,furier", "-o", "x"], "Did you mean 'fourier'"),
        (["probe", "vit_nano", "--mean", "0.5;0.5", "-o", "x"], "use e.g. --mean 0.5,0.5,0.5"),
        (["probe", "vit_nano", "--mean", "0.5,0.5", "-o", "x"], "one mean and one std above 0 for each channel"),
        (["probe", "vit_nano", "--option", "definition=papr", "-o", "x"], "Did you mean 'paper'"),
        (["probe", "vit_nano", "--probes", "furier", "-o", "x.nc"], "Did you mean 'fourier'"),
        (["probe", "vit_nano", "--option", "k=3", "-o", "x.nc"], "takes an option 'k'"),
        (["probe", "vit_nano", "--probes", "hessian_density", "--option", "k=3", "-o", "x.nc"], "'samples'"),
        (["probe", "resnet_nano", "--probes", "nonlocality", "-o", "x.nc"], "has no attention"),
        (["probe", "no_such_module:build", "-o", "x.nc"], "no_such_module"),
        (["probe", "timm:vit_tinny_patch16_224", "-o", "x.nc"], "Did you mean"),
        (["probe", "vit_nano", "--checkpoint", "gone.pt", "-o", "x.nc"], "gone.pt"),
        (["probe", "vit_nano", "--image-size", "0", "-o", "x.nc"], "give 1 or more pixels"),
        (["probe", "vit_nano", "--device", "gpu", "-o", "x.nc"], "there is no device 'gpu': use cpu"),
        (["probe", "vit_nano", "--device", "cuda:99", "-o", "x.nc"], "there is no device 'cuda:99'"),
        (["probe", "vit_nano", "--checkpoint", ".", "-o", "x.nc"], ". is a folder"),
        (["run", "park_kim/fourier", "--scale", "smoke", "--device", "gpu", "--workers", "1"], "no device 'gpu'"),
        (["run", "park_kim/fourier", "--seeds", "0"], "seeds is 0: give 1 or more"),
        (["runs", "gone"], "there is no folder gone"),
        (["train", "vit_nano", "--folder", "f", "--device", "gpu"], "there is no device 'gpu'"),
        (["train", "vit_nano", "--folder", "f", "--option", "dim=-6"], "at least 1 for dim, not -6"),
        (["train", "vit_nano", "--folder", "f", "--epochs", "0"], "epochs must be at least 1"),
        (["train", "vit_nano", "--folder", "f", "--recipe", "park_kim"], "Did you mean 'park_kim_weak'"),
        (["train", "vit_nano", "--folder", "f", "--start", "a", "--first", "b"], "give one of them"),
        (["train", "vit_nano", "--folder", "f", "--teacher", "none"], "none holds no trained network"),
        (["train", "vit_nano", "--folder", "f", "--measure", "nonlocalty"], "Did you mean 'nonlocality'"),
        (["train", "vit_nano", "--folder", "f", "--measure", "fourier", "--measure-every", "0"], "1 or more"),
        (["train", "vit_nano", "--folder", "f", "--option", "patch_size"], "NAME=VALUE"),
        (["train", "vit_nano", "--folder", "f", "--option", "patch_size=3"], "use patch_size=2"),
        (["show", "gone.nc"], "gone.nc"),
        (["report", "gone.nc", "-o", "x"], "gone.nc"),
        (["report", ".", "-o", "x"], "no netCDF files"),
        (["report", "-o", "x"], "nothing to report"),
        (["report", "gone.nc", "-o", "x.html"], "-o x for a folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, said, capsys):
    assert call(*arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_a_file_in_the_way_is_bad_input(capsys):
    Path("file").touch()
    Path("garbage.pt").write_bytes(bytes(range(200)))
    common = ["--train-size", "60", "--test-size", "40", "--epochs", "1"]
    for arguments, said in (
        (["train", "vit_nano", "--folder", "file", *common], "file is a file"),
        (["probe", "vit_nano", "--checkpoint", "garbage.pt", "-o", "x.nc"], "garbage.pt cannot be loaded"),
        (["probe", "vit_nano", "--images", "10", "-o", "file/p.nc"], "file"),
    ):
        assert call(*arguments) == 2
        assert said in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_a_failure_and_no_traceback(capsys):
    arguments = ["--train-size", "60", "--test-size", "40", "--batch-size", "20", "--epochs", "1", "--lr", "1e30"]
    assert call("train", "vit_nano", "--folder", "f", *arguments) == 1
    assert "vitprobe: the training loss is nan" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run"], ["nothing"], ["run", "park_kim/fourier", "--scale", "huge"]])
def test_wrong_usage_is_exit_code_2(arguments):
    assert call(*arguments) == 2


def test_train_probe_show(tmp_path, capsys):
    common = ["--data", "digits", "--train-size", "60", "--test-size", "40"]
    arguments = ["train", "vit_nano", "--folder", "run", *common, "--epochs", "1", "--option", "depth=2"]
    assert call(*arguments) == 0
    assert "test accuracy" in capsys.readouterr().out
    assert xr.load_dataset("run/history.nc").sizes == {"epoch": 1}

    (tmp_path / "mynets.py").write_text(
        "import vitprobe as vp\n"
        "def build():\n"
        "    return vp.create_model('vit_nano', image_size=8, channels=1, depth=2)\n"
    )
    arguments = ["probe", "mynets:build", "--checkpoint", "run/checkpoint.pt", "--probes", "all", "-o", "out/mine.nc"]
    assert call(*arguments, "--images", "30", "--batch-size", "20") == 0
    fourier = xr.load_dataset("out/mine_fourier.nc")
    assert fourier.attrs["images"] == 30
    assert fourier.kind.values.tolist() == ["stem", "msa", "mlp", "msa", "mlp"]
    trained = torch.load("run/checkpoint.pt", weights_only=True)["model"]
    fresh = __import__("mynets").build().state_dict()
    assert not all(torch.equal(trained[name], fresh[name]) for name in fresh)

    for name in ("fourier", "feature_variance", "nonlocality"):
        assert call("show", f"out/mine_{name}.nc") == 0
        assert (tmp_path / f"out/mine_{name}.png").stat().st_size > 5_000


BARS = """
import numpy as np
import xarray as xr
from PIL import Image
from matplotlib.figure import Figure
from vitprobe.results import provenance
from vitprobe.runs import Run
from vitprobe.study import Study

def measure(run, settings):
    values = np.random.default_rng(run.recipe.seed).normal(size=3)
    coords = {"layer": np.arange(3)}
    ds = xr.Dataset({"value": ("layer", values, {"long_name": "a value", "units": "1"})}, coords)
    return ds.assign_attrs(provenance(title="Bars", config=run.config()))

def draw(ds):
    figure = Figure()
    figure.subplots().bar(ds.layer.values, ds.value.mean("run").values)
    figure.suptitle(f"{ds.sizes['run']} runs of {ds.attrs['study']}")
    return figure

STUDY = Study(
    name="toys/bars", title="Bars", grid=lambda settings: [Run(model="vit_nano"), Run(model="resnet_nano")],
    measure=measure, draw=draw, verdicts=lambda ds: [],
)
"""


def test_show_draws_a_study_as_the_study_did(tmp_path, monkeypatch, capsys):
    from concurrent.futures import Future

    from matplotlib.figure import Figure
    from matplotlib.image import imread

    from vitprobe.figures import FIGURES
    from vitprobe.study import Settings, run_study

    class Here:
        def submit(self, function, *arguments):
            future = Future()
            future.set_result(function(*arguments))
            return future

    script = tmp_path / "root" / "studies" / "toys" / "bars.py"
    script.parent.mkdir(parents=True)
    script.write_text(BARS)
    monkeypatch.setattr(cli, "studies_root", lambda: tmp_path / "root")
    file = run_study(cli.find_study("toys/bars"), Settings(scale="smoke"), executor=Here())
    assert call("show", str(file), "-o", "again.png") == 0
    np.testing.assert_array_equal(imread("again.png"), imread(file.with_suffix(".png")))
    assert call("report", str(file), "-o", "page") == 0
    np.testing.assert_array_equal(imread("page/bars_smoke.png"), imread(file.with_suffix(".png")))

    # Where the study is not, there is its probe's figure, or a sentence.
    ds = vp.load(file)
    monkeypatch.setattr(cli, "studies_root", lambda: tmp_path / "nothing")
    capsys.readouterr()
    assert call("show", str(file), "-o", "gone.png") == 2
    assert "is of the study toys/bars, which is not here" in capsys.readouterr().err
    seen = []
    monkeypatch.setitem(FIGURES, "bars", lambda shown: seen.append(shown) or Figure())
    vp.save(ds.assign_attrs(probe="bars"), "probed.nc")
    assert call("show", "probed.nc") == 0
    assert seen[0].attrs["study"] == "toys/bars" and (tmp_path / "probed.png").is_file()


def test_probe_the_loss_and_go_on(tmp_path, capsys):
    arguments = ["probe", "vit_nano", "--images", "20", "--batch-size", "8", "-o", "h.nc"]
    arguments += ["--probes", "feature_variance,hessian_eigenvalues,loss_landscape"]
    options = ["--option", "k=2", "--option", "points=3", "--option", "tol=0.01"]
    assert call(*arguments, *options) == 0
    assert capsys.readouterr().out.split() == [f"h_{name}.nc" for name in arguments[-1].split(",")]
    eigenvalues = xr.load_dataset("h_hessian_eigenvalues.nc")
    assert eigenvalues.sizes == {"batch": 3, "rank": 2} and eigenvalues.attrs["model"] == "vit_nano"
    assert xr.load_dataset("h_loss_landscape.nc").sizes["x"] == 3
    assert call("show", "h_hessian_eigenvalues.nc") == 0
    # What is finished is found again, and another measurement is not overwritten.
    assert call(*arguments, *options) == 0
    again = xr.load_dataset("h_hessian_eigenvalues.nc")
    assert again.equals(eigenvalues)
    assert call(*arguments, *options[:-1], "tol=0.02") == 2
    assert "config.tol was 0.01 and is now 0.02" in capsys.readouterr().err


def test_probe_a_foreign_model_at_its_own_size(tmp_path):
    arguments = ["probe", "torchvision:resnet18", "--data", "synthetic:low", "--images", "4", "--image-size", "64"]
    assert call(*arguments, "--probes", "feature_variance", "-o", "r.nc") == 0
    ds = xr.load_dataset("r.nc")
    assert (ds.attrs["image_height"], ds.attrs["batch_size"], ds.attrs["augment"]) == (64, 64, "none")
    assert ds.attrs["model"] == "torchvision:resnet18"


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ({}, 0),
        ({"toys/a": RuntimeError("2 of 5 runs failed")}, 1),
        ({"toys/a": ValueError("no such scale"), "toys/c": ValueError("no such scale")}, 2),
        ({"toys/a": ValueError("no such scale"), "toys/b": RuntimeError("2 of 5 runs failed")}, 1),
        ({"toys/b": KeyError("a slip in the study")}, 1),
        ({"toys/b": AssertionError()}, 1),
    ],
)
def test_all_studies_of_a_paper(errors, code, monkeypatch, capsys):
    done = []

    def study(name, settings):
        done.append((name, settings.scale))
        if name in errors:
            raise errors[name]

    monkeypatch.setattr(cli, "list_studies", lambda: ["toy/d", "toys/a", "toys/b", "toys/c"])
    monkeypatch.setattr(cli, "find_study", lambda name: name)
    monkeypatch.setattr(cli, "run_study", study)
    assert call("run", "toys", "--scale", "smoke") == code
    assert done == [("toys/a", "smoke"), ("toys/b", "smoke"), ("toys/c", "smoke")]
    said = capsys.readouterr().err
    assert (f"{len(errors)} of 3 did not finish" in said) == bool(errors)
    for name, error in errors.items():
        assert f"  {name}: {str(error) or type(error).__name__}\n" in said
    # Where a user can do nothing, who wrote the study can.
    assert ("Traceback" in said) == any(isinstance(error, KeyError | AssertionError) for error in errors.values())


def test_ctrl_c_stops_all_studies_of_a_paper(monkeypatch):
    done = []

    def study(name, settings):
        done.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "list_studies", lambda: ["toys/a", "toys/b"])
    monkeypatch.setattr(cli, "find_study", lambda name: name)
    monkeypatch.setattr(cli, "run_study", study)
    assert call("run", "toys") == 130
    assert done == ["toys/a"]


def judged(file: Path, name: str, scale: str, values: list[float]) -> None:
    """A study's dataset with one verdict."""
    from vitprobe.results import provenance, save

    verdicts = verdicts_to_json([decide(CLAIMS[name], values, threshold=0)])
    attributes = provenance(title=f"Toys of {name}", scale=scale, verdicts=verdicts)
    save(xr.Dataset({"value": ((), values[0], {"long_name": "a value", "units": "1"})}, attrs=attributes), file)


def test_claims_of_all_folders(tmp_path, capsys):
    judged(tmp_path / "results" / "toys" / "a_cpu.nc", "E9", "cpu", [1.0, 1.5, 2.0])
    judged(tmp_path / "results" / "toys" / "more" / "b_paper.nc", "E2", "paper", [-1.0, 1.5, 2.0])
    judged(tmp_path / "results" / "toys" / "a_quick.nc", "E3", "quick", [-1.0, -1.1, -1.2])
    (tmp_path / "results" / "toys" / "a_cpu.png").touch()
    assert call("claims") == 0
    _, *rows, path = capsys.readouterr().out.splitlines()
    assert path == "results/claims.md"
    row = {line.split(maxsplit=1)[0]: line for line in rows}
    assert list(row) == list(CLAIMS)
    assert "1.5 [0.258, 2.74], n = 3 seeds" in row["E9"] and "cpu    supported" in row["E9"]
    assert row["E9"].endswith("toys/a_cpu.nc") and row["E2"].endswith("toys/more/b_paper.nc")
    assert "quick  contradicted" in row["E3"] and row["E1"].endswith("not measured")

    # Small scales are no evidence: what they alone judged is not measured there.
    page = (tmp_path / "results" / "claims.md").read_text()
    assert page.count("### Not measured") == 4  # of each paper
    measured, missing = page.split("### Not measured", 1)
    assert "| **supported** |" in measured and "| inconclusive (" in measured and "**contradicted**" not in measured
    assert [name for name in CLAIMS if f"\n| {name} |" in missing] == [
        name for name in CLAIMS if name not in ("E2", "E9")
    ]
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert sorted(links) == ["toys/a_cpu.nc", "toys/a_cpu.png", "toys/more/b_paper.nc"]
    assert all((tmp_path / "results" / link).is_file() for link in links)

    assert call("claims", "results/toys", "--scale", "quick") == 0
    _, *rows, path = capsys.readouterr().out.splitlines()
    assert path == "results/toys/claims_quick.md"
    assert [line.split()[0] for line in rows if not line.endswith("not measured")] == ["E3"]
    assert "[a_quick.nc](a_quick.nc)" in (tmp_path / path).read_text()
    assert not (tmp_path / "results" / "toys" / "claims.md").exists()


def test_which_images_of_a_folder_are_probed(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in ("circle", "square"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(10):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    arguments = ("probe", "vit_nano", "--data", f"folder:{tmp_path / 'images'}", "-o", "a.nc", "--probes", "fourier")
    assert call(*arguments, "--device", "cpu") == 0
    assert "4 images of the test split" in capsys.readouterr().err  # the last fifth of each class
    assert call(*arguments, "--device", "cpu", "--split", "train", "--images", "6") == 0
    assert "6 images of the train split" in capsys.readouterr().err and vp.load("a.nc").attrs["images"] == 6
    assert call(*arguments, "--images", "6") == 2
    assert "--images=6 wants 3 images of class 0 ('circle') but there are 2" in capsys.readouterr().err


def test_claims_of_a_folder_without_verdicts(tmp_path, capsys):
    assert call("claims", ".") == 0
    _, *rows, path = capsys.readouterr().out.splitlines()
    assert len(rows) == len(CLAIMS) and all(row.endswith("not measured") for row in rows)
    assert (tmp_path / path).read_text().count("| not measured |\n") == len(CLAIMS) + 1  # and a column of the summary


def test_a_study_of_ones_own(tmp_path, capsys):
    (tmp_path / "no_study.py").write_text("x = 1\n")
    assert call("run", "no_study.py") == 2
    assert "defines no STUDY" in capsys.readouterr().err


def test_probe_into_a_folder_with_a_page(tmp_path, capsys):
    arguments = ["probe", "resnet_nano", "--images", "20", "--probes", "all", "-o", "out/mine"]
    assert call(*arguments, "--option", "definition=paper") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "out/mine/index.html"
    assert "out/mine/fourier.nc" in lines and "out/mine/feature_variance.nc" in lines
    (sentence,) = [line for line in lines if line.startswith("left out: nonlocality: ")]
    assert "has no attention" in sentence
    folder = tmp_path / "out" / "mine"
    assert xr.load_dataset(folder / "fourier.nc").attrs["definition"] == "paper"
    assert "definition" not in xr.load_dataset(folder / "feature_variance.nc").attrs
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png;base64,") >= 2 and (folder / "fourier.png").is_file()
    assert "has no attention" in page and "definition <code>paper</code>" in page

    # The files say what was left out, so that a page made of them says it too.
    assert call("report", "out/mine", "-o", "again") == 0
    assert capsys.readouterr().out == "again/index.html\n"
    again = (tmp_path / "again" / "index.html").read_text()
    assert "has no attention" in again and (tmp_path / "again" / "fourier.nc").is_file()

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "fourier.nc").write_bytes((folder / "fourier.nc").read_bytes())
    assert call("report", "out/mine", "other/fourier.nc", "-o", "x") == 2
    assert "have one name" in capsys.readouterr().err


def test_what_is_named_has_to_be_there_and_the_rest_is_kept(tmp_path, capsys):
    assert call("probe", "resnet_nano", "--images", "20", "--probes", "all,nonlocality", "-o", "out") == 2
    said = capsys.readouterr()
    assert "out/fourier.nc" in said.out and "has no attention" in said.err
    assert (tmp_path / "out" / "fourier.nc").is_file() and not (tmp_path / "out" / "index.html").exists()


def test_an_interruption_leaves_what_is_done(tmp_path, monkeypatch, capsys):
    from vitprobe import probes

    def interrupted(model, batches, *, layers="auto"):
        raise KeyboardInterrupt

    monkeypatch.setitem(probes.LOSS_PROBES, "hessian_density", interrupted)
    arguments = ["--images", "20", "--probes", "feature_variance,hessian_density", "-o", "out"]
    assert call("probe", "vit_nano", *arguments) == 130
    assert capsys.readouterr().out == "out/feature_variance.nc\n"
    assert call("report", "out", "-o", "out") == 0
    assert "Variance of activations" in (tmp_path / "out" / "index.html").read_text()


def test_every_probe_gets_its_own_options_and_what_flags_say(monkeypatch, capsys):
    from vitprobe import probes

    seen = {}

    def mine(model, source, masks, *, layers="auto", prefix=None, batch_size=1, repeats=1, path=None, **others):
        seen.update(model=model, source=source, masks=masks, layers=layers, prefix=prefix, batch_size=batch_size)
        seen.update(repeats=repeats, path=path, others=others)
        raise KeyboardInterrupt

    monkeypatch.setitem(probes.IMAGE_PROBES, "mine", mine)
    arguments = ["probe", "vit_nano", "--images", "10", "--probes", "fourier,mine", "--option", "definition=paper"]
    arguments += ["--layers", "blocks.*", "--prefix", "0", "--batch-size", "5", "--option", "repeats=3", "-o", "x.nc"]
    assert call(*arguments) == 2
    assert "add --option masks=VALUE" in capsys.readouterr().err
    arguments += ["--option", "masks=all"]
    assert call(*arguments, "--image-size", "16") == 2
    assert "leave out --image-size" in capsys.readouterr().err
    assert call(*arguments, "--split", "train", "--mean", "0.25") == 130
    del seen["model"]
    source = seen.pop("source")
    assert source.mean == (0.25,)
    assert source.test.images.equal(vp.load_data("digits", train_size=10).train.images)
    assert seen == {
        "masks": "all", "layers": ["blocks.*"], "prefix": 0, "batch_size": 5, "repeats": 3, "path": Path("x_mine.nc"),
        "others": {},
    }  # fmt: skip
    assert xr.load_dataset("x_fourier.nc").attrs["definition"] == "paper"


def test_corruptions_are_of_the_images_that_were_asked_for():
    arguments = ["probe", "vit_nano", "--data", "synthetic:low", "--images", "10", "--option", "severities=[3]"]
    assert call(*arguments, "--option", "types=['gaussian_noise', 'fog']", "--probes", "corruption_robustness") == 2
    arguments += ["--option", "types=['gaussian_noise','fog']", "--probes", "corruption_robustness", "-o", "c.nc"]
    assert call(*arguments) == 0
    ds = xr.load_dataset("c.nc")
    assert dict(ds.sizes) == {"corruption": 2, "severity": 1} and ds.attrs["images"] == 10


def test_images_are_normalised_as_the_model_wants(tmp_path):
    (tmp_path / "linear.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv = torch.nn.Conv2d(1, 2, 1, bias=False)\n"
        "    def forward(self, x):\n"
        "        return self.conv(x).mean((2, 3))\n"
    )
    common = ["probe", "linear:Net", "--layers", "conv", "--images", "20", "--probes", "feature_variance"]
    assert call(*common, "--mean", "0", "--std", "1", "-o", "whole.nc") == 0
    assert call(*common, "--mean", "0.5", "--std", "0.5", "-o", "half.nc") == 0
    whole, half = xr.load_dataset("whole.nc"), xr.load_dataset("half.nc")
    # Half the divisor is twice the numbers; a shift has no variance.
    assert half.variance.values == pytest.approx(4 * whole.variance.values, rel=1e-5)
    assert (half.attrs["normalisation_mean"], half.attrs["normalisation_std"]) == ("0.5", "0.5")


def test_files_say_no_folders_of_this_machine(tmp_path):
    for split in ("train", "test"):
        images = np.random.default_rng(0).integers(0, 256, (8, 8, 8), dtype=np.uint8)
        np.savez(tmp_path / f"{split}.npz", images=images, labels=np.arange(8) % 2)
    data = f"npz:{tmp_path}/train.npz,{tmp_path}/test.npz"
    assert call("probe", "vit_nano", "--data", data, "--probes", "feature_variance", "-o", "v.nc") == 0
    attributes = xr.load_dataset("v.nc").attrs
    assert attributes["data"] == "npz:train.npz,test.npz"
    assert str(tmp_path) not in " ".join(map(str, attributes.values()))


def test_train_by_a_papers_recipe(tmp_path, capsys):
    """Its settings are the flags' defaults; what is given changes one of them."""
    common = ["--train-size", "60", "--test-size", "40", "--epochs", "2", "--warmup-epochs", "0.5"]
    recipe = ["--recipe", "park_kim_weak_cpu"]
    assert (
        call("train", "convit_nano", "--folder", "run", *common, *recipe, "--measure", "attention_gates,fourier") == 0
    )
    assert "test accuracy" in capsys.readouterr().out
    kept = json.loads(Path("run/recipe.json").read_text())
    assert kept["weight_decay"] == 0.05 and kept["stochastic_depth"] == 0.1 and kept["epochs"] == 2
    assert kept["snapshots"] == [0, 1]  # of 0, 1, 6, 11, 16: those that there are
    assert vp.load("run/history.nc").attrs["recipe"] == "park_kim_weak_cpu"
    assert vp.load("run/attention_gates.nc").epoch.values.tolist() == [1, 2]
    assert call("probe", "run", "--images", "20", "--probes", "fourier", "-o", "f.nc") == 0
    trained = json.loads(vp.load("f.nc").attrs["config"])
    assert trained["probe"] == "fourier"

    assert call("train", "vit_nano", "--folder", "b", *common, f"--recipe={recipe[1]}", "--teacher", "run") == 2
    assert "distillation=0.5" in capsys.readouterr().err
    pupil = ["--teacher", "run", "--distillation", "0.5", "--start", "run"]
    assert call("train", "convit_nano", "--folder", "c", *common, *pupil) == 0
    history = vp.load("c/history.nc")
    assert json.loads(history.attrs["hand_over"])["gap"] == 0.0 and "distillation_loss" in history
    assert history.attrs["start"] == "run"

    # What it started from is not to be written over: not by the checkpoint's word, nor, in an old one, the history's.
    Path("other").symlink_to("run")
    taught = ["train", "convit_nano", "--folder", "c", *common, *pupil[:4]]
    assert call(*taught, "--start", "other") == 2
    assert "started from the weights of run, not from the weights of other" in capsys.readouterr().err
    assert call(*taught) == 2 and "not from fresh weights" in capsys.readouterr().err
    Path("c/history.nc").unlink()
    assert call(*taught) == 2
    assert "another start: start.weights was 'after " in capsys.readouterr().err

    # A finished training has no more to measure while it trains, and its history no figure.
    assert call("train", "convit_nano", "--folder", "run", *common, *recipe, "--measure", "feature_variance") == 2
    assert "vitprobe probe run" in capsys.readouterr().err
    assert call("show", "run/history.nc") == 2
    assert "vitprobe report run/history.nc -o FOLDER" in capsys.readouterr().err
    assert call("report", "run/history.nc", "-o", "page") == 0

    capsys.readouterr()
    assert call("runs", ".") == 0
    listed = capsys.readouterr().out
    assert listed.count("convit_nano") == 2 and "2 finished" in listed
    Path("empty").mkdir()
    assert call("runs", "empty") == 0 and "no runs below empty" in capsys.readouterr().out


def test_two_phases_on_the_command_line(tmp_path):
    arguments = ["--recipe", "two_phase_cpu", "--epochs", "2", "--train-size", "60", "--test-size", "40"]
    command = ["train", "relative_vit_nano", "--first", "convolutional_vit_nano", "--folder", "two", *arguments]
    assert call(*command) == 0
    assert vp.load("two/history.nc").phase.values.tolist() == ["convolution", "attention"]


def test_recipes_are_listed_with_what_they_changed(capsys):
    assert call("list", "recipes", "-v") == 0
    listed = capsys.readouterr().out
    assert "park_kim_strong" in listed and "lr 0.001 (was 0.000125)" in listed
