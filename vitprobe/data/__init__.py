"""Images in: data sets as uint8 tensors, loaders that live on the device, and batched augmentation."""

from vitprobe.data.augment import augmentation
from vitprobe.data.datasets import DATA_NAMES, load_data
from vitprobe.data.images import ImageData, Loader
from vitprobe.data.split import Split

__all__ = ["DATA_NAMES", "ImageData", "Loader", "Split", "augmentation", "load_data"]
