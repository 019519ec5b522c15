"""A ViT that starts as a convolutional network and goes on as attention (Li et al. 2021, two-phase training).

*Can Vision Transformers Perform Convolution?*, arXiv:2111.01353. In the first phase every attention is a 3x3
convolution on the grid of patches, written as nine heads that each look at one fixed offset (`ShiftAttention`). In the
second it is attention with a relative-bias table, whose nine heads start by looking at these offsets (`transfer_`).
No code was published: kernel, widths, boundary and bias are ours.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitprobe.models.attention import Attention, RelativeBias, grid_offsets
from vitprobe.models.layers import check_divides, check_odd
from vitprobe.models.registry import register, variant
from vitprobe.models.vit import ViT
from vitprobe.names import unknown


class ShiftAttention(nn.Module):
    """A convolution on the grid of patches, one head per tap: `y_q = sum_k x_{q + d_k} V_k W_k` over tokens.

    The attention map of head `k` is the shift by its offset `d_k`, fixed, and zero where that leaves the image. Names
    and shapes of values and output are those of `Attention`.

    Args:
        dim: channels of the tokens.
        grid: rows and columns of patches.
        kernel_size: side of the kernel [patches], odd; it has `kernel_size^2` heads, row by row.
        head_dim: channels of a head, the rank of its tap; `dim / heads` unless given.
        qkv_bias: a bias on the values.
    """

    def __init__(
        self,
        dim: int,
        grid: tuple[int, int],
        *,
        kernel_size: int = 3,
        head_dim: int | None = None,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        offsets = shift_offsets(kernel_size)
        self.heads = len(offsets)
        if head_dim is None:
            check_divides(self.heads, (dim,), what="heads", of=f"dim={dim}")
            head_dim = dim // self.heads
        self.grid = grid
        self.value = nn.Linear(dim, self.heads * head_dim, bias=qkv_bias)
        self.project = nn.Linear(self.heads * head_dim, dim)
        self.offsets: Tensor
        self.register_buffer("offsets", offsets, persistent=False)
        # One depthwise convolution shifts all heads at once.
        taps = torch.eye(self.heads).view(self.heads, 1, kernel_size, kernel_size)
        self.kernel: Tensor
        self.register_buffer("kernel", taps.repeat_interleave(head_dim, 0), persistent=False)

    def weights(self, x: Tensor) -> Tensor:
        """The maps `(batch, head, query, key)` of tokens `(batch, token, dim)`: the shifts, whatever the tokens."""
        looks = grid_offsets(self.grid).to(x.device) == self.offsets[:, None, None]
        return looks.all(-1).to(x.dtype).expand(len(x), -1, -1, -1)

    def forward(self, x: Tensor) -> Tensor:
        """Shift and mix the values: `(batch, token, dim)` to the same shape."""
        value = rearrange(self.value(x), "b (h w) c -> b c h w", h=self.grid[0])
        shifted = F.conv2d(value, self.kernel, padding=self.kernel.shape[-1] // 2, groups=len(self.kernel))
        return self.project(rearrange(shifted, "b c h w -> b (h w) c"))


def shift_offsets(kernel_size: int) -> Tensor:
    """The offsets of a kernel's taps, key - query `(head, 2)` in (rows, columns), row by row.

    Args:
        kernel_size: side of the kernel, odd.

    Returns:
        The offsets, whole numbers.
    """
    check_odd(kernel_size, what="kernel_size")
    reach = kernel_size // 2
    return torch.cartesian_prod(*2 * [torch.arange(-reach, reach + 1)])


@torch.no_grad()
def transfer_(target: nn.Module, source: nn.Module, *, strength: float = 8.0) -> None:
    """Make a `relative_vit` the function that a `convolutional_vit` is: the hand-over between the two phases.

    All weights are copied. Each head's table gets `strength` at the head's own offset and 0 elsewhere, and its queries
    become zero, so that content logits start at zero and yet learn (with zero keys as well they never would).
    What a softmax leaves of the other tokens is a share of about `token / e^strength`, and so is the gap between the
    two functions. Where the offset leaves the image, the head looks at the zero tokens around it (the table's margin);
    a single zero token of constant logit could not be both nothing inside and everything at the border.

    Args:
        target: the network of attention.
        source: the convolutional network, of the same options.
        strength: the logit of a head's own offset. Gradients to queries, keys and table vanish as `e^-strength`.

    Raises:
        ValueError: if the two networks do not fit.
    """
    shifts = {name: module for name, module in source.named_modules() if isinstance(module, ShiftAttention)}
    attentions = {name: module for name, module in target.named_modules() if isinstance(module, Attention)}
    state, shapes = source.state_dict(), {name: value.shape for name, value in target.state_dict().items()}
    unfit = [name for name, value in state.items() if shapes.get(name) != value.shape]
    if not shifts or shifts.keys() != attentions.keys() or unfit:
        raise ValueError(
            "weights go from a convolutional_vit to a relative_vit of the same options"
            + (f"; these do not fit: {', '.join(unfit)}." if unfit else ", not between these networks.")
        )
    target.load_state_dict(state, strict=False)
    for name, shift in shifts.items():
        attention = attentions[name]
        assert isinstance(attention.position, RelativeBias) and attention.query_key is not None
        attention.position.look_at_(shift.offsets, strength=strength)
        for parameter in attention.query_key.parameters():
            parameter[: len(parameter) // 2] = 0


@register
def convolutional_vit(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    patch_size: int = 4,
    dim: int = 288,
    depth: int = 6,
    kernel_size: int = 3,
    head_dim: int | None = None,
    mlp_ratio: float = 4.0,
    position: str = "learned",
    qkv_bias: bool = False,
    phase: str = "convolution",
) -> ViT:
    """The convolutional phase of Li et al. 2021: a ViT whose attention is nine fixed shifts of the patches.

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        patch_size: side of a patch [pixels].
        dim: channels of a token.
        depth: number of blocks.
        kernel_size: side of the convolutions [patches], odd; `kernel_size^2` heads.
        head_dim: channels of a head, the rank of its tap; `dim / heads` unless given.
        mlp_ratio: hidden width of the MLP over `dim`.
        position: the code added to the patches, `"learned"`, `"sincos"` or `"none"`.
        qkv_bias: biases on values, queries and keys.
        phase: `"convolution"`, or `"attention"` for the network that it becomes (`relative_vit`), whose heads have
            each a table of relative biases that reaches `kernel_size // 2` patches beyond the image; see `transfer_`.

    Returns:
        The network.
    """
    if phase not in ("convolution", "attention"):
        raise unknown("phase", phase, ("convolution", "attention"))

    def attention(grid: tuple[int, int], prefix: int) -> nn.Module:
        if phase == "convolution":
            return ShiftAttention(dim, grid, kernel_size=kernel_size, head_dim=head_dim, qkv_bias=qkv_bias)
        heads = len(shift_offsets(kernel_size))
        bias = RelativeBias(grid, heads, margin=kernel_size // 2)
        return Attention(dim, heads, head_dim=head_dim, position=bias, qkv_bias=qkv_bias)

    return ViT(
        attention,
        image_size=image_size,
        channels=channels,
        num_classes=num_classes,
        patch_size=patch_size,
        dim=dim,
        depth=depth,
        mlp_ratio=mlp_ratio,
        pool="mean",
        position=position,
    )


@variant(convolutional_vit, phase="attention")
def relative_vit() -> None:
    """The attention phase of Li et al. 2021: a ViT of nine heads, each with a table of relative biases."""


_MICRO = dict(dim=72, depth=6, mlp_ratio=2.0)
_NANO = dict(patch_size=2, dim=54, depth=4, mlp_ratio=2.0)


@variant(convolutional_vit, **_MICRO)
def convolutional_vit_micro() -> None:
    """The convolutional phase for two cores and 32x32 images: patch 4, 72 wide, 6 deep, 9 heads."""


@variant(relative_vit, **_MICRO)
def relative_vit_micro() -> None:
    """The attention phase for two cores and 32x32 images: patch 4, 72 wide, 6 deep, 9 heads."""


@variant(convolutional_vit, **_NANO)
def convolutional_vit_nano() -> None:
    """The convolutional phase for seconds and 8x8 images: patch 2, 54 wide, 4 deep, 9 heads."""


@variant(relative_vit, **_NANO)
def relative_vit_nano() -> None:
    """The attention phase for seconds and 8x8 images: patch 2, 54 wide, 4 deep, 9 heads."""
