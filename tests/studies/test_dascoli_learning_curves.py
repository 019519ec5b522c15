"""Curves of the trainings that other studies make: the grid, means and intervals by hand, a smoke run."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.dascoli import ablations, learning_curves, sample_efficiency
from studies.dascoli.ablations import ROWS
from studies.dascoli.learning_curves import BY_SHARE, LINES, curves, draw, passes
from studies.outcomes import watched, where
from vitprobe.results import load
from vitprobe.study import Settings


def stacked(*, seeds: int = 3) -> xr.Dataset:
    """All rows with 100 images and 4 epochs, ViT and ConViT also with 25 and 16."""
    rows = [(seed, row, 100) for seed in range(seeds) for row in ROWS] + [
        (seed, row, 25) for seed in range(seeds) for row in "ea"
    ]
    epochs = np.arange(1, 17)
    accuracy = np.array([
        (0.5 + 0.01 * list(ROWS).index(row) + 0.1 * seed) * (1 - np.exp(-epochs * images / 100))
        for seed, row, images in rows
    ])
    accuracy[[images == 100 for _, _, images in rows], 4:] = np.nan
    return xr.Dataset(
        {"test_accuracy": (("run", "epoch"), accuracy)},
        {
            "epoch": epochs,
            "seed": ("run", [seed for seed, _, _ in rows]),
            "row": ("run", [row for _, row, _ in rows]),
            "train_images": ("run", [images for _, _, images in rows]),
            # Of more images than the curves are of, hence not their ends.
            "accuracy": ("run", 100 * np.nanmax(accuracy, axis=1) - 1),
        },
        {"data": "made"},
    )


@pytest.mark.parametrize(("scale", "runs"), [("smoke", 18), ("quick", 27), ("cpu", 42), ("paper", 60)])
def test_grid_is_that_of_both_studies_without_repetition(scale, runs, monkeypatch):
    monkeypatch.setattr(ablations, "load", lambda spec: type("Images", (), {"train": range(1000)}))
    settings = Settings(scale=scale)
    found, theirs = learning_curves.grid(settings), [*sample_efficiency.grid(settings), *ablations.grid(settings)]
    assert len(found) == runs
    assert [run for run in found if run not in theirs] == [run for run in theirs if run not in found] == []
    assert [run.recipe.seed for run in found] == sorted(run.recipe.seed for run in found)
    assert len(sample_efficiency.SHARES[scale]) <= len(BY_SHARE) and set(LINES) == set(ROWS)


def test_what_is_equal_has_equal_keys():
    settings = Settings(scale="smoke")
    keys = [run.key() for run in learning_curves.grid(settings)]
    theirs = {run.key() for run in (*sample_efficiency.grid(settings), *ablations.grid(settings))}
    assert len(set(keys)) == len(keys) and set(keys) == theirs


def test_passes_end_at_the_same_place():
    ds = stacked()
    few, whole = (where(ds, row="a", train_images=images) for images in (25, 100))
    assert passes(few, 100)[[0, -1]].tolist() == [0.25, 4]
    assert passes(whole.isel(epoch=slice(4)), 100).tolist() == [1, 2, 3, 4]


def test_curves_by_hand():
    mean, half = curves(where(stacked(), row="a", train_images=100).isel(epoch=slice(1)))
    level = 100 * (1 - np.exp(-1))
    np.testing.assert_allclose(mean, 0.6 * level)
    np.testing.assert_allclose(half, 4.3027 * 0.1 * level / 3**0.5, rtol=1e-4)  # t at 97.5 % of 2 degrees of freedom


def test_the_figure_has_all_curves_to_their_ends():
    by_share, by_row = draw(stacked()).axes
    # Bands and bars beside the ends on the left, bars alone on the right, each with its middle as a line of one point.
    assert (len(by_share.collections), len(by_row.collections)) == (8, len(ROWS))
    curved, lines = ([line for line in ax.lines if len(line.get_xdata()) > 1] for ax in (by_share, by_row))
    assert sorted(len(line.get_xdata()) for line in curved) == [4, 4, 16, 16]
    assert {float(line.get_xdata()[-1]) for line in (*curved, *lines)} == {4.0}
    (beside,) = (line for line in by_row.lines if len(line.get_xdata()) == 1 and line.get_color() == LINES["g"][0])
    assert beside.get_ydata()[0] == pytest.approx(float(where(stacked(), row="g", train_images=100).accuracy.mean()))
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == len(ROWS)
    # The level of the seeds differs by 10 points: bands would dwarf the lines, which make the limits.
    assert by_share.get_ylim() == by_row.get_ylim() and by_share.get_ylim()[1] < 80
    assert not [ax for ax in draw(stacked(seeds=2)).axes if ax.collections]  # two seeds have neither


def test_the_caption_says_how_many_images_the_curves_are_of():
    config = ("run", [json.dumps({"data": {"test_size": 2000}})] * stacked().sizes["run"])
    of_all = stacked().assign_coords(run_config=config).assign_attrs(test_images=2000)
    assert watched(of_all) == watched(stacked()) == ""
    of_some = of_all.assign_attrs(test_images=10_000)
    assert watched(of_some, "Left", "right") == "Left: 2,000 test images; right: all 10,000. "
    assert "Curves: 2,000 test images; beside their ends: all 10,000." in draw(of_some).get_supxlabel()


def test_smoke_run(smoke_run):
    path = smoke_run(learning_curves.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    assert not list(path.parent.glob("claims*"))
    ds = load(path)
    assert sorted(ds.row.values) == sorted([*ROWS, "a", "e"])
    assert ds.epoch.values.tolist() == [1, 2]  # half of the images twice
    for run in range(ds.sizes["run"]):
        curve = ds.test_accuracy.isel(run=run).dropna("epoch").values
        assert 100 * curve[-1] == pytest.approx(float(ds.accuracy[run])) and len(curve) == int(ds.epochs[run])
