"""Variance over positions and running means, against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_probes_fourier import Shown

from vitprobe.models import create_model
from vitprobe.probes import RunningMean, feature_variance


def measure(x, batch=3, **options):
    model = Shown().to(x.dtype)
    return feature_variance(model, x.split(batch), layers="map", progress=False, **options).isel(layer=0)


def images(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_variance_is_numpys_unbiased_one_over_positions():
    x = images(7, 5, 4, 6) * torch.arange(1, 8).reshape(-1, 1, 1, 1) + 3
    found = measure(x)
    per_image = x.flatten(2).numpy().var(-1, ddof=1).mean(1)
    assert float(found.variance) == pytest.approx(per_image.mean(), rel=1e-12)
    assert float(found.variance_se) == pytest.approx(per_image.std(ddof=1) / np.sqrt(7), rel=1e-12)
    normalised = per_image / x.flatten(1).numpy().__pow__(2).mean(1)
    assert float(found.normalised_variance) == pytest.approx(normalised.mean(), rel=1e-12)
    assert float(found.normalised_variance_se) == pytest.approx(normalised.std(ddof=1) / np.sqrt(7), rel=1e-12)


def test_large_means_do_not_cancel():
    x = (images(3, 2, 8, 8) + 1000).float()
    expected = x.double().flatten(2).numpy().var(-1, ddof=1).mean()
    assert float(measure(x).variance) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_normalised_variance_does_not_know_the_scale(scale):
    x = images(4, 3, 4, 4) + 0.5
    small, large = measure(x), measure(x * scale)
    assert float(large.normalised_variance) == pytest.approx(float(small.normalised_variance), rel=1e-9)
    assert float(large.variance) == pytest.approx(float(small.variance) * scale**2, rel=1e-9)


def test_it_is_over_positions_and_not_over_images():
    constant = torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 2, 5, 5) + 1
    assert float(measure(constant).variance) == pytest.approx(0, abs=1e-12)


def test_prefix_tokens_are_left_out():
    model = create_model("vit", image_size=16, dim=12, depth=1, registers=3, seed=0)
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    before = feature_variance(model, x, layers="blocks", progress=False)
    # The stem's prefix is the parameter itself: its size says nothing of the patches.
    stem = feature_variance(model, x, progress=False).isel(layer=0)
    with torch.no_grad():
        model.prefix.mul_(100)
    assert float(feature_variance(model, x, progress=False).isel(layer=0).variance) == float(stem.variance)
    assert int(before.prefix[0]) == 4


def test_a_single_position_or_image_has_no_variance():
    with pytest.raises(ValueError, match=r"no unit has more than one position; the grids are \[\(1, 1\)\]"):
        measure(images(3, 2, 1, 1))
    with pytest.raises(ValueError, match="needs two images or more"):
        measure(images(1, 2, 4, 4), over="images")
    with pytest.raises(ValueError, match="over 'tokens'"):
        measure(images(3, 2, 4, 4), over="tokens")


@settings(max_examples=20)
@given(count=st.integers(2, 9), chunk=st.integers(1, 9), offset=st.sampled_from([0.0, 100.0]), seed=st.integers(0, 99))
def test_variance_over_images_is_numpys_for_any_batches(count, chunk, offset, seed):
    x = images(count, 3, 4, 6, seed=seed) * torch.arange(1, 7) + offset
    found = measure(x, over="images", batch=chunk)
    expected = x.numpy().var(0, ddof=1).mean()
    assert float(found.variance) == pytest.approx(expected, rel=1e-9)
    assert found.attrs["over"] == "images"
    assert bool(found.variance_se.isnull()) == (count == 2)


def test_standard_error_over_images_is_that_of_repetitions():
    repeated = [measure(images(12, 2, 2, 2, seed=seed), over="images") for seed in range(60)]
    spread = np.std([float(one.variance) for one in repeated], ddof=1)
    claimed = np.mean([float(one.variance_se) for one in repeated])
    assert 0.7 < claimed / spread < 1.3


def test_the_change_is_paired_image_by_image():
    class Doubling(torch.nn.Module):
        """Two residual units: the first adds the stream to itself, the second nothing."""

        def __init__(self):
            super().__init__()
            self.stem, self.mix = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 1, bias=False)
            torch.nn.init.dirac_(self.mix.weight)

        def forward(self, x):
            x = self.stem(x)
            x = x + self.mix(x)
            return (x + self.mix(x) * 0).mean((2, 3))

    torch.manual_seed(0)
    found = feature_variance(Doubling().double(), images(5, 3, 6, 6).split(2), progress=False)
    assert list(found.kind.values) == ["stem", "mlp", "mlp"]
    np.testing.assert_allclose(found.variance_change[1:], [3 * float(found.variance[0]), 0], atol=1e-12)
    np.testing.assert_allclose(found.variance_change_se[1:], [3 * float(found.variance_se[0]), 0], atol=1e-12)
    assert found.variance_change[:1].isnull().all() and found.variance_change_se[:1].isnull().all()


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    seed=st.integers(0, 999),
    offset=st.sampled_from([0.0, 1e3, -1e6]),
)
def test_running_mean_is_numpys_for_any_chunks(sizes, seed, offset):
    values = np.random.default_rng(seed).normal(size=(sum(sizes), 2, 3)) + offset
    running = RunningMean()
    for chunk in torch.from_numpy(values).split(sizes):
        running.add(chunk)
    assert running.count == len(values)
    np.testing.assert_allclose(running.mean, values.mean(0), rtol=1e-12)
    if len(values) == 1:
        assert np.isnan(running.standard_error).all()
    else:
        expected = values.std(0, ddof=1) / np.sqrt(len(values))
        np.testing.assert_allclose(running.standard_error, expected, rtol=1e-7)


def test_running_mean_adds_in_double_precision():
    values = torch.full((10000,), 0.1, dtype=torch.float32)
    running = RunningMean()
    for chunk in values.split(7):
        running.add(chunk)
    assert float(running.mean) == pytest.approx(float(values[0]), abs=1e-12)
