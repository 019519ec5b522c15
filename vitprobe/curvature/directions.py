"""Directions in parameter space and their normalisation (Li et al. 2018, *Visualizing the Loss Landscape*)."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm

from vitprobe.names import unknown

Normalisation = Literal["li", "paper", "layer", "none"]
NORMALISATIONS = ("li", "paper", "layer", "none")


def random_direction(
    weights: Mapping[str, Tensor], *, normalisation: Normalisation, generator: torch.Generator
) -> dict[str, Tensor]:
    """A Gaussian direction for every weight tensor, scaled to the weights.

    - `"li"`: every filter (the slice of a tensor at one output) gets the length of the weights' filter; tensors with
      less than two dimensions get zero.
    - `"paper"`: Park & Kim's published code, which takes lengths along the first axis instead, so that every
      (input, y, x) column over all outputs is matched; tensors with less than two dimensions, and position codes, get
      zero.
    - `"layer"`: every tensor gets the length of the weights' tensor, also biases and norms.
    - `"none"`: the Gaussian itself; tensors with less than two dimensions get zero.

    Args:
        weights: by name, where the landscape is centred.
        normalisation: one of the above.
        generator: of the Gaussian numbers, on the CPU.

    Returns:
        One tensor for each weight.

    Raises:
        ValueError: for an unknown normalisation.
    """
    if normalisation not in NORMALISATIONS:
        raise unknown("normalisation", normalisation, NORMALISATIONS)
    direction = {}
    for name, weight in ((name, weight.detach()) for name, weight in weights.items()):
        # Drawn for every tensor, also where it is not used: normalisations of one seed share their numbers.
        draw = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
        direction[name] = _scale(name, draw, weight, normalisation)
    return direction


def _scale(name: str, draw: Tensor, weight: Tensor, normalisation: Normalisation) -> Tensor:
    if normalisation == "layer":
        return draw * (vector_norm(weight) / vector_norm(draw).clamp_min(1e-30))
    if weight.ndim < 2:
        return torch.zeros_like(weight)
    if normalisation == "none":
        return draw
    if normalisation == "paper":
        if "pos_embed" in name or "relative_position" in name:
            return torch.zeros_like(weight)
        return draw * _length(weight, (0,)) / (_length(draw, (0,)) + 1e-7)
    rest = tuple(range(1, weight.ndim))
    return draw * _length(weight, rest) / _length(draw, rest).clamp_min(1e-30)


def _length(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return vector_norm(x, dim=axes, keepdim=True)
