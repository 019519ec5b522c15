"""Box blurs in a ResNet: statistics and verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.park_kim import blur
from studies.park_kim.eigenvalues import contrast
from studies.park_kim.families import grid as families_grid
from vitprobe.models import create_model
from vitprobe.models.resnet import Smoothing
from vitprobe.results import load, stack_runs
from vitprobe.study import Settings

PLAIN = ["block"] * 4
BLURRED = ["block", "block", "blur", "block", "block", "blur"]


def one_run(seed: int, *, blurred: bool, high: float, doublings: float, ape: float, rest: float) -> xr.Dataset:
    """Two stages of two blocks whose blurs change amplitude and variance by so much, and later blocks by `rest`."""
    rng = np.random.default_rng([seed, blurred])
    roles = BLURRED if blurred else PLAIN
    amplitude, log_variance, values = -2.0, 0.0, []
    for place, role in enumerate(roles):
        if role == "blur":
            amplitude, log_variance = amplitude + high, log_variance + doublings
        elif place == 3 and blurred:  # the first block after a blur, which may undo what that did
            amplitude, log_variance = amplitude - high + 0.5 + rest, log_variance - doublings + 1 + rest
        else:
            amplitude, log_variance = amplitude + 0.5, log_variance + 1
        values.append((amplitude, log_variance))
    noisy = np.array(values) + rng.normal(0, 0.001, (len(roles), 2))
    variables = {
        "high_frequency_amplitude": noisy[:, 0],
        "variance": 2 ** noisy[:, 1],
        "normalised_variance": 2 ** (noisy[:, 1] - 6),
    }
    numbers = {"ape": 20.0 * (1 + seed) * 2 ** (blurred * ape + rng.normal(0, 0.01)), "error": 30.0 - blurred + seed}
    return xr.Dataset(
        {name: ("layer", column) for name, column in variables.items()}
        | {f"{name}_se": ("layer", np.full(len(roles), 0.01)) for name in variables}
        | {name: ((), value) for name, value in numbers.items()},
        coords={
            "layer": np.arange(len(roles)),
            "role": ("layer", roles),
            "position": ("layer", [1.0, 2.0, 2.5, 3.0, 4.0, 4.5] if blurred else [1.0, 2.0, 3.0, 4.0]),
            "smoothing": ((), "box" if blurred else "none"),
            "seed": ((), seed),
        },
    )


def stacked(
    high: float = -1.5,
    doublings: float = -2.0,
    ape: float = -0.5,
    *,
    rest: float = 0.0,
    seeds: int = 3,
    accuracy: float = 70.0,
) -> xr.Dataset:
    """Runs without blurs and with them; APE differs by so many doublings, what is behind the first blur by `rest`."""
    runs = [
        one_run(seed, blurred=kind, high=high, doublings=doublings, ape=ape, rest=rest)
        for seed in range(seeds)
        for kind in (False, True)
    ]
    ds = stack_runs([run.assign_coords(accuracy=((), accuracy)) for run in runs], model=["resnet_nano"] * len(runs))
    return ds.assign_attrs(classes=10, data="made", test_images=100)


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in blur.verdicts(ds)}


def test_statistics_are_those_that_the_runs_were_made_with():
    ds = stacked(high=-1.5, doublings=-2.0, ape=-0.5, rest=0.25)
    for variable, expected in (("high_frequency_amplitude", -1.5), ("variance", -2.0), ("normalised_variance", -2.0)):
        assert blur.changes(ds, variable).shape == (3, 2)
        np.testing.assert_allclose(blur.changes(ds, variable), expected, atol=0.01)
        np.testing.assert_allclose(blur.ending(ds, variable, "last block"), 0.25, atol=0.01)
        np.testing.assert_allclose(blur.ending(ds, variable, "last map"), 0.25 + expected, atol=0.01)
    np.testing.assert_allclose(contrast(ds, "ape", *blur.WITH_AND_WITHOUT), -0.5, atol=0.05)


@pytest.mark.parametrize(
    ("made", "whole"),
    [
        ({}, "supported"),
        ({"ape": 0.5}, "contradicted"),
        ({"ape": 0.0}, "inconclusive"),
        ({"high": 0.5}, "contradicted"),
        ({"doublings": 0.5}, "contradicted"),
    ],
)
def test_verdicts(made, whole):
    assert verdicts(stacked(**made))["E24"] == whole


def test_what_becomes_of_the_network_decides_nothing():
    found = verdicts(stacked(rest=1.0))
    assert found["E24"] == "supported"
    assert (found["E24 variance, last block"], found["E24 variance, last map"]) == ("contradicted", "supported")


def test_one_seed_and_networks_that_did_not_learn_are_no_evidence():
    assert set(verdicts(stacked(seeds=1)).values()) == {"inconclusive"}
    assert set(verdicts(stacked(accuracy=44.9)).values()) == {"inconclusive"}


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grid_is_the_resnet_of_the_other_studies_and_one_with_blurs(scale):
    runs = blur.grid(Settings(scale=scale))
    plain = [run for run in families_grid(Settings(scale=scale)) if "resnet" in run.model]
    assert runs[::2] == plain
    assert [run.options for run in runs[1::2]] == [{"smoothing": "box"}] * len(plain)
    assert [run.recipe for run in runs[1::2]] == [run.recipe for run in plain]
    assert len({(run.recipe.seed, bool(run.options)) for run in runs}) == len(runs)


def test_blurs_change_no_weight_and_end_every_stage():
    plain, blurred = (create_model("resnet_nano", image_size=8, channels=1, seed=0, smoothing=s) for s in blur.LOOKS)
    weights = blurred.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in plain.state_dict().items())
    assert [isinstance(stage[-1], Smoothing) for stage in blurred.stages] == [True, True]


@pytest.mark.filterwarnings("ignore:.*not converged:UserWarning")  # smoke gives up early
def test_smoke_run(smoke_run):
    path = smoke_run(blur.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.smoothing.values.tolist() == ["none", "box"]
    assert [(row != "").sum() for row in ds.role.values] == [6, 8]
    assert (blur.changes(ds, "variance") < 0).all() and (blur.changes(ds, "high_frequency_amplitude") < 0).all()
    assert np.isfinite(contrast(ds, "ape", *blur.WITH_AND_WITHOUT)).all()
