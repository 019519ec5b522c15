"""Where a model keeps its attention weights and its position code, whichever library wrote it.

Found by structure: names of linear layers and the number of heads beside them. Every weight comes as a view, so that
writing to it writes to the model.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitprobe.calling import unwrap
from vitprobe.models.attention import Attention, Mixture

# Names of the linear layers that hold query, key and value, in this order. The rows of a layer that holds several are
# (query, key, value) x head x channel.
_LAYOUTS = (
    ("qkv",),
    ("to_qkv",),
    ("query_key", "value"),
    ("qk", "v"),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
)
_HELD = {1: (3,), 2: (2, 1), 3: (1, 1, 1)}
_OUTPUTS = ("project", "proj", "out_proj", "o_proj", "to_out")
_HEADS = ("heads", "num_heads", "num_attention_heads", "n_heads")
_KEY_HEADS = ("num_kv_heads", "num_key_value_heads", "kv_heads")
_QUERY_NORM = re.compile(r"(q|k|qk|query|key)_?(layer)?_?norm")
_CODE = re.compile(
    r"(^|\.)(position|pos_embed|pos_embedding|positional_embedding|position_embeddings?)(\.(code|weight))?$"
)
_PREFIX = (
    "cls_token", "class_token", "class_embedding", "dist_token", "distillation_token", "reg_token", "register_tokens",
    "prefix",
)  # fmt: skip


@dataclass(frozen=True)
class Projection:
    """Views of one linear map into the heads: `weight` (head, channel, dim), `bias` (head, channel) or `None`."""

    weight: Tensor
    bias: Tensor | None

    def write_(self, weight: Tensor) -> None:
        """Set the weight; a bias becomes zero, so that the map is what the weight says."""
        self.weight.copy_(weight)
        if self.bias is not None:
            self.bias.zero_()


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer: `softmax(scale x Q_h^T K_h x^T)` and `x V_h^T O_h`, `Q_h` being `query.weight[h]`.

    Attributes:
        name: path of the module.
        module: it.
        heads: number of heads.
        scale: what the content logits are multiplied by.
        query: projection to the queries; `None` where maps have no content.
        key: projection to the keys.
        value: projection to the values; `None` where tokens are mixed as they are.
        output: view of the output weights (head, channel, dim out); `None` where there are none.
        output_bias: its bias (dim out).
        beside: names of what else the maps are made of: relative biases, gates, masks, norms of query and key.
    """

    name: str
    module: nn.Module = field(repr=False)
    heads: int
    scale: float
    query: Projection | None
    key: Projection | None
    value: Projection | None
    output: Tensor | None
    output_bias: Tensor | None
    beside: tuple[str, ...]

    def query_key(self) -> tuple[Projection, Projection]:
        """The projections to queries and keys.

        Returns:
            Both.

        Raises:
            ValueError: if there are none, or the layer norms what they give.
        """
        if self.query is None or self.key is None:
            raise ValueError(f"{self.name} has no queries and keys: its maps are made of {', '.join(self.beside)}.")
        if norms := [name for name in self.beside if _QUERY_NORM.fullmatch(name)]:
            raise ValueError(
                f"{self.name} norms its queries and keys ({', '.join(norms)}), so that their product is not what its "
                "weights say: build the model without (timm: qk_norm=False)."
            )
        return self.query, self.key

    def value_output(self) -> tuple[Projection, Tensor]:
        """The projection to the values and the output weights.

        Returns:
            Both.

        Raises:
            ValueError: if either is missing.
        """
        if self.value is None or self.output is None:
            missing = "values" if self.value is None else "output layer"
            raise ValueError(f"{self.name} has no {missing} of its own: leave value and output out.")
        return self.value, self.output


@dataclass(frozen=True)
class PositionCode:
    """A model's position code.

    Attributes:
        name: path of the parameter or buffer.
        whole: view of all its rows (token, dim): those of prefix tokens, if it has such, then one per patch.
        patches: how many of them are the patches'.
        prefix: what the prefix tokens enter the first layer as (token, dim).
        learned: whether it is a parameter.
    """

    name: str
    whole: Tensor
    patches: int
    prefix: Tensor
    learned: bool

    @property
    def code(self) -> Tensor:
        """The rows of the patches (token, dim), a view."""
        return self.whole[len(self.whole) - self.patches :]


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """All attention layers in the order in which the model declares them.

    Args:
        model: vitprobe's, timm's, torchvision's, transformers', or any whose attention is an `nn.MultiheadAttention`
            or has linear layers of the usual names.

    Returns:
        The layers.

    Raises:
        ValueError: if there are none, or one whose weights mean something else, with the reason.
    """
    model = unwrap(model)
    layers = list(_find(model))
    if not layers:
        raise ValueError(
            f"no attention layer was found in {type(model).__name__}: looked for nn.MultiheadAttention, and for the "
            f"number of heads beside linear layers named {', '.join('/'.join(names) for names in _LAYOUTS)}."
        )
    return layers


def skipped(model: nn.Module, layers: list[AttentionLayer]) -> list[str]:
    """Modules that call themselves attention and are not among the layers, nor around or inside of one."""
    names = [
        name
        for name, module in unwrap(model).named_modules()
        if re.search("attention|attn", type(module).__name__, re.IGNORECASE)
        and not any(_within(name, layer.name) or _within(layer.name, name) for layer in layers)
    ]
    return [name for name in names if not any(other != name and _within(name, other) for other in names)]


def _within(inner: str, outer: str) -> bool:
    return f"{inner}.".startswith(f"{outer}.") or not outer


def _find(model: nn.Module) -> Iterator[AttentionLayer]:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield _multihead(name, module)
            continue
        heads = next((count for key in _HEADS if isinstance(count := getattr(module, key, None), int)), None)
        layout = next((names for names in _LAYOUTS if _has(module, names)), None)
        if heads is not None and layout is not None:
            yield _by_layout(model, name, module, heads, layout)


def _has(module: nn.Module, names: tuple[str, ...]) -> bool:
    if isinstance(module, Attention):  # which may lack queries and keys, or values
        return names == ("query_key", "value")
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def _multihead(name: str, module: nn.MultiheadAttention) -> AttentionLayer:
    if module.in_proj_weight is None:
        raise ValueError(f"{name} attends from tokens to others of another width; only self-attention is initialised.")
    dim, heads = module.embed_dim, module.num_heads
    bias = module.in_proj_bias
    query, key, value = _split(name, module.in_proj_weight, bias, held=3, heads=heads)
    output, output_bias = _output(name, module.out_proj, heads, dim)
    return AttentionLayer(
        name=name,
        module=module,
        heads=heads,
        scale=(dim // heads) ** -0.5,
        query=query,
        key=key,
        value=value,
        output=output,
        output_bias=output_bias,
        beside=tuple(
            extra
            for extra, there in (("bias_k", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn))
            if there
        ),
    )


def _by_layout(model: nn.Module, name: str, module: nn.Module, heads: int, layout: tuple[str, ...]) -> AttentionLayer:
    key_heads = next((count for key in _KEY_HEADS if isinstance(count := getattr(module, key, None), int)), heads)
    projections: list[Projection | None] = []
    for part, held in zip(layout, _HELD[len(layout)], strict=True):
        linear = getattr(module, part)
        if isinstance(linear, nn.Linear):
            projections += _split(f"{name}.{part}".lstrip("."), linear.weight, linear.bias, held=held, heads=heads)
        else:
            projections += [None] * held
    query, key, value = projections
    if key_heads != heads or (query and key and query.weight.shape != key.weight.shape):
        raise ValueError(
            f"{name} has {heads} heads for its queries and others for its keys (grouped-query attention), which is not "
            "supported: there is no product of one query and one key matrix per head."
        )
    found = [(part, _linear_in(getattr(module, part, None))) for part in _OUTPUTS]
    if name and not any(linear for _, linear in found):  # transformers up to 4: the output layer lies beside
        parent = model.get_submodule(name.rpartition(".")[0])
        found.append(("", _linear_in(getattr(parent, "output", None))))
    output_name, output_layer = next((pair for pair in found if pair[1] is not None), ("", None))
    output, output_bias = None, None
    if output_layer is not None and value is not None:
        label = f"{name}.{output_name}".strip(".")
        output, output_bias = _output(label, output_layer, heads, heads * value.weight.shape[1])
    width = next((part.weight.shape[1] for part in (query, value) if part is not None), 1)
    scale = next((s for key in ("scale", "scaling") if isinstance(s := getattr(module, key, None), float)), width**-0.5)
    return AttentionLayer(
        name=name,
        module=module,
        heads=heads,
        scale=scale,
        query=query,
        key=key,
        value=value,
        output=output,
        output_bias=output_bias,
        beside=_beside(module, {*layout, output_name}),
    )


def _split(name: str, weight: Tensor, bias: Tensor | None, *, held: int, heads: int) -> list[Projection]:
    """The projections that the rows of one weight hold, one after the other."""
    if not isinstance(weight, nn.Parameter):
        raise ValueError(f"the weight of {name} is computed from others (a parametrisation), which cannot be written.")
    rows, dim = weight.shape
    if rows % (held * heads):
        raise ValueError(
            f"{name} has {rows} rows, which are not {held} times as many for each of {heads} heads: grouped-query "
            "attention is not supported."
        )
    shape = (held, heads, rows // (held * heads))
    biases = [None] * held if bias is None else list(bias.detach().view(shape))
    return [Projection(*pair) for pair in zip(weight.detach().view(*shape, dim), biases, strict=True)]


def _output(name: str, linear: nn.Linear, heads: int, width: int) -> tuple[Tensor, Tensor | None]:
    """The output weights by head and their bias."""
    if not isinstance(linear.weight, nn.Parameter):
        raise ValueError(f"the weight of {name} is computed from others (a parametrisation), which cannot be written.")
    if linear.in_features != width:
        raise ValueError(f"{name} takes {linear.in_features} channels where the heads give {width}.")
    weight = linear.weight.detach().view(linear.out_features, heads, width // heads).permute(1, 2, 0)
    return weight, None if linear.bias is None else linear.bias.detach()


def _linear_in(module: object) -> nn.Linear | None:
    """The linear layer that a module is or holds."""
    if not isinstance(module, nn.Module):
        return None
    return next((inner for inner in module.modules() if isinstance(inner, nn.Linear)), None)


def _beside(module: nn.Module, known: set[str]) -> tuple[str, ...]:
    """What a layer's maps are made of besides its projections."""
    if isinstance(module, Attention):
        parts = {name: getattr(module, name) for name in ("position", "gate", "mask")}
        return tuple(name for name, part in parts.items() if part is not None) + (("sink",) if module.sink else ())
    children = [
        name
        for name, child in module.named_children()
        if name not in known
        and not isinstance(child, nn.Identity)
        and (_QUERY_NORM.fullmatch(name) or (next(child.parameters(), None) is not None and "norm" not in name))
    ]
    return (*(name for name, _ in module.named_parameters(recurse=False)), *children)


def position_code(model: nn.Module, grid: tuple[int, int] | None = None) -> PositionCode | None:
    """The position code that a model adds to its tokens, found by its name; `None` without one.

    Args:
        model: the model.
        grid: rows and columns of patches; as many patches as the code has rows unless given.

    Returns:
        The code.

    Raises:
        ValueError: if it has fewer rows than there are patches, or is no table of rows at all.
    """
    model = unwrap(model)
    parameters = dict(model.named_parameters())
    tensors = parameters | dict(model.named_buffers())
    name = next((name for name in tensors if _CODE.search(name) and tensors[name].is_floating_point()), None)
    if name is None:
        return None
    whole = _rows(name, tensors[name].detach())
    patches = len(whole) if grid is None else grid[0] * grid[1]
    if len(whole) < patches:
        raise ValueError(
            f"the position code {name} has {len(whole)} rows for a grid of {grid} patches: give grid=(rows, columns)."
        )
    own = whole[: len(whole) - patches]  # the code's own rows for prefix tokens, the first of them
    tokens = [row for token in prefix_tokens(model).values() for row in token.reshape(-1, whole.shape[1])]
    prefix = torch.zeros(max(len(own), len(tokens)), whole.shape[1]).to(whole)
    prefix[: len(own)] = own
    for row, token in zip(prefix, tokens, strict=False):
        row += token
    return PositionCode(name, whole, patches, prefix, name in parameters)


def _rows(name: str, code: Tensor) -> Tensor:
    """A view (token, dim) of a code, which some models, PiT among them, keep as a map of channels."""
    if code.ndim == 4 and len(code) == 1 and code.shape[2] == code.shape[3] != code.shape[1]:
        return code[0].flatten(1).T
    if code.ndim > 4 or any(size != 1 for size in code.shape[:-3]):
        raise ValueError(f"the position code {name} of shape {tuple(code.shape)} has not one row for each token.")
    return code.view(-1, code.shape[-1])


def prefix_tokens(model: nn.Module) -> dict[str, Tensor]:
    """The learned tokens that a model puts before its patches, by the name of the parameter."""
    parameters = unwrap(model).named_parameters()
    return {name: parameter.detach() for name, parameter in parameters if name.rpartition(".")[2] in _PREFIX}


def mixed_code(layer: AttentionLayer) -> tuple[Tensor, float] | None:
    """The position code that a layer mixes into its own queries and keys, and its share; `None` without one."""
    source = getattr(layer.module, "source", None)
    return (source.code().detach(), 1 - source.alpha) if isinstance(source, Mixture) else None


def patch_grid(model: nn.Module) -> tuple[int, int]:
    """Rows and columns of patches, as the model declares them.

    Args:
        model: the model.

    Returns:
        The grid.

    Raises:
        ValueError: if it declares none.
    """
    model = unwrap(model)
    for module in model.modules():
        for name in ("grid", "grid_size"):
            if isinstance(grid := getattr(module, name, None), tuple | list) and (pair := _pair(grid)):
                return pair
    for owner in (model, getattr(model, "config", None), *model.modules()):
        image, patch = (_pair(getattr(owner, name, None)) for name in ("image_size", "patch_size"))
        if image and patch:
            return image[0] // patch[0], image[1] // patch[1]
    raise ValueError(f"{type(model).__name__} does not say how its patches are laid out: give grid=(rows, columns).")


def _pair(size: Any) -> tuple[int, int] | None:
    """Two whole numbers of a size given as one or two; `None` of anything else."""
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    return pair if len(pair) == 2 and all(isinstance(side, int) for side in pair) else None
