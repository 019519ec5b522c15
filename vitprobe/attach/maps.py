"""Attention maps: the non-negative, row-stochastic operand that multiplies the values.

Not the output of a softmax: a hand-written map has none, and GPSA has two that are both halves of its map.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitprobe.calling import tensors_of

MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm, Tensor.bmm}


@dataclass(frozen=True)
class MapSource:
    """How to get the map out of a call.

    Attributes:
        kind: the call: fused attention, PyTorch's own multi-head function, or a product with the map as `operand`.
        operand: index of the map among the call's tensors (products only).
        order: axes of the operand that put (..., query, key) last (products only).
        shape: of the map in the traced pass, `(..., query, key)`, or `(..., head, query, key)`.
        sink: whether rows may sum to less than one, because keys that give nothing were cut off, or a mask leaves a
            query none.
    """

    kind: Literal["sdpa", "mha", "product"]
    operand: int
    order: tuple[int, ...]
    shape: tuple[int, ...]
    sink: bool = False


def recognise(
    func: Callable, args: tuple, kwargs: dict[str, Any], cut: Callable[[Tensor], bool] = lambda x: False
) -> MapSource | None:
    """The map source in a call, or `None` if the call applies no attention map.

    Args:
        func: the function called.
        args: its arguments.
        kwargs: its keyword arguments.
        cut: says whether a tensor is what was left of a softmax after columns were cut off.
    """
    if func is F.scaled_dot_product_attention:
        query, key, _, mask, *_ = sdpa_arguments(*args, **kwargs)
        return MapSource("sdpa", 0, (), (*query.shape[:-1], key.shape[-2]), mask is not None and _blinds(mask))
    if func is F.multi_head_attention_forward:
        call = mha_arguments(*args, **kwargs)
        query, heads = call["query"], call["num_heads"]
        if query.ndim != 3:
            return None
        keys = call["key"].shape[0] + (call["bias_k"] is not None) + call["add_zero_attn"]
        return MapSource("mha", 0, (), (query.shape[1], heads, query.shape[0], keys))
    if func in MATMUL:
        left, right = (args[1], args[0]) if func is Tensor.__rmatmul__ else tensors_of([*args, kwargs])[:2]
        if left.ndim >= 3 and right.ndim >= 3:
            axes = list(range(left.ndim))
            if _stochastic(left, -1, sink=cut(left)):
                operand = int(func is Tensor.__rmatmul__)
                return MapSource("product", operand, tuple(axes), tuple(left.shape), cut(left))
            if _stochastic(right, -2):
                order = (*axes[:-2], axes[-1], axes[-2])
                shape = tuple(right.shape[i] for i in order)
                return MapSource("product", int(func is not Tensor.__rmatmul__), order, shape)
    if func is torch.einsum and isinstance(args[0], str):
        return _recognise_einsum(args[0], tensors_of(list(args[1:])))
    return None


def _blinds(mask: Tensor) -> bool:
    """Whether a mask leaves a query no key at all."""
    hidden = ~mask if mask.dtype == torch.bool else mask.isneginf()
    return bool(hidden.all(-1).any())


def einsum_letters(equation: str, operands: list[Tensor]) -> tuple[list[str], str]:
    """A letter for every axis of the operands and of the output of an einsum; none for operands without a map.

    Args:
        equation: as `torch.einsum` takes it.
        operands: its tensors.
    """
    left, _, output = equation.replace(" ", "").partition("->")
    letters = left.split(",")
    if len(letters) != len(operands) or not output:
        return [], ""
    # An ellipsis stands for the axes without a letter; digits cannot clash with letters.
    dots = [x.ndim - len(mine.replace("...", "")) for mine, x in zip(letters, operands, strict=True)]
    letters = [mine.replace("...", "0123456789"[10 - n :]) for mine, n in zip(letters, dots, strict=True)]
    return letters, output.replace("...", "0123456789"[10 - max(dots) :])


def _recognise_einsum(equation: str, operands: list[Tensor]) -> MapSource | None:
    letters, output = einsum_letters(equation, operands)
    if len(letters) != 2:
        return None
    for i, (mine, other) in enumerate((letters, letters[::-1])):
        keys = [a for a in mine if a in other and a not in output]
        queries = [a for a in mine if a not in other and a in output]
        if len(keys) == 1 and len(queries) == 1 and len(mine) >= 3 and _stochastic(operands[i], mine.index(keys[0])):
            rest = [a for a in mine if a not in (keys[0], queries[0])]
            order = tuple(mine.index(a) for a in (*rest, queries[0], keys[0]))
            shape = tuple(operands[i].shape[a] for a in order)
            return MapSource("product", i, order, shape)
    return None


def _stochastic(x: Tensor, axis: int, *, sink: bool = False) -> bool:
    """Whether `x` is non-negative with sums of one (of at most one, with a sink) along `axis`, more than a constant."""
    if not x.is_floating_point() or x.shape[axis] < 2:
        return False
    # Half precision sums a few hundred rounded weights.
    halves = (torch.float16, torch.bfloat16)
    tolerance = 2e-2 if x.dtype in halves or torch.is_autocast_enabled(x.device.type) else 1e-4
    x = x.detach().float()
    beyond = x.sum(axis) - 1
    return bool((x >= 0).all()) and bool(((beyond if sink else beyond.abs()) <= tolerance).all())


def compute_maps(
    source: MapSource, func: Callable, args: tuple, kwargs: dict[str, Any], chunk: Callable[[int], int]
) -> Iterator[Tensor]:
    """The maps of one call, in chunks along the leading axis: `(chunk, head, query, key)` or `(chunk, query, key)`.

    Recomputed from the call's own arguments where the call does not show them; never more than a chunk at a time.

    Args:
        source: what the traced pass found.
        func: the function called.
        args: its arguments.
        kwargs: its keyword arguments.
        chunk: for the numbers in one leading entry's maps, how many entries to give at once.
    """
    if source.kind == "product":
        operand = tensors_of([*(args[1:] if func is torch.einsum else args), kwargs])[source.operand]
        maps = operand.permute(source.order)
        maps = maps.flatten(0, -4) if maps.ndim > 4 else maps
        yield from maps.split(chunk(maps[0].numel()))
    elif source.kind == "sdpa":
        query, key, mask, causal, scale, grouped = _sdpa_logit_arguments(args, kwargs)
        size = chunk(query[0].numel() // query.shape[-1] * key.shape[-2])
        for start in range(0, len(query), size):
            part = slice(start, start + size)
            yield _sdpa_weights(query[part], key[part], _cut(mask, part, query.ndim), causal, scale, grouped)
    else:
        call = mha_arguments(*args, **kwargs)
        query, key = call["query"], call["key"]
        size = chunk(call["num_heads"] * query.shape[0] * key.shape[0])
        for start in range(0, query.shape[1], size):
            yield _mha_weights(call, slice(start, start + size))


def whole_maps(source: MapSource, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The maps of one fused call for the whole batch, of the source's shape: `(..., query, key)`.

    Args:
        source: what the traced pass found, fused attention or PyTorch's own function.
        func: the function called.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    maps = torch.cat(list(compute_maps(source, func, args, kwargs, lambda numbers: 1 << 30)))
    if source.kind == "sdpa":
        query, key = sdpa_arguments(*args, **kwargs)[:2]
        return maps.reshape(*query.shape[:-1], key.shape[-2])
    return maps


def sdpa_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float | None, bool]:
    """The arguments of `F.scaled_dot_product_attention`, whichever way they were passed; dropout is never applied."""
    return query, key, value, attn_mask, is_causal, scale, enable_gqa


def _sdpa_logit_arguments(
    args: tuple, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None, bool, float, bool]:
    query, key, _, mask, causal, scale, grouped = sdpa_arguments(*args, **kwargs)
    if query.ndim > 4:
        if mask is not None and mask.ndim > 3:
            mask = mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
        query, key = query.flatten(0, -4), key.flatten(0, -4)
    return query, key, mask, causal, query.shape[-1] ** -0.5 if scale is None else scale, grouped


def _cut(mask: Tensor | None, part: slice, axes: int) -> Tensor | None:
    """The mask of some leading entries; one with fewer axes than the query, or a single entry, is that of all."""
    return mask[part] if mask is not None and mask.ndim == axes and len(mask) > 1 else mask


def _sdpa_weights(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float, grouped: bool) -> Tensor:
    if query.dtype in (torch.float16, torch.bfloat16):  # the fused kernels add up in float32, too
        query, key = query.float(), key.float()
    if grouped:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    logits = (query @ key.transpose(-2, -1)).mul_(scale)
    if causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, float("-inf"))
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(-1)
    if mask is None:
        return weights
    # The fused kernels give a query that may see nothing zeros.
    return weights.masked_fill(logits.isneginf().all(-1, keepdim=True), 0.0)


def mha_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> dict[str, Any]:
    """The arguments of `F.multi_head_attention_forward` by name, whichever way they were passed."""
    return locals()


def _mha_weights(call: dict[str, Any], part: slice) -> Tensor:
    """Per-head maps of some images, by asking the function itself for them; its output is thrown away."""
    call = dict(call)
    for name in ("query", "key", "value"):
        call[name] = call[name][:, part]
    if call["key_padding_mask"] is not None:
        call["key_padding_mask"] = call["key_padding_mask"][part]
    mask = call["attn_mask"]
    if mask is not None and mask.ndim == 3:
        heads = call["num_heads"]
        call["attn_mask"] = mask[part.start * heads : part.stop * heads]
    call |= {"need_weights": True, "average_attn_weights": False, "training": False}
    weights = F.multi_head_attention_forward(**call)[1]
    assert weights is not None
    return weights
