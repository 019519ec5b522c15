"""Drawn spatial filters: what the banks hold, and how ConvMixer uses them."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from timm.models.convmixer import ConvMixer

from vitprobe.models import create_model
from vitprobe.models.convmixer import DrawnFilters, FilterSpec
from vitprobe.models.filters import CONVOLUTIONS, MATRICES, filter_bank, filter_choice, permutation_bank


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def bank(kind, count=4000, kernel_size=5, seed=0, **options):
    return filter_bank(kind, count, kernel_size, generator=generator(seed), **options)


def squared_norms(filters):
    return filters.double().flatten(1).square().sum(1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("impulse", {})]
    + [("box", dict(box_taps=n)) for n in (1, 2, 7, 25, None)]
    + [("gaussian", dict(gaussian_variance=s)) for s in (10.0, 1.0, 0.3, 0.01)],
)
@pytest.mark.parametrize("kernel_size", [5, 6])
def test_mean_squared_norm_is_a_third(kind, options, kernel_size):
    if options.get("box_taps") == 25 and kernel_size != 5:
        options = dict(box_taps=kernel_size**2)
    assert squared_norms(bank(kind, 60, kernel_size, **options)).mean().item() == pytest.approx(1 / 3, rel=1e-5)


@pytest.mark.parametrize("kernel_size", [3, 5])
def test_random_filters_are_those_of_pytorch(kernel_size):
    weight = bank("random", 20_000, kernel_size)
    torch.manual_seed(0)
    theirs = torch.nn.Conv2d(20_000, 20_000, kernel_size, groups=20_000).weight
    assert weight.shape == theirs.shape
    assert weight.abs().max() <= 1 / kernel_size
    # The squared norm of k^2 uniform numbers: mean 1/3, variance 4 / (45 k^2).
    spread = math.sqrt(4 / 45 / kernel_size**2 / 20_000)
    for filters in (weight, theirs.detach()):
        assert squared_norms(filters).mean().item() == pytest.approx(1 / 3, abs=5 * spread)


def test_softmax_filters_are_logits_of_almost_flat_ones():
    assert torch.equal(bank("softmax"), bank("random"))
    layer = DrawnFilters(64, spec("softmax"))
    filters = layer.filters().flatten(1)
    torch.testing.assert_close(filters.sum(1), torch.ones(64))
    torch.testing.assert_close(filters, layer.weight.flatten(1).exp() / layer.weight.flatten(1).exp().sum(1)[:, None])
    assert filters.min() > 0.6 / 25 and filters.max() < 1.5 / 25


def test_impulses_are_anywhere_alike():
    weight = bank("impulse").flatten(1)
    assert ((weight != 0).sum(1) == 1).all()
    assert weight.max().item() == pytest.approx(math.sqrt(1 / 3))
    assert chisquare(weight.argmax(1).bincount(minlength=25)).pvalue > 1e-3


@pytest.mark.parametrize("taps", [2, 3, 24, 25])
def test_boxes_are_equal_taps_at_distinct_places(taps):
    weight = bank("box", box_taps=taps).flatten(1)
    assert ((weight != 0).sum(1) == taps).all()
    assert weight[weight != 0].unique().tolist() == pytest.approx([math.sqrt(1 / (3 * taps))])
    if taps == 2:  # all pairs of places alike
        pairs = Counter(tuple(row.nonzero().flatten().tolist()) for row in weight)
        assert chisquare([pairs[i, j] for i in range(25) for j in range(i + 1, 25)]).pvalue > 1e-3
    assert torch.equal(bank("box"), bank("box", box_taps=25))


@pytest.mark.parametrize("variance", [4.0, 0.5])
def test_gaussians_by_a_loop(variance):
    weight = bank("gaussian", 40, gaussian_variance=variance)
    peaks = [divmod(int(place), 5) for place in weight.flatten(1).argmax(1)]
    expected = torch.tensor([
        [[[math.exp(-((y - py) ** 2 + (x - px) ** 2) / (2 * variance)) for x in range(5)] for y in range(5)]]
        for py, px in peaks
    ])
    torch.testing.assert_close(weight / weight.amax((1, 2, 3), keepdim=True), expected)
    assert weight.amax((1, 2, 3)).unique().numel() < 3  # one scale for the whole bank, not one per filter
    many = bank("gaussian", gaussian_variance=variance).flatten(1).argmax(1)
    assert chisquare(many.bincount(minlength=25)).pvalue > 1e-3


@pytest.mark.parametrize("kind", MATRICES)
def test_permutations(kind):
    matrices = permutation_bank(kind, 30, 16, generator=generator())
    assert matrices.unique().tolist() == pytest.approx([0.0, math.sqrt(1 / 3)])
    assert ((matrices != 0).sum(2) == 1).all()
    once = ((matrices != 0).sum(1) == 1).all(1)
    # A map of 16 places drawn at random is one-to-one with probability 16! / 16^16 = 1e-6.
    assert once.all() if kind == "full_permutation" else not once.any()
    places = matrices.argmax(2).flatten()
    assert chisquare(places.bincount(minlength=16)).pvalue > 1e-3


def test_choice_is_with_replacement():
    """8 heads that draw from 25 taps hold 25 (1 - (24/25)^8) = 6.97 distinct ones on average."""
    found = [filter_choice(8, 25, generator=generator(seed)).unique().numel() for seed in range(2000)]
    assert sum(found) / 2000 == pytest.approx(25 * (1 - (24 / 25) ** 8), abs=0.08)
    assert filter_choice(10_000, 4, generator=generator()).bincount().tolist() == pytest.approx([2500] * 4, abs=200)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_banks_depend_on_the_generator_alone(kind):
    before = torch.get_rng_state()
    first = bank(kind, seed=1, count=20, box_taps=3)
    assert torch.equal(first, bank(kind, seed=1, count=20, box_taps=3))
    assert not torch.equal(first, bank(kind, seed=2, count=20, box_taps=3))
    assert torch.equal(before, torch.get_rng_state())
    with torch.device("meta"):
        assert torch.equal(first, bank(kind, seed=1, count=20, box_taps=3))


def spec(kind, *, distinct=64, frozen=True, grid=(4, 6), kernel_size=5):
    return FilterSpec(kind, kernel_size, grid, frozen, distinct, box_taps=None, gaussian_variance=1.0)


@pytest.mark.parametrize("distinct", [64, 7, 1])
@pytest.mark.parametrize("kind", CONVOLUTIONS + MATRICES)
def test_number_of_distinct_filters(kind, distinct):
    torch.manual_seed(0)
    layer = DrawnFilters(64, spec(kind, distinct=distinct))
    assert len(layer.weight) == distinct
    used = layer.filters().flatten(1).unique(dim=0)
    if kind == "box":  # all taps: they are all the same
        assert len(used) == 1
    elif kind in ("impulse", "gaussian"):  # 25 of them at most
        assert len(used) == layer.weight[layer.choice if distinct < 64 else ...].flatten(1).unique(dim=0).shape[0]
        assert len(used) <= min(25, distinct)
    else:
        assert len(used) == (64 if distinct == 64 else layer.choice.unique().numel())


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_layer_is_a_depthwise_convolution(kind):
    torch.manual_seed(0)
    layer = DrawnFilters(64, spec(kind, distinct=9))
    x = torch.randn(2, 64, 4, 6)
    padded = F.pad(x, (2, 2, 2, 2))
    expected = torch.zeros_like(x) + layer.bias[:, None, None]
    for y in range(5):
        for z in range(5):
            expected += layer.filters()[:, 0, y, z, None, None] * padded[:, :, y : y + 4, z : z + 6]
    torch.testing.assert_close(layer(x), expected)


def test_impulse_shifts_the_map():
    layer = DrawnFilters(64, spec("impulse"))
    x = torch.randn(2, 64, 4, 6)
    out = (layer(x) - layer.bias[:, None, None]) * math.sqrt(3)
    for channel, tap in enumerate(layer.weight.flatten(1).argmax(1).tolist()):
        dy, dx = tap // 5 - 2, tap % 5 - 2
        for y in range(4):
            for z in range(6):
                inside = 0 <= y + dy < 4 and 0 <= z + dx < 6
                expected = x[:, channel, y + dy, z + dx] if inside else torch.zeros(2)
                torch.testing.assert_close(out[:, channel, y, z], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", MATRICES)
def test_permutation_gathers(kind):
    layer = DrawnFilters(64, spec(kind, distinct=5))
    x = torch.randn(2, 64, 4, 6)
    keys = layer.filters().argmax(2)
    gathered = x.flatten(2).gather(2, keys.expand(2, -1, -1)).view_as(x)
    torch.testing.assert_close(layer(x), gathered * math.sqrt(1 / 3) + layer.bias[:, None, None])
    with pytest.raises(ValueError, match="mix 4x6 patches and got 6x4: build the model with the image_size"):
        layer(x.transpose(2, 3))


SMALL = dict(image_size=16, dim=12, depth=3, patch_size=4, seed=0)


def build(**options):
    return create_model("convmixer", **{**SMALL, **options})


@pytest.mark.parametrize("kind", CONVOLUTIONS + MATRICES)
def test_frozen_filters_and_biases_stay_and_are_no_parameters(kind):
    learned, model = build(), build(filters=kind)
    free = build(filters=kind, frozen=False)
    assert list(model.state_dict()) == list(free.state_dict()) == list(learned.state_dict())
    count = {name: sum(p.numel() for p in m.parameters()) for name, m in (("all", free), ("frozen", model))}
    mixing = sum(tensor.numel() for key, tensor in model.state_dict().items() if ".spatial.0." in key)
    assert count["all"] - count["frozen"] == mixing
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(torch.randn(4, 3, 16, 16)).logsumexp(1).sum().backward()
    optimizer.step()
    for key, value in model.state_dict().items():
        if key.endswith(("weight", "bias")):
            assert torch.equal(value, before[key]) == (".spatial.0." in key), key
    free(torch.randn(4, 3, 16, 16)).logsumexp(1).sum().backward()
    assert all(p.grad is not None for p in free.parameters())
    free.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(free.eval()(x), model.eval()(x))


def mixing(model):
    return [block.spatial[0] for block in model.blocks]


def test_layers_draw_their_own_filters_unless_they_share():
    first, second, _ = mixing(build(filters="random", distinct=4))
    assert not torch.equal(first.weight, second.weight)
    for frozen in (True, False):
        model = build(filters="random", distinct=4, share_filters=True, frozen=frozen)
        first, second, third = mixing(model)
        assert first.weight is second.weight is third.weight
        assert not torch.equal(first.choice, second.choice)
        assert not torch.equal(first.bias, second.bias)
        count = sum(p.numel() for p in model.parameters())
        assert count == sum(p.numel() for p in build(filters="random", distinct=4, frozen=frozen).parameters()) - (
            0 if frozen else 2 * 4 * 25
        )
        other = build(filters="random", distinct=4, share_filters=True, frozen=frozen, seed=1)
        other.load_state_dict(model.state_dict())
        other.double()
        assert torch.equal(mixing(other)[0].weight, first.weight.double())
        assert torch.equal(mixing(other)[2].weight, first.weight.double())


def test_the_bank_is_the_whole_difference_between_seeds_of_frozen_filters():
    for kind in CONVOLUTIONS + MATRICES:
        torch.manual_seed(5)
        state = build(filters=kind, distinct=3).state_dict()
        torch.manual_seed(6)
        assert all(
            torch.equal(value, state[key]) for key, value in build(filters=kind, distinct=3).state_dict().items()
        )
        other = build(filters=kind, distinct=3, seed=1).state_dict()
        assert not torch.equal(other["blocks.0.spatial.0.choice"], state["blocks.0.spatial.0.choice"])
        if kind != "box":
            assert not torch.equal(other["blocks.0.spatial.0.weight"], state["blocks.0.spatial.0.weight"])


def test_trained_random_filters_are_convmixer_of_timm():
    torch.manual_seed(0)
    theirs = ConvMixer(8, 3, kernel_size=5, patch_size=2, num_classes=10)
    options = dict(image_size=16, dim=8, depth=3, kernel_size=5, patch_size=2)
    ours = create_model("convmixer", filters="random", frozen=False, **options)
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [True, False])
def test_activation_after_the_spatial_filters(activation):
    torch.manual_seed(0)
    model = build(spatial_activation=activation).double()
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    state = {key: value.clone() for key, value in model.state_dict().items()}

    def norm(x, name):
        return F.batch_norm(x, None, None, state[f"{name}.weight"], state[f"{name}.bias"], training=True)

    y = norm(F.gelu(F.conv2d(x, state["stem.0.weight"], state["stem.0.bias"], stride=4)), "stem.2")
    for i in range(3):
        name = f"blocks.{i}"
        weight, bias = state[f"{name}.spatial.0.weight"], state[f"{name}.spatial.0.bias"]
        mixed = F.conv2d(y, weight, bias, padding=2, groups=12)
        y = y + norm(F.gelu(mixed) if activation else mixed, f"{name}.spatial.2")
        weight, bias = state[f"{name}.channel.0.weight"], state[f"{name}.channel.0.bias"]
        y = norm(F.gelu(F.conv2d(y, weight, bias)), f"{name}.channel.2")
    expected = F.linear(y.mean((2, 3)), state["head.weight"], state["head.bias"])
    torch.testing.assert_close(model(x), expected)


def test_convmixers_of_the_papers():
    def parameters(dim, depth, kernel, patch):
        stem = dim * (3 * patch**2 + 1) + 2 * dim
        block = dim * (kernel**2 + 1) + 2 * dim + dim * (dim + 1) + 2 * dim
        return stem + depth * block + 10 * (dim + 1)

    with torch.device("meta"):
        for name, shape in (("convmixer_zheng", (512, 6, 5, 2)), ("convmixer_256_8", (256, 8, 5, 2))):
            model = create_model(name)
            assert sum(p.numel() for p in model.parameters()) == parameters(*shape)
            activations = [type(block.spatial[1]).__name__ for block in model.blocks]
            assert set(activations) == {"Identity" if name == "convmixer_zheng" else "GELU"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(filters="gausian"), "unknown kind of filters 'gausian'. Did you mean 'gaussian'"),
        (dict(frozen=True), "learned filters are one per channel and layer, and train: for frozen"),
        (dict(distinct=4), "use filters='random'"),
        (dict(share_filters=True), "use filters='random'"),
        (dict(filters="random", distinct=0), "distinct=0 filters for 12 channels: use 1 to 12"),
        (dict(filters="random", distinct=13), "use 1 to 12"),
        (dict(filters="box", box_taps=26), "box_taps=26 of a 5x5 kernel: use 1 to 25"),
        (dict(filters="box", box_taps=0), "use 1 to 25"),
        (dict(filters="gaussian", gaussian_variance=0.0), "use a number above 0"),
    ],
)
def test_wrong_filters_say_what_is_right(options, words):
    with pytest.raises(ValueError) as error:
        build(**options)
    assert words in str(error.value)
