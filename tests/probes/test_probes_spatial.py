"""Rank and reach of token-mixing matrices, against loops, NumPy, explicit operators and known distances."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fixed_maps import FixedMap, dilated, measured, random_maps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitprobe import results
from vitprobe.attach import spatial_operator
from vitprobe.initializers import convolution_as_attention, impulse_
from vitprobe.models import create_model
from vitprobe.models.convit import gpsa
from vitprobe.probes import FeatureVariance, attention_maps, feature_variance, probe, spatial
from vitprobe.probes.filters import filter_statistics, torus_singular_values
from vitprobe.probes.nonlocality import distances, uniform_nonlocality
from vitprobe.probes.spatial import (
    SpatialOperators,
    distance_profile,
    operator_statistics,
    rank_statistics,
    spatial_operators,
)

every_grid = pytest.mark.parametrize("grid", [(8, 8), (8, 12), (3, 5), (1, 6)])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ranks_by_numpy(matrix, tolerance=0.01):
    """Stable, effective and numerical rank."""
    values = np.linalg.svd(np.asarray(matrix), compute_uv=False)
    shares = values[values > 0] / values.sum()
    entropy = -(shares * np.log(shares)).sum()
    return (values**2).sum() / values[0] ** 2, math.exp(entropy), (values > tolerance * values[0]).sum()


RANKS = ("stable_rank", "effective_rank", "numerical_rank")


@every_grid
@pytest.mark.parametrize("offset", [(0, 0), (-1, 1), (1, 0), (0, 2)])
def test_an_impulse_filter_has_its_mass_on_one_offset_and_the_rank_of_what_stays_inside(grid, offset):
    layer = nn.Conv2d(1, 1, 5, padding=2, bias=False)
    nn.init.zeros_(layer.weight)
    layer.weight.data[0, 0, 2 + offset[0], 2 + offset[1]] = -0.5
    found = operator_statistics(spatial_operator(layer, grid), grid).isel(head=0)
    inside = max(0, grid[0] - abs(offset[0])) * (grid[1] - abs(offset[1]))
    assert found.matrix_rank == inside
    if inside:
        assert found.stable_rank == pytest.approx(inside)
        assert found.nonlocality == pytest.approx(math.hypot(*offset))
        assert found.mass.sel(y=offset[0], x=offset[1]) == pytest.approx(1) == found.mass.sum()


def test_permutations_have_full_rank():
    permutations = torch.stack([torch.eye(12)[torch.randperm(12, generator=torch.Generator().manual_seed(0))]])
    found = operator_statistics(permutations, (3, 4))
    assert found.matrix_rank.item() == 12 == pytest.approx(found.stable_rank.item())


@pytest.mark.parametrize(("side", "expected"), [(8, 4.14), (14, 7.28), (16, 8.33)])
def test_uniform_attention(side, expected):
    tokens = side**2
    found = operator_statistics(torch.full((tokens, tokens), 1 / tokens), (side, side))
    assert found.nonlocality.item() == pytest.approx(expected, abs=0.005)
    assert found.matrix_rank.item() == 1 and found.stable_rank.item() == pytest.approx(1)
    pairs = np.convolve(np.ones(side), np.ones(side))
    np.testing.assert_allclose(found.mass[0], np.outer(pairs, pairs) / tokens**2)


@pytest.mark.parametrize(("side", "heads", "expected"), [(14, 9, 2.88), (8, 4, 1.80), (8, 16, 2.18), (16, 9, 3.17)])
def test_gpsa_before_training(side, heads, expected):
    attention = gpsa(heads, heads, grid=(side, side))
    attention.position.set_local_()
    nn.init.zeros_(attention.query_key.weight)
    operator = spatial_operator(attention, (side, side), normal(1, side**2, heads))
    assert operator_statistics(operator, (side, side)).nonlocality.mean() == pytest.approx(expected, abs=5e-3)


def statistics_by_loops(operator, grid):
    places = list(itertools.product(range(grid[0]), range(grid[1])))
    mass = np.zeros((2 * grid[0] - 1, 2 * grid[1] - 1))
    rows = []
    for q, (y, x) in enumerate(places):
        weights = np.abs(operator[q])
        for k, (v, u) in enumerate(places):
            mass[v - y + grid[0] - 1, u - x + grid[1] - 1] += weights[k]
        if weights.sum():
            rows.append(sum(weights[k] * math.hypot(v - y, u - x) for k, (v, u) in enumerate(places)) / weights.sum())
    return mass / mass.sum(), np.mean(rows)


@every_grid
def test_statistics_by_loops(grid):
    tokens = grid[0] * grid[1]
    operator = normal(2, 3, tokens, tokens).double()
    operator[1, 2, 0] = 0  # a query that sees nothing
    operator[0, 1] = operator[0, 1, :, :1] * operator[0, 1, :1]
    found = operator_statistics(operator, grid)
    results.check(found)
    assert (found.attrs["grid_h"], found.attrs["grid_w"]) == grid
    for layer, head in itertools.product(range(2), range(3)):
        one, here = operator[layer, head].numpy(), found.isel(layer=layer, head=head)
        mass, nonlocality = statistics_by_loops(one, grid)
        np.testing.assert_allclose(here.mass, mass)
        assert here.nonlocality.item() == pytest.approx(nonlocality)
        assert here.matrix_rank.item() == np.linalg.matrix_rank(one)
        assert here.stable_rank.item() == pytest.approx((one**2).sum() / np.linalg.norm(one, 2) ** 2)
        assert here.effective_rank.item() == pytest.approx(ranks_by_numpy(one)[1])


@every_grid
def test_distance_profile_by_loops(grid):
    tokens = grid[0] * grid[1]
    operator = normal(3, tokens, tokens).double()
    found = distance_profile(operator, grid)
    results.check(found)
    places = list(itertools.product(range(grid[0]), range(grid[1])))
    weight, pairs = np.zeros((3, found.sizes["bin"])), np.zeros(found.sizes["bin"])
    for (q, (y, x)), (k, (v, u)) in itertools.product(enumerate(places), repeat=2):
        ring = round(math.hypot(v - y, u - x))
        weight[:, ring] += operator[:, q, k].abs().numpy()
        pairs[ring] += 1
    np.testing.assert_allclose(found.mass, weight / weight.sum(1, keepdims=True))
    np.testing.assert_allclose(found.uniform_mass, pairs / pairs.sum())
    apart = distances(grid).double()
    np.testing.assert_allclose(found.mean_distance, (operator.abs() * apart).sum((1, 2)) / operator.abs().sum((1, 2)))


def test_statistics_of_nothing_and_of_another_grid():
    with pytest.raises(ValueError, match=r"shape \(9, 9\) on a grid of 2x3.*with 6 queries"):
        operator_statistics(torch.ones(9, 9), (2, 3))
    with pytest.raises(ValueError, match=r"shape \(4, 6\)"):
        operator_statistics(torch.ones(4, 6), (2, 3))
    found = operator_statistics(torch.zeros(1, 6, 6), (2, 3))
    assert found.matrix_rank.item() == 0 and np.isnan(found.nonlocality.item())


# --- ranks ------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    *(st.integers(1, 8) for _ in range(3)), st.floats(1e-3, 1e3), st.integers(0, 2**16),
)  # fmt: skip
def test_ranks_are_those_of_numpy_between_1_and_the_rank_and_free_of_scale(rows, columns, rank, scale, seed):
    matrix = normal(rows, rank, seed=seed).double() @ normal(rank, columns, seed=seed + 1).double()
    found = rank_statistics(torch.linalg.svdvals(matrix), 0.01)
    np.testing.assert_allclose([float(found[name]) for name in RANKS], ranks_by_numpy(matrix), rtol=1e-6)
    assert 1 - 1e-9 <= found["stable_rank"] <= found["effective_rank"] ** 2
    assert found["effective_rank"] <= min(rows, columns, rank) + 1e-6
    for same in (scale * matrix, matrix.T):
        again = rank_statistics(torch.linalg.svdvals(same), 0.01)
        torch.testing.assert_close(again, found, rtol=1e-9, atol=0)


# --- attention in a forward pass --------------------------------------------------------------------


def images(count=3, side=16, seed=0):
    return normal(count, 3, side, side, seed=seed)


def test_uniform_attention_has_rank_one_and_looks_everywhere():
    found = spatial_operators(FixedMap(torch.full((1, 2, 17, 17), 1 / 17)), images(), progress=False)
    results.check(found)
    for name in (*RANKS, "fixed_power"):
        np.testing.assert_allclose(found[name], 1, rtol=1e-5)
        np.testing.assert_allclose(found[f"{name}_se"], 0, atol=1e-5)
    np.testing.assert_allclose(found.mean_distance, uniform_nonlocality((4, 4)), rtol=1e-6)
    np.testing.assert_allclose(found.uniform_mean_distance, uniform_nonlocality((4, 4)), rtol=1e-6)
    np.testing.assert_allclose(found.mass[:, 0], found.uniform_mass, rtol=1e-6)
    assert found.bin.values.tolist() == list(range(5)) and found.attrs["maps"] == "mean"


def test_permutations_have_full_rank_and_known_distances():
    eye = torch.eye(16).unflatten(1, (4, 4))
    moved = torch.stack([eye.roll(shift, (1, 2)).flatten(1) for shift in [(0, 0), (2, 0), (2, 2)]])
    found = spatial_operators(FixedMap(moved[None]), images(), progress=False).isel(layer=0)
    for name in RANKS:
        np.testing.assert_allclose(found[name], 16, rtol=1e-6)
    np.testing.assert_allclose(found.mean_distance, [0, 2, math.sqrt(8)], rtol=1e-6)
    np.testing.assert_allclose(found.mass, np.eye(5)[[0, 2, 3]], atol=1e-7)


def test_the_mean_map_by_numpy_without_its_class_token():
    model = create_model("vit", image_size=(16, 24), patch_size=4, dim=24, heads=3, depth=2, seed=0)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.query_key.weight.mul_(8)
    x = normal(5, 3, 16, 24)
    found = spatial_operators(model, x.split(2), progress=False)
    maps = attention_maps(model, x, queries="all", progress=False).attention
    maps = maps.transpose("layer", "head", "query", "y", "x").values.reshape(2, 3, 24, 24)
    profile = distance_profile(torch.from_numpy(maps), (4, 6))
    statistics = operator_statistics(torch.from_numpy(maps), (4, 6))
    assert statistics.stable_rank.max() > 1.2  # something to see
    np.testing.assert_allclose(found.stable_rank, statistics.stable_rank, rtol=1e-5)
    np.testing.assert_allclose(found.effective_rank, statistics.effective_rank, rtol=1e-4)
    by_numpy = [[ranks_by_numpy(head)[2] for head in layer] for layer in maps]
    np.testing.assert_array_equal(found.numerical_rank, by_numpy)
    np.testing.assert_allclose(found.mass, profile.mass, rtol=1e-4)
    np.testing.assert_allclose(found.mean_distance, profile.mean_distance, rtol=1e-5)
    assert found.prefix.values.tolist() == [1, 1]


def test_of_each_map_the_mean_and_standard_error_are_over_images():
    maps = random_maps(5, 1, 2, 12)
    found = measured(SpatialOperators("each", tolerance=0.2), maps, (3, 4)).isel(layer=0)
    each = np.array([[ranks_by_numpy(head, 0.2) for head in image[0]] for image in maps])
    for index, name in enumerate(RANKS):
        np.testing.assert_allclose(found[name], each[..., index].mean(0))
        np.testing.assert_allclose(found[f"{name}_se"], each[..., index].std(0, ddof=1) / math.sqrt(5))
    assert "fixed_power" not in found


def left_out(maps, statistic, groups):
    """The statistic of the mean of maps, and its standard error by the pseudo-values of groups of images."""
    count = len(maps)
    members = [np.arange(group, count, groups) for group in range(min(groups, count))]
    values = []
    for group in members:
        share = len(group) / count
        without = np.delete(maps, group, axis=0)
        values.append((len(group), statistic(maps) / share - (1 / share - 1) * statistic(without)))
    whole = statistic(maps)
    centre = len(members) * whole - sum(
        (1 - size / count) * statistic(np.delete(maps, group, axis=0))
        for group, (size, _) in zip(members, values, strict=True)
    )
    return whole, math.sqrt(np.mean([(value - centre) ** 2 / (count / size - 1) for size, value in values]))


@pytest.mark.parametrize(("count", "chunk"), [(6, 4), (8, 8), (19, 5)])
def test_standard_errors_of_the_mean_map_are_the_jackknifes(count, chunk):
    maps = random_maps(count, 1, 1, 9, spread=1.0)
    found = measured(SpatialOperators(), maps, (3, 3), chunk=chunk).isel(layer=0, head=0)
    numbers = maps[:, 0, 0].numpy()

    def fixed_power(some):
        fixed = some[:, None] * some  # between different images, what is common alone has a mean
        between = fixed.sum() - (some**2).sum()
        return between / (len(some) - 1) / (some**2).sum()

    for name, statistic in {
        "stable_rank": lambda some: ranks_by_numpy(some.mean(0))[0],
        "effective_rank": lambda some: ranks_by_numpy(some.mean(0))[1],
        "fixed_power": fixed_power,
    }.items():
        value, error = left_out(numbers, statistic, groups=8)
        assert found[name].item() == pytest.approx(value, rel=1e-8)
        assert found[f"{name}_se"].item() == pytest.approx(error, rel=1e-6) and error > 0


def test_the_error_of_what_is_linear_is_that_of_the_mean():
    maps = random_maps(8, 1, 2, 9)
    found = measured(SpatialOperators(), maps, (3, 3)).isel(layer=0)
    each = (maps[:, 0] * distances((3, 3))).sum((-2, -1)).numpy() / 9
    np.testing.assert_allclose(found.mean_distance, each.mean(0))
    np.testing.assert_allclose(found.mean_distance_se, each.std(0, ddof=1) / math.sqrt(8))


def test_the_share_of_fixed_power_is_not_biased_by_few_images():
    # Two permutations that never agree: the mean of either, equally likely, has half of their power.
    pair = torch.eye(9)[None].repeat(2, 1, 1)
    pair[1] = pair[1].roll(1, 0)
    drawn = [pair[list(choice)][:, None, None] for choice in itertools.product((0, 1), repeat=4)]
    shares = [measured(SpatialOperators(), maps, (3, 3)).fixed_power.item() for maps in drawn]
    assert np.mean(shares) == pytest.approx(0.5)
    assert max(shares) == pytest.approx(1)  # the same map four times
    assert math.isnan(measured(SpatialOperators(), drawn[0][:1], (3, 3)).fixed_power.item())


def test_one_image_has_no_standard_error():
    found = measured(SpatialOperators(), random_maps(1, 1, 1, 9), (3, 3))
    assert np.isfinite(found.stable_rank).all()
    for name in (*RANKS, "mean_distance", "mass"):
        assert np.isnan(found[f"{name}_se"]).all()


def test_ranks_of_windows_are_averaged_and_their_mass_is_pooled():
    windows = torch.stack([torch.full((9, 9), 1 / 9), torch.eye(9)])[None, :, None].repeat(3, 1, 1, 1, 1)
    found = measured(SpatialOperators(), windows, (3, 3)).isel(layer=0, head=0)
    for name in RANKS:
        assert found[name].item() == pytest.approx((1 + 9) / 2)
    assert found.mean_distance.item() == pytest.approx(uniform_nonlocality((3, 3)) / 2)
    assert found.mass[0].item() == pytest.approx((1 / 9 + 1) / 2)


def test_windows_may_be_dilated_and_padded():
    positions = dilated((2, 2), (2, 2))  # four windows of every second row and column
    positions[0, 3] = np.nan  # the last token of the first window is padding
    maps = random_maps(3, 4, 2, 4)
    found = measured(SpatialOperators(), maps, (2, 2), positions=positions).isel(layer=0)
    mean = maps.mean(0).numpy()
    mean[0, :, 3], mean[0, :, :, 3] = 0, 0
    by_numpy = np.array([[ranks_by_numpy(head) for head in window] for window in mean]).mean(0)
    for index, name in enumerate(RANKS):
        np.testing.assert_allclose(found[name], by_numpy[:, index])
    apart = 2 * distances((2, 2)).numpy()
    np.testing.assert_allclose(found.mean_distance, (mean * apart).sum((0, 2, 3)) / mean.sum((0, 2, 3)), rtol=1e-6)
    rows = [(0 + 2 + 2) / 3, (0 + 2 + math.sqrt(8)) / 3, (0 + 2 + math.sqrt(8)) / 3]  # three patches of a square
    expected = (sum(rows) + 3 * 4 * (2 + 2 + math.sqrt(8)) / 4) / (3 + 12)
    assert found.uniform_mean_distance.item() == pytest.approx(expected)


class Convolved(nn.Module):
    """An attention over patches of 2x2 pixels that is a convolution, and a mean over pixels."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean((2, 3)))


OFFSETS = list(itertools.product((-1, 0, 1), repeat=2))


def test_heads_that_are_a_convolution_with_zeros_around_look_at_one_offset():
    layer = convolution_as_attention(normal(4, 2, 3, 3), image_size=(10, 12), patch_size=2)
    maps = layer.weights(normal(2, 2, 10, 12)).detach()[:, None].expand(2, -1, -1, -1, -1)
    found = measured(SpatialOperators(), maps, (5, 6), sink=True).isel(layer=0)
    for head, (y, x) in enumerate(OFFSETS):
        here = found.isel(head=head)
        assert here.mean_distance.item() == pytest.approx(math.hypot(y, x), abs=1e-4)
        assert here.mass.sel(bin=round(math.hypot(y, x))).item() == pytest.approx(1, abs=1e-4)
        for name in RANKS:  # queries whose key is outside see nothing
            assert here[name].item() == pytest.approx((5 - abs(y)) * (6 - abs(x)), rel=1e-4)
    np.testing.assert_allclose(found.fixed_power, 1, rtol=1e-5)


def test_heads_that_are_a_circular_convolution_have_full_rank():
    layer = convolution_as_attention(normal(4, 2, 3, 3), image_size=(10, 12), patch_size=2, boundary="circular")
    found = spatial_operators(Convolved(layer), normal(2, 2, 10, 12), progress=False).isel(layer=0)
    for name in RANKS:
        np.testing.assert_allclose(found[name], 30, rtol=1e-4)
    for head, (y, x) in enumerate(OFFSETS):  # a row or column goes around the border
        far = [math.hypot((row + y) % 5 - row, (column + x) % 6 - column) for row in range(5) for column in range(6)]
        assert found.mean_distance[head].item() == pytest.approx(np.mean(far), abs=1e-4)


def test_impulse_heads_look_at_the_distance_of_their_tap():
    model = create_model("vit", image_size=32, dim=96, heads=4, depth=1, pool="mean", position="sincos", seed=0)
    achieved = impulse_(model, seed=0).isel(layer=0)
    embedding = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    nn.init.zeros_(embedding.weight), nn.init.zeros_(embedding.bias)  # the position code alone, as in the fit
    found = spatial_operators(model, images(2, 32), progress=False).isel(layer=0)
    ring = np.hypot(achieved.offset_y, achieved.offset_x).round().astype(int)
    inside = 1 - achieved.outside_share
    on_target = achieved.mass * inside
    mass = found.mass.isel(bin=ring)
    assert (on_target > 0.7).all()
    assert (mass >= on_target - 1e-5).all() and (mass > 5 * found.uniform_mass.isel(bin=ring)).all()
    np.testing.assert_array_equal(found.numerical_rank, 64 * inside)  # of a shift, the queries whose key is inside
    np.testing.assert_allclose(found.effective_rank, 64 * inside, rtol=0.03)


def test_too_many_maps_for_memory_have_fewer_groups_or_are_left_out(monkeypatch):
    maps = random_maps(16, 1, 1, 9)
    full = measured(SpatialOperators(), maps, (3, 3))
    monkeypatch.setattr(spatial, "MEMORY", 8 * 81 * 4)
    fewer = measured(SpatialOperators(), maps, (3, 3), chunk=3).isel(layer=0, head=0)
    assert fewer.stable_rank.item() == pytest.approx(full.stable_rank.item())
    _, error = left_out(maps[:, 0, 0].numpy(), lambda some: ranks_by_numpy(some.mean(0))[0], groups=4)
    assert fewer.stable_rank_se.item() == pytest.approx(error, rel=1e-6)
    monkeypatch.setattr(spatial, "MEMORY", 8 * 80)
    with pytest.raises(ValueError, match=r"mean maps alone take .* give maps='each'"):
        measured(SpatialOperators(), maps, (3, 3))
    model = create_model("vit_nano", image_size=16, seed=0)
    tree = probe(model, images(), [SpatialOperators(), FeatureVariance()], missing="skip", progress=False)
    assert list(tree.children) == ["feature_variance"]
    assert "maps='each'" in json.loads(tree.attrs["left_out"])["spatial_operators"]


def test_groups_that_were_begun_are_merged(monkeypatch):
    """A second layer that does not fit beside the first one's groups halves them all."""
    model = create_model("vit", image_size=16, patch_size=4, dim=12, heads=2, depth=2, seed=0)
    wide = spatial_operators(model, images(12), progress=False)
    monkeypatch.setattr(spatial, "MEMORY", 8 * 8 * 2 * 256)  # eight groups of one layer
    narrow = spatial_operators(model, images(12).split(5), progress=False)
    np.testing.assert_allclose(narrow.stable_rank, wide.stable_rank, rtol=1e-6)
    np.testing.assert_allclose(narrow.mean_distance, wide.mean_distance, rtol=1e-6)
    assert np.isfinite(narrow.mean_distance_se).all() and not np.allclose(
        narrow.mean_distance_se, wide.mean_distance_se
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [({"maps": "all"}, "unknown maps 'all'"), ({"tolerance": 1.0}, "tolerance=1.0"), ({"tolerance": 0}, "tolerance=0")],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        SpatialOperators(**options)


# --- convolutions -----------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers after each other, and a mean over places."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).mean((2, 3))


def filters_of(*layers, channels, grid, **options):
    return filter_statistics(Net(*layers), normal(2, channels, *grid), **options)


LAYERS = [
    dict(in_channels=4, out_channels=4, kernel_size=3, padding=1, groups=4),
    dict(in_channels=4, out_channels=8, kernel_size=(3, 5), padding=(1, 2), groups=2),
    dict(in_channels=4, out_channels=2, kernel_size=7, padding="same"),
    dict(in_channels=4, out_channels=4, kernel_size=3, padding=2, dilation=2, groups=4),
    dict(in_channels=4, out_channels=3, kernel_size=(1, 5), padding=(0, 2)),
]


@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("grid", [(6, 6), (3, 8)])
def test_taps_spread_as_the_explicit_operator(options, grid):
    torch.manual_seed(0)
    layer = nn.Conv2d(**options)
    found = filters_of(layer, channels=4, grid=grid).isel(layer=0)
    results.check(found)
    explicit = distance_profile(spatial_operator(layer, grid), grid)
    np.testing.assert_allclose(found.mean_distance, explicit.mean_distance, rtol=1e-6)
    bins = found.sizes["bin"]
    np.testing.assert_allclose(found.mass, explicit.mass.pad(bin=(0, bins), constant_values=0)[:, :bins], atol=1e-7)
    nn.init.ones_(layer.weight)
    equal = distance_profile(spatial_operator(layer, grid), grid)
    assert found.uniform_mean_distance.item() == pytest.approx(float(equal.mean_distance[0]))


@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("stride", [1, 2])
def test_ranks_are_those_of_the_explicit_circular_operator(options, stride):
    grid = (8, 12)
    torch.manual_seed(0)
    layer = nn.Conv2d(**options, padding_mode="circular", bias=False).double()
    basis = torch.eye(4 * 96, dtype=torch.float64).view(-1, 4, *grid)
    answers = layer(basis)[:, :, ::stride, ::stride].flatten(2)  # (channel in and key, channel out, query)
    outputs = (grid[0] // stride, grid[1] // stride)
    dilation = layer.dilation
    found = torus_singular_values(layer.weight.detach(), outputs, stride=(stride, stride), dilation=dilation)
    for channel, values in enumerate(found):
        expected = np.linalg.svd(answers[:, channel].detach().numpy(), compute_uv=False)
        np.testing.assert_allclose(values.sort(descending=True).values, expected[: len(values)], atol=1e-7)
    if stride == 1:
        ranks = filters_of(layer.float(), channels=4, grid=grid).isel(layer=0)
        by_numpy = [ranks_by_numpy(answers[:, channel].detach()) for channel in range(len(found))]
        for index, name in enumerate(RANKS):
            np.testing.assert_allclose(ranks[name], [one[index] for one in by_numpy], rtol=1e-4)


def test_a_kernel_larger_than_its_grid_goes_around_it():
    weight = normal(2, 1, 9, 9).double()
    wrapped = torch.zeros(2, 4, 5, dtype=torch.float64)
    for y, x in itertools.product(range(9), repeat=2):
        wrapped[:, y % 4, x % 5] += weight[:, 0, y, x]
    expected = torch.fft.fft2(wrapped).abs().flatten(1)
    torch.testing.assert_close(torus_singular_values(weight, (4, 5)), expected)


def test_taps_of_a_strided_stem_are_counted_from_its_middle():
    layer = nn.Conv2d(3, 5, 4, stride=4)
    found = filters_of(layer, channels=3, grid=(16, 8)).isel(layer=0)
    strength = layer.weight.detach().square().sum(1).sqrt().double().numpy()
    apart = np.hypot(*np.meshgrid(np.arange(4) - 1.5, np.arange(4) - 1.5, indexing="ij"))
    np.testing.assert_allclose(found.mean_distance, (strength * apart).sum((1, 2)) / strength.sum((1, 2)), rtol=1e-6)
    np.testing.assert_allclose(found.uniform_mass, [0, 4 / 16, 12 / 16])  # 0.71, and 1.58 or 2.12
    # Patches without overlap: every place has all of the filter, and all singular values are the same.
    for name in RANKS:
        np.testing.assert_allclose(found[name], 4 * 2, rtol=1e-6)
    assert [int(found[name]) for name in ("grid_h", "grid_w", "outputs_h", "outputs_w")] == [16, 8, 4, 2]
    assert [int(found[name]) for name in ("kernel_h", "kernel_w", "inputs")] == [4, 4, 3]


@pytest.mark.parametrize("shape", [(12, 1, 3, 3), (2, 3, 5, 5), (16, 8, 3, 5)])
def test_the_bank_is_all_filters_as_rows_of_taps(shape):
    layer = nn.Conv2d(shape[1], shape[0], shape[2:], padding="same", bias=False)
    layer.weight.data = normal(*shape)
    found = filters_of(layer, channels=shape[1], grid=(6, 7), tolerance=0.5).isel(layer=0)
    expected = ranks_by_numpy(layer.weight.detach().reshape(-1, shape[2] * shape[3]).double(), 0.5)
    np.testing.assert_allclose([float(found[f"bank_{name}"]) for name in RANKS], expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["impulse", "box"])
def test_banks_of_drawn_filters_as_they_are_run(kind):
    model = create_model("convmixer", image_size=16, patch_size=2, dim=40, depth=2, kernel_size=3, filters=kind, seed=0)
    found = filter_statistics(model, images())
    assert found.layer_name.values.tolist() == ["stem.0", "blocks.0.spatial.0", "blocks.1.spatial.0"]
    drawn = found.isel(layer=1)
    if kind == "box":  # one filter, and so no rank but one
        np.testing.assert_allclose([drawn[f"bank_{name}"] for name in RANKS], 1, rtol=1e-6)
        assert drawn.bank_stable_rank.item() == pytest.approx(1)
    else:  # as many as differ, the stable rank by how often each is drawn; each is a shift of all places
        taps = model.blocks[0].spatial[0].filters().flatten(1).abs().argmax(1).bincount()
        assert drawn.bank_numerical_rank.item() == (taps > 0).sum()
        assert drawn.bank_stable_rank.item() == pytest.approx(40 / int(taps.max()), rel=1e-5)
        for name in RANKS:
            np.testing.assert_allclose(drawn[name], 64, rtol=1e-5)
        assert set(np.unique(drawn.mass.dropna("bin"))) <= {0, 1}


def test_weights_are_those_that_are_used_and_uses_are_told_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(normal(2, 2, 3, 3))

        def forward(self, x):
            x = F.conv2d(x, self.weight, padding=1)
            x = F.conv2d(x, self.weight[:, :, 1:2, 1:2])  # no spatial kernel
            return F.conv2d(weight=self.weight * torch.eye(3), input=x, bias=None, stride=2).mean((2, 3))

    model = Twice()
    found = filter_statistics(model, normal(1, 2, 7, 9))
    assert found.layer_name.values.tolist() == ["Twice", "Twice#2"]
    assert found.outputs_h.values.tolist() == [7, 3] and found.outputs_w.values.tolist() == [9, 4]
    diagonal = (model.weight * torch.eye(3)).detach().reshape(-1, 9).double()
    assert found.bank_stable_rank[1].item() == pytest.approx(ranks_by_numpy(diagonal)[0], rel=1e-6)


def test_convolutions_go_by_their_units_and_the_model_is_left_alone():
    model = create_model("resnet_nano", image_size=16, seed=0).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    found = filter_statistics(model, (image for image in [images(4), images(4)]))
    assert model.training and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    units = feature_variance(model, images(), progress=False)
    kinds = dict(zip(units.depth.values, units.kind.values, strict=True))
    modules = dict(model.named_modules())
    assert found.sizes["layer"] == sum(
        isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1) for module in modules.values()
    )
    for index in range(found.sizes["layer"]):
        here = found.isel(layer=index)
        assert here.kind.item() == kinds[here.depth.item()]
        channels, inputs, *_ = modules[here.layer_name.item()].weight.shape
        assert here.inputs.item() == inputs
        assert int(here.stable_rank.notnull().sum()) == channels
    assert (np.diff(found.depth) >= 0).all() and found.depth[0] == 0 and found.depth[-1] == 1


def test_nothing_to_measure():
    with pytest.raises(ValueError, match="no two-dimensional convolution with a spatial kernel"):
        filters_of(nn.Conv2d(2, 2, 1), channels=2, grid=(4, 4))
    with pytest.raises(ValueError, match="batches were empty"):
        filter_statistics(Net(nn.Conv2d(2, 2, 3)), [])
    with pytest.raises(ValueError, match="tolerance=0"):
        filters_of(nn.Conv2d(2, 2, 3), channels=2, grid=(4, 4), tolerance=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_rank_of_matrices_in_any_precision(dtype):
    assert operator_statistics(torch.eye(196, dtype=dtype), (14, 14)).matrix_rank.item() == 196
    low = normal(196, 3).double() @ normal(3, 196, seed=1).double()
    assert operator_statistics(low.to(dtype), (14, 14)).matrix_rank.item() == 3


def test_operators_of_integers_are_answered_in_words():
    with pytest.raises(TypeError, match=r"operator of torch.int64: .* operator.float\(\)"):
        operator_statistics(torch.eye(4, dtype=torch.long), (2, 2))


@pytest.mark.parametrize("mode", ["circular", "reflect"])
def test_borders_that_are_repeated_are_no_part_of_the_grid(mode):
    options = dict(in_channels=2, out_channels=2, kernel_size=3, padding=1)
    torch.manual_seed(0)
    layer = nn.Conv2d(**options, padding_mode=mode)
    found = filters_of(layer, channels=2, grid=(5, 6))
    assert (found.grid_h.item(), found.grid_w.item()) == (5, 6)
    assert (found.outputs_h.item(), found.outputs_w.item()) == (5, 6)
    # No tap falls on zeros: all count alike.
    strength = layer.weight.detach().double().square().sum(1).sqrt()
    middle = strength[:, 1, 1] / strength.sum((1, 2))
    np.testing.assert_allclose(found.mass[0, :, 0], middle, rtol=1e-6)


def test_filters_with_a_forward_of_none():
    assert filters_of(nn.Conv2d(2, 2, 3), channels=2, grid=(4, 4), forward=None).sizes["layer"] == 1
