"""What a forward pass consists of: units of the residual stream, attention maps, and the patches' embedding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from vitprobe.attach.layout import Layout
from vitprobe.attach.maps import MapSource
from vitprobe.attach.trace import Event

Kind = Literal["stem", "msa", "conv", "mlp", "subsample", "module"]


@dataclass(frozen=True)
class Unit:
    """One step of the residual stream.

    Attributes:
        index: position in the network, from 0.
        name: path of the module it happens in; `#2` and so on for a module that is used again.
        kind: `stem` (the stream's beginning), `msa`, `conv`, `mlp`, `subsample` (the grid changes), or `module`
            (chosen by pattern).
        depth: 0 for the first unit, 1 for the last.
        layout: how its activation holds the image.
        channels: of its activation.
        event: when its activation comes to be.
        stream: for a residual branch, which operand of the addition (0 or 1) is the stream; else `None`.
        skips: further additions on the way of the stream through the unit, where it has several branches beside each
            other, and which operand the stream is there.
        convolutions: when its convolutions with a spatial kernel run that keep the shape of what they take.
    """

    index: int
    name: str
    kind: Kind
    depth: float
    layout: Layout
    channels: int
    event: Event
    stream: int | None = None
    skips: tuple[tuple[Event, int], ...] = ()
    convolutions: tuple[Event, ...] = ()


@dataclass(frozen=True)
class AttentionSite:
    """One attention map of the network.

    Attributes:
        name: path of the module that applies it; `#2` and so on for further maps in that module.
        kind: kind of the residual unit it belongs to; `msa` if it belongs to none.
        depth: depth of that unit, whichever units `layers` chose; NaN if it belongs to none.
        heads: number of heads.
        grid: rows and columns of patches that attend to each other (the window's, for windowed attention).
        prefix: class, distillation and register tokens, before them unless `positions` says where.
        windows: windows in an image; 1 for global attention.
        event: when it is applied.
        source: how to get the map.
        positions: row and column of every token `(window, token, 2)` on the layer's grid [patches], NaN for a token
            that is no patch (a window's padding), where windows are dilated, padded or reordered; `None` where the
            tokens of a window fill its grid row by row after the prefix.
        keys: row and column of every key `(window, key, 2)` on the grid of the queries [patches], also between its rows
            and columns, NaN for a key that is no patch, where keys are other tokens than queries (pooled ones, say);
            `positions` are those of the queries then. `None` where the same tokens ask and answer.
        extra_keys: keys after the tokens that have no query and no place (a sink); their columns are cut off the maps,
            whose rows then sum to less than one.
        heads_first: whether heads come before windows among the axes of the maps.
        parts: when the two maps that it is a gated sum of come to be, content before position (GPSA); else none.
    """

    name: str
    kind: Kind
    depth: float
    heads: int
    grid: tuple[int, int]
    prefix: int
    windows: int
    event: Event
    source: MapSource
    positions: np.ndarray | None = field(default=None, compare=False)
    keys: np.ndarray | None = field(default=None, compare=False)
    extra_keys: int = 0
    heads_first: bool = False
    parts: tuple[Event, ...] = ()

    @property
    def key_grid(self) -> tuple[int, int]:
        """Rows and columns of patches that are looked at, the window's for windowed attention."""
        if self.keys is None:
            return self.grid
        full = self.keys[(~np.isnan(self.keys[..., 0])).sum(1).argmax()]  # a window without padding, if there is one
        rows, columns = (np.unique(np.round(axis[~np.isnan(axis)], 3)).size for axis in full.T)
        return rows, columns

    def by_image(self, maps: Tensor) -> Tensor:
        """Maps of whole images as the pass has them, as `(image, window, head, query, key)`."""
        maps = maps[..., : maps.shape[-1] - self.extra_keys]
        size = maps.shape[-2:]
        if self.heads_first:
            return maps.reshape(-1, self.heads, self.windows, *size).transpose(1, 2)
        return maps.reshape(-1, self.windows, self.heads, *size)

    def as_in_pass(self, maps: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `by_image`: maps of the shape that the pass has them in."""
        return (maps.transpose(1, 2) if self.heads_first else maps).reshape(shape)


@dataclass(frozen=True)
class Embedding:
    """Where the patches' embedding comes to be, before position codes and prefix tokens join it.

    Attributes:
        event: the return of the module that makes it.
        layout: how it holds the image.
        prefix: tokens that join it later.
        orders: where the patches lie among so many tokens, row by row, if not so after the prefix tokens.
    """

    event: Event
    layout: Layout
    prefix: int
    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
