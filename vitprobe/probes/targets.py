"""Targets and logits that a cross-entropy over images can be taken of: checked once, for all probes of the loss."""

from typing import Any

from torch import Tensor, nn

from vitprobe.calling import images_of, targets_of
from vitprobe.probes.growing import fingerprint


def classes_needed(batch: Any) -> int:
    """How many classes a model must have for the targets of a batch.

    Args:
        batch: images with targets.

    Returns:
        The largest class number and one; or how many probabilities an image has.

    Raises:
        ValueError: if the targets are neither class numbers `(batch,)` from 0 on nor probabilities `(batch, class)`.
    """
    targets, images = targets_of(batch), len(images_of(batch))
    given = f"{targets.dtype} of {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
    wanted = f"targets are {given}: give class numbers ({images},)"
    if not isinstance(targets, Tensor):
        raise ValueError(f"{wanted} as a tensor.")
    if targets.is_floating_point():
        if targets.ndim != 2 or len(targets) != images:
            raise ValueError(f"{wanted} as integers, or probabilities ({images}, classes).")
        return targets.shape[1]
    if targets.shape != (images,):
        raise ValueError(f"{wanted}, or probabilities ({images}, classes) in floating point.")
    least, most = int(targets.min()), int(targets.max())
    if least < 0:
        raise ValueError(
            f"labels from {least} to {most}: a mean over images has no place for those without a class. Drop them, or "
            "give a loss= that leaves them out where there is that option."
        )
    return most + 1


def require_logits(logits: Tensor, images: int) -> None:
    """Refuse what a model gave for so many images if it is not `(batch, class)`.

    Raises:
        ValueError: if it is not.
    """
    if logits.ndim != 2 or len(logits) != images:
        raise ValueError(
            f"the model gave {tuple(logits.shape)} for {images} images, not (batch, class): give "
            "forward=lambda model, batch: ... that returns such logits."
        )


def fitting(logits: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Logits and targets as cross-entropy takes them; under `torch.func.vmap` too, since only shapes are looked at.

    Args:
        logits: what the model gave.
        targets: of the same images, checked by `classes_needed`.
        classes: how many are needed.

    Returns:
        The logits as they are, and the targets, class numbers in int64.

    Raises:
        ValueError: if the logits are not `(batch, class)`, or classes are missing.
    """
    require_logits(logits, len(targets))
    soft = targets.is_floating_point()
    if logits.shape[1] < classes or (soft and logits.shape[1] != targets.shape[1]):
        what = f"probabilities of {targets.shape[1]} classes" if soft else f"labels up to {classes - 1}"
        raise ValueError(f"{what} for a model of {logits.shape[1]} classes: give it the data set that it was made for.")
    return logits, targets if soft else targets.long()


def settings_of(loss: Any) -> Any:
    """A loss as a configuration has it: a module by its settings and tensors, which its class does not tell."""
    if not isinstance(loss, nn.Module):
        return loss
    settings = {
        ".".join(filter(None, (place, name))): value
        for place, module in loss.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and isinstance(value, bool | int | float | str | None)
    }
    tensors = {**dict(loss.named_parameters()), **dict(loss.named_buffers())}
    return {"module": type(loss), **settings, **({"tensors": fingerprint(tensors)} if tensors else {})}
