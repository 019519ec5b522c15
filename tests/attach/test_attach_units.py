"""Which units a traced forward pass finds, in networks of four sources."""

from dataclasses import dataclass, field

import pytest
import torch
from einops import rearrange
from handwritten import (
    ChannelsLast,
    GatedBranches,
    InPlaceViT,
    ParallelBranches,
    PoolMixer,
    PositionModule,
    PostNormEncoder,
    TinyMHA,
    mobile_net,
    plain_cnn,
)
from torch import nn

from vitprobe.attach import Watch, plan
from vitprobe.calling import untouched
from vitprobe.models import create_model


@dataclass
class Case:
    """A network and what has to be found in it; one value where all units share it."""

    build: object
    image: tuple[int, int]
    kinds: str
    grid: object
    prefix: object = 0
    names: dict[int, str] = field(default_factory=dict)


def timm_model(name, **options):
    import timm

    return lambda: timm.create_model(name, num_classes=5, **options)


def timm_convmixer():
    from timm.models.convmixer import ConvMixer

    return ConvMixer(dim=8, depth=2, kernel_size=5, patch_size=4, num_classes=3)


def timm_mixer():
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(num_classes=3, img_size=32, patch_size=8, num_blocks=2, embed_dim=16)


def torchvision_vit():
    from torchvision.models import VisionTransformer

    return VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32)


def torchvision_swin():
    from torchvision.models import SwinTransformer

    # 8 channels on a grid of 8x8: the shape alone does not tell where the channels are
    return SwinTransformer(patch_size=[4, 4], embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=[4, 4])


def torchvision_resnet():
    import torchvision

    return torchvision.models.resnet18(num_classes=3)


def transformers_vit(attention="sdpa"):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return ViTForImageClassification(
        ViTConfig(image_size=32, patch_size=8, attn_implementation=attention, num_labels=3, **sizes)
    )


def ours(name, **options):
    return lambda: create_model(name, seed=0, **options)


def blocks(depth):
    return "stem" + " msa mlp" * depth


RESNET18 = "stem conv conv subsample conv subsample conv subsample conv"
CASES = {
    "vit": Case(
        ours("vit", image_size=(16, 8), patch_size=2, dim=12, depth=2, registers=4),
        (16, 8),
        blocks(2),
        (8, 4),
        5,
        {1: "blocks.0", 2: "blocks.0#2", 4: "blocks.1#2"},
    ),
    "vit_nano": Case(ours("vit_nano", image_size=8), (8, 8), blocks(4), (4, 4)),
    "convit": Case(
        ours("convit", image_size=16, dim=16, depth=3, gpsa_layers=2),
        (16, 16),
        blocks(3),
        (4, 4),
        [0] * 5 + [1] * 2,
        {1: "local_blocks.0", 5: "global_blocks.0"},
    ),
    "convmixer_nano": Case(
        ours("convmixer_nano", image_size=8),
        (8, 8),
        "stem" + " conv mlp" * 4,
        (8, 8),
        names={0: "stem.2", 1: "blocks.0", 2: "blocks.0.channel.2"},
    ),
    "resnet_nano": Case(
        ours("resnet_nano", image_size=8),
        (8, 8),
        "stem conv conv conv subsample conv conv",
        [(8, 8)] * 4 + [(4, 4)] * 3,
        names={0: "stem", 1: "stages.0.0", 4: "stages.1.0"},
    ),
    "alternet_nano": Case(
        ours("alternet_nano", image_size=8),
        (8, 8),
        "stem conv conv conv subsample conv msa",
        [(8, 8)] * 4 + [(4, 4)] * 3,
    ),
    "timm vit_tiny": Case(
        timm_model("vit_tiny_patch16_224", depth=2),
        (224, 224),
        blocks(2),
        (14, 14),
        1,
        {0: "pos_drop", 1: "blocks.0", 2: "blocks.0#2"},
    ),
    "timm registers": Case(
        timm_model("vit_small_patch16_224", depth=2, embed_dim=24, reg_tokens=4, img_size=64),
        (64, 64),
        blocks(2),
        (4, 4),
        5,
    ),
    "timm distilled": Case(
        timm_model("deit_tiny_distilled_patch16_224", depth=2, img_size=64), (64, 64), blocks(2), (4, 4), 2
    ),
    "timm not square": Case(
        timm_model("vit_tiny_patch16_224", depth=1, img_size=(224, 112)), (224, 112), blocks(1), (14, 7), 1
    ),
    "timm convit": Case(
        timm_model("convit_tiny", depth=3, local_up_to_layer=2),
        (224, 224),
        blocks(3),
        (14, 14),
        [0] * 5 + [1] * 2,
    ),
    "timm pit": Case(
        timm_model("pit_ti_224", depth=[1, 1, 1]),
        (224, 224),
        "stem msa mlp subsample msa mlp subsample msa mlp",
        [(27, 27)] * 3 + [(14, 14)] * 3 + [(7, 7)] * 3,
        1,
    ),
    "timm swin": Case(
        timm_model("swin_tiny_patch4_window7_224", depths=(2, 2), num_heads=(1, 2), embed_dim=8, img_size=112),
        (112, 112),
        blocks(2) + " subsample" + " msa mlp" * 2,
        [(28, 28)] * 5 + [(14, 14)] * 5,
    ),
    "timm resnet18": Case(
        timm_model("resnet18"),
        (64, 64),
        RESNET18,
        [(16, 16)] * 3 + [(8, 8)] * 2 + [(4, 4)] * 2 + [(2, 2)] * 2,
        names={0: "maxpool", 1: "layer1.0", 3: "layer2.0"},
    ),
    "timm convmixer": Case(timm_convmixer, (32, 32), "stem conv mlp conv mlp", (8, 8)),
    "timm mixer": Case(timm_mixer, (32, 32), "stem mlp mlp mlp mlp", (4, 4)),
    "torchvision vit": Case(torchvision_vit, (32, 32), blocks(2), (4, 4), 1),
    "torchvision swin": Case(
        torchvision_swin, (32, 32), blocks(2) + " subsample" + " msa mlp" * 2, [(8, 8)] * 5 + [(4, 4)] * 5
    ),
    "torchvision resnet18": Case(
        torchvision_resnet,
        (64, 64),
        RESNET18,
        [(16, 16)] * 3 + [(8, 8)] * 2 + [(4, 4)] * 2 + [(2, 2)] * 2,
    ),
    "transformers vit": Case(transformers_vit, (32, 32), blocks(2), (4, 4), 1),
    "post-norm": Case(lambda: PostNormEncoder(batch_first=True), (16, 16), blocks(2), (4, 4)),
    "post-norm, batch second": Case(lambda: PostNormEncoder(batch_first=False), (16, 16), blocks(2), (4, 4)),
    "in place, shared block": Case(
        InPlaceViT,
        (16, 16),
        blocks(2),
        (4, 4),
        names={1: "block", 2: "block#2", 3: "block#3", 4: "block#4"},
    ),
    "inner additions": Case(GatedBranches, (16, 16), "stem conv mlp", (16, 16)),
    "parallel branches": Case(ParallelBranches, (16, 16), "stem msa", (4, 4)),
    "pooling mixes": Case(PoolMixer, (16, 16), "stem conv mlp", (4, 4)),
    "position code in a module": Case(PositionModule, (16, 16), "stem mlp", (4, 4)),
    "no residuals": Case(
        plain_cnn,
        (16, 16),
        "stem subsample conv",
        [(16, 16), (8, 8), (8, 8)],
        names={0: "2", 1: "5", 2: "7"},
    ),
    "some residuals": Case(
        mobile_net,
        (16, 16),
        "stem conv subsample conv conv conv",
        [(16, 16)] * 2 + [(8, 8)] * 4,
        names={0: "0", 1: "1", 2: "2.branch.5", 3: "3", 4: "4.branch.5", 5: "5"},
    ),
}


def find(model, image, **options):
    torch.manual_seed(1)
    with untouched(model):
        return plan(model, torch.randn(2, 3, *image), **options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_units(case):
    torch.manual_seed(0)
    units = find(case.build(), case.image).units
    count = len(case.kinds.split())
    assert " ".join(unit.kind for unit in units) == case.kinds
    assert [unit.layout.grid for unit in units] == (case.grid if isinstance(case.grid, list) else [case.grid] * count)
    assert [unit.layout.prefix for unit in units] == (
        case.prefix if isinstance(case.prefix, list) else [case.prefix] * count
    )
    assert {index: units[index].name for index in case.names} == case.names
    assert len({unit.name for unit in units}) == count
    assert [unit.index for unit in units] == list(range(count))
    assert [unit.depth for unit in units] == pytest.approx([index / (count - 1) for index in range(count)])


def collect(model, x, **options):
    """Whole activations `(batch, token, channel)`, prefix first, of every unit, in one pass over two images."""
    found = find(model, tuple(x.shape[-2:]), **options)
    parts = [[] for _ in found.units]

    def keep(unit, activation):
        patches = activation.patches.flatten(1, 2)
        parts[unit.index].append(torch.cat([activation.prefix, patches], dim=1).clone())

    with untouched(model):
        Watch(model, found, on_unit=keep)(lambda net, batch: net(batch), model, x)
    return [torch.cat(part) for part in parts]


def recorded(model, x, *names):
    """Copies of what modules take and give, by hooks set by hand: `{name: (input, output)}`."""
    seen = {}

    def hook(name):
        def note(module, args, output):
            seen[name] = (taken.pop(name), output.clone())

        return note

    taken = {}
    modules = dict(model.named_modules())
    handles = []
    for name in names:

        def note_input(module, args, name=name):
            taken[name] = args[0].clone()

        handles += [
            modules[name].register_forward_pre_hook(note_input),
            modules[name].register_forward_hook(hook(name)),
        ]
    model.eval()
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def test_activations_of_a_vit_are_those_of_hooks_bit_for_bit():
    torch.manual_seed(0)
    model = timm_model("vit_tiny_patch16_224", depth=2, img_size=64, embed_dim=24, init_values=0.5)()
    x = torch.randn(2, 3, 64, 64)
    activations = collect(model, x)
    seen = recorded(model, x, "blocks.0", "blocks.1", "blocks.0.ls1", "blocks.1.ls1")
    assert torch.equal(activations[0], seen["blocks.0"][0])
    for block in (0, 1):
        into, out = seen[f"blocks.{block}"]
        assert torch.equal(activations[1 + 2 * block], into + seen[f"blocks.{block}.ls1"][1])
        assert torch.equal(activations[2 + 2 * block], out)


def test_activations_of_a_resnet_are_those_of_hooks_bit_for_bit():
    torch.manual_seed(0)
    model = torchvision_resnet()
    x = torch.randn(2, 3, 32, 32)
    activations = collect(model, x)
    # The sum before the ReLU, which torchvision applies in place to the very tensor that was added to.
    names = [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in (0, 1)]
    seen = recorded(model, x, *names, *(f"{name}.bn2" for name in names), "layer2.0.downsample", "layer3.0.downsample")
    assert len(activations) == 7
    for index, name in enumerate(names, start=1):
        skip = seen[f"{name}.downsample"][1] if f"{name}.downsample" in seen else seen[name][0]
        added = seen[f"{name}.bn2"][1] + skip
        assert bool((added < 0).any())
        assert torch.equal(activations[index], added.flatten(2).transpose(1, 2)), name


def test_activations_with_the_batch_on_the_second_axis():
    torch.manual_seed(0)
    model = PostNormEncoder(batch_first=False)
    x = torch.randn(2, 3, 16, 16)
    activations = collect(model, x)
    model.eval()
    with torch.no_grad():
        tokens = model.embed(x).flatten(2).transpose(1, 2)
        assert torch.equal(activations[0], tokens)
        y = tokens.transpose(0, 1)
        layer = model.encoder.layers[0]
        added = y + layer.self_attn(y, y, y)[0]
    torch.testing.assert_close(activations[1], added.transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.permute(0, 2, 3, 1),
        lambda x: x.movedim(1, -1),
        lambda x: x.flatten(2).transpose(1, 2).reshape(-1, 4, 4, 4),
        lambda x: rearrange(x, "b c h w -> b h w c").contiguous(),
    ],
    ids=["permute", "movedim", "reshape", "einops"],
)
def test_channels_last_where_the_shape_fits_both_ways(move):
    torch.manual_seed(0)
    model = ChannelsLast(move)
    x = torch.randn(2, 3, 16, 16)
    assert [unit.layout.axes for unit in find(model, (16, 16)).units] == ["bhwc", "bhwc", "bchw"]
    activations = collect(model, x)
    with torch.no_grad():
        first = model.stem(x).permute(0, 2, 3, 1)
        second = first + model.mlp(model.norm(first))
        third = second + model.back(second.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    for activation, expected in zip(activations, (first, second, third), strict=True):
        torch.testing.assert_close(activation, expected.flatten(1, 2))


@pytest.mark.parametrize(
    ("build", "image", "streams"),
    [
        (ours("resnet_nano", image_size=8), 8, [0, 0, 0, 0, 0, 0]),
        (torchvision_resnet, 64, [1] * 8),  # `branch += skip`
        (transformers_vit, 32, [1, 1, 1, 1]),
        (ParallelBranches, 16, [0]),  # the skip and the first branch come together in the left operand
        (InPlaceViT, 16, [0, 0, 0, 0]),
    ],
)
def test_which_operand_is_the_stream(build, image, streams):
    units = find(build(), (image, image)).units
    assert units[0].stream is None
    assert [unit.stream for unit in units[1:]] == streams


def test_a_sum_that_a_network_begins_with_is_its_stem():
    class TwoStems(nn.Module):
        def __init__(self):
            super().__init__()
            self.coarse, self.fine, self.deep = (nn.Conv2d(3, 3, k, padding=k // 2) for k in (5, 3, 3))

        def forward(self, x):
            x = self.coarse(x) + self.fine(x)
            return (x + self.deep(x)).mean((2, 3))

    model = TwoStems()
    activations = collect(model, x := torch.randn(2, 3, 8, 8))
    with torch.no_grad():
        torch.testing.assert_close(activations[0], (model.coarse(x) + model.fine(x)).flatten(2).transpose(1, 2))
    assert [unit.kind for unit in find(model, (8, 8)).units] == ["stem", "conv"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_scripted_layer_does_not_cut_the_stream():
    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 3)
            self.act = torch.jit.script(nn.Sequential(nn.BatchNorm2d(8), nn.SiLU()))

        def forward(self, x):
            x = self.act(self.stem(x))
            x = x + self.conv(self.act(x))
            return self.head(x.mean((2, 3)))

    assert [unit.kind for unit in find(Scripted(), (8, 8)).units] == ["stem", "conv"]


def test_patterns_take_module_outputs_part_by_part():
    model = create_model("vit_nano", image_size=8, seed=0)
    found = find(model, (8, 8), layers=["blocks.*", "blocks.[02].attention"])
    assert [unit.name for unit in found.units] == [
        *("blocks.0.attention", "blocks.0", "blocks.1"),
        *("blocks.2.attention", "blocks.2", "blocks.3"),
    ]
    assert {unit.kind for unit in found.units} == {"module"}
    # The attention maps are those of the whole network, at the depth of its residual units.
    assert [site.depth for site in found.attentions] == pytest.approx([1 / 8, 3 / 8, 5 / 8, 7 / 8])
    activations = collect(model, x := torch.randn(2, 3, 8, 8), layers="blocks.*")
    seen = recorded(model, x, *(f"blocks.{i}" for i in range(4)))
    for i in range(4):
        assert torch.equal(activations[i], seen[f"blocks.{i}"][1])


def test_pattern_of_a_module_that_is_used_again():
    model = InPlaceViT()
    assert [unit.name for unit in find(model, (16, 16), layers="block").units] == ["block", "block#2"]


def test_pattern_that_matches_no_image_says_so():
    found = find(TinyMHA(), (16, 16), layers=["embed", "head"])
    assert [unit.name for unit in found.units] == ["embed"]
    assert "head: an output of shape (2, 5) is no image" in found.skipped


def test_unmatched_pattern_names_the_modules():
    with pytest.raises(ValueError, match=r"no module .* matches layers='block\.\*'; it has embed, attention, .*head"):
        find(TinyMHA(), (16, 16), layers=["embed", "block.*"])


class Branch(nn.Module):
    """One residual branch over a 4x4 grid of patches, between two MLPs."""

    def __init__(self, mix):
        super().__init__()
        self.embed, self.mlp, self.head = nn.Conv2d(3, 12, 4, 4), nn.Linear(12, 12), nn.Linear(12, 3)
        self.recurrent = nn.ModuleDict({
            "lstm": nn.LSTM(12, 6, bidirectional=True, batch_first=True),
            "gru": nn.GRU(12, 12, batch_first=True),
        })
        self.mix = mix

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.mlp(x)
        x = x + self.mlp(self.mix(self, x))
        return self.head((x + self.mlp(x)).mean(1))


def fourier_filter(model, x):
    spectrum = torch.fft.rfft2(x.unflatten(1, (4, 4)), dim=(1, 2))
    return torch.fft.irfft2(spectrum * torch.rand(4, 3, 12), s=(4, 4), dim=(1, 2)).flatten(1, 2)


@pytest.mark.parametrize(
    "mix",
    [
        fourier_filter,
        lambda model, x: torch.fft.fft(x, dim=1).real,
        lambda model, x: model.recurrent["lstm"](x)[0],
        lambda model, x: model.recurrent["gru"](x)[0],
        lambda model, x: x.cumsum(1) / 16,
        lambda model, x: torch.roll(x.unflatten(1, (4, 4)), (1, -1), (1, 2)).flatten(1, 2),
    ],
    ids=["global filter", "Fourier transform", "LSTM", "GRU", "cumulative sum", "shift"],
)
def test_what_mixes_positions_without_a_kernel_is_no_mlp(mix):
    found = find(Branch(mix), (16, 16))
    assert [unit.kind for unit in found.units] == ["stem", "mlp", "conv", "mlp"]
    assert {unit.layout.grid for unit in found.units} == {(4, 4)}


class UShaped(nn.Module):
    """An encoder and a decoder of convolutions with a connection around both, residual blocks inside or not."""

    def __init__(self, residual):
        super().__init__()
        self.residual = residual
        self.stem, self.down, self.up = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 8, 2, 2)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.join, self.head = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 2, 1)

    def block(self, index, x):
        y = self.blocks[index](x).relu()
        return x + y if self.residual else y

    def forward(self, x):
        around = self.block(0, self.stem(x))
        x = self.block(2, self.block(1, self.down(around)))
        return self.head(self.join(torch.cat([self.up(x), around], 1)))


@pytest.mark.parametrize(("residual", "inside"), [(True, "2 residual branches"), (False, "4 convolutions in a row")])
def test_what_lies_inside_of_one_unit_is_told(residual, inside):
    found = find(UShaped(residual), (16, 16))
    (told,) = found.skipped
    assert f"one unit with {inside} inside, since something leads around them" in told
    assert told.split(":")[0] in [unit.name for unit in found.units]


def test_one_convolution_outside_is_told():
    class TwoOutputs(nn.Module):
        """A residual network of two heads, before one of which there is one more convolution."""

        def __init__(self):
            super().__init__()
            self.stem, self.block, self.more = (nn.Conv2d(k, 8, 3, padding=1) for k in (3, 8, 8))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            x = self.stem(x)
            x = x + self.block(x)
            return self.head(x.mean((2, 3))) + self.head(self.more(x).mean((2, 3)))

    (told,) = find(TwoOutputs(), (16, 16)).skipped
    assert told.startswith("1 convolutions and attentions after TwoOutputs are in no unit")


class Stages(nn.Module):
    """Gives the features of each of its stages, as backbones do."""

    def __init__(self, give):
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv2d(k, 8, 3, 2, 1) for k in (3, 8, 8))
        self.give = give

    def forward(self, x):
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return self.give(features)


@pytest.mark.parametrize("give", [list, tuple, lambda features: dict(enumerate(features))])
def test_features_of_which_the_first_was_taken(give):
    found = find(Stages(give), (16, 16))
    assert found.skipped[0] == (
        "of the 3 tensors that the model returned, one of shape (2, 8, 8, 8) was taken for its output, and layers that "
        "lead to others alone are in no unit: forward=lambda m, b: m(b)[-1] takes the last"
    )
    whole = find(Stages(list), (16, 16), forward=lambda m, b: m(b)[-1])
    assert len(whole.units) == 3 > len(found.units) and whole.skipped == ()
