"""The loss that curvature probes look at: any model, any batches, as one operator."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitprobe.calling import as_batches, default_forward, images_of, logits_of, same_random, targets_of, to_model
from vitprobe.curvature import Decay, Loss, LossOperator
from vitprobe.probes.targets import classes_needed, fitting
from vitprobe.ranks import Group, Ranks

NO_BATCHES = "the batches were empty: an iterator that was used up, or a loader without images?"


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
        raise ValueError(NO_BATCHES)


def keep(batches: Iterable[Any], model: nn.Module, ranks: Ranks | None = None) -> list[Any]:
    """The batches, drawn once and held where the model is, so that every product sees the same data.

    Random numbers that the loader draws are put back.

    Args:
        batches: what the user gave.
        model: the module, unwrapped.
        ranks: the processes that have batches of their own each; unless given, this one alone.

    Returns:
        The batches of this process.

    Raises:
        ValueError: if there are none, in any of the processes.
    """
    ranks = ranks or Ranks(None)
    with ranks.together(), same_random(model):
        kept = [to_model(batch, model) for batch in as_batches(batches)]
    if not any(ranks.gathered(bool(kept))):
        raise ValueError(NO_BATCHES)
    return kept


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
    group: Group = None,
) -> LossOperator:
    """The mean loss of a model over kept batches, as an operator.

    Args:
        model: the module, unwrapped.
        batches: from `keep`.
        loss: `loss(logits, targets)`, a mean over the batch. Of cross-entropy, logits and targets are checked.
        weight_decay: coefficient of the decay term.
        decay: which term, see `LossOperator`.
        parameters: glob patterns of parameter names.
        dtype: `torch.float64` computes on a copy in double precision.
        forward: `forward(model, batch)` for models that are called in another way.
        group: the processes whose batches count together.

    Returns:
        The operator.

    Raises:
        ValueError: as `LossOperator`, and if cross-entropy cannot be taken of the logits and targets.
    """
    call = forward or default_forward
    classes: int | None = None
    if loss is F.cross_entropy:
        with Ranks(group, next(model.parameters()).device).together():
            classes = max(map(classes_needed, batches), default=0)

    def answered(one: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        logits, targets = logits_of(call(one, batch)), targets_of(batch)
        return (logits, targets) if classes is None else fitting(logits, targets, classes)

    return LossOperator(
        model,
        batches,
        forward=answered,
        images=lambda batch: len(images_of(batch)),
        loss=loss,
        parameters=parameters,
        weight_decay=weight_decay,
        decay=decay,
        dtype=dtype,
        group=group,
    )
