"""The one attention core: pluggable logits, summed before the softmax or gated after it.

Every attention of this package is an `Attention`: content alone (ViT), content plus a relative-bias table
(AlterNet's windows), content gated against a Gaussian of position (GPSA). Its map is a function,
`weights(x) -> (batch, head, query, key)`, and `forward` applies that same map to the values.
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitprobe.models.layers import check_divides


class Attention(nn.Module):
    """Multi-head self-attention over `(batch, token, dim)`.

    Args:
        dim: channels of the tokens.
        heads: number of heads.
        head_dim: channels of a head; `dim / heads` unless given.
        out_dim: channels of the output; `dim` unless given.
        position: a module that returns position logits `(head or 1, query, key)`, or `None`.
        gate: `None` adds the position logits to the content logits before the softmax. A number starts one gate per
            head there (its logit): the map is then `(1 - s) softmax(content) + s softmax(position)` with
            `s = sigmoid(gate)` (d'Ascoli et al. 2021, eq. 7). Both parts have rows that sum to one, so the paper's
            final normalisation changes nothing and is left out.
        qkv_bias: biases on query, key and value.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        out_dim: int | None = None,
        position: nn.Module | None = None,
        gate: float | None = None,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        if head_dim is None:
            check_divides(heads, (dim,), what="heads", of=f"dim={dim}")
            head_dim = dim // heads
        if gate is not None and position is None:
            raise ValueError("a gate chooses between content and position: give position= as well.")
        self.heads = heads
        self.scale = head_dim**-0.5
        self.query_key = nn.Linear(dim, 2 * heads * head_dim, bias=qkv_bias)
        self.value = nn.Linear(dim, heads * head_dim, bias=qkv_bias)
        self.project = nn.Linear(heads * head_dim, out_dim or dim)
        self.position = position
        self.gate = None if gate is None else nn.Parameter(torch.full((heads,), float(gate)))

    def weights(self, x: Tensor) -> Tensor:
        """The attention maps `(batch, head, query, key)` of tokens `(batch, token, dim)`."""
        query, key = self._query_key(x)
        content = self.scale * query @ key.transpose(-2, -1)
        if self.position is None:
            return content.softmax(-1)
        if self.gate is None:
            return (content + self.position()).softmax(-1)
        gate = rearrange(self.gate.sigmoid(), "h -> h 1 1")
        return (1 - gate) * content.softmax(-1) + gate * self.position().softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the values by the maps: `(batch, token, dim)` to `(batch, token, out_dim)`."""
        value = rearrange(self.value(x), "b n (h d) -> b h n d", h=self.heads)
        if self.gate is None:
            # The same map as `weights`, fused: 3 times faster at 256 tokens.
            query, key = self._query_key(x)
            bias = None if self.position is None else self.position().to(query.dtype)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scale)
        else:
            mixed = self.weights(x) @ value
        return self.project(rearrange(mixed, "b h n d -> b n (h d)"))

    def _query_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = rearrange(self.query_key(x), "b n (two h d) -> two b h n d", two=2, h=self.heads)
        return query, key


class RelativeBias(nn.Module):
    """A learned bias for every offset between two tokens of a window: `(head or 1, query, key)` (Shaw et al. 2018)."""

    def __init__(self, window: tuple[int, int], heads: int = 1) -> None:
        super().__init__()
        height, width = window
        self.table = nn.Parameter(torch.zeros(heads, 2 * height - 1, 2 * width - 1))
        nn.init.trunc_normal_(self.table, std=0.02)
        offset = grid_offsets(window)
        index = (offset[..., 0] + height - 1) * (2 * width - 1) + offset[..., 1] + width - 1
        self.index: Tensor
        self.register_buffer("index", index.long(), persistent=False)

    def forward(self) -> Tensor:
        """The bias logits."""
        return self.table.flatten(1)[:, self.index]


class GaussianPosition(nn.Module):
    """Position logits that peak at one offset per head: `(head, query, key)` (d'Ascoli et al. 2021, eq. 4 and 6).

    The logit is `v_h . r` with `r = (|d|^2, d_x, d_y)`, `d` = key - query in patches, so that
    `v_h = -strength (1, -2 c_x, -2 c_y)` is a bump of inverse width `strength` around the centre `c`.
    """

    def __init__(self, grid: tuple[int, int], heads: int) -> None:
        super().__init__()
        offset = grid_offsets(grid)
        features = torch.stack([offset.square().sum(-1), offset[..., 1], offset[..., 0]], dim=-1)
        self.register_buffer("features", features, persistent=False)
        self.vector = nn.Parameter(torch.empty(heads, 3))
        nn.init.trunc_normal_(self.vector, std=0.02)

    def forward(self) -> Tensor:
        """The position logits."""
        return torch.einsum("qkf,hf->hqk", self.features, self.vector)

    @torch.no_grad()
    def set_local_(self, *, strength: float = 1.0, centers: str = "code") -> None:
        """Put the heads on a square lattice of centres, as a convolution's taps.

        Args:
            strength: inverse width of the bumps [1/patch^2].
            centers: `"code"` spaces the lattice by one patch, as the published code does, so that 4 heads sit at
                (±0.5, ±0.5), each shared by four patches; `"paper"` puts 4 heads at (±1, ±1) as its Figure 3 says.
                The two differ for an even number of heads per side only.

        Raises:
            ValueError: if `centers` is neither.
        """
        if centers not in ("code", "paper"):
            raise ValueError(f"centers is 'code' or 'paper', not {centers!r}.")
        side = math.isqrt(len(self.vector))
        lattice = torch.arange(side, dtype=self.vector.dtype) - (side - 1) / 2
        if centers == "paper" and side % 2 == 0:
            lattice = lattice + 0.5 * lattice.sign()
        # Heads beyond the square have no place on the lattice: zero logits, a uniform map.
        self.vector.zero_()
        y, x = torch.meshgrid(lattice, lattice, indexing="ij")
        taps = torch.stack([-torch.ones(side * side), 2 * x.flatten(), 2 * y.flatten()], dim=1)
        self.vector[: side * side] = strength * taps


def grid_offsets(grid: tuple[int, int]) -> Tensor:
    """Offsets key - query `(query, key, 2)` in (rows, columns) between the patches of a grid, float32."""
    rows, columns = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    positions = torch.stack([rows.flatten(), columns.flatten()], dim=-1).float()
    return positions[None, :] - positions[:, None]
