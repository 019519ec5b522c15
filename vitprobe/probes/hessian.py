"""Largest eigenvalues of the loss's Hessian (Park & Kim 2022, Fig. 1b, 4, 6 and 7; Yao et al. 2020, PyHessian)."""

import copy
import hashlib
import importlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from vitprobe.calling import (
    as_batches,
    described,
    described_batches,
    images_of,
    same_random,
    targets_of,
    to_model,
    with_weights,
)
from vitprobe.curvature import (
    Decay,
    Eigenpairs,
    Loss,
    LossOperator,
    LossStack,
    Which,
    eigenpairs,
    eigenpairs_together,
    matching,
    noisy_start,
    norm,
    order,
)
from vitprobe.intervals import bootstrap_interval
from vitprobe.names import unknown
from vitprobe.probes.growing import Growing, fingerprint, require_same_value
from vitprobe.probes.objective import NO_BATCHES, keep, objective
from vitprobe.probes.targets import settings_of
from vitprobe.ranks import Group, Ranks, agreed
from vitprobe.results import config_hash, name_of, provenance
from vitprobe.seeds import derive_seed

Method = Literal["lanczos", "power"]
TITLE = "Hessian eigenvalues"
REFERENCES = "Park & Kim 2022, arXiv:2202.06709, Fig. 4; Yao et al. 2020, PyHessian, arXiv:1912.07145"
_CHOICES = {"which": ("LM", "LA", "SA", "BE"), "per": ("batch", "dataset"), "method": ("lanczos", "power")}

_BOTH, _BATCH = ("batch", "rank"), ("batch",)
_VARIABLES = {
    "eigenvalue": (_BOTH, "eigenvalue of the loss's Hessian", "nats"),
    "residual": (_BOTH, "length of H v - eigenvalue v", "nats"),
    "converged": (_BOTH, "1 if the relative residual is within tol", "1"),
    "products": (_BATCH, "Hessian-vector products", "1"),
    "loss": (_BATCH, "mean loss, decay included", "nats"),
    "gradient_norm": (_BATCH, "length of the gradient", "nats"),
    "images": (_BATCH, "images in the mean", "1"),
}
Row = Mapping[str, Any]


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
    stack: int = 1,
    loss: Loss = F.cross_entropy,
    weight_decay: float = 0.0,
    decay: Decay = "half_square",
    parameters: str | Sequence[str] = "*",
    dtype: torch.dtype | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    path: str | os.PathLike[str] | None = None,
    group: Group = None,
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
            With `per="batch"` they are drawn one by one; with `per="dataset"` held where the model is.
        k: how many eigenvalues.
        which: `"LM"` largest magnitude (the paper's), `"LA"` largest, `"SA"` smallest, `"BE"` both ends in turn.
        per: what one Hessian is of.
        method: `"lanczos"`, or `"power"`: the published protocol, PyHessian's deflated power iteration at its own
            defaults (`which="LM"`, 100 iterations, a change of the estimate below 1e-3). It stalls or blends where
            the largest positive and negative eigenvalues are close, as in small ViTs; its residuals show that.
        tol: relative residual at which an eigenvalue is converged (`"lanczos"`).
        max_products: Hessian-vector products to spend at most on one Hessian (`"lanczos"`).
        second_start: search the complement from a random direction afterwards, for second eigenvectors of the same
            eigenvalue, which a single start cannot see, at nearly the same cost again (`"lanczos"`). Needed where
            eigenvalues are multiple: the zeros at the lower end of a convex loss, say.
        stack: batches of one shape that are solved in one vectorised pass (`per="batch"`), with a copy of the
            weights for each: for batches too small to fill a GPU. On a CPU it pays for small transformers only.
        loss: `loss(logits, targets)`, a mean over the batch.
        weight_decay: coefficient of the decay term in the loss; 0 leaves it out.
        decay: `"half_square"`, `|w|^2 / 2`, which shifts every eigenvalue by the coefficient; or `"sum_of_norms"`,
            the sum over tensors of their unsquared lengths, as Park & Kim's code adds it up.
        parameters: glob patterns of parameter names; trainable ones that match are the variables.
        dtype: `torch.float64` computes on a copy in double precision.
        forward: `forward(model, batch)` that returns the logits, for models that are called in another way.
        path: a netCDF file that grows with every batch. The same call goes on where an interrupted one stopped; the
            batches have to be the same again, which is checked, and so is the loss of the first and its gradient,
            since the file knows functions by their names alone.
        group: a group of `torch.distributed` whose processes call this together, each with batches of its own or
            none, and without a `path`. With `per="dataset"` the Hessian is that over the batches of all. With
            `per="batch"` each solves its own, from starts that it numbers by itself, and all get the results of rank
            0, then those of rank 1, and so on. Unless given, this process measures alone.
        seed: of the starts.
        progress: whether a terminal shows a progress bar.

    Returns:
        `eigenvalue`, `residual` and `converged` (batch, rank); `products`, `loss`, `gradient_norm` and `images`
        (batch). For spectra of batches (`which="LM"`) the attributes hold the paper's negative eigenvalue proportion
        and average positive eigenvalue, `nep` and `ape`, with 95 % intervals by bootstrap over batches, `nep_low` to
        `ape_high`. The attribute `parameters` is the number of variables.

    Raises:
        ValueError: if there are no batches, no labels or negative ones, an option is unknown, the model has no
            parameters, there are fewer `max_products` than eigenvalues, the loss is not finite or not the same twice,
            batch norm would use the batch's statistics, or the file holds another measurement or results of more
            batches; if the ranks of a group have other models, or one of them fails.
    """
    for name, given in {"which": which, "per": per, "method": method}.items():
        if given not in _CHOICES[name]:
            raise unknown(name, given, _CHOICES[name])
    if k < 1 or stack < 1:
        raise ValueError(f"k={k} and stack={stack}: both have to be at least 1.")
    settled = which == "LM" and per == "batch" and not weight_decay and parameters == "*" and dtype is None
    if method == "power" and not settled:
        raise ValueError(
            "method='power' is the published protocol, one batch at a time: which='LM', per='batch', all parameters, "
            "no weight_decay, the model's dtype."
        )
    if stack > 1 and (method == "power" or per == "dataset"):
        raise ValueError(f"stack={stack} solves batches together: use method='lanczos' and per='batch'.")
    if path is not None and group is not None:
        raise ValueError(f"path={str(path)!r} is the file of one process: save what a group's first rank returns.")
    bare = with_weights(model)
    ranks = Ranks(group, next(bare.parameters()).device)
    ranks.require_same(bare)
    if dtype is not None:
        bare = copy.deepcopy(bare).to(dtype)  # once, not for every batch
    config = {
        "probe": "hessian_eigenvalues",
        "k": k,
        "which": which,
        "per": per,
        "method": method,
        "tol": tol,
        "max_products": max_products,
        "second_start": second_start,
        "loss": settings_of(loss),
        "weight_decay": weight_decay,
        "decay": decay,
        "parameters": parameters,
        "dtype": str(dtype or next(bare.parameters()).dtype),
        "stack": stack,
        "seed": seed,
    }
    if forward is not None:
        config["forward"] = forward
    if frozen := [name for name, p in matching(bare, parameters).items() if not p.requires_grad]:
        config["frozen"] = f"{len(frozen)} parameters, {config_hash(frozen)}"
    options = {"which": which, "tol": tol, "max_products": max_products, "second_start": second_start}

    def build(some: Sequence[Any]) -> LossOperator:
        return objective(
            bare,
            some,
            loss=loss,
            weight_decay=weight_decay,
            decay=decay,
            parameters=parameters,
            forward=forward,
            group=group if per == "dataset" else None,
        )

    said = agreed(ranks.gathered(described_batches(batches)))
    identity = {} if path is None else {"config": config, "model": fingerprint(bare)}
    rows: list[Row] = []
    known: list[Row] = []

    def new() -> xr.Dataset | None:
        # Until there is more than an earlier call left, its file stays as it is.
        return _dataset(rows, bare, config, said) if len(rows) > len(known) else None

    def require_same(some: Sequence[Any], row: Row) -> None:
        again = build(some)
        require_same_value(path, "the length of the first gradient", row["gradient_norm"], norm(again.gradient()))
        require_same_value(path, "the first loss", row["loss"], again.value())

    total = length_hint(as_batches(batches), 0) or None if per == "batch" else None
    with (
        same_random(bare),
        Ranks(group if per == "batch" else None, ranks.device).together(),
        Growing(path, identity, new) as file,
        tqdm(total=total, desc="hessian", unit=per, disable=None if progress and ranks.first else True) as bar,
    ):
        known += [] if file.found is None else _rows(file.found)
        for some in _groups(batches, bare, stack, per, ranks):
            rest = _not_known(some, known, rows, bar, require_same)
            if rest or not known:  # also a rank without batches takes part in the products of all
                rows += _solve(build(rest), k, per, method, options, seed, len(rows))
                bar.update(len(rows) - bar.n)
                file.tick()
        if len(rows) < len(known):
            raise ValueError(
                f"{file.path} has results of {len(known)} batches, and {len(rows)} were given: to go on, give the same "
                "batches from the first on, or another path=."
            )
    if per == "batch":
        rows = [row for own in ranks.gathered(rows) for row in own]
    if not rows:
        raise ValueError(NO_BATCHES)
    ds = ranks.from_first(lambda: _dataset(rows, bare, config, said))
    assert ds is not None
    if group is not None:
        ds.attrs["ranks"] = ranks.count
    unsettled = ds.converged.size - int(ds.converged.sum())
    if unsettled:
        warnings.warn(
            f"{unsettled} of {ds.converged.size} eigenvalues are not converged to a relative residual of {tol:g}; see "
            "`residual` and `converged`" + ("" if method == "power" else ", or allow more than max_products") + ".",
            stacklevel=2,
        )
    return file.mark(ds)


def _groups(batches: Iterable[Any], model: nn.Module, stack: int, per: str, ranks: Ranks) -> Iterator[list[Any]]:
    """What is solved at once: all batches together, or up to so many of one shape."""
    if per == "dataset":
        yield keep(batches, model, ranks)
        return
    moved = (to_model(batch, model) for batch in as_batches(batches))
    for _, alike in itertools.groupby(moved, key=lambda batch: images_of(batch).shape):
        while group := list(itertools.islice(alike, stack)):
            yield group


def _not_known(
    group: list[Any],
    known: list[Row],
    rows: list[Row],
    bar: "tqdm[Any]",
    require_same: Callable[[Sequence[Any], Row], None],
) -> list[Any]:
    """The batches of a group that no earlier call has solved; the rows of the others are taken over."""
    rest = list(group)
    while rest and len(rows) < len(known):
        row = known[len(rows)]
        part = rest[:1] if row["images"] == len(images_of(rest[0])) else rest
        if fingerprint(part) != row["fingerprint"]:
            raise ValueError(
                f"batch {len(rows)} is not the one that the file has results of: to go on, give the same batches in "
                "the same order (no shuffling without a fixed seed), or another path=."
            )
        if not rows:
            require_same(part, row)
        rows.append(row)
        bar.update()
        rest = rest[len(part) :]
    return rest


def _solve(
    operator: LossOperator, k: int, per: str, method: Method, options: Mapping[str, Any], seed: int, first: int
) -> list[Row]:
    """The rows of an operator's batches apart, or of all together; `first` is the number of the first row."""
    batches = list(operator.batches)
    count = len(batches) if per == "batch" else 1
    starts = [derive_seed(seed, "lanczos", first + i) for i in range(count)]
    seeds = [derive_seed(seed, "directions", first + i) for i in range(count)]
    if count > 1:
        stack = LossStack(operator)
        gradients, losses = stack.gradients, stack.losses.tolist()
        begin = [noisy_start(gradient, start) for gradient, start in zip(gradients, starts, strict=True)]
        found = eigenpairs_together(stack.product, begin, k, seeds=seeds, **options)
        each = [fingerprint([batch]) for batch in batches]
        return list(map(_row, operator.images, each, found, gradients, losses))
    gradient = operator.gradient()
    if method == "power":
        pairs = _power(operator, k, options["tol"], derive_seed(seed, "power", first))
    else:
        pairs = eigenpairs(operator.product, noisy_start(gradient, starts[0]), k, seed=seeds[0], **options)
    shares = operator.ranks.gathered(fingerprint(batches))
    named = shares[0] if len(shares) == 1 else hashlib.sha256("".join(shares).encode()).hexdigest()[:16]
    return [_row(operator.total, named, pairs, gradient, operator.value())]


def _row(images: int, named: str, pairs: Eigenpairs, gradient: Tensor, loss: float) -> Row:
    return {
        "eigenvalue": pairs.values,
        "residual": pairs.residuals,
        "converged": pairs.converged.astype(np.int8),
        "products": pairs.products,
        "loss": loss,
        "gradient_norm": norm(gradient),
        "images": images,
        "fingerprint": named,
    }


def _rows(ds: xr.Dataset) -> list[Row]:
    """The rows of a dataset that `_dataset` made."""
    arrays = {name: ds[name].values for name in [*_VARIABLES, "fingerprint"]}
    return [{name: array[b] for name, array in arrays.items()} for b in range(ds.sizes["batch"])]


def _power(operator: LossOperator, k: int, tol: float, seed: int) -> Eigenpairs:
    """PyHessian at its own defaults, on a copy, because it leaves the mode and the gradients changed."""
    pyhessian = importlib.import_module("pyhessian.hessian")  # the package has a class of its module's name
    (batch,) = operator.batches
    caller = _OneBatch(copy.deepcopy(operator.model), operator.forward, batch)
    with (
        torch.random.fork_rng(),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        mock.patch.object(pyhessian, "hessian_vector_product", wraps=pyhessian.hessian_vector_product) as counted,
    ):
        torch.manual_seed(seed)
        targets = targets_of(batch)
        whole = operator.loss is F.cross_entropy and not targets.is_floating_point()
        data = (images_of(batch), targets.long() if whole else targets)
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
    rows: Sequence[Row], model: nn.Module, config: Mapping[str, Any], said: Mapping[str, Any]
) -> xr.Dataset | None:
    if not rows:
        return None
    ranks = len(rows[0]["eigenvalue"])
    loss, variables = config["loss"], matching(model, config["parameters"]).values()
    ds = xr.Dataset(
        {
            name: (dims, np.asarray([row[name] for row in rows]), {"long_name": long_name, "units": units})
            for name, (dims, long_name, units) in _VARIABLES.items()
        },
        coords={
            "batch": ("batch", np.arange(len(rows)), {"long_name": "batch, or 0 for all together", "units": "1"}),
            "rank": ("rank", np.arange(ranks), {"long_name": "place in the order of which", "units": "1"}),
            "fingerprint": ("batch", [str(row["fingerprint"]) for row in rows], {"long_name": "hash of the batch"}),
        },
        attrs=provenance(
            title=TITLE,
            references=REFERENCES,
            config=dict(config),
            device=next(model.parameters()).device,
            seed=config["seed"],
            probe="hessian_eigenvalues",
            method=config["method"],
            which=config["which"],
            per=config["per"],
            loss=name_of(loss["module"] if isinstance(loss, Mapping) else loss),
            weight_decay=config["weight_decay"],
            **described(model) | {"parameters": sum(p.numel() for p in variables if p.requires_grad)},
            **said,
        ),
    )
    spectra = config["which"] == "LM" and config["per"] == "batch"
    return ds.assign_attrs(_proportions(ds.eigenvalue.values)) if spectra else ds


def _proportions(spectra: np.ndarray) -> dict[str, float]:
    """NEP and APE of spectra `(batch, rank)`, from the eigenvalues themselves and not from a smoothed density."""

    def nep(spectra: np.ndarray) -> float:
        return float((spectra < 0).mean())

    def ape(spectra: np.ndarray) -> float:
        positive = spectra[spectra > 0]
        return float(positive.mean()) if positive.size else 0.0

    said: dict[str, float] = {}
    for statistic in (nep, ape):
        # Batches are independent, the eigenvalues of one are not.
        value, low, high = bootstrap_interval(spectra, statistic, seed=0, resamples=2000)
        said |= {statistic.__name__: value, f"{statistic.__name__}_low": low, f"{statistic.__name__}_high": high}
    return said
