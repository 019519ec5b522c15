"""Spectral density and trace of the loss's Hessian, from random vectors (Ghorbani et al. 2019; Hutchinson 1989)."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from torch import nn
from tqdm import tqdm

from vitprobe.calling import described, described_batches, with_weights
from vitprobe.curvature import Lanczos, Loss
from vitprobe.probes.objective import keep, objective
from vitprobe.probes.targets import settings_of
from vitprobe.ranks import Group, Ranks, agreed
from vitprobe.results import name_of, provenance
from vitprobe.seeds import derive_seed


def hessian_density(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    samples: int = 10,
    steps: int = 60,
    loss: Loss = F.cross_entropy,
    weight_decay: float = 0.0,
    parameters: str | Sequence[str] = "*",
    dtype: torch.dtype | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    group: Group = None,
    seed: int = 0,
    progress: bool = True,
) -> xr.Dataset:
    """The density of all eigenvalues of the Hessian over all batches, by stochastic Lanczos quadrature, and its trace.

    A random vector of signs sees the spectrum as a measure; `steps` Lanczos steps from it give the Gauss quadrature
    of that measure: nodes, and weights that are the squared first components of the tridiagonal matrix's
    eigenvectors and sum to one. The mean over vectors estimates the density, exactly in its first `2 * steps - 1`
    moments for each vector. The trace is `parameters * sum(weight * node)`, Hutchinson's estimate for that vector.

    Args:
        model: any eager PyTorch model, also wrapped.
        batches: `(images, labels)` tuples, or mappings with `labels`; the mean loss over all of them counts.
        samples: random vectors; errors fall with their square root.
        steps: Lanczos steps from each, one Hessian-vector product a step.
        loss: `loss(logits, targets)`, a mean over the batch.
        weight_decay: coefficient of `|w|^2 / 2` in the loss.
        parameters: glob patterns of parameter names; trainable ones that match are the variables.
        dtype: `torch.float64` computes on a copy in double precision.
        forward: `forward(model, batch)` that returns the logits, for models that are called in another way.
        group: a group of `torch.distributed` whose processes call this together, each with batches of its own or
            none: the loss is the mean over all of them. Unless given, this process measures alone.
        seed: of the vectors.
        progress: whether a terminal shows a progress bar.

    Returns:
        `node` and `weight` (sample, rank), and `trace` (sample); the attributes `trace_mean` and `trace_se` are its
        mean and standard error over samples. The attribute `parameters` is the number of variables.

    Raises:
        ValueError: if there are no batches, no labels or negative ones, the model has no parameters, a number is not
            positive, or the loss is not finite; if the ranks of a group have other models, or one of them fails.
    """
    if samples < 1 or steps < 1:
        raise ValueError(f"samples={samples} and steps={steps}: both have to be at least 1.")
    bare = with_weights(model)
    ranks = Ranks(group, next(bare.parameters()).device)
    ranks.require_same(bare)
    if dtype is not None:
        bare = copy.deepcopy(bare).to(dtype)  # and the batches straight to it
    operator = objective(
        bare,
        keep(batches, bare, ranks),
        loss=loss,
        weight_decay=weight_decay,
        parameters=parameters,
        forward=forward,
        group=group,
    )
    steps = min(steps, operator.size)
    nodes, weights = np.full((samples, steps), np.nan), np.zeros((samples, steps))
    shown = None if progress and ranks.first else True
    with tqdm(total=samples * steps, desc="density", unit="product", disable=shown) as bar:
        for sample in range(samples):
            generator = torch.Generator().manual_seed(derive_seed(seed, "density", sample))
            signs = torch.randint(0, 2, (operator.size,), generator=generator) * 2 - 1
            lanczos = Lanczos(signs.to(operator.device, operator.dtype))
            while lanczos.direction is not None and len(lanczos) < steps:
                lanczos.grow(operator.product(lanczos.direction))
                bar.update()
                if lanczos.betas[-1] == 0.0:  # the vector sees no more of the spectrum than this
                    break
            values, _, coordinates = lanczos.ritz()
            nodes[sample, : len(values)] = values
            weights[sample, : len(values)] = coordinates[0] ** 2
    trace = operator.size * np.nansum(nodes * weights, axis=1)
    error = float(trace.std(ddof=1) / np.sqrt(samples)) if samples > 1 else float("nan")
    said = ranks.gathered(described_batches(batches))
    return ranks.from_first(
        lambda: xr.Dataset(
            {
                "node": (("sample", "rank"), nodes, {"long_name": "eigenvalue of the loss's Hessian", "units": "nats"}),
                "weight": (("sample", "rank"), weights, {"long_name": "share of the spectrum", "units": "1"}),
                "trace": ("sample", trace, {"long_name": "Hutchinson's estimate of the trace", "units": "nats"}),
            },
            coords={
                "sample": ("sample", np.arange(samples), {"long_name": "random vector", "units": "1"}),
                "rank": ("rank", np.arange(steps), {"long_name": "quadrature node", "units": "1"}),
            },
            attrs=provenance(
                title="Spectral density of the loss's Hessian",
                references="Ghorbani et al. 2019, arXiv:1901.10159; Yao et al. 2020, PyHessian, arXiv:1912.07145",
                config={
                    "probe": "hessian_density",
                    "samples": samples,
                    "steps": steps,
                    "loss": settings_of(loss),
                    "weight_decay": weight_decay,
                    "parameters": parameters,
                    "dtype": str(operator.dtype),
                },
                device=operator.device,
                seed=seed,
                probe="hessian_density",
                loss=name_of(loss),
                weight_decay=weight_decay,
                **agreed(said),
                images=operator.total,
                **({} if group is None else {"ranks": ranks.count}),
                trace_mean=float(trace.mean()),
                trace_se=error,
                **described(bare) | {"parameters": operator.size},
            ),
        )
    )
