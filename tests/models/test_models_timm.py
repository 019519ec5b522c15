"""The networks agree with timm's and torchvision's after their weights are copied over."""

import pytest
import timm
import torch
import torchvision
from timm.models.convit import ConVit
from timm.models.convmixer import ConvMixer
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitprobe.models import create_model

NAMES = {
    "patch_embed.proj": "patches.project",
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "fc1": "0",
    "fc2": "2",
    "attn.proj": "attention.project",
    "attn.qk.": "attention.query_key.",
    "attn.v.": "attention.value.",
    "attn.gating_param": "attention.gate",
    "ls1.gamma": "attention_scale.factor",
    "ls2.gamma": "mlp_scale.factor",
    "head_dist": "distilled_head",
}


def scattered_(model):
    """Random parameters and running statistics, wide enough for a missing one to show."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.2 * torch.rand_like(tensor))
    return model


def transformer_state(theirs):
    """A timm transformer's state dict under our names, but for position and prefix."""
    state = {}
    for key, value in theirs.state_dict().items():
        for their_name, our_name in NAMES.items():
            key = key.replace(their_name, our_name)
        if "attn.qkv" in key:
            query, three = value.chunk(3), key.replace("attn.qkv", "attention.{}")
            state[three.format("query_key")] = torch.cat(query[:2])
            state[three.format("value")] = query[2]
        else:
            state[key] = value
    return state


def assert_agree(ours, theirs, shape):
    x = torch.randn(shape)
    out = theirs(x)
    assert out.std() > 0.05
    torch.testing.assert_close(ours(x), out, rtol=1e-5, atol=1e-5)


def vit_state(theirs):
    """A timm ViT's state dict under our names."""
    state = transformer_state(theirs)
    prefix = [state.pop(name)[0] for name in ("cls_token", "dist_token", "reg_token") if name in state]
    position = state.pop("pos_embed")[0]
    if prefix:
        # timm gives prefix tokens positions of their own; ours are learned tokens and need none.
        prefix = torch.cat(prefix)
        state["prefix"], position = prefix + position[: len(prefix)], position[len(prefix) :]
    return state | {"position": position}


@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_vit(pool, registers, size):
    scale = 0.1 if registers else None
    theirs = VisionTransformer(
        img_size=size,
        patch_size=4,
        embed_dim=24,
        depth=2,
        num_heads=3,
        num_classes=10,
        reg_tokens=registers,
        class_token=pool == "class",
        global_pool="token" if pool == "class" else "avg",
        fc_norm=False,
        init_values=scale,
    )
    theirs = scattered_(theirs).eval()
    options = dict(pool=pool, registers=registers, layer_scale=scale, qkv_bias=True)
    ours = create_model("vit", image_size=size, dim=24, depth=2, num_classes=10, **options).eval()
    ours.load_state_dict(vit_state(theirs))
    assert_agree(ours, theirs, (2, 3, *size))


def test_distilled_deit():
    size = (12, 20)
    theirs = VisionTransformerDistilled(img_size=size, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=10)
    theirs = scattered_(theirs)
    ours = create_model("vit", image_size=size, dim=24, depth=2, num_classes=10, distilled=True, qkv_bias=True)
    ours.load_state_dict(vit_state(theirs))
    assert ours.num_prefix_tokens == 2
    assert_agree(ours.eval(), theirs.eval(), (2, 3, *size))
    assert_agree(ours.train(), theirs.train(), (2, 3, *size))
    x = torch.randn(2, 3, *size)
    average = ours(x)
    ours.set_distilled_training()
    theirs.set_distilled_training()
    for mine, other in zip(ours(x), theirs(x), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert torch.equal(sum(ours(x)) / 2, average)
    assert torch.equal(ours.eval()(x), average)
    with pytest.raises(ValueError, match="build it with distilled=True"):
        create_model("vit_nano").set_distilled_training()
    with pytest.raises(ValueError, match="use pool='class', or distilled=False"):
        create_model("vit_nano", distilled=True)


def test_torchvision_vit():
    theirs = torchvision.models.VisionTransformer(16, 4, 2, 3, 24, 48, num_classes=10)
    state = {}
    for key, value in scattered_(theirs.eval()).state_dict().items():
        for their_name, our_name in {
            "conv_proj": "patches.project",
            "encoder.layers.encoder_layer_": "blocks.",
            "ln_1": "attention_norm",
            "ln_2": "mlp_norm",
            "mlp.3": "mlp.2",
            "self_attention.out_proj": "attention.project",
            "encoder.ln": "norm",
            "heads.head": "head",
        }.items():
            key = key.replace(their_name, our_name)
        if "in_proj_" in key:
            parts = value.chunk(3)
            state[key.replace("self_attention.in_proj_", "attention.query_key.")] = torch.cat(parts[:2])
            state[key.replace("self_attention.in_proj_", "attention.value.")] = parts[2]
        else:
            state[key] = value
    position = state.pop("encoder.pos_embedding")[0]
    state["prefix"], state["position"] = state.pop("class_token")[0] + position[:1], position[1:]
    ours = create_model("vit", image_size=16, dim=24, depth=2, mlp_ratio=2.0, num_classes=10, qkv_bias=True).eval()
    ours.load_state_dict(state)
    assert_agree(ours, theirs, (2, 3, 16, 16))


def convits(**settings):
    theirs = ConVit(
        img_size=32, patch_size=4, embed_dim=6, num_heads=4, depth=4, local_up_to_layer=2, num_classes=10, **settings
    )
    return create_model("convit", dim=24, depth=4, heads=4, gpsa_layers=2, seed=0), theirs


def convit_state(theirs):
    """A timm ConViT's state dict under our names."""
    state, gated = transformer_state(theirs), theirs.local_up_to_layer
    state["class_token"] = state.pop("cls_token")[0, 0]
    state["position"] = state.pop("pos_embed")[0]
    for i in range(gated):
        vector = state.pop(f"blocks.{i}.attn.pos_proj.weight")
        state[f"blocks.{i}.attention.position.vector"] = vector[:, [2, 0, 1]]  # theirs is (x, y, square)
        del state[f"blocks.{i}.attn.pos_proj.bias"]  # the same for all keys: the softmax does not see it
    renamed = {}
    for key, value in state.items():
        head, _, rest = key.partition(".")
        index, _, tail = rest.partition(".")
        if head == "blocks":
            key = f"local_blocks.{index}.{tail}" if int(index) < gated else f"global_blocks.{int(index) - gated}.{tail}"
        renamed[key] = value
    return renamed


def test_convit():
    ours, theirs = (model.eval() for model in convits())
    ours.load_state_dict(convit_state(scattered_(theirs)))
    assert_agree(ours, theirs, (2, 3, 32, 32))


def test_convit_tiny():
    """As timm registers it, at its own initial weights: twelve layers amplify the rounding of random ones."""
    torch.manual_seed(0)
    theirs = timm.create_model("convit_tiny", img_size=32, patch_size=4, num_classes=10).eval()
    torch.nn.init.normal_(theirs.head.weight)
    ours = create_model("convit_ti", num_classes=10).eval()
    ours.load_state_dict(convit_state(theirs))
    assert_agree(ours, theirs, (2, 3, 32, 32))


def test_convit_starts_where_theirs_starts():
    """But for the order of the heads, which runs along columns there and along rows here."""
    ours, theirs = convits()
    for block, other in zip(ours.local_blocks, theirs.blocks, strict=False):
        vector = other.attn.pos_proj.weight[:, [2, 0, 1]].unflatten(0, (2, 2)).transpose(0, 1).flatten(0, 1)
        assert torch.equal(block.attention.position.vector, vector)
        assert torch.equal(block.attention.value.weight, other.attn.v.weight)
        assert torch.equal(block.attention.gate, other.attn.gating_param)


@pytest.mark.parametrize("training", [False, True])
def test_convmixer(training):
    theirs = scattered_(ConvMixer(8, 3, kernel_size=5, patch_size=2, num_classes=10)).train(training)
    ours = create_model("convmixer", image_size=16, dim=8, depth=3, kernel_size=5, patch_size=2).train(training)
    # Both list their layers in the order of the forward pass.
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    assert sum(isinstance(module, nn.BatchNorm2d) for module in ours.modules()) == 7
    assert_agree(ours, theirs, (4, 3, 16, 16))


def millions(name, **options):
    with torch.device("meta"):
        model = create_model(name, **options)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


@pytest.mark.parametrize(
    ("name", "expected"), [("vit_ti", 5.373), ("vit_ti_p2", 5.403), ("vit_s_p2", 21.42), ("vit_b_p2", 85.31)]
)
def test_sizes_of_vits(name, expected):
    """Park & Kim 2022, CIFAR-100 [million parameters]."""
    decimals = len(str(expected).partition(".")[2])
    assert millions(name, num_classes=100) == pytest.approx(expected, abs=0.51 * 10**-decimals)


@pytest.mark.parametrize(
    ("name", "theirs", "expected"),
    [
        ("convit_ti", "convit_tiny", 6),
        ("convit_ti_plus", None, 10),
        ("convit_s", "convit_small", 27),
        ("convit_s_plus", None, 48),
        ("convit_b", "convit_base", 86),
        ("convit_b_plus", None, 152),
    ],
)
def test_sizes_of_convits(name, theirs, expected):
    """D'Ascoli et al. 2021, Table 1 [million parameters], which all fit without the classifier alone.

    With it, as many as timm's, but for a bias that does nothing.
    """
    ours = millions(name, image_size=224, patch_size=16, num_classes=1000)
    of_a_class = millions(name, image_size=224, patch_size=16, num_classes=1001) - ours
    assert round(ours - 1000 * of_a_class) == expected
    if theirs:
        with torch.device("meta"):
            model = timm.create_model(theirs)
        dead = sum(p.numel() for key, p in model.named_parameters() if key.endswith("pos_proj.bias"))
        assert round(ours * 1e6) == sum(p.numel() for p in model.parameters()) - dead
