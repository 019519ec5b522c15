"""Kinds of spatial filters: verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.zheng import architectures, filters
from vitprobe.models import create_model
from vitprobe.results import load
from vitprobe.study import Settings


def stacked(*, seeds: int = 3, accuracy: float = 70.0, noise: float = 0.01, **losses: float) -> xr.Dataset:
    """Learned filters of an accuracy, and what the frozen kinds lose; as published unless given."""
    losses = {"learned": 0.0, "random": 1.0, "impulse": 1.0, "box": 10.0, "permutation": 20.0, **losses}
    rng = np.random.default_rng(0)
    rows = [(seed, kind) for seed in range(seeds) for kind in losses]
    level = rng.normal(0, 5, seeds)  # what a seed's networks have in common
    level -= level.max()
    found = [accuracy - level[seed] - losses[kind] + rng.normal(0, noise) for seed, kind in rows]
    return xr.Dataset(
        {"error_se": ("run", np.full(len(rows), 1.0))},
        coords={
            "run": np.arange(len(rows)),
            "seed": ("run", [seed for seed, _ in rows]),
            "filters": ("run", [kind for _, kind in rows]),
            "accuracy": ("run", found),
        },
        attrs={"classes": 10},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in filters.verdicts(ds)}


@pytest.mark.parametrize(
    ("losses", "whole", "deciding"),
    [
        ({}, "supported", None),
        ({"random": -1.0}, "supported", None),
        ({"impulse": 4.0}, "contradicted", "Z1 learned-impulse"),
        ({"box": 3.0}, "contradicted", "Z1 learned-box"),
        ({"box": 25.0}, "contradicted", "Z1 box-permutation"),
    ],
)
def test_verdicts(losses, whole, deciding):
    found = verdicts(stacked(**losses))
    assert found.pop("Z1") == whole
    assert [name for name, verdict in found.items() if verdict != "supported"] == [deciding] * (deciding is not None)
    assert len(found) == 5


def test_noise_one_seed_and_learned_filters_that_did_not_learn_are_no_evidence():
    assert verdicts(stacked(noise=4.0))["Z1"] == "inconclusive"
    assert set(verdicts(stacked(seeds=1)).values()) == {"inconclusive"}
    assert set(verdicts(stacked(accuracy=34.0)).values()) == {"inconclusive"}
    # Frozen filters that keep a network from learning are what is claimed.
    assert verdicts(stacked(accuracy=40.0, permutation=30.0, random=0.5, impulse=0.5))["Z1"] == "supported"


@pytest.mark.parametrize(("scale", "side", "channels"), [("smoke", 8, 48), ("quick", 8, 48), ("cpu", 32, 96)])
def test_grid(scale, side, channels):
    runs = filters.grid(Settings(scale=scale))
    assert len(runs) == 5 * len({run.recipe.seed for run in runs})
    assert len({str(run.options) for run in runs[:5]}) == 5
    assert {run.recipe.augment for run in runs} == {"none"}
    models = [create_model(run.model, image_size=side, channels=3, **run.options) for run in runs[:5]]
    spatial = [model.blocks[0].spatial[0] for model in models]
    assert [len(layer.weight) for layer in spatial] == [channels] * 5
    # Boxes are one filter everywhere, and what is frozen has no gradient.
    assert spatial[3].weight.unique().numel() == 1
    assert [sum(p.numel() for p in layer.parameters()) > 0 for layer in spatial] == [True] + [False] * 4
    assert spatial[4].weight.shape == (channels, 64, 64)  # a matrix over all patches


def test_the_paper_scale_has_the_papers_settings():
    runs = filters.grid(Settings(scale="paper"))
    assert len(runs) == 15
    for run in runs:
        assert (run.model, run.options["spatial_activation"], run.recipe.lr) == ("convmixer_zheng", False, 1e-3)
        assert (run.recipe.epochs, run.recipe.batch_size, run.recipe.augment) == (200, 512, "none")


@pytest.mark.parametrize("scale", ["smoke", "quick"])
def test_learned_filters_are_the_reference_of_the_other_table(scale):
    ours = [run.key() for run in filters.grid(Settings(scale=scale)) if "filters" not in run.options]
    theirs = [run.key() for run in architectures.grid(Settings(scale=scale)) if run.model == "convmixer_nano"]
    assert ours == theirs


def test_smoke_run(smoke_run):
    path = smoke_run(filters.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.filters.values.tolist() == list(filters.KINDS)
    assert len(set(ds.nll_clean.values.tolist())) == 5
    # Frozen filters and their biases are not trained; permutations are frozen too.
    trained = dict(zip(ds.filters.values.tolist(), ds.parameters.values.tolist(), strict=True))
    assert {trained[kind] for kind in filters.KINDS[1:]} == {trained["learned"] - 4 * 48 * (9 + 1)}
