"""What a model answers, image by image: for probes that compare its accuracy under several conditions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitprobe.calling import Forward, logits_of, targets_of
from vitprobe.probes.targets import require_logits


def answers(model: nn.Module, batch: Any, forward: Forward) -> tuple[Tensor, Tensor]:
    """Which images of a batch a model gets right, and what it says of their labels.

    Args:
        model: the module, unwrapped, where the batch is.
        batch: images with class numbers.
        forward: `forward(model, batch)`.

    Returns:
        correct: 1 where the largest output is the label's, else 0 `(image,)`, in double precision. Where the outputs
            are not numbers, neither is this: NaN is no largest output, though `argmax` takes it for one.
        nll: negative log-likelihood of the label [nats] `(image,)`, in double precision.

    Raises:
        ValueError: if there are no targets, they are not class numbers that the model has, or the outputs are not
            `(image, class)`.
    """
    labels = targets_of(batch)
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point():
        what = f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"accuracy needs class numbers of shape (batch,), not {what}: give integers, without mixup.")
    logits = logits_of(forward(model, batch)).double()
    require_logits(logits, len(labels))
    labels = labels.to(logits.device).long()
    if int(labels.min()) < 0 or int(labels.max()) >= logits.shape[1]:
        raise ValueError(
            f"labels from {int(labels.min())} to {int(labels.max())} for a model of {logits.shape[1]} classes: give "
            "it the data set that it was made for."
        )
    nll = F.cross_entropy(logits, labels, reduction="none")
    correct = (logits.argmax(1) == labels).to(torch.float64)
    return correct.masked_fill(nll.isnan(), torch.nan), nll
