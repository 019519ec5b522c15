"""What the README says is what the code does."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))


@pytest.mark.parametrize("name", ["timm `vit_tiny_patch16_224`", "timm `convit_tiny`", "torchvision `resnet18`"])
def test_the_table_of_foreign_models_is_the_scripts(name):
    import foreign_models

    assert foreign_models.row(name) in README


def test_the_table_is_complete():
    import foreign_models

    assert [name for name in foreign_models.MODELS if f"| {name} |" not in README] == []


def test_the_scorecard_is_that_of_the_results(tmp_path):
    from vitprobe.claims import CLAIMS, summary
    from vitprobe.study import find_verdicts, write_claims

    judged = find_verdicts(ROOT / "results", deep=True)
    evidence = [one for one in judged if one.scale in ("cpu", "paper")]
    between = README.partition("<!-- scorecard: begin -->\n")[2].partition("<!-- scorecard: end -->")[0]
    assert between == summary(evidence, CLAIMS), "copy the first table of results/claims.md to README.md"
    page = write_claims(tmp_path, "cpu", judged=judged, registry=CLAIMS)
    assert page.read_text() == (ROOT / "results" / "claims.md").read_text(), "type: vitprobe claims"


def test_python_blocks_compile_and_name_what_is_there():
    import vitprobe

    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README", "exec")
        for name in re.findall(r"\bvp\.(\w+)", block):
            assert hasattr(vitprobe, name), name


def test_every_study_is_in_the_table():
    from vitprobe.cli import list_studies

    assert [name for name in list_studies() if f"| `{name}` |" not in README] == []


def test_ci_runs_the_commands_of_the_readme():
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "pip install -e '.[test]' && pytest" in README
    assert "pip install -q -e '.[test]'" in ci and "pytest" in ci


def test_files_that_the_readme_links_exist():
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
