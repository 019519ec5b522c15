"""How to watch any eager PyTorch vision model: its residual units, its activations as images, its attention maps."""

from vitprobe.attach.intervene import Intervention, removal
from vitprobe.attach.layout import Activation, Layout, infer_layout
from vitprobe.attach.parts import AttentionSite, Unit
from vitprobe.attach.plan import Plan, plan
from vitprobe.attach.spatial import spatial_operator
from vitprobe.attach.watch import Inputs, Watch

__all__ = [
    "Activation",
    "AttentionSite",
    "Inputs",
    "Intervention",
    "Layout",
    "Plan",
    "Unit",
    "Watch",
    "infer_layout",
    "plan",
    "removal",
    "spatial_operator",
]
