"""Local against global attention: verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.park_kim import local_attention
from studies.park_kim.families import grid as families_grid
from vitprobe.models import create_model
from vitprobe.results import load
from vitprobe.study import Settings


def stacked(error_5: float, loss_5: float, *, seeds: int = 3, accuracy: float = 70.0) -> xr.Dataset:
    """Global attention, and 5 x 5 that differs by so much; 3 x 3 always differs by -1 point and +0.1 nats."""
    rng = np.random.default_rng(0)
    by_kernel = {3: (-1.0, 0.1), 5: (error_5, loss_5), 0: (0.0, 0.0)}
    rows = [(seed, kernel) for seed in range(seeds) for kernel in by_kernel]
    level = rng.normal(0, 5, seeds)  # what a seed's networks have in common
    error, loss = (
        [base + scale * level[seed] + by_kernel[kernel][k] + rng.normal(0, 0.01) for seed, kernel in rows]
        for k, (base, scale) in enumerate(((30, 1), (1, 0.1)))
    )
    return xr.Dataset(
        {"error": ("run", error), "nll_train": ("run", loss)},
        coords={
            "run": np.arange(len(rows)),
            "seed": ("run", [seed for seed, _ in rows]),
            "kernel": ("run", [kernel for _, kernel in rows]),
            "model": ("run", ["vit_micro"] * len(rows)),
            "accuracy": ("run", [accuracy] * len(rows)),
        },
        attrs={"classes": 10, "data": "made", "tokens": "8 x 8"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in local_attention.verdicts(ds)}


@pytest.mark.parametrize(
    ("error_5", "loss_5", "whole"),
    [
        (-1, -0.1, "supported"),
        (1, -0.1, "contradicted"),
        (-1, 0.1, "contradicted"),
        (0, -0.1, "inconclusive"),
    ],
)
def test_verdicts(error_5, loss_5, whole):
    found = verdicts(stacked(error_5, loss_5))
    assert found["E8 accuracy"] == whole
    # Reported, and decides nothing.
    assert (found["E8 test error 3x3"], found["E8 training loss 3x3"]) == ("supported", "contradicted")


def test_one_seed_and_networks_that_did_not_learn_are_no_evidence():
    assert set(verdicts(stacked(-1, -0.1, seeds=1)).values()) == {"inconclusive"}
    assert set(verdicts(stacked(-1, -0.1, accuracy=44.9)).values()) == {"inconclusive"}


def test_published_differences():
    found = {verdict.claim.id: verdict.claim.published for verdict in local_attention.verdicts(stacked(-1, -0.1))}
    assert found["E8 test error 5x5"] == "-0.89 percentage points"
    assert found["E8 training loss 5x5"] == "-0.067 nats"


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grid_differs_in_nothing_but_the_mask(scale):
    runs = local_attention.grid(Settings(scale=scale))
    assert len(runs) == 3 * len({run.recipe.seed for run in runs})
    small = {"smoke": (8, 1), "quick": (8, 1), "cpu": (32, 3), "paper": (32, 3)}[scale]
    models = [
        create_model(run.model, image_size=small[0], channels=small[1], seed=0, **run.options) for run in runs[:3]
    ]
    states = [model.state_dict() for model in models]
    assert all(model.pool == "mean" and model.num_prefix_tokens == 0 for model in models)
    assert all((state[name] == states[2][name]).all() for state in states for name in states[2])
    assert [model.patches.grid for model in models] == [(4, 4) if small[0] == 8 else (8, 8)] * 3


@pytest.mark.parametrize("scale", ["smoke", "quick"])
def test_the_global_one_is_the_vit_of_the_other_studies(scale):
    ours = [run.key() for run in local_attention.grid(Settings(scale=scale)) if "kernel_size" not in run.options]
    assert ours == [run.key() for run in families_grid(Settings(scale=scale)) if run.model == "vit_nano"]


def test_smoke_run(smoke_run):
    path = smoke_run(local_attention.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.kernel.values.tolist() == [3, 5, 0]
    assert len(set(ds.nll_clean.values.tolist())) == 3
