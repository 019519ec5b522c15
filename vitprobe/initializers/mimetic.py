"""Weights whose products look like those of trained transformers: mimetic initialisation (Trockman & Kolter 2023)."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn

from vitprobe.initializers.access import AttentionLayer, attention_layers, skipped
from vitprobe.initializers.report import dataset, generator
from vitprobe.names import unknown
from vitprobe.results import to_json

VARIANTS = ("paper", "zheng")
DISTRIBUTIONS = ("normal", "uniform")
Pair = tuple[float, float]


@torch.no_grad()
def mimetic_(
    model: nn.Module,
    *,
    query_key: Pair | None = (0.7, 0.7),
    value_output: Pair | None = (0.4, 0.4),
    variant: str = "paper",
    distribution: str = "normal",
    seed: int,
) -> xr.Dataset:
    """Make `W_Q W_K^T` of each head and `W_V W_O` of each layer near to multiples of the identity.

    Trockman & Kolter 2023, *Mimetic Initialization of Self-Attention Layers*: `W_Q W_K^T ~ a Z + b I` by head and
    `W_V W_O ~ a Z - b I` by layer, with independent entries of variance `1 / dim` in `Z`; each product is split by its
    singular value decomposition, of which a head keeps as many directions as it has channels. Biases of what is written
    become zero. Tokens that are alike then attend to each other; with a
    sine-cosine position code in the input (`positions_`) neighbours are alike.

    Args:
        model: vitprobe's, timm's, torchvision's, transformers' or any model that `attention_layers` understands.
        query_key: `(a, b)` of queries and keys; `None` leaves them as they are.
        value_output: `(a, b)` of values and outputs; `None` leaves them as they are.
        variant: `"paper"`; or `"zheng"`, the weaker baseline of Zheng et al. 2024 (arXiv:2401.12511): queries and keys
            alone, and `Z` uniform on ±1/sqrt(dim), whose standard deviation is smaller by sqrt(3).
        distribution: of the paper's `Z`, `"normal"` or `"uniform"`.
        seed: draws `Z`, by layer and head in the model's order.

    Returns:
        Of the products of the weights as they are in the model, mean and standard deviation on the diagonal and
        standard deviation off it: `query_key_*` by layer and head, `value_output_*` by layer.

    Raises:
        ValueError: if an option is unknown, nothing is to be written, or a layer has no such product. The model is then
            as it was.
    """
    if variant not in VARIANTS:
        raise unknown("variant", variant, VARIANTS)
    if distribution not in DISTRIBUTIONS:
        raise unknown("distribution", distribution, DISTRIBUTIONS)
    if variant == "zheng":
        if distribution != "normal" or value_output not in (None, (0.4, 0.4)):
            raise ValueError(
                "variant='zheng' leaves values and outputs alone and draws uniformly: leave value_output and "
                "distribution out, or use variant='paper'."
            )
        value_output, distribution = None, "uniform"
    if query_key is None and value_output is None:
        raise ValueError("nothing to write: give query_key=(a, b), value_output=(a, b) or both.")
    layers = attention_layers(model)
    for layer in layers:
        if query_key is not None:
            layer.query_key()
        if value_output is not None:
            _check_square(layer)
    spread = 3**-0.5 if variant == "zheng" else 1.0
    variables: dict[str, tuple[Sequence[Tensor], str, str]] = {}
    if query_key is not None:
        for index, layer in enumerate(layers):
            _write_query_key_(layer, query_key, distribution, spread, seed, index)
        variables |= _described("query_key", "W_Q W_K^T", [_query_key_product(layer) for layer in layers])
    if value_output is not None:
        for index, layer in enumerate(layers):
            _write_value_output_(layer, value_output, distribution, seed, index)
        variables |= _described("value_output", "W_V W_O", [_value_output_product(layer) for layer in layers])
    return dataset(
        model,
        "mimetic",
        variables,
        layers=[layer.name for layer in layers],
        title="Products of mimetically initialised weights",
        references="Trockman & Kolter 2023, arXiv:2305.09828"
        + ("; as in Zheng, Li & Lucey 2024, arXiv:2401.12511" if variant == "zheng" else ""),
        options={
            "query_key": query_key,
            "value_output": value_output,
            "variant": variant,
            "distribution": distribution,
        },
        seed=seed,
        variant=variant,
        skipped=to_json(skipped(model, layers)),
    )


def _check_square(layer: AttentionLayer) -> None:
    value, output = layer.value_output()
    heads, channels, dim = value.weight.shape
    if output.shape[-1] != dim or heads * channels > dim:
        raise ValueError(
            f"{layer.name} takes {dim} channels, has {heads} heads of {channels} and gives {output.shape[-1]}: value "
            "and output are mimetic where as many channels go out as come in, and no more pass through the heads. "
            "Use value_output=None."
        )


def _noise(dim: int, distribution: str, source: torch.Generator, like: Tensor) -> Tensor:
    """`(dim, dim)` independent entries of variance `1 / dim`."""
    if distribution == "normal":
        noise = torch.randn(dim, dim, generator=source, device="cpu")
    else:
        noise = (2 * torch.rand(dim, dim, generator=source, device="cpu") - 1) * math.sqrt(3)
    return (noise / math.sqrt(dim)).to(like.device)


def _write_query_key_(
    layer: AttentionLayer, pair: Pair, distribution: str, spread: float, seed: int, index: int
) -> None:
    query, key = layer.query_key()
    heads, channels, dim = query.weight.shape
    weights = []
    for head in range(heads):
        source = generator(seed, "mimetic query key", index, head)
        noise = spread * _noise(dim, distribution, source, query.weight)
        left, right = _factors(pair[0] * noise + pair[1] * torch.eye(dim).to(noise), channels)
        weights.append((left, right))
    query.write_(torch.stack([left for left, _ in weights]))
    key.write_(torch.stack([right for _, right in weights]))


def _write_value_output_(layer: AttentionLayer, pair: Pair, distribution: str, seed: int, index: int) -> None:
    value, output = layer.value_output()
    heads, channels, dim = value.weight.shape
    noise = _noise(dim, distribution, generator(seed, "mimetic value output", index), value.weight)
    left, right = _factors(pair[0] * noise - pair[1] * torch.eye(dim).to(noise), heads * channels)
    value.write_(left.view(heads, channels, dim))
    output.copy_(right.view(heads, channels, dim))
    if layer.output_bias is not None:
        layer.output_bias.zero_()


def _factors(product: Tensor, directions: int) -> tuple[Tensor, Tensor]:
    """`L`, `R` (direction, dim) so that `L^T R` is the best of so many directions, singular values split evenly."""
    svd = torch.linalg.svd(product)
    roots = svd.S[:directions, None].sqrt()
    spare = (0, 0, 0, max(0, directions - len(product)))
    return F.pad(roots * svd.U.mT[:directions], spare), F.pad(roots * svd.Vh[:directions], spare)


def _query_key_product(layer: AttentionLayer) -> Tensor:
    query, key = layer.query_key()
    return query.weight.float().mT @ key.weight.float()


def _value_output_product(layer: AttentionLayer) -> Tensor:
    value, output = layer.value_output()
    return value.weight.float().flatten(0, 1).mT @ output.float().flatten(0, 1)


def _described(name: str, product: str, matrices: Sequence[Tensor]) -> dict[str, tuple[Sequence[Tensor], str, str]]:
    diagonals = [matrix.diagonal(dim1=-2, dim2=-1).cpu() for matrix in matrices]
    others = [matrix.cpu()[..., ~torch.eye(matrix.shape[-1], dtype=torch.bool)] for matrix in matrices]
    return {
        f"{name}_diagonal": ([d.mean(-1) for d in diagonals], f"mean of the diagonal of {product}", "1"),
        f"{name}_diagonal_std": (
            [d.std(-1) for d in diagonals],
            f"standard deviation on the diagonal of {product}",
            "1",
        ),
        f"{name}_other_std": ([o.std(-1) for o in others], f"standard deviation off the diagonal of {product}", "1"),
    }
