import hashlib
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitprobe.data import ImageData, Loader, Split, load_data
from vitprobe.data.images import local_part


def _split(count: int, channels: int = 3, size: int = 8, classes: int = 2) -> Split:
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(256, (count, channels, size, size), generator=generator, dtype=torch.uint8)
    return Split(images, torch.arange(count) % classes)


def _data(**changes: object) -> ImageData:
    facts = {
        "spec": "made",
        "name": "made",
        "train": _split(20),
        "test": _split(7),
        "class_names": ("a", "b"),
        "mean": (0.4, 0.5, 0.6),
        "std": (0.2, 0.25, 0.5),
    }
    return ImageData(**{**facts, **changes})


def _labelled(count: int, **options: object) -> Loader:
    """A loader of 1 px images, each of which has its index as its label."""
    split = Split(torch.zeros(count, 1, 1, 1, dtype=torch.uint8), torch.arange(count))
    return Loader(split, mean=(0.0,), std=(1.0,), **options)


def _order(loader: Loader) -> list[int]:
    return torch.cat([y for _, y in loader]).tolist()


def test_batches_are_normalised_in_units_of_zero_to_one() -> None:
    data = _data()
    batches = list(data.loader("test", batch_size=3))
    assert [x.dtype for x, _ in batches] == [torch.float32] * 3
    pixels = data.test.images.double() / 255
    for channel, (mean, std) in enumerate(zip(data.mean, data.std, strict=True)):
        wanted = (pixels[:, channel] - mean) / std
        got = torch.cat([x for x, _ in batches])[:, channel]
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cat([y for _, y in batches]), data.test.labels)


def test_measured_constants_give_batches_of_mean_0_and_standard_deviation_1() -> None:
    data = load_data("digits")
    x = torch.cat([x for x, _ in data.loader("train")]).double()
    assert abs(x.mean().item()) < 1e-5
    assert x.std(correction=0).item() == pytest.approx(1, abs=1e-5)


@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    drop_last=st.booleans(),
    seed=st.none() | st.integers(0, 9),
)
def test_one_pass_gives_each_image_once(count: int, batch_size: int, drop_last: bool, seed: int | None) -> None:
    if drop_last and batch_size > count:
        with pytest.raises(ValueError, match="leaves no batch"):
            _labelled(count, batch_size=batch_size, drop_last=True)
        return
    loader = _labelled(count, batch_size=batch_size, drop_last=drop_last, seed=seed)
    sizes = [len(y) for _, y in loader]
    assert len(sizes) == len(loader)
    assert set(sizes[:-1]) <= {batch_size}
    order = _order(loader)
    assert len(order) == len(set(order)) == (count - count % batch_size if drop_last else count)
    if seed is None:
        assert order == list(range(len(order)))
    assert (loader.batch_size, loader.dataset_size) == (batch_size, count)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    loader = _labelled(50, batch_size=8, seed=3)
    first = _order(loader)
    assert first != list(range(50))
    assert _order(loader) == first
    loader.epoch = 1
    second = _order(loader)
    assert second != first
    other = _labelled(50, batch_size=8, seed=3)
    other.epoch = 1
    assert _order(other) == second
    assert _order(_labelled(50, batch_size=8, seed=4)) != first


def test_augmented_batches_repeat_whatever_ran_before() -> None:
    data = _data()
    loader = data.loader(batch_size=6, seed=5, augment="crop_flip")
    loader.epoch = 2
    wanted = [x.clone() for x, _ in loader]

    again = data.loader(batch_size=6, seed=5, augment="crop_flip")
    list(again)
    next(iter(again))
    torch.rand(3)
    again.epoch = 2
    assert all(torch.equal(x, y) for (x, _), y in zip(again, wanted, strict=True))
    again.epoch = 3
    assert not any(torch.equal(x, y) for (x, _), y in zip(again, wanted, strict=True))


def test_each_batch_and_each_epoch_is_augmented_differently() -> None:
    image = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(40, -1, -1, -1)
    loader = Loader(
        Split(image, torch.zeros(40, dtype=torch.int64)),
        mean=(0.0,),
        std=(1.0,),
        batch_size=20,
        seed=0,
        augment="crop",
    )
    first, second = (x for x, _ in loader)  # all images are the same, so the order plays no part
    loader.epoch = 1
    assert not torch.equal(first, second)
    assert not torch.equal(first, next(iter(loader))[0])


def test_an_image_comes_several_times_in_a_row_and_the_epoch_stays_as_long() -> None:
    loader = _labelled(20, batch_size=8, seed=3, repeats=3)
    plain = _labelled(20, batch_size=8, seed=3)
    order = _order(plain)
    assert _order(loader) == [image for image in order for _ in range(3)][:20]
    assert loader.batch_sizes == plain.batch_sizes
    assert loader.description["repeats"] == 3
    loader.epoch = plain.epoch = 1
    assert _order(loader) == [image for image in _order(plain) for _ in range(3)][:20]


def test_repeats_are_augmented_differently() -> None:
    loader = _data(train=_split(30, size=16), test=_split(7, size=16)).loader(
        batch_size=30, seed=0, augment="crop", repeats=30
    )
    ((x, y),) = loader
    assert len(set(y.tolist())) == 1
    assert len(x.flatten(1).unique(dim=0)) > 10


def test_erasing_paints_the_mean_after_normalisation() -> None:
    data = _data(train=_split(20, size=16), test=_split(7, size=16))
    ((x, _),) = data.loader(batch_size=20, seed=0, augment="erase-1")
    ((plain, _),) = data.loader(batch_size=20, seed=0, augment="none")
    erased = (x == 0).all(1, keepdim=True)
    assert erased.flatten(1).any(1).all()
    assert torch.equal(x, plain.masked_fill(erased, 0))


def test_the_mean_comes_in_from_outside_in_rand_augment() -> None:
    black = Split(torch.zeros(300, 3, 8, 8, dtype=torch.uint8), torch.arange(300) % 2)
    ((x, _),) = _data(train=black).loader(batch_size=300, seed=0, augment="rand-m10-n1")
    mean = torch.tensor([[[0.4]], [[0.5]], [[0.6]]])
    std = torch.tensor([[[0.2]], [[0.25]], [[0.5]]])
    fill = ((255 * mean).round() / 255 - mean) / std
    assert torch.isclose(x, fill, atol=1e-6).all(1).any()


@given(count=st.integers(1, 70), ranks=st.integers(1, 9))
def test_parts_are_the_batch_and_pairs_stay_together(count: int, ranks: int) -> None:
    parts = [local_part(count, rank, ranks) for rank in range(ranks)]
    assert sorted(torch.cat(parts).tolist()) == list(range(count))
    pairs = [len(part) // 2 for part in parts]
    assert max(pairs) - min(pairs) <= 1
    assert [len(part) % 2 for part in parts] == [0] * (ranks - 1) + [count % 2]
    assert torch.equal(
        torch.cat([part[:pair] for part, pair in zip(parts, pairs, strict=True)]), torch.arange(count // 2)
    )
    batch = torch.rand(count, generator=torch.Generator().manual_seed(count))
    mixed = 0.3 * batch + 0.7 * batch.flip(0)
    for part in parts:
        own = batch[part]
        assert torch.equal(0.3 * own + 0.7 * own.flip(0), mixed[part])


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_processes_together_have_the_batches_of_one(ranks: int) -> None:
    data = _data(train=_split(45, size=16), test=_split(7, size=16))
    options = {
        "batch_size": 19,
        "seed": 5,
        "augment": "crop_flip+rand-m9-n2-mstd0.5+erase-0.5-pixel",
        "repeats": 2,
    }
    whole = data.loader(**options)
    loaders = [data.loader(**options, rank=rank, ranks=ranks) for rank in range(ranks)]
    for loader in loaders:
        assert (len(loader), loader.batch_sizes) == (3, [19, 19, 7])
        loader.epoch = whole.epoch = 4
    for size, (x, y), *shares in zip(whole.batch_sizes, whole, *loaders, strict=True):
        assert len(y) == size
        for rank, (own, labels) in enumerate(shares):
            part = local_part(size, rank, ranks)
            assert torch.equal(own, x[part])
            assert torch.equal(labels, y[part])


def test_nothing_waits_for_the_device() -> None:
    """On a device whose numbers cannot be read."""
    loader = _data().loader(batch_size=7, seed=0, augment="crop_flip+rand-m9-n2+erase-0.5", device="meta", ranks=2)
    assert [tuple(x.shape) for x, _ in loader] == [(4, 3, 8, 8)] * 3


def test_global_random_numbers_are_left_alone() -> None:
    loader = _data().loader(seed=0, augment="crop_flip")
    before = torch.random.get_rng_state()
    list(loader)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_a_user_does_with_a_batch_does_not_reach_the_images() -> None:
    data = _data()
    images, labels = data.test.images.clone(), data.test.labels.clone()
    for x, y in data.loader("test"):
        x.zero_()
        y.zero_()
    assert torch.equal(data.test.images, images)
    assert torch.equal(data.test.labels, labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "valid"}, r"unknown split 'valid'"),
        ({"batch_size": 0}, r"batch_size is 0"),
        ({"augment": "crop"}, r"augment='crop' draws random numbers: give a seed"),
        ({"augment": "mix", "seed": 0}, r"unknown augmentation 'mix'"),
        ({"drop_last": True, "batch_size": 21}, r"batch_size is 21 and there are 20 images"),
        ({"repeats": 0, "seed": 0}, r"repeats is 0; at least 1"),
        ({"repeats": 2}, r"repeats=2 sees other images in each epoch: give a seed"),
        ({"rank": 2, "ranks": 2}, r"rank is 2 of 2; wanted is 0 to ranks - 1"),
        ({"rank": 0, "ranks": 0}, r"rank is 0 of 0"),
        ({"rank": 0, "ranks": 4, "batch_size": 9}, r"a batch of 2 images leaves one of 4 processes .* drop_last=True"),
        ({"rank": 1, "ranks": 6, "batch_size": 10}, r"a batch of 10 images .* a batch_size of 12 or more"),
    ],
)
def test_a_loader_refuses_what_it_cannot_do(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _data().loader(**options)


def test_properties() -> None:
    images = torch.zeros(2, 1, 4, 6, dtype=torch.uint8)
    split = Split(images, torch.tensor([0, 1]))
    data = _data(train=split, test=split, mean=(0.5,), std=(1.0,))
    assert (data.num_classes, data.channels, data.image_size) == (2, 1, (4, 6))


def test_config_is_json_of_the_content_alone() -> None:
    data = _data()
    config = data.config()
    assert json.loads(json.dumps(config)) == config
    same = _data(spec="npz:/somewhere/else.npz", name="else", class_names=("cat", "dog"))
    assert same.config() == config
    sha = hashlib.sha256()
    for split in (data.train, data.test):
        sha.update(str(tuple(split.images.shape)).encode())
        sha.update(bytes(split.images.flatten().tolist()))
        sha.update(b"".join(label.to_bytes(8, "little") for label in split.labels.tolist()))
    assert config["digest"] == sha.hexdigest()


def _changed(split: Split, part: str) -> Split:
    tensor = getattr(split, part).clone()
    tensor.view(-1)[0] = 1 - tensor.view(-1)[0].clamp(max=1)
    return replace(split, **{part: tensor})


@pytest.mark.parametrize("which", ["train", "test"])
@pytest.mark.parametrize("part", ["images", "labels"])
def test_one_other_value_gives_another_digest(which: str, part: str) -> None:
    data = _data()
    other = replace(data, **{which: _changed(getattr(data, which), part)})
    assert other.config()["digest"] != data.config()["digest"]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_digest_tells_one_shape_from_another(channels: int) -> None:
    pixels = torch.zeros(2 * 3 * 16, dtype=torch.uint8)
    labels = torch.tensor([0, 1])
    wide, tall = (Split(pixels[: 32 * channels].reshape(2, channels, *size), labels) for size in ((2, 8), (8, 2)))
    constants = {"mean": (0.5,) * channels, "std": (1.0,) * channels}
    assert (
        _data(train=wide, test=wide, **constants).config()["digest"]
        != _data(train=tall, test=tall, **constants).config()["digest"]
    )


@pytest.mark.parametrize(
    ("images", "labels", "error", "message"),
    [
        (
            torch.zeros(2, 3, 4, 4),
            torch.tensor([0, 1]),
            TypeError,
            r"images are float32, uint8 .*\(255 \* images\)",
        ),
        (torch.zeros(2, 3, 4, 4, dtype=torch.int64), torch.tensor([0, 1]), TypeError, "images are int64"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0.0, 1]), TypeError, "labels are float32"),
        (
            torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
            torch.tensor([0, 1]).int(),
            TypeError,
            r"labels\.long\(\)",
        ),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), ValueError, r"\(2, 4, 4\)"),
        (torch.zeros(2, 4, 4, 3, dtype=torch.uint8), torch.tensor([0, 1]), ValueError, r"\(2, 4, 4, 3\)"),
        (
            torch.zeros(0, 3, 4, 4, dtype=torch.uint8),
            torch.tensor([]).long(),
            ValueError,
            "at least one image",
        ),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0]), ValueError, "2 images but labels"),
        (
            torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
            torch.tensor([0, -2]),
            ValueError,
            "label -2 at index 1",
        ),
    ],
)
def test_a_split_refuses_wrong_tensors(
    images: torch.Tensor, labels: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Split(images, labels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"class_names": ("a",)}, r"label 1 at index 1 of the training images is out of range; there are 1"),
        ({"test": _split(7, classes=3)}, r"label 2 at index 2 of the test images is out of range"),
        ({"class_names": ("a", "b", "c")}, r"class 2 \('c'\) has no training image"),
        ({"test": _split(7, size=4)}, r"\(3, 8, 8\) but test images \(3, 4, 4\)"),
        ({"mean": (0.5,)}, r"give one mean and one std"),
        ({"std": (0.5, 0.0, 0.5)}, r"std above 0"),
    ],
)
def test_image_data_refuses_what_does_not_fit_together(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _data(**changes)
