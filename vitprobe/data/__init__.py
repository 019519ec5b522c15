"""Images in: data sets as uint8 tensors, loaders that live on the device, and batched augmentation."""

from vitprobe.data.augment import Augmentation, augmentation
from vitprobe.data.corruption import (
    ALEXNET_ERRORS,
    CORRUPTIONS,
    Corruptions,
    GeneratedCorruptions,
    read_corruptions,
)
from vitprobe.data.datasets import DATA_NAMES, load_data
from vitprobe.data.images import ImageData, Loader
from vitprobe.data.split import Split

__all__ = [
    "ALEXNET_ERRORS",
    "CORRUPTIONS",
    "DATA_NAMES",
    "Augmentation",
    "Corruptions",
    "GeneratedCorruptions",
    "ImageData",
    "Loader",
    "Split",
    "augmentation",
    "load_data",
    "read_corruptions",
]
