"""Noise of one band of spatial frequencies, a function of seed and image (Park & Kim 2022, Fig. 2b)."""

from typing import Literal

import torch
from torch import Tensor

from vitprobe.names import unknown
from vitprobe.seeds import derive_seed

NoiseDefinition = Literal["corrected", "paper"]
NOISE_DEFINITIONS = ("corrected", "paper")
EDGE = 1e-9
"""What a frequency may be away from a band's edge and still be on it [pi rad/px]: 0.3 - 0.05 is not quite 0.25."""


def ring(
    size: tuple[int, int], frequency: float, *, width: float = 0.1, definition: NoiseDefinition = "corrected"
) -> Tensor:
    """Which coefficients of a two-dimensional Fourier transform lie in a band.

    The frequency of a coefficient is the larger one of its row's and its column's, so that the bands are square rings
    and a wave along the diagonal has the frequency that `vitprobe.fourier` gives it.

    Args:
        size: rows and columns of the image [px].
        frequency: the centre of the band [pi rad/px].
        width: from its lower edge, which is inside, to its upper edge, which is not [pi rad/px].
        definition: `"corrected"` takes a wave and its mirror image alike, so that what it lets pass is real; `"paper"`
            is the published code's difference of two centred squares, each from `-n` to `n - 1`, where `n` is the
            edge's frequency in waves per image, rounded down (on square images of even sides; here each axis has an
            `n` of its own).

    Returns:
        Booleans `(y, x)` in the order of `torch.fft.fft2`.

    Raises:
        ValueError: if no coefficient lies in the band, or an option is out of range.
    """
    if definition not in NOISE_DEFINITIONS:
        raise unknown("definition", definition, NOISE_DEFINITIONS)
    if not (0 < frequency <= 1 and width > 0):
        raise ValueError(
            f"frequency={frequency} and width={width}: give a centre above 0 and at most 1, and a width above 0, in "
            "units of pi rad/px."
        )
    low, high = frequency - width / 2, frequency + width / 2
    if definition == "corrected":
        y, x = (2 * torch.fft.fftfreq(side, dtype=torch.float64).abs() for side in size)
        larger = torch.maximum(y[:, None], x)
        inside = (larger >= low - EDGE) & (larger < high - EDGE)
    else:
        inside = torch.fft.ifftshift(_square(size, high) & ~_square(size, low))
    if not inside.any():
        raise ValueError(
            f"no frequency of an image of {size[0]}x{size[1]} px lies in {low:g} .. {high:g} pi rad/px; they are "
            f"multiples of {2 / max(size):.3g} pi rad/px: choose other frequencies=, or a larger width=."
        )
    return inside


def _square(size: tuple[int, int], edge: float) -> Tensor:
    """The published code's mask of all frequencies below an edge `(y, x)`, frequency zero in the middle."""
    inside = []
    for side in size:
        reach = min(max(int((edge + EDGE) * side / 2), 0), side // 2)
        place = torch.arange(side) - side // 2
        inside.append((place >= -reach) & (place < reach))
    return inside[0][:, None] & inside[1]


def white_spectrum(
    shape: tuple[int, int, int, int],
    *,
    seed: int = 0,
    first: int = 0,
    definition: NoiseDefinition = "corrected",
    device: torch.device | str = "cpu",
) -> Tensor:
    """The Fourier transform of white noise of root mean square 1, of which `band_noise` cuts bands.

    Each image has noise of its own, which depends on the seed and on the image's number alone: it is the same for
    every model, batch size and device.

    Args:
        shape: of the images `(batch, channel, y, x)`.
        seed: of the noise.
        first: the number of the first image.
        definition: `"corrected"` draws from a normal distribution, `"paper"` the signs of such draws.
        device: where the transform is computed; the draws are the CPU's.

    Returns:
        Complex `(batch, channel, y, x)`.
    """
    images = torch.empty(shape)
    for number, image in enumerate(images, start=first):
        image.normal_(generator=torch.Generator().manual_seed(derive_seed(seed, "band noise", number)))
    images = images.to(device)
    return torch.fft.fft2(images.sign() if definition == "paper" else images)


def band_noise(
    spectrum: Tensor,
    frequency: float,
    *,
    rms: float,
    width: float = 0.1,
    definition: NoiseDefinition = "corrected",
) -> tuple[Tensor, Tensor]:
    """Noise that has the frequencies of one band only.

    Args:
        spectrum: of white noise, from `white_spectrum` with the same definition `(batch, channel, y, x)`.
        frequency: the centre of the band [pi rad/px].
        rms: root mean square of the noise, in the units of the images. With `"corrected"` every image's noise has it
            over its channels and pixels, whatever the band. With `"paper"` it is the amplitude of the white noise,
            of which a high band keeps more than a low one: its ring is larger.
        width: of the band [pi rad/px].
        definition: `"corrected"`, or `"paper"`: the real part of what the published ring lets pass, not scaled.

    Returns:
        noise: real `(batch, channel, y, x)`.
        achieved: its root mean square `(batch,)`.

    Raises:
        ValueError: if no frequency lies in the band, or an option is out of range.
    """
    if not rms > 0:
        raise ValueError(f"rms={rms}: give a root mean square above 0, in the units of the normalised images.")
    height, columns = spectrum.shape[-2:]
    inside = ring((height, columns), frequency, width=width, definition=definition).to(spectrum.device)
    noise = torch.fft.ifft2(spectrum * inside).real
    achieved = _rms(noise)
    noise = noise * (rms if definition == "paper" else (rms / achieved)[:, None, None, None])
    return noise, _rms(noise)


def _rms(images: Tensor) -> Tensor:
    return images.square().mean((1, 2, 3)).sqrt()
