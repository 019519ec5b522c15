"""How spread out attention is, by layer and head."""

import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures.heads import against_uniform, heads_by_layer
from vitprobe.figures.page import columns, models, note, style


def attention_entropy(ds: xr.Dataset) -> Figure:
    """Entropy of attention of each head by layer, one panel per model.

    Args:
        ds: the dataset of `vitprobe.probes.attention_entropy`, of one run or of stacked runs.

    Returns:
        The figure: a point per head and seed, the mean over heads as a line, and the entropy of uniform attention,
        dashed.
    """
    with style():
        panels = models(ds)
        figure, axes = columns(panels, rows=1, height=2.3)
        for ax, model in zip(axes[0], panels, strict=True):
            drawn = heads_by_layer(ax, model.runs, "entropy")
            against_uniform(ax, model.runs, "uniform_entropy", drawn)
        axes[0, 0].set_ylabel("entropy of attention [nats]")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
        note(figure, panels)
    return figure
