import inspect

import numpy as np
import pytest
import torch
from torch import nn

from vitprobe.cli import main
from vitprobe.models import create_model, list_models, model_cost, register, registry, variant
from vitprobe.models.registry import SIZES, _constructor


def test_seed_leaves_other_devices_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeds every GPU"))
    create_model("resnet_nano", seed=0)


def test_without_a_seed_the_global_state_decides():
    def weights(global_seed):
        torch.manual_seed(global_seed)
        return create_model("resnet_nano").stem.weight

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"unknown model 'vit_tii'\. Did you mean 'vit_ti'.*Known: alternet, "):
        create_model("vit_tii")


def test_unknown_option_lists_the_known():
    with pytest.raises(TypeError, match=r"'vit_ti' takes no option 'patch'; it takes .*patch_size"):
        create_model("vit_ti", patch=4)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("vit_micro", dict(patch_size=5), "patch_size=5 does not divide an image of 32x32 pixels; use patch_size=4"),
        ("vit_micro", dict(image_size=(32, 12), patch_size=8), "an image of 32x12 pixels; use patch_size=4"),
        ("convit_micro", dict(patch_size=33), "use patch_size=32"),
        ("convmixer_micro", dict(patch_size=0), "use patch_size=1"),
        ("convmixer_micro", dict(kernel_size=4), "kernel_size=4 has no middle: use 5"),
        ("vit_micro", dict(heads=5), "heads=5 does not divide dim=64; use heads=4"),
        ("convit_micro", dict(heads=0), "heads=0 does not divide dim=64; use heads=1"),
        ("vit_micro", dict(pool="avg"), "pool is 'class' (a class token) or 'mean'"),
        ("convit_micro", dict(pool="avg"), "pool is 'class' (a class token) or 'mean'"),
        ("vit_micro", dict(position="sine"), "position is 'learned', 'sincos' or 'none', not 'sine'"),
        ("vit_micro", dict(position="sincos", dim=90), "multiple of 4 and at least 8, not 90"),
        ("convit_micro", dict(gpsa_layers=7), "gpsa_layers=7 of 6 blocks: use 0 to 6"),
        ("convit_micro", dict(centers="figure"), "centers is 'code' or 'paper', not 'figure'"),
        ("resnet_micro", dict(blocks=(3, 3)), "need one entry per stage"),
        ("alternet_micro", dict(heads=(1, 2)), "need one entry per stage"),
        ("alternet_micro", dict(attentions=(0, 2, 1)), "a stage of 2 blocks takes at most 1"),
        ("alternet_micro", dict(window=5), "window=5 does not divide maps of 16x16, 8x8; use window=4"),
        ("alternet_micro", dict(image_size=24), "window=4 does not divide maps of 12x12, 6x6; use window=3"),
        ("resnet", dict(blocks=(2, 0, 2, 2)), "every stage has at least 1 block"),
        ("resnet", dict(stem="small"), "stem is 'cifar' (3x3) or 'imagenet'"),
        ("resnet", dict(smoothing="gauss"), "smoothing is 'none', 'box' (keeps the grid), 'blur'"),
        ("resnet", dict(groups=2), "for groups use bottleneck=4"),
        ("resnet_micro", dict(image_size=0), "one positive integer or (height, width), not 0"),
        ("resnet_micro", dict(image_size=(32,)), "one positive integer or (height, width), not (32,)"),
        ("resnet_micro", dict(image_size=32.0), "one positive integer or (height, width), not 32.0"),
    ],
)
def test_wrong_settings_name_the_right_ones(name, settings, words):
    with pytest.raises(ValueError) as error:
        create_model(name, **settings)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("vit_nano", 16, "built for images of 8x8 pixels and got 16x16: build it with image_size=(16, 16)"),
        ("convit_nano", 16, "built for images of 8x8 pixels and got 16x16: build it with image_size=(16, 16)"),
        ("alternet_nano", 12, "window=4 does not divide a map of 6x6; use window=3"),
    ],
)
def test_wrong_image_size_at_forward(name, size, words):
    with pytest.raises(ValueError) as error:
        create_model(name, image_size=8)(torch.zeros(1, 3, size, size))
    assert words in str(error.value)


def test_own_networks_register(monkeypatch):
    monkeypatch.setattr(registry, "_CONSTRUCTORS", dict(registry._CONSTRUCTORS))

    @register
    def borrowed(*, image_size, channels, num_classes, **options):
        """A network of another library."""
        return nn.Linear(channels, num_classes, **options)

    assert "borrowed" in list_models()
    assert create_model("borrowed", bias=False).bias is None
    assert register(borrowed) is borrowed  # its module, loaded anew
    borrowed.__module__ = "elsewhere"
    monkeypatch.setitem(registry._CONSTRUCTORS, "borrowed", create_model)
    with pytest.raises(ValueError, match="'borrowed' is registered already"):
        register(borrowed)


def test_a_size_that_a_variant_sets_is_its_default(monkeypatch):
    monkeypatch.setattr(registry, "_CONSTRUCTORS", dict(registry._CONSTRUCTORS))

    @register
    def sized(*, image_size, channels, num_classes):
        """A network that knows its images."""
        return nn.Linear(image_size[0], image_size[1])

    @variant(sized, image_size=(5, 7))
    def oblong():
        """For images of 5x7 pixels."""

    @variant(oblong)
    def oblong_too():
        """For images of 5x7 pixels, too."""

    shapes = [create_model(name).weight.shape for name in ("sized", "oblong", "oblong_too")]
    assert shapes == [(32, 32), (7, 5), (7, 5)]
    assert create_model("oblong_too", image_size=4).weight.shape == (4, 4)


def multiply_adds_by_hooks(model, x):
    """Outputs times inputs of each output, in every convolution and linear layer of one pass."""
    total = 0

    def count(module, args, out):
        nonlocal total
        per_output = module.weight[0].numel()
        total += out.numel() * per_output

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    model.eval()(x)
    return total


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {}),
        ("resnext50", dict(image_size=(32, 64), num_classes=100)),
        ("preact_resnet50", dict(stem="imagenet", image_size=64)),
        ("convmixer_micro", dict(channels=1)),
        ("mixer_micro", dict(num_classes=7)),
    ],
)
def test_cost_of_networks_without_attention(name, options):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    cost = model_cost(name, **options)
    assert torch.equal(before, torch.get_rng_state())
    model = create_model(name, **options)
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    x = torch.zeros(1, options.get("channels", 3), *cost.image_size)
    assert cost.multiply_adds == multiply_adds_by_hooks(model, x)


@pytest.mark.parametrize("name", ["vit_ti", "deit_ti"])
def test_cost_of_attention_by_hand(name):
    patches, dim, classes = 16 * 16, 192, 10
    tokens = patches + 1
    block = 4 * tokens * dim**2 + 2 * tokens**2 * dim + 8 * tokens * dim**2
    expected = patches * 12 * dim + 12 * block + dim * classes
    assert model_cost(name, patch_size=2).multiply_adds == expected


def test_cost_of_attention_in_windows_by_hand():
    """`alternet_nano` on 8x8 pixels: one attention block on a map of 4x4."""
    with_attention = model_cost("alternet_nano", image_size=8).multiply_adds
    without = model_cost("alternet_nano", image_size=8, attentions=(0, 0)).multiply_adds
    tokens, dim, inner = 16, 32, 2 * 16
    attention = tokens * dim * dim + 3 * tokens * dim * inner + 2 * tokens**2 * inner + tokens * inner * dim
    assert with_attention - without == attention - 2 * tokens * 9 * dim**2


def test_cost_of_dense_filters():
    """One matrix product over all patches per channel where a depthwise convolution was."""
    options = dict(image_size=16, dim=8, depth=3, patch_size=4)
    learned, dense = (model_cost("convmixer", **options, filters=kind) for kind in ("learned", "permutation"))
    assert dense.multiply_adds - learned.multiply_adds == 3 * 8 * 16 * (16 - 25)
    assert learned.parameters - dense.parameters == 3 * 8 * 26  # frozen filters are no parameters


def test_list_with_costs(monkeypatch, capsys):
    monkeypatch.setattr("vitprobe.models.list_models", lambda: ["vit_nano", "vit_ti", "alternet50_imagenet"])
    assert main(["list", "models", "-v"]) == 0
    title, legend, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("models") and "multiply-adds" in legend and "10 classes" in legend
    assert [row.split()[:4] for row in rows] == [
        ["vit_nano", "8x8", "0.077", "M"],
        ["vit_ti", "32x32", "5.356", "M"],
        ["alternet50_imagenet", "224x224", "33.887", "M"],
    ]
    assert rows[1].split()[4:6] == [f"{model_cost('vit_ti').multiply_adds / 1e6:.1f}", "M"]


def test_list_of_one_kind(capsys):
    for kind, known in (("models", "vit_ti"), ("probes", "fourier"), ("data", "cifar10"), ("studies", "park_kim")):
        assert main(["list", kind]) == 0
        out = capsys.readouterr().out
        assert out.startswith(kind) and known in out and "multiply-adds" not in out
        assert len([line for line in out.splitlines() if not line.startswith("  ")]) == 1
    assert main(["list", "network"]) == 2
    assert "unknown list 'network'" in capsys.readouterr().err


@pytest.mark.parametrize("name", list_models())
def test_a_network_of_no_size_is_bad_input(name):
    taken = inspect.signature(_constructor(name)).parameters
    for option in sorted(SIZES & taken.keys()):
        if taken[option].annotation is not int:
            continue
        for value, problem in (
            (0, ValueError),
            (-3, ValueError),
            (2.5, ValueError),
            (True, TypeError),
            ("8", TypeError),
        ):
            with pytest.raises(problem, match=rf"whole number of at least 1 for {option}, not {value!r}"):
                create_model(name, **{option: value})


def test_sizes_of_numpy_are_whole_numbers():
    model = create_model("vit_nano", image_size=8, depth=np.int64(1), num_classes=np.int64(4))
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 4)


def test_a_network_that_cannot_be_built_is_bad_input():
    with pytest.raises(ValueError, match=r"model 'convit_nano' cannot be built with heads=-1"):
        create_model("convit_nano", image_size=8, heads=-1)
    with pytest.raises(ValueError, match=r"mlp_ratio=0 leaves the MLP of 48 channels no hidden unit"):
        create_model("vit_nano", image_size=8, mlp_ratio=0)
    with pytest.raises(ValueError, match=r"widths=\(0, 8\): every stage has at least 1 channel"):
        create_model("resnet_nano", image_size=8, widths=(0, 8))
