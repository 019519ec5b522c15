"""How far attention looks, against values known beforehand."""

import math

import numpy as np
import pytest
import torch
from einops import rearrange
from torch import nn

from vitprobe.models import create_model
from vitprobe.probes import nonlocality
from vitprobe.probes.nonlocality import distances, uniform_nonlocality


def look_everywhere_(model):
    """Zero queries and keys: the content part of every attention is uniform."""
    for name, parameter in model.named_parameters():
        if "query_key" in name:
            nn.init.zeros_(parameter)
    return model


def measure(model, image_size=32, count=2, **options):
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    x = torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(0))
    return nonlocality(model, x, progress=False, **options)


def test_distances_by_hand():
    expected = [
        [0, 1, 1, math.sqrt(2), 2, math.sqrt(5)],
        [1, 0, math.sqrt(2), 1, math.sqrt(5), 2],
    ]
    np.testing.assert_allclose(distances((3, 2))[:2], expected, rtol=1e-6)
    assert uniform_nonlocality((1, 5)) == pytest.approx((2 * (4 * 1 + 3 * 2 + 2 * 3 + 1 * 4)) / 25)


@pytest.mark.parametrize(("side", "expected"), [(8, 4.14), (14, 7.28), (16, 8.33)])
def test_uniform_attention(side, expected):
    model = create_model("vit", image_size=2 * side, patch_size=2, dim=12, depth=1, pool="mean", seed=0)
    found = measure(look_everywhere_(model), 2 * side)
    np.testing.assert_allclose(found.nonlocality, expected, atol=0.005)
    np.testing.assert_allclose(found.uniform_nonlocality, found.nonlocality.isel(head=0), rtol=1e-5)
    np.testing.assert_allclose(found.nonlocality_se, 0, atol=1e-6)
    np.testing.assert_array_equal(found.prefix_mass, 0)


@pytest.mark.parametrize(
    ("side", "heads", "expected"), [(14, 9, 2.88), (8, 4, 1.80), (8, 9, 1.98), (8, 16, 2.18), (16, 9, 3.17)]
)
def test_gated_attention_at_initialisation(side, heads, expected):
    options = dict(patch_size=2, dim=4 * heads, heads=heads, depth=1, gpsa_layers=1, pool="mean", seed=0)
    model = create_model("convit", image_size=2 * side, **options)
    found = measure(look_everywhere_(model), 2 * side)
    assert float(found.nonlocality.mean()) == pytest.approx(expected, abs=0.005)


def test_gates_choose_between_position_and_content():
    options = dict(patch_size=2, dim=36, heads=9, depth=1, gpsa_layers=1, pool="mean", seed=0)
    model = look_everywhere_(create_model("convit", image_size=28, **options))
    gate = model.local_blocks[0].attention.gate
    with torch.no_grad():
        gate.fill_(50.0)
        position = measure(model, 28)
        gate.fill_(-50.0)
        content = measure(model, 28)
        gate.fill_(0.0)
        half = measure(model, 28)
    assert float(position.nonlocality.mean()) == pytest.approx(1.26, abs=0.005)
    np.testing.assert_allclose(content.nonlocality, 7.28, atol=0.005)
    np.testing.assert_allclose(half.nonlocality, (position.nonlocality + content.nonlocality) / 2, rtol=1e-5)


@pytest.mark.parametrize("registers", [0, 4])
def test_prefix_tokens_are_no_place(registers):
    model = create_model("vit", image_size=16, dim=12, depth=1, registers=registers, seed=0)
    found = measure(look_everywhere_(model), 16)
    assert int(found.prefix[0]) == 1 + registers
    np.testing.assert_allclose(found.nonlocality, uniform_nonlocality((4, 4)), rtol=1e-5)
    np.testing.assert_allclose(found.prefix_mass, (1 + registers) / (17 + registers), rtol=1e-5)


class FixedMap(nn.Module):
    """One attention over a class token, if the map has 17 tokens, and the patches of a 4x4 grid.

    Its map `(image or 1, head, token, token)` is set.
    """

    def __init__(self, weights):
        super().__init__()
        self.register_buffer("weights", weights)
        self.embed, self.token = nn.Conv2d(3, 6, 4, 4), nn.Parameter(torch.randn(1, weights.shape[-1] - 16, 6))
        self.value, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        value = rearrange(self.value(x), "b n (h d) -> b h n d", h=self.weights.shape[1])
        x = x + rearrange(self.weights.to(x.dtype).expand(len(x), -1, -1, -1) @ value, "b h n d -> b n (h d)")
        return self.head(x[:, 0])


def to_the_right(steps, mass):
    """Every patch looks `steps` to the right, around the edge, and with `mass` at the class token."""
    weights = torch.zeros(17, 17)
    for row in range(4):
        for column in range(4):
            weights[1 + 4 * row + column, 1 + 4 * row + (column + steps) % 4] = 1 - mass
    weights[1:, 0] = mass
    weights[0, 1:4] = torch.tensor([0.5, 0.25, 0.25])
    return weights


def test_class_token_is_dropped_and_rows_are_normalised_anew():
    weights = torch.stack([to_the_right(0, 0.25), to_the_right(1, 0.5), to_the_right(2, 1e-6)])[None]
    found = measure(FixedMap(weights), 16)
    # one step to the right around the edge: three patches go 1 and the last goes 3; two steps are always 2
    np.testing.assert_allclose(found.nonlocality[0], [0, (1 + 1 + 1 + 3) / 4, 2], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.prefix_mass[0], [0.25, 0.5, 1e-6], rtol=1e-4)
    assert found.kind.item() == "msa" and found.prefix.item() == 1


def test_half_precision_rows_are_normalised():
    weights = torch.zeros(1, 2, 16, 16)
    weights[..., :7] = 1 / 7
    assert float(weights.bfloat16().double()[0, 0, 0].sum()) == pytest.approx(0.998, abs=1e-3)
    found = measure(FixedMap(weights).bfloat16(), 16)
    exact = distances((4, 4))[:, :7].double().mean().item()
    np.testing.assert_allclose(found.nonlocality, exact, rtol=1e-5)


def test_standard_error_is_over_images():
    class ByBrightness(FixedMap):
        """Bright images look two patches to the right, dark ones at themselves."""

        def forward(self, x):
            bright = (x.mean((1, 2, 3)) > 0).float()[:, None, None, None]
            self.weights = bright * to_the_right(2, 0.0) + (1 - bright) * to_the_right(0, 0.0)
            return super().forward(x)

    x = torch.ones(5, 3, 16, 16) * torch.tensor([1.0, -1, 1, 1, -1]).reshape(5, 1, 1, 1)
    found = nonlocality(ByBrightness(to_the_right(0, 0.0)[None, None]), x.split(2), progress=False)
    each = np.array([2.0, 0, 2, 2, 0])
    np.testing.assert_allclose(found.nonlocality, each.mean(), rtol=1e-6)
    np.testing.assert_allclose(found.nonlocality_se, each.std(ddof=1) / np.sqrt(5), rtol=1e-6)


def test_windows_are_measured_inside():
    from timm.models.swin_transformer import SwinTransformer

    sizes = dict(img_size=56, patch_size=4, window_size=7, embed_dim=8, depths=(2,), num_heads=(2,))
    model = SwinTransformer(num_classes=3, **sizes)
    for name, parameter in model.named_parameters():
        if "attn.qkv" in name or "relative_position_bias_table" in name:
            nn.init.zeros_(parameter)
    found = measure(model, 56)
    np.testing.assert_array_equal(found.windows, 4)
    np.testing.assert_allclose(found.uniform_nonlocality, 3.61, atol=0.005)
    np.testing.assert_allclose(found.nonlocality[0], 3.61, atol=0.005)
    # The second block's windows are shifted by three: what came around the edge is masked.
    regions = np.concatenate([np.repeat(0, 7), np.repeat(1, 4), np.repeat(2, 3)])
    labels = np.add.outer(10 * regions, regions)
    windows = labels.reshape(2, 7, 2, 7).transpose(0, 2, 1, 3).reshape(4, 49)
    allowed = windows[:, :, None] == windows[:, None, :]
    shifted = (allowed / allowed.sum(-1, keepdims=True) * distances((7, 7)).numpy()).sum(-1).mean()
    np.testing.assert_allclose(found.nonlocality[1], shifted, rtol=1e-4)


def test_layers_with_fewer_heads_are_padded():
    model = create_model("alternet_micro", image_size=16, seed=0)
    found = measure(model, 16)
    assert found.sizes == {"layer": 2, "head": 4}
    assert found.nonlocality.isnull().sum("head").values.tolist() == [2, 0]
    assert len(found.nonlocality.to_dataframe().dropna()) == 6


def test_uses_of_one_module_are_not_averaged():
    class Twice(FixedMap):
        def forward(self, x):
            x = self.embed(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
            for weights in (self.weights[:, :1], self.weights[:, 1:2], self.weights[:, 2:]):
                x = x + weights[:, 0].expand(len(x), -1, -1) @ self.value(x)
            return self.head(x[:, 0])

    weights = torch.stack([to_the_right(0, 0.25), to_the_right(2, 0.5), to_the_right(0, 0.5)])[None]
    found = measure(Twice(weights), 16)
    assert found.layer_name.values.tolist() == ["Twice", "Twice#2", "Twice#3"]
    np.testing.assert_allclose(found.nonlocality[:, 0], [0, 2, 0], atol=1e-6)
