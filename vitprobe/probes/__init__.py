"""One file is one measurement: any model and batches in, a Dataset out."""

from collections.abc import Callable

import xarray as xr

from vitprobe.probes.attention_maps import AttentionMaps, attention_maps, operator_map
from vitprobe.probes.base import FeatureProbe, RunningMean, along_layer, probe
from vitprobe.probes.density import hessian_density
from vitprobe.probes.fourier import Fourier, fourier
from vitprobe.probes.hessian import hessian_eigenvalues
from vitprobe.probes.landscape import eigenvector_directions, loss_landscape
from vitprobe.probes.nonlocality import Nonlocality, nonlocality
from vitprobe.probes.spatial import distance_profile, operator_statistics
from vitprobe.probes.trajectory import trajectory
from vitprobe.probes.variance import FeatureVariance, feature_variance

FEATURE_PROBES: dict[str, type[FeatureProbe]] = {
    probe_class.name: probe_class for probe_class in (Fourier, FeatureVariance, Nonlocality)
}
"""The probes that share one pass, by name."""

LOSS_PROBES: dict[str, Callable[..., xr.Dataset]] = {
    function.__name__: function for function in (hessian_eigenvalues, hessian_density, loss_landscape)
}
"""The probes that look at the loss, and make passes of their own, by name."""

__all__ = [
    "FEATURE_PROBES",
    "LOSS_PROBES",
    "AttentionMaps",
    "FeatureProbe",
    "FeatureVariance",
    "Fourier",
    "Nonlocality",
    "RunningMean",
    "along_layer",
    "attention_maps",
    "distance_profile",
    "eigenvector_directions",
    "feature_variance",
    "fourier",
    "hessian_density",
    "hessian_eigenvalues",
    "loss_landscape",
    "nonlocality",
    "operator_map",
    "operator_statistics",
    "probe",
    "trajectory",
]
