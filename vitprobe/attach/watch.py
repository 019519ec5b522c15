"""Repeat a planned forward pass and hand over what the plan names, as it happens."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitprobe.attach.layout import Activation
from vitprobe.attach.maps import compute_maps
from vitprobe.attach.plan import AttentionSite, Plan, Unit
from vitprobe.attach.trace import Clock, Event

# Numbers in a chunk on a CPU: 8 MiB of float32 stay in its last cache while every probe reads them, and are enough
# for the calls not to count.
CHUNK = 1 << 21


class Watch(Clock):
    """Hands over the activations of units and the attention maps of each forward pass made while it is `running()`.

    Args:
        model: the module that was traced.
        plan: what `plan` found.
        on_unit: called with a unit and its activation, in chunks of images; `None` to leave activations alone.
        on_whole_unit: the same with all images of the batch at once.
        on_attention: called with a site and its maps `(image, window, head, query, key)`, in chunks of images;
            `None` to leave attention alone.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        on_unit: Callable[[Unit, Activation], None] | None = None,
        on_whole_unit: Callable[[Unit, Activation], None] | None = None,
        on_attention: Callable[[AttentionSite, Tensor], None] | None = None,
    ) -> None:
        super().__init__(model)
        self.plan = plan
        self.on_unit = on_unit
        self.on_whole_unit = on_whole_unit
        self.on_attention = on_attention
        self._units: dict[Event, Unit] = {unit.event: unit for unit in plan.units} if on_unit or on_whole_unit else {}
        self._sites: dict[Event, AttentionSite] = {site.event: site for site in plan.attentions} if on_attention else {}

    def __call__(self, forward: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> Any:
        """Run one forward pass and hand over what it shows.

        Args:
            forward: calls the model on a batch.
            model: the module that was traced.
            batch: the batch.

        Returns:
            What the model returned.

        Raises:
            RuntimeError: if the pass ran other operations than the traced one.
        """
        self._seen = 0
        with self.running():
            output = forward(model, batch)
        expected = len(self._units) + len(self._sites)
        if self._seen != expected:
            raise RuntimeError(
                f"the forward pass changed between batches: {self._seen} of {expected} units "
                "and attention maps came by. The model decides by the data or the batch size what to run: give batches "
                "of one size, or a forward= that always runs the same."
            )
        return output

    def on_operation(
        self, event: Event, func: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        """Hand over, if this operation is in the plan."""
        if unit := self._units.get(event):
            self._show(unit, tensors[0])
        if site := self._sites.get(event):
            assert self.on_attention is not None
            self._seen += 1
            for maps in self._maps(site, func, args, kwargs, tensors[0].device):
                self.on_attention(site, maps)

    def on_module(self, event: Event, name: str, args: Any, tensors: list[Tensor]) -> None:
        """Hand over, if this module's return is in the plan."""
        if unit := self._units.get(event):
            self._show(unit, tensors[0])

    def _show(self, unit: Unit, x: Tensor) -> None:
        self._seen += 1
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
        entries = site.windows * (site.heads if len(site.source.shape) == 3 else 1)

        def chunk(numbers: int) -> int:
            return entries * chunk_size(numbers * entries, device)

        for maps in compute_maps(site.source, func, args, kwargs, chunk):
            yield maps.reshape(-1, site.windows, site.heads, *maps.shape[-2:])


def chunk_size(numbers: int, device: torch.device) -> int:
    """How many images, of so many numbers each, to look at together: what the cache of a CPU holds; else all."""
    return max(1, CHUNK // max(numbers, 1)) if device.type == "cpu" else 1 << 30
