"""Rank and reach of token-mixing matrices, against loops, NumPy and known distances."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from vitprobe import results
from vitprobe.attach import spatial_operator
from vitprobe.models.convit import gpsa
from vitprobe.probes.spatial import distance_profile, operator_statistics

every_grid = pytest.mark.parametrize("grid", [(8, 8), (8, 12), (3, 5), (1, 6)])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


def test_statistics_of_nothing_and_of_another_grid():
    with pytest.raises(ValueError, match=r"shape \(9, 9\) on a grid of 2x3.*with 6 queries"):
        operator_statistics(torch.ones(9, 9), (2, 3))
    with pytest.raises(ValueError, match=r"shape \(4, 6\)"):
        operator_statistics(torch.ones(4, 6), (2, 3))
    found = operator_statistics(torch.zeros(1, 6, 6), (2, 3))
    assert found.matrix_rank.item() == 0 and np.isnan(found.nonlocality.item())
