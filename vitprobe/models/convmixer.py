"""ConvMixer: patches mixed by convolutions (Trockman & Kolter 2022, *Patches Are All You Need?*)."""

from torch import Tensor, nn

from vitprobe.models.layers import StochasticDepth, check_divides
from vitprobe.models.registry import register, variant


class ConvMixerBlock(nn.Module):
    """A depthwise convolution with a skip connection, then a pointwise one without."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        self.spatial = nn.Sequential(
            nn.Conv2d(dim, dim, kernel_size, groups=dim, padding="same"), nn.GELU(), nn.BatchNorm2d(dim)
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
    ) -> None:
        super().__init__()
        height, width = image_size
        check_divides(patch_size, image_size, what="patch_size", of=f"an image of {height}x{width} pixels")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size} has no middle: use {kernel_size + 1} or another odd number.")
        self.stem = nn.Sequential(
            nn.Conv2d(channels, dim, patch_size, stride=patch_size), nn.GELU(), nn.BatchNorm2d(dim)
        )
        self.blocks = nn.Sequential(*[ConvMixerBlock(dim, kernel_size) for _ in range(depth)])
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

    Returns:
        The network.
    """
    return ConvMixer(**locals())


@variant(convmixer, patch_size=4, dim=128, depth=6)
def convmixer_micro() -> None:
    """A ConvMixer for two cores and 32x32 images: patch 4, 128 wide, 6 deep, 5x5 kernels."""


@variant(convmixer, patch_size=1, dim=48, depth=4, kernel_size=3)
def convmixer_nano() -> None:
    """A ConvMixer for seconds and 8x8 images: every pixel a patch, 48 wide, 4 deep, 3x3 kernels."""
