"""Variance over positions and running means, against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_probes_fourier import Shown

from vitprobe.models import create_model
from vitprobe.probes import RunningMean, feature_variance


def measure(x):
    model = Shown().to(x.dtype)
    model(x)
    return feature_variance(model, x.split(3), layers="map", progress=False).isel(layer=0)


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


def test_units_with_one_position_are_nan():
    found = measure(images(3, 2, 1, 1))
    assert found.variance.isnull() and found.normalised_variance.isnull()


@settings(deadline=None)
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
