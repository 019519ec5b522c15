import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from vitprobe.data import load_data
from vitprobe.data.synthetic import HIGH_BAND, LOW_BAND, draw_images


def _spectrum(images: np.ndarray, band: str) -> np.ndarray:
    """Amplitudes of the grey image in one band; they do not depend on where a thing is."""
    grey = images.astype(float).mean(-1)
    cutoff = (LOW_BAND + HIGH_BAND) / 2
    axis = 2 * np.fft.fftfreq(grey.shape[-1])
    radius = np.hypot(axis[:, None], axis)
    inside = (radius > 0) & (radius < cutoff) if band == "low" else radius > cutoff
    return abs(np.fft.fft2(grey))[:, inside]


def _accuracy(cue: str, band: str) -> float:
    images, labels = draw_images(cue, 300, "train")
    test_images, test_labels = draw_images(cue, 100, "test")
    classifier = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1).fit(_spectrum(images, band), labels)
    return float((classifier.predict(_spectrum(test_images, band)) == test_labels).mean())


@pytest.mark.parametrize("cue", ["low", "high"])
def test_the_label_is_in_its_own_band_and_not_in_the_other(cue: str) -> None:
    other = {"low": "high", "high": "low"}[cue]
    assert _accuracy(cue, cue) > 0.9
    assert _accuracy(cue, other) < 0.25 + 4 * (0.25 * 0.75 / 400) ** 0.5  # chance, and 4 standard errors


@pytest.mark.parametrize("cue", ["low", "high"])
def test_both_bands_have_power_and_nothing_lies_between_or_in_the_mean(cue: str) -> None:
    images, labels = draw_images(cue, 25, "train")
    power = (abs(np.fft.fft2(images.astype(float), axes=(1, 2))) ** 2).mean((0, 3))
    axis = 2 * np.fft.fftfreq(32)
    radius = np.hypot(axis[:, None], axis)
    low = power[(radius > 0) & (radius <= LOW_BAND)].mean()
    high = power[radius > HIGH_BAND].mean()
    between = power[(radius > LOW_BAND) & (radius <= HIGH_BAND)].mean()
    rounding = 32**2 / 12  # white noise of uniform rounding errors
    assert between < 2 * rounding < min(low, high) / 10
    for label in range(4):
        assert images[labels == label].mean() == pytest.approx(127.5, abs=0.05)


@pytest.mark.parametrize("cue", ["low", "high"])
def test_synthetic_data_are_balanced_repeat_and_differ_between_splits(cue: str) -> None:
    data = load_data(f"synthetic:{cue}")
    assert (len(data.train), len(data.test)) == (4000, 1000)
    assert (data.image_size, data.channels, data.num_classes) == ((32, 32), 3, 4)
    assert data.train.labels.bincount().tolist() == [1000] * 4
    assert data.test.labels.bincount().tolist() == [250] * 4
    assert data.train.images.min() > 0  # nothing is clipped
    assert data.train.images.max() < 255
    images, labels = draw_images(cue, 250, "test")
    assert (data.test.images.permute(0, 2, 3, 1).numpy() == images).all()
    assert (data.test.labels.numpy() == labels).all()
    train_images = data.train.images[:1000].permute(0, 2, 3, 1).numpy()
    assert not (train_images == images).all(axis=(1, 2, 3)).any()
