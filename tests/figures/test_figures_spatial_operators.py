"""Rank and reach of operators: what is drawn is what was measured."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import PathCollection

from vitprobe.figures import save_figure
from vitprobe.figures.spatial_operators import MANY, filter_statistics, spatial_operators
from vitprobe.results import stack_runs

TEXT = {"long_name": "made up", "units": "1"}


def dataset(variables, layers, each, size, bins=4, **coords) -> xr.Dataset:
    return xr.Dataset(
        {name: (dims, values, TEXT) for name, (dims, values) in variables.items()},
        {
            "layer": np.arange(layers),
            each: np.arange(size),
            "bin": np.arange(bins),
            "layer_name": ("layer", [f"layers.{index}" for index in range(layers)]),
            "kind": ("layer", ["msa"] * layers),
            "depth": ("layer", np.linspace(0, 1, layers)),
        }
        | {name: ("layer", values) for name, values in coords.items()},
    )


def attention(layers=3, heads=4, seed=0, model="vit_ti", power=True) -> xr.Dataset:
    rng = np.random.default_rng(seed)
    mass = rng.dirichlet(np.ones(4), (layers, heads))
    by_head = {"stable_rank": 1 + 5 * rng.random((layers, heads)), "stable_rank_se": rng.random((layers, heads)) / 9}
    if power:
        by_head |= {"fixed_power": rng.random((layers, heads)), "fixed_power_se": rng.random((layers, heads)) / 9}
    variables = {name: (("layer", "head"), values) for name, values in by_head.items()}
    variables |= {"mass": (("layer", "head", "bin"), mass)}
    variables |= {"uniform_mass": (("layer", "bin"), np.tile([0.1, 0.4, 0.3, 0.2], (layers, 1)))}
    return dataset(variables, layers, "head", heads).assign_attrs(probe="spatial_operators", model=model)


def filters(layers=3, channels=5, seed=0, model="convmixer") -> xr.Dataset:
    rng = np.random.default_rng(seed)
    variables = {
        "mass": (("layer", "channel", "bin"), rng.dirichlet(np.ones(4), (layers, channels))),
        "uniform_mass": (("layer", "bin"), np.tile([0.1, 0.4, 0.3, 0.2], (layers, 1))),
        "bank_stable_rank": (("layer",), 1 + 8 * rng.random(layers)),
    }
    ds = dataset(variables, layers, "channel", channels, kernel_h=[3] * layers, kernel_w=[5] * layers)
    return ds.assign_attrs(probe="filter_statistics", model=model)


def panels(figure) -> list:
    return [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]


def lines(ax) -> list[np.ndarray]:
    return [np.asarray(line.get_ydata()) for line in ax.lines]


def points(ax) -> np.ndarray:
    (drawn,) = [one for one in ax.collections if isinstance(one, PathCollection)]
    return np.asarray(drawn.get_offsets())


def holds(drawn: list[np.ndarray], expected: np.ndarray) -> bool:
    return any(one.shape == expected.shape and np.allclose(one, expected) for one in drawn)


def test_a_line_per_head_and_their_mean_beside_uniform_attention(tmp_path):
    ds = attention()
    figure = spatial_operators(ds)
    save_figure(figure, tmp_path / "a.png", dpi=50)
    profile, rank, power = panels(figure)
    assert len(profile.lines) == 3 * (4 + 1) + 1
    for layer in range(3):
        assert holds(lines(profile), ds.mass[layer].mean("head").values)
        for head in range(4):
            assert holds(lines(profile), ds.mass[layer, head].values)
    np.testing.assert_array_equal(profile.lines[-1].get_ydata(), [0.1, 0.4, 0.3, 0.2])
    colors = {line.get_color() for line in profile.lines[:-1]}
    assert len(colors) == 3  # one for each depth
    for ax, name in ((rank, "stable_rank"), (power, "fixed_power")):
        np.testing.assert_allclose(np.sort(points(ax)[:, 1]), np.sort(ds[name].values.ravel()))
        np.testing.assert_allclose(ax.lines[-1].get_ydata(), ds[name].mean("head"))
        assert ax.get_xlabel() == "attention layer" and ax.get_xlim() == (0.5, 3.5)
        bars = ax.collections[0].get_segments()
        half = [(high - low) / 2 for (_, low), (_, high) in bars]
        np.testing.assert_allclose(half, ds[f"{name}_se"].values.ravel())
    assert rank.get_yscale() == "log" and rank.get_ylim()[0] < 1 < ds.stable_rank.max() < rank.get_ylim()[1]
    assert "standard error over images" in figure.get_supxlabel()


def test_seeds_and_models_of_other_sizes():
    runs = [attention(), attention(seed=1), attention(layers=2, heads=6, model="convit_ti")]
    figure = spatial_operators(stack_runs(runs, model=[ds.attrs["model"] for ds in runs]))
    profile, other, rank, other_rank, *_ = panels(figure)
    assert profile.get_title() == "ViT Ti" and other.get_title() == "ConViT Ti"
    assert len(profile.lines) == 3 * (2 * 4 + 1) + 1 and len(other.lines) == 2 * (6 + 1) + 1
    assert holds(lines(profile), np.mean([ds.mass[1].mean("head") for ds in runs[:2]], axis=0))
    drawn = points(rank)
    assert len(drawn) == 2 * 3 * 4 and len(points(other_rank)) == 2 * 6
    # Heads lie evenly around their layer, whatever another model has.
    beside = np.unique(np.round(drawn[:, 0] - np.round(drawn[:, 0]), 3))
    np.testing.assert_allclose(beside, np.linspace(-0.2, 0.2, 4), atol=1e-3)
    assert figure.get_figwidth() < 7.001


def test_of_each_map_there_is_no_share_of_power():
    assert len(panels(spatial_operators(attention(power=False)))) == 2


def test_many_heads_are_left_to_their_mean_and_layers_without_a_unit_have_a_colour():
    ds = attention(heads=MANY + 1)
    ds["depth"] = ("layer", [0.0, np.nan, 1.0])
    profile = panels(spatial_operators(ds))[0]
    assert len(profile.lines) == 3 + 1
    assert len({line.get_color() for line in profile.lines[:-1]}) == 3


def test_layers_on_smaller_grids_and_with_fewer_heads_end_where_they_do():
    ds = attention()
    ds["mass"][2, :, 3], ds["mass"][2, 3] = np.nan, np.nan
    ds["stable_rank"][2, 3] = np.nan
    figure = spatial_operators(ds)
    expected = ds.mass[2, :3, :3].mean("head").values
    assert any(np.allclose(one[:3], expected) and np.isnan(one[3]) for one in lines(panels(figure)[0]))
    np.testing.assert_allclose(panels(figure)[1].lines[-1].get_ydata()[2], ds.stable_rank[2, :3].mean())


@pytest.mark.parametrize("count", [1, 2])
def test_filters_by_their_mean_and_their_bank_below_its_taps(tmp_path, count):
    runs = [filters(seed=seed) for seed in range(count)]
    figure = filter_statistics(runs[0] if count == 1 else stack_runs(runs))
    save_figure(figure, tmp_path / "a.png", dpi=30)
    profile, bank = panels(figure)
    assert len(profile.lines) == 3 + 1
    assert holds(lines(profile), np.mean([ds.mass[2].mean("channel") for ds in runs], axis=0))
    mean, taps = lines(bank)
    np.testing.assert_allclose(mean, np.mean([ds.bank_stable_rank for ds in runs], axis=0))
    np.testing.assert_array_equal(taps, 15)
    assert bank.get_ylim()[1] > 15
