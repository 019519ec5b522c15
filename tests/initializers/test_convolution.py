"""Attention that is a convolution, against PyTorch's own; and what fewer or narrower heads cannot be."""

import itertools
import re

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vitprobe.initializers.convolution import (
    convolution_,
    convolution_as_attention,
    factorise,
    head_widths,
    least_heads,
    lower_bound,
    patch_matrices,
    patch_offsets,
)
from vitprobe.models.attention import Attention, Neighbourhood, RelativeBias

CASES = {(2, 3): 9, (4, 3): 9, (4, 5): 9, (2, 5): 9, (2, 7): 25, (1, 3): 9, (1, 5): 25, (3, 7): 9, (3, 1): 1}


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kernel(patch, size, channels=(3, 4), seed=0):
    return normal(channels[1], channels[0], size, size, seed=seed)


def as_attention(weight, x, patch, **options):
    return convolution_as_attention(weight, image_size=tuple(x.shape[-2:]), patch_size=patch, **options)


def matrices_by_loops(weight, patch):
    """Every entry of every `M_k` by its definition."""
    d_out, c_in, size, _ = weight.shape
    r, reach = size // 2, -(-(size // 2) // patch)
    found = []
    for a, b in itertools.product(range(-reach, reach + 1), repeat=2):
        m = np.zeros((c_in, patch, patch, d_out, patch, patch))
        for iy, ix, jy, jx in itertools.product(range(patch), repeat=4):
            dy, dx = patch * a + iy - jy, patch * b + ix - jx
            if abs(dy) <= r and abs(dx) <= r:
                m[:, iy, ix, :, jy, jx] = weight[:, :, dy + r, dx + r].numpy().T
        found.append(m.reshape(c_in * patch**2, d_out * patch**2))
    return np.stack(found)


@pytest.mark.parametrize(("patch", "size"), CASES)
def test_matrices_by_their_definition(patch, size):
    weight = kernel(patch, size)
    expected = matrices_by_loops(weight, patch)
    assert len(expected) == CASES[patch, size] == len(patch_offsets(size, patch))
    np.testing.assert_array_equal(patch_matrices(weight, patch), expected)


@settings(max_examples=60)
@given(
    case=st.sampled_from(sorted(CASES)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    boundary=st.sampled_from(["sink", "circular", "interior"]),
    seed=st.integers(0, 2**31),
)
def test_is_the_convolution(case, channels, grid, boundary, seed):
    (patch, size), r = case, case[1] // 2
    weight, bias = kernel(patch, size, channels, seed), normal(channels[1], seed=seed + 1)
    x = normal(2, channels[0], patch * grid[0], patch * grid[1], seed=seed + 2)
    if boundary == "interior" and min(grid) <= -(-r // patch):
        return  # there is no interior
    error = as_attention(weight, x, patch, bias=bias, boundary=boundary)(x)
    if boundary == "circular":
        if r > min(x.shape[-2:]):
            return  # PyTorch's circular padding goes around once
        error = error - F.conv2d(F.pad(x, 4 * [r], mode="circular"), weight, bias)
    else:
        error = error - F.conv2d(x, weight, bias, padding=r)
    if boundary == "interior":
        rings = patch * -(-r // patch)
        error = error[..., rings : error.shape[-2] - rings, rings : error.shape[-1] - rings]
    assert error.numel() == 0 or error.abs().max() < 1e-8


def test_the_border_is_what_tells_the_boundaries_apart():
    weight, x = kernel(2, 3), normal(1, 3, 8, 10)
    truth = F.conv2d(x, weight, padding=1)
    errors = {
        boundary: (as_attention(weight, x, 2, boundary=boundary)(x) - truth).abs()
        for boundary in ("sink", "circular", "interior")
    }
    assert errors["sink"].max() < 1e-8
    for boundary in ("circular", "interior"):
        assert errors[boundary][..., 2:-2, 2:-2].max() < 1e-8 < 0.1 < errors[boundary].max()


@pytest.mark.parametrize("boundary", ["sink", "circular", "interior"])
def test_heads_look_at_their_offsets(boundary):
    x = normal(2, 3, 6, 8)
    maps = as_attention(kernel(2, 3), x, 2, boundary=boundary).weights(x)
    expected = torch.zeros(9, 12, 12, dtype=torch.float64)
    for head, dy, dx, y, x in (
        (head, *offset, *place)
        for head, offset in enumerate(itertools.product((-1, 0, 1), repeat=2))
        for place in itertools.product(range(3), range(4))
    ):
        row = expected[head, 4 * y + x]
        if (0 <= y + dy < 3 and 0 <= x + dx < 4) or boundary == "circular":
            row[4 * ((y + dy) % 3) + (x + dx) % 4] = 1
        elif boundary == "interior":
            row[:] = 1 / 12
    assert maps.shape == (2, 9, 12, 12)
    torch.testing.assert_close(maps[1], expected, atol=1e-11, rtol=0)


def test_sharpness_is_what_leaks_elsewhere():
    weight, x = kernel(2, 3), normal(1, 3, 8, 8)
    truth = F.conv2d(x, weight, padding=1)
    errors = [(as_attention(weight, x, 2, sharpness=c)(x) - truth).norm().item() for c in (10, 20, 30)]
    # The leak is e^-c but for the normalisation of the softmax.
    assert errors[0] / errors[1] == pytest.approx(np.exp(10), rel=1e-2)
    assert errors[1] / errors[2] == pytest.approx(np.exp(10), rel=1e-2)


def test_single_precision_and_gradients():
    weight, x = kernel(2, 3).float(), normal(2, 3, 8, 8).float()
    attention = as_attention(weight, x, 2)
    torch.testing.assert_close(attention(x), F.conv2d(x, weight, padding=1), rtol=1e-5, atol=1e-5)
    attention(x).square().sum().backward()
    for parameter in attention.parameters():
        assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().max() > 0


def test_spare_heads_and_wide_heads_add_nothing():
    weight, x = kernel(2, 3), normal(1, 3, 8, 8)
    attention = as_attention(weight, x, 2, heads=12, head_dim=50)
    assert attention.attention.value.weight.shape == (600, 12)
    assert attention.weights(x).shape[1] == 12
    assert (attention(x) - F.conv2d(x, weight, padding=1)).abs().max() < 1e-8


# --- ranks and bounds -------------------------------------------------------------------------------


@pytest.mark.parametrize(("patch", "size"), [(4, 3), (4, 5), (2, 3), (2, 5), (3, 7)])
@pytest.mark.parametrize("channels", [(3, 3), (2, 5), (4, 1)])
def test_widths_by_the_formula(patch, size, channels):
    r, least = size // 2, min(channels)
    centre, edge, corner = patch**2 * least, r * patch * least, r**2 * least
    expected = [[corner, edge, corner], [edge, centre, edge], [corner, edge, corner]]
    assert head_widths(kernel(patch, size, channels), patch).view(3, 3).tolist() == expected


def test_widths_of_the_first_layer_in_numbers():
    widths = head_widths(kernel(4, 3, (3, 3)), 4).view(3, 3)
    assert (widths[1, 1], widths[0, 1], widths[0, 0]) == (48, 12, 3)


@pytest.mark.parametrize(
    ("patch", "size", "channels", "least"),
    [
        (2, 3, (1, 1), 9),
        (2, 3, (3, 4), 9),
        (4, 5, (2, 2), 9),
        (2, 7, (1, 2), 18),
        (2, 7, (1, 3), 25),
        (1, 5, (3, 4), 12),
        (1, 3, (2, 2), 4),
        (1, 3, (3, 3), 9),
        (1, 5, (5, 5), 25),
    ],
)
def test_least_heads(patch, size, channels, least):
    """Nine with patches whatever the channels; else there may be fewer entries per offset than offsets."""
    weight = kernel(patch, size, channels)
    assert (
        least_heads(weight, patch)
        == least
        == np.linalg.matrix_rank(matrices_by_loops(weight, patch).reshape(CASES[patch, size], -1))
    )
    bounds = [lower_bound(weight, patch, heads) for heads in range(least + 2)]
    assert bounds[0] == pytest.approx(1) and bounds[least:] == [0, 0]
    assert all(more < fewer for fewer, more in itertools.pairwise(bounds[: least + 1]))
    assert bounds[least - 1] > 1e-3


def test_a_kernel_of_one_product_needs_one_head():
    """Every tap the same mixture of channels, up to a factor: one averaging head per kernel would do."""
    weight = normal(4, 3)[:, :, None, None] * normal(1, 1, 3, 3, seed=1)
    assert least_heads(weight, 1) == 1 and lower_bound(weight, 1, 1) == 0


def circular_shifts(weight, x):
    return as_attention(weight, x, 2, boundary="circular").weights(x)[0].detach()


def circulant(maps, matrices):
    """`sum_h maps_h (x) matrices_h` as one dense matrix, from maps `(head, query, key)`."""
    return torch.einsum("hqk,hio->kiqo", maps, matrices).flatten(2).flatten(0, 1)


@pytest.mark.parametrize("heads", [1, 4, 6, 8])
def test_the_bound_is_reached_by_signed_maps(heads):
    """On a circular grid, where no border blurs the norm, heads that mix offsets by the singular vectors reach it."""
    weight = kernel(2, 3, (2, 2))
    shifts = circular_shifts(weight, normal(1, 2, 8, 8))
    stack = torch.from_numpy(matrices_by_loops(weight, 2))
    u, s, v = np.linalg.svd(stack.flatten(1).numpy(), full_matrices=False)
    maps = torch.einsum("dh,dqk->hqk", torch.from_numpy(u[:, :heads]), shifts)
    mixed = torch.from_numpy(s[:heads, None] * v[:heads]).view(heads, *stack.shape[1:])
    truth = circulant(shifts, stack)
    error = (circulant(maps, mixed) - truth).norm() / truth.norm()
    assert lower_bound(weight, 2, heads) == pytest.approx(error.item(), rel=1e-9)


def test_no_softmax_heads_beat_the_bound():
    """Six heads fitted by least squares and descent on their logits get near, and not below."""
    weight, heads = kernel(2, 3, (1, 1)), 6
    shifts = circular_shifts(weight, normal(1, 1, 6, 6))
    truth = torch.einsum("hqk,hio->qkio", shifts, torch.from_numpy(matrices_by_loops(weight, 2)))[0].flatten(1)
    losses = []

    def fit(flat):
        logits = torch.tensor(flat.reshape(heads, 9), requires_grad=True)
        maps = logits.softmax(-1).T  # one query's offsets are all its keys on a grid of 3x3
        loss = (maps @ torch.linalg.lstsq(maps, truth).solution - truth).norm() / truth.norm()
        loss.backward()
        losses.append(loss.item())
        return loss.item(), logits.grad.numpy().ravel()

    for seed in range(2):
        start = normal(heads * 9, seed=seed).numpy()
        scipy.optimize.minimize(fit, start, jac=True, method="L-BFGS-B", options={"maxiter": 200})
    bound = lower_bound(weight, 2, heads)
    assert bound - 1e-9 < min(losses) < 1.1 * bound < 0.8 * losses[0]


@pytest.mark.parametrize("head_dim", [3, 12, 20])
def test_factors_are_the_nearest_of_their_width(head_dim):
    matrices = patch_matrices(kernel(2, 3), 2)
    value, output = factorise(matrices, head_dim)
    assert value.shape == (9, 12, head_dim) and output.shape == (9, head_dim, 16)
    torch.testing.assert_close(value.norm(dim=(1, 2)), output.norm(dim=(1, 2)))
    rest = torch.linalg.svdvals(matrices)[:, head_dim:].square().sum(-1)
    torch.testing.assert_close((value @ output - matrices).square().sum((1, 2)), rest, atol=1e-20, rtol=1e-9)


# --- refusals ---------------------------------------------------------------------------------------


def test_too_few_heads():
    weight = kernel(2, 3)
    bound = f"{lower_bound(weight, 2, 6):.3g}"
    with pytest.raises(ValueError, match=rf"3x3 .* 2x2 .* needs a head for each, not 6: give heads=9\..*{bound}"):
        convolution_as_attention(weight, image_size=(8, 8), patch_size=2, heads=6)
    with pytest.raises(ValueError, match="give heads=25"):
        convolution_as_attention(kernel(2, 7), image_size=(8, 8), patch_size=2, heads=9)


def test_too_narrow_heads():
    ranks = re.escape("3 12 3 / 12 48 12 / 3 12 3")
    with pytest.raises(ValueError, match=f"width 16 are too narrow.*{ranks}.*head_dim=48"):
        convolution_as_attention(kernel(4, 3, (3, 3)), image_size=(8, 8), patch_size=4, head_dim=16)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(weight=torch.ones(2, 2, 4, 4)), "kernel_size=4 has no middle: use 5"),
        (dict(weight=torch.ones(2, 2, 3, 5)), r"shape \(2, 2, 3, 5\): give that of a square"),
        (dict(weight=torch.ones(2, 3, 3)), "channel out, channel in, K, K"),
        (dict(patch_size=0), "at least 1 pixel"),
        (dict(boundary="sinks"), "unknown boundary 'sinks'. Did you mean 'sink'"),
        (dict(image_size=(9, 12)), "patch_size=2 does not divide an image of 9x12 pixels; use patch_size=1"),
        (dict(image_size=(2, 8), boundary="interior"), "reaches 1 patches far and the table of offsets 0"),
    ],
)
def test_refused_in_words(options, says):
    with pytest.raises(ValueError, match=says):
        convolution_as_attention(**dict(weight=torch.ones(2, 2, 3, 3), image_size=(8, 8), patch_size=2) | options)


# --- into attention that is there -------------------------------------------------------------------

GRID = (3, 4)


def attention_layer(dim=5, heads=9, *, margin=1, tables=None, **options):
    torch.manual_seed(0)
    position = RelativeBias(GRID, tables or heads, margin=margin)
    return Attention(dim, heads, **{"head_dim": dim, "position": position, "qkv_bias": True} | options).double()


def test_a_layer_with_content_becomes_a_convolution_of_the_grid_and_can_yet_learn():
    attention, weight, bias = attention_layer(), normal(5, 5, 3, 3), normal(5, seed=1)
    keys = attention.query_key.weight.detach().chunk(2)[1].clone()
    convolution_(attention, weight, bias=bias)
    x = normal(2, 5, *GRID, seed=2)
    y = attention(x.flatten(2).mT)
    truth = F.conv2d(x, weight, bias, padding=1).flatten(2).mT
    assert (y - truth).abs().max() < 1e-8
    assert torch.equal(attention.query_key.weight.chunk(2)[1], keys)
    convolution_(attention, weight, bias=bias, sharpness=4.0)
    (attention(x.flatten(2).mT) - truth).square().sum().backward()
    query, key = attention.query_key.weight.grad.chunk(2)
    assert query.abs().max() > 1e-6 and key.abs().max() == 0 and attention.position.table.grad.abs().max() > 1e-6


def test_what_was_there_does_not_count():
    weight, tokens = normal(5, 5, 3, 3), normal(1, 12, 5)
    attention = attention_layer(content=False)
    convolution_(attention, weight)
    before = attention(tokens)
    for parameter in attention.parameters():
        parameter.data.normal_()
    convolution_(attention, weight)
    assert torch.equal(attention(tokens), before)


def test_random_numbers_of_others_stay_theirs():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    convolution_as_attention(kernel(2, 3), image_size=(8, 8), patch_size=2)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("attention", "options", "says"),
    [
        (dict(position=None), {}, r"position=RelativeBias\(grid, heads=9"),
        (dict(tables=1), {}, "a table of offsets for each head"),
        (dict(gate=1.0), {}, "without gates or a mask"),
        (dict(mask=Neighbourhood(GRID, 3)), {}, "without gates or a mask"),
        (dict(dim=9, head_dim=None, value=False), dict(weight=torch.ones(9, 9, 3, 3)), "attention with values"),
        (dict(dim=6), {}, "tokens of 5 to 5 numbers, the attention of 6 to 6: build it with dim=5 and out_dim=5"),
        (dict(heads=8), {}, "give heads=9"),
        (dict(head_dim=4), {}, "head_dim=5"),
        (dict(heads=49, margin=0), dict(weight=normal(5, 5, 7, 7)), r"reaches 3 patches far .* 2: .* margin=3"),
        (dict(project_bias=False), dict(bias=torch.ones(5)), "build it with project_bias=True"),
    ],
)
def test_attention_that_cannot_be_it(attention, options, says):
    with pytest.raises(ValueError, match=says):
        convolution_(attention_layer(**attention), **dict(weight=normal(5, 5, 3, 3)) | options)
