"""Which axes of an activation are the image, and which tokens are not patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
    """How a tensor holds an image: `axes` names its axes, `grid` its rows and columns, `prefix` the other tokens."""

    axes: Literal["bchw", "bhwc", "bnc", "nbc"]
    grid: tuple[int, int]
    prefix: int = 0

    @property
    def tokens(self) -> int:
        """Patches and prefix tokens together."""
        return self.grid[0] * self.grid[1] + self.prefix

    def channels(self, shape: Sequence[int]) -> int:
        """The channels of an activation of that shape."""
        return shape[self.axes.index("c")]

    def batch_first(self, x: Tensor) -> Tensor:
        """The tensor with the batch on its first axis."""
        return x.transpose(0, 1) if self.axes == "nbc" else x

    def split(self, x: Tensor) -> Activation:
        """Patches and prefix tokens of a tensor that has the batch on its first axis."""
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
        options = [option for option in options if similar(option.grid, image)]
        if len(options) == 2:
            return options[1] if channels_last else options[0]
        return options[0] if options else None
    if len(shape) == 3 and batch in shape[:2]:
        axes: Literal["bnc", "nbc"] = "bnc" if shape[0] == batch else "nbc"
        found = token_grid(shape[1] if axes == "bnc" else shape[0], image, prefix=prefix, declared=declared)
        return found and Layout(axes, *found)
    return None


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
