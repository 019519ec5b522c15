"""The loss on a plane or line through the weights (Park & Kim 2022, Fig. 1a; Li et al. 2018)."""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import nn
from tqdm import tqdm

from vitprobe.calling import default_forward, described, described_batches, images_of, untouched, with_weights
from vitprobe.curvature import (
    Checkpoint,
    Directions,
    Normalisation,
    as_directions,
    eigenpairs,
    noisy_start,
    random_directions,
    require_random,
)
from vitprobe.names import unknown
from vitprobe.probes.cells import Cells
from vitprobe.probes.growing import Growing, fingerprint, require_same_value
from vitprobe.probes.objective import keep, objective
from vitprobe.results import provenance
from vitprobe.seeds import derive_seed

Span = float | tuple[float, float] | tuple[tuple[float, float], tuple[float, float]]

VARIABLES = {
    "nll": ("mean negative log-likelihood", "nats"),
    "accuracy": ("share of images whose largest output is the label's", "1"),
    "nll_se": ("standard error over images of nll", "nats"),
    "accuracy_se": ("standard error over images of accuracy", "1"),
    "l2_half_square": ("half the squared length of the weights", "1"),
    "l2_sum_of_norms": ("sum over weight tensors of their lengths", "1"),
}


def loss_landscape(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    directions: Literal["random", "eigenvectors"] | Directions | Checkpoint | Sequence[Checkpoint] = "random",
    span: Span | None = None,
    points: int = 21,
    pairs: int = 1,
    dimensions: int = 2,
    normalisation: Normalisation = "li",
    batch_norm: Literal["kept", "reestimated"] = "kept",
    stack: int = 1,
    path: str | os.PathLike[str] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> xr.Dataset:
    """The loss along directions through the model's weights.

    At `w + x a + y b` for every cell of a grid the mean negative log-likelihood, the accuracy, and both forms of the
    weight term, each by itself: the published picture is the first plus 0.05 times `l2_sum_of_norms`, which dominates
    it. The batches are drawn once, so that all cells see the same images (common random numbers), images count alike
    in batches of any size, and the loss is a log-softmax, which does not overflow. Where a model's outputs are not
    numbers, neither are `nll` and `accuracy`.

    The directions are

    - `"random"`: Gaussian, normalised to the weights; the paper's.
    - `"eigenvectors"`: of the Hessian over all the batches, of the eigenvalues of largest magnitude; a step is a
      length in weight space, and the second difference of `nll` along it is the eigenvalue, at steps small enough.
      `eigenvector_directions` gives them for use elsewhere too.
    - one or two other checkpoints, each a module or a state dict: `x = 1` is the first, `y = 1` the second. Their
      batch norm statistics move with the weights; beyond a checkpoint a variance may fall below zero, and the loss
      there is not a number (`batch_norm="reestimated"` has no such place).
    - `vitprobe.curvature.Directions`, such as `principal_directions` of a training: the plane of `trajectory`.

    Args:
        model: any eager PyTorch model, also wrapped; it is handed back as it was.
        batches: `(images, labels)` tuples, or mappings with `labels`; labels may be class numbers or probabilities.
        directions: which.
        span: how far the grid reaches along each direction: `s` is from `-s` to `s`, `(low, high)` is that, and
            `((low, high), (low, high))` is x and y apart. 1 unless given, between checkpoints `(-0.5, 1.5)`.
        points: cells along each direction.
        pairs: independent pairs of random directions; one pair says little.
        dimensions: 2 for a plane, 1 for a line; checkpoints and ready directions say it themselves.
        normalisation: of random directions, `"li"`, `"paper"`, `"layer"` or `"none"`; see
            `vitprobe.curvature.random_direction`.
        batch_norm: `"kept"`, the statistics are the model's own; or `"reestimated"`, they are computed anew for every
            cell, as the mean over the given batches at the moved weights, which doubles the cost.
        stack: cells that are computed at once by `torch.func.vmap`, equal to one by one up to rounding, with as much
            more memory. For devices that one cell does not fill. On one CPU core 16 at once took 0.45 to 0.65 of
            their time one by one for ViT, ConViT, ResNet and AlterNet on 8x8 images in batches of 16, where calling
            costs as much as computing, but 1.65 of it for ConvMixer; in batches of 96 or at 32x32, 1.1 to 1.5.
        path: netCDF file that grows while the cells are computed. The same call goes on where an interrupted one
            stopped (eigenvectors are found anew); cells that are not done are not numbers, and the attribute
            `complete` is 0. With a `forward`, which the file knows by its name alone, a cell is computed again and
            compared.
        forward: `forward(model, batch)` that returns the logits, for models that are called in another way.
        seed: of the directions.
        progress: whether a terminal shows a progress bar.

    Returns:
        `nll` and `accuracy`, each with its standard error over images, `l2_half_square` (`|w|^2 / 2`) and
        `l2_sum_of_norms` (sum over tensors of their lengths) along `(direction_pair, y, x)`, or `(direction_pair, x)`
        on a line. All cells see the same images, so that their errors are not independent: they say how far the whole
        picture would move with other images.

    Raises:
        ValueError: if there are no batches, no labels or negative ones, a number makes no grid, names or shapes of
            checkpoints differ from the model's, an option has no meaning here, the cells cannot be stacked, or the
            file holds another landscape.
    """
    bare = with_weights(model)
    given = None if isinstance(directions, str) else as_directions(bare, directions)
    kind = str(directions) if given is None else given.kind
    if given is not None:
        dimensions = len(given.axes)
    elif kind not in ("random", "eigenvectors"):
        raise unknown("directions", kind, ("random", "eigenvectors"))
    drawn = given is None and kind == "random"
    require_random(drawn, pairs, normalisation)
    if batch_norm not in ("kept", "reestimated"):
        raise unknown("batch_norm", batch_norm, ("kept", "reestimated"))
    steps = _grid(span, kind, points, pairs, dimensions, stack)
    kept = keep(batches, bare)
    cells = Cells(bare, kept, forward or default_forward, reestimate=batch_norm == "reestimated", stack=stack)
    config = {
        "probe": "loss_landscape",
        "directions": kind,
        "span": [[float(axis[0]), float(axis[-1])] for axis in steps],
        "points": points,
        "pairs": pairs,
        "dimensions": dimensions,
        "normalisation": normalisation if drawn else None,
        "batch_norm": batch_norm,
        "stack": stack,
        "forward": forward,
    }
    identity: dict[str, Any] = {}
    if path is not None:
        axes = [] if given is None else [fingerprint(axis) for axis in given.axes]
        identity = {"model": fingerprint(bare), "directions": axes, "batches": fingerprint(kept)}
        identity |= {"config": config, "seed": seed}
    sizes = [len(images_of(batch)) for batch in kept]
    attributes: dict[str, Any] = {
        "device": next(bare.parameters()).device,
        "seed": seed,
        "probe": "loss_landscape",
        "directions": kind,
        "batch_norm": batch_norm,
        "loss": "cross-entropy, mean over images",
        **described(bare),
        **described_batches(batches),
        "images": sum(sizes),
        "batch_size": max(sizes),
    }
    landscape = _Landscape(steps, pairs, config, attributes)

    def plane_of(pair: int) -> Directions:
        if given is not None:
            return given
        if kind == "eigenvectors":
            return eigenvector_directions(bare, kept, dimensions=dimensions, forward=forward, seed=seed)
        return random_directions(bare, normalisation=normalisation, seed=seed, pair=pair, dimensions=dimensions)

    file = Growing(path, identity, landscape.unfinished)
    if file.found is not None:
        landscape.go_on(file.found)
        if forward is not None and landscape.done.any():
            known = landscape.known()
            cell = [axis[place] for axis, place in zip(steps, known[:0:-1], strict=False)]
            if kind != "eigenvectors" or not any(cell):  # eigenvectors are dear to find again
                # In the middle all planes meet.
                plane = plane_of(known[0]) if any(cell) else random_directions(bare, dimensions=dimensions)
                with untouched(bare), cells.along(plane) as means:
                    again = float(means(np.array([cell]))[0, 0])
                place = ", ".join(f"{step:g}" for step in cell)
                require_same_value(path, f"nll at ({place})", float(landscape.values[0][known]), again)
        if landscape.done.all():
            return file.found
    with (
        file,
        tqdm(
            total=landscape.done.size,
            initial=int(landscape.done.sum()),
            desc="landscape",
            unit="cell",
            disable=None if progress else True,
        ) as bar,
    ):
        for pair in range(pairs):
            todo = np.argwhere(~landscape.done[pair])
            if not len(todo):
                continue
            plane = plane_of(pair)
            landscape.start(pair, plane, bare)
            with untouched(bare), cells.along(plane) as means:
                for chunk in np.split(todo, range(stack, len(todo), stack)):
                    where = np.array([[steps[0][i], *(axis[j] for axis in steps[1:])] for j, i in chunk])
                    landscape.fill(pair, chunk, means(where))
                    bar.update(len(chunk))
                    file.tick()
    return file.mark(landscape.dataset())


def eigenvector_directions(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    dimensions: int = 2,
    tol: float = 1e-3,
    max_products: int = 200,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    seed: int = 0,
) -> Directions:
    """Unit eigenvectors of the Hessian of the mean loss over all batches, of the eigenvalues of largest magnitude.

    Each has the sign that makes its largest component positive.

    Args:
        model: any eager PyTorch model, also wrapped.
        batches: `(images, labels)` tuples, or mappings with `labels`.
        dimensions: 2 for a plane, 1 for a line.
        tol: relative residual at which an eigenvalue is converged.
        max_products: Hessian-vector products to spend at most.
        forward: `forward(model, batch)` that returns the logits, for models that are called in another way.
        seed: of the start.

    Returns:
        The directions; facts are the eigenvalues, their residuals, and whether all are converged (1 or 0).

    Raises:
        ValueError: if there are no batches or no labels, or the loss is not finite.
    """
    bare = with_weights(model)
    operator = objective(bare, keep(batches, bare), forward=forward)
    start = noisy_start(operator.gradient(), derive_seed(seed, "eigenvectors"))
    found = eigenpairs(operator.product, start, dimensions, which="LM", tol=tol, max_products=max_products, seed=seed)
    if not found.converged.all():
        warnings.warn(
            f"the eigenvectors are not converged to a relative residual of {tol:g} after {found.products} products: "
            f"eigenvalues {found.values}, residuals {found.residuals}. vitprobe.probes.eigenvector_directions takes "
            "more max_products, and loss_landscape its result as directions.",
            stacklevel=2,
        )
    axes = []
    for vector in found.vectors:
        pieces = (vector * vector[vector.abs().argmax()].sign()).split([p.numel() for p in operator.parameters])
        axes.append({
            name: piece.view_as(p) for name, piece, p in zip(operator.names, pieces, operator.parameters, strict=True)
        })
    facts: dict[str, str | int | float] = {"converged": int(found.converged.all())}
    for axis, value, residual in zip("xy", found.values, found.residuals, strict=False):
        facts |= {f"eigenvalue_{axis}": float(value), f"residual_{axis}": float(residual)}
    labels = ("length along Hessian eigenvector 1", "length along Hessian eigenvector 2")
    return as_directions(bare, Directions("eigenvectors", tuple(axes), labels[: len(axes)], facts))


def plane_name(model: nn.Module, directions: Directions) -> str:
    """Digits that tell planes and lines apart: their centre and their directions.

    Args:
        model: whose weights are the centre, unwrapped.
        directions: the axes.

    Returns:
        Sixteen hexadecimal digits.
    """
    return fingerprint([dict(model.named_parameters()), *directions.axes])


def _grid(span: Span | None, kind: str, points: int, pairs: int, dimensions: int, stack: int) -> list[np.ndarray]:
    """The steps along each direction; whole numbers are exact, so that the centre and the checkpoints are cells."""
    if span is None:
        span = (-0.5, 1.5) if kind == "checkpoints" else 1.0
    ends = np.array((-span, span) if isinstance(span, int | float) else span, dtype=float)
    ends = np.broadcast_to(ends, (dimensions, 2)) if ends.shape in ((2,), (dimensions, 2)) else np.zeros((1, 2))
    if points < 2 or pairs < 1 or stack < 1 or dimensions not in (1, 2) or not (ends[:, 0] < ends[:, 1]).all():
        raise ValueError(
            f"points={points}, pairs={pairs}, span={span}, dimensions={dimensions}, stack={stack}: use at least 2 "
            "points, at least 1 pair, a positive span or (low, high), for each of 1 or 2 dimensions, a stack of 1."
        )
    steps = [np.linspace(low, high, points) for low, high in ends]
    return [np.where(np.abs(s - np.rint(s)) < 1e-12 * np.abs(s).max(), np.rint(s), s) for s in steps]


class _Landscape:
    """The values of all cells, done or not, and the dataset that they make."""

    def __init__(
        self, steps: list[np.ndarray], pairs: int, config: Mapping[str, Any], described: Mapping[str, Any]
    ) -> None:
        self.steps = steps
        self.config, self.described = config, described
        rows = len(steps[1]) if len(steps) == 2 else 1
        self.values = np.full((len(VARIABLES), pairs, rows, len(steps[0])), np.nan)
        self.planes = [""] * pairs
        self.labels: list[str] = []
        self.facts: Mapping[str, Any] = {}
        self.weight_terms = np.empty(0)

    @property
    def done(self) -> np.ndarray:
        """Which cells are done `(pair, y, x)`: the loss may be not a number for other reasons, the weights not."""
        return ~np.isnan(self.values[-1])

    def known(self) -> tuple[int, int, int]:
        """Pair, row and column of the done cell that is nearest to the middle."""
        rows = np.abs(self.steps[1]) if len(self.steps) == 2 else np.zeros(1)
        away = np.where(self.done, np.abs(self.steps[0]) + rows[:, None], np.inf)
        pair, row, column = map(int, np.unravel_index(away.argmin(), away.shape))
        return pair, row, column

    def go_on(self, found: xr.Dataset) -> None:
        for values, name in zip(self.values, VARIABLES, strict=True):
            if name in found:  # older files have no standard errors
                values[:] = found[name].values.reshape(values.shape)
        self.planes = [str(plane) for plane in found["plane"].values]

    def start(self, pair: int, directions: Directions, model: nn.Module) -> None:
        self.planes[pair] = plane_name(model, directions)
        self.labels = [directions.label(axis) for axis in range(len(self.steps))]
        self.facts = directions.facts
        self.weight_terms = _weight_terms(model, directions, self.steps)

    def fill(self, pair: int, cells: np.ndarray, means: np.ndarray) -> None:
        rows, columns = cells.T
        means = np.where(np.isnan(means[:, :1]), np.nan, means)
        self.values[:4, pair, rows, columns] = means.T
        self.values[4:, pair, rows, columns] = self.weight_terms[:, rows, columns]

    def unfinished(self) -> xr.Dataset | None:
        return self.dataset() if self.labels else None

    def dataset(self) -> xr.Dataset:
        dims = ("direction_pair", *("y", "x")[-len(self.steps) :])
        values = self.values if len(self.steps) == 2 else self.values[:, :, 0]
        coords: dict[str, Any] = {
            "direction_pair": (
                "direction_pair",
                np.arange(len(self.planes)),
                {"long_name": "pair of directions", "units": "1"},
            ),
            "plane": ("direction_pair", self.planes, {"long_name": "digits that tell planes apart"}),
        }
        for axis, steps, label in zip("xy", self.steps, self.labels, strict=False):
            coords[axis] = (axis, steps, {"long_name": label, "units": "1"})
        return xr.Dataset(
            {
                name: (dims, array, {"long_name": long_name, "units": units})
                for array, (name, (long_name, units)) in zip(values, VARIABLES.items(), strict=True)
            },
            coords=coords,
            attrs=provenance(
                title="Loss landscape",
                references="Li et al. 2018, arXiv:1712.09913; Park & Kim 2022, arXiv:2202.06709, Fig. 1a",
                config=self.config,
                **self.described,
                **self.facts,
                complete=int(self.done.all()),
            ),
        )


def _weight_terms(model: nn.Module, directions: Directions, steps: list[np.ndarray]) -> np.ndarray:
    """Both weight terms at every cell `(term, y, x)`, from inner products, once for all cells."""
    grams = []
    for name, p in model.named_parameters():
        rows = torch.stack([p.detach(), *(axis[name] for axis in directions.axes)]).double().flatten(1)
        grams.append(rows @ rows.T)
    x, y = np.meshgrid(steps[0], steps[1] if len(steps) == 2 else [0.0])
    coefficients = np.stack([np.ones_like(x), x, y][: 1 + len(steps)])
    gram = torch.stack(grams).cpu().numpy()
    squares = np.einsum("tij,iyx,jyx->tyx", gram, coefficients, coefficients, optimize=True).clip(0)
    return np.stack([0.5 * squares.sum(0), np.sqrt(squares).sum(0)])
