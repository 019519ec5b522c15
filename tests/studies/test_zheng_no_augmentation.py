"""Initialisations without augmentation: verdicts on datasets made by hand, the grid, the patches, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.zheng import alpha, frozen, no_augmentation
from studies.zheng.alpha import alpha_of
from studies.zheng.initialisations import LOOKS
from vitprobe.models import create_model
from vitprobe.results import load
from vitprobe.study import Settings


def stacked(accuracies: dict[str, float], *, seeds: int = 3) -> xr.Dataset:
    """The accuracies, each seed with a level of its own and a little noise."""
    rng = np.random.default_rng(0)
    level = rng.normal(0, 3, seeds)
    rows = [(seed, name) for seed in range(seeds) for name in LOOKS]
    accuracy = [accuracies[name] + level[seed] + rng.normal(0, 0.1) for seed, name in rows]
    return xr.Dataset(
        {"error_se": ("run", [1.0] * len(rows))},
        {
            "seed": ("run", [seed for seed, _ in rows]),
            "initialisation": ("run", [name for _, name in rows]),
            "accuracy": ("run", accuracy),
        },
        {"classes": 10, "data": "made", "shown": 0.1},
    )


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((60, 62, 65), ("supported", "supported", "supported")),
        ((60, 66, 63), ("contradicted", "supported", "contradicted")),
        ((64, 60, 60), ("contradicted", "contradicted", "inconclusive")),
        ((60, 65, 65), ("inconclusive", "supported", "inconclusive")),
        ((30, 50, 55), ("inconclusive", "inconclusive", "supported")),  # random did not learn
    ],
)
def test_verdicts(accuracies, expected):
    found = no_augmentation.verdicts(stacked(dict(zip(LOOKS, accuracies, strict=True))))
    names = ("Z7 no augmentation", "Z7 no augmentation over random", "Z7 no augmentation over mimetic")
    assert [verdict.claim.id for verdict in found] == list(names)
    assert tuple(verdict.verdict for verdict in found) == expected


def test_values_by_hand_and_single_seeds():
    ds = stacked(dict.fromkeys(LOOKS, 60.0))
    impulse, mimetic = (ds.accuracy.values[ds.initialisation.values == name] for name in ("impulse", "mimetic"))
    _, _, over_mimetic = no_augmentation.verdicts(ds)
    gap = impulse - mimetic
    half = 4.3027 * gap.std(ddof=1) / 3**0.5  # t at 97.5 % of 2 degrees of freedom
    assert over_mimetic.value == pytest.approx(gap.mean())
    assert over_mimetic.high - over_mimetic.low == pytest.approx(2 * half, rel=1e-4)
    single = no_augmentation.verdicts(stacked({"random": 50, "mimetic": 60, "impulse": 80}, seeds=1))
    assert {verdict.verdict for verdict in single} == {"inconclusive"}


@pytest.mark.parametrize(("scale", "runs"), [("smoke", 6), ("quick", 9), ("cpu", 9), ("paper", 9)])
def test_grid(scale, runs):
    settings = Settings(scale=scale)
    found, augmented = no_augmentation.grid(settings), alpha.grid(settings)
    assert len(found) == len({(run.recipe.seed, str(run.initialisers)) for run in found}) == runs
    assert {run.recipe.augment for run in found} == {"none"}
    assert {alpha_of(run) for run in found} == {0.2 if scale == "paper" else 0.0}
    # The same networks; digits are never augmented, so at these scales the same runs.
    assert [run for run in found if run.options not in [other.options for other in augmented]] == []
    assert all(run in augmented for run in found) == (scale in ("smoke", "quick"))


def test_shared_runs_have_equal_keys():
    settings = Settings(scale="smoke")
    theirs = {run.key() for run in alpha.grid(settings)}
    assert {run.key() for run in no_augmentation.grid(settings)} <= theirs


def test_random_and_impulse_are_those_of_zheng_frozen():
    for scale in ("quick", "cpu"):
        settings = Settings(scale=scale)
        theirs = frozen.grid(settings)
        shared = [run for run in no_augmentation.grid(settings) if run in theirs]
        assert len(shared) == (9 if scale == "quick" else 6)


def test_svhn_without_augmentation_is_that_of_zheng_alpha():
    settings = Settings(scale="paper", data="svhn")
    theirs = alpha.grid(settings)
    assert all(run in theirs for run in no_augmentation.grid(settings))


@pytest.mark.parametrize(("side", "patch"), [(64, 4), (32, 2)])
def test_large_images_have_as_many_tokens(side, patch, tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (10, side, side, 3), dtype=np.uint8)
    np.savez(tmp_path / "tiny.npz", images=images, labels=np.arange(10) % 2)
    run = no_augmentation.grid(Settings(scale="paper", data=f"npz:{tmp_path / 'tiny.npz'}"))[0]
    assert run.options.get("patch_size", 2) == patch
    network = create_model(run.model, image_size=side, num_classes=2, seed=0, **{**run.options, "depth": 1})
    assert network.patches.grid == (16, 16)


def test_smoke_run(smoke_run):
    path = smoke_run(no_augmentation.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.initialisation.values.tolist() == list(LOOKS) and ds.attrs["augmented"] == "no augmentation"
    assert np.isfinite(ds.nll_clean.values).all()
