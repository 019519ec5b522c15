"""Where images come from: `.npz` files, folders of images, the official files of known data sets."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from einops import rearrange

from vitprobe.data.split import Split, check_dtypes, hold_out
from vitprobe.data.synthetic import SHAPES, TEXTURES, draw_images

Parts = tuple[Split, Split, tuple[str, ...]]
"""Training split, test split, class names."""

# torchvision's class, and the folder below the root where it keeps the files
_TORCHVISION = {
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST/raw"),
}
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation"}  # and no names of classes
_IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def as_split(images: np.ndarray, labels: np.ndarray, where: object) -> Split:
    """Images `(image, y, x)` or `(image, y, x, channel)` and labels as a split; errors name where they come from."""
    try:
        check_dtypes(images.dtype, labels.dtype)
        if images.ndim == 3:
            images = images[..., None]
        if images.ndim != 4 or images.shape[-1] not in (1, 3):
            raise ValueError(
                f"images have shape {images.shape}; wanted is (image, y, x) or (image, y, x, channel) "
                "with 1 or 3 channels"
            )
        images = np.ascontiguousarray(rearrange(images, "image y x channel -> image channel y x"))
        return Split(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def _digits(spec: str, root: Path, download: bool) -> Parts:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return *hold_out(as_split(images, digits.target, spec), spec), tuple(map(str, digits.target_names))


def _synthetic(spec: str, root: Path, download: bool) -> Parts:
    cue = spec.removeprefix("synthetic:")
    train = as_split(*draw_images(cue, 1000, "train"), spec)
    test = as_split(*draw_images(cue, 250, "test"), spec)
    return train, test, SHAPES if cue == "low" else TEXTURES


def _npz(argument: str) -> Parts:
    paths = [Path(path).expanduser() for path in argument.split(",")]
    if len(paths) > 2:
        raise ValueError(f"npz:{argument} names {len(paths)} files; wanted is npz:TRAIN or npz:TRAIN,TEST")
    splits, names = zip(*map(_read_npz, paths), strict=True)
    named = [names_of_file for names_of_file in names if names_of_file is not None]
    if len(set(named)) > 1:
        raise ValueError(f"{paths[0]} and {paths[1]} have different label_names")
    class_names = named[0] if named else tuple(map(str, range(int(splits[0].labels.max()) + 1)))
    train, test = splits if len(splits) == 2 else hold_out(splits[0], paths[0])
    return train, test, class_names


def _read_npz(path: Path) -> tuple[Split, tuple[str, ...] | None]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with np.load(path) as file:
            arrays = {key: file[key] for key in ("images", "labels", "label_names") if key in file}
    except Exception as error:  # zipfile, zlib and NumPy each have their own for a damaged file
        raise ValueError(f"{path} is not a readable .npz of plain arrays: {error}") from error
    if missing := {"images", "labels"} - set(arrays):
        raise ValueError(f"{path} has no array {min(missing)!r}: save it by numpy.savez(path, images=..., labels=...)")
    names = tuple(map(str, arrays["label_names"])) if "label_names" in arrays else None
    return as_split(arrays["images"], arrays["labels"], path), names


def _folder(argument: str) -> Parts:
    path = Path(argument).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    if not (path / "train").is_dir():
        class_names = class_folders(path)
        splits = [name for name in class_names if name.lower() in _SPLITS]
        if len(splits) > 1 or len(splits) == len(class_names):  # one among others may be a class: CIFAR-100 has trains
            raise ValueError(
                f"{path} has the folders {', '.join(class_names)}, which are splits and no classes: wanted is "
                f"{path / 'train' / 'CLASS'} beside {path / 'test' / 'CLASS'} (or val), in small letters; or type "
                f"folder:{path / splits[0]} to hold out a fifth of that one"
            )
        files, labels = image_files(path, class_names)
        return *hold_out(as_split(decode(files), labels, path), path), class_names
    test_path = next((path / name for name in ("test", "val") if (path / name).is_dir()), None)
    if test_path is None:
        raise FileNotFoundError(
            f"{path} has a folder train but neither test nor val: add one, "
            f"or type folder:{path / 'train'} to hold out a fifth of it"
        )
    class_names = class_folders(path / "train")
    if strangers := set(class_folders(test_path)) - set(class_names):
        raise ValueError(f"{test_path / min(strangers)} is a class that {path / 'train'} does not have")
    train_files, train_labels = image_files(path / "train", class_names)
    test_files, test_labels = image_files(test_path, class_names)
    images = decode(train_files + test_files)
    train = as_split(images[: len(train_files)], train_labels, path)
    return train, as_split(images[len(train_files) :], test_labels, path), class_names


def class_folders(path: Path) -> tuple[str, ...]:
    """The classes that a folder holds, one folder each."""
    names = sorted(folder.name for folder in path.iterdir() if folder.is_dir() and folder.name[0] != ".")
    if not names:
        raise FileNotFoundError(f"{path} has no folders; wanted is one folder of images for each class")
    return tuple(names)


def image_files(path: Path, class_names: Sequence[str]) -> tuple[list[Path], np.ndarray]:
    """The image files of those classes that have a folder in `path`, and their labels."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        if not (path / name).is_dir():
            continue
        found = sorted(
            file
            for file in (path / name).rglob("*")
            if file.suffix.lower() in _IMAGE_SUFFIXES
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not found:
            raise FileNotFoundError(f"{path / name} has no images ({', '.join(_IMAGE_SUFFIXES)})")
        files += found
        labels += [label] * len(found)
    return files, np.array(labels)


def decode(files: Sequence[Path]) -> np.ndarray:
    """Images `(image, y, x, channel)` as uint8: one channel if every one is grey, else three."""
    pictures = []
    for file in files:
        pictures.append(_decode_one(file))
        (height, width), first = pictures[-1].shape[:2], pictures[0].shape[:2]
        if (height, width) != first:
            raise ValueError(
                f"images of different sizes: {files[0]} is {first[1]} x {first[0]} px "
                f"and {file} is {width} x {height} px; resize them to one size"
            )
    channels = max(picture.shape[-1] for picture in pictures)
    images = np.empty((len(pictures), *pictures[0].shape[:2], channels), np.uint8)
    for index, picture in enumerate(pictures):
        images[index] = picture  # a grey picture among coloured ones gets three equal channels
    return images


def _decode_one(file: Path) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(file) as picture:
            if picture.mode.startswith(("I", "F")):
                raise ValueError(f"it has more than 8 bits per pixel (mode {picture.mode}); save it with 8")
            grey = picture.mode in ("1", "L", "LA")
            array = np.asarray(picture.convert("L" if grey else "RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # SyntaxError is PIL's word for a broken PNG
        raise ValueError(f"cannot read the image {file}: {error}") from error
    return array[..., None] if grey else array


def _not_found(spec: str, place: Path, why: Exception | None) -> FileNotFoundError:
    tried = "download=False" if why is None else f"it could not be downloaded ({why})"
    return FileNotFoundError(
        f"{spec} is not, or not whole, in {place} and {tried}: copy the official files there, "
        "name another root by root=... or $VITPROBE_DATA, or let them be downloaded where there is a network"
    )


def _torchvision(spec: str, root: Path, download: bool) -> Parts:
    import torchvision.datasets

    class_name, folder = _TORCHVISION[spec]
    read = getattr(torchvision.datasets, class_name)
    try:
        train, test = read(root, train=True), read(root, train=False)
    except RuntimeError:  # torchvision's word for files that are missing or of another md5
        if not download:
            raise _not_found(spec, root / folder, None) from None
        try:
            train, test = read(root, train=True, download=True), read(root, train=False)
        except (OSError, RuntimeError) as error:
            raise _not_found(spec, root / folder, error) from error
    splits = [as_split(np.asarray(part.data), np.asarray(part.targets), root / folder) for part in (train, test)]
    return splits[0], splits[1], tuple(train.classes)


def _svhn(spec: str, root: Path, download: bool) -> Parts:
    train, test = (_read_svhn(root / f"{part}_32x32.mat", part, download) for part in ("train", "test"))
    return train, test, tuple(map(str, range(10)))


# torchvision downloads the file but does not read it: by its md5 it would refuse any but the official two.
def _read_svhn(path: Path, part: str, download: bool) -> Split:
    import scipy.io
    import torchvision.datasets

    if not path.is_file():
        if not download:
            raise _not_found("svhn", path, None)
        try:
            torchvision.datasets.SVHN(path.parent, split=part, download=True)
        except (OSError, RuntimeError) as error:
            raise _not_found("svhn", path, error) from error
    try:
        file = scipy.io.loadmat(path)
        images, labels = rearrange(file["X"], "y x channel image -> image y x channel"), file["y"].reshape(-1)
    except Exception as error:  # scipy has many for a damaged file
        raise ValueError(f"{path} is not a file of SVHN, a .mat of images X and labels y: {error}") from error
    return as_split(images, np.where(labels == 10, 0, labels), path)  # the files call the digit 0 class 10


READERS: dict[str, tuple[str, Callable[[str], Parts]]] = {
    "folder": ("PATH", _folder),
    "npz": ("TRAIN[,TEST]", _npz),
}
"""Sources that a path follows: what to type after the colon, and the reader of it."""

NAMED: dict[str, Callable[[str, Path, bool], Parts]] = {
    "cifar10": _torchvision,
    "cifar100": _torchvision,
    "digits": _digits,
    "fashion_mnist": _torchvision,
    "svhn": _svhn,
    "synthetic:high": _synthetic,
    "synthetic:low": _synthetic,
}
"""Data sets with a name: readers of `(spec, root, download)`."""
