"""AlterNet: a pre-activation ResNet with attention at the ends of its stages (Park & Kim 2022, section 4)."""

from collections.abc import Sequence

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitprobe.models.attention import Attention, RelativeBias
from vitprobe.models.layers import StochasticDepth, check_divides
from vitprobe.models.registry import register, variant
from vitprobe.models.resnet import PreActivationBlock, PreActivationResNet


class WindowAttentionBlock(nn.Module):
    """AlterNet's MSA block: norm, GELU, 1x1 convolution, norm, attention in windows, skip. No MLP.

    One relative-bias table is shared by all heads; windows are neither shifted nor masked.
    """

    def __init__(self, channels: int, *, inner: int, heads: int, head_dim: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.norm = nn.BatchNorm2d(channels)
        self.reduce = nn.Conv2d(channels, inner, 1, bias=False)
        self.reduced_norm = nn.BatchNorm2d(inner)
        self.attention = Attention(
            inner, heads, head_dim=head_dim, out_dim=channels, position=RelativeBias((window, window))
        )
        self.drop = StochasticDepth()

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, channel, y, x)` to the same shape."""
        height, width = x.shape[-2:]
        check_divides(self.window, (height, width), what="window", of=f"a map of {height}x{width}")
        reduced = self.reduced_norm(self.reduce(F.gelu(self.norm(x))))
        windows = rearrange(reduced, "b c (y wy) (x wx) -> (b y x) (wy wx) c", wy=self.window, wx=self.window)
        mixed = rearrange(
            self.attention(windows),
            "(b y x) (wy wx) c -> b c (y wy) (x wx)",
            y=height // self.window,
            x=width // self.window,
            wy=self.window,
        )
        return x + self.drop(mixed)


def attention_places(blocks: int, attentions: int) -> list[bool]:
    """Which blocks of a stage are attention: convolutions first, then (convolution, attention) pairs to the end.

    Args:
        blocks: blocks of the stage.
        attentions: how many of them are attention.

    Returns:
        One flag per block.

    Raises:
        ValueError: if the stage is too short for that many pairs.
    """
    if attentions * 2 > blocks:
        raise ValueError(
            f"{attentions} attention blocks need as many convolutions before them: "
            f"a stage of {blocks} blocks takes at most {blocks // 2}."
        )
    return [False] * (blocks - 2 * attentions) + [False, True] * attentions


@register
def alternet(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    widths: Sequence[int] = (256, 512, 1024, 2048),
    blocks: Sequence[int] = (3, 4, 6, 4),
    attentions: Sequence[int] = (0, 1, 1, 2),
    heads: Sequence[int] = (3, 6, 12, 24),
    head_dim: int = 64,
    window: int = 4,
    bottleneck: int = 4,
    stem: str = "cifar",
) -> PreActivationResNet:
    """AlterNet: a pre-activation ResNet whose stages end in attention; the default is Alter-ResNet-50 for CIFAR.

    Args:
        image_size: `(height, width)` [pixels]; the window has to divide the maps of stages with attention.
        channels: channels of the images.
        num_classes: width of the classifier.
        widths: output channels of each stage.
        blocks: blocks of each stage, attention included.
        attentions: attention blocks of each stage, placed from its end on, alternating with convolutions.
        heads: heads of each stage's attention.
        head_dim: channels of a head.
        window: side of the attention windows [cells of the map].
        bottleneck: 1 for basic blocks, 4 for bottleneck blocks.
        stem: `"cifar"` (3x3, every position kept) or `"imagenet"` (7x7 with stride 2, 3x3 max-pooling with stride 2).

    Returns:
        The network.

    Raises:
        ValueError: if the lists disagree on the number of stages, or a window does not divide its map.
    """
    if not len(widths) == len(blocks) == len(attentions) == len(heads):
        raise ValueError(
            f"widths={tuple(widths)}, blocks={tuple(blocks)}, attentions={tuple(attentions)} and heads={tuple(heads)} "
            "need one entry per stage each."
        )
    places = [attention_places(count, attention) for count, attention in zip(blocks, attentions, strict=True)]
    _check_window(window, image_size, attentions, first_stride=4 if stem == "imagenet" else 1)

    def block(stage: int, index: int, in_channels: int, out_channels: int, stride: int) -> nn.Module:
        if places[stage][index]:
            inner = out_channels // bottleneck
            return WindowAttentionBlock(out_channels, inner=inner, heads=heads[stage], head_dim=head_dim, window=window)
        return PreActivationBlock(in_channels, out_channels, stride=stride, bottleneck=bottleneck)

    return PreActivationResNet(
        block,
        channels=channels,
        num_classes=num_classes,
        stem_width=widths[0] // bottleneck,
        widths=widths,
        blocks=blocks,
        stem=stem,
    )


def _check_window(window: int, image_size: tuple[int, int], attentions: Sequence[int], *, first_stride: int) -> None:
    """Refuse a window that does not divide every map with attention, naming those that divide them all."""
    # Convolutions and pooling with stride 2 round up.
    maps = [
        tuple(-(-side // (first_stride * 2**stage)) for side in image_size)
        for stage, attention in enumerate(attentions)
        if attention
    ]
    if not maps:
        return
    sizes = list(dict.fromkeys(f"{height}x{width}" for height, width in maps))
    of = f"maps of {', '.join(sizes)}" if len(sizes) > 1 else f"a map of {sizes[0]}"
    try:
        check_divides(window, sum(maps, ()), what="window", of=of)
    except ValueError as error:
        last = max(stage for stage, attention in enumerate(attentions) if attention)
        step = max(window, 1) * first_stride * 2**last
        raise ValueError(
            f"{error} Images of {image_size[0]}x{image_size[1]} pixels gave them; sides that are multiples of {step} "
            f"take window={max(window, 1)}."
        ) from None


@variant(alternet)
def alternet50() -> None:
    """Alter-ResNet-50 for CIFAR: blocks (3, 4, 6, 4), attentions (0, 1, 1, 2), windows of 4."""


@variant(alternet, attentions=(0, 1, 3, 2), window=7, stem="imagenet", image_size=224)
def alternet50_imagenet() -> None:
    """Alter-ResNet-50 for ImageNet: blocks (3, 4, 6, 4), attentions (0, 1, 3, 2), windows of 7; 224x224 images."""


@variant(alternet, widths=(64, 128, 256, 512), blocks=(2, 2, 2, 2), attentions=(0, 1, 1, 1), bottleneck=1)
def alternet18() -> None:
    """Alter-ResNet-18 for CIFAR: basic blocks (2, 2, 2, 2), attentions (0, 1, 1, 1), windows of 4."""


@variant(
    alternet,
    widths=(16, 32, 64),
    blocks=(2, 2, 2),
    attentions=(0, 1, 1),
    heads=(1, 2, 4),
    head_dim=16,
    bottleneck=1,
)
def alternet_micro() -> None:
    """An AlterNet for two cores and 32x32 images: `resnet_micro` whose last two stages end in attention."""


@variant(
    alternet,
    widths=(16, 32),
    blocks=(3, 3),
    attentions=(0, 1),
    heads=(1, 2),
    head_dim=16,
    bottleneck=1,
)
def alternet_nano() -> None:
    """An AlterNet for seconds and 8x8 images: `resnet_nano` whose last stage ends in attention over its 4x4 map."""
