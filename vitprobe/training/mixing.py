"""Soft targets: label smoothing, mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019)."""

import numpy as np
import torch
from torch import Tensor

from vitprobe.training.recipe import Recipe


def soft_targets(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Targets `(batch, class)`: `smoothing / num_classes` for every class, and the rest for the label's.

    Args:
        labels: `(batch,)`, integers from 0 to `num_classes - 1`.
        num_classes: number of classes.
        smoothing: share of the target that is spread evenly, the label's own class included.
    """
    even = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), even, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + even)


def mix_batch(images: Tensor, targets: Tensor, recipe: Recipe, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Mixes each image and target with those at the mirrored place in the batch, by mixup or by CutMix.

    One λ ~ Beta(α, α) is drawn for the whole batch. In CutMix the box has the area share 1 - λ before it is
    clipped at the image's border; targets are mixed by the area that is left after that.

    Args:
        images: `(batch, channel, height, width)`; not changed.
        targets: `(batch, class)`; not changed.
        recipe: gives `mixup`, `cutmix`, `mix_probability` and `mix_switch`.
        rng: where the draws come from. NumPy's, so that a GPU is never waited for.

    Returns:
        The mixed images and targets.
    """
    if not (recipe.mixup or recipe.cutmix) or rng.random() >= recipe.mix_probability:
        return images, targets
    switch = recipe.mix_switch if recipe.mixup and recipe.cutmix else float(recipe.cutmix > 0)
    if rng.random() < switch:
        height, width = images.shape[-2:]
        rows, columns = cutmix_box(height, width, rng.beta(recipe.cutmix, recipe.cutmix), rng)
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        share = 1 - area / (height * width)
        mixed = images.clone()
        mixed[..., rows, columns] = images.flip(0)[..., rows, columns]
    else:
        share = rng.beta(recipe.mixup, recipe.mixup)
        mixed = torch.lerp(images.flip(0), images, share)
    return mixed, torch.lerp(targets.flip(0), targets, share)


def cutmix_box(height: int, width: int, share: float, rng: np.random.Generator) -> tuple[slice, slice]:
    """Rows and columns of a box of area `1 - share` around a uniformly drawn centre, clipped at the edge."""
    rows, columns = (
        _interval(int(size * (1 - share) ** 0.5), int(rng.integers(size)), size) for size in (height, width)
    )
    return rows, columns


def _interval(length: int, centre: int, size: int) -> slice:
    start = centre - length // 2
    return slice(max(0, start), min(size, centre + length // 2))
