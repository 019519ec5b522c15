"""What the pages of docs/ say is what the code does: their blocks run, and their tables are complete."""

import ast
import inspect
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\w+)\.py\n")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A folder of its own, in which modules that a page writes can be imported, and registries as they were."""
    from vitprobe.models import registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITPROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(registry, "_CONSTRUCTORS", dict(registry._CONSTRUCTORS))
    # Instead of processes, which take longer to start than to measure.
    monkeypatch.setattr("vitprobe.study._pool", lambda settings, runs: ThreadPoolExecutor(1))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == tmp_path:
            del sys.modules[name]


def run(page: str) -> dict:
    """Do what a reader of a page does: save the blocks that name their file, run the others in order."""
    from vitprobe.cli import main

    namespace: dict = {"__name__": "page"}
    for language, block in BLOCK.findall(PAGES[page]):
        if language == "sh":
            commands = [line.split()[1:] for line in block.splitlines() if line.startswith("vitprobe ")]
            assert [main(command) for command in commands] == [0] * len(commands), block
        elif name := FILE.match(block):
            Path(f"{name[1]}.py").write_text(block)
            sys.modules.pop(name[1], None)  # another test's module of that name
        else:
            exec(compile(block, f"docs/{page}.md", "exec"), namespace)
    return namespace


def test_write_a_probe(fresh, monkeypatch, capsys):
    import numpy as np
    import torch

    from vitprobe.cli import main
    from vitprobe.probes import FEATURE_PROBES

    namespace = run("write_a_probe")
    assert len(Path("participation.py").read_text().splitlines()) < 30
    assert Path("mine_fourier.nc").is_file() and Path("participation_ratio.png").stat().st_size > 5_000

    # From the singular values of the patches of one image.
    images = torch.randn(1, 3, 4, 4)
    singular = np.linalg.svd((images - images.mean((2, 3), keepdim=True)).reshape(3, 16).numpy())[1]
    ds = namespace["ParticipationRatio"]().run(namespace["identity"][:2], images, layers=["0"])
    assert ds.participation_ratio.item() == pytest.approx((singular**2).sum() ** 2 / (singular**4).sum(), rel=1e-5)

    command = ["probe", "vit_nano", "--images", "20", "--probes", "participation_ratio", "-o", "here.nc"]
    assert main(command) == 2
    monkeypatch.setitem(FEATURE_PROBES, "participation_ratio", namespace["ParticipationRatio"])
    assert main(command) == 0 and Path("here.nc").is_file()
    capsys.readouterr()
    main(["list", "probes"])
    assert "Participation ratio of activations by unit" in capsys.readouterr().out


def test_register_a_model(fresh, capsys):
    namespace = run("register_a_model")
    assert Path("depthwise_fourier.png").is_file()
    from vitprobe.models import create_model, describe_model

    assert describe_model("depthwise_net") == "Patches mixed by 3x3 depthwise and by pointwise convolutions."
    with pytest.raises(TypeError, match=r"takes no option 'heads'; it takes .*patch_size"):
        create_model("depthwise_net", heads=3)
    with pytest.raises(ValueError, match="'vit' is registered already"):

        def vit(*, image_size, channels, num_classes):
            """Another network of that name."""

        namespace["vp"].register(vit)


def test_write_a_study(fresh, capsys):
    run("write_a_study")
    from vitprobe.cli import main

    assert "reach" in Path("results/mine/claims_smoke.md").read_text()
    assert Path("results/mine/reach_smoke.png").is_file() and Path("again.png").is_file()
    capsys.readouterr()
    assert main(["run", "reach.py", "--scale", "smoke"]) == 0
    assert "2 already measured" in capsys.readouterr().out
    assert main(["run", "reach.py", "--scale", "paper"]) == 2
    assert "this study has the scales smoke, quick" in capsys.readouterr().err


def test_attach(fresh, capsys):
    run("attach")
    (shown,) = re.findall(r"^```text\n(.*?)^```", PAGES["attach"], re.DOTALL | re.MULTILINE)
    assert capsys.readouterr().out == shown


# --- the table of measurements ----------------------------------------------------------------------


def tables() -> list[list[tuple[str, list[str]]]]:
    """Name and other cells of each row of each table of docs/probes.md."""
    found = []
    for part in PAGES["probes"].split("\n## ")[1:]:
        rows = [line.strip("| ").split("|") for line in part.splitlines() if line.startswith("| `")]
        found.append([(name.strip(" `"), [cell.strip() for cell in cells]) for name, *cells in rows])
    return found


ROWS = [row for table in tables() for row in table]


def test_the_table_names_every_probe_and_no_other():
    from vitprobe import probes

    registries = (probes.FEATURE_PROBES, probes.LOSS_PROBES, probes.CHANGE_PROBES, probes.IMAGE_PROBES)
    for table, registry in zip(tables(), registries, strict=False):
        assert sorted(name for name, _ in table) == sorted(registry)
    assert len(tables()) == 5 and len(dict(ROWS)) == len(ROWS)
    assert [name for name, _ in ROWS if not callable(getattr(probes, name, None))] == []


@pytest.mark.parametrize(("name", "cells"), ROWS, ids=dict(ROWS))
def test_options_are_the_functions_with_their_defaults(name, cells):
    from vitprobe import probes

    takes = inspect.signature(getattr(probes, name)).parameters
    options = cells[2]
    for option, default in re.findall(r"`(\w+)=([^`]+)`", options):
        assert takes[option].default == ast.literal_eval(default), option
    assert [word for word in re.findall(r"`([a-z]\w*)`", options) if word not in takes] == []
    given = getattr(probes, "FEATURE_PROBES", {}).get(name)
    known = inspect.signature(given).parameters if given else {}
    assert [option for option in known if f"`{option}=" not in options and option != "seed"] == []


def test_dimensions_are_those_of_the_datasets():
    import torch

    from vitprobe import probes
    from vitprobe.models import create_model

    def build(seed):
        sizes = dict(image_size=8, channels=1, patch_size=2, dim=16, depth=2, heads=4, gpsa_layers=1)
        return create_model("convit", **sizes, seed=seed)

    images = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    batches, model = [(images, torch.arange(12) % 10)] * 2, build(0)
    smallest = {
        "hessian_eigenvalues": {"k": 1, "tol": 0.5},
        "hessian_density": {"samples": 1, "steps": 2},
        "loss_landscape": {"points": 2},
        "masking": {"masks": "uniform", "per": "layer"},
        "noise_by_frequency": {"frequencies": (0.5,), "width": 0.5},
    }
    shared = [probe_class() for probe_class in probes.FEATURE_PROBES.values()]
    found = {name: child.to_dataset() for name, child in probes.probe(model, batches, shared).children.items()}
    for name, function in {**probes.LOSS_PROBES, **probes.CHANGE_PROBES}.items():
        found[name] = function(model, batches, **smallest.get(name, {}))
    alone = {
        "trajectory": lambda: probes.trajectory(model, [build(1), build(2), model]),
        "operator_statistics": lambda: probes.operator_statistics(torch.rand(2, 16, 16), (4, 4)),
        "filter_statistics": lambda: probes.filter_statistics(create_model("resnet_nano"), torch.rand(2, 3, 32, 32)),
    }
    found |= {name: measure() for name, measure in alone.items() if name in dict(ROWS)}
    for name, cells in ROWS:
        if name != "corruption_robustness":  # of images that a corruption library makes
            first = re.split(r";|, and", cells[3])[0]
            optional = {"layer"} if name == "masking" else set()
            assert set(found[name].dims) - optional == set(first.split(", ")), name


# --- links ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", PAGES[page])
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_training(fresh, capsys):
    from vitprobe.training import list_recipes

    namespace = run("training")
    assert 0 <= float(namespace["history"].hand_over_relative_gap) < 0.2
    assert namespace["watch"].dataset("nonlocality").epoch.values.tolist() == [0, 1, 2]
    assert "4 finished" in capsys.readouterr().out or Path("runs/two/attention/checkpoint.pt").is_file()
    assert [name for name in list_recipes() if f"`{name}`" not in PAGES["training"]] == []


def test_many_machines(fresh):
    from vitprobe.executors import open_executor

    assert "open_executor" in PAGES["many_machines"]
    run("many_machines")
    assert callable(open_executor)
