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


def samples(count=2, layers=2, channels=3, **options) -> xr.Dataset:
    """Maps of chosen images, whose pixels count from the upper left."""
    ds = xr.concat([measured(layers, seed=seed, **options) for seed in range(count)], "sample", coords="minimal")
    pixels = np.arange(count * channels * 16 * 16, dtype=float).reshape(count, channels, 16, 16)
    ds = ds.assign_coords(sample=[3, 5, 9][:count], image=(("sample", "channel", "pixel_y", "pixel_x"), pixels))
    return ds.assign_attrs(probe="attention_maps", images=10)


@pytest.mark.parametrize("channels", [1, 3])
def test_chosen_images_stand_before_their_maps(channels, tmp_path):
    ds = samples(channels=channels)
    figure = draw(ds)
    save_figure(figure, tmp_path / "a.png", dpi=50)
    images = [ax for ax in figure.axes if ax.images and ax.get_title().startswith("image")]
    assert [ax.get_title() for ax in images] == ["image 3", "image 5"]
    for ax in images:
        shape = (16, 16, 3) if channels == 3 else (16, 16)
        assert drawn(ax).shape == shape and (drawn(ax).min(), drawn(ax).max()) == (0, 1)
        (box,) = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
        # the patch in row 4 and column 3 of 8x8 patches of two pixels
        assert (*box.get_xy(), box.get_width(), box.get_height()) == (5.5, 7.5, 2, 2)
    maps = [ax for ax in panels(figure) if ax not in images]
    assert names(figure) == ["layer 1", "layer 2"] * 2
    for ax, expected in zip(maps, ds.attention.values.reshape(-1, 8, 8), strict=True):
        np.testing.assert_array_equal(drawn(ax), expected)
    assert "from 0" in figure.get_supxlabel() and "Mean of" not in figure.get_supxlabel()


def test_rows_go_by_their_images_where_those_are_not_at_hand():
    found = [name.replace("\n", " ") for name in names(draw(samples().drop_vars("image")))]
    assert found == ["image 3, layer 1", "image 3, layer 2", "image 5, layer 1", "image 5, layer 2"]


def every_query() -> xr.Dataset:
    """A layer of 4x6 patches and one of 2x3, with the maps of all queries."""
    rng, values = np.random.default_rng(0), np.full((2, 2, 24, 4, 6), np.nan)
    values[0], values[1, :, :6, :2, :3] = rng.uniform(1e-3, 0.4, (2, 24, 4, 6)), rng.uniform(1e-3, 0.4, (2, 6, 2, 3))
    ds = xr.Dataset(
        {"attention": (("layer", "head", "query", "y", "x"), values, {"long_name": "made up", "units": "1"})},
        {dim: np.arange(size) for dim, size in zip(("layer", "head", "query", "y", "x"), values.shape, strict=True)},
        {"probe": "attention_maps"},
    )
    places = np.full((2, 2, 24), np.nan)
    for layer, grid in enumerate([(4, 6), (2, 3)]):
        places[:, layer, : grid[0] * grid[1]] = np.indices(grid).reshape(2, -1)
    return ds.assign_coords(query_y=(("layer", "query"), places[0]), query_x=(("layer", "query"), places[1]))


def test_one_of_all_queries():
    ds = every_query()
    for query, at in ((None, [(2, 3), (1, 1)]), ((1, 2), [(1, 2), (1, 2)])):
        figure = attention_maps(ds, query=query)
        for layer, (row, column) in enumerate(at):
            width, height = [(6, 4), (3, 2)][layer]
            ax = panels(figure)[2 * layer]
            expected = ds.attention[layer, 0, row * width + column, :height, :width]
            np.testing.assert_array_equal(drawn(ax), expected)
            assert ax.patches[0].get_xy() == (column - 0.5, row - 0.5)
    with pytest.raises(ValueError, match="no patch of a grid of 2x3"):
        attention_maps(ds, query=(3, 5))
    with pytest.raises(ValueError, match=r"holds the maps of \(4, 3\) alone; measure queries='all'"):
        attention_maps(measured(), query=(1, 1))


def test_tables_stay_on_a_page():
    assert draw(measured(layers=24, heads=1)).get_figheight() <= 9.01
    with pytest.raises(ValueError, match=r"40 rows of maps cannot be read .* ds\.isel"):
        draw(measured(layers=40))
    small = draw(measured(heads=16))
    assert [ax.get_title() for ax in panels(small)][:3] == ["head 1", "2", "3"] and small.get_figwidth() < 7.001
