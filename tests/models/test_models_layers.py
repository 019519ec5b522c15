import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vitprobe.models import create_model
from vitprobe.models.alternet import WindowAttentionBlock
from vitprobe.models.attention import Attention
from vitprobe.models.convmixer import ConvMixerBlock
from vitprobe.models.layers import (
    PatchEmbedding,
    StochasticDepth,
    TransformerBlock,
    check_divides,
    init_transformer_,
    sincos_positions,
)
from vitprobe.models.resnet import PreActivationBlock


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    n, p = 20_000, 0.25
    out = StochasticDepth(p).train()(torch.ones(n, 2, 3, dtype=torch.float64))
    assert torch.equal(out, out[:, :1, :1].expand_as(out))
    assert set(out.unique().tolist()) == {0.0, 1 / (1 - p)}
    assert out.mean().item() == pytest.approx(1.0, abs=5 * math.sqrt(p / (1 - p) / n))


@pytest.mark.parametrize("layer", [StochasticDepth(0.0).train(), StochasticDepth(0.9).eval()])
def test_stochastic_depth_at_rest_is_the_identity(layer):
    x, before = torch.randn(8, 3), torch.get_rng_state()
    assert torch.equal(layer(x), x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("block", "shape", "branches"),
    [
        (TransformerBlock(Attention(8, 2), 8, mlp_ratio=2.0), (3, 4, 8), 2),
        (PreActivationBlock(8, 8, stride=1, bottleneck=1), (3, 8, 4, 4), 1),
        (PreActivationBlock(8, 8, stride=1, bottleneck=4), (3, 8, 4, 4), 1),
        (WindowAttentionBlock(8, inner=4, heads=2, head_dim=4, window=2), (3, 8, 4, 4), 1),
        (ConvMixerBlock(8, 3), (3, 8, 4, 4), 1),
    ],
)
def test_every_residual_branch_can_be_dropped(block, shape, branches):
    drops = [module for module in block.modules() if isinstance(module, StochasticDepth)]
    assert len(drops) == branches
    for drop in drops:
        drop.p = 1 - 1e-9
    x = torch.randn(shape)
    stream = block.channel(x) if isinstance(block, ConvMixerBlock) else x
    assert torch.equal(block.train()(x), stream)
    assert not torch.equal(block.eval()(x), block.channel(x) if isinstance(block, ConvMixerBlock) else x)


@pytest.mark.parametrize("grid", [(4, 4), (2, 5)])
def test_sincos_positions_by_the_formula(grid):
    dim = 16
    code = sincos_positions(grid, dim)
    assert code.shape == (grid[0] * grid[1], dim)
    for token, row in enumerate(code.tolist()):
        y, x = divmod(token, grid[1])
        frequencies = [10_000 ** (-i / 3) for i in range(4)]
        expected = [f(axis * w) for axis in (x, y) for f in (math.sin, math.cos) for w in frequencies]
        assert row == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dim", [4, 10])
def test_sincos_positions_refuse_a_width_they_cannot_fill(dim):
    with pytest.raises(ValueError, match=f"multiple of 4 and at least 8, not {dim}"):
        sincos_positions((2, 2), dim)


def test_sincos_vit_adds_the_code_and_does_not_learn_it():
    model = create_model("vit_nano", image_size=8, position="sincos", seed=0)
    assert "position" not in dict(model.named_parameters())
    assert torch.equal(model.position, sincos_positions((4, 4), 48))
    without = create_model("vit_nano", image_size=8, position="none", seed=0)
    without.patches.register_forward_hook(lambda module, args, out: out + sincos_positions((4, 4), 48))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(without(x), model(x))


def test_patches_are_cut_in_row_major_order():
    patches = PatchEmbedding(image_size=(4, 6), patch_size=2, channels=2, dim=5)
    x = torch.randn(1, 2, 4, 6)
    assert patches.grid == (2, 3)
    for token in range(6):
        row, column = divmod(token, 3)
        patch = x[0, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten()
        expected = patches.project.weight.flatten(1) @ patch + patches.project.bias
        torch.testing.assert_close(patches(x)[0, token], expected)


@given(st.integers(-2, 70), st.lists(st.integers(1, 64), min_size=1, max_size=3))
def test_divisors_are_checked_and_the_nearest_named(divisor, sizes):
    divides = [d for d in range(1, 65) if all(size % d == 0 for size in sizes)]
    if divisor in divides:
        check_divides(divisor, tuple(sizes), what="window", of="it")
        return
    with pytest.raises(ValueError) as error:
        check_divides(divisor, tuple(sizes), what="window", of="it")
    suggested = int(re.search(r"use window=(\d+)", str(error.value))[1])
    assert suggested in divides
    assert abs(suggested - divisor) == min(abs(d - divisor) for d in divides)


def test_initial_linear_layers_are_glorot_uniform():
    layer = nn.Linear(300, 500)
    init_transformer_(layer)
    limit = math.sqrt(6 / 800)
    assert limit * 0.99 < layer.weight.abs().max() <= limit
    assert layer.weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.02)
    assert not layer.bias.any()
