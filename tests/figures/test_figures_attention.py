"""Figures of entropy, gates and offsets of attention: what is drawn is what was measured."""

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

from vitprobe import results
from vitprobe.figures import save_figure
from vitprobe.figures.attention_entropy import attention_entropy
from vitprobe.figures.attention_gates import attention_gates
from vitprobe.figures.attention_offsets import attention_offsets, local_mass
from vitprobe.figures.nonlocality import nonlocality

LAYERS, HEADS = 3, 2
GATES = ("gate", "nonlocality", "content_nonlocality", "position_nonlocality")


def dataset(variables, model="vit_micro", seed=0, **attrs) -> xr.Dataset:
    described = {"long_name": "made up", "units": "1"}
    coords = {
        "layer": np.arange(LAYERS),
        "layer_name": ("layer", [f"blocks.{index}" for index in range(LAYERS)]),
        "kind": ("layer", ["msa"] * LAYERS),
        "head": np.arange(HEADS),
    }
    attributes = results.provenance(title="t", seed=seed, model=model, **attrs)
    return xr.Dataset({name: (*what, described) for name, what in variables.items()}, coords, attributes)


def by_head(*names, seed=0):
    rng = np.random.default_rng(seed)
    return {name: (("layer", "head"), rng.uniform(0.2, 0.9, (LAYERS, HEADS))) for name in names}


def entropy(model="vit_micro", seed=0):
    uniform = {"uniform_entropy": ("layer", np.full(LAYERS, 4.2))}
    return dataset(by_head("entropy", seed=seed) | uniform, model, seed, probe="attention_entropy")


def gates(model="convit_micro", seed=0):
    uniform = {"uniform_nonlocality": ("layer", np.full(LAYERS, 1.5))}
    return dataset(by_head(*GATES, seed=seed) | uniform, model, seed, probe="attention_gates")


def offsets(model="vit_micro", seed=0, reach=3):
    rng, side = np.random.default_rng(seed), 2 * reach + 1
    maps = rng.uniform(1e-3, 0.1, (LAYERS, HEADS, side, side))
    maps[1, :, [0, -1]] = maps[1, :, :, [0, -1]] = np.nan  # a smaller grid
    pairs = np.outer(*2 * [reach + 1 - abs(np.arange(-reach, reach + 1))]) / (reach + 1) ** 4
    variables = {name: (("layer", "head", "offset_y", "offset_x"), maps) for name in ("mass", "mean_weight")}
    variables["uniform_mass"] = (("layer", "offset_y", "offset_x"), np.broadcast_to(pairs, (LAYERS, side, side)))
    variables |= by_head("local_mass", seed=seed)
    config = {"probe": "attention_offsets", "neighbourhood": 3}
    ds = dataset(variables, model, seed, probe="attention_offsets", images=4, config=config)
    return ds.assign_coords({dim: np.arange(-reach, reach + 1) for dim in ("offset_y", "offset_x")})


def panels(figure) -> list:
    return [ax for ax in figure.axes if ax.get_label() != "<colorbar>" and ax.axison]


def points(ax) -> list[np.ndarray]:
    return [part.get_offsets()[:, 1] for part in ax.collections if not isinstance(part, PolyCollection)]


@pytest.mark.parametrize(("make", "figure", "uniform"), [
    (entropy, attention_entropy, 4.2),
    (offsets, local_mass, 10 * 10 / 4**4),  # (3 + 4 + 3)^2 of 4^4 pairs lie in the middle 3x3
])  # fmt: skip
def test_heads_their_mean_and_uniform_attention(make, figure, uniform, tmp_path):
    before = dict(mpl.rcParams)
    runs = [make(model, seed) for model in ("vit_micro", "convit_micro") for seed in range(3)]
    drawn = figure(results.stack_runs(runs))
    save_figure(drawn, tmp_path / "a.png", dpi=50)
    assert dict(mpl.rcParams) == before
    assert [ax.get_title() for ax in panels(drawn)] == ["ViT micro", "ConViT micro"]
    variable = "entropy" if make is entropy else "local_mass"
    for ax in panels(drawn):
        (heads,) = points(ax)
        values = np.stack([run[variable] for run in runs[:3]])
        np.testing.assert_allclose(sorted(heads), sorted(values.ravel()))
        mean, dashed = ax.lines
        np.testing.assert_allclose(mean.get_ydata(), values.mean((0, 2)))
        np.testing.assert_allclose(dashed.get_ydata(), uniform)
        assert ax.get_ylim()[0] == 0
    assert panels(drawn)[0].get_ylabel() in ("entropy of attention [nats]", "attention mass within 3x3 [1]")
    assert "over 3 seeds" in drawn.get_supxlabel()
    assert figure(runs[0]).get_supxlabel() == ""  # a single run has no band


def test_a_single_run_s_band_is_its_standard_error():
    variables = by_head("nonlocality") | {
        "uniform_nonlocality": ("layer", np.ones(LAYERS)),
        "layer_nonlocality_se": ("layer", np.array([0.1, 0.2, 0.3])),
    }
    figure = nonlocality(dataset(variables, probe="nonlocality"))
    (band,) = [part for part in panels(figure)[0].collections if isinstance(part, PolyCollection)]
    corners = band.get_paths()[0].vertices
    for layer, error in enumerate([0.1, 0.2, 0.3], 1):
        at = corners[np.isclose(corners[:, 0], layer), 1]
        assert at.max() - at.min() == pytest.approx(2 * error)
    assert "standard error over images" in figure.get_supxlabel()


def test_gates_above_the_reach_of_their_parts(tmp_path):
    runs = [gates(seed=seed) for seed in range(2)]
    figure = attention_gates(results.stack_runs(runs))
    save_figure(figure, tmp_path / "a.png", dpi=50)
    above, below = panels(figure)
    np.testing.assert_allclose(above.lines[0].get_ydata(), np.stack([run.gate for run in runs]).mean((0, 2)))
    assert above.get_ylim() == (-0.02, 1.02) and above.get_ylabel() == "share of position [1]"
    lines = {line.get_label(): line.get_ydata() for line in below.lines}
    assert list(lines) == ["position", "gated", "content", "uniform attention"]
    for label, name in (("position", "position_"), ("gated", ""), ("content", "content_")):
        values = np.stack([run[f"{name}nonlocality"] for run in runs])
        np.testing.assert_allclose(lines[label], values.mean((0, 2)))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(lines)


@pytest.mark.parametrize("variable", ["mass", "mean_weight"])
def test_offsets_around_the_query(variable, tmp_path):
    ds = offsets()
    figure = attention_offsets(ds, variable=variable)
    save_figure(figure, tmp_path / "a.png", dpi=50)
    shapes = [np.asarray(ax.images[0].get_array()).shape for ax in panels(figure)]
    assert shapes == [(7, 7)] * 2 + [(5, 5)] * 2 + [(7, 7)] * 2
    np.testing.assert_array_equal(panels(figure)[3].images[0].get_array(), ds[variable][1, 1, 1:-1, 1:-1])
    for ax, middle in ((panels(figure)[0], 3), (panels(figure)[2], 2)):
        (box,) = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
        assert (*box.get_xy(), box.get_width(), box.get_height()) == (middle - 1.5, middle - 1.5, 3, 3)
        assert ax.get_xticks()[1] == middle
    assert "Box: its 3x3 neighbourhood. Mean of 4 images." in figure.get_supxlabel().replace("\n", " ")
    near = attention_offsets(ds, variable=variable, reach=1)
    np.testing.assert_array_equal(panels(near)[0].images[0].get_array(), ds[variable][0, 0, 2:5, 2:5])


def test_offsets_that_dilated_windows_lack_stay_empty():
    ds = offsets()
    ds["mass"] = ds.mass.where((ds.offset_y % 2 == 1) & (ds.offset_x % 2 == 1))
    first = panels(attention_offsets(ds))[0]
    assert np.asarray(first.images[0].get_array()).shape == (7, 7)
    assert np.ma.getmaskarray(first.images[0].get_array()).sum() == 49 - 16


def test_what_cannot_be_drawn():
    with pytest.raises(ValueError, match=r"unknown variable 'masses'.*Did you mean 'mass'"):
        attention_offsets(offsets(), variable="masses")
    with pytest.raises(ValueError, match=r"2 runs: draw one at a time, ds\.isel\(run=0\)"):
        attention_offsets(results.stack_runs([offsets(), offsets(seed=1)]))
