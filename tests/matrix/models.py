"""The models of the matrix, and what has to be found in each.

A model of one's own is one line of `MODELS`: `"mine": Model(build)`, where `build()` returns it; or, without writing
any, `pytest tests/matrix --model mypkg.nets:build`. It is then measured with every probe and checked for what holds of
any model: the same output with and without probes, handed back as it was, the same numbers twice, every refusal one
sentence with its reason. What its architecture promises can be added word by word:

- `image`: pixels of a side, or `(height, width)`. `batch` makes what it is called on of images and labels.
- `units`: kinds of units in order, by grid: `"8x8+1: stem msa mlp; 4x4: subsample msa"` (`+1` is one class token).
- `maps`: attention maps in order: `"2 x 3 heads on 7x7 in 16 windows"`, and `"1 x 1 head on 8x8 over 2x2"` where keys
  are other tokens than queries. Those that are none between patches, by a piece
  of the reason, stand in `skipped`.
- `refused`: what is read by the probes that have nothing to measure ("activation", "attention"), with a piece of their
  reason. Gates are refused by all models but those that have `gates`.
- `taps`: modules whose inputs or outputs, in the order of the pass, are the activations of all units, or of `tapped`.
- `branches`: modules whose output is what a residual branch adds, in the order of the pass: what `lesion` removes.
- `attention`: by which road `oracles.py` computes the maps anew; `places`: where their tokens lie, for those that are
  not the rows of one grid or of contiguous windows; `keys`: where other keys lie that are not in the middle of equal
  shares of the grid; `heads_first` if they come before the windows.
- `exact`: off where PyTorch's fused `nn.MultiheadAttention` gives other last digits when it is not watched.
- `faults`: tests that a fault of vitprobe lets fail, with the fault; they have to fail.

All of that is read off the architectures' sources, none of it off what vitprobe finds. Weights are drawn from a seed;
nothing is downloaded.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from oracles import Tap, inputs, outputs
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "attach"))
from handwritten import PostNormEncoder, TinyViT

os.environ.setdefault("HF_HUB_OFFLINE", "1")

NO_MAPS = {"attention": "no attention maps between patches"}
NO_ATTENTION = dict.fromkeys(("attention", "gated attention"), "the model has no attention")
NO_UNITS = {"activation": "no units"}


@dataclass(frozen=True)
class Model:
    """One model; everything but `build` says what has to be found in it."""

    build: Callable[[], nn.Module]
    image: int | tuple[int, int] = 64
    batch: Callable[[Tensor, Tensor], Any] = lambda images, labels: (images, labels)
    units: str | None = None
    maps: Sequence[str] | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    taps: Sequence[Tap] = ()
    tapped: Sequence[int] | None = None
    to_image: Callable[[nn.Module, int, Tensor], Tensor] | None = None
    branches: Sequence[str] = ()
    attention: str = "softmax"
    heads_first: bool = False
    gates: bool = False
    places: Mapping[int, Callable[[], np.ndarray]] = field(default_factory=dict)
    keys: Mapping[int, Callable[[], np.ndarray]] = field(default_factory=dict)
    exact: bool = True
    faults: Mapping[str, str] = field(default_factory=dict)


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of timm by its name."""

    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=10, **options)

    return build


def timm_class(path: str, **options: Any) -> Callable[[], nn.Module]:
    """A class of `timm.models`, for sizes that no name of it has."""

    def build() -> nn.Module:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"timm.models.{module}"), name)(num_classes=10, **options)

    return build


def hugging_face(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A classifier of transformers from a configuration of its own."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(num_labels=10, **options)
        return getattr(transformers, f"{name}ForImageClassification")(config)

    return build


def ours(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of vitprobe's."""

    def build() -> nn.Module:
        from vitprobe.models import create_model

        return create_model(name, num_classes=10, seed=0, **options)

    return build


def pixel_values(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """A batch as transformers takes it."""
    return {"pixel_values": images, "labels": labels}


def torchvision_vit() -> nn.Module:
    """A ViT of torchvision's, three blocks."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(64, 8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10)


def torchvision_swin(version: int, window: int = 4) -> nn.Module:
    """A Swin of torchvision's on 16x16 and 8x8 patches."""
    from torchvision.models import swin_transformer as swin

    block, merging = {
        1: (swin.SwinTransformerBlock, swin.PatchMerging),
        2: (swin.SwinTransformerBlockV2, swin.PatchMergingV2),
    }[version]
    return swin.SwinTransformer(
        [4, 4], 16, [2, 2], [1, 2], [window, window], num_classes=10, block=block, downsample_layer=merging
    )


def torchvision_maxvit() -> nn.Module:
    """A MaxViT of torchvision's: 16 windows of 4x4, then 4."""
    from torchvision.models import MaxVit

    return MaxVit((64, 64), 8, 4, [16, 32], [1, 2], head_dim=8, stochastic_depth_prob=0.0, num_classes=10)


def torchvision_convnext() -> nn.Module:
    """A ConvNeXt of torchvision's, three stages."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 24, 1), CNBlockConfig(24, 32, 2), CNBlockConfig(32, None, 1)], num_classes=10)


def torchvision_resnet() -> nn.Module:
    """A ResNet of torchvision's, a basic block a stage."""
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)


def torchvision_googlenet() -> nn.Module:
    """A GoogLeNet of torchvision's without auxiliary classifiers: branches and concatenations."""
    from torchvision.models import GoogLeNet

    return GoogLeNet(num_classes=10, aux_logits=False, init_weights=False)


def torchvision_shufflenet() -> nn.Module:
    """A ShuffleNet of torchvision's: half of the channels pass, half are convolved."""
    from torchvision.models import ShuffleNetV2

    return ShuffleNetV2([1, 2, 1], [8, 16, 32, 64, 64], num_classes=10)


def torchvision_vgg() -> nn.Module:
    """A VGG of torchvision's with four convolutions."""
    from torchvision.models.vgg import VGG, make_layers

    features = make_layers([8, "M", 16, "M", 32, 32, "M"], batch_norm=True)
    with torch.device("meta"):  # its classifier has 10^8 weights
        model = VGG(features, init_weights=False)
    model.classifier = nn.Linear(32 * 7 * 7, 10)
    return model


def transformer_encoder(norm_first: bool) -> nn.Module:
    """A classifier around `nn.TransformerEncoder`."""
    model = PostNormEncoder(batch_first=True)
    for layer in model.encoder.layers:
        layer.norm_first = norm_first
    return model


def mvitv2() -> nn.Module:
    """An MViTv2 of timm's, which has no small one."""
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    return MultiScaleVit(MultiScaleVitCfg(depths=(1, 2, 2, 1), embed_dim=16), img_size=(64, 64), num_classes=10)


def caformer() -> nn.Module:
    """A CAFormer of timm's: separable convolutions, then attention."""
    from timm.models import metaformer

    mixers = [metaformer.SepConv] * 2 + [metaformer.Attention] * 2
    norms = [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2
    return metaformer.MetaFormer(
        depths=(1, 1, 2, 1), dims=(16, 32, 64, 96), token_mixers=mixers, norm_layers=norms, num_classes=10
    )


def normalised_exponentials(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as one writes it with `einsum` and no softmax."""
    weights = (torch.einsum("bhqc,bhkc->bhqk", query, key) / query.shape[-1] ** 0.5).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bhqk,bhkc->bhqc", weights, value)


def softmax_product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as one writes it with `@`."""
    return (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(-1) @ value


def hiera_image(model: nn.Module, unit: int, x: Tensor) -> Tensor:
    """Tokens of timm's Hiera in rows and columns, by its own function; its unit `i` belongs to block `(i - 1) // 2`."""
    return model.reroll(x, max(unit - 1, 0) // 2)


def folded(model: nn.Module, unit: int, x: Tensor) -> Tensor:
    """`(image, channel, pixel of a patch, patch)` of timm's MobileViTv2, patches of 2x2 pixels, as an image."""
    side = round(x.shape[3] ** 0.5)
    x = x.unflatten(3, (side, side)).unflatten(2, (2, 2))
    return x.permute(0, 4, 2, 5, 3, 1).flatten(3, 4).flatten(1, 2)


def nest_image(model: nn.Module, unit: int, x: Tensor) -> Tensor:
    """Blocks of timm's NesT in rows and columns, by its own function."""
    from timm.models.nest import deblockify

    return deblockify(x, 4)


def hiera_places(side: int, strides: int, windows: int) -> np.ndarray:
    """Where the tokens of a map of timm's Hiera lie `(window, token, 2)`, by its own function."""
    from timm.models.hiera import Unroll

    order = Unroll((side, side), (1, 1), [(2, 2)] * strides)(torch.arange(float(side * side)).view(1, -1, 1))
    index = order.long().view(-1, windows).T.numpy()  # the windows are the fastest axis
    return np.stack([index // side, index % side], axis=-1)


def hiera_pooled(side: int, strides: int, windows: int) -> np.ndarray:
    """The same of tokens whose queries are pooled 2 x 2, in patches of those."""
    return (hiera_places(side, strides, windows) + 0.5) / 2 - 0.5


def apart(size: int, stride: int) -> np.ndarray:
    """`size` x `size` tokens, `stride` patches apart: the grid attention of MaxViT."""
    y, x = np.meshgrid(np.arange(size) * stride, np.arange(size) * stride, indexing="ij")
    return np.stack([y.ravel(), x.ravel()], axis=-1)[None]


def steps(count: int, step: float) -> np.ndarray:
    """`count` x `count` keys from the first patch on, `step` patches of the queries apart."""
    return apart(count, 1) * step


def windows_with_padding(side: int, window: int, shift: int = 0, padded_first: bool = True) -> np.ndarray:
    """Windows over a grid that they do not divide, filled up at the right and below: NaN where there is no patch.

    Shifted windows are filled up before they are shifted, as torchvision does it, or after, as timm does.
    """
    padding = -side % window
    y, x = np.meshgrid(np.arange(float(side)), np.arange(float(side)), indexing="ij")
    places = np.stack([y, x], axis=-1)
    for step in (True, False):
        if step == padded_first:
            places = np.pad(places, ((0, padding), (0, padding), (0, 0)), constant_values=np.nan)
        else:
            places = np.roll(places, (-shift, -shift), axis=(0, 1))
    count = (side + padding) // window
    places = places.reshape(count, window, count, window, 2).transpose(0, 2, 1, 3, 4)
    return places.reshape(count * count, window * window, 2)


BLOCKS = ("blocks.*.attn", "blocks.*.mlp")
SWIN = inputs("layers.*.blocks.*.norm1", "layers.[12].downsample", "norm", nhwc=True)
SWIN += inputs("layers.*.blocks.*.norm2")
NORMS = inputs("blocks.*.norm1", "blocks.*.norm2", "norm")
HIERA_MAPS = [
    "1 x 1 head on 8x8 in 16 windows",
    "1 x 2 heads on 4x4 over 8x8 in 16 windows",
    "1 x 2 heads on 4x4 in 16 windows",
    "1 x 4 heads on 2x2 over 4x4 in 16 windows",
    "1 x 4 heads on 8x8",
    "1 x 8 heads on 4x4 over 8x8",
    "1 x 8 heads on 4x4",
]
HIERA_PLACES = {
    0: partial(hiera_places, 32, 3, 16),
    1: partial(hiera_places, 16, 2, 16),
    2: partial(hiera_places, 16, 2, 16),
    3: partial(hiera_places, 8, 1, 16),
    4: partial(hiera_places, 8, 1, 1),
    5: partial(hiera_places, 4, 0, 1),
}
HIERA_KEYS = {
    1: partial(hiera_pooled, 32, 3, 16),
    3: partial(hiera_pooled, 16, 2, 16),
    5: partial(hiera_pooled, 8, 1, 1),
}
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 64, "patch_size": 8}
STAGES = {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)}

MODELS: dict[str, Model] = {
    # timm: one grid
    "timm vit": Model(
        timm_model("vit_tiny_patch16_224", depth=3, img_size=(64, 96), patch_size=8),
        (64, 96),
        units="8x12+1: stem msa mlp msa mlp msa mlp",
        maps=["3 x 3 heads on 8x12+1"],
        taps=NORMS,
        branches=BLOCKS,
    ),
    "timm deit distilled": Model(
        timm_model("deit_tiny_distilled_patch16_224", depth=3, img_size=64, patch_size=8),
        units="8x8+2: stem msa mlp msa mlp msa mlp",
        maps=["3 x 3 heads on 8x8+2"],
        taps=NORMS,
        branches=BLOCKS,
    ),
    "timm vit registers": Model(
        timm_model("vit_little_patch16_reg4_gap_256", depth=3, img_size=64, patch_size=8, embed_dim=64, num_heads=4),
        units="8x8+4: stem msa mlp msa mlp msa mlp",
        maps=["3 x 4 heads on 8x8+4"],
        taps=NORMS,
        branches=BLOCKS,
    ),
    "timm beit": Model(
        timm_model("beit_base_patch16_224", depth=3, img_size=64, patch_size=8, embed_dim=64, num_heads=4),
        units="8x8+1: stem msa mlp msa mlp msa mlp",
        maps=["3 x 4 heads on 8x8+1"],
        taps=NORMS,
        branches=BLOCKS,
    ),
    "timm eva02": Model(
        timm_model("eva02_tiny_patch14_224", depth=3, img_size=56, patch_size=7, embed_dim=64, num_heads=2),
        56,
        units="8x8+1: stem msa mlp msa mlp msa mlp",
        maps=["3 x 2 heads on 8x8+1"],
        taps=NORMS,
        branches=BLOCKS,
    ),
    "timm vit rope mixed": Model(
        timm_model("vit_base_patch16_rope_mixed_224", depth=3, img_size=64, patch_size=8, embed_dim=64, num_heads=4),
        units="8x8+1: stem msa mlp msa mlp msa mlp",
        maps=["3 x 4 heads on 8x8+1"],
        taps=NORMS,
    ),
    "timm convit": Model(
        timm_model("convit_tiny", depth=4, local_up_to_layer=3, img_size=64, patch_size=8),
        units="8x8: stem msa mlp msa mlp msa mlp; 8x8+1: msa mlp",
        maps=["3 x 4 heads on 8x8", "1 x 4 heads on 8x8+1"],
        taps=NORMS,
        attention="dropout",
        gates=True,
        branches=BLOCKS,
    ),
    "timm cait": Model(
        timm_class("cait.Cait", img_size=64, patch_size=8, embed_dim=32, depth=3, num_heads=2),
        units="8x8: stem msa mlp msa mlp msa mlp",
        maps=[],
        skipped={"rows sum to one": 3, "no patch does": 2},
        refused=NO_MAPS,
        taps=inputs("blocks.*.norm1", "blocks.*.norm2", "blocks_token_only.0.norm1"),
    ),
    "timm xcit": Model(
        timm_class("xcit.Xcit", img_size=64, patch_size=8, embed_dim=64, depth=2, num_heads=2, eta=0.5),
        units="8x8: stem msa conv mlp msa conv mlp; 8x8+1: msa mlp msa mlp",
        maps=[],
        skipped={"channels": 2, "no patch does": 2},
        refused=NO_MAPS,
        taps=inputs("blocks.*.norm[123]", "cls_attn_blocks.*.norm1", "norm"),
        tapped=(0, 1, 2, 3, 4, 5, 6, 8, 10),
    ),
    "timm xcit, 64 channels on 64 tokens": Model(
        timm_class("xcit.Xcit", img_size=64, patch_size=8, embed_dim=128, depth=1, num_heads=2, eta=0.5),
        units="8x8: stem msa conv mlp; 8x8+1: msa mlp msa mlp",
        maps=[],
        skipped={"channels": 1, "no patch does": 2},
        refused=NO_MAPS,
        taps=inputs("blocks.*.norm[123]", "cls_attn_blocks.*.norm1", "norm"),
        tapped=(0, 1, 2, 3, 5, 7),
    ),
    "timm volo": Model(
        timm_class(
            "volo.VOLO",
            layers=[1, 2],
            img_size=64,
            embed_dims=[24, 48],
            num_heads=[2, 4],
            downsamples=(True, False),
            outlook_attention=(True, False),
        ),
        units="8x8: stem msa mlp; 4x4: subsample msa mlp msa mlp",
        maps=["2 x 4 heads on 4x4"],
        skipped={"different places": 1, "no patch does": 2},
        taps=inputs("network.*.*.norm[12]", "network.1", "post_network.0.norm1", nhwc=True),
    ),
    "timm samvit": Model(
        timm_model(
            "samvit_base_patch16_224",
            img_size=64,
            patch_size=8,
            depth=2,
            embed_dim=32,
            num_heads=2,
            window_size=4,
            global_attn_indexes=(1,),
        ),
        units="8x8: stem msa mlp msa mlp",
        maps=["1 x 2 heads on 4x4 in 4 windows", "1 x 2 heads on 8x8"],
        taps=inputs("blocks.*.norm[12]", nhwc=True) + outputs("blocks.1", nhwc=True),
    ),
    "timm samvit, padded windows": Model(
        timm_model(
            "samvit_base_patch16_224",
            img_size=80,
            patch_size=8,
            depth=2,
            embed_dim=32,
            num_heads=2,
            window_size=4,
            global_attn_indexes=(1,),
        ),
        80,
        units="10x10: stem msa mlp msa mlp",
        maps=["1 x 2 heads on 4x4 in 9 windows", "1 x 2 heads on 10x10"],
        places={0: partial(windows_with_padding, 10, 4)},
        branches=BLOCKS,
        taps=inputs("blocks.*.norm[12]", nhwc=True) + outputs("blocks.1", nhwc=True),
    ),
    "timm mixer": Model(
        timm_class("mlp_mixer.MlpMixer", img_size=64, patch_size=8, num_blocks=3, embed_dim=32),
        units="8x8: stem mlp mlp mlp mlp mlp mlp",
        maps=[],
        refused=NO_ATTENTION,
        taps=NORMS,
        branches=("blocks.*.mlp_tokens", "blocks.*.mlp_channels"),
    ),
    "timm convmixer": Model(
        timm_class("convmixer.ConvMixer", dim=16, depth=3, kernel_size=5, patch_size=4),
        units="16x16: stem conv mlp conv mlp conv mlp",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("stem", "blocks.*.0", "blocks.*"),
    ),
    "timm crossvit": Model(
        timm_class(
            "crossvit.CrossVit",
            img_size=120,
            img_scale=(1.0, 112 / 120),
            patch_size=(12, 16),
            embed_dim=(24, 48),
            depth=((1, 2, 0), (1, 2, 0)),
            num_heads=(2, 2),
            mlp_ratio=(2, 2, 1),
        ),
        120,
        units="",
        maps=["1 x 2 heads on 10x10+1", "2 x 2 heads on 7x7+1", "1 x 2 heads on 10x10+1", "2 x 2 heads on 7x7+1"],
        skipped={"no patch does": 4, "more than one position": 1},
        refused=NO_UNITS,
    ),
    # timm: pyramids
    "timm pit": Model(
        timm_model("pit_ti_224", img_size=96, depth=[1, 2, 1]),
        96,
        units="11x11+1: stem msa mlp; 6x6+1: subsample msa mlp msa mlp; 3x3+1: subsample msa mlp",
        maps=["1 x 2 heads on 11x11+1", "2 x 4 heads on 6x6+1", "1 x 8 heads on 3x3+1"],
        taps=inputs("transformers.*.blocks.*.norm[12]", "transformers.[12].pool") + outputs("transformers.2"),
        branches=("transformers.*.blocks.*.attn", "transformers.*.blocks.*.mlp"),
    ),
    "timm swin": Model(
        timm_model("swin_tiny_patch4_window7_224", img_size=112, embed_dim=24, depths=(2, 2, 2), num_heads=(1, 2, 4)),
        112,
        units="28x28: stem msa mlp msa mlp; 14x14: subsample msa mlp msa mlp; 7x7: subsample msa mlp msa mlp",
        maps=["2 x 1 head on 7x7 in 16 windows", "2 x 2 heads on 7x7 in 4 windows", "2 x 4 heads on 7x7"],
        taps=SWIN,
        branches=("layers.*.blocks.*.attn", "layers.*.blocks.*.mlp"),
    ),
    "timm swin, padded windows": Model(
        timm_model(
            "swin_tiny_patch4_window7_224",
            img_size=64,
            embed_dim=24,
            depths=(2, 2),
            num_heads=(1, 2),
            window_size=5,
        ),
        units="16x16: stem msa mlp msa mlp; 8x8: subsample msa mlp msa mlp",
        maps=["2 x 1 head on 5x5 in 16 windows", "2 x 2 heads on 5x5 in 4 windows"],
        places={
            0: partial(windows_with_padding, 16, 5),
            1: partial(windows_with_padding, 16, 5, 2, padded_first=False),
            2: partial(windows_with_padding, 8, 5),
            3: partial(windows_with_padding, 8, 5, 2, padded_first=False),
        },
        taps=SWIN,
    ),
    "timm swinv2": Model(
        timm_model(
            "swinv2_tiny_window8_256",
            img_size=64,
            window_size=4,
            embed_dim=24,
            depths=(2, 2, 2),
            num_heads=(1, 2, 4),
        ),
        units="16x16: stem msa mlp msa mlp; 8x8: subsample msa mlp msa mlp; 4x4: subsample msa mlp msa mlp",
        maps=["2 x 1 head on 4x4 in 16 windows", "2 x 2 heads on 4x4 in 4 windows", "2 x 4 heads on 4x4"],
        taps=inputs("layers.*.blocks.*", "layers.[12].downsample", "norm", nhwc=True) + inputs("layers.*.blocks.*.mlp"),
        branches=("layers.*.blocks.*.norm1", "layers.*.blocks.*.norm2"),
    ),
    "timm twins": Model(
        timm_model(
            "twins_svt_small",
            img_size=64,
            patch_size=2,
            embed_dims=(16, 32, 32, 64),
            num_heads=(1, 2, 2, 4),
            depths=(2, 2, 2, 2),
            wss=(4, 4, 4, 4),
        ),
        units="32x32: stem msa mlp conv msa mlp; 16x16: subsample msa mlp conv msa mlp; "
        "8x8: subsample msa mlp conv msa mlp; 4x4: subsample msa mlp conv msa mlp",
        maps=[
            "1 x 1 head on 4x4 in 64 windows",
            "1 x 1 head on 32x32 over 4x4",
            "1 x 2 heads on 4x4 in 16 windows",
            "1 x 2 heads on 16x16 over 4x4",
            "1 x 2 heads on 4x4 in 4 windows",
            "1 x 2 heads on 8x8 over 4x4",
            "2 x 4 heads on 4x4",
        ],
        taps=inputs("blocks.*.*.norm[12]", "pos_block.*", "patch_embeds.[123]", "norm"),
    ),
    "timm pvt_v2": Model(
        timm_class("pvt_v2.PyramidVisionTransformerV2", depths=(1, 1, 1, 1), embed_dims=(16, 32, 32, 64)),
        units="16x16: stem msa conv; 8x8: subsample msa conv; 4x4: subsample msa conv; 2x2: subsample msa conv",
        maps=[
            "1 x 1 head on 16x16 over 2x2",
            "1 x 2 heads on 8x8 over 2x2",
            "1 x 4 heads on 4x4 over 2x2",
            "1 x 8 heads on 2x2",
        ],
        taps=inputs("stages.*.blocks.*.norm[12]", "stages.*.norm"),
        branches=("stages.*.blocks.*.attn", "stages.*.blocks.*.mlp"),
    ),
    "timm levit": Model(
        timm_class(
            "levit.Levit",
            img_size=128,
            embed_dim=(32, 48, 64),
            key_dim=16,
            depth=(2, 2, 1),
            num_heads=(2, 3, 4),
            stem_stride=16,
        ),
        128,
        units="8x8: stem msa mlp msa mlp; 4x4: subsample mlp msa mlp msa mlp; 2x2: subsample mlp msa mlp",
        maps=[
            "2 x 2 heads on 8x8",
            "1 x 2 heads on 4x4 over 8x8",
            "2 x 3 heads on 4x4",
            "1 x 3 heads on 2x2 over 4x4",
            "1 x 4 heads on 2x2",
        ],
        keys={2: partial(steps, 8, 0.5), 5: partial(steps, 4, 0.5)},
        taps=inputs(
            "stages.*.blocks.*.attn",
            "stages.*.blocks.*.mlp",
            "stages.*.downsample.attn_downsample",
            "stages.*.downsample.mlp",
        )
        + outputs("stages.2"),
    ),
    "timm mobilevit": Model(
        timm_model("mobilevit_xxs"),
        128,
        units="64x64: stem conv; 32x32: subsample conv conv mlp; 16x16: subsample msa conv; 8x8: subsample msa conv; "
        "4x4: subsample msa conv",
        skipped={"attentions, since something leads around": 3},
        taps=outputs("stem", "stages.[01].*", "stages.[234].0", "stages.[234].0.conv1_1x1", "final_conv")
        + inputs("stages.[234].1.conv_fusion"),
        maps=["2 x 4 heads on 8x8 in 4 windows", "4 x 4 heads on 4x4 in 4 windows", "3 x 4 heads on 2x2 in 4 windows"],
        places={i: partial(apart, 8 if i < 2 else 4 if i < 6 else 2, 2) for i in range(9)},
    ),
    "timm mobilevit v2": Model(
        timm_model("mobilevitv2_050"),
        128,
        units="32x32: stem conv; 16x16: subsample msa mlp msa mlp; "
        "8x8: subsample msa mlp msa mlp msa mlp msa mlp; 4x4: subsample msa mlp msa mlp msa mlp mlp",
        maps=[],
        skipped={"no attention map was seen": 9},
        refused=NO_MAPS,
        taps=inputs("stages.*.1.transformer.*.norm[12]", "stages.*.1.norm"),
        tapped=range(2, 23),
        to_image=folded,
        faults={"units": "separable attention is found as mlp: it multiplies number by number, and no matrices"},
    ),
    "timm maxvit": Model(
        timm_model("test_maxvit"),
        160,
        units="80x80: stem; 40x40: subsample msa mlp msa mlp; 20x20: subsample msa mlp msa mlp; "
        "10x10: subsample msa mlp msa mlp; 5x5: subsample msa mlp msa mlp",
        maps=[
            "2 x 1 head on 5x5 in 64 windows",
            "2 x 2 heads on 5x5 in 16 windows",
            "2 x 3 heads on 5x5 in 4 windows",
            "2 x 4 heads on 5x5",
        ],
        places={1: partial(apart, 5, 8), 3: partial(apart, 5, 4), 5: partial(apart, 5, 2)},
        taps=outputs("stem", "stages.*.blocks.*.conv")
        + inputs("stages.*.blocks.*.attn_block.norm2", "stages.*.blocks.*.attn_grid.norm[12]", nhwc=True)
        + outputs("stages.*.blocks.*.attn_grid", nhwc=True),
    ),
    "timm coatnet": Model(
        timm_model("test_coatnet"),
        160,
        units="80x80: stem; 40x40: subsample; 20x20: subsample; 10x10: subsample mlp msa mlp; 5x5: subsample mlp",
        maps=["1 x 2 heads on 10x10", "1 x 3 heads on 10x10", "1 x 3 heads on 5x5"],
        taps=outputs("stem", "stages.[01].blocks.*", "stages.[23].blocks.*") + inputs("stages.[23].blocks.*.norm2"),
    ),
    "timm coat lite": Model(
        timm_class("coat.CoaT", img_size=64, patch_size=4, embed_dims=[16, 32, 32, 32], serial_depths=[1, 2, 1, 1]),
        units="16x16+1: stem msa mlp; 8x8+1: subsample msa mlp conv msa mlp; 4x4+1: subsample msa mlp; "
        "2x2+1: subsample msa mlp",
        maps=[],
        skipped={"over channels": 5},
        refused=NO_MAPS,
        taps=inputs("serial_blocks*.*.norm[12]", "patch_embed[234]", "norm4") + outputs("serial_blocks2.0"),
    ),
    "timm hiera": Model(
        timm_class("hiera.Hiera", img_size=(128, 128), embed_dim=16, num_heads=1, stages=(1, 2, 2, 2)),
        128,
        units="32x32: stem msa mlp; 16x16: subsample mlp msa mlp; 8x8: subsample mlp msa mlp; "
        "4x4: subsample mlp msa mlp",
        maps=HIERA_MAPS,
        heads_first=True,
        places=HIERA_PLACES,
        keys=HIERA_KEYS,
        to_image=hiera_image,
        taps=inputs("blocks.*.norm[12]") + outputs("blocks.6"),
        branches=BLOCKS,
    ),
    "timm efficientformer": Model(
        timm_class("efficientformer.EfficientFormer", depths=(1, 1, 1, 3), embed_dims=(16, 24, 32, 48), num_vit=2),
        224,
        units="56x56: stem conv mlp; 28x28: subsample conv mlp; 14x14: subsample conv mlp; "
        "7x7: subsample conv mlp msa mlp msa mlp",
        maps=["2 x 8 heads on 7x7"],
        taps=outputs("stem", "stages.*.blocks.0", "stages.3.blocks.[23]", "stages.[123].downsample")
        + inputs("stages.*.blocks.0.mlp", "stages.3.blocks.[23].norm2"),
    ),
    "timm efficientformer v2": Model(
        timm_class(
            "efficientformer_v2.EfficientFormerV2",
            depths=(1, 1, 2, 2),
            embed_dims=(16, 24, 32, 48),
            num_vit=1,
            img_size=64,
        ),
        units="16x16: stem conv; 8x8: subsample conv; 4x4: subsample conv msa conv; 2x2: subsample conv msa conv",
        maps=["1 x 8 heads on 2x2 over 4x4"],
        skipped={"rows sum to one": 2},
        keys={0: partial(steps, 4, 0.5)},
        taps=outputs("stem", "stages.[123].downsample", "stages.*.blocks.*") + inputs("stages.[23].blocks.1.mlp"),
    ),
    "timm edgenext": Model(
        timm_class("edgenext.EdgeNeXt", depths=(1, 2, 2, 2), dims=(16, 24, 32, 48), heads=(4, 4, 4, 4)),
        units="16x16: stem conv; 8x8: subsample conv msa; 4x4: subsample conv msa; 2x2: subsample conv msa",
        maps=[],
        skipped={"channels": 3},
        refused=NO_MAPS,
        taps=outputs("stem", "stages.[123].downsample", "stages.*.blocks.*"),
    ),
    "timm nextvit": Model(
        timm_class("nextvit.NextViT", in_chans=3, depths=(1, 2, 5, 1), stem_chs=(16, 16, 16)),
        units="16x16: stem conv mlp; 8x8: subsample conv mlp msa conv mlp; "
        "4x4: subsample conv mlp conv mlp conv mlp conv mlp msa conv mlp; 2x2: subsample msa conv mlp",
        maps=["1 x 24 heads on 2x2"],
        skipped={"different grids": 2},
        taps=outputs("stages.*.blocks.0.patch_embed", "stages.*.blocks.*")
        + inputs("stages.*.blocks.*.norm", "stages.*.blocks.*.norm2", "stages.*.blocks.*.projection"),
    ),
    "timm poolformer": Model(
        timm_class("metaformer.MetaFormer", **STAGES, downsample_norm=None),
        units="16x16: stem conv mlp; 8x8: subsample conv mlp; 4x4: subsample conv mlp conv mlp; "
        "2x2: subsample conv mlp",
        maps=[],
        refused=NO_ATTENTION,
        taps=inputs("stages.*.blocks.*.norm[12]", "stages.[123].downsample") + outputs("stages.3"),
    ),
    "timm caformer": Model(
        caformer,
        units="16x16: stem conv mlp; 8x8: subsample conv mlp; 4x4: subsample msa mlp msa mlp; 2x2: subsample msa mlp",
        maps=["2 x 2 heads on 4x4", "1 x 3 heads on 2x2"],
        taps=inputs("stages.*.blocks.*.norm[12]", "stages.[123].downsample") + outputs("stages.3"),
    ),
    "timm davit": Model(
        timm_class("davit.DaVit", depths=(1, 1, 1), embed_dims=(16, 24, 32), num_heads=(1, 2, 2), window_size=4),
        units="16x16: stem conv msa conv mlp conv msa conv mlp; 8x8: subsample conv msa conv mlp conv msa conv mlp; "
        "4x4: subsample conv msa conv mlp conv msa conv mlp",
        maps=["1 x 1 head on 4x4 in 16 windows", "1 x 2 heads on 4x4 in 4 windows", "1 x 2 heads on 4x4"],
        skipped={"channels": 3},
        taps=inputs("stages.*.blocks.*.*.cpe[12]", "stages.*.blocks.*.*.norm[12]", "stages.[123].downsample")
        + outputs("stages.2"),
        branches=("stages.*.blocks.*.*.cpe[12].proj", "stages.*.blocks.*.*.attn", "stages.*.blocks.*.*.mlp"),
    ),
    "timm focalnet": Model(
        timm_class("focalnet.FocalNet", depths=(1, 1, 2, 1), embed_dim=16),
        units="16x16: stem conv mlp; 8x8: subsample conv mlp; 4x4: subsample conv mlp conv mlp; "
        "2x2: subsample conv mlp",
        maps=[],
        refused=NO_ATTENTION,
        taps=inputs("layers.*.blocks.*.norm[12]", "layers.[123].downsample", "norm"),
    ),
    "timm gcvit": Model(
        timm_class(
            "gcvit.GlobalContextVit",
            img_size=64,
            window_ratio=(32, 32, 16),
            embed_dim=16,
            depths=(2, 2, 2),
            num_heads=(1, 2, 2),
            window_size=None,
        ),
        # The global query of a stage, made from its input, leads around all of its blocks but the last MLP.
        units="32x32: stem conv; 16x16: subsample msa mlp conv; 8x8: subsample msa mlp conv; 4x4: subsample msa mlp",
        maps=["1 x 1 head on 2x2 in 64 windows", "1 x 2 heads on 2x2 in 16 windows", "2 x 2 heads on 4x4"],
        skipped={"attentions, since something leads around": 3, "different places": 2},
        taps=outputs("stem.down.norm1")
        + inputs("stem.down.reduction", "stages.*.downsample.reduction")
        + inputs("stages.*.blocks.0.norm1", "stages.*.blocks.1.norm2", nhwc=True)
        + outputs("stages.*.blocks.1", nhwc=True),
    ),
    "timm tiny_vit": Model(
        timm_class(
            "tiny_vit.TinyVit",
            embed_dims=(16, 32, 32, 64),
            depths=(1, 2, 2, 1),
            num_heads=(1, 2, 2, 4),
            window_sizes=(7, 4, 4, 2),
        ),
        units="16x16: stem conv; 8x8: subsample msa conv mlp msa conv mlp; 4x4: subsample msa conv mlp msa conv mlp; "
        "2x2: subsample msa conv mlp",
        maps=["2 x 2 heads on 4x4 in 4 windows", "2 x 2 heads on 4x4", "1 x 4 heads on 2x2"],
        taps=outputs("patch_embed", "stages.[123].downsample", "stages.*.blocks.*.local_conv")
        + inputs("stages.0.blocks.*.act3", "stages.*.blocks.*.local_conv")
        + outputs("stages.[123].blocks.*", nhwc=True),
    ),
    "timm fastvit": Model(
        timm_class("fastvit.FastVit", layers=(1, 1, 1, 1), embed_dims=(16, 32, 64, 64)),
        units="32x32: stem; 16x16: subsample mlp conv conv; 8x8: subsample mlp conv conv; "
        "4x4: subsample mlp conv conv; "
        "2x2: subsample mlp conv conv conv mlp",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("stages.*.blocks.*", "stages.*.blocks.*.token_mixer"),
        tapped=(3, 4, 7, 8, 11, 12, 15, 16),
    ),
    "timm nest": Model(
        timm_class(
            "nest.Nest",
            img_size=64,
            patch_size=4,
            num_levels=3,
            embed_dims=(16, 32, 32),
            num_heads=(1, 2, 2),
            depths=(1, 2, 1),
        ),
        units="16x16: stem msa mlp; 8x8: subsample msa mlp msa mlp; 4x4: subsample msa mlp",
        maps=["1 x 1 head on 4x4 in 16 windows", "2 x 2 heads on 4x4 in 4 windows", "1 x 2 heads on 4x4"],
        heads_first=True,
        branches=("levels.*.transformer_encoder.*.attn", "levels.*.transformer_encoder.*.mlp"),
        taps=inputs("levels.*.transformer_encoder.*.norm[12]"),
        tapped=(0, 1, 3, 4, 5, 6, 8, 9),
        to_image=nest_image,
    ),
    "timm mvitv2": Model(
        mvitv2,
        units="16x16: stem msa mlp; 8x8: subsample mlp msa mlp; 4x4: subsample mlp msa mlp; 2x2: subsample mlp",
        maps=[
            "1 x 1 head on 16x16 over 4x4",
            "1 x 2 heads on 8x8",
            "1 x 2 heads on 8x8 over 4x4",
            "1 x 4 heads on 4x4 over 8x8",
            "1 x 4 heads on 4x4",
            "1 x 8 heads on 2x2 over 4x4",
        ],
        keys={
            0: partial(steps, 4, 4),
            2: partial(steps, 4, 2),
            3: partial(steps, 8, 0.5),
            5: partial(steps, 4, 0.5),
        },
        taps=inputs("stages.*.blocks.*.norm[12]", "norm"),
    ),
    "timm tnt": Model(
        timm_class(
            "tnt.TNT",
            img_size=64,
            patch_size=16,
            embed_dim=32,
            inner_dim=12,
            depth=2,
            num_heads_inner=2,
            num_heads_outer=2,
        ),
        # The pixels of a patch, which every block sees, lead around all but the last.
        units="4x4+1: stem msa mlp",
        maps=["1 x 2 heads on 4x4 in 16 windows", "1 x 2 heads on 4x4+1"] * 2,
        skipped={"attentions, since something leads around": 1},
        taps=inputs("blocks.1.norm_out", "blocks.1.norm_mlp", "norm"),
    ),
    "timm visformer": Model(
        timm_class(
            "visformer.Visformer",
            img_size=64,
            init_channels=16,
            embed_dim=48,
            depth=(2, 2, 2),
            num_heads=3,
            attn_stage="011",
            spatial_conv="100",
        ),
        units="8x8: stem conv conv; 4x4: subsample msa mlp msa mlp; 2x2: subsample msa mlp msa mlp",
        maps=["2 x 3 heads on 4x4", "2 x 3 heads on 2x2"],
        taps=inputs("stage*.*.norm[12]", "patch_embed[23]", "norm"),
    ),
    "timm efficientvit": Model(
        timm_class(
            "efficientvit_msra.EfficientVitMsra",
            img_size=128,
            embed_dim=(32, 48, 64),
            depth=(1, 2, 1),
            num_heads=(2, 2, 2),
            window_size=(4, 4, 2),
        ),
        128,
        units="8x8: stem conv mlp msa conv mlp conv mlp; "
        "4x4: subsample conv mlp conv mlp msa conv mlp conv mlp msa conv mlp conv mlp; "
        "2x2: subsample conv mlp conv mlp msa conv mlp",
        maps=["2 x 1 head on 4x4 in 4 windows", "4 x 1 head on 4x4", "2 x 1 head on 2x2"],
        skipped={"attentions, since something leads around": 4},  # a head feeds the next
        taps=outputs(
            "patch_embed",
            "stages.*.blocks.*.dw[01]",
            "stages.*.blocks.*.ffn[01]",
            "stages.*.blocks.*.mixer",
            "stages.*.downsample.res[12].*",
            "stages.*.downsample.patchmerge",
        ),
    ),
    "timm shvit": Model(
        timm_class(
            "shvit.SHViT",
            embed_dim=(32, 48, 64),
            partial_dim=(8, 12, 16),
            qk_dim=(8, 8, 8),
            depth=(1, 2, 1),
            types=("i", "s", "s"),
        ),
        128,
        units="8x8: stem conv mlp conv mlp; 4x4: subsample conv mlp conv msa mlp conv msa mlp conv mlp; "
        "2x2: subsample conv mlp conv msa mlp",
        maps=["2 x 1 head on 4x4", "1 x 1 head on 2x2"],
        taps=outputs(
            "patch_embed",
            "stages.*.blocks.*.conv",
            "stages.[12].blocks.*.mixer",
            "stages.*.blocks.*.ffn",
            "stages.[12].downsample.*",
        ),
    ),
    # timm: convolutions
    "timm convnext": Model(
        timm_class("convnext.ConvNeXt", **STAGES),
        units="16x16: stem conv; 8x8: subsample conv; 4x4: subsample conv conv; 2x2: subsample conv",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("stem", "stages.[123].downsample", "stages.*.blocks.*"),
        branches=("stages.*.blocks.*.mlp",),
    ),
    "timm resnet": Model(
        timm_model("resnet18"),
        units="16x16: stem conv conv; 8x8: subsample conv; 4x4: subsample conv; 2x2: subsample conv",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("maxpool") + inputs("layer*.*.act2"),
        branches=("layer*.*.bn2",),
    ),
    "timm resnet pre-activation": Model(
        timm_model("resnetv2_18", layers=[1, 2, 1, 1], channels=(16, 32, 64, 64)),
        units="16x16: stem conv; 8x8: subsample conv; 4x4: subsample; 2x2: subsample",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("stages.0.blocks.0.norm1", "stages.*.blocks.*"),  # its first branches part after the first norm
        branches=("stages.*.blocks.*.conv2",),
    ),
    "timm regnet": Model(
        timm_model("regnetx_002"),
        units="32x32: stem; 16x16: subsample; 8x8: subsample; 4x4: subsample conv conv conv; "
        "2x2: subsample conv conv conv conv conv conv",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("stem") + inputs("s*.b*.act3"),
    ),
    "timm densenet": Model(
        timm_class("densenet.DenseNet", growth_rate=8, block_config=(2, 2, 2, 2)),
        units="16x16: stem conv; 8x8: subsample conv; 4x4: subsample conv; 2x2: subsample conv",
        maps=[],
        skipped={"2 convolutions in a row": 4},
        refused=NO_ATTENTION,
        taps=outputs("features.pool0", "features.transition*.norm", "features.transition*", "features.norm5"),
    ),
    "timm efficientnet": Model(
        timm_model("efficientnet_b0"),
        units="16x16: stem conv; 8x8: subsample conv; 4x4: subsample conv conv conv conv conv; "
        "2x2: subsample conv conv conv conv",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("blocks.[1-5].*", "bn2"),
    ),
    # torchvision
    "torchvision vit": Model(
        torchvision_vit,
        units="8x8+1: stem msa mlp msa mlp msa mlp",
        maps=["3 x 2 heads on 8x8+1"],
        taps=inputs("encoder.layers.*.ln_[12]", "encoder.ln"),
        attention="mha",
        exact=False,
        branches=("encoder.layers.*.self_attention", "encoder.layers.*.mlp"),
    ),
    "torchvision swin": Model(
        partial(torchvision_swin, 1),
        units="16x16: stem msa mlp msa mlp; 8x8: subsample msa mlp msa mlp",
        maps=["2 x 1 head on 4x4 in 16 windows", "2 x 2 heads on 4x4 in 4 windows"],
        taps=inputs("features.*.*.norm[12]", "features.2", "norm", nhwc=True),
        branches=("features.*.*.attn", "features.*.*.mlp"),
    ),
    "torchvision swin v2": Model(
        partial(torchvision_swin, 2),
        units="16x16: stem msa mlp msa mlp; 8x8: subsample msa mlp msa mlp",
        maps=["2 x 1 head on 4x4 in 16 windows", "2 x 2 heads on 4x4 in 4 windows"],
        taps=inputs("features.*.*.attn", "features.*.*.mlp", "features.2", "norm", nhwc=True),
    ),
    "torchvision swin v2, padded windows": Model(
        partial(torchvision_swin, 2, 6),
        units="16x16: stem msa mlp msa mlp; 8x8: subsample msa mlp msa mlp",
        # The last has no whole window: 3 + 5 rows, and padding.
        maps=["2 x 1 head on 6x6 in 9 windows", "1 x 2 heads on 6x6 in 4 windows", "1 x 2 heads on 5x5 in 4 windows"],
        places={
            0: partial(windows_with_padding, 16, 6),
            1: partial(windows_with_padding, 16, 6, 3),
            2: partial(windows_with_padding, 8, 6),
            3: partial(windows_with_padding, 8, 6, 3),
        },
        taps=inputs("features.*.*.attn", "features.*.*.mlp", "features.2", "norm", nhwc=True),
    ),
    "torchvision maxvit": Model(
        torchvision_maxvit,
        units="32x32: stem; 16x16: subsample msa mlp msa mlp; 8x8: subsample msa mlp msa mlp conv msa mlp msa mlp",
        maps=["2 x 2 heads on 4x4 in 16 windows", "4 x 4 heads on 4x4 in 4 windows"],
        places={1: partial(apart, 4, 4), 3: partial(apart, 4, 2), 5: partial(apart, 4, 2)},
        taps=outputs(
            "stem",
            "blocks.*.layers.*.layers.MBconv",
            "blocks.*.layers.*.layers.window_attention",
            "blocks.*.layers.*.layers.grid_attention",
        ),
        tapped=(0, 1, 3, 5, 6, 8, 10, 11, 13, 15),
    ),
    "torchvision convnext": Model(
        torchvision_convnext,
        units="16x16: stem conv; 8x8: subsample conv conv; 4x4: subsample conv",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("features.[024]", "features.[135].*"),
    ),
    "torchvision resnet": Model(
        torchvision_resnet,
        units="16x16: stem conv; 8x8: subsample; 4x4: subsample; 2x2: subsample",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("maxpool"),
        tapped=(0,),
    ),
    "torchvision googlenet": Model(
        torchvision_googlenet,
        units="16x16: stem mlp; 8x8: subsample conv; 4x4: subsample conv conv conv conv; 2x2: subsample conv conv",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("maxpool[1234]", "conv2", "inception3a", "inception4[abcd]", "inception5[ab]"),
    ),
    "torchvision shufflenet": Model(
        torchvision_shufflenet,
        units="16x16: stem; 8x8: subsample; 4x4: subsample conv; 2x2: subsample mlp",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("maxpool", "stage[234].*", "conv5"),
    ),
    "torchvision vgg": Model(
        torchvision_vgg,
        56,
        units="28x28: stem; 14x14: subsample conv; 7x7: subsample",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("features.3", "features.7", "features.10", "avgpool"),
    ),
    # transformers
    "transformers vit": Model(
        hugging_face("ViT", **SMALL, intermediate_size=64),
        batch=pixel_values,
        units="8x8+1: stem msa mlp msa mlp msa mlp",
        maps=["3 x 2 heads on 8x8+1"],
        taps=inputs("vit.layers.*.layernorm_before", "vit.layers.*.layernorm_after", "vit.layernorm"),
        attention="transformers",
        branches=("vit.layers.*.attention", "vit.layers.*.mlp"),
    ),
    "transformers deit": Model(
        hugging_face("DeiT", **SMALL, intermediate_size=64),
        batch=pixel_values,
        units="8x8+2: stem msa mlp msa mlp msa mlp",
        maps=["3 x 2 heads on 8x8+2"],
        taps=inputs("deit.layers.*.layernorm_before", "deit.layers.*.layernorm_after", "deit.layernorm"),
        attention="transformers",
    ),
    "transformers beit": Model(
        hugging_face("Beit", **SMALL, intermediate_size=64),
        batch=pixel_values,
        units="8x8+1: stem msa mlp msa mlp msa mlp",
        maps=["3 x 2 heads on 8x8+1"],
        taps=inputs("beit.layers.*.layernorm_before", "beit.layers.*.layernorm_after", "beit.layernorm"),
        attention="transformers",
    ),
    "transformers dinov2 registers": Model(
        hugging_face("Dinov2WithRegisters", **SMALL),
        batch=pixel_values,
        units="8x8+5: stem msa mlp msa mlp msa mlp",
        maps=["3 x 2 heads on 8x8+5"],
        taps=inputs("dinov2_with_registers.encoder.layer.*.norm[12]", "dinov2_with_registers.layernorm"),
        attention="transformers",
        branches=("dinov2_with_registers.encoder.layer.*.attention", "dinov2_with_registers.encoder.layer.*.mlp"),
    ),
    "transformers swin": Model(
        hugging_face("Swin", image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[1, 2], window_size=4),
        batch=pixel_values,
        units="16x16: stem msa mlp msa mlp; 8x8: subsample msa mlp msa mlp",
        maps=["2 x 1 head on 4x4 in 16 windows", "2 x 2 heads on 4x4 in 4 windows"],
        taps=inputs(
            "swin.encoder.layers.*.blocks.*.layernorm_before",
            "swin.encoder.layers.*.blocks.*.layernorm_after",
            "swin.encoder.layers.0.downsample",
            "swin.layernorm",
        ),
    ),
    "transformers hiera": Model(
        hugging_face("Hiera", image_size=[128, 128], depths=[1, 2, 2, 2], embed_dim=16, num_heads=[1, 2, 4, 8]),
        128,
        batch=pixel_values,
        units="32x32: stem msa mlp; 16x16: subsample mlp msa mlp; 8x8: subsample mlp msa mlp; "
        "4x4: subsample mlp msa mlp",
        maps=HIERA_MAPS,
        heads_first=True,
        places=HIERA_PLACES,
        keys=HIERA_KEYS,
    ),
    "transformers mobilevit": Model(
        hugging_face(
            "MobileViT", image_size=128, hidden_sizes=[24, 32, 40], neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 64]
        ),
        128,
        batch=pixel_values,
        units="32x32: stem conv conv mlp; 16x16: subsample msa conv; 8x8: subsample msa conv; 4x4: subsample msa conv",
        maps=["2 x 4 heads on 8x8 in 4 windows", "4 x 4 heads on 4x4 in 4 windows", "3 x 4 heads on 2x2 in 4 windows"],
        skipped={"attentions, since something leads around": 3},
        places={i: partial(apart, 8 if i < 2 else 4 if i < 6 else 2, 2) for i in range(9)},
    ),
    "transformers convnext": Model(
        hugging_face("ConvNext", depths=[1, 2, 1], hidden_sizes=[16, 24, 32], num_stages=3),
        batch=pixel_values,
        units="16x16: stem conv; 8x8: subsample conv conv; 4x4: subsample conv",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs(
            "convnext.embeddings",
            "convnext.encoder.stages.*.layers.*",
            "convnext.encoder.stages.[12].downsampling_layer.1",
        ),
    ),
    "transformers segformer": Model(
        hugging_face("Segformer", depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 32, 64], num_attention_heads=[1, 2, 2, 4]),
        batch=pixel_values,
        units="16x16: stem msa conv; 8x8: subsample msa conv; 4x4: subsample msa conv; 2x2: subsample msa conv",
        maps=[
            "1 x 1 head on 16x16 over 2x2",
            "1 x 2 heads on 8x8 over 2x2",
            "1 x 2 heads on 4x4 over 2x2",
            "1 x 4 heads on 2x2",
        ],
        taps=inputs(
            "segformer.stages.*.blocks.*.layernorm_before",
            "segformer.stages.*.blocks.*.layernorm_after",
            "segformer.stages.*.layer_norm",
        ),
        attention="transformers",
    ),
    "transformers pvt": Model(
        hugging_face(
            "Pvt", image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 32, 64], num_attention_heads=[1, 2, 2, 4]
        ),
        batch=pixel_values,
        units="16x16: stem msa mlp; 8x8: subsample msa mlp; 4x4: subsample msa mlp; 2x2+1: subsample msa mlp",
        maps=[
            "1 x 1 head on 16x16 over 2x2",
            "1 x 2 heads on 8x8 over 2x2",
            "1 x 2 heads on 4x4 over 2x2",
            "1 x 4 heads on 2x2+1",
        ],
        attention="transformers",
        taps=inputs(
            "pvt.encoder.block.*.0.layer_norm_[12]", "pvt.encoder.patch_embeddings.[123]", "pvt.encoder.layer_norm"
        ),
    ),
    # PyTorch itself, and by hand
    "nn.TransformerEncoder": Model(
        partial(transformer_encoder, False),
        16,
        units="4x4: stem msa mlp msa mlp",
        maps=["2 x 2 heads on 4x4"],
        attention="mha",
        exact=False,
        taps=inputs("encoder", "encoder.layers.*.norm[12]"),
    ),
    "nn.TransformerEncoder, pre-norm": Model(
        partial(transformer_encoder, True),
        16,
        units="4x4: stem msa mlp msa mlp",
        maps=["2 x 2 heads on 4x4"],
        taps=inputs("encoder.layers.*.norm[12]") + outputs("encoder"),
        attention="mha",
        exact=False,
        branches=("encoder.layers.*.self_attn", "encoder.layers.*.linear2"),
    ),
    "by hand, softmax @ v": Model(
        partial(TinyViT, softmax_product),
        16,
        units="4x4: stem msa mlp",
        maps=["1 x 3 heads on 4x4"],
        taps=inputs("norm", "mlp"),
        tapped=(0, 1),
        attention="seen",
        branches=("project", "mlp"),
    ),
    "by hand, einsum and exp": Model(
        partial(TinyViT, normalised_exponentials),
        16,
        units="4x4: stem msa mlp",
        maps=["1 x 3 heads on 4x4"],
        taps=inputs("norm", "mlp"),
        tapped=(0, 1),
        attention="seen",
    ),
    "by hand, fused": Model(
        partial(TinyViT, F.scaled_dot_product_attention, prefix=2),
        16,
        units="4x4+2: stem msa mlp",
        maps=["1 x 3 heads on 4x4+2"],
        taps=inputs("norm", "mlp"),
        tapped=(0, 1),
        attention="seen",
    ),
    # ours
    "vitprobe vit": Model(
        ours("vit", image_size=32, patch_size=4, dim=24, depth=2, heads=3),
        32,
        units="8x8+1: stem msa mlp msa mlp",
        maps=["2 x 3 heads on 8x8+1"],
        taps=inputs("blocks.*.attention_norm", "blocks.*.mlp_norm", "norm"),
        attention="weights",
        branches=("blocks.*.attention", "blocks.*.mlp"),
    ),
    "vitprobe convit": Model(
        ours("convit", image_size=32, patch_size=4, dim=16, depth=3, gpsa_layers=2),
        32,
        units="8x8: stem msa mlp msa mlp; 8x8+1: msa mlp",
        maps=["2 x 4 heads on 8x8", "1 x 4 heads on 8x8+1"],
        taps=inputs("*_blocks.*.attention_norm", "*_blocks.*.mlp_norm", "norm"),
        attention="weights",
        gates=True,
    ),
    "vitprobe simple_vit": Model(
        ours("simple_vit_micro", image_size=32, depth=2),
        32,
        units="8x8: stem msa mlp msa mlp",
        maps=["2 x 4 heads on 8x8"],
        taps=inputs("blocks.*.attention_norm", "blocks.*.mlp_norm", "norm"),
        attention="weights",
    ),
    "vitprobe convmixer": Model(
        ours("convmixer_nano", image_size=16),
        16,
        units="16x16: stem conv mlp conv mlp conv mlp conv mlp",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("stem", "blocks.*") + inputs("blocks.*.channel"),
    ),
    "vitprobe resnet": Model(
        ours("resnet_nano", image_size=16),
        16,
        units="16x16: stem conv conv conv; 8x8: subsample conv conv",
        maps=[],
        refused=NO_ATTENTION,
        taps=outputs("stem", "stages.*.*"),
    ),
    "vitprobe alternet": Model(
        ours("alternet_nano", image_size=16),
        16,
        units="16x16: stem conv conv conv; 8x8: subsample conv msa",
        maps=["1 x 2 heads on 4x4 in 4 windows"],
        taps=outputs("stem", "stages.*.*"),
        attention="weights",
        branches=("stages.*.*.branch", "stages.*.*.attention"),
    ),
    "vitprobe mixer": Model(
        ours("mixer", image_size=32, patch_size=4, dim=16, depth=2),
        32,
        units="8x8: stem mlp mlp mlp mlp",
        maps=[],
        refused=NO_ATTENTION,
        taps=inputs("blocks.*.token_norm", "blocks.*.channel_norm", "norm"),
    ),
}
