from itertools import product

import pytest
import torch

from vitprobe.models import create_model
from vitprobe.models.attention import Attention, GaussianPosition, Mixture, Neighbourhood, RelativeBias
from vitprobe.models.convit import gpsa
from vitprobe.models.layers import PositionCode

GRID = (2, 3)


def mixture(kind="learned", alpha=0.3, dim=12):
    return Mixture(PositionCode(kind, GRID, dim), alpha)


KINDS = {
    "plain": lambda: Attention(12, 3),
    "plain with biases": lambda: Attention(12, 3, qkv_bias=True),
    "wide heads, other width out": lambda: Attention(12, 3, head_dim=5, out_dim=7),
    "shared relative bias": lambda: Attention(12, 3, position=RelativeBias(GRID)),
    "relative bias per head": lambda: Attention(12, 3, position=RelativeBias(GRID, heads=3), qkv_bias=True),
    "Gaussian before the softmax": lambda: Attention(12, 3, position=GaussianPosition(GRID, 3)),
    "gated": lambda: gpsa(12, 3, grid=GRID, qkv_bias=True),
    "own scale": lambda: Attention(12, 3, scale=0.1),
    "without values": lambda: Attention(12, 3, head_dim=5, value=False, out_dim=7, project_bias=False),
    "tokens and code": lambda: Attention(12, 3, source=mixture(), qkv_bias=True),
    "code alone": lambda: Attention(12, 3, source=mixture("sincos", 0.0)),
    "free matrices": lambda: Attention(12, 3, head_dim=5, source=mixture("identity", 0.0, dim=6)),
    "position alone": lambda: Attention(12, 3, content=False, position=GaussianPosition(GRID, 3)),
    "position alone, one for all heads": lambda: Attention(12, 3, content=False, position=RelativeBias(GRID)),
    "masked": lambda: Attention(12, 3, mask=Neighbourhood(GRID, 3)),
    "masked relative bias": lambda: Attention(12, 3, position=RelativeBias(GRID), mask=Neighbourhood(GRID, 3)),
    "masked and gated": lambda: Attention(
        12, 3, position=GaussianPosition(GRID, 3), gate=0.5, mask=Neighbourhood(GRID, 3)
    ),
    "everything": lambda: Attention(
        12, 3, source=mixture(), position=RelativeBias(GRID, 3), mask=Neighbourhood(GRID, 3), scale=0.7, value=False
    ),
}
SINKS = {
    "sink": lambda: Attention(12, 3, sink=True, qkv_bias=True),
    "sink beside a position": lambda: Attention(12, 3, position=GaussianPosition(GRID, 3), sink=True),
    "sink, gated": lambda: Attention(12, 3, position=GaussianPosition(GRID, 3), gate=0.5, sink=True),
    "sink beside a mask": lambda: Attention(12, 3, mask=Neighbourhood(GRID, 3), sink=True),
    "zero tokens in a table": lambda: Attention(12, 3, position=RelativeBias(GRID, 3, margin=2)),
    "zero tokens in a table alone": lambda: Attention(12, 3, content=False, position=RelativeBias(GRID, margin=1)),
    "zero tokens in a mask": lambda: Attention(12, 3, mask=Neighbourhood(GRID, 3, boundary="zero")),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_sink = pytest.mark.parametrize("kind", SINKS)


def attention_and_tokens(kind):
    torch.manual_seed(0)
    attention = (KINDS | SINKS)[kind]().double().requires_grad_(False)
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


@pytest.mark.parametrize("kind", KINDS | SINKS)
def test_forward_applies_its_weights_to_the_values(kind):
    attention, x = attention_and_tokens(kind)
    weights, value = attention.weights(x), attention.value(x)
    width = value.shape[-1] // 3
    mixed = torch.cat([weights[:, h] @ value[..., h * width : (h + 1) * width] for h in range(3)], dim=-1)
    torch.testing.assert_close(attention(x), attention.project(mixed))


def logits_by_the_formula(attention, x, head):
    """Content and position with the mask on each, as the papers write them down."""
    content = position = torch.zeros(6, 6, dtype=torch.float64)
    if attention.query_key is not None:
        z = x
        if attention.source is not None:
            z = (1 - attention.source.alpha) * attention.source.code.code
            z = z + attention.source.alpha * x if attention.source.alpha else z
        query, key = attention.query_key(z).chunk(2, dim=-1)
        width = query.shape[-1] // 3
        part = slice(head * width, (head + 1) * width)
        content = (
            query[..., part] @ key[..., part].mT * (attention.scale if attention.scale in (0.1, 0.7) else width**-0.5)
        )
    if attention.position is not None:
        position = attention.position()[..., :6].expand(3, 6, 6)[head]
    if attention.mask is not None:
        y, x = torch.tensor([place(token, 3) for token in range(6)]).T
        far = ((y[:, None] - y).abs() > 1) | ((x[:, None] - x).abs() > 1)
        content, position = content.masked_fill(far, -torch.inf), position.masked_fill(far, -torch.inf)
    return content, position


@every_kind
def test_weights_by_the_formula(kind):
    attention, x = attention_and_tokens(kind)
    for h in range(3):
        content, position = logits_by_the_formula(attention, x, h)
        if attention.gate is None:
            expected = (content + position).softmax(-1)
        else:
            share = 1 / (1 + (-attention.gate[h]).exp())
            expected = (1 - share) * content.softmax(-1) + share * position.softmax(-1)
        torch.testing.assert_close(attention.weights(x)[:, h], expected.expand(2, 6, 6))


@every_sink
def test_a_sink_takes_the_rest_of_every_row(kind):
    attention, x = attention_and_tokens(kind)
    for parameter in attention.parameters():
        parameter.mul_(0.3)  # soft maps
    weights = attention.weights(x)
    assert weights.shape == (2, 3, 6, 6)
    assert (weights >= 0).all()
    assert (weights.sum(-1) < 0.999).all()


@pytest.mark.parametrize("kind", ["sink", "sink beside a position", "sink, gated", "sink beside a mask"])
def test_a_sink_is_a_token_of_zeros(kind):
    attention, x = attention_and_tokens(kind)
    zero = torch.zeros(2, 6, 1, dtype=torch.float64)
    for h in range(3):
        content, position = (
            torch.cat([part.expand(2, 6, 6), zero], dim=-1) for part in logits_by_the_formula(attention, x, h)
        )
        if attention.gate is None:
            expected = (content + position).softmax(-1)
        else:
            share = attention.gate[h].sigmoid()
            expected = (1 - share) * content.softmax(-1) + share * position.softmax(-1)
        torch.testing.assert_close(attention.weights(x)[:, h], expected[..., :6])


@pytest.mark.parametrize("margin", [1, 2])
def test_a_margin_is_attention_over_an_image_padded_with_zeros(margin):
    torch.manual_seed(0)
    attention = Attention(12, 3, position=RelativeBias(GRID, 3, margin=margin)).double().requires_grad_(False)
    padded_grid = (GRID[0] + 2 * margin, GRID[1] + 2 * margin)
    padded = Attention(12, 3, position=RelativeBias(padded_grid, 3)).double().requires_grad_(False)
    attention.position.table.normal_()
    state = attention.state_dict()
    state["position.table"] = torch.nn.functional.pad(state["position.table"], [margin] * 4)  # never looked up
    padded.load_state_dict(state)
    x = torch.randn(2, *GRID, 12, dtype=torch.float64)
    around = torch.nn.functional.pad(x, (0, 0, *[margin] * 4)).flatten(1, 2)
    expected = padded(around).unflatten(1, padded_grid)[:, margin:-margin, margin:-margin]
    torch.testing.assert_close(attention(x.flatten(1, 2)), expected.flatten(1, 2))


def test_maps_without_content_are_the_same_for_all_images():
    for kind in ("code alone", "free matrices", "position alone"):
        attention, x = attention_and_tokens(kind)
        weights = attention.weights(x)
        assert torch.equal(weights[0], weights[1])
    attention, x = attention_and_tokens("tokens and code")
    assert (attention.weights(x)[0] - attention.weights(x)[1]).abs().max() > 0.01


def test_free_matrices_are_the_rows_of_the_query_and_key_layer():
    """Model III: `softmax(c Q_h K_h^T)` with `Q_h`, `K_h` of `(token, rank)`."""
    attention, x = attention_and_tokens("free matrices")
    free = attention.query_key.weight.view(2, 3, 5, 6).mT  # (query or key, head, token, rank)
    torch.testing.assert_close(attention.weights(x)[0], (free[0] @ free[1].mT / 5**0.5).softmax(-1))


@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        (dict(), set()),
        (dict(train_query_key=False), {"query_key.weight", "query_key.bias"}),
        (dict(train_gate=False), {"gate"}),
        (dict(train_query_key=False, train_gate=False), {"query_key.weight", "query_key.bias", "gate"}),
    ],
)
def test_what_is_frozen(options, frozen):
    attention = Attention(12, 3, position=GaussianPosition(GRID, 3), gate=1.0, qkv_bias=True, **options)
    assert {name for name, p in attention.named_parameters() if not p.requires_grad} == frozen


@pytest.mark.parametrize("kind", KINDS | SINKS)
def test_first_and_second_derivatives(kind):
    attention, x = attention_and_tokens(kind)
    x = x[:1, :, :].requires_grad_()
    # pytorch#116350: fused attention has no second derivative.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.autograd.gradcheck(lambda x: attention(x).sum(-1), x, fast_mode=True)
        assert torch.autograd.gradgradcheck(lambda x: attention(x).square().sum(), x, fast_mode=True)


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


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("give position= as well", dict(gate=1.0)),
        ("and content", dict(gate=1.0, content=False, position=GaussianPosition(GRID, 3))),
        ("nothing to attend by: give position=", dict(content=False)),
        ("drop sink=True", dict(sink=True, position=RelativeBias(GRID, margin=1))),
        ("drop sink=True", dict(sink=True, mask=Neighbourhood(GRID, 3, boundary="zero"))),
        ("heads=3 does not divide dim=10; use heads=2", dict(dim=10, head_dim=4, value=False)),
    ],
)
def test_contradictions_are_refused(words, options):
    with pytest.raises(ValueError) as error:
        Attention(**{"dim": 12, "heads": 3} | options)
    assert words in str(error.value)


def test_a_share_beyond_one_is_refused():
    with pytest.raises(ValueError, match=r"alpha=1\.5 is the share of the tokens.*use 0 to 1"):
        mixture(alpha=1.5)


def test_ungated_and_frozen_convits():
    """PSA sums both logits before one softmax; Table 3 of d'Ascoli et al. freezes gates, or all of the attention."""
    settings = dict(dim=16, depth=3, gpsa_layers=2, seed=0)

    def frozen(**options):
        model = create_model("convit", **settings, **options)
        return {name for name, p in model.named_parameters() if not p.requires_grad}

    summed = create_model("convit", gated=False, **settings).local_blocks[0].attention.double()
    assert summed.gate is None
    x = torch.randn(2, 64, 16, dtype=torch.float64)
    query, key = summed.query_key(x).chunk(2, dim=-1)
    logits = query[..., 4:8] @ key[..., 4:8].mT / 2 + summed.position()[1]
    torch.testing.assert_close(summed.weights(x)[:, 1], logits.softmax(-1))
    assert not frozen()
    assert frozen(train_gate=False) == {f"local_blocks.{i}.attention.gate" for i in range(2)}
    parts = ("query_key.weight", "value.weight", "project.weight", "project.bias", "position.vector", "gate")
    assert frozen(train_gpsa=False) == {f"local_blocks.{i}.attention.{part}" for i in range(2) for part in parts}
    gate = create_model("convit", gate=0.0, **settings).local_blocks[1].attention.gate
    assert torch.equal(gate, torch.zeros(4))
