import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from libraries import LIBRARIES, from_timm, from_vitprobe, randomise_

import vitprobe as vp
from vitprobe.initializers import ImpulseSpec, attention_layers, impulse_, mimetic_, positions_
from vitprobe.initializers.impulse_fit import Impulses, content_logits, draw_offsets
from vitprobe.initializers.report import generator
from vitprobe.models import create_model
from vitprobe.results import check


def sincos_vit(image_size=32, **options):
    return from_vitprobe(
        **dict(image_size=image_size, dim=96, heads=4, depth=1, pool="mean", position="sincos") | options
    )


def weights_of(model):
    return torch.cat([part.weight.flatten() for layer in attention_layers(model) for part in layer.query_key()])


def convolution_matrix(grid, offset):
    """The matrix of a convolution with one tap, from what it does to each unit image: an oracle of its own."""
    rows, columns = grid
    kernel = torch.zeros(1, 1, 5, 5)
    kernel[0, 0, 2 + offset[0], 2 + offset[1]] = 1
    images = torch.eye(rows * columns).view(-1, 1, rows, columns)
    return F.conv2d(images, kernel, padding=2).flatten(1).T  # (query, key)


def first_maps(model):
    """What the first layer attends to on the position code alone."""
    block = model.blocks[0]
    return block.attention.weights(block.attention_norm(model.position)[None])[0].detach()


# --- what is achieved -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, seconds",
    [
        (dict(image_size=32, dim=192, heads=3), 2),
        (dict(image_size=64, dim=192, heads=3), 10),
        (dict(image_size=(32, 48), dim=192, heads=12), 10),
    ],
    ids=["8x8", "16x16", "8x12 with 12 heads"],
)
def test_sharp_and_fast_by_default(sizes, seconds):
    ds = impulse_(sincos_vit(**sizes), seed=0)
    check(ds)
    assert (ds.mass >= 0.95).all() and (ds.argmax_accuracy == 1).all()
    assert ds.seconds.sum() < seconds and (ds.steps < 100).all()


def test_the_numbers_are_those_of_the_models_own_maps():
    grid = (8, 12)
    model = sincos_vit((32, 48), heads=4)
    ds = impulse_(model, kernel_size=5, seed=3).isel(layer=0)
    maps = first_maps(model)
    for head, found in enumerate(maps):
        at = ds.isel(head=head)
        wanted = convolution_matrix(grid, (int(at.offset_y), int(at.offset_x)))
        inside = wanted.sum(1) > 0
        assert at.outside == (~inside).sum() and at.outside_share == pytest.approx(float((~inside).float().mean()))
        assert at.mass == pytest.approx(float((found * wanted).sum(1)[inside].mean()), abs=1e-4)
        assert at.argmax_accuracy == (found.argmax(1) == wanted.argmax(1))[inside].float().mean()
        assert at.mean_squared_error == pytest.approx(float((found - wanted).square().mean()), rel=1e-3)
        assert at.uniform_mass == pytest.approx(1 / 96)
        assert at.uniform_mean_squared_error == pytest.approx(float((1 / 96 - wanted).square().mean()), rel=1e-4)
    (layer,) = attention_layers(model)
    np.testing.assert_allclose(ds.query_norm, layer.query.weight.norm(dim=(1, 2)), rtol=1e-5)


def test_heads_look_as_far_as_their_offsets():
    model = sincos_vit(heads=6, dim=192)
    ds = impulse_(model, seed=1).isel(layer=0)
    distance = np.hypot(ds.offset_y, ds.offset_x)
    # Images of little contrast beside the code; queries at the border look at what is nearest.
    images = 0.05 * torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = vp.nonlocality(model, images, progress=False).nonlocality.isel(layer=0)
    np.testing.assert_allclose(found, distance, atol=0.35)
    assert distance.max() > 1  # 4.14 is uniform attention's


def test_prefix_tokens_get_no_attention():
    model = from_vitprobe(image_size=32, dim=96, heads=4, depth=1, position="sincos", registers=2)
    ds = impulse_(model, seed=0)
    assert ds.attrs["prefix"] == 3 and (ds.mass > 0.95).all()
    block = model.blocks[0]
    tokens = torch.cat([model.prefix, model.position])
    maps = block.attention.weights(block.attention_norm(tokens)[None])[0]
    assert maps[:, 3:, :3].mean() < 0.02
    mass = Impulses.of((8, 8), torch.from_numpy(np.stack([ds.offset_y[0], ds.offset_x[0]], 1)).long(), prefix=3).mass(
        maps[:, 3:]
    )
    np.testing.assert_allclose(mass.detach(), ds.mass[0], atol=1e-4)


@pytest.mark.parametrize("name", ["model_1_nano", "model_2_nano", "model_3_nano"])
def test_codes_that_layers_mix_in_themselves(name):
    model = create_model(name, image_size=16, depth=2, seed=0)
    ds = impulse_(model, seed=0)
    assert (ds.mass > 0.95).all()
    attention = model.blocks[1].attention
    share = 1 - attention.source.alpha
    maps = attention.weights(torch.zeros(1, 64, attention.source.dim))[0]
    assert share in (0.5, 1.0)
    offsets = torch.from_numpy(np.stack([ds.offset_y[1], ds.offset_x[1]], 1)).long()
    np.testing.assert_allclose(Impulses.of((8, 8), offsets).mass(maps.detach()), ds.mass[1], atol=1e-4)


def test_the_same_in_every_library():
    models = {name: library() for name, library in LIBRARIES.items()}
    for model in models.values():
        for name, parameter in model.named_parameters():
            if name in ("prefix", "cls_token", "class_token", "vit.embeddings.cls_token"):
                parameter.data.zero_()
        positions_(model)
    products = {}
    for name, model in models.items():
        impulse_(model, seed=5)
        layer = attention_layers(model)[1]
        products[name] = layer.scale * layer.query.weight.mT @ layer.key.weight
        assert layer.query.bias is None or not layer.query.bias.any()
    for product in products.values():
        torch.testing.assert_close(product, products["timm"])


def test_pure_in_options_and_seed():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, other = sincos_vit(16, depth=2), randomise_(sincos_vit(16, depth=2))
    torch.set_rng_state(state)
    impulse_(one, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    impulse_(other, seed=0)
    assert torch.equal(weights_of(one), weights_of(other))
    impulse_(other, seed=1)
    assert not torch.equal(weights_of(one), weights_of(other))


def test_only_queries_and_keys_are_written():
    model = from_timm(qkv_bias=True)
    randomise_(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    impulse_(model, seed=0)
    for name, value in model.state_dict().items():
        if "attn.qkv" in name:
            assert torch.equal(value[64:], before[name][64:]) and not torch.equal(value[:64], before[name][:64])
            assert value.ndim == 2 or not value[:64].any()
        else:
            assert torch.equal(value, before[name])


# --- options ----------------------------------------------------------------------------------------


def adam_by_hand(tokens, wanted, query, key, *, scale, lr, steps, every):
    """Zheng, Li & Lucey's pre-training, head by head in float64, with Adam written out (beta 0.9, 0.999)."""
    tokens, wanted, query, key = (t.double() for t in (tokens, wanted, query, key))
    norm = query.norm(dim=2).mean()
    moments = [torch.zeros_like(query) for _ in range(4)]
    for step in range(1, steps + 1):
        gradients = torch.zeros_like(query), torch.zeros_like(key)
        for head in range(len(query)):
            q, k = tokens @ query[head].T, tokens @ key[head].T
            maps = (scale * q @ k.T).softmax(-1)
            outer = 2 * (maps - wanted[head]) / wanted.numel()
            logits = scale * maps * (outer - (outer * maps).sum(1, keepdim=True))
            gradients[0][head] = (logits @ k).T @ tokens
            gradients[1][head] = (logits.T @ q).T @ tokens
        for index, (weight, gradient) in enumerate(zip((query, key), gradients, strict=True)):
            first, second = moments[2 * index], moments[2 * index + 1]
            first.mul_(0.9).add_(0.1 * gradient)
            second.mul_(0.999).add_(0.001 * gradient**2)
            weight -= lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        if step % every == 0:
            query *= norm / query.norm(dim=2, keepdim=True)
            key *= norm / key.norm(dim=1, keepdim=True)
    return query, key


def test_the_papers_settings_are_the_published_algorithm():
    model = sincos_vit(16, dim=16, heads=2)
    ds = impulse_(model, settings="paper", kernel_size=3, steps=25, weight_norm=10, lr=1e-2, seed=4)
    start = (2 * torch.rand(2, 2, 8, 16, generator=generator(4, "impulse start", 0)) - 1) * math.sqrt(1 / (8 * 2))
    offsets = np.stack([ds.offset_y[0], ds.offset_x[0]], 1).astype(int)
    wanted = torch.stack([convolution_matrix((4, 4), offset) for offset in offsets])
    query, key = adam_by_hand(model.position, wanted, *start, scale=0.1, lr=1e-2, steps=25, every=10)
    (layer,) = attention_layers(model)
    assert layer.scale == 8**-0.5  # c = 0.1 lies in the weights
    fold = math.sqrt(0.1 / layer.scale)
    torch.testing.assert_close(layer.query.weight.double(), fold * query, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layer.key.weight.double(), fold * key, rtol=1e-3, atol=1e-4)


def test_the_papers_settings_give_blurred_maps():
    # 2000 steps of 1e-4 on these 8x8 patches give mass 0.11 at argmax accuracy 0.89; these are fewer, longer ones.
    options = dict(kernel_size=3, steps=150, lr=1e-3, seed=0)
    model = sincos_vit(dim=192, heads=3)
    ds = impulse_(model, settings="paper", weight_norm=15, **options)
    assert ds.mass.min() > 0.08 and ds.mass.max() < 0.3
    assert 0.6 < ds.argmax_accuracy.mean() < 1
    assert (ds.mean_squared_error > 0.75 * ds.uniform_mean_squared_error).all()
    # It is the normalisation that keeps them so.
    assert impulse_(model, settings="paper", weight_norm=None, **options).mass.min() > 0.5


def test_stops_at_the_target_mass():
    ds = impulse_(sincos_vit(), target_mass=0.3, seed=0)
    assert 0.3 <= ds.mass.min() < 0.5
    few = impulse_(sincos_vit(), steps=2, seed=0)
    assert few.mass.max() < 0.3 and (few.steps == 2).all()


def test_a_scale_of_its_own_is_folded_in():
    model = sincos_vit(16, dim=48, heads=2)
    unfolded = impulse_(model, target_mass=None, steps=3, seed=0)
    same = impulse_(model, target_mass=None, steps=3, scale=24**-0.5, seed=0)
    np.testing.assert_allclose(same.query_norm, unfolded.query_norm, rtol=1e-5)
    ds = impulse_(model, scale=3.0, seed=0)
    assert model.blocks[0].attention.scale == 24**-0.5 and (ds.mass > 0.95).all()
    offsets = torch.from_numpy(np.stack([ds.offset_y[0], ds.offset_x[0]], 1)).long()
    np.testing.assert_allclose(Impulses.of((4, 4), offsets).mass(first_maps(model)), ds.mass[0], atol=1e-4)


@pytest.mark.parametrize("loss", ["cross entropy", "squared error"])
def test_queries_at_the_border(loss):
    entropies = {}
    for boundary in ("masked", "zero"):
        model = sincos_vit(16, dim=48, heads=4)
        options = dict(sampling="fixed", target_mass=None, steps=60, lr=1e-2, seed=0)
        ds = impulse_(model, boundary=boundary, loss=loss, **options)
        offsets = torch.from_numpy(np.stack([ds.offset_y[0], ds.offset_x[0]], 1)).long()
        rows = first_maps(model)[~Impulses.of((4, 4), offsets).inside]
        entropies[boundary] = float(-(rows * rows.log()).sum(1).mean())
    assert entropies["masked"] + 0.4 < entropies["zero"] < math.log(16)


def test_the_code_alone_survives_more_content():
    masses = {}
    for coordinates in ("code", "weights"):
        model = sincos_vit(dim=192, heads=3)
        ds = impulse_(model, coordinates=coordinates, lr=1e-2, seed=0)
        offsets = torch.from_numpy(np.stack([ds.offset_y[0], ds.offset_x[0]], 1)).long()
        content = torch.randn(8, 64, 192, generator=torch.Generator().manual_seed(0))
        block = model.blocks[0]
        maps = block.attention.weights(block.attention_norm(model.position + 0.3 * content)).mean(0)
        masses[coordinates] = float(Impulses.of((8, 8), offsets).mass(maps.detach()).mean())
    assert masses["code"] > masses["weights"] + 0.03


def test_the_closed_form_on_a_code_that_fills_the_space():
    model = from_vitprobe(image_size=32, dim=128, heads=2, depth=1, pool="mean")
    ds = impulse_(model, solver="closed form", seed=0)
    assert ds.mass.min() == pytest.approx(0.95, abs=2e-3) and (ds.argmax_accuracy == 1).all()
    published = impulse_(model, settings="closed form", seed=0)
    np.testing.assert_allclose(published.query_norm, 7, rtol=1e-4)
    np.testing.assert_allclose(published.key_norm, 7, rtol=1e-4)
    assert [tuple(o) for o in np.stack([published.offset_y[0], published.offset_x[0]], 1)] == [(0, 0), (-1, 0)]
    # Where heads are as wide as patches are many, the logits are the target itself.
    wide = from_vitprobe(image_size=16, dim=64, heads=2, depth=1, pool="mean")
    ds = impulse_(wide, settings="closed form", seed=0)
    (layer,) = attention_layers(wide)
    tokens = F.layer_norm(wide.position.detach(), (64,), eps=1e-6)
    logits = content_logits(tokens, layer.query.weight, layer.key.weight, layer.scale, 0)
    for head, offset in enumerate([(0, 0), (-1, 0)]):
        wanted = convolution_matrix((4, 4), offset)
        assert np.corrcoef(logits[head].flatten(), wanted.flatten())[0, 1] > 0.999


@pytest.mark.parametrize(
    "model, reason",
    [
        (lambda: sincos_vit(dim=96, heads=2), r"the position code spans 1\d of 64 directions"),
        (lambda: create_model("model_3_micro", seed=0), "heads of 16 channels keep 16"),
    ],
    ids=["sincos", "identity cut to the heads"],
)
def test_the_closed_form_is_refused_with_the_reason(model, reason):
    model = model()
    before = weights_of(model).clone()
    with pytest.raises(ValueError, match=reason):
        impulse_(model, solver="closed form", seed=0)
    assert torch.equal(weights_of(model), before) and not hasattr(model, "initialisation")


def test_taps_are_drawn_as_named():
    many = draw_offsets([9] * 400, 3, "with replacement", 0)
    distinct = np.mean([len({tuple(o) for o in layer.tolist()}) for layer in many])
    assert distinct == pytest.approx(9 * (1 - (8 / 9) ** 9), abs=0.15)  # 5.88
    assert torch.stack(many).abs().max() == 1 and torch.stack(many).float().mean().abs() < 0.03
    for layer in draw_offsets([9, 9], 3, "without replacement", 0):
        assert len({tuple(o) for o in layer.tolist()}) == 9
    layers = draw_offsets([4, 4, 4, 4], 3, "stratified", 0)
    counts = np.unique(torch.cat(layers).numpy(), axis=0, return_counts=True)[1]
    assert len(counts) == 9 and set(counts) <= {1, 2}
    around = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1), (0, 0)]
    assert [tuple(o) for o in draw_offsets([10], 3, "fixed", 0)[0].tolist()] == around
    assert draw_offsets([50], 5, "with replacement", 0)[0].unique().tolist() == [-2, -1, 0, 1, 2]


def test_one_fit_for_all_layers():
    model = sincos_vit(16, depth=3)
    ds = impulse_(model, shared=True, seed=0)
    layers = attention_layers(model)
    for layer in layers[1:]:
        assert torch.equal(layer.query.weight, layers[0].query.weight)
    assert ds.seconds[0] > 0 and not ds.seconds[1:].any() and (ds.mass > 0.95).all()
    impulse_(model, seed=0)
    assert not torch.equal(layers[1].query.weight, layers[0].query.weight)


def test_any_tensor_may_stand_for_the_tokens():
    model = from_vitprobe(position="none", pool="mean")
    tokens = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    ds = impulse_(model, pseudo_input=tokens, seed=0)
    assert (ds.mass > 0.95).all() and "tensor 16x32" in json.loads(ds.attrs["config"])["pseudo_input"]
    with pytest.raises(ValueError, match=r"\(16, 32\) or more"):
        impulse_(model, pseudo_input=tokens[:8], seed=0)


def test_what_was_done_is_kept_on_the_model():
    model = from_vitprobe()
    mimetic_(model, query_key=None, seed=7)
    ds = impulse_(model, kernel_size=5, seed=8)
    done = json.loads(model.initialisation)
    assert [(d["initializer"], d["seed"]) for d in done] == [("mimetic", 7), ("impulse", 8)]
    assert done[1]["options"]["kernel_size"] == 5 and done[0]["options"]["query_key"] is None
    assert ds.attrs["initialisation"] == model.initialisation


def test_what_cannot_be_is_refused():
    model = from_vitprobe()
    before = weights_of(model).clone()
    with pytest.raises(ValueError, match=r"unknown settings 'papr'.*'paper'"):
        impulse_(model, settings="papr", seed=0)
    with pytest.raises(ValueError, match="unknown sampling 'stratify'"):
        impulse_(model, sampling="stratify", seed=0)
    with pytest.raises(TypeError, match="no option 'kernel'; it takes kernel_size"):
        impulse_(model, kernel=3, seed=0)
    with pytest.raises(ValueError, match="use 7 at most"):
        impulse_(model, kernel_size=9, seed=0)
    with pytest.raises(ValueError, match="give coordinates='weights'"):
        ImpulseSpec(weight_norm=100)
    with pytest.raises(ValueError, match="target_mass=95"):
        ImpulseSpec(target_mass=95)
    with pytest.raises(ValueError, match="lr=0"):
        ImpulseSpec(lr=0)
    with pytest.raises(ValueError, match="no position code"):
        impulse_(from_vitprobe(position="none"), seed=0)
    with pytest.raises(ValueError, match=r"made of more than queries and keys \(position, gate\)"):
        impulse_(create_model("convit_nano", image_size=8), seed=0)
    with pytest.raises(ValueError, match="no share in its maps"):
        impulse_(create_model("model_1_nano", image_size=8, alpha=1.0), seed=0)
    assert torch.equal(weights_of(model), before)
