"""The steps between units and the verdicts of the Park & Kim studies, on datasets made by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.outcomes import learned
from studies.park_kim.families import CLAIMS, LOOKS, SCALES, family, grid, headline, judge, steps
from vitprobe.models import list_models
from vitprobe.study import Settings

KINDS = ["stem", "msa", "mlp", "msa", "mlp", "subsample", "msa", "mlp"]
GRIDS = [8, 8, 8, 8, 8, 4, 4, 4]


def stacked(msa: float, mlp: float, *, seeds: int = 3, accuracy: float = 60.0, noise: float = 0.01) -> xr.Dataset:
    """A ViT whose attention units step by `msa` and MLPs by `mlp`, with a jump of 100 where the grid changes."""
    rng = np.random.default_rng(0)
    change = {"stem": 0.0, "msa": msa, "mlp": mlp, "subsample": 100.0}
    values = [np.cumsum([change[k] + rng.normal(0, noise) for k in KINDS]) for _ in range(seeds)]
    runs, layers = ("run",), ("run", "layer")
    return xr.Dataset(
        {"value": (layers, values)},
        coords={
            "kind": (layers, [KINDS] * seeds),
            "grid_h": (layers, [GRIDS] * seeds),
            "grid_w": (layers, [GRIDS] * seeds),
            "model": (runs, ["vit_micro"] * seeds),
            "accuracy": (runs, [accuracy] * seeds),
        },
        attrs={"classes": 10},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {v.claim.id: v.verdict for v in judge(ds, "value", CLAIMS["E14"], headline(ds))}


def test_steps_leave_out_stems_and_changes_of_the_grid():
    change = steps(stacked(-1.0, 2.0, noise=0.0), "value").values[0]
    np.testing.assert_allclose(change, [np.nan, -1, 2, -1, 2, np.nan, -1, 2])


def test_a_unit_that_changes_the_grid_unnoticed_is_no_step():
    ds = stacked(-1.0, 2.0)
    ds["kind"] = ds.kind.where(ds.kind != "subsample", "conv")
    assert np.isnan(steps(ds, "value").values[0, 5])


@pytest.mark.parametrize(
    ("msa", "mlp", "whole"),
    [(-1, 1, "supported"), (1, 1, "contradicted"), (-1, -1, "contradicted"), (-1, 0.0, "inconclusive")],
)
def test_verdicts(msa, mlp, whole):
    found = verdicts(stacked(msa, mlp))
    assert found["E14"] == whole
    assert found["E14 msa vit_micro"] == ("supported" if msa < 0 else "contradicted")


def test_one_seed_and_networks_that_did_not_learn_are_no_evidence():
    assert set(verdicts(stacked(-1, 1, seeds=1)).values()) == {"inconclusive"}
    ds = stacked(-1, 1)
    ds["accuracy"] = ("run", [60.0, 44.9, 60.0])
    assert set(verdicts(ds).values()) == {"inconclusive"}
    (part,) = (v for v in judge(ds, "value", CLAIMS["E14"], ["vit_micro"]) if v.claim.id.endswith("msa vit_micro"))
    assert "did not learn" in part.detail


def test_other_families_are_reported_and_do_not_decide():
    ds = stacked(-1, 1)
    other = stacked(1, -1)
    other["model"] = ("run", ["convit_micro"] * 3)
    both = xr.concat([ds, other], dim="run", combine_attrs="override")
    found = verdicts(both)
    assert found["E14"] == "supported"
    assert found["E14 msa convit_micro"] == "contradicted"


@pytest.mark.parametrize("scale", SCALES)
def test_grids_name_models_that_exist(scale):
    runs = grid(Settings(scale=scale))
    assert {run.model for run in runs} <= set(list_models())
    assert len({(run.model, run.recipe.seed) for run in runs}) == len(runs) == 7 * SCALES[scale][2]


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_has_the_same_families_each_once(scale):
    runs = grid(Settings(scale=scale, seeds=1))
    assert sorted(family(run.model) for run in runs) == sorted(set(LOOKS) - {"mixer"})


def test_families_of_names():
    names = ["preact_resnet50", "resnet_micro", "resnext50", "alternet50_imagenet", "vit_ti_p2", "swin_ti", "convmixer"]
    assert [family(name) for name in names] == ["resnet", "resnet", "resnext", "alternet", "vit", "swin", "convmixer"]


def test_no_two_families_look_alike():
    for attribute in ("label", "color", "marker"):
        assert len({getattr(look, attribute) for look in LOOKS.values()}) == len(LOOKS)


def test_data_by_name_keeps_the_sizes_of_the_scale_and_other_data_come_whole():
    same = grid(Settings(scale="cpu", data="cifar10"))[0].data
    other = grid(Settings(scale="cpu", data="cifar100"))[0].data
    asked = grid(Settings(scale="cpu", data="cifar100", train_size=500))[0].data
    assert (same.train_size, same.test_size) == (10_000, 2_000)
    assert (other.train_size, other.test_size) == (None, None)
    assert asked.train_size == 500


def test_an_accuracy_that_all_runs_share_is_an_attribute():
    ds = xr.Dataset(attrs={"classes": 10, "accuracy": 50.0})
    assert learned(ds) and not learned(ds.assign_attrs(accuracy=40.0))
