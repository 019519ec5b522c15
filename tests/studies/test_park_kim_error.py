"""Error and training loss by family: rank correlations and verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.outcomes import difference, rank_correlation, where
from studies.park_kim import error
from studies.park_kim.error import BIAS, LOOKS, PUBLISHED, SECOND, correlations
from studies.park_kim.families import family
from vitprobe.models import list_models
from vitprobe.published import park_kim_2022
from vitprobe.results import load
from vitprobe.study import Settings

MODELS = ["resnet_nano", "alternet_nano", "convit_nano", "vit_nano", "mixer_nano"]


def stacked(errors: list[float], losses: list[float], *, seeds: int = 6, noise: float = 1e-3) -> xr.Dataset:
    """The models with these errors and training losses, and a little noise of every seed."""
    rng = np.random.default_rng(0)
    runs = [(seed, model) for seed in range(seeds) for model in range(len(MODELS))]

    def noisy(values):
        return ("run", [values[model] + rng.normal(0, noise) for _, model in runs])

    return xr.Dataset(
        {"error": noisy(errors), "nll_train": noisy(losses), "nll_clean": noisy(losses)},
        coords={
            "run": np.arange(len(runs)),
            "model": ("run", [MODELS[model] for _, model in runs]),
            "seed": ("run", [seed for seed, _ in runs]),
            "parameters": ("run", [1000 * (model + 1) for _, model in runs]),
            "accuracy": ("run", [100 - errors[model] for _, model in runs]),
        },
        attrs={"classes": 10, "data": "made"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in error.verdicts(ds)}


def test_rank_correlation_of_small_cases():
    # 1 - 6 * sum(d^2) / (n (n^2 - 1)) with d = (0, 1, -1).
    assert rank_correlation(np.array([1, 2, 3]), np.array([10, 30, 20])) == pytest.approx(0.5)
    assert rank_correlation(np.array([1, 1, 1]), np.array([1, 2, 3])) == 0.0


def test_published_points_are_in_the_order_of_bias():
    points = park_kim_2022()["cifar100_error_nll"]
    order = sorted((name for name in points if name != "ResNeXt-50"), key=lambda name: BIAS[PUBLISHED[name]])
    assert order == sorted(order, key=lambda name: points[name]["error_pct"])
    assert order == sorted(order, key=lambda name: points[name]["nll_train"])


def test_correlations_are_of_each_seed():
    ds = stacked([1, 2, 3, 4, 5], [5, 4, 3, 2, 1])
    assert correlations(ds, "error", "nll_train") == pytest.approx([-1] * 6)
    assert correlations(ds, "error", "bias") == pytest.approx([1] * 6)


def test_differences_are_within_seeds_whatever_the_order_of_runs():
    ds = stacked([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], noise=0.0)
    ds["error"] = ds.error + ds.seed
    found = difference(ds.isel(run=slice(None, None, -1)), "error", {"model": "mixer_nano"}, {"model": "vit_nano"})
    np.testing.assert_allclose(found, [1] * 6)
    assert where(ds.isel(run=slice(None, None, -1)), model="vit_nano").seed.values.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("errors", "losses", "whole", "mixing"),
    [
        ([10, 12, 14, 16, 18], [1.0, 1.2, 1.4, 1.6, 1.8], "supported", "supported"),
        ([10, 12, 14, 18, 16], [1.8, 1.6, 1.4, 1.2, 1.0], "contradicted", "contradicted"),
        ([14, 14, 14, 14, 14], [1.4, 1.4, 1.4, 1.4, 1.4], "inconclusive", "inconclusive"),
    ],
)
def test_verdicts(errors, losses, whole, mixing):
    found = verdicts(stacked(errors, losses))
    assert (found["E1"], found["E1 clean"], found["E9"]) == (whole, whole, mixing)


def test_three_seeds_that_agree_are_too_few_and_say_how_many_would_decide():
    ds = stacked([10, 12, 14, 16, 18], [1.0, 1.2, 1.4, 1.6, 1.8], seeds=3)
    found = {verdict.claim.id: verdict for verdict in error.verdicts(ds)}
    assert found["E1"].verdict == "inconclusive" and found["E1"].needed == 6


def test_networks_that_did_not_learn_are_no_evidence():
    ds = stacked([10, 12, 14, 16, 18], [1.0, 1.2, 1.4, 1.6, 1.8])
    ds["accuracy"] = ds.accuracy.where(ds.model != "mixer_nano", 10.0)
    assert set(verdicts(ds).values()) == {"inconclusive"}


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grid(scale):
    runs = error.grid(Settings(scale=scale))
    assert {run.model for run in runs} <= set(list_models())
    seeds = 2 if scale == "smoke" else 3
    per_seed = 12 if scale == "paper" else 8
    assert len({(run.model, run.recipe.seed) for run in runs}) == len(runs) == seeds * per_seed
    assert [run.recipe.seed for run in runs] == sorted(run.recipe.seed for run in runs)
    assert {family(run.model) for run in runs} <= set(BIAS) == set(LOOKS)


def test_no_two_networks_of_the_paper_scale_look_alike():
    models = [run.model for run in error.grid(Settings(scale="paper", seeds=1))]
    looks = {(LOOKS[family(model)].color, SECOND.get(model, LOOKS[family(model)].marker)) for model in models}
    assert len(looks) == len(models) == 12


def test_smoke_run(smoke_run):
    path = smoke_run(error.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.sizes == {"run": 8}
    # Before it has learned anything a network's loss is about that of a guess, and these have no floor.
    np.testing.assert_allclose(ds.nll_clean, np.log(10), rtol=0.3)
    np.testing.assert_allclose(ds.error, 100 - ds.accuracy)
    assert (ds.entropy_floor == 0).all() and (ds.nll_train > 0).all()
