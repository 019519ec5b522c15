"""Batches apart: each one's own Hessian times its own vector, all in one pass."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from vitprobe.calling import lent
from vitprobe.curvature.loss import LossOperator, require_finite


class LossStack:
    """The losses of an operator's batches, each for itself, as functions of the same parameters.

    A batch of 16 images does not fill a GPU. Here every batch has a copy of the parameters, so that one pass over
    all of them, vectorised by `torch.func.vmap`, gives each batch's own gradient, and a pass through that graph each
    batch's own curvature product. The memory is that of the batches together, and of their copies of the parameters.

    Args:
        operator: of batches that are all of one shape.

    Attributes:
        losses: loss of each batch, decay included `(batch,)`.
        gradients: gradient of each `(batch, parameter)`.

    Raises:
        ValueError: if the batches differ in shape, a loss is not finite, or the model cannot be vectorised.
    """

    def __init__(self, operator: LossOperator) -> None:
        self.operator = operator
        count = len(operator.shares)
        self._copies = [p.detach().expand(count, *p.shape).clone() for p in operator.parameters]
        for copy in self._copies:
            copy.requires_grad_()
        batches = stacked(list(operator.batches))
        with operator.quiet():
            try:
                losses = vmap(self._loss)(self._copies, batches)
            except torch.OutOfMemoryError:
                raise  # a smaller stack is what helps, and the error says what is short
            except RuntimeError as error:
                raise ValueError(
                    f"{type(operator.model).__name__} cannot be vectorised: use stack=1. ({error})"
                ) from error
            for b, (loss, batch) in enumerate(zip(losses.tolist(), operator.batches, strict=True)):
                require_finite(b, loss)
                operator.require_repeatable(b, batch, loss)
            self._slopes = torch.autograd.grad(
                losses.sum(), self._copies, create_graph=True, allow_unused=True, materialize_grads=True
            )
        self.losses = losses.detach() + operator.decay_value()
        self.gradients = self._flatten(self._slopes) + operator.decay_gradient()

    def product(self, vectors: Tensor) -> Tensor:
        """The Hessian of each batch times its vector.

        Args:
            vectors: `(batch, parameter)`.

        Returns:
            The products, same shape.
        """
        pieces = vectors.split([p.numel() for p in self.operator.parameters], dim=1)
        columns = [piece.reshape(copy.shape) for piece, copy in zip(pieces, self._copies, strict=True)]
        with self.operator.quiet():
            parts = torch.autograd.grad(
                self._slopes, self._copies, columns, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        return self._flatten(parts) + self.operator.decay_product(vectors.T).T

    def _loss(self, weights: Sequence[Tensor], batch: Any) -> Tensor:
        operator = self.operator
        with lent(operator.model, dict(zip(operator.names, weights, strict=True))):
            return operator.loss(*operator.forward(operator.model, batch))

    def _flatten(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.detach().flatten(1) for part in parts], dim=1)


def stacked(batches: Sequence[Any]) -> Any:
    """Batches with their tensors stacked along a new first axis.

    Args:
        batches: nests of the same form.

    Returns:
        The nest of that form.

    Raises:
        ValueError: if the shapes differ.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        if len({one.shape for one in batches}) > 1:
            shapes = ", ".join(sorted({str(tuple(one.shape)) for one in batches}))
            raise ValueError(f"only batches of one shape can be stacked, not {shapes}: use stack=1, or drop_last.")
        return torch.stack(list(batches))
    if isinstance(first, Mapping):
        return {key: stacked([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple | list):
        parts = [stacked(list(items)) for items in zip(*batches, strict=True)]
        # A named tuple takes its fields one by one.
        return type(first)(*parts) if hasattr(first, "_fields") else parts
    raise ValueError(f"a {type(first).__name__} in a batch cannot be stacked: use stack=1.")
