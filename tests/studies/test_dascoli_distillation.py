"""Distillation of ViT and ConViT: verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.dascoli import distillation, masking
from vitprobe.results import load
from vitprobe.study import Settings


def stacked(
    vit: float = 1.15,
    convit: float = 0.7,
    *,
    seeds: int = 3,
    accuracy: float = 80.0,
    teacher: float = 82.9,
    fitted: float = 90.0,
) -> xr.Dataset:
    """What a teacher adds on average to ViT and ConViT [points]; seeds differ in that, and by a level of their own."""
    rows = [(seed, taught, model) for seed in range(seeds) for taught in (0, 1) for model in (0, 1)]
    level = np.arange(seeds) - (seeds - 1) / 2
    values = [
        accuracy + 2 * model + 3 * level[seed] + taught * ((vit, convit)[model] + (0.1, 0.05)[model] * level[seed])
        for seed, taught, model in rows
    ]
    layers = np.array([
        [2 + 0.3 * layer - 0.2 * taught - 0.5 * model for layer in range(4)] for _, taught, model in rows
    ])
    return xr.Dataset(
        {
            "error": ("run", 100 - np.array(values)),
            "layer_nonlocality": (("run", "layer"), layers),
            "uniform_nonlocality": (("run", "layer"), np.full_like(layers, 4.14)),
        },
        coords={
            "run": np.arange(len(rows)),
            "seed": ("run", [row[0] for row in rows]),
            "taught": ("run", [row[1] for row in rows]),
            "model": ("run", [("vit_micro", "convit_micro")[row[2]] for row in rows]),
            "accuracy": ("run", values),
            "teacher_accuracy": ("run", [teacher if row[1] else np.nan for row in rows]),
            "teacher_fitted": ("run", [fitted if row[1] else np.nan for row in rows]),
        },
        attrs={"classes": 10, "data": "made"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in distillation.verdicts(ds)}


@pytest.mark.parametrize(
    ("vit", "convit", "expected"),
    [
        (1.15, 0.7, ("supported", "supported", "supported", "supported")),
        (1, 2, ("contradicted", "supported", "contradicted", "supported")),
        (1, -1, ("contradicted", "contradicted", "supported", "supported")),
        (1, 1, ("inconclusive", "supported", "inconclusive", "supported")),
        (-1, -2, ("contradicted", "contradicted", "supported", "contradicted")),
    ],
)
def test_verdicts(vit, convit, expected):
    found = verdicts(stacked(vit, convit))
    assert tuple(found[name] for name in ("D11", "D11 ConViT", "D11 less", "D11 ViT")) == expected


def test_one_seed_and_networks_that_did_not_learn_are_no_evidence():
    assert set(verdicts(stacked(seeds=1)).values()) == {"inconclusive"}
    assert set(verdicts(stacked(accuracy=34.0)).values()) == {"inconclusive"}


def test_a_teacher_that_has_nothing_to_give_is_no_evidence():
    assert verdicts(stacked(fitted=97.9))["D11"] == "supported"
    for useless in ({"fitted": 98.1}, {"teacher": 60.0}, {"teacher": 81.5}):  # 81.5: not better than the ConViT
        assert set(verdicts(stacked(**useless)).values()) == {"inconclusive"}
    assert "decides as the labels" in distillation.verdicts(stacked(fitted=99.0))[1].detail


def test_published_gains_and_the_teacher_are_said():
    found = {verdict.claim.id: verdict for verdict in distillation.verdicts(stacked())}
    assert found["D11 ViT"].claim.published == "+1.1 and +1.2 points"
    assert found["D11 ConViT"].claim.published == "+0.7 points"
    assert found["D11 less"].claim.published == "+0.4 and +0.5 points"
    assert found["D11 less"].value == pytest.approx(0.45)
    assert "teacher 82.9 %" in found["D11"].detail


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grid_differs_in_nothing_but_the_teacher(scale):
    runs = distillation.grid(Settings(scale=scale))
    shared = masking.STUDY.grid(Settings(scale=scale))
    assert [run for run in runs if run.teacher is None] == shared
    taught = [run for run in runs if run.teacher is not None]
    for run, alone in zip(taught, shared, strict=True):
        assert (run.model, run.options, run.data) == (alone.model, alone.options, alone.data)
        assert (run.recipe.distillation, alone.recipe.distillation) == (0.5, 0)
        assert run.recipe.seed == alone.recipe.seed == run.teacher.recipe.seed
        assert "resnet" in run.teacher.model and run.teacher.data == run.data
    assert len({run.teacher.recipe.seed for run in taught}) == len(taught) // 2


def test_smoke_run(smoke_run):
    path = smoke_run(distillation.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.taught.values.tolist() == [0, 0, 1, 1]
    assert np.isfinite(ds.teacher_accuracy.values).tolist() == [False, False, True, True]
    assert len(set(ds.nll_clean.values.tolist())) == 4
    assert ((ds.layer_nonlocality > 0) & (ds.layer_nonlocality < ds.sizes["layer"])).all()
