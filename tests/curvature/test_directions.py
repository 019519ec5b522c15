"""Directions: between checkpoints, along a training, and what does not fit."""

import copy

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

import vitprobe as vp
from vitprobe.curvature import (
    Directions,
    as_directions,
    checkpoint_directions,
    principal_directions,
    random_direction,
    random_directions,
)
from vitprobe.seeds import derive_seed


def net(seed: int = 0) -> nn.Module:
    return vp.create_model(
        "convmixer", image_size=8, channels=1, num_classes=3, patch_size=2, dim=6, depth=1, seed=seed
    )


def flat(named) -> np.ndarray:
    return np.concatenate([tensor.detach().double().numpy().ravel() for tensor in named.values()])


def walk(model: nn.Module, steps: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Checkpoints that differ from the model in every parameter."""
    generator = torch.Generator().manual_seed(seed)
    states = []
    for _ in range(steps):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for p in moved.parameters():
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
        states.append(moved.state_dict())
    return states


def matrix(model: nn.Module, states) -> np.ndarray:
    names = dict(model.named_parameters())
    return np.stack([flat({name: state[name] for name in names}) - flat(names) for state in states])


def test_principal_directions_are_the_singular_vectors():
    model = net()
    states = walk(model, 5)
    ours = principal_directions(model, states)
    rows = matrix(model, states)
    _, singular, right = np.linalg.svd(rows, full_matrices=False)
    for axis, vector in zip(ours.axes, right, strict=False):
        direction = flat(axis)
        np.testing.assert_allclose(abs(direction @ vector), 1.0, rtol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(direction), 1.0, rtol=1e-6)
        coordinates = rows @ direction
        assert coordinates[np.abs(coordinates).argmax()] > 0
    shares = singular**2 / (singular**2).sum()
    np.testing.assert_allclose([ours.facts["explained_x"], ours.facts["explained_y"]], shares[:2], rtol=1e-9)


def test_centred_principal_directions_are_those_of_scikit_learn():
    model = net()
    states = walk(model, 5)
    ours = principal_directions(model, states, centred=True)
    theirs = PCA(n_components=2).fit(matrix(model, states))
    for axis, vector in zip(ours.axes, theirs.components_, strict=True):
        np.testing.assert_allclose(abs(flat(axis) @ vector), 1.0, rtol=1e-6)
    shares = [ours.facts["explained_x"], ours.facts["explained_y"]]
    np.testing.assert_allclose(shares, theirs.explained_variance_ratio_, rtol=1e-9)


def test_a_straight_line_has_no_second_principal_direction():
    model = net().double()
    step = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    rest = dict(model.named_buffers())
    states = [{**{n: p.detach() + t * step[n] for n, p in model.named_parameters()}, **rest} for t in (3, 2, 1)]
    x, y = principal_directions(model, states).axes
    np.testing.assert_allclose(flat(x), flat(step) / np.linalg.norm(flat(step)), rtol=1e-9)
    assert not flat(y).any()


def test_a_step_of_one_is_the_checkpoint_with_its_floating_point_buffers():
    model, other = net(), net(seed=1)
    bn = next(module for module in other.modules() if isinstance(module, nn.BatchNorm2d))
    bn.running_mean += 0.7
    bn.num_batches_tracked += 5
    for given in (other, other.state_dict(), nn.DataParallel(other)):
        (axis,) = checkpoint_directions(model, [given]).axes
        state, target = model.state_dict(), other.state_dict()
        assert set(axis) == {name for name, tensor in state.items() if tensor.is_floating_point()}
        for name, tensor in axis.items():
            torch.testing.assert_close(state[name] + tensor, target[name])


def test_random_directions_are_those_of_their_seeds():
    model = net()
    ours = random_directions(model, normalisation="paper", seed=3, pair=2)
    generator = torch.Generator().manual_seed(derive_seed(3, "direction", 2, "y"))
    theirs = random_direction(dict(model.named_parameters()), normalisation="paper", generator=generator)
    assert all(torch.equal(ours.axes[1][name], theirs[name]) for name in theirs)
    assert len(random_directions(model, dimensions=1).axes) == 1


def test_own_directions_may_name_a_few_weights():
    model = net()
    name, p = next(iter(model.named_parameters()))
    (axis,) = as_directions(model, Directions("mine", ({name: torch.ones(p.shape, dtype=torch.float64)},))).axes
    assert set(axis) == set(dict(model.named_parameters()))
    assert axis[name].dtype == p.dtype and bool((axis[name] == 1).all())
    assert not any(tensor.any() for other, tensor in axis.items() if other != name)


def test_what_does_not_fit_is_named():
    model = net()
    state = model.state_dict()
    name = next(iter(state))
    missing = {key: value for key, value in state.items() if key != name}
    with pytest.raises(ValueError, match=rf"checkpoint 1 does not fit the model\. missing: {name}"):
        as_directions(model, missing)
    with pytest.raises(ValueError, match=r"checkpoint 2 does not fit the model\. unknown: extra"):
        as_directions(model, [state, {**state, "extra": state[name]}])
    with pytest.raises(ValueError, match=rf"other shape: {name} \(1,\) instead of"):
        as_directions(model, {**state, name: torch.zeros(1)})
    with pytest.raises(ValueError, match=r"direction x does not fit the model\. unknown: extra"):
        as_directions(model, Directions("mine", ({"extra": torch.zeros(1)},)))
    with pytest.raises(ValueError, match="3 directions: give one for a line or two for a plane"):
        as_directions(model, [state] * 3)
    with pytest.raises(TypeError, match="not int, int"):
        as_directions(model, [1, 2])


def test_long_lists_of_names_are_cut():
    with pytest.raises(ValueError, match=r"missing: .* and \d+ more\."):
        as_directions(net(), {})


def test_a_training_is_several_checkpoints_that_differ():
    model = net()
    for given in (model, [model], model.state_dict()):
        with pytest.raises(ValueError, match="two checkpoints or more"):
            principal_directions(model, given)
    with pytest.raises(ValueError, match="no checkpoint differs"):
        principal_directions(model, [model, model.state_dict()])
