"""Strength of locality, number of gated layers and no gates: verdicts on made datasets, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.dascoli import strength
from studies.dascoli.pair import convit, seeds, vit
from vitprobe.models import create_model
from vitprobe.results import load
from vitprobe.study import Settings

NONE, PSA = (0, float("nan"), 0), (5, 1.0, 0)
KINDS = [NONE, (5, 1.0, 1), (2, 1.0, 1), (5, 0.01, 1), (5, 0.1, 1), PSA]  # layers, strength, gates
EARLY = {NONE: 20.0, PSA: 28.0}
LATE = {NONE: 50.0, PSA: 45.0, (2, 1.0, 1): 53.0, (5, 0.01, 1): 51.0, (5, 0.1, 1): 54.0, (5, 1.0, 1): 57.0}


def stacked(
    early: dict[tuple[float, ...], float] | None = None,
    late: dict[tuple[float, ...], float] | None = None,
    *,
    count: int = 3,
    epochs: int = 20,
) -> xr.Dataset:
    """All as claimed but for what is given, at a tenth of the epochs and in the end; 35 early unless said."""
    early, late = EARLY | (early or {}), LATE | (late or {})
    rng = np.random.default_rng(0)
    rows = [(seed, kind) for seed in range(count) for kind in KINDS]
    at = [round(0.1 * epochs), epochs // 4, epochs // 2, epochs]
    ends = [(early.get(kind, 35.0), late[kind]) for _, kind in rows]
    curves = np.array([[low, (low + high) / 2, high - 1, high] for low, high in ends]) + rng.normal(
        0, 0.1, (len(rows), 4)
    )
    layers, strong, gates = (list(column) for column in zip(*(kind for _, kind in rows), strict=True))
    return xr.Dataset(
        {"test_accuracy": (("run", "epoch"), curves / 100)},
        {
            "run": range(len(rows)),
            "epoch": at,
            "seed": ("run", [seed for seed, _ in rows]),
            "layers": ("run", layers),
            "strength": ("run", strong),
            "gates": ("run", gates),
            "accuracy": ("run", curves[:, -1]),
        },
        {"classes": 10, "data": "made"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in strength.verdicts(ds)}


def test_all_as_claimed():
    found = verdicts(stacked())
    assert list(found) == ["D6", "D6 layers", "D6 strength", "D6 early", "D8", "D8 early", "D8 lost"]
    assert set(found.values()) == {"supported"}


@pytest.mark.parametrize(
    ("early", "late", "part", "expected"),
    [
        ({}, {NONE: 60.0, (2, 1.0, 1): 58.0}, "D6 layers", "contradicted"),
        ({}, {NONE: 57.0, (2, 1.0, 1): 57.0}, "D6 layers", "inconclusive"),
        ({}, {(5, 0.01, 1): 60.0, (5, 0.1, 1): 58.0}, "D6 strength", "contradicted"),
        ({NONE: 35.0}, {}, "D6 early", "inconclusive"),  # nothing after 2 epochs of 20, a gain in the end
        ({PSA: 15.0}, {}, "D8 early", "contradicted"),
        ({}, {PSA: 55.0}, "D8 lost", "inconclusive"),  # ahead after 20 epochs
    ],
)
def test_parts_decide(early, late, part, expected):
    found = verdicts(stacked(early, late))
    assert found[part] == found[part.partition(" ")[0]] == expected


def test_what_may_come_later_contradicts_in_a_long_training():
    assert verdicts(stacked(late={PSA: 55.0}, epochs=200))["D8 lost"] == "contradicted"
    assert verdicts(stacked({NONE: 35.0}, epochs=200))["D6 early"] == "contradicted"


def test_a_head_start_compares_the_same_images():
    """Those seen after every epoch are few, and another network may be ahead on them than on all."""
    ds = stacked()
    more = ds.assign_coords(accuracy=ds.accuracy + np.where(ds.layers == 0, 5.0, 0.0))
    found = [next(v for v in strength.verdicts(each) if v.claim.id == "D6 early") for each in (ds, more)]
    assert found[0].value == found[1].value


def test_slopes_are_points_per_layer_and_per_decade():
    by_name = {verdict.claim.id: verdict for verdict in strength.verdicts(stacked(late={(2, 1.0, 1): 52.8}))}
    assert by_name["D6 layers"].value == pytest.approx(7 / 5, abs=0.05)
    assert by_name["D6 strength"].value == pytest.approx(3, abs=0.1)
    assert by_name["D6 early"].value == pytest.approx(35 / 20 - 57 / 50, abs=0.02)


def test_no_evidence_from_one_seed_or_without_learning():
    assert set(verdicts(stacked(count=1)).values()) == {"inconclusive"}
    found = verdicts(stacked(late={PSA: 30.0}))
    assert {found[name] for name in ("D8", "D8 early", "D8 lost")} == {"inconclusive"}
    assert found["D6"] == "supported"  # which the network without gates has no part in
    assert verdicts(stacked(late={NONE: 30.0}))["D6"] == "inconclusive"


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grid(scale):
    settings = Settings(scale=scale, seeds=2)
    runs = strength.grid(settings)
    half = len(runs) // 2
    assert [run.recipe.seed for run in runs] == [0] * half + [1] * half
    assert len({str((run.model, run.options)) for run in runs[:half]}) == half
    assert half == {"smoke": 4, "quick": 6, "cpu": 5, "paper": 11}[scale]
    base = seeds(settings)[0]
    assert runs[:2] == [vit(base, settings), convit(base, settings)]  # those of the other studies
    assert not any(run.recipe.snapshots for run in runs[2:half])
    assert {run.data for run in runs} == {base.data}


@pytest.mark.parametrize("scale", ["smoke", "cpu"])
def test_most_layers_are_the_networks_own(scale):
    """So that the whole ConViT has its place in the sweep of layers."""
    settings = Settings(scale=scale)
    run = convit(seeds(settings)[0], settings)
    side, channels = (8, 1) if scale == "smoke" else (32, 3)
    model = create_model(run.model, image_size=side, channels=channels, seed=0, **run.options)
    assert len(model.local_blocks) == strength.SWEEPS[scale].layers[-1]


def test_smoke_run(smoke_run):
    path = smoke_run(strength.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.layers.values.tolist() == [0, 3, 3, 3]
    assert ds.gates.values.tolist() == [0, 1, 1, 0]
    assert np.isnan(ds.strength.values[0]) and ds.strength.values[1:].tolist() == [1, 0.1, 1]
