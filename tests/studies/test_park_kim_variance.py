"""The study of variance: peaks of stages made by hand and published, their verdicts, and a run of it."""

from dataclasses import replace

import numpy as np
import xarray as xr

from studies.park_kim import variance
from studies.park_kim.families import grid
from vitprobe.published import park_kim_2022

GRIDS = [8, 8, 8, 8, 4, 4, 2]  # a stem, stages of three and of two units, and one of a single unit
RISING = [9.0, 1, 2, 3, 1, 2, 5]
FALLING = [0.0, 3, 2, 1, 2, 1, 5]


def stacked(*seeds, model="resnet_micro", grids=GRIDS, accuracy=60.0) -> xr.Dataset:
    """One run for each row of variances."""
    runs, layers = ("run",), ("run", "layer")
    n = len(seeds)
    return xr.Dataset(
        {"variance": (layers, np.array(seeds, dtype=float))},
        coords={
            "layer_name": (layers, [[f"unit{i}" for i in range(len(grids))]] * n),
            "grid_h": (layers, [grids] * n),
            "grid_w": (layers, [grids] * n),
            "model": (runs, [model] * n),
            "accuracy": (runs, [accuracy] * n),
        },
        attrs={"classes": 10},
    )


def judged(ds: xr.Dataset) -> dict:
    return {verdict.claim.id: verdict for verdict in variance.judge_peaks(ds, "variance", variance.CLAIMS["E17"])}


def test_peaks_by_hand():
    stages = np.array([0, 0, 0, 0, 1, 1, 2])
    # The stem's 9 does not count, and the last stage has nothing to choose from.
    assert variance.peaks(np.array(RISING), stages) == [(True, 3), (True, 2)]
    assert variance.peaks(np.array([0, 1, 3, 2, 1, 2, 0.0]), stages) == [(False, 3), (True, 2)]


def test_published_stages_all_peak_at_their_ends():
    values = np.array(park_kim_2022()["variance_resnet50_cifar100"])
    stages = np.repeat([0, 1, 2, 3], [4, 4, 6, 3])  # with the stem
    assert variance.peaks(values, stages) == [(True, 3), (True, 4), (True, 6), (True, 3)]


def test_the_share_is_judged_against_chance():
    found = judged(stacked(*[RISING] * 6))
    assert (found["E17"].verdict, found["E17"].value) == ("supported", 1.0)
    assert f"above {(1 / 3 + 1 / 2) / 2:g}" in found["E17"].rule
    assert judged(stacked(*[FALLING] * 6))["E17"].verdict == "contradicted"
    three = judged(stacked(*[RISING] * 3))["E17"]
    assert (three.verdict, three.needed) == ("inconclusive", 6)
    assert judged(stacked(RISING, RISING, FALLING))["E17"].verdict == "inconclusive"


def test_a_network_that_did_not_learn_is_no_evidence():
    assert judged(stacked(*[RISING] * 6, accuracy=20.0))["E17"].verdict == "inconclusive"


def test_others_with_stages_are_reported_and_those_without_are_not():
    swin = stacked(*[FALLING] * 6, model="swin_micro")
    vit = stacked(*[RISING] * 6, model="vit_micro", grids=[4] * 7)
    found = judged(xr.concat([swin, vit, stacked(*[RISING] * 6)], dim="run", combine_attrs="override"))
    assert {name: one.verdict for name, one in found.items()} == {
        "E17": "supported",
        "E17 swin_micro": "contradicted",
    }


def test_smoke(smoke_run):
    wanted = ("resnet_nano", "vit_nano")
    small = replace(variance.STUDY, grid=lambda asked: [run for run in grid(asked) if run.model in wanted])
    path = smoke_run(small)
    axes = variance.draw(xr.load_dataset(path)).get_axes()
    assert [ax.get_title().partition("\n")[0] for ax in axes] == ["ResNet-50", "ResNet nano", "ViT-Ti", "ViT nano"]
    rings = [line.get_xydata()[0] for line in axes[0].lines if line.get_markersize() == 6]
    # The last of 3, 4, 6 and 3 blocks.
    expected = [(3 / 16, 0.455), (7 / 16, 0.765), (13 / 16, 0.836), (1, 0.209)]
    np.testing.assert_allclose(rings, expected)
    assert [line for line in axes[2].lines if line.get_markersize() == 6] == []
    text = (path.parent / "claims_smoke.md").read_text()
    assert "E16 normalised" in text and "E17 normalised" in text
