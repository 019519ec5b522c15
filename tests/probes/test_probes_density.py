"""Spectral density and trace against dense truth."""

import numpy as np
import pytest
import torch
from torch import nn

import vitprobe as vp
from vitprobe.figures import draw
from vitprobe.results import check


@pytest.fixture(scope="module")
def regression():
    """Softmax regression: its Hessian in closed form."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(3, 16, generator=generator, dtype=torch.float64))
    x = torch.randn(20, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (20,), generator=generator)
    p, inputs = model(x).softmax(1).detach(), x.flatten(1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    hessian = torch.einsum("ncd,ni,nj->cidj", inner, inputs, inputs).reshape(48, 48) / len(x)
    return model, [(x[:13], y[:13]), (x[13:], y[13:])], hessian


def signs_of(ds, size):
    """The random vectors that the probe drew."""
    from vitprobe.seeds import derive_seed

    return [
        (torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(derive_seed(0, "density", s))) * 2 - 1)
        for s in range(ds.sizes["sample"])
    ]


def test_moments_of_each_vector_are_exact(regression):
    model, data, hessian = regression
    ds = vp.hessian_density(model, data, samples=3, steps=6)
    for sample, signs in enumerate(signs_of(ds, 48)):
        v = signs.double()
        for power in range(2 * 6):
            truth = float(v @ torch.linalg.matrix_power(hessian, power) @ v) / 48
            ours = float((ds.weight[sample] * ds.node[sample] ** power).sum())
            assert ours == pytest.approx(truth, rel=1e-8), power


def test_trace_is_within_its_standard_error(regression):
    model, data, hessian = regression
    ds = vp.hessian_density(model, data, samples=200, steps=1)
    truth = float(hessian.trace())
    assert abs(ds.attrs["trace_mean"] - truth) < 4 * ds.attrs["trace_se"]
    assert ds.attrs["trace_se"] < 0.1 * truth
    np.testing.assert_allclose(ds.attrs["trace_se"], ds.trace.values.std(ddof=1) / 200**0.5)


def test_weights_sum_to_one_and_steps_end_with_the_space(regression):
    model, data, hessian = regression
    ds = vp.hessian_density(model, data, samples=2, steps=500)
    assert ds.sizes["rank"] == 48
    np.testing.assert_allclose(ds.weight.sum("rank"), 1.0)
    rank = int(torch.linalg.matrix_rank(hessian))
    # One node for each eigenvalue that the vector sees, zero included; rounding may split zero.
    assert rank <= int(np.isfinite(ds.node[0]).sum()) <= rank + 3


def test_repeatable_saved_and_drawn(regression, tmp_path):
    model, data, _ = regression
    first, second = (vp.hessian_density(model, data, samples=2, steps=5) for _ in range(2))
    np.testing.assert_array_equal(first.node, second.node)
    check(first)
    assert draw(vp.load(vp.save(first, tmp_path / "d.nc"))).axes


def test_bad_numbers(regression):
    model, data, _ = regression
    with pytest.raises(ValueError, match="samples=0"):
        vp.hessian_density(model, data, samples=0)
