"""Band noise against its own transform, and against the published recipe written out by hand."""

import cmath
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitprobe.data.band_noise import band_noise, ring, white_spectrum


def waves(size):
    """The larger one of both axes' frequencies of every coefficient, one by one [pi rad/px]."""
    height, columns = size
    found = np.empty(size)
    for k in range(height):
        for l in range(columns):  # noqa: E741
            found[k, l] = max(2 * min(k, height - k) / height, 2 * min(l, columns - l) / columns)
    return found


sizes = st.tuples(st.integers(8, 40), st.integers(8, 40))


@settings(max_examples=60)
@given(
    size=sizes,
    channels=st.integers(1, 4),
    frequency=st.floats(0.05, 1),
    width=st.floats(0.3, 1),
    rms=st.floats(0.01, 5),
)
def test_corrected_noise_has_its_band_alone_and_the_asked_strength(size, channels, frequency, width, rms):
    spectrum = white_spectrum((2, channels, *size), seed=3)
    noise, achieved = band_noise(spectrum, frequency, width=width, rms=rms)
    assert noise.shape == (2, channels, *size) and noise.dtype == torch.float32
    np.testing.assert_allclose(noise.double().square().mean((1, 2, 3)).sqrt(), rms, rtol=1e-5)
    np.testing.assert_allclose(achieved, rms, rtol=1e-5)
    back = np.abs(np.fft.fft2(noise.numpy().astype(float))).max(axis=(0, 1))
    centre = waves(size)
    outside = (centre < frequency - width / 2 - 1e-6) | (centre > frequency + width / 2 + 1e-6)
    well_inside = (centre > frequency - width / 2 + 1e-6) & (centre < frequency + width / 2 - 1e-6)
    assert back[outside].max(initial=0) < 1e-5 * back.max()
    assert back[well_inside].min(initial=back.max()) > 1e-4 * back.max()


@settings(max_examples=40)
@given(size=sizes, bands=st.integers(1, 10))
def test_bands_side_by_side_take_each_frequency_once(size, bands):
    """Edges included: 0 to 1 in equal parts, and a part that begins at 1."""
    taken = np.zeros(size, int)
    for band in range(bands + 1):
        centre = (band + 0.5) / bands
        if band == bands:
            taken += waves(size) == 1  # the centre of the last band lies beyond 1
            continue
        try:
            taken += ring(size, centre, width=1 / bands).numpy()
        except ValueError:  # a small image has no frequency there
            inside = (waves(size) > band / bands + 1e-6) & (waves(size) < (band + 1) / bands - 1e-6)
            assert not inside.any()
    assert (taken == 1).all()


def test_corrected_bands_are_real_and_published_ones_are_not():
    spectrum = white_spectrum((1, 1, 32, 32))
    parts = {
        definition: torch.fft.ifft2(spectrum * ring((32, 32), 0.5, definition=definition)).imag.abs().max().item()
        for definition in ("corrected", "paper")
    }
    assert parts["corrected"] < 1e-6 < 1e-3 < parts["paper"]


def published(white, frequency, width):
    """The published recipe for one channel, sum by sum: transform, shift, square ring, shift, back, real part."""
    side = len(white)
    shifted = np.roll(np.fft.fft2(white), (side // 2, side // 2), axis=(0, 1))
    outer = 2 * int((frequency + width / 2) * math.pi * side / (2 * math.pi))
    inner = 2 * int((frequency - width / 2) * math.pi * side / (2 * math.pi))
    outer, inner = (min(max(square, 0), side) for square in (outer, inner))
    kept = np.zeros((side, side), complex)
    for y in range(side):
        for x in range(side):
            in_outer = all((side - outer) // 2 <= place < (side + outer) // 2 for place in (y, x))
            in_inner = all((side - inner) // 2 <= place < (side + inner) // 2 for place in (y, x))
            kept[y, x] = shifted[y, x] if in_outer and not in_inner else 0
    kept = np.roll(kept, (side // 2, side // 2), axis=(0, 1))
    forward = np.array([[cmath.exp(2j * math.pi * k * n / side) for k in range(side)] for n in range(side)])
    return (forward @ kept @ forward.T / side**2).real


@pytest.mark.parametrize("frequency", [0.1, 0.3, 0.45, 0.9, 1.0])
def test_the_published_recipe(frequency):
    spectrum = white_spectrum((1, 2, 32, 32), seed=1, definition="paper")
    white = torch.fft.ifft2(spectrum).real
    np.testing.assert_allclose(white.abs(), 1, atol=1e-5)  # signs of normal draws
    noise, achieved = band_noise(spectrum, frequency, rms=0.7, width=0.13, definition="paper")
    for channel in range(2):
        by_hand = published(0.7 * np.sign(white[0, channel].numpy().astype(float)), frequency, 0.13)
        np.testing.assert_allclose(noise[0, channel], by_hand, atol=1e-6)
    np.testing.assert_allclose(achieved, noise.square().mean().sqrt(), rtol=1e-6)


@pytest.mark.parametrize(("frequency", "share", "rms"), [(0.1, 0.025, 0.108), (0.9, 0.223, 0.325)])
def test_published_bands_have_unequal_power(frequency, share, rms):
    """As computed from the published code at 224 px, with its half width of 0.2 rad/px and amplitude 0.7."""
    width = 2 * 0.2 / math.pi
    kept = ring((224, 224), frequency, width=width, definition="paper").double().mean().item()
    assert kept == pytest.approx(share, abs=5e-4)
    spectrum = white_spectrum((2, 3, 224, 224), definition="paper")
    _, achieved = band_noise(spectrum, frequency, rms=0.7, width=width, definition="paper")
    np.testing.assert_allclose(achieved, rms, rtol=0.02)


def test_noise_belongs_to_seed_and_image():
    whole, _ = band_noise(white_spectrum((5, 3, 12, 16), seed=4), 0.5, width=0.4, rms=1.0)
    for first, last in [(0, 2), (2, 3), (3, 5)]:
        spectrum = white_spectrum((last - first, 3, 12, 16), seed=4, first=first)
        part, _ = band_noise(spectrum, 0.5, width=0.4, rms=1.0)
        torch.testing.assert_close(part, whole[first:last])
    other_seed, _ = band_noise(white_spectrum((5, 3, 12, 16), seed=5), 0.5, width=0.4, rms=1.0)
    draws = torch.cat([whole, other_seed]).flatten(1).double()
    alike = (torch.corrcoef(draws) - torch.eye(10)).abs().max()
    inside = int(ring((12, 16), 0.5, width=0.4).sum())
    assert alike < 5 / math.sqrt(3 * inside)  # standard deviation of the correlation of independent noise


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    white_spectrum((1, 1, 8, 8))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"definition": "papers"}, r"unknown definition 'papers'. Did you mean 'paper'"),
        ({"frequency": 0.1}, r"no frequency of an image of 8x8 px lies in 0.05 .. 0.15 .* multiples of 0.25"),
        ({"frequency": 0.1, "definition": "paper"}, r"no frequency of an image of 8x8"),
        ({"frequency": 0.0}, r"frequency=0.0 .* above 0"),
        ({"frequency": 1.2}, r"frequency=1.2 .* at most 1"),
        ({"width": 0.0}, r"width=0.0"),
        ({"rms": 0.0}, r"rms=0.0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        band_noise(white_spectrum((1, 1, 8, 8)), **{"frequency": 0.5, "rms": 1.0, **options})
