"""Steps that draw a box in the image: crops resized to the image's size, and random erasing."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vitprobe.data.step import Parameters, Step

TRIES = 10
"""How often a box is drawn that does not fit."""
_PRECISION = 22
"""Bits of the weights in Pillow's resize."""


def _draw_boxes(
    count: int,
    largest: tuple[int, int],
    areas: tuple[float, float],
    ratio: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Heights and widths `(image,)` of the first boxes that fit, and whether any did.

    The area is uniform, the ratio of the sides log-uniform between `1 / ratio` and `ratio`.

    Args:
        count: images.
        largest: height and width that still fit [px].
        areas: smallest and largest area [px²].
        ratio: largest ratio of the sides.
        generator: drawn from.
    """
    random = torch.rand((2, count, TRIES), generator=generator, device=generator.device, dtype=torch.float64)
    area = areas[0] + (areas[1] - areas[0]) * random[0]
    root = ((2 * random[1] - 1) * (math.log(ratio) / 2)).exp()
    height, width = (area.sqrt() / root).round(), (area.sqrt() * root).round()
    fits = (height > 0) & (height <= largest[0]) & (width > 0) & (width <= largest[1])
    first = fits.byte().argmax(1, keepdim=True)
    return (
        height.gather(1, first).squeeze(1).long(),
        width.gather(1, first).squeeze(1).long(),
        fits.any(1),
    )


def _draw_place(room: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform integers from 0 to `room`, `(image,)`."""
    random = torch.rand(room.shape, generator=generator, device=generator.device, dtype=torch.float64)
    return (random * (room + 1)).long()


@dataclass
class ResizedCrop(Step):
    """A box of the image, enlarged to the image's size (Szegedy et al. 2015, as in torchvision).

    Linear interpolation, rounded to grey levels after each of the two axes, first along rows, as in Pillow.

    Args:
        low: smallest share of the image's area; the share is uniform from here to 1.
        ratio: largest ratio of the sides of the box; log-uniform from its inverse.
    """

    low: float
    ratio: float = 4 / 3

    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        """See `Step`."""
        full = shape[-2], shape[-1]
        pixels = full[0] * full[1]
        *drawn, fits = _draw_boxes(count, full, (self.low * pixels, pixels), self.ratio, generator)
        height, width = (torch.where(fits, one, whole) for one, whole in zip(drawn, self._largest(*full), strict=True))
        spare = full[0] - height, full[1] - width
        # A box of which none fitted sits in the middle.
        top, left = (torch.where(fits, _draw_place(room, generator), room // 2) for room in spare)
        return {"top": top, "left": left, "height": height, "width": width}

    def _largest(self, height: int, width: int) -> tuple[int, int]:
        return min(height, round(width * self.ratio)), min(width, round(height * self.ratio))

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """See `Step`."""
        here = {name: numbers.to(images.device, non_blocking=True) for name, numbers in parameters.items()}
        wide = _enlarged(images.mT, here["left"], here["width"]).mT
        return _enlarged(wide, here["top"], here["height"])


def _enlarged(images: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """`length` rows from `start` on, spread over all rows, in the integers of Pillow's resize."""
    count, channels, size, width = images.shape
    position = torch.arange(size, dtype=torch.float64, device=images.device) + 0.5
    position = (position * (length.double() / size).unsqueeze(1) - 0.5).clamp_(min=0)
    first = position.long()
    share = position - first
    image = torch.arange(count * channels, device=images.device).reshape(count, channels, 1) * size
    rows = images.reshape(-1, width)

    def weighted(index: Tensor, weight: Tensor) -> Tensor:
        index = start.unsqueeze(1) + torch.minimum(index, length.unsqueeze(1) - 1)
        weight = (weight * 2**_PRECISION + 0.5).int()[:, None, :, None]
        return rows.index_select(0, (image + index.unsqueeze(1)).flatten()).reshape(images.shape).int().mul_(weight)

    mixed = weighted(first, 1 - share).add_(weighted(first + 1, share))
    return mixed.add_(2 ** (_PRECISION - 1)).bitwise_right_shift_(_PRECISION).to(torch.uint8)


def _along(numbers: Tensor, dim: int) -> Tensor:
    """`(image, place)` as `(image, 1, place, 1)` or `(image, 1, 1, place)`."""
    return numbers[:, None, :, None] if dim == 2 else numbers[:, None, None, :]


@dataclass
class Erase(Step):
    """A box of the image painted over (Zhong et al. 2020, as in timm), after normalisation.

    Its share of the area is uniform between 0.02 and 1/3 and its ratio of sides log-uniform between 0.3 and 1/0.3; it
    is smaller than the image in either direction.

    Args:
        probability: share of the images that get a box.
        noise: whether it is filled with normal noise, a number for every pixel and channel; with zeros otherwise, the
            mean of the data set.
    """

    probability: float
    noise: bool = False
    after_normalisation = True

    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        """See `Step`. Images without a box have one of height 0."""
        full = shape[-2], shape[-1]
        pixels = full[0] * full[1]
        largest = full[0] - 1, full[1] - 1
        height, width, fits = _draw_boxes(count, largest, (0.02 * pixels, pixels / 3), 1 / 0.3, generator)
        chosen = torch.rand(count, generator=generator, device=generator.device) < self.probability
        height = torch.where(fits & chosen, height, 0)
        drawn = {
            "top": _draw_place(full[0] - height, generator),
            "left": _draw_place(full[1] - width, generator),
            "height": height,
            "width": width,
        }
        if self.noise:
            # A seed for each image instead of the noise itself, which would be as large as the batch.
            drawn["seed"] = torch.randint(2**62, (count,), generator=generator, device=generator.device)
        return drawn

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """See `Step`."""
        return self._noisy(images, parameters) if self.noise else self._plain(images, parameters)

    def _plain(self, images: Tensor, parameters: Parameters) -> Tensor:
        here = {name: numbers.to(images.device, non_blocking=True) for name, numbers in parameters.items()}
        rows = _covered(here["top"], here["height"], images.shape[2])
        columns = _covered(here["left"], here["width"], images.shape[3])
        return images.masked_fill(_along(rows, 2) & _along(columns, 3), 0)

    def _noisy(self, images: Tensor, parameters: Parameters) -> Tensor:
        images = images.clone()
        generator = torch.Generator(images.device)
        names = ("top", "left", "height", "width", "seed")
        for image, *numbers in zip(images, *(parameters[name].tolist() for name in names), strict=True):
            top, left, height, width, seed = numbers
            if height > 0:
                image[:, top : top + height, left : left + width].normal_(generator=generator.manual_seed(seed))
        return images


def _covered(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Which of so many places lie in `start`, `start + 1`, ..., `(image, place)`."""
    place = torch.arange(size, device=start.device) - start.unsqueeze(1)
    return (place >= 0) & (place < length.unsqueeze(1))
