"""How far attention reaches, by layer and head (d'Ascoli et al. 2021)."""

import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures.heads import against_uniform, heads_by_layer
from vitprobe.figures.page import SINGLE_RUN, columns, models, note, style


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
            drawn = heads_by_layer(ax, model.runs, "nonlocality", error="layer_nonlocality_se")
            against_uniform(ax, model.runs, "uniform_nonlocality", drawn)
        axes[0, 0].set_ylabel("nonlocality [patches]")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
        note(figure, panels, single=SINGLE_RUN if "layer_nonlocality_se" in ds else "")
    return figure
