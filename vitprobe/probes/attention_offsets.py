"""Where attention looks relative to the query: its mass by offset (Cordonnier et al. 2020)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import AttentionSite
from vitprobe.probes.attention import SiteMean, grid_positions, head_coordinate, in_single, site_positions
from vitprobe.probes.base import FeatureProbe, along_layer

BY_OFFSET = ("offset_y", "offset_x")


class AttentionOffsets(FeatureProbe):
    """Attention mass at each offset from query to key, by layer and head.

    `mass` is what all query patches together pay at an offset, over the number of them. Over offsets it sums to one
    less `prefix_mass`, what they pay to prefix tokens and sinks; weighted by the offsets' lengths it sums to the
    nonlocality, where there are no such tokens. Few queries have a far offset inside the grid, so that even uniform
    attention has little mass there: `uniform_mass`. `mean_weight` is the mean over those queries that do have the
    offset; it does not sum to one. Offsets that a layer's grid does not have are NaN; windowed attention is measured
    inside its windows. Standard errors are over images.

    Args:
        neighbourhood: side of the square of offsets around the query whose mass is `local_mass` [patches], odd.
    """

    name = "attention_offsets"
    title = "Attention mass by offset from the query, layer and head"
    references = (
        "Cordonnier et al. 2020, On the Relationship between Self-Attention and Convolutional Layers, arXiv:1911.03584"
    )
    reads = "attention"
    summed = ("_mass", "_local", "_prefix")

    def __init__(self, neighbourhood: int = 3) -> None:
        _check_odd(neighbourhood)
        self.neighbourhood = neighbourhood

    def config(self) -> dict[str, Any]:
        """The neighbourhood."""
        return {"neighbourhood": self.neighbourhood}

    def start(self) -> None:
        """Forget everything that was measured."""
        self._offsets: dict[str, Offsets] = {}
        self._index: dict[str, Tensor] = {}
        self._mass, self._local, self._prefix = SiteMean(), SiteMean(), SiteMean()

    def update(self, where: AttentionSite, what: Tensor) -> None:
        """Add the maps `(image, window, head, query, key)` of one site for a chunk of images."""
        offsets = self._of_site(where)
        if where.name not in self._index:
            self._index[where.name] = offsets.index.to(what.device)
        mass, elsewhere = offset_mass(in_single(where, what), self._index[where.name], offsets)
        if where.source.sink:
            elsewhere = elsewhere + (1 - mass.sum((-2, -1)) - elsewhere).clamp_min(0)
        near_y, near_x = (_near(size, self.neighbourhood) for size in offsets.shape)
        self._mass.add(where, mass)
        self._local.add(where, mass[..., near_y, near_x].sum((-2, -1)))
        self._prefix.add(where, elsewhere)

    def dataset(self, places: Sequence[AttentionSite]) -> xr.Dataset:
        """The statistics along `layer`, `head` and the offsets."""
        by_site = {site.name: self._of_site(site) for site in places}
        shape = tuple(max(by_site[site.name].shape[axis] for site in places) for axis in (0, 1))

        def centred(site: AttentionSite, values: np.ndarray) -> np.ndarray:
            values = np.where(by_site[site.name].pairs > 0, values, np.nan)
            beside = [(size - own) // 2 for size, own in zip(shape, values.shape[-2:], strict=True)]
            around = [(0, 0)] * (values.ndim - 2) + [(pad, pad) for pad in beside]
            return np.pad(values, around, constant_values=np.nan)

        def by_pair(site: AttentionSite, values: np.ndarray) -> np.ndarray:
            offsets = by_site[site.name]
            return centred(site, values * offsets.queries / np.maximum(offsets.pairs, 1))

        variables = self._mass.variables(
            places,
            "mass",
            ("head", *BY_OFFSET),
            long_name="attention mass at this offset from the query",
            units="1",
            scaled=centred,
        )
        variables |= self._mass.variables(
            places,
            "mean_weight",
            ("head", *BY_OFFSET),
            long_name="mean attention of the queries that have a key at this offset",
            units="1",
            scaled=by_pair,
        )
        variables["uniform_mass"] = along_layer(
            [centred(site, by_site[site.name].uniform) for site in places],
            BY_OFFSET,
            long_name="mass of uniform attention at this offset",
            units="1",
        )
        side = self.neighbourhood
        variables |= self._local.variables(
            places, "local_mass", long_name=f"attention mass within {side}x{side} patches around the query", units="1"
        )
        variables |= self._prefix.variables(
            places, "prefix_mass", long_name="attention of patches to prefix tokens and sinks", units="1"
        )
        return xr.Dataset(variables, coords=head_coordinate(places) | _offset_coordinates(shape))

    def _of_site(self, site: AttentionSite) -> "Offsets":
        if site.name not in self._offsets:
            self._offsets[site.name] = site_offsets(site)
        return self._offsets[site.name]


@dataclass(frozen=True)
class Offsets:
    """Which offsets the pairs of patches of a site have.

    Attributes:
        shape: how many offsets there are along each axis, from the most negative on `(offset_y, offset_x)`.
        index: where the offset of each pair of tokens lies among all of them, row by row; one beyond for a patch that
            looks at no patch, two for what is asked by no patch `(window query key,)`.
        queries: how many patches ask, in all windows.
        pairs: how many pairs of patches have the offset `(offset_y, offset_x)`.
        uniform: mass of attention to all patches of a window alike `(offset_y, offset_x)`.
    """

    shape: tuple[int, int]
    index: Tensor
    queries: int
    pairs: np.ndarray
    uniform: np.ndarray

    @classmethod
    def between(cls, positions: Tensor) -> "Offsets":
        """The offsets between the tokens of each window.

        Args:
            positions: row and column of the tokens `(window, token, 2)` [patches], NaN for what is no patch.
        """
        offset = positions[:, None] - positions[:, :, None]  # from query to key (window, query, key, 2)
        present = ~offset[..., 0].isnan()
        asking = ~positions[:, :, None, 0].isnan()
        reach = offset[present].abs().amax(0).long()
        rows, columns = (2 * reach + 1).tolist()
        index = (offset + reach).nan_to_num(0).long() @ torch.tensor([columns, 1])
        index = torch.where(present, index, rows * columns + (~asking).long()).flatten()
        alike = present.double() / present.sum(-1, keepdim=True).clamp_min(1)
        queries = int(asking.sum())

        def summed(weights: Tensor) -> np.ndarray:
            total = index.bincount(weights.double().flatten(), minlength=rows * columns + 2)
            return total[:-2].reshape(rows, columns).numpy()

        return cls((rows, columns), index, queries, summed(present), summed(alike) / queries)


def site_offsets(site: AttentionSite) -> Offsets:
    """The offsets between the tokens of a site."""
    if site.positions is None:
        return _grid_offsets(site.grid, site.prefix, site.windows)
    return Offsets.between(site_positions(site))


@lru_cache(maxsize=16)
def _grid_offsets(grid: tuple[int, int], prefix: int, windows: int) -> Offsets:
    tokens = F.pad(grid_positions(grid), (0, 0, prefix, 0), value=math.nan)
    return Offsets.between(tokens.expand(windows, -1, -1))


def offset_mass(maps: Tensor, index: Tensor, offsets: Offsets) -> tuple[Tensor, Tensor]:
    """Attention mass of each image and head at each offset, over the number of patches that ask.

    Args:
        maps: `(image, window, head, query, key)`, all tokens.
        index: that of the offsets, on the same device.
        offsets: of the site.

    Returns:
        The mass `(image, head, offset_y, offset_x)`, and the attention of patches to other tokens `(image, head)`.
    """
    flat = maps.transpose(1, 2).flatten(2)
    rows, columns = offsets.shape
    mass = flat.new_zeros(*flat.shape[:2], rows * columns + 2).index_add_(-1, index, flat) / offsets.queries
    return mass[..., :-2].unflatten(-1, offsets.shape), mass[..., -2]


def local_mass(ds: xr.Dataset, size: int) -> xr.DataArray:
    """The attention mass within a square of offsets around the query: a `size x size` convolution's share.

    `AttentionOffsets(neighbourhood=size)` gives it with its standard error.

    Args:
        ds: the dataset of `attention_offsets`.
        size: side of the square [patches], odd.

    Returns:
        `(layer, head)`, NaN where a layer has fewer heads.

    Raises:
        ValueError: if the square has no middle.
    """
    _check_odd(size)
    near = (abs(ds["offset_y"]) <= size // 2) & (abs(ds["offset_x"]) <= size // 2)
    mass = ds["mass"].where(near).sum(BY_OFFSET, min_count=1)
    long_name = f"attention mass within {size}x{size} patches around the query"
    return mass.rename("local_mass").assign_attrs(long_name=long_name, units="1")


def attention_offsets(
    model: nn.Module, batches: Iterable[Any], *, neighbourhood: int = 3, **options: Any
) -> xr.Dataset:
    """Where every head looks relative to the query; see `AttentionOffsets`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        neighbourhood: side of the square of offsets that `local_mass` is of [patches], odd.
        **options: `layers`, `prefix`, `forward`, `group` and `progress` of `probe`.

    Returns:
        `mass` and `mean_weight` (layer, head, offset_y, offset_x), `local_mass` and `prefix_mass` (layer, head), each
        with its standard error over images, and `uniform_mass` (layer, offset_y, offset_x).
    """
    return AttentionOffsets(neighbourhood).run(model, batches, **options)


def _check_odd(size: int) -> None:
    if size < 1 or size % 2 == 0:
        raise ValueError(f"a neighbourhood of {size}x{size} patches has no query in the middle: give an odd size.")


def _near(size: int, neighbourhood: int) -> slice:
    """The middle of an axis of offsets, all of it where it is shorter than the neighbourhood."""
    middle, reach = size // 2, neighbourhood // 2
    return slice(max(0, middle - reach), middle + reach + 1)


def _offset_coordinates(shape: tuple[int, ...]) -> dict[str, Any]:
    words = ("rows from the query down to the key", "columns from the query right to the key")
    return {
        dim: (dim, np.arange(size) - size // 2, {"long_name": text, "units": "patches"})
        for dim, size, text in zip(BY_OFFSET, shape, words, strict=True)
    }
