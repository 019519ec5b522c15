"""The Vision Transformer (Dosovitskiy et al. 2021; DeiT's form, Touvron et al. 2021)."""

from collections.abc import Callable

import torch
from einops import repeat
from torch import Tensor, nn

from vitprobe.models.attention import Attention, Neighbourhood
from vitprobe.models.layers import (
    LayerNorm,
    PatchEmbedding,
    TransformerBlock,
    init_transformer_,
    sincos_positions,
)
from vitprobe.models.registry import register, variant


class ViT(nn.Module):
    """Patches, prefix tokens (class, distillation, registers) or average pooling, pre-norm blocks of attention and MLP.

    `attention(grid, prefix)` builds each block's attention for a grid of patches and so many tokens before them.
    """

    def __init__(
        self,
        attention: Callable[[tuple[int, int], int], nn.Module],
        *,
        image_size: tuple[int, int],
        channels: int,
        num_classes: int,
        patch_size: int,
        dim: int,
        depth: int,
        mlp_ratio: float,
        pool: str,
        position: str,
        registers: int = 0,
        distilled: bool = False,
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        if pool not in ("class", "mean"):
            raise ValueError(f"pool is 'class' (a class token) or 'mean' (average of the patches), not {pool!r}.")
        if position not in ("learned", "sincos", "none"):
            raise ValueError(f"position is 'learned', 'sincos' or 'none', not {position!r}.")
        if distilled and pool != "class":
            raise ValueError("a distillation token goes with a class token: use pool='class', or distilled=False.")
        self.patches = PatchEmbedding(image_size=image_size, patch_size=patch_size, channels=channels, dim=dim)
        self.pool = pool
        self.num_prefix_tokens = int(pool == "class") + int(distilled) + registers
        self.prefix = nn.Parameter(torch.zeros(self.num_prefix_tokens, dim)) if self.num_prefix_tokens else None
        tokens = self.patches.grid[0] * self.patches.grid[1]
        if position == "learned":
            self.position = nn.Parameter(torch.zeros(tokens, dim))
        else:
            code = sincos_positions(self.patches.grid, dim) if position == "sincos" else None
            self.register_buffer("position", code, persistent=False)
        self.blocks = nn.Sequential(*[
            TransformerBlock(
                attention(self.patches.grid, self.num_prefix_tokens), dim, mlp_ratio=mlp_ratio, layer_scale=layer_scale
            )
            for _ in range(depth)
        ])
        self.norm = LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        self.distilled_head = nn.Linear(dim, num_classes) if distilled else None
        self.distilled_training = False
        init_transformer_(self)
        for parameter in (self.prefix, self.position):
            if isinstance(parameter, nn.Parameter):
                nn.init.trunc_normal_(parameter, std=0.02)

    def set_distilled_training(self, enable: bool = True) -> None:
        """Whether a distilled network in training mode returns both heads' logits, as timm's do.

        Args:
            enable: `False` goes back to their average.

        Raises:
            ValueError: if the network has no distillation token.
        """
        if self.distilled_head is None:
            raise ValueError("this network has no distillation token: build it with distilled=True.")
        self.distilled_training = enable

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Logits `(batch, class)` of images `(batch, channel, y, x)`.

        A distilled network gives the average of its two heads (Touvron et al. 2021, section 4): for a loss on each,
        see `set_distilled_training`.
        """
        x = self.patches(x)
        if self.position is not None:
            x = x + self.position
        if self.prefix is not None:
            x = torch.cat([repeat(self.prefix, "p d -> b p d", b=len(x)), x], dim=1)
        x = self.norm(self.blocks(x))
        logits = self.head(x[:, 0] if self.pool == "class" else x[:, self.num_prefix_tokens :].mean(1))
        if self.distilled_head is None:
            return logits
        distilled = self.distilled_head(x[:, 1])
        return (logits, distilled) if self.distilled_training and self.training else (logits + distilled) / 2


@register
def vit(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    patch_size: int = 4,
    dim: int = 192,
    depth: int = 12,
    heads: int = 3,
    head_dim: int | None = None,
    mlp_ratio: float = 4.0,
    pool: str = "class",
    position: str = "learned",
    registers: int = 0,
    distilled: bool = False,
    kernel_size: int | None = None,
    boundary: str = "masked",
    layer_scale: float | None = None,
    qkv_bias: bool = False,
) -> ViT:
    """Vision Transformer: class token or pooling, learned or sine-cosine positions, any size.

    With `kernel_size=3, pool="mean"`, `vit_ti` is the ViT with convolutional attention of Park & Kim 2022 (Fig. 7).

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        patch_size: side of a patch [pixels].
        dim: channels of a token.
        depth: number of blocks.
        heads: heads per block.
        head_dim: channels of a head; `dim / heads` unless given.
        mlp_ratio: hidden width of the MLP over `dim`.
        pool: `"class"` classifies a class token, `"mean"` the average of the patch tokens.
        position: `"learned"`, `"sincos"` or `"none"`; the class token carries its own, being learned itself.
        registers: extra learned prefix tokens (Darcet et al. 2024), after the others.
        distilled: a distillation token after the class token, with a head of its own (Touvron et al. 2021).
        kernel_size: patches see only the square of so many patches a side around them, odd; all of them unless given.
        boundary: what such a square holds outside of the image, `"masked"` or `"zero"`; see `Neighbourhood`.
        layer_scale: start of a learned factor per channel on every residual branch; none unless given.
        qkv_bias: biases on query, key and value.

    Returns:
        The network.
    """

    def attention(grid: tuple[int, int], prefix: int) -> nn.Module:
        mask = None if kernel_size is None else Neighbourhood(grid, kernel_size, boundary=boundary, prefix=prefix)
        return Attention(dim, heads, head_dim=head_dim, mask=mask, qkv_bias=qkv_bias)

    return ViT(
        attention,
        image_size=image_size,
        channels=channels,
        num_classes=num_classes,
        patch_size=patch_size,
        dim=dim,
        depth=depth,
        mlp_ratio=mlp_ratio,
        pool=pool,
        position=position,
        registers=registers,
        distilled=distilled,
        layer_scale=layer_scale,
    )


@variant(vit, dim=192, depth=12, heads=3)
def vit_ti() -> None:
    """ViT-Ti: 192 wide, 12 deep, 3 heads; patch 4 for small images."""


@variant(vit, dim=384, depth=12, heads=6)
def vit_s() -> None:
    """ViT-S: 384 wide, 12 deep, 6 heads; patch 4 for small images."""


@variant(vit, patch_size=2, dim=192, depth=12, heads=3)
def vit_ti_p2() -> None:
    """ViT-Ti of Park & Kim 2022: patch 2, 192 wide, 12 deep, 3 heads."""


@variant(vit, patch_size=2, dim=384, depth=12, heads=6)
def vit_s_p2() -> None:
    """ViT-S of Park & Kim 2022: patch 2, 384 wide, 12 deep, 6 heads."""


@variant(vit, patch_size=2, dim=768, depth=12, heads=12)
def vit_b_p2() -> None:
    """ViT-B of Park & Kim 2022: patch 2, 768 wide, 12 deep, 12 heads."""


@variant(vit, dim=64, depth=6, heads=4, mlp_ratio=2.0, pool="mean")
def vit_micro() -> None:
    """A ViT for two cores and 32x32 images: 64 wide, 6 deep, 4 heads, average pooling."""


@variant(vit, patch_size=2, dim=48, depth=4, heads=3, mlp_ratio=2.0, pool="mean")
def vit_nano() -> None:
    """A ViT for seconds and 8x8 images: patch 2, 48 wide, 4 deep, 3 heads, average pooling."""
