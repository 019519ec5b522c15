"""ConViT: gated positional self-attention (GPSA), d'Ascoli et al. 2021.

Not the "ConViT" file of Park & Kim's code, which is a ViT with local attention.
"""

import torch
from einops import repeat
from torch import Tensor, nn

from vitprobe.models.attention import Attention, GaussianPosition
from vitprobe.models.layers import LayerNorm, PatchEmbedding, TransformerBlock, init_transformer_
from vitprobe.models.registry import register, variant


def gpsa(
    dim: int,
    heads: int,
    *,
    grid: tuple[int, int],
    gate: float | None = 1.0,
    train_gate: bool = True,
    qkv_bias: bool = False,
) -> Attention:
    """Gated positional self-attention: content and a Gaussian of position, chosen between by one gate per head (eq. 7).

    The gates start at logit 1, so that position has a share of 0.731. Without gates (`None`) it is positional
    self-attention (PSA): both logits in one softmax.
    """
    return Attention(
        dim, heads, position=GaussianPosition(grid, heads), gate=gate, train_gate=train_gate, qkv_bias=qkv_bias
    )


class ConViT(nn.Module):
    """GPSA blocks on the patches alone, then blocks of plain attention with a class token that joins before them."""

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
        gpsa_layers: int,
        gated: bool,
        gate: float,
        train_gate: bool,
        train_gpsa: bool,
        local: bool,
        locality_strength: float,
        centers: str,
        pool: str,
        qkv_bias: bool,
    ) -> None:
        super().__init__()
        if not 0 <= gpsa_layers <= depth:
            raise ValueError(f"gpsa_layers={gpsa_layers} of {depth} blocks: use 0 to {depth}.")
        if pool not in ("class", "mean"):
            raise ValueError(f"pool is 'class' (a class token) or 'mean' (average of the patches), not {pool!r}.")
        self.patches = PatchEmbedding(image_size=image_size, patch_size=patch_size, channels=channels, dim=dim)
        self.position = nn.Parameter(torch.zeros(self.patches.grid[0] * self.patches.grid[1], dim))
        self.class_token = nn.Parameter(torch.zeros(dim)) if pool == "class" else None
        self.num_prefix_tokens = int(pool == "class")
        self.local_blocks = nn.Sequential(*[
            TransformerBlock(
                gpsa(
                    dim,
                    heads,
                    grid=self.patches.grid,
                    gate=gate if gated else None,
                    train_gate=train_gate,
                    qkv_bias=qkv_bias,
                ),
                dim,
                mlp_ratio=mlp_ratio,
            )
            for _ in range(gpsa_layers)
        ])
        self.global_blocks = nn.Sequential(*[
            TransformerBlock(Attention(dim, heads, qkv_bias=qkv_bias), dim, mlp_ratio=mlp_ratio)
            for _ in range(depth - gpsa_layers)
        ])
        self.norm = LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        init_transformer_(self)
        nn.init.trunc_normal_(self.position, std=0.02)
        if self.class_token is not None:
            nn.init.trunc_normal_(self.class_token, std=0.02)
        for module in self.local_blocks.modules():
            if local and isinstance(module, GaussianPosition):
                module.set_local_(strength=locality_strength, centers=centers)
            if isinstance(module, Attention):
                if local and isinstance(module.value, nn.Linear):
                    nn.init.eye_(module.value.weight)
                if not train_gpsa:
                    module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(batch, class)` of images `(batch, channel, y, x)`."""
        x = self.local_blocks(self.patches(x) + self.position)
        if self.class_token is not None:
            x = torch.cat([repeat(self.class_token, "d -> b 1 d", b=len(x)), x], dim=1)
        x = self.norm(self.global_blocks(x))
        return self.head(x[:, 0] if self.class_token is not None else x.mean(1))


@register
def convit(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    patch_size: int = 4,
    dim: int = 192,
    depth: int = 12,
    heads: int = 4,
    mlp_ratio: float = 4.0,
    gpsa_layers: int = 10,
    gated: bool = True,
    gate: float = 1.0,
    train_gate: bool = True,
    train_gpsa: bool = True,
    local: bool = True,
    locality_strength: float = 1.0,
    centers: str = "code",
    pool: str = "class",
    qkv_bias: bool = False,
) -> ConViT:
    """ConViT: gated positional self-attention, initialised as a convolution (d'Ascoli et al. 2021).

    Queries, keys and the other linear layers start by Glorot's rule, as in all ViTs here (`init_transformer_`): queries
    and keys have a standard deviation of 0.059 at 192 channels and 0.039 at 432, where the published code draws them
    from a truncated normal of 0.02. The content maps are less uniform at the start for it.

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        patch_size: side of a patch [pixels].
        dim: channels of a token.
        depth: number of blocks.
        heads: heads per block; a square number gives every head a place on the lattice of offsets.
        mlp_ratio: hidden width of the MLP over `dim`.
        gpsa_layers: how many blocks, from the first on, are gated; the class token joins after the last of them.
        gated: `False` sums content and position logits before one softmax in those blocks (PSA, Fig. 9).
        gate: where the gates start (their logit); 0 shares equally.
        train_gate: `False` freezes the gates (Table 3 b and d: at 0).
        train_gpsa: `False` freezes the whole attention of the gated blocks (Table 3 f and g).
        local: start the gated blocks as convolutions (position vectors on a lattice, identity values).
        locality_strength: inverse width of the heads' Gaussians [1/patch^2].
        centers: where an even lattice sits, `"code"` or `"paper"`; see `GaussianPosition.set_local_`.
        pool: `"class"` classifies the class token, `"mean"` the average of the patch tokens.
        qkv_bias: biases on query, key and value.

    Returns:
        The network.
    """
    return ConViT(**locals())


@variant(convit, dim=192, heads=4)
def convit_ti() -> None:
    """ConViT-Ti: 192 wide, 12 deep (10 gated), 4 heads; patch 4 for small images."""


@variant(convit, dim=256, heads=4)
def convit_ti_plus() -> None:
    """ConViT-Ti+: 256 wide, 12 deep (10 gated), 4 heads; patch 4 for small images."""


@variant(convit, dim=432, heads=9)
def convit_s() -> None:
    """ConViT-S: 432 wide, 12 deep (10 gated), 9 heads; patch 4 for small images."""


@variant(convit, dim=576, heads=9)
def convit_s_plus() -> None:
    """ConViT-S+: 576 wide, 12 deep (10 gated), 9 heads; patch 4 for small images."""


@variant(convit, dim=768, heads=16)
def convit_b() -> None:
    """ConViT-B: 768 wide, 12 deep (10 gated), 16 heads; patch 4 for small images."""


@variant(convit, dim=1024, heads=16)
def convit_b_plus() -> None:
    """ConViT-B+: 1024 wide, 12 deep (10 gated), 16 heads; patch 4 for small images."""


@variant(convit, dim=64, depth=6, heads=4, mlp_ratio=2.0, gpsa_layers=5, pool="mean")
def convit_micro() -> None:
    """A ConViT for two cores and 32x32 images: 64 wide, 6 deep (5 gated), 4 heads, average pooling."""


@variant(convit, patch_size=2, dim=48, depth=4, heads=4, mlp_ratio=2.0, gpsa_layers=3, pool="mean")
def convit_nano() -> None:
    """A ConViT for seconds and 8x8 images: patch 2, 48 wide, 4 deep (3 gated), average pooling."""
