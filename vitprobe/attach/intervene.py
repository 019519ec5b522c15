"""Repeat a planned forward pass with something else in a place: a unit without its branch, attention with other maps.

No surgery and no copy of the model: the operation that closes a branch, or applies a map, is answered by ours.
"""

from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitprobe.attach.maps import MapSource, mha_arguments, sdpa_arguments, whole_maps
from vitprobe.attach.parts import AttentionSite, Unit
from vitprobe.attach.plan import Plan
from vitprobe.attach.trace import Event, Replay
from vitprobe.calling import replace_tensor, tensors_of

Removal = Literal["branch", "bypass"]
Edit = Callable[[AttentionSite, Tensor, tuple[Tensor, ...]], Tensor]


def removal(unit: Unit, plan: Plan) -> Removal | None:
    """How a unit can be taken out of a network.

    Args:
        unit: one of the plan's.
        plan: of the network.

    Returns:
        `"branch"` for a residual branch, whose addition then gives its stream alone; `"bypass"` for a unit without a
        skip connection that leaves the shape of the stream as it is, whose place the activation of the unit before
        takes; `None` for others (stems, changes of grid or width without a skip connection).
    """
    if unit.stream is not None:
        return "branch"
    before = plan.units[unit.index - 1]
    if unit.index > 0 and (before.layout, before.channels) == (unit.layout, unit.channels):
        return "bypass"
    return None


class Intervention(Replay):
    """Forward passes with units removed or attention maps edited.

    Args:
        model: the module that was traced.
        plan: what `plan` found.
        without: units to remove; `removal` says which can be.
        convolutions: units whose `convolutions` give back what they take, the rest of the branch staying as it is.
        sites: attention sites whose maps to edit.
        edit: called with a site, its maps `(image, window, head, query, key)` of the whole batch, and the site's
            parts of the same shape (GPSA's content and position maps); gives the maps to use.
    """

    awaited = "interventions"

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        without: Collection[Unit] = (),
        convolutions: Collection[Unit] = (),
        sites: Collection[AttentionSite] = (),
        edit: Edit | None = None,
    ) -> None:
        super().__init__(model)
        for unit in without:
            if removal(unit, plan) is None:
                raise ValueError(
                    f"{unit.name} ({unit.kind}) has no skip connection and changes the shape of the stream: "
                    "there is nothing that could stand in its place."
                )
        if sites and edit is None:
            raise ValueError("sites were given without an edit=: say what becomes of their maps.")
        self.edit = edit
        branches = [unit for unit in without if removal(unit, plan) == "branch"]
        self._branches: dict[Event, int] = {}
        for unit in branches:
            assert unit.stream is not None
            self._branches |= {unit.event: unit.stream, **dict(unit.skips)}
        bypassed = [unit for unit in without if removal(unit, plan) == "bypass"]
        self._bypassed = {unit.event: unit for unit in bypassed}
        self._before = {plan.units[unit.index - 1].event: unit.index for unit in bypassed}
        self._convolutions = {event for unit in convolutions for event in unit.convolutions}
        self._sites = {site.event: site for site in sites}
        self._parts = {event: site for site in sites for event in site.parts}
        self.planned = len(self._branches) + len(self._bypassed) + len(self._convolutions) + len(self._sites)

    def instead(self, event: Event, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The stream alone for a removed branch, what it takes for a convolution, the product with the edited maps."""
        if (stream := self._branches.get(event)) is not None:
            self.came += 1
            return _stream_alone(stream, func, args, kwargs)
        if event in self._convolutions:
            self.came += 1
            return tensors_of([*args, kwargs])[0].clone()
        if site := self._sites.get(event):
            self.came += 1
            return self._edited(site, func, args, kwargs)
        return NotImplemented

    def on_operation(
        self, event: Event, func: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Tensor | None:
        """Keep what an intervention later in the pass needs, and put what was kept in a bypassed unit's place."""
        return self._pass(event, tensors[0])

    def on_module(self, event: Event, name: str, args: Any, tensors: list[Tensor]) -> Tensor | None:
        """The same at a module's return."""
        return self._pass(event, tensors[0])

    def _pass(self, event: Event, x: Tensor) -> Tensor | None:
        replacement = None
        if unit := self._bypassed.get(event):
            self.came += 1
            replacement = x = self.kept.pop(unit.index)
        if (index := self._before.get(event)) is not None:
            self.kept[index] = x.clone()  # an activation function may work in place on the original
        if event in self._parts:
            self.kept[event] = x
        return replacement

    def _edited(self, site: AttentionSite, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        assert self.edit is not None
        edit = self.edit
        parts = tuple(self.kept.pop(event) for event in site.parts)

        def edited(maps: Tensor) -> Tensor:
            first, *others = (site.by_image(x.expand(maps.shape)) for x in (maps, *parts))
            sunk = maps[..., maps.shape[-1] - site.extra_keys :]
            changed = edit(site, first, tuple(others)).to(maps.dtype)
            changed = site.as_in_pass(changed, (*maps.shape[:-1], maps.shape[-1] - site.extra_keys))
            if site.extra_keys:  # what the sink takes, it keeps
                changed = changed * ((1 - sunk.sum(-1, keepdim=True)) / changed.sum(-1, keepdim=True))
            return torch.cat([changed, sunk], -1)

        return apply_maps(site.source, func, args, kwargs, edited)


def apply_maps(
    source: MapSource, func: Callable, args: tuple, kwargs: dict[str, Any], edit: Callable[[Tensor], Tensor]
) -> Any:
    """What an attention call would have returned had its maps been others.

    Args:
        source: what the traced pass found.
        func: the function called.
        args: its arguments.
        kwargs: its keyword arguments.
        edit: of the maps `(..., query, key)`.

    Returns:
        What the function returns, of its own type.
    """
    if source.kind == "product":
        operand = tensors_of([*args, kwargs])[source.operand]
        inverse = [source.order.index(axis) for axis in range(operand.ndim)]
        changed = edit(operand.permute(source.order)).permute(inverse)
        args, kwargs = replace_tensor((args, kwargs), operand, changed)
        return func(*args, **kwargs)
    maps = edit(whole_maps(source, func, args, kwargs))
    if source.kind == "sdpa":
        query, _, value, *_, grouped = sdpa_arguments(*args, **kwargs)
        if grouped:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        return maps.to(value.dtype) @ value
    return _mha_output(mha_arguments(*args, **kwargs), maps)


def _mha_output(call: dict[str, Any], maps: Tensor) -> tuple[Tensor, Tensor | None]:
    """The output of `F.multi_head_attention_forward` with other maps `(image, head, query, key)`."""
    value, heads = call["value"], call["num_heads"]
    width = call["embed_dim_to_check"]
    bias = call["in_proj_bias"]
    weight = call["v_proj_weight"] if call["use_separate_proj_weight"] else call["in_proj_weight"][2 * width :]
    value = F.linear(value, weight, None if bias is None else bias[2 * width :])
    if call["bias_v"] is not None:
        value = torch.cat([value, call["bias_v"].expand(1, value.shape[1], -1)])
    if call["add_zero_attn"]:
        value = torch.cat([value, value.new_zeros(1, *value.shape[1:])])
    value = value.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)  # (image, head, key, channel)
    output = (maps.to(value.dtype) @ value).permute(2, 0, 1, 3).flatten(2)
    output = F.linear(output, call["out_proj_weight"], call["out_proj_bias"])
    if not call["need_weights"]:
        return output, None
    return output, maps.mean(1) if call["average_attn_weights"] else maps


def _stream_alone(stream: int, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """What an addition returns, and leaves in its operands, with zeros in the place of what is not the stream."""
    rest = {name: value for name, value in kwargs.items() if name != "other"}
    pair = tensors_of([*args[:2], kwargs.get("other")])
    pair[1 - stream] = torch.zeros_like(pair[1 - stream])
    if stream == 1 and func in (Tensor.add_, Tensor.__iadd__):  # the sum goes into the branch
        return args[0].copy_(torch.add(*pair, **rest))
    # By the addition itself, which may scale the stream, change its dtype, or write into another tensor.
    return func(*pair, **rest)
