"""Where tokens lie: against networks whose tokens carry their own coordinates."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitprobe.attach import Watch, plan
from vitprobe.calling import untouched
from vitprobe.probes import nonlocality


class Coordinates(nn.Module):
    """Windows of any kind over a grid of patches whose channels are row, column, and one for being a patch.

    Args:
        window: rows and columns of a window.
        dilated: whether a window's tokens are spread over the image.
        shift: by how many patches the grid is rolled before.
        heads_first: whether heads come before windows.
        product: how the map is applied.
    """

    def __init__(self, window, *, dilated=False, shift=0, heads_first=False, product="matmul"):
        super().__init__()
        self.embed = nn.Conv2d(3, 3, 2, stride=2, groups=3, bias=False)
        nn.init.constant_(self.embed.weight, 0.25)
        self.head = nn.Linear(3, 2)
        self.window, self.dilated, self.shift = window, dilated, shift
        self.heads_first, self.product = heads_first, product

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1)
        return self.head((x + self.branch(x)).mean((1, 2)))

    def branch(self, x):
        rows, columns = x.shape[1:3]
        height, width = self.window
        y = F.pad(x, (0, 0, 0, -columns % width, 0, -rows % height))
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        axes = "b (h u) (w v) c" if self.dilated else "b (u h) (v w) c"
        sizes = dict(h=height, w=width)
        counts = dict(u=y.shape[1] // height, v=y.shape[2] // width)
        if self.heads_first:
            self.seen = rearrange(y, f"{axes} -> b (u v) (h w) c", **sizes)
            z = self.attention(self.seen[:, None].expand(-1, 2, -1, -1, -1))[:, 0]
            z = rearrange(z, f"b (u v) (h w) c -> {axes}", **sizes, **counts)
        else:
            self.seen = rearrange(y, f"{axes} -> (b u v) (h w) c", **sizes)
            z = rearrange(self.attention(self.seen[:, None])[:, 0], f"(b u v) (h w) c -> {axes}", **sizes, **counts)
        if self.shift:
            z = torch.roll(z, (self.shift, self.shift), (1, 2))
        return z[:, :rows, :columns]

    def attention(self, x):
        if self.product == "sdpa":
            return F.scaled_dot_product_attention(x, x, x)
        if self.product == "einsum":
            maps = torch.einsum("...qc,...kc->...qk", x, x).softmax(-1)
            return torch.einsum("...qk,...kc->...qc", maps, x)
        return (x @ x.transpose(-2, -1)).softmax(-1) @ x


def coordinates(rows, columns, batch=2):
    """Images of two pixels a patch: row and column of the patch, and one."""
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    image = torch.stack([y, x, torch.ones_like(x)]).float().repeat_interleave(2, 1).repeat_interleave(2, 2)
    return image.expand(batch, -1, -1, -1).clone()


def positions_of(site):
    if site.positions is not None:
        return site.positions
    inside = np.stack(np.meshgrid(*map(np.arange, site.grid), indexing="ij"), -1).reshape(-1, 2).astype(float)
    inside = np.concatenate([
        np.full((site.prefix, 2), np.nan),
        inside,
    ])  # padding that comes first is as good as prefix
    return np.broadcast_to(inside, (site.windows, *inside.shape))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(2, 8),
    columns=st.integers(2, 8),
    window=st.tuples(st.integers(1, 4), st.integers(2, 4)),
    dilated=st.booleans(),
    shift=st.integers(0, 2),
    heads_first=st.booleans(),
    product=st.sampled_from(["matmul", "einsum", "sdpa"]),
)
def test_windows_of_any_kind_are_where_their_tokens_say(rows, columns, window, dilated, shift, heads_first, product):
    model = Coordinates(window, dilated=dilated, shift=shift, heads_first=heads_first, product=product)
    x = coordinates(rows, columns)
    with untouched(model):
        (site,) = plan(model, x).attentions
    seen = model.seen.reshape(2, -1, *model.seen.shape[-2:])[0].detach().numpy()  # (window, token, channel)
    truth = np.where(seen[..., 2:] > 0.5, seen[..., :2], np.nan)
    # Windows of padding alone are one and the same place; such a network is left to its shapes.
    if np.isnan(truth[..., 0]).all(1).sum() > 1:
        return
    assert site.windows == len(truth)
    found = positions_of(site)
    if site.positions is None:  # counted from each window's first token, around the edge of a rolled grid
        truth = (truth - truth[:, site.prefix : site.prefix + 1]) % (rows, columns)
    np.testing.assert_array_equal(found, truth)


@pytest.mark.parametrize("product", ["matmul", "einsum", "sdpa"])
def test_nonlocality_in_dilated_windows_is_in_patches_of_the_image(product):
    model = Coordinates((2, 2), dilated=True, product=product)
    found = nonlocality(model, coordinates(8, 8, batch=3), progress=False)
    maps = torch.einsum("wqc,wkc->wqk", *(2 * [model.seen.reshape(3, -1, 4, 3)[0]]))
    maps = (maps if product != "sdpa" else maps / math.sqrt(3)).softmax(-1)
    apart = torch.cdist(*(2 * [model.seen.reshape(3, -1, 4, 3)[0][..., :2]]))
    assert float(found.nonlocality.squeeze()) == pytest.approx(float((maps * apart).sum(-1).mean()), rel=1e-5)
    assert float(found.uniform_nonlocality.squeeze()) == pytest.approx((0 + 4 + 4 + math.sqrt(32)) / 4)


def test_padding_is_no_patch():
    """On a grid of 3x3 in windows of 2x2, seven of the sixteen tokens are padding, and count for nothing."""
    model = Coordinates((2, 2))
    found = nonlocality(model, coordinates(3, 3), progress=False)
    seen = model.seen.reshape(2, 4, 4, 3)[0]
    maps = (seen @ seen.transpose(-2, -1)).softmax(-1)
    real = seen[..., 2] > 0.5
    rows = maps * real[:, None, :]
    distance = (rows * torch.cdist(seen[..., :2], seen[..., :2])).sum(-1) / rows.sum(-1)
    assert float(found.nonlocality.squeeze()) == pytest.approx(float(distance[real].mean()), rel=1e-5)
    assert float(found.prefix_mass.squeeze()) == pytest.approx(float(1 - rows.sum(-1)[real].mean()), rel=1e-5)


class Reordered(nn.Module):
    """A ViT whose tokens are in another order than the patches, or in blocks, from its embedding to its head."""

    def __init__(self, layout):
        super().__init__()
        self.embed, self.mlp = nn.Conv2d(3, 3, 2, stride=2, groups=3, bias=False), nn.Linear(3, 3)
        nn.init.constant_(self.embed.weight, 0.25)
        self.layout = layout

    def forward(self, x):
        x = rearrange(self.embed(x), f"b c (u h) (v w) -> {self.layout}", h=2, w=2)
        return (x + 0 * self.mlp(x)).flatten(1, -2).mean(1)


@pytest.mark.parametrize("layout", ["b (u v h w) c", "b (h w u v) c", "b (u v) (h w) c", "(b u v) (h w) c"])
def test_activations_are_images_again(layout):
    model = Reordered(layout)
    x = coordinates(4, 6, batch=5)
    shown = []
    with untouched(model):
        found = plan(model, x)
        Watch(model, found, on_unit=lambda unit, a: shown.append(a.patches.clone()))(lambda m, b: m(b), model, x)
    assert [unit.layout.grid for unit in found.units[:2]] == [(4, 6), (4, 6)]  # the head may pool by window
    truth = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij"), -1)
    for patches in shown[:2]:
        torch.testing.assert_close(patches[..., :2], truth.expand(len(patches), -1, -1, -1))


def test_hiera_is_unrolled_as_it_says():
    import timm

    model = timm.create_model("hiera_tiny_224", img_size=(64, 64), stages=(1, 1, 1, 1), embed_dim=16, num_heads=1)
    with untouched(model):
        found = plan(model, torch.randn(2, 3, 64, 64))
    order = model.unroll(torch.arange(256.0).reshape(1, -1, 1)).flatten().long()
    stem = found.units[0].layout
    assert stem.grid == (16, 16)
    np.testing.assert_array_equal(np.array(stem.order), order.argsort())
    assert not any("blocks.0.attn:" in reason for reason in found.skipped)
