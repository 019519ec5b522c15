import copy
import json

import numpy as np
import pytest
import timm
import torch
from libraries import LIBRARIES, from_timm, from_torchvision, from_transformers, from_vitprobe, randomise_
from torch import nn

import vitprobe as vp
from vitprobe.initializers import default_, gpsa_, impulse_, positions_
from vitprobe.initializers.access import position_code
from vitprobe.models import create_model
from vitprobe.models.layers import sincos_positions
from vitprobe.probes.nonlocality import distances
from vitprobe.results import check


def same_distribution(model, fresh, *, but=()):
    """Compare mean square and range of every parameter with those of a network that its own library made."""
    theirs = dict(fresh.named_parameters())
    for name, parameter in model.named_parameters():
        if any(part in name for part in but):
            continue
        mine, other = parameter.detach().double(), theirs[name].detach().double()
        if other.std(correction=0) == 0:
            assert torch.equal(mine, other), name
            continue
        # Uniform numbers: 0.45 / sqrt(n) is the relative standard error of their spread, normal numbers': 0.71.
        near = 5 * 0.71 * (2 / mine.numel()) ** 0.5
        assert float(mine.square().mean().sqrt()) == pytest.approx(float(other.square().mean().sqrt()), rel=near), name
        normal = other.abs().max() > 2 * other.std()
        assert bool(mine.abs().max() > 2 * mine.std()) == bool(normal) or mine.numel() < 200, name


def test_as_timm():
    model, fresh = randomise_(from_timm(embed_dim=96, reg_tokens=2)), from_timm(embed_dim=96, reg_tokens=2)
    check(default_(model, "timm", seed=0))
    same_distribution(model, fresh)


def test_as_transformers():
    pytest.importorskip("transformers")
    model, fresh = randomise_(from_transformers()), from_transformers()
    default_(model, "transformers", seed=0)
    same_distribution(model, fresh)


def test_as_vitprobe():
    model = randomise_(from_vitprobe(dim=96))
    default_(model, "vitprobe", seed=0)
    same_distribution(model, from_vitprobe(dim=96))
    model = randomise_(create_model("model_1_nano", image_size=16, position="learned"))
    default_(model, "vitprobe", seed=0)
    same_distribution(model, create_model("model_1_nano", image_size=16, position="learned"))


def test_as_torch():
    layers = nn.Sequential(nn.Linear(30, 40), nn.Conv2d(3, 40, 5), nn.BatchNorm2d(40), nn.MultiheadAttention(48, 3))
    fresh = copy.deepcopy(layers)
    layers[2].running_mean.fill_(1.0)
    default_(randomise_(layers), "torch", seed=0)
    same_distribution(layers, fresh)
    assert not layers[2].running_mean.any()


def test_as_deit():
    model = randomise_(from_torchvision())
    ds = default_(model, "deit", seed=0).swap_dims(layer="layer_name")
    check(ds.swap_dims(layer_name="layer"))
    std = ds["std"]
    assert std.sel(layer_name="encoder.pos_embedding") == pytest.approx(0.02, rel=0.1)
    assert std.sel(layer_name="class_token") == pytest.approx(0.02, rel=0.5)
    assert std.sel(layer_name="encoder.layers.encoder_layer_0.mlp.0.weight") == pytest.approx(0.02, rel=0.1)
    assert std.sel(layer_name="encoder.layers.encoder_layer_0.self_attention.in_proj_weight") == pytest.approx(
        0.02, rel=0.1
    )
    assert ds.largest.sel(layer_name="conv_proj.weight") == pytest.approx(48**-0.5, rel=0.01)
    assert not model.heads.head.bias.any()


def test_parameters_are_drawn_by_their_names():
    state = torch.get_rng_state()
    one, other = randomise_(from_vitprobe()), from_vitprobe(depth=3)
    torch.set_rng_state(state)
    default_(one, "deit", seed=0)
    default_(other, "deit", seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    assert not torch.equal(one.blocks[0].attention.value.weight, one.blocks[1].attention.value.weight)
    with pytest.raises(ValueError, match=r"unknown style 'diet'.*Did you mean 'deit'"):
        default_(one, "diet", seed=0)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_sincos_code_in_any_library(library):
    model = LIBRARIES[library]()
    check(positions_(model, code="sincos", scale=2.0))
    name = {"timm": "pos_embed", "torchvision": "encoder.pos_embedding", "vitprobe": "position"}.get(
        library, "vit.embeddings.position_embeddings"
    )
    rows = dict(model.named_parameters())[name].reshape(-1, 32)
    torch.testing.assert_close(rows[-16:].detach(), 2 * sincos_positions((4, 4), 32))
    assert len(rows) == 16 or not rows[0].any()


def test_codes_that_are_maps_of_channels():
    """PiT adds one before its tokens are a row; others keep theirs with the channels last."""
    model = timm.create_model("pit_ti_224", img_size=64, num_classes=3)
    side = model.pos_embed.shape[-1]
    assert positions_(model, code="sincos").attrs["numerical_rank"] > 1
    rows = model.pos_embed.detach()[0].permute(1, 2, 0).reshape(side**2, -1)
    torch.testing.assert_close(rows, sincos_positions((side, side), rows.shape[1]))
    with pytest.raises(ValueError, match=r"transformers\.1\.blocks\.0\.attn, which takes 128 channels"):
        impulse_(model, kernel_size=3, seed=0)
    model = nn.Module()
    model.pos_embed = nn.Parameter(torch.zeros(1, 3, 4, 8))
    assert position_code(model).code.shape == (12, 8)
    model.pos_embed = nn.Parameter(torch.zeros(2, 3, 4, 8))
    with pytest.raises(ValueError, match=r"pos_embed of shape \(2, 3, 4, 8\) has not one row for each token"):
        position_code(model)


def test_the_rank_of_a_code_is_what_can_be_told_apart():
    model = from_vitprobe(image_size=32, dim=96)
    ds = positions_(model, code="sincos")
    np.testing.assert_allclose(ds.singular_value, np.linalg.svd(sincos_positions((8, 8), 96))[1], atol=1e-4)
    assert ds.attrs["numerical_rank"] == 15
    assert positions_(model, code="identity").attrs["numerical_rank"] == 64
    assert torch.equal(model.position.detach()[:, :64], torch.eye(64)) and not model.position[:, 64:].any()
    assert positions_(model, code="learned", scale=18.0, seed=1).attrs["numerical_rank"] == 64
    assert float(model.position.detach().std()) == pytest.approx(0.36, rel=0.05)
    assert [d["options"]["code"] for d in json.loads(model.initialisation)] == ["sincos", "identity", "learned"]


def test_codes_that_cannot_be_written_are_refused():
    with pytest.raises(ValueError, match=r"fixed code \(position\): build it with a learned one"):
        positions_(from_vitprobe(position="sincos"))
    with pytest.raises(ValueError, match="no position code that it adds"):
        positions_(from_vitprobe(position="none"))
    with pytest.raises(ValueError, match="each of 64 patches"):
        positions_(from_vitprobe(image_size=32), code="identity")
    with pytest.raises(ValueError, match="unknown position code 'sine'"):
        positions_(from_vitprobe(), code="sine")


@pytest.mark.parametrize("heads", [4, 9, 5])
def test_local_gpsa_is_what_the_libraries_make(heads):
    vitprobe = create_model("convit_nano", image_size=8, dim=36 if heads == 9 else 40, heads=heads, seed=0)
    made = copy.deepcopy(vitprobe.state_dict())
    with torch.no_grad():
        for block in vitprobe.local_blocks:
            for parameter in (block.attention.position.vector, block.attention.gate, block.attention.value.weight):
                parameter.normal_()
    ds = gpsa_(vitprobe)
    check(ds)
    for name, value in vitprobe.state_dict().items():
        torch.testing.assert_close(value, made[name])
    assert ds.sizes["layer"] == 3 and ds.position_share.values == pytest.approx(0.731, abs=5e-4)
    square = int(heads**0.5) ** 2
    theirs = timm.create_model("convit_tiny", img_size=32, depth=2, local_up_to_layer=1, embed_dim=8, num_heads=heads)
    published = copy.deepcopy(theirs.state_dict())
    timms = gpsa_(randomise_(theirs))
    # timm counts its heads down the columns of the lattice, vitprobe along the rows.
    rows = [
        weight[:square].detach().tolist()
        for weight in (theirs.blocks[0].attn.pos_proj.weight, published["blocks.0.attn.pos_proj.weight"])
    ]
    assert sorted(rows[0]) == sorted(rows[1])
    assert torch.equal(theirs.blocks[0].attn.v.weight, published["blocks.0.attn.v.weight"])
    assert torch.equal(theirs.blocks[0].attn.gating_param, torch.ones(heads))
    np.testing.assert_array_equal(np.isnan(ds.offset_y[0]), np.arange(heads) >= square)
    places = [
        {(float(y), float(x)) for y, x in zip(d.offset_y[0, :square], d.offset_x[0, :square], strict=True)}
        for d in (ds, timms)
    ]
    assert places[0] == places[1]


def test_local_gpsa_is_as_local_as_published():
    # 14x14 patches, 9 heads, strength 1, content uniform: nonlocality 2.88 of 7.28, its positional part 1.26.
    model = create_model("convit_nano", image_size=28, dim=36, heads=9, seed=0, local=False)
    gpsa_(model)
    position = model.local_blocks[0].attention.position().detach().softmax(-1)
    apart = distances((14, 14))
    assert float((position * apart).sum(-1).mean()) == pytest.approx(1.26, abs=0.01)
    with torch.no_grad():
        for block in model.local_blocks:
            block.attention.query_key.weight.zero_()
    found = vp.nonlocality(model, torch.randn(1, 3, 28, 28), progress=False).nonlocality
    assert float(found[:3].mean()) == pytest.approx(2.88, abs=0.01)


def test_options_of_gpsa():
    model = create_model("convit_nano", image_size=8, seed=0)
    ds = gpsa_(model, strength=0.5, centers="paper", gate=0.0)
    assert set(np.abs(ds.offset_y.values.ravel())) == {1.0} and (ds.position_share == 0.5).all()
    assert (ds.strength == 0.5).all()
    with pytest.raises(ValueError, match="'code' or 'paper'"):
        gpsa_(model, centers="middle")
    with pytest.raises(ValueError, match="ViT has no gated positional self-attention"):
        gpsa_(from_vitprobe())
