"""Queries and keys whose maps are impulses: each head looks at one offset, as a random impulse filter does.

Zheng, Li & Lucey 2024, *Convolutional Initialization for Data-Efficient Vision Transformers*, arXiv:2401.12511. A head
draws one tap of a `kernel_size x kernel_size` kernel, and its queries and keys are fitted so that attention between
the position codes of any two patches is 1 at that offset and 0 elsewhere.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn

from vitprobe.initializers.access import (
    AttentionLayer,
    PositionCode,
    attention_layers,
    mixed_code,
    patch_grid,
    position_code,
    skipped,
)
from vitprobe.initializers.impulse_fit import (
    Impulses,
    ImpulseSpec,
    content_logits,
    draw_offsets,
    fit_adam,
    fit_closed_form,
)
from vitprobe.initializers.report import dataset, generator
from vitprobe.names import unknown
from vitprobe.results import to_json

SETTINGS = {
    "sharp": ImpulseSpec(),
    # arXiv:2401.12511 and its code
    "paper": ImpulseSpec(
        kernel_size=5,
        boundary="zero",
        pseudo_input="positions",
        loss="squared error",
        coordinates="weights",
        scale=0.1,
        lr=1e-4,
        steps=10_000,
        weight_norm=100,
        target_mass=None,
    ),
    # arXiv:2505.19985 and its code
    "closed form": ImpulseSpec(
        sampling="fixed",
        boundary="zero",
        pseudo_input="layer norm",
        solver="closed form",
        target_mass=None,
        gain=7.0,
    ),
}


def impulse_(
    model: nn.Module,
    *,
    settings: str | ImpulseSpec = "sharp",
    seed: int,
    grid: tuple[int, int] | None = None,
    **options: object,
) -> xr.Dataset:
    """Fit queries and keys so that each head of each layer looks at one offset (Zheng, Li & Lucey 2024).

    Values and outputs are left alone: `mimetic_(model, query_key=None, seed=...)` is their part in arXiv:2505.19985.
    Biases of queries and keys become zero. The fit sees position codes only: images dilute the maps, the more the
    weaker the code is against the patches, and a learned code of standard deviation 0.02 all but drowns
    (`positions_` writes stronger ones).

    Args:
        model: vitprobe's, timm's, torchvision's, transformers' or any model that `attention_layers` understands.
        settings: `"sharp"`; `"paper"`, as published, with heads that put 0.3 of their attention on the target on 16x16
            patches after minutes; `"closed form"`, as in arXiv:2505.19985; or an `ImpulseSpec`.
        seed: draws taps and starting weights; the same in every model with as many layers and heads.
        grid: rows and columns of patches, where the model does not say.
        **options: fields of `ImpulseSpec`, e.g. `kernel_size=5, target_mass=0.3`, in place of those of the settings.

    Returns:
        By layer and head, of the maps of the pseudo-input under the weights as they are in the model: `mass` (attention
        on the target, mean over the queries whose target is in the grid), `argmax_accuracy`, `mean_squared_error` to
        the convolution matrix with zero rows at the border, the same of uniform attention (`uniform_mass`,
        `uniform_mean_squared_error`), `offset_y` and `offset_x`, `outside` (queries whose target is not in the grid)
        and `outside_share`, Frobenius norms; by layer `steps` and `seconds`.

    Raises:
        TypeError: if an option is none.
        ValueError: if an option is out of range, the model has no position code or maps that are made of more than
            queries and keys, or the closed form does not fit. The model is then as it was.
    """
    spec = _spec(settings, options)
    layers = attention_layers(model)
    grid = grid or patch_grid(model)
    _check(layers, grid, spec)
    offsets = draw_offsets([layer.heads for layer in layers], spec.kernel_size, spec.sampling, seed)
    stream = position_code(model, grid)
    inputs = [_pseudo_input(layer, stream, grid, spec.pseudo_input) for layer in layers]
    if spec.shared:
        _check_shared(layers, inputs)
        offsets = offsets[:1] * len(layers)
    solutions: list[_Solution] = []
    for index, (layer, tokens, taps) in enumerate(zip(layers, inputs, offsets, strict=True)):
        if spec.shared and solutions:
            solutions.append(replace(solutions[0], steps=0, seconds=0.0))
        else:
            target = Impulses.of(grid, taps, prefix=len(tokens) - grid[0] * grid[1], device=tokens.device)
            solutions.append(_solve(layer, tokens, target, spec, generator(seed, "impulse start", index)))
    columns: dict[str, list[Tensor]] = {name: [] for name in _VARIABLES}
    for layer, tokens, solution in zip(layers, inputs, solutions, strict=True):
        query, key = layer.query_key()
        with torch.no_grad():
            query.write_(solution.query)
            key.write_(solution.key)
        for name, values in _achieved(layer, tokens, solution.target).items():
            columns[name].append(values)
    variables = {name: (columns[name], *text) for name, text in _VARIABLES.items()}
    return dataset(
        model,
        "impulse",
        variables
        | {
            "steps": ([solution.steps for solution in solutions], "steps of the fit", "1"),
            "seconds": ([solution.seconds for solution in solutions], "time that the fit took", "s"),
        },
        layers=[layer.name for layer in layers],
        title="Attention on the target of impulse-initialised heads",
        references="Zheng, Li & Lucey 2024, arXiv:2401.12511; Zheng et al. 2024, arXiv:2404.01139; "
        "Zheng et al. 2025, arXiv:2505.19985",
        options=spec.config() | {"grid": grid},
        seed=seed,
        grid_h=grid[0],
        grid_w=grid[1],
        prefix=len(inputs[0]) - grid[0] * grid[1],
        skipped=to_json(skipped(model, layers)),
    )


_VARIABLES = {
    "mass": ("attention on the target, mean over queries whose target is in the grid", "1"),
    "argmax_accuracy": ("share of these queries that attend to the target most", "1"),
    "mean_squared_error": ("mean squared difference of map and convolution matrix", "1"),
    "uniform_mass": ("mass of uniform attention", "1"),
    "uniform_mean_squared_error": ("mean_squared_error of uniform attention", "1"),
    "offset_y": ("rows from query to target", "patches"),
    "offset_x": ("columns from query to target", "patches"),
    "outside": ("queries whose target is not in the grid", "1"),
    "outside_share": ("share of queries whose target is not in the grid", "1"),
    "query_norm": ("Frobenius norm of the query weights", "1"),
    "key_norm": ("Frobenius norm of the key weights", "1"),
}


def _spec(settings: str | ImpulseSpec, options: dict[str, object]) -> ImpulseSpec:
    if isinstance(settings, str):
        if settings not in SETTINGS:
            raise unknown("settings", settings, SETTINGS)
        settings = SETTINGS[settings]
    known = [field.name for field in fields(ImpulseSpec)]
    for name in options:
        if name not in known:
            raise TypeError(f"impulse_ takes no option {name!r}; it takes {', '.join(known)}.")
    return replace(settings, **options)  # type: ignore[arg-type]


def _check(layers: Sequence[AttentionLayer], grid: tuple[int, int], spec: ImpulseSpec) -> None:
    for layer in layers:
        layer.query_key()
        if layer.beside:
            raise ValueError(
                f"the maps of {layer.name} are made of more than queries and keys ({', '.join(layer.beside)}), so that "
                "these do not make them impulses; gpsa_ does that for gated positional attention."
            )
    if spec.kernel_size // 2 >= min(grid):
        raise ValueError(
            f"kernel_size={spec.kernel_size} reaches beyond a grid of {grid[0]}x{grid[1]} patches from every one of "
            f"them: use {2 * min(grid) - 1} at most."
        )


def _check_shared(layers: Sequence[AttentionLayer], inputs: Sequence[Tensor]) -> None:
    shapes = {(layer.query_key()[0].weight.shape, layer.scale) for layer in layers}
    if len(shapes) > 1 or any(not torch.equal(inputs[0], tokens) for tokens in inputs):
        raise ValueError(
            "shared=True needs layers of one size, scale and pseudo-input; these differ: use shared=False."
        )


def _pseudo_input(
    layer: AttentionLayer, stream: PositionCode | None, grid: tuple[int, int], kind: str | Tensor
) -> Tensor:
    """What stands for the tokens in the fit: prefix tokens, then patches, in float32 (token, dim)."""
    patches, mixed = grid[0] * grid[1], mixed_code(layer)
    dim = layer.query_key()[0].weight.shape[-1]
    if isinstance(kind, Tensor):
        tokens = kind
    elif mixed is not None:
        tokens = mixed[0] * mixed[1] if kind == "as seen" else mixed[0]
    elif stream is not None:
        tokens = torch.cat([stream.prefix, stream.code])
    else:
        raise ValueError(
            "the model has no position code, by which alone queries and keys can tell patches apart: build it with one "
            "(vitprobe: position='sincos'; timm: pos_embed='learn'), or give pseudo_input=, a tensor (token, dim)."
        )
    if tokens.ndim != 2 or tokens.shape[1] != dim or len(tokens) < patches:
        raise ValueError(
            f"a pseudo-input of shape {tuple(tokens.shape)} for {layer.name}, which takes {dim} channels, and a grid "
            f"of {grid[0]}x{grid[1]} patches: what is wanted is (token, dim), ({patches}, {dim}) or more for prefix "
            "tokens."
        )
    tokens = tokens.detach().to(layer.query_key()[0].weight.device, torch.float32)
    normed = kind == "layer norm" or (kind == "as seen" and mixed is None)
    return F.layer_norm(tokens, (dim,), eps=1e-6) if normed else tokens


@torch.no_grad()
def _achieved(layer: AttentionLayer, tokens: Tensor, target: Impulses) -> dict[str, Tensor]:
    """What the weights that are in the layer do to the pseudo-input, by head."""
    query, key = (part.weight.float() for part in layer.query_key())
    maps = content_logits(tokens, query, key, layer.scale, target.prefix).softmax(-1)
    uniform, wanted = torch.full_like(maps, 1 / len(tokens)), target.matrix()
    outside = (~target.inside).sum(-1)
    values = {
        "mass": target.mass(maps),
        "argmax_accuracy": target.accuracy(maps),
        "mean_squared_error": (maps - wanted).square().mean((1, 2)),
        "uniform_mass": target.mass(uniform),
        "uniform_mean_squared_error": (uniform - wanted).square().mean((1, 2)),
        "offset_y": target.offsets[:, 0],
        "offset_x": target.offsets[:, 1],
        "outside": outside,
        "outside_share": outside / target.inside.shape[1],
        "query_norm": query.norm(dim=(1, 2)),
        "key_norm": key.norm(dim=(1, 2)),
    }
    return {name: value.cpu() for name, value in values.items()}


@dataclass(frozen=True)
class _Solution:
    query: Tensor
    key: Tensor
    target: Impulses
    steps: int
    seconds: float


def _solve(
    layer: AttentionLayer, tokens: Tensor, target: Impulses, spec: ImpulseSpec, source: torch.Generator
) -> _Solution:
    """Query and key weights for the layer's own scale."""
    began = time.perf_counter()
    if not tokens[target.prefix :].any():
        raise ValueError(
            f"the pseudo-input of {layer.name} is zero: its position code is, or has no share in its maps."
        )
    width, scale = layer.query_key()[0].weight.shape[1], spec.scale or layer.scale
    if spec.solver == "adam":
        query, key, steps = fit_adam(tokens, target, spec, width=width, scale=scale, source=source)
    else:
        query, key = fit_closed_form(tokens, target, spec, width=width, scale=scale, source=source)
        steps = 0
    fold = math.sqrt(scale / layer.scale)
    return _Solution(query * fold, key * fold, target, steps, time.perf_counter() - began)
