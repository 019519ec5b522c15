"""The study of augmentation and calibration: its pairs of recipes, verdicts on datasets made by hand, and a run."""

from dataclasses import fields, replace

import numpy as np
import pytest
import xarray as xr

from studies.park_kim import calibration
from studies.park_kim.families import SCALES
from studies.park_kim.families import grid as families_grid
from vitprobe.study import Settings
from vitprobe.training import Recipe, make_recipe

SEEDS = 3


def differing(one: Recipe, other: Recipe) -> set[str]:
    return {field.name for field in fields(Recipe) if getattr(one, field.name) != getattr(other, field.name)}


def stacked(weak: float, alone: float, strong: float, *, seeds: int = SEEDS, accuracy: float = 60.0) -> xr.Dataset:
    """A ResNet and a ViT with these errors, and a ConViT with the opposite ones."""
    signs = {"resnet_micro": 1, "vit_micro": 1, "convit_micro": -1}
    rows = [
        (model, name, sign * error + 0.001 * seed)
        for seed in range(seeds)
        for model, sign in signs.items()
        for name, error in (("weak", weak), ("images alone", alone), ("strong", strong))
        if name != "images alone" or sign == 1
    ]
    models, names, errors = zip(*rows, strict=True)
    return xr.Dataset(
        {"ecse": ("run", list(errors)), "ece": ("run", list(np.abs(errors)))},
        coords={
            "model": ("run", list(models)),
            "augmentation": ("run", list(names)),
            "accuracy": ("run", [accuracy] * len(rows)),
        },
        attrs={"classes": 10},
    )


def words(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in calibration.verdicts(ds)}


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu"])
def test_weak_and_strong_differ_in_what_is_published_as_augmentation(scale):
    weak, alone, strong = calibration.recipes(scale).values()
    assert weak == SCALES[scale][3]
    assert differing(weak, alone) == {"augment"}
    assert differing(alone, strong) == {"label_smoothing", "mixup", "cutmix", "clip"}
    published = differing(make_recipe("park_kim_weak"), make_recipe("park_kim_strong"))
    assert differing(weak, strong) == published


def test_the_paper_scale_has_the_published_recipes():
    weak, _, strong = calibration.recipes("paper").values()
    assert differing(weak, make_recipe("park_kim_weak")) == {"precision", "channels_last"}
    assert strong == SCALES["paper"][3]


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_the_grid_trains_two_families_with_each_augmentation_and_shares_one(scale):
    settings = Settings(scale=scale)
    runs, shared = calibration.grid(settings), families_grid(settings)
    seeds = calibration.SEEDS.get(scale, SCALES[scale][2])
    assert len([run for run in runs if run in shared]) == 2 * seeds
    kinds = 4 if scale == "cpu" else 6
    assert len({(run.model, str(run.recipe)) for run in runs}) == len(runs) == kinds * seeds


def test_verdicts():
    found = words(stacked(0.1, -0.05, -0.1))
    assert found["E22"] == found["E22 images alone"] == found["E22 weak vit_micro"] == "supported"
    assert found["E22 weak convit_micro"] == found["E22 strong convit_micro"] == "contradicted"
    # Labels and not images flip the sign.
    found = words(stacked(0.1, 0.05, -0.1))
    assert (found["E22"], found["E22 images alone"]) == ("supported", "contradicted")
    assert words(stacked(0.1, 0.05, 0.1))["E22"] == words(stacked(-0.1, 0.05, -0.1))["E22"] == "contradicted"
    assert words(stacked(0.0, 0.05, -0.1))["E22"] == "inconclusive"


def test_without_the_control_there_is_no_verdict_on_it():
    ds = stacked(0.1, -0.05, -0.1)
    found = words(ds.isel(run=np.flatnonzero(ds.augmentation != "images alone")))
    assert found["E22"] == "supported" and not any("alone" in name for name in found)


@pytest.mark.parametrize("options", [{"seeds": 1}, {"accuracy": 30.0}])
def test_no_evidence(options):
    assert set(words(stacked(0.1, -0.1, -0.1, **options)).values()) == {"inconclusive"}


def test_smoke(smoke_run):
    grid = calibration.grid
    small = replace(calibration.STUDY, grid=lambda asked: [run for run in grid(asked) if run.model == "vit_nano"])
    small = replace(small, verdicts=lambda ds: [calibration.judge(ds, calibration.CLAIMS["E22"], *_ONE)])
    path = smoke_run(small, train_size=200, test_size=100)
    ds = xr.load_dataset(path)
    assert ds.augmentation.values.tolist() == ["weak", "images alone", "strong"]
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "E22 strong vit_nano" in (path.parent / "claims_smoke.md").read_text()


_ONE = ("strong", "vit_nano", "below")
