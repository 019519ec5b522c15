"""Spectra as figures: what is drawn is what was measured."""

import numpy as np
import pytest
import xarray as xr

from vitprobe.figures import draw
from vitprobe.results import stack_runs


def spectrum(values: np.ndarray, **attrs) -> xr.Dataset:
    count, ranks = values.shape
    said = {"probe": "hessian_eigenvalues", "which": "LM", "nep": 0.25, "nep_low": 0.2, "nep_high": 0.3}
    return xr.Dataset(
        {"eigenvalue": (("batch", "rank"), values), "residual": (("batch", "rank"), np.full_like(values, 0.5))},
        coords={"batch": np.arange(count), "rank": np.arange(ranks)},
        attrs=said | {"ape": 10.0, "ape_low": 9.0, "ape_high": 11.0} | attrs,
    )


def values(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(5, 10, (count, 5))


def area(ax) -> float:
    outline = next(patch for patch in ax.patches if not patch.get_fill()).get_data()
    return float((outline.values * np.diff(outline.edges)).sum())


def test_few_hessians_by_rank_with_residuals():
    (ax,) = draw(spectrum(values(3))).axes
    drawn = np.concatenate([line.get_ydata() for line in ax.lines if line.get_marker() == "."])
    np.testing.assert_array_equal(np.sort(drawn), np.sort(values(3).ravel()))


def test_many_as_densities_whose_areas_are_shares():
    ds = spectrum(values(40))
    figure = draw(ds)
    negative, positive = figure.axes
    assert area(negative) == pytest.approx((ds.eigenvalue.values < 0).mean())
    assert area(negative) + area(positive) == pytest.approx(1.0)
    assert negative.get_xlim()[1] == 0 == positive.get_xlim()[0]
    (legend,) = figure.legends
    assert legend.get_texts()[0].get_text() == "NEP 0.25 [0.2, 0.3],  APE 10 [9, 11] nats"


def test_models_beside_each_other_with_seeds_pooled():
    runs = [
        spectrum(values(20, seed), model=model, seed=seed, nep=0.2 + 0.1 * seed, ape=10.0 + seed)
        for model in ("vit_nano", "resnet_nano")
        for seed in (0, 1)
    ]
    figure = draw(stack_runs(runs))
    assert len(figure.axes[0].patches) == 4  # an outline and an area for each model
    first = figure.legends[0].get_texts()[0].get_text()
    assert first.startswith("ViT nano,  NEP 0.25 ± 0.071 (s.d. of 2 seeds)")
    positive_only = spectrum(np.abs(values(20)))
    assert not draw(positive_only).axes[0].patches
