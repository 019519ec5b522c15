"""`load_data`: data sets by name, from a folder of images, from `.npz` files, or drawn on the fly."""

import os
from pathlib import Path

import torch

from vitprobe.data.images import ImageData, check_splits
from vitprobe.data.sources import NAMED, READERS
from vitprobe.data.split import Split, subset
from vitprobe.names import unknown

DATA_NAMES = tuple(sorted([*NAMED, *(f"{kind}:{argument}" for kind, (argument, _) in READERS.items())]))
"""What `load_data` accepts."""

_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

# The mean and std that Park & Kim (2022), and most work on CIFAR, normalise by.
_PUBLISHED = {
    tuple(_CIFAR10.split()): ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    tuple(_CIFAR100.split()): ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}


def load_data(
    spec: str = "digits",
    *,
    root: str | Path | None = None,
    download: bool = True,
    train_size: int | None = None,
    test_size: int | None = None,
) -> ImageData:
    """Loads a data set into memory.

    - `digits`: scikit-learn's 1,797 scans of digits, 8 px by 8 px, grey, scaled from 0..16 to 0..255; the
      last fifth of each class is the test split. Nothing is downloaded.
    - `cifar10`, `cifar100`, `svhn`, `fashion_mnist`: the files torchvision downloads, from `root`. CIFAR's
      are checked against their md5 sums; those of SVHN and Fashion-MNIST when they are downloaded, not later.
    - `folder:PATH`: `PATH/train/CLASS/*.png` and `PATH/test/CLASS/*.png` (or `PATH/val`), or
      `PATH/CLASS/*.png`, of which the last fifth of each class becomes the test split. Any depth below a
      class; hidden files are left out; images are in the order of their paths. Colour, unless every image is
      grey; transparency is dropped.
    - `npz:TRAIN[,TEST]`: `.npz` files with `images` (uint8 `(image, y, x, channel)` or `(image, y, x)`),
      `labels` and, if there are any, `label_names`; without TEST the last fifth of each class becomes the
      test split.
    - `synthetic:low`, `synthetic:high`: a shape in the low and a texture in the high frequencies, of which
      the one named is the label and the other a distractor; 4,000 + 1,000 images of 32 px by 32 px, 4
      classes.

    Images are normalised by the published constants if they are 32 px by 32 px, in colour, and their classes
    have the names of CIFAR-10's or CIFAR-100's (wherever they were read from); otherwise by the mean and
    standard deviation of the training split.

    Args:
        spec: one of the above.
        root: the folder of downloaded data sets; if not given, `$VITPROBE_DATA`, else
            `~/.cache/vitprobe/data`.
        download: whether a data set that is not in `root` may be downloaded to it.
        train_size: how many training images to keep: the first of each class, equally many, in their original
            order (if that does not divide, the first classes have one more).
        test_size: the same for the test images.

    Raises:
        FileNotFoundError: a file or folder is missing, or could not be downloaded.
        TypeError: images are not uint8 or labels are not integers.
        ValueError: an unknown spec, data that do not fit together, or more images wanted than there are.
    """
    kind, _, argument = spec.partition(":")
    if spec in NAMED:
        folder = root or os.environ.get("VITPROBE_DATA") or "~/.cache/vitprobe/data"
        train, test, class_names = NAMED[spec](spec, Path(folder).expanduser(), download)
        name = spec.replace(":", "_")
    elif kind in READERS and argument:
        train, test, class_names = READERS[kind][1](argument)
        name = Path(argument.split(",")[0]).expanduser().resolve().stem
    else:
        raise unknown("data set", spec, DATA_NAMES)
    check_splits(spec, train, test, class_names)
    if train_size is not None:
        train = subset(train, train_size, class_names, "train_size")
    if test_size is not None:
        test = subset(test, test_size, class_names, "test_size")
    published = _PUBLISHED.get(class_names) if train.images.shape[1:] == (3, 32, 32) else None
    mean, std = published or _measure(spec, train)
    return ImageData(spec, name, train, test, class_names, mean, std)


# Mean and standard deviation of each channel in units of [0, 1], exact from the histogram of its 256 values.
def _measure(spec: str, split: Split) -> tuple[tuple[float, ...], tuple[float, ...]]:
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel, pixels in enumerate(split.images.unbind(1)):
        histogram = torch.bincount(pixels.flatten(), minlength=256).double() / pixels.numel()
        if histogram.max() == 1:
            raise ValueError(f"{spec}: channel {channel} has the same value in every training image")
        mean = (histogram * levels).sum()
        means.append(mean.item())
        stds.append((histogram * (levels - mean) ** 2).sum().sqrt().item())
    return tuple(means), tuple(stds)
