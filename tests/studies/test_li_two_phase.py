"""Two-phase training: the arms, verdicts on datasets made by hand, and smoke runs."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.li import stability, two_phase
from studies.li.arms import ARMS, CONVOLUTION, SCRATCH, TWICE, TWO_PHASES, arm
from vitprobe.models import create_model
from vitprobe.results import load
from vitprobe.study import Settings

SCALES = ["smoke", "quick", "cpu", "paper"]


def stacked(
    *, handed: float = -0.1, first: float = 40.0, seeds: int = 3, level: float = 60.0, **less: float
) -> xr.Dataset:
    """Arms that are so many points below two phases; the hand-over changes the accuracy by `handed`."""
    below = {TWO_PHASES: 0.0, SCRATCH: less.get("scratch", 3.0), CONVOLUTION: less.get("convolution", 2.0)}
    below[TWICE] = less.get("twice", 2.0)
    rng = np.random.default_rng(0)
    common = rng.normal(0, 4, seeds)  # what a seed's networks share
    rows = [(seed, name) for seed in range(seeds) for name in below]
    accuracy = [level + common[seed] - below[name] + rng.normal(0, 0.05) for seed, name in rows]
    first_phase = np.full(len(rows), first)
    return xr.Dataset(
        {
            "test_accuracy": (("run", "epoch"), np.array(accuracy)[:, None] / 100 * np.linspace(0.4, 1, 4)),
            "error_se": ("run", np.full(len(rows), 1.0)),
            "seconds": ("run", [98.0 if name == TWO_PHASES else 100.0 for _, name in rows]),
            "first_accuracy": ("run", first_phase),
            "handed_accuracy": ("run", first_phase + handed + rng.normal(0, 0.02, len(rows))),
            "relative_gap": ("run", np.full(len(rows), 0.03)),
            "agreement": ("run", np.full(len(rows), 0.99)),
        },
        coords={
            "run": np.arange(len(rows)),
            "epoch": [1, 2, 3, 4],
            "arm": ("run", [name for _, name in rows]),
            "seed": ("run", [seed for seed, _ in rows]),
            "accuracy": ("run", accuracy),
            "first_epochs": ("run", [2 if name in (TWO_PHASES, TWICE) else 0 for _, name in rows]),
            "train_images": ("run", np.full(len(rows), 500)),
            "test_images": ("run", np.full(len(rows), 300)),
        },
        attrs={"classes": 10, "data": "made"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in two_phase.verdicts(ds)}


@pytest.mark.parametrize(
    ("options", "l3", "l4"),
    [
        ({}, "supported", "supported"),
        ({"scratch": -3.0}, "contradicted", "supported"),
        ({"scratch": 0.0}, "inconclusive", "supported"),
        ({"handed": -2.0}, "supported", "contradicted"),
        ({"handed": -0.5}, "supported", "inconclusive"),
        ({"convolution": -1.0}, "supported", "contradicted"),
        ({"twice": -1.0}, "supported", "contradicted"),
        ({"twice": 0.0}, "supported", "inconclusive"),
        ({"seeds": 1}, "inconclusive", "inconclusive"),
        ({"level": 30.0}, "inconclusive", "inconclusive"),
        ({"first": 12.0}, "supported", "inconclusive"),  # what is handed over is no trained network
    ],
)
def test_verdicts(options, l3, l4):
    found = verdicts(stacked(**options))
    assert (found["L3"], found["L4"]) == (l3, l4)


def test_only_the_arms_that_are_compared_must_have_learned():
    ds = stacked(scratch=30.0)  # 30 %
    assert verdicts(ds) == {
        "L3": "inconclusive",
        "L4": "supported",
        "L4 hand-over": "supported",
        "L4 less convolution": "supported",
        "L4 less convolution, twice": "supported",
    }


def test_time_is_told():
    assert "in 0.98 of the wall time" in two_phase.verdicts(stacked())[0].detail


@pytest.mark.parametrize("scale", SCALES)
def test_arms_differ_in_nothing_else(scale):
    runs = two_phase.grid(Settings(scale=scale))
    assert [arm(run) for run in runs[:4]] == list(ARMS)
    assert len(runs) == 4 * len({run.recipe.seed for run in runs}) >= 8
    for run in runs:
        assert run.recipe.epochs + (run.start.recipe.epochs if run.start else 0) == runs[1].recipe.epochs
        assert run.start is None or (run.start.recipe.seed, run.start.data) == (run.recipe.seed, run.data)
        assert run.data == runs[0].data and not run.options
    assert runs[0].start == runs[3].start and runs[0].recipe == runs[3].recipe
    assert runs[0].model == runs[1].model != runs[2].model == runs[3].model
    assert runs[0].data.spec == {"cpu": "cifar10", "paper": "cifar100"}.get(scale, "digits")


@pytest.mark.parametrize(("scale", "size", "channels"), [("quick", 8, 1), ("cpu", 32, 3)])
def test_the_networks_have_nine_heads_on_a_grid_of_patches(scale, size, channels):
    names = {run.model for run in two_phase.grid(Settings(scale=scale))}
    models = [create_model(name, image_size=size, channels=channels, seed=0) for name in sorted(names)]
    assert {model.blocks[0].attention.heads for model in models} == {9}
    assert {model.patches.grid for model in models} == {(4, 4) if size == 8 else (8, 8)}


def test_both_phases_are_one_curve(smoke_run):
    path = smoke_run(two_phase.STUDY, train_size=60)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.arm.values.tolist() == list(ARMS)
    whole, parts = (ds.test_accuracy.sel(run=ds.arm.values == name).values for name in (SCRATCH, TWO_PHASES))
    assert np.isfinite(whole).all() and np.isfinite(parts).all()
    both = ds.isel(run=0)
    assert both.epoch.values.tolist() == [1, 2] and (int(both.epochs), int(both.first_epochs)) == (2, 1)
    # Before the hand-over it is what the first phase ended with, and in the end what the second one did.
    assert float(both.first_accuracy) == pytest.approx(100 * float(both.test_accuracy[0]))
    assert float(both.accuracy) == pytest.approx(100 * float(both.test_accuracy[-1]))
    assert 0 < float(both.relative_gap) < 0.5
    assert float(ds.relative_gap[3]) == 0 and np.isnan(ds.relative_gap.values[1:3]).all()


# --- learning rates ---------------------------------------------------------------------------------


def swept(two: list[float], scratch: list[float], *, seeds: int = 3, diverged: int = 0) -> xr.Dataset:
    """Accuracies by learning rate, which seeds change a little."""
    rng = np.random.default_rng(0)
    rows = [
        (seed, name, rate, value + rng.normal(0, 1))
        for seed in range(seeds)
        for name, values in ((TWO_PHASES, two), (SCRATCH, scratch))
        for rate, value in zip((1e-3, 4e-3, 2.5e-4), values, strict=True)
    ]
    seed, name, rate, accuracy = (list(column) for column in zip(*rows, strict=True))
    return xr.Dataset(
        {"diverged": ("run", [1.0] * diverged + [0.0] * (len(rows) - diverged))},
        {
            "run": range(len(rows)),
            "seed": ("run", seed),
            "arm": ("run", name),
            "lr": ("run", rate),
            "accuracy": ("run", accuracy),
        },
        {"classes": 10, "data": "made", "epochs": 4, "train_images": 500},
    )


@pytest.mark.parametrize(
    ("two", "scratch", "expected"),
    [
        ([50, 40, 45], [50, 15, 30], "supported"),
        ([50, 15, 30], [50, 40, 45], "contradicted"),
        ([50, 40, 45], [30, 25, 28], "inconclusive"),  # both keep 0.75
        ([50, 40, 45], [15, 10, 12], "inconclusive"),  # nothing learned that could be lost
    ],
)
def test_verdict_on_stability(two, scratch, expected):
    (verdict,) = stability.verdicts(swept(two, scratch))
    assert (verdict.claim.id, verdict.verdict) == ("L5", expected)


def test_share_is_of_what_is_above_chance():
    ds = swept([50, 30, 45], [50, 5, 40], seeds=1, diverged=1)
    assert stability.kept(ds, TWO_PHASES) == pytest.approx(20 / 40, abs=0.1)
    assert stability.kept(ds, SCRATCH).tolist() == [0]
    (verdict,) = stability.verdicts(ds)
    assert verdict.verdict == "inconclusive" and "1 trainings diverged" in verdict.detail


@pytest.mark.parametrize("scale", SCALES)
def test_grid_of_learning_rates(scale):
    runs = stability.grid(Settings(scale=scale))
    told_apart = {(arm(run), run.recipe.lr, run.recipe.seed) for run in runs}
    assert len(runs) == len(told_apart) == (12 if scale == "smoke" else 18)
    usual = two_phase.grid(Settings(scale=scale))[0].recipe.lr
    assert {run.recipe.lr / usual for run in runs} == set(stability.FACTORS)
    assert {run.start.recipe.lr / run.recipe.lr for run in runs if run.start} == {1.0}
    total = {run.recipe.epochs + (run.start.recipe.epochs if run.start else 0) for run in runs}
    assert total == {stability.EPOCHS[scale]}


def test_a_loss_that_is_not_finite_counts_as_chance(monkeypatch):
    def diverges(run, settings):
        raise FloatingPointError("nan")

    monkeypatch.setattr(stability, "outcome_of_both", diverges)
    settings = Settings(scale="smoke", seeds=1)
    ds = stability.measure(stability.grid(settings)[0], settings)
    assert (float(ds.accuracy), float(ds.diverged)) == (10, 1)


def test_smoke_run_of_learning_rates(smoke_run, monkeypatch):
    monkeypatch.setattr(stability, "FACTORS", (1.0, 4.0))
    path = smoke_run(stability.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    assert load(path).lr.values.tolist() == [1e-3, 1e-3, 4e-3, 4e-3]
