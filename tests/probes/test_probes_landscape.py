"""Loss landscapes: directions, cells, and that the model is not moved."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitprobe as vp
from vitprobe.curvature import random_direction
from vitprobe.figures import draw
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
