"""A data set in memory, and the loader that hands it out as normalised batches."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from einops import rearrange

from vitprobe.data.augment import augmentation
from vitprobe.data.split import Split
from vitprobe.names import unknown
from vitprobe.seeds import derive_seed


def check_splits(spec: str, train: Split, test: Split, class_names: tuple[str, ...]) -> None:
    """Refuses splits that do not belong together.

    Args:
        spec: the data set's name, for the errors.
        train: the images to learn from.
        test: the images to be judged on.
        class_names: the name of each label.

    Raises:
        ValueError: a label out of range, a class without a training image, or images of two sizes.
    """
    for part, split in (("training", train), ("test", test)):
        if split.labels.max() >= len(class_names):
            index = int((split.labels >= len(class_names)).nonzero()[0])
            raise ValueError(
                f"{spec}: label {int(split.labels[index])} at index {index} of the {part} images is out of "
                f"range; there are {len(class_names)} classes, 0..{len(class_names) - 1}"
            )
    counts = torch.bincount(train.labels, minlength=len(class_names))
    if counts.min() == 0:
        empty = int((counts == 0).nonzero()[0])
        raise ValueError(
            f"{spec}: class {empty} ({class_names[empty]!r}) has no training image; "
            "leave the class out and number the others 0, 1, 2, ..."
        )
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(
            f"{spec}: training images are {tuple(train.images.shape[1:])} but test images "
            f"{tuple(test.images.shape[1:])} as (channel, y, x); they must be the same"
        )


@dataclass(frozen=True, eq=False)
class ImageData:
    """A data set for classification, whole in memory.

    Attributes:
        spec: what the user typed, e.g. `"cifar10"`.
        name: a short name for figures and folders.
        train: the images to learn from.
        test: the images to be judged on.
        class_names: the name of each label.
        mean: what the loaders subtract, per channel, for pixels in [0, 1].
        std: what the loaders divide by, per channel, for pixels in [0, 1].
    """

    spec: str
    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        check_splits(self.spec, self.train, self.test, self.class_names)
        if not len(self.mean) == len(self.std) == self.channels or min(self.std) <= 0:
            raise ValueError(
                f"{self.spec}: mean {self.mean} and std {self.std} do not normalise images of "
                f"{self.channels} channel(s): give one mean and one std above 0 for each channel"
            )

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour."""
        return self.train.images.shape[1]

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width [px]."""
        height, width = self.train.images.shape[-2:]
        return height, width

    @cached_property
    def _digest(self) -> str:
        sha = hashlib.sha256()
        for split in (self.train, self.test):
            sha.update(repr(tuple(split.images.shape)).encode())
            sha.update(split.images.cpu().numpy().tobytes())
            sha.update(split.labels.cpu().numpy().astype("<i8").tobytes())
        return sha.hexdigest()

    def config(self) -> dict[str, object]:
        """What a run trained on these images depends on, as plain JSON types.

        The data set's name, its class names and its place on the disk are left out on purpose: the same
        pixels, labels and normalisation train the same model, whether they were read from the official files,
        a folder or an `.npz`, so a run cached for the one serves the others. The digest (sha256 of images and
        labels, in order) tells different images apart.
        """
        return {
            "train_size": len(self.train),
            "test_size": len(self.test),
            "image_size": list(self.image_size),
            "channels": self.channels,
            "num_classes": self.num_classes,
            "mean": list(self.mean),
            "std": list(self.std),
            "digest": self._digest,
        }

    def loader(
        self,
        split: str = "train",
        *,
        batch_size: int = 128,
        device: str | torch.device = "cpu",
        seed: int | None = None,
        augment: str = "none",
        drop_last: bool = False,
    ) -> "Loader":
        """A loader of one split, see `Loader`.

        Args:
            split: `"train"` or `"test"`.
            batch_size: images per batch.
            device: where the images are kept and the batches made.
            seed: the seed of order and augmentation; `None` hands the images out in the data set's order.
            augment: the name of an `augmentation`; all but `"none"` need a seed.
            drop_last: leave out a last batch that is not full.

        Raises:
            ValueError: an unknown split, or what `Loader` refuses.
        """
        splits = {"train": self.train, "test": self.test}
        if split not in splits:
            raise unknown("split", split, splits)
        return Loader(
            splits[split],
            mean=self.mean,
            std=self.std,
            batch_size=batch_size,
            device=device,
            seed=seed,
            augment=augment,
            drop_last=drop_last,
            name=split,
        )


class Loader:
    """Batches `(x, y)` of one split, made on the device the images are kept on.

    `x` is float32 `(batch, channel, y, x)`, augmented and then normalised; `y` is int64 `(batch,)`. The
    batches depend on nothing but seed and `epoch`: they are the same whatever was drawn before, and the
    global random number generators are not touched. The order is the same on every device; augmentation draws
    on the device, so a CPU and a GPU draw different crops.

    Args:
        split: the images.
        mean: what is subtracted, per channel, for pixels in [0, 1].
        std: what is divided by, per channel, for pixels in [0, 1].
        batch_size: images per batch.
        device: where the images are kept and the batches made.
        seed: the seed of order and augmentation; `None` hands the images out in the split's order.
        augment: the name of an `augmentation`; all but `"none"` need a seed.
        drop_last: leave out a last batch that is not full.
        name: of the split.

    Attributes:
        description: split, augmentation and batch size, for the datasets of what is measured on the batches.
        epoch: which epoch's order and augmentation the next pass has; set it before each pass.
        batch_size: images per batch.
        dataset_size: images in the split.
        images: uint8 `(image, channel, y, x)`, on the device.
        labels: int64 `(image,)`, on the device.

    Raises:
        ValueError: a batch size below 1, augmentation without a seed, or `drop_last` that leaves no batch.
    """

    def __init__(
        self,
        split: Split,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        batch_size: int = 128,
        device: str | torch.device = "cpu",
        seed: int | None = None,
        augment: str = "none",
        drop_last: bool = False,
        name: str = "",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; at least 1 is wanted")
        if drop_last and batch_size > len(split):
            raise ValueError(
                f"drop_last=True leaves no batch: batch_size is {batch_size} and there are "
                f"{len(split)} images; give a smaller batch_size"
            )
        self._augment = augmentation(augment)
        if augment != "none" and seed is None:
            raise ValueError(f"augment={augment!r} draws random numbers: give a seed, e.g. seed=0")
        self.description: dict[str, str | int | float] = {"augment": augment, "batch_size": batch_size}
        if name:
            self.description["split"] = name
        self.epoch = 0
        self.batch_size = batch_size
        self.dataset_size = len(split)
        self.images = split.images.to(device)
        self.labels = split.labels.to(device)
        self._seed = seed
        self._drop_last = drop_last
        self._mean = rearrange(torch.tensor(mean, device=device), "channel -> channel 1 1") * 255
        self._std = rearrange(torch.tensor(std, device=device), "channel -> channel 1 1") * 255

    def __len__(self) -> int:
        full, rest = divmod(self.dataset_size, self.batch_size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.arange(self.dataset_size)
        generator = torch.Generator(self.images.device)
        if self._seed is not None:
            shuffler = torch.Generator().manual_seed(derive_seed(self._seed, "order", self.epoch))
            order = torch.randperm(self.dataset_size, generator=shuffler)
            generator.manual_seed(derive_seed(self._seed, "augment", self.epoch))
        for batch in order.to(self.images.device).split(self.batch_size)[: len(self)]:
            images = self._augment(self.images[batch], generator)
            yield images.float().sub_(self._mean).div_(self._std), self.labels[batch]
