"""Long measurements that grow in a file."""

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import vitprobe as vp
from vitprobe.probes.growing import Growing, fingerprint
from vitprobe.results import provenance


def dataset(values) -> xr.Dataset | None:
    if not values:
        return None
    return xr.Dataset(
        {"loss": ("batch", np.array(values), {"long_name": "loss", "units": "nats"})},
        coords={"batch": ("batch", np.arange(len(values)), {"long_name": "batch", "units": "1"})},
        attrs=provenance(title="a test"),
    )


def test_fingerprints_tell_weights_buffers_names_and_shapes_apart():
    a, b = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    assert fingerprint(a) == fingerprint(b)
    b.running_mean += 1e-6
    assert fingerprint(a) != fingerprint(b)
    assert fingerprint(nn.Sequential(a)) != fingerprint(a)
    x = torch.zeros(2, 3)
    assert fingerprint([(x, x)]) != fingerprint([(x, x.T)])
    assert fingerprint([x]) != fingerprint([x.long()])
    assert fingerprint([x.bfloat16(), torch.tensor(True), x[:0]]) == fingerprint([
        x.bfloat16(),
        torch.tensor(True),
        x[:0],
    ])


def test_kept_on_any_exit_and_found_again(tmp_path):
    path, values = tmp_path / "grows.nc", []
    with pytest.raises(KeyboardInterrupt), Growing(path, {"k": 5}, lambda: dataset(values)) as file:
        assert file.found is None
        values += [1.0, 2.0]
        raise KeyboardInterrupt
    with Growing(path, {"k": 5}, lambda: dataset(values)) as file:
        np.testing.assert_array_equal(file.found.loss, [1.0, 2.0])
        values.append(3.0)
    np.testing.assert_array_equal(vp.load(path).loss, [1.0, 2.0, 3.0])


def test_saves_as_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr("vitprobe.probes.growing.EVERY", 0.0)
    values = []
    with Growing(tmp_path / "g.nc", {}, lambda: dataset(values)) as file:
        file.tick()
        assert not (tmp_path / "g.nc").exists()  # nothing was measured yet
        values.append(1.0)
        file.tick()
        assert vp.load(tmp_path / "g.nc").sizes["batch"] == 1


def test_another_measurement_is_refused_and_left_whole(tmp_path):
    path = tmp_path / "g.nc"
    with Growing(path, {"config": {"k": 5, "tol": 1e-3}, "model": "a"}, lambda: dataset([1.0])):
        pass
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"config.k was 5 and is now 6; model was 'a' and is now 'b'.*delete the file"):
        Growing(path, {"config": {"k": 6, "tol": 1e-3}, "model": "b"}, lambda: dataset([2.0]))
    assert path.read_bytes() == before


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Growing(None, {}, lambda: dataset([1.0])) as file:
        file.tick()
    assert not list(tmp_path.iterdir())
