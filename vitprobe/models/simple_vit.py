"""Simple ViT and its steps towards ConvMixer, Models I to III (Zheng et al. 2024).

*Convolutional Initialization for Data-Efficient Vision Transformers*, arXiv:2401.12511, Table 1. With the normed tokens
`X` of a block and a position code `P`, head `h` has the map

- Simple ViT: `softmax(c X Q_h K_h^T X^T)`; the code is mixed into the input, `alpha X + (1 - alpha) P`, once;
- Model I: `softmax(c Z Q_h K_h^T Z^T)` with `Z = alpha X + (1 - alpha) P` in every block, and no code anywhere else;
- Model II: the same at `alpha = 0`: `softmax(c P Q_h K_h^T P^T)`, one map for all images;
- Model III: `softmax(c Q_h K_h^T)` with free `Q_h`, `K_h` of as many rows as there are patches, and no code.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from vitprobe.models.attention import Attention, Mixture
from vitprobe.models.layers import (
    LayerNorm,
    NormedPatchEmbedding,
    PositionCode,
    TransformerBlock,
    init_transformer_,
)
from vitprobe.models.registry import register, variant
from vitprobe.names import unknown

MAPS = ("tokens", "mixture", "free")


class SimpleViT(nn.Module):
    """Normed patches, pre-norm blocks, norm, average pooling: no class token, no bias in attention."""

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
        head_dim: int | None,
        mlp_ratio: float,
        maps: str,
        position: str,
        alpha: float | Sequence[float],
        scale: float | None,
        use_value: bool,
        train_query_key: bool,
    ) -> None:
        super().__init__()
        if maps not in MAPS:
            raise unknown("maps", maps, MAPS)
        if position not in ("sincos", "identity", "learned", "none"):
            raise unknown("position", position, ("sincos", "identity", "learned", "none"))
        shares = _shares(alpha, depth)
        self.patches = NormedPatchEmbedding(image_size=image_size, patch_size=patch_size, channels=channels, dim=dim)
        grid = self.patches.grid
        if maps == "free":
            if position != "none":
                raise ValueError(f"free maps (Model III) have no position code: use position='none', not {position!r}.")
            code: PositionCode | None = PositionCode("identity", grid, grid[0] * grid[1])
            shares = [0.0] * depth
        else:
            code = None if position == "none" else PositionCode(position, grid, dim)
        if maps == "mixture" and code is None and 0 in shares:
            raise ValueError(
                "at alpha=0 (Model II) the maps have nothing but the position code: use position='sincos', 'identity' "
                "or 'learned', or maps='free' (Model III)."
            )
        if maps == "tokens" and len(set(shares)) > 1:
            raise ValueError(f"with maps='tokens' the code is mixed in once: give one alpha, not {alpha}.")
        # Where each block's queries and keys come from; the blocks share one code.
        sources = [None if code is None or maps == "tokens" else Mixture(code, share) for share in shares]
        self.position = code if maps == "tokens" else None
        self.alpha = shares[0]
        self.num_prefix_tokens = 0
        self.blocks = nn.Sequential(*[
            TransformerBlock(
                Attention(
                    dim,
                    heads,
                    head_dim=head_dim,
                    source=source,
                    scale=scale,
                    value=use_value,
                    project_bias=False,
                    train_query_key=train_query_key,
                ),
                dim,
                mlp_ratio=mlp_ratio,
            )
            for source in sources
        ])
        self.norm = LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        init_transformer_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(batch, class)` of images `(batch, channel, y, x)`."""
        x = self.patches(x)
        if self.position is not None:
            x = self.alpha * x + (1 - self.alpha) * self.position()
        return self.head(self.norm(self.blocks(x)).mean(1))


def _shares(alpha: float | Sequence[float], depth: int) -> list[float]:
    """The share of the tokens in each block."""
    if not isinstance(alpha, Sequence):
        alpha = [alpha] * depth
    if len(alpha) != depth:
        raise ValueError(
            f"alpha={list(alpha)} has {len(alpha)} entries for {depth} blocks: give {depth}, or one number."
        )
    if not all(0 <= share <= 1 for share in alpha):
        raise ValueError(f"alpha is the share of the tokens beside the position code, 0 to 1, not {alpha}.")
    return list(alpha)


@register
def simple_vit(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    patch_size: int = 2,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    head_dim: int | None = None,
    mlp_ratio: float = 1.0,
    maps: str = "tokens",
    position: str = "sincos",
    alpha: float | Sequence[float] = 0.5,
    scale: float | None = None,
    use_value: bool = True,
    train_query_key: bool = True,
) -> SimpleViT:
    """Simple ViT: a fixed position code in the input, average pooling, no class token; Models I to III by `maps`.

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        patch_size: side of a patch [pixels].
        dim: channels of a token.
        depth: number of blocks.
        heads: heads per block.
        head_dim: channels of a head, the rank of its map's logits; `dim / heads` unless given.
        mlp_ratio: hidden width of the MLP over `dim`.
        maps: what attention's queries and keys are made of: `"tokens"`, `"mixture"` (Model I, and II at `alpha=0`), or
            `"free"` (Model III: free matrices).
        position: the code, `"sincos"`, `"identity"` (needs as many channels as patches), `"learned"` or `"none"`.
        alpha: share of the tokens beside the code, in the input for `"tokens"`, in every block's maps for `"mixture"`
            (one number, or one per block). Without a code nothing is mixed.
        scale: what the logits are multiplied by (`c`); `head_dim^-1/2` unless given.
        use_value: `False` mixes the tokens themselves in place of values.
        train_query_key: `False` freezes queries and keys.

    Returns:
        The network.
    """
    return SimpleViT(**locals())


@variant(simple_vit, maps="mixture")
def model_1() -> None:
    """Model I of Zheng et al. 2024: maps from tokens and position code mixed in every block."""


@variant(simple_vit, maps="mixture", alpha=0.0)
def model_2() -> None:
    """Model II of Zheng et al. 2024: maps from the position code alone, the same for all images."""


@variant(simple_vit, maps="free", position="none")
def model_3() -> None:
    """Model III of Zheng et al. 2024: maps from free matrices, without a position code."""


_MICRO = dict(patch_size=4, dim=64, depth=6, heads=4, mlp_ratio=2.0)
_NANO = dict(patch_size=2, dim=48, depth=4, heads=4, mlp_ratio=2.0)


@variant(simple_vit, **_MICRO)
def simple_vit_micro() -> None:
    """A Simple ViT for two cores and 32x32 images: patch 4, 64 wide, 6 deep, 4 heads."""


@variant(model_1, **_MICRO)
def model_1_micro() -> None:
    """Model I for two cores and 32x32 images: patch 4, 64 wide, 6 deep, 4 heads."""


@variant(model_2, **_MICRO)
def model_2_micro() -> None:
    """Model II for two cores and 32x32 images: patch 4, 64 wide, 6 deep, 4 heads."""


@variant(model_3, **_MICRO)
def model_3_micro() -> None:
    """Model III for two cores and 32x32 images: patch 4, 64 wide, 6 deep, 4 heads."""


@variant(simple_vit, **_NANO)
def simple_vit_nano() -> None:
    """A Simple ViT for seconds and 8x8 images: patch 2, 48 wide, 4 deep, 4 heads."""


@variant(model_1, **_NANO)
def model_1_nano() -> None:
    """Model I for seconds and 8x8 images: patch 2, 48 wide, 4 deep, 4 heads."""


@variant(model_2, **_NANO)
def model_2_nano() -> None:
    """Model II for seconds and 8x8 images: patch 2, 48 wide, 4 deep, 4 heads."""


@variant(model_3, **_NANO)
def model_3_nano() -> None:
    """Model III for seconds and 8x8 images: patch 2, 48 wide, 4 deep, 4 heads."""
