"""Attention by stage: the network of equal size, verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.park_kim import placement
from studies.park_kim.placement import PLACEMENTS, same_size
from vitprobe.models import create_model
from vitprobe.results import load
from vitprobe.study import Settings

KINDS = {"0 0 0": 0.0, "0 0 2": 0.5, "0 1 2": 0.0, "0 2 2": 0.0, "matched": 0.0}


def stacked(
    alternet: float, matched: float, crowded: float, *, robust: float | None = 1.0, seeds: int = 3
) -> xr.Dataset:
    """Gains over the blocks without attention, in percentage points, and on corrupted images over equal size."""
    rng = np.random.default_rng(0)
    gains = {**KINDS, "0 1 2": alternet, "matched": matched, "0 2 2": crowded}
    rows = [(seed, kind) for seed in range(seeds) for kind in gains]
    level = rng.normal(0, 3, seeds)  # what a seed's networks have in common
    accuracy = [70 + level[seed] + gains[kind] + rng.normal(0, 0.01) for seed, kind in rows]
    corrupted = [50 + level[seed] + rng.normal(0, 0.01) + (robust or 0) * (kind == "0 1 2") for seed, kind in rows]
    names = [kind if kind != "matched" else "0 0 0" for _, kind in rows]
    return xr.Dataset(
        {"robustness": ("run", corrupted if robust is not None else [np.nan] * len(rows))},
        coords={
            "run": np.arange(len(rows)),
            "seed": ("run", [seed for seed, _ in rows]),
            "placement": ("run", names),
            "attention_blocks": ("run", [sum(map(int, name.split())) for name in names]),
            "matched": ("run", [int(kind == "matched") for _, kind in rows]),
            "model": ("run", ["alternet_micro"] * len(rows)),
            "accuracy": ("run", accuracy),
            "parameters": ("run", [1000] * len(rows)),
        },
        attrs={"classes": 10, "alternet": "0 1 2", "crowded": "0 2 2", "uncrowded": "0 1 2"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in placement.verdicts(ds)}


@pytest.mark.parametrize(
    ("gains", "whole"),
    [
        ((1.5, 0.5, 1.0), "supported"),
        ((1.5, 2.0, 1.0), "contradicted"),  # it is size that helps
        ((1.5, 0.5, 2.0), "contradicted"),  # more of it helps more
        ((-1.0, -2.0, -2.0), "contradicted"),
        ((1.5, 0.5, 1.5), "inconclusive"),
    ],
)
def test_verdicts_on_placement(gains, whole):
    assert verdicts(stacked(*gains))["E20"] == whole


@pytest.mark.parametrize(
    ("matched", "robust", "whole"),
    [(0.5, 1.0, "supported"), (0.5, -1.0, "contradicted"), (2.0, 1.0, "contradicted"), (0.5, None, "inconclusive")],
)
def test_verdicts_on_accuracy_and_robustness(matched, robust, whole):
    found = verdicts(stacked(1.5, matched, 1.0, robust=robust))
    assert found["E21 accuracy"] == whole
    assert ("E21 corrupted" in found) == (robust is not None)


def test_networks_that_did_not_learn_are_no_evidence():
    ds = stacked(1.5, 0.5, 1.0)
    ds["accuracy"] = ds.accuracy - 40
    assert set(verdicts(ds).values()) == {"inconclusive"}


def test_same_size_of_a_known_count():
    # A network of 3 w0^2 + 5 w1^2 parameters; proportions 1 to 2 give 23 w0^2.
    def count(widths):
        return 3 * widths[0] ** 2 + 5 * widths[1] ** 2

    assert same_size(count, (100, 200), target=count((70, 140)), step=1) == (70, 140)
    assert same_size(count, (100, 200), target=count((148, 296)), step=4) == (148, 296)


@pytest.mark.parametrize("scale", ["smoke", "quick"])
def test_grid(scale):
    runs = placement.grid(Settings(scale=scale))
    placements = PLACEMENTS[scale]
    seeds = {run.recipe.seed for run in runs}
    assert len({run.key() for run in runs}) == len(runs) == len(seeds) * (len(placements.attentions) + 1)
    sizes = {
        (run.options["attentions"], run.options["widths"]): sum(
            p.numel() for p in create_model(run.model, image_size=8, channels=1, **run.options).parameters()
        )
        for run in runs[: len(placements.attentions) + 1]
    }
    *_, matched = sizes.values()
    assert matched == pytest.approx(sizes[placements.alternet, placements.widths], rel=0.03)
    assert sizes[placements.attentions[0], placements.widths] > 1.3 * matched


@pytest.mark.parametrize("placements", PLACEMENTS.values())
def test_placements_are_possible_and_judged_ones_are_among_them(placements):
    assert {placements.alternet, placements.crowded, placements.uncrowded} <= set(placements.attentions)
    assert not any(placements.attentions[0])
    for attentions in placements.attentions:
        assert all(2 * some <= blocks for some, blocks in zip(attentions, placements.blocks, strict=True))


def test_smoke_run(smoke_run):
    path = smoke_run(placement.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.placement.values.tolist() == ["0 0", "1 2", "2 2", "0 0"]
    assert ds.matched.values.tolist() == [0, 0, 0, 1]
    assert np.isnan(ds.robustness).all()  # digits are too small to be corrupted
