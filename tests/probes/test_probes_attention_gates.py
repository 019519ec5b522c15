"""The gates of gated attention, against the gating parameters of two libraries."""

import numpy as np
import pytest
import torch
from fixed_maps import make_site, random_maps
from torch import nn

from vitprobe.models import create_model
from vitprobe.probes import Nonlocality, nonlocality, probe
from vitprobe.probes.attention_gates import AttentionGates, attention_gates, solve_gate
from vitprobe.probes.nonlocality import distances
from vitprobe.results import check


def images(count=4, side=16):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def convit(**options):
    shape = dict(image_size=16, patch_size=4, num_classes=3, dim=36, depth=3, heads=9, gpsa_layers=2, seed=0)
    model = create_model("convit", **shape | options).eval()
    generator = torch.Generator().manual_seed(1)
    for block in model.local_blocks:
        nn.init.normal_(block.attention.query_key.weight, std=0.5, generator=generator)
        nn.init.normal_(block.attention.gate, std=2.0, generator=generator)
    return model


def timm_convit():
    from timm.models.convit import ConVit

    torch.manual_seed(0)
    model = ConVit(img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=4, local_up_to_layer=2, num_classes=3)
    for block in model.blocks[:2]:
        nn.init.normal_(block.attn.qk.weight, std=0.5)
        nn.init.normal_(block.attn.gating_param, std=2.0)
    return model.eval()


@pytest.mark.parametrize("library", ["vitprobe", "timm"])
def test_gates_are_the_sigmoid_of_the_parameter(library):
    model = convit() if library == "vitprobe" else timm_convit()
    parameters = (
        [block.attention.gate for block in model.local_blocks]
        if library == "vitprobe"
        else [block.attn.gating_param for block in model.blocks[:2]]
    )
    found = attention_gates(model, images().split(3), progress=False)
    check(found)
    assert found.sizes["layer"] == 2  # the last layer has no gates
    np.testing.assert_allclose(found.gate, torch.stack(parameters).sigmoid().detach(), atol=1e-5)
    np.testing.assert_allclose(found.gate_se, 0, atol=1e-6)


def test_nonlocality_of_both_parts():
    model, x = convit(), images()
    found = attention_gates(model, x, progress=False)
    attention, seen = model.local_blocks[0].attention, []
    handle = attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(x)
        handle.remove()
        query, key = attention._query_key(seen[0])
        content = (attention.scale * query @ key.transpose(-2, -1)).softmax(-1)
        position = attention.position().softmax(-1).expand_as(content)
    for name, maps in (("content", content), ("position", position)):
        each = (maps * distances((4, 4))).sum(-1).mean(-1)
        np.testing.assert_allclose(found[f"{name}_nonlocality"][0], each.mean(0), rtol=1e-5)
        spread = each.std(0) / np.sqrt(len(x))
        np.testing.assert_allclose(found[f"{name}_nonlocality_se"][0], spread, rtol=1e-3, atol=1e-6)
    whole = nonlocality(model, x, progress=False)
    np.testing.assert_allclose(found.nonlocality, whole.nonlocality[:2], rtol=1e-6)
    np.testing.assert_allclose(found.uniform_nonlocality, whole.uniform_nonlocality[:2], rtol=1e-6)
    mixed = (1 - found.gate) * found.content_nonlocality + found.gate * found.position_nonlocality
    np.testing.assert_allclose(mixed, found.nonlocality, rtol=1e-5)


def test_any_share_of_any_two_maps():
    content, position = random_maps(5, 2, 3, 6, seed=1), random_maps(1, 2, 3, 6, seed=2)
    share = torch.tensor([0.0, 0.3, 1.0]).double()
    gated = (1 - share[:, None, None]) * content + share[:, None, None] * position
    np.testing.assert_allclose(solve_gate(gated, content, position.expand_as(content)), share.expand(5, 3), atol=1e-12)
    assert solve_gate(gated, content, content).isnan().all()


def measured(gated, content, position):
    one = AttentionGates()
    site = make_site(gated, (2, 3), name="blocks.0")
    one.start()
    for part in zip(gated.split(2), content.split(2), position.split(2), strict=True):
        one.update(site, part)
    return one.dataset([site])


def test_gates_that_differ_between_images_have_a_standard_error():
    content, position = random_maps(4, 1, 2, 6, seed=1), random_maps(1, 1, 2, 6, seed=2).expand(4, -1, -1, -1, -1)
    share = torch.tensor([0.1, 0.2, 0.4, 0.9]).double()[:, None, None, None, None]
    found = measured((1 - share) * content + share * position, content, position)
    np.testing.assert_allclose(found.gate, share.mean(), atol=1e-9)
    np.testing.assert_allclose(found.gate_se, share.std() / 2, atol=1e-9)
    np.testing.assert_allclose(found.position_nonlocality_se, 0, atol=1e-12)


def test_maps_that_are_no_gated_sum_are_refused():
    content, position = random_maps(2, 1, 2, 6, seed=1), random_maps(2, 1, 2, 6, seed=2)
    gated = 0.5 * content + 0.5 * position
    measured(gated + 5e-5 * random_maps(2, 1, 2, 6, seed=3), content, position)
    with pytest.raises(
        ValueError, match=r"the map of blocks\.0 is 0\.\d+ away from any \(1 - g\) A \+ g B.*Nonlocality"
    ):
        measured((content * position).softmax(-1), content, position)


def test_a_model_without_gates():
    model = create_model("vit_nano", image_size=8, seed=0)
    with pytest.raises(ValueError, match="attention_gates: the forward pass shows no attention that is a gated sum"):
        attention_gates(model, images(2, 8), progress=False)
    tree = probe(model, images(2, 8), [Nonlocality(), AttentionGates()], missing="skip", progress=False)
    assert list(tree.children) == ["nonlocality"] and "attention_gates" in tree.attrs["left_out"]


def test_half_precision():
    model = convit().bfloat16()
    found = attention_gates(model, images(), progress=False)
    expected = torch.stack([block.attention.gate for block in model.local_blocks]).sigmoid().detach().float()
    np.testing.assert_allclose(found.gate, expected, atol=0.02)
