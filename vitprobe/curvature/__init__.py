"""The loss as an operator: exact curvature products, the eigenvalues they give, directions to look along."""

from vitprobe.curvature.directions import (
    Checkpoint,
    Directions,
    Normalisation,
    as_directions,
    checkpoint_directions,
    movable,
    path_of,
    principal_directions,
    random_direction,
    random_directions,
    require_random,
)
from vitprobe.curvature.lanczos import (
    Eigenpairs,
    Lanczos,
    Which,
    eigenpairs,
    eigenpairs_together,
    inner,
    noisy_start,
    norm,
    order,
)
from vitprobe.curvature.loss import BatchNorm, Decay, Loss, LossOperator, matching
from vitprobe.curvature.stack import LossStack

__all__ = [
    "BatchNorm",
    "Checkpoint",
    "Decay",
    "Directions",
    "Eigenpairs",
    "Lanczos",
    "Loss",
    "LossOperator",
    "LossStack",
    "Normalisation",
    "Which",
    "as_directions",
    "checkpoint_directions",
    "eigenpairs",
    "eigenpairs_together",
    "inner",
    "matching",
    "movable",
    "noisy_start",
    "norm",
    "order",
    "path_of",
    "principal_directions",
    "random_direction",
    "random_directions",
    "require_random",
]
