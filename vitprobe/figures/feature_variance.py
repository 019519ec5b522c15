"""Variance of the feature maps, over positions or over images, by depth (Park & Kim 2022, Fig. 9)."""

import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures.depth_profile import depth_profile, kind_legend
from vitprobe.figures.page import SINGLE_RUN, THIN_LINES, columns, models, note, style


def feature_variance(ds: xr.Dataset, *, normalised: bool = False) -> Figure:
    """Feature-map variance, over positions or over images as it was measured, by depth, one panel per model.

    Args:
        ds: the dataset of `vitprobe.feature_variance`, of one run or of stacked runs.
        normalised: draw the variance over the mean square, which does not grow with the residual stream.

    Returns:
        The figure.
    """
    with style():
        panels = models(ds)
        figure, axes = columns(panels, rows=1, height=2.3)
        variable = "normalised_variance" if normalised else "variance"
        what = "variance over images" if ds.attrs.get("over") == "images" else "feature-map variance"
        label = f"{what}\n/ mean square [1]" if normalised else f"{what} [1]"
        depth_profile(axes[0].tolist(), panels, variable, label)
        kind_legend(figure, panels)
        note(figure, panels, several=THIN_LINES, single=SINGLE_RUN)
    return figure
