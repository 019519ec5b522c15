"""The loss of a model at many points of one plane through its weights, at the cost of calling the model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitprobe.calling import Forward, lent, logits_of, targets_of, uncached
from vitprobe.curvature import BatchNorm, Directions, movable
from vitprobe.probes.targets import classes_needed, fitting

Means = Callable[[np.ndarray], np.ndarray]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Cells:
    """Mean loss and accuracy of a model over kept batches with standard errors, at weights moved along directions.

    Args:
        model: the module, unwrapped.
        batches: from `keep`.
        forward: `forward(model, batch)`.
        reestimate: whether the running statistics of batch norm are computed anew at each point: the mean over the
            batches, each weighted by its images, with batch norm alone in training mode.
        stack: points that are computed at once by `vmap`.

    Raises:
        ValueError: if there are no targets that a cross-entropy takes, or no running statistics to compute anew.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], forward: Forward, *, reestimate: bool, stack: int
    ) -> None:
        self.model, self.forward, self.stack = model, uncached(forward), stack
        self.batches = []
        self.classes = max(map(classes_needed, batches))
        for batch in batches:
            targets = targets_of(batch)
            labels = targets if targets.ndim == 1 else targets.argmax(1)
            self.batches.append((batch, targets if targets.ndim == 1 else targets.double(), labels))
        self.count = sum(len(labels) for _, _, labels in self.batches)
        self.norms = {
            name: module
            for name, module in model.named_modules()
            if reestimate and isinstance(module, BatchNorm) and module.running_mean is not None
        }
        if reestimate and not self.norms:
            raise ValueError(
                "batch_norm='reestimated': this model has no batch norm with running statistics; leave the option out."
            )
        self.statistics = {
            f"{name}.{which}": tensor
            for name, module in self.norms.items()
            for which in STATISTICS
            if isinstance(tensor := getattr(module, which, None), Tensor)
        }

    @contextmanager
    def along(self, directions: Directions) -> Iterator[Means]:
        """Look along directions for the length of a `with`; afterwards the model is as it was.

        Args:
            directions: from `as_directions` or the like: every axis names the same tensors.

        Yields:
            A function of steps `(cell, axis)` that gives mean loss [nats], accuracy, and the standard errors of both
            over images `(cell, 4)`.
        """
        momenta = {module: module.momentum for module in self.norms.values()}
        # Statistics that are computed anew need not move.
        own = {name: tensor for name, tensor in movable(self.model).items() if name not in self.statistics}
        names = [name for name in directions.axes[0] if name in own]
        axes = [[axis[name] for name in names] for axis in directions.axes]
        try:
            if self.stack == 1:
                with self._one_by_one([own[name] for name in names], axes) as means:
                    yield means
            else:
                origins = {name: own[name].detach() for name in names}
                yield lambda steps: self._at_once(origins, axes, steps)
        finally:
            for module, momentum in momenta.items():
                module.momentum = momentum

    @contextmanager
    def _one_by_one(self, tensors: list[Tensor], axes: list[list[Tensor]]) -> Iterator[Means]:
        """The model's tensors stand on storage of ours meanwhile: calls cost nothing extra, theirs is never written."""
        borrowed = [*tensors, *self.statistics.values()]
        theirs = [tensor.data for tensor in borrowed]
        origins = theirs[: len(tensors)]
        try:
            for tensor in borrowed:
                tensor.data = tensor.data.clone()
            moved = [tensor.data for tensor in tensors]

            def means(steps: np.ndarray) -> np.ndarray:
                cells = []
                for cell in steps.tolist():
                    torch._foreach_copy_(moved, origins)
                    for step, axis in zip(cell, axes, strict=True):
                        torch._foreach_add_(moved, torch._foreach_mul(axis, step))
                    for module in self.norms.values():
                        module.reset_running_stats()
                    cells.append(self._means(lambda batch: logits_of(self.forward(self.model, batch))))
                return torch.stack(cells).cpu().numpy()

            yield means
        finally:
            for tensor, data in zip(borrowed, theirs, strict=True):
                tensor.data = data

    def _at_once(self, origins: dict[str, Tensor], axes: list[list[Tensor]], steps: np.ndarray) -> np.ndarray:
        def column(values: np.ndarray, like: Tensor) -> Tensor:
            return torch.from_numpy(values).to(like).view(-1, *[1] * like.ndim)

        stacked = {}
        for name, origin, *along in zip(origins, origins.values(), *axes, strict=True):
            stacked[name] = origin.expand(len(steps), *origin.shape)
            for values, direction in zip(steps.T, along, strict=True):
                stacked[name] = stacked[name] + column(values, direction) * direction
        for name, tensor in self.statistics.items():
            start = 1 if name.endswith("running_var") else 0
            stacked[name] = torch.full((len(steps), *tensor.shape), start, dtype=tensor.dtype, device=tensor.device)

        def cell(named: dict[str, Tensor]) -> Tensor:
            with lent(self.model, named):
                return self._means(lambda batch: logits_of(self.forward(self.model, batch)))

        try:
            with sdpa_kernel(SDPBackend.MATH):  # not every fused kernel can be stacked
                return vmap(cell)(stacked).cpu().numpy()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"stack={self.stack}: this model cannot be computed at several weights at once ({reason}). Use stack=1."
            ) from error

    def _means(self, call: Callable[[Any], Tensor]) -> Tensor:
        """Mean loss, accuracy, and the standard errors of both `(4,)`, still on the device."""
        self._reestimate(call)
        sums = torch.zeros(2, dtype=torch.float64, device=self.batches[0][2].device)
        each = []
        for batch, targets, labels in self.batches:
            logits, targets = fitting(call(batch).double(), targets, self.classes)
            nll = F.cross_entropy(logits, targets, reduction="sum")
            each.append(F.cross_entropy(logits, targets, reduction="none"))
            sums = sums + torch.stack([nll, (logits.argmax(1) == labels).sum().double()])
        means = sums / self.count
        # Of one image there is no standard error: 0 / 0. That of answers which are right or wrong is a binomial one.
        variance = torch.stack([(torch.cat(each) - means[0]).square().mean(), means[1] * (1 - means[1])])
        return torch.cat([means, (variance / (self.count - 1)).sqrt()])

    def _reestimate(self, call: Callable[[Any], Tensor]) -> None:
        if not self.norms:
            return
        for module in self.norms.values():
            module.training = True
        seen = 0
        for batch, _, labels in self.batches:
            seen += len(labels)
            for module in self.norms.values():
                module.momentum = len(labels) / seen
            call(batch)
        for module in self.norms.values():
            module.training = False
