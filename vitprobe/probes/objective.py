"""The loss that curvature probes look at: any model, any batches, as one operator."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vitprobe.calling import as_batches, default_forward, images_of, logits_of, targets_of, to_model
from vitprobe.curvature import Decay, Loss, LossOperator


def drawn(batches: Iterable[Any], model: nn.Module) -> Iterator[Any]:
    """The batches one by one, each on the device and in the dtype of the model; an error if there are none.

    Args:
        batches: what the user gave.
        model: the module, unwrapped.

    Yields:
        The batches.

    Raises:
        ValueError: if there are none.
    """
    empty = True
    for batch in as_batches(batches):
        empty = False
        yield to_model(batch, model)
    if empty:
        raise ValueError("the batches were empty: an iterator that was used up, or a loader without images?")


def keep(batches: Iterable[Any], model: nn.Module) -> list[Any]:
    """The batches, drawn once and held where the model is, so that every product sees the same data.

    Args:
        batches: what the user gave.
        model: the module, unwrapped.

    Returns:
        The batches.

    Raises:
        ValueError: if there are none.
    """
    return list(drawn(batches, model))


def objective(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Loss = F.cross_entropy,
    weight_decay: float = 0.0,
    decay: Decay = "half_square",
    parameters: str | Sequence[str] = "*",
    dtype: torch.dtype | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> LossOperator:
    """The mean loss of a model over kept batches, as an operator.

    Args:
        model: the module, unwrapped.
        batches: from `keep`.
        loss: `loss(logits, targets)`, a mean over the batch.
        weight_decay: coefficient of the decay term.
        decay: which term, see `LossOperator`.
        parameters: glob patterns of parameter names.
        dtype: `torch.float64` computes on a copy in double precision.
        forward: `forward(model, batch)` for models that are called in another way.

    Returns:
        The operator.
    """
    call = forward or default_forward
    return LossOperator(
        model,
        batches,
        forward=lambda one, batch: (logits_of(call(one, batch)), targets_of(batch)),
        images=lambda batch: len(images_of(batch)),
        loss=loss,
        parameters=parameters,
        weight_decay=weight_decay,
        decay=decay,
        dtype=dtype,
    )
