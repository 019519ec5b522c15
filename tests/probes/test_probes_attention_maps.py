"""Where heads look from one place, against the networks' own maps."""

import importlib

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from fixed_maps import dilated, measured, random_maps

import vitprobe.attach.watch as watch_module
from vitprobe import results
from vitprobe.figures import draw
from vitprobe.models import create_model
from vitprobe.models.attention import GaussianPosition
from vitprobe.probes import AttentionMaps, Nonlocality, attention_maps, nonlocality, operator_map, probe

# The function of that name hides the module among the package's attributes.
attention_maps_module = importlib.import_module("vitprobe.probes.attention_maps")

SIZE, GRID = (16, 24), (4, 6)


def images(count=5, size=SIZE):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(0))


def model(name="vit", **options):
    shape = dict(image_size=SIZE, patch_size=4, num_classes=3, dim=18, depth=2, heads=3, seed=0)
    return create_model(name, **shape | options)


def first_maps(network, x):
    """The first layer's own maps `(image, head, query, key)`."""
    attention, seen = network.blocks[0].attention, []
    handle = attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        network(x)
        handle.remove()
        return attention.weights(seen[0])


@pytest.mark.parametrize(("queries", "place"), [("middle", (2, 3)), ((0, 0), (0, 0)), ((3, 1), (3, 1))])
def test_rows_of_the_network_s_own_maps(queries, place):
    network, x = model(pool="class").eval(), images()
    maps = first_maps(network, x)[:, :, 1 + place[0] * 6 + place[1]]
    found = attention_maps(network, x.split(2), queries=queries, progress=False)
    results.check(found)
    assert (found.query_y[0], found.query_x[0]) == place
    first = found.isel(layer=0)
    for name, each in (("attention", maps[..., 1:].unflatten(-1, GRID)), ("prefix_mass", maps[..., 0])):
        np.testing.assert_allclose(first[name], each.mean(0), atol=1e-6)
        np.testing.assert_allclose(first[f"{name}_se"], each.std(0) / 5**0.5, atol=1e-6)
    assert found.attrs["probe"] == "attention_maps" and len(draw(found).axes) == 2 * 3 + 1


def test_all_queries():
    network, x = model(pool="class").eval(), images()
    maps = first_maps(network, x)[:, :, 1:]
    found = attention_maps(network, x.split(2), queries="all", progress=False)
    results.check(found)
    assert found.attention.dims == ("layer", "head", "query", "y", "x")
    np.testing.assert_allclose(found.attention[0].values.reshape(3, 24, 24), maps[..., 1:].mean(0), atol=1e-6)
    np.testing.assert_allclose(found.prefix_mass[0], maps[..., 0].mean(0), atol=1e-6)
    np.testing.assert_array_equal(found.query_y[1] * 6 + found.query_x[1], np.arange(24))


@pytest.mark.parametrize("chosen", [[0], [4], [3, 1], 3, [4, 0, 4]])
@pytest.mark.parametrize("queries", ["middle", "all"])
def test_chosen_images(chosen, queries, monkeypatch):
    monkeypatch.setattr(watch_module, "CHUNK", 3 * 25 * 25)  # one image at a time
    network, x = model(pool="class").eval(), images()
    which = list(range(chosen)) if isinstance(chosen, int) else sorted(set(chosen))
    maps = first_maps(network, x)[which][:, :, 1:, 1:]
    found = attention_maps(network, x.split(2), images=chosen, queries=queries, progress=False)
    results.check(found)
    assert found.sample.values.tolist() == which
    np.testing.assert_array_equal(found.image, x[which])
    expected = maps if queries == "all" else maps[:, :, 15]
    np.testing.assert_allclose(found.attention[:, 0].values.reshape(expected.shape), expected, atol=1e-6)
    whole = attention_maps(network, x[which], queries=queries, progress=False)
    np.testing.assert_allclose(found.attention.mean("sample"), whole.attention, atol=1e-6)


def test_no_batch_after_the_last_chosen_image_is_looked_at():
    def batches():
        yield from images(6).split(2)
        raise AssertionError("a batch was asked for that nobody needs")

    found = attention_maps(model(), batches(), images=[1, 5], progress=False)
    assert found.images == 6 and found.sizes["sample"] == 2


def test_images_that_do_not_come():
    with pytest.raises(ValueError, match=r"image 9 was asked for, but 5 images came by: give images= below 5"):
        attention_maps(model(), images(), images=[0, 9], progress=False)


@pytest.mark.parametrize("chosen", [0, -1, [], [-1, 2]])
def test_images_that_are_none(chosen):
    with pytest.raises(ValueError, match="how many images to keep, or a list of their places"):
        AttentionMaps(images=chosen)


@pytest.mark.parametrize(("options", "message"), [
    (dict(queries="centre"), r"unknown queries 'centre'.*Known: all, middle"),
    (dict(queries=(1, 2, 3)), "give 'middle', 'all', or the row and column of a patch"),
    (dict(images="all"), r"unknown images 'all'.*Known: mean"),
])  # fmt: skip
def test_options_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionMaps(**options)


def test_a_file_holds_what_memory_would(tmp_path):
    network, path = timm.create_model("pit_ti_224", img_size=64, num_classes=0), tmp_path / "new" / "maps.nc"
    x = images(7, (64, 64))
    options = dict(images=[0, 2, 3, 6], queries="all", progress=False)
    opened = attention_maps(network, x.split(2), path=path, **options)
    kept = attention_maps(network, x.split(2), **options)
    assert path.stat().st_size < kept.nbytes and not opened.attention.variable._in_memory
    loaded = results.load(path)
    results.check(loaded)
    xr.testing.assert_equal(loaded, kept)
    same = {name for name in kept.attrs if kept.attrs[name] == loaded.attrs[name]}
    assert set(kept.attrs) - same <= {"history"}
    for name in kept.variables:
        assert loaded[name].attrs == kept[name].attrs and loaded[name].dtype == kept[name].dtype
    results.save(loaded, tmp_path / "again.nc")
    xr.testing.assert_equal(results.load(tmp_path / "again.nc"), kept)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "maps.nc"
    network = model()
    attention_maps(network, images(), images=2, path=path, progress=False).close()
    before = path.read_bytes()

    def broken():
        yield images(2)
        raise OSError("the disk of the data is gone")

    with pytest.raises(OSError, match="gone"):
        attention_maps(network, broken(), images=4, path=path, progress=False)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("options", [dict(path="maps.png", images=1), dict(path="maps.nc")])
def test_files_for_nothing(options):
    with pytest.raises(ValueError, match=r"a file <stem>\.nc holds the maps of chosen images"):
        attention_maps(model(), images(), **options)


def test_more_than_memory_holds_is_refused(monkeypatch, tmp_path):
    network, x = model(pool="class"), images()
    each = 2 * 3 * 24 * 24 * 4  # bytes of all maps of an image in single precision
    pixels = x[0].numel() * 4
    monkeypatch.setattr(attention_maps_module, "MEMORY", 3 * (each + pixels))
    found = attention_maps(network, x, queries="all", images=3, progress=False)
    assert found.attention.nbytes == 3 * each
    with pytest.raises(ValueError, match=r"GiB of maps or more .* give one query, fewer images, or a file: .*path="):
        attention_maps(network, x, queries="all", images=4, progress=False)
    attention_maps(network, x, queries="all", images=4, path=tmp_path / "maps.nc", progress=False).close()
    monkeypatch.setattr(attention_maps_module, "MEMORY", 4 * each - 1)  # mean and squares in double precision
    with pytest.raises(ValueError, match=r"are allowed: give one query\."):
        attention_maps(network, x, queries="all", progress=False)
    attention_maps(network, x, progress=False)


def test_dilated_windows_are_put_in_order():
    """Four windows of every other patch: the map of a window's query by its rank in the window."""
    maps, positions = random_maps(2, 4, 2, 6), dilated((2, 3), (2, 2))
    shuffled = [3, 0, 5, 1, 4, 2]
    found = measured(AttentionMaps(queries="all"), maps, (2, 3), positions=positions)
    np.testing.assert_allclose(found.attention[0].values.reshape(2, 6, 6), maps.mean((0, 1)), rtol=1e-6)
    mixed = measured(
        AttentionMaps(queries="all"),
        maps[..., shuffled, :][..., shuffled],
        (2, 3),
        positions=positions[:, shuffled],
    )
    xr.testing.assert_allclose(mixed, found)
    positions[1, 3] = np.nan  # a window with padding is left out
    whole = measured(AttentionMaps((1, 2)), maps, (2, 3), positions=positions)
    expected = maps[:, [0, 2, 3], :, 5].mean((0, 1))
    np.testing.assert_allclose(whole.attention[0].values.reshape(2, 6), expected, rtol=1e-6)
    positions[:, 3] = np.nan
    with pytest.raises(ValueError, match="no window of attention holds 2x3 patches without padding"):
        measured(AttentionMaps(), maps, (2, 3), positions=positions)


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
        tree["attention_maps"].attention, attention_maps(network, x, queries=(1, 1), progress=False).attention
    )
    np.testing.assert_array_equal(
        tree["nonlocality"]["nonlocality"], nonlocality(network, x, progress=False)["nonlocality"]
    )


@pytest.mark.parametrize("query", [(4, 0), (0, 6), (-1, 0)])
def test_a_query_outside(query):
    with pytest.raises(ValueError, match=r"no patch of a grid of 4x6: give a row below 4 and a column below 6"):
        attention_maps(model(), images(), queries=query, progress=False)


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


class Saying(list):
    """Batches that say what they are."""

    @property
    def description(self):
        return {"split": "test"}


def test_maps_of_chosen_images_say_what_they_were_measured_on(tmp_path):
    model = create_model("vit_nano", image_size=8, seed=0)
    batches = Saying([torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))])
    assert attention_maps(model, batches, images=2, progress=False).attrs["split"] == "test"
    with attention_maps(model, batches, images=2, path=tmp_path / "maps.nc", progress=False) as ds:
        assert ds.attrs["split"] == "test"
