"""Heads that are a convolution: what is counted and built against PyTorch and NumPy, and the verdicts."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.li import construction
from studies.li.construction import CASES, FEW, MANY, NINE, PIXELS, counted_heads, fewer_heads
from vitprobe.initializers.convolution import lower_bound
from vitprobe.results import load
from vitprobe.study import Settings


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def measured() -> xr.Dataset:
    """Two kernels of every case, as a study stacks them."""
    from vitprobe.results import stack_runs

    settings = Settings(scale="smoke", seeds=2)
    return stack_runs([construction.measure(drawn, settings) for drawn in construction.grid(settings)])


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in construction.verdicts(ds)}


def changed(ds: xr.Dataset, variable: str, kind: str, value: float) -> xr.Dataset:
    """The dataset with one number of the second kernel, in the first case of a kind, replaced."""
    ds = ds.copy(deep=True)
    place = [case.kind for case in CASES].index(kind)
    ds[variable][{"run": 1, "sample": place}] = value
    return ds


# --- what is measured -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patch", "size", "count"),
    [(2, 3, 9), (2, 5, 9), (2, 7, 25), (4, 3, 9), (4, 9, 9), (4, 11, 25), (1, 3, 9), (1, 5, 25), (3, 1, 1)],
)
def test_patches_are_counted_as_by_hand(patch, size, count):
    """A kernel of K reaches (K - 1) / 2 pixels, and so one patch further for each P that begins."""
    assert counted_heads(normal(2, 3, size, size), patch) == count


def test_a_tap_of_zero_at_every_corner_is_no_head():
    weight = normal(1, 1, 3, 3)
    weight[..., ::2, ::2] = 0
    assert counted_heads(weight, 2) == 5


@pytest.mark.parametrize(("channels", "size", "rank"), [((2, 2), 3, 4), ((3, 4), 5, 12), ((1, 1), 5, 1)])
def test_one_head_more_than_the_rank_is_the_convolution(channels, size, rank):
    """Its maps are those of a softmax: not negative, and one in all, with what is outside of the image."""
    weight, images = normal(channels[1], channels[0], size, size), normal(2, channels[0], 6, 7, seed=1)
    stack = weight.permute(2, 3, 1, 0).flatten(0, 1).flatten(1)
    assert np.linalg.matrix_rank(stack) == rank
    function = fewer_heads(weight)((6, 7))
    attention = function.__closure__[0].cell_contents
    assert attention.heads == rank + 1 < size**2
    maps = attention.weights(images.flatten(2).mT)
    assert maps.min() >= 0 and maps.sum(-1).max() <= 1 + 1e-12
    with torch.no_grad():
        assert (function(images) - F.conv2d(images, weight, padding=size // 2)).abs().max() < 1e-10


def test_least_errors_are_near_those_noted_of_another_kernel():
    """Of one kernel of 3 x 3 on patches of 2: 0.106, 0.271, 0.448 and 0.765 with 8, 6, 4 heads and 1."""
    found = np.array([[lower_bound(normal(4, 3, 3, 3, seed=seed), 2, n) for n in (8, 6, 4, 1)] for seed in range(20)])
    noted = np.array([0.106, 0.271, 0.448, 0.765])
    assert (np.abs(found.mean(0) - noted) < 3 * found.std(0)).all()
    assert lower_bound(normal(4, 3, 3, 3), 2, 9) == 0 < found.min()


def test_numbers_by_case(measured):
    by_case = {case.label: measured.isel(run=0, sample=place) for place, case in enumerate(CASES)}
    assert len(by_case) == len(CASES)
    assert {label: int(ds.heads) for label, ds in by_case.items() if "K=7" in label} == {
        "P=3, K=7, 3→4": 9,
        "P=2, K=7, 3→4": 25,
    }
    ranks = {label: int(ds["rank"]) for label, ds in by_case.items() if label.startswith("P=1")}
    assert list(ranks.values()) == [9, 25, 4, 12]  # min(K^2, C D)
    assert int(by_case["P=4, K=3, 3→4"].width) == 4**2 * 3
    assert (measured.error < 1e-8).all() and (measured.refused == 1).all()
    for label, ds in by_case.items():
        least = ds.least_error.dropna("head").values
        assert len(least) == ds.heads and (np.diff(least[: int(ds["rank"])]) < 0).all(), label
        assert (least[int(ds["rank"]) - 1 :] == 0).all(), label


# --- verdicts ---------------------------------------------------------------------------------------


def test_exact_under_the_conditions_and_not_without(measured):
    assert verdicts(measured) == {
        "L1": "supported",
        "L1 any kernel size": "contradicted",
        "L1 number": "supported",
        "L2": "supported",
        "L2 patches": "supported",
        "L2 pixels": "supported",
        "L2 few channels": "contradicted",
    }


@pytest.mark.parametrize(
    ("variable", "kind", "value", "claim"),
    [
        ("error", NINE, 2e-8, "L1"),
        ("counted_heads", NINE, 25, "L1"),
        ("refused", NINE, 0, "L1"),
        ("error", MANY, 2e-8, "L1 number"),
        ("counted_heads", PIXELS, 8, "L1 number"),
        ("rank", NINE, 8, "L2 patches"),
        ("rank", PIXELS, 8, "L2 pixels"),
    ],
)
def test_one_kernel_contradicts(measured, variable, kind, value, claim):
    found = verdicts(changed(measured, variable, kind, value))
    assert found[claim] == "contradicted"
    assert claim == "L1 number" or found[claim.partition(" ")[0]] == "contradicted"


def test_heads_that_are_not_the_convolution_contradict_no_need_for_more(measured):
    """With all of them wrong, K^2 heads stay necessary as far as anybody knows."""
    wrong = measured.copy(deep=True)
    wrong["fewer_error"] = wrong.fewer_error + 1
    assert verdicts(wrong)["L2 few channels"] == "supported"


def test_one_kernel_supports_nothing(measured):
    found = verdicts(measured.isel(run=[0]))
    assert {found[claim] for claim in ("L1", "L2", "L1 number")} == {"inconclusive"}


def test_brackets_are_the_smallest_and_the_largest(measured):
    l1 = construction.verdicts(measured)[0]
    errors = measured.error.isel(sample=[case.kind == NINE for case in CASES]).values
    assert (l1.low, l1.value, l1.high) == (errors.min(), errors.max(), errors.max())
    assert (l1.n, l1.unit) == (2, "kernel")


# --- the study --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grid(scale):
    runs = construction.grid(Settings(scale=scale))
    assert len({math.prod(run.grid) * 1000 + run.seed for run in runs}) == len(runs) >= 2
    assert [run.config()["seed"] for run in runs] == list(range(len(runs)))
    assert all(
        case["channels"][0] * case["channels"][1] < 25 or case["kind"] != FEW for case in runs[0].config()["cases"]
    )


def test_smoke_run(smoke_run):
    path = smoke_run(construction.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    assert load(path).sizes == {"run": 1, "sample": len(CASES), "head": 25}
