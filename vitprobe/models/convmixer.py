"""ConvMixer: patches mixed by convolutions (Trockman & Kolter 2022, *Patches Are All You Need?*).

Its spatial filters may be drawn and kept, as Zheng et al. 2024 do to ask what they are for
(*Convolutional Initialization for Data-Efficient Vision Transformers*, Fig. 4 and Table 6).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitprobe.models import filters as banks
from vitprobe.models.layers import StochasticDepth, check_divides, check_odd
from vitprobe.models.registry import register, variant
from vitprobe.names import unknown


class FilterSpec(NamedTuple):
    """What a layer of drawn filters is made of; the arguments of `convmixer`."""

    kind: str
    kernel_size: int
    grid: tuple[int, int]
    frozen: bool
    distinct: int
    box_taps: int | None
    gaussian_variance: float


class DrawnFilters(nn.Module):
    """Mixes space by filters of a drawn bank: depthwise kernels, or one dense matrix over all patches per channel.

    Frozen filters and their biases are buffers, so that `parameters()` counts what is trained; names in the state
    dict are the same either way.

    Args:
        channels: channels of the maps.
        spec: what to draw.
        shared: the layer whose bank this one uses too; the choice among its filters and the biases are its own.
    """

    weight: Tensor
    bias: Tensor
    choice: Tensor | None

    def __init__(self, channels: int, spec: FilterSpec, *, shared: "DrawnFilters | None" = None) -> None:
        super().__init__()
        self.spec = spec
        self.dense = spec.kind in banks.MATRICES
        # `default_generator` is the global state of the CPU, which `create_model` seeds: filters do not depend on
        # the device that the network is built on.
        generator, device = torch.default_generator, torch.get_default_device()
        if shared is None:
            self._keep("weight", _draw(spec, generator).to(device))
        elif spec.frozen:
            self.register_buffer("weight", shared.weight)
        else:
            self.weight = shared.weight
        bound = 1 / (channels if self.dense else spec.kernel_size)
        bias = bound * (2 * torch.rand(channels, generator=generator, device="cpu") - 1)
        self._keep("bias", bias.to(device))
        choice = None
        if spec.distinct < channels:
            choice = banks.filter_choice(channels, spec.distinct, generator=generator).to(device)
        self.register_buffer("choice", choice)

    def _keep(self, name: str, value: Tensor) -> None:
        if self.spec.frozen:
            self.register_buffer(name, value)
        else:
            self.register_parameter(name, nn.Parameter(value))

    def filters(self) -> Tensor:
        """The filter of every channel: `(channel, 1, y, x)`, or `(channel, query, key)` of dense matrices."""
        weight = self.weight.flatten(1).softmax(1).view_as(self.weight) if self.spec.kind == "softmax" else self.weight
        return weight if self.choice is None else weight[self.choice]

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, channel, y, x)` to the same shape; zeros beyond the edges, as in a convolution."""
        if not self.dense:
            return F.conv2d(x, self.filters(), self.bias, padding="same", groups=x.shape[1])
        if tuple(x.shape[2:]) != self.spec.grid:
            raise ValueError(
                f"these matrices mix {self.spec.grid[0]}x{self.spec.grid[1]} patches and got "
                f"{x.shape[2]}x{x.shape[3]}: build the model with the image_size of its images."
            )
        mixed = torch.einsum("bck,cqk->bcq", x.flatten(2), self.filters())
        return (mixed + self.bias[:, None]).view_as(x)

    def extra_repr(self) -> str:
        """What the filters are, for `print(model)`."""
        return f"{self.spec.kind}, distinct={self.spec.distinct}, frozen={self.spec.frozen}"


def _draw(spec: FilterSpec, generator: torch.Generator) -> Tensor:
    if spec.kind in banks.MATRICES:
        return banks.permutation_bank(spec.kind, spec.distinct, spec.grid[0] * spec.grid[1], generator=generator)
    return banks.filter_bank(
        spec.kind,
        spec.distinct,
        spec.kernel_size,
        generator=generator,
        box_taps=spec.box_taps,
        gaussian_variance=spec.gaussian_variance,
    )


class ConvMixerBlock(nn.Module):
    """A depthwise convolution with a skip connection, then a pointwise one without.

    Args:
        dim: channels.
        kernel_size: side of the depthwise kernels, odd.
        mix: what mixes space in place of the learned depthwise convolution.
        activation: whether a GELU follows it.
    """

    def __init__(self, dim: int, kernel_size: int, *, mix: nn.Module | None = None, activation: bool = True) -> None:
        super().__init__()
        self.spatial = nn.Sequential(
            mix or nn.Conv2d(dim, dim, kernel_size, groups=dim, padding="same"),
            nn.GELU() if activation else nn.Identity(),
            nn.BatchNorm2d(dim),
        )
        self.drop = StochasticDepth()
        self.channel = nn.Sequential(nn.Conv2d(dim, dim, 1), nn.GELU(), nn.BatchNorm2d(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, dim, y, x)` to the same shape."""
        return self.channel(x + self.drop(self.spatial(x)))


class ConvMixer(nn.Module):
    """A strided patch convolution, isotropic ConvMixer blocks, average pooling."""

    def __init__(
        self,
        *,
        image_size: tuple[int, int],
        channels: int,
        num_classes: int,
        patch_size: int,
        dim: int,
        depth: int,
        kernel_size: int,
        filters: str,
        frozen: bool | None,
        distinct: int | None,
        share_filters: bool,
        box_taps: int | None,
        gaussian_variance: float,
        spatial_activation: bool,
    ) -> None:
        super().__init__()
        height, width = image_size
        check_divides(patch_size, image_size, what="patch_size", of=f"an image of {height}x{width} pixels")
        check_odd(kernel_size, what="kernel_size")
        self.stem = nn.Sequential(
            nn.Conv2d(channels, dim, patch_size, stride=patch_size), nn.GELU(), nn.BatchNorm2d(dim)
        )
        drawn = filters != "learned"
        if drawn and filters not in banks.CONVOLUTIONS + banks.MATRICES:
            raise unknown("kind of filters", filters, ["learned", *banks.CONVOLUTIONS, *banks.MATRICES])
        if not drawn and (frozen or distinct is not None or share_filters):
            raise ValueError(
                "learned filters are one per channel and layer, and train: for frozen, distinct or shared ones use "
                "filters='random' (which starts as learned filters do) or another kind, with frozen=False to train it."
            )
        if distinct is not None and not 1 <= distinct <= dim:
            raise ValueError(f"distinct={distinct} filters for {dim} channels: use 1 to {dim}.")
        spec = FilterSpec(
            kind=filters,
            kernel_size=kernel_size,
            grid=(height // patch_size, width // patch_size),
            frozen=frozen is not False,
            distinct=distinct or dim,
            box_taps=box_taps,
            gaussian_variance=gaussian_variance,
        )
        blocks: list[nn.Module] = []
        first = None
        for _ in range(depth):
            mix = DrawnFilters(dim, spec, shared=first) if drawn else None
            first = mix if share_filters else None
            blocks.append(ConvMixerBlock(dim, kernel_size, mix=mix, activation=spatial_activation))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(batch, class)` of images `(batch, channel, y, x)`."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@register
def convmixer(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    patch_size: int = 2,
    dim: int = 256,
    depth: int = 8,
    kernel_size: int = 5,
    filters: str = "learned",
    frozen: bool | None = None,
    distinct: int | None = None,
    share_filters: bool = False,
    box_taps: int | None = None,
    gaussian_variance: float = 1.0,
    spatial_activation: bool = True,
) -> ConvMixer:
    """ConvMixer: depthwise convolutions mix patches, pointwise ones mix channels, at one resolution throughout.

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        patch_size: side of a patch [pixels].
        dim: channels.
        depth: number of blocks.
        kernel_size: side of the depthwise kernels [patches], odd.
        filters: `"learned"`, or how the spatial filters are drawn: `"random"`, `"impulse"`, `"box"`, `"gaussian"`,
            `"softmax"` (see `vitprobe.models.filters.filter_bank`), `"permutation"`, `"full_permutation"` (a dense
            matrix over all patches per channel; see `permutation_bank`).
        frozen: whether drawn filters and their biases stay as drawn; they do unless this is `False`.
        distinct: how many different filters a layer's channels draw from, at random; one per channel unless given.
        share_filters: use the first layer's bank in all layers; each still chooses from it, and has biases, by itself.
        box_taps: taps of a `"box"`; all of them unless given.
        gaussian_variance: `s` in the `"gaussian"` filters' `exp(-r^2 / 2s)` [patches^2].
        spatial_activation: whether a GELU follows the spatial filters. Zheng et al.'s code has none there.

    Returns:
        The network.
    """
    return ConvMixer(**locals())


@variant(convmixer, patch_size=2, dim=256, depth=8, kernel_size=5)
def convmixer_256_8() -> None:
    """ConvMixer-256/8 for CIFAR: 256 wide, 8 deep, 5x5 kernels, patch 2 (Trockman & Kolter)."""


@variant(convmixer, patch_size=2, dim=512, depth=6, kernel_size=5, spatial_activation=False)
def convmixer_zheng() -> None:
    """ConvMixer as in Zheng et al.'s code: 512 wide, 6 deep, 5x5, patch 2, no GELU after the spatial filters."""


@variant(convmixer, patch_size=4, dim=96, depth=6)
def convmixer_micro() -> None:
    """A ConvMixer for two cores and 32x32 images: patch 4, 96 wide, 6 deep, 5x5 kernels."""


@variant(convmixer, patch_size=1, dim=48, depth=4, kernel_size=3)
def convmixer_nano() -> None:
    """A ConvMixer for seconds and 8x8 images: every pixel a patch, 48 wide, 4 deep, 3x3 kernels."""
