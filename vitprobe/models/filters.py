"""Banks of spatial filters that a network may keep as they were drawn (Zheng et al. 2024, Fig. 4 and Table 6).

Every bank is a pure function of its arguments and the generator's state. All but `"softmax"` have a mean squared norm
of 1/3, that of PyTorch's own depthwise convolution, so that they differ in shape and not in size.
"""

import math

import torch
from torch import Tensor

from vitprobe.names import unknown

CONVOLUTIONS = ("random", "impulse", "box", "gaussian", "softmax")
MATRICES = ("permutation", "full_permutation")


def filter_bank(
    kind: str,
    count: int,
    kernel_size: int,
    *,
    generator: torch.Generator,
    box_taps: int | None = None,
    gaussian_variance: float = 1.0,
) -> Tensor:
    """Depthwise kernels of one kind.

    Args:
        kind: `"random"`: uniform on ±1/`kernel_size`. `"impulse"`: one tap, drawn uniformly. `"box"`: `box_taps` equal
            taps at distinct places. `"gaussian"`: a bump around a tap drawn uniformly. `"softmax"`: as random, but
            these are logits: a filter is their softmax over the taps, sums to 1 and is almost flat; its squared norm is
            about 1/`kernel_size`^2.
        count: number of filters.
        kernel_size: side of the kernels [taps].
        generator: draws them, on the CPU.
        box_taps: taps of a box; all of them unless given.
        gaussian_variance: `s` in `exp(-r^2 / 2s)` [taps^2]; what the published code calls sigma.

    Returns:
        `(filter, 1, y, x)`, float32, on the CPU.

    Raises:
        ValueError: if the kind is unknown, or a box has no or too many taps, or a variance is not positive.
    """
    if kind not in CONVOLUTIONS:
        raise unknown("kind of filters", kind, CONVOLUTIONS)
    area = kernel_size**2
    shape = (count, 1, kernel_size, kernel_size)
    if kind in ("random", "softmax"):
        return (2 * torch.rand(shape, generator=generator, device="cpu") - 1) / kernel_size
    if kind == "gaussian":
        if gaussian_variance <= 0:
            raise ValueError(f"gaussian_variance={gaussian_variance}: use a number above 0, or filters='impulse'.")
        peak = torch.randint(kernel_size, (count, 2, 1), generator=generator, device="cpu")
        square = (torch.arange(kernel_size, device="cpu") - peak).square()
        bank = torch.exp(-(square[:, 0, :, None] + square[:, 1, None, :]) / (2 * gaussian_variance))
        return (bank / (3 * bank.square().sum((1, 2)).mean()).sqrt()).view(shape)
    taps = 1 if kind == "impulse" else area if box_taps is None else box_taps
    if not 1 <= taps <= area:
        raise ValueError(f"box_taps={taps} of a {kernel_size}x{kernel_size} kernel: use 1 to {area}.")
    places = torch.rand(count, area, generator=generator, device="cpu").argsort(1)[:, :taps]
    return torch.zeros(count, area, device="cpu").scatter_(1, places, math.sqrt(1 / (3 * taps))).view(shape)


def permutation_bank(kind: str, count: int, tokens: int, *, generator: torch.Generator) -> Tensor:
    """Dense matrices that send every token to one place, without the locality and the weight sharing of a convolution.

    Args:
        kind: `"permutation"`: the places are drawn independently, so that some are taken twice and some never, as in
            the published code. `"full_permutation"`: a true permutation.
        count: number of matrices.
        tokens: side of the matrices.
        generator: draws them, on the CPU.

    Returns:
        `(filter, query, key)`, one entry of sqrt(1/3) in every row, float32, on the CPU.

    Raises:
        ValueError: if the kind is unknown.
    """
    if kind not in MATRICES:
        raise unknown("kind of matrices", kind, MATRICES)
    if kind == "permutation":
        places = torch.randint(tokens, (count, tokens), generator=generator, device="cpu")
    else:
        places = torch.rand(count, tokens, generator=generator, device="cpu").argsort(1)
    return torch.zeros(count, tokens, tokens, device="cpu").scatter_(2, places[..., None], math.sqrt(1 / 3))


def filter_choice(channels: int, distinct: int, *, generator: torch.Generator) -> Tensor:
    """Which filter of a bank each channel gets, drawn independently.

    Args:
        channels: number of channels.
        distinct: size of the bank.
        generator: draws the choice, on the CPU.

    Returns:
        `(channel,)`, int64, on the CPU.
    """
    return torch.randint(distinct, (channels,), generator=generator, device="cpu")
