"""Trajectories: paths made by hand, projections against numpy, and the plane of the landscape."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import vitprobe as vp
from vitprobe.curvature import Directions, principal_directions, random_directions
from vitprobe.figures import draw
from vitprobe.results import check


def net() -> nn.Module:
    model = vp.create_model("convmixer", image_size=8, channels=1, num_classes=3, patch_size=2, dim=6, depth=1, seed=0)
    return model.double()


def data():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 1, 8, 8, generator=generator), torch.randint(3, (8,), generator=generator))]


def vectors(model: nn.Module, count: int) -> list[dict[str, torch.Tensor]]:
    """Orthonormal directions through all parameters."""
    generator = torch.Generator().manual_seed(1)
    size = sum(p.numel() for p in model.parameters())
    basis, _ = torch.linalg.qr(torch.randn(size, count, generator=generator, dtype=torch.float64))
    sizes = [p.numel() for p in model.parameters()]
    return [
        {n: part.view_as(p) for (n, p), part in zip(model.named_parameters(), column.split(sizes), strict=True)}
        for column in basis.T
    ]


def at(model: nn.Module, steps) -> dict[str, torch.Tensor]:
    """The model moved by `(step, direction)` pairs."""
    state = copy.deepcopy(model.state_dict())
    for step, direction in steps:
        for name, tensor in direction.items():
            state[name] += step * tensor
    return state


def rows(model: nn.Module, states) -> np.ndarray:
    names = dict(model.named_parameters())
    return np.stack([
        torch.cat([(state[name] - p.detach()).flatten() for name, p in names.items()]).numpy() for state in states
    ])


def test_a_straight_line():
    model = net()
    (a,) = vectors(model, 1)
    steps = [3.0, 2.0, 0.5, -1.0]
    ds = vp.trajectory(model, [at(model, [(step, a)]) for step in steps], epochs=[0, 1, 5, 9])
    np.testing.assert_allclose(ds.radius, np.abs(steps) / 3)
    np.testing.assert_allclose(ds.angle, [0, 0, 0, math.pi], atol=1e-12)
    np.testing.assert_allclose(ds.along_x[0], steps, rtol=1e-9)
    np.testing.assert_array_equal(ds.along_y, 0)
    np.testing.assert_allclose(ds.off_plane, 0, atol=1e-20)
    np.testing.assert_allclose([ds.attrs["initial_distance"], ds.attrs["explained_x"]], [3, 1])
    np.testing.assert_array_equal(ds.epoch, [0, 1, 5, 9])


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-3, 1.0, math.pi / 2, math.pi - 1e-9, math.pi])
def test_a_circle(angle):
    model = net()
    a, b = vectors(model, 2)
    turned = at(model, [(2 * math.cos(angle), a), (2 * math.sin(angle), b)])
    ds = vp.trajectory(model, [at(model, [(2.0, a)]), turned])
    assert float(ds.radius[1]) == pytest.approx(1)
    assert float(ds.angle[1]) == pytest.approx(angle, rel=1e-5, abs=1e-14)


def test_the_model_itself_lies_in_no_direction():
    model = net()
    a, b = vectors(model, 2)
    ds = vp.trajectory(model, [at(model, [(2, a)]), at(model, [(1, b)]), model])
    assert float(ds.radius[-1]) == 0 and np.isnan(ds.angle[-1]) and np.isnan(ds.off_plane[0, -1])
    np.testing.assert_array_equal([ds.along_x[0, -1], ds.along_y[0, -1]], 0)
    assert np.isfinite(ds.angle[:-1]).all()
    check(ds)


def test_principal_coordinates_are_those_of_the_singular_value_decomposition():
    model = net()
    a, b, c = vectors(model, 3)
    path = [at(model, [(5 - t, a), (t * (5 - t) / 3, b), (0.1 * (-1) ** t, c)]) for t in range(5)]
    ds = vp.trajectory(model, path)
    left, singular, _ = np.linalg.svd(rows(model, path), full_matrices=False)
    for axis, name in enumerate(("along_x", "along_y")):
        expected = left[:, axis] * singular[axis]
        np.testing.assert_allclose(ds[name][0], expected * np.sign(expected[np.abs(expected).argmax()]), atol=1e-9)
    squares = (rows(model, path) ** 2).sum(1)
    outside = 1 - ((left[:, :2] * singular[:2]) ** 2).sum(1) / squares
    np.testing.assert_allclose(ds.off_plane[0], outside, atol=1e-9)
    assert float(ds.off_plane.max()) > 1e-4


@pytest.mark.parametrize("normalisation", ["li", "layer"])
def test_coordinates_are_least_squares(normalisation):
    model = net()
    path = [at(model, [(2 - t, v) for t, v in enumerate(vectors(model, 2))]), at(model, [(1, vectors(model, 1)[0])])]
    ds = vp.trajectory(model, path, directions="random", pairs=2, normalisation=normalisation, seed=5)
    for pair in range(2):
        axes = random_directions(model, normalisation=normalisation, seed=5, pair=pair).axes
        matrix = np.stack([np.concatenate([t.numpy().ravel() for t in axis.values()]) for axis in axes], axis=1)
        for t, row in enumerate(rows(model, path)):
            expected, squares, *_ = np.linalg.lstsq(matrix, row)
            here = ds.isel(direction_pair=pair, epoch=t)
            np.testing.assert_allclose([here.along_x, here.along_y], expected, rtol=1e-9)
            np.testing.assert_allclose(here.off_plane, squares[0] / (row @ row), rtol=1e-9)
    assert ds.attrs["normalisation"] == normalisation


def test_checkpoints_that_span_the_plane_lie_at_steps_of_one():
    model = net()
    a, b = vectors(model, 2)
    first, second = at(model, [(2, a)]), at(model, [(1, a), (1e-3, b)])
    middle = at(model, [(1.5, a), (5e-4, b)])
    ds = vp.trajectory(model, [first, middle, second], directions=[first, second])
    np.testing.assert_allclose(ds.along_x[0], [1, 0.5, 0], atol=1e-9)
    np.testing.assert_allclose(ds.along_y[0], [0, 0.5, 1], atol=1e-9)
    line = vp.trajectory(model, [first, middle, second], directions=first)
    assert "along_y" not in line and "line" in line.off_plane.attrs["long_name"]
    np.testing.assert_allclose(line.along_x[0], [1, 0.75, 0.5], rtol=1e-9)
    assert draw(line).axes


def test_directions_of_no_length_and_of_the_same_line():
    model = net()
    (a,) = vectors(model, 1)
    twice = Directions("mine", (a, {name: 2 * tensor for name, tensor in a.items()}))
    ds = vp.trajectory(model, [at(model, [(5, a)]), model], directions=twice)
    np.testing.assert_allclose([float(ds.along_x[0, 0]), float(ds.along_y[0, 0])], [1, 2])  # the shortest solution


def test_the_plane_is_that_of_the_landscape():
    model = net()
    path = [at(model, [(1, v)]) for v in vectors(model, 3)]
    plane = principal_directions(model, path)

    def landscape(**options):
        return vp.loss_landscape(model, data(), points=3, **options)

    ds = vp.trajectory(model, path)
    assert ds.plane.values == landscape(directions=plane).plane.values
    same = vp.trajectory(model, path, directions="random", pairs=2, seed=1)
    np.testing.assert_array_equal(same.plane, landscape(pairs=2, seed=1).plane)
    assert set(same.plane.values).isdisjoint(landscape(pairs=2, seed=2).plane.values)
    corners = vp.trajectory(model, path, directions=path[:2])
    assert corners.plane.values == landscape(directions=path[:2]).plane.values
    # The point of the plane nearest to a checkpoint has the loss of the landscape's cell there.
    ends = {axis: float(abs(ds[f"along_{axis}"][0]).max()) for axis in ("x", "y")}
    found = landscape(directions=plane, span=tuple((0, end) for end in ends.values()))
    moved = net()
    moved.load_state_dict(at(model, zip(ends.values(), plane.axes, strict=True)))
    double = [(x.double(), y) for x, y in data()]
    np.testing.assert_allclose(found.nll[0, -1, -1], vp.evaluate(moved, double).nll, rtol=1e-9)


def test_untouched_saved_stacked_and_drawn(tmp_path):
    model = net().train()
    before = copy.deepcopy(model.state_dict())
    path = [at(model, [(2 - t, v) for t, v in enumerate(vectors(model, 2))]), copy.deepcopy(model)]
    state = torch.get_rng_state()
    ds = vp.trajectory(nn.DataParallel(model), path)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    loaded = vp.load(vp.save(ds, tmp_path / "t.nc"))
    np.testing.assert_array_equal(loaded.angle, ds.angle)
    np.testing.assert_array_equal(loaded.plane, ds.plane)
    longer = vp.trajectory(model, [path[0], *path])
    runs = vp.stack_runs([ds, longer], model=["vit_nano", "resnet_nano"])
    check(runs)
    assert draw(vp.load(vp.save(runs, tmp_path / "r.nc"))).axes


def test_half_precision_is_summed_in_double():
    model = nn.Linear(1000, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.zero_()
    one, tenth = torch.ones(1, 1000), torch.full((1, 1000), 0.125)
    ds = vp.trajectory(model, [{"weight": one}, {"weight": tenth}], directions=[{"weight": one}])
    np.testing.assert_allclose(ds.radius, [1, 0.125], rtol=1e-12)
    np.testing.assert_allclose(ds.attrs["initial_distance"], math.sqrt(1000), rtol=1e-12)


def test_what_makes_no_trajectory():
    model = net()
    path = [at(model, [(1, v)]) for v in vectors(model, 2)]
    with pytest.raises(ValueError, match="two checkpoints or more"):
        vp.trajectory(model, path[:1])
    with pytest.raises(ValueError, match="the first checkpoint is the model itself"):
        vp.trajectory(model, [model, path[0]])
    with pytest.raises(ValueError, match="3 epochs for 2 checkpoints"):
        vp.trajectory(model, path, epochs=[1, 2, 3])
    with pytest.raises(ValueError, match="checkpoint 1 does not fit the model"):
        vp.trajectory(model, [path[0], {}])
    with pytest.raises(ValueError, match="Did you mean 'random'"):
        vp.trajectory(model, path, directions="randon")
    with pytest.raises(ValueError, match="options of directions='random'"):
        vp.trajectory(model, path, pairs=2)


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match="Flatten has no parameters"):
        vp.trajectory(nn.Flatten(), [nn.Flatten(), nn.Flatten()])
