"""The Vision Transformer (Dosovitskiy et al. 2021; DeiT's form, Touvron et al. 2021)."""

import torch
from einops import repeat
from torch import Tensor, nn

from vitprobe.models.attention import Attention
from vitprobe.models.layers import (
    LayerNorm,
    PatchEmbedding,
    TransformerBlock,
    init_transformer_,
    sincos_positions,
)
from vitprobe.models.registry import register, variant


class ViT(nn.Module):
    """Patches, a class token or average pooling, pre-norm blocks of global attention and MLP."""

    def __init__(
        self,
        *,
        image_size: tuple[int, int],
        channels: int,
        num_classes: int,
        patch_size: int,
        dim: int,
        depth: int,
        heads: int,
        mlp_ratio: float,
        pool: str,
        position: str,
        registers: int,
        qkv_bias: bool,
    ) -> None:
        super().__init__()
        if pool not in ("class", "mean"):
            raise ValueError(f"pool is 'class' (a class token) or 'mean' (average of the patches), not {pool!r}.")
        if position not in ("learned", "sincos", "none"):
            raise ValueError(f"position is 'learned', 'sincos' or 'none', not {position!r}.")
        self.patches = PatchEmbedding(image_size=image_size, patch_size=patch_size, channels=channels, dim=dim)
        self.pool = pool
        self.num_prefix_tokens = int(pool == "class") + registers
        self.prefix = nn.Parameter(torch.zeros(self.num_prefix_tokens, dim)) if self.num_prefix_tokens else None
        tokens = self.patches.grid[0] * self.patches.grid[1]
        if position == "learned":
            self.position = nn.Parameter(torch.zeros(tokens, dim))
        else:
            code = sincos_positions(self.patches.grid, dim) if position == "sincos" else None
            self.register_buffer("position", code, persistent=False)
        self.blocks = nn.Sequential(*[
            TransformerBlock(Attention(dim, heads, qkv_bias=qkv_bias), dim, mlp_ratio=mlp_ratio) for _ in range(depth)
        ])
        self.norm = LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        init_transformer_(self)
        for parameter in (self.prefix, self.position):
            if isinstance(parameter, nn.Parameter):
                nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(batch, class)` of images `(batch, channel, y, x)`."""
        x = self.patches(x)
        if self.position is not None:
            x = x + self.position
        if self.prefix is not None:
            x = torch.cat([repeat(self.prefix, "p d -> b p d", b=len(x)), x], dim=1)
        x = self.norm(self.blocks(x))
        x = x[:, 0] if self.pool == "class" else x[:, self.num_prefix_tokens :].mean(1)
        return self.head(x)


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
    mlp_ratio: float = 4.0,
    pool: str = "class",
    position: str = "learned",
    registers: int = 0,
    qkv_bias: bool = False,
) -> ViT:
    """Vision Transformer: class token or pooling, learned or sine-cosine positions, any size.

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        patch_size: side of a patch [pixels].
        dim: channels of a token.
        depth: number of blocks.
        heads: heads per block.
        mlp_ratio: hidden width of the MLP over `dim`.
        pool: `"class"` classifies a class token, `"mean"` the average of the patch tokens.
        position: `"learned"`, `"sincos"` or `"none"`; the class token carries its own, being learned itself.
        registers: extra learned prefix tokens (Darcet et al. 2024).
        qkv_bias: biases on query, key and value.

    Returns:
        The network.
    """
    return ViT(**locals())


@variant(vit, dim=192, depth=12, heads=3)
def vit_ti() -> None:
    """ViT-Ti: 192 wide, 12 deep, 3 heads; patch 4 for small images."""


@variant(vit, dim=384, depth=12, heads=6)
def vit_s() -> None:
    """ViT-S: 384 wide, 12 deep, 6 heads; patch 4 for small images."""


@variant(vit, dim=96, depth=6, heads=3, mlp_ratio=2.0, pool="mean")
def vit_micro() -> None:
    """A ViT for two cores and 32x32 images: 96 wide, 6 deep, 3 heads, average pooling."""


@variant(vit, patch_size=2, dim=48, depth=4, heads=3, mlp_ratio=2.0, pool="mean")
def vit_nano() -> None:
    """A ViT for seconds and 8x8 images: patch 2, 48 wide, 4 deep, 3 heads, average pooling."""
