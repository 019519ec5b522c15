import pytest
import torch

from vitprobe.data.augment import augmentation, shift, take

STRONG = (
    "crop_flip+rand-m9-n2-mstd1.0",
    "crop_flip+randaugment-n2-m14",
    "trivialaugment",
    "resized_crop-0.08+flip+rand-m9-mstd0.5-inc1+jitter-0.4+erase-0.25-pixel",
    "resized_crop-0.75-square+flip+randaugment-n1-m8+jitter-0.1+erase-0.25",
)


def _images(count: int, height: int = 32, width: int = 32, channels: int = 3) -> torch.Tensor:
    shape = (count, channels, height, width)
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def _moved(image: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """Pixel by pixel: what was at (y, x) is at (y + down, x + right), and the rest is black."""
    result = torch.zeros_like(image)
    height, width = image.shape[-2:]
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                result[:, y, x] = image[:, y - down, x - right]
    return result


@pytest.mark.parametrize(("height", "width"), [(32, 32), (16, 24)])
def test_shift_moves_each_image_by_its_own_offset(height: int, width: int) -> None:
    images = _images(4, height, width)
    pad_y, pad_x = height // 8, width // 8
    down, right = torch.tensor([0, pad_y, -pad_y, 1]), torch.tensor([0, -pad_x, pad_x, -1])
    moved = shift(images, down, right)
    for image, result, dy, dx in zip(images, moved, down.tolist(), right.tolist(), strict=True):
        assert torch.equal(result, _moved(image, dy, dx))


@pytest.mark.parametrize(("size", "pad"), [(32, 4), (8, 1)])
def test_crop_draws_every_shift_within_an_eighth_equally_often(size: int, pad: int) -> None:
    image = _images(1, size, size)
    copies = 50 * (2 * pad + 1) ** 2
    cropped = augmentation("crop")(image.expand(copies, -1, -1, -1), torch.Generator().manual_seed(1))
    counts = [
        (cropped == _moved(image[0], down, right)).flatten(1).all(1).sum().item()
        for down in range(-pad, pad + 1)
        for right in range(-pad, pad + 1)
    ]
    assert sum(counts) == copies  # nothing but these shifts
    chi_squared = sum((count - 50) ** 2 / 50 for count in counts)
    freedom = len(counts) - 1
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5


def test_flip_mirrors_left_and_right_of_half_of_the_images() -> None:
    images = _images(2000, 4, 4)
    flipped = augmentation("flip")(images, torch.Generator().manual_seed(1))
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images[..., [3, 2, 1, 0]]).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert abs(mirrored.float().mean() - 0.5) < 4 * 0.5 / 2000**0.5


def test_crop_flip_does_both() -> None:
    image = _images(1, 8, 8)
    result = augmentation("crop_flip")(image.expand(400, -1, -1, -1), torch.Generator().manual_seed(1))
    moved = [_moved(image[0], down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    seen = {
        index
        for index, wanted in enumerate([*moved, *(picture.flip(-1) for picture in moved)])
        if (result == wanted).flatten(1).all(1).any()
    }
    assert seen == set(range(18))


def test_the_first_augmentations_draw_what_they_always_drew() -> None:
    """Results that were kept depend on it: rows, columns, mirrors, each for the whole batch."""
    images = _images(6, 16, 24)
    generator = torch.Generator().manual_seed(3)
    down = torch.randint(-2, 3, (6,), generator=generator)
    right = torch.randint(-3, 4, (6,), generator=generator)
    mirrored = torch.randint(2, (6, 1, 1, 1), generator=generator).bool()
    moved = shift(images, down, right)
    wanted = torch.where(mirrored, moved.flip(-1), moved)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(augmentation("crop_flip")(images, generator), wanted)
    assert torch.equal(augmentation("crop")(images, torch.Generator().manual_seed(3)), moved)


@pytest.mark.parametrize("name", ["none", "crop", "flip", "crop_flip", *STRONG])
@pytest.mark.parametrize("channels", [1, 3])
def test_augmentation_keeps_shape_dtype_images_and_global_random_numbers(name: str, channels: int) -> None:
    augment = augmentation(name)
    images = _images(40, 16, 24, channels)
    before, state = images.clone(), torch.random.get_rng_state()
    parameters = augment.draw(40, images.shape[1:], torch.Generator().manual_seed(0))
    assert all(len(numbers) == 40 for numbers in parameters.values())
    drawn = {name: numbers.clone() for name, numbers in parameters.items()}
    result = augment.apply(images, parameters)
    x = result.float()
    kept = x.clone()
    finished = augment.finish(x, parameters)
    assert (result.shape, result.dtype) == (images.shape, torch.uint8)
    assert (finished.shape, finished.dtype) == (images.shape, torch.float32)
    assert torch.equal(images, before)
    assert torch.equal(x, kept)
    assert all(torch.equal(numbers, drawn[name]) for name, numbers in parameters.items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(finished, x) != ("erase" in name)
    assert name != "none" or torch.equal(result, images)


@pytest.mark.parametrize("name", ["crop_flip", *STRONG])
def test_a_part_comes_out_as_that_part_of_the_whole(name: str) -> None:
    augment = augmentation(name, fill=(90, 100, 110))
    images = _images(37, 24, 16)
    parameters = augment.draw(37, images.shape[1:], torch.Generator().manual_seed(0))
    whole = augment.apply(images, parameters)
    finished = augment.finish(whole.float().div(100), parameters)
    parts = [torch.arange(5, 30, 3), torch.tensor([36, 2, 2, 11]), torch.arange(37).flip(0), *torch.arange(37)[:, None]]
    for part in parts:
        own = take(parameters, part)
        changed = augment.apply(images[part], own)
        assert torch.equal(changed, whole[part])
        assert torch.equal(augment.finish(changed.float().div(100), own), finished[part])


@pytest.mark.parametrize("name", STRONG)
def test_every_image_draws_its_own_numbers_and_a_seed_repeats_them(name: str) -> None:
    augment = augmentation(name)
    image = _images(1).expand(60, -1, -1, -1)

    def augmented(seed: int) -> torch.Tensor:
        parameters = augment.draw(60, image.shape[1:], torch.Generator().manual_seed(seed))
        return augment.finish(augment.apply(image, parameters).float(), parameters)

    first = augmented(0)
    assert len(first.flatten(1).unique(dim=0)) > 40
    assert not torch.equal(augmented(1), first)
    torch.rand(3)
    assert torch.equal(augmented(0), first)


def test_steps_are_applied_in_the_order_given() -> None:
    images = _images(50)
    for name in ("flip+crop", "crop+flip"):
        augment = augmentation(name)
        got = augment(images, torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(0)
        wanted = images
        for step in name.split("+"):
            wanted = augmentation(step)(wanted, generator)
        # Both draw step by step, from one generator.
        assert torch.equal(got, wanted)


def test_the_fill_colour_comes_in_from_outside() -> None:
    images = torch.zeros(200, 3, 16, 16, dtype=torch.uint8)
    augment = augmentation("rand-m10-n1", fill=(1, 2, 3))
    parameters = augment.draw(200, images.shape[1:], torch.Generator().manual_seed(0))
    colours = augment.apply(images, parameters).permute(0, 2, 3, 1).flatten(0, 2).unique(dim=0).tolist()
    assert [1, 2, 3] in colours


@pytest.mark.parametrize("name", [name for name in STRONG if "pixel" not in name])
def test_nothing_waits_for_the_device_or_leaves_it(name: str) -> None:
    """On a device whose numbers cannot be read, and on which nothing from the CPU can be computed with."""
    augment = augmentation(name, fill=(1, 2, 3))
    images = torch.empty(200, 3, 16, 24, dtype=torch.uint8, device="meta")
    parameters = augment.draw(200, images.shape[1:], augment.generator("meta"))
    result = augment.apply(images, parameters)
    assert (result.device, result.shape, result.dtype) == (images.device, images.shape, torch.uint8)
    assert augment.finish(result.float(), parameters).device == images.device


def test_numbers_that_choose_kernels_are_drawn_on_the_cpu() -> None:
    assert augmentation("crop+flip").drawn_on_device
    assert not augmentation("crop_flip+trivialaugment").drawn_on_device
    # A device without a GPU has no generator: asking for one would fail here.
    assert augmentation("crop_flip+trivialaugment").generator("meta").device.type == "cpu"


def test_steps_on_normalised_images_are_not_run_on_others() -> None:
    with pytest.raises(ValueError, match="call draw, apply, normalise, and finish"):
        augmentation("erase-0.5")(_images(2), torch.Generator())
    with pytest.raises(ValueError, match=r"'erase-0.5' acts after normalisation .* put it last"):
        augmentation("erase-0.5+crop")


def test_an_unknown_augmentation_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown augmentation 'flop'.*'flip'.*Known: crop, crop_flip, erase-P"):
        augmentation("flop")
    with pytest.raises(ValueError, match=r"unknown augmentation 'randaugmnt-n2-m9'.*'randaugment-nN-mM'"):
        augmentation("crop+randaugmnt-n2-m9")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("crop-3", r"step 'crop-3': '3' is not understood; wanted is crop, e.g. 'crop'"),
        ("flip+rand-n2", r"step 'rand-n2': M is missing; wanted is rand-mM.*, e.g. 'rand-m9-n2-mstd0.5'"),
        ("rand-m11-n2", r"'m11' is not between 0 and 10"),
        ("rand-m9-n0", r"'n0' is not between 1 and inf"),
        ("rand-m9.5", r"'m9.5' is not a whole number"),
        ("rand-m9-inc2", r"'inc2' is not between 0 and 1"),
        ("rand-m9-p0.3", r"'p0.3' is not understood"),
        ("rand-m9-m8", r"'m8' is not understood"),
        ("randaugment-n2-m31", r"'m31' is not between 0 and 30"),
        ("randaugment-m9", r"N is missing"),
        ("trivialaugment-m9", r"'m9' is not understood"),
        ("jitter", r"a number is missing; wanted is jitter-X"),
        ("erase-1.5", r"'1.5' is not between 0 and 1"),
        ("erase-0.5-const", r"'const' is not understood; wanted is erase-P\[-pixel\]"),
        ("resized_crop-8", r"'8' is not between 0 and 1"),
    ],
)
def test_a_wrong_step_is_answered_with_what_is_wanted(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        augmentation(name)
