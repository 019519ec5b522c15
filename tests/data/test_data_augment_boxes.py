import random

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from timm.data import random_erasing
from torch import Tensor
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.functional import resized_crop

from vitprobe.data import load_data
from vitprobe.data.boxes import Erase, ResizedCrop

SIZE = (32, 24)


def _images(count: int, channels: int) -> Tensor:
    """Half real images, half random pixels, `(image, channel, 32, 24)`."""
    real = load_data("digits").test.images[:count].repeat_interleave(4, 2).repeat_interleave(4, 3)[..., :24]
    real = torch.cat([real, 255 - real, real // 2 + 17], 1)[:, :channels]
    noise = torch.randint(256, real.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return torch.where(torch.arange(count).reshape(-1, 1, 1, 1) < count // 2, real, noise)


def _drawn(step: ResizedCrop | Erase, count: int, channels: int = 3, seed: int = 0) -> dict[str, Tensor]:
    return dict(step.draw(count, (channels, *SIZE), torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_resized_crop_is_that_of_torchvision_to_the_grey_level(channels: int) -> None:
    images = _images(40, channels)
    boxes = _drawn(ResizedCrop(0.05), 40)
    got = ResizedCrop(0.05).apply(images, boxes)
    for image, result, *box in zip(
        images, got, *(boxes[name].tolist() for name in ("top", "left", "height", "width")), strict=True
    ):
        picture = Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())
        wanted = np.array(resized_crop(picture, *box, SIZE, InterpolationMode.BILINEAR))
        assert np.array_equal(result.permute(1, 2, 0).squeeze(2).numpy(), wanted), box


@pytest.mark.parametrize(("low", "ratio"), [(0.08, 4 / 3), (0.75, 1.0), (1.0, 4 / 3)])
def test_boxes_of_crops_are_drawn_as_torchvision_draws_them(low: float, ratio: float) -> None:
    boxes = _drawn(ResizedCrop(low, ratio), 4000)
    image = torch.zeros(3, *SIZE)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reference = [RandomResizedCrop.get_params(image, [low, 1.0], [1 / ratio, ratio]) for _ in range(4000)]
    for place, name in enumerate(("top", "left", "height", "width")):
        theirs = [box[place] for box in reference]
        assert stats.ks_2samp(boxes[name].numpy(), theirs).pvalue > 1e-3, name
    assert set(boxes["height"].tolist()) <= set(range(1, 33))
    areas = (boxes["height"] * boxes["width"]).double().numpy()
    assert stats.ks_2samp(areas, [box[2] * box[3] for box in reference]).pvalue > 1e-3


def test_a_box_that_never_fits_is_the_largest_in_the_middle() -> None:
    boxes = ResizedCrop(1.0, 1.0).draw(3, (3, 8, 20), torch.Generator().manual_seed(0))
    assert {name: numbers.tolist() for name, numbers in boxes.items()} == {
        "top": [0] * 3,
        "left": [6] * 3,
        "height": [8] * 3,
        "width": [8] * 3,
    }


def _erased_by_timm(count: int, probability: float) -> Tensor:
    erase = random_erasing.RandomErasing(probability, device="cpu")
    return erase(torch.ones(count, 1, *SIZE)) == 0


def test_erased_boxes_are_drawn_as_timm_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_erasing, "random", random.Random(0))
    count = 3000
    ours = Erase(0.6).apply(torch.ones(count, 1, *SIZE), _drawn(Erase(0.6), count, 1)) == 0
    theirs = _erased_by_timm(count, 0.6)
    assert stats.binomtest(int(ours.flatten(1).any(1).sum()), count, 0.6).pvalue > 1e-3
    boxes = []
    for erased in (ours, theirs):
        erased = erased[erased.flatten(1).any(1)][:, 0]
        rows, columns = erased.any(2), erased.any(1)
        assert torch.equal(erased, rows[:, :, None] & columns[:, None, :])  # one box each
        height, width = rows.sum(1).double(), columns.sum(1).double()
        top, left = rows.byte().argmax(1), columns.byte().argmax(1)
        boxes.append((height * width, height / width, height, width, top, left))
    for mine, other in zip(*boxes, strict=True):
        assert stats.ks_2samp(mine.numpy(), other.numpy()).pvalue > 1e-3


def test_erasing_paints_zeros_or_noise_and_leaves_the_rest() -> None:
    images = torch.full((300, 3, *SIZE), 7.0)
    for noise in (False, True):
        step = Erase(1.0, noise=noise)
        erased = step.apply(images, _drawn(step, 300))
        assert (images == 7).all()
        inside = erased != 7
        assert inside.flatten(1).any(1).all()
        assert torch.equal(inside, inside[:, :1].expand_as(inside))
        values = erased[inside]
        if noise:
            assert stats.kstest(values[:5000], stats.norm.cdf).pvalue > 1e-3
            assert len(values.unique()) > 0.99 * len(values)  # a number for every pixel of every image
        else:
            assert not values.any()
