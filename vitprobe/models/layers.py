"""Layers that several families share: patches, residual branches, position codes, and the checks on sizes."""

import math

import torch
from einops import rearrange
from torch import Tensor, nn


def check_divides(divisor: int, sizes: tuple[int, ...], *, what: str, of: str) -> None:
    """Refuse a size that does not divide, and name those that would.

    Args:
        divisor: the patch size, window or number of heads.
        sizes: what it has to divide.
        what: the word for the divisor, e.g. `"patch_size"`.
        of: the words for what is divided, e.g. `"an image of 30x32 pixels"`.

    Raises:
        ValueError: if any size is not a multiple of the divisor.
    """
    if divisor > 0 and all(size % divisor == 0 for size in sizes):
        return
    common = math.gcd(*sizes)
    valid = [d for d in range(1, common + 1) if common % d == 0]
    nearest = min(valid, key=lambda d: abs(d - divisor))
    raise ValueError(f"{what}={divisor} does not divide {of}; use {what}={nearest} (possible: {valid}).")


class StochasticDepth(nn.Module):
    """Drops a residual branch for whole samples while training (Huang et al. 2016); `p` is set by the trainer.

    Survivors are scaled by `1 / (1 - p)`. Random numbers come from the global generator, as with `nn.Dropout`.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop samples of `(batch, ...)` at random; the identity in evaluation mode."""
        if not self.training or self.p == 0.0:
            return x
        keep = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= self.p
        return x * keep.to(x.dtype) / (1.0 - self.p)

    def extra_repr(self) -> str:
        """The probability, for `print(model)`."""
        return f"p={self.p}"


class LayerNorm(nn.LayerNorm):
    """Layer norm with the epsilon of every published ViT, a tenth of PyTorch's: early activations are that small."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=1e-6)


class PatchEmbedding(nn.Module):
    """Cuts an image into square patches and maps each linearly: `(batch, channel, y, x)` to `(batch, token, dim)`."""

    def __init__(self, *, image_size: tuple[int, int], patch_size: int, channels: int, dim: int) -> None:
        super().__init__()
        height, width = image_size
        check_divides(patch_size, image_size, what="patch_size", of=f"an image of {height}x{width} pixels")
        self.image_size = image_size
        self.grid = (height // patch_size, width // patch_size)
        self.project = nn.Conv2d(channels, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens in row-major order of the grid."""
        if tuple(x.shape[-2:]) != self.image_size:
            raise ValueError(
                f"this model was built for images of {self.image_size[0]}x{self.image_size[1]} pixels and got "
                f"{x.shape[-2]}x{x.shape[-1]}: build it with image_size={tuple(x.shape[-2:])}."
            )
        return rearrange(self.project(x), "b d h w -> b (h w) d")


class MLP(nn.Sequential):
    """Two linear layers with a GELU between them, applied to every token by itself."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, attention: nn.Module, dim: int, *, mlp_ratio: float) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(dim)
        self.attention = attention
        self.mlp_norm = LayerNorm(dim)
        self.mlp = MLP(dim, int(dim * mlp_ratio))
        self.drop_attention = StochasticDepth()
        self.drop_mlp = StochasticDepth()

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, token, dim)` to the same shape."""
        x = x + self.drop_attention(self.attention(self.attention_norm(x)))
        return x + self.drop_mlp(self.mlp(self.mlp_norm(x)))


def sincos_positions(grid: tuple[int, int], dim: int) -> Tensor:
    """The fixed two-dimensional sine-cosine position code `(token, dim)`.

    A quarter of the channels each hold `sin(x w)`, `cos(x w)`, `sin(y w)`, `cos(y w)` with
    `w_i = 10000^(-i / (dim/4 - 1))` (Beyer et al. 2022, *Better plain ViT baselines*).

    Args:
        grid: rows and columns of patches.
        dim: channels.

    Returns:
        The code, tokens in row-major order.

    Raises:
        ValueError: if `dim` is not a multiple of 4, or is below 8.
    """
    if dim % 4 or dim < 8:
        raise ValueError(f"a sine-cosine position code needs a dim that is a multiple of 4 and at least 8, not {dim}.")
    quarter = dim // 4
    frequency = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
    y, x = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    angles = [rearrange(axis, "h w -> (h w) 1") * frequency for axis in (x, y)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1).float()


def init_transformer_(module: nn.Module) -> None:
    """Glorot's uniform weights and zero biases in every linear layer, as the original ViT's code has it.

    Query and key are one layer here and share its width, which is the square root of 2/3 of what each would have alone.

    DeiT's truncated normal of standard deviation 0.02 is as wide as this at 768 channels, and so narrow at 100 that
    small networks take epochs to leave it.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
