"""The units of a trace: the steps of its residual stream, or of its chain of layers."""

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from vitprobe.attach.parts import Embedding, Kind, Unit
from vitprobe.attach.reading import Reading
from vitprobe.attach.trace import Event, Node


@dataclass
class Found:
    """A unit with the nodes of the trace that it consists of."""

    unit: Unit
    nodes: set[int]


def find_units(reading: Reading) -> list[Found]:
    """The units of a network, numbered: its residual branches, and what changes the stream between them.

    Args:
        reading: of its forward pass.
    """
    finder = _Finder(reading)
    return _number(finder.residual_units() or finder.chain_units())


def find_modules(reading: Reading, patterns: Sequence[str]) -> tuple[list[Found], list[str]]:
    """The outputs of the modules whose path matches a pattern as units, and which had to be left out and why.

    Args:
        reading: of the forward pass.
        patterns: glob patterns of module paths; `*` stays between two dots.
    """
    calls = reading.trace.modules
    for pattern in patterns:
        if not any(_matches(call.name, pattern) for call in calls):
            names = ", ".join(dict.fromkeys(call.name for call in calls if call.name))
            raise ValueError(f"no module of the model matches layers={pattern!r}; it has {names}.")
    units: list[Found] = []
    skipped: list[str] = []
    for call in calls:
        if any(_matches(call.name, pattern) for pattern in patterns):
            if layout := reading.layout(call.node):
                channels = layout.channels(call.shape)
                units.append(Found(Unit(0, call.name, "module", 0.0, layout, channels, call.event), set()))
            else:
                skipped.append(f"{call.name}: an output of shape {call.shape} is no image")
    return _number(units), skipped


def find_embedding(reading: Reading, units: Sequence[Found]) -> Embedding | None:
    """The patches' embedding: the first module's return as wide as the stream and on its first grid.

    Args:
        reading: of the forward pass.
        units: of the network.
    """
    if not units:
        return None
    first = units[0].unit
    layouts = [found.unit.layout for found in units if found.unit.layout.grid == first.layout.grid]
    prefix = max(found.unit.layout.prefix for found in units)
    orders = {layout.tokens: layout.order for layout in layouts if layout.order is not None and layout.axes == "bnc"}
    for call in reading.trace.modules:
        layout = reading.layout(call.node)
        same = layout and layout.grid == first.layout.grid and layout.channels(call.shape) == first.channels
        if layout and same and call.event.call:
            return Embedding(call.event, replace(layout, prefix=0) if layout.prefix else layout, prefix, orders)
    return None


def unseen_streams(reading: Reading, units: Sequence[Found]) -> list[str]:
    """What no unit shows, in words: streams that run side by side, or a single position.

    Args:
        reading: of the forward pass.
        units: of the network.
    """
    nodes = reading.trace.nodes
    told = _scattered(reading)
    if not units:
        if not told and not any(reading.is_map(n) for n in reading.trace.stream() if n):
            told.append("no activation that the logits follow from has more than one position")
        return told
    for found in units:
        if (count := sum(nodes[n].source is not None and not _over_channels(nodes[n]) for n in found.nodes)) > 1:
            told.append(
                f"{found.unit.name}: one unit with {count} attentions, since something leads around all of them"
            )
        elif several := _inside(reading, found):
            told.append(
                f"{found.unit.name}: one unit with {several} inside, since something leads around them; name modules "
                "with layers="
            )
    covered = set().union(*(found.nodes for found in units))
    last = max(covered)
    outside = [n for n in range(last + 1, len(nodes)) if nodes[n].op in ("attention", "conv") and reading.is_map(n)]
    if outside:
        told.append(
            f"{len(outside)} convolutions and attentions after {units[-1].unit.name} are in no unit: no activation "
            "there leads to all of the logits; name modules with layers="
        )
    return told


def _inside(reading: Reading, found: Found) -> str:
    """Several residual branches inside a unit, or convolutions in a row that something leads around, in words."""
    nodes = reading.trace.nodes
    ends = {found.unit.event, *(event for event, _ in found.unit.skips)}
    branches = 0
    for n in found.nodes:
        start = nodes[n].dominator
        if start in nodes[n].operands and nodes[n].event not in ends and reading.is_map(start) and reading.is_map(n):
            branches += reading.mixes(reading.trace.between(start, n))
    if branches > 1:
        return f"{branches} residual branches"
    if found.unit.stream is not None or found.unit.kind == "stem":
        return ""
    stream = set(reading.trace.stream())
    row: dict[int, int] = {}
    for n in sorted(found.nodes):
        here = nodes[n].op == "conv" and n not in stream and reading.is_map(n)
        row[n] = max((row.get(parent, 0) for parent in nodes[n].parents), default=0) + here
    longest = max(row.values(), default=0)
    return f"{longest} convolutions in a row" if longest > 1 else ""


def _over_channels(node: Node) -> bool:
    return node.keys is not None and not node.keys.size


def _scattered(reading: Reading) -> list[str]:
    """Additions on the stream that are no units because their tokens are no image, by the reason."""
    names: dict[str, list[str]] = {}
    for n in reading.trace.stream():
        if reading.trace.nodes[n].operands and (reason := reading.why_no_image(n)):
            names.setdefault(reason, []).append(reading.trace.nodes[n].module)
    return [f"{first}{f' and {len(rest)} more' if rest else ''}: {reason}" for reason, (first, *rest) in names.items()]


def _number(units: list[Found]) -> list[Found]:
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


class _Finder:
    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.trace = reading.trace

    def residual_units(self) -> list[Found]:
        """Additions on the stream, and what changes it between them without a skip connection."""
        nodes, stream = self.trace.nodes, self.trace.stream()
        additions = [n for n in stream if nodes[n].operands and self.reading.is_map(n)]
        units: list[Found] = []
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
            stream_of, skips = self._skips(start, end)
            unit.unit = replace(unit.unit, stream=stream_of, skips=skips)
            units.append(unit)
        if units:
            last = max(units[-1].nodes)
            # What is pooled after it may look like tokens by its shape alone.
            grid = units[-1].unit.layout.grid
            known = [n for n in stream if n > last and (nodes[n].places is not None or self.reading.grid(n) == grid)]
            units += self._tail(last, [n for n in known if self.reading.is_map(n)])
        return units

    def _skips(self, start: int, end: int) -> tuple[int, tuple[tuple[Event, int], ...]]:
        """Which operand of the addition that closes a branch is the stream, and of those that it passes before."""
        nodes, passed = self.trace.nodes, []
        while end != start and len(nodes[end].operands) == 2:
            # The skip connection is the operand that is fewer operations away.
            away = [self.trace.distance(start, operand) for operand in nodes[end].operands]
            passed.append((nodes[end].event, int(away[1] < away[0])))
            end = nodes[end].operands[passed[-1][1]]
        return passed[0][1], tuple(passed[1:])

    def chain_units(self) -> list[Found]:
        """A network without residual additions: each step from one mixing operation to the next."""
        return self._chain(0, [n for n in self.trace.stream() if n and self.reading.is_map(n)], "stem")

    def _chain(self, start: int, stream: list[int], first: Kind | None = None) -> list[Found]:
        """Steps along nodes of the stream from `start`, each from before one mixing operation to before the next."""
        pairs = list(pairwise([start, *stream]))
        ends = [before for before, after in pairs if self.reading.mixes(self.trace.between(before, after))][
            1:
        ] + stream[-1:]
        units: list[Found] = []
        for end in ends:
            if end > start and not self._only_prefix(start, end):
                units += self._transition(start, end, None if units else first)
                start = end
        return units

    def _tail(self, start: int, stream: list[int]) -> list[Found]:
        """Steps without skip connections behind the last one: a change of grid, attention, or what is between."""
        pairs = list(pairwise([start, *stream]))
        attends = [
            any(self.trace.nodes[n].op in ("attention", "kernel") for n in self.trace.between(before, after))
            for before, after in pairs
        ]
        ends = [
            before
            for (before, after), here, last in zip(pairs, attends, [False, *attends], strict=False)
            if here or last or self.reading.grid(before) != self.reading.grid(after)
        ]
        units: list[Found] = []
        for end in [*ends, *stream[-1:]]:
            if end > start and not self._only_prefix(start, end):
                units += self._transition(start, end)
                start = end
        return units

    def _only_prefix(self, start: int, end: int) -> bool:
        """Whether the patches at `end` are those at `start`, put together with other prefix tokens."""
        nodes = self.trace.nodes
        while end > start:
            node = nodes[end]
            parents = list(node.parents)
            if node.event.function in ("cat", "concat"):  # of tokens; of channels, it is more than the patches were
                width = self._width(end)
                parents = [parent for parent in parents if width is not None and self._width(parent) == width]
            elif len(parents) > 1:
                return False
            if node.op != "other" or not parents:
                return False
            end = max(parents, key=lambda parent: math.prod(nodes[parent].shape))
        return end == start

    def _width(self, node: int) -> int | None:
        layout = self.reading.layout(node)
        return None if layout is None else layout.channels(self.trace.nodes[node].shape)

    def _transition(self, start: int, end: int, kind: Kind | None = None) -> list[Found]:
        """The unit between two nodes of the stream, if anything but norms and activations happens there."""
        layout = self.reading.layout(end)
        if layout is None or end == start:
            return []
        nodes = set(self.trace.between(start, end))
        if kind is None:
            mixes = self.reading.mixes(nodes)
            moves = layout.grid != self.reading.grid(start)
            if not mixes and not moves:
                return []
            kind = self._kind(nodes, self.reading.grid(start), end)
        return [self._unit(end, kind, nodes | {end})]

    def _kind(self, between: set[int], grid: tuple[int, int] | None, end: int) -> Kind:
        if grid is not None and self.reading.grid(end) != grid:
            return "subsample"
        ops = {self.trace.nodes[n].op for n in between}
        if ops & {"attention", "kernel"}:
            return "msa"
        return "conv" if ops & {"conv", "pool", "scan"} else "mlp"

    def _unit(self, end: int, kind: Kind, nodes: set[int]) -> Found:
        node = self.trace.nodes[end]
        layout = self.reading.layout(end)
        assert layout is not None
        convolutions = tuple(
            one.event
            for one in (self.trace.nodes[n] for n in sorted(nodes))
            if one.op == "conv" and one.shape == self.trace.nodes[one.parents[0]].shape
        )
        channels = layout.channels(node.shape)
        return Found(Unit(0, node.module, kind, 0.0, layout, channels, node.event, convolutions=convolutions), nodes)


def _matches(name: str, pattern: str) -> bool:
    """Whether a module path matches a glob pattern, part by part."""
    parts, globs = name.split("."), pattern.split(".")
    return len(parts) == len(globs) and all(map(fnmatch.fnmatchcase, parts, globs))
