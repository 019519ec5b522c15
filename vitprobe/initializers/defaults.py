"""What libraries start their networks with, position codes, and ConViT's local start: the plain initialisations."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr
from torch import Generator, Tensor, nn

from vitprobe.calling import unwrap
from vitprobe.initializers.access import attention_layers, patch_grid, position_code, prefix_tokens
from vitprobe.initializers.report import attributes, dataset, fill_, generator
from vitprobe.models.attention import GaussianPosition, RelativeBias
from vitprobe.models.layers import PositionCode, sincos_positions
from vitprobe.names import unknown

Draw = Callable[[Tensor, Generator], object]


def _normal(tensor: Tensor, source: Generator, *, std: float = 0.02) -> None:
    nn.init.normal_(tensor, std=std, generator=source)


def _zeros(tensor: Tensor, source: Generator) -> None:
    tensor.zero_()


def _glorot(tensor: Tensor, source: Generator) -> None:
    nn.init.xavier_uniform_(tensor, generator=source)


def _fan_in(tensor: Tensor, source: Generator, *, fan: int | None = None) -> None:
    """Uniform on ±1/sqrt(fan in): PyTorch's weights, and with the weights' fan in its biases."""
    bound = (fan or tensor[0].numel()) ** -0.5
    nn.init.uniform_(tensor, -bound, bound, generator=source)


@dataclass(frozen=True)
class _Style:
    """How one library fills linear layers, convolutions, position codes and prefix tokens.

    A bias without a rule is PyTorch's, uniform on ±1/sqrt(fan in) of its weight.
    """

    linear: Draw
    linear_bias: Draw | None
    convolution: Draw
    convolution_bias: Draw | None
    code: Draw
    prefix: Draw
    joint: Draw  # nn.MultiheadAttention's query, key and value in one


STYLES = {
    "vitprobe": _Style(_glorot, _zeros, _fan_in, None, _normal, _normal, _glorot),
    "torch": _Style(_fan_in, None, _fan_in, None, _normal, _normal, _glorot),
    "timm": _Style(_normal, _zeros, _fan_in, None, _normal, partial(_normal, std=1e-6), _normal),
    "deit": _Style(_normal, _zeros, _fan_in, None, _normal, _normal, _normal),
    "transformers": _Style(_normal, _zeros, _normal, _zeros, _normal, _normal, _glorot),
}


@torch.no_grad()
def default_(model: nn.Module, style: str, *, seed: int) -> xr.Dataset:
    """Start a network as a library would: linear layers, convolutions, norms, position code and prefix tokens.

    | style | linear weights | biases | convolutions | position code | prefix tokens |
    |---|---|---|---|---|---|
    | `"vitprobe"` | Glorot's uniform | 0 | PyTorch's | normal 0.02 | normal 0.02 |
    | `"torch"` | uniform ±1/sqrt(fan in) | the same | the same | normal 0.02 | normal 0.02 |
    | `"timm"` | normal 0.02 | 0 | PyTorch's | normal 0.02 | normal 1e-6 |
    | `"deit"` | normal 0.02 | 0 | PyTorch's | normal 0.02 | normal 0.02 |
    | `"transformers"` | normal 0.02 | 0 | normal 0.02, biases 0 | normal 0.02 | normal 0.02 |

    timm, DeiT and transformers cut their normal distribution at ±2, a hundred standard deviations. PyTorch has no
    default for a position code or token; 0.02 is torchvision's code. `nn.MultiheadAttention` gets Glorot's joint matrix
    as PyTorch and transformers do, but a linear layer's weights in the styles of timm and DeiT, which do not use it.
    Norms become the identity, tables of relative bias normal 0.02. All other parameters (layer scale, gates, positions
    of GPSA) and fixed position codes stay as they are.

    Args:
        model: any model.
        style: one of the above.
        seed: draws each parameter by its own name, so that the order of construction does not matter.

    Returns:
        For each parameter that was set, along `layer`: mean, standard deviation and largest magnitude.

    Raises:
        ValueError: if the style is unknown.
    """
    if style not in STYLES:
        raise unknown("style", style, STYLES)
    rules = STYLES[style]
    model = unwrap(model)
    done: dict[str, Tensor] = {}

    def set_(name: str, tensor: Tensor | None, draw: Draw) -> None:
        if tensor is not None:
            fill_(tensor, draw, generator(seed, "default", name))
            done[name] = tensor

    for name, module in model.named_modules():
        at = f"{name}." if name else ""
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            linear = isinstance(module, nn.Linear)
            set_(f"{at}weight", module.weight, rules.linear if linear else rules.convolution)
            bias = rules.linear_bias if linear else rules.convolution_bias
            if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
                bias = _zeros
            set_(f"{at}bias", module.bias, bias or partial(_fan_in, fan=module.weight[0].numel()))
        elif isinstance(module, nn.MultiheadAttention):
            set_(f"{at}in_proj_weight", module.in_proj_weight, rules.joint)
            set_(f"{at}in_proj_bias", module.in_proj_bias, _zeros)
        elif "norm" in type(module).__name__.lower() and callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        elif isinstance(module, RelativeBias):
            set_(f"{at}table", module.table, _normal)
        elif isinstance(module, PositionCode) and isinstance(module.code, nn.Parameter):
            wide = partial(_normal, std=math.sqrt(0.5))
            set_(f"{at}code", module.code, wide if style == "vitprobe" else rules.code)
    for name, token in prefix_tokens(model).items():
        set_(name, token, rules.prefix)
    code = position_code(model)
    if code is not None and code.learned and code.name not in done:
        set_(code.name, code.whole, rules.code)
    values = [tensor.detach().float() for tensor in done.values()]
    return dataset(
        model,
        "default",
        {
            "mean": ([v.mean().cpu() for v in values], "mean of the parameter", "1"),
            "std": ([v.std(correction=0).cpu() for v in values], "standard deviation of the parameter", "1"),
            "largest": ([v.abs().max().cpu() for v in values], "largest magnitude in the parameter", "1"),
        },
        layers=list(done),
        title=f"Parameters initialised as in {style}",
        references="",
        options={"style": style},
        seed=seed,
        style=style,
    )


@torch.no_grad()
def positions_(
    model: nn.Module, *, code: str = "sincos", scale: float = 1.0, seed: int = 0, grid: tuple[int, int] | None = None
) -> xr.Dataset:
    """Write a position code into a model's learned one, which goes on learning from there.

    The rows of prefix tokens become zero, but for `"learned"`.

    Args:
        model: a model with a learned position code.
        code: `"sincos"` (see `sincos_positions`; root mean square 0.71), `"identity"` (a channel for each patch), or
            `"learned"` (normal of standard deviation 0.02, the libraries' default).
        scale: multiplies it; Zheng et al. 2025 (arXiv:2505.19985) take 18 times `"learned"`.
        seed: draws `"learned"`.
        grid: rows and columns of patches, where the model does not say.

    Returns:
        The singular values of the patches' code along `rank`; their number above 1e-6 of the largest, which is all that
        queries and keys can tell patches apart by, is the attribute `numerical_rank`.

    Raises:
        ValueError: if the code is unknown or does not fit, or the model has no learned one.
    """
    if code not in ("sincos", "identity", "learned"):
        raise unknown("position code", code, ("sincos", "identity", "learned"))
    model = unwrap(model)
    grid = grid or patch_grid(model)
    found = position_code(model, grid)
    if found is None or not found.learned:
        what = "no position code that it adds to its tokens" if found is None else f"a fixed code ({found.name})"
        raise ValueError(
            f"{type(model).__name__} has {what}: build it with a learned one (vitprobe: position='learned')."
        )
    tokens, dim = found.code.shape
    if code == "identity" and dim < tokens:
        raise ValueError(f"an identity code gives each of {tokens} patches a channel of its own; there are {dim}.")
    if code == "learned":
        fill_(found.whole, partial(_normal, std=0.02 * scale), generator(seed, "positions"))
    else:
        found.whole.zero_()
        found.code.copy_(scale * (sincos_positions(grid, dim) if code == "sincos" else torch.eye(tokens, dim)))
    values = torch.linalg.svdvals(found.code.double()).cpu().numpy()
    ds = xr.Dataset(
        {"singular_value": ("rank", values, {"long_name": "singular value of the position code", "units": "1"})},
        coords={"rank": ("rank", np.arange(len(values)), {"long_name": "rank of the singular value", "units": "1"})},
    )
    ds.attrs = attributes(
        model,
        "positions",
        title="Singular values of a position code",
        references="Zheng, Li & Lucey 2024, arXiv:2401.12511",
        options={"code": code, "scale": scale, "grid": grid},
        seed=seed,
        code=code,
        numerical_rank=int((values > 1e-6 * values[0]).sum()),
    )
    return ds


@torch.no_grad()
def gpsa_(model: nn.Module, *, strength: float = 1.0, centers: str = "code", gate: float = 1.0) -> xr.Dataset:
    """Start gated positional self-attention as a convolution (d'Ascoli et al. 2021, section 4).

    Each head's Gaussian of position gets its place on a square lattice of offsets, values become the identity and gates
    equal; queries, keys and outputs stay as they are. Nothing is drawn.

    Args:
        model: vitprobe's `convit` or timm's.
        strength: inverse width of the Gaussians [1/patch^2], the paper's alpha.
        centers: where an even lattice sits, `"code"` or `"paper"`; see `GaussianPosition.set_local_`.
        gate: logit of the share of position in the maps.

    Returns:
        By layer and head, read back from the weights: `strength`, `offset_y` and `offset_x` of the Gaussian (NaN where
        heads beyond the square have none), and `position_share`, the sigmoid of the gate.

    Raises:
        ValueError: if the model has no such attention, or its values cannot be the identity.
    """
    layers = [layer for layer in attention_layers(model) if _gaussian(layer.module) is not None]
    if not layers:
        raise ValueError(
            f"{type(unwrap(model)).__name__} has no gated positional self-attention: see create_model('convit')."
        )
    for layer in layers:
        if layer.value is None or layer.value.weight.flatten(0, 1).shape[0] != layer.value.weight.shape[2]:
            raise ValueError(f"the values of {layer.name} are not as wide as its tokens, so cannot be the identity.")
    columns: dict[str, list[Tensor]] = {name: [] for name in ("strength", "offset_y", "offset_x", "position_share")}
    for layer in layers:
        found = _gaussian(layer.module)
        assert found is not None and layer.value is not None
        vector, order, gates = found
        vector[:, order] = _lattice(layer.heads, strength, centers).to(vector)
        if gates is not None:
            gates.fill_(gate)
        layer.value.write_(torch.eye(layer.value.weight.shape[2]).view(layer.value.weight.shape))
        square, x, y = vector[:, order].cpu().unbind(1)
        columns["strength"].append(-square)
        columns["offset_x"].append(-x / (2 * square))
        columns["offset_y"].append(-y / (2 * square))
        share = torch.ones(layer.heads) if gates is None else gates.sigmoid().cpu()
        columns["position_share"].append(share)
    text = {
        "strength": ("inverse width of the Gaussian of position", "patches-2"),
        "offset_y": ("rows from query to the Gaussian's centre", "patches"),
        "offset_x": ("columns from query to the Gaussian's centre", "patches"),
        "position_share": ("share of position in the map", "1"),
    }
    return dataset(
        model,
        "gpsa",
        {name: (columns[name], *text[name]) for name in text},
        layers=[layer.name for layer in layers],
        title="Locally initialised gated positional self-attention",
        references="d'Ascoli et al. 2021, ConViT, arXiv:2103.10697",
        options={"strength": strength, "centers": centers, "gate": gate},
        centers=centers,
    )


def _gaussian(module: nn.Module) -> tuple[Tensor, list[int], Tensor | None] | None:
    """Weights of position (head, 3), their columns of (distance squared, x, y), and the gates (head,)."""
    position, gate = getattr(module, "position", None), getattr(module, "gate", None)
    if isinstance(position, GaussianPosition):
        return position.vector.detach(), [0, 1, 2], None if gate is None else gate.detach()
    position, gate = getattr(module, "pos_proj", None), getattr(module, "gating_param", None)
    if isinstance(position, nn.Linear) and isinstance(gate, nn.Parameter) and position.in_features == 3:  # timm
        return position.weight.detach(), [2, 0, 1], gate.detach()
    return None


def _lattice(heads: int, strength: float, centers: str) -> Tensor:
    with torch.random.fork_rng(devices=[]):  # a new module draws weights, which are overwritten
        position = GaussianPosition((1, 1), heads)
    position.set_local_(strength=strength, centers=centers)
    return position.vector.detach()
