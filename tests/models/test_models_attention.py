from itertools import product

import pytest
import torch

from vitprobe.models import create_model
from vitprobe.models.attention import Attention, GaussianPosition, RelativeBias
from vitprobe.models.convit import gpsa

GRID = (2, 3)
KINDS = {
    "plain": lambda: Attention(12, 3),
    "plain with biases": lambda: Attention(12, 3, qkv_bias=True),
    "wide heads, other width out": lambda: Attention(12, 3, head_dim=5, out_dim=7),
    "shared relative bias": lambda: Attention(12, 3, position=RelativeBias(GRID)),
    "relative bias per head": lambda: Attention(12, 3, position=RelativeBias(GRID, heads=3), qkv_bias=True),
    "Gaussian before the softmax": lambda: Attention(12, 3, position=GaussianPosition(GRID, 3)),
    "gated": lambda: gpsa(12, 3, grid=GRID, qkv_bias=True),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def attention_and_tokens(kind):
    torch.manual_seed(0)
    attention = KINDS[kind]().double().requires_grad_(False)
    for parameter in attention.parameters():
        parameter.normal_()  # position logits start so small that leaving them out would hardly show
    return attention, torch.randn(2, 6, 12, dtype=torch.float64)


def place(token, columns):
    return divmod(token, columns)


@every_kind
def test_rows_are_distributions(kind):
    attention, x = attention_and_tokens(kind)
    weights = attention.weights(x)
    assert weights.shape == (2, 3, 6, 6)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 6, dtype=torch.float64))


@every_kind
def test_forward_applies_its_weights_to_the_values(kind):
    attention, x = attention_and_tokens(kind)
    weights, value = attention.weights(x), attention.value(x)
    width = value.shape[-1] // 3
    mixed = torch.cat([weights[:, h] @ value[..., h * width : (h + 1) * width] for h in range(3)], dim=-1)
    torch.testing.assert_close(attention(x), attention.project(mixed))


@every_kind
def test_weights_by_the_formula(kind):
    attention, x = attention_and_tokens(kind)
    query, key = attention.query_key(x).chunk(2, dim=-1)
    width = query.shape[-1] // 3
    for h in range(3):
        part = slice(h * width, (h + 1) * width)
        content = query[..., part] @ key[..., part].mT / width**0.5
        position = 0.0 if attention.position is None else attention.position().expand(3, 6, 6)[h]
        if attention.gate is None:
            expected = (content + position).softmax(-1)
        else:
            share = 1 / (1 + (-attention.gate[h]).exp())
            expected = (1 - share) * content.softmax(-1) + share * position.softmax(-1)
        torch.testing.assert_close(attention.weights(x)[:, h], expected)


def test_gate_chooses_between_content_and_position():
    attention, x = attention_and_tokens("gated")
    assert gpsa(12, 3, grid=GRID).gate.sigmoid().tolist() == pytest.approx([0.731] * 3, abs=5e-4)
    attention.gate[:] = torch.tensor([-50.0, 0.0, 50.0])
    weights = attention.weights(x)
    position = attention.position().softmax(-1)
    torch.testing.assert_close(weights[:, 2], position[2].expand(2, 6, 6))
    content = 2 * weights[:, 1] - position[1]
    torch.testing.assert_close(content.sum(-1), torch.ones(2, 6, dtype=torch.float64))
    attention.position.vector[0] += 1.0
    torch.testing.assert_close(attention.weights(x)[:, 0], weights[:, 0])


@pytest.mark.parametrize(("window", "heads"), [((3, 3), 1), ((2, 4), 3), ((4, 1), 2)])
def test_relative_bias_by_a_loop(window, heads):
    bias = RelativeBias(window, heads)
    rows, columns = window
    tokens = range(rows * columns)
    expected = torch.empty(heads, len(tokens), len(tokens))
    for query, key in product(tokens, tokens):
        (y, x), (y_key, x_key) = place(query, columns), place(key, columns)
        expected[:, query, key] = bias.table[:, y_key - y + rows - 1, x_key - x + columns - 1]
    assert torch.equal(bias(), expected)
    bias().sum().backward()
    assert (bias.table.grad > 0).all()  # every offset is used


@pytest.mark.parametrize("grid", [(3, 3), (2, 4), (5, 1)])
def test_gaussian_position_by_a_loop(grid):
    position = GaussianPosition(grid, 2)
    tokens = range(grid[0] * grid[1])
    for head, query, key in product(range(2), tokens, tokens):
        (y, x), (y_key, x_key) = place(query, grid[1]), place(key, grid[1])
        dy, dx = y_key - y, x_key - x
        v = position.vector[head].tolist()
        expected = v[0] * (dx**2 + dy**2) + v[1] * dx + v[2] * dy
        assert position()[head, query, key].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("heads", "centers", "sides"),
    [
        (1, "code", (0,)),
        (4, "code", (-0.5, 0.5)),
        (4, "paper", (-1, 1)),
        (9, "code", (-1, 0, 1)),
        (9, "paper", (-1, 0, 1)),
        (16, "code", (-1.5, -0.5, 0.5, 1.5)),
        (16, "paper", (-2, -1, 1, 2)),
        (12, "code", (-1, 0, 1)),  # three heads have no place
    ],
)
@pytest.mark.parametrize("grid", [(5, 5), (3, 6)])
def test_local_heads_are_bumps_on_a_lattice(heads, centers, sides, grid):
    position = GaussianPosition(grid, heads)
    position.set_local_(strength=0.7, centers=centers)
    maps = position().softmax(-1)
    y, x = torch.tensor([place(token, grid[1]) for token in range(grid[0] * grid[1])]).T
    dy, dx = y[None] - y[:, None], x[None] - x[:, None]
    for head, (center_y, center_x) in enumerate(product(sides, sides)):
        bump = torch.exp(-0.7 * ((dy - center_y) ** 2 + (dx - center_x) ** 2))
        torch.testing.assert_close(maps[head], bump / bump.sum(-1, keepdim=True))
    uniform = torch.full_like(maps[0], 1 / len(y))
    torch.testing.assert_close(maps[len(sides) ** 2 :], uniform.expand(heads - len(sides) ** 2, -1, -1))


def nonlocality(maps, side):
    """Mean over heads and queries of the expected distance to the key [patches]."""
    positions = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    return (maps * torch.cdist(positions, positions)).sum(-1).mean().item()


@pytest.mark.parametrize(
    ("side", "heads", "expected"), [(14, 9, 2.88), (8, 4, 1.80), (8, 9, 1.98), (8, 16, 2.18), (16, 9, 3.17)]
)
def test_nonlocality_of_gpsa_before_training(side, heads, expected):
    """D'Ascoli et al. 2021, figure 5 at epoch 0: uniform content, gates at 1, bumps of strength 1."""
    attention = gpsa(heads, heads, grid=(side, side))
    attention.position.set_local_()
    torch.nn.init.zeros_(attention.query_key.weight)
    assert nonlocality(attention.weights(torch.randn(1, side**2, heads))[0], side) == pytest.approx(expected, abs=5e-3)
    if side == 14:
        maps = attention.position().softmax(-1)
        assert nonlocality(maps, side) == pytest.approx(1.26, abs=5e-3)
        assert maps.amax(-1).mean().item() == pytest.approx(0.36, abs=5e-3)


def test_local_convit_starts_with_the_lattice_and_identity_values():
    settings = dict(dim=16, depth=3, gpsa_layers=2, seed=0)
    local = create_model("convit", locality_strength=0.5, **settings)
    plain = create_model("convit", local=False, **settings)
    for block, other in zip(local.local_blocks, plain.local_blocks, strict=True):
        assert torch.equal(block.attention.value.weight, torch.eye(16))
        assert torch.equal(block.attention.position.vector[:, 0], torch.full((4,), -0.5))
        assert not torch.equal(other.attention.value.weight, torch.eye(16))
        assert other.attention.position.vector.abs().max() < 0.1
    assert not torch.equal(local.global_blocks[0].attention.value.weight, torch.eye(16))


def test_a_gate_needs_a_position():
    with pytest.raises(ValueError, match="give position= as well"):
        Attention(12, 3, gate=1.0)
