"""Where heads look: statistics against other ways to them, the grid, the figure's layout, a smoke run."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

import vitprobe as vp
from studies.dascoli import ablations, attention_maps, sample_efficiency
from studies.dascoli.attention_maps import draw, gates, looked, moved, shown_layers
from vitprobe.models.attention import Attention
from vitprobe.results import load
from vitprobe.study import Settings


@pytest.fixture(scope="module")
def data():
    return vp.load_data("digits", train_size=20, test_size=30)


@pytest.fixture(scope="module")
def model():
    """A ConViT whose gates differ by head, and whose content maps are not uniform."""
    model = vp.create_model("convit_nano", image_size=8, channels=1, seed=0)
    with torch.no_grad():
        for number, layer in enumerate(module for module in model.modules() if isinstance(module, Attention)):
            layer.query_key.weight.mul_(20)
            if layer.gate is not None:
                layer.gate.copy_(torch.linspace(-2, 2, layer.heads) + number)
    return model.eval()


# --- statistics -------------------------------------------------------------------------------------


def one_map(y: int, x: int) -> np.ndarray:
    found = np.zeros((1, 1, 2, 2))
    found[0, 0, y, x] = 1
    return found


def test_moved_by_hand():
    here, there, half = one_map(0, 0), one_map(1, 1), (one_map(0, 0) + one_map(1, 1)) / 2
    mean, error = moved(np.stack([here, here, here, there]))  # the pairs are 1 and 3, 2 and 4
    assert mean.item() == 0.5 and error.item() == pytest.approx(np.std([0, 1], ddof=1) / 2**0.5)
    mean, error = moved(np.stack([here, half, half, here, there]))  # the last has no partner
    assert (mean.item(), error.item()) == (0.5, 0)


def test_a_gate_leaves_of_the_content_map_what_it_says():
    content, position = (np.random.default_rng(0).dirichlet(np.ones(9), (8, 1, 1)).reshape(8, 1, 1, 3, 3) for _ in "ab")
    mixed = 0.25 * content + 0.75 * position[:1]
    np.testing.assert_allclose(moved(mixed), 0.25 * np.array(moved(content)))
    np.testing.assert_allclose(moved(np.repeat(position[:1], 8, 0)), 0)


def test_means_and_standard_errors_are_those_of_the_running_mean(model, data):
    ds = looked(model, data)
    batches = data.loader("test", batch_size=7)
    mean = vp.attention_maps(model, batches, progress=False)
    np.testing.assert_allclose(ds.mean_attention, mean.attention, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(ds.mean_attention_se, mean.attention_se, rtol=1e-3, atol=1e-6)
    first = vp.attention_maps(model, batches, images=[0], progress=False)
    np.testing.assert_allclose(ds.attention, first.attention.isel(sample=0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(ds.image, data.test.images[0].numpy() / 255, rtol=1e-6)
    assert (ds.moved_se < ds.moved).all() and (ds.query_y.values.tolist(), ds.query_x.values.tolist()) == ([2] * 4,) * 2


def test_gates_are_those_that_the_maps_show(model, data):
    found = gates(model)
    assert np.isnan(found[3]).all() and np.isfinite(found[:3]).all()
    np.testing.assert_allclose(
        found[:3], vp.attention_gates(model, data.loader("test", batch_size=7), progress=False).gate, atol=1e-4
    )
    assert np.isnan(gates(vp.create_model("vit_nano", image_size=8, channels=1, seed=0))).all()


def test_shown_layers():
    assert shown_layers(np.arange(6) < 5) == [0, 2, 4, 5]
    assert shown_layers(np.arange(12) < 10, middle=False) == [0, 9, 11]
    assert shown_layers(np.arange(2) < 1) == [0, 1]


# --- grid and figure --------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "runs"), [("smoke", 4), ("quick", 6), ("cpu", 6), ("paper", 6)])
def test_grid_is_that_of_all_images(scale, runs, monkeypatch):
    monkeypatch.setattr(ablations, "load", lambda spec: type("Images", (), {"train": range(1000)}))
    found = attention_maps.STUDY.grid(Settings(scale=scale))
    assert len(found) == runs
    others = sample_efficiency.grid(Settings(scale=scale))
    assert [run for run in found if run not in others] == []
    assert {0, found[0].recipe.epochs} <= set(found[0].recipe.snapshots)
    if scale == "smoke":
        assert {run.key() for run in found} <= {run.key() for run in others}


def stacked(heads: int, layers: int, side: int = 8) -> xr.Dataset:
    """A ViT and a ConViT of one seed, whose last two layers have no gates."""
    rng = np.random.default_rng(0)
    maps = rng.dirichlet(np.full(side**2, 0.3), (2, 2, layers, heads)).reshape(2, 2, layers, heads, side, side)
    gate = np.full((2, 2, layers, heads), np.nan)
    gate[1, :, : layers - 2] = rng.uniform(0, 1, (2, layers - 2, heads))
    dims = ("run", "epoch", "layer", "head")
    return xr.Dataset(
        {
            "attention": ((*dims, "y", "x"), maps),
            "mean_attention": ((*dims, "y", "x"), maps),
            "moved": (dims, rng.uniform(0, 0.5, gate.shape)),
            "moved_se": (dims, np.full(gate.shape, 0.02)),
            "gate": (dims, gate),
        },
        {
            "epoch": [0, 16],
            "model": ("run", ["vit_s", "convit_s_plus"]),
            "seed": ("run", [0, 0]),
            "accuracy": ("run", [60.0, 65.0]),
            "image": (("run", "channel", "pixel_y", "pixel_x"), rng.uniform(0, 1, (2, 3, 32, 32))),
            "query_y": (("run", "layer"), np.full((2, layers), 4)),
            "query_x": (("run", "layer"), np.full((2, layers), 4)),
        },
        {"images": 100, "data": "made"},
    )


@pytest.mark.parametrize(("heads", "layers", "maps"), [(4, 6, 4 * 4 * 4), (9, 12, 4 * 3 * 9), (2, 3, 4 * 2 * 2)])
def test_maps_fill_the_page_and_cover_nothing(heads, layers, maps):
    figure = draw(stacked(heads, layers))
    assert figure.get_figwidth() == 7.0 and 5 < figure.get_figheight() <= attention_maps.HIGH + 1e-9
    assert len(figure.axes) == maps + 4  # the image, the colours, two panels
    boxes = [ax.get_position() for ax in figure.axes]
    assert min(min(box.x0, box.y0) for box in boxes) > 0 and max(max(box.x1, box.y1) for box in boxes) < 1
    assert not [pair for pair in itertools.combinations(boxes, 2) if overlap(*pair)]
    scales = {(ax.images[0].norm.vmin, ax.images[0].norm.vmax) for ax in figure.axes[:maps]}
    assert len(scales) == 1 and min(scales)[0] >= 1e-4


def overlap(one, other) -> bool:
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    high = min(one.y1, other.y1) - max(one.y0, other.y0)
    return min(wide, high) > 1e-6


def test_smoke_run(smoke_run):
    path = smoke_run(attention_maps.STUDY)
    assert path.with_suffix(".png").stat().st_size > 40_000
    assert not list(path.parent.glob("claims*"))
    ds = load(path)
    assert ds.attention.dims == ("run", "epoch", "layer", "head", "y", "x") and ds.epoch.values.tolist() == [0, 1]
    np.testing.assert_allclose(ds.attention.sum(("y", "x")), 1, rtol=1e-5)
    plain, gated = ds.gate.values
    assert np.isnan(plain).all() and np.isnan(gated[:, 3]).all()
    np.testing.assert_allclose(gated[0, :3], 0.731, atol=1e-3)
    # Before training a gated head moves as little as its share of position says; content is the ViT's, near uniform.
    assert float(ds.moved[1, 0, :3].max()) < 0.1
    assert [json.loads(str(run))["recipe"]["seed"] for run in ds.run_config.values] == ds.seed.values.tolist() == [0, 0]
