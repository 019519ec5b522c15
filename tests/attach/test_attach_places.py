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


@settings(max_examples=60)
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


class Tokens(nn.Module):
    """Attention over the coordinates of the patches, after something was done to the tokens.

    Args:
        change: of the tokens `(image, token, channel)`; one for being a patch is their last channel.
        patch: rows and columns of a patch [pixels].
    """

    def __init__(self, change=lambda x: x, patch=(2, 2)):
        super().__init__()
        self.embed, self.mlp = nn.Conv2d(3, 3, patch, patch, groups=3, bias=False), nn.Linear(3, 3)
        nn.init.constant_(self.embed.weight, 1 / math.prod(patch))
        self.change = change

    def forward(self, x):
        x = self.change(self.embed(x).flatten(2).mT)
        self.seen = x.clone()
        self.maps = (x @ x.mT).softmax(-1)
        x = x + 0 * (self.maps @ x)
        return (x + 0 * self.mlp(x)).mean(1)

    def nonlocality(self):
        """Of the maps as they were, where the tokens say that they lie."""
        real = self.seen[..., 2] > 0.5
        rows = self.maps * real[:, None]
        apart = (rows * torch.cdist(self.seen[..., :2], self.seen[..., :2])).sum(-1) / rows.sum(-1)
        return float(apart[real].mean())


def around(x, *, before=0, after=0, order=None):
    """Tokens of zeros, which are no patches, around the patches in some order."""
    other = torch.zeros(1, 1, x.shape[-1]).expand(len(x), -1, -1)
    return torch.cat([*before * [other], x if order is None else x[:, order], *after * [other]], 1)


SHUFFLED = torch.randperm(24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options",
    [
        dict(after=1),
        dict(before=1, after=3),
        dict(before=1, order=SHUFFLED),
        dict(after=2, order=SHUFFLED),
    ],
    ids=["class token last", "detection tokens last", "class token before shuffled", "registers after shuffled"],
)
def test_tokens_that_are_no_patches_lie_anywhere(options):
    model = Tokens(lambda x: around(x, **options))
    x = coordinates(4, 6)
    ds = nonlocality(model, x, progress=False)
    assert float(ds.nonlocality.squeeze()) == pytest.approx(model.nonlocality(), rel=1e-5)
    others = options.get("before", 0) + options.get("after", 0)
    assert ds.prefix.item() == others and (ds.grid_h.item(), ds.grid_w.item()) == (4, 6)
    shown = []
    with untouched(model):
        found = plan(model, x)
        Watch(model, found, on_unit=lambda unit, a: shown.append(a))(lambda m, b: m(b), model, x)
    truth = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij"), -1)
    for activation in shown:
        torch.testing.assert_close(activation.patches[..., :2], truth.expand(2, -1, -1, -1))
        assert activation.prefix.shape == (2, others, 3) and not activation.prefix.any()


@pytest.mark.parametrize(("patch", "grid"), [((1, 4), (8, 6)), ((4, 1), (2, 24)), ((2, 4), (4, 6))])
@pytest.mark.parametrize("classes", [0, 1])
def test_a_grid_need_not_have_the_shape_of_the_image(patch, grid, classes):
    model = Tokens(lambda x: around(x, before=classes), patch)
    x = torch.randn(2, 3, 8, 24)
    with untouched(model):
        found = plan(model, x)
    assert {(unit.layout.grid, unit.layout.prefix) for unit in found.units} == {(grid, classes)}
    (site,) = found.attentions
    assert (site.grid, site.prefix, site.positions) == (grid, classes, None) and found.skipped == ()


class Strides(nn.Module):
    """A convolutional network that halves the rows alone, twice; its 8x32 places of 8 channels fit 8x8 of 32, too."""

    def __init__(self):
        super().__init__()
        self.stem, self.same = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.down = nn.Sequential(nn.Conv2d(8, 8, 3, (2, 1), 1), nn.ReLU(), nn.Conv2d(8, 8, 3, (2, 1), 1))
        self.last, self.head = nn.Conv2d(8, 8, 3, 1, 1), nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = self.down(x + self.same(x))
        x = x + self.last(x)
        return self.head(x.mean((2, 3)))


def test_strides_of_rows_alone():
    model = Strides()
    with untouched(model):
        units = plan(model, torch.randn(2, 3, 64, 64)).units
    assert [unit.layout.grid for unit in units] == [(32, 32)] * 2 + [(8, 32)] * 2
    assert {(unit.layout.axes, unit.channels) for unit in units} == {("bchw", 8)}


@pytest.mark.parametrize("by", ["order", "drop"])
def test_tokens_of_which_each_image_keeps_others_are_no_grid(by):
    """16 tokens of 24 make a grid of nothing, nor do all of them in an order of their own."""

    def change(x):
        order = torch.stack([torch.randperm(24, generator=torch.Generator().manual_seed(i)) for i in range(len(x))])
        kept = order[:, : 24 if by == "order" else 16]
        return x.gather(1, kept[..., None].expand(-1, -1, 3))

    model = Tokens(change)
    with untouched(model):
        found = plan(model, coordinates(4, 6))
    assert [unit.kind for unit in found.units] == ["stem"] and found.attentions == ()
    units, maps = found.skipped
    assert units.startswith("Tokens and 1 more: the tokens fill no grid")
    assert maps == f"Tokens: the {24 if by == 'order' else 16} tokens fill no grid: they lie elsewhere in each image"


def test_tokens_that_every_image_drops_alike_are_no_grid():
    model = Tokens(lambda x: x[:, SHUFFLED[:16].sort().values])
    with untouched(model):
        found = plan(model, coordinates(4, 6))
    assert len(found.units) == 1 and found.attentions == ()
    assert found.skipped[1] == "Tokens: the 16 tokens fill no grid"


@pytest.mark.parametrize("kernel", [dict(kernel_size=7, stride=4, padding=2), dict(kernel_size=(3, 5), padding=(1, 2))])
def test_unfolded_patches_lie_where_their_windows_do(kernel):
    """Overlapping ones, too, and those at the border, part of which is padding."""
    unfold = nn.Unfold(**{"stride": 4, **kernel})
    model = Tokens(lambda x: x, (1, 1))
    model.embed = nn.Sequential(unfold, nn.Unflatten(2, (4, -1)), nn.LazyConv2d(3, 1))
    x = torch.randn(2, 3, 16, 24)
    model(x)
    with untouched(model):
        found = plan(model, x)
    assert [unit.layout.grid for unit in found.units] == [(4, 6)] * len(found.units)
    assert [(site.grid, site.positions) for site in found.attentions] == [((4, 6), None)]


class Attend(nn.Module):
    """Attention of tokens to each other, which stay in `seen`."""

    def forward(self, x):
        self.seen = x.clone()
        return (x @ x.mT).softmax(-1) @ x


class Twice(nn.Module):
    """Two attentions in modules of their own, over patches and other tokens `around` them."""

    def __init__(self, **options):
        super().__init__()
        self.embed, self.options = nn.Conv2d(3, 3, 2, 2), options
        self.attend = nn.ModuleList([Attend(), Attend()])

    def forward(self, x):
        x = around(self.embed(x).flatten(2).mT, **self.options)
        for attend in self.attend:
            x = x + attend(x)
        return x.mean(1)


@pytest.mark.parametrize("options", [dict(after=1), dict(before=1, order=SHUFFLED)], ids=["last", "before shuffled"])
def test_patch_embeddings_come_in_the_place_of_the_patches(options):
    """In every layer, and the class token stays what it is there."""
    model, x = Twice(**options), torch.randn(2, 3, 8, 12)
    with untouched(model):
        found = plan(model, x)
        watch = Watch(model, found, on_attention=lambda site, maps: None, inputs="patch embedding")
        watch(lambda m, b: m(b), model, x)
    first, second = (attend.seen for attend in model.attend)
    other = 0 if "before" in options else 24
    patches = [token for token in range(25) if token != other]
    assert torch.equal(second[:, patches], first[:, patches]) and second[:, other].any() and not first[:, other].any()


def test_attention_without_a_module_of_its_own_has_no_input_to_change():
    model, x = Tokens(), coordinates(4, 6)
    with untouched(model):
        watch = Watch(model, plan(model, x), on_attention=lambda site, maps: None, inputs="patch embedding")
        with pytest.raises(ValueError, match="Tokens is called before the patches are embedded; use inputs='layer'"):
            watch(lambda m, b: m(b), model, x)
