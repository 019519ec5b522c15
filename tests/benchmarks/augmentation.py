"""What augmentation costs per image, side by side in one run: vitprobe, single images in Pillow, and two libraries.

    python tests/benchmarks/augmentation.py [--batch 128] [--size 32] [--rounds 15] [--clock cpu]

- recipes: whole augmentation strings, normalisation and erasing included, by vitprobe on a batch, and by the transforms
  of torchvision and timm on its images one by one.
- operations: random operations alone, with the numbers that vitprobe drew, by vitprobe, by torchvision's kernels for
  tensors and by kornia's (left out where it is not installed). The libraries draw one operation for a whole batch, so
  here their kernels get the images that share one: torchvision's with a single strength each, kornia's with a strength
  for every image. Beside the time, how far they are from Pillow's result: the share of pixels that differ, and the mean
  difference of those [grey levels]. Neither has Pillow's cubics; theirs are lines here.

All ways run in turn in every round; given is the median over rounds (least to most).
"""

import argparse
import functools
import importlib.util
import math
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import auto_augment
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision import transforms
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from vitprobe.data.augment import augmentation
from vitprobe.data.operations import OPERATIONS

MEAN, STD = (0.5, 0.48, 0.45), (0.25, 0.24, 0.26)
FILL = tuple(round(255 * one) for one in MEAN)
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
RECIPES = (
    "crop_flip",
    "resized_crop-0.08+flip",
    "crop_flip+rand-m9-n2-mstd1.0",
    "crop_flip+randaugment-n2-m14",
    "crop_flip+rand-m9-n2-mstd0.5-inc1+jitter-0.4+erase-0.25-pixel",
    "trivialaugment",
)
DRAWN = ("rand-m9-n2-mstd1.0", "randaugment-n2-m14", "trivialaugment")
NAMES = list(OPERATIONS)

Numbers = tuple[Tensor, Tensor]  # codes (image, place) and arguments (image, place, 7)
Way = Callable[[], object]


def noise(count: int, size: int) -> Tensor:
    """Images with large and small structure, `(image, 3, y, x)`."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    fine = torch.rand(count, 3, size, size, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    return (255 * (0.8 * smooth + 0.2 * fine)).to(torch.uint8)


def medians(ways: dict[str, Way], rounds: int, clock: Callable[[], float], count: int) -> dict[str, list[float]]:
    """Milliseconds per image of each way in each round, all ways in turn."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            start = clock()
            way()
            taken[name].append(1e3 * (clock() - start) / count)
    return taken


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


# --- whole recipes ----------------------------------------------------------------------------------


def reference_steps(text: str, size: int) -> list[Callable]:
    """One step of a string as torchvision and timm have it."""
    head, *sections = text.split("-")
    number = {section.rstrip("0123456789."): section.lstrip("abcdefghijklmnopqrstuvwxyz") for section in sections}
    if head == "crop_flip":
        return [transforms.RandomCrop(size, size // 8), transforms.RandomHorizontalFlip()]
    if head == "flip":
        return [transforms.RandomHorizontalFlip()]
    if head == "resized_crop":
        return [transforms.RandomResizedCrop(size, (float(sections[0]), 1.0))]
    if head == "rand":
        transform = auto_augment.rand_augment_transform(text, {"img_mean": FILL})
        for operation in transform.ops:
            if operation.name.startswith("Posterize"):
                operation.aug_fn = posterize
        return [transform]
    if head == "randaugment":
        return [transforms.RandAugment(int(number["n"]), int(number["m"]))]
    if head == "trivialaugment":
        return [transforms.TrivialAugmentWide()]
    if head == "jitter":
        return [transforms.ColorJitter(*[float(sections[0])] * 3)]
    raise ValueError(f"no reference for {text!r}")


def posterize(image: Image.Image, bits: int, **options: object) -> Image.Image:
    """What timm means: at one end of its levels no bit is kept, which newer versions of Pillow refuse."""
    return ImageOps.posterize(image, bits) if bits else Image.new(image.mode, image.size)


def reference(recipe: str, size: int) -> transforms.Compose:
    """A string as the transforms of one Pillow image."""
    texts = recipe.split("+")
    late = [text for text in texts if text.startswith("erase")]
    early = [step for text in texts if text not in late for step in reference_steps(text, size)]
    erase = [
        RandomErasing(float(text.split("-")[1]), mode="pixel" if text.endswith("pixel") else "const", device="cpu")
        for text in late
    ]
    return transforms.Compose([*early, transforms.ToTensor(), transforms.Normalize(MEAN, STD), *erase])


def one_by_one(images: list[np.ndarray], transform: transforms.Compose) -> Tensor:
    return torch.stack([transform(Image.fromarray(image)) for image in images])


def ours(images: Tensor, recipe: str) -> Way:
    augment = augmentation(recipe, fill=FILL)
    generator = augment.generator("cpu").manual_seed(0)
    mean, std = (255 * torch.tensor(one).reshape(3, 1, 1) for one in (MEAN, STD))

    def run() -> Tensor:
        parameters = augment.draw(len(images), images.shape[1:], generator)
        x = augment.apply(images, parameters).float().sub_(mean).div_(std)
        return augment.finish(x, parameters)

    return run


def recipes(arguments: argparse.Namespace) -> None:
    images = noise(arguments.batch, arguments.size)
    arrays = [image.permute(1, 2, 0).contiguous().numpy() for image in images]
    print("\n| recipe | vitprobe, ms per image | one by one in Pillow | ratio |\n|---|---|---|---|")
    for recipe in RECIPES:
        transform = reference(recipe, arguments.size)
        ways: dict[str, Way] = {
            "ours": ours(images, recipe),
            "theirs": functools.partial(one_by_one, arrays, transform),
        }
        taken = medians(ways, arguments.rounds, CLOCKS[arguments.clock], len(images))
        ratios = [b / a for a, b in zip(taken["ours"], taken["theirs"], strict=True)]
        print(f"| {recipe} | {spread(taken['ours'])} | {spread(taken['theirs'])} | {statistics.median(ratios):.1f} |")


# --- random operations alone ------------------------------------------------------------------------


def groups(codes: Tensor, arguments: Tensor) -> dict[tuple[float, ...], Tensor]:
    """The images that share an operation and all its numbers."""
    keys: dict[tuple[float, ...], list[int]] = {}
    for image, (code, numbers) in enumerate(zip(codes.tolist(), arguments.tolist(), strict=True)):
        if NAMES[code] != "identity":
            keys.setdefault((code, *numbers), []).append(image)
    return {key: torch.tensor(index) for key, index in keys.items()}


def by_torchvision(images: Tensor, numbers: Numbers, fill: list[float], lines: bool) -> Tensor:
    """Kernels of torchvision for tensors, on images that share operation and strength."""
    mode = InterpolationMode.BILINEAR if lines else InterpolationMode.NEAREST
    result = images.clone()
    for codes, arguments in zip(*(one.unbind(1) for one in numbers), strict=True):
        for (code, *n), index in groups(codes, arguments).items():
            result[index] = torchvision_kernel(NAMES[int(code)], n, result[index], mode, fill)
    return result


def torchvision_kernel(name: str, n: list[float], x: Tensor, mode: InterpolationMode, fill: list[float]) -> Tensor:
    def affine(translate: list[float], shear: list[float]) -> Tensor:
        slopes = [math.degrees(math.atan(one)) for one in shear]
        return tv.affine(x, 0.0, translate, 1.0, slopes, mode, fill, [0, 0])

    if name == "along_x":
        return affine([-n[1], 0], [n[0], 0])
    if name == "along_y":
        return affine([0, -n[1]], [0, n[0]])
    if name == "affine" or (name == "nearest" and n[1] == -n[3] != 0):
        return tv.rotate(x, math.degrees(math.atan2(-n[1], n[0])), mode, fill=fill)
    if name == "nearest":
        return affine([-n[2], -n[5]], [n[1], n[3]])
    if name == "solarize_add":
        return torch.where(x < 128, (x.int() + int(n[0])).clamp(max=255).to(torch.uint8), x)
    kernels: dict[str, Callable[[], Tensor]] = {
        "autocontrast": lambda: tv.autocontrast(x),
        "equalize": lambda: tv.equalize(x),
        "invert": lambda: tv.invert(x),
        "posterize": lambda: tv.posterize(x, int(n[0])),
        "solarize": lambda: tv.solarize(x, min(n[0], 255.0)),
        "brightness": lambda: tv.adjust_brightness(x, n[0]),
        "contrast": lambda: tv.adjust_contrast(x, n[0]),
        "color": lambda: tv.adjust_saturation(x, n[0]),
        "sharpness": lambda: tv.adjust_sharpness(x, n[0]),
    }
    return kernels[name]()


def by_kornia(images: Tensor, numbers: Numbers, fill: list[float], lines: bool) -> Tensor:
    """Kernels of kornia, on images that share an operation, each with its own strength."""
    mode = "bilinear" if lines else "nearest"
    result = images.float().div_(255)
    for codes, arguments in zip(*(one.unbind(1) for one in numbers), strict=True):
        for code in codes.unique().tolist():
            index = (codes == code).nonzero().squeeze(1)
            if NAMES[code] != "identity":
                result[index] = kornia_kernel(NAMES[code], arguments[index].float(), result[index], mode, fill)
    return result.mul_(255).round_().clamp_(0, 255).to(torch.uint8)


def kornia_kernel(name: str, n: Tensor, x: Tensor, mode: str, fill: list[float]) -> Tensor:
    from kornia import enhance
    from kornia.geometry.transform import warp_affine

    if name in ("along_x", "along_y", "affine", "nearest"):
        one, zero = torch.ones(len(n)), torch.zeros(len(n))
        maps = {
            "along_x": lambda: (one, n[:, 0], n[:, 1], zero, one, zero),
            "along_y": lambda: (one, zero, zero, n[:, 0], one, n[:, 1]),
        }
        a, b, c, d, e, f = maps[name]() if name in maps else n[:, :6].unbind(1)
        # From centres of pixels at .5 to centres at whole numbers; kornia wants where a pixel goes to.
        c, f = c + (a + b - 1) / 2, f + (d + e - 1) / 2
        inverse = torch.stack([a, b, c, d, e, f, zero, zero, one], 1).reshape(-1, 3, 3).inverse()[:, :2]
        colour = torch.tensor(fill) / 255
        return warp_affine(x, inverse, x.shape[2:], mode, "fill", align_corners=True, fill_value=colour)
    v = n[:, 0]
    kernels: dict[str, Callable[[], Tensor]] = {
        "autocontrast": lambda: enhance.normalize_min_max(x),
        "equalize": lambda: enhance.equalize(x),
        "invert": lambda: enhance.invert(x),
        "posterize": lambda: enhance.posterize(x, v.int()),
        "solarize": lambda: enhance.solarize(x, v / 256),
        "solarize_add": lambda: torch.where(x < 128 / 255, x + v.reshape(-1, 1, 1, 1) / 255, x).clamp(max=1),
        "brightness": lambda: enhance.adjust_brightness_accumulative(x, v),
        "contrast": lambda: enhance.adjust_contrast_with_mean_subtraction(x, v),
        "color": lambda: enhance.adjust_saturation_with_gray_subtraction(x, v),
        "sharpness": lambda: enhance.sharpness(x, v),
    }
    return kernels[name]()


def operations(arguments: argparse.Namespace) -> None:
    images = noise(arguments.batch, arguments.size)
    print("\n| operations drawn | way | ms per image | over vitprobe | pixels that differ | by |")
    print("|---|---|---|---|---|---|")
    for name in DRAWN:
        augment = augmentation(name, fill=FILL)
        drawn = augment.draw(len(images), images.shape[1:], torch.Generator().manual_seed(1))
        numbers = drawn["0 codes"], drawn["0 arguments"]
        lines = name.startswith("rand-")
        fill = [float(one) for one in FILL] if lines else [0.0] * 3
        ways: dict[str, Way] = {
            "vitprobe": functools.partial(augment.apply, images, drawn),
            "torchvision, by strength": functools.partial(by_torchvision, images, numbers, fill, lines),
        }
        if importlib.util.find_spec("kornia") is not None:
            ways["kornia, by operation"] = functools.partial(by_kornia, images, numbers, fill, lines)
        taken = medians(ways, arguments.rounds, CLOCKS[arguments.clock], len(images))
        exact = augment.apply(images, drawn).int()  # the tests hold it to Pillow's result
        for way, call in ways.items():
            off = (call().int() - exact).abs()
            ratio = statistics.median([a / b for a, b in zip(taken[way], taken["vitprobe"], strict=True)])
            differ = (off > 0).double().mean().item()
            by = off[off > 0].double().mean().item() if differ else 0.0
            print(f"| {name} | {way} | {spread(taken[way])} | {ratio:.1f} | {differ:.1%} | {by:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a machine that other work shares")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Batches of {arguments.batch} images of {arguments.size} px, one thread, {arguments.clock} clock.")
    recipes(arguments)
    operations(arguments)


if __name__ == "__main__":
    main()
