"""The study of lesions: ranks of stage beginnings and ends by hand and of the published network, verdicts, a run."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from studies.park_kim import lesion
from studies.park_kim.families import grid
from studies.park_kim.profiles import stage_of
from vitprobe.published import park_kim_2022

KINDS = ["stem", "conv", "conv", "conv", "subsample", "conv", "msa"]
GRIDS = [8, 8, 8, 8, 4, 4, 4]
CLAIMED = [0.0, 9, 3, 2, 7, 1, 8]  # points lost
OPPOSITE = [0.0, 1, 3, 2, 1, 5, 0]
SWIN = {"kinds": ["stem", *["msa", "mlp"] * 2, "subsample", "msa", "mlp"], "grids": [8] * 5 + [4] * 3}


def stacked(lost, *, seeds=6, kinds=KINDS, grids=GRIDS, model="alternet_micro", accuracy=60.0) -> xr.Dataset:
    """Equal runs, each unit of which loses so many points; with the published lesion as many, but of the first."""
    layers, runs = ("run", "layer"), ("run",)
    change = -np.tile(np.array(lost, dtype=float), (seeds, 1)) / 100
    return xr.Dataset(
        {"accuracy_change": (layers, change), "accuracy_change_convolution": (layers, change)},
        coords={
            "kind": (layers, [kinds] * seeds),
            "layer_name": (layers, [[f"unit{i}" for i in range(len(kinds))]] * seeds),
            "grid_h": (layers, [grids] * seeds),
            "grid_w": (layers, [grids] * seeds),
            "model": (runs, [model] * seeds),
            "accuracy": (runs, [accuracy] * seeds),
        },
        attrs={"classes": 10},
    )


def words(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in lesion.verdicts(ds)}


def test_a_share_of_the_others_loses_less():
    lost = np.array([4.0, 1.0, 4.0, 9.0, 2.0])
    assert lesion.share_below(lost, 3) == 1.0
    assert lesion.share_below(lost, 1) == 0.0
    assert lesion.share_below(lost, 0) == (2 + 0.5) / 4


def test_ranks_by_hand():
    lost, kinds, stages = np.array([5.0, 1, 2, 4, 3, 6]), ["mlp", "msa", "mlp", "msa", "mlp", "msa"], [0] * 6
    # The first MLP lost 5 and the others 2 and 3; the last attention unit lost 6, and the others 1 and 4.
    assert lesion.by_stage(lesion.share_below, lost, kinds, stages, "mlp") == [1.0]
    assert lesion.by_stage(lesion.share_below, lost, kinds, stages, "msa") == [1.0]
    assert lesion.by_stage(lesion.share_below, lost, kinds, stages, "conv") == []
    # Alone of its kind it is ranked among all; alone in its stage it has no rank.
    assert lesion.by_stage(lesion.share_below, lost[:4], ["conv", "conv", "conv", "msa"], [0, 0, 0, 0], "msa") == [
        2 / 3
    ]
    assert lesion.by_stage(lesion.share_below, lost[:4], ["conv", "conv", "conv", "msa"], [0, 0, 0, 1], "msa") == []


def test_ranks_of_the_published_swin():
    swin = [unit for unit in park_kim_2022()["lesion_swin_ti"] if unit["stage"] > 1]
    lost = np.array([-unit["delta_acc_pct"] for unit in swin])
    kinds, stages = [unit["unit"].lower() for unit in swin], [unit["stage"] for unit in swin]
    # Every stage begins with the MLP that matters most.
    assert lesion.by_stage(lesion.share_below, lost, kinds, stages, "mlp") == [1.0, 1.0, 1.0]
    # Stages 2 and 4 end with the attention unit that matters most; in stage 3 one of six costs 0.60, the last 0.56.
    assert lesion.by_stage(lesion.share_below, lost, kinds, stages, "msa") == pytest.approx([1.0, 4 / 5, 1.0])


def test_what_was_not_removed_is_not_ranked():
    lost = np.array([np.nan, 1.0, 2.0, 3.0])
    assert lesion.by_stage(lesion.share_below, lost, ["conv"] * 4, [0] * 4, "conv") == [0.0]


def test_a_stage_begins_where_either_side_of_the_grid_changes():
    np.testing.assert_array_equal(stage_of(np.array([[8, 8], [8, 8], [8, 4], [4, 4], [4, 4]])), [0, 0, 1, 2, 2])


def both(resnet, swin, **options) -> xr.Dataset:
    """A ResNet, which gets a last convolution that costs nothing so that both have eight units, and a Swin."""
    kinds = [*KINDS[:-1], "conv", "conv"]
    one = stacked([*resnet, 0], model="resnet_micro", kinds=kinds, grids=[*GRIDS, 4], **options)
    other = stacked(swin, model="swin_micro", **SWIN, **options)
    return xr.concat([one, other], dim="run", combine_attrs="override")


def test_resnet_and_swin_decide():
    found = words(both([0, 9, 3, 2, 7, 1, 2], [0, 1, 9, 8, 2, np.nan, 4, 5]))
    # The single attention unit and the single MLP of the second stage are ranked against each other.
    assert found["E19 conv resnet_micro"] == found["E19 mlp swin_micro"] == "supported"
    assert found["E19 msa swin_micro"] == "inconclusive"  # 1 and 0: the middle
    assert found["E19"] == "inconclusive"
    swin = [0, 8, 2, 1, 9, np.nan, 4, 5]  # the attention unit is the lesser in both stages
    assert words(both([0, 9, 3, 2, 7, 1, 2], swin))["E19"] == "contradicted"
    assert words(both(OPPOSITE, [0, 1, 9, 8, 2, np.nan, 4, 5]))["E19 convolution"] == "contradicted"


def test_alternet_is_reported_and_does_not_decide():
    resnet = stacked([0, 9, 3, 2, 7, 1, 2], model="resnet_micro", kinds=[*KINDS[:-1], "conv"])
    found = words(xr.concat([resnet, stacked(OPPOSITE)], dim="run", combine_attrs="override"))
    assert found["E19 conv alternet_micro"] == "contradicted"
    assert found["E19"] == "supported"


def test_the_excess_has_a_spread_where_ranks_are_the_same():
    runs = [stacked([0, 9 + seed, 3, 2, 7, 1, 2 + seed], seeds=1, model="resnet_micro", kinds=[*KINDS[:-1], "conv"])
            for seed in range(3)]  # fmt: skip
    ds = xr.concat(runs, dim="run", combine_attrs="override")
    found = {verdict.claim.id: verdict for verdict in lesion.verdicts(ds)}
    assert found["E19"].verdict == "inconclusive"
    excess = found["E19 excess conv resnet_micro"]
    # First stage 9, 10 and 11 less 2.5; second 7 less the mean of 1 and 2, 3 or 4.
    assert excess.value == pytest.approx(np.mean([(6.5 + 5.5) / 2, (7.5 + 5.0) / 2, (8.5 + 4.5) / 2]))
    assert (excess.verdict, found["E19 excess"].verdict) == ("supported", "supported")
    assert f"costs {excess.value:.1f} [{excess.low:.1f}, {excess.high:.1f}] points more" in found["E19"].detail


def test_the_published_excess():
    # Stage 2: 0.60 less 0.22; stage 3: 0.69 less the mean of 0.28, 0.17, 0.22, 0.30 and 0; stage 4: 1.07 less 1.00.
    assert lesion._published_excess("mlp") == "0.38, 0.50, 0.07"
    # 1.44 less 0.42; 0.56 less the mean of 0.23, 0.16, 0.39, 0.23 and 0.60; 1.88 less 1.09.
    assert lesion._published_excess("msa") == "1.02, 0.24, 0.79"


def test_blocks_that_change_the_grid_may_be_left_out():
    # Without the block of 7, the second stage has a convolution of 1 below an attention unit of 8; alone of its kind,
    # it is ranked among both.
    ds = stacked(CLAIMED, model="resnet_micro")
    (with_it,) = [v for v in lesion.judge(ds, lesion.CLAIMS["E19"]) if "conv" in v.claim.id]
    without = lesion.judge(ds, lesion.CLAIMS["E19"], subsampling=False)
    (without,) = [v for v in without if "conv" in v.claim.id]
    assert (with_it.value, without.value) == (1.0, 0.5)
    assert without.verdict == "inconclusive"


def test_equal_ranks_of_three_seeds_are_inconclusive_and_say_that_it_takes_six():
    found = lesion.verdicts(stacked(CLAIMED, seeds=3, model="resnet_micro"))
    verdict = next(v for v in found if v.claim.id.endswith("msa resnet_micro"))
    assert (verdict.verdict, verdict.needed) == ("inconclusive", 6)


def test_networks_without_stages_are_reported_and_do_not_decide():
    vit = stacked([0, 8, 1, 3, 9, 1, 8], kinds=["stem", *["msa", "mlp"] * 3], grids=[4] * 7, model="vit_micro")
    resnet = stacked(CLAIMED, model="resnet_micro")
    found = words(xr.concat([resnet, vit], dim="run", combine_attrs="override"))
    assert found["E19 mlp vit_micro"] == found["E19 msa vit_micro"] == "contradicted"
    assert found["E19"] == "supported"


def test_networks_that_did_not_learn_are_no_evidence():
    assert set(words(stacked(CLAIMED, accuracy=20.0, model="resnet_micro")).values()) == {"inconclusive"}


def test_smoke(smoke_run):
    wanted = ("resnet_nano", "alternet_nano")
    small = replace(lesion.STUDY, grid=lambda asked: [run for run in grid(asked) if run.model in wanted])
    path = smoke_run(small)
    ds = xr.load_dataset(path)
    alternet = ds.isel(run=int(np.flatnonzero(ds.model == "alternet_nano")[0]))
    attention = alternet.where(alternet.kind == "msa", drop=True)
    np.testing.assert_array_equal(attention.accuracy_change, attention.accuracy_change_convolution)
    assert (alternet.removed_convolution == alternet.removed).sum() < alternet.sizes["layer"]
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "E19 excess conv resnet_nano" in (path.parent / "claims_smoke.md").read_text()
