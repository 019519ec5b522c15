"""Labelled images in memory, and which of them to take."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def check_dtypes(images: object, labels: object) -> None:
    """Refuses images that are not uint8 and labels that are not integers, and says how to convert them.

    Args:
        images: the dtype of the images, of torch or NumPy.
        labels: the dtype of the labels.

    Raises:
        TypeError: a wrong dtype.
    """
    images, labels = (str(dtype).removeprefix("torch.") for dtype in (images, labels))
    if images != "uint8":
        raise TypeError(
            f"images are {images}, uint8 in 0..255 is wanted: if yours lie in [0, 1], "
            "give (255 * images).round() converted to uint8"
        )
    if not labels.startswith(("int", "uint")):
        raise TypeError(f"labels are {labels}, integers are wanted: number the classes 0, 1, 2, ... as int64")


@dataclass(frozen=True, eq=False)
class Split:
    """One split of a data set.

    Attributes:
        images: uint8 `(image, channel, y, x)`, 1 or 3 channels.
        labels: int64 `(image,)`, counted from 0.
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __post_init__(self) -> None:
        check_dtypes(self.images.dtype, self.labels.dtype)
        if self.labels.dtype != torch.int64:
            raise TypeError(f"labels are {self.labels.dtype}, int64 is wanted: give labels.long()")
        if self.images.ndim != 4 or self.images.shape[1] not in (1, 3) or 0 in self.images.shape:
            raise ValueError(
                f"images have shape {tuple(self.images.shape)}; wanted is (image, channel, y, x) "
                "with 1 or 3 channels and at least one image"
            )
        if self.labels.shape != self.images.shape[:1]:
            raise ValueError(f"{len(self.images)} images but labels of shape {tuple(self.labels.shape)}")
        if self.labels.min() < 0:
            index = int((self.labels < 0).nonzero()[0])
            raise ValueError(f"label {int(self.labels[index])} at index {index} is negative; labels count from 0")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, keep: torch.Tensor) -> "Split":
        """The images where the boolean `keep` `(image,)` is true, in their order."""
        return Split(self.images[keep], self.labels[keep])


def subset(split: Split, size: int, class_names: Sequence[str], option: str) -> Split:
    """The first images of each class, equally many, in their original order.

    If the size does not divide by the number of classes, the first classes have one image more.

    Args:
        split: the images to choose from.
        size: how many in all.
        class_names: the name of each label.
        option: what the caller calls `size`, for the errors.

    Returns:
        The smaller split.

    Raises:
        ValueError: fewer images than classes are wanted, or more than there are.
    """
    classes = len(class_names)
    if size < classes:
        raise ValueError(
            f"{option}={size} is less than one image for each of {classes} classes: give {classes} or more"
        )
    counts = split.labels.bincount(minlength=classes)
    wanted = size // classes + (torch.arange(classes) < size % classes).long()
    if (counts < wanted).any():
        label = int((counts < wanted).nonzero()[0])
        largest = classes * int(counts.min()) + int(counts.argmin())
        raise ValueError(
            f"{option}={size} wants {int(wanted[label])} images of class {label} ({class_names[label]!r}) "
            f"but there are {int(counts[label])}: give {largest} or less"
        )
    return split.take(_place_in_class(split.labels) < wanted[split.labels])


def hold_out(split: Split, where: object) -> tuple[Split, Split]:
    """Divides into training and test: the last fifth of each class, and at least one image, goes to the test.

    The last, not every fifth: neighbours in a data set are often alike (one writer's digits, one film's
    frames), and one in the training with its neighbour in the test would flatter.

    Args:
        split: all images.
        where: what the images were read from, for the errors.

    Returns:
        The training and the test split, each in the original order.

    Raises:
        ValueError: a class has one image only.
    """
    counts = split.labels.bincount()
    if (counts == 1).any():
        label = int((counts == 1).nonzero()[0])
        raise ValueError(f"{where}: class {label} has 1 image; to hold out a test split, each class needs at least 2")
    held_out = (counts / 5).round().long().clamp(min=1)
    train = _place_in_class(split.labels) < (counts - held_out)[split.labels]
    return split.take(train), split.take(~train)


def _place_in_class(labels: torch.Tensor) -> torch.Tensor:
    """For each image, how many of its class come before it."""
    order = labels.argsort(stable=True)
    counts = labels.bincount()
    place = torch.empty_like(labels)
    place[order] = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return place
