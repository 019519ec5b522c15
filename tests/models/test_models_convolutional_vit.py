import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from vitprobe.models import create_model
from vitprobe.models.attention import Attention, RelativeBias
from vitprobe.models.convolutional_vit import ShiftAttention, shift_offsets, transfer_

every_grid = pytest.mark.parametrize("grid", [(4, 4), (3, 5), (1, 6)])


def shift(grid, **options):
    torch.manual_seed(0)
    module = ShiftAttention(18, grid, **options).double().requires_grad_(False)
    return module, torch.randn(3, grid[0] * grid[1], 18, dtype=torch.float64)


def phases(strength=None, **options):
    """Both networks on 4x6 patches in double precision; the second handed over if a strength is given."""
    settings = dict(image_size=(8, 12), patch_size=2, dim=18, depth=3, mlp_ratio=2.0, seed=0) | options
    source, target = create_model("convolutional_vit", **settings), create_model("relative_vit", **settings)
    source, target = (model.double().eval().requires_grad_(False) for model in (source, target))
    generator = torch.Generator().manual_seed(0)
    for parameter in source.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    if strength is not None:
        transfer_(target, source, strength=strength)
    return source, target, torch.randn(3, 3, 8, 12, generator=generator, dtype=torch.float64)


@every_grid
@pytest.mark.parametrize("options", [dict(), dict(head_dim=5, qkv_bias=True), dict(kernel_size=1)])
def test_shifts_are_a_convolution_with_zero_padding(grid, options):
    """Tap by tap `V_k W_k`, as one dense kernel; a bias on the values is part of what is padded."""
    module, x = shift(grid, **options)
    size = options.get("kernel_size", 3)
    value, project = module.value.weight.unflatten(0, (size**2, -1)), module.project.weight.unflatten(1, (size**2, -1))
    kernel = torch.einsum("kdi,okd->oik", value, project).unflatten(2, (size, size))
    expected = F.conv2d(x.mT.unflatten(2, grid), kernel, module.project.bias, padding=size // 2)
    if module.value.bias is not None:
        constant = torch.einsum("kd,okd->ok", module.value.bias.unflatten(0, (size**2, -1)), project)
        ones = torch.ones(1, 1, *grid, dtype=torch.float64)
        expected = expected + F.conv2d(ones, constant.view(18, 1, size, size), padding=size // 2)
    torch.testing.assert_close(module(x).mT.unflatten(2, grid), expected)


@every_grid
def test_shifts_apply_their_weights(grid):
    module, x = shift(grid)
    weights, value = module.weights(x), module.value(x).unflatten(2, (9, 2))
    assert set(weights.unique().tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(module(x), module.project(torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)))
    centre = weights[0, 4]
    assert torch.equal(centre, torch.eye(len(centre), dtype=torch.float64))


def test_offsets_are_row_by_row():
    assert shift_offsets(3).tolist() == [[a, b] for a in (-1, 0, 1) for b in (-1, 0, 1)]


@pytest.mark.parametrize("phase", [0, 1])
def test_transposed_network_sees_the_transposed_image(phase):
    """Any confusion of rows and columns shows on an image that is not square; heads are taps in the first phase."""
    model, x = phases(1.0)[phase], phases()[2]
    other = phases(image_size=(12, 8))[phase]
    state = model.state_dict()
    for key, value in state.items():
        if value.ndim == 4 or key.endswith("table"):
            state[key] = value.mT
        elif key == "position":
            state[key] = value.unflatten(0, (4, 6)).transpose(0, 1).flatten(0, 1)
        elif phase == 0 and key.endswith("attention.value.weight"):
            state[key] = value.unflatten(0, (3, 3, 2)).transpose(0, 1).flatten(0, 2)
        elif phase == 0 and key.endswith("attention.project.weight"):
            state[key] = value.unflatten(1, (3, 3, 2)).transpose(1, 2).flatten(1, 3)
    other.load_state_dict(state)
    torch.testing.assert_close(other(x.mT), model(x))


@pytest.mark.parametrize("options", [dict(), dict(head_dim=4, qkv_bias=True), dict(kernel_size=5, head_dim=2)])
def test_hand_over_leaves_the_function_alone(options):
    source, target, x = phases(30.0, **options)
    out = source(x)
    assert out.std() > 0.1
    assert (target(x) - out).abs().max() < 1e-8


def test_gap_is_what_the_softmax_leaves():
    """Each head keeps `1 / (1 + others e^-strength)` at its offset, and the gap falls as `e^-strength`."""
    gaps = []
    for strength in (10.0, 11.0, 12.0):
        source, target, x = phases(strength)
        gaps.append((target(x) - source(x)).abs().max().item())
        tokens = torch.randn(1, 24, 18, dtype=torch.float64)
        looks, rest = source.blocks[0].attention.weights(tokens), math.exp(-strength)
        # 24 patches and a ring of 24 zero tokens around them: at the border it is one of these that is looked at.
        expected = (looks + (1 - looks) * rest) / (1 + 47 * rest)
        torch.testing.assert_close(target.blocks[0].attention.weights(tokens), expected)
    assert [math.log(a / b) for a, b in pairwise(gaps)] == pytest.approx([1, 1], abs=0.01)


def test_content_starts_at_zero_and_learns():
    _, target, x = phases(4.0)
    attention = target.blocks[1].attention
    query, key = attention.query_key.weight.chunk(2)
    assert not query.any() and key.any()
    target.requires_grad_(True)
    target(x).logsumexp(1).sum().backward()
    query, key = attention.query_key.weight.grad.chunk(2)
    assert query.abs().max() > 1e-8 and not key.any()
    assert attention.position.table.grad.any()


def test_hand_over_copies_all_that_both_have():
    source, target, _ = phases(8.0)
    state = target.state_dict()
    assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())
    own = {name.split(".", 2)[2] for name in state.keys() - source.state_dict().keys()}
    assert own == {"attention.query_key.weight", "attention.position.table"}


@pytest.mark.parametrize(
    ("target", "source", "words"),
    [
        ("relative_vit", "relative_vit", "not between these networks"),
        ("convolutional_vit", "convolutional_vit", "not between these networks"),
        ("relative_vit", "vit", "of the same options"),
    ],
)
def test_hand_over_refuses_other_networks(target, source, words):
    settings = dict(image_size=8, patch_size=2, dim=18, depth=1, seed=0)
    source = create_model(source, **settings)
    target = create_model(target, **settings)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        transfer_(target, source)
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())


def test_hand_over_names_what_does_not_fit():
    source, _, _ = phases()
    _, target, _ = phases(image_size=8)
    with pytest.raises(ValueError, match="these do not fit: position"):
        transfer_(target, source)


def test_table_looks_where_it_is_told():
    bias = RelativeBias((3, 4), 2, margin=1)
    bias.look_at_(torch.tensor([[1, -1], [0, 2]]), strength=5.0)
    logits = bias()[..., :12]
    for head, (down, right) in enumerate([(1, -1), (0, 2)]):
        looks = [[(b // 4 - a // 4, b % 4 - a % 4) == (down, right) for b in range(12)] for a in range(12)]
        assert torch.equal(logits[head], 5.0 * torch.tensor(looks))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("convolutional_vit", dict(dim=20), "heads=9 does not divide dim=20; use heads=10"),
        ("relative_vit", dict(dim=20), "heads=9 does not divide dim=20; use heads=10"),
        ("convolutional_vit", dict(kernel_size=4), "kernel_size=4 has no middle: use 5"),
        ("relative_vit", dict(kernel_size=4), "kernel_size=4 has no middle: use 5"),
        ("convolutional_vit", dict(phase="conv"), "unknown phase 'conv'. Did you mean 'convolution'"),
        ("convolutional_vit", dict(patch_size=5), "use patch_size=4"),
    ],
)
def test_wrong_settings_name_the_right_ones(name, options, words):
    with pytest.raises(ValueError) as error:
        create_model(name, **options)
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["convolutional_vit", "relative_vit"])
def test_compiles_without_a_graph_break(name):
    torch.compiler.reset()
    model = create_model(name, image_size=(8, 12), patch_size=2, dim=18, depth=1, seed=0).eval().requires_grad_(False)
    x = torch.randn(3, 3, 8, 12)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_both_phases_have_nine_heads():
    source, target, _ = phases()
    assert [type(block.attention) for block in source.blocks] == 3 * [ShiftAttention]
    assert [type(block.attention) for block in target.blocks] == 3 * [Attention]
    assert {block.attention.heads for model in (source, target) for block in model.blocks} == {9}
