"""vitprobe: how does this vision network work?

Train vision transformers and their convolutional relatives, probe any PyTorch vision model, read the results as
plain xarray datasets.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitprobe import curvature as curvature
    from vitprobe import initializers as initializers
    from vitprobe.data import ImageData, Loader, load_data
    from vitprobe.figures import draw, save_figure
    from vitprobe.models import create_model, list_models, register
    from vitprobe.probes import (
        FeatureProbe,
        FeatureVariance,
        Fourier,
        Nonlocality,
        feature_variance,
        fourier,
        hessian_density,
        hessian_eigenvalues,
        loss_landscape,
        nonlocality,
        probe,
        trajectory,
    )
    from vitprobe.results import load, save, stack_runs
    from vitprobe.training import Evaluation, Recipe, TrainingBatches, evaluate, fit, load_weights

_ROOMS = {
    "data": ("ImageData", "Loader", "load_data"),
    "figures": ("draw", "save_figure"),
    "models": ("create_model", "list_models", "register"),
    "probes": (
        "FeatureProbe",
        "FeatureVariance",
        "Fourier",
        "Nonlocality",
        "feature_variance",
        "fourier",
        "hessian_density",
        "hessian_eigenvalues",
        "loss_landscape",
        "nonlocality",
        "probe",
        "trajectory",
    ),
    "results": ("load", "save", "stack_runs"),
    "training": ("Evaluation", "Recipe", "TrainingBatches", "evaluate", "fit", "load_weights"),
}
_MODULES = ("curvature", "initializers")  # rooms whose functions go by the room's name: vp.initializers.impulse_(...)
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Evaluation",
    "FeatureProbe",
    "FeatureVariance",
    "Fourier",
    "ImageData",
    "Loader",
    "Nonlocality",
    "Recipe",
    "TrainingBatches",
    "create_model",
    "draw",
    "evaluate",
    "feature_variance",
    "fit",
    "fourier",
    "hessian_density",
    "hessian_eigenvalues",
    "list_models",
    "load",
    "load_data",
    "load_weights",
    "loss_landscape",
    "nonlocality",
    "probe",
    "register",
    "save",
    "save_figure",
    "stack_runs",
    "trajectory",
]


def __getattr__(name: str) -> Any:
    # Rooms load when they are first used: reading and drawing results needs no torch.
    if name in _HOME:
        value = getattr(importlib.import_module(f"vitprobe.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"vitprobe.{name}")
    raise AttributeError(f"module 'vitprobe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
