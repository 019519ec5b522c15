"""How far attention reaches, by layer and head (d'Ascoli et al. 2021)."""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitprobe.figures.page import BLUE, VERMILION, columns, interval, limit, models, note, style


def nonlocality(ds: xr.Dataset) -> Figure:
    """Nonlocality of each attention head by layer, one panel per model.

    Args:
        ds: the dataset of `vitprobe.nonlocality`, of one run or of stacked runs.

    Returns:
        The figure: a point per head and seed, the mean over heads as a line, and the nonlocality of uniform
        attention, dashed.
    """
    with style():
        panels = models(ds)
        figure, axes = columns(panels, rows=1, height=2.3)
        for ax, model in zip(axes[0], panels, strict=True):
            heads = model.runs["nonlocality"].transpose("run", "layer", "head")
            layer = np.arange(1, heads.sizes["layer"] + 1)
            # Heads have no order that two seeds share, so each is a point of its own.
            spread = np.linspace(-0.15, 0.15, heads.sizes["head"])
            x = np.broadcast_to(layer[:, None] + spread, heads.shape)
            ax.scatter(x, heads, s=5, color=BLUE, alpha=0.45, linewidths=0, zorder=3, label="head")
            mean, half_width = interval(heads.mean("head").values)
            ax.fill_between(layer, mean - half_width, mean + half_width, color=BLUE, alpha=0.25, linewidth=0)
            ax.plot(layer, mean, color=BLUE, marker="o", markersize=3, zorder=4, label="mean over heads")
            uniform = model.runs["uniform_nonlocality"].mean("run")
            ax.plot(layer, uniform, color=VERMILION, linestyle="--", zorder=2, label="uniform attention")
            ax.set_xlabel("attention layer")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            limit([ax], [heads.values, uniform.values])
            ax.set_ylim(bottom=0)
        axes[0, 0].set_ylabel("nonlocality [patches]")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
        note(figure, panels)
    return figure
