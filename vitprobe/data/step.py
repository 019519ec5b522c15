"""What a step of an augmentation is: it draws the numbers of a whole batch, and applies those of any part of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]
"""Drawn numbers by name; the first dimension of each is `image`."""


class Step(ABC):
    """One step of an augmentation. Every image draws its own numbers.

    What becomes of an image depends on its own pixels and numbers alone, bit for bit, so a part of a batch comes out as
    that part of the whole. Functions whose last bit may depend on the place in a tensor (sin, exp, ...) are therefore
    evaluated where numbers are drawn.

    Attributes:
        after_normalisation: whether `apply` takes normalised float images; uint8 ones otherwise.
        drawn_on_device: whether numbers are drawn where the images are. Others are drawn on the CPU: they decide which
            images go through which kernel, and a GPU would have to be waited for.
    """

    after_normalisation = False
    drawn_on_device = False

    @abstractmethod
    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        """All numbers for a batch.

        Args:
            count: images.
            shape: of each, `(channel, y, x)`.
            generator: drawn from, on its device.

        Returns:
            The numbers by name, first dimension `image`.
        """

    @abstractmethod
    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """The images, changed as the numbers say.

        Args:
            images: `(image, channel, y, x)`, left as they are.
            parameters: of these images, on any device.

        Returns:
            Images of the same shape and dtype.
        """
