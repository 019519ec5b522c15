"""What the probes of attention maps share: where tokens lie, rows over patches, means over images by layer and head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitprobe.attach import AttentionSite
from vitprobe.probes.base import RunningMean, along_layer
from vitprobe.ranks import merged

PIECE = 1 << 17  # numbers in the maps of a few images: half a MiB


def grid_positions(grid: tuple[int, int]) -> Tensor:
    """Row and column of every patch of a grid, row by row `(patch, 2)`."""
    y, x = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    return torch.stack([y.flatten(), x.flatten()], dim=-1)


def site_positions(site: AttentionSite) -> Tensor:
    """Row and column of the queries of `Rows` `(window or 1, query, 2)` [patches]; NaN for no patch."""
    return grid_positions(site.grid)[None] if site.positions is None else torch.from_numpy(site.positions)


def key_positions(site: AttentionSite) -> Tensor:
    """Row and column of its keys, which mostly are the same tokens `(window or 1, key, 2)` [patches of the queries]."""
    return site_positions(site) if site.keys is None else torch.from_numpy(site.keys)


def in_single(site: AttentionSite, maps: Tensor) -> Tensor:
    """Maps in single precision at least; rounded weights, which do not sum to one, are normalised."""
    if maps.dtype not in (torch.float16, torch.bfloat16):
        return maps
    maps = maps.float()
    return maps if site.source.sink else maps / maps.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Rows:
    """What the patches of a site look at, in single precision at least.

    Attributes:
        patches: attention to each patch `(image, window, head, query, key)`, not normalised anew; 0 where a key is no
            patch.
        on_patches: its sum over keys `(image, window, head, query)`.
        elsewhere: attention to what is no patch: prefix tokens, padding, and a sink that was cut off the map
            `(image, window, head, query)`.
        asking: which queries are patches `(window, query)`; `None` for all.
    """

    patches: Tensor
    on_patches: Tensor
    elsewhere: Tensor
    asking: Tensor | None

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the queries that are patches `(image, head)` of values `(image, window, head, query)`."""
        if self.asking is None:
            return values.mean((1, 3))
        asking = self.asking[:, None]
        return torch.where(asking, values, 0).sum((1, 3)) / asking.sum()

    def mean_looking(self, values: Tensor) -> Tensor:
        """The same over those of them that look at patches at all: other rows cannot be normalised anew.

        Where all attention goes to a class token or a sink, a query has no distance and no entropy; NaN for a head
        without any other.
        """
        looking = self.on_patches > 0
        if self.asking is None and looking.all():
            return values.mean((1, 3))
        if self.asking is not None:
            looking = looking & self.asking[:, None]
        return torch.where(looking, values, 0).sum((1, 3)) / looking.sum((1, 3))


def patch_rows(site: AttentionSite, maps: Tensor) -> Rows:
    """What the patches of a site look at.

    Args:
        site: where the maps are from.
        maps: `(image, window, head, query, key)`.

    Returns:
        The rows of all patches. Where the site tells the positions of its tokens, queries and keys are all of its
        tokens; else they are its patches.
    """
    if site.positions is not None:
        asking, keys = (~at(site)[..., 0].isnan().to(maps.device) for at in (site_positions, key_positions))
        return select_keys(site, maps, asking, keys)
    first = site.prefix
    return select_keys(site, maps[..., first : first + site.grid[0] * site.grid[1], :])


def select_keys(site: AttentionSite, rows: Tensor, asking: Tensor | None = None, present: Tensor | None = None) -> Rows:
    """Attention of some queries to patches, and to the rest.

    Args:
        site: where the rows are from.
        rows: `(image, window, head, query, key)`.
        asking: which queries are patches `(window, query)`; all of them unless given.
        present: which keys are `(window, key)`, if the site tells their positions.

    Returns:
        The rows.
    """
    rows = in_single(site, rows)
    if present is None:
        first, last = site.prefix, site.prefix + site.grid[0] * site.grid[1]
        patches = rows[..., first:last]
        others = rows[..., :first].sum(-1) + rows[..., last:].sum(-1)
    else:
        keys = present[:, None, None]
        patches, others = rows * keys, (rows * ~keys).sum(-1)
    on_patches = patches.sum(-1)
    if site.source.sink:
        others = others + (1 - on_patches - others).clamp_min(0)
    return Rows(patches, on_patches, others, asking)


def in_pieces(measure: Callable[..., Tensor], *maps: Tensor) -> Tensor:
    """What `measure` gives for maps, from a few images at a time, whose intermediate results a core's cache holds.

    Args:
        measure: of maps `(image, ...)` gives a tensor `(image, ...)`.
        *maps: what it is called with; all at once where they are not on a CPU.

    Returns:
        The tensor for all images.
    """
    size = max(1, PIECE // maps[0][0].numel()) if maps[0].device.type == "cpu" else len(maps[0])
    return torch.cat([measure(*part) for part in zip(*(one.split(size) for one in maps), strict=True)])


class SiteMean:
    """Mean over images of a value of every attention site, with its standard error."""

    def __init__(self) -> None:
        self._means: dict[str, RunningMean] = {}

    def add(self, site: AttentionSite, values: Tensor) -> None:
        """Add the values `(image, ...)` of one site for a chunk of images."""
        self._means.setdefault(site.name, RunningMean()).add(values)

    def merge(self, other: "SiteMean") -> None:
        """Add the images that another has seen."""
        self._means = merged(self._means, other._means)

    def variables(
        self,
        places: Sequence[AttentionSite],
        name: str,
        dims: Sequence[str] = ("head",),
        *,
        long_name: str,
        units: str,
        scaled: Callable[[AttentionSite, np.ndarray], np.ndarray] = lambda site, values: values,
    ) -> dict[str, Any]:
        """`name` and `<name>_se` along `layer`, NaN where a layer has less of a dimension than another.

        Args:
            places: the sites.
            name: of the variable.
            dims: names of the axes of a site's values.
            long_name: what it is.
            units: its units.
            scaled: what becomes of a site's means and standard errors: a constant factor, or another shape.
        """
        return {
            name + suffix: along_layer(
                [scaled(site, getattr(self._means[site.name], attribute)) for site in places],
                dims,
                long_name=text,
                units=units,
            )
            for suffix, attribute, text in (
                ("", "mean", long_name),
                ("_se", "standard_error", f"standard error over images of {name}"),
            )
        }


def head_coordinate(places: Sequence[AttentionSite]) -> dict[str, Any]:
    """The coordinate `head`, as long as the most heads of a layer."""
    heads = max(site.heads for site in places)
    return {"head": ("head", np.arange(heads), {"long_name": "head", "units": "1"})}
