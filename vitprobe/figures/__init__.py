"""A dataset in, a matplotlib `Figure` out. Nothing is measured here, and nothing here needs torch.

One file is one figure: a function of its name takes the dataset of one run, or of stacked runs, and `draw`
finds it by the dataset's attribute `probe`. Figures are plain `matplotlib.figure.Figure` objects, without the
state of pyplot.
"""

from collections.abc import Callable, Mapping

import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures.attention_entropy import attention_entropy
from vitprobe.figures.attention_gates import attention_gates
from vitprobe.figures.attention_maps import attention_maps
from vitprobe.figures.attention_offsets import attention_offsets, local_mass
from vitprobe.figures.calibration import calibration
from vitprobe.figures.cka import cka
from vitprobe.figures.corruption import corruption_robustness
from vitprobe.figures.feature_variance import feature_variance
from vitprobe.figures.fourier import fourier
from vitprobe.figures.fourier_spectrum import fourier_spectrum
from vitprobe.figures.hessian import hessian_density, hessian_eigenvalues
from vitprobe.figures.lesion import lesion
from vitprobe.figures.loss_landscape import loss_landscape, loss_surface
from vitprobe.figures.masking import masking
from vitprobe.figures.noise import noise_by_frequency
from vitprobe.figures.nonlocality import nonlocality
from vitprobe.figures.page import pretty, save_figure, style
from vitprobe.figures.spatial_operators import filter_statistics, spatial_operators
from vitprobe.figures.trajectory import trajectory
from vitprobe.figures.unit_changes import unit_changes
from vitprobe.names import unknown

__all__ = [
    "attention_entropy",
    "attention_gates",
    "attention_maps",
    "attention_offsets",
    "calibration",
    "cka",
    "corruption_robustness",
    "draw",
    "feature_variance",
    "filter_statistics",
    "fourier",
    "fourier_spectrum",
    "hessian_density",
    "hessian_eigenvalues",
    "lesion",
    "local_mass",
    "loss_landscape",
    "loss_surface",
    "masking",
    "noise_by_frequency",
    "nonlocality",
    "pretty",
    "save_figure",
    "spatial_operators",
    "style",
    "trajectory",
    "unit_changes",
]

FIGURES: Mapping[str, Callable[[xr.Dataset], Figure]] = {
    "attention_maps": attention_maps,
    "fourier": fourier,
    "feature_variance": feature_variance,
    "nonlocality": nonlocality,
    "calibration": calibration,
    "cka": cka,
    "noise_by_frequency": noise_by_frequency,
    "corruption_robustness": corruption_robustness,
    "hessian_eigenvalues": hessian_eigenvalues,
    "hessian_density": hessian_density,
    "loss_landscape": loss_landscape,
    "trajectory": trajectory,
    "attention_entropy": attention_entropy,
    "attention_gates": attention_gates,
    "attention_offsets": attention_offsets,
    "fourier_spectrum": fourier_spectrum,
    "lesion": lesion,
    "masking": masking,
    "spatial_operators": spatial_operators,
    "filter_statistics": filter_statistics,
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
