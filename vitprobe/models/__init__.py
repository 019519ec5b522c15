"""The networks: one paper's network is one file, found by name through `create_model`."""

from vitprobe.models import alternet, convit, convmixer, convolutional_vit, foreign, mixer, resnet, simple_vit, vit
from vitprobe.models.registry import (
    create_model,
    describe_model,
    list_libraries,
    list_models,
    model_cost,
    register,
    register_library,
    variant,
)

__all__ = [
    "alternet",
    "convit",
    "convmixer",
    "convolutional_vit",
    "create_model",
    "describe_model",
    "foreign",
    "list_libraries",
    "list_models",
    "mixer",
    "model_cost",
    "register",
    "register_library",
    "resnet",
    "simple_vit",
    "variant",
    "vit",
]
