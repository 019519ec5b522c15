"""The attention maps of a trace: between which patches of which windows they are, or why between none."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vitprobe.attach.layout import Layout, Raster, scattered
from vitprobe.attach.parts import AttentionSite
from vitprobe.attach.reading import Reading
from vitprobe.attach.trace import Event, Node
from vitprobe.attach.units import Found

# The last part of a module's path that is an attention layer, not its dropout or projection.
_ATTENTION = re.compile(r"(self_?|multi_?head_?)?att(n|ention)?\d*|mha|msa", re.IGNORECASE)


def find_sites(reading: Reading, units: Sequence[Found]) -> tuple[list[AttentionSite], list[str]]:
    """The attention maps between patches, and which others were left out and why.

    Args:
        reading: of the forward pass.
        units: of the network.
    """
    finder = _Finder(reading)
    return finder.sites(units), finder.skipped


@dataclass(frozen=True)
class _Place:
    """Where the tokens of an attention map lie; see `AttentionSite`."""

    heads: int
    grid: tuple[int, int]
    prefix: int
    windows: int
    positions: np.ndarray | None = None
    heads_first: bool = False
    extra_keys: int = 0
    keys: np.ndarray | None = None


class _Finder:
    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.trace = reading.trace
        self.skipped: list[str] = []

    def sites(self, units: Sequence[Found]) -> list[AttentionSite]:
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
            prefix = place.prefix
            if unit and place.windows == 1 and place.positions is not None:
                others = int(np.isnan(place.positions[..., 0]).sum())
                prefix = others if others == unit.layout.prefix else prefix  # anywhere, but padding is none
            sites.append(
                AttentionSite(
                    name=name,
                    kind=kind,
                    depth=depth,
                    heads=place.heads,
                    grid=place.grid,
                    prefix=prefix,
                    windows=place.windows,
                    event=node.event,
                    source=replace(node.source, sink=True) if place.extra_keys else node.source,
                    positions=place.positions,
                    keys=place.keys,
                    heads_first=place.heads_first,
                    extra_keys=place.extra_keys,
                    parts=self._parts(node),
                )
            )
        for found in units:
            products = [node for node in map(self.trace.nodes.__getitem__, found.nodes) if node.op == "attention"]
            if found.unit.kind == "msa" and products and all(node.source is None for node in products):
                self.skipped.append(f"{found.unit.name}: activations multiply each other, but no map's rows sum to one")
        unseen = self._unseen()
        for found in units:
            kernels = [node.module for n in sorted(found.nodes) if (node := self.trace.nodes[n]).op == "kernel"]
            if kernels and not any(f"{kernel}.".startswith(f"{name}.") for kernel in kernels for name in unseen):
                unseen.append(kernels[0])
        self.skipped += [
            f"{name}: no attention map was seen in it (linear attention, or a kernel that bypasses PyTorch?)"
            for name in dict.fromkeys(unseen)
        ]
        return sites

    def _unseen(self) -> list[str]:
        """Modules that by their name are attention, and have layers of tokens, but multiply no activations."""
        named = {call.name for call in self.trace.modules if _ATTENTION.fullmatch(call.name.rpartition(".")[2])}
        inside: dict[str, set[str]] = {name: set() for name in named}
        for index, node in enumerate(self.trace.nodes):
            for name in named:
                if f"{node.module}.".startswith(f"{name}.") and (node.op == "attention" or self.reading.is_map(index)):
                    inside[name].add(node.op)
        seen = {name for name, ops in inside.items() if "attention" in ops}
        return sorted(
            name
            for name, ops in inside.items()
            if "linear" in ops and name not in seen and not any(name.startswith(f"{other}.") for other in seen)
        )

    def _traced_place(self, node: Node) -> _Place | str | None:
        """What `_place` says, from where keys and queries lie; `None` if that was lost, or is no grid."""
        assert node.source is not None
        *leading, queries, keys = node.source.shape
        if node.keys is None or self.reading.prefix is not None:
            return None
        if not node.keys.size:
            return f"a map of {queries}x{keys} is over channels, not over tokens"
        nowhere = np.isnan(node.keys).all()
        if node.queries is not None and np.isnan(node.queries).all():
            if nowhere:
                return f"{queries} tokens attend to each other that lie nowhere in the image (object queries, latents)"
            return "prefix tokens attend to the patches, no patch does"
        if nowhere:
            return f"{queries} queries attend to {keys} keys that lie nowhere in the image (channels, latents)"
        extra = self._extra_keys(node)
        own = queries + extra == keys  # the same tokens ask and answer
        if node.queries is None and not own:
            return None
        try:
            places = np.broadcast_to(node.keys, (*leading, keys)).reshape(-1, keys)
            asking = places[:, :queries]
            if node.queries is not None:
                asking = np.broadcast_to(node.queries, (*leading, queries)).reshape(-1, queries)
        except ValueError:
            return None
        if not own:
            places = np.concatenate([asking, places], -1)
        elif np.allclose(asking, places[:, :queries], atol=0.5, equal_nan=True):
            places = places[:, :queries]
        else:
            return "queries and keys lie at different places"
        batch, tokens = self.reading.batch, places.shape[1]
        if len(places) % batch:
            return None
        apart = places.reshape(batch, -1, tokens)
        windows = len(np.unique(np.nan_to_num(apart[0], nan=-1e6), axis=0))
        heads, rest = divmod(len(places), batch * windows)
        if len(leading) > 1 and leading[0] % batch:
            return None
        if not self._images_first(node):
            return f"maps of shape {node.source.shape} have heads or windows before images"
        if not np.allclose(apart, apart[:1], atol=0.5, equal_nan=True):
            return f"the {tokens} tokens fill no grid: they lie elsewhere in each image"
        if rest:
            return None
        for heads_first in (False, True):
            axes = (batch, heads, windows, tokens) if heads_first else (batch, windows, heads, tokens)
            apart = places.reshape(axes)
            first = apart[0, 0] if heads_first else apart[0, :, 0]
            here = first[None, None] if heads_first else first[None, :, None]
            if np.array_equal(apart, np.broadcast_to(here, axes), equal_nan=True):
                place = _place_of(first[:, :queries], heads, heads_first)
                if place is None and scattered(first[:, :queries]):
                    return f"the {first[:, :queries].size} tokens fill no grid"
                if place is None or own:
                    return place and replace(place, extra_keys=extra)
                if any(scattered(window) for window in first[:, queries:]):
                    return f"{queries} queries attend to {keys} keys, which fill no grid"
                return self._among_others(place, first[:, :queries], first[:, queries:])
        return None

    def _among_others(self, place: _Place, queries: np.ndarray, keys: np.ndarray) -> _Place | None:
        """A place whose queries `(window, query)` attend to other tokens `(window, key)`."""
        raster = Raster.of(queries.ravel())
        if raster is None:
            return None
        positions = np.stack([raster.rows, raster.columns], -1).reshape(*queries.shape, 2)
        return replace(place, positions=positions, keys=raster.among(keys, self.reading.image))

    def _images_first(self, node: Node) -> bool:
        """Whether all maps of an image come before those of the next, as far as is known."""
        assert node.source is not None and node.images is not None
        *leading, _, keys = node.source.shape
        images = np.broadcast_to(node.images, (*leading, keys)).reshape(self.reading.batch, -1, keys)
        expected = np.arange(self.reading.batch)[:, None, None]
        return bool((np.isnan(images) | (images == expected)).all())

    def _extra_keys(self, node: Node) -> int:
        """How many keys after the tokens are at no place, where the keys before them are the queries."""
        assert node.source is not None and node.keys is not None
        extra = node.source.shape[-1] - node.source.shape[-2]
        if extra <= 0 or node.queries is None or not np.isnan(node.keys[..., -extra:]).all():
            return 0
        before, queries = node.keys[..., :-extra], node.queries
        if before.shape[-1] != queries.shape[-1]:
            return 0
        same = np.allclose(before, np.broadcast_to(queries, before.shape), atol=0.5, equal_nan=True)
        return extra if same else 0

    def _place(self, shape: tuple[int, ...], around: Layout | None) -> _Place | str:
        """Heads, grid, prefix tokens and windows of maps `(..., query, key)`, or why they are none between patches."""
        queries, keys = shape[-2:]
        if queries != keys:
            return f"{queries} queries attend to {keys} keys, which lie on different grids"
        layout = around or self.reading.infer((self.reading.batch, queries, 1))
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
        heads = shape[-3] if len(shape) >= 4 else leading // (self.reading.batch * windows)
        if leading != self.reading.batch * windows * heads:
            rows, columns = layout.grid
            return f"maps of shape {shape} are not those of {self.reading.batch} images of {rows}x{columns} patches"
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
            layout = None if last is None else self.reading.layout(n)
            if layout and layout.tokens > 1 and last == (layout.axes != "bchw"):
                return layout
            waiting += [parent for parent in nodes[n].parents if parent and parent not in waiting]
        return None


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
