"""The loss of a model over fixed batches, as a function of its parameters: value, gradient, curvature products."""

import copy
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitprobe.calling import eager, evaluation_mode, same_buffers, uncached
from vitprobe.curvature.lanczos import norm
from vitprobe.names import unknown
from vitprobe.ranks import Group, Ranks

Loss = Callable[[Tensor, Any], Tensor]
Product = Literal["hessian", "gauss_newton"]
Decay = Literal["half_square", "sum_of_norms"]
DECAYS = ("half_square", "sum_of_norms")
BatchNorm = nn.modules.batchnorm._BatchNorm  # all of them, also over ranks; PyTorch has no public name for that


class LossOperator:
    """The mean loss over fixed batches as a function of chosen parameters, flattened into one vector.

    `L(w) = sum_b n_b L_b(w) / sum_b n_b + weight_decay * decay(w)`, batches weighted by their images, so that the
    operator of several batches is that of their union. The model is in evaluation mode while it is evaluated
    (batch norm in training mode would make the loss of an image depend on the others), attention runs under the math
    kernel (fused kernels have no second derivative), autocast and TF32 are off; gradients, modes and flags are handed
    back as they were.

    With a group the batches of all its processes count together: each goes through its own, and values, gradients and
    products are summed, to the last bit the same on all. Every rank then calls the same methods in the same order,
    with the same vectors.

    Args:
        model: the module, unwrapped.
        batches: what `forward` takes; gone through once for each product, and the same every time. Of a group a
            process may have none.
        forward: `forward(model, batch) -> (logits, targets)`.
        loss: `loss(logits, targets)`, a mean over the batch.
        images: gives the number of images of a batch.
        parameters: glob patterns of parameter names; trainable parameters that match are the variables.
        weight_decay: coefficient of the decay term.
        decay: `"half_square"`: `|w|^2 / 2`, which shifts every eigenvalue of the Hessian by the coefficient;
            `"sum_of_norms"`: the sum over tensors of their lengths, unsquared, as Park & Kim's code adds it up.
        dtype: `torch.float64` computes on a copy in double precision; `None` keeps the model's own.
        group: a group of `torch.distributed`; `None` is this process alone.

    Attributes:
        images: images in each of this process's batches.
        total: images in all batches, of all processes.

    Raises:
        ValueError: if no parameter matches or one is in half precision, there are no batches, the loss is not finite
            or not the same twice, batch norm would take its statistics from the batch, the sum of norms has no
            derivative, or another rank fails.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        forward: Callable[[nn.Module, Any], tuple[Tensor, Any]],
        images: Callable[[Any], int],
        loss: Loss = F.cross_entropy,
        parameters: str | Sequence[str] = "*",
        weight_decay: float = 0.0,
        decay: Decay = "half_square",
        dtype: torch.dtype | None = None,
        group: Group = None,
    ) -> None:
        if decay not in DECAYS:
            raise unknown("decay", decay, DECAYS)
        _refuse_batch_statistics(model)
        _refuse_weight_norm(model)
        self.model = model if dtype is None else copy.deepcopy(model).to(dtype)
        self.batches = batches
        self.forward = uncached(forward)
        self.loss = loss
        self.weight_decay = weight_decay
        self.decay = decay
        chosen = {name: p for name, p in matching(self.model, parameters).items() if p.requires_grad}
        if not chosen:
            named = [name for name, p in self.model.named_parameters() if p.requires_grad]
            patterns = [parameters] if isinstance(parameters, str) else list(parameters)
            raise ValueError(f"no trainable parameter matches {patterns}; the model has {', '.join(named) or 'none'}.")
        self.names = list(chosen)
        self.parameters = list(chosen.values())
        if torch.is_inference_mode_enabled() or any(p.is_inference() for p in self.model.parameters()):
            raise ValueError(
                "curvature needs gradients, which torch.inference_mode() rules out: call it outside, with a model that "
                "was built outside."
            )
        if half := next((p.dtype for p in self.parameters if p.dtype in (torch.float16, torch.bfloat16)), None):
            raise ValueError(
                f"weights in {half} are too coarse for second derivatives (percents off, or not finite): "
                "dtype=torch.float32 computes on a copy in single precision."
            )
        self.size = sum(p.numel() for p in self.parameters)
        self.ranks = Ranks(group, self.device)
        with self.ranks.together():
            self.images = [images(batch) for batch in batches]
        self.total = sum(self.ranks.gathered(sum(self.images)))
        if not self.total:
            raise ValueError("a loss needs at least one batch.")
        self.shares = [count / self.total for count in self.images]
        self.products = 0
        self._graph: tuple[Tensor, list[Tensor]] | None = None
        self._repeatable = False
        if weight_decay and decay == "sum_of_norms":
            self._refuse_zeros()

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
        total = 0.0
        with self.ranks.together():
            for b, batch, share in self._parts():
                if self._graph is not None:
                    total += share * self._graph[0].item()
                    continue
                with self.quiet(), torch.no_grad():
                    total += share * self._batch_loss(b, batch).item()
        return sum(self.ranks.gathered(total)) + self.decay_value()

    def gradient(self) -> Tensor:
        """The gradient of the loss `(parameter,)`."""
        total = self._once(self.decay_gradient())
        with self.ranks.together():
            for b, batch, share in self._parts():
                with self.quiet():
                    # With a single batch a product will want the graph anyway.
                    single = len(self.shares) == 1
                    slopes = self._linearised(b, batch) if single else self._gradients(self._batch_loss(b, batch))
                    total.add_(self._flatten(slopes), alpha=share)
        return self.ranks.sum(total)

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
        result = self._once(self.decay_product(columns))
        with self.ranks.together():
            for b, batch, share in self._parts():
                with self.quiet():
                    for i, part in enumerate(self._batch_products(b, batch, columns, of)):
                        result[:, i].add_(part, alpha=share)
        result = self.ranks.sum(result)
        self.products += columns.shape[1]
        return result[:, 0] if vectors.ndim == 1 else result

    def _once(self, decay: Tensor) -> Tensor:
        """What a sum over ranks is to hold a single time: here on the first of them, zeros on others."""
        return decay if self.ranks.first else decay.zero_()

    def _parts(self) -> Iterator[tuple[int, Any, float]]:
        """Number, batch and share of each batch."""
        for b, (batch, share) in enumerate(zip(self.batches, self.shares, strict=True)):
            yield b, batch, share

    def _batch_products(self, b: int, batch: Any, columns: Tensor, of: Product) -> Iterator[Tensor]:
        if of == "gauss_newton":
            yield from self._gauss_newton(batch, columns)
            return
        gradients = self._linearised(b, batch)
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

    def _linearised(self, b: int, batch: Any) -> list[Tensor]:
        """The gradient of one batch with its graph."""
        if self._graph is not None:
            return self._graph[1]
        loss = self._batch_loss(b, batch)
        gradients = self._gradients(loss, create_graph=True)
        if len(self.shares) == 1:
            self._graph = (loss, gradients)
        return gradients

    def _gauss_newton(self, batch: Any, columns: Tensor) -> Iterator[Tensor]:
        """J^T H_loss J v, where J is the Jacobian of the logits."""
        logits, targets = self.forward(self.model, batch)
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

    def decay_value(self) -> float:
        """The decay term."""
        lengths = [norm(p.detach().flatten()) for p in self.parameters]
        squared = self.decay == "half_square"
        return self.weight_decay * sum(0.5 * length**2 if squared else length for length in lengths)

    def decay_gradient(self) -> Tensor:
        """Gradient of the decay term `(parameter,)`."""
        if self.decay == "half_square" or not self.weight_decay:
            return self.point() * self.weight_decay
        return self._flatten(p / norm(p.detach().flatten()) for p in self.parameters) * self.weight_decay

    def decay_product(self, columns: Tensor) -> Tensor:
        """Hessian of the decay term times vectors `(parameter, vector)`, new memory."""
        result = columns * self.weight_decay
        if self.decay == "half_square" or not self.weight_decay:
            return result
        # The length of a tensor p curves by (1 - p p' / |p|^2) / |p|.
        for rows, p in zip(result.split([p.numel() for p in self.parameters]), self.parameters, strict=True):
            length = norm(p.detach().flatten())
            unit = p.detach().flatten() / length
            rows.sub_(unit.outer(unit @ rows)).div_(length)
        return result

    def _refuse_zeros(self) -> None:
        zeros = [name for name, p in zip(self.names, self.parameters, strict=True) if not p.detach().any()]
        if zeros:
            raise ValueError(
                f"decay='sum_of_norms' has no derivative where a whole tensor is zero: {', '.join(zeros)}. Choose "
                "other parameters=, or decay='half_square'."
            )

    def _batch_loss(self, b: int, batch: Any) -> Tensor:
        loss = self.loss(*self.forward(self.model, batch))
        if loss.ndim:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}: give one that returns the mean over the batch.")
        require_finite(b, loss.item())
        self.require_repeatable(b, batch, loss.item())
        return loss

    def require_repeatable(self, b: int, batch: Any, first: float) -> None:
        """Refuse a loss that is no function of the parameters; asked once, for one more forward pass.

        Args:
            b: number of the batch.
            batch: the batch.
            first: its loss.

        Raises:
            ValueError: if the loss is another when computed again, or batch norm is in training mode.
        """
        if self._repeatable:
            return
        with torch.no_grad():
            second = self.loss(*self.forward(self.model, batch)).item()
        if abs(first - second) > 1e-4 * max(abs(first), 1e-4):
            raise ValueError(
                f"the loss of batch {b} is {first:.6g} at first and {second:.6g} when computed again: the model draws "
                "random numbers in evaluation mode (dropout called with training=True?), or forward draws new data."
            )
        training = [n for n, m in self.model.named_modules() if isinstance(m, BatchNorm) and m.training]
        if training:
            raise ValueError(
                f"forward puts batch norm in training mode ({training[0]}), where the loss of an image depends on the "
                "others of its batch: leave the model in evaluation mode."
            )
        self._repeatable = True

    def _gradients(self, loss: Tensor, *, create_graph: bool = False) -> list[Tensor]:
        return list(
            torch.autograd.grad(
                loss, self.parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
            )
        )

    def _flatten(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.detach().reshape(-1) for part in parts])

    def _split(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.to(self.dtype).split([p.numel() for p in self.parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Evaluation mode, the math kernel, no autocast, other parameters frozen, and random numbers put back."""
        flags = {p: p.requires_grad for p in self.model.parameters()}
        try:
            for p in flags:
                p.requires_grad_(False)
            for p in self.parameters:
                p.requires_grad_(True)
            with (
                torch.random.fork_rng([self.device] if self.device.type == "cuda" else []),
                evaluation_mode(self.model),
                same_buffers(self.model),
                eager(),
                torch.enable_grad(),
                sdpa_kernel(SDPBackend.MATH),
                torch.autocast(self.device.type, enabled=False),
                _ieee_float32(),
            ):
                yield
        finally:
            for p, flag in flags.items():
                p.requires_grad_(flag)


def matching(model: nn.Module, parameters: str | Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters, trainable or frozen, whose names match one of some glob patterns."""
    patterns = [parameters] if isinstance(parameters, str) else list(parameters)
    named = model.named_parameters()
    return {name: p for name, p in named if any(fnmatch.fnmatchcase(name, one) for one in patterns)}


def require_finite(b: int, loss: float) -> None:
    """Refuse a loss that is not a number, by the number of its batch."""
    if not math.isfinite(loss):
        raise ValueError(f"the loss of batch {b} is {loss}: curvature there means nothing.")


def _refuse_weight_norm(model: nn.Module) -> None:
    """PyTorch's own second derivative of `torch._weight_norm` is none: dense, it is not even symmetric (torch 2.14)."""
    for name, module in model.named_modules():
        hooks = (*module._forward_pre_hooks.values(), module)
        if any(type(hook).__name__ in ("WeightNorm", "_WeightNorm") for hook in hooks):
            raise TypeError(
                f"{name} has weight norm, whose second derivative PyTorch computes wrongly: take it out first, by "
                "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight') or "
                "torch.nn.utils.remove_weight_norm(layer)."
            )


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"{name} is a batch norm without running statistics, which takes those of the batch also in evaluation "
                "mode: the loss of an image then depends on the others, and a mean over batches means nothing. Build "
                "it with track_running_stats=True."
            )


@contextmanager
def _ieee_float32() -> Iterator[None]:
    """Whole float32 products on a GPU: TF32 keeps ten bits of them."""
    cudnn: Any = torch.backends.cudnn
    kinds, name, value = [torch.backends.cuda.matmul, cudnn], "allow_tf32", cast(Any, False)
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # since PyTorch 2.9, and not to be mixed with the other
        kinds, name, value = [torch.backends.cuda.matmul, cudnn.conv], "fp32_precision", "ieee"
    before = [getattr(kind, name) for kind in kinds]
    try:
        for kind in kinds:
            setattr(kind, name, value)
        yield
    finally:
        for kind, old in zip(kinds, before, strict=True):
            setattr(kind, name, old)
