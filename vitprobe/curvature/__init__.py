"""The loss as an operator: exact curvature products, the eigenvalues they give, directions to look along."""

from vitprobe.curvature.directions import Normalisation, random_direction
from vitprobe.curvature.lanczos import Eigenpairs, Lanczos, Which, eigenpairs, eigenpairs_together, inner, norm, order
from vitprobe.curvature.loss import Loss, LossOperator

__all__ = [
    "Eigenpairs",
    "Lanczos",
    "Loss",
    "LossOperator",
    "Normalisation",
    "Which",
    "eigenpairs",
    "eigenpairs_together",
    "inner",
    "norm",
    "order",
    "random_direction",
]
