import copy

import pytest
import timm
import torch
from libraries import DIM, IMAGE, LIBRARIES, PATCH, call, from_timm, from_vitprobe, randomise_
from torch import nn

import vitprobe as vp
from vitprobe.initializers.access import attention_layers, patch_grid, position_code, skipped
from vitprobe.models import create_model
from vitprobe.models.attention import Attention


class HandWritten(nn.Module):
    """As in vit-pytorch: its norm inside, one layer for three, the output in a Sequential."""

    def __init__(self):
        super().__init__()
        self.heads, self.scale = 2, 0.2
        self.norm = nn.LayerNorm(12)
        self.to_qkv = nn.Linear(12, 3 * 2 * 5, bias=False)
        self.to_out = nn.Sequential(nn.Linear(10, 12), nn.Dropout(0.0))

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (2, 5)).transpose(1, 2) for part in self.to_qkv(self.norm(x)).chunk(3, -1)
        )
        maps = (query @ key.mT * self.scale).softmax(-1)
        return self.to_out((maps @ value).transpose(1, 2).flatten(2))


class Inner(nn.Module):
    def __init__(self, key_width=12):
        super().__init__()
        self.num_attention_heads = 3
        self.query, self.key, self.value = (nn.Linear(12, width) for width in (12, key_width, key_width))

    def forward(self, x):
        query, key, value = (
            part(x).unflatten(-1, (3, 4)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return ((query @ key.mT / 2).softmax(-1) @ value).transpose(1, 2).flatten(2)


class Nested(nn.Module):
    """As in transformers up to 4: queries, keys and values in one module, the output in the next."""

    def __init__(self):
        super().__init__()
        self.attention = Inner()
        self.output = nn.ModuleDict({"dense": nn.Linear(12, 12)})

    def forward(self, x):
        return self.output["dense"](self.attention(x))


ATTENTION = {
    "vitprobe": lambda: Attention(12, 3, qkv_bias=True),
    "vitprobe, wide heads and its own scale": lambda: Attention(12, 3, head_dim=5, out_dim=7, scale=0.1),
    "timm": lambda: timm.models.vision_transformer.Attention(12, 3, qkv_bias=True),
    "torch": lambda: nn.MultiheadAttention(12, 3, batch_first=True),
    "transformers": lambda: LIBRARIES["transformers"]().vit.layers[0].attention,
    "vit-pytorch": HandWritten,
    "nested": Nested,
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_the_views_are_what_the_layer_computes_with(kind):
    torch.manual_seed(0)
    attention = randomise_(ATTENTION[kind]())
    (layer,) = attention_layers(attention)
    (query, key), (value, output) = layer.query_key(), layer.value_output()
    x = torch.randn(2, 6, query.weight.shape[-1])
    seen = attention.norm(x) if kind == "vit-pytorch" else x

    def through(part):
        bias = 0.0 if part.bias is None else part.bias[:, None]
        return torch.einsum("bnd,hcd->bhnc", seen, part.weight) + bias

    maps = (layer.scale * through(query) @ through(key).mT).softmax(-1)
    expected = torch.einsum("bhnc,hcd->bnd", maps @ through(value), output)
    if layer.output_bias is not None:
        expected = expected + layer.output_bias
    torch.testing.assert_close(call(attention, x), expected, rtol=1e-4, atol=1e-5)
    assert layer.beside == ()


@pytest.mark.parametrize("kind", ATTENTION)
def test_writing_to_a_view_writes_to_the_model(kind):
    torch.manual_seed(0)
    attention = randomise_(ATTENTION[kind]())
    (layer,) = attention_layers(attention)
    query, _ = layer.query_key()
    value, output = layer.value_output()
    # Equal maps, and values that come out as they went in, as far as the heads are wide.
    query.write_(torch.zeros_like(query.weight))
    heads, channels, dim = value.weight.shape
    value.write_(torch.eye(heads * channels, dim).view(heads, channels, dim))
    output.copy_(torch.eye(heads * channels, output.shape[-1]).view(output.shape))
    layer.output_bias.zero_()
    x = torch.randn(2, 6, dim)
    mean = (attention.norm(x) if kind == "vit-pytorch" else x).mean(1, keepdim=True)
    kept = min(heads * channels, dim, output.shape[-1])
    expected = torch.zeros(2, 6, output.shape[-1])
    expected[..., :kept] = mean[..., :kept]
    torch.testing.assert_close(call(attention, x), expected, rtol=1e-4, atol=1e-5)


def test_what_maps_are_made_of_besides():
    gated = create_model("convit_nano", image_size=8)
    assert {layer.beside for layer in attention_layers(gated)} == {("position", "gate"), ()}
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, window_size=7, depths=(1, 1, 1, 1))
    assert {layer.beside for layer in attention_layers(swin)} == {("relative_position_bias_table",)}
    convit = timm.create_model("convit_tiny", img_size=32, depth=12)
    assert [len(layer.beside) for layer in attention_layers(convit)] == [2] * 10 + [0] * 2


def test_query_and_key_norms_are_refused():
    (layer, _) = attention_layers(from_timm(qk_norm=True))
    with pytest.raises(ValueError, match=r"blocks\.0\.attn norms its queries and keys \(q_norm, k_norm\)"):
        layer.query_key()
    layer.value_output()


def test_attention_without_queries_or_values_says_so():
    model = create_model("simple_vit_nano", image_size=8, use_value=False)
    with pytest.raises(ValueError, match="has no values of its own"):
        attention_layers(model)[0].value_output()


def test_shared_keys_are_refused():
    class Grouped(Inner):
        def __init__(self):
            super().__init__(key_width=6)

    with pytest.raises(ValueError, match="others for its keys"):
        attention_layers(Grouped())
    with pytest.raises(ValueError, match="grouped-query"):
        fused = timm.models.vision_transformer.Attention(12, 3)
        fused.qkv = nn.Linear(12, 20)
        attention_layers(fused)


def test_computed_weights_are_refused():
    attention = Attention(12, 3)
    nn.utils.parametrizations.weight_norm(attention.query_key)
    with pytest.raises(ValueError, match="parametrisation"):
        attention_layers(attention)


def test_a_network_without_attention_is_refused():
    with pytest.raises(ValueError, match="no attention layer was found in PreActivationResNet"):
        attention_layers(create_model("resnet_nano", image_size=8))


def test_attention_that_was_not_understood_is_named():
    class OddAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.everything = nn.Linear(3, 3)

    model = nn.Sequential(Nested(), OddAttention())
    assert skipped(model, attention_layers(model)) == ["1"]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("prefix", [True, False])
def test_the_code_is_what_blank_images_become(library, prefix):
    torch.manual_seed(0)
    if prefix:
        model = LIBRARIES[library]()
    elif library == "vitprobe":
        model = from_vitprobe(pool="mean")
    elif library == "timm":
        model = from_timm(class_token=False, global_pool="avg")
    else:
        pytest.skip("always has a class token")
    randomise_(model)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            for parameter in module.parameters():
                parameter.data.zero_()
    seen = []
    first = attention_layers(model)[0].module
    block = next(m for m in model.modules() if first in m.children())
    block.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.eval()(torch.randn(1, 3, IMAGE, IMAGE))
    code = position_code(model, patch_grid(model))
    assert patch_grid(model) == (IMAGE // PATCH, IMAGE // PATCH)
    torch.testing.assert_close(torch.cat([code.prefix, code.code]), seen[0][0].detach())
    assert code.learned and code.code.shape == (16, DIM)


def test_codes_of_several_prefix_tokens():
    torch.manual_seed(0)
    timm_model = randomise_(from_timm(reg_tokens=3, no_embed_class=True))
    code = position_code(timm_model, (4, 4))
    torch.testing.assert_close(code.prefix, torch.cat([timm_model.cls_token[0], timm_model.reg_token[0]]).detach())
    model = from_vitprobe(registers=2, distilled=True, position="sincos")
    code = position_code(model, (4, 4))
    torch.testing.assert_close(code.prefix, model.prefix.detach())
    assert not code.learned
    assert position_code(create_model("model_1_nano", image_size=8), (4, 4)) is None
    assert position_code(create_model("simple_vit_nano", image_size=8), (4, 4)).name == "position.code"


def test_grids_are_declared_or_asked_for():
    assert patch_grid(from_timm(img_size=(16, 24))) == (4, 6)
    assert patch_grid(from_vitprobe(image_size=(16, 24))) == (4, 6)
    with pytest.raises(ValueError, match=r"give grid=\(rows, columns\)"):
        patch_grid(Nested())
    with pytest.raises(ValueError, match="has 16 rows for a grid"):
        position_code(from_vitprobe(), (5, 4))


def test_reading_changes_nothing():
    model = from_timm()
    before = copy.deepcopy(model.state_dict())
    attention_layers(model), position_code(model, patch_grid(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_room_goes_by_its_name(monkeypatch):
    monkeypatch.delattr(vp, "initializers")
    assert vp.initializers.attention_layers is attention_layers and "initializers" in dir(vp)
