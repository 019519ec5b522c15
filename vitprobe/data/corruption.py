"""Corrupted images in fifteen kinds and five severities (Hendrycks & Dietterich 2019): made here, or read from disk."""

import importlib
import importlib.metadata
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange

from vitprobe.data.images import ImageData, Loader
from vitprobe.data.sources import as_split, class_folders, decode, image_files
from vitprobe.data.split import Split
from vitprobe.names import unknown
from vitprobe.seeds import derive_seed

GROUPS: Mapping[str, tuple[str, ...]] = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}
"""The corruptions by group; the extra ones are kept for validation and are in no mean."""
CORRUPTIONS = tuple(name for group, names in GROUPS.items() if group != "extra" for name in names)
"""The fifteen that published means are over."""
ALL_CORRUPTIONS = tuple(name for names in GROUPS.values() for name in names)
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 32
"""Rows and columns that an image needs to be corrupted [px]."""

ALEXNET_ERRORS: Mapping[str, Mapping[str, float]] = {
    name: dict(zip(CORRUPTIONS, errors, strict=True))
    for name, errors in {
        "imagenet": (
            0.886428, 0.894468, 0.922640, 0.819880, 0.826268, 0.785948, 0.798360, 0.866816, 0.826572, 0.819324,
            0.564592, 0.853204, 0.646056, 0.717840, 0.606500,
        ),
        "imagenet_park_kim": (
            0.89355, 0.90209, 0.93039, 0.85058, 0.84090, 0.80735, 0.79756, 0.87435, 0.83576, 0.83683, 0.59642,
            0.87164, 0.67531, 0.71776, 0.65064,
        ),
        "cifar10": (
            0.31816, 0.27476, 0.39542, 0.16538, 0.30432, 0.21100, 0.16222, 0.24836, 0.24464, 0.23034, 0.16590,
            0.28116, 0.19602, 0.18354, 0.19716,
        ),
        "cifar100": (
            0.71296, 0.65350, 0.78604, 0.52182, 0.70600, 0.55892, 0.54976, 0.58738, 0.61058, 0.56536, 0.48840,
            0.61784, 0.52242, 0.46874, 0.49826,
        ),
    }.items()
}  # fmt: skip
"""Errors of AlexNet by corruption, the mean over five severities: what a mean corruption error is relative to.

`imagenet`: of Hendrycks & Dietterich, the reference of published mCEs. The others: of the AlexNets of Park & Kim
(github.com/xxxnell/how-do-vits-work, resources/results/*_alexnet_dnn_corrupted.csv), whose means over the corruptions
are 0.8054 (ImageNet-C), 0.2386 (CIFAR-10-C) and 0.5899 (CIFAR-100-C).
"""

_DISTRIBUTION = "imagecorruptions-imaug"


def corrupt(images: np.ndarray, corruption: str, severity: int, *, seed: int = 0, first: int = 0) -> np.ndarray:
    """Corrupt images by the functions and constants of ImageNet-C.

    What an image becomes depends on the seed, the corruption, the severity and the image's number alone. The constants
    are those for images of 224 px: on 32 px most corruptions are harder than CIFAR-10-C's, which has constants of its
    own. Unlike ImageNet-C's files, the images are not compressed again.

    Args:
        images: uint8 `(image, y, x, channel)`, in colour, 32 px or more a side.
        corruption: one of `ALL_CORRUPTIONS`.
        severity: 1 to 5.
        seed: of what is random in it.
        first: the number of the first image.

    Returns:
        The corrupted images, same shape and dtype.

    Raises:
        ImportError: if the library is not installed.
        ValueError: for other images, an unknown corruption or another severity.
    """
    if corruption not in ALL_CORRUPTIONS:
        raise unknown("corruption", corruption, ALL_CORRUPTIONS)
    _check_severities(severity)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or min(images.shape[1:3]) < SMALLEST:
        raise ValueError(
            f"images are {images.dtype} of shape {images.shape}: corruptions are made for uint8 images (image, y, x, "
            f"channel) in colour, {SMALLEST} px or more a side."
        )
    library = _library()
    # Two of the functions have a generator of their own; the others draw from NumPy's global one.
    own_seed = "seed" in inspect.signature(library.corruption_dict[corruption]).parameters
    corrupted = np.empty_like(images)
    state = np.random.get_state()
    try:
        for index, image in enumerate(images):
            drawn = derive_seed(seed, "corruption", corruption, severity, first + index) % 2**32
            np.random.seed(drawn)
            options = {"seed": drawn} if own_seed else {}
            corrupted[index] = library.corrupt(image, severity, corruption, **options)
    finally:
        np.random.set_state(state)
    return corrupted


def _check_severities(*severities: int) -> None:
    for severity in severities:
        if severity not in SEVERITIES:
            raise ValueError(f"severity {severity!r} is not one of {', '.join(map(str, SEVERITIES))}.")


def _library() -> Any:
    try:
        importlib.metadata.version(_DISTRIBUTION)  # the unmaintained package has the same module, and fails
        return importlib.import_module("imagecorruptions")
    except ImportError as error:
        raise ImportError(
            f"making corrupted images needs the package {_DISTRIBUTION}: type pip install 'vitprobe[corruptions]', or "
            "read precomputed ones with read_corruptions(path, mean=..., std=...)."
        ) from error


class Corruptions(ABC):
    """The same images in many corrupted versions, handed out one set at a time as normalised batches.

    Attributes:
        mean: what is subtracted, per channel, for pixels in [0, 1].
        std: what is divided by, per channel, for pixels in [0, 1].
        corruptions: the names of those there are.
        images: how many images are in each set.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    corruptions: tuple[str, ...]
    images: int

    def batches(
        self, corruption: str, severity: int, *, batch_size: int = 128
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One set as batches `(x, y)`, see `Loader`; not more than a batch is in memory.

        Args:
            corruption: its name.
            severity: 1 to 5.
            batch_size: images per batch.

        Yields:
            Batches, in the same order for every set.

        Raises:
            ValueError: if there is no such set, or it has other images than the first one.
        """
        self.check(corruption, severity)
        for split in self._splits(corruption, severity, batch_size):
            if split.images.shape[1] != len(self.mean):
                raise ValueError(
                    f"{corruption}: images of {split.images.shape[1]} channel(s) and a mean of {len(self.mean)}: give "
                    "one mean and one std for each channel."
                )
            yield from Loader(split, mean=self.mean, std=self.std, batch_size=batch_size)

    def check(self, corruption: str, *severities: int) -> None:
        """Refuses a set that there is not.

        Args:
            corruption: its name.
            *severities: 1 to 5.

        Raises:
            ValueError: if the corruption is not one of `corruptions`, or a severity is out of range.
        """
        if corruption not in self.corruptions:
            raise unknown("corruption", corruption, self.corruptions)
        _check_severities(*severities)

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What the images depend on, as plain JSON types."""

    @abstractmethod
    def _splits(self, corruption: str, severity: int, batch_size: int) -> Iterator[Split]:
        """The images of a set, one batch after the other."""


class GeneratedCorruptions(Corruptions):
    """Corrupted versions of a data set, made while they are used, see `corrupt`.

    Args:
        data: the images, in colour, 32 px or more a side.
        split: `"train"` or `"test"`.
        seed: of what is random in the corruptions.

    Raises:
        ImportError: if the library is not installed.
        ValueError: for grey or smaller images, or an unknown split.
    """

    def __init__(self, data: ImageData, *, split: str = "test", seed: int = 0) -> None:
        splits = {"train": data.train, "test": data.test}
        if split not in splits:
            raise unknown("split", split, splits)
        if data.channels != 3 or min(data.image_size) < SMALLEST:
            raise ValueError(
                f"{data.spec} has images of {data.image_size} px and {data.channels} channel(s): corruptions are made "
                f"for images in colour, {SMALLEST} px or more a side."
            )
        _library()
        self.mean, self.std = data.mean, data.std
        self.corruptions = ALL_CORRUPTIONS
        self.images = len(splits[split])
        self.split = split
        self.seed = seed
        self._data = data
        self._images = splits[split]

    def config(self) -> dict[str, Any]:
        """What the images depend on, as plain JSON types."""
        made = f"{_DISTRIBUTION} {importlib.metadata.version(_DISTRIBUTION)}, constants of ImageNet-C"
        return {"made_by": made, "seed": self.seed, "split": self.split, "data": self._data.config()}

    def _splits(self, corruption: str, severity: int, batch_size: int) -> Iterator[Split]:
        for first in range(0, self.images, batch_size):
            images = self._images.images[first : first + batch_size].cpu().numpy()
            images = rearrange(images, "image channel y x -> image y x channel")
            corrupted = corrupt(images, corruption, severity, seed=self.seed, first=first)
            labels = self._images.labels[first : first + batch_size].cpu().numpy()
            yield as_split(corrupted, labels, f"{corruption} {severity}")


def read_corruptions(path: str | Path, *, mean: tuple[float, ...], std: tuple[float, ...]) -> Corruptions:
    """Corrupted images that others made: CIFAR-10-C, CIFAR-100-C, ImageNet-C, Tiny-ImageNet-C, or their like.

    - With `labels.npy` in the folder: `<corruption>.npy`, uint8 `(image, y, x, channel)`, the five severities of the
      same images one after the other.
    - Else `<corruption>/<severity>/<class>/*.JPEG`, or other images of one size; the classes are numbered in the order
      of their names, as ImageNet's are.

    Args:
        path: the folder.
        mean: what the model's images are normalised by, per channel, for pixels in [0, 1].
        std: the same.

    Returns:
        The images, read while they are used.

    Raises:
        FileNotFoundError: if there is no such folder, or nothing in it that is known.
        ValueError: if labels and images do not fit together, or `mean` and `std` do not normalise.
    """
    folder = Path(path).expanduser()
    if len(mean) != len(std) or min(std) <= 0:
        raise ValueError(f"mean={mean} and std={std}: give one mean and one std above 0 for each channel.")
    if (folder / "labels.npy").is_file():
        return _Arrays(folder, mean, std)
    return _Pictures(folder, mean, std)


class _Stored(Corruptions):
    """A folder of corrupted images.

    Args:
        folder: the folder.
        mean: what is subtracted.
        std: what is divided by.
        ending: what follows a corruption's name in the path of something that it has to have.
    """

    def __init__(self, folder: Path, mean: tuple[float, ...], std: tuple[float, ...], ending: str) -> None:
        self.folder = folder
        self.mean, self.std = tuple(mean), tuple(std)
        self.corruptions = tuple(name for name in ALL_CORRUPTIONS if (folder / f"{name}{ending}").exists())
        if not self.corruptions:
            raise FileNotFoundError(
                f"{folder} has no corrupted images: wanted are labels.npy and gaussian_noise.npy, ..., as in "
                "CIFAR-10-C, or folders gaussian_noise/1/CLASS/, ..., as in ImageNet-C."
            )

    def config(self) -> dict[str, Any]:
        """What the images depend on, as plain JSON types."""
        return {"folder": self.folder.name, "images": self.images, "mean": list(self.mean), "std": list(self.std)}


class _Arrays(_Stored):
    """CIFAR-10-C and its like: an array for each corruption, and the labels."""

    def __init__(self, folder: Path, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__(folder, mean, std, ".npy")
        file = folder / "labels.npy"
        labels = np.load(file)
        if labels.ndim != 1 or not len(labels) or len(labels) % len(SEVERITIES):
            raise ValueError(f"{file} has shape {labels.shape}: one label for each image of five severities is wanted.")
        by_severity = labels.reshape(len(SEVERITIES), -1)
        if (by_severity != by_severity[0]).any():
            raise ValueError(f"{file}: the five severities have other labels, so they are not of the same images.")
        self._labels = by_severity[0]
        self.images = len(self._labels)

    def _splits(self, corruption: str, severity: int, batch_size: int) -> Iterator[Split]:
        file = self.folder / f"{corruption}.npy"
        images = np.load(file, mmap_mode="r")
        if len(images) != len(SEVERITIES) * self.images:
            raise ValueError(
                f"{file} holds {len(images)} images and labels.npy {len(SEVERITIES) * self.images} labels: five "
                "severities, one after the other, are wanted of both."
            )
        start = (severity - 1) * self.images
        for first in range(0, self.images, batch_size):
            labels = self._labels[first : first + batch_size]
            yield as_split(np.asarray(images[start + first : start + first + len(labels)]), labels, file)


class _Pictures(_Stored):
    """ImageNet-C and its like: a folder of pictures for each corruption, severity and class."""

    def __init__(self, folder: Path, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__(folder, mean, std, "/1")
        self._classes = class_folders(folder / self.corruptions[0] / "1")
        self._names = self._files(self.corruptions[0], 1)[0]
        self.images = len(self._names)

    def _splits(self, corruption: str, severity: int, batch_size: int) -> Iterator[Split]:
        names, labels = self._files(corruption, severity)
        place = self.folder / corruption / str(severity)
        if odd := set(names) ^ set(self._names):
            raise ValueError(
                f"{place} has other images than {self.corruptions[0]}/1, e.g. {min(odd)}; all sets have to be of the "
                "same images: complete the one or the other."
            )
        for first in range(0, len(names), batch_size):
            pictures = decode([place / name for name in names[first : first + batch_size]])
            if pictures.shape[-1] == 1:
                pictures = np.repeat(pictures, len(self.mean), axis=-1)
            yield as_split(pictures, labels[first : first + batch_size], place)

    def _files(self, corruption: str, severity: int) -> tuple[list[str], np.ndarray]:
        """The images of a set by their paths below it, class after class, and their labels."""
        place = self.folder / corruption / str(severity)
        if not place.is_dir():
            raise FileNotFoundError(f"there is no folder {place}: name the severities that there are by severities=.")
        files, labels = image_files(place, self._classes)
        return [str(file.relative_to(place)) for file in files], labels
