"""Calling any model: batches in, logits out, and the model handed back as it was."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], Any]


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside any nesting of `torch.compile`, `DataParallel` and `DistributedDataParallel`.

    Args:
        model: the model as the user has it.

    Returns:
        The innermost module.

    Raises:
        TypeError: if it is no `nn.Module`, is TorchScript, or is sharded by FSDP.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a probe needs a torch.nn.Module, not {type(model).__name__}.")
    while True:
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(
                "a TorchScript model runs outside Python, where nothing can be watched: "
                "give the nn.Module it was made from."
            )
        kinds = {parent.__name__ for module in model.modules() for parent in type(module).__mro__}
        if {"FullyShardedDataParallel", "FSDPModule"} & kinds:
            raise TypeError("a model sharded by FSDP holds no whole weights: load it into one process, unsharded.")
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def with_weights(model: nn.Module) -> nn.Module:
    """The user's own module, where its weights are parameters; see `unwrap`.

    Args:
        model: the model as the user has it.

    Returns:
        The innermost module.

    Raises:
        TypeError: as `unwrap`, and if the model is quantised: packed integers are no parameters.
        ValueError: if it has no parameters.
    """
    bare = unwrap(model)
    packed = [name for name, module in bare.named_modules() if ".quantized" in type(module).__module__]
    if packed:
        raise TypeError(
            f"a quantised model keeps its weights as packed integers ({packed[0]}, ...), which have no derivative and "
            "no direction to move in: give the model that it was made from."
        )
    if next(bare.parameters(), None) is None:
        raise ValueError(
            f"{type(bare).__name__} has no parameters, which a loss would be a function of: give a model whose weights "
            "are registered (nn.Parameter; layers in an nn.ModuleList, not in a list)."
        )
    return bare


def described(model: nn.Module) -> dict[str, Any]:
    """What a dataset says of the model it was measured on.

    Args:
        model: the module, unwrapped.

    Returns:
        Attributes: class, number of parameters, and the initialisers that wrote to it, if any did.
    """
    said = {
        "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    initialisation = getattr(model, "initialisation", "")
    return said | ({"initialisation": initialisation} if isinstance(initialisation, str) and initialisation else {})


def described_batches(batches: Any) -> dict[str, str | int | float]:
    """What a dataset says of the batches it was measured on: what they say of themselves in `description`.

    Args:
        batches: any iterable; loaders of `vitprobe.data` and `vitprobe.training` know their split and augmentation.
    """
    description = getattr(batches, "description", {})
    return dict(description) if isinstance(description, Mapping) else {}


class Described:
    """Batches that come in another way than the user's own, and still say what those say of themselves.

    Args:
        batches: an iterable.
        like: the user's batches.

    Attributes:
        description: what `described_batches` finds.
    """

    def __init__(self, batches: Iterable[Any], like: Any) -> None:
        self._batches = batches
        self._like = like

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    @property
    def description(self) -> dict[str, str | int | float]:
        """Of the user's batches."""
        return described_batches(self._like)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients for the length of a `with`; modes and random state are restored on any exit.

    Compiled submodules run eagerly inside, because hooks and modes set after compilation are never called
    (pytorch#117758).
    """
    with (
        same_random(model),
        eager(),
        torch.no_grad(),
        evaluation_mode(model),
        same_buffers(model),
    ):
        yield


def same_random(model: nn.Module) -> AbstractContextManager[None]:
    """Random numbers that are drawn inside a `with`, here or where the model is, are put back on any exit.

    A loader draws some for each pass over it, also one without shuffling.
    """
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(devices=sorted(d for d in devices if d is not None))


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers that a pass writes to, or puts others in the place of (counters, caches), are put back on any exit."""
    kept = [(buffer, _version(buffer), buffer.clone()) for buffer in model.buffers()]
    plain = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    stores = [(module._buffers, dict(module._buffers)) for module in plain]
    try:
        yield
    finally:
        for store, own in stores:
            if store.keys() != own.keys() or any(store[name] is not value for name, value in own.items()):
                store.clear()
                store.update(own)
        with torch.no_grad():
            for buffer, version, value in kept:
                if not torch.equal(buffer, value) if version is None else version != buffer._version:
                    buffer.copy_(value)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; `None` for one that does not count (made in inference mode)."""
    return None if tensor.is_inference() else tensor._version


def eager() -> AbstractContextManager[Any]:
    """Compiled modules run eagerly for the length of a `with`."""
    # Nothing is compiled where the compiler was never imported, which costs a second and 130 MiB.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the length of a `with`; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        # Through the model's own train() first, which may do more than set flags (unmerge adapters, say).
        model.train(modes[model])
        for module, training in modes.items():
            module.training = training


def default_forward(model: nn.Module, batch: Any) -> Any:
    """Call `model` on a batch: a tensor, a tuple that starts with one, or a mapping of keyword arguments.

    Args:
        model: any vision model.
        batch: images; `(images, ...)`; or a mapping, whose `labels` are left out.

    Returns:
        Whatever the model returns.

    Raises:
        TypeError: for a batch of another kind.
        ValueError: if the model wrote to the images, so that another pass would see others.
    """
    before = [_version(tensor) for tensor in tensors_of(batch)]
    output = _called(model, batch)
    if before != [_version(tensor) for tensor in tensors_of(batch)]:
        raise ValueError(
            f"{type(model).__name__} writes to the images that it is given (an operation in place on its input), and "
            "they are needed again: give forward=lambda model, batch: model(batch.clone()), of batches with labels "
            "model(batch[0].clone())."
        )
    return output


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**{key: value for key, value in batch.items() if key not in ("label", "labels")})
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor):
        return model(batch[0])
    raise TypeError(
        f"a batch is a tensor, a tuple or list that starts with one, or a mapping of keyword arguments, not "
        f"{type(batch).__name__}: give forward=lambda model, batch: ... that calls the model on yours."
    )


_CACHE = "attention_bias_cache"  # timm's LeViT and its like keep what they made of their biases


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """No cache of what was computed from weights, for the length of a `with`: these may be others inside."""
    kept = [(vars(module), vars(module)[_CACHE]) for module in model.modules() if _CACHE in vars(module)]
    try:
        for attributes, _ in kept:
            attributes[_CACHE] = {}
        yield
    finally:
        for attributes, cache in kept:
            attributes[_CACHE] = cache


def uncached(forward: Forward) -> Forward:
    """The same way of calling a model, whose caches of what was computed from other weights are not used or filled."""

    def call(model: nn.Module, batch: Any) -> Any:
        with without_caches(model):
            return forward(model, batch)

    return call


@contextmanager
def lent(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Other tensors in the place of a model's own for the length of a `with`; nothing is written to.

    By the identity of what is replaced and module by module, each once: `torch.func.functional_call` would leave
    tensors behind in a module that is registered twice, and tied ones need no naming here.

    Args:
        model: the module.
        tensors: by the names of parameters and buffers.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = {id(own[name]): tensor for name, tensor in tensors.items()}
    stores: list[dict[str, Any]] = [store for m in model.modules() for store in (m._parameters, m._buffers)]
    places = [(store, name, value) for store in stores for name, value in store.items() if id(value) in others]
    try:
        for store, name, value in places:
            store[name] = others[id(value)]
        yield
    finally:
        for store, name, value in places:
            store[name] = value


def as_batches(batches: Iterable[Any]) -> Iterable[Any]:
    """The batches, or the one batch that was given without a list around it."""
    if isinstance(batches, Tensor | Mapping):
        return [batches]
    if isinstance(batches, tuple) and batches and isinstance(batches[0], Tensor):
        shape = batches[0].shape[1:]
        several = all(isinstance(item, Tensor) and item.shape[1:] == shape for item in batches)  # images.split(64)
        return batches if several else [batches]
    if isinstance(batches, list) and batches and isinstance(batches[0], Tensor) and batches[0].ndim == 4:
        return [batches] if any(isinstance(item, Tensor) and item.ndim != 4 for item in batches) else batches
    return batches


def to_model(batch: Any, model: nn.Module) -> Any:
    """The batch on the device of the model, its floating-point tensors in the dtype of the model."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None:
        return batch

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(parameter.device, parameter.dtype if tensor.is_floating_point() else None)

    return change_tensors(batch, move)


def change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of tuples, lists and mappings, of the same types, with every tensor changed.

    Args:
        value: the nest.
        change: of one tensor.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: change_tensors(item, change) for key, item in value.items()}
        if type(value) is dict:
            return items
        try:
            same: Any = copy.copy(value)
            for key, item in items.items():
                same[key] = item
        except (TypeError, RuntimeError):  # one that is read only, or all of whose tensors have to have one size
            return items
        return same
    if isinstance(value, tuple | list):
        parts = [change_tensors(item, change) for item in value]
        # A named tuple takes its fields one by one.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in a nest of tuples, lists, mappings and `ModelOutput`s, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def replace_tensor(value: Any, old: Tensor, new: Tensor) -> Any:
    """The same nest of tuples, lists and mappings with one tensor replaced by another."""
    return change_tensors(value, lambda tensor: new if tensor is old else tensor)


def images_of(batch: Any) -> Tensor:
    """The images of a batch: its first floating-point tensor `(batch, channel, y, x)`.

    Args:
        batch: what the model is called on.

    Returns:
        The images.

    Raises:
        ValueError: if there are none.
    """
    for tensor in tensors_of(batch):
        if tensor.ndim == 4 and tensor.is_floating_point():
            if not len(tensor):
                raise ValueError(f"a batch of 0 images {tuple(tensor.shape)}: leave empty batches out.")
            return tensor
    shapes = [tuple(tensor.shape) for tensor in tensors_of(batch)]
    raise ValueError(
        f"no images (batch, channel, y, x) of floating point in the batch, only {shapes or type(batch).__name__}: "
        "convert them with .float() and normalise them as the model expects."
    )


def first_images(batch: Any, count: int) -> Any:
    """The same batch with its first `count` images only."""
    size = len(images_of(batch))

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:count] if tensor.ndim and len(tensor) == size else tensor

    return change_tensors(batch, cut)


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned: a tensor, `.logits`, or the first tensor of a tuple or mapping.

    Args:
        output: the model's return value.

    Returns:
        The logits.

    Raises:
        TypeError: if there is no tensor in it.
    """
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        return output["logits"]
    tensors = tensors_of(output)
    if not tensors:
        raise TypeError(f"the model returned {type(output).__name__} with no tensor in it.")
    return tensors[0]


def targets_of(batch: Any) -> Any:
    """The targets of a batch: the second of a tuple, or `labels` of a mapping.

    Args:
        batch: `(images, labels, ...)` or a mapping.

    Returns:
        The targets.

    Raises:
        ValueError: if there are none.
    """
    if isinstance(batch, Mapping):
        for key in ("labels", "label"):
            if key in batch:
                return batch[key]
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[1]
    raise ValueError("the batch has no targets: give batches of (images, labels), or mappings with 'labels'.")
