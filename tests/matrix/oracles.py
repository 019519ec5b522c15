"""What the probes have to find, computed without vitprobe: module hooks, the libraries' own attention maps, NumPy."""

import copy
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from scipy.spatial.distance import cdist
from scipy.special import entr
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# --- what is written in the list of models ----------------------------------------------------------


@dataclass(frozen=True)
class Tap:
    """Modules whose input or output is a unit's activation; `nhwc` where it has four axes, channels last."""

    pattern: str
    side: Literal["in", "out"]
    nhwc: bool


def inputs(*patterns: str, nhwc: bool = False) -> tuple[Tap, ...]:
    """What modules take, by patterns of their paths."""
    return tuple(Tap(pattern, "in", nhwc) for pattern in patterns)


def outputs(*patterns: str, nhwc: bool = False) -> tuple[Tap, ...]:
    """What modules give, by patterns of their paths."""
    return tuple(Tap(pattern, "out", nhwc) for pattern in patterns)


@dataclass(frozen=True)
class Place:
    """A unit, or an attention map, as the list of models says it."""

    kind: str
    grid: tuple[int, int]
    prefix: int
    heads: int = 0
    windows: int = 1
    keys: tuple[int, int] | None = None  # their grid, where they are not the queries' tokens


def _grid(text: str) -> tuple[tuple[int, int], int]:
    rows, columns, prefix = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+))?", text).groups()
    return (int(rows), int(columns)), int(prefix or 0)


def parse_units(text: str) -> list[Place]:
    """`"8x8+1: stem msa mlp; 4x4: subsample"` unit by unit."""
    units = []
    for stage in text.split("; "):
        grid, _, kinds = stage.partition(": ")
        units += [Place(kind, *_grid(grid)) for kind in kinds.split()]
    return units


def say_units(units: Sequence[Place]) -> str:
    """The same text from units."""
    stages = groupby(units, key=lambda unit: (unit.grid, unit.prefix))
    return "; ".join(f"{_say_grid(*key)}: {' '.join(unit.kind for unit in stage)}" for key, stage in stages)


def _say_grid(grid: tuple[int, int], prefix: int) -> str:
    return f"{grid[0]}x{grid[1]}" + (f"+{prefix}" if prefix else "")


def parse_maps(lines: Sequence[str]) -> list[Place]:
    """`["2 x 3 heads on 7x7 in 16 windows", "1 x 1 head on 8x8 over 2x2"]` map by map."""
    maps = []
    for line in lines:
        found = re.fullmatch(r"(\d+) x (\d+) heads? on (\S+)(?: over (\S+))?(?: in (\d+) windows)?", line)
        assert found, line
        count, heads, grid, keys, windows = found.groups()
        others = _grid(keys)[0] if keys else None
        maps += [Place("map", *_grid(grid), int(heads), int(windows or 1), others)] * int(count)
    return maps


def say_maps(maps: Sequence[Place]) -> list[str]:
    """The same text from maps."""
    return [
        f"{len(list(alike))} x {one.heads} {'head' if one.heads == 1 else 'heads'} on {_say_grid(one.grid, one.prefix)}"
        + (f" over {_say_grid(one.keys, 0)}" if one.keys else "")
        + (f" in {one.windows} windows" if one.windows > 1 else "")
        for one, alike in groupby(maps)
    ]


# --- weights ----------------------------------------------------------------------------------------


def enliven(model: nn.Module) -> None:
    """Weights from a seed that make every branch and every attention count.

    The libraries' own start with attention that looks everywhere alike, with branches scaled by 1e-6, and with norms
    that end branches scaled by 0: none would show a wrong place or a wrong activation.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 * max(parameter[0].numel(), 1) ** -0.5, generator=generator)
            elif not name.endswith("bias") and bool((parameter.abs() < 0.2).all()):
                parameter.fill_(0.5)


# --- activations ------------------------------------------------------------------------------------


def record(model: nn.Module, taps: Sequence[Tap], call: Callable[[nn.Module], Any]) -> list[tuple[Tensor, bool]]:
    """Copies of what the tapped modules take and give, in the order of one pass, and whether channels are last."""
    seen: list[tuple[Tensor, bool]] = []

    def first(value: Any) -> Tensor:
        return (
            value
            if isinstance(value, Tensor)
            else first(next(iter(value.values() if isinstance(value, dict) else value)))
        )

    def keep(value: Any, nhwc: bool) -> None:
        seen.append((first(value).detach().clone(), nhwc))

    handles = []
    for name, module in model.named_modules():
        for tap in taps:
            if _matches(name, tap.pattern):
                if tap.side == "in":
                    hook = lambda module, args, kwargs, nhwc=tap.nhwc: keep(args or kwargs, nhwc)  # noqa: E731
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
                else:
                    handles.append(module.register_forward_hook(lambda m, a, out, nhwc=tap.nhwc: keep(out, nhwc)))
    try:
        call(model)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def without(model: nn.Module, patterns: Sequence[str], number: int, call: Callable[[nn.Module], Any]) -> Any:
    """What a model gives with zeros in place of what the `number`-th call of the modules of these paths returned."""
    calls = 0

    def zero(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != number:
            return None
        return torch.zeros_like(output) if isinstance(output, Tensor) else (torch.zeros_like(output[0]), *output[1:])

    named = model.named_modules()
    handles = [m.register_forward_hook(zero) for name, m in named if any(_matches(name, p) for p in patterns)]
    try:
        with _no_fast_path():
            output = call(model)
    finally:
        for handle in handles:
            handle.remove()
    assert calls >= number, f"{calls} calls of {patterns}"
    return output


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """PyTorch's fused encoder layers call no modules and so no hooks: switched off."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _matches(name: str, pattern: str) -> bool:
    parts, globs = name.split("."), pattern.split(".")
    return len(parts) == len(globs) and all(map(fnmatch.fnmatchcase, parts, globs))


def as_image(x: Tensor, grid: tuple[int, int], nhwc: bool) -> np.ndarray:
    """An activation as `(image, row, column, channel)`; prefix tokens come first and are left out."""
    if x.ndim == 4:
        x = x if nhwc else x.permute(0, 2, 3, 1)
    else:
        assert x.ndim == 3, tuple(x.shape)
        x = x[:, x.shape[1] - grid[0] * grid[1] :].reshape(len(x), *grid, -1)
    assert x.shape[1:3] == grid, (tuple(x.shape), grid)
    return x.double().numpy()


def spectrum(x: np.ndarray) -> np.ndarray:
    """Log amplitude relative to frequency zero `(image, y, x)`, averaged over channels (Park & Kim 2022)."""
    logs = np.log(np.abs(np.fft.fft2(x, axes=(1, 2))) + 1e-6).mean(-1)
    return logs - logs[:, :1, :1]


def half_diagonal(x: np.ndarray) -> np.ndarray:
    """The part of the spectrum where both axes have the same frequency `(image, frequency)`."""
    rows, columns = x.shape[1:3]
    common = np.gcd(rows, columns)
    steps = np.arange(common // 2 + 1)
    return spectrum(x)[:, steps * (rows // common), steps * (columns // common)]


def variance(x: np.ndarray) -> np.ndarray:
    """Unbiased variance over positions, mean over channels `(image,)`."""
    return x.var((1, 2), ddof=1).mean(-1)


def alike(images: Sequence[np.ndarray]) -> np.ndarray:
    """Centred kernel alignment between activations of the same images, by HSIC_1 of Song et al. (2012), eq. 5."""
    grams = []
    for x in images:
        flat = x.reshape(len(x), -1) - x.reshape(len(x), -1).mean(0)
        grams.append(flat @ flat.T)
        np.fill_diagonal(grams[-1], 0)
    k = np.array(grams)
    n = k.shape[-1]
    product = np.einsum("aij,bij->ab", k, k)
    of_all = np.multiply.outer(*[k.sum((1, 2))] * 2) / (n - 1) / (n - 2)
    of_rows = 2 * k.sum(1) @ k.sum(1).T / (n - 2)
    hsic = (product + of_all - of_rows) / n / (n - 3)
    return hsic / np.sqrt(np.multiply.outer(*[hsic.diagonal()] * 2))


# --- attention maps ---------------------------------------------------------------------------------


def attention_maps(model: nn.Module, road: str, call: Callable[[nn.Module], Any]) -> list[np.ndarray]:
    """Every attention map of one pass, as the libraries themselves give it.

    Args:
        model: the model; a copy of it is run.
        road: `softmax`: what comes out of every softmax, fused kernels off; `dropout`: what timm's dropout of
            attention maps takes; `mha`: `nn.MultiheadAttention` asked for its weights; `transformers`: the output of
            `output_attentions`; `weights`: the method of vitprobe's own attention; `seen`: queries and keys that a
            handwritten model keeps.
        call: runs a model.
    """
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    found: list[Tensor] = []
    if road == "softmax":
        with _Softmax(found):
            call(model)
    elif road == "dropout":
        taps = [Tap(name, "in", False) for name, _ in model.named_modules() if name.endswith("attn_drop")]
        found = [x for x, _ in record(model, taps, call)]
    elif road == "mha":
        with _each(nn.MultiheadAttention, model, found, _multihead_weights):
            call(model)
    elif road == "transformers":
        model.config.output_attentions = True
        found = list(call(model).attentions)
    elif road == "weights":
        with _each(nn.Module, model, found, lambda module, args, kwargs: module.weights(*args, **kwargs)):
            call(model)
    elif road == "seen":
        call(model)
        query, key, _ = model.seen
        found = [(query.double() @ key.double().transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)]
    return [x.detach().double().numpy() for x in found]


class _Softmax(TorchFunctionMode):
    def __init__(self, found: list[Tensor]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (F.softmax, torch.softmax, Tensor.softmax) and result.ndim > 2:
            self.found.append(result.clone())
        return result


@contextmanager
def _each(kind: type, model: nn.Module, found: list[Tensor], ask: Callable) -> Iterator[None]:
    """Ask every module of a kind for its maps when it is called."""
    modules = [m for m in model.modules() if isinstance(m, kind) and (kind is not nn.Module or hasattr(m, "weights"))]
    asked = set()

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if module not in asked:  # asking may call it again
            asked.add(module)
            found.append(ask(module, args, kwargs))
            asked.remove(module)

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        with _no_fast_path():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _multihead_weights(module: nn.Module, args: tuple, kwargs: dict) -> Tensor:
    return module(*args, **(kwargs | {"need_weights": True, "average_attn_weights": False}))[1]


def choose(
    maps: Sequence[np.ndarray], tokens: Sequence[tuple[int, int, int, int]], images: int, heads_first: bool
) -> list[np.ndarray]:
    """The wanted maps, in order, as `(image, window, head, query, key)`; others between them are left out.

    Args:
        maps: of one pass.
        tokens: windows, heads, queries and keys of each wanted.
        images: images in the batch.
        heads_first: whether the heads come before the windows.
    """
    chosen: list[np.ndarray] = []
    for found in maps:
        if len(chosen) == len(tokens):
            break
        windows, heads, *sides = tokens[len(chosen)]
        if found.shape[-2:] == tuple(sides) and found.size == images * windows * heads * sides[0] * sides[1]:
            if heads_first:
                found = found.reshape(images, heads, windows, *sides).swapaxes(1, 2)
            chosen.append(found.reshape(images, windows, heads, *sides))
    assert len(chosen) == len(tokens), f"only {len(chosen)} of {tokens} among {[found.shape for found in maps]}"
    return chosen


def rows(grid: tuple[int, int], prefix: int) -> np.ndarray:
    """Where the tokens of a grid lie `(window, token, 2)`, row by row; prefix tokens nowhere."""
    y, x = np.meshgrid(*map(np.arange, grid), indexing="ij")
    patches = np.stack([y.ravel(), x.ravel()], axis=-1).astype(float)
    return np.concatenate([np.full((prefix, 2), np.nan), patches])[None]


def middles(grid: tuple[int, int], keys: tuple[int, int]) -> np.ndarray:
    """Keys in the middle of what they were pooled from `(window, key, 2)`, row by row [patches of a grid]."""
    axes = [(np.arange(count) + 0.5) * side / count - 0.5 for side, count in zip(grid, keys, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(1, -1, 2)


class Looks:
    """What the patches of an attention look at; tokens without a place (prefix, padding) are left out.

    Args:
        maps: `(image, window, head, query, key)`.
        places: rows and columns of the queries `(window or 1, token, 2)` [patches]; NaN for no place.
        keys: those of the keys, if they are other tokens.
    """

    def __init__(self, maps: np.ndarray, places: np.ndarray, keys: np.ndarray | None = None) -> None:
        self.places, asking = self._there(places, maps.shape[1])
        self.keys, there = self._there(places if keys is None else keys, maps.shape[1])
        asked = [maps[:, window][..., here, :] for window, here in enumerate(asking)]
        self.paid = [rows[..., here] for rows, here in zip(asked, there, strict=True)]
        self._elsewhere = [rows[..., ~here] for rows, here in zip(asked, there, strict=True)]

    @staticmethod
    def _there(places: np.ndarray, windows: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The places of the tokens of each window that have one, and which those are."""
        places = np.broadcast_to(places, (windows, *places.shape[1:]))
        there = [~np.isnan(lie[:, 0]) for lie in places]
        return [lie[here] for lie, here in zip(places, there, strict=True)], there

    def _far(self) -> list[np.ndarray]:
        """Distance from query to key `(query, key)` of each window."""
        return [cdist(lie, there) for lie, there in zip(self.places, self.keys, strict=True)]

    def _mean(self, values: Iterable[np.ndarray]) -> np.ndarray:
        """The mean over all queries, the last axis of each window's values."""
        return np.concatenate(list(values), axis=-1).mean(-1)

    def distance(self) -> np.ndarray:
        """Attention-weighted distance `(image, head)` (d'Ascoli et al. 2021, eq. 8)."""
        pairs = zip(self.paid, self._far(), strict=True)
        return self._mean((paid * far).sum(-1) / paid.sum(-1) for paid, far in pairs)

    def uniform(self) -> float:
        """The same of attention to all patches alike."""
        return float(self._mean(far.mean(-1) for far in self._far()))

    def elsewhere(self) -> np.ndarray:
        """Attention to what is no patch `(image, head)`."""
        return self._mean(rows.sum(-1) for rows in self._elsewhere)

    def entropy(self) -> np.ndarray:
        """Shannon entropy over patches `(image, head)` [nats]."""
        return self._mean(entr(paid / paid.sum(-1, keepdims=True)).sum(-1) for paid in self.paid)

    def offsets(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Mass at each offset from query to key `(image, head, row, column)`."""
        mass = np.zeros((*self.paid[0].shape[:2], len(rows), len(columns)))
        for paid, lie in zip(self.paid, self.places, strict=True):
            y, x = (lie[None] - lie[:, None]).round().astype(int).transpose(2, 0, 1)
            np.add.at(mass, (slice(None), slice(None), y - int(rows[0]), x - int(columns[0])), paid)
        return mass / sum(len(lie) for lie in self.places)

    def distance_of_mean(self) -> np.ndarray:
        """Distance between patches, weighted by all attention of the map averaged over images `(head,)`."""
        means = [paid.mean(0) for paid in self.paid]
        far = sum((mean * cdist(lie, lie)).sum((1, 2)) for mean, lie in zip(means, self.places, strict=True))
        return far / sum(mean.sum((1, 2)) for mean in means)

    def middle(self, grid: tuple[int, int]) -> np.ndarray:
        """What the patch in the middle of a window looks at `(image, head, row, column)`, windows without padding."""
        seen = []
        for paid, lie in zip(self.paid, self.places, strict=True):
            if len(lie) == grid[0] * grid[1]:
                order = np.lexsort((lie[:, 1], lie[:, 0]))
                seen.append(paid[..., order[grid[0] // 2 * grid[1] + grid[1] // 2], :][..., order])
        mean = np.mean(seen, axis=0)
        return mean.reshape(*mean.shape[:2], *grid)
