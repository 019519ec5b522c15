"""Where heads look from one place, against the networks' own maps."""

import numpy as np
import pytest
import timm
import torch

from vitprobe import results
from vitprobe.figures import draw
from vitprobe.models import create_model
from vitprobe.models.attention import GaussianPosition
from vitprobe.probes import AttentionMaps, Nonlocality, attention_maps, nonlocality, operator_map, probe

SIZE, GRID = (16, 24), (4, 6)


def images(count=5, size=SIZE):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(0))


def model(name="vit", **options):
    shape = dict(image_size=SIZE, patch_size=4, num_classes=3, dim=18, depth=2, heads=3, seed=0)
    return create_model(name, **shape | options)


@pytest.mark.parametrize(("query", "place"), [(None, (2, 3)), ((0, 0), (0, 0)), ((3, 1), (3, 1))])
def test_rows_of_the_network_s_own_maps(query, place):
    network, x = model(pool="class").eval(), images()
    attention, seen = network.blocks[0].attention, []
    attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    found = attention_maps(network, x.split(2), query=query, progress=False)
    results.check(found)
    with torch.no_grad():
        network(x)
        maps = attention.weights(seen[-1]).mean(0)[:, 1 + place[0] * 6 + place[1]]
    assert (found.query_y[0], found.query_x[0]) == place
    first = found.isel(layer=0)
    np.testing.assert_allclose(first.attention.values.reshape(3, 24), maps[:, 1:], atol=1e-6)
    np.testing.assert_allclose(first.prefix_mass, maps[:, 0], atol=1e-6)
    assert found.attrs["probe"] == "attention_maps" and len(draw(found).axes) == 2 * 3 + 1


def test_a_convit_s_first_layer_is_its_lattice():
    network = model("convit", dim=18, heads=9, gpsa_layers=1, locality_strength=2.0)
    network.local_blocks[0].attention.gate.data.fill_(40.0)  # position alone
    found = attention_maps(network, images(2), progress=False)
    peaks = found.attention.isel(layer=0).argmax(["y", "x"])
    assert (peaks["y"] - 2).values.tolist() == [-1, -1, -1, 0, 0, 0, 1, 1, 1]
    assert (peaks["x"] - 3).values.tolist() == [-1, 0, 1] * 3


def test_layers_of_other_sizes_are_padded():
    network = timm.create_model("pit_ti_224", img_size=64, num_classes=0)
    found = attention_maps(network, images(2, (64, 64)), progress=False)
    small = found.isel(layer=-1).attention.dropna("y", how="all").dropna("x", how="all")
    assert small.shape == (8, int(found.grid_h[-1]), int(found.grid_w[-1])) != found.attention.shape[1:]
    total = found.attention.sum(["y", "x"]) + found.prefix_mass  # not a number where a layer has fewer heads
    assert total.notnull().sum("head").values.tolist() == 2 * [2] + 6 * [4] + 4 * [8]
    np.testing.assert_allclose(total.values[total.notnull()], 1, rtol=1e-5)
    assert (found.query_y == found.grid_h // 2).all()


def test_one_pass_with_others():
    network, x = model(), images()
    tree = probe(network, x, [AttentionMaps((1, 1)), Nonlocality()], progress=False)
    np.testing.assert_array_equal(
        tree["attention_maps"].attention, attention_maps(network, x, query=(1, 1), progress=False).attention
    )
    np.testing.assert_array_equal(
        tree["nonlocality"]["nonlocality"], nonlocality(network, x, progress=False)["nonlocality"]
    )


@pytest.mark.parametrize("query", [(4, 0), (0, 6), (-1, 0)])
def test_a_query_outside(query):
    with pytest.raises(ValueError, match=r"no patch of a grid of 4x6: give a row below 4 and a column below 6"):
        attention_maps(model(), images(), query=query, progress=False)


def test_rows_of_operators():
    position = GaussianPosition(GRID, 9)
    operator = position().softmax(-1)
    operator[0] = -operator[0]
    found = operator_map(operator, GRID, query=(1, 4))
    results.check(found)
    np.testing.assert_allclose(found.attention.values.reshape(9, 24), operator.detach()[:, 10].abs(), rtol=1e-6)
    assert (found.query_y, found.query_x) == (1, 4) and len(draw(found).axes) == 9 + 1
    with pytest.raises(ValueError, match=r"shape \(9, 24, 24\) on a grid of 4x4.*16 queries"):
        operator_map(operator, (4, 4))
