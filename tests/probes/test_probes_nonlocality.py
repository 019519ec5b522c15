"""How far attention looks, against values known beforehand."""

import math

import numpy as np
import pytest
import torch
from fixed_maps import FixedMap, by_loops, dilated, measured, random_maps
from torch import nn

from vitprobe.attach import Intervention, plan
from vitprobe.calling import default_forward, untouched
from vitprobe.models import create_model
from vitprobe.models.attention import Attention, GaussianPosition, Neighbourhood
from vitprobe.probes import Nonlocality, nonlocality
from vitprobe.probes.nonlocality import distances, uniform_nonlocality
from vitprobe.results import check


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
    np.testing.assert_allclose(found.nonlocality_ratio, 1, rtol=1e-5)


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


def test_ratio_and_mean_over_heads():
    """By hand on a 2x2 grid: one head looks at itself, one across the corner, one to all alike."""
    everywhere = torch.full((4, 4), 0.25)
    maps = torch.stack([torch.eye(4), torch.eye(4).flip(0), everywhere])[None, None].double()
    # of the second image, the first head looks to all alike as well
    maps = torch.cat([maps, torch.stack([everywhere, torch.eye(4).flip(0), everywhere])[None, None].double()])
    found = measured(Nonlocality(), maps, (2, 2))
    uniform = (0 + 1 + 1 + math.sqrt(2)) / 4
    expected = np.array([[0, math.sqrt(2), uniform], [uniform, math.sqrt(2), uniform]])
    for name, values in (("nonlocality", expected), ("nonlocality_ratio", expected / uniform)):
        np.testing.assert_allclose(found[name][0], values.mean(0), rtol=1e-6)
        np.testing.assert_allclose(found[f"{name}_se"][0], values.std(0, ddof=1) / math.sqrt(2), rtol=1e-6, atol=1e-7)
    layer = expected.mean(1)
    assert found.layer_nonlocality.item() == pytest.approx(layer.mean(), rel=1e-6)
    assert found.layer_nonlocality_se.item() == pytest.approx(layer.std(ddof=1) / math.sqrt(2), rel=1e-6)


def test_standard_error_of_a_layer_knows_that_heads_go_together():
    maps = random_maps(6, 1, 1, 9).expand(-1, -1, 4, -1, -1)
    found = measured(Nonlocality(), maps, (3, 3))
    np.testing.assert_allclose(found.layer_nonlocality_se[0], found.nonlocality_se[0, 0], rtol=1e-6)


def test_a_sink_takes_what_a_row_lacks():
    maps = random_maps(3, 1, 2, 7)  # a class token, a 2x2 grid and two tokens that the map's owner cut off
    cut = maps[..., :5, :5]
    found = measured(Nonlocality(), cut, (2, 2), prefix=1, sink=True)
    np.testing.assert_allclose(found.prefix_mass[0], 1 - cut[..., 1:, 1:].sum(-1).mean((0, 1, 3)), rtol=1e-6)
    places = torch.tensor([[math.nan] * 2, [0, 0], [0, 1], [1, 0], [1, 1]])[None]
    expected = np.mean([[by_loops(one[:, head], places)[0] for head in (0, 1)] for one in cut], 0)
    np.testing.assert_allclose(found.nonlocality[0], expected, rtol=1e-6)


def test_half_precision_rows_with_a_sink_keep_what_they_lack():
    weights = torch.full((1, 1, 1, 4, 4), 1 / 8)
    found = measured(Nonlocality(), weights.bfloat16(), (2, 2), sink=True)
    assert found.prefix_mass.item() == 0.5 and found.nonlocality_ratio.item() == pytest.approx(1)


def test_dilated_windows():
    maps, positions = random_maps(3, 6, 2, 6), dilated((2, 3), (3, 2))
    found = measured(Nonlocality(), maps, (2, 3), positions=positions)
    expected = [[by_loops(image[:, head], positions)[0] for head in (0, 1)] for image in maps]
    np.testing.assert_allclose(found.nonlocality[0], np.mean(expected, 0), rtol=1e-6)
    uniform = by_loops(torch.full((6, 6, 6), 1 / 6), positions)[0]
    np.testing.assert_allclose(found.uniform_nonlocality, uniform, rtol=1e-6)
    np.testing.assert_array_equal(found.prefix_mass, 0)


def test_padded_windows():
    """Three columns in windows of two: the second window's right half is padding, whose rows do not count."""
    maps = random_maps(3, 2, 1, 4)
    positions = np.array([[[0, 0], [0, 1], [1, 0], [1, 1]], [[0, 2], [np.nan] * 2, [1, 2], [np.nan] * 2]])
    found = measured(Nonlocality(), maps, (2, 2), positions=positions)
    expected = [by_loops(image[:, 0], positions)[0] for image in maps]
    np.testing.assert_allclose(found.nonlocality[0], np.mean(expected), rtol=1e-6)
    lost = (maps[:, 1, 0, 0, [1, 3]].sum(-1) + maps[:, 1, 0, 2, [1, 3]].sum(-1)) / 6
    np.testing.assert_allclose(found.prefix_mass[0], lost.mean(), rtol=1e-6)
    uniform = (4 * (0 + 1 + 1 + math.sqrt(2)) / 4 + 2 * (0 + 1) / 2) / 6
    assert found.uniform_nonlocality.item() == pytest.approx(uniform, rel=1e-6)


@pytest.mark.parametrize("pool", ["mean", "class"])
def test_inputs_as_the_published_code_logs_them(pool):
    """Every attention sees the patch embedding: no position code, no norm, no layers before."""
    shape = dict(image_size=16, patch_size=4, dim=16, depth=3, heads=4, gpsa_layers=2, pool=pool, seed=0)
    model = create_model("convit", **shape).eval()
    for name, parameter in model.named_parameters():
        if "position" not in name:
            nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = nonlocality(model, x.split(3), inputs="patch embedding", progress=False)
    check(found)
    assert found.inputs == "patch embedding" and "patch embedding" in found.config
    with torch.no_grad():
        patches = model.patches(x)
        for layer, block in enumerate([*model.local_blocks, *model.global_blocks]):
            if pool == "class" and layer == 2:
                continue  # its class token is the layer's own
            maps = block.attention.weights(patches)
            expected = (maps * distances((4, 4))).sum(-1).mean(2)
            np.testing.assert_allclose(found.nonlocality[layer], expected.mean(0), rtol=1e-5)
    own = nonlocality(model, x, progress=False)
    assert own.inputs == "layer" and float(abs(own.nonlocality - found.nonlocality).min()) > 1e-4


def test_inputs_that_are_none():
    with pytest.raises(ValueError, match=r"unknown inputs 'embedding'.*Known: layer, patch embedding"):
        nonlocality(create_model("vit_nano", image_size=8, seed=0), torch.zeros(1, 3, 8, 8), inputs="embedding")


@pytest.mark.parametrize(
    "options",
    [
        {"sink": True},
        {"mask": Neighbourhood((4, 4), 3, boundary="zero")},
        {"position": GaussianPosition((4, 4), 2), "gate": 0.5, "mask": Neighbourhood((4, 4), 3, boundary="zero")},
    ],
)
def test_what_a_sink_takes_is_no_distance(options):
    """Against the maps that the attention gives as a function, whose rows sum to less than one."""
    torch.manual_seed(0)

    class Sunk(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention, self.head = nn.Conv2d(3, 8, 4, 4), Attention(8, 2, **options), nn.Linear(8, 2)

        def forward(self, x):
            x = self.tokens = self.embed(x).flatten(2).transpose(1, 2)
            return self.head((x + self.attention(x)).mean(1))

    model, x = Sunk(), torch.randn(3, 3, 16, 16)
    found = nonlocality(model, x, progress=False).isel(layer=0)
    with torch.no_grad():
        maps = model.attention.weights(model.tokens)
    mass = maps.sum(-1)
    assert float(mass.mean()) < 0.99
    distance = ((maps * distances((4, 4))).sum(-1) / mass).mean((0, 2))
    np.testing.assert_allclose(found.nonlocality, distance, rtol=1e-5)
    np.testing.assert_allclose(found.prefix_mass, 1 - mass.mean((0, 2)), rtol=1e-5)
    # Maps handed back as they are change nothing, sink or not.
    with untouched(model):
        planned = plan(model, x)
        same = Intervention(model, planned, sites=planned.attentions, edit=lambda site, maps, parts: maps)
        torch.testing.assert_close(same(default_forward, model, x), model(x))


def test_queries_without_attention_to_patches_are_left_out_of_the_mean():
    weights = torch.stack([to_the_right(1, 0.5), to_the_right(2, 0.5)])[None].clone()
    weights[0, 0, 1] = weights[0, 1, 4] = torch.eye(17)[0]  # first and last of a row of patches: all to the class token
    found = measure(FixedMap(weights), 16)
    steps = np.array([1.0, 1, 1, 3] * 4)
    np.testing.assert_allclose(found.nonlocality[0], [np.delete(steps, 0).mean(), 2], rtol=1e-5)
    assert np.isfinite(found.layer_nonlocality).all()
    np.testing.assert_allclose(found.prefix_mass[0], (15 * 0.5 + 1) / 16, rtol=1e-5)
    weights[0, 0, 1:] = torch.eye(17)[0]
    assert np.isnan(measure(FixedMap(weights), 16).nonlocality[0]).values.tolist() == [True, False]


def test_a_single_probe_cannot_be_skipped():
    with pytest.raises(ValueError, match=r"the model has no attention.*skip.* leaves nothing"):
        measure(create_model("resnet_nano", image_size=8, seed=0), 8, missing="skip")
