"""The loss on a plane through the weights (Park & Kim 2022, Fig. 1a; Li et al. 2018)."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

from vitprobe.calling import default_forward, images_of, logits_of, untouched, unwrap
from vitprobe.curvature import Normalisation, random_direction
from vitprobe.probes.objective import keep, targets_of
from vitprobe.results import provenance
from vitprobe.seeds import derive_seed


def loss_landscape(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    span: float = 1.0,
    points: int = 21,
    pairs: int = 1,
    dimensions: int = 2,
    normalisation: Normalisation = "li",
    forward: Callable[[nn.Module, Any], Any] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> xr.Dataset:
    """The loss along random, normalised directions through the model's weights.

    At `w + x a + y b` for every cell of a grid the mean negative log-likelihood, the accuracy, and both forms of the
    weight term, each by itself: the published picture is the first plus 0.05 times `l2_sum_of_norms`, which dominates
    it. The batches are drawn once, so that all cells see the same images (common random numbers), images count alike
    in batches of any size, and the loss is a log-softmax, which does not overflow. Batch norm keeps its running
    statistics, and buffers are not moved.

    Args:
        model: any eager PyTorch model, also wrapped; it is handed back as it was.
        batches: `(images, labels)` tuples, or mappings with `labels`; labels may be class numbers or probabilities.
        span: the grid reaches from `-span` to `span` along each direction.
        points: cells along each direction.
        pairs: independent pairs of directions; one pair says little.
        dimensions: 2 for a plane, 1 for a line.
        normalisation: `"li"`, `"paper"`, `"layer"` or `"none"`; see `vitprobe.curvature.random_direction`.
        forward: `forward(model, batch)` that returns the logits, for models that are called in another way.
        seed: of the directions.
        progress: whether a terminal shows a progress bar.

    Returns:
        `nll`, `accuracy`, `l2_half_square` (`|w|^2 / 2`) and `l2_sum_of_norms` (sum over tensors of their lengths)
        along `(direction_pair, y, x)`, or `(direction_pair, x)` on a line.

    Raises:
        ValueError: if there are no batches or no labels, or a number makes no grid.
    """
    if points < 2 or pairs < 1 or span <= 0 or dimensions not in (1, 2):
        raise ValueError(
            f"points={points}, pairs={pairs}, span={span}, dimensions={dimensions}: use at least 2 points, at least "
            "1 pair, a positive span, and 1 or 2 dimensions."
        )
    bare = unwrap(model)
    kept = keep(batches, bare)
    call = forward or default_forward
    weights = {name: p.detach() for name, p in bare.named_parameters()}
    steps = np.linspace(-span, span, points)
    steps[np.abs(steps) < 1e-12 * span] = 0.0
    rows = steps if dimensions == 2 else np.zeros(1)
    names = ("nll", "accuracy", "l2_half_square", "l2_sum_of_norms")
    values = np.empty((len(names), pairs, len(rows), points))
    total = pairs * len(rows) * points
    with (
        untouched(bare),
        tqdm(total=total, desc="landscape", unit="cell", disable=None if progress else True) as bar,
    ):
        for pair in range(pairs):
            a, b = (
                random_direction(
                    weights,
                    normalisation=normalisation,
                    generator=torch.Generator().manual_seed(derive_seed(seed, "direction", pair, axis)),
                )
                for axis in ("x", "y")
            )
            for j, y in enumerate(rows):
                for i, x in enumerate(steps):
                    moved = {name: w + x * a[name] + y * b[name] for name, w in weights.items()}
                    values[:, pair, j, i] = _cell(bare, moved, kept, call)
                    bar.update()
    dims: tuple[str, ...] = ("direction_pair", "y", "x")
    if dimensions == 1:
        dims, values = ("direction_pair", "x"), values[:, :, 0]
    described = {
        "nll": ("mean negative log-likelihood", "nats"),
        "accuracy": ("share of images whose largest output is the label's", "1"),
        "l2_half_square": ("half the squared length of the weights", "1"),
        "l2_sum_of_norms": ("sum over weight tensors of their lengths", "1"),
    }
    coords: dict[str, Any] = {
        "direction_pair": ("direction_pair", np.arange(pairs), {"long_name": "pair of directions", "units": "1"}),
    }
    for axis in dims[1:]:
        label = f"steps along direction {axis}, normalised by {normalisation!r}"
        coords[axis] = (axis, steps, {"long_name": label, "units": "1"})
    return xr.Dataset(
        {
            name: (dims, array, {"long_name": described[name][0], "units": described[name][1]})
            for name, array in zip(names, values, strict=True)
        },
        coords=coords,
        attrs=provenance(
            title="Loss landscape",
            references="Li et al. 2018, arXiv:1712.09913; Park & Kim 2022, arXiv:2202.06709, Fig. 1a",
            config={
                "probe": "loss_landscape",
                "span": span,
                "points": points,
                "pairs": pairs,
                "dimensions": dimensions,
                "normalisation": normalisation,
            },
            device=next(iter(weights.values())).device,
            seed=seed,
            probe="loss_landscape",
            normalisation=normalisation,
            model_class=f"{type(bare).__module__}.{type(bare).__qualname__}",
            parameters=sum(w.numel() for w in weights.values()),
            images=sum(len(images_of(batch)) for batch in kept),
        ),
    )


class _Called(nn.Module):
    """A model whose forward is a call of one's own, so that moved weights reach whatever that call does."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, batch: Any) -> Tensor:
        return logits_of(self.call(self.model, batch))


def _cell(
    model: nn.Module, weights: dict[str, Tensor], batches: list[Any], call: Callable[[nn.Module, Any], Any]
) -> tuple[float, float, float, float]:
    """Loss, accuracy and the weight terms at one point."""
    called = _Called(model, call)
    named = {f"model.{name}": weight for name, weight in weights.items()}
    sums = torch.zeros(2, dtype=torch.float64)
    count = 0
    for batch in batches:
        logits, targets = functional_call(called, named, (batch,)).double(), targets_of(batch)
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        nll = F.cross_entropy(logits, targets if targets.ndim == 1 else targets.double(), reduction="sum")
        sums += torch.stack([nll, (logits.argmax(1) == labels).sum().double()]).cpu()
        count += len(logits)
    squares = torch.stack([weight.double().square().sum() for weight in weights.values()])
    nll_mean, accuracy = (sums / count).tolist()
    return nll_mean, accuracy, 0.5 * float(squares.sum()), float(squares.sqrt().sum())
