"""Attention maps, against a float64 reference from queries and keys, for every way of applying them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from handwritten import TinyMHA, TinyViT
from torch import nn

import vitprobe.attach.watch as watch_module
from vitprobe.attach import Watch, plan
from vitprobe.calling import untouched
from vitprobe.models import create_model

HEADS, TOKENS = 3, 16
generator = torch.Generator().manual_seed(7)
BOOL_MASK = (torch.rand(TOKENS, TOKENS, generator=generator) < 0.6) | torch.eye(TOKENS, dtype=torch.bool)
HEAD_BIAS = torch.randn(HEADS, TOKENS, TOKENS, generator=generator)
IMAGE_BIAS = torch.randn(5, 1, TOKENS, TOKENS, generator=generator)
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def watched(model, x, *, layers="auto"):
    """Sites, their whole maps `(image, window, head, query, key)`, what was skipped, and the model's output."""
    with untouched(model):
        found = plan(model, x, layers=layers)
        maps = [[] for _ in found.attentions]
        place = {site.event: index for index, site in enumerate(found.attentions)}
        watch = Watch(model, found, on_attention=lambda site, part: maps[place[site.event]].append(part.clone()))
        output = watch(lambda net, batch: net(batch), model, x)
    return found, [torch.cat(part) for part in maps], output


def softmax64(query, key, *, scale=None, bias=0.0, allowed=None):
    """The reference `(batch, head, query, key)`, in NumPy's float64."""
    query, key = (x.detach().double().numpy() for x in (query, key))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = query @ key.swapaxes(-1, -2) * scale + np.asarray(bias, dtype=np.float64)
    if allowed is not None:
        logits = np.where(allowed, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def soft(query, key):
    return (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)


def sdpa(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def five_axes(q, k, v):
    # two groups of rows that do not see each other, as windows are often written
    q, k, v = (rearrange(x, "b h (w n) d -> b w h n d", w=4) for x in (q, k, v))
    bias = HEAD_BIAS[None, None, :, :4, :4].expand(1, 4, -1, -1, -1)
    return rearrange(F.scaled_dot_product_attention(q, k, v, attn_mask=bias), "b w h n d -> b h (w n) d")


def merged_sdpa(q, k, v):
    mask = HEAD_BIAS.repeat(len(q), 1, 1)
    merged = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)), attn_mask=mask)
    return merged.unflatten(0, (-1, HEADS))


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def bmm(q, k, v):
    q, k, v = (rearrange(x, "b h n d -> (b h) n d") for x in (q, k, v))
    return torch.bmm(soft(q, k), v).unflatten(0, (-1, HEADS))


def query_before_head(q, k, v):
    weights = torch.einsum("bhqd,bhkd->bqhk", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("b q h k, b h k d -> b h q d", weights, v)


def by_hand(q, k, v):
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


PLAIN = {}
WAYS = {
    "fused": (sdpa(), PLAIN),
    "fused, bool mask": (sdpa(attn_mask=BOOL_MASK), dict(allowed=BOOL_MASK)),
    "fused, float mask per head": (sdpa(attn_mask=HEAD_BIAS), dict(bias=HEAD_BIAS)),
    "fused, float mask per image": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=IMAGE_BIAS[: len(q)]),
        dict(bias=IMAGE_BIAS),
    ),
    "fused, causal": (sdpa(is_causal=True), dict(allowed=CAUSAL)),
    "fused, scale": (sdpa(scale=1.7), dict(scale=1.7)),
    "fused, heads merged": (merged_sdpa, dict(bias=HEAD_BIAS)),
    "matmul": (lambda q, k, v: torch.matmul(soft(q, k), v), PLAIN),
    "matmul by name": (lambda q, k, v: torch.matmul(input=soft(q, k), other=v), PLAIN),
    "@": (lambda q, k, v: soft(q, k) @ v, PLAIN),
    "reflected @": (lambda q, k, v: v.__rmatmul__(soft(q, k)), PLAIN),
    "transposed": (lambda q, k, v: (v.mT @ soft(q, k).mT).mT, PLAIN),
    "bmm, heads merged": (bmm, PLAIN),
    "einsum": (lambda q, k, v: torch.einsum("bhij,bhjd->bhid", soft(q, k), v), PLAIN),
    "einsum, values first": (lambda q, k, v: torch.einsum("bhjd,bhij->bhid", v, soft(q, k)), PLAIN),
    "einsum, ellipsis": (lambda q, k, v: torch.einsum("...ij,...jd->...id", soft(q, k), v), PLAIN),
    "einsum, query before head": (query_before_head, PLAIN),
    "softmax by hand": (by_hand, PLAIN),
}


@pytest.mark.parametrize("chunk", [1, 1 << 18], ids=["one image at a time", "whole"])
@pytest.mark.parametrize(("attend", "reference"), WAYS.values(), ids=WAYS)
def test_map_is_the_one_applied(attend, reference, chunk, monkeypatch):
    monkeypatch.setattr(watch_module, "CHUNK", chunk)
    torch.manual_seed(0)
    model = TinyViT(attend).eval()
    x = torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        plain = model(x)
    found, (maps,), output = watched(model, x)
    query, key, _ = model.seen
    assert torch.equal(output, plain)
    assert [(site.heads, site.grid, site.prefix, site.windows) for site in found.attentions] == [(3, (4, 4), 0, 1)]
    np.testing.assert_allclose(maps[:, 0].numpy(), softmax64(query, key, **reference), atol=2e-6)
    np.testing.assert_allclose(maps.sum(-1).numpy(), 1.0, atol=1e-5)


def test_map_is_the_one_before_dropout():
    torch.manual_seed(0)
    model = TinyViT(sdpa(dropout_p=0.5))
    _, (maps,), _ = watched(model, torch.randn(3, 3, 16, 16))
    np.testing.assert_allclose(maps[:, 0].numpy(), softmax64(*model.seen[:2]), atol=2e-6)


def test_multihead_function_in_training_mode_gives_the_map_before_dropout():
    class Functional(TinyMHA):
        def attention_of(self, y):
            part = self.attention
            projections = (part.in_proj_weight, part.in_proj_bias, None, None, False)
            out = (part.out_proj.weight, part.out_proj.bias)
            return F.multi_head_attention_forward(y, y, y, 12, HEADS, *projections, 0.5, *out)[0]  # training=True

        def forward(self, x):
            self.inputs = self.embed(x).flatten(2).transpose(1, 2)
            return self.head((self.inputs + self.attention_of(self.inputs.transpose(0, 1)).transpose(0, 1)).mean(1))

    torch.manual_seed(0)
    model = Functional()
    found, (maps,), _ = watched(model, torch.randn(3, 3, 16, 16))
    assert found.attentions[0].source.kind == "mha"
    np.testing.assert_allclose(maps[:, 0].numpy(), reference_mha(model), atol=2e-6)


def test_five_axes_are_windows():
    torch.manual_seed(0)
    model = TinyViT(five_axes)
    x = torch.randn(5, 3, 16, 16)
    found, (maps,), _ = watched(model, x)
    query, key = (rearrange(part, "b h (w n) d -> b w h n d", w=4) for part in model.seen[:2])
    # four tokens in a row are a row of patches
    assert [(site.grid, site.windows) for site in found.attentions] == [((1, 4), 4)]
    np.testing.assert_allclose(maps.numpy(), softmax64(query, key, bias=HEAD_BIAS[:, :4, :4]), atol=2e-6)


def test_grouped_queries_share_keys():
    torch.manual_seed(0)
    model = TinyViT(grouped, heads=4)
    _, (maps,), _ = watched(model, torch.randn(3, 3, 16, 16))
    query, key, _ = model.seen
    np.testing.assert_allclose(maps[:, 0].numpy(), softmax64(query, key[:, [0, 0, 1, 1]]), atol=2e-6)


def reference_mha(model, *, allowed=None, bias=0.0):
    attention, x = model.attention, model.inputs
    query, key, _ = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    query, key = (rearrange(part, "b n (h d) -> b h n d", h=attention.num_heads) for part in (query, key))
    return softmax64(query, key, allowed=allowed, bias=bias)


def padding(x):
    """A mask of the last tokens, one more of them in each image: True leaves a key out."""
    return torch.arange(TOKENS)[None] >= TOKENS - torch.arange(len(x))[:, None]


ASKED = {
    "no weights": (dict(need_weights=False), None),
    "averaged": (dict(need_weights=True), (5, TOKENS, TOKENS)),
    "per head": (dict(need_weights=True, average_attn_weights=False), (5, HEADS, TOKENS, TOKENS)),
}


@pytest.mark.parametrize("chunk", [1, 1 << 18], ids=["one image at a time", "whole"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("options", "returned"), ASKED.values(), ids=ASKED)
def test_multihead_attention_gives_its_caller_what_it_asked_for(options, returned, batch_first, chunk, monkeypatch):
    monkeypatch.setattr(watch_module, "CHUNK", chunk)
    torch.manual_seed(0)
    model = TinyMHA(options, batch_first=batch_first).eval()
    x = torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        plain = model(x)
    _, (maps,), output = watched(model, x)
    # PyTorch's fast path is off while it is watched, and rounds in another order.
    torch.testing.assert_close(output, plain, rtol=1e-5, atol=1e-6)
    expected = reference_mha(model)
    np.testing.assert_allclose(maps[:, 0].numpy(), expected, atol=2e-6)
    assert (model.returned is None) if returned is None else (tuple(model.returned.shape) == returned)
    if returned is not None:
        given = expected.mean(1) if len(returned) == 3 else expected
        np.testing.assert_allclose(model.returned.numpy(), given, atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 1 << 18], ids=["one image at a time", "whole"])
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        (dict(attn_mask=~BOOL_MASK), dict(allowed=BOOL_MASK)),
        (dict(attn_mask=lambda x: HEAD_BIAS.repeat(len(x), 1, 1)), dict(bias=HEAD_BIAS)),
        (dict(attn_mask=~CAUSAL, is_causal=True), dict(allowed=CAUSAL)),
        (dict(key_padding_mask=padding), dict(allowed=~padding(range(5))[:, None, None])),
    ],
    ids=["bool mask", "float mask per head", "causal", "padding"],
)
def test_multihead_attention_with_masks(options, reference, chunk, monkeypatch):
    monkeypatch.setattr(watch_module, "CHUNK", chunk)
    torch.manual_seed(0)
    model = TinyMHA(options | {"need_weights": False})
    _, (maps,), _ = watched(model, torch.randn(5, 3, 16, 16))
    np.testing.assert_allclose(maps[:, 0].numpy(), reference_mha(model, **reference), atol=2e-6)


def test_a_module_used_again_has_a_map_for_each_use():
    torch.manual_seed(0)
    model = TinyMHA({"need_weights": False}, repeat=3)
    found, maps, _ = watched(model, torch.randn(2, 3, 16, 16))
    assert [site.name for site in found.attentions] == ["attention", "attention#2", "attention#3"]
    np.testing.assert_allclose(maps[2][:, 0].numpy(), reference_mha(model), atol=2e-6)
    assert not torch.allclose(maps[0], maps[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_have_rows_that_sum_to_one(dtype):
    torch.manual_seed(0)
    model = TinyViT(sdpa()).to(dtype)
    _, (maps,), output = watched(model, torch.randn(2, 3, 16, 16, dtype=dtype))
    query, key, _ = model.seen
    assert output.dtype == dtype
    np.testing.assert_allclose(maps[:, 0].numpy(), softmax64(query, key), atol=2e-6)


def test_timm_convit_has_one_gated_map_per_block():
    import timm

    torch.manual_seed(0)
    model = timm.create_model("convit_tiny", depth=3, local_up_to_layer=2, img_size=64, num_classes=3)
    model(torch.randn(2, 3, 64, 64))  # `get_attention` needs the table of a first call
    inputs = {}
    for index, block in enumerate(model.blocks):
        block.attn.register_forward_pre_hook(lambda module, args, index=index: inputs.update({index: args[0].clone()}))
    found, maps, _ = watched(model, torch.randn(2, 3, 64, 64))
    assert [site.name for site in found.attentions] == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    assert [(site.grid, site.prefix) for site in found.attentions] == [((4, 4), 0), ((4, 4), 0), ((4, 4), 1)]
    with torch.no_grad():
        for index in (0, 1):
            gated = model.blocks[index].attn.get_attention(inputs[index])
            torch.testing.assert_close(maps[index][:, 0], gated, rtol=1e-5, atol=1e-7)
    for part in maps:
        torch.testing.assert_close(part.sum(-1), torch.ones_like(part[..., 0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["vit_nano", "convit_nano", "alternet_nano"])
def test_our_attentions_apply_what_their_weights_function_says(name):
    model = create_model(name, image_size=8, seed=0)
    inputs = {}
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, path=path: inputs.update({path: args}))
    found, maps, _ = watched(model, torch.randn(2, 3, 8, 8))
    assert len(maps) == {"vit_nano": 4, "convit_nano": 4, "alternet_nano": 1}[name]
    with torch.no_grad():
        for site, part in zip(found.attentions, maps, strict=True):
            expected = model.get_submodule(site.name).weights(*inputs[site.name])
            torch.testing.assert_close(part.flatten(0, 1), expected, rtol=1e-5, atol=1e-6)


def test_transformers_sdpa_and_eager_are_the_same():
    from test_attach_units import transformers_vit

    torch.manual_seed(0)
    fused, eager = transformers_vit("sdpa"), transformers_vit("eager")
    eager.load_state_dict(fused.state_dict())
    x = torch.randn(2, 3, 32, 32)
    (found, ours, _), (_, theirs, _) = watched(fused, x), watched(eager, x)
    assert [site.name for site in found.attentions] == ["vit.layers.0.attention", "vit.layers.1.attention"]
    assert found.attentions[0].source.kind == "sdpa"
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # The model's own flags are neither needed nor moved.
    assert fused.config._attn_implementation == "sdpa"
    eager.eval()
    with torch.no_grad():
        published = eager(x, output_attentions=True).attentions
    for a, b in zip(theirs, published, strict=True):
        torch.testing.assert_close(a[:, 0], b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [32, 36])
def test_channel_attention_is_refused_with_the_reason(width):
    from timm.models.xcit import Xcit

    # Of 16 tokens; 32 channels per head could be read as 5x5 + 7 tokens, 36 as a window of 6x6 with padding.
    sizes = dict(embed_dim=2 * width, num_heads=2, depth=1, cls_attn_layers=1)
    model = Xcit(img_size=64, patch_size=16, num_classes=3, **sizes)
    for layers in ("auto", "blocks.*"):
        found, maps, _ = watched(model, torch.randn(2, 3, 64, 64), layers=layers)
        assert maps == []
        reason = f"a map of {width}x{width} is over channels, not over tokens"
        assert f"blocks.0.attn: {reason}" in found.skipped
        assert "cls_attn_blocks.0.attn: prefix tokens attend to the patches, no patch does" in found.skipped


def pvt():
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    sizes = dict(depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 16), num_heads=(1, 2, 2, 2))
    return PyramidVisionTransformerV2(num_classes=3, **sizes)


def test_pooled_keys_lie_in_the_middle_of_what_they_stand_for():
    found, maps, _ = watched(pvt(), torch.randn(2, 3, 64, 96))
    assert found.skipped == ()
    assert [site.grid for site in found.attentions] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    assert [site.key_grid for site in found.attentions] == [(2, 3)] * 4
    assert [tuple(one.shape) for one in maps[:2]] == [(2, 1, 1, 384, 6), (2, 1, 2, 96, 6)]
    first, last = found.attentions[0], found.attentions[-1]
    assert last.keys is None and first.positions.shape == (1, 384, 2)
    middles = [[y, x] for y in (3.5, 11.5) for x in (3.5, 11.5, 19.5)]
    np.testing.assert_allclose(first.keys[0], middles)


def test_keys_of_blocks_reach_around_them():
    """HaloNet: blocks of 8x8 queries see the 12x12 patches around, as far as the image goes."""
    import timm

    found, maps, _ = watched(timm.create_model("halonet26t", num_classes=3), torch.randn(2, 3, 256, 256))
    site = found.attentions[0]
    assert (site.grid, site.key_grid, site.windows, site.heads) == ((8, 8), (10, 10), 4, 8)
    for block, (queries, keys) in enumerate(zip(site.positions, site.keys, strict=True)):
        corner = np.array(divmod(block, 2)) * 8
        inside = np.stack(np.meshgrid(np.arange(12), np.arange(12), indexing="ij"), -1).reshape(-1, 2) + corner - 2
        outside = ((inside < 0) | (inside > 15)).any(1)
        np.testing.assert_array_equal(queries[[0, -1]], [corner, corner + 7])
        np.testing.assert_array_equal(keys, np.where(outside[:, None], np.nan, inside))
    assert maps[0].shape == (2, 4, 8, 64, 144)


def test_keys_on_no_grid_are_refused_with_the_reason():
    def few(q, k, v):  # of 16 patches the first seven
        return soft(q, k[:, :, :7]) @ v[:, :, :7]

    found, maps, _ = watched(TinyViT(few), torch.randn(2, 3, 16, 16))
    assert maps == []
    assert found.skipped == ("TinyViT: 16 queries attend to 7 keys, which fill no grid",)


def test_extra_keys_are_refused_with_the_reason():
    for extra in ("add_bias_kv", "add_zero_attn"):
        found, maps, _ = watched(TinyMHA({"need_weights": False}, **{extra: True}), torch.randn(2, 3, 16, 16))
        assert maps == []
        assert found.skipped == ("attention: 16 queries attend to 17 keys, which lie on different grids",)


def test_heads_before_the_batch_are_refused_and_not_mixed_up():
    def head_first(q, k, v):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return (soft(q, k) @ v).transpose(0, 1)

    found, maps, _ = watched(TinyViT(head_first, dim=16, heads=4), torch.randn(3, 3, 16, 16))
    assert maps == []
    assert found.skipped == ("TinyViT: maps of shape (4, 2, 16, 16) have heads or windows before images",)


@pytest.mark.parametrize(
    "pattern", ["b h n d -> (h b) n d", "b h n d -> h b n d"], ids=["on one axis", "as many heads as images"]
)
def test_heads_before_the_batch_are_no_images(pattern):
    """Two heads and two images: the shape of the maps does not tell which is which."""

    def head_first(q, k, v):
        q, k, v = (rearrange(x, pattern) for x in (q, k, v))
        return rearrange(soft(q, k) @ v, f"{pattern.split('-> ')[1]} -> b h n d", h=2)

    found, maps, _ = watched(TinyViT(head_first, heads=2), torch.randn(2, 3, 16, 16))
    shape = (4, 16, 16) if "(h b)" in pattern else (2, 2, 16, 16)
    assert maps == [] and found.skipped == (f"TinyViT: maps of shape {shape} have heads or windows before images",)


def test_maps_mixed_after_the_softmax_are_reported():
    class TalkingHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(HEADS, HEADS)
            self.net = TinyViT(lambda q, k, v: self.mix(soft(q, k).movedim(1, -1)).movedim(-1, 1) @ v)

        def forward(self, x):
            return self.net(x)

    found, maps, _ = watched(TalkingHeads(), torch.randn(2, 3, 16, 16))
    assert maps == []
    assert [unit.kind for unit in found.units] == ["stem", "msa", "mlp"]
    assert found.skipped == ("net#2: activations multiply each other, but no map's rows sum to one",)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_a_kernel_without_maps():
    from torch.nn.attention.flex_attention import flex_attention

    model = TinyViT(flex_attention)
    with untouched(model):
        found = plan(model, torch.randn(2, 3, 16, 16))
    assert [unit.kind for unit in found.units] == ["stem", "msa", "mlp"]
    assert found.attends and found.attentions == ()
    (reason,) = found.skipped
    assert reason.startswith("TinyViT: no attention map was seen in it")


def linear(q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def linear_einsum(q, k, v):
    context = torch.einsum("bhnd,bhne->bhde", k.softmax(-2), v)
    return torch.einsum("bhnd,bhde->bhne", q.softmax(-1), context)


@pytest.mark.parametrize("attend", [linear, linear_einsum])
@pytest.mark.parametrize("width", [TOKENS, TOKENS // 2], ids=["as many channels as tokens", "fewer channels"])
def test_linear_attention_is_over_channels(attend, width):
    """Its keys sum to one over tokens, and its queries over channels: neither is a map between patches."""
    found, maps, _ = watched(TinyViT(attend, dim=HEADS * width), torch.randn(2, 3, 16, 16))
    assert maps == [] and [unit.kind for unit in found.units] == ["stem", "msa", "mlp"]
    assert found.skipped == (
        f"TinyViT: a map of {width}x{TOKENS} is over channels, not over tokens",
        f"TinyViT#2: {TOKENS} queries attend to {width} keys that lie nowhere in the image (channels, latents)",
    )


class Queries(nn.Module):
    """Learned queries, as many as a grid of 3x3, that ask the patches and then each other."""

    def __init__(self, attention):
        super().__init__()
        self.embed, self.queries = nn.Conv2d(3, 12, 4, 4), nn.Parameter(torch.randn(1, 9, 12))
        self.fixed, self.cross, self.self_attention = attention(), attention(), attention()
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.boxes, self.classes = nn.Linear(12, 4), nn.Linear(12, 5)

    def forward(self, x):
        x = self.embed(x).flatten(2).mT
        x = x + self.mlp(x)
        y = self.queries.expand(len(x), -1, -1)
        y = y + self.fixed(y, y, y)[0]
        y = y + self.cross(y, x, x)[0]
        y = y + self.self_attention(y, y, y)[0]
        y = y + self.mlp(y)
        return self.classes(y), self.boxes(y)


class FusedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, q, k, v):
        parts = (rearrange(x, "b n (h d) -> b h n d", h=HEADS) for x in (self.query(q), self.key(k), self.value(v)))
        return (rearrange(F.scaled_dot_product_attention(*parts), "b h n d -> b n (h d)"),)


class WrittenAttention(FusedAttention):
    def forward(self, q, k, v):
        return (soft(self.query(q), self.key(k)) @ self.value(v),)


@pytest.mark.parametrize(
    "attention",
    [lambda: nn.MultiheadAttention(12, HEADS, batch_first=True), FusedAttention, WrittenAttention],
    ids=["multi-head function", "fused", "matmul"],
)
def test_object_queries_are_no_patches(attention):
    found, maps, _ = watched(Queries(attention), torch.randn(2, 3, 16, 16))
    assert maps == []
    assert [(unit.kind, unit.layout.grid) for unit in found.units] == [("stem", (4, 4)), ("mlp", (4, 4))]
    assert found.skipped[0] == "Queries and 1 more: no token lies anywhere in the image (object queries, latents)"
    assert found.skipped[1].startswith("cross: ")
    assert found.skipped[2].startswith("self_attention: 9 tokens attend to each other that lie nowhere")


@pytest.mark.parametrize("product", ["fused", "multi-head function"])
def test_codes_of_positions_ask_each_other_of_the_patches(product):
    """No image is in the map, and all of it in the values."""
    codes = torch.randn(1, TOKENS, 12)

    class Fixed(TinyMHA):
        def forward(self, x):
            x = self.embed(x).flatten(2).mT
            code = codes.expand(len(x), -1, -1)
            fused = product == "fused"
            y = F.scaled_dot_product_attention(code, code, x) if fused else self.attention(code, code, x)[0]
            return self.head((x + y).mean(1))

    found, *_ = watched(Fixed(), torch.randn(2, 3, 16, 16))
    assert [(site.grid, site.prefix, site.positions) for site in found.attentions] == [((4, 4), 0, None)]
    assert [unit.kind for unit in found.units] == ["stem", "msa"] and found.skipped == ()


def test_products_that_are_no_attention_are_left_alone():
    class Mixer(nn.Module):
        """A fixed matrix of averages, weights some of which are negative, and a softmax of channels."""

        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, 12, 4, 4)
            self.mean = nn.Parameter(torch.full((TOKENS, TOKENS), 1 / TOKENS))
            self.head = nn.Linear(12, 5)

        def forward(self, x):
            x = self.embed(x).flatten(2).transpose(1, 2)
            x = x + self.mean @ x
            x = x + x @ torch.ones(12, 12)
            weights = (x @ x.mT).softmax(-1)
            x = x + (2 * torch.eye(TOKENS) - weights) @ x  # rows sum to one, but some are negative
            x = x + torch.einsum("bnc,dc->bnd", x.softmax(-1), torch.ones(12, 12))
            return self.head(x.mean(1))

    found, maps, _ = watched(Mixer(), torch.randn(2, 3, 16, 16))
    assert maps == [] and [unit.kind for unit in found.units] == ["stem", "mlp", "mlp", "msa", "mlp"]
    assert found.skipped == ("Mixer#4: activations multiply each other, but no map's rows sum to one",)


def test_shifted_windows_cover_the_grid():
    from test_attach_units import CASES

    model = CASES["timm swin"].build()
    found, maps, _ = watched(model, torch.randn(2, 3, 112, 112))
    assert [(site.grid, site.windows, site.heads) for site in found.attentions] == (
        [((7, 7), 16, 1)] * 2 + [((7, 7), 4, 2)] * 2
    )
    assert [tuple(part.shape) for part in maps] == [(2, 16, 1, 49, 49)] * 2 + [(2, 4, 2, 49, 49)] * 2
    # Windows are in the order image, row, column: the first of the second image is the product of its own tokens.
    _, alone, _ = watched(model, torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(3))[1:])
    _, both, _ = watched(model, torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(3)))
    torch.testing.assert_close(both[0][1:], alone[0], rtol=1e-4, atol=1e-5)


def test_norms_and_scales_inside_attention_do_not_hide_the_grid():
    class Scaled(TinyViT):
        """Normalised queries, as many channels in a head as tokens, and a temperature from the pooled image."""

        def __init__(self):
            super().__init__(self.mix, dim=3 * TOKENS)
            self.temperature = nn.Linear(TOKENS, 1)

        def mix(self, q, k, v):
            q, k = (F.layer_norm(x, (TOKENS,)) for x in (q, k))
            temperature = self.temperature(q.mean((1, 2))[:, None])[:, None]  # (batch, 1, 1, 1)
            return (q @ k.mT * temperature).softmax(-1) @ v

    found, (maps,), _ = watched(Scaled(), torch.randn(2, 3, 16, 16))
    assert [(site.grid, site.heads) for site in found.attentions] == [((4, 4), 3)]
    assert maps.shape == (2, 1, 3, TOKENS, TOKENS)


def test_attention_inside_a_branch_that_halves_the_grid():
    from timm.models import create_model as timm_model

    model = timm_model("botnet26t_256", img_size=64, num_classes=3)
    found, maps, _ = watched(model, torch.randn(2, 3, 64, 64))
    assert [(site.grid, site.heads, site.kind) for site in found.attentions] == [
        ((4, 4), 4, "msa"),
        ((4, 4), 4, "subsample"),
        ((2, 2), 4, "msa"),
    ]
    assert all(part.shape[2] == 4 for part in maps)
