"""The fit behind `impulse_`: which offsets heads look at, the maps that are wanted, and the weights that make them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from vitprobe.initializers.report import generator
from vitprobe.names import unknown

_CHOICES = {
    "sampling": ("with replacement", "without replacement", "stratified", "fixed"),
    "boundary": ("masked", "zero"),
    "pseudo_input": ("as seen", "positions", "layer norm"),
    "solver": ("adam", "closed form"),
    "loss": ("cross entropy", "squared error"),
    "coordinates": ("code", "weights"),
}
_SPANNED = 1e-6  # singular values below this share of the largest are rounding errors of float32
_MAX_GAIN = 1e3


@dataclass(frozen=True, kw_only=True)
class ImpulseSpec:
    """How impulses are drawn and fitted; the defaults are the sharp and fast way.

    Attributes:
        kernel_size: side of the kernel that taps are drawn from [patches].
        sampling: `"with replacement"`: each head draws its tap by itself, as published, so that 9 heads have 5.9
            distinct of 9 on average. `"without replacement"`: a layer repeats a tap only when all have been used.
            `"stratified"`: the same over all layers. `"fixed"`: head `i` has tap `i` from the centre outwards (centre,
            up, down, left, right, corners; Zheng et al. 2025, arXiv:2505.19985).
        boundary: queries whose offset leaves the grid. `"masked"` leaves them out of the loss; `"zero"` wants them to
            see nothing, as a convolution's zero padding does, which draws a softmax towards uniform there (published);
            the cross entropy wants that as much as the impulses and gives up mass for it, the squared error little.
        pseudo_input: what stands for the tokens in the fit. `"as seen"`: the code as the layer's queries and keys would
            see it, were the images blank: normed, or times its share where the layer mixes it in itself
            (Models I to III). `"positions"`: the code as it is (published). `"layer norm"`: the normed code
            (arXiv:2404.01139). Or a tensor (token, dim). Prefix tokens are keys that are to get no attention.
        solver: `"adam"`, or `"closed form"`: the pseudo-inverse of the code around the target, cut to the width of the
            heads (arXiv:2505.19985). It does for codes that fill the space and heads not much narrower than patches are
            many, and is refused otherwise.
        loss: what Adam minimises. `"squared error"` of the maps (published) has no gradient where a softmax is
            saturated at a wrong key, and now and then loses a head to it; `"cross entropy"` does not.
        coordinates: Adam moves the weights themselves (`"weights"`, published) or their coordinates in the space that
            the code spans (`"code"`): several times fewer steps, and weights that see nothing but the code, so that
            maps survive more of the images' content.
        scale: what logits are multiplied by in the fit; the layer's own unless given. Any other is folded into the
            weights afterwards, exactly, so that the model need not change.
        lr: Adam's learning rate.
        steps: its steps, at most.
        weight_norm: steps between normalisations as published: every query channel (over its inputs) and every key
            input (over the channels) gets the mean norm that the query channels began with. `None`: none.
        target_mass: Adam stops when the worst head has this attention on its target; the closed form is scaled to it.
        gain: Frobenius norm of each head's query and key matrix in the closed form (published: 7), in place of
            `target_mass`.
        shared: one fit for all layers.
    """

    kernel_size: int = 3
    sampling: str = "with replacement"
    boundary: str = "masked"
    pseudo_input: str | Tensor = "as seen"
    solver: str = "adam"
    loss: str = "cross entropy"
    coordinates: str = "code"
    scale: float | None = None
    lr: float = 3e-2
    steps: int = 300
    weight_norm: int | None = None
    target_mass: float | None = 0.95
    gain: float | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name, known in _CHOICES.items():
            if isinstance(given := getattr(self, name), str) and given not in known:
                raise unknown(name, given, known)
        for name in ("kernel_size", "steps", "lr", "scale", "weight_norm", "gain"):
            if (given := getattr(self, name)) is not None and given <= 0:
                raise ValueError(f"{name}={given}: use a number above 0.")
        if self.target_mass is not None and not 0 < self.target_mass < 1:
            raise ValueError(f"target_mass={self.target_mass} is a share of a head's attention: between 0 and 1.")
        if self.weight_norm is not None and self.coordinates != "weights":
            raise ValueError("weight_norm is published for the weights themselves: give coordinates='weights' as well.")
        if self.solver == "closed form" and (self.gain is None) == (self.target_mass is None):
            raise ValueError("the closed form is scaled by gain= or to target_mass=: give one, and the other as None.")

    def config(self) -> dict[str, object]:
        """All options as text and numbers, a tensor by the hash of its values."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.pseudo_input, Tensor):
            values = self.pseudo_input.detach().cpu().double().contiguous().numpy().tobytes()
            shape = "x".join(map(str, self.pseudo_input.shape))
            options["pseudo_input"] = f"tensor {shape} {sha256(values).hexdigest()[:16]}"
        return options


def draw_offsets(heads: Sequence[int], kernel_size: int, sampling: str, seed: int) -> list[Tensor]:
    """The offset that each head looks at, (head, 2) in (rows, columns) for each layer.

    Args:
        heads: number of heads of each layer.
        kernel_size: side of the kernel; tap `t` is the offset `(t // f - f // 2, t % f - f // 2)`.
        sampling: as in `ImpulseSpec`.
        seed: of the draws.

    Returns:
        The offsets key - query.
    """
    area, reach = kernel_size**2, kernel_size // 2

    def shuffled(count: int, *purpose: int | str) -> Tensor:
        sources = [generator(seed, *purpose, turn) for turn in range(-(-count // area))]
        return torch.cat([torch.randperm(area, generator=source, device="cpu") for source in sources])[:count]

    if sampling == "fixed":
        outwards = sorted(range(area), key=lambda tap: _distance(tap // kernel_size - reach, tap % kernel_size - reach))
        taps = [torch.tensor(outwards, device="cpu").repeat(-(-count // area))[:count] for count in heads]
    elif sampling == "stratified":
        taps = list(shuffled(sum(heads), "impulse taps", "all").split(list(heads)))
    elif sampling == "without replacement":
        taps = [shuffled(count, "impulse taps", layer) for layer, count in enumerate(heads)]
    else:
        taps = [
            torch.randint(area, (count,), generator=generator(seed, "impulse taps", layer), device="cpu")
            for layer, count in enumerate(heads)
        ]
    return [torch.stack([tap // kernel_size - reach, tap % kernel_size - reach], dim=1) for tap in taps]


def _distance(row: int, column: int) -> tuple[int, int, int, int]:
    """Sorts offsets: nearest first, of equals rows before columns, upper and left first."""
    return row**2 + column**2, abs(column), row, column


@dataclass(frozen=True)
class Impulses:
    """The maps that are wanted: a convolution with one tap per head.

    Attributes:
        offsets: key - query (head, 2).
        key: token that each query is to look at (head, query); any where it is not in the grid.
        inside: whether it is (head, query).
        prefix: tokens before the patches; they are keys, not queries.
    """

    offsets: Tensor
    key: Tensor
    inside: Tensor
    prefix: int

    @classmethod
    def of(
        cls, grid: tuple[int, int], offsets: Tensor, *, prefix: int = 0, device: torch.device | str = "cpu"
    ) -> "Impulses":
        """The targets of heads that look at these offsets on a grid."""
        rows, columns = grid
        places = torch.tensor(list(product(range(rows), range(columns))), device="cpu")
        looked = places + offsets[:, None]
        inside = ((looked >= 0) & (looked < torch.tensor(grid, device="cpu"))).all(-1)
        key = torch.where(inside, looked[..., 0] * columns + looked[..., 1], 0) + prefix
        return cls(offsets, key.to(device), inside.to(device), prefix)

    def matrix(self) -> Tensor:
        """The convolution matrices (head, query, key), rows of zeros where the target is not in the grid."""
        heads, queries = self.key.shape
        empty = torch.zeros(heads, queries, self.prefix + queries, device=self.key.device)
        return empty.scatter(2, self.key[..., None], self.inside[..., None].float())

    def mass(self, maps: Tensor) -> Tensor:
        """Attention on the target (head,), mean over the queries that have one."""
        looked = maps.gather(-1, self.key[..., None]).squeeze(-1)
        return (looked * self.inside).sum(-1) / self.inside.sum(-1)

    def accuracy(self, maps: Tensor) -> Tensor:
        """Share of these queries that attend to the target most (head,)."""
        return ((maps.argmax(-1) == self.key) & self.inside).sum(-1) / self.inside.sum(-1)


def content_logits(tokens: Tensor, query: Tensor, key: Tensor, scale: float, prefix: int) -> Tensor:
    """Logits (head, query, key) of tokens (token, dim) under weights (head, channel, dim); only patches are queries."""
    return scale * (tokens[prefix:] @ query.mT) @ (tokens @ key.mT).mT


@torch.enable_grad()
def fit_adam(
    tokens: Tensor, target: Impulses, spec: ImpulseSpec, *, width: int, scale: float, source: torch.Generator
) -> tuple[Tensor, Tensor, int]:
    """Weights whose maps are near to the target, by Adam on all heads at once.

    Args:
        tokens: pseudo-input (token, dim).
        target: the maps that are wanted.
        spec: `loss`, `boundary`, `coordinates`, `lr`, `steps`, `weight_norm`, `target_mass`.
        width: channels of a head.
        scale: what logits are multiplied by.
        source: draws the starting weights.

    Returns:
        Query and key weights (head, channel, dim), and the steps taken.
    """
    heads, dim = len(target.key), tokens.shape[1]
    bound = (width * heads) ** -0.5
    start = (2 * torch.rand(2, heads, width, dim, generator=source, device="cpu") - 1) * bound
    start, axes = start.to(tokens), None
    if spec.coordinates == "code":
        axes = torch.linalg.svd(tokens.double(), full_matrices=False)
        axes = axes.Vh[axes.S / axes.S[0] > _SPANNED].float()  # (direction, dim)
        start, tokens = start @ axes.mT, tokens @ axes.mT
    query, key = (part.clone().requires_grad_() for part in start)
    norm = query.detach().norm(dim=-1).mean()
    optimizer = torch.optim.Adam([query, key], lr=spec.lr)
    wanted = target.matrix()
    steps = 0
    while steps < spec.steps:
        log_maps = content_logits(tokens, query, key, scale, target.prefix).log_softmax(-1)
        if spec.target_mass is not None and target.mass(log_maps.detach().exp()).min() >= spec.target_mass:
            break
        optimizer.zero_grad()
        _loss(log_maps, target, wanted, spec).backward()
        optimizer.step()
        steps += 1
        if spec.weight_norm is not None and steps % spec.weight_norm == 0:
            with torch.no_grad():
                query *= norm / query.norm(dim=-1, keepdim=True)
                key *= norm / key.norm(dim=1, keepdim=True)
    query, key = query.detach(), key.detach()
    return (query, key, steps) if axes is None else (query @ axes, key @ axes, steps)


def _loss(log_maps: Tensor, target: Impulses, wanted: Tensor, spec: ImpulseSpec) -> Tensor:
    """What Adam minimises, of maps `(head, query, key)`."""
    if spec.loss == "squared error":
        error = (log_maps.exp() - wanted).square()
        return (error if spec.boundary == "zero" else error * target.inside[..., None]).mean()
    looked = log_maps.gather(-1, target.key[..., None]).squeeze(-1)
    outside = log_maps.mean(-1) if spec.boundary == "zero" else 0.0  # a uniform row is the nearest to one of zeros
    return -torch.where(target.inside, looked, outside).mean()


def fit_closed_form(
    tokens: Tensor, target: Impulses, spec: ImpulseSpec, *, width: int, scale: float, source: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Weights whose logits are near to the target, by the pseudo-inverse of the tokens.

    Args:
        tokens: pseudo-input (token, dim).
        target: the maps that are wanted.
        spec: `gain` or `target_mass`.
        width: channels of a head, of which the pseudo-inverse keeps as many directions.
        scale: what logits are multiplied by.
        source: draws the noise off the target.

    Returns:
        Query and key weights (head, channel, dim).

    Raises:
        ValueError: if logits like these do not make the maps.
    """
    patches = tokens[target.prefix :].double()
    spanned = int(torch.linalg.matrix_rank(patches, rtol=1e-3))
    if 2 * spanned < len(patches):
        raise ValueError(
            f"the position code spans {spanned} of {len(patches)} directions, so that the closed form, which fits "
            "logits by least squares, gives a blur: use solver='adam', which fits maps, or a learned code."
        )
    wanted = target.matrix()
    noise = torch.randn(wanted.shape, generator=source, device="cpu").abs().to(tokens)
    # The published noise: it decides which of equally good directions are kept.
    logits = torch.where(wanted > 0, wanted, 3e-3 * noise).double()
    left, right = _inverse(patches, width), _inverse(tokens.double(), width)  # (direction, query), (direction, key)
    svd = torch.linalg.svd(left.inverse @ logits @ right.inverse.mT, full_matrices=False)
    roots = svd.S.sqrt()
    query = (roots[:, :, None] * svd.U.mT) @ left.axes
    key = (roots[:, :, None] * svd.Vh) @ right.axes
    spare = (0, 0, 0, width - roots.shape[1])
    query, key = (F.pad(part / part.norm(dim=(1, 2), keepdim=True), spare).float() for part in (query, key))

    def maps(gain: float) -> Tensor:
        return content_logits(tokens, query, key, gain**2 * scale, target.prefix).softmax(-1)

    gain = spec.gain or _least_gain(lambda gain: float(target.mass(maps(gain)).min()), spec.target_mass or 0.0)
    found = maps(gain or _MAX_GAIN)
    if gain is None or target.accuracy(found).min() < 0.9:
        raise ValueError(
            f"the closed form leaves its worst head with mass {target.mass(found).min():.2f} and argmax accuracy "
            f"{target.accuracy(found).min():.2f}: a shift moves {len(patches)} patches in equally many directions, of "
            f"which heads of {width} channels keep {min(width, spanned)}. Use solver='adam' or wider heads."
        )
    return query * gain, key * gain


@dataclass(frozen=True)
class _Inverse:
    """The pseudo-inverse of tokens, `axes.T @ inverse`, cut to some directions."""

    axes: Tensor
    inverse: Tensor


def _inverse(tokens: Tensor, directions: int) -> _Inverse:
    svd = torch.linalg.svd(tokens, full_matrices=False)
    kept = min(directions, int((svd.S / svd.S[0] > _SPANNED).sum()))
    return _Inverse(svd.Vh[:kept], svd.U[:, :kept].mT / svd.S[:kept, None])


def _least_gain(mass: Callable[[float], float], target: float) -> float | None:
    """The least gain that reaches a mass, by bisection; `None` if none does."""
    low, high = 1e-2, _MAX_GAIN
    if mass(high) < target:
        return None
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if mass(middle) >= target else (middle, high)
    return high
