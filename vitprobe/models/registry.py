"""Model names: a constructor function registers itself, and its name is the model's name."""

import inspect
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vitprobe.names import unknown
from vitprobe.seeds import derive_seed

SIZES = {"channel_hidden", "channels", "depth", "dim", "head_dim", "num_classes", "token_hidden"}

_CONSTRUCTORS: dict[str, Callable[..., nn.Module]] = {}
_LIBRARIES: dict[str, Callable[[str], Callable[..., nn.Module]]] = {}


def register(constructor: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Make a keyword-only constructor known to `create_model` under its own name.

    Args:
        constructor: a function with keyword-only arguments, `image_size`, `channels`, `num_classes` among them,
            that returns the network.

    Returns:
        The same function.

    Raises:
        ValueError: if the name is taken by a constructor of another module.
    """
    name = constructor.__name__
    taken = _CONSTRUCTORS.get(name)
    # The same one again is its module loaded anew, after an edit, in a notebook or a worker that stays.
    if taken is not None and taken.__module__ != constructor.__module__:
        raise ValueError(f"a model named {name!r} is registered already: give the constructor another name.")
    _CONSTRUCTORS[name] = constructor
    return constructor


def register_library(prefix: str, find: Callable[[str], Callable[..., nn.Module]]) -> None:
    """Make `create_model("prefix:NAME")` build another library's models.

    Args:
        prefix: the library's name.
        find: gives the constructor of a name, as `register` takes it, or raises `vitprobe.names.unknown`.
    """
    _LIBRARIES[prefix] = find


def list_libraries() -> list[str]:
    """The prefixes that `create_model` accepts before a colon, sorted."""
    return sorted(_LIBRARIES)


def list_models() -> list[str]:
    """The names of our own that `create_model` accepts, sorted."""
    return sorted(_CONSTRUCTORS)


def describe_model(name: str) -> str:
    """The first line of a model's docstring."""
    return (inspect.getdoc(_constructor(name)) or "").split("\n")[0]


class ModelCost(NamedTuple):
    """What a network costs: its images `(height, width)`, its parameters, and multiply-adds per image."""

    image_size: tuple[int, int]
    parameters: int
    multiply_adds: int


def model_cost(name: str, **arguments: Any) -> ModelCost:
    """Parameters and multiply-adds of a network, found without building it in memory.

    Multiply-adds are those of convolutions and matrix products in one forward pass, attention included; norms,
    activations, softmax and pooling are not counted. Many papers call them FLOPs; counted singly there are twice as
    many.

    Args:
        name: as for `create_model`.
        **arguments: as for `create_model`.

    Returns:
        The cost.
    """
    image_size = as_pair(arguments.pop("image_size", _image_size(name)))
    channels = arguments.pop("channels", 3)
    with torch.device("meta"), torch.no_grad():
        model = create_model(name, image_size=image_size, channels=channels, **{"seed": 0, **arguments}).eval()
        # Whichever attention kernel this machine would choose: the plain one is matrix products, which are counted.
        with sdpa_kernel(SDPBackend.MATH), _FlopCount() as counter:
            model(torch.empty(1, channels, *image_size))
    return ModelCost(image_size, sum(p.numel() for p in model.parameters()), counter.total // 2)


class _FlopCount(TorchDispatchMode):
    """Adds up PyTorch's formulas; `FlopCounterMode` follows modules too, and fails where they hand on tuples."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def create_model(
    name: str,
    *,
    image_size: int | tuple[int, int] | None = None,
    channels: int = 3,
    num_classes: int = 10,
    seed: int | None = None,
    **options: Any,
) -> nn.Module:
    """Build a network by name.

    Args:
        name: one of `list_models()`, or `timm:NAME` or `torchvision:NAME` of those libraries.
        image_size: side of the images, or `(height, width)` [pixels]; 32 unless given, but 224 for networks whose
            name says ImageNet.
        channels: channels of the images.
        num_classes: width of the classifier.
        seed: seeds the initial weights, independently of the global random state, which is left as it was.
            `None` draws them from the global state as any `nn.Module` does.
        **options: the constructor's own arguments.

    Returns:
        The network, in training mode. Its attribute `vitprobe_created` holds these arguments, so that the folder of a
        training can say what network its weights are of.

    Raises:
        TypeError: if the constructor does not take an option, or not a value of this type.
        ValueError: if it takes it, and cannot build a network so.
    """
    constructor = _constructor(name)
    # The signature of a variant is that of its base; a constructor may also pass `**options` on to another library.
    accepted = inspect.signature(constructor).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        for option in options:
            if option not in accepted:
                raise TypeError(f"model {name!r} takes no option {option!r}; it takes {', '.join(sorted(accepted))}.")
    size = as_pair(_image_size(name) if image_size is None else image_size)
    arguments = dict(image_size=size, channels=channels, num_classes=num_classes, **options)
    if ":" not in name:  # other libraries have meanings of their own, as timm has for a classifier of 0 classes
        _check_sizes(name, accepted, arguments)
    try:
        model = _seeded(constructor, arguments, seed)
    except (RuntimeError, ZeroDivisionError) as error:  # PyTorch's words for a width that is none
        if not options:
            raise
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise ValueError(f"model {name!r} cannot be built with {given}: {error}.") from error
    model.vitprobe_created = {"name": name, **arguments}  # type: ignore[assignment]
    return model


def _check_sizes(name: str, accepted: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> None:
    # Python and PyTorch build networks without blocks, channels or hidden units, which train, and are no networks.
    for option in sorted(SIZES & accepted.keys() & arguments.keys()):
        value, wanted = arguments[option], accepted[option].annotation
        if wanted is not int or (isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1):
            continue
        default = accepted[option].default
        example = "" if default is inspect.Parameter.empty else f", for instance {option}={default}"
        problem = f"model {name!r} takes a whole number of at least 1 for {option}, not {value!r}{example}."
        raise ValueError(problem) if isinstance(value, Real) and not isinstance(value, bool) else TypeError(problem)


def _seeded(constructor: Callable[..., nn.Module], arguments: dict[str, Any], seed: int | None) -> nn.Module:
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
    prefix, colon, rest = name.partition(":")
    if colon:
        if prefix not in _LIBRARIES:
            raise unknown("library", prefix, _LIBRARIES)
        return _LIBRARIES[prefix](rest)
    if name not in _CONSTRUCTORS:
        raise unknown("model", name, _CONSTRUCTORS)
    return _CONSTRUCTORS[name]


def _image_size(name: str) -> int:
    return getattr(_constructor(name), "image_size", 32)


def variant(
    base: Callable[..., nn.Module], **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., nn.Module]]:
    """Register a named size of a network: `base` with other defaults, every one of which can be overridden.

    Args:
        base: the network's constructor.
        **defaults: what this size sets; an `image_size` is what `create_model` builds it for unless told.

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
        if size := defaults.get("image_size", getattr(base, "image_size", None)):
            constructor.image_size = size  # type: ignore[attr-defined]
        return register(constructor)

    return decorate
