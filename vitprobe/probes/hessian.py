"""Largest eigenvalues of the loss's Hessian (Park & Kim 2022, Fig. 1b, 4, 6 and 7; Yao et al. 2020, PyHessian)."""

import copy
import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from vitprobe.calling import images_of, unwrap
from vitprobe.curvature import Eigenpairs, Loss, LossOperator, Which, eigenpairs, norm, order
from vitprobe.names import unknown
from vitprobe.probes.objective import keep, objective, targets_of
from vitprobe.results import provenance
from vitprobe.seeds import derive_seed

Method = Literal["lanczos", "power"]
TITLE = "Hessian eigenvalues"
REFERENCES = "Park & Kim 2022, arXiv:2202.06709, Fig. 4; Yao et al. 2020, PyHessian, arXiv:1912.07145"


def hessian_eigenvalues(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    k: int = 5,
    which: Which = "LM",
    per: Literal["batch", "dataset"] = "batch",
    method: Method = "lanczos",
    tol: float = 1e-3,
    max_products: int = 200,
    second_start: bool = False,
    loss: Loss = F.cross_entropy,
    weight_decay: float = 0.0,
    parameters: str | Sequence[str] = "*",
    dtype: torch.dtype | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> xr.Dataset:
    """The most extreme eigenvalues of the Hessian of the loss, each with its residual.

    The Hessian is that of the mean loss over each batch (`per="batch"`, the spectra of Park & Kim 2022, with batches
    of 16) or over all batches together (`per="dataset"`), at the model's weights, in evaluation mode. "Top" is named
    by `which`. Products are exact; attention runs under the math kernel, which fused kernels' missing second
    derivative makes necessary; the model is handed back as it was.

    Args:
        model: any eager PyTorch model, also wrapped.
        batches: `(images, labels)` tuples, or mappings with `labels`; labels may be class numbers or probabilities.
        k: how many eigenvalues.
        which: `"LM"` largest magnitude (the paper's), `"LA"` largest, `"SA"` smallest, `"BE"` both ends in turn.
        per: what one Hessian is of.
        method: `"lanczos"`, or `"power"`: the published protocol, PyHessian's deflated power iteration at its own
            defaults (`which="LM"`, 100 iterations, a change of the estimate below 1e-3). It stalls or blends where
            the largest positive and negative eigenvalues are close, as in small ViTs; its residuals show that.
        tol: relative residual at which an eigenvalue is converged (`"lanczos"`).
        max_products: Hessian-vector products to spend at most on one Hessian (`"lanczos"`).
        second_start: search the complement from a random direction afterwards, for second eigenvectors of the same
            eigenvalue and anything missed, at nearly the same cost again (`"lanczos"`).
        loss: `loss(logits, targets)`, a mean over the batch.
        weight_decay: coefficient of `|w|^2 / 2` in the loss; shifts every eigenvalue by as much.
        parameters: glob patterns of parameter names; trainable ones that match are the variables.
        dtype: `torch.float64` computes on a copy in double precision.
        forward: `forward(model, batch)` that returns the logits, for models that are called in another way.
        seed: of the starts.
        progress: whether a terminal shows a progress bar.

    Returns:
        `eigenvalue`, `residual` and `converged` (batch, rank); `products`, `loss`, `gradient_norm` and `images`
        (batch).

    Raises:
        ValueError: if there are no batches or no labels, an option is unknown, or the loss is not finite.
    """
    if which not in ("LM", "LA", "SA", "BE"):
        raise unknown("which", which, ("LM", "LA", "SA", "BE"))
    if per not in ("batch", "dataset"):
        raise unknown("per", per, ("batch", "dataset"))
    if method not in ("lanczos", "power"):
        raise unknown("method", method, ("lanczos", "power"))
    if k < 1:
        raise ValueError(f"k={k}: ask for at least one eigenvalue.")
    if method == "power" and (which != "LM" or weight_decay or parameters != "*" or dtype is not None):
        raise ValueError(
            "method='power' is the published protocol: which='LM', all parameters, no weight_decay, the model's dtype."
        )
    bare = unwrap(model)
    if dtype is not None:
        bare = copy.deepcopy(bare).to(dtype)  # once, not for every batch
    kept = keep(batches, bare)
    problems = [[batch] for batch in kept] if per == "batch" else [kept]
    rows: list[dict[str, Any]] = []
    for number, problem in enumerate(tqdm(problems, desc="hessian", unit=per, disable=None if progress else True)):
        operator = objective(
            bare,
            problem,
            loss=loss,
            weight_decay=weight_decay,
            parameters=parameters,
            forward=forward,
        )
        gradient = operator.gradient()
        start = _start(gradient, derive_seed(seed, "lanczos", number))
        if method == "lanczos":
            pairs = eigenpairs(
                operator.product,
                start,
                k,
                which=which,
                tol=tol,
                max_products=max_products,
                second_start=second_start,
                seed=derive_seed(seed, "directions", number),
            )
        else:
            pairs = _power(operator, k, tol, derive_seed(seed, "power", number))
        rows.append({
            "pairs": pairs,
            "loss": operator.value(),
            "gradient_norm": norm(gradient),
            "images": sum(len(images_of(batch)) for batch in problem),
        })
    unsettled = sum(int((~row["pairs"].converged).sum()) for row in rows)
    if unsettled:
        total = sum(len(row["pairs"].converged) for row in rows)
        warnings.warn(
            f"{unsettled} of {total} eigenvalues are not converged to a relative residual of {tol:g}; see `residual` "
            "and `converged`" + ("" if method == "power" else ", or allow more than max_products") + ".",
            stacklevel=2,
        )
    return _dataset(
        rows,
        bare,
        config={
            "probe": "hessian_eigenvalues",
            "k": k,
            "which": which,
            "per": per,
            "method": method,
            "tol": tol,
            "max_products": max_products,
            "second_start": second_start,
            "loss": loss,
            "weight_decay": weight_decay,
            "parameters": parameters,
            "dtype": str(dtype or next(bare.parameters()).dtype),
        },
        seed=seed,
    )


def _start(gradient: Tensor, seed: int) -> Tensor:
    """Gradient and noise, each of length one: the gradient saves products, the noise leaves no direction out."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(gradient.numel(), generator=generator, dtype=torch.float64).to(gradient)
    length = norm(gradient)
    return noise / norm(noise) + (gradient / length if length > 0 else 0)


def _power(operator: LossOperator, k: int, tol: float, seed: int) -> Eigenpairs:
    """PyHessian at its own defaults, on a copy, because it leaves the mode and the gradients changed."""
    if len(operator.batches) > 1:
        raise ValueError("method='power' knows one batch at a time: use per='batch'.")
    pyhessian = importlib.import_module("pyhessian.hessian")  # the package has a class of its module's name
    batch = operator.batches[0]
    caller = _OneBatch(copy.deepcopy(operator.model), operator.forward, batch)
    with (
        torch.random.fork_rng(),
        sdpa_kernel(SDPBackend.MATH),
        mock.patch.object(pyhessian, "hessian_vector_product", wraps=pyhessian.hessian_vector_product) as counted,
    ):
        torch.manual_seed(seed)
        data = (images_of(batch), targets_of(batch))
        computer = pyhessian.hessian(caller, operator.loss, data=data, cuda=operator.device.type == "cuda")
        estimates, parts = computer.eigenvalues(top_n=k)
        caller.zero_grad()  # its gradients hold their own graph, in a circle
    values = np.array(estimates, dtype=float)
    vectors = torch.stack([torch.cat([part.detach().reshape(-1) for part in vector]) for vector in parts])
    vectors /= torch.tensor([norm(vector) for vector in vectors]).to(vectors)[:, None]
    products = operator.product(vectors.T).T
    residuals = np.array([norm(p - value * v) for p, v, value in zip(products, vectors, values, strict=True)])
    best = order(values, "LM")
    return Eigenpairs(
        values[best],
        vectors[torch.from_numpy(best.copy())],
        residuals[best],
        residuals[best] <= tol * np.abs(values[best]),
        counted.call_count,
    )


class _OneBatch(nn.Module):
    """A model as PyHessian calls it, on images alone; they are those of the batch, in whatever form that has."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], tuple[Tensor, Any]], batch: Any) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.batch = batch

    def forward(self, images: Tensor) -> Tensor:
        return self.call(self.model, self.batch)[0]


def _dataset(
    rows: Sequence[Mapping[str, Any]], model: nn.Module, *, config: Mapping[str, Any], seed: int
) -> xr.Dataset:
    def variable(dims: tuple[str, ...], values: Any, long_name: str, units: str) -> tuple[Any, ...]:
        return dims, np.asarray(values), {"long_name": long_name, "units": units}

    pairs = [row["pairs"] for row in rows]
    both, batch = ("batch", "rank"), ("batch",)
    return xr.Dataset(
        {
            "eigenvalue": variable(both, [p.values for p in pairs], "eigenvalue of the loss's Hessian", "nats"),
            "residual": variable(both, [p.residuals for p in pairs], "length of H v - eigenvalue v", "nats"),
            "converged": variable(
                both, [p.converged.astype(np.int8) for p in pairs], "1 if the relative residual is within tol", "1"
            ),
            "products": variable(batch, [p.products for p in pairs], "Hessian-vector products", "1"),
            "loss": variable(batch, [row["loss"] for row in rows], "mean loss", "nats"),
            "gradient_norm": variable(batch, [row["gradient_norm"] for row in rows], "length of the gradient", "nats"),
            "images": variable(batch, [row["images"] for row in rows], "images in the mean", "1"),
        },
        coords={
            "batch": ("batch", np.arange(len(rows)), {"long_name": "batch, or 0 for all together", "units": "1"}),
            "rank": (
                "rank",
                np.arange(len(pairs[0].values)),
                {"long_name": "place in the order of which", "units": "1"},
            ),
        },
        attrs=provenance(
            title=TITLE,
            references=REFERENCES,
            config=dict(config),
            device=next(model.parameters()).device,
            seed=seed,
            probe="hessian_eigenvalues",
            method=config["method"],
            which=config["which"],
            per=config["per"],
            model_class=f"{type(model).__module__}.{type(model).__qualname__}",
            parameters=sum(p.numel() for p in model.parameters()),
        ),
    )
