"""Networks of timm and torchvision: any by `library:NAME`, and the papers' baselines with their settings for CIFAR.

Both libraries are imported when a network of theirs is built, not before.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from vitprobe.models.layers import check_divides
from vitprobe.models.registry import register, register_library, variant
from vitprobe.names import unknown


def timm_model(name: str) -> Callable[..., nn.Module]:
    """The constructor of a timm model, for images of any size and channels where the architecture allows them.

    Args:
        name: as in `timm.list_models()`, with or without a tag of pretrained weights.

    Returns:
        A constructor as `register` takes it; its options are timm's, e.g. `patch_size`, `drop_path_rate`,
        `pretrained`.

    Raises:
        ValueError: if timm has no such model.
    """
    import timm

    if not timm.is_model(name):
        raise unknown("timm model", name, timm.list_models())

    def constructor(*, image_size: tuple[int, int], channels: int, num_classes: int, **options: Any) -> nn.Module:
        # timm hands the size of this entry to models that are built for one size, and to no other: most refuse it.
        size = {"input_size": (channels, *image_size)}
        network = timm.create_model(
            name, num_classes=num_classes, in_chans=channels, pretrained_cfg_overlay=size, **options
        )
        for module in network.modules():
            if hasattr(module, "attention_bias_cache"):
                module.get_attention_biases = MethodType(_attention_biases, module)  # type: ignore[assignment]
        return network

    constructor.__doc__ = f"{name} of timm."
    return constructor


def _attention_biases(self: nn.Module, device: object) -> Tensor:
    # timm (LeViT, TinyViT, EfficientFormer) keeps the biases of the first evaluation: weights loaded or moved later,
    # as curvature and loss landscapes move them, would go unseen.
    return self.attention_biases[:, self.attention_bias_idxs]  # type: ignore[index]


def torchvision_model(name: str) -> Callable[..., nn.Module]:
    """The constructor of a torchvision classifier.

    Args:
        name: as in `torchvision.models.list_models(module=torchvision.models)`.

    Returns:
        A constructor as `register` takes it; its options are torchvision's, e.g. `dropout`. It raises
        `ValueError` for images that torchvision's networks do not take: other than 3 channels, or not square for ViT.

    Raises:
        ValueError: if torchvision has no such classifier.
    """
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise unknown("torchvision model", name, known)

    def constructor(*, image_size: tuple[int, int], channels: int, num_classes: int, **options: Any) -> nn.Module:
        if channels != 3:
            raise ValueError(f"torchvision's models take 3 channels, not {channels}: timm:NAME takes any number.")
        if name.startswith("vit_"):
            if image_size[0] != image_size[1]:
                raise ValueError(
                    f"torchvision's {name} takes square images, not {image_size[0]}x{image_size[1]}: timm's take any."
                )
            options = {"image_size": image_size[0], **options}
        elif name.startswith("maxvit_"):
            options = {"input_size": image_size, **options}
        return torchvision.models.get_model(name, num_classes=num_classes, **options)

    constructor.__doc__ = f"{name} of torchvision."
    return constructor


register_library("timm", timm_model)
register_library("torchvision", torchvision_model)


def _baseline(
    name: str, image_size: tuple[int, int], channels: int, num_classes: int, options: dict[str, Any]
) -> nn.Module:
    """A timm model that is ready for stochastic depth, as our own are: it is off until a recipe sets it."""
    rate = options.pop("drop_path_rate", None)
    network = timm_model(name)(
        image_size=image_size,
        channels=channels,
        num_classes=num_classes,
        drop_path_rate=0.1 if rate is None else rate,  # timm leaves the modules out at 0
        **options,
    )
    for module in network.modules():
        if rate is None and type(module).__name__ == "DropPath":
            module.drop_prob = 0.0  # type: ignore[assignment]
    return network


@register
def deit_ti(
    *, image_size: tuple[int, int], channels: int, num_classes: int, patch_size: int = 2, **options: Any
) -> nn.Module:
    """DeiT-Ti of timm for CIFAR: 192 wide, 12 deep, 3 heads, class token, patch 2.

    `vit_ti` with biases on query, key and value, and a class token with a position: 7,104 parameters more.

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        patch_size: side of a patch [pixels].
        **options: timm's own.

    Returns:
        The network.
    """
    return _baseline("deit_tiny_patch16_224", image_size, channels, num_classes, {"patch_size": patch_size, **options})


@variant(deit_ti, embed_dim=384, num_heads=6)
def deit_s() -> None:
    """DeiT-S of timm for CIFAR: 384 wide, 12 deep, 6 heads, class token, patch 2."""


@variant(deit_ti, embed_dim=768, num_heads=12)
def deit_b() -> None:
    """DeiT-B of timm for CIFAR: 768 wide, 12 deep, 12 heads, class token, patch 2."""


@register
def pit_ti(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    patch_size: int = 2,
    stride: int = 1,
    **options: Any,
) -> nn.Module:
    """PiT-Ti of timm for CIFAR: a ViT whose grid is halved twice, patches of 2 at every pixel (31x31 tokens).

    Park & Kim's has no biases on query, key and value: 5,760 parameters fewer.

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        patch_size: side of a patch [pixels].
        stride: between patches [pixels].
        **options: timm's own.

    Returns:
        The network.
    """
    settings = {"patch_size": patch_size, "stride": stride, **options}
    return _baseline("pit_ti_224", image_size, channels, num_classes, settings)


@variant(pit_ti, patch_size=4, stride=2, base_dims=(16, 16, 16), depth=(2, 2, 2), heads=(2, 4, 8), mlp_ratio=2.0)
def pit_micro() -> None:
    """A PiT for two cores and 32x32 images: 32 to 128 wide, 3 stages of 2 blocks, patches of 4 at every other pixel."""


@variant(pit_ti, patch_size=2, stride=1, base_dims=(16, 16), depth=(2, 2), heads=(2, 4), mlp_ratio=2.0)
def pit_nano() -> None:
    """A PiT for seconds and 8x8 images: 32 and 64 wide, 2 stages of 2 blocks, patches of 2 at every pixel."""


@register
def swin_ti(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    patch_size: int = 1,
    window_size: int = 4,
    **options: Any,
) -> nn.Module:
    """Swin-Ti of timm for CIFAR: attention in shifted windows of 4, every pixel a patch.

    Park & Kim's own Swin has 23,646 parameters fewer: no biases on query, key and value (13,248), one table of
    relative biases for all heads (6,174), and no norms around its strided convolutions (4,224). It also masks the
    wrong windows on grids of more than 2x2 windows; timm's does not.

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        patch_size: side of a patch [pixels].
        window_size: side of the windows [patches]; smaller maps are one window.
        **options: timm's own.

    Returns:
        The network.
    """
    settings = {"patch_size": patch_size, "window_size": window_size, **options}
    return _baseline("swin_tiny_patch4_window7_224", image_size, channels, num_classes, settings)


@variant(swin_ti, patch_size=2, embed_dim=32, depths=(2, 2, 2), num_heads=(2, 4, 8), mlp_ratio=2.0)
def swin_micro() -> None:
    """A Swin for two cores and 32x32 images: 32 to 128 wide, 3 stages of 2 blocks, windows of 4 patches of 2."""


@variant(swin_ti, embed_dim=32, depths=(2, 2), num_heads=(2, 4), mlp_ratio=2.0)
def swin_nano() -> None:
    """A Swin for seconds and 8x8 images: 32 and 64 wide, 2 stages of 2 blocks, windows of 4, every pixel a patch."""


@register
def twins_s(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    patch_size: int = 1,
    window_size: int = 4,
    **options: Any,
) -> nn.Module:
    """Twins-SVT-S of timm for small images: windows of 4 and subsampled global attention in turn, every pixel a patch.

    Park & Kim state no settings for CIFAR. With the published patches of 4 and windows of 7, the maps of 32x32 pixels
    are 8x8 to 1x1 and hardly need windows; these settings give 32x32 to 4x4, as in `swin_ti`.

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        patch_size: side of a patch [pixels].
        window_size: side of the windows [patches].
        **options: timm's own.

    Returns:
        The network.
    """
    settings = {"patch_size": patch_size, "wss": (window_size,) * 4, **options}
    return _baseline("twins_svt_small", image_size, channels, num_classes, settings)


@register
def levit_128s(
    *, image_size: tuple[int, int], channels: int, num_classes: int, stem_stride: int = 2, **options: Any
) -> nn.Module:
    """LeViT-128S of timm for small images: convolutional stem, attention that halves the grid, one classifier.

    The published stem has stride 16 and leaves 2x2 patches of 32x32 pixels, which the stages take to 1x1: that runs,
    and mixes almost nothing. Here only the stem's last convolution is strided, so that the grids are 16x16, 8x8 and
    4x4 (on ImageNet 14x14, 7x7 and 4x4); the parameters are the same.

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        stem_stride: of the whole stem: 2, 4, 8 or the published 16.
        **options: timm's own; `distilled=True` adds the second classifier.

    Returns:
        The network.

    Raises:
        ValueError: if the stem cannot have that stride, or it does not divide the image.
    """
    from timm.layers import get_act_layer
    from timm.models.levit import Stem16

    if stem_stride not in (2, 4, 8, 16):
        raise ValueError(f"stem_stride={stem_stride}: the stem's convolutions give 2, 4, 8 or 16.")
    height, width = image_size
    check_divides(stem_stride, image_size, what="stem_stride", of=f"an image of {height}x{width} pixels")
    stem_width = options.get("embed_dim", (128,))[0]
    stem = Stem16(channels, stem_width, act_layer=get_act_layer("hard_swish"))
    for number in range(1, 5):
        stride = 2 if stem_stride >= 2 ** (5 - number) else 1
        getattr(stem, f"conv{number}").linear.stride = (stride, stride)
    settings = {"stem_backbone": stem, "stem_stride": stem_stride, "distilled": False, **options}
    return _baseline("levit_128s", image_size, channels, num_classes, settings)
