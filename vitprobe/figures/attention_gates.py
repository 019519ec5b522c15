"""Gates between content and position, and how far each of the two looks (d'Ascoli et al. 2021, Fig. 6)."""

import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures.heads import against_uniform, heads_by_layer
from vitprobe.figures.page import PALETTE, columns, models, note, style

PARTS = {"position_nonlocality": "position", "nonlocality": "gated", "content_nonlocality": "content"}


def attention_gates(ds: xr.Dataset) -> Figure:
    """Gates of each head by layer above the nonlocality of both parts and of the gated map, one column per model.

    Args:
        ds: the dataset of `vitprobe.probes.attention_gates`, of one run or of stacked runs.

    Returns:
        The figure: a point per head and seed, the means over heads as lines.
    """
    with style():
        panels = models(ds)
        figure, axes = columns(panels, rows=2, height=1.9)
        for (above, below), model in zip(axes.T, panels, strict=True):
            heads_by_layer(above, model.runs, "gate")
            above.set(ylim=(-0.02, 1.02), xlabel="")
            above.tick_params(labelbottom=False)
            for color, (variable, label) in zip(PALETTE[2:5], PARTS.items(), strict=True):
                drawn = heads_by_layer(below, model.runs, variable, color=color, label=label)
            against_uniform(below, model.runs, "uniform_nonlocality", drawn)
        axes[0, 0].set_ylabel("share of position [1]")
        axes[1, 0].set_ylabel("nonlocality [patches]")
        handles = dict(zip(*axes[1, 0].get_legend_handles_labels()[::-1], strict=True))
        handles.pop("head")
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=2 * min(len(panels), 2))
        note(figure, panels, always="Points: heads. Lines: means over heads.")
    return figure
