"""How a layer mixes places: one matrix `(query, key)` per head or channel, of attention and convolution alike."""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitprobe.attach.layout import MAX_PREFIX
from vitprobe.attach.maps import compute_maps, recognise
from vitprobe.calling import untouched, unwrap
from vitprobe.seeds import derive_seed


def spatial_operator(
    module: nn.Module | Tensor, grid: tuple[int, int] | None = None, x: Tensor | None = None
) -> Tensor:
    """The token-mixing matrices of one layer: how much of what lies at each key arrives at each query.

    - Attention that gives its map as a method `weights(x)`, or that applies a single one while it runs on `x`,
      whichever library wrote it: the map, averaged over the batch. With `grid`, tokens before the patches (class,
      distillation, register, sink) are left out as queries and as keys; rows are not normalised anew.
    - `nn.Conv2d` of stride 1: its taps, with its own padding, by output channel; signed where that reads one input
      channel (depthwise), else the root of the sum of squares over the inputs: how strongly white inputs arrive.
    - `nn.Linear` over tokens, with as many outputs as inputs: its weight.
    - Anything else that mixes places linearly and each channel by itself (average pooling, blur, fixed filters,
      permutations): its answers to impulses, checked against its answer to a random input.
    - A tensor `(query, key)`, `(head, query, key)` or `(batch, head, query, key)`: itself, averaged over the batch.

    Args:
        module: the layer; it is left as it was.
        grid: rows and columns of places, which are in row-major order.
        x: an input of the layer, tokens `(batch, token, channel)` or images `(batch, channel, y, x)`. Attention
            depends on it; of other layers it tells the channels, and images tell the grid.

    Returns:
        `(head or channel, query, key)`.

    Raises:
        ValueError: if the layer has no such matrices, with the reason, or if `grid` or `x` is missing.
    """
    if isinstance(module, Tensor):
        return _patches(_matrices(module.detach()), grid)
    module = unwrap(module)
    with untouched(module):
        if callable(weights := getattr(module, "weights", None)):
            if x is None:
                raise ValueError(f"the map of {_name(module)} depends on its input: give x=, as its forward takes it.")
            return _patches(_matrices(weights(x)), grid)
        if isinstance(module, nn.Linear):
            return _linear(module, grid)
        around = grid or ((x.shape[2], x.shape[3]) if x is not None and x.ndim == 4 else None)
        if isinstance(module, nn.Conv2d):
            return _convolution(module, around)
        if x is not None and (maps := _watch(module, x)) is not None:
            return _patches(maps, grid)
        return _patches(_by_impulses(module, around, x), around)


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _matrices(maps: Tensor) -> Tensor:
    """`(head, query, key)` of one matrix, of a stack, or of a batch of stacks."""
    if not 2 <= maps.ndim <= 4 or maps.shape[-1] != maps.shape[-2]:
        raise ValueError(
            f"matrices of shape {tuple(maps.shape)}: what is wanted is (query, key), (head, query, key) or "
            "(batch, head, query, key), with as many queries as keys."
        )
    return maps.mean(0) if maps.ndim == 4 else maps.reshape(-1, *maps.shape[-2:])


def _patches(matrices: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """The rows and columns of patches; other tokens come before them."""
    if grid is None:
        return matrices
    patches, tokens = grid[0] * grid[1], matrices.shape[-1]
    if not 0 <= tokens - patches <= MAX_PREFIX:
        raise ValueError(f"{tokens} tokens do not lie on a grid of {grid[0]}x{grid[1]}: give theirs as grid=.")
    return matrices[:, tokens - patches :, tokens - patches :]


# --- attention --------------------------------------------------------------------------------------


class _Maps(TorchFunctionMode):
    """Keeps the attention maps that are applied while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (source := recognise(func, args, kwargs)) is not None:
            self.found.append(torch.cat(list(compute_maps(source, func, args, kwargs, lambda numbers: 1))))
        return result


def _watch(module: nn.Module, x: Tensor) -> Tensor | None:
    """The map `(head, query, key)` that a layer applies, averaged over images and windows, if it applies any."""
    averages = []
    for image in x.split(1):  # one at a time: heads are often on one axis with the batch
        with _Maps() as maps:
            if isinstance(module, nn.MultiheadAttention):
                tokens = image if module.batch_first else image.transpose(0, 1)
                module(tokens, tokens, tokens)
            else:
                module(image)
        if not maps.found:
            return None
        if len(maps.found) > 1:
            raise ValueError(
                f"{_name(module)} applies {len(maps.found)} attention maps: give one layer of it, such as "
                "model.blocks[0].attn, with that layer's input."
            )
        averages.append(_matrices(maps.found[0]))
    return torch.stack(averages).mean(0)


# --- linear layers ----------------------------------------------------------------------------------


def _linear(module: nn.Linear, grid: tuple[int, int] | None) -> Tensor:
    places = module.in_features if grid is None else grid[0] * grid[1]
    if not places == module.in_features == module.out_features:
        raise ValueError(
            f"a linear layer from {module.in_features} to {module.out_features} numbers is no matrix between {places} "
            "places: it maps channels, or to hidden units that lie nowhere."
        )
    return module.weight.detach()[None]


def _convolution(module: nn.Conv2d, grid: tuple[int, int] | None) -> Tensor:
    weight = module.weight.detach()
    # The same convolution from one channel into all: so it goes with padding of any kind.
    taps = nn.Conv2d(
        1,
        len(weight),
        (weight.shape[2], weight.shape[3]),
        (module.stride[0], module.stride[1]),
        module.padding if isinstance(module.padding, str) else (module.padding[0], module.padding[1]),
        (module.dilation[0], module.dilation[1]),
        bias=False,
        padding_mode=module.padding_mode,
        device="meta",
    )
    impulses = _impulses(module, grid, 1, weight)
    operators = []
    for channel in weight.split(1, dim=1):
        taps.weight = nn.Parameter(channel)
        operators.append(_operator(module, impulses, taps(impulses)))
    return operators[0] if len(operators) == 1 else torch.stack(operators).square().sum(0).sqrt()


def _by_impulses(module: nn.Module, grid: tuple[int, int] | None, x: Tensor | None) -> Tensor:
    numbers = [number for number in (*module.parameters(), *module.buffers()) if number.is_floating_point()]
    if x is None and numbers:
        raise ValueError(f"the channels that {_name(module)} takes are not known: give x=, an input of it.")
    if x is not None and x.ndim == 3:
        impulses = torch.eye(x.shape[1]).to(x)[..., None].expand(-1, -1, x.shape[2])
    else:
        impulses = _impulses(module, grid, 1 if x is None else x.shape[1], torch.zeros(()) if x is None else x)
    still = module(torch.zeros_like(impulses[:1]))
    operator = _operator(module, impulses, module(impulses) - still)
    generator = torch.Generator().manual_seed(derive_seed(0, "spatial_operator"))
    one, other = torch.randn(2, *impulses[:1].shape, generator=generator).to(impulses)
    found, rest, both = (module(trial) - still for trial in (one, other, one + other))
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    if (both - found - rest).norm() > tolerance * both.norm():
        raise ValueError(
            f"{_name(module)} is not linear in its input, on which its mixing of places therefore depends: give a "
            "layer inside of it, without the activation function, or attention with an input x=."
        )
    if (_flat(found) - operator @ _flat(one)).norm() > tolerance * found.norm():
        raise ValueError(
            f"{_name(module)} mixes channels as well as places: there is no one matrix of places per channel."
        )
    return operator


def _impulses(module: nn.Module, grid: tuple[int, int] | None, channels: int, like: Tensor) -> Tensor:
    """An image for each place `(key, channel, y, x)`, zero but for ones there."""
    if grid is None:
        raise ValueError(f"the matrix of {_name(module)} depends on the size of its input: give grid=(rows, columns).")
    eye = torch.eye(grid[0] * grid[1], dtype=like.dtype, device=like.device)
    return eye.view(-1, 1, *grid).expand(-1, channels, -1, -1)


def _operator(module: nn.Module, impulses: Tensor, answers: Tensor) -> Tensor:
    """`(channel, query, key)` of the answers to impulses, key by key."""
    places = impulses.shape[2:] if impulses.ndim == 4 else impulses.shape[1:2]
    given = answers.shape[2:] if impulses.ndim == 4 else answers.shape[1:2]
    if answers.ndim != impulses.ndim or given != places:
        raise ValueError(
            f"{_name(module)} makes {'x'.join(map(str, given))} places of {'x'.join(map(str, places))}: queries and "
            "keys are wanted on the same grid (stride 1, with padding)."
        )
    return _flat(answers)


def _flat(answers: Tensor) -> Tensor:
    """`(channel, place, image)` of tokens `(image, place, channel)` or images `(image, channel, y, x)`."""
    return rearrange(answers, "b n c -> c n b" if answers.ndim == 3 else "b c y x -> c (y x) b")
