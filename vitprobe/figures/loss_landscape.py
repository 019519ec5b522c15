"""The loss on planes and lines through the weights (Park & Kim 2022, Fig. 1a; Li et al. 2018)."""

import textwrap
from typing import Any

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from vitprobe.figures.page import BLUE, GREY, PAGE_WIDTH, VERMILION, style

PUBLISHED_WEIGHT = 0.05  # of the sum of norms in the published picture
WITHOUT_NUMBER = "0.85"  # the grey of cells that are not done, or whose outputs are no numbers
WRAP = 36  # characters of a label on one line
OUTLINE = [withStroke(linewidth=2.2, foreground=GREY)]  # of white marks, which lie on any colour
CHECKPOINTS = {"x": (1, 0), "y": (0, 1)}  # where they lie, by the axis that leads to them


def loss_landscape(ds: xr.Dataset) -> Figure:
    """One row per pair of directions: the loss alone, and with the published weight term added.

    Both are relative to the centre, because the term's own size says nothing of the shape; or to the lowest cell,
    where none lies at the centre. The model is marked, and the checkpoints that span the plane. Cells without a
    number (of an unfinished file, or where the outputs are none) stay grey.

    Args:
        ds: the dataset of `vitprobe.loss_landscape`.

    Returns:
        The figure.

    Raises:
        ValueError: if no cell has a number, or there are several runs.
    """
    with style():
        return _planes(ds) if "y" in ds.dims else _lines(ds)


def loss_surface(ds: xr.Dataset, *, elevation: float = 30.0, azimuth: float = -50.0) -> Figure:
    """The same as surfaces in three dimensions; the published picture's eye is at 15 and 15 degrees.

    Colours are the levels of the contours in `loss_landscape`.

    Args:
        ds: the dataset of `vitprobe.loss_landscape` on a plane.
        elevation: of the eye above the plane [degrees].
        azimuth: of the eye around it [degrees].

    Returns:
        The figure.

    Raises:
        ValueError: if the dataset is of a line, no cell has a number, or there are several runs.
    """
    if "y" not in ds.dims:
        raise ValueError("a line has no surface: draw it with vitprobe.figures.loss_landscape.")
    pairs = ds.sizes["direction_pair"]
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 0.3 + 3.0 * pairs), layout="constrained")
        grid = np.meshgrid(ds["x"].values, ds["y"].values)
        for column, (title, values) in enumerate(rises(ds).items()):
            norm = BoundaryNorm(levels_of(values), 256)
            for row in range(pairs):
                height = values.isel(direction_pair=row).values
                ax: Any = figure.add_subplot(pairs, 2, 2 * row + column + 1, projection="3d")
                ax.plot_surface(
                    *grid,
                    height,
                    rstride=1,
                    cstride=1,
                    facecolors=colormaps["viridis"](norm(np.nan_to_num(height))),
                    edgecolor="white",
                    linewidth=0.2,
                    shade=False,
                )
                ax.view_init(elevation, azimuth)
                ax.set_box_aspect(None, zoom=0.8)  # or the labels leave the page
                ax.set(xlabel=axis_label(ds, "x", 24), ylabel=axis_label(ds, "y", 24), zlabel=rise_label(ds))
                for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
                    axis.set_major_locator(MaxNLocator(4))
                    axis.set_tick_params(pad=-1)
                ax.set_title(title if row == 0 else "")
        _note(figure, ds)
    return figure


def _planes(ds: xr.Dataset) -> Figure:
    pairs, parts = ds.sizes["direction_pair"], rises(ds)
    figure = Figure(figsize=(PAGE_WIDTH, 0.7 + (0.2 + 2.3 * shape_of(ds)) * pairs), layout="constrained")
    axes = figure.subplots(pairs, len(parts), squeeze=False, sharex=True, sharey=True)
    for column, (title, values) in enumerate(parts.items()):
        for row in range(pairs):
            ax = axes[row, column]
            drawn = contours(ax, values.isel(direction_pair=row), levels_of(values))
            _mark(ax, ds)
            ax.set_ylabel(axis_label(ds, "y", int(WRAP * min(shape_of(ds), 1))) if column == 0 else "")
        axes[0, column].set_title(title)
        axes[-1, column].set_xlabel(axis_label(ds, "x"))
        color_bar(figure, drawn, axes[:, column].tolist(), rise_label(ds))
    _note(figure, ds)
    return figure


def _lines(ds: xr.Dataset) -> Figure:
    figure = Figure(figsize=(3.5, 2.6), layout="constrained")
    ax = figure.subplots()
    for color, (title, values) in zip((BLUE, VERMILION), rises(ds).items(), strict=True):
        for row in range(ds.sizes["direction_pair"]):
            ax.plot(ds["x"], values.isel(direction_pair=row), color=color, label=title if row == 0 else None)
    for position, name in _points(ds).items():
        ax.axvline(position[0], color=GREY, linewidth=0.6, linestyle=":", zorder=1)
        ax.annotate(
            name,
            (position[0], 1),
            xycoords=ax.get_xaxis_transform(),
            ha="center",
            va="bottom",
            color=GREY,
            fontsize=6.5,
        )
    ax.set(xlabel=axis_label(ds, "x"), ylabel=rise_label(ds))
    ax.legend()
    _note(figure, ds)
    return figure


# --- shared with the trajectory ---------------------------------------------------------------------


def rises(ds: xr.Dataset) -> dict[str, xr.DataArray]:
    """The loss, and the loss with the published weight term, above the centre or else the lowest cell.

    Args:
        ds: the landscape.

    Returns:
        By title.

    Raises:
        ValueError: if no cell has a number, or there are several runs.
    """
    if "run" in ds.dims:
        raise ValueError("a landscape is drawn run by run: give ds.isel(run=0), and so on.")
    if not np.isfinite(ds["nll"]).any():
        raise ValueError("no cell of this landscape has a number yet: nothing to draw.")
    parts = {
        "NLL": ds["nll"],
        f"NLL + {PUBLISHED_WEIGHT} · sum of norms": ds["nll"] + PUBLISHED_WEIGHT * ds["l2_sum_of_norms"],
    }
    if _has_centre(ds):
        return {title: values - values.sel(_centre(ds)) for title, values in parts.items()}
    axes = list(_centre(ds))
    return {title: values - values.where(np.isfinite(values)).min(axes) for title, values in parts.items()}


def rise_label(ds: xr.Dataset) -> str:
    """What the heights of `rises` are, with their unit."""
    return f"rise from the {'centre' if _has_centre(ds) else 'lowest cell'} [nats]"


def _centre(ds: xr.Dataset) -> dict[str, float]:
    return {axis: 0.0 for axis in ("x", "y") if axis in ds.dims}


def _has_centre(ds: xr.Dataset) -> bool:
    centre = _centre(ds)
    return all((ds[axis] == 0).any() for axis in centre) and bool(np.isfinite(ds["nll"].sel(centre)).all())


def levels_of(values: xr.DataArray) -> np.ndarray:
    """Levels that grow as the square of their number: the bowl matters, not its rim."""
    finite = values.values[np.isfinite(values.values)]
    low, high = finite.min(), finite.max()
    return low + ((high - low) or 1.0) * np.linspace(0, 1, 13) ** 2


def contours(ax: Axes, values: xr.DataArray, levels: np.ndarray) -> Any:
    """Filled contours of one plane `(y, x)`, in the shape of `shape_of`."""
    ax.set_facecolor(WITHOUT_NUMBER)
    drawn = ax.contourf(values["x"], values["y"], values, levels=levels, cmap="viridis")
    ax.contour(values["x"], values["y"], values, levels=levels, colors="white", linewidths=0.3)
    ax.set_box_aspect(shape_of(values))
    return drawn


def shape_of(plane: xr.Dataset | xr.DataArray) -> float:
    """Height of the picture of a plane over its width: true to scale, unless that makes a sliver of it."""
    return float(np.clip(np.ptp(plane["y"].values) / np.ptp(plane["x"].values), 0.4, 1.5))


def color_bar(figure: Figure, drawn: Any, axes: list[Axes], label: str) -> None:
    """A colour bar with every third level."""
    bar = figure.colorbar(drawn, ax=axes, label=label, ticks=drawn.levels[::3])
    bar.ax.set_yticklabels([f"{tick:.3g}" for tick in drawn.levels[::3]])


def axis_label(ds: xr.Dataset, axis: str, characters: int = WRAP) -> str:
    """What a step along an axis is, on lines of so many characters; an eigenvector's with its eigenvalue."""
    text = str(ds[axis].attrs["long_name"]).partition(",")[0]
    if f"eigenvalue_{axis}" in ds.attrs:
        text += " " + f"(λ = {ds.attrs[f'eigenvalue_{axis}']:.3g} nats)".replace(" ", "\N{NO-BREAK SPACE}")
    return textwrap.fill(text, characters)


def _points(ds: xr.Dataset) -> dict[tuple[float, float], str]:
    """The model and the checkpoints that span the plane or line, by where they lie."""
    points: dict[tuple[float, float], str] = {(0, 0): "model"}
    if ds.attrs["directions"] == "checkpoints":
        points |= {CHECKPOINTS[axis]: f"checkpoint {n}" for n, axis in enumerate(_centre(ds), 1)}
    return points


def _mark(ax: Axes, ds: xr.Dataset) -> None:
    points = _points(ds)
    for position, name in points.items():
        ax.plot(*position, marker="+", color="white", markersize=6, path_effects=OUTLINE)
        if len(points) > 1:
            ax.annotate(
                name,
                position,
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                color="white",
                fontsize=6.5,
                path_effects=OUTLINE,
            )


def _note(figure: Figure, ds: xr.Dataset) -> None:
    said = [f"{ds.attrs['images']} images, the same for all cells."]
    if "normalisation" in ds.attrs:
        said.append(f"Normalisation: {ds.attrs['normalisation']}.")
    if ds.attrs["batch_norm"] == "reestimated":
        said.append("Batch norm re-estimated at each cell.")
    if not ds.attrs["complete"]:
        said.append("Unfinished.")
    if without := int(ds["nll"].isnull().sum()):
        said.append(f"{without} of {ds['nll'].size} cells without a number.")
    figure.supxlabel(" ".join(said), fontsize=6.5, color=GREY)
