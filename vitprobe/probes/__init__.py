"""One file is one measurement: any model and batches in, a Dataset out."""

from collections.abc import Callable

import xarray as xr

from vitprobe.probes.attention_entropy import AttentionEntropy, attention_entropy
from vitprobe.probes.attention_gates import AttentionGates, attention_gates
from vitprobe.probes.attention_maps import AttentionMaps, attention_maps, operator_map
from vitprobe.probes.attention_offsets import AttentionOffsets, attention_offsets, local_mass
from vitprobe.probes.base import FeatureProbe, RunningMean, UnitMean, along_layer, probe
from vitprobe.probes.calibration import Calibration, calibration
from vitprobe.probes.cka import CKA, block_structure, cka
from vitprobe.probes.corruption import corruption_robustness
from vitprobe.probes.density import hessian_density
from vitprobe.probes.filters import filter_statistics
from vitprobe.probes.fourier import Fourier, fourier
from vitprobe.probes.fourier_spectrum import FourierSpectrum, fourier_spectrum
from vitprobe.probes.hessian import hessian_eigenvalues
from vitprobe.probes.landscape import eigenvector_directions, loss_landscape
from vitprobe.probes.lesion import lesion
from vitprobe.probes.masking import masking
from vitprobe.probes.noise import noise_by_frequency
from vitprobe.probes.nonlocality import Nonlocality, nonlocality
from vitprobe.probes.spatial import (
    SpatialOperators,
    distance_profile,
    operator_statistics,
    spatial_operators,
)
from vitprobe.probes.trajectory import trajectory
from vitprobe.probes.variance import FeatureVariance, feature_variance

FEATURE_PROBES: dict[str, type[FeatureProbe]] = {
    probe_class.name: probe_class
    for probe_class in (
        Fourier,
        FourierSpectrum,
        FeatureVariance,
        Nonlocality,
        AttentionEntropy,
        AttentionOffsets,
        AttentionGates,
        AttentionMaps,
        SpatialOperators,
        CKA,
        Calibration,
    )
}
"""The probes that share one pass, by name."""

LOSS_PROBES: dict[str, Callable[..., xr.Dataset]] = {
    function.__name__: function for function in (hessian_eigenvalues, hessian_density, loss_landscape)
}
"""The probes that look at the loss as a function of the weights, and make passes of their own, by name."""

CHANGE_PROBES: dict[str, Callable[..., xr.Dataset]] = {
    function.__name__: function for function in (lesion, masking, noise_by_frequency)
}
"""The probes that change something and look at the answers, a pass for each change, by name."""

IMAGE_PROBES: dict[str, Callable[..., xr.Dataset]] = {"corruption_robustness": corruption_robustness}
"""The probes that make images of their own of a data set, by name; they take that as `source`, and no batches."""

__all__ = [
    "CHANGE_PROBES",
    "CKA",
    "FEATURE_PROBES",
    "IMAGE_PROBES",
    "LOSS_PROBES",
    "AttentionEntropy",
    "AttentionGates",
    "AttentionMaps",
    "AttentionOffsets",
    "Calibration",
    "FeatureProbe",
    "FeatureVariance",
    "Fourier",
    "FourierSpectrum",
    "Nonlocality",
    "RunningMean",
    "SpatialOperators",
    "UnitMean",
    "along_layer",
    "attention_entropy",
    "attention_gates",
    "attention_maps",
    "attention_offsets",
    "block_structure",
    "calibration",
    "cka",
    "corruption_robustness",
    "distance_profile",
    "eigenvector_directions",
    "feature_variance",
    "filter_statistics",
    "fourier",
    "fourier_spectrum",
    "hessian_density",
    "hessian_eigenvalues",
    "lesion",
    "local_mass",
    "loss_landscape",
    "masking",
    "noise_by_frequency",
    "nonlocality",
    "operator_map",
    "operator_statistics",
    "probe",
    "spatial_operators",
    "trajectory",
]
