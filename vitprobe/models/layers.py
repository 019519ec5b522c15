"""Layers that several families share: patches, residual branches, position codes, and the checks on sizes."""

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from vitprobe.names import unknown


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


def check_odd(size: int, *, what: str) -> None:
    """Refuse a kernel without a middle, and name one that has it.

    Args:
        size: the kernel's side.
        what: the word for it, e.g. `"kernel_size"`.

    Raises:
        ValueError: if the size is even, or not positive.
    """
    if size < 1 or size % 2 == 0:
        raise ValueError(f"{what}={size} has no middle: use {max(size + 1, 1)} or another odd number.")


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


def cut_grid(image_size: tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Rows and columns of patches in an image.

    Args:
        image_size: `(height, width)` [pixels].
        patch_size: side of a patch [pixels].

    Returns:
        The grid.

    Raises:
        ValueError: if the patches do not fill the image.
    """
    height, width = image_size
    check_divides(patch_size, image_size, what="patch_size", of=f"an image of {height}x{width} pixels")
    return height // patch_size, width // patch_size


def check_image_size(x: Tensor, image_size: tuple[int, int]) -> None:
    """Refuse images `(..., y, x)` of another size than the model was built for.

    Args:
        x: the images.
        image_size: `(height, width)` [pixels].

    Raises:
        ValueError: if the sizes differ.
    """
    if tuple(x.shape[-2:]) != image_size:
        raise ValueError(
            f"this model was built for images of {image_size[0]}x{image_size[1]} pixels and got "
            f"{x.shape[-2]}x{x.shape[-1]}: build it with image_size={tuple(x.shape[-2:])}."
        )


class PatchEmbedding(nn.Module):
    """Cuts an image into square patches and maps each linearly: `(batch, channel, y, x)` to `(batch, token, dim)`."""

    def __init__(self, *, image_size: tuple[int, int], patch_size: int, channels: int, dim: int) -> None:
        super().__init__()
        self.grid = cut_grid(image_size, patch_size)
        self.image_size = image_size
        self.project = nn.Conv2d(channels, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens in row-major order of the grid."""
        check_image_size(x, self.image_size)
        return rearrange(self.project(x), "b d h w -> b (h w) d")


class NormedPatchEmbedding(nn.Module):
    """Cuts an image into patches and maps each by norm, linear layer, norm (Simple ViT as Zheng et al. 2024 have it).

    `(batch, channel, y, x)` to `(batch, token, dim)`; a patch's numbers are in the order channel, row, column.
    """

    def __init__(self, *, image_size: tuple[int, int], patch_size: int, channels: int, dim: int) -> None:
        super().__init__()
        self.grid = cut_grid(image_size, patch_size)
        self.image_size = image_size
        self.patch_size = patch_size
        numbers = channels * patch_size**2
        self.pixel_norm = LayerNorm(numbers)
        self.project = nn.Linear(numbers, dim)
        self.norm = LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens in row-major order of the grid."""
        check_image_size(x, self.image_size)
        side = self.patch_size
        patches = rearrange(x, "b c (h i) (w j) -> b (h w) (c i j)", i=side, j=side)
        return self.norm(self.project(self.pixel_norm(patches)))


class MLP(nn.Sequential):
    """Two linear layers with a GELU between them, applied to every token by itself."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch (Touvron et al. 2021, *Going Deeper with Image Transformers*).

    Args:
        dim: channels.
        start: the factors before training.
    """

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((dim,), float(start)))

    def forward(self, x: Tensor) -> Tensor:
        """Scale `(..., dim)`."""
        return x * self.factor


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

    Args:
        attention: what mixes the tokens.
        dim: channels of the tokens.
        mlp_ratio: hidden width of the MLP over `dim`.
        layer_scale: start of a learned factor per channel on both branches; none unless given.

    Raises:
        ValueError: if the MLP would have no hidden unit.
    """

    def __init__(self, attention: nn.Module, dim: int, *, mlp_ratio: float, layer_scale: float | None = None) -> None:
        super().__init__()
        if dim * mlp_ratio < 1:
            raise ValueError(f"mlp_ratio={mlp_ratio} leaves the MLP of {dim} channels no hidden unit: use 4.0, say.")
        self.attention_norm = LayerNorm(dim)
        self.attention = attention
        self.mlp_norm = LayerNorm(dim)
        self.mlp = MLP(dim, int(dim * mlp_ratio))
        self.attention_scale, self.mlp_scale = (
            nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale) for _ in range(2)
        )
        self.drop_attention = StochasticDepth()
        self.drop_mlp = StochasticDepth()

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, token, dim)` to the same shape."""
        x = x + self.drop_attention(self.attention_scale(self.attention(self.attention_norm(x))))
        return x + self.drop_mlp(self.mlp_scale(self.mlp(self.mlp_norm(x))))


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


class PositionCode(nn.Module):
    """A position code `(token, dim)` as a module, so that several layers can share one.

    Args:
        kind: `"sincos"` (fixed, `sincos_positions`), `"identity"` (fixed, `[I | 0]`: every patch has a channel of its
            own), or `"learned"`, which starts as wide as the sine-cosine code.
        grid: rows and columns of patches.
        dim: channels.

    Raises:
        ValueError: if the kind is none of these, or the channels are too few for it.
    """

    def __init__(self, kind: str, grid: tuple[int, int], dim: int) -> None:
        super().__init__()
        tokens = grid[0] * grid[1]
        self.dim = dim
        self.code: Tensor
        if kind == "learned":
            self.code = nn.Parameter(math.sqrt(0.5) * torch.randn(tokens, dim))
        elif kind == "sincos":
            self.register_buffer("code", sincos_positions(grid, dim), persistent=False)
        elif kind == "identity":
            if dim < tokens:
                raise ValueError(
                    f"an identity position code gives each of {tokens} patches a channel of its own: use dim={tokens} "
                    f"or more, not {dim}, or larger patches."
                )
            self.register_buffer("code", torch.eye(tokens, dim), persistent=False)
        else:
            raise unknown("position code", kind, ("sincos", "identity", "learned"))

    def forward(self) -> Tensor:
        """The code, tokens in row-major order."""
        return self.code


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
