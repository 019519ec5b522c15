import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitprobe.training import Recipe, mix_batch, soft_targets
from vitprobe.training.mixing import cutmix_box

PARK_KIM = Recipe(label_smoothing=0.1, mixup=1.0, cutmix=0.8)


def entropy(targets):
    return torch.special.entr(targets).sum(1)


def test_smoothing_is_that_of_pytorch():
    logits, labels = torch.randn(6, 5), torch.tensor([0, 4, 2, 2, 1, 3])
    ours = torch.nn.functional.cross_entropy(logits, soft_targets(labels, 5, 0.2))
    theirs = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2)
    torch.testing.assert_close(ours, theirs)


def test_entropy_of_smoothing_alone():
    floor = entropy(soft_targets(torch.arange(100), 100, 0.1)).mean().item()
    assert floor == pytest.approx(-0.901 * math.log(0.901) - 99 * 0.001 * math.log(0.001), abs=1e-5)
    assert floor == pytest.approx(0.778, abs=5e-4)


def floors(mix, classes, draws=3000):
    labels = torch.Generator().manual_seed(0)
    batches = (torch.randint(classes, (96,), generator=labels) for _ in range(draws))
    found = np.array([entropy(mix(torch.zeros(96, 1, 32, 32), batch)).mean().item() for batch in batches])
    return found.mean(), found.std() / draws**0.5


def ours(recipe, classes):
    rng = np.random.default_rng(0)
    return floors(lambda x, y: mix_batch(x, soft_targets(y, classes, recipe.label_smoothing), recipe, rng)[1], classes)


def integral(alpha, classes, smoothing=0.1, draws=200_000):
    """Mean entropy of λ·a + (1 - λ)·b for two smoothed labels a, b and λ ~ Beta(α, α)."""
    share = np.random.default_rng(0).beta(alpha, alpha, draws)
    off = smoothing / classes
    first, second = share * (1 - smoothing) + off, (1 - share) * (1 - smoothing) + off
    others = -off * np.log(off)
    two = -first * np.log(first) - second * np.log(second) + (classes - 2) * others
    one = -(1 - smoothing + off) * np.log(1 - smoothing + off) + (classes - 1) * others
    return (two * (1 - 1 / classes) + one / classes).mean()


@pytest.mark.parametrize(("classes", "without_clipping"), [(10, 0.860), (100, 1.203), (1000, 1.448)])
def test_entropy_floor_if_no_box_were_clipped(classes, without_clipping):
    assert (integral(1.0, classes) + integral(0.8, classes)) / 2 == pytest.approx(without_clipping, abs=1e-3)


@pytest.mark.parametrize(("classes", "at_32_px"), [(10, 0.877), (100, 1.222)])
def test_entropy_floor_of_park_and_kim(classes, at_32_px):
    """Smoothing 0.1, mixup 1.0, CutMix 0.8, always mixed, switch 0.5; clipped boxes add 0.02."""
    floor, error = ours(PARK_KIM, classes)
    assert error < 0.004
    assert floor == pytest.approx(at_32_px, abs=4 * error)


def test_entropy_floor_is_that_of_timm():
    from timm.data.mixup import Mixup

    state = np.random.get_state()  # timm draws from NumPy's global generator
    np.random.seed(1)
    theirs = Mixup(mixup_alpha=1.0, cutmix_alpha=0.8, label_smoothing=0.1, num_classes=100)
    expected, expected_error = floors(lambda x, y: theirs(x, y)[1], 100)
    np.random.set_state(state)
    floor, error = ours(PARK_KIM, 100)
    assert floor == pytest.approx(expected, abs=4 * math.hypot(error, expected_error))


def test_entropy_floor_of_mixup_alone():
    floor, error = ours(Recipe(label_smoothing=0.1, mixup=1.0), 100)
    assert floor == pytest.approx(integral(1.0, 100), abs=4 * error)


@given(seed=st.integers(0, 2**32), batch=st.integers(1, 7), height=st.integers(1, 9), width=st.integers(1, 9))
def test_targets_tell_the_share_of_pixels(seed, batch, height, width):
    """Image i is all i: the targets must be the shares of the two images in the mixed one."""
    images = torch.arange(batch).float()[:, None, None, None].expand(batch, 2, height, width)
    before = images.clone()
    targets = torch.eye(batch)
    mixed, shares = mix_batch(images, targets, PARK_KIM, np.random.default_rng(seed))
    assert torch.equal(images, before) and torch.equal(targets, torch.eye(batch))
    torch.testing.assert_close(mixed.mean((1, 2, 3)), shares @ torch.arange(batch).float())
    torch.testing.assert_close(shares.sum(1), torch.ones(batch))


def test_cutmix_pastes_and_mixup_blends():
    images, targets = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 3, 8, 8), torch.eye(2)
    pasted = [mix_batch(images, targets, Recipe(cutmix=1.0), np.random.default_rng(i))[0] for i in range(20)]
    assert set(torch.cat(pasted).unique().tolist()) == {0.0, 1.0}
    blended, shares = mix_batch(images, targets, Recipe(mixup=1.0), np.random.default_rng(0))
    assert 0 < blended[0, 0, 0, 0] < 1
    assert torch.allclose(blended[0], shares[0, 1]) and torch.allclose(blended[1], shares[1, 1])


def test_probability_and_switch():
    images, targets = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 1, 16, 16), torch.eye(2)

    def share_of(recipe, seen, draws=2000):
        rng = np.random.default_rng(1)
        return np.mean([seen(mix_batch(images, targets, recipe, rng)[0]) for _ in range(draws)])

    def unmixed(x):
        return x is images

    def blended(x):
        return bool(((x > 0) & (x < 1)).any())

    recipe = Recipe(mixup=1.0, cutmix=1.0, mix_probability=0.3)
    assert share_of(recipe, unmixed) == pytest.approx(0.7, abs=0.04)
    assert share_of(Recipe(mixup=1.0, cutmix=1.0, mix_switch=0.2), blended) == pytest.approx(0.8, abs=0.04)
    assert share_of(Recipe(), unmixed, draws=5) == 1


@given(share=st.floats(0, 1), seed=st.integers(0, 1000))
def test_box_is_inside_and_no_larger_than_drawn(share, seed):
    rows, columns = cutmix_box(32, 16, share, np.random.default_rng(seed))
    assert 0 <= rows.start <= rows.stop <= 32 and 0 <= columns.start <= columns.stop <= 16
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    assert area <= (1 - share) * 32 * 16 + 1e-6
