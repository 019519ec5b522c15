"""Frozen attention maps: verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.zheng import frozen
from studies.zheng.frozen import CELLS, Cell, cell_of
from vitprobe.initializers import impulse_
from vitprobe.models import create_model
from vitprobe.results import load
from vitprobe.study import Settings

# Means by cell; what is not here is 60 %.
LEVELS = {
    Cell("random", "trained"): 58.0,
    Cell("impulse", "trained"): 60.0,
    Cell("random"): 30.0,
    Cell("impulse"): 56.0,
    Cell("random", maps="mixed"): 31.0,
    Cell("impulse", maps="mixed"): 31.0,
    Cell("random", value="without"): 28.0,
    Cell("impulse", value="without"): 57.0,
    Cell(frozen.SPIKES): 33.0,
    Cell("mimetic"): 45.0,
    Cell(frozen.FAR): 40.0,
    Cell(frozen.DIFFERENT): 58.0,
}


def stacked(*, seeds: int = 3, scale: str = "quick", **levels: float) -> xr.Dataset:
    """The table as published, up to the levels of `impulse`, `random` (frozen) and `trained` (both)."""
    rng = np.random.default_rng(0)
    means = dict(LEVELS)
    for name in ("impulse", "random"):
        means[Cell(name)] = levels.get(name, means[Cell(name)])
        means[Cell(name, "trained")] = levels.get("trained", means[Cell(name, "trained")])
    shared = rng.normal(0, 2, seeds)
    rows = [(seed, cell) for seed in range(seeds) for cell in CELLS[scale]]
    accuracy = [means.get(cell, 60.0) + shared[seed] + rng.normal(0, 0.3) for seed, cell in rows]
    names = ("initialisation", "query_key", "maps", "value")
    return xr.Dataset(
        {"error": ("run", 100 - np.array(accuracy)), "error_se": ("run", [1.0] * len(rows))},
        coords={
            "run": np.arange(len(rows)),
            "seed": ("run", [seed for seed, _ in rows]),
            "accuracy": ("run", accuracy),
            **{name: ("run", [vars(cell)[name] for _, cell in rows]) for name in names},
        },
        attrs={"classes": 10, "data": "made"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in frozen.verdicts(ds)}


@pytest.mark.parametrize(
    ("levels", "whole"),
    [
        ({}, "supported"),
        ({"random": 52.0}, "contradicted"),  # random maps are not bad
        ({"impulse": 40.0}, "contradicted"),  # impulses are better and not good
        ({"random": 48.3}, "inconclusive"),
    ],
)
def test_verdicts(levels, whole):
    assert verdicts(stacked(**levels))["Z6"] == whole


def test_what_decides_nothing_is_judged_beside():
    found = verdicts(stacked())
    assert set(found) == {"Z6", "Z6 good", *(f"Z6 {test.name}" for test in frozen._TESTS)} - {"Z6 near", "Z6 taps"}
    assert set(found.values()) == {"supported"}
    small = verdicts(stacked(scale="cpu"))
    assert set(small) == {"Z6", "Z6 frozen", "Z6 good", "Z6 trained", "Z6 near", "Z6 taps"}
    assert set(small.values()) == {"supported"}


def test_shares_are_of_what_random_trained_maps_learn():
    found = {verdict.claim.id: verdict for verdict in frozen.verdicts(stacked())}
    assert found["Z6 frozen"].value == pytest.approx((56 - 30) / 48, abs=0.03)
    assert found["Z6 good"].value == pytest.approx(56 - 30 - (60 - 30) / 2, abs=0.5)
    assert "recovered: 0.87 of 29.9 points" in found["Z6 good"].detail
    assert "+26.2 points; random maps gain 28.0 [27.3, 28.7] points by training" in found["Z6 frozen"].detail


def test_where_trained_impulses_gain_nothing_half_of_it_is_no_division_by_zero():
    ds = stacked(impulse=30.0, trained=30.0)
    ds["accuracy"][:] = 50.0
    good = {verdict.claim.id: verdict for verdict in frozen.verdicts(ds)}["Z6 good"]
    assert good.value == 0 and good.verdict == "inconclusive" and "recovered" not in good.detail


def test_only_trained_maps_must_have_learned():
    assert verdicts(stacked(random=12.0))["Z6"] == "supported"
    assert set(verdicts(stacked(trained=20.0)).values()) == {"inconclusive"}
    assert set(verdicts(stacked(seeds=1)).values()) == {"inconclusive"}


@pytest.mark.parametrize(("scale", "runs"), [("smoke", 8), ("quick", 33), ("cpu", 18), ("paper", 81)])
def test_grid(scale, runs):
    found = frozen.grid(Settings(scale=scale))
    assert [cell_of(run) for run in found] == CELLS[scale] * (runs // len(CELLS[scale]))
    assert len(found) == runs and all(run.recipe.augment == "none" for run in found)
    settings = [(run.model, str(run.options), str(run.initialisers), run.recipe.seed) for run in found]
    assert len(set(settings)) == runs


def test_maps_are_frozen_and_data_free():
    (run,) = [
        run for run in frozen.grid(Settings(scale="quick", seeds=1)) if cell_of(run) == Cell("impulse", value="without")
    ]
    model = create_model(run.model, image_size=8, channels=1, seed=0, **run.options)
    attention = model.blocks[0].attention
    assert not any(parameter.requires_grad for parameter in attention.query_key.parameters())
    maps = attention.weights(torch.randn(2, 16, 72))
    assert maps.shape == (2, 9, 16, 16) and torch.equal(maps[0], maps[1])


def test_far_impulses_are_as_sharp_and_further_away():
    runs = {cell_of(run): run for run in frozen.grid(Settings(scale="cpu", seeds=1))}
    peaks, distances = [], []
    for cell in (Cell("impulse"), Cell(frozen.FAR)):
        run = runs[cell]
        model = create_model(run.model, image_size=32, seed=0, **run.options)
        impulse_(model, **run.initialisers["impulse_"], seed=0)
        maps = model.blocks[0].attention.weights(torch.zeros(1, 64, 108))[0].detach()
        places = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))
        peaks.append(float(maps.max(-1).values.median()))
        distances.append(float((maps * torch.cdist(places, places)).sum(-1).mean()))
    assert min(peaks) > 0.9 and distances[1] > 1.5 * distances[0]


@pytest.mark.parametrize(("scale", "size", "wanted"), [("quick", 8, 0.95), ("paper", 32, 0.3)])
def test_sharp_random_maps_are_about_as_sharp_as_impulses(scale, size, wanted):
    runs = {cell_of(run): run for run in frozen.grid(Settings(scale=scale, seeds=1))}
    peaks = []
    for name in ("random", frozen.SPIKES):
        run = runs[Cell(name)]
        model = create_model(run.model, image_size=size, seed=0, **run.options)
        rows, columns = model.patches.grid
        tokens = torch.zeros(1, rows * columns, len(model.norm.weight))
        peaks.append(float(model.blocks[0].attention.weights(tokens).max(-1).values.mean()))
    assert peaks[0] < 1.5 / (rows * columns) and abs(peaks[1] - wanted) < 0.15


def test_smoke_run(smoke_run):
    path = smoke_run(frozen.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.query_key.values.tolist() == ["trained", "trained", "frozen", "frozen"]
    assert len(set(ds.nll_clean.values.tolist())) == 4
