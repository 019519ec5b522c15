"""The arrows of the design: which room may import which, and which rooms never import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vitprobe"

LEAVES = {"seeds", "names", "intervals", "calling", "ranks"}  # helpers without a room of their own: for anybody
ALLOWED = {
    "models": set(),
    "initializers": {"models", "results"},
    "data": set(),
    "results": set(),
    "published": set(),
    "claims": {"published"},
    "figures": {"results"},
    "training": {"data", "results"},
    "attach": set(),
    "curvature": set(),
    "probes": {"attach", "curvature", "data", "results"},
    "runs": {"models", "initializers", "data", "training", "results"},
    "executors": set(),
    "study": {"results", "claims", "figures", "executors"},
    "report": {"results", "figures"},
    "cli": {
        "models",
        "data",
        "training",
        "probes",
        "figures",
        "results",
        "claims",
        "study",
        "report",
        "runs",
        "cli_train",
    },
    "cli_train": {"cli", "models", "data", "training", "probes", "results", "runs"},
    "__main__": {"cli"},
}
WITHOUT_TORCH = (
    "results", "published", "claims", "figures", "study", "executors", "report", "seeds", "names",
    "intervals", "cli",
)  # fmt: skip


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(file: Path) -> set[str]:
    """Full names of the modules that a file imports, inside functions and for type checkers too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            names.add(node.module or "")
            if node.module == "vitprobe":
                names |= {f"vitprobe.{alias.name}" for alias in node.names}
    return names


FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py" or file.parent != PACKAGE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_arrows(file):
    room = room_of(file)
    if room in LEAVES:
        allowed = set()
    else:
        assert room in ALLOWED, f"{room} is a room that the design does not know"
        allowed = ALLOWED[room] | {room} | LEAVES
    used = {name.split(".")[1] for name in imported(file) if name.startswith("vitprobe.")}
    assert used <= allowed, f"{room} may not import {sorted(used - allowed)}"
    assert "studies" not in {name.split(".")[0] for name in imported(file)}


def test_the_walk_sees_a_forbidden_arrow(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def f():\n    from vitprobe.probes import probe\n")
    assert "vitprobe.probes" in imported(file)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_reads_and_draws_without_torch(room):
    heavy = "{'torch', 'torchvision', 'timm', 'sklearn'} & set(sys.modules)"
    assert run(f"import sys, vitprobe.{room}; print(sorted({heavy}))") == "[]"


def test_import_is_light():
    code = "import sys; before = set(sys.modules); import vitprobe; print(len(set(sys.modules) - before))"
    # A few modules of the standard library: nothing that could take a fifth of a second.
    assert int(run(code)) < 50
    assert run("import sys, vitprobe; print('torch' in sys.modules, 'xarray' in sys.modules)") == "False False"


def test_every_public_name_is_there():
    import vitprobe

    for name in vitprobe.__all__:
        assert getattr(vitprobe, name).__doc__, f"{name} has no docstring"
    assert set(vitprobe.__all__) == set(dir(vitprobe))
    with pytest.raises(AttributeError, match="attribute nothing"):
        _ = vitprobe.nothing
