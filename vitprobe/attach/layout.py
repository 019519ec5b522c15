"""Which axes of an activation are the image, and which tokens are not patches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from einops import rearrange
from torch import Tensor

MAX_PREFIX = 16  # class, distillation and register tokens of published models: at most 1 + 1 + 8


@dataclass(frozen=True)
class Activation:
    """One unit's activation for one chunk of a batch.

    Attributes:
        patches: `(batch, row, column, channel)`, a view where the layout allows.
        prefix: class, distillation and register tokens `(batch, token, channel)`, none for most networks.
    """

    patches: Tensor
    prefix: Tensor


@dataclass(frozen=True)
class Layout:
    """How a tensor holds an image.

    Attributes:
        axes: names of its axes; `"blocks"` for the batch on the first axis, alone or with windows, and tokens on
            the others.
        grid: rows and columns of patches.
        prefix: class, distillation and register tokens.
        order: where the patches lie among all tokens, row by row; `None` if they lie so after the prefix tokens.
        channel: axis of the channels of blocks.
        size: tokens of an image in blocks, padding included.
    """

    axes: Literal["bchw", "bhwc", "bnc", "nbc", "blocks"]
    grid: tuple[int, int]
    prefix: int = 0
    order: tuple[int, ...] | None = None
    channel: int = -1
    size: int = 0

    @property
    def tokens(self) -> int:
        """Patches and prefix tokens together."""
        return self.grid[0] * self.grid[1] + self.prefix

    def channels(self, shape: Sequence[int]) -> int:
        """The channels of an activation of that shape."""
        return shape[self.channel if self.axes == "blocks" else self.axes.index("c")]

    def batch_first(self, x: Tensor) -> Tensor:
        """The tensor with the batch on its first axis, blocks as `(batch, token, channel)`."""
        if self.axes == "blocks":
            x = x.movedim(self.channel, -1)
            return x.reshape(-1, self.size, x.shape[-1])
        return x.transpose(0, 1) if self.axes == "nbc" else x

    def split(self, x: Tensor) -> Activation:
        """Patches and prefix tokens of a tensor that has the batch on its first axis."""
        if self.order is not None:
            others = sorted(set(range(x.shape[1])) - set(self.order))[: self.prefix]
            return Activation(x[:, list(self.order)].unflatten(1, self.grid), x[:, others])
        if self.axes == "bhwc":
            return Activation(x, x.new_empty(len(x), 0, x.shape[-1]))
        if self.axes == "bchw":
            return Activation(x.permute(0, 2, 3, 1), x.new_empty(len(x), 0, x.shape[1]))
        patches = rearrange(x[:, self.prefix :], "b (h w) c -> b h w c", h=self.grid[0])
        return Activation(patches, x[:, : self.prefix])


def infer_layout(
    shape: Sequence[int],
    *,
    batch: int,
    image: tuple[int, int],
    prefix: int | None = None,
    declared: int | None = None,
    channels_last: bool | None = None,
) -> Layout | None:
    """The layout of an activation, or `None` if its shape is no image, e.g. after pooling or inside windows.

    Args:
        shape: the activation's shape.
        batch: images in the batch.
        image: `(height, width)` of the images [pixels].
        prefix: tokens before the patches, as the user says.
        declared: the same as the model says; ignored where it leaves no grid (ConViT's class token joins late).
        channels_last: what the operations around it tell, for a map whose shape fits both ways.
    """
    if len(shape) == 4 and shape[0] == batch:
        options = [Layout("bchw", (shape[2], shape[3])), Layout("bhwc", (shape[1], shape[2]))]
        known = options if channels_last is None else options[channels_last:][:1]
        return next((option for option in known if similar(option.grid, image)), None)
    if len(shape) == 3 and batch in shape[:2]:
        axes: Literal["bnc", "nbc"] = "bnc" if shape[0] == batch else "nbc"
        found = token_grid(shape[1] if axes == "bnc" else shape[0], image, prefix=prefix, declared=declared)
        return found and Layout(axes, *found)
    return None


def arranged(
    places: np.ndarray, channel: int, *, batch: int, image: tuple[int, int], layout: Layout | None
) -> Layout | None:
    """The layout of an activation whose tokens are known to lie at given places; `layout` where they agree with it.

    `None` where they fill no grid: tokens that were dropped, that lie elsewhere in every image, or at no place at all.

    Args:
        places: coordinates `y + ix` of its tokens, its own shape without channels; NaN for no place.
        channel: the axis that the channels were.
        batch: images in the batch.
        image: `(height, width)` of the images [pixels].
        layout: what its shape alone tells.
    """
    second = places.ndim == 2 and places.shape[0] != batch == places.shape[1] and _alike(places.T)
    if second:
        places = places.T
    if not places.ndim or places.shape[0] % batch:
        return layout
    images = places.reshape(batch, -1)
    first = images[0]
    if scattered(first) or not _alike(images):
        return None
    found = Raster.of(first)
    if found is None:
        # Several tokens at a place, say: its shape may still tell, but not that its channels are rows.
        rows = layout is not None and layout.axes in ("bchw", "bhwc") and (layout.axes == "bchw") != (channel == 1)
        return None if rows else layout
    if not _cover(first, image):
        return layout if layout is not None and layout.grid == found.grid else None
    prefix = int(np.isnan(first).sum()) if places.ndim == 2 else 0
    order = found.order()
    plain = bool((order == prefix + np.arange(order.size)).all())
    if places.ndim == 3 and plain and places.shape == (batch, *found.grid):
        return Layout("bchw" if channel == 1 else "bhwc", found.grid)
    if places.ndim == 2 and len(places) == batch and channel == -1:
        return Layout("nbc" if second else "bnc", found.grid, prefix, None if plain else tuple(map(int, order)))
    if found.grid == (1, 1):
        return layout
    return Layout("blocks", found.grid, 0, tuple(map(int, order)), channel, first.size)


def scattered(places: np.ndarray) -> bool:
    """Whether coordinates are known to fill no grid, be its rows and columns evenly spaced or not.

    Several tokens at a place, as after pooling and spreading, tell nothing of it.
    """
    present = np.round(places[~np.isnan(places)], 1)
    if np.unique(present).size < present.size:
        return False
    return not present.size or np.unique(present.real).size * np.unique(present.imag).size != present.size


def _alike(images: np.ndarray) -> bool:
    """Whether the tokens of all images lie at the same places."""
    return bool(np.allclose(images, images[:1], atol=0.5, equal_nan=True))


def _cover(places: np.ndarray, image: tuple[int, int]) -> bool:
    """Whether coordinates lie over a whole image, less what is lost at its borders, and not over a part of it."""
    for values, side in zip((places.real, places.imag), image, strict=True):
        present = np.unique(np.round(values[~np.isnan(values)], 2))
        # A single row stands for what it is the middle of.
        alone = 2 * min(present[0] + 0.5, side - 0.5 - present[0])
        extent = present[-1] - present[0] + np.diff(present).min() if present.size > 1 else alone
        if extent <= side / 2:
            return False
    return True


@dataclass(frozen=True)
class Raster:
    """Coordinates that fill a grid.

    Attributes:
        rows: row of every token, NaN where it has no place.
        columns: its column.
        grid: rows and columns there are.
        first: coordinates of the first row and column.
        step: from one row, and column, to the next; NaN where there is one alone.
    """

    rows: np.ndarray
    columns: np.ndarray
    grid: tuple[int, int]
    first: tuple[float, float]
    step: tuple[float, float]

    @classmethod
    def of(cls, places: np.ndarray) -> "Raster | None":
        """The grid that coordinates `y + ix` lie on, each place taken once; `None` if they fill none."""
        down, across = _steps(places.real), _steps(places.imag)
        if down is None or across is None:
            return None
        rows, columns = down[0], across[0]
        grid = (int(np.nanmax(rows)) + 1, int(np.nanmax(columns)) + 1)
        cells = (rows * grid[1] + columns)[~np.isnan(rows)]
        filled = cells.size == grid[0] * grid[1] and np.unique(cells).size == cells.size
        return cls(rows, columns, grid, (down[1], across[1]), (down[2], across[2])) if filled else None

    def among(self, places: np.ndarray, image: tuple[int, int]) -> np.ndarray:
        """Row and column of other tokens on this grid, between its own rows and columns too `(..., 2)`.

        Args:
            places: their coordinates `y + ix`.
            image: `(height, width)` of the images [pixels], of which a single row is a whole.
        """
        step = [side if np.isnan(step) else step for step, side in zip(self.step, image, strict=True)]
        axes = zip((places.real, places.imag), self.first, step, strict=True)
        return np.stack([(values - first) / length for values, first, length in axes], -1)

    def order(self) -> np.ndarray:
        """Where the patches lie among the tokens, row by row."""
        index = np.flatnonzero(~np.isnan(self.rows))
        return index[np.lexsort((self.columns[index], self.rows[index]))]


def _steps(values: np.ndarray) -> tuple[np.ndarray, float, float] | None:
    """Coordinates in units of their spacing, from 0, the first and the spacing; `None` if it is not even."""
    present = np.unique(np.round(values[~np.isnan(values)], 2))
    if not present.size:
        return None
    gaps = np.diff(present)
    spacing = float(gaps[gaps < gaps.min() + 0.1].mean()) if gaps.size else math.nan  # each is rounded
    steps = (values - present[0]) / (spacing if gaps.size else 1.0)
    whole = np.round(steps)
    return (whole, float(present[0]), spacing) if np.nanmax(np.abs(steps - whole)) < 0.05 else None


def token_grid(
    tokens: int, image: tuple[int, int], *, prefix: int | None = None, declared: int | None = None
) -> tuple[tuple[int, int], int] | None:
    """Rows, columns and prefix tokens of a row of tokens: the fewest prefix tokens that leave the image's shape."""
    if prefix is not None:
        grid = _best_grid(tokens - prefix, image)
        return grid and (grid, prefix)
    if declared is not None and (grid := _best_grid(tokens - declared, image)):
        return grid, declared
    found = [(grid, p) for p in range(min(MAX_PREFIX, tokens)) if (grid := _best_grid(tokens - p, image))]
    exact = [(grid, p) for grid, p in found if grid[0] * image[1] == grid[1] * image[0]]
    return next(iter(exact or found), None)


def _best_grid(patches: int, image: tuple[int, int]) -> tuple[int, int] | None:
    pairs = [(h, patches // h) for h in range(1, patches + 1) if patches % h == 0]
    pairs = [pair for pair in pairs if similar(pair, image)]
    return min(pairs, key=lambda pair: abs(pair[0] * image[1] - pair[1] * image[0]), default=None)


def similar(grid: tuple[int, int], image: tuple[int, int]) -> bool:
    """Whether a grid has the image's shape, up to one row or column lost to rounding."""
    return abs(grid[0] * image[1] - grid[1] * image[0]) < max(image)
