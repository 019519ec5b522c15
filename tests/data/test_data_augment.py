import pytest
import torch

from vitprobe.data.augment import augmentation, shift


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


@pytest.mark.parametrize("name", ["none", "crop", "flip", "crop_flip"])
def test_augmentation_keeps_shape_and_dtype_and_the_images_given(name: str) -> None:
    images = _images(5, 16, 24, channels=1)
    before = images.clone()
    result = augmentation(name)(images, torch.Generator().manual_seed(0))
    assert result.shape == images.shape
    assert result.dtype == torch.uint8
    assert torch.equal(images, before)
    assert name != "none" or torch.equal(result, images)


def test_an_unknown_augmentation_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown augmentation 'flop'.*'flip'.*Known: crop, crop_flip, flip, none"):
        augmentation("flop")
