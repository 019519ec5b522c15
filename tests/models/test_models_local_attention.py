import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitprobe.models import create_model
from vitprobe.models.attention import Attention, Neighbourhood

every_grid = pytest.mark.parametrize("grid", [(5, 5), (3, 6), (1, 4)])
every_kernel = pytest.mark.parametrize("kernel_size", [1, 3, 5, 9])


def build(grid, kernel_size, **options):
    torch.manual_seed(0)
    mask = Neighbourhood(grid, kernel_size, **options)
    attention = Attention(8, 2, mask=mask, qkv_bias=True).double().requires_grad_(False)
    x = torch.randn(2, options.get("prefix", 0) + grid[0] * grid[1], 8, dtype=torch.float64)
    return attention, x


def heads_of(attention, x):
    """Query, key and value `(batch, head, token, channel)`."""
    query, key = attention.query_key(x).chunk(2, dim=-1)
    return [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (query, key, attention.value(x))]


def near(grid, kernel_size):
    tokens = [divmod(token, grid[1]) for token in range(grid[0] * grid[1])]
    return torch.tensor([
        [abs(y - a) <= kernel_size // 2 and abs(x - b) <= kernel_size // 2 for a, b in tokens] for y, x in tokens
    ])


@every_grid
@every_kernel
def test_masked_is_global_attention_with_the_rest_left_out(grid, kernel_size):
    attention, x = build(grid, kernel_size)
    query, key, value = heads_of(attention, x)
    weights = (query @ key.mT / 2).exp() * near(grid, kernel_size)
    weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(attention.weights(x), weights)
    expected = attention.project((weights @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected)


@every_grid
@every_kernel
def test_zero_is_softmax_over_unfolded_and_padded_patches(grid, kernel_size):
    """As the published code has it: keys and values unfolded from maps with zeros around them."""
    attention, x = build(grid, kernel_size, boundary="zero")
    query, key, value = heads_of(attention, x)

    def unfold(tokens):  # (batch, head, patch, place, channel)
        maps = tokens.transpose(2, 3).flatten(0, 1).unflatten(2, grid)
        places = F.unfold(maps, kernel_size, padding=kernel_size // 2)
        return places.view(2, 2, 4, kernel_size**2, -1).permute(0, 1, 4, 3, 2)

    weights = torch.einsum("bhnd,bhnkd->bhnk", query, unfold(key) / 2).softmax(-1)
    expected = attention.project(torch.einsum("bhnk,bhnkd->bnhd", weights, unfold(value)).flatten(2))
    torch.testing.assert_close(attention(x), expected)
    torch.testing.assert_close(attention.project((attention.weights(x) @ value).transpose(1, 2).flatten(2)), expected)


def test_what_a_border_patch_loses():
    """With equal logits a patch loses the share of its neighbourhood that is outside: 5 of 9 in the corner."""
    attention, x = build((3, 4), 3, boundary="zero")
    attention.query_key.weight.zero_()
    attention.query_key.bias.zero_()
    left = attention.weights(x).sum(-1)[0, 0].view(3, 4)
    corner, edge = 4 / 9, 6 / 9
    expected = [[corner, edge, edge, corner], [edge, 1, 1, edge], [corner, edge, edge, corner]]
    torch.testing.assert_close(left, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("boundary", ["masked", "zero"])
def test_a_kernel_as_wide_as_the_image(boundary):
    attention, x = build((3, 4), 7, boundary=boundary)
    everywhere = Attention(8, 2, qkv_bias=True).double()
    everywhere.load_state_dict(attention.state_dict())
    if boundary == "masked":
        torch.testing.assert_close(attention(x), everywhere(x))
    else:
        kept = attention.weights(x)
        torch.testing.assert_close(kept / kept.sum(-1, keepdim=True), everywhere.weights(x))
        assert (kept.sum(-1) < 1).all()


@pytest.mark.parametrize("boundary", ["masked", "zero"])
def test_prefix_tokens_see_and_are_seen_by_all(boundary):
    attention, x = build((3, 4), 3, boundary=boundary, prefix=2)
    query, key, _ = heads_of(attention, x)
    visible = F.pad(near((3, 4), 3).double(), (2, 0, 2, 0), value=1.0)
    weights = (query @ key.mT / 2).exp() * visible
    missing = 9 - near((3, 4), 3).sum(-1) if boundary == "zero" else torch.zeros(12)
    lost = F.pad(missing.double(), (2, 0))[:, None]
    torch.testing.assert_close(attention.weights(x), weights / (weights.sum(-1, keepdim=True) + lost))


def test_mask_is_part_of_no_state_and_follows_the_dtype():
    mask = Neighbourhood((2, 2), 3, boundary="zero")
    assert not mask.state_dict()
    assert mask.double()().dtype == torch.float64
    assert mask()[0, :, -1].tolist() == pytest.approx([math.log(5)] * 4)


@pytest.mark.parametrize(("kernel_size", "nearest"), [(4, 5), (8, 9), (0, 1), (-3, 1)])
def test_even_kernels_are_refused(kernel_size, nearest):
    with pytest.raises(ValueError, match=f"kernel_size={kernel_size} has no middle: use {nearest} or another odd"):
        create_model("vit_nano", image_size=8, kernel_size=kernel_size)


def test_unknown_boundary_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown boundary 'zeros'\. Did you mean 'zero'\? Known: masked, zero"):
        create_model("vit_nano", image_size=8, kernel_size=3, boundary="zeros")


@pytest.mark.parametrize("options", [dict(), dict(boundary="zero"), dict(pool="class", registers=2, distilled=True)])
def test_local_vit_reaches_as_far_as_its_layers(options):
    """A change of one patch travels one patch a layer for a kernel of 3, unless a prefix token carries it."""
    model = create_model(
        "vit", image_size=(8, 20), patch_size=4, dim=12, depth=2, seed=0, kernel_size=3, **{"pool": "mean"} | options
    )
    model = model.double().eval().requires_grad_(False)
    x = torch.randn(1, 3, 8, 20, dtype=torch.float64)
    other = x.clone()
    other[..., :4, :4] += 1.0
    tokens = []
    model.norm.register_forward_hook(lambda module, args, out: tokens.append(args[0][:, model.num_prefix_tokens :]))
    model(x), model(other)
    changed = ((tokens[0] - tokens[1]).abs().amax((0, -1)) > 1e-12).view(2, 5)
    far = model.num_prefix_tokens > 0
    assert changed.tolist() == 2 * [[True, True, True, far, far]]


def test_conv_msa_vit_of_park_kim():
    """Fig. 7: patch 4, 192 wide, 12 deep, 3 heads, average pooling, 5.373 million parameters at 100 classes."""
    with torch.device("meta"):
        model = create_model("vit_ti", num_classes=100, kernel_size=3, pool="mean")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(5.373, abs=5e-4)
    masks = [module for module in model.modules() if isinstance(module, Neighbourhood)]
    assert [mask.logits.shape for mask in masks] == 12 * [(1, 64, 64)]


def test_compiles_without_a_graph_break():
    torch.compiler.reset()
    model = create_model("vit", image_size=(8, 12), dim=12, depth=1, kernel_size=3, boundary="zero", seed=0)
    model = model.eval().requires_grad_(False)
    x = torch.randn(3, 3, 8, 12)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_trains():
    model = create_model("vit_nano", image_size=8, kernel_size=3, boundary="zero", seed=0)
    nn.functional.cross_entropy(model(torch.randn(5, 3, 8, 8)), torch.arange(5)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
