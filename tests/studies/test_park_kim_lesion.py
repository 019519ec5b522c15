"""The study of lesions: ranks of stage beginnings and ends by hand and of the published network, verdicts, a run."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from studies.park_kim import lesion
from studies.park_kim.families import grid
from vitprobe.published import park_kim_2022
from vitprobe.study import Settings, run_study

KINDS = ["stem", "conv", "conv", "conv", "subsample", "conv", "msa"]
GRIDS = [8, 8, 8, 8, 4, 4, 4]
CLAIMED = [0.0, 9, 3, 2, 7, 1, 8]  # points lost
OPPOSITE = [0.0, 1, 3, 2, 1, 5, 0]


class Here:
    """An executor in this process: spawning costs more than the study."""

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


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
    assert lesion.place_ranks(lost, kinds, stages, "mlp") == [1.0]
    assert lesion.place_ranks(lost, kinds, stages, "msa") == [1.0]
    assert lesion.place_ranks(lost, kinds, stages, "conv") == []
    # Alone of its kind it is ranked among all; alone in its stage it has no rank.
    assert lesion.place_ranks(lost[:4], ["conv", "conv", "conv", "msa"], [0, 0, 0, 0], "msa") == [2 / 3]
    assert lesion.place_ranks(lost[:4], ["conv", "conv", "conv", "msa"], [0, 0, 0, 1], "msa") == []


def test_ranks_of_the_published_swin():
    swin = [unit for unit in park_kim_2022()["lesion_swin_ti"] if unit["stage"] > 1]
    lost = np.array([-unit["delta_acc_pct"] for unit in swin])
    kinds, stages = [unit["unit"].lower() for unit in swin], [unit["stage"] for unit in swin]
    # Every stage begins with the MLP that matters most.
    assert lesion.place_ranks(lost, kinds, stages, "mlp") == [1.0, 1.0, 1.0]
    # Stages 2 and 4 end with the attention unit that matters most; in stage 3 one of six costs 0.60, the last 0.56.
    assert lesion.place_ranks(lost, kinds, stages, "msa") == pytest.approx([1.0, 4 / 5, 1.0])


def test_what_was_not_removed_is_not_ranked():
    lost = np.array([np.nan, 1.0, 2.0, 3.0])
    assert lesion.place_ranks(lost, ["conv"] * 4, [0] * 4, "conv") == [0.0]


def test_a_stage_begins_where_either_side_of_the_grid_changes():
    np.testing.assert_array_equal(lesion.stage_of(np.array([[8, 8], [8, 8], [8, 4], [4, 4], [4, 4]])), [0, 0, 1, 2, 2])


def test_verdicts():
    found = words(stacked(CLAIMED))
    assert found["E19"] == found["E19 conv alternet_micro"] == found["E19 msa alternet_micro"] == "supported"
    found = words(stacked(OPPOSITE))
    assert found["E19"] == found["E19 convolution"] == "contradicted"


def test_blocks_that_change_the_grid_may_be_left_out():
    # Without the block of 7, the second stage has a convolution of 1 below an attention unit of 8; alone of its kind,
    # it is ranked among both.
    (with_it,) = [v for v in lesion.judge(stacked(CLAIMED), lesion.CLAIMS["E19"]) if "conv" in v.claim.id]
    without = lesion.judge(stacked(CLAIMED), lesion.CLAIMS["E19"], subsampling=False)
    (without,) = [v for v in without if "conv" in v.claim.id]
    assert (with_it.value, without.value) == (1.0, 0.5)
    assert without.verdict == "inconclusive"


def test_equal_ranks_of_three_seeds_are_inconclusive_and_say_that_it_takes_six():
    verdict = next(v for v in lesion.verdicts(stacked(CLAIMED, seeds=3)) if v.claim.id.endswith("msa alternet_micro"))
    assert (verdict.verdict, verdict.needed) == ("inconclusive", 6)


def test_networks_without_stages_are_reported_and_do_not_decide():
    vit = stacked([0, 8, 1, 3, 9, 1, 8], kinds=["stem", *["msa", "mlp"] * 3], grids=[4] * 7, model="vit_micro")
    found = words(xr.concat([stacked(CLAIMED), vit], dim="run", combine_attrs="override"))
    assert found["E19 mlp vit_micro"] == found["E19 msa vit_micro"] == "contradicted"
    assert found["E19"] == "supported"


def test_networks_that_did_not_learn_are_no_evidence():
    assert set(words(stacked(CLAIMED, accuracy=20.0)).values()) == {"inconclusive"}


def test_smoke(tmp_path):
    settings = Settings(scale="smoke", out=tmp_path / "out", cache=tmp_path / "cache", workers=1, seeds=1)
    wanted = ("vit_nano", "alternet_nano")
    small = replace(lesion.STUDY, grid=lambda asked: [run for run in grid(asked) if run.model in wanted])
    path = run_study(small, settings, executor=Here())
    ds = xr.load_dataset(path)
    vit, alternet = (ds.isel(run=int(np.flatnonzero(ds.model == name)[0])) for name in wanted)
    np.testing.assert_array_equal(vit.accuracy_change, vit.accuracy_change_convolution)
    assert (alternet.removed_convolution == alternet.removed).sum() < alternet.sizes["layer"]
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "E19 inner units" in (path.parent / "claims_smoke.md").read_text()
