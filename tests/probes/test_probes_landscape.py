"""Loss landscapes: directions, cells, and that the model is not moved."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import update_bn

import vitprobe as vp
from vitprobe.curvature import Directions, principal_directions, random_direction
from vitprobe.figures import draw
from vitprobe.probes import eigenvector_directions
from vitprobe.results import check


def net() -> nn.Module:
    return vp.create_model("convmixer", image_size=8, channels=1, num_classes=3, patch_size=2, dim=6, depth=1, seed=0)


def data(images: int = 11):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, 1, 8, 8, generator=generator)
    y = torch.randint(3, (images,), generator=generator)
    return [(x[:8], y[:8]), (x[8:], y[8:])]


def direction(normalisation: str) -> dict[str, torch.Tensor]:
    weights = dict(net().named_parameters())
    return random_direction(weights, normalisation=normalisation, generator=torch.Generator().manual_seed(1))


def test_li_matches_every_filter_and_leaves_vectors_alone():
    for name, weight in net().named_parameters():
        ours = direction("li")[name]
        if weight.ndim < 2:
            assert not ours.any()
        else:
            torch.testing.assert_close(ours.flatten(1).norm(dim=1), weight.detach().flatten(1).norm(dim=1))


def test_paper_matches_the_first_axis_and_so_not_the_filters():
    name, weight = next((n, w.detach()) for n, w in net().named_parameters() if w.ndim == 4)
    ours = direction("paper")[name]
    torch.testing.assert_close(ours.norm(dim=0), weight.norm(dim=0), rtol=1e-4, atol=1e-5)
    ratio = ours.flatten(1).norm(dim=1) / weight.flatten(1).norm(dim=1)
    assert (ratio - 1).abs().max() > 0.05
    tokens = {"pos_embed": torch.ones(1, 4, 2), "cls_token": torch.ones(1, 1, 2)}
    drawn = random_direction(tokens, normalisation="paper", generator=torch.Generator().manual_seed(0))
    assert not drawn["pos_embed"].any()
    torch.testing.assert_close(drawn["cls_token"].abs(), tokens["cls_token"], rtol=1e-4, atol=0)


def test_layer_matches_every_tensor_and_none_is_gaussian():
    for name, weight in net().named_parameters():
        length = float(weight.detach().norm())
        assert float(direction("layer")[name].norm()) == pytest.approx(length, rel=1e-5, abs=1e-12)
    draws = torch.cat([d.flatten() for d in direction("none").values() if d.ndim > 1])
    assert float(draws.std()) == pytest.approx(1.0, abs=0.1)


def test_normalisations_of_one_seed_share_their_numbers():
    li, none = direction("li"), direction("none")
    for name, tensor in none.items():
        if tensor.ndim > 1:
            cosine = F.cosine_similarity(li[name].flatten(1), tensor.flatten(1), dim=1)
            torch.testing.assert_close(cosine, torch.ones_like(cosine))


def test_centre_is_the_model_and_every_cell_is_a_moved_model():
    ds = vp.loss_landscape(net(), data(), points=3, span=0.5, pairs=2)
    plain = vp.evaluate(net(), data())
    centre = ds.sel(x=0, y=0)
    np.testing.assert_allclose(centre.nll, plain.nll, rtol=1e-6)
    np.testing.assert_allclose(centre.accuracy, plain.accuracy)
    # One corner by hand.
    from vitprobe.seeds import derive_seed

    model = net()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    a, b = (
        random_direction(
            weights,
            normalisation="li",
            generator=torch.Generator().manual_seed(derive_seed(0, "direction", 1, axis)),
        )
        for axis in ("x", "y")
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name] + 0.5 * a[name] - 0.5 * b[name])
    corner = ds.isel(direction_pair=1).sel(x=0.5, y=-0.5)
    moved = vp.evaluate(model, data())
    assert float(corner.nll) == pytest.approx(moved.nll, rel=1e-5)
    norms = [float(p.detach().double().norm()) for p in model.parameters()]
    assert float(corner.l2_half_square) == pytest.approx(0.5 * sum(n**2 for n in norms), rel=1e-6)
    assert float(corner.l2_sum_of_norms) == pytest.approx(sum(norms), rel=1e-6)


def test_saturated_logits_do_not_overflow():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with torch.no_grad():
        model[1].weight.mul_(1e6)
    ds = vp.loss_landscape(model, data(), points=3)
    assert np.isfinite(ds.nll).all() and float(ds.nll.max()) > 1e4


def test_untouched_repeatable_saved_and_drawn(tmp_path):
    model = net().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = vp.loss_landscape(model, data(), points=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(module.training for module in model.modules())
    second = vp.loss_landscape(model, data(), points=3)
    np.testing.assert_array_equal(first.nll, second.nll)
    check(first)
    assert len(draw(vp.load(vp.save(first, tmp_path / "l.nc"))).axes) >= 2
    line = vp.loss_landscape(model, data(), points=5, dimensions=1, pairs=3)
    assert line.nll.dims == ("direction_pair", "x")
    assert draw(line).axes


@pytest.mark.parametrize("options", [{"points": 1}, {"pairs": 0}, {"span": 0}, {"dimensions": 3}])
def test_bad_grids(options):
    with pytest.raises(ValueError, match="at least 2 points"):
        vp.loss_landscape(net(), data(), **options)


def test_unknown_normalisation():
    with pytest.raises(ValueError, match="Did you mean 'layer'"):
        vp.loss_landscape(net(), data(), points=2, normalisation="layers")


# --- grids and provenance ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("span", "x", "y"),
    [
        (0.5, (-0.5, 0.5), (-0.5, 0.5)),
        ((-0.5, 1.5), (-0.5, 1.5), (-0.5, 1.5)),
        (((0, 1), (-2, 2)), (0, 1), (-2, 2)),
        (None, (-1, 1), (-1, 1)),
    ],
)
def test_spans(span, x, y):
    ds = vp.loss_landscape(net(), data(), points=2, span=span)
    np.testing.assert_array_equal(ds.x, x)
    np.testing.assert_array_equal(ds.y, y)


@pytest.mark.parametrize("span", [(1, -1), ((0, 1), (0, 1), (0, 1)), (0, 1, 2)])
def test_bad_spans(span):
    with pytest.raises(ValueError, match="a positive span"):
        vp.loss_landscape(net(), data(), points=2, span=span)


def test_whole_steps_are_exact():
    ds = vp.loss_landscape(net(), data(), points=21, span=(-0.5, 1.5), dimensions=1)
    assert {0.0, 1.0} < set(ds.x.values)


def test_the_protocol_is_in_the_file():
    ds = vp.loss_landscape(net(), data(), points=2, pairs=2, seed=3, normalisation="paper")
    said = {
        name: ds.attrs[name] for name in ("images", "batch_size", "normalisation", "batch_norm", "seed", "complete")
    }
    assert said == {
        "images": 11,
        "batch_size": 8,
        "normalisation": "paper",
        "batch_norm": "kept",
        "seed": 3,
        "complete": 1,
    }
    assert ds.attrs["loss"] == "cross-entropy, mean over images"
    assert json.loads(ds.attrs["config"]) == {
        "probe": "loss_landscape",
        "directions": "random",
        "span": [[-1.0, 1.0], [-1.0, 1.0]],
        "points": 2,
        "pairs": 2,
        "dimensions": 2,
        "normalisation": "paper",
        "batch_norm": "kept",
        "stack": 1,
        "forward": None,
    }
    assert len(set(ds.plane.values)) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"directions": "eigenvector"}, "Did you mean 'eigenvectors'"),
        ({"batch_norm": "re-estimated"}, "Did you mean 'reestimated'"),
        ({"directions": "eigenvectors", "pairs": 2}, "options of directions='random'"),
        ({"directions": "eigenvectors", "normalisation": "paper"}, "options of directions='random'"),
        ({"stack": 0}, "a stack of 1"),
    ],
)
def test_options_without_meaning(options, words):
    with pytest.raises(ValueError, match=words):
        vp.loss_landscape(net(), data(), points=2, **options)


def test_outputs_that_are_no_numbers_have_no_accuracy_either():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    huge = {"1.weight": torch.full((3, 64), 1e38)}
    ds = vp.loss_landscape(model, data(), points=3, span=10.0, directions=Directions("mine", (huge,)))
    assert np.isnan(ds.nll.sel(x=10)).all() and np.isnan(ds.accuracy.sel(x=10)).all()
    assert np.isfinite(ds.nll.sel(x=0)).all() and np.isfinite(ds.l2_half_square).all()
    assert ds.attrs["complete"] == 1


# --- eigenvectors -----------------------------------------------------------------------------------


def dense(model: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues by magnitude, and eigenvectors as rows, of the whole Hessian."""
    batches = data()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def loss(vector):
        parts = vector.split([shape.numel() for shape in shapes.values()])
        weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, weights, (x.double(),)), y)

    point = torch.cat([p.detach().flatten() for p in model.parameters()])
    values, vectors = np.linalg.eigh(torch.autograd.functional.hessian(loss, point, vectorize=True).numpy())
    best = np.argsort(-np.abs(values))
    return values[best], vectors.T[best]


def test_along_eigenvectors_the_second_difference_is_the_eigenvalue():
    model = net().double().eval()
    values, vectors = dense(model)
    h = 1e-3
    ds = vp.loss_landscape(model, data(), directions="eigenvectors", span=h, points=3)
    for axis, other, value in (("x", "y", values[0]), ("y", "x", values[1])):
        np.testing.assert_allclose(ds.attrs[f"eigenvalue_{axis}"], value, rtol=1e-5)
        line = ds.nll.sel(direction_pair=0).sel({other: 0})
        second = float(line.sel({axis: h}) + line.sel({axis: -h}) - 2 * line.sel({axis: 0})) / h**2
        assert second == pytest.approx(value, rel=1e-3)
    assert ds.attrs["converged"] == 1 and ds.attrs["residual_x"] < 1e-3 * abs(values[0])
    axes = eigenvector_directions(model, data()).axes
    for axis, vector in zip(axes, vectors, strict=False):
        flat = np.concatenate([axis[name].numpy().ravel() for name in dict(model.named_parameters())])
        np.testing.assert_allclose(abs(flat @ vector), 1.0, rtol=1e-5)
        assert flat[np.abs(flat).argmax()] > 0
    again = vp.loss_landscape(model, data(), directions=eigenvector_directions(model, data()), span=h, points=3)
    np.testing.assert_array_equal(again.nll, ds.nll)
    assert again.plane.values == ds.plane.values


def test_eigenvectors_move_trainable_weights_only():
    model = net()
    frozen = next(iter(dict(model.named_parameters())))
    model.get_parameter(frozen).requires_grad_(False)
    axes = eigenvector_directions(model, data(), dimensions=1).axes
    assert len(axes) == 1 and not axes[0][frozen].any()


def test_eigenvectors_that_are_not_converged_are_told():
    with pytest.warns(UserWarning, match="not converged"):
        found = eigenvector_directions(net(), data(), max_products=3)
    assert found.facts["converged"] == 0


# --- between checkpoints ----------------------------------------------------------------------------


def trained(seed: int) -> nn.Module:
    """A network whose batch norm has statistics of its own."""
    model = vp.create_model(
        "convmixer", image_size=8, channels=1, num_classes=3, patch_size=2, dim=6, depth=1, seed=seed
    ).train()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        model(1 + seed + torch.randn(8, 1, 8, 8, generator=generator))
    return model.eval()


def test_corners_are_the_checkpoints_own_losses():
    model, first, second = trained(0), trained(1), trained(2)
    before = copy.deepcopy(model.state_dict())
    ds = vp.loss_landscape(model, data(), directions=[first, second.state_dict()], points=5)
    for one, x, y in ((model, 0, 0), (first, 1, 0), (second, 0, 1)):
        cell, plain = ds.sel(x=x, y=y), vp.evaluate(one, data())
        np.testing.assert_allclose(cell.nll, plain.nll, rtol=1e-5)
        np.testing.assert_allclose(cell.accuracy, plain.accuracy)
    half = copy.deepcopy(model)
    half.load_state_dict({
        name: (value + first.state_dict()[name]) / 2 if value.is_floating_point() else value
        for name, value in before.items()
    })
    np.testing.assert_allclose(ds.sel(x=0.5, y=0).nll, vp.evaluate(half, data()).nll, rtol=1e-5)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert ds.attrs["directions"] == "checkpoints" and "normalisation" not in ds.attrs


def test_one_checkpoint_makes_a_line():
    ds = vp.loss_landscape(trained(0), data(), directions=trained(1), points=21)
    assert ds.nll.dims == ("direction_pair", "x")
    np.testing.assert_allclose(ds.sel(x=1).nll, vp.evaluate(trained(1), data()).nll, rtol=1e-5)
    assert (float(ds.x[0]), float(ds.x[-1])) == (-0.5, 1.5)
    check(ds)
    assert draw(ds).axes


def test_a_checkpoint_of_another_network_is_refused():
    other = vp.create_model("convmixer", image_size=8, channels=1, num_classes=4, patch_size=2, dim=6, depth=1)
    with pytest.raises(ValueError, match=r"other shape: .*\(4, 6\) instead of \(3, 6\)"):
        vp.loss_landscape(trained(0), data(), directions=other, points=2)


def test_principal_directions_of_a_training_span_a_landscape():
    model, states = trained(0), [trained(1), trained(2)]
    ds = vp.loss_landscape(model, data(), directions=principal_directions(model, states), points=3)
    assert ds.attrs["directions"] == "pca" and 0 < ds.attrs["explained_y"] < ds.attrs["explained_x"]
    np.testing.assert_allclose(ds.sel(x=0, y=0).nll, vp.evaluate(model, data()).nll, rtol=1e-6)


# --- batch norm -------------------------------------------------------------------------------------


def moved(model: nn.Module, steps: dict[str, float], seed: int = 0) -> nn.Module:
    """A copy at one cell of random directions."""
    from vitprobe.curvature import random_directions

    copied = copy.deepcopy(model)
    directions = random_directions(model, seed=seed)
    with torch.no_grad():
        for axis, step in zip(directions.axes, steps.values(), strict=True):
            for name, p in copied.named_parameters():
                p.add_(step * axis[name])
    return copied


def test_reestimated_statistics_are_those_of_update_bn():
    batches = [data(16)[0], data(16)[1]]
    assert len(batches[0][0]) == len(batches[1][0])
    model = trained(1)
    ds = vp.loss_landscape(model, batches, points=3, span=0.3, batch_norm="reestimated")
    for x, y in ((0, 0), (0.3, -0.3)):
        by_hand = moved(model, {"x": x, "y": y})
        update_bn(batches, by_hand)
        np.testing.assert_allclose(ds.sel(x=x, y=y).nll, vp.evaluate(by_hand, batches).nll, rtol=1e-5)
    assert abs(float(ds.sel(x=0, y=0).nll[0]) / vp.evaluate(model, batches).nll - 1) > 0.01


def test_reestimated_statistics_weight_batches_by_their_images():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))
    batches = data(11)
    ds = vp.loss_landscape(model, batches, points=2, dimensions=1, span=1e-9, batch_norm="reestimated")
    mean = sum(len(x) * x.mean() for x, _ in batches) / 11
    var = sum(len(x) * x.var(unbiased=True) for x, _ in batches) / 11
    by_hand = copy.deepcopy(model)
    by_hand[0].running_mean.fill_(mean)
    by_hand[0].running_var.fill_(var)
    np.testing.assert_allclose(ds.nll.values[0], vp.evaluate(by_hand, batches).nll, rtol=1e-5)


@pytest.mark.parametrize("stack", [1, 2])
def test_the_models_own_batch_norm_is_handed_back(stack):
    model = trained(1).train()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    norms[0].momentum, norms[1].momentum = None, 0.3
    before = copy.deepcopy(model.state_dict())
    storage = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}

    def intact() -> bool:
        state = model.state_dict()
        return (
            all(
                torch.equal(state[name], value) and state[name].data_ptr() == storage[name]
                for name, value in before.items()
            )
            and (norms[0].momentum, norms[1].momentum) == (None, 0.3)
            and all(module.training for module in model.modules())
        )

    vp.loss_landscape(model, data(), points=2, batch_norm="reestimated", stack=stack)
    assert intact()
    calls = iter(range(100))

    def fails(one, batch):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return one(batch[0])

    with pytest.raises(KeyboardInterrupt):
        vp.loss_landscape(model, data(), points=2, batch_norm="reestimated", stack=stack, forward=fails)
    assert intact()


def test_nothing_to_reestimate():
    with pytest.raises(ValueError, match="no batch norm with running statistics"):
        vp.loss_landscape(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), data(), points=2, batch_norm="reestimated")


# --- several cells at once --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "batch_norm"),
    [
        ("convmixer_nano", "kept"),
        ("vit_nano", "kept"),
        ("convit_nano", "kept"),
        ("alternet_nano", "kept"),
        ("convmixer_nano", "reestimated"),
        ("alternet_nano", "reestimated"),
    ],
)
def test_stacked_cells_are_the_cells_one_by_one(name, batch_norm):
    model = vp.create_model(name, image_size=8, channels=1, num_classes=3, seed=0).double()
    options = {"points": 3, "span": 0.5, "batch_norm": batch_norm}
    one_by_one = vp.loss_landscape(model, data(), **options)
    stacked = vp.loss_landscape(model, data(), stack=4, **options)
    for variable in one_by_one.data_vars:
        np.testing.assert_allclose(stacked[variable], one_by_one[variable], rtol=1e-10)


def test_stacked_cells_move_the_statistics_of_checkpoints():
    options = {"directions": [trained(1), trained(2)], "points": 3, "span": (0, 1)}
    one_by_one = vp.loss_landscape(trained(0), data(), **options)
    stacked = vp.loss_landscape(trained(0), data(), stack=4, **options)
    np.testing.assert_allclose(stacked.nll, one_by_one.nll, rtol=1e-5)


def test_what_cannot_be_stacked_is_told():
    def branches(model, batch):
        logits = model(batch[0])
        return logits if logits.sum() > 0 else logits + 1

    vp.loss_landscape(net(), data(), points=2, forward=branches)
    with pytest.raises(ValueError, match=r"stack=2: this model cannot .* Use stack=1"):
        vp.loss_landscape(net(), data(), points=2, forward=branches, stack=2)


# --- files that grow --------------------------------------------------------------------------------


class Counted:
    """A forward that is interrupted at a call."""

    def __init__(self, at: int | None = None) -> None:
        self.calls = 0
        self.at = at

    def __call__(self, model, batch):
        if self.calls == self.at:
            raise KeyboardInterrupt
        self.calls += 1
        return model(batch[0])


COUNTED = Counted()


def counted(model, batch):
    """One name for the configuration, whatever is counted."""
    return COUNTED(model, batch)


@pytest.mark.parametrize(
    ("options", "at", "done"),
    [
        ({"pairs": 2}, 11, 5),  # inside the sixth cell of nine, two batches a cell
        ({"pairs": 2}, 27, 13),  # in the second pair
        ({"batch_norm": "reestimated"}, 11, 2),
        ({"stack": 4}, 3, 4),
        ({"dimensions": 1}, 3, 1),
        ({"directions": "checkpoints", "span": (0, 1)}, 3, 1),
    ],
)
def test_an_interrupted_landscape_goes_on_and_repeats_nothing(options, at, done, tmp_path, monkeypatch):
    options = {"points": 3, "span": 0.5, "forward": counted, **options}
    if options.get("directions") == "checkpoints":
        options["directions"] = [trained(1), trained(2)]
    model, path = trained(0), tmp_path / "l.nc"
    monkeypatch.setattr(f"{__name__}.COUNTED", whole := Counted())
    uninterrupted = vp.loss_landscape(model, data(), **options)

    monkeypatch.setattr(f"{__name__}.COUNTED", Counted(at))
    with pytest.raises(KeyboardInterrupt):
        vp.loss_landscape(model, data(), path=path, **options)
    unfinished = vp.load(path)
    check(unfinished)
    for name, array in unfinished.data_vars.items():
        assert int(array.notnull().sum()) == done, name
        kept = uninterrupted[name].values[array.notnull().values]
        np.testing.assert_array_equal(array.values[array.notnull().values], kept)
    assert unfinished.attrs["complete"] == 0
    assert draw(unfinished).axes

    monkeypatch.setattr(f"{__name__}.COUNTED", rest := Counted())
    resumed = vp.loss_landscape(model, data(), path=path, **options)
    for ds in (resumed, vp.load(path)):
        xr_equal(ds, uninterrupted)
        assert ds.attrs["complete"] == 1
    # What the interruption cut in the middle of a cell, or of a stack of them, is the only thing computed again.
    cells = uninterrupted.nll.size
    per_cell = whole.calls / -(-9 // 4) if "stack" in options else whole.calls / cells
    left = -(-(cells - done) // options.get("stack", 1)) if "stack" in options else cells - done
    # And one cell that was done, which tells functions of one name apart.
    assert rest.calls == (left + 1) * per_cell

    monkeypatch.setattr(f"{__name__}.COUNTED", none := Counted())
    xr_equal(vp.loss_landscape(model, data(), path=path, **options), uninterrupted)
    assert none.calls == per_cell


def xr_equal(one, other) -> None:
    for name in other.variables:
        np.testing.assert_array_equal(one[name], other[name])
        assert one[name].attrs == other[name].attrs


def test_eigenvectors_are_found_again(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    path, options = tmp_path / "l.nc", {"directions": "eigenvectors", "points": 3, "forward": counted}
    monkeypatch.setattr(f"{__name__}.COUNTED", whole := Counted())
    uninterrupted = vp.loss_landscape(model, data(), **options)
    monkeypatch.setattr(f"{__name__}.COUNTED", Counted(whole.calls - 1))
    with pytest.raises(KeyboardInterrupt):
        vp.loss_landscape(model, data(), path=path, **options)
    monkeypatch.setattr(f"{__name__}.COUNTED", Counted())
    xr_equal(vp.loss_landscape(model, data(), path=path, **options), uninterrupted)


def test_a_file_of_another_landscape_is_refused(tmp_path):
    path = tmp_path / "l.nc"
    vp.loss_landscape(trained(0), data(), points=2, path=path, directions=trained(1))
    for model, batches, options in (
        (trained(3), data(), {"directions": trained(1)}),
        (trained(0), data(12), {"directions": trained(1)}),
        (trained(0), data(), {"directions": trained(2)}),
        (trained(0), data(), {"directions": trained(1), "span": 2}),
    ):
        with pytest.raises(ValueError, match="holds another measurement"):
            vp.loss_landscape(model, batches, points=2, path=path, **options)


@pytest.mark.parametrize("directions", ["random", "eigenvectors"])
@pytest.mark.parametrize("points", [2, 3])
def test_a_forward_of_the_same_name_is_another_landscape(directions, points, tmp_path):
    def scaled(by):
        return lambda model, batch: by * model(batch[0])

    model, path = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), tmp_path / "l.nc"
    options = {"points": points, "path": path, "directions": directions}
    first = vp.loss_landscape(model, data(), forward=scaled(1), **options)
    xr_equal(vp.loss_landscape(model, data(), forward=scaled(1), **options), first)
    if (directions, points) != ("eigenvectors", 2):  # no cell in the middle: not looked at
        with pytest.raises(ValueError, match=r"nll at \(.*\) was .* of the same name"):
            vp.loss_landscape(model, data(), forward=scaled(3), **options)
    xr_equal(vp.load(path), first)


# --- standard errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("soft", [False, True])
def test_standard_errors_are_numpys_over_images(stack, soft):
    batches = [(x, F.one_hot(y, 3).float() * 0.7 + 0.1) for x, y in data()] if soft else data()
    ds = vp.loss_landscape(net(), batches, points=3, stack=stack).sel(x=0, y=0)
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    with torch.no_grad():
        logits = net().eval()(x).double()
    each = F.cross_entropy(logits, y.double() if soft else y, reduction="none").numpy()
    right = (logits.argmax(1) == (y.argmax(1) if soft else y)).numpy()
    for name, values in (("nll", each), ("accuracy", right)):
        np.testing.assert_allclose(ds[name], values.mean(), rtol=1e-5)
        np.testing.assert_allclose(ds[f"{name}_se"], values.std(ddof=1) / 11**0.5, rtol=1e-4)


def test_one_image_has_no_standard_error_and_older_files_have_none(tmp_path):
    x, y = data()[0]
    path = tmp_path / "l.nc"
    ds = vp.loss_landscape(net(), (x[:1], y[:1]), points=2, path=path)
    assert np.isnan(ds.nll_se).all() and np.isnan(ds.accuracy_se).all()
    vp.save(ds.drop_vars(["nll_se", "accuracy_se"]), path)
    np.testing.assert_array_equal(vp.loss_landscape(net(), (x[:1], y[:1]), points=2, path=path).nll, ds.nll)
