"""The networks: one paper's network is one file, found by name through `create_model`."""

from vitprobe.models import alternet, convit, convmixer, resnet, vit
from vitprobe.models.registry import create_model, describe_model, list_models, register, variant

__all__ = [
    "alternet",
    "convit",
    "convmixer",
    "create_model",
    "describe_model",
    "list_models",
    "register",
    "resnet",
    "variant",
    "vit",
]
