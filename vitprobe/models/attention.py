"""The one attention core: pluggable logits, summed before the softmax or gated after it.

Every attention of this package is an `Attention`. Its logits come from

- content: queries and keys of the tokens (ViT), of a mixture of tokens and position code or of the code alone
  (`Mixture`: Models I and II of Zheng et al. 2024), of nothing but free matrices (`Mixture` of an identity: Model III);
- position: a table of offsets (`RelativeBias`: AlterNet, Li et al. 2021) or a bump (`GaussianPosition`: ConViT).

Position is added to content before the softmax, or gated against it after (GPSA), or stands alone. A `Neighbourhood`
masks what is too far away. The map is a function, `weights(x) -> (batch, head, query, key)`, and `forward` applies that
same map to the values.
"""

import math
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitprobe.models.layers import PositionCode, check_divides, check_odd
from vitprobe.names import unknown


class Attention(nn.Module):
    """Multi-head self-attention over `(batch, token, dim)`.

    `softmax(scale * z Q K^T z^T + position + mask) v`, by head, where `z` is what `source` makes of the tokens `x`, and
    the values are `v = x V`.

    Args:
        dim: channels of the tokens.
        heads: number of heads.
        head_dim: channels of a head; `dim / heads` unless given.
        out_dim: channels of the output; `dim` unless given.
        content: `False` leaves the content logits out, and with them query and key: attention by position alone
            (PSA set up as a convolution, d'Ascoli et al. 2021, eq. 4).
        source: what queries and keys are computed from; the tokens themselves unless given.
        position: a module that returns position logits `(head or 1, query, key)`, or `None`.
        gate: `None` adds the position logits to the content logits before the softmax. A number starts one gate per
            head there (its logit): the map is then `(1 - s) softmax(content) + s softmax(position)` with
            `s = sigmoid(gate)` (d'Ascoli et al. 2021, eq. 7). Both parts have rows that sum to one, so the paper's
            final normalisation changes nothing and is left out.
        mask: a module that returns logits `(1, query, key)`, minus infinity for what is not to be seen.
        sink: adds a key and value of zeros: a token at content logit 0 and position logit 0 that takes attention and
            gives nothing. A position or mask that has zero tokens of its own (`RelativeBias(margin=)`,
            `Neighbourhood(boundary="zero")`) declares it by an attribute `sink` and gives their logit as a last column.
        scale: what the content logits are multiplied by, the `c` of Zheng et al. 2024; `head_dim^-1/2` unless given.
        value: `False` mixes the tokens themselves, split among the heads, in place of values.
        qkv_bias: biases on query, key and value.
        project_bias: a bias on the output.
        train_query_key: `False` freezes query and key.
        train_gate: `False` freezes the gates.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        out_dim: int | None = None,
        content: bool = True,
        source: "Mixture | None" = None,
        position: nn.Module | None = None,
        gate: float | None = None,
        mask: nn.Module | None = None,
        sink: bool = False,
        scale: float | None = None,
        value: bool = True,
        qkv_bias: bool = False,
        project_bias: bool = True,
        train_query_key: bool = True,
        train_gate: bool = True,
    ) -> None:
        super().__init__()
        if head_dim is None or not value:
            check_divides(heads, (dim,), what="heads", of=f"dim={dim}")
        if head_dim is None:
            head_dim = dim // heads
        if gate is not None and (position is None or not content):
            raise ValueError("a gate chooses between content and position: give position= as well, and content.")
        if not content and position is None:
            raise ValueError("without content there is nothing to attend by: give position= as well.")
        sinks = [sink, *(getattr(module, "sink", False) for module in (position, mask))]
        if sum(sinks) > 1:
            raise ValueError(
                "zero tokens come from one place: drop sink=True, or those of the position or of the mask."
            )
        self.heads = heads
        self.scale = head_dim**-0.5 if scale is None else scale
        self.sink = any(sinks)
        self.source = source
        width = dim if source is None else source.dim
        self.query_key = nn.Linear(width, 2 * heads * head_dim, bias=qkv_bias) if content else None
        self.value = nn.Linear(dim, heads * head_dim, bias=qkv_bias) if value else nn.Identity()
        self.project = nn.Linear(heads * head_dim if value else dim, out_dim or dim, bias=project_bias)
        self.position = position
        self.mask = mask
        self.gate = None if gate is None else nn.Parameter(torch.full((heads,), float(gate)), requires_grad=train_gate)
        if self.query_key is not None:
            self.query_key.requires_grad_(train_query_key)

    def weights(self, x: Tensor) -> Tensor:
        """The attention maps `(batch, head, query, key)` of tokens `(batch, token, dim)`.

        Rows sum to one, less what goes to a sink.
        """
        content = None
        if self.query_key is not None:
            query, key = self._query_key(x)
            content = self.scale * query @ key.transpose(-2, -1)
        position, mask = self._call(self.position), self._call(self.mask)
        if self.gate is None:
            maps = self._softmax(content, position, mask)
        else:
            gate = rearrange(self.gate.sigmoid(), "h -> h 1 1")
            maps = (1 - gate) * self._softmax(content, mask) + gate * self._softmax(position, mask)
        return maps.expand(len(x), self.heads, -1, -1)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the values by the maps: `(batch, token, dim)` to `(batch, token, out_dim)`."""
        value = rearrange(self.value(x), "b n (h d) -> b h n d", h=self.heads)
        if self.gate is None and self.query_key is not None:
            # The same map as `weights`, fused: 3 times faster at 256 tokens.
            query, key = (part.expand(len(x), -1, -1, -1) for part in self._query_key(x))
            bias = self._sum(self._call(self.position), self._call(self.mask))
            if self.sink:
                key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
            bias = None if bias is None else bias.to(query.dtype)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scale)
        else:
            mixed = self.weights(x) @ value
        return self.project(rearrange(mixed, "b h n d -> b n (h d)"))

    def _query_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys `(batch, head, token, head_dim)`, batch 1 if they do not depend on the images."""
        assert self.query_key is not None
        both = self.query_key(x if self.source is None else self.source(x))
        query, key = rearrange(both, "b n (two h d) -> two b h n d", two=2, h=self.heads)
        return query, key

    def _sum(self, *logits: Tensor | None) -> Tensor | None:
        """The sum of the logits that are there, `(..., query, key)`, a sink's in the last column."""
        present = [part for part in logits if part is not None]
        if self.sink:
            # Logits that do not know the sink have 0 for it.
            present = [F.pad(part, (0, part.shape[-2] + 1 - part.shape[-1])) for part in present]
        return reduce(add, present) if present else None

    def _softmax(self, *logits: Tensor | None) -> Tensor:
        """The softmax of the sum, `(..., query, key)` without the sink's column."""
        total = self._sum(*logits)
        assert total is not None
        return total.softmax(-1)[..., : total.shape[-2]]

    @staticmethod
    def _call(module: nn.Module | None) -> Tensor | None:
        return None if module is None else module()


class Mixture(nn.Module):
    """Queries and keys from tokens and a position code, `alpha x + (1 - alpha) P` (Zheng et al. 2024, Models I to III).

    The code goes into no value and not into the stream. At `alpha = 0` the maps are the same for all images: Model II
    for a code as wide as the tokens; Model III, whose `Q_h` and `K_h` are free `(token, head_dim)` matrices, for the
    identity of as many channels as tokens, which leaves the rows of the query and key layer as they are.

    Args:
        code: gives `P`, `(token, dim)`.
        alpha: share of the tokens, 0 to 1.

    Raises:
        ValueError: if the share is none.
    """

    def __init__(self, code: PositionCode, alpha: float) -> None:
        super().__init__()
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha} is the share of the tokens in what attention looks at: use 0 to 1.")
        self.code = code
        self.dim = code.dim
        self.alpha = float(alpha)

    def forward(self, x: Tensor) -> Tensor:
        """What queries and keys are computed from, `(batch, token, dim)`; batch 1 at `alpha = 0`."""
        code = self.code()
        return code[None] if self.alpha == 0 else self.alpha * x + (1 - self.alpha) * code

    def extra_repr(self) -> str:
        """The share of the tokens, for `print(model)`."""
        return f"alpha={self.alpha:g}"


class RelativeBias(nn.Module):
    """A learned bias for every offset between two tokens of a window: `(head or 1, query, key)` (Shaw et al. 2018).

    Args:
        window: rows and columns of tokens.
        heads: tables; 1 for one that all heads share.
        margin: rings of zero tokens around the window, which take attention by the table as well and give nothing, as
            the zeros around a convolution's input do. Their logits are one further column, the logarithm of the sum
            of their exponentials.
    """

    def __init__(self, window: tuple[int, int], heads: int = 1, *, margin: int = 0) -> None:
        super().__init__()
        self.sink = margin > 0
        self.reach = (window[0] - 1 + margin, window[1] - 1 + margin)
        height, width = (2 * reach + 1 for reach in self.reach)
        self.table = nn.Parameter(torch.zeros(heads, height, width))
        nn.init.trunc_normal_(self.table, std=0.02)
        offset = grid_offsets(window, margin=margin)
        index = (offset[..., 0] + self.reach[0]) * width + offset[..., 1] + self.reach[1]
        self.index: Tensor
        self.register_buffer("index", index.long(), persistent=False)

    def forward(self) -> Tensor:
        """The bias logits."""
        bias = self.table.flatten(1)[:, self.index]
        if not self.sink:
            return bias
        bias, ring = bias.tensor_split([len(self.index)], dim=-1)
        return torch.cat([bias, ring.logsumexp(-1, keepdim=True)], dim=-1)

    @torch.no_grad()
    def look_at_(self, offsets: Tensor, *, strength: float) -> None:
        """Let each head look at one offset: `strength` there, 0 elsewhere.

        Args:
            offsets: key - query `(head, 2)` in (rows, columns).
            strength: the logit; all other tokens together keep a share of about `token / e^strength`.
        """
        self.table.zero_()
        for table, (row, column) in zip(self.table, offsets.tolist(), strict=True):
            table[self.reach[0] + row, self.reach[1] + column] = strength


class Neighbourhood(nn.Module):
    """Lets a patch see the square of patches around it alone: logits `(1, query, key)`, 0 or minus infinity.

    The convolutional self-attention of Park & Kim 2022 (Fig. 7), after Yang et al. 2019. Prefix tokens, which have no
    place, see and are seen by all.

    Args:
        grid: rows and columns of patches.
        kernel_size: side of the neighbourhood [patches], odd.
        boundary: `"masked"`: what is outside of the image takes no attention. `"zero"`: as in the published code, each
            patch missing there has logit 0 and value 0, so that a patch at the border loses attention to it. Together
            they are one zero token of logit `log(number of them)`, a further column.
        prefix: tokens before the patches.

    Raises:
        ValueError: if the kernel has no middle, or the boundary is neither.
    """

    def __init__(self, grid: tuple[int, int], kernel_size: int, *, boundary: str = "masked", prefix: int = 0) -> None:
        super().__init__()
        check_odd(kernel_size, what="kernel_size")
        if boundary not in ("masked", "zero"):
            raise unknown("boundary", boundary, ("masked", "zero"))
        self.sink = boundary == "zero"
        near = grid_offsets(grid).abs().amax(-1) <= kernel_size // 2
        logits = F.pad(torch.zeros(near.shape).masked_fill(~near, -math.inf), (prefix, 0, prefix, 0))
        if self.sink:
            missing = F.pad(kernel_size**2 - near.sum(-1), (prefix, 0))
            logits = torch.cat([logits, missing.log()[:, None]], dim=-1)
        self.logits: Tensor
        self.register_buffer("logits", logits[None], persistent=False)

    def forward(self) -> Tensor:
        """The mask's logits."""
        return self.logits


class GaussianPosition(nn.Module):
    """Position logits that peak at one offset per head: `(head, query, key)` (d'Ascoli et al. 2021, eq. 4 and 6).

    The logit is `v_h . r` with `r = (|d|^2, d_x, d_y)`, `d` = key - query in patches, so that
    `v_h = -strength (1, -2 c_x, -2 c_y)` is a bump of inverse width `strength` around the centre `c`.

    Attributes:
        matrices: names of parameters that are a linear map's weights, whatever they are called, for a trainer that lets
            matrices decay. The vectors are those of the published code's `pos_proj`, and decay there.
    """

    matrices = ("vector",)

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


def grid_offsets(grid: tuple[int, int], *, margin: int = 0) -> Tensor:
    """Offsets key - query `(query, key, 2)` in (rows, columns) between the patches of a grid, float32.

    With a margin, the places of so many rings around the grid are keys, too, after the patches.
    """
    rows, columns = torch.meshgrid(*(torch.arange(-margin, side + margin) for side in grid), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], dim=-1)
    outside = ((places < 0) | (places >= torch.tensor(grid))).any(-1)
    keys = places[outside.argsort(stable=True)].float()
    queries = keys[: grid[0] * grid[1]]
    return keys[None, :] - queries[:, None]
