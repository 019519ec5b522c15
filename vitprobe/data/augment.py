"""Augmentation of uint8 batches on the device: every sample draws its own numbers, all samples at once."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitprobe.data.boxes import Erase, ResizedCrop
from vitprobe.data.operations import Fill
from vitprobe.data.rand_augment import BINS, TOP, Jitter, RandAugment, TimmRandAugment, TrivialAugment
from vitprobe.data.step import Parameters, Step
from vitprobe.names import unknown

_NUMBER = r"\d+(?:\.\d+)?"


def shift(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
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


class _Nothing(Step):
    drawn_on_device = True

    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        return {}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        return images


class _Crop(Step):
    drawn_on_device = True

    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        def draw(size: int) -> Tensor:
            pad = size // 8
            return torch.randint(-pad, pad + 1, (count,), generator=generator, device=generator.device)

        return {"down": draw(shape[1]), "right": draw(shape[2])}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        down, right = (parameters[name].to(images.device, non_blocking=True) for name in ("down", "right"))
        return shift(images, down, right)


class _Flip(Step):
    drawn_on_device = True

    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        return {"mirrored": torch.randint(2, (count, 1, 1, 1), generator=generator, device=generator.device).bool()}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        return torch.where(parameters["mirrored"].to(images.device, non_blocking=True), images.flip(-1), images)


class _CropFlip(Step):
    drawn_on_device = True

    def __init__(self) -> None:
        self._crop, self._flip = _Crop(), _Flip()

    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        return {**self._crop.draw(count, shape, generator), **self._flip.draw(count, shape, generator)}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        return self._flip.apply(self._crop.apply(images, parameters), parameters)


class Augmentation:
    """Steps in the order applied, see `augmentation`.

    Drawing and applying are apart, so that the processes of one training can each draw the numbers of a whole batch
    and apply those of their own images: the part comes out as that part of the whole, bit for bit.

    Args:
        name: what the user typed.
        steps: those on uint8 images first, then those on normalised ones.

    Attributes:
        name: what the user typed.
        drawn_on_device: whether numbers are to be drawn where the images are, see `Step`.
    """

    def __init__(self, name: str, steps: list[Step]) -> None:
        self.name = name
        self.drawn_on_device = all(step.drawn_on_device for step in steps)
        self._steps = steps

    def generator(self, device: str | torch.device) -> torch.Generator:
        """A generator for images on a device: there if `drawn_on_device`, else on the CPU."""
        return torch.Generator(device if self.drawn_on_device else "cpu")

    def draw(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Parameters:
        """All random numbers of a batch.

        Args:
            count: images.
            shape: of each, `(channel, y, x)`.
            generator: drawn from, on its device.

        Returns:
            The numbers; the first dimension of each is `image`. The names are the steps' own business.
        """
        return {
            f"{place} {name}": numbers
            for place, step in enumerate(self._steps)
            for name, numbers in step.draw(count, shape, generator).items()
        }

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """The steps before normalisation.

        Args:
            images: uint8 `(image, channel, y, x)`, left as they are.
            parameters: of these images, from `draw` and `take`.

        Returns:
            Images of the same shape and dtype.
        """
        return self._run(images, parameters, after_normalisation=False)

    def finish(self, images: Tensor, parameters: Parameters) -> Tensor:
        """The steps after normalisation.

        Args:
            images: float `(image, channel, y, x)`, left as they are.
            parameters: of these images, from `draw` and `take`.

        Returns:
            Images of the same shape and dtype.
        """
        return self._run(images, parameters, after_normalisation=True)

    def _run(self, images: Tensor, parameters: Parameters, *, after_normalisation: bool) -> Tensor:
        for place, step in enumerate(self._steps):
            if step.after_normalisation == after_normalisation:
                prefix = f"{place} "
                own = {
                    name.removeprefix(prefix): numbers
                    for name, numbers in parameters.items()
                    if name.startswith(prefix)
                }
                images = step.apply(images, own)
        return images

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Draws and applies at once.

        Args:
            images: uint8 `(image, channel, y, x)`, left as they are.
            generator: drawn from, see `generator`.

        Returns:
            Images of the same shape and dtype.

        Raises:
            ValueError: a step acts on normalised images.
        """
        if any(step.after_normalisation for step in self._steps):
            raise ValueError(
                f"augmentation {self.name!r} has a step on normalised images: call draw, apply, normalise, and finish."
            )
        return self.apply(images, self.draw(len(images), images.shape[1:], generator))


def take(parameters: Parameters, index: Tensor) -> Parameters:
    """The numbers of some images of a batch.

    Args:
        parameters: from `Augmentation.draw`.
        index: `(image,)` int64.

    Returns:
        Their numbers, for `Augmentation.apply` and `finish`.
    """
    at_once = index.device.type == "cpu"  # from a GPU, one must wait for what is copied
    return {name: numbers[index.to(numbers.device, non_blocking=at_once)] for name, numbers in parameters.items()}


class _Options:
    """What follows the name of a step, between dashes: numbers, numbers with a letter before them, and words."""

    def __init__(self, sections: list[str]) -> None:
        self._left = list(sections)

    def number(self, key: str, kind: type[int] | type[float], low: float, high: float, default: float | None) -> float:
        """The number after `key`, which may be empty, at least `low` and at most `high`."""
        found = [text for text in self._left if re.fullmatch(key + _NUMBER, text)]
        if not found:
            if default is None:
                raise ValueError(f"{key.upper() or 'a number'} is missing")
            return default
        self._left.remove(found[0])
        text = found[0].removeprefix(key)
        if kind is int and not text.isdigit():
            raise ValueError(f"{found[0]!r} is not a whole number")
        if not low <= float(text) <= high:
            raise ValueError(f"{found[0]!r} is not between {low:g} and {high:g}")
        return kind(text)

    def word(self, word: str) -> bool:
        """Whether the word is there."""
        there = word in self._left
        if there:
            self._left.remove(word)
        return there

    def end(self) -> None:
        """Refuses what nobody asked for."""
        if self._left:
            raise ValueError(f"{self._left[0]!r} is not understood")


def _timm_rand_augment(options: _Options, fill: Fill) -> Step:
    return TimmRandAugment(
        magnitude=int(options.number("m", int, 0, TOP, None)),
        number=int(options.number("n", int, 1, math.inf, 2)),
        spread=options.number("mstd", float, 0, 100, 0.0),
        increasing=bool(options.number("inc", int, 0, 1, 0)),
        fill=fill,
    )


def _rand_augment(options: _Options, fill: Fill) -> Step:
    number = int(options.number("n", int, 1, math.inf, None))
    return RandAugment(number, magnitude=int(options.number("m", int, 0, BINS - 1, None)))


def _jitter(options: _Options, fill: Fill) -> Step:
    return Jitter(options.number("", float, 0, math.inf, None))


def _resized_crop(options: _Options, fill: Fill) -> Step:
    low = options.number("", float, 0, 1, None)
    return ResizedCrop(low, 1.0) if options.word("square") else ResizedCrop(low)


def _erase(options: _Options, fill: Fill) -> Step:
    return Erase(options.number("", float, 0, 1, None), noise=options.word("pixel"))


class _Form(NamedTuple):
    """How a step is written, an example, and what makes it."""

    written: str
    example: str
    build: Callable[[_Options, Fill], Step]


_FORMS: dict[str, _Form] = {
    "none": _Form("none", "none", lambda options, fill: _Nothing()),
    "crop": _Form("crop", "crop", lambda options, fill: _Crop()),
    "flip": _Form("flip", "flip", lambda options, fill: _Flip()),
    "crop_flip": _Form("crop_flip", "crop_flip", lambda options, fill: _CropFlip()),
    "resized_crop": _Form("resized_crop-LOW[-square]", "resized_crop-0.08", _resized_crop),
    "rand": _Form("rand-mM[-nN][-mstdS][-inc1]", "rand-m9-n2-mstd0.5", _timm_rand_augment),
    "randaugment": _Form("randaugment-nN-mM", "randaugment-n2-m14", _rand_augment),
    "trivialaugment": _Form("trivialaugment", "trivialaugment", lambda options, fill: TrivialAugment()),
    "jitter": _Form("jitter-X", "jitter-0.4", _jitter),
    "erase": _Form("erase-P[-pixel]", "erase-0.25", _erase),
}


def _step(text: str, fill: Fill) -> Step:
    head, *sections = text.split("-")
    if head not in _FORMS:
        raise unknown("augmentation", text, [form.written for form in _FORMS.values()])
    form, options = _FORMS[head], _Options(sections)
    try:
        step = form.build(options, fill)
        options.end()
    except ValueError as error:
        raise ValueError(
            f"augmentation step {text!r}: {error}; wanted is {form.written}, e.g. {form.example!r}."
        ) from None
    return step


def augmentation(name: str, *, fill: Fill = 128) -> Augmentation:
    """The augmentation of that name: steps joined by `+`, in the order applied.

    For example `crop_flip+rand-m9-n2-mstd1.0+erase-0.25`. Every image draws its own numbers. All operations give what
    Pillow, timm and torchvision give for one image, see `vitprobe.data.operations`.

    - `none`: the images as they are.
    - `crop`: black padding of an eighth of the size (4 px at 32) on all sides, then a random window of the
      size before.
    - `flip`: left and right exchanged with probability 1/2.
    - `crop_flip`: both, the base augmentation of CIFAR training.
    - `resized_crop-LOW`: a random box of a share `LOW` to 1 of the area and a ratio of sides of 3/4 to 4/3, enlarged to
      the image's size (Szegedy et al. 2015; torchvision's RandomResizedCrop, `LOW` 0.08 by default there); with
      `-square`, a box of equal sides (ConvMixer on CIFAR).
    - `rand-mM-nN-mstdS-inc1`: RandAugment (Cubuk et al. 2020) as timm reads the string, see `TimmRandAugment`. `N` is 2
      and `S` 0 where left out; `inc1` has operations grow in strength with the level.
    - `randaugment-nN-mM`: RandAugment as torchvision defines it, `N` operations of level `M` of 30, see `RandAugment`.
    - `trivialaugment`: TrivialAugment, wide (Müller & Hutter 2021; torchvision), see `TrivialAugment`.
    - `jitter-X`: brightness, contrast and saturation by factors of `1 - X` to `1 + X`, in random order (torchvision's
      ColorJitter of three equal numbers). timm leaves it out beside RandAugment unless it is forced.
    - `erase-P`: random erasing (Zhong et al. 2020; timm) of a box with probability `P`, by zeros after normalisation;
      with `-pixel`, by normal noise. Last, since it acts on normalised images.

    Args:
        name: the steps.
        fill: grey level, or one for each channel, of what comes in from outside in `rand-...`. timm takes the mean of
            the data set, and so do the loaders.

    Returns:
        What draws and applies.

    Raises:
        ValueError: a step is none of these, a number of it is wrong, or the steps are in an order that cannot be.
    """
    texts = name.split("+")
    steps = [_step(text, fill) for text in texts]
    late = [step.after_normalisation for step in steps]
    if late != sorted(late):
        last = texts[late.index(True)]
        raise ValueError(
            f"augmentation {name!r}: {last!r} acts after normalisation and the steps behind it before: put it last."
        )
    return Augmentation(name, steps)
