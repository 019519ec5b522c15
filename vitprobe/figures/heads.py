"""A number of each head by layer: a point per head, and the mean over heads as a line."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitprobe.figures.page import BLUE, SINGLE_RUN, VERMILION, columns, interval, limit, models, note, style


def heads_by_layer(
    ax: Axes,
    runs: xr.Dataset,
    variable: str,
    *,
    color: str = BLUE,
    marker: str = "o",
    error: str = "",
    label: str = "mean over heads",
) -> np.ndarray:
    """Draw a variable `(run, layer, head)` by layer: a point per head and seed, and the mean over heads as a line.

    Args:
        ax: where to draw.
        runs: the runs of one model, without padded layers.
        variable: the variable.
        color: of points, line and band.
        marker: of points and line.
        error: the variable that is the standard error of the mean over heads, for the band of a single run.
        label: of the line.

    Returns:
        What was drawn `(run, layer, head)`.
    """
    heads = runs[variable].transpose("run", "layer", "head")
    layer = layers(runs)
    # Heads have no order that two seeds share, so each is a point of its own.
    spread = np.linspace(-0.15, 0.15, heads.sizes["head"])
    x = np.broadcast_to(layer[:, None] + spread, heads.shape)
    ax.scatter(x, heads, s=5, color=color, marker=marker, alpha=0.45, linewidths=0, zorder=3, label="head")
    mean, half_width = interval(heads.mean("head").values)
    if heads.sizes["run"] == 1 and error in runs:
        half_width = runs[error].transpose("run", "layer").values[0]
    ax.fill_between(layer, mean - half_width, mean + half_width, color=color, alpha=0.25, linewidth=0)
    ax.plot(layer, mean, color=color, marker=marker, markersize=3, zorder=4, label=label)
    ax.set_xlabel("attention layer")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return heads.values


def by_layer(ds: xr.Dataset, variable: str, uniform: str, *, label: str, error: str = "") -> Figure:
    """A variable of each head by layer, one panel per model, with what uniform attention would give.

    Args:
        ds: a dataset of one run, or of stacked runs.
        variable: the variable `(layer, head)`.
        uniform: the variable that is its value for uniform attention `(layer,)`.
        label: of the ordinates.
        error: as in `heads_by_layer`.

    Returns:
        The figure: a point per head and seed, the mean over heads as a line, and uniform attention, dashed.
    """
    with style():
        panels = models(ds)
        figure, axes = columns(panels, rows=1, height=2.3)
        for ax, model in zip(axes[0], panels, strict=True):
            drawn = heads_by_layer(ax, model.runs, variable, error=error)
            against_uniform(ax, model.runs, uniform, drawn)
        axes[0, 0].set_ylabel(label)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
        note(figure, panels, single=SINGLE_RUN if error in ds else "")
    return figure


def layers(runs: xr.Dataset) -> np.ndarray:
    """The layers, counted from 1."""
    return np.arange(1, runs.sizes["layer"] + 1)


def against_uniform(ax: Axes, runs: xr.Dataset, variable: str, drawn: np.ndarray) -> None:
    """Add what uniform attention would give, dashed, and let the ordinates begin at 0.

    Args:
        ax: where to draw.
        runs: the runs of one model, without padded layers.
        variable: that of uniform attention `(run, layer)`.
        drawn: everything else that was drawn.
    """
    uniform = runs[variable].mean("run")
    ax.plot(layers(runs), uniform, color=VERMILION, linestyle="--", zorder=2, label="uniform attention")
    limit([ax], [drawn, uniform.values])
    ax.set_ylim(bottom=0)
