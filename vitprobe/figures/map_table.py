"""Maps of heads as a table of images: a row per layer, a column per head, one scale of colours for all."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from vitprobe.figures.page import GREY, PAGE_WIDTH, VERMILION, style
from vitprobe.names import unknown

FLOOR = 1e-4  # of a logarithmic scale: less is as good as nothing
BESIDE = 1.7  # inches for what stands left and right of the maps
SIDE = 1.1  # inches, the widest that a map becomes
HIGH = 9.0  # inches, the highest that a figure becomes
BAR = 0.14  # inches, the width of the scale of colours
WRAP = 16  # characters of a row's name on one line
ROWS = 30  # as many rows as a figure can have and be read


@dataclass(frozen=True)
class MapRow:
    """The maps of one layer.

    Attributes:
        name: of the row.
        maps: `(head, y, x)` without padding.
        origin: row and column of what ticks count from and the box surrounds.
        image: what the maps are of, `(y, x)` or `(y, x, 3)` between 0 and 1, in a panel before them; none unless given.
        title: of that panel.
    """

    name: str
    maps: np.ndarray
    origin: tuple[int, int]
    image: np.ndarray | None = None
    title: str = ""


def map_table(
    rows: Sequence[MapRow], *, column: str, scale: str, label: str, note: str, box: int = 1, marks: Sequence[float] = ()
) -> Figure:
    """Draw maps of heads as a table of images.

    Args:
        rows: the layers.
        column: what the columns are, which are counted from 1.
        scale: of the colours, `"log"` or `"linear"`.
        label: of the colours.
        note: the line under the figure.
        box: side of the box around the origin, odd.
        marks: values to mark on the scale of colours.

    Returns:
        The figure.

    Raises:
        ValueError: if the scale is neither, or the rows are too many to be read.
    """
    if scale not in ("log", "linear"):
        raise unknown("scale", scale, ("log", "linear"))
    if len(rows) > ROWS:
        raise ValueError(
            f"{len(rows)} rows of maps cannot be read on one page: choose some, as with ds.isel(sample=[0]) or "
            "ds.isel(layer=[0, 5, 11])."
        )
    heads = max(len(row.maps) for row in rows)
    before = int(any(row.image is not None for row in rows))
    tall = sum(row.maps.shape[1] / row.maps.shape[2] for row in rows)
    titles = 0.6 + 0.15 * sum(bool(row.title) for row in rows[1:])
    side = min(SIDE, (PAGE_WIDTH - BESIDE) / (heads + before), (HIGH - titles) / tall)
    norm = _norm(rows, scale)
    with style():
        layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0, compress=True)
        size = (BESIDE + side * (heads + before), side * tall + titles)
        figure = Figure(figsize=size, layout=layout)
        axes = figure.subplots(len(rows), before + heads, squeeze=False)
        for row, across in zip(rows, axes, strict=True):
            if before:
                _draw_image(across[0], row)
            for head, ax in enumerate(across[before:]):
                if head >= len(row.maps):
                    ax.set_axis_off()
                    continue
                drawn = _draw(ax, row.maps[head], row.origin, norm, box)
                ax.tick_params(labelleft=head == 0)
            name = "\n".join(textwrap.fill(part, WRAP) for part in row.name.replace(", ", ",\n").split("\n"))
            across[before].set_ylabel(name, rotation=0, horizontalalignment="right", verticalalignment="center")
        for head, down in enumerate(axes.T[before:]):
            present = [ax for ax in down if ax.axison]
            for ax in present[:-1]:
                ax.tick_params(labelbottom=False)
            # "head 12" is half an inch wide.
            present[0].set_title(f"{head + 1}" if head and side < 0.5 else f"{column} {head + 1}")
        _color_bar(figure, drawn, rows, norm, label, marks)
        figure.supxlabel(textwrap.fill(note, round(22 * size[0])), fontsize=6.5, color=GREY)
    return figure


def _norm(rows: Sequence[MapRow], scale: str) -> Normalize:
    highest = max(float(np.nanmax(row.maps)) for row in rows)
    if scale == "linear":
        return Normalize(0, highest)
    lowest = min(float(np.nanmin(row.maps)) for row in rows)
    return LogNorm(min(max(lowest, FLOOR), highest / 10), highest)


def _draw(ax: Axes, weights: np.ndarray, origin: tuple[int, int], norm: Normalize, box: int) -> Any:
    drawn = ax.imshow(np.maximum(weights, norm.vmin or 0), norm=norm, cmap="viridis", interpolation="nearest")
    row, column = origin
    _draw_box(ax, (column - box / 2, row - box / 2), (box, box))
    for axis, place, length in ((ax.yaxis, row, len(weights)), (ax.xaxis, column, weights.shape[1])):
        step = max(1, length // 3)
        offsets = [offset for offset in (-step, 0, step) if 0 <= place + offset < length]
        words = [f"{offset:+d}".replace("-", "−") if offset else "0" for offset in offsets]
        axis.set_ticks([place + offset for offset in offsets], words)
    ax.tick_params(length=1.5, pad=1.5, labelsize=6)
    ax.spines[:].set_visible(False)
    return drawn


def _draw_image(ax: Axes, row: MapRow) -> None:
    """The image with the box around the same patch, if the row has one."""
    ax.set_axis_off()
    if row.image is None:
        return
    ax.imshow(row.image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    high, wide = (pixels / patches for pixels, patches in zip(row.image.shape[:2], row.maps.shape[1:], strict=True))
    _draw_box(ax, (row.origin[1] * wide - 0.5, row.origin[0] * high - 0.5), (wide, high))
    ax.set_title(row.title)


def _draw_box(ax: Axes, corner: tuple[float, float], size: tuple[float, float]) -> None:
    box = Rectangle(corner, *size, fill=False, edgecolor="white", linewidth=0.5)
    box.set_path_effects([withStroke(linewidth=1.1, foreground="black")])
    ax.add_patch(box)


def _color_bar(
    figure: Figure, drawn: Any, rows: Sequence[MapRow], norm: Normalize, label: str, marks: Sequence[float]
) -> None:
    clipped = isinstance(norm, LogNorm) and min(float(np.nanmin(row.maps)) for row in rows) < (norm.vmin or 0)
    bar = figure.colorbar(
        drawn,
        ax=figure.axes,
        label=textwrap.fill(label, round(14 * figure.get_figheight())),
        extend="min" if clipped else "neither",
        aspect=figure.get_figheight() / BAR,
        pad=0.01,
    )
    bar.outline.set_visible(False)
    for mark in set(marks):
        bar.ax.axhline(mark, color="white", linewidth=1.2)
        bar.ax.plot(
            1.0,
            mark,
            marker="<",
            color=VERMILION,
            markersize=4,
            clip_on=False,
            transform=bar.ax.get_yaxis_transform(),
        )
