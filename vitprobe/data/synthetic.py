"""Images with a shape in the low and a texture in the high frequencies, one of which is the label."""

import numpy as np

from vitprobe.seeds import derive_seed

SHAPES = ("disc", "ring", "horizontal bar", "vertical bar")
TEXTURES = ("grating 0°", "grating 45°", "grating 90°", "grating 135°")
LOW_BAND = 0.4
"""Shapes have no power above this radial frequency [pi]."""
HIGH_BAND = 0.5
"""Textures have no power below this radial frequency [pi]."""

_SIZE = 32


def draw_images(cue: str, images_per_class: int, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Draws one shape over one texture per image, each in its own frequency band, both tinted at random.

    The bands are cut in Fourier space: up to the rounding to uint8, a low-pass filter between the two leaves
    the shape alone, a high-pass filter the texture alone. One is the label; the other is drawn independently
    of it. Neither changes the mean of an image.

    Args:
        cue: `"low"`: the shape is the label; `"high"`: the texture is.
        images_per_class: how many images of each of the 4 classes.
        part: a name for this draw, e.g. `"train"`; another name gives other images.

    Returns:
        images: uint8 `(image, y, x, channel)`, 32 px by 32 px.
        labels: int64 `(image,)`.
    """
    rng = np.random.default_rng(derive_seed(0, "synthetic", cue, part))
    labels = rng.permutation(np.repeat(np.arange(4), images_per_class))
    distractors = rng.integers(4, size=len(labels))
    shapes, textures = (labels, distractors) if cue == "low" else (distractors, labels)
    images = 0.5 + _tinted(_draw_shapes(shapes, rng), rng) + _tinted(_draw_textures(textures, rng), rng)
    return np.round(255 * images).astype(np.uint8), labels.astype(np.int64)


def _draw_shapes(kinds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    y, x = np.mgrid[:_SIZE, :_SIZE]
    centre_y, centre_x = rng.uniform(12, _SIZE - 12, size=(2, len(kinds), 1, 1))
    radius = rng.uniform(6, 9, size=(len(kinds), 1, 1))
    dy, dx = abs(y - centre_y), abs(x - centre_x)
    distance = np.hypot(dy, dx)
    masks = [
        distance < 0.8 * radius,
        (distance < 1.1 * radius) & (distance > 0.6 * radius),
        (dy < 0.35 * radius) & (dx < 1.3 * radius),
        (dx < 0.35 * radius) & (dy < 1.3 * radius),
    ]
    return _band(np.choose(kinds[:, None, None], masks).astype(float), 0, LOW_BAND)


def _draw_textures(kinds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    y, x = np.mgrid[:_SIZE, :_SIZE]
    angle = np.pi / 4 * kinds + rng.uniform(-0.15, 0.15, size=len(kinds))
    frequency = rng.uniform(0.65, 0.85, size=len(kinds))  # pi per pixel
    phase = rng.uniform(0, 2 * np.pi, size=(len(kinds), 1, 1))
    step_y, step_x = (np.pi * frequency * np.stack([np.sin(angle), np.cos(angle)]))[..., None, None]
    return _band(np.cos(step_y * y + step_x * x + phase), HIGH_BAND, np.inf)


def _band(images: np.ndarray, lowest: float, highest: float) -> np.ndarray:
    """What `(image, y, x)` has at `lowest < radial frequency <= highest` [pi], scaled to a maximum of 1."""
    axis = 2 * np.fft.fftfreq(_SIZE)
    radius = np.hypot(axis[:, None], axis)
    images = np.fft.ifft2(np.fft.fft2(images) * ((radius > lowest) & (radius <= highest))).real
    return images / abs(images).max(axis=(1, 2), keepdims=True)


def _tinted(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`(image, y, x, channel)` of magnitude 0.24 at most: the sum of two around 0.5 is never clipped."""
    return images[..., None] * rng.uniform(0.12, 0.24, size=(len(images), 1, 1, 3))
