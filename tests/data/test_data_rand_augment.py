from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from timm.data import auto_augment
from torch import Tensor
from torchvision.transforms import ColorJitter, InterpolationMode, autoaugment

from vitprobe.data import load_data
from vitprobe.data.augment import augmentation
from vitprobe.data.operations import CODES, OPERATIONS, operate
from vitprobe.data.rand_augment import BINS, Jitter, RandAugment, TimmRandAugment, TrivialAugment, chosen

FILL = [11, 120, 233]
NAMES = list(OPERATIONS)


def _digits(count: int) -> Tensor:
    """Real images, coloured and four times as large: `(image, 3, 32, 32)`."""
    grey = load_data("digits").test.images[:count].repeat_interleave(4, 2).repeat_interleave(4, 3)
    return torch.cat([grey, 255 - grey, grey // 2 + 17], 1)


def _noise(count: int) -> Tensor:
    """Random pixels, taller than wide, one image without and one with little contrast."""
    images = torch.randint(256, (count, 3, 20, 13), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    images[0] = 77
    images[1] = images[1] // 64 + 100
    return images


IMAGES: dict[str, Callable[[int], Tensor]] = {
    "digits": _digits,
    "noise": _noise,
    "grey": lambda count: _digits(count)[:, 2:],
}


def _picture(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())


def _pixels(picture: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(picture))
    return pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels[None]


def _operated(images: Tensor, drawn: dict[str, Tensor], fill: object) -> Tensor:
    return operate(images, drawn["codes"][:, 0], drawn["arguments"][:, 0], fill)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("increasing", [False, True])
def test_every_operation_is_that_of_timm_to_the_grey_level(
    name: str, increasing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = IMAGES[name](12)
    fill = FILL[: images.shape[1]]
    generator = torch.Generator().manual_seed(1)
    # Below 2.5 the plain form of Posterize keeps no bit, at 10 the increasing one: Pillow refuses that by now.
    level = 2.5 + 7.4 * torch.rand(12, 1, generator=generator, dtype=torch.float64)
    sign = torch.tensor([-1.0, 1]).double().repeat(6)[:, None]
    names = auto_augment._RAND_INCREASING_TRANSFORMS if increasing else auto_augment._RAND_TRANSFORMS
    for cubic, interpolation in enumerate((Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)):
        step = TimmRandAugment(9, increasing=increasing)
        kinds = step.kinds(level, sign, torch.full((12, 1), cubic), *images.shape[2:])
        assert len(kinds) == len(names)
        for kind, wanted in enumerate(names):
            got = _operated(images, chosen(kinds, torch.full((12, 1), kind)), fill)
            for index, image in enumerate(images):
                monkeypatch.setattr(auto_augment, "_randomly_negate", lambda v, i=index: v * sign[i].item())
                hparams = {"img_mean": tuple(fill), "interpolation": interpolation}
                operation = auto_augment.AugmentOp(wanted, prob=1.0, magnitude=level[index].item(), hparams=hparams)
                assert torch.equal(got[index], _pixels(operation(_picture(image)))), (wanted, index, interpolation)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("trivial", [False, True])
def test_every_operation_is_that_of_torchvision_to_the_grey_level(name: str, trivial: bool) -> None:
    images = IMAGES[name](12)
    shape = images.shape[2:]
    level = torch.tensor([0, 1, 4, 8, 11, 14, 15, 19, 20, 24, 29, 30])[:, None]
    sign = torch.tensor([-1.0, 1, 1, -1]).double().repeat(3)[:, None]
    if trivial:
        kinds = TrivialAugment().kinds(level, sign, *shape)
        space = autoaugment.TrivialAugmentWide()._augmentation_space(BINS)
    else:
        kinds = RandAugment(2, 9).kinds(level, sign, *shape)
        space = autoaugment.RandAugment()._augmentation_space(BINS, tuple(shape))
    assert len(kinds) == len(space)
    for kind, (wanted, (magnitudes, signed)) in enumerate(space.items()):
        got = _operated(images, chosen(kinds, torch.full((12, 1), kind)), 0)
        for index, image in enumerate(images):
            magnitude = magnitudes[level[index]].item() if magnitudes.ndim else 0.0
            magnitude *= sign[index].item() if signed else 1
            nearest = InterpolationMode.NEAREST
            reference = autoaugment._apply_op(_picture(image), wanted, magnitude, nearest, None)
            assert torch.equal(got[index], _pixels(reference)), (wanted, index)


def test_posterize_without_a_bit_is_black() -> None:
    kinds = TimmRandAugment(1).kinds(*(torch.ones(3, 1).double() for _ in range(2)), torch.zeros(3, 1), 32, 32)
    posterize = auto_augment._RAND_TRANSFORMS.index("Posterize")
    assert not _operated(_digits(3), chosen(kinds, torch.full((3, 1), posterize)), 0).any()


def _kinds_drawn(parameters: dict[str, Tensor]) -> list[str]:
    """What was drawn by a readable name; shears and translations differ in which number is not 0."""
    codes, arguments = parameters["codes"].flatten(), parameters["arguments"].flatten(0, 1)
    names = []
    for code, numbers in zip(codes.tolist(), arguments.tolist(), strict=True):
        name = NAMES[code]
        if name in ("along_x", "along_y"):
            name += " shear" if numbers[0] else " translation"
        elif name == "nearest":
            moved = [place for place in (1, 2, 3, 5) if numbers[place]]
            name += f" {moved}"
        names.append(name)
    return names


def _chi_squared(names: list[str], kinds: int) -> float:
    counts = list(np.unique(names, return_counts=True)[1])
    assert len(counts) == kinds
    return stats.chisquare(counts).pvalue


def test_timm_operations_are_drawn_equally_often_and_half_of_them_carried_out() -> None:
    drawn = TimmRandAugment(9, 3, spread=0.5).draw(5000, (3, 32, 32), torch.Generator().manual_seed(0))
    names = _kinds_drawn(drawn)
    carried_out = [name for name in names if name != "identity"]
    assert stats.binomtest(len(carried_out), len(names), 0.5).pvalue > 1e-3
    assert _chi_squared(carried_out, 15) > 1e-3
    # With replacement: an operation that was drawn can be drawn again.
    again = ((drawn["codes"] == CODES["invert"]).sum(1) >= 2).sum().item()
    assert stats.binomtest(again, 5000, stats.binom(3, 1 / 30).sf(1)).pvalue > 1e-3
    # Every place has draws of its own.
    together = (drawn["codes"][:, :2] == CODES["identity"]).all(1).sum().item()
    assert stats.binomtest(together, 5000, 0.25).pvalue > 1e-3


def test_timm_levels_are_normal_and_cut_off() -> None:
    drawn = TimmRandAugment(9, 2, spread=1.0).draw(20000, (3, 32, 32), torch.Generator().manual_seed(0))
    shear = drawn["arguments"][drawn["codes"] == CODES["along_x"]][:, 0]
    shear = shear[shear != 0]
    level = (shear.abs() / 0.03).numpy()
    normal = stats.norm(9, 1)
    assert level.max() == pytest.approx(10)
    assert stats.binomtest(int((level > 10 - 1e-9).sum()), len(level), normal.sf(10)).pvalue > 1e-3
    inner = level[level < 10 - 1e-9]
    assert stats.kstest(inner, lambda x: normal.cdf(x) / normal.cdf(10)).pvalue > 1e-3
    assert stats.binomtest(int((shear > 0).sum()), len(shear), 0.5).pvalue > 1e-3
    cubic = drawn["arguments"][drawn["codes"] == CODES["along_x"]][:, 2]
    assert stats.binomtest(int(cubic.sum()), len(cubic), 0.5).pvalue > 1e-3


def test_without_a_spread_every_level_is_the_mean() -> None:
    drawn = TimmRandAugment(4).draw(500, (3, 32, 32), torch.Generator().manual_seed(0))
    shear = drawn["arguments"][drawn["codes"] == CODES["along_y"]][:, 0].abs()
    assert shear.unique().tolist() == pytest.approx([0, 0.12])


def test_torchvision_operations_and_levels_are_drawn_equally_often() -> None:
    drawn = RandAugment(2, 15).draw(5000, (3, 32, 32), torch.Generator().manual_seed(0))
    assert _chi_squared(_kinds_drawn(drawn), 14) > 1e-3
    trivial = TrivialAugment().draw(20000, (3, 32, 32), torch.Generator().manual_seed(0))
    threshold = trivial["arguments"][trivial["codes"] == CODES["solarize"]][:, 0]
    assert stats.chisquare(threshold.unique(return_counts=True)[1]).pvalue > 1e-3
    assert len(threshold.unique()) == BINS


def test_jitter_is_in_every_order_and_uniform() -> None:
    drawn = Jitter(0.4).draw(6000, (3, 32, 32), torch.Generator().manual_seed(0))
    orders = ["".join(map(str, order)) for order in drawn["codes"].tolist()]
    assert _chi_squared(orders, 6) > 1e-3
    for factors in drawn["arguments"][..., 0].unbind(1):
        assert stats.kstest(factors, stats.uniform(0.6, 0.8).cdf).pvalue > 1e-3
    strong = Jitter(1.5).draw(2000, (3, 32, 32), torch.Generator().manual_seed(0))["arguments"][..., 0]
    assert (strong.min() >= 0, strong.max() <= 2.5, strong.max() > 2.4) == (True, True, True)


def test_jitter_does_what_torchvision_does_in_the_same_order() -> None:
    images = _digits(8)
    drawn = Jitter(0.4).draw(8, (3, 32, 32), torch.Generator().manual_seed(0))
    got = Jitter(0.4).apply(images, drawn)
    for index, image in enumerate(images):
        picture = _picture(image)
        for code, factor in zip(drawn["codes"][index], drawn["arguments"][index, :, 0], strict=True):
            place = ("brightness", "contrast", "color").index(NAMES[code])
            ranges = [(1.0, 1.0)] * 3
            ranges[place] = (factor.item(),) * 2
            picture = ColorJitter(*ranges)(picture)
        assert torch.equal(got[index], _pixels(picture))


def _of_timm(picture: Image.Image, count: int) -> Tensor:
    transform = auto_augment.rand_augment_transform("rand-m7-n2-mstd1.0", {"img_mean": tuple(FILL)})
    return torch.stack([_pixels(transform(picture)) for _ in range(count)])


def _of_torchvision(picture: Image.Image, count: int) -> Tensor:
    return torch.stack([_pixels(autoaugment.RandAugment(2, 14)(picture)) for _ in range(count)])


def _of_trivial(picture: Image.Image, count: int) -> Tensor:
    return torch.stack([_pixels(autoaugment.TrivialAugmentWide()(picture)) for _ in range(count)])


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("rand-m7-n2-mstd1.0", _of_timm),
        ("randaugment-n2-m14", _of_torchvision),
        ("trivialaugment", _of_trivial),
    ],
)
def test_many_draws_have_the_mean_and_spread_of_the_reference(
    name: str, reference: Callable[[Image.Image, int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = _digits(3)[2]
    monkeypatch.setattr(auto_augment.random, "random", np.random.default_rng(0).random)
    monkeypatch.setattr(auto_augment.random, "gauss", np.random.default_rng(1).normal)
    monkeypatch.setattr(auto_augment.np.random, "choice", np.random.default_rng(2).choice)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = reference(_picture(image), 500).double()
    ours = augmentation(name, fill=FILL)(image.expand(2000, -1, -1, -1), torch.Generator().manual_seed(0)).double()
    for statistic in (lambda x: x, lambda x: (x - image) ** 2):
        a, b = (torch.nn.functional.avg_pool2d(statistic(x), 4) for x in (ours, theirs))
        z = (a.mean(0) - b.mean(0)) / (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
        # 192 numbers, nearly all of one draw, so not independent: their mean square is 1 give or take 1/2.
        assert z.abs().max() < 4.5
        assert (z**2).mean() < 3
