import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from vitprobe.data import DATA_NAMES, Split, load_data
from vitprobe.data.split import hold_out, subset

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck".split()  # noqa: SIM905


def _pixels(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(count, *shape), dtype=np.uint8)


def _npz(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


# Subsets and held-out splits

labels_of_some_classes = st.integers(1, 5).flatmap(
    lambda classes: st.lists(st.integers(0, classes - 1), max_size=40).map(lambda rest: [*range(classes), *rest])
)


@st.composite
def labelled(draw: st.DrawFn) -> Split:
    """Images whose one pixel is their index, of classes that each have at least one."""
    labels = draw(labels_of_some_classes.flatmap(st.permutations))
    return Split(torch.arange(len(labels), dtype=torch.uint8).reshape(-1, 1, 1, 1), torch.tensor(labels))


def _indices(split: Split) -> list[int]:
    return split.images.flatten().tolist()


@given(split=labelled(), size=st.integers(0, 60))
def test_a_subset_is_the_first_of_each_class_in_their_order(split: Split, size: int) -> None:
    labels = split.labels.tolist()
    classes = max(labels) + 1
    names = [f"class {label}" for label in range(classes)]
    wanted = [size // classes + (label < size % classes) for label in range(classes)]
    if size < classes:
        with pytest.raises(ValueError, match=f"train_size={size} is less than one image for each of {classes}"):
            subset(split, size, names, "train_size")
    elif any(labels.count(label) < wanted[label] for label in range(classes)):
        with pytest.raises(ValueError, match=r"give (\d+) or less") as error:
            subset(split, size, names, "train_size")
        largest = int(str(error.value).split()[-3])
        assert len(subset(split, largest, names, "train_size")) == largest < size
        with pytest.raises(ValueError, match="or less"):
            subset(split, largest + 1, names, "train_size")
    else:
        taken = [0] * classes
        kept = []
        for index, label in enumerate(labels):
            if taken[label] < wanted[label]:
                taken[label] += 1
                kept.append(index)
        result = subset(split, size, names, "train_size")
        assert _indices(result) == kept
        assert result.labels.tolist() == [labels[index] for index in kept]
        assert len(result) == size


@given(split=labelled())
def test_the_last_fifth_of_each_class_is_held_out(split: Split) -> None:
    counts = split.labels.bincount().tolist()
    if 1 in counts:
        with pytest.raises(ValueError, match=rf"here: class {counts.index(1)} has 1 image"):
            hold_out(split, "here")
        return
    train, test = hold_out(split, "here")
    assert sorted(_indices(train) + _indices(test)) == _indices(split)
    for label, count in enumerate(counts):
        train_images = [i for i, y in zip(_indices(train), train.labels.tolist(), strict=True) if y == label]
        test_images = [i for i, y in zip(_indices(test), test.labels.tolist(), strict=True) if y == label]
        assert train_images == sorted(train_images)
        assert max(train_images) < min(test_images)
        assert abs(len(test_images) - count / 5) <= 0.5 or len(test_images) == 1


# Digits


def test_digits_are_the_scans_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    data = load_data("digits")
    assert len(data.train) + len(data.test) == 1797
    assert 0.79 < len(data.train) / 1797 < 0.81
    assert (data.name, data.image_size, data.channels) == ("digits", (8, 8), 1)
    assert data.class_names == tuple("0123456789")
    original = load_digits()
    scans = np.round(original.images * 255 / 16).astype(np.uint8)
    first_seven = np.flatnonzero(original.target == 7)[0]
    ours = data.train.images[data.train.labels == 7][0, 0].numpy()
    assert (ours == scans[first_seven]).all()
    assert data.train.images.max() == 255


def test_sizes_are_passed_to_the_right_split() -> None:
    data = load_data("digits", train_size=25, test_size=10)
    assert data.train.labels.bincount().tolist() == [3] * 5 + [2] * 5
    assert data.test.labels.bincount().tolist() == [1] * 10
    with pytest.raises(ValueError, match=r"test_size=9999 wants 1000 images of class 0 \('0'\)"):
        load_data("digits", test_size=9999)


@pytest.mark.parametrize("spec", ["digit", "digits:8", "folder", "npz:", "synthetic", "cifar", ""])
def test_an_unknown_spec_is_answered_with_the_known_ones(spec: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown data set '{spec}'.*folder:PATH, npz:TRAIN\[,TEST\], svhn"):
        load_data(spec)
    assert "digits" in DATA_NAMES


# .npz


@pytest.mark.parametrize("shape", [(5, 6), (5, 6, 1), (5, 6, 3)])
def test_npz_keeps_every_pixel(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images, test_images = _pixels(8, *shape), _pixels(4, *shape, seed=1)
    train = _npz(tmp_path / "a.npz", images=images, labels=np.arange(8, dtype=np.uint8) % 2)
    test = _npz(tmp_path / "b.npz", images=test_images, labels=np.arange(4, dtype=np.int32) % 2)
    data = load_data(f"npz:{train},{test}")
    assert (data.name, data.image_size, data.class_names) == ("a", (5, 6), ("0", "1"))
    assert data.test.labels.tolist() == [0, 1, 0, 1]
    for index, y, x in np.ndindex(4, 5, 6):
        assert data.test.images[index, :, y, x].tolist() == np.atleast_1d(test_images[index, y, x]).tolist()
    pixels = images.reshape(-1, data.channels) / 255
    assert data.mean == pytest.approx(pixels.mean(0))
    assert data.std == pytest.approx(pixels.std(0))


def test_npz_without_a_test_file_holds_out_a_fifth(tmp_path: Path) -> None:
    images = _pixels(20, 4, 4)
    path = _npz(tmp_path / "a.npz", images=images, labels=[0] * 10 + [1] * 10, label_names=["cat", "dog"])
    data = load_data(f"npz:{path}")
    assert data.class_names == ("cat", "dog")
    assert (data.test.images[:, 0].numpy() == images[[8, 9, 18, 19]]).all()
    assert (data.train.images[:, 0].numpy() == images[[*range(8), *range(10, 18)]]).all()


def test_cifar_is_recognised_by_its_class_names_and_shape(tmp_path: Path) -> None:
    labels = np.tile(np.arange(10), 2)
    named = _npz(tmp_path / "a.npz", images=_pixels(20, 32, 32, 3), labels=labels, label_names=CIFAR10)
    assert load_data(f"npz:{named}").mean == (0.4914, 0.4822, 0.4465)
    nameless = _npz(tmp_path / "b.npz", images=_pixels(20, 32, 32, 3), labels=labels)
    small = _npz(tmp_path / "c.npz", images=_pixels(20, 16, 16, 3), labels=labels, label_names=CIFAR10)
    for path in (nameless, small):
        assert load_data(f"npz:{path}").mean == pytest.approx([0.5] * 3, abs=0.02)


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        (
            {"images": _pixels(4, 2, 2) / 255, "labels": [0, 1, 0, 1]},
            TypeError,
            r"a\.npz: images are float64, uint8",
        ),
        (
            {"images": _pixels(4, 2, 2).astype(np.uint16), "labels": [0, 1, 0, 1]},
            TypeError,
            r"images are uint16",
        ),
        (
            {"images": _pixels(4, 2, 2), "labels": [0.0, 1, 0, 1]},
            TypeError,
            r"a\.npz: labels are float64, integers",
        ),
        ({"images": _pixels(4, 2, 2), "labels": ["a", "b", "a", "b"]}, TypeError, r"a\.npz: labels are <U1"),
        ({"images": _pixels(4, 2, 2), "labels": [0, 1, -1, 1]}, ValueError, r"a\.npz: label -1 at index 2"),
        (
            {"images": _pixels(4, 2, 2), "labels": [0, 1, 0]},
            ValueError,
            r"a\.npz: 4 images but labels of shape \(3,\)",
        ),
        (
            {"images": _pixels(4, 2, 2), "labels": [[0], [1], [0], [1]]},
            ValueError,
            r"a\.npz: 4 images but .*\(4, 1\)",
        ),
        (
            {"images": _pixels(4, 3, 8, 8), "labels": [0, 1, 0, 1]},
            ValueError,
            r"a\.npz: images have shape \(4, 3, 8, 8\)",
        ),
        (
            {"images": _pixels(4, 2), "labels": [0, 1, 0, 1]},
            ValueError,
            r"a\.npz: images have shape \(4, 2\)",
        ),
        (
            {"images": _pixels(0, 2, 2), "labels": np.zeros(0, int)},
            ValueError,
            r"a\.npz: .*at least one image",
        ),
        (
            {"images": _pixels(4, 2, 2), "labels": [0, 2, 0, 2]},
            ValueError,
            r"a\.npz: class 1 \('1'\) has no training",
        ),
        ({"images": _pixels(4, 2, 2), "labels": [0, 1, 1, 1]}, ValueError, r"a\.npz: class 0 has 1 image"),
        (
            {"images": _pixels(4, 2, 2), "labels": [0, 1, 0, 1], "label_names": ["a"]},
            ValueError,
            r"a\.npz: label 1 at index \d of the training images is out of range; there are 1 classes",
        ),
        ({"images": _pixels(4, 2, 2)}, ValueError, r"a\.npz has no array 'labels'"),
        (
            {"images": np.array([{}, {}], dtype=object), "labels": [0, 1]},
            ValueError,
            r"a\.npz is not a readable",
        ),
        (
            {"images": np.zeros((4, 2, 2), np.uint8), "labels": [0, 1, 0, 1]},
            ValueError,
            r"channel 0 has the same value",
        ),
    ],
)
def test_a_wrong_npz_is_refused_by_name(tmp_path: Path, arrays: dict, error: type[Exception], message: str) -> None:
    path = _npz(tmp_path / "a.npz", **arrays)
    with pytest.raises(error, match=message):
        load_data(f"npz:{path}")


def test_two_npz_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def save(name: str, **changes: object) -> Path:
        arrays = {"images": _pixels(4, 8, 8), "labels": [0, 1, 0, 1], "label_names": ["a", "b"]}
        return _npz(tmp_path / name, **{**arrays, **changes})

    train = save("train.npz")
    with pytest.raises(ValueError, match=r"\(1, 8, 8\) but test images \(1, 4, 4\)"):
        load_data(f"npz:{train},{save('small.npz', images=_pixels(4, 4, 4))}")
    with pytest.raises(ValueError, match=r"train\.npz and .*names\.npz have different label_names"):
        load_data(f"npz:{train},{save('names.npz', label_names=['b', 'a'])}")
    with pytest.raises(ValueError, match=r"label 2 at index 3 of the test images is out of range"):
        load_data(f"npz:{train},{save('labels.npz', labels=[0, 1, 0, 2])}")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nothing\.npz"):
        load_data(f"npz:{train},{tmp_path / 'nothing.npz'}")
    with pytest.raises(ValueError, match="names 3 files"):
        load_data(f"npz:{train},{train},{train}")


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 cut off"])
def test_a_damaged_npz_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.npz is not a readable \.npz"):
        load_data(f"npz:{path}")


# Folders of images


def _save(path: Path, array: np.ndarray, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(array)
    (picture.convert(mode) if mode else picture).save(path)


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_folder_with_two_splits(tmp_path: Path, test_name: str) -> None:
    images = _pixels(7, 6, 8, 3)
    _save(tmp_path / "train" / "dog" / "deep" / "b.png", images[0])
    _save(tmp_path / "train" / "dog" / "a.PNG", images[1])
    _save(tmp_path / "train" / "cat" / "2.bmp", images[2])
    _save(tmp_path / "train" / "cat" / "10.png", images[3])
    _save(tmp_path / "train" / ".hidden" / "x.png", images[4])
    _save(tmp_path / "train" / "cat" / "._2.png", images[4])
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    _save(tmp_path / test_name / "dog" / "c.png", images[5])
    data = load_data(f"folder:{tmp_path}")
    assert data.class_names == ("cat", "dog")
    assert data.train.labels.tolist() == [0, 0, 1, 1]
    assert (data.train.images.permute(0, 2, 3, 1).numpy() == images[[3, 2, 1, 0]]).all()
    assert data.test.labels.tolist() == [1]
    assert (data.test.images[0].permute(1, 2, 0).numpy() == images[5]).all()
    assert (data.name, data.image_size) == (tmp_path.name, (6, 8))


def test_folder_of_classes_holds_out_the_last_fifth(tmp_path: Path) -> None:
    images = _pixels(10, 4, 4)
    for index, image in enumerate(images):
        _save(tmp_path / "ab"[index % 2] / f"{index}.png", image)
    data = load_data(f"folder:{tmp_path}")
    assert data.channels == 1
    assert (data.test.images[:, 0].numpy() == images[[8, 9]]).all()
    assert (data.train.images[:, 0].numpy() == images[[0, 2, 4, 6, 1, 3, 5, 7]]).all()


def test_one_coloured_image_makes_all_of_them_coloured(tmp_path: Path) -> None:
    images = _pixels(3, 4, 4, 3)
    for name in "ab":
        _save(tmp_path / "train" / name / "grey.png", images[0, ..., 0])
    _save(tmp_path / "test" / "a" / "colour.png", images[1])
    _save(tmp_path / "test" / "b" / "transparent.png", images[2], "RGBA")
    data = load_data(f"folder:{tmp_path}")
    assert (data.train.images.numpy() == images[0, ..., 0]).all()
    assert (data.test.images.permute(0, 2, 3, 1).numpy() == images[1:]).all()


def _folder(tmp_path: Path) -> Path:
    for part, name in (("train", "cat"), ("train", "dog"), ("test", "cat")):
        _save(tmp_path / part / name / "1.png", _pixels(1, 4, 4, 3)[0])
    return tmp_path


def test_images_of_different_sizes_are_refused_by_both_names(tmp_path: Path) -> None:
    path = _folder(tmp_path)
    _save(path / "test" / "cat" / "2.png", _pixels(1, 4, 6, 3)[0])
    with pytest.raises(ValueError, match=r"train/cat/1\.png is 4 x 4 px and .*test/cat/2\.png is 6 x 4 px"):
        load_data(f"folder:{path}")


@pytest.mark.parametrize("kept", [0, 40, 60])
def test_an_unreadable_image_is_refused_by_name(tmp_path: Path, kept: int) -> None:
    path = _folder(tmp_path)
    broken = path / "train" / "dog" / "1.png"
    broken.write_bytes(broken.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"cannot read the image .*train/dog/1\.png"):
        load_data(f"folder:{path}")


def test_sixteen_bits_are_refused(tmp_path: Path) -> None:
    path = _folder(tmp_path)
    _save(path / "train" / "dog" / "2.png", _pixels(1, 4, 4)[0].astype(np.uint16) * 257)
    with pytest.raises(ValueError, match=r"dog/2\.png: it has more than 8 bits per pixel"):
        load_data(f"folder:{path}")


def test_a_folder_without_what_is_needed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nothing"):
        load_data(f"folder:{tmp_path / 'nothing'}")
    with pytest.raises(FileNotFoundError, match="has no folders"):
        load_data(f"folder:{tmp_path}")
    path = _folder(tmp_path)
    (path / "train" / "owl").mkdir()
    with pytest.raises(FileNotFoundError, match=r"train/owl has no images"):
        load_data(f"folder:{path}")
    (path / "train" / "owl").rmdir()
    (path / "test" / "bat").mkdir()
    with pytest.raises(ValueError, match=r"test/bat is a class that .*train does not have"):
        load_data(f"folder:{path}")
    os.rename(path / "test", path / "other")
    with pytest.raises(FileNotFoundError, match=r"neither test nor val: add one, or type folder:.*train"):
        load_data(f"folder:{path}")


# The official files


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("cifar10", "cifar-10-batches-py"),
        ("cifar100", "cifar-100-python"),
        ("fashion_mnist", "FashionMNIST/raw"),
        ("svhn", "train_32x32.mat"),
    ],
)
def test_missing_files_are_answered_with_where_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, place: str
) -> None:
    import torchvision.datasets as official

    with pytest.raises(FileNotFoundError, match=rf"{spec} is not.*{tmp_path / place} and download=False: copy"):
        load_data(spec, root=tmp_path, download=False)

    def offline(self: object) -> None:
        raise OSError("no network")

    for name in ("CIFAR10", "MNIST", "SVHN"):
        monkeypatch.setattr(getattr(official, name), "download", offline)
    monkeypatch.setenv("VITPROBE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path / place} and it could not be downloaded \(no network\)"):
        load_data(spec)


def _save_svhn(path: Path, images: np.ndarray, labels: list[int]) -> None:
    savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": np.array(labels, np.uint8)[:, None]})


def test_svhn_counts_ten_as_the_digit_0(tmp_path: Path) -> None:
    images = _pixels(12, 32, 32, 3)
    _save_svhn(tmp_path / "train_32x32.mat", images[:10], [*range(1, 11)])
    _save_svhn(tmp_path / "test_32x32.mat", images[10:], [10, 3])
    data = load_data("svhn", root=tmp_path, download=False)
    assert data.train.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert data.test.labels.tolist() == [0, 3]
    assert (data.train.images.permute(0, 2, 3, 1).numpy() == images[:10]).all()
    (tmp_path / "test_32x32.mat").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"test_32x32\.mat is not a file of SVHN"):
        load_data("svhn", root=tmp_path, download=False)


def test_fashion_mnist_is_read_from_its_idx_files(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    images = _pixels(12, 28, 28)
    for part, chosen in (("train", slice(10)), ("t10k", slice(10, 12))):
        count = len(images[chosen]).to_bytes(4, "big")
        size = (28).to_bytes(4, "big")
        (raw / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + count + 2 * size + images[chosen].tobytes())
        labels = bytes(range(10)) if part == "train" else bytes([4, 2])
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + count + labels)
    data = load_data("fashion_mnist", root=tmp_path, download=False)
    assert (data.train.images[:, 0].numpy() == images[:10]).all()
    assert data.test.labels.tolist() == [4, 2]
    assert data.class_names[9] == "Ankle boot"


@pytest.fixture(scope="module")
def official_cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 in its official files and two .npz of the first of each class, as the shared script writes."""
    script = SHARED / "restore.py"
    if not script.is_file():
        pytest.skip("needs the shared copy of CIFAR-10")
    root = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, script, root], check=True, capture_output=True)
    return root


def test_a_subset_of_the_official_cifar10_is_the_npz_of_it(official_cifar10: Path) -> None:
    root = official_cifar10
    data = load_data("cifar10", root=root, download=False, train_size=10000, test_size=2000)
    same = load_data(f"npz:{root / 'cifar10-train-10k.npz'},{root / 'cifar10-test-2k.npz'}")
    assert data.config() == same.config()
    assert torch.equal(data.train.images, same.train.images)
    assert torch.equal(data.test.labels, same.test.labels)
    assert data.class_names == same.class_names == tuple(CIFAR10)
    assert (data.mean, data.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    assert data.train.labels.bincount().tolist() == [1000] * 10


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared data")
def test_cifar100_is_normalised_by_the_published_constants() -> None:
    folder = SHARED / "cifar100"
    data = load_data(f"npz:{folder / 'cifar100-train-10k.npz'},{folder / 'cifar100-test-2k.npz'}")
    assert (data.num_classes, data.mean, data.std) == (
        100,
        (0.5071, 0.4867, 0.4408),
        (0.2675, 0.2565, 0.2761),
    )


@pytest.mark.parametrize("splits", [("val", "test"), ("Train", "Test"), ("Train", "Val", "extra"), ("test",)])
def test_splits_are_no_classes(tmp_path: Path, splits: tuple[str, ...]) -> None:
    for split in splits:
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for index, pixels in enumerate(_pixels(5, 4, 4)):
                Image.fromarray(pixels).save(tmp_path / split / name / f"{index}.png")
    with pytest.raises(
        ValueError, match=r"which are splits and no classes: wanted is .*train/CLASS beside .*test/CLASS"
    ):
        load_data(f"folder:{tmp_path}")


def test_a_train_may_be_a_class(tmp_path: Path) -> None:
    for name in ("Train", "bus"):
        (tmp_path / name).mkdir()
        for index, pixels in enumerate(_pixels(5, 4, 4)):
            Image.fromarray(pixels).save(tmp_path / name / f"{index}.png")
    assert load_data(f"folder:{tmp_path}").class_names == ("Train", "bus")
