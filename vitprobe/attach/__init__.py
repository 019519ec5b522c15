"""How to watch any eager PyTorch vision model: its residual units, its activations as images, its attention maps."""

from vitprobe.attach.forward import default_forward, images_of, to_model, untouched, unwrap
from vitprobe.attach.layout import Activation, Layout, infer_layout
from vitprobe.attach.plan import AttentionSite, Plan, Unit, plan
from vitprobe.attach.watch import Watch

__all__ = [
    "Activation",
    "AttentionSite",
    "Layout",
    "Plan",
    "Unit",
    "Watch",
    "default_forward",
    "images_of",
    "infer_layout",
    "plan",
    "to_model",
    "untouched",
    "unwrap",
]
