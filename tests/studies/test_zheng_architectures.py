"""From a simple ViT to a ConvMixer: verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.zheng import architectures
from vitprobe.models import create_model
from vitprobe.results import load
from vitprobe.study import Settings

KINDS = [*architectures.VITS, "convmixer"]


def stacked(*, seeds: int = 3, accuracy: float = 70.0, noise: float = 0.01, **beyond: float) -> xr.Dataset:
    """A simple ViT of an accuracy, and what the others have beyond it; as claimed unless given."""
    beyond = {
        "simple_vit": 0.0, "no_code": -14.0, "model_1": -0.6, "model_1_identity": 1.0, "model_2": 2.0, "model_3": 3.0,
        "convmixer": 10.0, **beyond,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    rows = [(seed, kind) for seed in range(seeds) for kind in beyond]
    level = np.abs(rng.normal(0, 5, seeds))  # what a seed's networks have in common
    found = [accuracy + level[seed] + beyond[kind] + rng.normal(0, noise) for seed, kind in rows]
    return xr.Dataset(
        {"error_se": ("run", np.full(len(rows), 1.0))},
        coords={
            "run": np.arange(len(rows)),
            "seed": ("run", [seed for seed, _ in rows]),
            "architecture": ("run", [kind for _, kind in rows]),
            "accuracy": ("run", found),
        },
        attrs={"classes": 10},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in architectures.verdicts(ds)}


@pytest.mark.parametrize(
    ("beyond", "contradicted"),
    [
        ({}, []),
        ({"no_code": -4.0}, ["Z3"]),
        ({"model_1": -2.5}, ["Z4", "Z4 worse"]),
        ({"model_1": 2.5, "model_2": 4.0, "model_3": 4.0}, ["Z4", "Z4 better", "Z5 model_1_identity"]),
        ({"model_2": -1.5}, ["Z5 model_2 better"]),  # no worse, and no better
        ({"model_2": -3.0}, ["Z5", "Z5 model_2", "Z5 model_2 better"]),
        ({"model_3": -3.0}, ["Z5", "Z5 model_3", "Z5 model_3 better"]),
        # What is beside the claim does not decide it.
        ({"model_1_identity": -3.0, "convmixer": -3.0}, ["Z5 model_1_identity", "Z5 convmixer"]),
    ],
)
def test_verdicts(beyond, contradicted):
    found = verdicts(stacked(**beyond))
    assert [name for name, verdict in found.items() if verdict == "contradicted"] == contradicted
    assert "inconclusive" not in found.values()
    assert [name for name in found if " " not in name] == ["Z3", "Z4", "Z5"]


def test_noise_one_seed_and_references_that_did_not_learn_are_no_evidence():
    assert {verdicts(stacked(noise=3.0))[name] for name in ("Z4", "Z5")} == {"inconclusive"}
    assert set(verdicts(stacked(seeds=1)).values()) == {"inconclusive"}
    assert set(verdicts(stacked(accuracy=20.0)).values()) == {"inconclusive"}
    # That a network does not learn without its code is what is claimed.
    assert verdicts(stacked(accuracy=40.0, no_code=-30.0))["Z3"] == "supported"


def test_published_differences():
    found = {verdict.claim.id: verdict.claim.published for verdict in architectures.verdicts(stacked())}
    assert found["Z4 worse"] == "-0.61 points"
    assert architectures.ROWS["no_code"].published == pytest.approx(-13.94)


@pytest.mark.parametrize(("scale", "side"), [("smoke", 8), ("quick", 8), ("cpu", 32), ("paper", 32)])
def test_grid(scale, side):
    settings = Settings(scale=scale)
    runs = architectures.grid(settings)
    assert len(runs) == 7 * len({run.recipe.seed for run in runs})
    assert [architectures.architecture(run, settings) for run in runs[:7]] == KINDS
    assert {run.recipe.augment for run in runs} == {"none"}
    assert {run.recipe.lr for run in runs[:6]} == {runs[0].recipe.lr}
    # The identity code needs as many channels as tokens, and then tells them all apart.
    identity = create_model(runs[3].model, image_size=side, **runs[3].options).blocks[0].attention.source
    assert len(torch.unique(identity.code(), dim=0)) == len(identity.code())


def test_which_maps_no_image_changes():
    runs = architectures.grid(Settings(scale="smoke"))[:6]
    images = torch.rand(2, 1, 8, 8)
    fixed = []
    for run in runs:
        model = create_model(run.model, image_size=8, channels=1, seed=0, **run.options)
        seen = []
        model.blocks[1].attention.register_forward_hook(
            lambda module, given, out, seen=seen: seen.append(module.weights(given[0]))
        )
        model(images)
        maps = seen[0].expand(2, -1, -1, -1)
        fixed.append(torch.equal(maps[0], maps[1]))
    assert fixed == [False, False, False, False, True, True]


def test_smoke_run(smoke_run):
    path = smoke_run(architectures.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.architecture.values.tolist() == KINDS
    assert len(set(ds.nll_clean.values.tolist())) == 7
