"""Fits to impulses: closed forms, verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.zheng import fit
from studies.zheng.fit import ALPHAS, PUBLISHED, QUICK, QUICK_STEPS, SCALES, SHARP
from vitprobe.initializers import impulse_
from vitprobe.initializers.impulse_fit import Impulses
from vitprobe.models import create_model
from vitprobe.models.layers import sincos_positions
from vitprobe.results import load
from vitprobe.study import Settings


def stacked(*, scale: str = "quick", quick: float = 0.97, published: float = 0.25, seconds: float = 4.0, half=0.06):
    """Fits whose attention grows with the steps up to a level by setting."""
    rng = np.random.default_rng(0)
    side, kernel = fit.SIZES[scale]
    uniform = fit.uniform_errors(side, kernel)
    levels = {PUBLISHED: published, "no norm": 0.5, "c = 1": 0.6, "lr 0.01": 0.7, QUICK: quick, SHARP: 0.96}
    rows = fit.grid(Settings(scale=scale))
    most = {name: max(row.arguments.get("steps", 60) for row in rows if row.label == name) for name in levels}
    steps = np.array([row.arguments.get("steps", 60 + row.arguments["seed"]) for row in rows])  # sharp ones end alone
    noise = rng.normal(0, 0.003, len(rows))
    mass = np.array([levels[row.label] * (n / most[row.label]) ** 0.2 for row, n in zip(rows, steps, strict=True)])
    mass = np.minimum(mass + noise, 1)
    diluted = mass[:, None] * np.interp(ALPHAS, [0, 0.1, 0.5], [1, 0.5, half])
    random = 1 / side**2 + (1 - 1 / side**2) / (1 + 30 / SCALES)
    return xr.Dataset(
        {
            "mass": ("run", mass),
            "argmax_accuracy": ("run", np.ones(len(rows))),
            "squared_error": ("run", uniform.mean() * (1 - mass) ** 1.5),
            "uniform_error": ("run", np.full(len(rows), uniform.mean())),
            "steps": ("run", steps),
            "processor_seconds": ("run", seconds + noise),
            "peak": (("run", "bin"), 1 / side**2 + (1 - 1 / side**2) / (1 + 0.1 / SCALES) + noise[:, None]),
            "random_peak": (("run", "bin"), random + noise[:, None]),
            "diluted_mass": (
                ("run", "bin", "sample"),
                np.broadcast_to(diluted[:, None], (len(rows), len(SCALES), len(ALPHAS))),
            ),
        },
        coords={
            "sample": list(ALPHAS),
            "bin": SCALES,
            "fit": ("run", [row.label for row in rows]),
            "seed": ("run", [row.arguments["seed"] for row in rows]),
        },
        attrs={
            "side": side,
            "kernel": kernel,
            "code_rank": 2 * side - 1,
            "uniform_error_mean": uniform.mean(),
            "uniform_error_least": uniform.min(),
            "uniform_error_most": uniform.max(),
        },
    )


def verdicts(**changes: float) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in fit.verdicts(stacked(**changes))}


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({}, "supported"),
        ({"quick": 0.8}, "contradicted"),
        ({"seconds": 100.0}, "contradicted"),
        ({"quick": 0.9005}, "inconclusive"),
    ],
)
def test_verdicts(changes, whole):
    assert verdicts(**changes)["Z9"] == whole


def test_what_decides_nothing_is_judged_beside():
    found = verdicts(published=0.25)
    assert (found["Z9 published mass"], found["Z7 diluted"], found["Z9"]) == ("contradicted", "supported", "supported")
    assert verdicts(half=0.5)["Z7 diluted"] == "contradicted"


@pytest.mark.parametrize(("side", "kernel"), [(4, 3), (8, 3), (5, 5)])
def test_error_of_uniform_maps_in_closed_form(side, kernel):
    """Against the convolution matrices themselves, in float64."""
    reach, tokens = kernel // 2, side**2
    taps = [(y, x) for y in range(-reach, reach + 1) for x in range(-reach, reach + 1)]
    wanted = Impulses.of((side, side), torch.tensor(taps)).matrix().double()
    errors = (wanted - 1 / tokens).square().mean((1, 2))
    np.testing.assert_allclose(fit.uniform_errors(side, kernel), errors, rtol=1e-12)


def test_numbers_of_the_header():
    small, large = fit.uniform_errors(8, 3), fit.uniform_errors(16, 5)
    assert np.unique(small.round(4)).tolist() == [0.0118, 0.0135, 0.0154]
    assert round(small.mean(), 4) == 0.0130
    assert [round(float(value), 4) for value in (large.mean(), large.min(), large.max())] == [0.0033, 0.0030, 0.0039]
    assert [fit.code_rank(side, dim) for side in (8, 16) for dim in (192, 512)] == [15, 15, 31, 31]
    assert fit.code_rank(16, 96) < 31
    assert [fit.code_rank(side, 512, np.float32) for side in (8, 16)] == [13, 21]


def test_rank_is_that_of_the_models_code():
    code = sincos_positions((8, 8), 96).numpy()
    assert fit.code_rank(8, 96, np.float32) == np.linalg.matrix_rank(code) <= 15


def test_the_scale_of_the_softmax_goes_from_flat_to_spikes():
    model = create_model("model_2", image_size=8, patch_size=2, dim=48, heads=4, depth=1, seed=0)
    attention = model.blocks[0].attention
    own = attention.scale
    found = fit.peaks(attention)
    assert (np.diff(found) > 0).all() and found[0] < 1.01 / 16 and found[-1] > 0.9
    assert attention.scale == own


def test_tokens_dilute_and_all_of_the_code_does_not():
    model = create_model("model_2", image_size=8, patch_size=2, dim=48, heads=4, depth=1, seed=0)
    achieved = impulse_(model, seed=0).isel(layer=0)
    offsets = torch.tensor(np.stack([achieved.offset_y.values, achieved.offset_x.values], axis=1)).long()
    attention = model.blocks[0].attention.double()
    own = attention.scale
    found = fit.diluted_mass(attention, Impulses.of((4, 4), offsets), seed=0)
    np.testing.assert_allclose(found[SCALES == 1, 0], achieved.mass.mean(), rtol=1e-4)
    assert (np.diff(found[SCALES == 1]) < 0).all() and found[SCALES == 1, -1] < 0.3
    assert found[0].max() < 1.25 / 16  # so small a scale leaves nearly uniform maps
    assert (attention.source.alpha, attention.scale) == (0, own)


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grid(scale):
    rows = fit.grid(Settings(scale=scale))
    assert len({row.model + row.label for row in rows}) == len(rows)
    quick = [row.arguments["seed"] for row in rows if (row.label, row.arguments.get("steps")) == (QUICK, QUICK_STEPS)]
    assert quick == list(range(fit.DECIDING_SEEDS))
    assert max(row.arguments["steps"] for row in rows if row.label == PUBLISHED) == {
        "smoke": 30, "quick": 300, "cpu": 10_000, "paper": 10_000,
    }[scale]  # fmt: skip


def test_smoke_run(smoke_run):
    path = smoke_run(fit.STUDY, seeds=2)
    assert path.with_suffix(".png").stat().st_size > 30_000
    ds = load(path)
    own = ds.isel(run=np.flatnonzero(ds.fit.values == SHARP))
    assert float(own.worst_mass.min()) > 0.9 and float(own.argmax_accuracy.min()) == 1
    np.testing.assert_allclose(ds.diluted_mass.sel(bin=1.0, sample=0.0), ds.mass, rtol=1e-3)
