"""ConViT against ViT by the share of the images: verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.dascoli import ablations, pair, sample_efficiency
from studies.dascoli.published import TABLE_1, TABLE_2
from studies.dascoli.sample_efficiency import gains, slopes, speed
from vitprobe.models import create_model
from vitprobe.results import load
from vitprobe.study import Settings


def stacked(accuracies: dict[float, tuple[float, float]], *, seeds: int = 3) -> xr.Dataset:
    """Accuracies of ViT and ConViT by share of 1,000 images: the means over seeds; ConViTs' differences vary."""
    rows = [(seed, share, model) for seed in range(seeds) for share in accuracies for model in (0, 1)]
    level = np.arange(seeds) - (seeds - 1) / 2
    accuracy = np.array([
        accuracies[share][model] + level[seed] * (0.5 + 0.2 * model * (2 * share - 1)) for seed, share, model in rows
    ])
    passes = np.array([[90.0, 100, 110]]) * np.array([[2 - model] for _, _, model in rows])
    names = {"heads": 4, "width": 96, "parameters": 1_000_000, "multiply_adds": 20_000_000, "speed_batch": 128}
    return xr.Dataset(
        {
            "error": ("run", 100 - accuracy),
            "nll_clean": ("run", [0.5 + row[2] for row in rows]),
            "speed": (("run", "batch"), passes),
        },
        coords={
            "run": np.arange(len(rows)),
            "seed": ("run", [row[0] for row in rows]),
            "train_images": ("run", [round(1000 * row[1]) for row in rows]),
            "model": ("run", [("vit_micro", "convit_micro")[row[2]] for row in rows]),
            "accuracy": ("run", accuracy),
            **{name: ("run", [value] * len(rows)) for name, value in names.items()},
        },
        attrs={"classes": 10, "data": "made"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in sample_efficiency.verdicts(ds)}


def test_published_accuracies_support_it():
    assert verdicts(stacked(TABLE_2)) == {"D1": "supported", "D2": "supported", "D2 points": "supported"}


@pytest.mark.parametrize(
    ("few", "all_", "expected"),
    [
        ((40, 50), (70, 65), ("contradicted", "supported", "supported")),
        ((40, 41), (70, 80), ("supported", "contradicted", "contradicted")),
        ((40, 44), (70, 74), ("supported", "supported", "inconclusive")),  # as many points are more of less
        ((40, 44), (70, 77), ("supported", "inconclusive", "contradicted")),
        ((40, 44), (70, 70), ("inconclusive", "supported", "supported")),
    ],
)
def test_verdicts(few, all_, expected):
    found = verdicts(stacked({0.1: few, 1.0: all_}))
    assert tuple(found[name] for name in ("D1", "D2", "D2 points")) == expected


def test_networks_that_did_not_learn_and_single_seeds_are_no_evidence():
    assert set(verdicts(stacked({0.1: (20, 30), 1.0: (34, 34.5)})).values()) == {"inconclusive"}
    by_chance = verdicts(stacked({0.1: (12, 20), 1.0: (60, 65)}))
    assert by_chance == {"D1": "supported", "D2": "inconclusive", "D2 points": "inconclusive"}
    assert set(verdicts(stacked(TABLE_2, seeds=1)).values()) == {"inconclusive"}


def test_gains_by_hand():
    ds = stacked({0.1: (40, 50), 1.0: (80, 84)})
    shares, points = gains(ds, relative=False)
    np.testing.assert_allclose(shares, [0.1, 1])
    np.testing.assert_allclose(points.mean(1), [10, 4], atol=0.2)
    np.testing.assert_allclose(gains(ds, relative=True)[1].mean(1), [25, 5], atol=0.6)
    # A seed that lacks a share has no slope.
    assert gains(ds.isel(run=slice(None, -1)), relative=True)[1].shape == (2, 2)


def test_slopes_are_those_of_least_squares():
    shares = np.array([0.05, 0.1, 0.3, 1])
    values = np.random.default_rng(0).normal(size=(4, 3))
    np.testing.assert_allclose(slopes(shares, values), np.polyfit(np.log10(shares), values, 1)[0])


def test_published_gains_are_the_published_percentages():
    shares, relative = sample_efficiency._published_gains(relative=True)
    assert shares.tolist() == [0.05, 0.1, 0.3, 0.5, 1.0]
    assert relative.round().tolist() == [37, 24, 11, 5, 2]  # printed as 37, 24, 12, 5 and 2
    assert {form.heads for name, form in TABLE_1.items() if name.endswith("S+")} == {9}


def test_speed_counts_images_of_all_passes_but_the_first(monkeypatch):
    class Slow(nn.Module):
        """Takes 100 s at first, then 2 s."""

        passes = 0

        def forward(self, x):
            self.passes += 1
            clock.time += 100 if self.passes <= sample_efficiency.WARM else 2

    class Clock:
        time = 0.0

        def perf_counter(self):
            return self.time

    clock = Clock()
    monkeypatch.setattr(sample_efficiency, "time", clock)
    assert speed(Slow(), torch.zeros(8, 1, 2, 2), repeats=3).tolist() == [4, 4, 4]


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grid(scale, monkeypatch):
    images = type("Images", (), {"train": range(1000)})
    monkeypatch.setattr(ablations, "load", lambda spec: images)
    runs = sample_efficiency.grid(Settings(scale=scale))
    shares = sample_efficiency.SHARES[scale]
    whole = runs[0].data.train_size
    seeds = {run.recipe.seed for run in runs}
    assert len(runs) == 2 * len(shares) * len(seeds)
    assert len({run.model + repr((run.options, run.data, run.recipe)) for run in runs}) == len(runs)
    assert [run.recipe.seed for run in runs] == sorted(run.recipe.seed for run in runs)
    for plain, gated, share in zip(runs[::2], runs[1::2], sorted(shares, reverse=True) * len(seeds), strict=True):
        assert (plain.model[:3], gated.model[:6]) == ("vit", "convit")
        assert (plain.data, plain.recipe) == (gated.data, gated.recipe)
        assert plain.data.train_size == (whole if share == 1 else round(1000 * share))
        assert plain.recipe.epochs == round(runs[0].recipe.epochs / share)
        assert bool(plain.recipe.snapshots) == (share == 1)


@pytest.mark.parametrize("scale", ["quick", "cpu"])
def test_both_have_the_same_heads_and_width(scale):
    (base, *_) = pair.seeds(Settings(scale=scale))
    size = {"image_size": 8, "channels": 1} if scale == "quick" else {"image_size": 32}
    plain, gated = (
        create_model(run.model, **size, seed=0, **run.options)
        for run in (pair.vit(base, Settings(scale=scale)), pair.convit(base, Settings(scale=scale)))
    )
    assert plain.blocks[0].attention.heads == gated.local_blocks[0].attention.heads == 4
    assert plain.position.shape == gated.position.shape
    # What a ConViT has more: three numbers and a gate of every gated head.
    count = [sum(p.numel() for p in model.parameters()) for model in (plain, gated)]
    assert count[1] - count[0] == 4 * 4 * len(gated.local_blocks)


def test_smoke_run(smoke_run):
    path = smoke_run(sample_efficiency.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.train_images.values.tolist() == [50, 50, 25, 25]
    assert (ds.speed > 0).all() and ds.sizes["batch"] == sample_efficiency.REPEATS
    assert (ds.multiply_adds.values > 1e5).all()
