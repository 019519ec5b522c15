"""Loss and accuracy of a model on batches."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vitprobe.calling import evaluation_mode, logits_of
from vitprobe.ranks import Group, Ranks


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` measured, over images.

    Attributes:
        nll: mean negative log-likelihood of the label [nats].
        nll_se: its standard error over images [nats]; nan of one image.
        accuracy: share of images whose largest output is the label's.
        accuracy_se: its (binomial) standard error over images.
        images: how many images there were.
    """

    nll: float
    nll_se: float
    accuracy: float
    accuracy_se: float
    images: int


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    group: Group = None,
) -> Evaluation:
    """Mean negative log-likelihood and accuracy over all images, in evaluation mode.

    Every image counts the same, also in a short last batch. Afterwards every module is in the mode it was in.

    Args:
        model: takes `(batch, channel, height, width)`, gives `(batch, class)`.
        batches: any iterable of `(images, labels)`; labels are class numbers.
        device: where to compute; `None` is where the model is.
        group: processes of `torch.distributed` that have a part of the images each; every one gets the result of all.

    Raises:
        ValueError: if there is no image, or a label is not a class number.
    """
    device = torch.device(device) if device is not None else device_of(model)
    model.to(device)
    totals = torch.zeros(4, dtype=torch.float64, device=device)  # sums of loss, squared loss, hits, and images
    with evaluation_mode(model), torch.no_grad():
        for images, labels, *_ in batches:
            labels = labels.to(device, non_blocking=True)
            if labels.ndim != 1 or labels.is_floating_point():
                raise ValueError(
                    f"evaluate needs class numbers of shape (batch,), not {labels.dtype} of shape"
                    f" {tuple(labels.shape)}."
                )
            logits = logits_of(model(images.to(device, non_blocking=True))).double()
            loss = F.cross_entropy(logits, labels.long(), reduction="none")
            hits = (logits.argmax(1) == labels).sum()
            totals += torch.stack([loss.sum(), loss.square().sum(), hits.double(), torch.ones_like(loss).sum()])
    totals = Ranks(group, device).sum(totals)
    count = int(totals[3])
    if count == 0:
        raise ValueError("evaluate got no images: the batches are empty, or an iterator that was already used up.")
    nll, square, accuracy = (totals[:3] / count).tolist()
    return Evaluation(
        nll=nll,
        nll_se=(max(square - nll**2, 0.0) / (count - 1)) ** 0.5 if count > 1 else math.nan,
        accuracy=accuracy,
        accuracy_se=(accuracy * (1 - accuracy) / count) ** 0.5,
        images=count,
    )


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter is."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
