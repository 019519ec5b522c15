"""Operations drawn at random: RandAugment in the forms of timm and of torchvision, TrivialAugment, colour jitter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitprobe.data.operations import ARGUMENTS, CODES, Fill, operate
from vitprobe.data.step import Parameters, Step

BINS = 31
"""Levels of strength in torchvision's form."""
TOP = 10
"""The highest level of strength in timm's form."""
CARRIED_OUT = 0.5
"""Share of the drawn operations that timm's form carries out."""


class _Operations(Step):
    """Some operations one after the other: `codes` `(image, place)` and `arguments` `(image, place, 7)`."""

    fill: Fill = 0

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """See `Step`."""
        for codes, arguments in zip(parameters["codes"].unbind(1), parameters["arguments"].unbind(1), strict=True):
            images = operate(images, codes, arguments, self.fill)
        return images


class _Kind(NamedTuple):
    """What can be drawn, as often as any other: an operation and its first numbers."""

    operation: str
    arguments: Sequence[Tensor | float] = ()


def _rotation(degrees: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
    """The map about the centre, counterclockwise, with Pillow's rounding: a right angle is one exactly."""
    angle = -degrees.remainder(360).deg2rad()
    cos, sin = angle.cos().round(decimals=15), angle.sin().round(decimals=15)
    x, y = width / 2, height / 2
    return cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y


def chosen(kinds: Sequence[_Kind], choice: Tensor) -> dict[str, Tensor]:
    """Codes and arguments of the kinds with these numbers, `(image, place)`."""
    codes = torch.tensor([CODES[kind.operation] for kind in kinds], device=choice.device)
    table = torch.zeros((*choice.shape, len(kinds), ARGUMENTS), dtype=torch.float64, device=choice.device)
    for number, kind in enumerate(kinds):
        for place, argument in enumerate(kind.arguments):
            table[..., number, place] = argument
    index = choice[..., None, None].expand(-1, -1, 1, ARGUMENTS)
    return {"codes": codes[choice], "arguments": table.gather(2, index).squeeze(2)}


def _draw_signs(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(2, size, generator=generator, device=generator.device).double() * 2 - 1


@dataclass
class TimmRandAugment(_Operations):
    """RandAugment (Cubuk et al. 2020) as timm defines it by a string like `rand-m9-n2-mstd0.5-inc1`.

    Of fifteen operations, some are drawn for each image, with replacement. Each is left out with probability 1/2 and
    else has a level of its own from a normal distribution, cut off at 0 and 10. Geometric operations interpolate
    linearly or by cubics, one or the other with probability 1/2.

    Args:
        magnitude: mean of the levels, 0 to 10.
        number: operations drawn for an image.
        spread: standard deviation of the levels.
        increasing: whether operations of which a higher level would change less are turned round.
        fill: what comes in from outside; timm takes the mean colour of the data set.
    """

    magnitude: int
    number: int = 2
    spread: float = 0.0
    increasing: bool = False
    fill: Fill = 128

    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        """See `Step`."""
        device, size = generator.device, (count, self.number)
        noise = torch.randn(size, generator=generator, device=device, dtype=torch.float64)
        level = (self.magnitude + self.spread * noise).clamp(0, TOP)
        cubic = torch.randint(2, size, generator=generator, device=device)
        kinds = self.kinds(level, _draw_signs(size, generator), cubic, *shape[-2:])
        choice = torch.randint(len(kinds), size, generator=generator, device=device)
        kept = torch.rand(size, generator=generator, device=device) < CARRIED_OUT
        drawn = chosen(kinds, choice)
        return drawn | {"codes": torch.where(kept, drawn["codes"], CODES["identity"])}

    def kinds(self, level: Tensor, sign: Tensor, cubic: Tensor, height: int, width: int) -> list[_Kind]:
        """What there is to draw, in timm's order.

        Args:
            level: `(image, place)`, 0 to 10.
            sign: `(image, place)`, -1 or 1.
            cubic: `(image, place)`, 0 for linear interpolation and 1 for cubics.
            height: of the images [px].
            width: of the images [px].

        Returns:
            The operations, each with its numbers for every level.
        """
        share = level / TOP
        bits, threshold = (share * 4).floor(), (share * 256).floor()
        factor = share * 1.8 + 0.1
        if self.increasing:
            bits, threshold = 4 - bits, 256 - threshold
            factor = (1 + sign * (share * 0.9)).clamp(min=0.1)
        signed = sign * share
        return [
            _Kind("autocontrast"),
            _Kind("equalize"),
            _Kind("invert"),
            _Kind("affine", (*_rotation(signed * 30, height, width), cubic)),
            _Kind("posterize", (bits,)),
            _Kind("solarize", (threshold,)),
            _Kind("solarize_add", ((share * 110).floor(),)),
            _Kind("color", (factor,)),
            _Kind("contrast", (factor,)),
            _Kind("brightness", (factor,)),
            _Kind("sharpness", (factor,)),
            _Kind("along_x", (signed * 0.3, 0, cubic)),
            _Kind("along_y", (signed * 0.3, 0, cubic)),
            _Kind("along_x", (0, signed * 0.45 * width, cubic)),
            _Kind("along_y", (0, signed * 0.45 * height, cubic)),
        ]


class _Binned(_Operations):
    """Fourteen operations in 31 levels of strength, nearest pixels, black from outside (torchvision)."""

    bits = 4
    """How many bits the highest level takes off."""
    turn = 30.0
    """Largest rotation [degrees]."""
    shear = 0.3
    strength = 0.9
    """Largest distance of a factor from 1."""

    def offsets(self, height: int, width: int) -> tuple[float, float]:
        """Largest translations down and right [px]."""
        return 150 / 331 * height, 150 / 331 * width

    def drawn(self, level: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        """Operations for levels `(image, place)`."""
        kinds = self.kinds(level, _draw_signs(tuple(level.shape), generator), *shape[-2:])
        choice = torch.randint(len(kinds), level.shape, generator=generator, device=generator.device)
        return chosen(kinds, choice)

    def kinds(self, level: Tensor, sign: Tensor, height: int, width: int) -> list[_Kind]:
        """What there is to draw, in torchvision's order.

        Args:
            level: `(image, place)` int64, 0 to 30.
            sign: `(image, place)`, -1 or 1.
            height: of the images [px].
            width: of the images [px].

        Returns:
            The operations, each with its numbers for every level.
        """

        def steps(first: float, last: float) -> Tensor:
            return torch.linspace(first, last, BINS, device=level.device)[level].double()

        down, right = self.offsets(height, width)
        factor = 1 + sign * steps(0, self.strength)
        shear = sign * steps(0, self.shear)
        return [
            _Kind("identity"),
            _Kind("nearest", (1, shear, 0, 0, 1, 0)),
            _Kind("nearest", (1, 0, 0, shear, 1, 0)),
            _Kind("nearest", (1, 0, sign * -steps(0, right).floor(), 0, 1, 0)),
            _Kind("nearest", (1, 0, 0, 0, 1, sign * -steps(0, down).floor())),
            _Kind("nearest", _rotation(sign * steps(0, self.turn), height, width)),
            _Kind("brightness", (factor,)),
            _Kind("color", (factor,)),
            _Kind("contrast", (factor,)),
            _Kind("sharpness", (factor,)),
            _Kind("posterize", (8 - (level / ((BINS - 1) / self.bits)).round(),)),
            _Kind("solarize", (steps(255, 0),)),
            _Kind("autocontrast"),
            _Kind("equalize"),
        ]


@dataclass
class RandAugment(_Binned):
    """RandAugment (Cubuk et al. 2020) as torchvision defines it: some operations, all of one level.

    Args:
        number: operations drawn for an image.
        magnitude: the level, 0 to 30.
    """

    number: int
    magnitude: int

    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        """See `Step`."""
        level = torch.full((count, self.number), self.magnitude, device=generator.device)
        return self.drawn(level, shape, generator)


class TrivialAugment(_Binned):
    """TrivialAugment (Müller & Hutter 2021) in the wide space: one operation, every level equally likely."""

    bits = 6
    turn = 135.0
    shear = 0.99
    strength = 0.99

    def offsets(self, height: int, width: int) -> tuple[float, float]:
        """See `_Binned`."""
        return 32.0, 32.0

    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        """See `Step`."""
        level = torch.randint(BINS, (count, 1), generator=generator, device=generator.device)
        return self.drawn(level, shape, generator)


@dataclass
class Jitter(_Operations):
    """Brightness, contrast and saturation by random factors, in an order of each image's own.

    Args:
        strength: the factors are uniform between `1 - strength`, at least 0, and `1 + strength`.
    """

    strength: float

    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        """See `Step`."""
        codes = torch.tensor([CODES[name] for name in ("brightness", "contrast", "color")], device=generator.device)
        random = torch.rand((2, count, len(codes)), generator=generator, device=generator.device, dtype=torch.float64)
        low, high = max(0.0, 1 - self.strength), 1 + self.strength
        factor = (low + (high - low) * random[1]).unsqueeze(2)
        return {"codes": codes[random[0].argsort(1)], "arguments": F.pad(factor, (0, ARGUMENTS - 1))}
