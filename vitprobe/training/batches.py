"""Batches as a training sees them, drawn once: what curvature is measured on."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitprobe.seeds import derive_seed
from vitprobe.training.mixing import mix_batch, soft_targets
from vitprobe.training.recipe import Recipe

if TYPE_CHECKING:
    from vitprobe.data import ImageData


class TrainingBatches:
    """Batches `(images, targets)` of the training images, augmented, smoothed and mixed as a recipe says.

    Park & Kim 2022 take their Hessian spectra over batches of 16 from a tenth of the training set, with the training's
    own augmentation and targets. Everything is drawn from the seed, so that each pass gives the same batches, for all
    models and checkpoints that are compared.

    Args:
        data: the images.
        recipe: gives `augment`, `label_smoothing`, `mixup`, `cutmix` and how often.
        batch_size: images in a batch; mixing stays inside it.
        share: of the training images, above 0 and at most 1; full batches only, and at least one.
        seed: of order, augmentation and mixing.
        device: where the batches are made.

    Raises:
        ValueError: if the share or the batch size gives no batch.
    """

    def __init__(
        self,
        data: "ImageData",
        recipe: Recipe,
        *,
        batch_size: int = 16,
        share: float = 0.1,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} of the training images: give a number above 0 and at most 1.")
        self.recipe = recipe
        self.seed = seed
        self.num_classes = data.num_classes
        self.loader = data.loader(
            "train",
            batch_size=batch_size,
            device=device,
            seed=derive_seed(seed, "training batches"),
            augment=recipe.augment,
            drop_last=True,
        )
        mixing = {name: getattr(recipe, name) for name in ("label_smoothing", "mixup", "cutmix")}
        self.description = self.loader.description | mixing
        self.count = min(len(self.loader), max(1, round(share * len(data.train) / batch_size)))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rng = np.random.default_rng(derive_seed(self.seed, "mixing of batches"))
        for _, (images, labels) in zip(range(self.count), self.loader, strict=False):
            targets = soft_targets(labels, self.num_classes, self.recipe.label_smoothing)
            yield mix_batch(images, targets, self.recipe, rng)
