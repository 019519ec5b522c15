"""Corrupted images: made ones against closed forms, stored ones against what was written."""

import importlib.metadata
import io

import numpy as np
import pytest
import torch
from PIL import Image

from vitprobe.data import ImageData, Split
from vitprobe.data.corruption import (
    ALEXNET_ERRORS,
    ALL_CORRUPTIONS,
    CORRUPTIONS,
    SEVERITIES,
    GeneratedCorruptions,
    corrupt,
    read_corruptions,
)

NORMALISATION = {"mean": (0.5, 0.4, 0.3), "std": (0.1, 0.2, 0.3)}


def pictures(count=2, size=32, seed=0):
    """Smooth colours, as photographs have."""
    y, x = np.mgrid[:size, :size] / size
    phase = np.random.default_rng(seed).uniform(0, 6, (count, 1, 1, 3))
    waves = 127 + 90 * np.sin(phase + 5 * y[None, :, :, None] + 3 * x[None, :, :, None])
    return np.round(waves).astype(np.uint8)


def normalised(images):
    mean, std = (np.array(NORMALISATION[name]) for name in ("mean", "std"))
    return ((images / 255 - mean) / std).transpose(0, 3, 1, 2)


def image_data(images):
    """A data set whose test images these are."""
    split = Split(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), torch.arange(len(images)) % 2)
    normalisation = {name: values[: split.images.shape[1]] for name, values in NORMALISATION.items()}
    return ImageData("made", "made", split, split, ("a", "b"), **normalisation)


# --- made ones --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("imagecorruptions")


def test_names_are_those_of_the_library(library):
    assert list(CORRUPTIONS) == library.get_corruption_names("common")
    assert set(ALL_CORRUPTIONS) == set(library.get_corruption_names("all"))


@pytest.mark.parametrize("name", ALL_CORRUPTIONS)
def test_an_image_becomes_the_same_wherever_it_stands(library, name):
    images = np.concatenate([pictures(1), pictures(1), pictures(1, seed=1)])
    np.random.seed(3)
    before = np.random.get_state()
    found = corrupt(images, name, 4, seed=5, first=10)
    after = np.random.get_state()
    assert before[2] == after[2] and (before[1] == after[1]).all()
    np.random.seed(4)  # whatever the global generator says
    np.testing.assert_array_equal(corrupt(images[1:], name, 4, seed=5, first=11), found[1:])
    assert found.dtype == np.uint8 and found.shape == images.shape and (found != images).any()
    fixed = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
    same = name in (*fixed, "gaussian_blur", "saturate")
    assert (found[0] == found[1]).all() == same  # two equal images, each with its own draw
    assert (corrupt(images, name, 4, seed=6, first=10) == found).all() == same


def test_closed_forms(library):
    images = pictures(3)
    share = images / 255
    mean = share.mean(axis=(1, 2), keepdims=True)
    by_hand = np.clip((share - mean) * 0.1 + mean, 0, 1) * 255
    np.testing.assert_allclose(corrupt(images, "contrast", 4), np.floor(by_hand), atol=1)
    for image, found in zip(images, corrupt(images, "jpeg_compression", 2), strict=True):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=18)
        np.testing.assert_array_equal(found, np.asarray(Image.open(buffer)))
    grey = np.full((4, 64, 64, 3), 128, np.uint8)
    noise = corrupt(grey, "gaussian_noise", 2).astype(float) - 128 + 0.5  # the library rounds down
    assert noise.std() == pytest.approx(0.12 * 255, rel=0.02)
    assert abs(noise.mean()) < 4 * 0.12 * 255 / np.sqrt(noise.size)


def test_generated_sets_are_normalised_batches(library):
    data = image_data(pictures(12))
    source = GeneratedCorruptions(data, seed=2)
    assert source.images == 12
    batches = list(source.batches("shot_noise", 3, batch_size=5))
    assert [len(x) for x, _ in batches] == [5, 5, 2]
    raw = data.test.images.permute(0, 2, 3, 1).numpy()
    expected = (corrupt(raw, "shot_noise", 3, seed=2) / 255 - np.array(data.mean)) / np.array(data.std)
    np.testing.assert_allclose(torch.cat([x for x, _ in batches]).permute(0, 2, 3, 1), expected, atol=1e-5)
    assert torch.equal(torch.cat([y for _, y in batches]), data.test.labels)
    assert source.config()["seed"] == 2 and "imagecorruptions-imaug" in source.config()["made_by"]


def test_grey_or_small_images_are_refused(library):
    for small, size, channels in [(pictures(size=16), 16, 3), (pictures()[..., :1], 32, 1)]:
        with pytest.raises(ValueError, match=rf"made has images of \({size}, {size}\) px and {channels} channel"):
            GeneratedCorruptions(image_data(small))
    for images in (pictures()[..., :1], pictures(size=31), pictures() / 255):
        with pytest.raises(ValueError, match=r"uint8 images .* in colour, 32 px or more"):
            corrupt(images, "fog", 1)
    with pytest.raises(ValueError, match=r"unknown corruption 'fogg'. Did you mean 'fog'"):
        corrupt(pictures(), "fogg", 1)
    with pytest.raises(ValueError, match="severity 0 is not one of 1, 2, 3, 4, 5"):
        corrupt(pictures(), "fog", 0)


def test_without_the_library_the_error_says_what_to_type(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"pip install 'vitprobe\[corruptions\]'"):
        corrupt(pictures(), "fog", 1)


# --- stored ones ------------------------------------------------------------------------------------


def write_arrays(folder, names=("fog", "gaussian_noise"), count=7):
    """As CIFAR-10-C: five severities one after the other, the labels five times."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, count)
    arrays = {name: rng.integers(0, 256, (5 * count, 8, 6, 3), dtype=np.uint8) for name in names}
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(labels, 5))
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return labels, arrays


def test_arrays_are_read_in_batches_by_severity(tmp_path):
    labels, arrays = write_arrays(tmp_path / "CIFAR-10-C")
    source = read_corruptions(tmp_path / "CIFAR-10-C", **NORMALISATION)
    assert source.corruptions == ("gaussian_noise", "fog") and source.images == 7
    for name, array in arrays.items():
        for severity in SEVERITIES:
            batches = list(source.batches(name, severity, batch_size=3))
            assert [len(x) for x, _ in batches] == [3, 3, 1]
            wanted = normalised(array[7 * (severity - 1) : 7 * severity])
            np.testing.assert_allclose(torch.cat([x for x, _ in batches]), wanted, atol=1e-5)
            np.testing.assert_array_equal(torch.cat([y for _, y in batches]), labels)
    assert source.config() == {"folder": "CIFAR-10-C", "images": 7, "mean": [0.5, 0.4, 0.3], "std": [0.1, 0.2, 0.3]}


def write_pictures(folder, names=("snow", "pixelate"), classes=("n02", "n01"), count=3):
    """As ImageNet-C: a folder for each corruption, severity and class; lossless here."""
    rng = np.random.default_rng(0)
    written = {}
    for name in names:
        for severity in SEVERITIES:
            for label, kind in enumerate(sorted(classes)):
                place = folder / name / str(severity) / kind
                place.mkdir(parents=True)
                for number in range(count):
                    picture = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
                    Image.fromarray(picture).save(place / f"val_{number}.png")
                    written.setdefault((name, severity), []).append((picture, label))
    return written


def test_folders_are_read_class_after_class(tmp_path):
    written = write_pictures(tmp_path / "ImageNet-C")
    source = read_corruptions(tmp_path / "ImageNet-C", **NORMALISATION)
    assert source.corruptions == ("snow", "pixelate") and source.images == 6
    for (name, severity), wanted in written.items():
        batches = list(source.batches(name, severity, batch_size=4))
        assert [len(x) for x, _ in batches] == [4, 2]
        images = np.stack([picture for picture, _ in wanted])
        np.testing.assert_allclose(torch.cat([x for x, _ in batches]), normalised(images), atol=1e-5)
        assert torch.cat([y for _, y in batches]).tolist() == [label for _, label in wanted]


def test_grey_pictures_among_coloured_ones_get_three_channels(tmp_path):
    write_pictures(tmp_path / "c", names=("snow",))
    for file in (tmp_path / "c/snow/1/n01").iterdir():
        Image.fromarray(np.full((6, 8), 51, np.uint8)).save(file)
    source = read_corruptions(tmp_path / "c", **NORMALISATION)
    images = torch.cat([x for x, _ in source.batches("snow", 1, batch_size=3)])
    np.testing.assert_allclose(images[:3], normalised(np.full((3, 6, 8, 3), 51)), atol=1e-5)


def test_sets_of_other_images_are_refused(tmp_path):
    write_pictures(tmp_path / "c")
    (tmp_path / "c/pixelate/3/n01/val_1.png").unlink()
    source = read_corruptions(tmp_path / "c", **NORMALISATION)
    with pytest.raises(ValueError, match=r"pixelate/3 has other images than snow/1, e.g. n01.val_1.png"):
        list(source.batches("pixelate", 3))
    with pytest.raises(ValueError, match="unknown corruption 'fog'"):
        list(source.batches("fog", 3))
    with pytest.raises(ValueError, match="severity 6 is not one of"):
        list(source.batches("snow", 6))


def test_folders_that_do_not_fit(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing has no corrupted images: wanted are"):
        read_corruptions(tmp_path / "nothing", **NORMALISATION)
    with pytest.raises(ValueError, match="one mean and one std above 0 for each channel"):
        read_corruptions(tmp_path, mean=(0.5,), std=(0.0,))
    labels, _ = write_arrays(tmp_path / "c", names=("fog",))
    with pytest.raises(ValueError, match=r"fog: images of 3 channel\(s\) and a mean of 1"):
        list(read_corruptions(tmp_path / "c", mean=(0.5,), std=(0.1,)).batches("fog", 1))
    np.save(tmp_path / "c/fog.npy", np.zeros((34, 8, 6, 3), np.uint8))
    with pytest.raises(ValueError, match=r"fog.npy holds 34 images and labels.npy 35 labels"):
        list(read_corruptions(tmp_path / "c", **NORMALISATION).batches("fog", 1))
    np.save(tmp_path / "c/labels.npy", np.tile(labels, 5)[:-1])
    with pytest.raises(ValueError, match="one label for each image of five severities"):
        read_corruptions(tmp_path / "c", **NORMALISATION)
    np.save(tmp_path / "c/labels.npy", np.arange(35))
    with pytest.raises(ValueError, match="the five severities have other labels"):
        read_corruptions(tmp_path / "c", **NORMALISATION)


@pytest.mark.parametrize(
    ("name", "mean"), [("cifar10", 0.2386), ("cifar100", 0.5899), ("imagenet_park_kim", 0.8054), ("imagenet", 0.7890)]
)
def test_alexnet_errors_have_their_known_means(name, mean):
    errors = ALEXNET_ERRORS[name]
    assert tuple(errors) == CORRUPTIONS
    assert np.mean(list(errors.values())) == pytest.approx(mean, abs=5e-5)
