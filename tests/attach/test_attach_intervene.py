"""Units removed and attention maps edited in a forward pass, against copies of the networks changed by hand."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from handwritten import InPlaceViT, ParallelBranches, TinyMHA, TinyViT, mobile_net
from test_attach_maps import ASKED, BOOL_MASK, HEAD_BIAS, WAYS, five_axes, grouped, padding, softmax64
from test_attach_units import torchvision_resnet, torchvision_swin, torchvision_vit, transformers_vit
from test_attach_untouched import assert_same, state, with_dropout
from torch import nn
from torch.overrides import TorchFunctionMode

from vitprobe.attach import Intervention, plan, removal
from vitprobe.attach.intervene import apply_maps
from vitprobe.attach.maps import recognise
from vitprobe.calling import default_forward, logits_of, untouched
from vitprobe.models import create_model


def images(side=16, count=5, seed=0):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def intervened(model, x, choose, **options):
    """The logits with what `choose` makes of the plan as the intervention."""
    with untouched(model):
        found = plan(model, x, **options)
        return logits_of(Intervention(model, found, **choose(found))(default_forward, model, x))


def plain(model, x):
    with untouched(model):
        return logits_of(model(x))


def without(*indices):
    return lambda found: {"without": [found.units[index] for index in indices]}


# --- units removed ----------------------------------------------------------------------------------


class Sums(nn.Module):
    """Three convolutional branches, each added by `add(stream, branch)`, with an activation after each sum."""

    def __init__(self, add, activation):
        super().__init__()
        self.add, self.activation = add, activation
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 9, 3, padding=1), nn.ReLU(), nn.Conv2d(9, 6, 1))
            for _ in range(3)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = self.activation(self.add(x, branch(x)))
        return self.head(x.mean((2, 3)))


def in_place(x, y):
    x += y
    return x


ADDITIONS = {
    "+": lambda x, y: x + y,
    "swapped": lambda x, y: y + x,
    "+=": in_place,
    "+= on the branch": lambda x, y: in_place(y, x),
    "add": lambda x, y: x.add(y),
    "torch.add": lambda x, y: torch.add(y, other=x),
    "add_": lambda x, y: x.add_(y),
    "add_ on the branch": lambda x, y: y.add_(x),
    "into another": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "half the stream": lambda x, y: torch.add(y, x, alpha=0.5),
    "half the branch": lambda x, y: x.add(y, alpha=0.5),
}


@pytest.mark.parametrize("activation", [nn.Identity(), nn.ReLU(inplace=True)], ids=["pre-norm", "ReLU in place"])
@pytest.mark.parametrize("add", ADDITIONS.values(), ids=ADDITIONS)
def test_a_branch_removed_is_a_branch_of_zeros(add, activation):
    torch.manual_seed(0)
    model, x = Sums(add, activation), images()
    for indices in ((1,), (2,), (3,), (1, 3)):
        copied = copy.deepcopy(model)
        for index in indices:
            copied.branches[index - 1][-1].weight.data.zero_()
            copied.branches[index - 1][-1].bias.data.zero_()
        assert torch.equal(intervened(model, x, without(*indices)), plain(copied, x)), indices


def test_a_branch_removed_has_the_dtype_of_the_sum():
    class Mixed(nn.Module):
        """A half-precision stream and branches of single precision, as autocast makes them."""

        def __init__(self):
            super().__init__()
            self.stem, self.mlp, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.stem(x).flatten(2).transpose(1, 2).bfloat16()
            x = x + self.mlp(x.float())
            return self.head(x.mean(1))

    torch.manual_seed(0)
    model, x = Mixed(), images()
    copied = copy.deepcopy(model)
    copied.mlp.weight.data.zero_()
    copied.mlp.bias.data.zero_()
    assert torch.equal(intervened(model, x, without(1)), plain(copied, x))


class Nothing(nn.Module):
    """Stands for a branch: zeros, and no weights where attention would return them."""

    def __init__(self, pair):
        super().__init__()
        self.pair = pair

    def forward(self, x, *args, **kwargs):
        zeros = torch.zeros_like(x)
        return (zeros, None) if self.pair else zeros


def timm_vit():
    import timm

    options = dict(depth=2, img_size=32, embed_dim=24, num_heads=3, num_classes=5, init_values=0.3, drop_path_rate=0.5)
    return timm.create_model("vit_tiny_patch16_224", **options)


def timm_swin():
    import timm

    return timm.create_model(
        "swin_tiny_patch4_window7_224", depths=(2, 2), num_heads=(1, 2), embed_dim=8, img_size=56, num_classes=3
    )


def torchvision_bottlenecks():
    from torchvision.models import resnet

    return resnet.ResNet(resnet.Bottleneck, [1, 2, 1, 1], num_classes=3)


def timm_bottlenecks():
    from timm.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, (1, 2, 1, 1), num_classes=3, channels=(8, 16, 16, 16))


# For each unit the module that gives its branch, and whether that returns a pair.
BLOCKS = {
    "timm vit": (timm_vit, 32, {1: "blocks.0.attn", 2: "blocks.0.mlp", 3: "blocks.1.attn", 4: "blocks.1.mlp"}, False),
    "timm swin": (
        timm_swin,
        56,
        {1: "layers.0.blocks.0.attn", 3: "layers.0.blocks.1.attn", 4: "layers.0.blocks.1.mlp"}
        | {8: "layers.1.blocks.1.attn"},
        False,
    ),
    "torchvision vit": (
        torchvision_vit,
        32,
        {1: "encoder.layers.encoder_layer_0.self_attention", 3: "encoder.layers.encoder_layer_1.self_attention"},
        True,
    ),
    "torchvision swin": (torchvision_swin, 32, {1: "features.1.0.attn", 4: "features.1.1.mlp"}, False),
    "transformers vit": (transformers_vit, 32, {1: "vit.layers.0.attention", 3: "vit.layers.1.attention"}, True),
    "transformers vit, MLP": (transformers_vit, 32, {2: "vit.layers.0.mlp", 4: "vit.layers.1.mlp"}, False),
    "torchvision resnet": (torchvision_resnet, 32, {1: "layer1.0.bn2", 3: "layer2.0.bn2", 6: "layer3.1.bn2"}, False),
    "ours": (
        lambda: create_model("vit", image_size=16, patch_size=4, dim=12, depth=2, registers=2, seed=0),
        16,
        {1: "blocks.0.attention", 4: "blocks.1.mlp"},
        False,
    ),
}


@pytest.mark.parametrize(("build", "side", "branches", "pair"), BLOCKS.values(), ids=BLOCKS)
def test_removed_by_hand_in_models_of_every_library(build, side, branches, pair):
    torch.manual_seed(0)
    model, x = build(), images(side, 3)
    for parameter in model.parameters():
        if not parameter.any():  # biases, and classifiers that start at zero
            parameter.data.normal_(std=0.1)
    before = plain(model, x)
    for index, name in branches.items():
        copied = copy.deepcopy(model)
        parent, _, child = name.rpartition(".")
        setattr(copied.get_submodule(parent), child, Nothing(pair))
        found = intervened(model, x, without(index))
        torch.testing.assert_close(found, plain(copied, x), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found, before, rtol=1e-5, atol=1e-6), name


def test_one_use_of_a_block_is_removed_and_the_other_stays():
    torch.manual_seed(0)
    model, x = InPlaceViT(), images()

    def by_hand(skipped):
        tokens = model.embed(x).flatten(2).transpose(1, 2)
        for use in range(2):
            y = model.block.norm(tokens)
            if skipped != (use, "attention"):
                tokens = tokens + model.block.attention(y, y, y, need_weights=False)[0]
            if skipped != (use, "mlp"):
                tokens = tokens + model.block.mlp(model.block.mlp_norm(tokens))
        return model.head(tokens.mean(1))

    cases = {1: (0, "attention"), 2: (0, "mlp"), 3: (1, "attention"), 4: (1, "mlp")}
    with torch.no_grad():
        for index, skipped in cases.items():
            expected = by_hand(skipped)
            torch.testing.assert_close(intervened(model, x, without(index)), expected, rtol=1e-5, atol=1e-6)


class Chain(nn.Sequential):
    """Convolutions without skip connections, each with a ReLU that works in place."""

    def __init__(self):
        super().__init__(
            *(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(6, 6, 5, padding=2), nn.ReLU(inplace=True)),
            *(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        )


@pytest.mark.parametrize("indices", [(1,), (2,), (4,), (1, 2), (1, 4)])
def test_units_without_a_skip_connection_are_bypassed(indices):
    torch.manual_seed(0)
    model, x = Chain(), images()
    copied = copy.deepcopy(model)
    for index in indices:
        copied[2 * index] = copied[2 * index + 1] = nn.Identity()
    assert torch.equal(intervened(model, x, without(*indices)), plain(copied, x))


def test_modules_chosen_by_pattern_are_bypassed():
    model, x = create_model("vit_nano", image_size=8, seed=0), images(8)
    copied = copy.deepcopy(model)
    copied.blocks[2] = nn.Identity()
    found = intervened(model, x, without(2), layers="blocks.*")
    torch.testing.assert_close(found, plain(copied, x), rtol=1e-5, atol=1e-6)


def test_how_units_can_be_removed():
    with untouched(model := mobile_net()):
        found = plan(model, images())
    kinds = [removal(unit, found) for unit in found.units]
    # A stem, a skip, a change of grid, a skip, a change of width, a skip.
    assert kinds == [None, "branch", None, "branch", None, "branch"]
    with untouched(model := Chain()):
        found = plan(model, images())
    assert [removal(unit, found) for unit in found.units] == [None, "bypass", "bypass", None, "bypass"]


def test_units_that_cannot_be_removed_are_refused():
    model, x = mobile_net(), images()
    with pytest.raises(ValueError, match=r"2\.branch\.5 \(subsample\) has no skip connection and changes the shape"):
        intervened(model, x, without(2))


# --- convolutions removed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "side", "expected"),
    [
        (torchvision_bottlenecks, 32, {1: ["layer1.0.conv2"], 2: [], 3: ["layer2.1.conv2"], 4: []}),
        (timm_bottlenecks, 32, {1: ["layer1.0.conv2"], 2: [], 3: ["layer2.1.conv2"]}),
        (torchvision_resnet, 32, {2: ["layer1.1.conv1", "layer1.1.conv2"], 3: ["layer2.0.conv2"]}),
        (lambda: create_model("resnet_nano", image_size=8, seed=0), 8, None),
        (Chain, 16, {1: ["2"], 3: [], 4: ["8"]}),
    ],
    ids=["torchvision", "timm", "basic blocks", "ours", "no skips"],
)
def test_convolutions_removed_are_identities(build, side, expected):
    torch.manual_seed(0)
    model, x = build(), images(side, 3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.weight.data.normal_()
    with untouched(model):
        found = plan(model, x)
    if expected is None:  # every 3x3 convolution of stride 1 inside a block
        expected = {
            unit.index: [
                f"{unit.name}.{name}"
                for name, module in model.get_submodule(unit.name).named_modules()
                if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3) and module.stride == (1, 1)
                and module.in_channels == module.out_channels
            ]
            for unit in found.units[1:]
        }  # fmt: skip
        assert any(expected.values())
    for index, names in expected.items():
        assert len(found.units[index].convolutions) == len(names), index
        copied = copy.deepcopy(model)
        for name in names:
            parent, _, child = name.rpartition(".")
            setattr(copied.get_submodule(parent), child, nn.Identity())
        changed = intervened(model, x, lambda found, index=index: {"convolutions": [found.units[index]]})
        assert torch.equal(changed, plain(copied, x)), index


# --- maps edited ------------------------------------------------------------------------------------


def keep(site, maps, parts):
    return maps


def mirrored(site, maps, parts):
    """Each head looks where it would have looked from the other end; another one for each head and image."""
    strength = torch.arange(1, 1 + maps.shape[2], dtype=maps.dtype).reshape(-1, 1, 1)
    image = torch.arange(len(maps), dtype=maps.dtype).reshape(-1, 1, 1, 1, 1)
    edited = maps.flip(-1) + 0.1 * strength * image
    return edited / edited.sum(-1, keepdim=True)


def edit_all(edit):
    return lambda found: {"sites": found.attentions, "edit": edit}


@pytest.mark.parametrize(("attend", "reference"), WAYS.values(), ids=WAYS)
def test_edited_maps_are_the_ones_applied(attend, reference):
    def by_hand(query, key, value):
        allowed = {name: fact[: len(query)] if name == "bias" and fact.ndim == 4 else fact
                   for name, fact in reference.items()}  # fmt: skip
        maps = torch.from_numpy(softmax64(query, key, **allowed))
        return (mirrored(None, maps[:, None], ())[:, 0] @ value.double()).float()

    torch.manual_seed(0)
    model, x = TinyViT(attend), images()
    edited = copy.deepcopy(model)
    edited.attend = by_hand
    torch.testing.assert_close(intervened(model, x, edit_all(keep)), plain(model, x), rtol=1e-5, atol=1e-5)
    found = intervened(model, x, edit_all(mirrored))
    torch.testing.assert_close(found, plain(edited, x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, plain(model, x), rtol=1e-2, atol=1e-2)


def test_edited_maps_of_windows_and_of_grouped_heads():
    def windows(query, key, value):
        query, key, value = (rearrange(x, "b h (w n) d -> b w h n d", w=4) for x in (query, key, value))
        maps = torch.from_numpy(softmax64(query, key, bias=HEAD_BIAS[:, :4, :4]))
        return rearrange(mirrored(None, maps, ()) @ value.double(), "b w h n d -> b h (w n) d").float()

    def groups(query, key, value):
        maps = torch.from_numpy(softmax64(query, key[:, [0, 0, 1, 1]]))
        return (mirrored(None, maps[:, None], ())[:, 0] @ value[:, [0, 0, 1, 1]].double()).float()

    x = images()
    for attend, by_hand, heads in ((five_axes, windows, 3), (grouped, groups, 4)):
        torch.manual_seed(0)
        model = TinyViT(attend, heads=heads)
        edited = copy.deepcopy(model)
        edited.attend = by_hand
        torch.testing.assert_close(intervened(model, x, edit_all(keep)), plain(model, x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(intervened(model, x, edit_all(mirrored)), plain(edited, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_edited_maps_in_half_precision(dtype):
    torch.manual_seed(0)
    model, x = TinyViT(WAYS["fused"][0]).to(dtype), images().to(dtype)
    found, before = intervened(model, x, edit_all(keep)), plain(model, x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, before, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("options", "returned"), ASKED.values(), ids=ASKED)
def test_multihead_attention_with_edited_maps_gives_its_caller_what_it_asked_for(options, returned, batch_first):
    torch.manual_seed(0)
    model, x = TinyMHA(options, batch_first=batch_first), images()
    assert_edited_by_hand(model, x)
    assert (model.returned is None) if returned is None else (tuple(model.returned.shape) == returned)
    if returned is not None:
        query, key, _ = projected(model)
        maps = mirrored(None, torch.from_numpy(softmax64(query, key))[:, None], ())[:, 0]
        expected = maps.mean(1) if len(returned) == 3 else maps
        torch.testing.assert_close(model.returned.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        (dict(attn_mask=~BOOL_MASK), dict(allowed=BOOL_MASK)),
        (dict(attn_mask=lambda x: HEAD_BIAS.repeat(len(x), 1, 1)), dict(bias=HEAD_BIAS)),
        (dict(key_padding_mask=padding), dict(allowed=~padding(range(5))[:, None, None])),
    ],
    ids=["bool mask", "float mask per head", "padding"],
)
def test_multihead_attention_with_masks_and_edited_maps(options, reference):
    torch.manual_seed(0)
    assert_edited_by_hand(TinyMHA(options | {"need_weights": False}), images(), **reference)


def projected(model):
    """Query, key and value `(batch, head, token, channel)` of the last pass."""
    attention = model.attention
    parts = F.linear(model.inputs, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    return [rearrange(part, "b n (h d) -> b h n d", h=attention.num_heads) for part in parts]


def assert_edited_by_hand(model, x, **reference):
    found = intervened(model, x, edit_all(mirrored))
    with torch.no_grad():
        query, key, value = projected(model)
        maps = mirrored(None, torch.from_numpy(softmax64(query, key, **reference))[:, None], ())[:, 0]
        mixed = rearrange(maps @ value.double(), "b h n d -> b n (h d)").float()
        expected = model.head((model.inputs + model.attention.out_proj(mixed)).mean(1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    asked = model.returned
    torch.testing.assert_close(intervened(model, x, edit_all(keep)), plain(model, x), rtol=1e-5, atol=1e-5)
    model.returned = asked


class Edited(TorchFunctionMode):
    """Edits the map of every call that applies one, among them those that no plan takes (more keys than queries)."""

    def __init__(self, edit):
        super().__init__()
        self.edit, self.count = edit, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        source = recognise(func, args, kwargs or {})
        if source is None:
            return func(*args, **(kwargs or {}))
        self.count += 1
        return apply_maps(source, func, args, kwargs or {}, self.edit)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
        {"kdim": 7, "vdim": 5},
        {"kdim": 7, "vdim": 5, "add_bias_kv": True},
    ],
    ids=["plain", "bias_k", "zero key", "both, no biases", "separate projections", "separate projections, bias_k"],
)
def test_multihead_attention_of_every_kind_with_edited_maps(settings):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(12, 3, batch_first=True, **settings).eval()
    for parameter in attention.parameters():
        parameter.data.normal_()  # PyTorch starts biases at zero
    width = (12, settings.get("kdim", 12), settings.get("vdim", 12))
    query, key, value = (torch.randn(4, n, size) for n, size in zip((6, 9, 9), width, strict=True))
    with torch.no_grad(), Edited(lambda maps: maps) as mode:
        same = attention(query, key, value, average_attn_weights=False)
    with torch.no_grad():
        output, weights = attention(query, key, value, average_attn_weights=False)
    assert mode.count == 1
    torch.testing.assert_close(same[0], output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(same[1], weights, rtol=1e-5, atol=1e-6)
    # The output is linear in the maps: that of the images' mean map on one image's values is the images' mean output.
    with torch.no_grad():
        values = value[:1].expand(4, -1, -1)
        with Edited(lambda maps: maps.mean(0, keepdim=True).expand_as(maps)):
            edited = attention(query, key, values)[0]
        expected = attention(query, key, values)[0].mean(0).expand_as(edited)
    torch.testing.assert_close(edited, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [transformers_vit, torchvision_vit, torchvision_swin, timm_swin, timm_vit])
def test_maps_given_back_as_they_are_change_nothing(build):
    torch.manual_seed(0)
    model, x = build(), images(56 if build is timm_swin else 32, 3)
    torch.testing.assert_close(intervened(model, x, edit_all(keep)), plain(model, x), rtol=1e-5, atol=1e-5)


def test_a_single_site_is_edited():
    model, x = create_model("vit_nano", image_size=8, seed=0), images(8)
    seen = []

    def note(site, maps, parts):
        seen.append((site.name, tuple(maps.shape), parts))
        return torch.full_like(maps, 1 / 16)

    found = intervened(model, x, lambda found: {"sites": found.attentions[2:3], "edit": note})
    copied = copy.deepcopy(model)
    copied.blocks[2].attention.query_key.weight.data.zero_()
    torch.testing.assert_close(found, plain(copied, x), rtol=1e-5, atol=1e-6)
    assert seen == [("blocks.2.attention", (5, 1, 3, 16, 16), ())]


# --- gated maps -------------------------------------------------------------------------------------


def timm_convit():
    import timm

    return timm.create_model("convit_tiny", depth=3, local_up_to_layer=2, img_size=64, num_classes=3)


@pytest.mark.parametrize(
    ("build", "side", "gate"),
    [(lambda: create_model("convit_nano", image_size=8, seed=0), 8, "gate"), (timm_convit, 64, "gating_param")],
    ids=["ours", "timm"],
)
def test_parts_of_a_gated_map_are_content_and_position(build, side, gate):
    torch.manual_seed(0)
    model, x = build(), images(side, 3)
    for name, parameter in model.named_parameters():
        if name.endswith(gate):
            parameter.data.normal_()
    counts = []

    def part(index):
        def edit(site, maps, parts):
            counts.append(len(parts))
            return parts[index] if parts else maps

        return edit

    def by_gate(value):
        copied = copy.deepcopy(model)
        for name, parameter in copied.named_parameters():
            if name.endswith(gate):
                parameter.data.fill_(value)
        return plain(copied, x)

    content, position = (intervened(model, x, edit_all(part(index))) for index in (0, 1))
    torch.testing.assert_close(content, by_gate(-40.0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(position, by_gate(40.0), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(content, position, rtol=1e-3, atol=1e-3)
    assert sorted(set(counts)) == [0, 2]  # the last blocks are plain


# --- whatever happens -------------------------------------------------------------------------------


def test_two_interventions_at_once():
    torch.manual_seed(0)
    model, x = create_model("vit_nano", image_size=8, seed=0), images(8)
    copied = copy.deepcopy(model)
    copied.blocks[0].mlp = Nothing(pair=False)
    copied.blocks[2].attention.query_key.weight.data.zero_()
    uniform = {"sites": slice(2, 3), "edit": lambda site, maps, parts: torch.full_like(maps, 1 / 16)}
    found = intervened(
        model,
        x,
        lambda found: uniform | {"sites": found.attentions[uniform["sites"]], "without": [found.units[2]]},
    )
    torch.testing.assert_close(found, plain(copied, x), rtol=1e-5, atol=1e-6)


def test_no_intervention_is_the_model_bit_for_bit():
    for name in ("vit_nano", "convit_nano", "alternet_nano"):
        model, x = create_model(name, image_size=8, seed=0), images(8)
        assert torch.equal(intervened(model, x, lambda found: {}), plain(model, x))


def test_batches_of_other_sizes_than_the_traced_one():
    model = create_model("alternet_nano", image_size=8, seed=0)
    x = images(8, 5)
    with untouched(model):
        found = plan(model, x[:3])
        remove = Intervention(model, found, without=[found.units[6]])
        whole = remove(default_forward, model, x)
        parts = torch.cat([remove(default_forward, model, part) for part in x.split([1, 4])])
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("error", [OverflowError, KeyboardInterrupt])
def test_model_is_as_it_was_after_an_exception(error):
    model = with_dropout()
    x = images(16, 2)
    before = state(model)

    def fail(module, args):
        torch.rand(3)
        raise error

    with untouched(model):
        found = plan(model, x)
        assert removal(found.units[1], found) == "bypass"
        remove = Intervention(model, found, without=[found.units[1]])
    handle = model[4].register_forward_pre_hook(fail)
    with pytest.raises(error), untouched(model):
        remove(default_forward, model, x)
    handle.remove()
    assert_same(before, state(model))
    assert remove.kept == {}
    copied = copy.deepcopy(model)
    copied[3] = copied[4] = nn.Identity()
    with untouched(model):
        assert torch.equal(remove(default_forward, model, x), plain(copied, x))
    assert_same(before, state(model))


def test_model_is_as_it_was_after_an_exception_in_an_edit():
    model, x = create_model("convit_nano", image_size=8, seed=0).train(), images(8)
    before = state(model)

    def interrupt(site, maps, parts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        intervened(model, x, edit_all(interrupt))
    assert_same(before, state(model))


def test_no_activation_outlives_its_pass():
    import gc
    import weakref

    torch.manual_seed(0)
    model, kept = Chain(), []
    model[1].register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    intervened(model, images(), without(1, 2))
    gc.collect()
    assert len(kept) == 3 and all(reference() is None for reference in kept)


def test_sites_without_an_edit_and_passes_that_changed_are_errors():
    model, x = create_model("vit_nano", image_size=8, seed=0), images(8)
    with pytest.raises(ValueError, match="sites were given without an edit=: say what becomes of their maps"):
        intervened(model, x, lambda found: {"sites": found.attentions})

    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return self.net(x) if len(x) < 4 else self.net.head(self.net.norm(self.net.patches(x)).mean(1))

    with untouched(fickle := Fickle()):
        found = plan(fickle, x)
        with pytest.raises(RuntimeError, match=r"changed since it was traced: 0 of 2 interventions took place"):
            Intervention(fickle, found, without=found.units[1:3])(default_forward, fickle, x)


def test_bypass_of_a_unit_that_is_no_more_the_same():
    """What the plan says of a unit decides, not what it is called."""
    with untouched(model := Chain()):
        found = plan(model, images())
    wider = replace(found.units[2], channels=7)
    assert removal(wider, found) is None
    np.testing.assert_array_equal([unit.channels for unit in found.units], [6, 6, 6, 8, 8])


def test_branches_beside_each_other_are_one_unit_and_go_together():
    torch.manual_seed(0)
    model = ParallelBranches().eval()
    x = torch.randn(3, 3, 16, 16)
    with untouched(model):
        found = plan(model, x)
        unit = found.units[1]
        assert len(unit.skips) == 1
        alone = Intervention(model, found, without=[unit])(default_forward, model, x)
        expected = model.head(model.embed(x).flatten(2).transpose(1, 2).mean(1))
    torch.testing.assert_close(alone, expected)
