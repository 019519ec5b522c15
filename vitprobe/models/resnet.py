"""Pre-activation residual networks for small images (He et al. 2016, *Identity Mappings in Deep Residual Networks*)."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from vitprobe.models.layers import StochasticDepth
from vitprobe.models.registry import register, variant


class PreActivationBlock(nn.Module):
    """A residual block whose norms and activations come before its convolutions.

    `bottleneck=1` is the basic block of two 3x3 convolutions; `bottleneck=4` squeezes the width by four around one.
    The shortcut is a 1x1 convolution of the activated input where the shape changes, else the input itself.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, bottleneck: int) -> None:
        super().__init__()
        inner = out_channels // bottleneck
        kernels = (3, 3) if bottleneck == 1 else (1, 3, 1)
        widths = (in_channels, *[inner] * (len(kernels) - 1), out_channels)
        strided = 0 if bottleneck == 1 else 1
        self.norm = nn.BatchNorm2d(in_channels)
        layers: list[nn.Module] = []
        for i, kernel in enumerate(kernels):
            if i:
                layers += [nn.BatchNorm2d(widths[i]), nn.ReLU()]
            layers.append(
                nn.Conv2d(
                    widths[i],
                    widths[i + 1],
                    kernel,
                    stride=stride if i == strided else 1,
                    padding=kernel // 2,
                    bias=False,
                )
            )
        self.branch = nn.Sequential(*layers)
        same = stride == 1 and in_channels == out_channels
        self.shortcut = None if same else nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
        self.drop = StochasticDepth()

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, channel, y, x)` to the block's width and grid."""
        activated = F.relu(self.norm(x))
        skip = x if self.shortcut is None else self.shortcut(activated)
        return skip + self.drop(self.branch(activated))


class PreActivationResNet(nn.Module):
    """A 3x3 stem, stages that halve the grid, norm, ReLU, average pooling.

    `block(stage, index, in_channels, out_channels, stride)` builds each block, so that AlterNet is this network with
    some of its blocks replaced.
    """

    def __init__(
        self,
        block: Callable[[int, int, int, int, int], nn.Module],
        *,
        channels: int,
        num_classes: int,
        stem_width: int,
        widths: Sequence[int],
        blocks: Sequence[int],
    ) -> None:
        super().__init__()
        if len(widths) != len(blocks) or not widths:
            raise ValueError(f"widths={tuple(widths)} and blocks={tuple(blocks)} need one entry per stage each.")
        self.stem = nn.Conv2d(channels, stem_width, 3, padding=1, bias=False)
        stages: list[nn.Module] = []
        width = stem_width
        for stage, (out_width, count) in enumerate(zip(widths, blocks, strict=True)):
            layers = []
            for index in range(count):
                stride = 2 if stage and index == 0 else 1
                layers.append(block(stage, index, width, out_width, stride))
                width = out_width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(batch, class)` of images `(batch, channel, y, x)`."""
        x = self.stages(self.stem(x))
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


@register
def preact_resnet(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    widths: Sequence[int] = (64, 128, 256, 512),
    blocks: Sequence[int] = (2, 2, 2, 2),
    bottleneck: int = 1,
    stem_width: int | None = None,
) -> PreActivationResNet:
    """Pre-activation ResNet with a stem for small images; basic or bottleneck blocks, any depth and width.

    Args:
        image_size: `(height, width)` [pixels]; any size works.
        channels: channels of the images.
        num_classes: width of the classifier.
        widths: output channels of each stage.
        blocks: blocks of each stage; every stage after the first starts by halving the grid.
        bottleneck: 1 for basic blocks, 4 for bottleneck blocks.
        stem_width: channels after the stem; the first stage's inner width unless given.

    Returns:
        The network.
    """

    def block(stage: int, index: int, in_channels: int, out_channels: int, stride: int) -> nn.Module:
        return PreActivationBlock(in_channels, out_channels, stride=stride, bottleneck=bottleneck)

    return PreActivationResNet(
        block,
        channels=channels,
        num_classes=num_classes,
        stem_width=stem_width or widths[0] // bottleneck,
        widths=widths,
        blocks=blocks,
    )


@variant(preact_resnet)
def preact_resnet18() -> None:
    """Pre-activation ResNet-18: basic blocks (2, 2, 2, 2), widths 64 to 512."""


@variant(preact_resnet, widths=(256, 512, 1024, 2048), blocks=(3, 4, 6, 3), bottleneck=4)
def preact_resnet50() -> None:
    """Pre-activation ResNet-50: bottleneck blocks (3, 4, 6, 3), widths 256 to 2048."""


@variant(preact_resnet, widths=(16, 32, 64), blocks=(3, 3, 3))
def resnet_micro() -> None:
    """A pre-activation ResNet for two cores and 32x32 images: three stages of three basic blocks, 16 to 64 wide."""


@variant(preact_resnet, widths=(16, 32), blocks=(3, 3))
def resnet_nano() -> None:
    """A pre-activation ResNet for seconds and 8x8 images: two stages of three basic blocks, 16 and 32 wide."""
