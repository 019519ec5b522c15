"""Augmentation of uint8 batches on the device: every sample draws its own numbers, all samples at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vitprobe.names import unknown

Augmentation = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def shift(images: torch.Tensor, down: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Moves each image by its own offset, at most an eighth of its size; what comes in from outside is black.

    Args:
        images: `(image, channel, y, x)`.
        down: `(image,)` rows [px] by which the content moves down; negative moves it up.
        right: `(image,)` columns [px] by which the content moves right; negative moves it left.

    Returns:
        The moved images, same shape and dtype.
    """
    height, width = images.shape[-2:]
    pad_y, pad_x = height // 8, width // 8
    padded = F.pad(images, (pad_x, pad_x, pad_y, pad_y))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (image, channel, top, left, y, x)
    image = torch.arange(len(images), device=images.device)
    return windows[image, :, pad_y - down, pad_x - right]


def _none(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return images


def _crop(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    def draw(size: int) -> torch.Tensor:
        pad = size // 8
        return torch.randint(-pad, pad + 1, (len(images),), generator=generator, device=images.device)

    return shift(images, draw(images.shape[-2]), draw(images.shape[-1]))


def _flip(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    mirrored = torch.randint(2, (len(images), 1, 1, 1), generator=generator, device=images.device).bool()
    return torch.where(mirrored, images.flip(-1), images)


def _crop_flip(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return _flip(_crop(images, generator), generator)


_AUGMENTATIONS: dict[str, Augmentation] = {
    "none": _none,
    "crop": _crop,
    "flip": _flip,
    "crop_flip": _crop_flip,
}


def augmentation(name: str) -> Augmentation:
    """The augmentation of that name, a function of uint8 images `(image, channel, y, x)` and a generator.

    - `none`: the images as they are.
    - `crop`: black padding of an eighth of the size (4 px at 32) on all sides, then a random window of the
      size before.
    - `flip`: left and right exchanged with probability 1/2.
    - `crop_flip`: both, the base augmentation of CIFAR training.

    Args:
        name: one of the names above.

    Returns:
        A function that draws from the generator it is given, which must live on the images' device.

    Raises:
        ValueError: the name is none of these.
    """
    if name not in _AUGMENTATIONS:
        raise unknown("augmentation", name, _AUGMENTATIONS)
    return _AUGMENTATIONS[name]
