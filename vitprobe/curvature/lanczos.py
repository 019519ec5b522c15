"""Lanczos iteration with full reorthogonalisation: extreme eigenvalues with residuals, and quadrature."""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

Which = Literal["LM", "LA", "SA", "BE"]

# Numbers converted to float64 at a time for an inner product: float32 sums of millions lose the digits needed.
CHUNK = 1 << 15
BLOCK = 8  # vectors of a basis that lie together
# A product is taken to be right to this many units of rounding of the largest eigenvalue: no residual is below that.
ROUNDING = 30
# A start has less than this share of a standard deviation along a given eigenvector once in 125 times.
FAINT = 0.01


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues in the order of `which`, with what is known of their error.

    Attributes:
        values: `(rank,)`.
        vectors: `(rank, parameter)`, orthonormal.
        residuals: `|A v - value v|` of each `(rank,)`, at least the rounding of a product: an eigenvalue lies within
            this distance of the value.
        converged: whether each residual is within the tolerance, relative to the value or to a thousandth of the
            largest, whichever is more `(rank,)`.
        products: number of products that were spent.
    """

    values: np.ndarray
    vectors: Tensor
    residuals: np.ndarray
    converged: np.ndarray
    products: int


class Lanczos:
    """The Krylov basis of a symmetric operator, grown step by step.

    Every new vector is orthogonalised against all before it, a second time where the first took most of it away, with
    inner products in float64; without that, copies of converged eigenvalues appear and more steps make it worse.
    Where the Krylov space is exhausted (an eigenvalue with several eigenvectors, say) a random direction goes on.

    The operator is somebody else's: `direction` is what it is to be applied to, `grow` takes what came out.

    Args:
        start: the first direction `(parameter,)`; need not have length one.
        seed: of the random directions that go on.
        against: vectors `(vector, parameter)` to stay orthogonal to.

    Attributes:
        direction: the newest vector of the basis, of which the image is wanted; `None` if the space is exhausted.
        alphas: diagonal of the tridiagonal matrix.
        betas: what stands beside it, zero where the space was exhausted; the last one leads out of the basis.
    """

    def __init__(self, start: Tensor, *, seed: int = 0, against: Tensor | None = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.against = against
        self.blocks: list[Tensor] = []
        self.leaks: list[Tensor] = []
        self.alphas: list[float] = []
        self.betas: list[float] = []
        first, length = self._orthogonal(start.clone())
        self.direction: Tensor | None = first if length > 0 else self._random(start)

    def __len__(self) -> int:
        return len(self.alphas)

    @property
    def epsilon(self) -> float:
        """Relative rounding of the vectors' type."""
        return torch.finfo(self.blocks[0].dtype).eps

    def grow(self, image: Tensor) -> None:
        """Add the direction to the basis.

        Args:
            image: the operator times the direction `(parameter,)`; may be changed.
        """
        vector = self.direction
        assert vector is not None
        alpha = inner(vector, image)
        # The three-term recurrence first: what is left has little in the basis, and one pass removes that.
        rest = image.sub_(vector, alpha=alpha)
        beta = self.betas[-1] if self.betas else 0.0
        if beta:
            rest.sub_(self.blocks[-1][(len(self) - 1) % BLOCK], alpha=beta)
        self._append(vector)
        self.alphas.append(alpha)
        if self.against is not None:
            self.leaks.append(_inners(self.against, rest).cpu())
        rest, length = self._orthogonal(rest, taken=max(abs(alpha), beta))
        size = max(*(abs(alpha) for alpha in self.alphas), *self.betas, 0.0)
        if length <= 100 * torch.finfo(vector.dtype).eps * size:
            # Invariant: nothing of the operator leads out of the basis, so its tridiagonal matrix falls in two here.
            self.betas.append(0.0)
            dimensions = vector.numel() - (0 if self.against is None else len(self.against))
            self.direction = self._random(vector) if len(self) < dimensions else None
        else:
            self.betas.append(length)
            self.direction = rest

    def ritz(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ritz values `(m,)`, their residuals `(m,)`, and their coordinates in the basis `(m, m)` as columns."""
        off = self.betas[:-1]
        tridiagonal = np.diag(self.alphas) + np.diag(off, 1) + np.diag(off, -1)
        values, coordinates = np.linalg.eigh(tridiagonal)
        residuals = self.betas[-1] * np.abs(coordinates[-1])
        if self.leaks:  # what the operator leads back to the vectors that were kept away from
            residuals = np.hypot(residuals, np.linalg.norm(torch.stack(self.leaks).numpy().T @ coordinates, axis=0))
        return values, residuals, coordinates

    def hidden(self, x: np.ndarray) -> np.ndarray:
        """The most weight that the latest start can have along an eigenvector of eigenvalue x, after what was seen.

        This is the Christoffel function `1 / sum_j p_j(x)^2` of the start's spectral measure, with the orthonormal
        polynomials that the tridiagonal matrix defines: no measure with these moments has a larger mass at x.

        Args:
            x: `(point,)`.

        Returns:
            Squared components `(point,)`, of a start of length one.
        """
        begin = self._begin()
        before, p, total = np.zeros_like(x), np.ones_like(x), np.ones_like(x)
        last = 0.0
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for alpha, beta in zip(self.alphas[begin:], self.betas[begin:], strict=True):
                before, p = p, ((x - alpha) * p - last * before) / beta
                last, total = beta, total + p**2
            return np.nan_to_num(1 / total, nan=0.0)

    def _begin(self) -> int:
        """Where the latest start is in the basis."""
        exhausted = [i for i, beta in enumerate(self.betas[:-1]) if beta == 0]
        return exhausted[-1] + 1 if exhausted else 0

    def latest_share(self, coordinates: np.ndarray) -> np.ndarray:
        """How much of each vector `(rank,)` of coordinates `(m, rank)` a start other than the first brought last."""
        begin = self._begin()
        return (coordinates[begin:] ** 2).sum(0) if begin else np.ones(coordinates.shape[1])

    def vectors(self, coordinates: np.ndarray) -> Tensor:
        """Vectors `(rank, parameter)` of coordinates `(m, rank)` in the basis."""
        weights = torch.from_numpy(np.ascontiguousarray(coordinates.T)).to(self.blocks[0])
        parts = weights.split(BLOCK, dim=1)
        result = weights.new_zeros(len(weights), self.blocks[0].shape[1])
        for part, block in zip(parts, self.blocks, strict=True):
            result.addmm_(part, block[: part.shape[1]])
        return result

    def _append(self, vector: Tensor) -> None:
        place = len(self) % BLOCK
        if place == 0:  # grown in blocks: a basis of the full length would be reserved in vain
            self.blocks.append(vector.new_empty(BLOCK, vector.numel()))
        self.blocks[-1][place] = vector

    def _orthogonal(self, rest: Tensor, *, taken: float = 0.0) -> tuple[Tensor, float]:
        """The part of a vector outside the basis, of length one, and the length it had; changes the vector.

        `taken` is the length of what has been taken away from it before.
        """
        known = [] if self.against is None else [self.against]
        known += [block[: len(self) - i * BLOCK] for i, block in enumerate(self.blocks)]
        whole = before = norm(rest)
        while True:
            for block in known:
                rest.addmv_(block.T, _inners(block, rest).to(rest), alpha=-1)
            length = norm(rest)
            if not math.isfinite(length):
                raise ValueError(
                    "a Hessian-vector product is not finite: the second derivative overflows; use dtype=torch.float64, "
                    "or look for an operation without one at these images (a square root at zero, say)."
                )
            # What is left of a vector inside the basis is rounding, in no direction of its own.
            if length <= 10 * torch.finfo(rest.dtype).eps * max(whole, taken):
                return rest, 0.0
            if length > 0.7 * before:
                return rest.div_(length), length
            before = length

    def _random(self, like: Tensor) -> Tensor:
        draw = torch.randn(like.numel(), generator=self.generator, dtype=torch.float64)
        return self._orthogonal(draw.to(like))[0]


def _inners(block: Tensor, vector: Tensor) -> Tensor:
    """Inner products of the rows of a block with a vector, in float64 `(row,)`; stays on the device."""
    if vector.dtype == torch.float64:
        return block @ vector
    total = vector.new_zeros(len(block), dtype=torch.float64)
    for rows, part in zip(block.split(CHUNK, dim=1), vector.split(CHUNK), strict=True):
        total += rows.double() @ part.double()
    return total


def inner(a: Tensor, b: Tensor) -> float:
    """Inner product in float64."""
    if a.dtype == torch.float64:
        return float(a @ b)
    parts = (x.double() @ y.double() for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True))
    return float(sum(parts))


def norm(a: Tensor) -> float:
    """Euclidean length, summed in float64."""
    return inner(a, a) ** 0.5


def noisy_start(gradient: Tensor, seed: int) -> Tensor:
    """A start of gradient and noise, each of length one: the one saves products, the other leaves no direction out.

    Args:
        gradient: `(parameter,)`; may be zero.
        seed: of the noise.

    Returns:
        The start.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(gradient.numel(), generator=generator, dtype=torch.float64).to(gradient)
    length = norm(gradient)
    return noise / norm(noise) + (gradient / length if length > 0 else 0)


def order(values: np.ndarray, which: Which) -> np.ndarray:
    """Indices of values from the most wanted on.

    Args:
        values: eigenvalues `(m,)`.
        which: `"LM"` largest magnitude, `"LA"` largest, `"SA"` smallest, `"BE"` largest and smallest in turn.

    Returns:
        `(m,)` indices.
    """
    descending = np.argsort(-values, kind="stable")
    if which == "LA":
        return descending
    if which == "SA":
        return descending[::-1]
    if which == "LM":
        return np.argsort(-np.abs(values), kind="stable")
    turns = np.empty_like(descending)
    turns[::2], turns[1::2] = descending[: (len(values) + 1) // 2], descending[::-1][: len(values) // 2]
    return turns


Search = Generator[Tensor, Tensor, "Eigenpairs"]


def search(
    start: Tensor,
    k: int,
    *,
    which: Which = "LM",
    tol: float = 1e-3,
    max_products: int = 200,
    second_start: bool = False,
    seed: int = 0,
) -> Search:
    """The search for the k most wanted eigenvalues of a symmetric operator, which is not called from here.

    It yields a vector `(parameter,)`, wants the operator's image of it sent back (and may change that), and returns
    the pairs. So several searches can share a pass. See `eigenpairs`, which drives one.
    """
    size = start.numel()
    k = min(k, size)
    if max_products < k:
        raise ValueError(
            f"max_products={max_products} for {k} eigenvalues, each of which takes a product at least: give {k} or "
            "more (200 is usual)."
        )
    # A second search stays away from what the first found: what is left of errors there, it can never mend.
    stop = 1e-3 * tol if second_start else tol
    found = yield from _iterate(Lanczos(start, seed=seed), k, which, tol, stop, max_products)
    while second_start and found.products < max_products and len(found.values) < size:
        generator = torch.Generator().manual_seed(seed + found.products)
        draw = torch.randn(size, generator=generator, dtype=torch.float64).to(start)
        budget = max_products - found.products
        complement = Lanczos(draw, seed=seed, against=found.vectors)
        again = yield from _iterate(complement, min(k, size - k), which, tol, tol, budget)
        values = np.concatenate([found.values, again.values])
        best = order(values, which)[:k]
        nothing_new = bool((best < len(found.values)).all())
        found = Eigenpairs(
            values[best],
            torch.cat([found.vectors, again.vectors])[torch.from_numpy(best.copy())],
            np.concatenate([found.residuals, again.residuals])[best],
            np.concatenate([found.converged, again.converged])[best],
            found.products + again.products,
        )
        if nothing_new:
            break
    return found


def eigenpairs(
    product: Callable[[Tensor], Tensor], start: Tensor, k: int, *, seed: int = 0, **options: Any
) -> Eigenpairs:
    """The k most wanted eigenvalues of a symmetric operator.

    A residual proves that *an* eigenvalue is near, not that none was missed. So this stops when the residuals of k
    Ritz pairs are within `tol` of their values, and an eigenvector that is wanted more than the last of them could
    have so little weight in the start that a random start has as little once in 125 times only (`Lanczos.hidden`).
    What no single start can see is how often an eigenvalue is there: of several eigenvectors of one value it finds
    one, and of two values nearer than `tol` perhaps one; see `second_start`.

    Args:
        product: `(parameter,)` to `(parameter,)`.
        start: first direction; the gradient with noise in it saves a fifth of the products of noise alone.
        k: how many.
        seed: of the random directions.
        **options: `which` are wanted, `"LM"` largest magnitude, `"LA"` largest, `"SA"` smallest, `"BE"` both ends in
            turn; `tol`, relative residual wanted (1e-3); `max_products`, to give up at (200), the pairs then say that
            they are not converged; `second_start`, to search the complement of what was found from a random direction
            afterwards until nothing there is wanted more, which finds second eigenvectors of the same eigenvalue at
            nearly the same cost again.

    Returns:
        The pairs, most wanted first.

    Raises:
        ValueError: if `max_products` are fewer than the eigenvalues that are wanted, or a product is not finite.
    """
    return eigenpairs_together(lambda vectors: product(vectors[0])[None], [start], k, seeds=[seed], **options)[0]


def eigenpairs_together(
    product: Callable[[Tensor], Tensor], starts: Sequence[Tensor], k: int, *, seeds: Sequence[int], **options: Any
) -> list[Eigenpairs]:
    """The same for several operators that are applied together, each to its own vector.

    Args:
        product: `(problem, parameter)` to the same shape; rows do not mix.
        starts: the first direction of each.
        k: how many eigenvalues of each.
        seeds: of the random directions of each.
        **options: as in `eigenpairs`.

    Returns:
        The pairs of each.
    """
    searches = [search(start, k, seed=seed, **options) for start, seed in zip(starts, seeds, strict=True)]
    found: list[Eigenpairs | None] = [None] * len(searches)
    wanted = [next(one) for one in searches]
    while None in found:
        images = product(torch.stack(wanted))
        for i, one in enumerate(searches):
            if found[i] is None:
                try:
                    wanted[i] = one.send(images[i])
                except StopIteration as done:
                    found[i] = done.value
                    wanted[i] = torch.zeros_like(wanted[i])
    return cast("list[Eigenpairs]", found)


def _iterate(lanczos: Lanczos, k: int, which: Which, tol: float, stop: float, max_products: int) -> Search:
    """Grow until the k most wanted are within `stop` and none is missed; `tol` is what is called converged."""
    while len(lanczos) < max_products and lanczos.direction is not None:
        lanczos.grow((yield lanczos.direction))
        if len(lanczos) < k:
            continue
        values, residuals, coordinates = lanczos.ritz()
        best = order(values, which)[:k]
        if not _settled(values, residuals, best, stop, lanczos.epsilon).all():
            continue
        if lanczos.betas[-1] > 0:
            faint = FAINT**2 / (2 * lanczos.blocks[0].shape[1])  # half of a start is the gradient
            if (lanczos.hidden(_wanted_more(values, best, which, tol)) <= faint).all():
                break
        elif (lanczos.latest_share(coordinates[:, best]) < 0.5).all():
            break  # the space was exhausted again, by a start that brought nothing wanted
    values, residuals, coordinates = lanczos.ritz()
    best = order(values, which)[:k]
    residuals = np.maximum(residuals, ROUNDING * lanczos.epsilon * np.abs(values).max())
    settled = _settled(values, residuals, best, tol, lanczos.epsilon)
    return Eigenpairs(values[best], lanczos.vectors(coordinates[:, best]), residuals[best], settled, len(lanczos))


def _settled(values: np.ndarray, residuals: np.ndarray, best: np.ndarray, tol: float, epsilon: float) -> np.ndarray:
    """Whether residuals are within the tolerance of their values, or as small as rounding lets them be."""
    largest = np.abs(values).max()
    return residuals[best] <= np.maximum(tol * _sizes(values[best], largest), 3 * ROUNDING * epsilon * largest)


def _sizes(values: np.ndarray, largest: float) -> np.ndarray:
    """What errors are relative to: the values, or a thousandth of the largest, because zero has no relative error."""
    return np.maximum(np.abs(values), 1e-3 * largest)


def _wanted_more(values: np.ndarray, best: np.ndarray, which: Which, tol: float) -> np.ndarray:
    """Points where an eigenvalue would be wanted more than the last of those found, and is not one of them."""
    found, largest = values[best], np.abs(values).max()
    apart = 2 * tol * _sizes(found, largest)
    end = (1 + 2 * tol) * largest

    def above(least: float) -> np.ndarray:
        return np.linspace(least, max(end, least), 200)

    if which == "LM":
        outside = above(np.abs(found).min() + apart.min())
        points = np.concatenate([outside, -outside])
    elif which == "LA":
        points = above(found.min())
    elif which == "SA":
        points = -above(-found.max())
    else:
        points = above(found[::2].min())
        if len(found) > 1:
            points = np.concatenate([points, -above(-found[1::2].max())])
    return points[(np.abs(points[:, None] - found) > apart).all(1)]
