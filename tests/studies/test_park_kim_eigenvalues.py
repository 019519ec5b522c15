"""What the studies of the Hessian share: eigenvalues kept beside the trained network."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.park_kim.eigenvalues import eigenvalues, over_seeds
from vitprobe.probes import hessian
from vitprobe.runs import DataSpec, Run, trained
from vitprobe.study import Settings
from vitprobe.training import Recipe

RUN = Run(
    model="vit_nano",
    data=DataSpec(spec="digits", train_size=48, test_size=20),
    recipe=Recipe(epochs=1, batch_size=24, snapshots=(0, 1)),
    options={"depth": 1},
)


@pytest.mark.filterwarnings("ignore:.*not converged:UserWarning")  # smoke gives up early
def test_eigenvalues_are_kept_beside_the_network_and_solved_once(tmp_path, monkeypatch):
    solved = []
    solve = hessian._solve

    def counting(operator, *rest):
        solved.append(len(operator.batches))
        return solve(operator, *rest)

    monkeypatch.setattr(hessian, "_solve", counting)
    monkeypatch.setattr("studies.park_kim.eigenvalues.BATCHES", {"smoke": 2})
    settings = Settings(scale="smoke", cache=tmp_path)
    first = eigenvalues(trained(RUN, cache=tmp_path, device="cpu"), 1, settings)
    again = eigenvalues(trained(RUN, cache=tmp_path, device="cpu"), 1, settings)
    assert solved == [2]
    xr.testing.assert_identical(first.drop_attrs(), again.drop_attrs())
    assert "identity" not in first.attrs
    # Other weights have a file of their own.
    eigenvalues(trained(RUN, cache=tmp_path, device="cpu"), 0, settings)
    assert solved == [2, 2] and len(list(tmp_path.rglob("eigenvalues_*.nc"))) == 2
    renewed = eigenvalues(trained(RUN, cache=tmp_path, device="cpu"), 1, replace(settings, recompute=True))
    assert solved == [2, 2, 2]
    xr.testing.assert_identical(first.drop_attrs(), renewed.drop_attrs())


@pytest.mark.filterwarnings("ignore:.*not converged:UserWarning")
def test_eigenvalues_go_on_with_the_next_batch(tmp_path, monkeypatch):
    monkeypatch.setattr("studies.park_kim.eigenvalues.BATCHES", {"cpu": 3})
    monkeypatch.setattr("studies.park_kim.eigenvalues.PRODUCTS", {"cpu": 12})
    settings = Settings(scale="cpu")
    whole = eigenvalues(trained(RUN, cache=tmp_path / "a", device="cpu"), 1, settings)
    solve, solved = hessian._solve, []

    def stopping(operator, *rest):
        solved.append(1)
        if len(solved) == 3:
            raise KeyboardInterrupt
        return solve(operator, *rest)

    monkeypatch.setattr(hessian, "_solve", stopping)
    result = trained(RUN, cache=tmp_path / "b", device="cpu")
    with pytest.raises(KeyboardInterrupt):
        eigenvalues(result, 1, settings)
    resumed = eigenvalues(result, 1, settings)
    assert len(solved) == 4  # two done, one stopped and done again
    xr.testing.assert_identical(whole.drop_attrs(), resumed.drop_attrs())


@pytest.mark.filterwarnings("ignore:.*not converged:UserWarning")
def test_batches_are_those_of_the_networks_seed(tmp_path):
    """So that an interval over seeds covers which batches were drawn, and networks of one seed can be compared."""
    runs = {
        (depth, seed): replace(RUN, recipe=replace(RUN.recipe, seed=seed), options={"depth": depth})
        for depth, seed in ((1, 0), (2, 0), (1, 1))
    }
    seen = {
        key: eigenvalues(trained(run, cache=tmp_path, device="cpu"), 1, Settings(scale="smoke")).fingerprint.values
        for key, run in runs.items()
    }
    assert (seen[1, 0] == seen[2, 0]).all()
    assert (seen[1, 0] != seen[1, 1]).all()


def test_the_interval_over_seeds_of_a_positive_number_is_that_of_its_logarithm():
    values = np.array([[4.0], [8.0], [16.0]])
    mean, sides = over_seeds(values, "ape")
    half = scipy.stats.t.ppf(0.975, 2) / np.sqrt(3)  # in doublings, whose standard deviation is one
    np.testing.assert_allclose([mean[0], mean[0] - sides[0, 0], mean[0] + sides[1, 0]], [8, 8 / 2**half, 8 * 2**half])
    mean, sides = over_seeds(np.array([[0.0], [0.1], [0.2]]), "nep")
    np.testing.assert_allclose([mean[0], *sides[:, 0]], [0.1, 0.1, scipy.stats.t.ppf(0.975, 2) * 0.1 / np.sqrt(3)])
