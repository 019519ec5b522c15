"""Convolution as attention (Li et al. 2021, *Can Vision Transformers Perform Convolution?*, arXiv:2111.01353).

A `K x K` convolution of an image is a sum over the patches around each patch: `y_q = sum_k x_{q + d_k} M_k`, with one
matrix `M_k` for every patch offset `d_k` that a kernel reaches. One attention head per offset, which looks there and
nowhere else, does the same: `M_k` is the product of its value and output matrices. That takes
`(2 ceil((K - 1) / 2P) + 1)^2` heads for patches of `P x P` pixels: 9 for `1 < K <= 2P + 1`, `K^2` for single pixels.
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitprobe.models.attention import Attention, RelativeBias, grid_offsets
from vitprobe.models.layers import check_divides
from vitprobe.names import unknown

BOUNDARIES = ("sink", "circular", "interior")


def patch_offsets(kernel_size: int, patch_size: int) -> Tensor:
    """The patches that a kernel reaches from one patch, `(head, 2)` in (rows, columns), row by row.

    Args:
        kernel_size: side of the kernel [pixels], odd.
        patch_size: side of a patch [pixels].

    Returns:
        The offsets, whole numbers of patches.

    Raises:
        ValueError: if the kernel has no middle, or the patch no pixel.
    """
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size={kernel_size} has no middle: use {kernel_size + 1} or another odd number.")
    if patch_size < 1:
        raise ValueError(f"patch_size={patch_size}: a patch has at least 1 pixel.")
    reach = math.ceil((kernel_size - 1) / (2 * patch_size))
    return torch.cartesian_prod(*2 * [torch.arange(-reach, reach + 1)])


def patch_matrices(weight: Tensor, patch_size: int) -> Tensor:
    """What each offset's patch adds to a patch of the convolution's output: the matrices `M_k`.

    Pixel `i` of the patch at offset `d` is `P d + i - j` away from pixel `j` of the output's patch; the entry is the
    kernel's tap there, and zero beyond it.

    Args:
        weight: of a convolution `(channel out D, channel in C, K, K)`, K odd.
        patch_size: side P of a patch [pixels].

    Returns:
        `(head, C P P, D P P)`, heads in the order of `patch_offsets`, a patch's numbers in the order channel, row,
        column, as in the weights of a patch embedding.

    Raises:
        ValueError: if the weight is not of a square kernel with a middle.
    """
    if weight.ndim != 4 or weight.shape[2] != weight.shape[3]:
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)}: give that of a square convolution, "
            "(channel out, channel in, K, K), such as nn.Conv2d(...).weight."
        )
    size = weight.shape[-1]
    offset = patch_offsets(size, patch_size)[:, 1].unique()  # those along one axis
    pixel = torch.arange(patch_size)
    tap = patch_size * offset[:, None, None] + pixel[:, None] - pixel + size // 2  # (offset, i, j)
    tap = torch.where((tap >= 0) & (tap < size), tap, size)  # one past the kernel, where a row of zeros is put
    rows, columns = tap[:, :, :, None, None, None], tap
    entries = F.pad(weight, (0, 1, 0, 1))[:, :, rows, columns]
    return rearrange(entries, "d c a iy jy b ix jx -> (a b) (c iy ix) (d jy jx)")


def head_widths(weight: Tensor, patch_size: int) -> Tensor:
    """How wide each head has to be: the ranks of the matrices `M_k`, `(head,)`.

    Without linear dependence among the taps, and for `K <= 2P + 1` and `r = (K - 1) / 2`, they are
    `P^2 min(C, D)` at the centre, `r P min(C, D)` on the edges, and `r^2 min(C, D)` in the corners.

    Args:
        weight: of the convolution.
        patch_size: side of a patch [pixels].

    Returns:
        The ranks.
    """
    return torch.linalg.matrix_rank(patch_matrices(weight.detach().double(), patch_size))


def least_heads(weight: Tensor, patch_size: int) -> int:
    """No fewer heads that look by position alone can be this convolution: the dimension that its `M_k` span.

    Where the taps are not linearly dependent, it is `min(n, (2P - 1)^2 C D)` for a kernel that reaches `n` patches: 9
    with patches and `1 < K <= 2P + 1`, whatever the channels, and `min(K^2, C D)` with single pixels.

    Args:
        weight: of the convolution.
        patch_size: side of a patch [pixels].

    Returns:
        The number of heads.
    """
    return int(torch.linalg.matrix_rank(patch_matrices(weight.detach().double(), patch_size).flatten(1)))


def lower_bound(weight: Tensor, patch_size: int, heads: int) -> float:
    """The least relative error of a convolution made by so many heads that look by position alone.

    Such heads make `sum_h a_h(d) N_h` of the offset `d`'s matrix, whatever they look at: together a matrix of rank
    `heads` in place of the stack of all `M_k`, so that the error is at least what the rest of its singular values
    leave (Eckart & Young). Root mean square over white images, away from their border, relative to the output.
    A softmax, whose weights are not negative, may need more heads; heads that look by content are not bounded.

    Args:
        weight: of the convolution.
        patch_size: side of a patch [pixels].
        heads: how many heads.

    Returns:
        The bound; 0 from `least_heads` heads on.
    """
    values = torch.linalg.svdvals(patch_matrices(weight.detach().double(), patch_size).flatten(1))
    if heads >= least_heads(weight, patch_size):  # beyond it the values are rounding errors
        return 0.0
    return float((values[heads:].square().sum() / values.square().sum()).sqrt())


def factorise(matrices: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Value and output matrices whose product is the nearest to each `M_k` that a head of that width can be.

    Args:
        matrices: `(head, dim in, dim out)`.
        head_dim: width of the heads.

    Returns:
        `(head, dim in, head_dim)` and `(head, head_dim, dim out)`, of the same size: each has the roots of the
        singular values.
    """
    left, values, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    roots = values.sqrt()
    spare = max(0, head_dim - roots.shape[-1])
    value = F.pad((left * roots[:, None, :])[..., :head_dim], (0, spare))
    output = F.pad((roots[:, :, None] * right)[:, :head_dim], (0, 0, 0, spare))
    return value.to(matrices.dtype), output.to(matrices.dtype)


class CircularBias(nn.Module):
    """A learned bias for every offset on a grid whose opposite borders touch: `(head, query, key)`.

    Args:
        grid: rows and columns of patches.
        heads: number of heads.
    """

    def __init__(self, grid: tuple[int, int], heads: int) -> None:
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.zeros(heads, *grid))
        row, column = grid_offsets(grid).long().unbind(-1)
        self.index: Tensor
        self.register_buffer("index", row % grid[0] * grid[1] + column % grid[1], persistent=False)

    def forward(self) -> Tensor:
        """The bias logits."""
        return self.table.flatten(1)[:, self.index]

    @torch.no_grad()
    def look_at_(self, offsets: Tensor, *, strength: float) -> None:
        """Let each head look at one offset `(head, 2)`: `strength` there, 0 elsewhere."""
        self.table.zero_()
        for table, (row, column) in zip(self.table, offsets.tolist(), strict=True):
            table[row % self.grid[0], column % self.grid[1]] = strength


class OnPatches(nn.Module):
    """An attention layer over tokens, applied to an image cut into patches: `(batch, C, y, x)` to `(batch, D, y, x)`.

    Args:
        attention: over the patches' numbers in the order channel, row, column.
        patch_size: side of a patch [pixels].
    """

    def __init__(self, attention: Attention, patch_size: int) -> None:
        super().__init__()
        self.attention = attention
        self.patch_size = patch_size

    def tokens(self, x: Tensor) -> Tensor:
        """The patches `(batch, token, channel)` of images."""
        side = self.patch_size
        return rearrange(x, "b c (h i) (w j) -> b (h w) (c i j)", i=side, j=side)

    def weights(self, x: Tensor) -> Tensor:
        """The attention maps `(batch, head, query, key)` for images."""
        return self.attention.weights(self.tokens(x))

    def forward(self, x: Tensor) -> Tensor:
        """Map images `(batch, C, y, x)` to `(batch, D, y, x)`."""
        side, rows = self.patch_size, x.shape[-2] // self.patch_size
        y = self.attention(self.tokens(x))
        return rearrange(y, "b (h w) (c i j) -> b c (h i) (w j)", h=rows, i=side, j=side)


@torch.no_grad()
def convolution_(
    attention: Attention,
    weight: Tensor,
    *,
    patch_size: int = 1,
    bias: Tensor | None = None,
    sharpness: float = 30.0,
) -> None:
    """Make attention over a grid the convolution given, of stride 1; exactly, but for what leaks past the sharpness.

    Each head's table of offsets becomes `sharpness` at one offset and 0 elsewhere. Queries become zero, so that content
    has no say; keys stay as they are, so that it can learn to. Heads beyond those needed add nothing.

    With `RelativeBias(..., margin=ceil((K - 1) / 2P))` it is the convolution with zero padding. Without a margin, a
    head whose offset lies outside of the image sees all patches alike, and as many rings of patches come out wrong.

    Args:
        attention: over tokens of `C P P` channels, in the order channel, row, column, with `D P P` out.
        weight: of the convolution `(channel out D, channel in C, K, K)`, K odd.
        patch_size: side P of what a token is of the image [pixels]; 1 convolves the grid of tokens.
        bias: of the convolution `(D,)`; zero unless given.
        sharpness: the logit at a head's offset: others keep a share of about `token / e^sharpness`, and gradients to
            the logits are as small.

    Raises:
        ValueError: if the heads are too few or too narrow, with the numbers that would do, or if the attention is of
            another kind or size.
    """
    matrices, offsets = patch_matrices(weight, patch_size), patch_offsets(weight.shape[-1], patch_size)
    position, value_layer = _parts(attention, matrices)
    head_dim = value_layer.out_features // attention.heads
    _check_enough(weight, patch_size, heads=attention.heads, head_dim=head_dim)
    reach = int(offsets.max())
    if isinstance(position, RelativeBias) and min(position.reach) < reach:
        raise ValueError(
            f"the kernel reaches {reach} patches far and the table of offsets {min(position.reach)}: the grid is too "
            f"small for an interior; give RelativeBias(..., margin={reach})."
        )
    if bias is not None and attention.project.bias is None:
        raise ValueError("the convolution has a bias and the attention has none: build it with project_bias=True.")
    value, output = factorise(matrices, head_dim)
    spare = attention.heads - len(offsets)
    position.look_at_(F.pad(offsets, (0, 0, 0, spare)), strength=sharpness)
    value_layer.weight.copy_(rearrange(F.pad(value, (0, 0, 0, 0, 0, spare)), "h i d -> (h d) i"))
    attention.project.weight.copy_(rearrange(F.pad(output, (0, 0, 0, 0, 0, spare)), "h d o -> o (h d)"))
    for layer in (attention.query_key, value_layer, attention.project):
        if layer is not None and layer.bias is not None:
            layer.bias.zero_()
    if attention.query_key is not None:
        attention.query_key.weight.chunk(2)[0].zero_()
    if bias is not None:
        attention.project.bias.copy_(bias.repeat_interleave(patch_size**2))


def convolution_as_attention(
    weight: Tensor,
    *,
    image_size: tuple[int, int],
    patch_size: int,
    bias: Tensor | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    sharpness: float = 30.0,
    boundary: str = "sink",
) -> OnPatches:
    """Attention over patches that is the convolution given, of stride 1 and with as many pixels out as in.

    At a sharpness of 30, the two agree to 1e-9 or so in double precision, and to its rounding in single precision.

    Args:
        weight: of the convolution `(channel out D, channel in C, K, K)`, K odd.
        image_size: `(height, width)` of the images [pixels].
        patch_size: side P of a patch [pixels].
        bias: of the convolution `(D,)`; none unless given.
        heads: number of heads; one for each patch that the kernel reaches, unless given.
        head_dim: width of the heads; what the widest one needs (`head_widths`), unless given.
        sharpness: the logit at a head's offset; see `convolution_`.
        boundary: what a head sees whose offset lies outside of the image. `"sink"`: tokens of zeros, which makes it
            the convolution with zero padding (a softmax over the patches alone cannot look nowhere). `"circular"`:
            the opposite border, as circular padding has it. `"interior"`: every patch alike; the outer
            `ceil((K - 1) / 2P)` rings of patches are wrong, and the others right.

    Returns:
        The module, for images `(batch, C, y, x)` of that size.

    Raises:
        ValueError: if the heads are too few or too narrow, with the numbers that would do, if the patches do not
            divide the image, or if the boundary is none of the three.
    """
    if boundary not in BOUNDARIES:
        raise unknown("boundary", boundary, BOUNDARIES)
    height, width = image_size
    matrices, offsets = patch_matrices(weight, patch_size), patch_offsets(weight.shape[-1], patch_size)
    check_divides(patch_size, image_size, what="patch_size", of=f"an image of {height}x{width} pixels")
    grid = (height // patch_size, width // patch_size)
    heads = len(offsets) if heads is None else heads
    head_dim = max(1, int(head_widths(weight, patch_size).max())) if head_dim is None else head_dim
    with torch.random.fork_rng(devices=[]):  # what the layers draw is overwritten
        position = (
            CircularBias(grid, heads)
            if boundary == "circular"
            else RelativeBias(grid, heads, margin=int(offsets.max()) if boundary == "sink" else 0)
        )
        attention = Attention(
            matrices.shape[1],
            heads,
            head_dim=head_dim,
            out_dim=matrices.shape[2],
            content=False,
            position=position,
            project_bias=bias is not None,
        ).to(weight)
    convolution_(attention, weight, patch_size=patch_size, bias=bias, sharpness=sharpness)
    return OnPatches(attention, patch_size)


def _parts(attention: Attention, matrices: Tensor) -> tuple[RelativeBias | CircularBias, nn.Linear]:
    """The attention's table of offsets and its values, if it is of the kind and size that the matrices need."""
    position, value, project = attention.position, attention.value, attention.project
    if not isinstance(position, RelativeBias | CircularBias) or len(position.table) != attention.heads:
        raise ValueError(
            "a convolution needs attention with a table of offsets for each head: "
            f"build it with position=RelativeBias(grid, heads={attention.heads}, margin=...)."
        )
    if attention.gate is not None or attention.mask is not None or not isinstance(value, nn.Linear):
        raise ValueError("a convolution needs attention with values, and without gates or a mask.")
    if (value.in_features, project.out_features) != tuple(matrices.shape[1:]):
        raise ValueError(
            f"the convolution maps tokens of {matrices.shape[1]} to {matrices.shape[2]} numbers, the attention of "
            f"{value.in_features} to {project.out_features}: build it with dim={matrices.shape[1]} and "
            f"out_dim={matrices.shape[2]}, or give another patch_size."
        )
    return position, value


def _check_enough(weight: Tensor, patch_size: int, *, heads: int, head_dim: int) -> None:
    """Refuse heads that are too few or too narrow for a head per offset."""
    size, widths = weight.shape[-1], head_widths(weight, patch_size)
    if heads < len(widths):
        raise ValueError(
            f"a {size}x{size} convolution on patches of {patch_size}x{patch_size} reaches {len(widths)} of them and "
            f"needs a head for each, not {heads}: give heads={len(widths)}. With {heads} that look by position alone, "
            f"its relative error is at least {lower_bound(weight, patch_size, heads):.3g}."
        )
    if head_dim < widths.max():
        side = math.isqrt(len(widths))
        ranks = " / ".join(" ".join(map(str, row)) for row in widths.view(side, side).tolist())
        raise ValueError(
            f"heads of width {head_dim} are too narrow: the matrices of this convolution have ranks {ranks} (rows and "
            f"columns of offsets). Give head_dim={widths.max()}, or a convolution of fewer channels."
        )
