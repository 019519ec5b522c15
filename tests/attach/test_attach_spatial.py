"""How layers mix places, against convolutions of one-hot inputs, hand-written matrices and other libraries' maps."""

import itertools

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTLayer

from vitprobe.attach import spatial_operator
from vitprobe.initializers import convolution_as_attention
from vitprobe.models.attention import Attention

GRIDS = [(8, 8), (8, 12), (3, 5), (1, 6)]
every_grid = pytest.mark.parametrize("grid", GRIDS)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shift(grid, offset):
    """Entry by entry: one where the key is at the offset from the query, and inside."""
    places = list(itertools.product(range(grid[0]), range(grid[1])))
    wanted = [(y + offset[0], x + offset[1]) for y, x in places]
    return torch.tensor([[float(key == at) for key in places] for at in wanted])


# --- convolutions and other linear layers -----------------------------------------------------------


@every_grid
@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_depthwise_taps_are_where_impulses_go(grid, padding_mode):
    if padding_mode == "circular" and min(grid) < 2:
        return  # PyTorch's circular padding goes around once
    layer = nn.Conv2d(4, 4, (3, 5), padding=(1, 2), groups=4, padding_mode=padding_mode)
    operator = spatial_operator(layer, grid)
    assert operator.shape == (4, grid[0] * grid[1], grid[0] * grid[1])
    x = normal(2, 4, *grid)
    expected = (layer(x) - layer.bias[:, None, None]).flatten(2)
    torch.testing.assert_close(torch.einsum("cqk,bck->bcq", operator, x.flatten(2)), expected)
    one_hot = torch.eye(grid[0] * grid[1]).view(-1, 1, *grid)
    if padding_mode == "zeros":
        for channel in range(4):
            answers = F.conv2d(one_hot, layer.weight[channel : channel + 1], padding=(1, 2))
            torch.testing.assert_close(operator[channel], answers.flatten(1).T, rtol=0, atol=1e-6)


@every_grid
@pytest.mark.parametrize("offset", [(0, 0), (-1, 1), (1, 0), (0, 2)])
def test_an_impulse_filter_is_a_shift(grid, offset):
    layer = nn.Conv2d(1, 1, 5, padding=2, bias=False)
    nn.init.zeros_(layer.weight)
    layer.weight.data[0, 0, 2 + offset[0], 2 + offset[1]] = 1
    operator = spatial_operator(layer, grid)
    assert torch.equal(operator[0], shift(grid, offset))
    assert torch.linalg.matrix_rank(operator[0]) == (grid[0] - abs(offset[0])) * max(0, grid[1] - abs(offset[1]))


def test_a_full_convolution_by_its_answers_to_white_inputs():
    layer, grid = nn.Conv2d(3, 4, 3, padding=1, bias=False), (3, 4)
    operator = spatial_operator(layer, grid)
    basis = torch.eye(36).view(36, 3, *grid)  # one input channel and place at a time
    answers = layer(basis).view(3, 12, 4, 12)  # (channel in, key, channel out, query)
    torch.testing.assert_close(operator, answers.square().sum(0).sqrt().permute(1, 2, 0))
    assert (operator >= 0).all()


def test_a_grouped_convolution_sums_over_its_own_inputs():
    layer, grid = nn.Conv2d(4, 6, 3, padding="same", groups=2), (3, 3)
    halves = [nn.Conv2d(2, 3, 3, padding=1) for _ in range(2)]
    for half, weight in zip(halves, layer.weight.split(3), strict=True):
        half.weight.data = weight.data
    expected = torch.cat([spatial_operator(half, grid) for half in halves])
    torch.testing.assert_close(spatial_operator(layer, grid), expected)


def test_average_pooling_and_blur():
    pool = spatial_operator(nn.AvgPool2d(3, 1, 1), (4, 5))
    box = sum(shift((4, 5), offset) for offset in itertools.product((-1, 0, 1), repeat=2)) / 9
    torch.testing.assert_close(pool, box[None])
    inside = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
    torch.testing.assert_close(spatial_operator(inside, (4, 5))[0], box / box.sum(-1, keepdim=True))
    channels = spatial_operator(nn.AvgPool2d(3, 1, 1), x=normal(1, 2, 4, 5))
    torch.testing.assert_close(channels, box.expand(2, -1, -1))


class FixedFilters(nn.Module):
    """A matrix of places for each channel of images, as a buffer, with an offset for good measure."""

    def __init__(self, matrices, bias=0.5):
        super().__init__()
        self.register_buffer("matrices", matrices)
        self.bias = bias

    def forward(self, x):
        return torch.einsum("cqk,bck->bcq", self.matrices, x.flatten(2)).view_as(x) + self.bias


def test_fixed_filters_and_permutations():
    generator = torch.Generator().manual_seed(0)
    permutations = torch.stack([torch.eye(12)[torch.randperm(12, generator=generator)] for _ in range(3)])
    layer = FixedFilters(permutations)
    torch.testing.assert_close(spatial_operator(layer, x=normal(1, 3, 3, 4)), permutations)
    assert torch.equal(spatial_operator(permutations[0], (3, 4)), permutations[:1])


def test_linear_over_tokens():
    layer = nn.Linear(12, 12)
    assert torch.equal(spatial_operator(layer, (3, 4))[0], layer.weight)
    assert torch.equal(spatial_operator(layer)[0], layer.weight)


def test_mixing_of_tokens_by_impulses():
    class OverTokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x):
            return self.mix(x.mT).mT

    layer = OverTokens()
    operator = spatial_operator(layer, (2, 3), normal(1, 6, 4))
    torch.testing.assert_close(operator, layer.mix.weight.expand(4, -1, -1))


# --- attention --------------------------------------------------------------------------------------


def test_attention_of_this_package_is_averaged_over_the_batch():
    attention, x = Attention(12, 3), normal(4, 6, 12)
    operator = spatial_operator(attention, (2, 3), x)
    torch.testing.assert_close(operator, attention.weights(x).mean(0))
    assert not operator.requires_grad


def test_tokens_before_the_patches_are_left_out_without_normalising_anew():
    attention, x = Attention(12, 3), normal(2, 8, 12)
    operator = spatial_operator(attention, (2, 3), x)
    assert torch.equal(operator, spatial_operator(attention, x=x)[:, 2:, 2:])
    assert (operator.sum(-1) < 1 - 1e-3).all()


def test_a_convolution_made_of_attention_has_the_shifts_of_its_offsets():
    layer = convolution_as_attention(normal(2, 2, 3, 3), image_size=(6, 8), patch_size=2)
    operator = spatial_operator(layer, (3, 4), normal(2, 2, 6, 8))
    offsets = itertools.product((-1, 0, 1), repeat=2)
    torch.testing.assert_close(operator, torch.stack([shift((3, 4), o) for o in offsets]), rtol=0, atol=1e-6)


def test_multihead_attention_of_pytorch():
    for batch_first in (True, False):
        layer, x = nn.MultiheadAttention(12, 3, batch_first=batch_first), normal(4, 6, 12)
        y = x if batch_first else x.transpose(0, 1)
        expected = layer(y, y, y, average_attn_weights=False)[1].mean(0)
        torch.testing.assert_close(spatial_operator(layer, (2, 3), x), expected)


def test_attention_of_timm():
    layer, x = timm.layers.Attention(12, num_heads=3).eval(), normal(4, 6, 12)
    query, key, _ = layer.qkv(x).view(4, 6, 3, 3, 4).permute(2, 0, 3, 1, 4)
    expected = (query @ key.mT / 2).softmax(-1).mean(0)
    torch.testing.assert_close(spatial_operator(layer, (2, 3), x), expected)


def test_a_whole_layer_of_transformers():
    layer, x = ViTLayer(ViTConfig(hidden_size=12, num_attention_heads=3, intermediate_size=12)), normal(2, 7, 12)
    operator = spatial_operator(layer, (2, 3), x)
    assert operator.shape == (3, 6, 6)
    assert ((operator.sum(-1) > 0.5) & (operator.sum(-1) < 1)).all()


class MergedHeads(nn.Module):
    """Heads and batch on one axis, `bmm`, a map that depends on the image."""

    def forward(self, x):
        maps = torch.cat([x @ x.mT, x.square() @ x.mT], dim=1).view(-1, x.shape[1], x.shape[1]).softmax(-1)
        return torch.bmm(maps, x.repeat_interleave(2, 0)).view(len(x), -1, x.shape[-1])


def test_heads_on_one_axis_with_the_batch():
    x = normal(3, 6, 5)
    expected = torch.stack([(x @ x.mT).softmax(-1).mean(0), (x.square() @ x.mT).softmax(-1).mean(0)])
    torch.testing.assert_close(spatial_operator(MergedHeads(), (2, 3), x), expected)


# --- the module is left alone, and what cannot be is refused ----------------------------------------


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv2d(3, 3, 3, padding=1, groups=3), normal(1, 3, 4, 4)),
        (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.BatchNorm2d(3)), normal(1, 3, 4, 4)),
        (nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True), normal(2, 16, 12)),
    ],
)
def test_module_and_random_numbers_are_left_alone(layer, x):
    layer.train()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first, second = (spatial_operator(layer, (4, 4), x) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, second)
    assert layer.training and all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize(
    ("layer", "options", "says"),
    [
        (Attention(12, 3), {}, "the map of Attention depends on its input: give x="),
        (nn.Conv2d(3, 3, 3, padding=1), {}, r"Conv2d depends on the size of its input: give grid=\(rows, columns\)"),
        (nn.Conv2d(3, 3, 3, stride=2, padding=1), dict(grid=(4, 4)), "Conv2d makes 2x2 places of 4x4.*stride 1"),
        (nn.AvgPool2d(2), dict(grid=(4, 4)), "AvgPool2d makes 2x2 places of 4x4"),
        (nn.MaxPool2d(3, 1, 1), dict(grid=(4, 4)), "MaxPool2d is not linear"),
        (nn.ReLU(), dict(grid=(4, 4)), "ReLU is not linear"),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.GELU()), dict(x=normal(1, 3, 4, 4)), "not linear.*activation function"),
        (nn.Sequential(nn.Conv2d(3, 3, 1)), dict(x=normal(1, 3, 4, 4)), "Sequential mixes channels as well as places"),
        (nn.BatchNorm2d(3), dict(grid=(4, 4)), "the channels that BatchNorm2d takes are not known: give x="),
        (nn.Linear(16, 64), dict(grid=(4, 4)), "from 16 to 64 numbers is no matrix between 16 places"),
        (nn.Linear(16, 16), dict(grid=(4, 5)), "from 16 to 16 numbers is no matrix between 20 places"),
        (torch.ones(3, 4), {}, r"matrices of shape \(3, 4\)"),
        (torch.ones(49, 49), dict(grid=(4, 5)), "49 tokens do not lie on a grid of 4x5"),
        (torch.ones(4, 4), dict(grid=(4, 5)), "4 tokens do not lie on a grid of 4x5"),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 12), 2, enable_nested_tensor=False),
            dict(x=normal(2, 6, 12)),
            "applies 2 attention maps: give one layer",
        ),
    ],
)
def test_refused_in_words(layer, options, says):
    with pytest.raises(ValueError, match=says):
        spatial_operator(layer, **options)


def test_the_mlp_of_a_mixer_is_refused_and_a_linear_layer_of_it_may_be_not():
    block = timm.models.mlp_mixer.MixerBlock(12, 16)
    with pytest.raises(ValueError, match="Mlp is not linear"):
        spatial_operator(block.mlp_tokens, x=normal(1, 12, 16))
    with pytest.raises(ValueError, match="from 16 to 6 numbers"):
        spatial_operator(block.mlp_tokens.fc1, (4, 4))


def test_no_module():
    with pytest.raises(TypeError, match="not int"):
        spatial_operator(3)
