"""How far attention reaches, by layer and head (d'Ascoli et al. 2021)."""

import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures.heads import by_layer


def nonlocality(ds: xr.Dataset) -> Figure:
    """Nonlocality of each attention head by layer, one panel per model.

    Args:
        ds: the dataset of `vitprobe.nonlocality`, of one run or of stacked runs.

    Returns:
        The figure: a point per head and seed, the mean over heads as a line, and the nonlocality of uniform
        attention, dashed.
    """
    return by_layer(
        ds, "nonlocality", "uniform_nonlocality", label="nonlocality [patches]", error="layer_nonlocality_se"
    )
