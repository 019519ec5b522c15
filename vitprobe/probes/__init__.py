"""One file is one measurement: any model and batches in, a Dataset out."""

from vitprobe.probes.base import FeatureProbe, RunningMean, along_layer, probe
from vitprobe.probes.density import hessian_density
from vitprobe.probes.fourier import Fourier, fourier
from vitprobe.probes.hessian import hessian_eigenvalues
from vitprobe.probes.landscape import loss_landscape
from vitprobe.probes.nonlocality import Nonlocality, nonlocality
from vitprobe.probes.variance import FeatureVariance, feature_variance

FEATURE_PROBES: dict[str, type[FeatureProbe]] = {
    probe_class.name: probe_class for probe_class in (Fourier, FeatureVariance, Nonlocality)
}
"""The probes that share one pass, by name."""

__all__ = [
    "FEATURE_PROBES",
    "FeatureProbe",
    "FeatureVariance",
    "Fourier",
    "Nonlocality",
    "RunningMean",
    "along_layer",
    "feature_variance",
    "fourier",
    "hessian_density",
    "hessian_eigenvalues",
    "loss_landscape",
    "nonlocality",
    "probe",
]
