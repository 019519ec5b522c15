"""The networks agree with timm's after its weights are copied over."""

import pytest
import torch
from timm.models.convit import ConVit
from timm.models.convmixer import ConvMixer
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


@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_vit(pool, registers, size):
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
    )
    theirs = scattered_(theirs).eval()
    state = transformer_state(theirs)
    prefix = [state.pop(name)[0] for name in ("cls_token", "reg_token") if name in state]
    position = state.pop("pos_embed")[0]
    if prefix:
        # timm gives prefix tokens positions of their own; ours are learned tokens and need none.
        prefix = torch.cat(prefix)
        state["prefix"], position = prefix + position[: len(prefix)], position[len(prefix) :]
    state["position"] = position
    ours = create_model(
        "vit", image_size=size, dim=24, depth=2, pool=pool, registers=registers, qkv_bias=True, num_classes=10
    ).eval()
    ours.load_state_dict(state)
    assert_agree(ours, theirs, (2, 3, *size))


def convits(**settings):
    theirs = ConVit(
        img_size=32, patch_size=4, embed_dim=6, num_heads=4, depth=4, local_up_to_layer=2, num_classes=10, **settings
    )
    return create_model("convit", dim=24, depth=4, heads=4, gpsa_layers=2, seed=0), theirs


def test_convit():
    ours, theirs = (model.eval() for model in convits())
    state = transformer_state(scattered_(theirs))
    state["class_token"] = state.pop("cls_token")[0, 0]
    state["position"] = state.pop("pos_embed")[0]
    for i in range(2):
        vector = state.pop(f"blocks.{i}.attn.pos_proj.weight")
        state[f"blocks.{i}.attention.position.vector"] = vector[:, [2, 0, 1]]  # theirs is (x, y, square)
        del state[f"blocks.{i}.attn.pos_proj.bias"]  # the same for all keys: the softmax does not see it
    renamed = {}
    for key, value in state.items():
        head, _, rest = key.partition(".")
        index, _, tail = rest.partition(".")
        if head == "blocks":
            key = f"local_blocks.{index}.{tail}" if int(index) < 2 else f"global_blocks.{int(index) - 2}.{tail}"
        renamed[key] = value
    ours.load_state_dict(renamed)
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
