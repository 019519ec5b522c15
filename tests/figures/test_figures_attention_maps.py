"""Attention maps as figures: what is drawn is what was measured, where it was measured."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.patches import Rectangle

from vitprobe.figures import draw, save_figure
from vitprobe.figures.attention_maps import attention_maps
from vitprobe.results import stack_runs


def measured(layers=None, heads=4, grid=(8, 8), query=(4, 3), seed=0, **attrs) -> xr.Dataset:
    dims = ("layer", "head", "y", "x") if layers else ("head", "y", "x")
    shape = (layers, heads, *grid) if layers else (heads, *grid)
    values = np.random.default_rng(seed).uniform(1e-3, 0.4, shape)
    ds = xr.Dataset(
        {"attention": (dims, values, {"long_name": "made up", "units": "1"})},
        {dim: np.arange(size) for dim, size in zip(dims, shape, strict=True)},
        {"probe": "attention_maps"} | attrs,
    )
    places = zip(("query_y", "query_x"), query, strict=True)
    return ds.assign_coords({name: (dims[:-3], np.full(shape[:-3], at)) for name, at in places})


def panels(figure) -> list:
    return [ax for ax in figure.axes if ax.get_label() != "<colorbar>" and ax.axison]


def drawn(ax) -> np.ndarray:
    return np.asarray(ax.images[0].get_array())


def names(figure) -> list[str]:
    return [ax.get_ylabel() for ax in panels(figure) if ax.get_ylabel()]


def test_a_panel_per_head_with_its_map_and_the_query_boxed(tmp_path):
    ds = measured(images=7)
    figure = draw(ds)
    save_figure(figure, tmp_path / "a.png", dpi=50)
    assert len(panels(figure)) == 4
    for head, ax in enumerate(panels(figure)):
        np.testing.assert_array_equal(drawn(ax), ds.attention[head])
        assert ax.get_title() == f"head {head + 1}"
        (box,) = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
        assert (*box.get_xy(), box.get_width(), box.get_height()) == (2.5, 3.5, 1, 1)
        for axis, at in ((ax.yaxis, 4), (ax.xaxis, 3)):
            places = axis.get_ticklocs()
            words = axis.get_major_formatter().format_ticks(places)
            assert [int(word.replace("−", "-")) for word in words] == [place - at for place in places]
    assert len({ax.images[0].norm for ax in panels(figure)}) == 1
    assert "Mean of 7 images." in figure.get_supxlabel()


@pytest.mark.parametrize("query", [(0, 0), (7, 11), (0, 5)])
def test_ticks_stay_inside_at_the_border(query):
    for ax in panels(draw(measured(grid=(8, 12), query=query))):
        assert ax.get_xlim() == (-0.5, 11.5) and ax.get_ylim() == (7.5, -0.5)
        assert query[0] in ax.get_yticks() and query[1] in ax.get_xticks()


def test_layers_below_each_other():
    ds = measured(layers=3)
    figure = draw(ds)
    assert names(figure) == ["layer 1", "layer 2", "layer 3"]
    for ax, expected in zip(panels(figure), ds.attention.values.reshape(-1, 8, 8), strict=True):
        np.testing.assert_array_equal(drawn(ax), expected)


def test_runs_of_other_sizes_without_their_padding():
    runs = [measured(layers=1), measured(layers=2, heads=5, grid=(4, 6), query=(2, 3), seed=1)]
    figure = draw(stack_runs(runs, label=["random", "a lattice, strength 2"]))
    assert [name.replace("\n", " ") for name in names(figure)] == [
        "random, layer 1", "a lattice, strength 2, layer 1", "a lattice, strength 2, layer 2",
    ]  # fmt: skip
    shapes = [drawn(ax).shape for ax in panels(figure)]
    assert shapes == 4 * [(8, 8)] + 10 * [(4, 6)]
    np.testing.assert_array_equal(drawn(panels(figure)[-1]), runs[1].attention[1, 4])
    assert figure.get_figwidth() < 7.001
    uniform = {line.get_ydata()[0] for ax in figure.axes if ax.get_label() == "<colorbar>" for line in ax.lines}
    assert uniform == {1 / 64, 1 / 24}


def test_runs_go_by_their_models_or_numbers():
    assert names(draw(stack_runs([measured(), measured()], model=["vit_ti", "convit_ti"]))) == ["ViT Ti", "ConViT Ti"]
    assert names(draw(stack_runs([measured(), measured()]))) == ["run 1", "run 2"]


def test_scales():
    ds = measured()
    ds.attention[0, 0, 0] = 0.0
    log, linear = (panels(attention_maps(ds, scale=scale))[0] for scale in ("log", "linear"))
    assert (log.images[0].norm.vmin, linear.images[0].norm.vmin) == (1e-4, 0)
    assert log.images[0].norm.vmax == linear.images[0].norm.vmax == ds.attention.max()
    assert drawn(log)[0, 0] == 1e-4 and drawn(linear)[0, 0] == 0
    middle = log.images[0].norm(np.sqrt(1e-4 * float(ds.attention.max())))
    assert middle == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"unknown scale 'logarithmic'\. Known: linear, log"):
        attention_maps(ds, scale="logarithmic")


def test_uniform_attention_can_be_drawn(tmp_path):
    ds = measured(heads=1)
    ds["attention"] = xr.full_like(ds.attention, 1 / 64)
    for scale in ("log", "linear"):
        save_figure(attention_maps(ds, scale=scale), tmp_path / f"{scale}.png", dpi=50)
