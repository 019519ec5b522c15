"""One forward pass of any eager model, seen operation by operation.

A `TorchFunctionMode` sees every call of PyTorch's Python interface, whichever library makes it; module hooks say
where it happens. The tracer keeps the graph of activations (shapes and arrows, no tensors) and, as it grows, each
node's *immediate dominator*: the last tensor through which every path from the images to it leads. The dominators
of the logits are the residual stream, since a skip connection leads around whatever happens inside a branch.
"""

import importlib
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from vitprobe.attach.maps import MapSource, recognise
from vitprobe.attach.places import Places
from vitprobe.calling import Forward, eager, replace_tensor, tensors_of

Op = Literal["add", "attention", "kernel", "conv", "linear", "pool", "scan", "other"]

ADD = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, operator.add}
CONV = {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d}
POOL = {F.avg_pool2d, F.max_pool2d, F.adaptive_avg_pool2d, F.interpolate}
PRODUCT = {
    F.linear,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    torch.bmm,
    Tensor.bmm,
}
PRODUCT |= {torch.einsum, torch.addmm, torch.baddbmm, F.bilinear}
# What mixes positions without a kernel, by name: `torch.fft` is called `fft_...`.
SCAN = {"roll", "cumsum", "cumprod", "logcumsumexp", "lstm", "gru", "rnn_tanh", "rnn_relu"}
CHANNELS_FIRST = {F.conv2d, F.batch_norm, F.group_norm, F.max_pool2d, F.avg_pool2d}
CHANNELS_LAST = {F.linear, F.layer_norm, F.multi_head_attention_forward}
PERMUTE = {torch.permute, Tensor.permute}
RESHAPE = {torch.reshape, Tensor.reshape, Tensor.view, torch.transpose, Tensor.transpose, torch.movedim, Tensor.movedim}


@dataclass(frozen=True)
class Event:
    """When something happens in a forward pass, so that it can be found again in the next one.

    Counted inside each module's call and by function, because a model may run other operations the first time than
    later (tables it caches, say).

    Attributes:
        call: the n-th call of a module in the pass; 0 is outside of any.
        function: the function called in it; empty when it is the module's return.
        number: the n-th call of that function there.
    """

    call: int
    function: str
    number: int


@dataclass
class Node:
    """One activation of the traced pass.

    Attributes:
        event: when it came to be.
        op: what made it, as far as kinds of units care.
        module: path of the module it was made in.
        shape: its shape.
        parents: the activations it was made from, as indices into `Trace.nodes`.
        dominator: index of its immediate dominator; -1 for the images themselves.
        height: number of its dominators.
        operands: for an addition, the nodes of its two operands in order.
        source: for an attention, where its map comes from.
        channels_last: where the channels of four axes are, as far as the operations around it tell.
        places: where its tokens lie in the image, and which axis its channels are; `None` if that was lost.
        queries: for an attention, where the queries of its map lie `(..., query)`; `None` if that was lost.
        keys: the same of its keys `(..., key)`.
        images: of which image each of them is `(..., key)`: 0 for the first, 1 for another, NaN for one at no place.
    """

    event: Event
    op: Op
    module: str
    shape: tuple[int, ...]
    parents: tuple[int, ...]
    dominator: int
    height: int
    operands: tuple[int, ...] = ()
    source: MapSource | None = None
    channels_last: bool | None = None
    places: tuple[np.ndarray, int] | None = None
    queries: np.ndarray | None = None
    keys: np.ndarray | None = None
    images: np.ndarray | None = None


@dataclass
class ModuleCall:
    """One module that returned during the traced pass: the node of its first tensor, if it depends on the images."""

    event: Event
    name: str
    shape: tuple[int, ...]
    node: int | None


@dataclass
class Trace:
    """The graph of activations of one forward pass; node 0 stands for everything that was put in."""

    nodes: list[Node] = field(default_factory=list)
    constant_maps: list[tuple[Event, str, tuple[int, ...]]] = field(default_factory=list)  # softmaxes of weights alone
    modules: list[ModuleCall] = field(default_factory=list)
    output: int | None = None

    def stream(self) -> list[int]:
        """The nodes that every path from the images to the logits leads through, in order, node 0 first."""
        path = []
        node = self.output if self.output is not None else len(self.nodes) - 1
        while node >= 0:
            path.append(node)
            node = self.nodes[node].dominator
        return path[::-1]

    def between(self, start: int, end: int) -> list[int]:
        """The nodes that `end` was made from, back to `start`, which dominates it; `end` included."""
        seen, waiting = set(), [end]
        while waiting:
            node = waiting.pop()
            if node != start and node not in seen:
                seen.add(node)
                waiting.extend(self.nodes[node].parents)
        return sorted(seen)

    def distance(self, start: int, end: int) -> int:
        """The fewest operations from `start`, which dominates `end`, to `end`."""
        steps = {start: 0}
        for node in self.between(start, end):
            steps[node] = 1 + min(steps[parent] for parent in self.nodes[node].parents)
        return steps[end]


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """The path of every module as if none were compiled; the model itself goes by its class."""
    paths = {module: name.split(".") for name, module in model.named_modules() if "_orig_mod" not in module._modules}
    names = {module: ".".join(part for part in path if part != "_orig_mod") for module, path in paths.items()}
    return names | {model: type(model).__name__}


@dataclass
class _Frame:
    """One module's call under way."""

    name: str
    call: int
    functions: dict[str, int] = field(default_factory=dict)


class Clock(TorchFunctionMode):
    """Counts the operations and module calls of a forward pass, and calls back at each.

    Base of the tracer, which records all, and of a replay, which waits for a few. Only calls that return tensors
    or change one count; reading a shape does not.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = names_of(model)
        self.stack: list[_Frame] = []
        self.calls = 0
        self._handing_over = False

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._handing_over:  # an operation of `on_module`, not of the model
            return func(*args, **kwargs)
        frame, name = self.stack[-1], func.__name__
        event = Event(frame.call, name, frame.functions.get(name, 0) + 1)
        result = self.instead(event, func, args, kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        if func is Tensor.__setitem__:
            changed: Any = args[0]
        elif isinstance(result, Tensor | tuple | list):
            changed = result
        else:
            return result
        if tensors := tensors_of(changed):
            frame.functions[name] = event.number
            replacement = self.on_operation(event, func, args, kwargs, tensors)
            if replacement is not None:
                return replace_tensor(result, tensors[0], replacement)
        return result

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch for the length of a `with`; everything global is removed on any exit."""
        self.calls = 0
        self.stack = [_Frame("", 0)]
        # On every module and not global, so as to come after its own hooks, which may change what it returns.
        # always_call: the stack stays right when a forward raises and the model catches it
        plain = [module for module in self.names if not isinstance(module, torch.jit.ScriptModule)]
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave_script, always_call=True),
            *(module.register_forward_hook(self._leave, always_call=True) for module in plain),
        ]
        try:
            with _uncompiled(), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> Any:
        if module not in self.names:
            return None
        self.calls += 1
        self.stack.append(_Frame(self.names[module], self.calls))
        self._handing_over = True
        try:
            changed = self.inputs_of(self.calls, args)
        finally:
            self._handing_over = False
        return None if changed is args else changed  # a hook that returns something replaces the arguments

    def inputs_of(self, call: int, args: tuple) -> tuple:
        """Called before each module of the model: the positional arguments that it is to be called with."""
        return args

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if module not in self.names:
            return None
        frame = self.stack.pop()
        if tensors := tensors_of(output):
            self._handing_over = True
            try:
                replacement = self.on_module(Event(frame.call, "", 0), frame.name, args, tensors)
            finally:
                self._handing_over = False
            if replacement is not None:
                return replace_tensor(output, tensors[0], replacement)
        return None  # a hook that returns something replaces the module's output

    def _leave_script(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The same of what takes no hooks of its own."""
        return self._leave(module, args, output) if isinstance(module, torch.jit.ScriptModule) else None

    def instead(self, event: Event, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Called before each operation: what it is to return without being run, or `NotImplemented` to run it."""
        return NotImplemented

    def on_operation(
        self, event: Event, func: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Tensor | None:
        """Called after each operation with the tensors that it returned or changed; may give another for the first."""
        raise NotImplementedError

    def on_module(self, event: Event, name: str, args: Any, tensors: list[Tensor]) -> Tensor | None:
        """Called after each module of the model that returned tensors; may give another for the first."""
        raise NotImplementedError


def _uncompiled() -> AbstractContextManager[Any]:
    """Nothing is compiled while it is watched, also where the compiler would be imported by the model itself."""
    if "torch.nn.attention.flex_attention" in sys.modules:
        importlib.import_module("torch._dynamo")  # else `eager` takes it for unused; flex_attention compiles itself
    return eager()


class Replay(Clock):
    """Forward passes of a traced model, in each of which all that was planned has to come by.

    Attributes:
        planned: how many events.
        awaited: what they are, in the plural.
        came: how many of them have come by in this pass.
        kept: what one event leaves for a later one of the same pass.
    """

    awaited = "events"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.planned = self.came = 0
        self.kept: dict[Any, Tensor] = {}

    def __call__(self, forward: Forward, model: nn.Module, batch: Any) -> Any:
        """Run one forward pass.

        Args:
            forward: calls the model on a batch.
            model: the module that was traced.
            batch: the batch.

        Returns:
            What the model returned.

        Raises:
            RuntimeError: if the pass ran other operations than the traced one.
        """
        self.came = 0
        try:
            with self.running():
                output = forward(model, batch)
        finally:
            self.kept.clear()
        if self.came != self.planned:
            raise RuntimeError(
                f"the forward pass changed since it was traced: {self.came} of {self.planned} {self.awaited} took "
                "place. The model decides by the data or the batch size what to run: give batches of one size, or a "
                "forward= that always runs the same."
            )
        return output


class Tracer(Clock):
    """Records the graph of one forward pass into `trace`."""

    def __init__(self, model: nn.Module, inputs: list[Tensor], images: Tensor) -> None:
        super().__init__(model)
        self.places = Places(images, lambda tensor: self.node_of(tensor) is not None)
        self.trace = Trace([Node(Event(0, "", 0), "other", "", tuple(inputs[0].shape), (), -1, 0)])
        # Weak keys: the trace never keeps an activation alive, and a freed one's identity is never reused.
        # `None` marks what is known not to depend on the images.
        constants = dict.fromkeys([*model.parameters(), *model.buffers()])
        self._node: WeakIdKeyDictionary = WeakIdKeyDictionary(constants | {tensor: 0 for tensor in inputs})
        self._softmaxes: WeakIdKeyDictionary = WeakIdKeyDictionary()  # to whether columns were cut off since

    def node_of(self, tensor: Tensor) -> int | None:
        """The node of a tensor; `None` if it does not depend on the images."""
        return self._node.get(tensor)

    def on_operation(
        self, event: Event, func: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        """Record what one operation made from what."""
        parents = self._nodes_of([*tensors_of(list(args)), *tensors_of(kwargs)])
        if not parents:
            for tensor in tensors:
                self._node.setdefault(tensor, None)
            if event.function == "softmax":
                self.trace.constant_maps.append((event, self.stack[-1].name, tuple(tensors[0].shape)))
            return
        op: Op = self._classify(func, args, kwargs)
        source = recognise(func, args, kwargs, lambda x: self._softmaxes.get(x, False))
        self._follow_softmax(event.function, args, tensors)
        operands: tuple[int, ...] = ()
        if source is not None:
            op = "attention"
        elif op == "add":
            operands = self._operands(args, kwargs)
        node = Node(
            event,
            op,
            self.stack[-1].name,
            tuple(tensors[0].shape),
            tuple(dict.fromkeys(parents)),
            *self._dominate(parents),
            operands,
            source,
        )
        node.channels_last = self._find_channels(func, node)
        self._follow(node, func, args, kwargs, tensors)
        self._record(node, tensors)

    def on_module(self, event: Event, name: str, args: Any, tensors: list[Tensor]) -> None:
        """Record a module's return, and bridge operations that no mode sees (scripted activations, say)."""
        unseen = [tensor for tensor in tensors if tensor not in self._node]
        parents = self._nodes_of(tensors_of(args))
        if unseen and parents:
            shape = tuple(unseen[0].shape)
            self.places.pass_on(tensors_of(args), unseen)
            self._record(Node(event, "other", name, shape, tuple(parents), *self._dominate(parents)), unseen)
        self.trace.modules.append(ModuleCall(event, name, tuple(tensors[0].shape), self.node_of(tensors[0])))

    def _nodes_of(self, tensors: list[Tensor]) -> list[int]:
        return [node for tensor in tensors if (node := self.node_of(tensor)) is not None]

    def _record(self, node: Node, tensors: list[Tensor]) -> None:
        node.places = self.places.of_tokens(tensors[0])
        self.trace.nodes.append(node)
        for tensor in tensors:
            self._node[tensor] = len(self.trace.nodes) - 1

    def _dominate(self, parents: list[int]) -> tuple[int, int]:
        nodes = self.trace.nodes
        common = parents[0]
        for other in parents[1:]:
            while common != other:
                if nodes[common].height < nodes[other].height:
                    common, other = other, common
                common = nodes[common].dominator
        return common, nodes[common].height + 1

    def _find_channels(self, func: Callable, node: Node) -> bool | None:
        """Whether channels are last: some operations tell, of what they take and give; most others pass it on."""
        parents = [self.trace.nodes[parent] for parent in node.parents]
        if func in CHANNELS_FIRST or func in CHANNELS_LAST:
            if parents[0].channels_last is None:
                parents[0].channels_last = func in CHANNELS_LAST
            return func in CHANNELS_LAST
        known = [parent for parent in parents if parent.channels_last is not None]
        if func in PERMUTE:
            return not known[0].channels_last if known else None
        same = [parent.channels_last for parent in known if parent.shape == node.shape and func not in RESHAPE]
        return same[0] if same else None

    def _follow_softmax(self, name: str, args: tuple, tensors: list[Tensor]) -> None:
        if name == "softmax":
            self._softmaxes[tensors[0]] = False
        elif args and isinstance(args[0], Tensor) and args[0] in self._softmaxes:
            if name in ("__getitem__", "narrow"):
                shorter = tensors[0].ndim == args[0].ndim and tensors[0].shape[-1] < args[0].shape[-1]
                self._softmaxes[tensors[0]] = shorter or self._softmaxes[args[0]]
            elif name in ("dropout", "to", "type", "contiguous", "view", "reshape", "expand"):
                self._softmaxes[tensors[0]] = self._softmaxes[args[0]]
        sums = ("mul", "add", "__mul__", "__rmul__", "__add__", "__radd__")  # of which a gated map is made
        if name in sums and any(self._softmaxes.get(x, False) for x in tensors_of(list(args[:2]))):
            self._softmaxes[tensors[0]] = True

    def _follow(self, node: Node, func: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        """Where the tokens of an operation's result lie, and those of the map that it applies, if it does."""
        if node.source is not None:
            if self._of_one(node.source, args, kwargs) and self.places.gather(node.source, args, kwargs, tensors):
                node.keys = np.empty(0)
                return
            node.queries, node.keys, node.images = self.places.of_attention(node.source, func, args, kwargs)
        self.places.follow(func, args, kwargs, tensors)

    def _of_one(self, source: MapSource, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether what looks like a map is one activation, normalised, and no product of two: followed by its size."""
        if source.kind != "product":
            return False
        waiting = self._nodes_of([tensors_of([*args, kwargs])[source.operand]])
        for node in (self.trace.nodes[n] for n in waiting):  # grows
            if node.op == "attention":
                return False
            if node.op not in ("linear", "conv"):
                size = sorted(node.shape[-2:])
                same = [n for n in node.parents if sorted(self.trace.nodes[n].shape[-2:]) == size]
                waiting += [n for n in same if n not in waiting]
        return True

    def _operands(self, args: tuple, kwargs: dict[str, Any]) -> tuple[int, ...]:
        pair = tensors_of([*args[:2], kwargs.get("other")])
        if len(pair) != 2 or pair[0].shape != pair[1].shape:
            return ()
        nodes = self._nodes_of(pair)
        return tuple(nodes) if len(nodes) == 2 else ()

    def _classify(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Op:
        if func in ADD:
            return "add"
        if func in CONV:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            return "linear" if all(side == 1 for side in weight.shape[2:]) else "conv"
        if func in POOL:
            return "pool"
        if func.__name__ in SCAN or func.__name__.startswith("fft_"):
            return "scan"
        if func in PRODUCT:  # by a weight, or by another activation
            constant = any(self.node_of(tensor) is None for tensor in tensors_of([*args, kwargs]))
            return "linear" if constant else "attention"
        if "attention" in func.__name__ and isinstance(func, torch._ops.HigherOrderOperator):
            return "kernel"  # torch.nn.attention.flex_attention, which is no overload of an operator
        if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            # No public function: a kernel of one's own, which mixes activations that it takes together.
            mixed = {id(x) for x in tensors_of([*args, kwargs]) if self.node_of(x) is not None}
            return "kernel" if len(mixed) > 1 else "other"
        return "other"
