"""The command line: what it prints, writes and returns."""

import subprocess
import sys

import pytest
import torch
import xarray as xr

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
    assert list_studies() == [*maps, "park_kim/fourier", "park_kim/variance"]
    assert (studies_root() / "studies" / "park_kim" / "fourier.py").is_file()


@pytest.mark.parametrize("command", [[], ["run"], ["list"], ["train"], ["probe"], ["show"]])
def test_help(command, capsys):
    assert call(*command, "--help") == 0
    assert "--help" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "park_kim/furier"], "Did you mean 'park_kim/fourier'"),
        (["run", "park_kim/fourier", "--data", "cifar11"], "cifar10"),
        (["run", "park_kim/fourier", "--data", "cifar10", "--data-root", "nowhere", "--no-download"], "nowhere"),
        (["probe", "vit_nanno", "-o", "x.nc"], "Did you mean 'vit_nano'"),
        (["probe", "vit_nano", "-o", "x.csv"], "use -o x.nc"),
        (["probe", "vit_nano", "--probes", "furier", "-o", "x.nc"], "Did you mean 'fourier'"),
        (["probe", "vit_nano", "--option", "k=3", "-o", "x.nc"], "takes an option 'k'"),
        (["probe", "vit_nano", "--probes", "hessian_density", "--option", "k=3", "-o", "x.nc"], "'samples'"),
        (["probe", "resnet_nano", "--probes", "nonlocality", "-o", "x.nc"], "no attention maps"),
        (["probe", "no_such_module:build", "-o", "x.nc"], "no_such_module"),
        (["probe", "timm:vit_tinny_patch16_224", "-o", "x.nc"], "Did you mean"),
        (["probe", "vit_nano", "--checkpoint", "gone.pt", "-o", "x.nc"], "gone.pt"),
        (["train", "vit_nano", "--folder", "f", "--epochs", "0"], "epochs must be at least 1"),
        (["train", "vit_nano", "--folder", "f", "--option", "patch_size"], "NAME=VALUE"),
        (["train", "vit_nano", "--folder", "f", "--option", "patch_size=3"], "use patch_size=2"),
        (["show", "gone.nc"], "gone.nc"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, said, capsys):
    assert call(*arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


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
    assert ds.attrs["image_height"] == 64
    assert ds.attrs["model"] == "torchvision:resnet18"


def test_a_study_of_ones_own(tmp_path, capsys):
    (tmp_path / "no_study.py").write_text("x = 1\n")
    assert call("run", "no_study.py") == 2
    assert "defines no STUDY" in capsys.readouterr().err
