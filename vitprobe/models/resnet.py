"""Residual networks (He et al. 2016), with their activations after the additions or before the convolutions.

*Deep Residual Learning for Image Recognition* and *Identity Mappings in Deep Residual Networks*; ResNeXt's groups
(Xie et al. 2017) and Park & Kim's spatial smoothing are options.
"""

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


class PostActivationBlock(nn.Module):
    """The original residual block: convolutions each followed by a norm, the last activation after the addition.

    `bottleneck=1` is the basic block of two 3x3 convolutions; `bottleneck=4` squeezes the width around one, which has
    the stride. That is a quarter as wide as the block; in ResNeXt, for every 64 channels of that quarter it has
    `groups` of `group_width`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        stride: int,
        bottleneck: int,
        groups: int = 1,
        group_width: int = 64,
    ) -> None:
        super().__init__()
        if bottleneck == 1 and (groups, group_width) != (1, 64):
            raise ValueError("basic blocks have one group of full width: for groups use bottleneck=4.")
        inner = int(out_channels // bottleneck * group_width / 64) * groups
        kernels = (3, 3) if bottleneck == 1 else (1, 3, 1)
        widths = (in_channels, *[inner] * (len(kernels) - 1), out_channels)
        strided = 0 if bottleneck == 1 else 1
        layers: list[nn.Module] = []
        for i, kernel in enumerate(kernels):
            if i:
                layers.append(nn.ReLU())
            layers += [
                nn.Conv2d(
                    widths[i],
                    widths[i + 1],
                    kernel,
                    stride=stride if i == strided else 1,
                    padding=kernel // 2,
                    groups=groups if i == strided else 1,
                    bias=False,
                ),
                nn.BatchNorm2d(widths[i + 1]),
            ]
        self.branch = nn.Sequential(*layers)
        same = stride == 1 and in_channels == out_channels
        self.shortcut = (
            None
            if same
            else nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )
        )
        self.drop = StochasticDepth()

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, channel, y, x)` to the block's width and grid."""
        skip = x if self.shortcut is None else self.shortcut(x)
        return F.relu(skip + self.drop(self.branch(x)))


class Smoothing(nn.Module):
    """Park & Kim's spatial smoothing: a 2x2 box blur before a subsampling.

    As published it keeps all positions, so that the grid grows by one, and zeros beyond the edges count; `bounded`
    puts `t tanh(x / t)`, `t` = 10, and a ReLU before it. With `keeps_grid` it looks one row down and one column to the
    right, and beyond the edges the last row and column are repeated: a constant map stays what it is, where zeros would
    draw a frame around it, which is itself variance and high frequency.
    """

    def __init__(self, *, bounded: bool = False, keeps_grid: bool = False) -> None:
        super().__init__()
        self.bounded = bounded
        self.keeps_grid = keeps_grid

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, channel, y, x)` to `(batch, channel, y + 1, x + 1)`, or to the same shape."""
        if self.bounded:
            x = F.relu(10 * F.tanh(x / 10))
        if self.keeps_grid:
            return F.avg_pool2d(F.pad(x, (0, 1, 0, 1), mode="replicate"), 2, stride=1)
        return F.avg_pool2d(x, 2, stride=1, padding=1)


# The options `smoothing` by name.
SMOOTHINGS: dict[str, dict[str, bool]] = {
    "box": {"keeps_grid": True},
    "blur": {},
    "tanh": {"bounded": True},
}


# Builds a block from its stage, its index in the stage, channels in and out, and stride.
BlockBuilder = Callable[[int, int, int, int, int], nn.Module]


def stem_convolution(channels: int, width: int, stem: str) -> tuple[nn.Conv2d, nn.Module]:
    """The first convolution and what pools after it.

    Args:
        channels: of the images.
        width: of the stem.
        stem: `"cifar"`: 3x3, every position kept; `"imagenet"`: 7x7 with stride 2, then 3x3 max-pooling with stride 2.

    Returns:
        The convolution and the pooling.

    Raises:
        ValueError: if the stem is neither.
    """
    if stem not in ("cifar", "imagenet"):
        raise ValueError(f"stem is 'cifar' (3x3) or 'imagenet' (7x7 with stride 2, then pooling), not {stem!r}.")
    if stem == "cifar":
        return nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.Identity()
    convolution = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
    return convolution, nn.MaxPool2d(3, stride=2, padding=1)


def build_stages(
    block: BlockBuilder, *, stem_width: int, widths: Sequence[int], blocks: Sequence[int], smoothing: str
) -> nn.Sequential:
    """Stages of blocks; every stage after the first starts by halving the grid.

    Args:
        block: builds a block.
        stem_width: channels that come in.
        widths: output channels of each stage.
        blocks: blocks of each stage.
        smoothing: `"none"`, or what ends every stage, one of `SMOOTHINGS`.

    Returns:
        The stages.

    Raises:
        ValueError: if the lists disagree on the number of stages, or one is empty, or the smoothing is unknown.
    """
    if len(widths) != len(blocks) or not widths:
        raise ValueError(f"widths={tuple(widths)} and blocks={tuple(blocks)} need one entry per stage each.")
    if min(widths) < 1:
        raise ValueError(f"widths={tuple(widths)}: every stage has at least 1 channel.")
    if min(blocks) < 1:
        raise ValueError(f"blocks={tuple(blocks)}: every stage has at least 1 block; leave out the others.")
    if smoothing not in ("none", *SMOOTHINGS):
        raise ValueError(
            "smoothing is 'none', 'box' (keeps the grid), 'blur' (the grid grows by one) or 'tanh' (bounded, then "
            f"blurred), not {smoothing!r}."
        )
    stages: list[nn.Module] = []
    width = stem_width
    for stage, (out_width, count) in enumerate(zip(widths, blocks, strict=True)):
        layers = []
        for index in range(count):
            stride = 2 if stage and index == 0 else 1
            layers.append(block(stage, index, width, out_width, stride))
            width = out_width
        if smoothing != "none":
            layers.append(Smoothing(**SMOOTHINGS[smoothing]))
        stages.append(nn.Sequential(*layers))
    return nn.Sequential(*stages)


def init_convolutions_(module: nn.Module) -> None:
    """Draw convolutions from He's normal distribution over their outputs, for ReLU."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


class PreActivationResNet(nn.Module):
    """A stem without norm, stages that halve the grid, norm, ReLU, average pooling.

    AlterNet is this network with some of its blocks replaced.
    """

    def __init__(
        self,
        block: BlockBuilder,
        *,
        channels: int,
        num_classes: int,
        stem_width: int,
        widths: Sequence[int],
        blocks: Sequence[int],
        stem: str = "cifar",
        smoothing: str = "none",
    ) -> None:
        super().__init__()
        self.stem, self.pool = stem_convolution(channels, stem_width, stem)
        self.stages = build_stages(block, stem_width=stem_width, widths=widths, blocks=blocks, smoothing=smoothing)
        self.norm = nn.BatchNorm2d(widths[-1])
        self.head = nn.Linear(widths[-1], num_classes)
        init_convolutions_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(batch, class)` of images `(batch, channel, y, x)`."""
        x = self.stages(self.pool(self.stem(x)))
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


class ResNet(nn.Module):
    """A stem with norm and ReLU, stages that halve the grid, average pooling."""

    def __init__(
        self,
        block: BlockBuilder,
        *,
        channels: int,
        num_classes: int,
        stem_width: int,
        widths: Sequence[int],
        blocks: Sequence[int],
        stem: str,
        smoothing: str,
    ) -> None:
        super().__init__()
        self.stem, self.pool = stem_convolution(channels, stem_width, stem)
        self.norm = nn.BatchNorm2d(stem_width)
        self.stages = build_stages(block, stem_width=stem_width, widths=widths, blocks=blocks, smoothing=smoothing)
        self.head = nn.Linear(widths[-1], num_classes)
        init_convolutions_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(batch, class)` of images `(batch, channel, y, x)`."""
        x = self.pool(F.relu(self.norm(self.stem(x))))
        return self.head(self.stages(x).mean((2, 3)))


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
    stem: str = "cifar",
    smoothing: str = "none",
) -> PreActivationResNet:
    """Pre-activation ResNet: norm and ReLU before the convolutions; basic or bottleneck blocks, any depth and width.

    Args:
        image_size: `(height, width)` [pixels]; any size works.
        channels: channels of the images.
        num_classes: width of the classifier.
        widths: output channels of each stage.
        blocks: blocks of each stage; every stage after the first starts by halving the grid.
        bottleneck: 1 for basic blocks, 4 for bottleneck blocks.
        stem_width: channels after the stem; the first stage's inner width unless given.
        stem: `"cifar"` (3x3, every position kept) or `"imagenet"` (7x7 with stride 2, 3x3 max-pooling with stride 2).
        smoothing: `"none"`, or a 2x2 box blur at the end of every stage: before every subsampling and, as in the
            published code, before the pooling. `"tanh"` is the published one, `"blur"` leaves out its tanh and ReLU,
            `"box"` also keeps the grid; see `Smoothing`.

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
        stem=stem,
        smoothing=smoothing,
    )


@register
def resnet(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    widths: Sequence[int] = (64, 128, 256, 512),
    blocks: Sequence[int] = (2, 2, 2, 2),
    bottleneck: int = 1,
    groups: int = 1,
    group_width: int = 64,
    stem_width: int | None = None,
    stem: str = "cifar",
    smoothing: str = "none",
) -> ResNet:
    """ResNet: norm after the convolutions, ReLU after the addition; basic, bottleneck or grouped blocks, any size.

    Args:
        image_size: `(height, width)` [pixels]; any size works.
        channels: channels of the images.
        num_classes: width of the classifier.
        widths: output channels of each stage.
        blocks: blocks of each stage; every stage after the first starts by halving the grid.
        bottleneck: 1 for basic blocks, 4 for bottleneck blocks.
        groups: groups of the 3x3 convolutions of bottleneck blocks.
        group_width: channels of a group in a block of inner width 64, as ResNeXt counts them.
        stem_width: channels after the stem; the first stage's inner width, without groups, unless given.
        stem: `"cifar"` (3x3, every position kept) or `"imagenet"` (7x7 with stride 2, 3x3 max-pooling with stride 2).
        smoothing: `"none"`, or a 2x2 box blur at the end of every stage: before every subsampling and, as in the
            published code, before the pooling. `"tanh"` is the published one, `"blur"` leaves out its tanh and ReLU,
            `"box"` also keeps the grid; see `Smoothing`.

    Returns:
        The network.
    """

    def block(stage: int, index: int, in_channels: int, out_channels: int, stride: int) -> nn.Module:
        return PostActivationBlock(
            in_channels, out_channels, stride=stride, bottleneck=bottleneck, groups=groups, group_width=group_width
        )

    return ResNet(
        block,
        channels=channels,
        num_classes=num_classes,
        stem_width=stem_width or widths[0] // bottleneck,
        widths=widths,
        blocks=blocks,
        stem=stem,
        smoothing=smoothing,
    )


@variant(resnet)
def resnet18() -> None:
    """ResNet-18: basic blocks (2, 2, 2, 2), widths 64 to 512; stem for small images."""


@variant(resnet, widths=(256, 512, 1024, 2048), blocks=(3, 4, 6, 3), bottleneck=4)
def resnet50() -> None:
    """ResNet-50: bottleneck blocks (3, 4, 6, 3), widths 256 to 2048; stem for small images."""


@variant(resnet, widths=(256, 512, 1024, 2048), blocks=(3, 4, 6, 3), bottleneck=4, groups=32, group_width=4)
def resnext50() -> None:
    """ResNeXt-50: ResNet-50 with 32 groups of 4 channels and more; stem for small images."""


@variant(preact_resnet)
def preact_resnet18() -> None:
    """Pre-activation ResNet-18: basic blocks (2, 2, 2, 2), widths 64 to 512."""


@variant(preact_resnet, widths=(256, 512, 1024, 2048), blocks=(3, 4, 6, 3), bottleneck=4)
def preact_resnet50() -> None:
    """Pre-activation ResNet-50: bottleneck blocks (3, 4, 6, 3), widths 256 to 2048."""


@variant(preact_resnet, widths=(256, 512, 1024, 2048), blocks=(3, 4, 6, 4), bottleneck=4)
def preact_resnet50_3464() -> None:
    """Pre-activation ResNet with one more block than 50's, (3, 4, 6, 4): `alternet50` without its attention."""


@variant(preact_resnet, widths=(16, 32, 64), blocks=(2, 2, 2))
def resnet_micro() -> None:
    """A pre-activation ResNet for two cores and 32x32 images: three stages of two basic blocks, 16 to 64 wide."""


@variant(preact_resnet, widths=(16, 32), blocks=(3, 3))
def resnet_nano() -> None:
    """A pre-activation ResNet for seconds and 8x8 images: two stages of three basic blocks, 16 and 32 wide."""
