"""A data set in memory, and the loader that hands it out as normalised batches."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from einops import rearrange

from vitprobe.data.augment import augmentation, take
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

    def few(self, images: int) -> "ImageData":
        """The data with so many test images at most, spread evenly over them, as they may be class by class."""
        chosen = torch.zeros(len(self.test), dtype=torch.bool)
        chosen[torch.linspace(0, len(self.test) - 1, min(images, len(self.test))).round().long()] = True
        return replace(self, test=self.test.take(chosen))

    def loader(
        self,
        split: str = "train",
        *,
        batch_size: int = 128,
        device: str | torch.device = "cpu",
        seed: int | None = None,
        augment: str = "none",
        drop_last: bool = False,
        repeats: int = 1,
        rank: int = 0,
        ranks: int = 1,
    ) -> "Loader":
        """A loader of one split, see `Loader`.

        Args:
            split: `"train"` or `"test"`.
            batch_size: images per batch.
            device: where the images are kept and the batches made.
            seed: the seed of order and augmentation; `None` hands the images out in the data set's order.
            augment: the name of an `augmentation`; all but `"none"` need a seed.
            drop_last: leave out a last batch that is not full.
            repeats: how often each image of an epoch comes, augmented differently.
            rank: which of the processes that share each batch this is, from 0.
            ranks: how many they are.

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
            repeats=repeats,
            rank=rank,
            ranks=ranks,
            name=split,
        )


def local_part(count: int, rank: int, ranks: int) -> torch.Tensor:
    """Which images of a batch one of several processes gets.

    A batch is mixed with itself in reverse, image `p` with image `count - 1 - p`, so both come to one process. The
    pairs go to the processes in runs as even as possible, longer ones first; the image in the middle of an odd batch
    goes to the last process. Its own part reversed then gives each image its partner.

    Args:
        count: images of the batch.
        rank: of the process, from 0.
        ranks: how many processes.

    Returns:
        `(image,)` int64: the first of each pair, the one in the middle, the second of each pair in reverse.
    """
    pairs = count // 2
    share, more = divmod(pairs, ranks)
    start = rank * share + min(rank, more)
    first = torch.arange(start, start + share + (rank < more))
    middle = torch.arange(pairs, pairs + (count % 2 if rank == ranks - 1 else 0))
    return torch.cat([first, middle, (count - 1 - first).flip(0)])


class Loader:
    """Batches `(x, y)` of one split, made on the device the images are kept on.

    `x` is float32 `(batch, channel, y, x)`, augmented and normalised; `y` is int64 `(batch,)`. The batches depend on
    nothing but seed and `epoch`: they are the same whatever was drawn before, and the global random number generators
    are not touched. The order is the same on every device, and so are the numbers of augmentations that name any step
    but `crop`, `flip` and `crop_flip`; those three alone draw on the device, so a CPU and a GPU draw different crops.

    Several processes that train one model can share each batch: each gets its `local_part`, and all together exactly
    the batches of one process alone.

    Args:
        split: the images.
        mean: what is subtracted, per channel, for pixels in [0, 1].
        std: what is divided by, per channel, for pixels in [0, 1].
        batch_size: images per batch, those of all processes together.
        device: where the images are kept and the batches made.
        seed: the seed of order and augmentation; `None` hands the images out in the split's order.
        augment: the name of an `augmentation`; all but `"none"` need a seed.
        drop_last: leave out a last batch that is not full.
        repeats: repeated augmentation (Hoffer et al. 2020; three times in DeiT): each image comes so often in a row,
            augmented differently, and an epoch is as long as before, so that it sees one of so many images.
        rank: which of the processes that share each batch this is, from 0.
        ranks: how many they are.
        name: of the split.

    Attributes:
        description: split, augmentation and batch size, for the datasets of what is measured on the batches.
        epoch: which epoch's order and augmentation the next pass has; set it before each pass.
        batch_size: images per batch, those of all processes together.
        batch_sizes: images of each batch of a pass, those of all processes together.
        dataset_size: images in the split.
        images: uint8 `(image, channel, y, x)`, on the device.
        labels: int64 `(image,)`, on the device.

    Raises:
        ValueError: a batch size or a number of repeats below 1, augmentation or repeats without a seed, `drop_last`
            that leaves no batch, or a batch that leaves a process without an image.
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
        repeats: int = 1,
        rank: int = 0,
        ranks: int = 1,
        name: str = "",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; at least 1 is wanted")
        if drop_last and batch_size > len(split):
            raise ValueError(
                f"drop_last=True leaves no batch: batch_size is {batch_size} and there are "
                f"{len(split)} images; give a smaller batch_size"
            )
        # What a map brings in from outside is the mean colour, as in timm.
        self._augment = augmentation(augment, fill=[min(255, round(255 * one)) for one in mean])
        if augment != "none" and seed is None:
            raise ValueError(f"augment={augment!r} draws random numbers: give a seed, e.g. seed=0")
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}; at least 1 is wanted, which is none repeated")
        if repeats > 1 and seed is None:
            raise ValueError(f"repeats={repeats} sees other images in each epoch: give a seed, e.g. seed=0")
        self.description: dict[str, str | int | float] = {"augment": augment, "batch_size": batch_size}
        if repeats > 1:
            self.description["repeats"] = repeats
        if name:
            self.description["split"] = name
        self.epoch = 0
        self.batch_size = batch_size
        self.dataset_size = len(split)
        full, rest = divmod(self.dataset_size, batch_size)
        self.batch_sizes = [batch_size] * full + [rest] * (rest > 0 and not drop_last)
        self._parts = self._local_parts(rank, ranks)
        self.images = split.images.to(device)
        self.labels = split.labels.to(device)
        self._seed = seed
        self._repeats = repeats
        self._mean = rearrange(torch.tensor(mean, device=device), "channel -> channel 1 1") * 255
        self._std = rearrange(torch.tensor(std, device=device), "channel -> channel 1 1") * 255

    def _local_parts(self, rank: int, ranks: int) -> dict[int, torch.Tensor]:
        """By the size of a batch, the images of this process."""
        if not 0 <= rank < ranks:
            raise ValueError(f"rank is {rank} of {ranks}; wanted is 0 to ranks - 1, and ranks of 1 or more")
        for size in set(self.batch_sizes):
            if any(len(local_part(size, one, ranks)) == 0 for one in range(ranks)):
                raise ValueError(
                    f"a batch of {size} images leaves one of {ranks} processes without an image, since pairs stay "
                    f"together: give drop_last=True if it is the last, a batch_size of {2 * ranks} or more, or fewer "
                    "processes"
                )
        return {size: local_part(size, rank, ranks) for size in set(self.batch_sizes)}

    def __len__(self) -> int:
        return len(self.batch_sizes)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.arange(self.dataset_size)
        generator = self._augment.generator(self.images.device)
        if self._seed is not None:
            shuffler = torch.Generator().manual_seed(derive_seed(self._seed, "order", self.epoch))
            order = torch.randperm(self.dataset_size, generator=shuffler)
            order = order.repeat_interleave(self._repeats)[: self.dataset_size]
            generator.manual_seed(derive_seed(self._seed, "augment", self.epoch))
        for batch in order[: sum(self.batch_sizes)].split(self.batch_size):
            part = self._parts[len(batch)]
            parameters = take(self._augment.draw(len(batch), self.images.shape[1:], generator), part)
            index = batch[part].to(self.images.device, non_blocking=True)
            images = self._augment.apply(self.images[index], parameters)
            x = images.float().sub_(self._mean).div_(self._std)
            yield self._augment.finish(x, parameters), self.labels[index]
