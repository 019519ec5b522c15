"""What goes with accuracy over families: ranks and their exact p values, verdicts made by hand, a small run."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.across import small_data
from studies.across.small_data import JUDGED, MEASURES, holm, permutation_p, rank_correlation, reach
from studies.park_kim.families import MICRO, grid
from vitprobe.models import create_model
from vitprobe.runs import Run, load
from vitprobe.study import Settings


def stacked(*, noise: float = 0.0, accuracy=(70, 66, 62, 58, 54, 50, 46), seeds: int = 3) -> xr.Dataset:
    """Seven families whose reach falls with accuracy, and whose other measures say nothing of it."""
    rng = np.random.default_rng(0)
    names = [name for _ in range(seeds) for name in MICRO]
    truth = np.tile(accuracy, seeds).astype(float)
    measures = {name: np.tile([3.0, 6.0, 1.0, 7.0, 2.0, 5.0, 4.0], seeds) for name in MEASURES}
    measures["reach"] = -truth + noise * rng.normal(size=len(names))
    return xr.Dataset(
        {name: ("run", values) for name, values in measures.items()} | {"error_se": ("run", np.ones(len(names)))},
        coords={
            "model": ("run", names),
            "seed": ("run", [seed for seed in range(seeds) for _ in MICRO]),
            "accuracy": ("run", truth + 0.1 * rng.normal(size=len(names))),
            "train_images": ("run", [10_000] * len(names)),
        },
        attrs={"classes": 10, "data": "cifar10"},
    )


def test_spearman_and_its_exact_p_are_scipys():
    rng = np.random.default_rng(1)
    for _ in range(5):
        one, other = rng.normal(size=(2, 6))
        assert rank_correlation(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)
        exact = stats.permutation_test(
            (one,), lambda x, other=other: stats.spearmanr(x, other).statistic, permutation_type="pairings"
        )
        assert permutation_p(one, other) == pytest.approx(exact.pvalue)
    assert permutation_p(np.arange(7), np.arange(7)) == pytest.approx(2 / 5040)
    assert permutation_p(np.array([*range(6), np.nan]), np.arange(7)) == 1.0
    one, other = rng.normal(size=(2, 12))  # of random orders
    assert permutation_p(one, other) == pytest.approx(stats.spearmanr(one, other).pvalue, abs=0.02)


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_verdicts():
    found = {verdict.claim.id: verdict for verdict in small_data.verdicts(stacked())}
    assert found["A reach"].verdict == "supported" and found["A reach"].value == pytest.approx(-1.0)
    assert {found[f"A {name}"].verdict for name in JUDGED if name != "reach"} == {"inconclusive"}
    assert found["A reach"].n == 7
    assert set(found) == {f"A {name}" for name in JUDGED} and set(JUDGED) < set(MEASURES)
    # The interval is the range over seeds, which cannot leave -1 to 1.
    noisy = small_data.verdicts(stacked(noise=8.0))
    assert all(-1 <= verdict.low <= verdict.high <= 1 for verdict in noisy)


def test_networks_that_did_not_learn_are_no_evidence():
    poor = stacked(accuracy=(40, 38, 36, 34, 32, 30, 28))
    assert {verdict.verdict for verdict in small_data.verdicts(poor)} == {"inconclusive"}


@pytest.mark.parametrize(("model", "low", "high"), [("resnet_nano", 0.5, 3.0), ("vit_nano", 2.0, 6.0)])
def test_reach_is_in_pixels(model, low, high, tmp_path):
    """Untrained attention of 2 px patches on 4x4 of them looks nearly everywhere, 3x3 taps look one place away."""

    class Result:
        data = load(grid(Settings(scale="smoke"))[0].data)

    Result.model = create_model(model, image_size=8, channels=1, num_classes=10, seed=0)
    assert low < reach(Result) < high


def test_windows_do_not_make_patches_larger():
    class Result:
        data = load(grid(Settings(scale="smoke"))[0].data)

    Result.model = create_model("swin_nano", image_size=8, channels=1, num_classes=10, seed=0)
    # Uniform attention in windows of 4x4: 1.93 patches; of 1 px in the first stage, of 2 px in the second.
    assert reach(Result) == pytest.approx(1.93 * 1.5, rel=0.15)


def test_grid_is_that_of_the_families():
    assert small_data.STUDY.grid is grid
    assert all(isinstance(run, Run) for run in grid(Settings(scale="cpu", data="synthetic:low")))


@pytest.mark.filterwarnings("ignore:.*not converged:UserWarning")  # smoke gives up early
def test_smoke_run(smoke_run):
    wanted = ("resnet_nano", "vit_nano", "alternet_nano")
    small = replace(small_data.STUDY, grid=lambda asked: [run for run in grid(asked) if run.model in wanted])
    path = smoke_run(small)
    ds = xr.load_dataset(path)
    assert all(np.isfinite(ds[name]).all() for name in MEASURES)
    assert path.with_suffix(".png").stat().st_size > 20_000
