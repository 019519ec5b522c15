"""The loss of a model over fixed batches, as a function of its parameters: value, gradient, curvature products."""

import copy
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitprobe.calling import evaluation_mode

Loss = Callable[[Tensor, Any], Tensor]
Product = Literal["hessian", "gauss_newton"]


class LossOperator:
    """The mean loss over fixed batches as a function of chosen parameters, flattened into one vector.

    `L(w) = sum_b n_b L_b(w) / sum_b n_b + weight_decay / 2 * |w|^2`, batches weighted by their images, so that the
    operator of several batches is that of their union. The model is in evaluation mode while it is evaluated
    (batch norm in training mode would make the loss of an image depend on the others), attention runs under the math
    kernel (fused kernels have no second derivative), autocast is off; gradients, modes and flags are handed back as
    they were.

    Args:
        model: the module, unwrapped.
        batches: what `forward` takes; kept, and never drawn anew.
        forward: `forward(model, batch) -> (logits, targets)`.
        loss: `loss(logits, targets)`, a mean over the batch.
        images: number of images of a batch.
        parameters: glob patterns of parameter names; trainable parameters that match are the variables.
        weight_decay: coefficient of `|w|^2 / 2`, which shifts every eigenvalue of the Hessian by as much.
        dtype: `torch.float64` computes on a copy in double precision; `None` keeps the model's own.

    Raises:
        ValueError: if no parameter matches, there are no batches, or the loss is not finite or not deterministic.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        *,
        forward: Callable[[nn.Module, Any], tuple[Tensor, Any]],
        images: Callable[[Any], int],
        loss: Loss = F.cross_entropy,
        parameters: str | Sequence[str] = "*",
        weight_decay: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not batches:
            raise ValueError("a loss needs at least one batch.")
        self.model = model if dtype is None else copy.deepcopy(model).to(dtype)
        self.batches = list(batches)
        self.forward = forward
        self.loss = loss
        self.weight_decay = weight_decay
        patterns = [parameters] if isinstance(parameters, str) else list(parameters)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        chosen = {name: p for name, p in named.items() if any(fnmatch.fnmatchcase(name, one) for one in patterns)}
        if not chosen:
            raise ValueError(f"no trainable parameter matches {patterns}; the model has {', '.join(named) or 'none'}.")
        self.names = list(chosen)
        self.parameters = list(chosen.values())
        self.size = sum(p.numel() for p in self.parameters)
        weights = [images(batch) for batch in self.batches]
        self.shares = [weight / sum(weights) for weight in weights]
        self.products = 0
        self._graph: tuple[Tensor, list[Tensor]] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the products."""
        return self.parameters[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the products are computed."""
        return self.parameters[0].device

    def point(self) -> Tensor:
        """The parameters themselves `(parameter,)`, a copy."""
        return self._flatten([p.detach() for p in self.parameters])

    def value(self) -> float:
        """The loss at the parameters."""
        with self._quiet(), torch.no_grad():
            total = sum(share * self._batch_loss(b).double() for b, share in enumerate(self.shares))
        return float(total) + self._decay()

    def gradient(self) -> Tensor:
        """The gradient of the loss `(parameter,)`."""
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for b, share in enumerate(self.shares):
            with self._quiet():
                total.add_(self._flatten(self._gradients(self._batch_loss(b))), alpha=share)
        return total.add_(self.point(), alpha=self.weight_decay)

    def product(self, vectors: Tensor, *, of: Product = "hessian") -> Tensor:
        """Curvature times vectors, exact to rounding: `(parameter,)` or `(parameter, vector)` to the same shape.

        Each batch is linearised once for all vectors; with a single batch the linearisation is kept for the
        operator's life.

        Args:
            vectors: one vector, or several as columns.
            of: `"hessian"`, or `"gauss_newton"` (the Hessian without the network's own second derivative: positive
                semi-definite for convex losses).

        Returns:
            The products.
        """
        columns = vectors[:, None] if vectors.ndim == 1 else vectors
        result = columns * self.weight_decay
        for b, share in enumerate(self.shares):
            with self._quiet():
                for i, part in enumerate(self._batch_products(b, columns, of)):
                    result[:, i].add_(part, alpha=share)
        self.products += columns.shape[1]
        return result[:, 0] if vectors.ndim == 1 else result

    def _batch_products(self, b: int, columns: Tensor, of: Product) -> Iterator[Tensor]:
        if of == "gauss_newton":
            yield from self._gauss_newton(b, columns)
            return
        gradients = self._linearised(b)
        for column in columns.T:
            parts = torch.autograd.grad(
                gradients,
                self.parameters,
                grad_outputs=self._split(column),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            yield self._flatten(parts)

    def _linearised(self, b: int) -> list[Tensor]:
        """The gradient of one batch with its graph."""
        if self._graph is not None:
            return self._graph[1]
        loss = self._batch_loss(b)
        gradients = self._gradients(loss, create_graph=True)
        if len(self.batches) == 1:
            self._graph = (loss, gradients)
        return gradients

    def _gauss_newton(self, b: int, columns: Tensor) -> Iterator[Tensor]:
        """J^T H_loss J v, where J is the Jacobian of the logits."""
        logits, targets = self.forward(self.model, self.batches[b])
        inner = logits.detach().requires_grad_()
        slope = torch.autograd.grad(self.loss(inner, targets), inner, create_graph=True)[0]
        # Double-backward trick: the transposed product J^T u is linear in a dummy u, and its derivative is J v.
        dummy = torch.zeros_like(logits, requires_grad=True)
        pulled = torch.autograd.grad(
            logits, self.parameters, dummy, create_graph=True, allow_unused=True, materialize_grads=True
        )
        for column in columns.T:
            pushed = torch.autograd.grad(pulled, dummy, self._split(column), retain_graph=True)[0]
            curved = torch.autograd.grad(slope, inner, pushed, retain_graph=True)[0]
            parts = torch.autograd.grad(
                logits, self.parameters, curved, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            yield self._flatten(parts)

    def _batch_loss(self, b: int) -> Tensor:
        logits, targets = self.forward(self.model, self.batches[b])
        loss = self.loss(logits, targets)
        if loss.ndim:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}: give one that returns the mean over the batch.")
        if not torch.isfinite(loss.detach()):
            raise ValueError(f"the loss of batch {b} is {loss.item()}: curvature there means nothing.")
        return loss

    def _gradients(self, loss: Tensor, *, create_graph: bool = False) -> list[Tensor]:
        return list(
            torch.autograd.grad(
                loss, self.parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
            )
        )

    def _decay(self) -> float:
        return 0.5 * self.weight_decay * float(self.point().double().square().sum())

    def _flatten(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.detach().reshape(-1) for part in parts])

    def _split(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.to(self.dtype).split([p.numel() for p in self.parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Evaluation mode, the math kernel, no autocast, other parameters frozen; all restored on any exit."""
        flags = {p: p.requires_grad for p in self.model.parameters()}
        try:
            for p in flags:
                p.requires_grad_(False)
            for p in self.parameters:
                p.requires_grad_(True)
            with (
                evaluation_mode(self.model),
                torch.enable_grad(),
                sdpa_kernel(SDPBackend.MATH),
                torch.autocast(self.device.type, enabled=False),
            ):
                yield
        finally:
            for p, flag in flags.items():
                p.requires_grad_(flag)
