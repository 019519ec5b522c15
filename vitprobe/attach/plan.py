"""From a trace to a plan: which operations of a forward pass are units, and which are attention maps."""

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from vitprobe.attach.layout import Layout, Raster, arranged, infer_layout
from vitprobe.attach.maps import MapSource
from vitprobe.attach.trace import Event, Node, Trace, Tracer
from vitprobe.calling import default_forward, first_images, images_of, logits_of, tensors_of, to_model

# The last part of a module's path that is an attention layer, not its dropout or projection.
_ATTENTION = re.compile(r"(self_?|multi_?head_?)?att(n|ention)?\d*|mha|msa", re.IGNORECASE)

Kind = Literal["stem", "msa", "conv", "mlp", "subsample", "module"]


@dataclass(frozen=True)
class Unit:
    """One step of the residual stream.

    Attributes:
        index: position in the network, from 0.
        name: path of the module it happens in; `#2` and so on for a module that is used again.
        kind: `stem` (the stream's beginning), `msa`, `conv`, `mlp`, `subsample` (the grid changes), or `module`
            (chosen by pattern).
        depth: 0 for the first unit, 1 for the last.
        layout: how its activation holds the image.
        channels: of its activation.
        event: when its activation comes to be.
        stream: for a residual branch, which operand of the addition (0 or 1) is the stream; else `None`.
        convolutions: when its convolutions with a spatial kernel run that keep the shape of what they take.
    """

    index: int
    name: str
    kind: Kind
    depth: float
    layout: Layout
    channels: int
    event: Event
    stream: int | None = None
    convolutions: tuple[Event, ...] = ()


@dataclass(frozen=True)
class AttentionSite:
    """One attention map of the network.

    Attributes:
        name: path of the module that applies it; `#2` and so on for further maps in that module.
        kind: kind of the residual unit it belongs to; `msa` if it belongs to none.
        depth: depth of that unit, whichever units `layers` chose; NaN if it belongs to none.
        heads: number of heads.
        grid: rows and columns of patches that attend to each other (the window's, for windowed attention).
        prefix: class, distillation and register tokens before them.
        windows: windows in an image; 1 for global attention.
        event: when it is applied.
        source: how to get the map.
        positions: row and column of every token `(window, token, 2)` on the layer's grid [patches], NaN for a token
            that is no patch (a window's padding), where windows are dilated, padded or reordered; `None` where the
            tokens of a window fill its grid row by row after the prefix.
        heads_first: whether heads come before windows among the axes of the maps.
        parts: when the two maps that it is a gated sum of come to be, content before position (GPSA); else none.
    """

    name: str
    kind: Kind
    depth: float
    heads: int
    grid: tuple[int, int]
    prefix: int
    windows: int
    event: Event
    source: MapSource
    positions: np.ndarray | None = field(default=None, compare=False)
    heads_first: bool = False
    parts: tuple[Event, ...] = ()

    def by_image(self, maps: Tensor) -> Tensor:
        """Maps of whole images as the pass has them, as `(image, window, head, query, key)`."""
        size = maps.shape[-2:]
        if self.heads_first:
            return maps.reshape(-1, self.heads, self.windows, *size).transpose(1, 2)
        return maps.reshape(-1, self.windows, self.heads, *size)

    def as_in_pass(self, maps: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `by_image`: maps of the shape that the pass has them in."""
        return (maps.transpose(1, 2) if self.heads_first else maps).reshape(shape)


@dataclass(frozen=True)
class Embedding:
    """Where the patches' embedding comes to be, before position codes and prefix tokens join it.

    Attributes:
        event: the return of the module that makes it.
        layout: how it holds the image.
        prefix: tokens that join it later.
    """

    event: Event
    layout: Layout
    prefix: int


@dataclass(frozen=True)
class Plan:
    """What a model shows for batches of one shape: its units, its attention maps, and what had to be left out."""

    units: tuple[Unit, ...]
    attentions: tuple[AttentionSite, ...]
    skipped: tuple[str, ...]
    image: tuple[int, int]
    embedding: Embedding | None = None


def plan(
    model: nn.Module,
    batch: Any,
    *,
    layers: str | Sequence[str] = "auto",
    prefix: int | None = None,
    forward: Any = default_forward,
) -> Plan:
    """Trace one forward pass on two images of a batch and find the model's units and attention maps.

    Args:
        model: the module, unwrapped, in evaluation mode.
        batch: what it is called on.
        layers: `"auto"` finds the units; glob patterns of module paths take those modules' outputs instead (`*` stays
            between two dots: `blocks.*` is the blocks and not what is in them).
        prefix: tokens before the patches, where the inference is wrong.
        forward: calls the model on a batch.

    Returns:
        The plan.
    """
    batch = first_images(to_model(batch, model), 2)
    images = images_of(batch)
    tracer = Tracer(model, [tensor for tensor in tensors_of(batch) if tensor.is_floating_point()], images)
    with tracer.running():
        logits = logits_of(forward(model, batch))
    trace = tracer.trace
    trace.output = tracer.node_of(logits)
    finder = _Finder(trace, len(images), (images.shape[-2], images.shape[-1]), prefix, _declared_prefix(model))
    steps = units = _number(finder.residual_units() or finder.chain_units())
    if layers != "auto":
        units = _number(finder.pattern_units([layers] if isinstance(layers, str) else list(layers)))
    attentions = finder.attentions(steps)
    finder.skipped += finder.unseen_streams(steps)
    return Plan(
        units=tuple(found.unit for found in units),
        attentions=tuple(attentions),
        skipped=tuple(finder.skipped),
        image=finder.image,
        embedding=finder.embedding(steps),
    )


@dataclass
class _Found:
    """A unit with the nodes of the trace that it consists of."""

    unit: Unit
    nodes: set[int]


def _declared_prefix(model: nn.Module) -> int | None:
    """What the model itself says of its prefix tokens (timm's attribute, or a transformers configuration)."""
    if isinstance(declared := getattr(model, "num_prefix_tokens", None), int):
        return declared
    registers = getattr(getattr(model, "config", None), "num_register_tokens", None)
    return registers + 1 if isinstance(registers, int) else None


def _number(units: list[_Found]) -> list[_Found]:
    """Give the units their index, their depth, and names that differ."""
    last = max(len(units) - 1, 1)
    uses: dict[str, int] = {}
    for index, found in enumerate(units):
        name = found.unit.name
        uses[name] = uses.get(name, 0) + 1
        if uses[name] > 1:
            name = f"{name}#{uses[name]}"
        found.unit = replace(found.unit, index=index, depth=index / last, name=name)
    return units


@dataclass(frozen=True)
class _Place:
    """Where the tokens of an attention map lie; see `AttentionSite`."""

    heads: int
    grid: tuple[int, int]
    prefix: int
    windows: int
    positions: np.ndarray | None = None
    heads_first: bool = False


class _Finder:
    def __init__(
        self, trace: Trace, batch: int, image: tuple[int, int], prefix: int | None, declared: int | None
    ) -> None:
        self.trace = trace
        self.batch = batch
        self.image = image
        self.prefix = prefix
        self.declared = declared
        self.skipped: list[str] = []
        self._layouts: dict[int, Layout | None] = {}

    def layout(self, node: int | None) -> Layout | None:
        if node is None:
            return None
        if node not in self._layouts:
            one = self.trace.nodes[node]
            layout = self._infer(one.shape, one.channels_last)
            if one.places is not None and self.prefix is None:
                layout = arranged(*one.places, batch=self.batch, image=self.image, layout=layout)
            self._layouts[node] = layout
        return self._layouts[node]

    def _infer(self, shape: tuple[int, ...], channels_last: bool | None = None) -> Layout | None:
        return infer_layout(
            shape,
            batch=self.batch,
            image=self.image,
            prefix=self.prefix,
            declared=self.declared,
            channels_last=channels_last,
        )

    def residual_units(self) -> list[_Found]:
        """Additions on the stream, and what changes it between them without a skip connection."""
        nodes, stream = self.trace.nodes, self.trace.stream()
        additions = [n for n in stream if nodes[n].operands and self._is_map(n)]
        units: list[_Found] = []
        for end in additions:
            start = nodes[end].dominator
            if not units:
                units += self._transition(0, start, "stem")
            else:
                units += self._transition(max(units[-1].nodes), start)
            grid = units[-1].unit.layout.grid if units else None
            between = set(self.trace.between(start, end))
            if start == 0:  # the first addition is one of the images themselves, in a stem of branches
                units.append(self._unit(end, "stem", between))
                continue
            unit = self._unit(end, self._kind(between, grid, end), between)
            # The skip connection is the operand that is fewer operations away.
            away = [self.trace.distance(start, operand) for operand in nodes[end].operands]
            unit.unit = replace(unit.unit, stream=int(away[1] < away[0]))
            units.append(unit)
        if units:
            last = max(units[-1].nodes)
            units += self._chain(last, [n for n in stream if n > last and self._is_map(n)])
        return units

    def embedding(self, units: list[_Found]) -> Embedding | None:
        """The first module's return as wide as the stream and on its first grid."""
        if not units:
            return None
        first = units[0].unit
        prefix = max(found.unit.layout.prefix for found in units)
        for call in self.trace.modules:
            layout = self.layout(call.node)
            same = layout and layout.grid == first.layout.grid and layout.channels(call.shape) == first.channels
            if layout and same and call.event.call:
                return Embedding(call.event, replace(layout, prefix=0) if layout.prefix else layout, prefix)
        return None

    def chain_units(self) -> list[_Found]:
        """A network without residual additions: each step from one mixing operation to the next."""
        return self._chain(0, [n for n in self.trace.stream() if n and self._is_map(n)], "stem")

    def _chain(self, start: int, stream: list[int], first: Kind | None = None) -> list[_Found]:
        """Steps along nodes of the stream from `start`, each from before one mixing operation to before the next."""
        pairs = list(pairwise([start, *stream]))
        ends = [before for before, after in pairs if self._mixes(self.trace.between(before, after))][1:] + stream[-1:]
        units: list[_Found] = []
        for end in ends:
            if end > start and not self._only_prefix(start, end):
                units += self._transition(start, end, None if units else first)
                start = end
        return units

    def _mixes(self, nodes: Iterable[int]) -> bool:
        return any(self.trace.nodes[n].op in ("attention", "conv", "linear") for n in nodes)

    def _only_prefix(self, start: int, end: int) -> bool:
        """Whether the patches at `end` are those at `start`, put together with other prefix tokens."""
        if not start or self.trace.nodes[end].event.function not in ("cat", "concat"):
            return False
        return any(
            self._grid(parent) == self._grid(end) and not self._mixes(self.trace.between(start, parent))
            for parent in self.trace.nodes[end].parents
            if parent >= start
        )

    def pattern_units(self, patterns: list[str]) -> list[_Found]:
        """The outputs of the modules whose path matches a pattern, in the order of the forward pass."""
        calls = self.trace.modules
        for pattern in patterns:
            if not any(_matches(call.name, pattern) for call in calls):
                names = ", ".join(dict.fromkeys(call.name for call in calls if call.name))
                raise ValueError(f"no module of the model matches layers={pattern!r}; it has {names}.")
        units = []
        for call in calls:
            if any(_matches(call.name, pattern) for pattern in patterns):
                if layout := self.layout(call.node):
                    channels = layout.channels(call.shape)
                    units.append(_Found(Unit(0, call.name, "module", 0.0, layout, channels, call.event), set()))
                else:
                    self.skipped.append(f"{call.name}: an output of shape {call.shape} is no image")
        return units

    def attentions(self, units: list[_Found]) -> list[AttentionSite]:
        """The attention maps between patches; the others go to `skipped` with the reason."""
        sites: list[AttentionSite] = []
        uses: Counter[str] = Counter()
        for index, node in enumerate(self.trace.nodes):
            if node.source is None:
                continue
            uses[node.module] += 1
            name = node.module if uses[node.module] == 1 else f"{node.module}#{uses[node.module]}"
            place = self._traced_place(node) or self._place(node.source.shape, self._around(node))
            if isinstance(place, str):
                self.skipped.append(f"{name}: {place}")
                continue
            unit = next((found.unit for found in units if index in found.nodes), None)
            kind, depth = (unit.kind, unit.depth) if unit else ("msa", math.nan)
            sites.append(
                AttentionSite(
                    name=name,
                    kind=kind,
                    depth=depth,
                    heads=place.heads,
                    grid=place.grid,
                    prefix=place.prefix,
                    windows=place.windows,
                    event=node.event,
                    source=node.source,
                    positions=place.positions,
                    heads_first=place.heads_first,
                    parts=self._parts(node),
                )
            )
        for found in units:
            if found.unit.kind == "msa" and all(self.trace.nodes[n].source is None for n in found.nodes):
                self.skipped.append(f"{found.unit.name}: activations multiply each other, but no map's rows sum to one")
        self.skipped += [
            f"{name}: no attention map was seen in it (a kernel that bypasses PyTorch?)" for name in self._unseen()
        ]
        return sites

    def _unseen(self) -> list[str]:
        """Modules that by their name are attention, and have layers of tokens, but showed no product of activations."""
        named = {call.name for call in self.trace.modules if _ATTENTION.fullmatch(call.name.rpartition(".")[2])}
        inside: dict[str, set[str]] = {name: set() for name in named}
        for index, node in enumerate(self.trace.nodes):
            for name in named:
                if f"{node.module}.".startswith(f"{name}.") and (node.source or self._is_map(index)):
                    inside[name].add("map" if node.source else node.op)
        return sorted(name for name, ops in inside.items() if "linear" in ops and "map" not in ops)

    def unseen_streams(self, units: list[_Found]) -> list[str]:
        """What no activation on the stream shows: streams that run side by side, or a single position."""
        nodes = self.trace.nodes
        if not units:
            if not any(self._is_map(n) for n in self.trace.stream() if n):
                return ["no activation that the logits follow from has more than one position"]
            return []
        covered = set().union(*(found.nodes for found in units))
        told = []
        stem = sum(nodes[n].op == "attention" for n in units[0].nodes) if units[0].unit.kind == "stem" else 0
        if stem > 1:
            told.append(f"{units[0].unit.name}: the stem holds {stem} attentions, whose streams run side by side")
        last = max(covered)
        outside = [n for n in range(last + 1, len(nodes)) if nodes[n].op in ("attention", "conv") and self._is_map(n)]
        if len(outside) > 1:
            told.append(
                f"{len(outside)} convolutions and attentions after {units[-1].unit.name} are in no unit: no activation "
                "there leads to all of the logits; name modules with layers="
            )
        return told

    def _traced_place(self, node: Node) -> _Place | str | None:
        """What `_place` says, from where keys and queries lie; `None` if that was lost, or is no grid."""
        assert node.source is not None
        *leading, queries, keys = node.source.shape
        if node.keys is None or self.prefix is not None:
            return None
        if not node.keys.size:
            return f"a map of {queries}x{keys} is over channels, not over tokens"
        if node.queries is not None and np.isnan(node.queries).all():
            return "prefix tokens attend to the patches, no patch does"
        if queries != keys:
            return None
        try:
            places = np.broadcast_to(node.keys, (*leading, keys)).reshape(-1, keys)
        except ValueError:
            return None
        if node.queries is not None:
            asking = np.broadcast_to(node.queries, (*leading, queries)).reshape(-1, queries)
            if not np.allclose(asking, places, atol=0.5, equal_nan=True):
                return "queries and keys lie at different places"
        windows = len(np.unique(np.nan_to_num(places, nan=-1e6), axis=0))
        heads, rest = divmod(len(places), self.batch * windows)
        batch_first = len(leading) == 1 or leading[0] in (self.batch, self.batch * windows)
        if rest or not batch_first:
            return None
        for heads_first in (False, True):
            axes = (self.batch, heads, windows, keys) if heads_first else (self.batch, windows, heads, keys)
            apart = places.reshape(axes)
            first = apart[0, 0] if heads_first else apart[0, :, 0]
            here = first[None, None] if heads_first else first[None, :, None]
            if np.array_equal(apart, np.broadcast_to(here, axes), equal_nan=True):
                return _place_of(first, heads, heads_first)
        return None

    def _place(self, shape: tuple[int, ...], around: Layout | None) -> _Place | str:
        """Heads, grid, prefix tokens and windows of maps `(..., query, key)`, or why they are none between patches."""
        queries, keys = shape[-2:]
        if queries != keys:
            return f"{queries} queries attend to {keys} keys, which lie on different grids"
        layout = around or self._infer((self.batch, queries, 1))
        if layout is None:
            return f"{queries} tokens are no grid"
        grid, prefix, windows = layout.grid, layout.prefix, 1
        if queries != layout.tokens:
            side = math.isqrt(queries)
            windows = math.prod(-(-length // side) for length in layout.grid)  # those at the border may be padded
            if side * side != queries or windows == 1:
                return f"a map of {queries}x{keys} is not over the {layout.tokens} tokens but, it seems, over channels"
            grid, prefix = (side, side), 0
        # Axes before the head, or (batch x head) on one axis, have the batch first.
        leading = math.prod(shape[:-2])
        heads = shape[-3] if len(shape) >= 4 else leading // (self.batch * windows)
        if leading != self.batch * windows * heads:
            rows, columns = layout.grid
            return f"maps of shape {shape} are not those of {self.batch} images of {rows}x{columns} patches"
        return _Place(heads, grid, prefix, windows)

    def _parts(self, attention: Node) -> tuple[Event, ...]:
        """The two softmaxes whose gated sum a map is, what depends on the images first."""
        source, nodes = attention.source, self.trace.nodes
        assert source is not None
        shape = source.shape[-2:]
        if source.kind != "product":
            return ()
        found: list[Event] = []
        waiting = [parent for parent in attention.parents if nodes[parent].shape[-2:] == shape]
        for n in waiting:  # grows
            if nodes[n].event.function == "softmax":
                found.append(nodes[n].event)
            else:
                same = [parent for parent in nodes[n].parents if nodes[parent].shape[-2:] == shape]
                waiting += [parent for parent in same if parent not in waiting]
        # A position map is the same for all images: no activation, but made in the same module.
        fixed = [
            event
            for event, module, size in self.trace.constant_maps
            if size[-2:] == shape and module == attention.module
        ]
        combined = len(found) == 1 and len(waiting) > 1
        parts = [*found, *(fixed if combined else [])]
        return tuple(parts) if len(parts) == 2 else ()

    def _around(self, attention: Node) -> Layout | None:
        """The layout of the nearest activation before an attention, by its shape and the operations around it."""
        nodes = self.trace.nodes
        waiting = list(attention.parents)
        for n in waiting:  # grows: breadth first
            last = nodes[n].channels_last
            layout = None if last is None else self.layout(n)
            if layout and layout.tokens > 1 and last == (layout.axes != "bchw"):
                return layout
            waiting += [parent for parent in nodes[n].parents if parent and parent not in waiting]
        return None

    def _transition(self, start: int, end: int, kind: Kind | None = None) -> list[_Found]:
        """The unit between two nodes of the stream, if anything but norms and activations happens there."""
        layout = self.layout(end)
        if layout is None or end == start:
            return []
        nodes = set(self.trace.between(start, end))
        if kind is None:
            mixes = self._mixes(nodes)
            moves = layout.grid != self._grid(start)
            if not mixes and not moves:
                return []
            kind = self._kind(nodes, self._grid(start), end)
        return [self._unit(end, kind, nodes | {end})]

    def _kind(self, between: set[int], grid: tuple[int, int] | None, end: int) -> Kind:
        if grid is not None and self._grid(end) != grid:
            return "subsample"
        ops = {self.trace.nodes[n].op for n in between}
        if "attention" in ops:
            return "msa"
        return "conv" if ops & {"conv", "pool"} else "mlp"

    def _unit(self, end: int, kind: Kind, nodes: set[int]) -> _Found:
        node = self.trace.nodes[end]
        layout = self.layout(end)
        assert layout is not None
        convolutions = tuple(
            one.event
            for one in (self.trace.nodes[n] for n in sorted(nodes))
            if one.op == "conv" and one.shape == self.trace.nodes[one.parents[0]].shape
        )
        channels = layout.channels(node.shape)
        return _Found(Unit(0, node.module, kind, 0.0, layout, channels, node.event, convolutions=convolutions), nodes)

    def _grid(self, node: int) -> tuple[int, int] | None:
        layout = self.layout(node)
        return layout.grid if layout else None

    def _is_map(self, node: int) -> bool:
        """Whether an activation has more than one position."""
        layout = self.layout(node)
        return layout is not None and math.prod(layout.grid) > 1


def _place_of(places: np.ndarray, heads: int, heads_first: bool) -> _Place | None:
    """Heads, grid, prefix, windows and positions of windows whose tokens lie at `places` `(window, token)`."""
    windows, tokens = places.shape
    raster = Raster.of(places.ravel())
    if raster is None:
        return None
    positions = np.stack([raster.rows, raster.columns], -1).reshape(windows, tokens, 2)
    present = ~np.isnan(positions[..., 0])
    full = positions[int(present.sum(1).argmax())]  # a window without padding, if there is one
    rows, columns = (np.unique(axis[~np.isnan(axis)]) for axis in (full[:, 0], full[:, 1]))
    grid, prefix = (len(rows), len(columns)), 0
    if windows == 1:
        grid, prefix = raster.grid, int(np.argmax(present[0]))
    inside = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1).reshape(-1, 2)
    plain = present[:, prefix:].all() and tokens == prefix + len(inside)
    # Windows of a rolled grid reach around its edge; what is beyond is masked, and inside nothing has changed.
    from_first = (positions[:, prefix:] - positions[:, prefix : prefix + 1]) % raster.grid
    if plain and bool((from_first == inside).all()):
        return _Place(heads, grid, prefix, windows, None, heads_first)
    return _Place(heads, grid, prefix, windows, positions, heads_first)


def _matches(name: str, pattern: str) -> bool:
    """Whether a module path matches a glob pattern, part by part."""
    parts, globs = name.split("."), pattern.split(".")
    return len(parts) == len(globs) and all(map(fnmatch.fnmatchcase, parts, globs))
