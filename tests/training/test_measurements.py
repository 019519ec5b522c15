"""Measurements while a network trains."""

import numpy as np
import pytest
import torch
from tiny import StopError, make_data, stop_after, tiny

from vitprobe import results
from vitprobe.data import load_data
from vitprobe.models import create_model
from vitprobe.probes import attention_gates, hessian_eigenvalues, nonlocality
from vitprobe.training import Measurements, Recipe, fit

RECIPE = Recipe(epochs=3, batch_size=50)


def test_probes_along_epochs_are_those_of_the_snapshots(tmp_path):
    data = load_data("digits", train_size=100, test_size=30)
    model = create_model("convit_nano", image_size=8, channels=1, num_classes=10, seed=0)
    batches = list(data.loader("test", batch_size=15))
    measures = {
        "nonlocality": lambda model: nonlocality(model, batches, progress=False),
        "gates": lambda model: attention_gates(model, batches, progress=False),
        "eigenvalues": lambda model: hessian_eigenvalues(model, batches[:1], k=1, progress=False),
    }
    measurements = Measurements(measures, tmp_path, epochs=(0, 1, 3))
    measurements(model, {"epoch": 0})
    fit(model, data, RECIPE, folder=tmp_path, on_epoch=measurements, progress=False)
    for name in measures:
        ds = measurements.dataset(name)
        assert ds.epoch.values.tolist() == [0, 1, 3]
        results.save(ds, tmp_path / f"{name}.nc")
    ds = measurements.dataset("nonlocality")
    assert ds.nonlocality.dims == ("epoch", "layer", "head")
    last = nonlocality(model, batches, progress=False)
    np.testing.assert_array_equal(ds.nonlocality.sel(epoch=3), last.nonlocality)
    assert not np.array_equal(ds.nonlocality.sel(epoch=0), ds.nonlocality.sel(epoch=3))
    assert measurements.dataset("eigenvalues").eigenvalue.dims == ("epoch", "batch", "rank")


def test_what_is_measured_is_not_measured_again(tmp_path):
    calls = []

    def count(model):
        calls.append(torch.stack([p.abs().sum() for p in model.parameters()]).sum().item())
        return nonlocality(create_model("vit_nano", image_size=8, num_classes=2, seed=0), [torch.zeros(2, 3, 8, 8)])

    recipe = Recipe(epochs=3, batch_size=16)
    with pytest.raises(StopError):
        measurements = Measurements({"one": count}, tmp_path)

        def measure(model, row):
            measurements(model, row)
            stop_after(2)(model, row)

        fit(tiny(), make_data(), recipe, folder=tmp_path, on_epoch=measure)
    again = Measurements({"one": count}, tmp_path)
    fit(tiny(), make_data(), recipe, folder=tmp_path, on_epoch=again)
    assert len(calls) == 3 == len(set(calls))
    assert again.dataset("one").epoch.values.tolist() == [1, 2, 3]


def test_a_measurement_of_other_weights_is_overwritten(tmp_path):
    """A folder may hold that of another seed, whose training was stopped before its first checkpoint."""
    batches = [torch.randn(2, 3, 8, 8)]
    found = []
    for seed in (0, 1, 1):
        measurements = Measurements({"one": lambda model: nonlocality(model, batches, progress=False)}, tmp_path)
        measurements(create_model("vit_nano", image_size=8, num_classes=2, seed=seed), {"epoch": 0})
        found.append(measurements.dataset("one"))
    assert not found[0].nonlocality.equals(found[1].nonlocality)
    assert found[1].attrs["history"] == found[2].attrs["history"]  # the same weights are not measured again


def test_unknown_and_empty_measurements_are_said(tmp_path):
    measurements = Measurements({"nonlocality": nonlocality}, tmp_path)
    with pytest.raises(ValueError, match="nothing is measured yet"):
        measurements.dataset("nonlocality")
    with pytest.raises(ValueError, match="Did you mean 'nonlocality'"):
        measurements.dataset("nonlocalty")
