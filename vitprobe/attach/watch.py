"""Repeat a planned forward pass and hand over what the plan names, as it happens."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitprobe.attach.layout import Activation
from vitprobe.attach.maps import compute_maps
from vitprobe.attach.parts import AttentionSite, Unit
from vitprobe.attach.plan import Plan
from vitprobe.attach.trace import Event, Replay

Inputs = Literal["layer", "patch embedding"]
Gated = tuple[Tensor, Tensor, Tensor]

# Numbers in a chunk on a CPU: 8 MiB of float32 stay in its last cache while every probe reads them, and are enough
# for the calls not to count.
CHUNK = 1 << 21


class Watch(Replay):
    """Hands over the activations of units and the attention maps of each forward pass made while it is `running()`.

    Args:
        model: the module that was traced.
        plan: what `plan` found.
        on_unit: called with a unit and its activation, in chunks of images; `None` to leave activations alone.
        on_whole_unit: the same with all images of the batch at once.
        on_attention: called with a site and its maps `(image, window, head, query, key)`, in chunks of images;
            `None` to leave attention alone.
        on_gated: called with a site whose maps are gated sums (GPSA), and its maps with their content and position
            parts, all `(image, window, head, query, key)`, in chunks of images; `None` to leave them alone.
        inputs: what attention sees: its layer's own input, or the patch embedding in every layer. With the latter,
            the outputs of the pass are not those of the model.

    Raises:
        ValueError: if attention cannot be given the patch embedding.
    """

    awaited = "units and attention maps"

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        on_unit: Callable[[Unit, Activation], None] | None = None,
        on_whole_unit: Callable[[Unit, Activation], None] | None = None,
        on_attention: Callable[[AttentionSite, Tensor], None] | None = None,
        on_gated: Callable[[AttentionSite, Gated], None] | None = None,
        inputs: Inputs = "layer",
    ) -> None:
        super().__init__(model)
        self.plan = plan
        self.on_unit = on_unit
        self.on_whole_unit = on_whole_unit
        self.on_attention = on_attention
        self.on_gated = on_gated
        self._units: dict[Event, Unit] = {unit.event: unit for unit in plan.units} if on_unit or on_whole_unit else {}
        gated = [site for site in plan.attentions if site.parts] if on_gated else []
        self._sites = {site.event: site for site in (plan.attentions if on_attention else gated)}
        self._parts = {event for site in gated for event in site.parts}
        self.planned = len(self._units) + len(self._sites)
        self._embedding = plan.embedding if inputs == "patch embedding" else None
        self._calls = {site.event.call: site.name for site in plan.attentions} if self._embedding else {}
        if inputs == "patch embedding" and plan.embedding is None:
            raise ValueError(
                "inputs='patch embedding': no module of the model returns the patches' embedding, as wide as the "
                "stream; use inputs='layer'."
            )

    def on_operation(
        self, event: Event, func: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        """Hand over, if this operation is in the plan."""
        if unit := self._units.get(event):
            self._show(unit, tensors[0])
        if event in self._parts:
            self.kept[event] = tensors[0]
        if site := self._sites.get(event):
            self.came += 1
            parts = [_by_image(self.kept.pop(part), site) for part in site.parts if part in self.kept]
            start = 0
            for maps in self._maps(site, func, args, kwargs, tensors[0].device):
                if self.on_attention is not None:
                    self.on_attention(site, maps)
                if parts and self.on_gated is not None:
                    here = slice(start, start + len(maps))
                    content, position = (part if len(part) == 1 else part[here] for part in parts)
                    self.on_gated(site, (maps, content.expand_as(maps), position.expand_as(maps)))
                start += len(maps)

    def on_module(self, event: Event, name: str, args: Any, tensors: list[Tensor]) -> None:
        """Hand over, if this module's return is in the plan."""
        if unit := self._units.get(event):
            self._show(unit, tensors[0])
        if self._embedding and event == self._embedding.event:
            x = self._embedding.layout.split(self._embedding.layout.batch_first(tensors[0])).patches
            self.kept[event] = x.flatten(1, 2)

    def inputs_of(self, call: int, args: tuple) -> tuple:
        """The patch embedding instead of the tokens that an attention module is called with."""
        if call not in self._calls:
            return args
        assert self._embedding is not None
        patches = self.kept.get(self._embedding.event)
        if patches is None:
            raise ValueError(
                f"inputs='patch embedding': {self._calls[call]} is called before the patches are embedded; use "
                "inputs='layer'."
            )
        count, prefix = patches.shape[1], self._embedding.prefix
        given = [x for x in args if isinstance(x, Tensor)]
        tokens = [x for x in given if x.ndim == 3 and x.shape[1] - count in (0, prefix)]
        if not tokens or any(x.shape != (len(patches), tokens[0].shape[1], patches.shape[2]) for x in tokens):
            raise ValueError(
                f"inputs='patch embedding': {self._calls[call]} is called with {[tuple(x.shape) for x in given]} and "
                f"not with tokens of the embedding's shape {tuple(patches.shape)}; use inputs='layer'."
            )
        # Prefix tokens stay what they are: rows are normalised over patches alone.
        total = tokens[0].shape[1]
        order = torch.tensor(self._embedding.orders.get(total, range(total - count, total)), device=patches.device)
        return tuple(x.index_copy(1, order, patches.to(x.dtype)) if any(x is t for t in tokens) else x for x in args)

    def _show(self, unit: Unit, x: Tensor) -> None:
        self.came += 1
        x = unit.layout.batch_first(x)
        if self.on_unit is not None:
            for part in x.split(chunk_size(x[0].numel(), x.device)):
                self.on_unit(unit, unit.layout.split(part))
        if self.on_whole_unit is not None:
            self.on_whole_unit(unit, unit.layout.split(x))

    def _maps(
        self, site: AttentionSite, func: Callable, args: tuple, kwargs: dict[str, Any], device: torch.device
    ) -> Iterator[Tensor]:
        """Chunks of whole images, `(image, window, head, query, key)`."""
        on_first_axis = site.heads if site.heads_first else site.windows  # the axes before the last three are one
        entries = on_first_axis * (
            (site.windows if site.heads_first else site.heads) if len(site.source.shape) == 3 else 1
        )

        def chunk(numbers: int) -> int:
            return entries * chunk_size(numbers * entries, device)

        for maps in compute_maps(site.source, func, args, kwargs, chunk):
            yield site.by_image(maps)


def _by_image(part: Tensor, site: AttentionSite) -> Tensor:
    """A part `(image or 1, window, head or 1, query, key)`: it may be the same for all images or all heads."""
    heads = part.shape[-3] if part.shape[-3] in (1, site.heads) else site.heads  # (batch x head) on one axis
    return part.reshape(-1, site.windows, heads, *part.shape[-2:])


def chunk_size(numbers: int, device: torch.device) -> int:
    """How many images, of so many numbers each, to look at together: what the cache of a CPU holds; else all."""
    return max(1, CHUNK // max(numbers, 1)) if device.type == "cpu" else 1 << 30
