"""How spread out attention is, by layer and head."""

import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures.heads import by_layer


def attention_entropy(ds: xr.Dataset) -> Figure:
    """Entropy of attention of each head by layer, one panel per model.

    Args:
        ds: the dataset of `vitprobe.probes.attention_entropy`, of one run or of stacked runs.

    Returns:
        The figure: a point per head and seed, the mean over heads as a line, and the entropy of uniform attention,
        dashed.
    """
    return by_layer(ds, "entropy", "uniform_entropy", label="entropy of attention [nats]")
