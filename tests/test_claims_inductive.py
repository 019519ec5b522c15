"""The claims of the papers on inductive bias are complete, each in words of its own, and need no torch."""

import importlib
import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

# Of each paper: the letter that its claims begin with, and how many there are.
KNOWN = {"claims_zheng": ("Z", 9), "claims_dascoli": ("D", 11), "claims_li": ("L", 5)}
PAPERS = [name for name in KNOWN if importlib.util.find_spec(f"vitprobe.{name}") is not None]


def module(name: str) -> ModuleType:
    return importlib.import_module(f"vitprobe.{name}")


@pytest.mark.parametrize("name", PAPERS)
def test_every_claim_is_there_under_its_own_id(name):
    letter, count = KNOWN[name]
    claims = module(name).CLAIMS
    assert list(claims) == [f"{letter}{number}" for number in range(1, count + 1)]
    assert {key: claim.id for key, claim in claims.items()} == {key: key for key in claims}
    assert {claim.paper for claim in claims.values()} == {module(name).PAPER}


@pytest.mark.parametrize("name", PAPERS)
def test_every_claim_is_complete(name):
    claims = module(name).CLAIMS
    for claim in claims.values():
        texts = [claim.statement, claim.statistic, claim.published, claim.source]
        assert all(texts) and len(set(texts)) == 4
        assert not any(text.endswith(".") for text in texts), claim.id  # a cell of a table
        assert claim.counter_evidence.endswith(".") or not claim.counter_evidence
    assert len({claim.statement for claim in claims.values()}) == len(claims)


def test_no_two_papers_share_an_id():
    ids = [key for name in PAPERS for key in module(name).CLAIMS]
    assert len(set(ids)) == len(ids)


def test_no_torch():
    names = ", ".join(f"vitprobe.{name}" for name in PAPERS)
    code = f"import sys, {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
