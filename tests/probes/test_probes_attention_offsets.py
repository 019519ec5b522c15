"""Attention mass by offset, against loops over all pairs, closed forms and sum rules."""

import math

import numpy as np
import pytest
import timm
import torch
from fixed_maps import FixedMap, by_loops, dilated, measured, random_maps
from hypothesis import given, settings
from hypothesis import strategies as st

from vitprobe.probes import Nonlocality
from vitprobe.probes.attention import grid_positions
from vitprobe.probes.attention_offsets import AttentionOffsets, attention_offsets, local_mass
from vitprobe.results import check

OFFSETS = ["offset_y", "offset_x"]


def looking(grid, step) -> torch.Tensor:
    """Every patch that has one looks at the patch at an offset, the others at themselves `(query, key)`."""
    places = [tuple(place) for place in grid_positions(grid).int().tolist()]
    maps = torch.zeros(len(places), len(places))
    for query, place in enumerate(places):
        there = (place[0] + step[0], place[1] + step[1])
        maps[query, places.index(there) if there in places else query] = 1
    return maps


def lengths(found):
    return np.hypot(*np.meshgrid(found.offset_y, found.offset_x, indexing="ij"))


def test_one_offset():
    maps = torch.stack([looking((3, 4), (1, -2)), looking((3, 4), (0, 0))])[None, None].expand(2, -1, -1, -1, -1)
    found = measured(AttentionOffsets(), maps, (3, 4))
    assert found.sizes["offset_y"] == 5 and found.sizes["offset_x"] == 7
    # two of three rows and two of four columns have a patch there
    assert found.mass.sel(offset_y=1, offset_x=-2)[0, 0] == pytest.approx(4 / 12)
    assert found.mass.sel(offset_y=0, offset_x=0)[0].values.tolist() == pytest.approx([8 / 12, 1])
    assert found.mean_weight.sel(offset_y=1, offset_x=-2)[0, 0] == pytest.approx(1)
    assert found.mass.sum() == pytest.approx(2)
    np.testing.assert_allclose(found.local_mass[0], [8 / 12, 1], rtol=1e-6)


def test_uniform_attention():
    found = measured(AttentionOffsets(), torch.full((2, 1, 1, 12, 12), 1 / 12), (3, 4))
    np.testing.assert_allclose(found.mass[0, 0], found.uniform_mass[0], rtol=1e-6)
    np.testing.assert_allclose(found.mean_weight, 1 / 12, rtol=1e-6)
    pairs = np.outer([1, 2, 3, 2, 1], [1, 2, 3, 4, 3, 2, 1])
    np.testing.assert_allclose(found.uniform_mass[0], pairs / 144, rtol=1e-12)


@settings(max_examples=25)
@given(
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    prefix=st.integers(0, 2),
    windows=st.integers(1, 2),
    lost=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_loops_over_pairs(grid, prefix, windows, lost, seed):
    """Any grid, with prefix tokens, windows, and a sink whose columns were cut off."""
    tokens = prefix + grid[0] * grid[1]
    maps = random_maps(2, windows, 2, tokens + lost, seed)[..., :tokens, :tokens]
    options = dict(prefix=prefix, sink=lost > 0)
    found = measured(AttentionOffsets(), maps, grid, **options)
    places = torch.cat([torch.full((prefix, 2), math.nan, dtype=torch.float64), grid_positions(grid)])
    places = places.expand(windows, -1, -1)
    for head in (0, 1):
        loops = [by_loops(image[:, head], places)[1] for image in maps]
        for offset in loops[0]:
            each = np.array([mass[offset] for mass in loops])
            here = found.sel(offset_y=offset[0], offset_x=offset[1]).isel(layer=0, head=head)
            assert here.mass.item() == pytest.approx(each.mean(), rel=1e-9)
            assert here.mass_se.item() == pytest.approx(each.std(ddof=1) / math.sqrt(2), rel=1e-6, abs=1e-12)
            queries = (grid[0] - abs(offset[0])) * (grid[1] - abs(offset[1]))
            weight = each.mean() * grid[0] * grid[1] / queries
            assert here.mean_weight.item() == pytest.approx(weight, rel=1e-9)
    np.testing.assert_allclose(found.mass.sum(OFFSETS) + found.prefix_mass, 1, rtol=1e-9)
    # the nonlocality of rows that are not normalised anew, which is the probe's own where nothing is paid elsewhere
    far = (found.mass * lengths(found)).sum(OFFSETS)
    other = measured(Nonlocality(), maps, grid, **options)
    np.testing.assert_allclose(found.prefix_mass, other.prefix_mass, atol=1e-12)
    if not prefix and not lost:
        np.testing.assert_allclose(far, other.nonlocality, rtol=1e-6)
    far = (found.uniform_mass * lengths(found)).sum(OFFSETS)
    np.testing.assert_allclose(far, other.uniform_nonlocality, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 3, 5, 7, 99])
def test_neighbourhoods(size):
    maps = random_maps(4, 1, 2, 13)
    found = measured(AttentionOffsets(neighbourhood=size), maps, (3, 4), prefix=1)
    places = grid_positions((3, 4))
    near = (places[:, None] - places).abs().amax(-1) <= size // 2
    each = (maps[:, 0, :, 1:, 1:] * near).sum((2, 3)).numpy() / 12
    np.testing.assert_allclose(found.local_mass[0], each.mean(0), rtol=1e-9)
    np.testing.assert_allclose(found.local_mass_se[0], each.std(0, ddof=1) / 2, rtol=1e-9)
    np.testing.assert_allclose(local_mass(found, size), found.local_mass, rtol=1e-9)


@pytest.mark.parametrize("size", [0, 2, -1])
def test_neighbourhoods_without_a_middle(size):
    with pytest.raises(ValueError, match="no query in the middle: give an odd size"):
        AttentionOffsets(neighbourhood=size)


def test_dilated_and_padded_windows():
    maps, positions = random_maps(3, 6, 2, 6), dilated((2, 3), (3, 2))
    positions[4, 2] = positions[5, 0] = np.nan  # two tokens that are no patches
    found = measured(AttentionOffsets(), maps, (2, 3), positions=positions)
    assert found.offset_y.values.tolist() == [-3, -2, -1, 0, 1, 2, 3] and found.offset_x[0] == -4
    for head in (0, 1):
        loops = [by_loops(image[:, head], positions)[1] for image in maps]
        expected = {offset: np.mean([mass[offset] for mass in loops]) for offset in loops[0]}
        mass = found.mass.isel(layer=0, head=head).to_series().dropna()
        assert dict(mass) == pytest.approx(expected)  # offsets between the lattice's are not a number
    np.testing.assert_allclose(found.mass.sum(OFFSETS) + found.prefix_mass, 1, rtol=1e-9)


def test_smaller_grids_lie_in_the_middle():
    model = timm.create_model("pit_ti_224", img_size=64, num_classes=0)
    found = attention_offsets(model, torch.randn(2, 3, 64, 64), progress=False)
    check(found)
    assert sorted(set(found.grid_h.values.tolist())) == [2, 4, 7] and float(found.offset_x.max()) == 6
    for layer, side in enumerate(found.grid_h.values):
        mass = found.mass[layer].dropna("head", how="all")
        for dim in OFFSETS:
            assert mass.dropna(dim, how="all")[dim].values.tolist() == list(range(1 - side, side))
        total = mass.sum(OFFSETS) + found.prefix_mass[layer].dropna("head")
        np.testing.assert_allclose(total, 1, rtol=1e-5)


def test_a_network_with_a_class_token():
    maps = random_maps(1, 1, 2, 17)[:, 0].float()
    x = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = attention_offsets(FixedMap(maps), x.split(2), neighbourhood=5, progress=False)
    check(found)
    places = torch.cat([torch.full((1, 2), math.nan), grid_positions((4, 4))])[None]
    expected = by_loops(maps[:, 1].double(), places)[1]
    np.testing.assert_allclose(
        found.mass[0, 1].to_series(), [expected[tuple(o)] for o in found.mass[0, 1].to_series().index], rtol=1e-5
    )
    assert found.probe == "attention_offsets" and '"neighbourhood": 5' in found.config
    assert "5x5" in found.local_mass.long_name
