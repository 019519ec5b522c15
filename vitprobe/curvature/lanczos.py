"""Lanczos iteration with full reorthogonalisation: extreme eigenvalues with residuals, and quadrature."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Which = Literal["LM", "LA", "SA", "BE"]

# Numbers converted to float64 at a time for an inner product: float32 sums of millions lose the digits needed.
CHUNK = 1 << 18


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues in the order of `which`, with what is known of their error.

    Attributes:
        values: `(rank,)`.
        vectors: `(rank, parameter)`, orthonormal.
        residuals: `|A v - value v|` of each `(rank,)`: an eigenvalue lies within this distance of the value.
        converged: whether each residual is within the tolerance `(rank,)`.
        products: number of products that were spent.
    """

    values: np.ndarray
    vectors: Tensor
    residuals: np.ndarray
    converged: np.ndarray
    products: int


class Lanczos:
    """The Krylov basis of a symmetric operator, grown step by step.

    Every new vector is orthogonalised twice against all before it, with inner products in float64; without that,
    copies of converged eigenvalues appear and more steps make it worse. Where the Krylov space is exhausted
    (an eigenvalue with several eigenvectors, say) a random direction goes on.

    Args:
        product: `(parameter,)` to `(parameter,)`.
        start: the first direction; need not have length one.
        seed: of the random directions that go on.
        against: vectors `(vector, parameter)` to stay orthogonal to.
    """

    def __init__(
        self, product: Callable[[Tensor], Tensor], start: Tensor, *, seed: int = 0, against: Tensor | None = None
    ) -> None:
        self.product = product
        self.generator = torch.Generator().manual_seed(seed)
        self.against = against
        self.basis: list[Tensor] = []
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self._next: Tensor | None = None
        first, length = self._orthogonal(start)
        self._next = first if length > 0 else self._random(start)

    def step(self) -> bool:
        """Add one direction; `False` if the whole space is exhausted."""
        if self._next is None:
            return False
        vector = self._next
        self.basis.append(vector)
        image = self.product(vector)
        self.alphas.append(inner(vector, image))
        rest, length = self._orthogonal(image)
        scale = max(1.0, *(abs(alpha) for alpha in self.alphas), *self.betas, 0.0)
        if length <= 100 * torch.finfo(vector.dtype).eps * scale:
            # Invariant: nothing of the operator leads out of the basis, so its tridiagonal matrix falls in two here.
            self.betas.append(0.0)
            dimensions = vector.numel() - (0 if self.against is None else len(self.against))
            self._next = self._random(vector) if len(self.basis) < dimensions else None
        else:
            self.betas.append(length)
            self._next = rest
        return True

    def ritz(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ritz values `(m,)`, their residuals `(m,)`, and their coordinates in the basis `(m, m)` as columns."""
        off = self.betas[:-1]
        tridiagonal = np.diag(self.alphas) + np.diag(off, 1) + np.diag(off, -1)
        values, coordinates = np.linalg.eigh(tridiagonal)
        return values, self.betas[-1] * np.abs(coordinates[-1]), coordinates

    def vectors(self, coordinates: np.ndarray) -> Tensor:
        """Vectors `(rank, parameter)` of coordinates `(m, rank)` in the basis."""
        weights = torch.from_numpy(np.ascontiguousarray(coordinates.T))
        result = torch.zeros(coordinates.shape[1], self.basis[0].numel(), dtype=self.basis[0].dtype)
        result = result.to(self.basis[0].device)
        for weight, vector in zip(weights.T, self.basis, strict=True):
            result += weight.to(result).outer(vector)
        return result

    def _orthogonal(self, vector: Tensor) -> tuple[Tensor, float]:
        """The part of a vector outside the basis, of length one, and the length it had."""
        rest = vector.clone()
        before = norm(rest)
        for _ in range(2):
            for other in [*(self.against if self.against is not None else []), *self.basis]:
                rest.sub_(other, alpha=inner(other, rest))
        length = norm(rest)
        # What is left of a vector inside the basis is rounding, in no direction of its own.
        if length <= 10 * torch.finfo(rest.dtype).eps * before:
            return rest, 0.0
        return rest.div_(length), length

    def _random(self, like: Tensor) -> Tensor:
        draw = torch.randn(like.numel(), generator=self.generator, dtype=torch.float64)
        return self._orthogonal(draw.to(like))[0]


def inner(a: Tensor, b: Tensor) -> float:
    """Inner product in float64."""
    if a.dtype == torch.float64:
        return float(a @ b)
    parts = (x.double() @ y.double() for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True))
    return float(sum(parts))


def norm(a: Tensor) -> float:
    """Euclidean length, summed in float64."""
    return inner(a, a) ** 0.5


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


def eigenpairs(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    k: int,
    *,
    which: Which = "LM",
    tol: float = 1e-3,
    max_products: int = 200,
    extra: int = 2,
    second_start: bool = False,
    seed: int = 0,
) -> Eigenpairs:
    """The k most wanted eigenvalues of a symmetric operator.

    Stops when the residuals of k Ritz pairs are within `tol` times the largest magnitude found of their values, and
    `extra` further pairs are within ten times that. A residual proves that *an* eigenvalue is near, not that none
    was missed; the further pairs have to be settled too before one can hide among the wanted.

    Args:
        product: `(parameter,)` to `(parameter,)`.
        start: first direction; the gradient with noise in it saves a fifth of the products of noise alone.
        k: how many.
        which: which are wanted: largest magnitude, largest, smallest, or both ends in turn.
        tol: relative residual wanted.
        max_products: give up there; the pairs then say that they are not converged.
        extra: further pairs that have to settle.
        second_start: afterwards search the complement of what was found from a random direction, until nothing
            there is wanted more: finds second eigenvectors of the same eigenvalue, at nearly the same cost again.
        seed: of the random directions.

    Returns:
        The pairs, most wanted first.
    """
    size = start.numel()
    k = min(k, size)
    found = _iterate(Lanczos(product, start, seed=seed), k, which, tol, max_products, extra)
    while second_start and found.products < max_products and len(found.values) < size:
        generator = torch.Generator().manual_seed(seed + found.products)
        draw = torch.randn(size, generator=generator, dtype=torch.float64).to(start)
        budget = max_products - found.products
        again = _iterate(
            Lanczos(product, draw, seed=seed, against=found.vectors), min(k, size - k), which, tol, budget, extra
        )
        values = np.concatenate([found.values, again.values])
        best = order(values, which)[:k]
        merged = Eigenpairs(
            values[best],
            torch.cat([found.vectors, again.vectors])[torch.from_numpy(best.copy())],
            np.concatenate([found.residuals, again.residuals])[best],
            np.concatenate([found.converged, again.converged])[best],
            found.products + again.products,
        )
        nothing_new = bool((best < len(found.values)).all())
        found = merged
        if nothing_new:
            break
    return found


def _iterate(lanczos: Lanczos, k: int, which: Which, tol: float, max_products: int, extra: int) -> Eigenpairs:
    while len(lanczos.basis) < max_products and lanczos.step():
        if len(lanczos.basis) < k + extra:
            continue
        values, residuals, coordinates = lanczos.ritz()
        best = order(values, which)[: k + extra]
        relative = residuals[best] / np.maximum(np.abs(values[best]), np.finfo(float).tiny)
        floor = residuals[best] <= 100 * np.finfo(float).eps * np.abs(values).max()
        if ((relative[:k] <= tol) | floor[:k]).all() and ((relative[k:] <= 10 * tol) | floor[k:]).all():
            break
    values, residuals, coordinates = lanczos.ritz()
    best = order(values, which)[:k]
    scale = np.abs(values).max()
    settled = residuals[best] <= np.maximum(tol * np.abs(values[best]), 100 * np.finfo(float).eps * scale)
    return Eigenpairs(values[best], lanczos.vectors(coordinates[:, best]), residuals[best], settled, len(lanczos.basis))
