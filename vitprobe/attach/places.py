"""Where in the image the tokens of an activation lie, followed through a forward pass.

Windows may be shifted, dilated or padded, and tokens reordered: shapes alone do not tell. So every activation has a
shadow of its own shape that holds the coordinates `y + ix` of the pixels its numbers come from, and NaN where they come
from no place (class tokens, padding). What rearranges an activation is repeated on its shadow; what works number by
number passes it on; what mixes channels takes the mean; convolutions and pools resample it. Where nothing of that
applies the shadow is lost, and shapes have to do.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from vitprobe.attach.maps import MATMUL, MapSource, einsum_letters, mha_arguments, sdpa_arguments
from vitprobe.calling import tensors_of

Convolution = Callable[..., Tensor]

# Repeated on the shadow as they are; by name, since each is a function of the module and a method of the tensor.
REARRANGING = {
    "reshape", "view", "flatten", "unflatten", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims",
    "squeeze", "unsqueeze", "chunk", "split", "unbind", "tensor_split", "narrow", "select", "__getitem__", "roll",
    "flip", "expand", "expand_as", "view_as", "reshape_as", "repeat", "repeat_interleave", "tile", "cat", "concat",
    "stack", "index_select", "gather", "take_along_dim", "pixel_shuffle", "pixel_unshuffle", "unfold", "t",
    "adjoint", "__get__",
}  # fmt: skip
MARGIN = 64  # added to the coordinates, which padding makes negative, so that their sign is free for something else
POOLS = {F.avg_pool2d, F.max_pool2d}
REDUCING = {"mean", "sum", "amax", "amin", "max", "min", "median"}
ADAPTIVE = {F.adaptive_avg_pool2d, F.adaptive_max_pool2d}
RESIZING = {*ADAPTIVE, F.interpolate}


class Places:
    """The shadows of the activations of one forward pass.

    Args:
        images: what the model is called on `(batch, channel, y, x)`.
        depends: says whether a tensor depends on the images.
    """

    def __init__(self, images: Tensor, depends: Callable[[Tensor], bool]) -> None:
        self.depends = depends
        y = torch.arange(images.shape[-2], dtype=torch.float32, device=images.device)
        x = torch.arange(images.shape[-1], dtype=torch.float32, device=images.device)
        # Weak keys: a shadow lives as long as its activation.
        self._shadows: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._tokens: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by shadow, which many activations share
        shadow = torch.complex(*torch.meshgrid(y + MARGIN, x + MARGIN, indexing="ij"))
        # The first image's coordinates are positive, the others' negative: what is linear leaves it so.
        signs = torch.tensor([1.0] + [-1.0] * (len(images) - 1), device=images.device)
        self._shadows[images] = (signs[:, None, None, None] * shadow).expand(images.shape)

    def follow(self, func: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        """Give what an operation returned its shadows.

        Args:
            func: the operation.
            args: its arguments.
            kwargs: its keyword arguments.
            tensors: what it returned or changed.
        """
        try:
            shadows = self._shadows_of_result(func, args, kwargs, tensors)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return  # no shadow can be made this way; it is lost
        for tensor, shadow in zip(tensors, shadows, strict=False):
            if shadow is not None and shadow.shape == tensor.shape:
                self._shadows[tensor] = shadow

    def pass_on(self, given: list[Tensor], made: list[Tensor]) -> None:
        """Give activations that were made unseen the shadows of the inputs of their shape."""
        for tensor in made:
            for x in given:
                if x.shape == tensor.shape and x in self._shadows:
                    self._shadows[tensor] = self._shadows[x]

    def of_tokens(self, x: Tensor) -> tuple[np.ndarray, int] | None:
        """The coordinates of an activation's positions without its channels, and which axis the channels are.

        Args:
            x: the activation.
        """
        shadow = self._shadows.get(x)
        if shadow is None or shadow.ndim < 2:
            return None
        if shadow not in self._tokens:
            axes = sorted((-1, 1), key=lambda axis: shadow.shape[axis] == 1)  # one alone is like itself
            axis = next((axis for axis in axes if _uniform(shadow, axis)), None)
            self._tokens[shadow] = None if axis is None else (_coordinates(shadow.select(axis, 0)), axis)
        return self._tokens[shadow]

    def of_attention(
        self, source: MapSource, func: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """The coordinates of the queries `(..., query)` and keys `(..., key)` of a map, and the keys' images.

        The images `(..., key)` are 0 for a key of the first image of the pass, 1 for one of another, NaN for a key at
        no place. Keys of size 0 stand for a map over channels: what it multiplies has all tokens on its other axis.

        Args:
            source: how to get the map.
            func: the operation that applies it.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        queries, keys = self._shadows_of_attention(source, func, args, kwargs)
        if keys is None:
            return (None if queries is None else _coordinates(queries)), None, None
        images = np.where(np.isnan(signs := keys.real.cpu().numpy()), np.nan, signs < 0)
        return (None if queries is None else _coordinates(queries)), _coordinates(keys), images

    def _shadows_of_attention(
        self, source: MapSource, func: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        if source.kind == "sdpa":
            query, key, value = sdpa_arguments(*args, **kwargs)[:3]
            return _first(self._asking(query, key)), _first(self._known(key if self.depends(key) else value))
        if source.kind == "mha":
            call = mha_arguments(*args, **kwargs)
            queries = _first(self._asking(call["query"], call["key"]))
            keys = _first(self._known(call["key"] if self.depends(call["key"]) else call["value"]))
            return (None if queries is None else queries.T[:, None]), (None if keys is None else keys.T[:, None])
        pair = tensors_of([*args, kwargs])[:2]
        maps, values = pair[source.operand], pair[1 - source.operand]
        shadow = self._shadows.get(maps)
        queries = None if shadow is None else shadow.permute(source.order)
        queries = queries.select(-1, 0) if queries is not None and _uniform(queries, -1) else None
        shadow = self._shadows.get(values)
        if shadow is None:
            return queries, None
        if func in MATMUL:
            # The map is on the left of the values, or, transposed, on their right.
            left = source.order[-1] == maps.ndim - 1
            along, channel = (-2, -1) if left else (-1, -2)
            keys = shadow.select(channel, 0) if _uniform(shadow, channel) else None
        else:
            letters, _ = einsum_letters(args[0], pair)
            mine, other = letters[source.operand], letters[1 - source.operand]
            rest = [mine[axis] for axis in source.order[:-2]]
            along = other.index(mine[source.order[-1]])
            keys = _spread(shadow, other, [*rest, other[along]])
        if keys is None and _uniform(shadow, along):
            keys = shadow.new_empty(0)
        return queries, keys

    def gather(self, source: MapSource, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
        """Whether the rows of what looks like a map are channels, each a sum over tokens, which then lies nowhere.

        Args:
            source: how to get it; it is made of one activation alone.
            args: of the operation that applies it.
            kwargs: its keyword arguments.
            tensors: what it returned.
        """
        shadow = self._shadows.get(tensors_of([*args, kwargs])[source.operand])
        if shadow is None or _uniform(shadow, source.order[-1]) or not _uniform(shadow, source.order[-2]):
            return False
        for tensor in tensors:
            self._shadows[tensor] = _nowhere(tensor)
        return True

    def _shadows_of_result(
        self, func: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> list[Tensor | None]:
        name, result = func.__name__, tensors[0]
        if func is F.unfold:
            return [self._unfolded(*args, **kwargs)]
        if name in REARRANGING:
            return self._repeated(func, name, args, kwargs)
        if name in REDUCING:
            shadow = self._shadow(args[0] if args else kwargs["input"])
            dims, keep = _dims(args, kwargs)
            shadow = _parts(lambda x: x.nanmean(dims, keepdim=keep), shadow)
            return [shadow, shadow]
        if func is F.pad:
            shadow = self._shadow(args[0] if args else kwargs["input"])
            bound = inspect.signature(_pad).bind(*args, **kwargs).arguments
            how = {"value": float("nan")} if bound.get("mode", "constant") == "constant" else {"mode": bound["mode"]}
            return [_parts(lambda x: F.pad(x, tuple(bound["pad"]), **how), shadow)]
        if func is Tensor.__setitem__:
            shadow = self._shadow(args[0]).clone()
            value = args[2] if isinstance(args[2], Tensor) else torch.tensor(0.0)
            shadow[args[1]] = self._shadow(value)
            return [shadow]
        if func in (F.conv2d, *POOLS, *RESIZING):
            shadow = self._shadows.get(args[0] if args else kwargs["input"])
            return [None if shadow is None else _resampled(func, shadow, args, kwargs, result)]
        if func is F.linear:
            shadow = self._shadows.get(args[0] if args else kwargs["input"])
            return [None if shadow is None else _mixed(shadow, result)]
        if func in MATMUL:
            pair = tensors_of([*args, kwargs])[:2]
            left, right = pair[::-1] if func is Tensor.__rmatmul__ else pair
            return [self._product(left, right, result)]
        if func is torch.baddbmm:
            return [self._product(args[1], args[2], result)]
        if func is torch.einsum:
            pair = tensors_of(list(args[1:]))
            letters, output = einsum_letters(args[0], pair)
            for x, mine in zip(pair, letters, strict=True):
                shadow = self._shadows.get(x)
                spread = None if shadow is None else _spread(shadow, mine, list(output))
                if spread is not None:
                    return [spread.expand(result.shape)]
            return [None]
        if func is F.scaled_dot_product_attention:
            asking = self._asking(*sdpa_arguments(*args, **kwargs)[:2])
            return [None if asking is None else asking[..., :1].expand(result.shape)]
        if func is F.multi_head_attention_forward:
            call = mha_arguments(*args, **kwargs)
            return [self._asking(call["query"], call["key"])]
        # Number by number: the first operand of the result's shape lends its shadow.
        operands = tensors_of([*args, kwargs])
        return [
            next((self._shadows[x] for x in operands if x.shape == y.shape and x in self._shadows), None)
            for y in tensors
        ]

    def _known(self, x: Tensor) -> Tensor | None:
        """The shadow of a tensor, that of a constant nowhere; `None` if it was lost."""
        shadow = self._shadows.get(x)
        return _nowhere(x) if shadow is None and not self.depends(x) else shadow

    def _asking(self, query: Tensor, key: Tensor) -> Tensor | None:
        """The shadow of queries; learned ones are nowhere, but for codes of positions, which ask others like them."""
        return self._known(query) if self.depends(key) else self._shadows.get(query)

    def _shadow(self, x: Tensor) -> Tensor:
        shadow = self._known(x)
        if shadow is None:
            raise ValueError("the shadow was lost")
        return shadow

    def _repeated(self, func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> list[Tensor | None]:
        def shadow(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self._shadow(value) if value.is_floating_point() else value
            if isinstance(value, tuple | list):
                return type(value)(shadow(item) for item in value)
            return value

        shadows = shadow(args), {key: shadow(value) for key, value in kwargs.items()}
        if not any(isinstance(x, Tensor) and x.is_complex() for x in tensors_of([*shadows[0], shadows[1]])):
            return []
        if name == "view":  # a shadow may lie in memory as its activation does not
            func = Tensor.reshape
        return [*tensors_of(func(*shadows[0], **shadows[1]))]

    def _unfolded(
        self, input: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
    ) -> Tensor:
        """After `F.unfold`, whose own padding is zeros, that is, a place."""
        down, across = padding if isinstance(padding, tuple | list) else (padding, padding)
        sides = (across, across, down, down)

        def unfold(x: Tensor) -> Tensor:
            return F.unfold(F.pad(x, sides, value=math.nan), kernel_size, dilation, 0, stride)

        return _parts(unfold, self._shadow(input))

    def _product(self, left: Tensor, right: Tensor, result: Tensor) -> Tensor | None:
        """Rows lie where those of the left factor do, if its columns are no places; else columns as the right's."""
        first, second = self._shadows.get(left), self._shadows.get(right)
        if first is not None and first.ndim > 1 and _uniform(first, -1):
            return first[..., :1].expand(result.shape)
        if second is not None and second.ndim > 1 and _uniform(second, -2):
            return second[..., :1, :].expand(result.shape)
        return None


def _nowhere(x: Tensor) -> Tensor:
    """The shadow of a tensor that lies nowhere."""
    # complex("nan") has an imaginary part of 0, which is a column.
    return torch.full((), complex(math.nan, math.nan), device=x.device).expand(x.shape)


def _pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> None:
    """The signature of `F.pad`."""


def _dims(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Which axes a reduction is over, and whether it keeps them."""
    dims = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    if dims is None or isinstance(dims, Tensor):
        raise ValueError("over everything, or of two tensors")
    return dims, bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))


def _parts(change: Callable[[Tensor], Tensor], shadow: Tensor) -> Tensor:
    """A change of a shadow by an operation that knows no complex numbers."""
    return torch.complex(change(shadow.real.contiguous()), change(shadow.imag.contiguous()))


def _coordinates(shadow: Tensor) -> np.ndarray:
    """The coordinates in a shadow, of whichever image."""
    values = shadow.cpu().numpy()
    return np.where(values.real < 0, -values, values) - complex(MARGIN, MARGIN)


def _first(shadow: Tensor | None) -> Tensor | None:
    """The shadow of tokens whose channels are last."""
    return shadow.select(-1, 0) if shadow is not None and _uniform(shadow, -1) else None


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _uniform(shadow: Tensor, axis: int) -> bool:
    """Whether an axis is one of channels: all of it lies at one place, and not everything everywhere does."""
    if shadow.stride(axis) == 0:
        return True
    return bool(_same(shadow, shadow.narrow(axis, 0, 1)).all())


def _spread(shadow: Tensor, letters: str, output: list[str]) -> Tensor | None:
    """The shadow along the axes of an einsum's output; `None` if the axes that are summed over are places."""
    for axis in reversed(range(shadow.ndim)):
        if letters[axis] not in output:
            if not _uniform(shadow, axis):
                return None
            shadow = shadow.select(axis, 0)
    left = [letter for letter in letters if letter in output]
    shadow = shadow.permute([left.index(letter) for letter in output if letter in left])
    for axis, letter in enumerate(output):
        if letter not in left:
            shadow = shadow.unsqueeze(axis)
    return shadow


def _centre(shadow: Tensor, axis: int) -> Tensor:
    """The mean over an axis, of what has a place."""
    if _uniform(shadow, axis):
        return shadow.narrow(axis, 0, 1)
    return _parts(lambda x: x.nanmean(axis, keepdim=True), shadow)


def _mixed(shadow: Tensor, result: Tensor) -> Tensor | None:
    """After a linear layer: in the middle of what it mixed; lost where it mixed the tokens."""
    centre = _centre(shadow, -1)
    if not _uniform(shadow, -1) and centre[0].numel() > 1 and bool(_same(centre[0], centre[0].flatten()[0]).all()):
        return None
    return centre.expand(result.shape)


def _resampled(func: Callable, shadow: Tensor, args: tuple, kwargs: dict[str, Any], result: Tensor) -> Tensor | None:
    """After a convolution or a pool: at the centre of its window."""
    if shadow.ndim != 4 or result.ndim != 4:
        return None
    centre = _centre(shadow, 1)
    steps = [_window(func, args, kwargs, axis, shadow.shape[2 + axis], result.shape[2 + axis]) for axis in (0, 1)]
    if steps == [(0.0, 1.0), (0.0, 1.0)] and result.shape[2:] == shadow.shape[2:]:
        return centre.expand(result.shape)
    # Coordinates are a plane over rows and columns: extend it from the middle, which no padding reaches.
    rows, columns = centre.shape[2:]
    row, column = rows // 2, columns // 2
    base = centre[:, :, row : row + 1, column : column + 1]
    down = base - centre[:, :, row - 1 : row, column : column + 1] if rows > 1 else base * 0
    across = base - centre[:, :, row : row + 1, column - 1 : column] if columns > 1 else base * 0

    def plane(y: Tensor, x: Tensor) -> Tensor:
        return base + down * (y - row)[:, None] + across * (x - column)

    here = [torch.arange(side, dtype=torch.float32, device=shadow.device) for side in (rows, columns)]
    if not bool(((centre - plane(*here)).abs().nan_to_num() < 1e-2).all()):
        return None
    there = [
        first + step * torch.arange(side, dtype=torch.float32, device=shadow.device)
        for (first, step), side in zip(steps, result.shape[2:], strict=True)
    ]
    if func in ADAPTIVE:
        sides = zip(centre.shape[2:], result.shape[2:], strict=True)
        there = [_middles(before, after).to(shadow.device) for before, after in sides]
    return plane(*there).expand(result.shape)


def _middles(before: int, after: int) -> Tensor:
    """The middles of adaptive windows, which overlap and differ in size where one side does not divide the other."""
    index = torch.arange(after, dtype=torch.float32)
    first, end = (index * before / after).floor(), ((index + 1) * before / after).ceil()
    return (first + end - 1) / 2


def _window(
    func: Callable, args: tuple, kwargs: dict[str, Any], axis: int, before: int, after: int
) -> tuple[float, float]:
    """Centre of the first window along an axis, and the step to the next [places before]."""
    if func in RESIZING:
        step = before / after
        return (step - 1) / 2, step
    names = ("input", "weight", "bias", "stride", "padding", "dilation")
    if func in POOLS:
        names = ("input", "kernel_size", "stride", "padding", *(("dilation",) if func is F.max_pool2d else ()))
    call = dict(zip(names, args, strict=False)) | {key: value for key, value in kwargs.items() if key in names}

    def number(name: str, default: Any) -> int:
        value = call.get(name)
        value = default if value is None or value == [] else value
        return int(value[axis]) if isinstance(value, tuple | list) else int(value)

    kernel = int(call["weight"].shape[2 + axis]) if func is F.conv2d else number("kernel_size", 1)
    stride = number("stride", 1 if func is F.conv2d else kernel)
    dilation = number("dilation", 1)
    reach = dilation * (kernel - 1)
    if isinstance(call.get("padding"), str):
        padding = reach // 2 if call["padding"] == "same" else 0
    else:
        padding = number("padding", 0)
    return reach / 2 - padding, float(stride)
