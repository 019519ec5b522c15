"""Lanczos against eigenvalues that are known."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator, eigsh

from vitprobe.curvature import Lanczos, eigenpairs, eigenpairs_together, inner, norm, order

SPECTRA = {
    "both signs": [120.0, -119.5, 61.7, 48.5, -30.0],
    "clustered": [10.0, 10.0001, 9.9999, -9.9998, 5.0],
    "one end": [7.0, 5.0, 3.0, 2.0, 1.5],
    "zero beside large": [3.0, 0.0, 0.0, 0.0, -2.0],
}


def matrix(values, size: int = 60, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    """A dense symmetric matrix whose eigenvalues are the given ones and small ones."""
    rng = np.random.default_rng(seed)
    spectrum = np.concatenate([values, rng.uniform(-0.5, 0.5, size - len(values))])
    q, _ = np.linalg.qr(rng.normal(size=(size, size)))
    return torch.from_numpy(q @ np.diag(spectrum) @ q.T), spectrum


def start(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("which", ["LM", "LA", "SA", "BE"])
@pytest.mark.parametrize("name", SPECTRA)
def test_ends_of_a_known_spectrum(name, which):
    a, spectrum = matrix(SPECTRA[name])
    found = eigenpairs(lambda v: a @ v, start(60), 4, which=which, tol=1e-9)
    truth = spectrum[order(spectrum, which)[:4]]
    np.testing.assert_allclose(found.values, truth, atol=1e-8)
    assert found.converged.all()
    residuals = [float((a @ v - value * v).norm()) for v, value in zip(found.vectors, found.values, strict=True)]
    np.testing.assert_allclose(residuals, found.residuals, atol=1e-9)
    torch.testing.assert_close(found.vectors @ found.vectors.T, torch.eye(4, dtype=torch.float64))


def test_an_eigenvalue_with_several_eigenvectors_needs_the_second_start():
    a, _ = matrix([5.0, 5.0, 5.0, -4.0, -4.0])
    once = eigenpairs(lambda v: a @ v, start(60), 5, tol=1e-2)
    twice = eigenpairs(lambda v: a @ v, start(60), 5, tol=1e-2, second_start=True)
    assert (np.abs(once.values) > 3.9).sum() < 5
    np.testing.assert_allclose(twice.values, [5, 5, 5, -4, -4], atol=1e-6)
    torch.testing.assert_close(twice.vectors @ twice.vectors.T, torch.eye(5, dtype=torch.float64), atol=1e-6, rtol=0)


def test_no_ghosts_however_many_steps():
    a, spectrum = matrix([100.0, 50.0, 20.0], size=40)
    lanczos = Lanczos(start(40))
    while lanczos.direction is not None:
        lanczos.grow(a @ lanczos.direction)
    assert len(lanczos) == 40
    np.testing.assert_allclose(lanczos.ritz()[0], np.sort(spectrum), atol=1e-8)


def test_a_start_without_the_wanted_direction_does_not_stop_it():
    a = torch.diag(torch.tensor([9.0, 5.0, 1.0, 0.5], dtype=torch.float64))
    blind = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    found = eigenpairs(lambda v: a @ v, blind, 2, tol=1e-10)
    np.testing.assert_allclose(found.values, [9, 5], atol=1e-9)


def test_zero_operator_and_zero_start():
    found = eigenpairs(torch.zeros_like, torch.zeros(8, dtype=torch.float64), 3)
    np.testing.assert_array_equal(found.values, 0)
    assert found.converged.all()


def test_unconverged_is_said():
    a, _ = matrix(SPECTRA["clustered"])
    found = eigenpairs(lambda v: a @ v, start(60), 4, tol=1e-10, max_products=7)
    assert not found.converged.all()
    assert found.products == 7


def test_float32_with_sums_in_float64():
    a, spectrum = matrix(SPECTRA["both signs"], size=300)
    single = a.float()
    found = eigenpairs(lambda v: single @ v, start(300).float(), 5, tol=1e-5)
    np.testing.assert_allclose(found.values, spectrum[:5], rtol=2e-6)
    ones = torch.full((1 << 25,), 0.1)
    assert inner(ones, ones) == pytest.approx(float(ones[0].double() ** 2) * (1 << 25), rel=1e-12)
    assert norm(ones) ** 2 == pytest.approx(inner(ones, ones), rel=1e-12)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(["LM", "LA", "SA"]))
def test_agrees_with_scipy(seed, which):
    a, _ = matrix(np.random.default_rng(seed).normal(0, 10, 6), seed=seed)
    found = eigenpairs(lambda v: a @ v, start(60, seed), 3, which=which, tol=1e-9)
    theirs = eigsh(LinearOperator(a.shape, lambda v: a.numpy() @ v), 3, which=which, return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(found.values), np.sort(theirs), atol=1e-7)


def test_several_operators_in_lockstep_are_each_alone():
    matrices = torch.stack([matrix(SPECTRA[name], seed=i)[0] for i, name in enumerate(SPECTRA)])
    starts = [start(60, i) for i in range(len(matrices))]
    together = eigenpairs_together(
        lambda v: torch.einsum("pij,pj->pi", matrices, v), starts, 4, seeds=range(4), tol=1e-6
    )
    for a, first, ours in zip(matrices, starts, together, strict=True):
        alone = eigenpairs(lambda v, a=a: a @ v, first, 4, tol=1e-6)
        np.testing.assert_allclose(ours.values, alone.values, atol=1e-10)
        assert ours.products == alone.products
    assert len({pairs.products for pairs in together}) > 1  # some waited for the others


def test_the_same_numbers_twice():
    a, _ = matrix(SPECTRA["clustered"])
    first, second = (eigenpairs(lambda v: a @ v, start(60), 4, second_start=True) for _ in range(2))
    np.testing.assert_array_equal(first.values, second.values)


@pytest.mark.parametrize("products", [0, 4])
def test_fewer_products_than_eigenvalues(products):
    hessian, _ = matrix([5.0, 4.0])
    with pytest.raises(ValueError, match=f"max_products={products} for 5 eigenvalues"):
        eigenpairs(lambda v: hessian @ v, start(60), 5, max_products=products)
    assert len(eigenpairs(lambda v: 2 * v[:3], torch.ones(3, dtype=torch.float64), 5, max_products=3).values) == 3
