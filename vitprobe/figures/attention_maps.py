"""Where heads look from one query, initialisations or layers below each other (d'Ascoli et al. 2021, Fig. 3 and 7)."""

import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from vitprobe.figures.page import GREY, PAGE_WIDTH, VERMILION, pretty, style
from vitprobe.names import unknown

FLOOR = 1e-4  # of a logarithmic scale: less is as good as nothing
BESIDE = 1.7  # inches for what stands left and right of the maps
SIDE = 1.1  # inches, the widest that a map becomes
WRAP = 16  # characters of a row's name on one line


@dataclass(frozen=True)
class _Row:
    """The maps of one layer `(head, y, x)` without padding, and the row and column of their query."""

    name: str
    maps: np.ndarray
    query: tuple[int, int]


def attention_maps(ds: xr.Dataset, *, scale: str = "log") -> Figure:
    """The attention of one query as images: a row per run and layer, a column per head, one scale of colours for all.

    The query is boxed, and ticks count patches from it.

    Args:
        ds: the dataset of `vitprobe.probes.attention_maps` or `operator_map`, of one run or of stacked runs; runs go
            by a coordinate `label`, else by `model`.
        scale: of the colours, `"log"` or `"linear"`.

    Returns:
        The figure.

    Raises:
        ValueError: if the scale is neither.
    """
    if scale not in ("log", "linear"):
        raise unknown("scale", scale, ("log", "linear"))
    rows = _rows(ds)
    heads = max(len(row.maps) for row in rows)
    column = str(ds["head"].attrs.get("long_name", "head"))
    side = min(SIDE, (PAGE_WIDTH - BESIDE) / heads)
    tall = sum(row.maps.shape[1] / row.maps.shape[2] for row in rows)
    norm = _norm(rows, scale)
    with style():
        layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0, compress=True)
        figure = Figure(figsize=(BESIDE + side * heads, 0.6 + side * tall), layout=layout)
        axes = figure.subplots(len(rows), heads, squeeze=False)
        for row, across in zip(rows, axes, strict=True):
            for head, ax in enumerate(across):
                if head >= len(row.maps):
                    ax.set_axis_off()
                    continue
                drawn = _draw(ax, row.maps[head], row.query, norm)
                ax.tick_params(labelleft=head == 0)
            name = "\n".join(textwrap.fill(part, WRAP) for part in row.name.replace(", ", ",\n").split("\n"))
            across[0].set_ylabel(name, rotation=0, horizontalalignment="right", verticalalignment="center")
        for head, down in enumerate(axes.T):
            present = [ax for ax in down if ax.axison]
            for ax in present[:-1]:
                ax.tick_params(labelbottom=False)
            present[0].set_title(f"{column} {head + 1}")
        _color_bar(figure, drawn, rows, norm, str(ds["attention"].attrs.get("long_name", "attention weight")))
        figure.supxlabel(_note(ds), fontsize=6.5, color=GREY)
    return figure


def _rows(ds: xr.Dataset) -> list[_Row]:
    rows = []
    for run in _along(ds, "run"):
        for layer in _along(run, "layer"):
            maps = layer["attention"].transpose("head", "y", "x")
            for dim in maps.dims:
                maps = maps.dropna(dim, how="all")
            if not maps.size:  # a layer that other runs have
                continue
            named = [_name(run)] if "run" in ds.dims else []
            named += [f"layer {int(layer['layer']) + 1}"] if ds.sizes.get("layer", 1) > 1 else []
            rows.append(_Row(", ".join(named), maps.values, (int(layer["query_y"]), int(layer["query_x"]))))
    return rows


def _along(ds: xr.Dataset, dim: str) -> list[xr.Dataset]:
    return [ds.isel({dim: index}) for index in range(ds.sizes[dim])] if dim in ds.dims else [ds]


def _name(run: xr.Dataset) -> str:
    if "label" in run.coords:
        return str(run["label"].item())
    return pretty(str(run["model"].item())) if "model" in run.coords else f"run {int(run['run']) + 1}"


def _norm(rows: list[_Row], scale: str) -> Normalize:
    highest = max(row.maps.max() for row in rows)
    if scale == "linear":
        return Normalize(0, highest)
    lowest = min(row.maps.min() for row in rows)
    return LogNorm(min(max(lowest, FLOOR), highest / 10), highest)


def _draw(ax: Axes, weights: np.ndarray, query: tuple[int, int], norm: Normalize) -> Any:
    drawn = ax.imshow(np.maximum(weights, norm.vmin or 0), norm=norm, cmap="viridis", interpolation="nearest")
    row, column = query
    box = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="white", linewidth=0.6)
    box.set_path_effects([withStroke(linewidth=1.4, foreground="black")])
    ax.add_patch(box)
    for axis, place, length in ((ax.yaxis, row, len(weights)), (ax.xaxis, column, weights.shape[1])):
        step = max(1, length // 3)
        offsets = [offset for offset in (-step, 0, step) if 0 <= place + offset < length]
        words = [f"{offset:+d}".replace("-", "−") if offset else "0" for offset in offsets]
        axis.set_ticks([place + offset for offset in offsets], words)
    ax.tick_params(length=1.5, pad=1.5, labelsize=6)
    ax.spines[:].set_visible(False)
    return drawn


def _color_bar(figure: Figure, drawn: Any, rows: list[_Row], norm: Normalize, label: str) -> None:
    clipped = isinstance(norm, LogNorm) and min(row.maps.min() for row in rows) < (norm.vmin or 0)
    bar = figure.colorbar(
        drawn, ax=figure.axes, label=label, extend="min" if clipped else "neither", aspect=30, pad=0.01
    )
    bar.outline.set_visible(False)
    for patches in {row.maps[0].size for row in rows}:
        bar.ax.axhline(1 / patches, color="white", linewidth=1.2)
        bar.ax.plot(
            1.0,
            1 / patches,
            marker="<",
            color=VERMILION,
            markersize=4,
            clip_on=False,
            transform=bar.ax.get_yaxis_transform(),
        )


def _note(ds: xr.Dataset) -> str:
    said = ["Box: the query. Ticks: rows and columns of patches from it. Triangle: uniform attention."]
    if "images" in ds.attrs:
        said.append(f"Mean of {ds.attrs['images']} image{'' if ds.attrs['images'] == 1 else 's'}.")
    return " ".join(said)
