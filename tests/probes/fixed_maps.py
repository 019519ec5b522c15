"""Attention whose maps are known: a network that applies given ones, and sites of any kind for a probe alone."""

import math

import torch
import xarray as xr
from einops import rearrange
from torch import Tensor, nn

from vitprobe.attach import AttentionSite
from vitprobe.attach.maps import MapSource
from vitprobe.attach.trace import Event


class FixedMap(nn.Module):
    """One attention over a class token, if the map has 17 tokens, and the patches of a 4x4 grid.

    Its map `(image or 1, head, token, token)` is set.
    """

    def __init__(self, weights):
        super().__init__()
        self.register_buffer("weights", weights)
        self.embed, self.token = nn.Conv2d(3, 6, 4, 4), nn.Parameter(torch.randn(1, weights.shape[-1] - 16, 6))
        self.value, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        value = rearrange(self.value(x), "b n (h d) -> b h n d", h=self.weights.shape[1])
        x = x + rearrange(self.weights.to(x.dtype).expand(len(x), -1, -1, -1) @ value, "b h n d -> b n (h d)")
        return self.head(x[:, 0])


def make_site(maps: Tensor, grid, *, prefix=0, positions=None, sink=False, name="attention") -> AttentionSite:
    """The site of maps `(image, window, head, query, key)`."""
    return AttentionSite(
        name=name,
        kind="msa",
        depth=0.5,
        heads=maps.shape[2],
        grid=grid,
        prefix=prefix,
        windows=maps.shape[1],
        event=Event(1, "matmul", 1),
        source=MapSource("product", 0, (), tuple(maps.shape[-4:]), sink),
        positions=positions,
    )


def measured(probe, maps: Tensor, grid, *, chunk=2, **options) -> xr.Dataset:
    """What a probe says of the maps of one site, handed over in chunks of images."""
    site = make_site(maps, grid, **options)
    probe.start()
    for part in maps.split(chunk):
        probe.update(site, part)
    return probe.dataset([site])


def random_maps(images, windows, heads, tokens, seed=0, *, spread=2.0) -> Tensor:
    """Softmaxes of Gaussian logits `(image, window, head, query, key)`, in double precision."""
    logits = torch.randn(
        images, windows, heads, tokens, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (spread * logits).softmax(-1)


def dilated(grid, windows) -> Tensor:
    """Positions `(window, token, 2)` of as many windows along each axis, each a lattice over the whole image."""
    y, x = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    inside = torch.stack([y.flatten(), x.flatten()], -1)
    first = torch.cartesian_prod(*(torch.arange(count) for count in windows))
    return (first[:, None] + inside * torch.tensor(windows)).double().numpy()


def by_loops(maps: Tensor, positions) -> tuple[float, dict[tuple[int, int], float], int]:
    """For one image and head `(window, query, key)`: nonlocality, mass by offset, and the number of patches that ask.

    Positions are `(window, token, 2)`, NaN for what is no patch.
    """
    far, mass, asking = 0.0, {}, 0
    for window, places in zip(maps.tolist(), positions.tolist(), strict=True):
        present = [index for index, place in enumerate(places) if not math.isnan(place[0])]
        for query in present:
            asking += 1
            total = sum(window[query][key] for key in present)
            for key in present:
                offset = tuple(round(b - a) for a, b in zip(places[query], places[key], strict=True))
                mass[offset] = mass.get(offset, 0.0) + window[query][key]
                far += window[query][key] / total * math.hypot(*offset)
    return far / asking, {offset: value / asking for offset, value in mass.items()}, asking
