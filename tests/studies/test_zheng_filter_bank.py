"""Rank of fixed filters: verdicts on datasets made by hand, the grid, the rank axis, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy.stats import pearsonr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.zheng import filter_bank
from vitprobe.models import create_model
from vitprobe.results import load
from vitprobe.study import Settings

CELLS = [(variance, distinct) for variance in (10.0, 0.1) for distinct in (48, 8, 2)]
RANKS = {48: 5.5, 8: 3.4, 2: 1.8}


def stacked(
    gain: float = 2.0, *, seeds: int = 3, accuracy: float = 70.0, eight: tuple[float, float, float] = (0, 0, 0)
) -> xr.Dataset:
    """Accuracies that grow by so much as the rank doubles; and at the narrowest width with 8 filters, in each seed."""
    rng = np.random.default_rng(0)
    rows = [(seed, *cell) for seed in range(seeds) for cell in CELLS]
    rank = np.array([1 + (RANKS[distinct] - 1) * (1 if variance == 0.1 else 0.005) for _, variance, distinct in rows])
    more = np.array([eight[seed] * (variance == 0.1 and distinct == 8) for seed, variance, distinct in rows])
    level = np.abs(rng.normal(0, 5, seeds))  # what a seed's networks have in common
    noise = rng.normal(0, 0.01, len(rows))
    found = accuracy + level[[seed for seed, *_ in rows]] + gain * np.log2(rank) + more + noise
    return xr.Dataset(
        {"error_se": ("run", np.full(len(rows), 1.0))},
        coords={
            "run": np.arange(len(rows)),
            "seed": ("run", [seed for seed, *_ in rows]),
            "variance": ("run", [variance for _, variance, _ in rows]),
            "distinct": ("run", [distinct for *_, distinct in rows]),
            "stable_rank": ("run", rank),
            "accuracy": ("run", found),
        },
        attrs={"classes": 10},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in filter_bank.verdicts(ds)}


@pytest.mark.parametrize(
    ("ds", "contradicted"),
    [
        (stacked(2.0), []),  # 8 filters have log2(5.5 / 3.4) doublings less than all: 1.4 points
        (stacked(2.0, eight=(-1.5, -1.5, -1.5)), ["Z2", "Z2 8-all"]),
        (stacked(2.0, eight=(-3, -3, -3)), ["Z2", "Z2 8-all", "Z2 8-2"]),  # 1.8 points above two filters by the rank
        (stacked(-2.0), ["Z2", "Z2 rank", "Z2 8-2", "Z2 width"]),
    ],
)
def test_verdicts(ds, contradicted):
    found = verdicts(ds)
    assert [name for name, verdict in found.items() if verdict == "contradicted"] == contradicted
    assert "inconclusive" not in found.values()
    assert [name for name in found if " " not in name] == ["Z2"]


def test_correlation_is_over_the_cells_of_each_seed():
    ds = stacked(2.0)
    ranks, accuracies = (ds[name].values.reshape(3, 6) for name in ("stable_rank", "accuracy"))
    expected = [pearsonr(np.log(rank), accuracy).statistic for rank, accuracy in zip(ranks, accuracies, strict=True)]
    assert filter_bank.together(ds.isel(run=slice(None, None, -1))) == pytest.approx(expected)
    ds["accuracy"] = ds.accuracy * 0 + 90
    assert filter_bank.together(ds) == [0, 0, 0]


def test_seeds_that_disagree_one_seed_and_networks_that_did_not_learn_are_no_evidence():
    found = verdicts(stacked(2.0, eight=(-4, 0, 4)))
    assert (found["Z2"], found["Z2 8-all"], found["Z2 8-2"]) == ("inconclusive",) * 3
    assert set(verdicts(stacked(seeds=1)).values()) == {"inconclusive"}
    assert set(verdicts(stacked(accuracy=20.0)).values()) == {"inconclusive"}


@pytest.mark.parametrize(
    ("scale", "cells", "seeds"), [("smoke", 6, 2), ("quick", 6, 3), ("cpu", 5, 3), ("paper", 25, 3)]
)
def test_grid(scale, cells, seeds):
    runs = filter_bank.grid(Settings(scale=scale))
    assert len(runs) == cells * seeds
    assert {run.recipe.augment for run in runs} == {"none"}
    assert len({str(run.options) for run in runs}) == cells
    assert {None, filter_bank.ENOUGH, filter_bank.FEW} <= {run.options["distinct"] for run in runs}


def test_smoke_run_measures_the_rank_of_the_filters_it_ran_with(smoke_run):
    path = smoke_run(filter_bank.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert list(zip(ds.variance.values.tolist(), ds.distinct.values.tolist(), strict=True)) == CELLS
    for run, rank in zip(filter_bank.grid(Settings(scale="smoke", seeds=1)), ds.stable_rank.values, strict=True):
        model = create_model(run.model, image_size=8, channels=1, num_classes=10, seed=0, **run.options)
        banks = [block.spatial[0].filters().flatten(1).double().numpy() for block in model.blocks]
        # The squared Frobenius norm over the squared spectral norm.
        expected = np.mean([(bank**2).sum() / np.linalg.norm(bank, 2) ** 2 for bank in banks])
        assert rank == pytest.approx(expected, rel=1e-6)
