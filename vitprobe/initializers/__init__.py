"""What the weights are before training: functions that write to a model and say what they achieved."""

from vitprobe.initializers.access import AttentionLayer, PositionCode, attention_layers, patch_grid, position_code
from vitprobe.initializers.convolution import convolution_, convolution_as_attention
from vitprobe.initializers.defaults import default_, gpsa_, positions_
from vitprobe.initializers.impulse import impulse_
from vitprobe.initializers.impulse_fit import ImpulseSpec
from vitprobe.initializers.mimetic import mimetic_

__all__ = [
    "AttentionLayer",
    "ImpulseSpec",
    "PositionCode",
    "attention_layers",
    "convolution_",
    "convolution_as_attention",
    "default_",
    "gpsa_",
    "impulse_",
    "mimetic_",
    "patch_grid",
    "position_code",
    "positions_",
]
