"""Centred kernel alignment, against its definitions written as loops, and what must not change it."""

import copy
import importlib
import json
import math
from itertools import permutations

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t
from torch import nn

from vitprobe.models import create_model
from vitprobe.probes import Fourier, probe
from vitprobe.probes.cka import CKA, block_structure, centred, cka, gram, jackknife_error
from vitprobe.results import check, load, save, stack_runs

cka_module = importlib.import_module("vitprobe.probes.cka")  # the package's name `cka` is the function


class Shown(nn.Module):
    """A model whose units `parts.0`, `parts.1`, ... are the channels of its input, so many each."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels
        self.parts = nn.ModuleList(nn.Identity() for _ in channels)

    def forward(self, x):
        ends = np.cumsum([0, *self.channels])
        shown = [part(x[:, a:b]) for part, a, b in zip(self.parts, ends, ends[1:], strict=False)]
        return torch.cat(shown, 1).mean((2, 3))


def measure(*features, batch=8, **options):
    """`cka` of features `(image, channel, row, column)` themselves, one unit each."""
    x = torch.cat(features, 1)
    options = {"layers": "parts.*", "progress": False} | options
    return cka(Shown([part.shape[1] for part in features]), x.split(batch), **options)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(name="vit_nano", seed=0, **options):
    return create_model(name, image_size=8, seed=seed, **options)


def images(count=24, seed=0):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


# --- the definition ---------------------------------------------------------------------------------


def hsic_by_loops(k, m):
    """HSIC_1 as Song et al. (2012) write it: three sums over the entries off the diagonal."""
    n = len(k)
    trace = sum(k[i, j] * m[i, j] for i in range(n) for j in range(n) if i != j)
    total_k = sum(k[i, j] for i in range(n) for j in range(n) if i != j)
    total_l = sum(m[i, j] for i in range(n) for j in range(n) if i != j)
    chain = sum(k[i, j] * m[j, q] for i in range(n) for j in range(n) for q in range(n) if i != j and j != q)
    return (trace + total_k * total_l / (n - 1) / (n - 2) - 2 / (n - 2) * chain) / (n * (n - 3))


def hsic_by_tuples(k, m):
    """The same as the U-statistic it is: the mean of its kernel over all ordered quadruples of different images."""
    terms = [k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]) for i, j, q, r in permutations(range(len(k)), 4)]
    return np.mean(terms)


def biased_hsic(k, m):
    h = np.eye(len(k)) - 1 / len(k)
    return np.trace(k @ h @ m @ h) / (len(k) - 1) ** 2


def kernels(n, seed=0):
    """Two linear kernels that have something in common, of features with a mean."""
    x = draw(n, 3, seed=seed) + 1
    y = torch.cat([x[:, :1] + draw(n, 1, seed=seed + 1), draw(n, 2, seed=seed + 2)], 1) - 2
    return x, y, (x @ x.T).numpy(), (y @ y.T).numpy()


@pytest.mark.parametrize("n", [4, 5, 6, 9])
@pytest.mark.parametrize("hsic", [hsic_by_loops, hsic_by_tuples, biased_hsic])
def test_hsic_is_the_product_of_centred_gram_matrices(n, hsic):
    x, y, k, m = kernels(n)
    estimator = "biased" if hsic is biased_hsic else "unbiased"
    found = (centred(gram([x]), estimator) * centred(gram([y]), estimator)).sum()
    assert float(found) == pytest.approx(hsic(k, m), rel=1e-10)


def test_images_in_any_pairing_have_no_hsic_on_average():
    """Over all pairings of the two sides' images, which makes them independent, HSIC_1 is zero; the other is not."""
    x, y, *_ = kernels(5)
    k, m, biased_k, biased_l = (
        centred(gram([side]), estimator) for estimator in ("unbiased", "biased") for side in (x, y)
    )
    pairings = [list(order) for order in permutations(range(5))]
    mean = np.mean([float((k * m[order][:, order]).sum()) for order in pairings])
    assert abs(mean) < 1e-12 < 1e-2 < abs(float((k * m).sum()))
    assert np.mean([float((biased_k * biased_l[order][:, order]).sum()) for order in pairings]) > 0.1


def by_hand(features, sizes, hsic):
    """CKA of all pairs of features `(image, feature)`: sums over batches, each times its images, and the ratio."""
    sums = np.zeros((len(features), len(features)))
    for parts in zip(*(side.double().split(sizes) for side in features), strict=True):
        grams = [(side @ side.T).numpy() for side in parts]
        n = len(parts[0])
        sums += [[n * hsic(k, m) for m in grams] for k in grams]
    return sums / np.sqrt(np.outer(np.diag(sums), np.diag(sums)))


@pytest.mark.parametrize(("estimator", "hsic"), [("unbiased", hsic_by_loops), ("biased", biased_hsic)])
def test_ratio_of_sums_over_unequal_batches(estimator, hsic):
    x, other = draw(19, 2, 2, 3), draw(19, 4, 2, 3, seed=1)
    y = 0.5 * x.repeat(1, 2, 1, 1) + other
    found = measure(x, y, batch=7, estimator=estimator)
    expected = by_hand([x.flatten(1), y.flatten(1)], [7, 7, 5], hsic)
    np.testing.assert_allclose(found.cka, expected, rtol=1e-10)
    assert 0.1 < found.cka[0, 1] < 0.9
    assert found.attrs["estimator"] == estimator
    assert found.batch_images.values.tolist() == [7, 7, 5]


@pytest.mark.parametrize("tokens", ["patches", "all"])
def test_prefix_tokens_are_left_out_unless_asked_for(tokens):
    model = build("vit", patch_size=4, dim=12, depth=2, registers=2)
    kept = []
    hooks = [block.register_forward_hook(lambda *call: kept.append(call[2])) for block in model.blocks]
    with torch.no_grad():
        model.eval()(images(8))
    for hook in hooks:
        hook.remove()
    first = 0 if tokens == "all" else 3
    expected = by_hand([x[:, first:].flatten(1) for x in kept], [8], hsic_by_loops)
    found = cka(model, images(8), tokens=tokens, layers="blocks.*", progress=False)
    np.testing.assert_allclose(found.cka, expected, rtol=1e-5)
    assert found.attrs["tokens"] == tokens and found.prefix.values.tolist() == [3, 3]


# --- what must not change it ------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    scale=st.floats(-1e3, 1e3).filter(lambda s: abs(s) > 1e-3),
    offset=st.sampled_from([0.0, 1.0, -30.0]),
    channels=st.integers(1, 5),
    seed=st.integers(0, 999),
    estimator=st.sampled_from(["unbiased", "biased"]),
)
def test_rotations_scales_and_shifts_do_not_matter(scale, offset, channels, seed, estimator):
    x, y = draw(12, channels, 2, 2, seed=seed), draw(12, 3, 2, 2, seed=seed + 1)
    rotation = torch.linalg.qr(draw(4 * channels, 4 * channels, seed=seed + 2)).Q
    turned = (scale * (x.flatten(1) @ rotation) + offset).reshape(x.shape)
    found = measure(x, turned, y, batch=6, estimator=estimator).cka.values
    np.testing.assert_allclose(np.diag(found), 1, rtol=1e-14)
    np.testing.assert_allclose(found[0, 1], 1, rtol=1e-9)
    np.testing.assert_allclose(found[0, 2], found[1, 2], rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found, found.T, rtol=1e-12, atol=1e-14)


def test_order_of_batches_and_of_images_does_not_matter():
    x, y = draw(24, 2, 3, 3), draw(24, 2, 3, 3, seed=1)
    y += x
    forward = measure(x, y)
    backward = measure(x.flip(0), y.flip(0))
    np.testing.assert_allclose(backward.cka, forward.cka, rtol=1e-12)
    np.testing.assert_allclose(backward.cka_se, forward.cka_se, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(backward.cka_without, forward.cka_without[::-1], rtol=1e-12)


def test_memory_layout_does_not_matter():
    x = draw(8, 3, 4, 5)
    expected = gram([x])
    for same in (x.permute(0, 2, 3, 1), x.contiguous(memory_format=torch.channels_last), x[:, :, ::1].mT):
        torch.testing.assert_close(gram([same]), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gram([x[:, :1], x[:, 1:]]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_features_are_taken_in_chunks(chunk, monkeypatch):
    x = draw(6, 3, 4, 5)
    flat = x.flatten(1) - x.flatten(1).mean(0)
    monkeypatch.setattr(cka_module, "chunk_size", lambda numbers, device: chunk)
    torch.testing.assert_close(gram([x]), flat @ flat.T, rtol=1e-12, atol=1e-12)


def test_single_precision_is_enough_also_around_a_large_mean():
    x = draw(32, 8, 6, 6).float() + 300
    y = (0.2 * x.mean(1, keepdim=True) + draw(32, 8, 6, 6, seed=1) - 500).float()
    single = measure(x, y, batch=16)
    double = measure(x.double(), y.double(), batch=16)
    assert abs(double.cka[0, 1]) > 1e-3
    np.testing.assert_allclose(single.cka, double.cka, atol=1e-6)
    # Without its mean taken off, single precision fails: the test is one.
    flat = x.flatten(1)
    assert not np.allclose(centred((flat @ flat.T).double()), centred(gram([flat])), rtol=1e-3)


def test_autocast_of_the_forward_does_not_reach_the_products():
    x, y = draw(16, 3, 4, 4).float(), draw(16, 3, 4, 4, seed=1).float()

    def under_autocast(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    xr.testing.assert_equal(measure(x, x + y, forward=under_autocast), measure(x, x + y))


def test_half_precision_models():
    model, x = build().bfloat16(), images()
    expected = cka(build(), x, progress=False)
    np.testing.assert_allclose(cka(model, x, progress=False).cka, expected.cka, atol=0.02)


# --- what it is for ---------------------------------------------------------------------------------


def test_independent_features_are_unlike_only_without_bias():
    x, y = draw(320, 64, 3, 3), draw(320, 64, 3, 3, seed=1)
    unbiased = measure(x, y, batch=32)
    assert abs(unbiased.cka[0, 1]) < 4 * unbiased.cka_se[0, 1] < 0.15
    assert measure(x, y, batch=32, estimator="biased").cka[0, 1] > 0.9


def test_small_batches_estimate_what_one_large_batch_does():
    """Features of known covariance: CKA tends to 0.5, whatever the batches' size; of the biased one it does not."""
    # Two features of unit variance, one of them shared: cross-covariance of squared norm 1, of each with itself 2.
    x = draw(1200, 2, 1, 1)
    y = torch.cat([x[:, :1], draw(1200, 1, 1, 1, seed=1)], 1)
    whole = measure(x, y, batch=1200)
    assert bool(whole.cka_se.isnull().all()) and whole.sizes["batch"] == 1
    assert float(whole.cka[0, 1]) == pytest.approx(0.5, abs=0.05)
    for batch in (6, 24):
        small = measure(x, y, batch=batch)
        assert abs(small.cka[0, 1] - whole.cka[0, 1]) < 3 * small.cka_se[0, 1] < 0.2
        assert small.batches == 1200 // batch
    biased = measure(x, y, batch=6, estimator="biased")
    assert abs(biased.cka[0, 1] - whole.cka[0, 1]) > 3 * biased.cka_se[0, 1]


def test_standard_error_is_the_spread_between_data_sets():
    found = []
    for seed in range(60):
        x = draw(160, 3, 2, 1, seed=3 * seed)
        y = x + draw(160, 3, 2, 1, seed=3 * seed + 1)
        found.append(measure(x, y, batch=8))
    values, errors = (np.array([ds[name].values[0, 1] for ds in found]) for name in ("cka", "cka_se"))
    assert np.sqrt((errors**2).mean()) == pytest.approx(values.std(ddof=1), rel=0.25)
    np.testing.assert_array_equal([np.diag(ds.cka_se) for ds in found], 0)


def test_jackknife_by_hand():
    rng = np.random.default_rng(0)
    # Of equal groups the ordinary one, for any statistic.
    without = rng.normal(size=(7, 2))
    expected = np.sqrt(6 / 7 * ((without - without.mean(0)) ** 2).sum(0))
    np.testing.assert_allclose(jackknife_error(rng.normal(size=2), without, np.full(7, 5)), expected)
    # Of a mean over unequal groups: each group's squared deviation over its odds.
    groups, sizes = rng.normal(size=6), np.array([8, 8, 8, 8, 8, 3])
    mean = np.average(groups, weights=sizes)
    left = np.array([np.average(np.delete(groups, i), weights=np.delete(sizes, i)) for i in range(6)])
    expected = math.sqrt(((groups - mean) ** 2 / (sizes.sum() / sizes - 1)).mean())
    assert float(jackknife_error(mean, left, sizes)) == pytest.approx(expected, rel=1e-12)
    assert np.isnan(jackknife_error(mean, left[:1] * np.nan, sizes[:1]))


def test_leaving_out_a_batch_is_measuring_the_others():
    x, y = draw(29, 2, 3, 3), draw(29, 2, 3, 3, seed=1)
    y += x
    found = measure(x, y)
    assert found.batch_images.values.tolist() == [8, 8, 8, 5]
    for batch, part in enumerate(torch.arange(29).split(8)):
        rest = np.setdiff1d(np.arange(29), part)
        sizes = [8] * (len(rest) // 8) + [5] * (len(rest) % 8 > 0)
        expected = by_hand([x[rest].flatten(1), y[rest].flatten(1)], sizes, hsic_by_loops)
        np.testing.assert_allclose(found.cka_without[batch], expected, rtol=1e-9)


def test_memory_does_not_grow_with_the_batches(monkeypatch):
    monkeypatch.setattr(cka_module, "GROUPS", 3)
    x, y = draw(40, 2, 2, 2), draw(40, 2, 2, 2, seed=1)
    y += x
    one = CKA()
    found = one.run(Shown([2, 2]), torch.cat([x, y], 1).split(5), layers="parts.*", progress=False)
    assert len(one._groups) == 3 and not one._grams
    assert found.batch_images.values.tolist() == [15, 15, 10] and found.batches == 8
    np.testing.assert_allclose(found.cka, by_hand([x.flatten(1), y.flatten(1)], [5] * 8, hsic_by_loops), rtol=1e-10)
    rest = [i for i in range(40) if i // 5 % 3 != 0]
    expected = by_hand([x[rest].flatten(1), y[rest].flatten(1)], [5] * 5, hsic_by_loops)
    np.testing.assert_allclose(found.cka_without[0], expected, rtol=1e-9)
    assert bool((found.cka_se.values >= 0).all()) and found.cka_se[0, 1] > 0


def test_short_batches_are_left_out_and_counted():
    x, y = draw(19, 2, 2, 2), draw(19, 2, 2, 2, seed=1)
    found = measure(x, x + y)
    expected = measure(x[:16], (x + y)[:16])
    xr.testing.assert_equal(found, expected)
    assert (found.images, found.batches, found.batches_left_out) == (16, 2, 1)
    assert expected.batches_left_out == 0
    with pytest.raises(ValueError, match=r"all 7 batches have fewer than 4 images.*DataLoader\(\.\.\., batch_size="):
        measure(x, y, batch=3)


def test_constant_units_have_no_number():
    x, y = draw(14, 2, 2, 2).float(), draw(14, 2, 2, 2, seed=1).float()
    constant = torch.full((14, 3, 2, 2), 0.3)
    assert (constant[:7] - constant[:7].mean(0)).any()  # the mean of equal numbers is another number
    found = measure(x, constant, x + y, batch=7)
    assert found.cka.isnull().values.tolist() == [[False, True, False], [True] * 3, [False, True, False]]
    np.testing.assert_array_equal(found.cka_se.isnull(), found.cka.isnull())
    assert json.loads(found.constant_units) == ["parts.1"]
    assert "constant_units" not in measure(x, x + y).attrs
    check(found)


# --- two models -------------------------------------------------------------------------------------


def test_a_model_beside_itself_is_the_model_alone():
    model = build()
    alone = cka(model, images().split(8), progress=False)
    beside = cka(model, images().split(8), other=model, progress=False)
    np.testing.assert_allclose(beside.cka, alone.cka, rtol=1e-12)
    np.testing.assert_allclose(beside.cka_without, alone.cka_without, rtol=1e-12)
    copied = cka(model, images().split(8), other=copy.deepcopy(model), progress=False)
    xr.testing.assert_equal(copied, beside)


def test_two_models_are_compared_on_the_same_images():
    vit, resnet = build(), build("resnet_nano")
    found = cka(vit, images(20).split(8), other=resnet, progress=False)
    turned = cka(resnet, images(20).split(8), other=vit, progress=False)
    alone = {name: cka(model, images(), progress=False) for name, model in (("", vit), ("_other", resnet))}
    for side, name in (("layer", ""), ("layer_other", "_other")):
        for coordinate in ("layer_name", "kind", "depth", "grid_h", "prefix"):
            expected = alone[name][coordinate].values
            np.testing.assert_array_equal(found[coordinate + name], expected)
            assert found[coordinate + name].dims == (side,)
    np.testing.assert_allclose(found.cka, turned.cka.values.T, rtol=1e-12)
    np.testing.assert_allclose(found.cka_se, turned.cka_se.values.T, rtol=1e-9)
    assert found.attrs["model_class_other"].endswith("ResNet") and "block_structure" not in found.attrs
    assert found.attrs["parameters_other"] == sum(p.numel() for p in resnet.parameters())


def test_features_of_two_models_by_hand():
    x, y = draw(13, 2, 2, 2), draw(13, 2, 2, 2, seed=1)
    y += x
    options = {"layers": "parts.*", "progress": False}

    def second(model, batch):
        return model(batch[:, [2, 3, 0]])

    batches = torch.cat([x, y], 1).split([8, 5])
    found = cka(Shown([2, 2]), batches, other=Shown([2, 1]), other_options={"forward": second}, **options)
    features = [side.flatten(1) for side in (x, y, y, x[:, :1])]
    expected = by_hand(features, [8, 5], hsic_by_loops)[:2, 2:]
    np.testing.assert_allclose(found.cka, expected, rtol=1e-10)


def test_seeds_of_a_network_are_alike_and_not_the_same():
    found = cka(build(seed=0), images().split(12), other=build(seed=1), progress=False)
    diagonal = np.diag(found.cka)
    assert (diagonal < 0.999).all() and diagonal[0] > 0.5


def test_both_models_are_handed_back_as_they_were():
    model, other = build().train(), build("resnet_nano").train()
    other.double()
    before = copy.deepcopy(other.state_dict())
    hooks, random = copy.copy(nn.modules.module._global_forward_hooks), torch.get_rng_state()
    cka(model, images().split(8), other=nn.DataParallel(other), progress=False)
    assert all(module.training for net in (model, other) for module in net.modules())
    assert {p.dtype for p in other.parameters()} == {torch.float64}
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert nn.modules.module._global_forward_hooks == hooks
    assert torch.equal(torch.get_rng_state(), random)


def test_layers_of_the_other_model():
    options = {"layers": ["blocks.*"], "progress": False}
    found = cka(build(), images(), other=build("resnet_nano"), other_options={"layers": "auto"}, **options)
    assert set(found.kind.values) == {"module"} and "stem" in found.kind_other.values
    with pytest.raises(ValueError, match="no module of the model matches layers='blocks"):
        cka(build("resnet_nano"), images(), other=build(), layers="stages", other_options={"layers": "blocks.x"})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"estimator": "unbaised"}, ValueError, r"unknown estimator 'unbaised'\. Did you mean 'unbiased'"),
        ({"tokens": "cls"}, ValueError, r"unknown tokens 'cls'.*Known: all, patches"),
        ({"other_options": {"prefix": 1}}, ValueError, r"are those of a second model: give other="),
        ({"other": nn.Identity(), "other_options": {"layer": "x"}}, ValueError, "Did you mean 'layers'"),
        ({"other": 3}, TypeError, r"needs a torch\.nn\.Module, not int"),
        (
            {"other": nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.ReLU(), nn.Linear(4, 2))},
            ValueError,
            "the other model's forward pass shows no units",
        ),
    ],
)
def test_errors_say_what_to_do(options, error, words):
    with pytest.raises(error, match=words):
        cka(build(), images(), progress=False, **options)


# --- the dataset ------------------------------------------------------------------------------------


def test_in_the_pass_of_other_probes():
    both = probe(build(), images().split(8), [Fourier(), CKA()], progress=False)
    xr.testing.assert_equal(both["cka"].to_dataset(), cka(build(), images().split(8), progress=False))
    xr.testing.assert_equal(both["fourier"].to_dataset(), Fourier().run(build(), images().split(8), progress=False))


def test_dataset_keeps_the_schema(tmp_path):
    found = cka(build("alternet_nano"), images(30).split(8), progress=False)
    check(found)
    xr.testing.assert_identical(load(save(found, tmp_path / "cka.nc")), found)
    assert found.cka.dims == ("layer", "layer_other") and found.cka_without.dims == ("batch", "layer", "layer_other")
    assert found.layer_name_other.values.tolist() == found.layer_name.values.tolist()
    np.testing.assert_array_equal(np.diag(found.cka), 1)
    assert json.loads(found.config) == {"probe": "cka", "estimator": "unbiased", "tokens": "patches"}
    assert (found.images, found.batches) == (30, 4)


# --- blocks -----------------------------------------------------------------------------------------


def made_up(matrix, grids, *, noise=0.0, batches=5):
    """A dataset of `cka` with a known matrix, whose replicates scatter."""
    units = len(matrix)
    rng = np.random.default_rng(0)
    shifts = noise * rng.normal(size=(batches, 1, 1)) * (1 - np.eye(units))
    coords = {"batch": np.arange(batches), "batch_images": ("batch", np.full(batches, 10))}
    for suffix in ("", "_other"):
        layer = f"layer{suffix}"
        coords |= {
            layer: np.arange(units),
            f"layer_name{suffix}": (layer, [f"units.{i}" for i in range(units)]),
            **{f"{side}{suffix}": (layer, grids) for side in ("grid_h", "grid_w")},
        }
    described = {"long_name": "made up", "units": "1"}
    pairs = ("layer", "layer_other")
    data = {
        "cka": (pairs, matrix, described),
        "cka_without": (("batch", *pairs), matrix + shifts, described),
    }
    return xr.Dataset(data, coords, {"probe": "cka", "title": "t"})


GRIDS = [8, 8, 8, 4, 4, 2, 2, 2]


def blocks(within, across):
    same = np.equal.outer(GRIDS, GRIDS)
    return np.where(np.eye(len(GRIDS)), 1.0, np.where(same, within, across))


def test_block_structure_of_blocks_is_their_contrast():
    found = block_structure(made_up(blocks(0.9, 0.2), GRIDS))
    assert float(found.within_stages) == pytest.approx(0.9)
    assert float(found.across_stages) == pytest.approx(0.2)
    assert float(found.block_structure) == pytest.approx(0.7)
    assert float(found.block_structure_equal_distance) == pytest.approx(0.7)
    assert json.loads(found.stages) == [0, 0, 0, 1, 1, 2, 2, 2] and found.stages_from == "grid"


def test_nearness_alone_is_no_block_structure_at_equal_distance():
    distance = np.abs(np.subtract.outer(np.arange(8), np.arange(8)))
    found = block_structure(made_up(0.9**distance, GRIDS))
    within = np.equal.outer(GRIDS, GRIDS) & (distance > 0)
    across = ~np.equal.outer(GRIDS, GRIDS)
    expected = (0.9**distance)[within].mean() - (0.9**distance)[across].mean()
    assert float(found.block_structure) == pytest.approx(expected) and expected > 0.1
    assert float(found.block_structure_equal_distance) == pytest.approx(0, abs=1e-12)


def test_equal_distance_weighs_distances_by_their_pairs_within():
    matrix = np.random.default_rng(1).uniform(size=(5, 5))
    matrix = (matrix + matrix.T) / 2
    found = block_structure(made_up(matrix, [4, 4, 4, 2, 2]))
    steps = {
        1: matrix[[0, 1, 3], [1, 2, 4]].mean() - matrix[2, 3],  # three pairs within
        2: matrix[0, 2] - matrix[[1, 2], [3, 4]].mean(),  # one
    }
    assert float(found.block_structure_equal_distance) == pytest.approx((3 * steps[1] + steps[2]) / 4)


def test_interval_of_block_structure_is_the_jackknifes():
    matrix = blocks(0.9, 0.2)
    ds = made_up(matrix, GRIDS)
    # Replicates that scatter within stages only: the statistic of a replicate is known.
    shifts = np.array([0.01, -0.02, 0.005, 0.0, 0.005])
    same = np.equal.outer(GRIDS, GRIDS) & ~np.eye(8, dtype=bool)
    ds["cka_without"] = ds.cka_without + xr.DataArray(shifts[:, None, None] * same, dims=ds.cka_without.dims)
    ds["cka_without"].attrs = {"long_name": "made up", "units": "1"}
    found = block_structure(ds)
    error = math.sqrt(4 / 5 * (shifts**2).sum())
    for name, value in (("within_stages", 0.9), ("block_structure", 0.7)):
        assert float(found[f"{name}_se"]) == pytest.approx(error)
        assert float(found[f"{name}_high"] - value) == pytest.approx(t.ppf(0.975, 4) * error)
        assert float(value - found[f"{name}_low"]) == pytest.approx(t.ppf(0.975, 4) * error)
    assert float(found.across_stages_se) == pytest.approx(0, abs=1e-12)
    alone = block_structure(made_up(matrix, GRIDS, batches=1))
    assert (
        np.isfinite(alone.block_structure) and alone.block_structure_se.isnull() and alone.block_structure_low.isnull()
    )


@pytest.mark.parametrize(
    ("stages", "expected", "source"),
    [
        (None, [0, 0, 1, 1, 2, 2, 3, 3], "pseudo"),
        (2, [0, 0, 0, 0, 1, 1, 1, 1], "pseudo"),
        (3, [0, 0, 0, 1, 1, 1, 2, 2], "pseudo"),
        ([5, 5, 5, 5, 5, 5, 1, 1], [5, 5, 5, 5, 5, 5, 1, 1], "given"),
    ],
)
def test_stages_of_networks_with_one_grid(stages, expected, source):
    found = block_structure(made_up(blocks(0.9, 0.2), [4] * 8), stages)
    assert json.loads(found.stages) == expected and found.stages_from == source


def test_units_without_a_number_are_left_out_of_blocks():
    matrix = blocks(0.9, 0.2)
    matrix[1] = matrix[:, 1] = np.nan
    found = block_structure(made_up(matrix, GRIDS))
    assert float(found.block_structure) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (1, "1 stages of 8 units: give stages from 2"),
        (9, "9 stages of 8 units"),
        ([0, 1], "give one whole number per unit"),
        ([0.5] * 8, "give one whole number per unit"),
        ([0] * 8, "no pair of units across stages"),
        (list(range(8)), "no pair of units within a stage"),
    ],
)
def test_stages_that_do_not_fit(stages, words):
    with pytest.raises(ValueError, match=words):
        block_structure(made_up(blocks(0.9, 0.2), GRIDS), stages)


def test_blocks_of_two_models_are_refused():
    found = cka(build(), images(), other=build(seed=1), progress=False)
    with pytest.raises(ValueError, match=r"compares two models, .*: give cka\(model, batches\)"):
        block_structure(found)


def test_blocks_of_measured_and_of_stacked_runs():
    names = ("resnet_nano", "vit_nano")
    runs = [
        cka(build(name), images(20 + 8 * i).split(8), progress=False).assign_attrs(model=name, seed=i)
        for i, name in enumerate(names)
    ]
    alone = [block_structure(run) for run in runs]
    assert [ds.stages_from for ds in alone] == ["grid", "pseudo"]
    for run, ds in zip(runs, alone, strict=True):
        assert run.attrs["block_structure"] == ds.block_structure and run.attrs["block_structure_se"] > 0
        assert run.attrs["stages_from"] == ds.stages_from
        check(ds)
    stacked = block_structure(stack_runs(runs))
    check(stacked)
    assert stacked.model.values.tolist() == list(names) and stacked.probe == "block_structure"
    for index, ds in enumerate(alone):
        for name in ds.data_vars:
            assert float(stacked[name][index]) == pytest.approx(float(ds[name]), rel=1e-12)


def test_too_few_units_have_no_blocks():
    assert "block_structure" not in measure(draw(8, 2, 2, 2), draw(8, 2, 2, 2, seed=1)).attrs


class Saying(list):
    """Batches that say what they are."""

    @property
    def description(self):
        return {"split": "test"}


def test_a_comparison_says_what_it_was_measured_on():
    model = create_model("resnet_nano", image_size=8, seed=0)
    batches = Saying([torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))])
    for other in (None, create_model("resnet_nano", image_size=8, seed=1)):
        assert cka(model, batches, other=other, progress=False).attrs["split"] == "test"
