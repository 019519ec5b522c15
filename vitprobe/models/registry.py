"""Model names: a constructor function registers itself, and its name is the model's name."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vitprobe.names import unknown
from vitprobe.seeds import derive_seed

_CONSTRUCTORS: dict[str, Callable[..., nn.Module]] = {}


def register(constructor: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Make a keyword-only constructor known to `create_model` under its own name.

    Args:
        constructor: a function with keyword-only arguments, `image_size`, `channels`, `num_classes` among them,
            that returns the network.

    Returns:
        The same function.

    Raises:
        ValueError: if the name is taken.
    """
    name = constructor.__name__
    if name in _CONSTRUCTORS:
        raise ValueError(f"a model named {name!r} is registered already: give the constructor another name.")
    _CONSTRUCTORS[name] = constructor
    return constructor


def list_models() -> list[str]:
    """The names that `create_model` accepts, sorted."""
    return sorted(_CONSTRUCTORS)


def describe_model(name: str) -> str:
    """The first line of a model's docstring."""
    return (inspect.getdoc(_constructor(name)) or "").split("\n")[0]


def create_model(
    name: str,
    *,
    image_size: int | tuple[int, int] = 32,
    channels: int = 3,
    num_classes: int = 10,
    seed: int | None = None,
    **options: Any,
) -> nn.Module:
    """Build a network by name.

    Args:
        name: one of `list_models()`.
        image_size: side of the images, or `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        seed: seeds the initial weights, independently of the global random state, which is left as it was.
            `None` draws them from the global state as any `nn.Module` does.
        **options: the constructor's own arguments.

    Returns:
        The network, in training mode.

    Raises:
        TypeError: if the constructor does not take an option.
    """
    constructor = _constructor(name)
    # The signature of a variant is that of its base; a constructor may also pass `**options` on to another library.
    accepted = inspect.signature(constructor).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        for option in options:
            if option not in accepted:
                raise TypeError(f"model {name!r} takes no option {option!r}; it takes {', '.join(sorted(accepted))}.")
    arguments = dict(image_size=as_pair(image_size), channels=channels, num_classes=num_classes, **options)
    if seed is None:
        return constructor(**arguments)
    device = torch.get_default_device()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # Not `torch.manual_seed`, which would seed every accelerator as well, and for good.
        torch.default_generator.manual_seed(derive_seed(seed, "weights"))
        if device.type == "cuda":
            torch.cuda.manual_seed(derive_seed(seed, "weights"))
        return constructor(**arguments)


def as_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """`(height, width)` of a size given as one or two integers.

    Args:
        size: side, or `(height, width)`.

    Returns:
        The pair.

    Raises:
        ValueError: if it is neither, or not positive.
    """
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(f"a size is one positive integer or (height, width), not {size!r}.")
    return pair


def _constructor(name: str) -> Callable[..., nn.Module]:
    if name not in _CONSTRUCTORS:
        raise unknown("model", name, _CONSTRUCTORS)
    return _CONSTRUCTORS[name]


def variant(
    base: Callable[..., nn.Module], **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., nn.Module]]:
    """Register a named size of a network: `base` with other defaults, every one of which can be overridden.

    Args:
        base: the network's constructor.
        **defaults: what this size sets.

    Returns:
        A decorator for an empty function whose name becomes the model's name and whose docstring describes it.
    """

    def decorate(named: Callable[..., None]) -> Callable[..., nn.Module]:
        def constructor(**options: Any) -> nn.Module:
            return base(**{**defaults, **options})

        constructor.__name__ = constructor.__qualname__ = named.__name__
        constructor.__module__ = named.__module__
        constructor.__doc__ = named.__doc__
        constructor.__wrapped__ = base  # type: ignore[attr-defined]
        return register(constructor)

    return decorate
