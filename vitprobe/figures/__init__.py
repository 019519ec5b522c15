"""A dataset in, a matplotlib `Figure` out. Nothing is measured here, and nothing here needs torch.

One file is one figure: a function of its name takes the dataset of one run, or of stacked runs, and `draw`
finds it by the dataset's attribute `probe`. Figures are plain `matplotlib.figure.Figure` objects, without the
state of pyplot.
"""

from collections.abc import Callable, Mapping

import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures.attention_maps import attention_maps
from vitprobe.figures.feature_variance import feature_variance
from vitprobe.figures.fourier import fourier
from vitprobe.figures.hessian import hessian_density, hessian_eigenvalues
from vitprobe.figures.loss_landscape import loss_landscape, loss_surface
from vitprobe.figures.nonlocality import nonlocality
from vitprobe.figures.page import pretty, save_figure, style
from vitprobe.figures.trajectory import trajectory
from vitprobe.names import unknown

__all__ = [
    "attention_maps",
    "draw",
    "feature_variance",
    "fourier",
    "hessian_density",
    "hessian_eigenvalues",
    "loss_landscape",
    "loss_surface",
    "nonlocality",
    "pretty",
    "save_figure",
    "style",
    "trajectory",
]

FIGURES: Mapping[str, Callable[[xr.Dataset], Figure]] = {
    "attention_maps": attention_maps,
    "fourier": fourier,
    "feature_variance": feature_variance,
    "nonlocality": nonlocality,
    "hessian_eigenvalues": hessian_eigenvalues,
    "hessian_density": hessian_density,
    "loss_landscape": loss_landscape,
    "trajectory": trajectory,
}


def draw(ds: xr.Dataset) -> Figure:
    """The figure of a measurement.

    Args:
        ds: a probe's dataset, of one run or of stacked runs.

    Returns:
        The figure, to be shown or given to `save_figure`.

    Raises:
        ValueError: if no figure is known for the probe.
    """
    probe = str(ds.attrs.get("probe", ""))
    if probe not in FIGURES:
        raise unknown("probe in ds.attrs['probe']:", probe, FIGURES)
    return FIGURES[probe](ds)
