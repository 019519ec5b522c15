import copy
import json

import numpy as np
import pytest
import torch
from libraries import LIBRARIES, from_timm, from_vitprobe, randomise_

import vitprobe as vp
from vitprobe.initializers import attention_layers, mimetic_
from vitprobe.initializers.report import generator
from vitprobe.models import create_model
from vitprobe.results import check, load, save


def products(model):
    """`W_Q W_K^T` (layer, head, dim, dim) and `W_V W_O` (layer, dim, dim) in float64."""
    pairs, mixes = [], []
    for layer in attention_layers(model):
        (query, key), (value, output) = layer.query_key(), layer.value_output()
        pairs.append(torch.einsum("hci,hcj->hij", query.weight.double(), key.weight.double()))
        mixes.append(torch.einsum("hci,hcj->ij", value.weight.double(), output.double()))
    return torch.stack(pairs), torch.stack(mixes)


@pytest.mark.parametrize("dim, head_dim, expected", [(192, 64, 0.39), (96, 24, 0.32), (192, 16, 0.12)])
def test_published_diagonals(dim, head_dim, expected):
    model = from_vitprobe(image_size=8, dim=dim, heads=dim // head_dim, depth=1)
    ds = mimetic_(model, seed=0)
    check(ds)
    np.testing.assert_allclose(ds.query_key_diagonal, expected, atol=0.02)
    np.testing.assert_allclose(ds.value_output_diagonal, -0.4, atol=0.02)
    if dim == 192:  # untransposed factors have the same mean by the trace, but 0.24
        np.testing.assert_allclose(ds.value_output_diagonal_std, 0.03, atol=0.005)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_products_are_the_nearest_to_what_is_wanted(library):
    model = randomise_(LIBRARIES[library]())
    ds = mimetic_(model, seed=3)
    pairs, mixes = products(model)
    eye = np.eye(32)
    for layer in range(2):
        noise = torch.randn(32, 32, generator=generator(3, "mimetic value output", layer)).double().numpy() / 32**0.5
        np.testing.assert_allclose(mixes[layer], 0.4 * noise - 0.4 * eye, atol=1e-5)
        for head in range(2):
            source = generator(3, "mimetic query key", layer, head)
            noise = torch.randn(32, 32, generator=source).double().numpy() / 32**0.5
            left, values, right = np.linalg.svd(0.7 * noise + 0.7 * eye)
            nearest = (left[:, :16] * values[:16]) @ right[:16]
            np.testing.assert_allclose(pairs[layer, head], nearest, atol=1e-5)
            diagonal = pairs[layer, head].diagonal()
            assert ds.query_key_diagonal[layer, head] == pytest.approx(float(diagonal.mean()), abs=1e-5)
            assert ds.query_key_diagonal_std[layer, head] == pytest.approx(float(diagonal.std()), abs=1e-5)
            other = nearest[~np.eye(32, dtype=bool)]
            assert ds.query_key_other_std[layer, head] == pytest.approx(other.std(ddof=1), abs=1e-5)
    for layer in attention_layers(model):
        for part in (layer.query, layer.key, layer.value):
            assert part.bias is None or not part.bias.any()
        assert not layer.output_bias.any()


def test_singular_values_are_split_evenly():
    model = from_vitprobe(image_size=8, depth=1)
    mimetic_(model, seed=0)
    (layer,) = attention_layers(model)
    for one, other in ((layer.query.weight, layer.key.weight), (layer.value.weight, layer.output)):
        torch.testing.assert_close(one.norm(dim=2), other.norm(dim=2))


def test_zhengs_baseline_is_weaker():
    model = from_vitprobe()
    before = products(model)[1]
    ds = mimetic_(model, variant="zheng", seed=0)
    pairs, mixes = products(model)
    assert torch.equal(mixes, before)
    assert "value_output_diagonal" not in ds and ds.attrs["variant"] == "zheng"
    noise = 2 * torch.rand(32, 32, generator=generator(0, "mimetic query key", 1, 0)).double().numpy() - 1
    left, values, right = np.linalg.svd(0.7 * noise / 32**0.5 + 0.7 * np.eye(32))
    np.testing.assert_allclose(pairs[1, 0], (left[:, :16] * values[:16]) @ right[:16], atol=1e-5)


def test_uniform_noise_is_as_wide_as_normal_noise():
    spread = {}
    for distribution in ("normal", "uniform"):
        model = from_vitprobe(image_size=8, dim=96, heads=4, depth=1)
        spread[distribution] = mimetic_(model, distribution=distribution, seed=0).value_output_other_std.item()
    assert spread["uniform"] == pytest.approx(0.4 / 96**0.5, rel=0.02)
    assert spread["normal"] == pytest.approx(0.4 / 96**0.5, rel=0.02)


def test_parts_are_written_by_themselves():
    model = from_timm()
    before = copy.deepcopy(model.state_dict())
    mimetic_(model, query_key=None, value_output=(0.1, 0.9), seed=0)
    qkv = model.blocks[0].attn.qkv.weight
    assert torch.equal(qkv[:64], before["blocks.0.attn.qkv.weight"][:64])
    assert products(model)[1].diagonal(dim1=1, dim2=2).mean() == pytest.approx(-0.9, abs=0.02)
    written = products(model)[1]
    mimetic_(model, value_output=None, seed=1)
    assert torch.equal(products(model)[1], written)


def test_pure_in_options_and_seed():
    state = torch.get_rng_state()
    one, other = from_vitprobe(), create_model("vit", seed=9, image_size=16, patch_size=4, dim=32, heads=2, depth=2)
    ds, same = mimetic_(one, seed=0), mimetic_(other, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(products(one), products(other), strict=True):
        assert torch.equal(a, b)
    assert ds.drop_vars([]).equals(same)
    assert not ds.equals(mimetic_(other, seed=1))


def test_layers_of_windows(tmp_path):
    model = create_model("alternet_micro", image_size=32, seed=0, bottleneck=4)
    with pytest.raises(ValueError, match="Use value_output=None"):
        mimetic_(model, seed=0)
    assert not hasattr(model, "initialisation")
    ds = mimetic_(model, value_output=None, seed=0)
    heads = [layer.heads for layer in attention_layers(model)]
    np.testing.assert_array_equal(ds.query_key_diagonal.notnull().sum("head"), heads)
    again = load(save(ds, tmp_path / "mimetic.nc"))
    np.testing.assert_allclose(again.query_key_diagonal, ds.query_key_diagonal)
    assert json.loads(again.attrs["initialisation"])[0]["options"]["value_output"] is None


def test_what_cannot_be_is_refused():
    model = from_vitprobe()
    with pytest.raises(ValueError, match=r"unknown variant 'zhang'.*Did you mean 'zheng'"):
        mimetic_(model, variant="zhang", seed=0)
    with pytest.raises(ValueError, match="unknown distribution 'gaussian'"):
        mimetic_(model, distribution="gaussian", seed=0)
    with pytest.raises(ValueError, match="leaves values and outputs alone"):
        mimetic_(model, variant="zheng", value_output=(0.1, 0.1), seed=0)
    with pytest.raises(ValueError, match="nothing to write"):
        mimetic_(model, query_key=None, value_output=None, seed=0)
    with pytest.raises(ValueError, match="norms its queries and keys"):
        mimetic_(from_timm(qk_norm=True), seed=0)
    mimetic_(from_timm(qk_norm=True), query_key=None, seed=0)


def test_probes_and_training_say_how_a_model_was_initialised():
    data = vp.load_data("digits", train_size=20, test_size=20)
    model = vp.create_model("vit_nano", image_size=8, channels=1, seed=0)
    batches = list(data.loader("test", batch_size=10))
    assert "initialisation" not in vp.feature_variance(model, batches).attrs
    vp.initializers.mimetic_(model, seed=3)
    for ds in (
        vp.feature_variance(model, batches),
        vp.hessian_eigenvalues(model, batches[:1], k=1),
        vp.loss_landscape(model, batches, points=2),
        vp.fit(model, data, vp.Recipe(epochs=1), progress=False),
    ):
        assert '"mimetic"' in ds.attrs["initialisation"] and '"seed": 3' in ds.attrs["initialisation"]
