"""Sweeps of data and epochs: which runs belong to which, verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.park_kim import data_fraction
from studies.park_kim.data_fraction import SWEEPS, sweep, together, where_model
from vitprobe.results import load
from vitprobe.runs import DataSpec, Run
from vitprobe.study import Settings
from vitprobe.training import Recipe

# images, epochs, patch size; the first is the run around which the others go.
POINTS = [(1000, 20, 4), (100, 20, 4), (100, 200, 4), (300, 20, 4), (300, 67, 4), (1000, 5, 4), (1000, 20, 8)]


def stacked(loss_by_data: float, loss_by_epochs: float, *, seeds: int = 3, accuracy: float = 80.0) -> xr.Dataset:
    """A ViT whose error grows as data or epochs shrink, and its loss with so many nats a factor e."""
    rng = np.random.default_rng(0)
    rows = [(seed, *point) for seed in range(seeds) for point in POINTS]
    images, epochs = (np.array([row[column] for row in rows], dtype=float) for column in (1, 2))
    less_data, shorter = np.log(1000 / images), np.log(20 / epochs).clip(0)
    equal_images = epochs > 20
    loss = 1 + loss_by_data * less_data * np.where(equal_images, -1, 1) + loss_by_epochs * shorter
    coordinates = {name: ("run", [row[k] for row in rows]) for k, name in enumerate(("seed", "train_images", "epochs"))}
    return xr.Dataset(
        {
            "error": ("run", 20 + 5 * less_data + 5 * shorter + rng.normal(0, 0.1, len(rows))),
            "nll_train": ("run", loss + rng.normal(0, 0.01, len(rows))),
        },
        coords={
            **coordinates,
            "run": np.arange(len(rows)),
            "patch_size": ("run", [row[3] for row in rows]),
            "model": ("run", ["vit_micro"] * len(rows)),
            "accuracy": ("run", [accuracy] * len(rows)),
        },
        attrs={"classes": 10, "data": "made"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in data_fraction.verdicts(ds)}


@pytest.mark.parametrize(
    ("name", "values"),
    [("data", [1.0, 0.1, 0.3]), ("images", [1.0, 0.1, 0.3]), ("epochs", [20, 5]), ("patch_size", [4, 8])],
)
def test_sweeps_hold_what_changes_one_thing(name, values):
    found = sweep(stacked(1, 1, seeds=1), name)
    np.testing.assert_allclose(found.value, values)
    epochs = {"data": {20}, "images": {20, 200, 67}, "epochs": {20, 5}, "patch_size": {20}}
    assert set(found.epochs.values.tolist()) == epochs[name]


def test_together_is_the_correlation_within_a_seed():
    ds = stacked(1, 1)
    ds["error"] = ds.error + 100 * ds.seed  # what seeds have in common is no evidence
    found = together(sweep(ds, "data"))
    assert len(found) == 3 and min(found) > 0.99
    assert together(sweep(ds.assign(nll_train=0 * ds.nll_train), "data")) == [0.0] * 3


@pytest.mark.parametrize(
    ("by_data", "by_epochs", "whole"),
    [(1, 1, "supported"), (-1, 1, "contradicted"), (1, -1, "contradicted"), (1, 0, "inconclusive")],
)
def test_verdicts(by_data, by_epochs, whole):
    ds = stacked(by_data, by_epochs, seeds=6)
    found = verdicts(ds)
    assert found["E2"] == whole
    assert found["E2 images vit_micro"] == ("contradicted" if by_data > 0 else "supported")  # and decides nothing


def test_a_resnet_is_reported_and_does_not_decide():
    vit, resnet = stacked(1, 1, seeds=6), stacked(-1, -1, seeds=6)
    resnet["model"] = resnet.model.copy(data=["resnet_micro"] * resnet.sizes["run"])
    found = verdicts(xr.concat([resnet, vit], dim="run", combine_attrs="override"))
    assert (found["E2"], found["E2 data resnet_micro"]) == ("supported", "contradicted")


def test_only_the_whole_training_must_have_learned():
    ds = stacked(1, 1, seeds=6)
    whole = (ds.train_images == 1000) & (ds.epochs == 20) & (ds.patch_size == 4)
    assert verdicts(ds.assign_coords(accuracy=ds.accuracy.where(whole, 10.0)))["E2"] == "supported"
    assert verdicts(ds.assign_coords(accuracy=ds.accuracy.where(~whole, 10.0)))["E2"] == "inconclusive"


@pytest.mark.parametrize("scale", ["smoke", "quick"])
def test_grid(scale):
    runs = data_fraction.grid(Settings(scale=scale))
    keys = {run.key() for run in runs}
    assert len(keys) == len(runs)
    sweeps = SWEEPS[scale]
    per_model = 1 + len(sweeps.fractions) + len(sweeps.controls) + len(sweeps.lengths)
    assert len(runs) == 2 * (2 * per_model + len(sweeps.patches))


def test_variants_see_what_they_should():
    base = Run(model="vit_nano", data=DataSpec(spec="digits", train_size=200, test_size=50), recipe=Recipe(epochs=10))
    around = list(data_fraction._around(base, data_fraction.Sweeps((0.1, 0.5), (0.1, 0.5), (0.5, 2), (1,))))
    seen = [((run.data.train_size), run.recipe.epochs, run.options.get("patch_size")) for run in around]
    assert seen == [
        (200, 10, None), (20, 10, None), (20, 100, None), (100, 10, None), (100, 20, None), (200, 5, None),
        (200, 20, None), (200, 10, 1),
    ]  # fmt: skip
    assert [run.recipe.warmup_epochs for run in around[:3]] == [1, 1, 10]


def test_smoke_run(smoke_run):
    path = smoke_run(data_fraction.STUDY, train_size=40)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.sizes == {"run": 8}
    for model, patch in (("resnet_nano", 1), ("vit_nano", 2)):
        runs = where_model(ds, model)
        assert runs.patch_size.values.tolist() == [patch] * 4
        assert runs.train_images.values.tolist() == [40, 20, 20, 40]
        assert runs.epochs.values.tolist() == [1, 1, 2, 2]
        assert [sweep(runs, name).sizes["run"] for name in ("data", "images", "epochs")] == [2, 2, 2]
