"""The loss as an operator: exact Hessian and Gauss-Newton products, and the eigenvalues they give."""

from vitprobe.curvature.lanczos import Eigenpairs, Lanczos, Which, eigenpairs, inner, norm, order
from vitprobe.curvature.loss import Loss, LossOperator

__all__ = ["Eigenpairs", "Lanczos", "Loss", "LossOperator", "Which", "eigenpairs", "inner", "norm", "order"]
