"""Networks of timm and torchvision: found by name, sized for the images, with the papers' settings for CIFAR."""

import copy
from itertools import pairwise

import pytest
import timm
import torch
import torchvision

from vitprobe.data import ImageData, Split
from vitprobe.models import create_model, describe_model, model_cost
from vitprobe.probes import feature_variance
from vitprobe.training import Recipe, fit, load_snapshot
from vitprobe.training.switches import set_stochastic_depth

BASELINES = ("deit_ti", "deit_s", "deit_b", "pit_ti", "swin_ti", "twins_s", "levit_128s")
SMALL_STAGES = ("pit_nano", "swin_nano", "pit_micro", "swin_micro")


def parameters(name, **options):
    with torch.device("meta"):
        model = create_model(name, **{"num_classes": 100, **options})
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "published", "more"),
    [
        # Park & Kim 2022, CIFAR-100 [million parameters], and what timm has more: biases on query, key and value ...
        ("pit_ti", 4.577, 3 * (2 * 64 + 6 * 128 + 4 * 256)),
        ("deit_ti", 5.403, 12 * 3 * 192),
        ("deit_s", 21.42, 12 * 3 * 384),
        ("deit_b", 85.31, 12 * 3 * 768),
        # ... and in Swin a table of 7x7 biases per head, not per block, norms after the patches and in each merging
        # instead of a bias.
        (
            "swin_ti",
            27.55,
            3 * (2 * 96 + 2 * 192 + 6 * 384 + 2 * 768)
            + 49 * (2 * 3 + 2 * 6 + 6 * 12 + 2 * 24 - 12)
            + 2 * 96
            + sum(2 * 4 * dim - 2 * dim for dim in (96, 192, 384)),
        ),
    ],
)
def test_parameter_counts_of_the_papers(name, published, more):
    decimals = len(str(published).partition(".")[2])
    assert (parameters(name) - more) / 1e6 == pytest.approx(published, abs=0.51 * 10**-decimals)


def test_parameter_counts_of_the_docstrings():
    assert parameters("deit_ti") - parameters("vit_ti", patch_size=2) == 7_104
    assert parameters("pit_ti") == 4_582_436
    assert parameters("swin_ti") == 27_575_374
    # Graham et al. 2021, with two classifiers of 1000 classes: 7.8 M; Chu et al. 2021: 24 M.
    assert parameters("levit_128s", num_classes=1000, distilled=True) / 1e6 == pytest.approx(7.8, abs=0.05)
    published = parameters("twins_s", num_classes=1000, image_size=224, patch_size=4, window_size=7)
    assert published / 1e6 == pytest.approx(24, abs=0.5)


def of_blocks(dims, depths):
    """Parameters of blocks with two norms, biased attention and an MLP of twice the width."""
    return sum(depth * (8 * dim**2 + 11 * dim) for dim, depth in zip(dims, depths, strict=True))


def of_pit(dims, depths, patch, channels, tokens, classes):
    """A PiT: patches, positions and class token, poolings of 3x3 places, the last norm, the classifier."""
    embedding = (channels * patch**2 + 1 + tokens + 1) * dims[0]
    pooling = sum(9 * to + to + (before + 1) * to for before, to in pairwise(dims))
    return embedding + of_blocks(dims, depths) + pooling + 2 * dims[-1] + (dims[-1] + 1) * classes


def of_swin(dims, depths, heads, patch, channels, classes):
    """A Swin of windows of 4: patches and their norm, tables of biases, mergings, the last norm, the classifier."""
    embedding = (channels * patch**2 + 1 + 2) * dims[0]
    tables = sum(depth * 7 * 7 * each for depth, each in zip(depths, heads, strict=True))
    merging = sum(4 * before * to + 2 * 4 * before for before, to in pairwise(dims))
    return embedding + of_blocks(dims, depths) + tables + merging + 2 * dims[-1] + (dims[-1] + 1) * classes


def test_parameter_counts_of_the_small_stages():
    digits = dict(image_size=8, channels=1, num_classes=10)
    assert parameters("pit_nano", **digits) == of_pit((32, 64), (2, 2), 2, 1, 7 * 7, 10)
    assert parameters("swin_nano", **digits) == of_swin((32, 64), (2, 2), (2, 4), 1, 1, 10)
    wide, deep = (32, 64, 128), (2, 2, 2)
    assert parameters("pit_micro", num_classes=10) == of_pit(wide, deep, 4, 3, 15 * 15, 10)
    assert parameters("swin_micro", num_classes=10) == of_swin(wide, deep, (2, 4, 8), 2, 3, 10)


@pytest.mark.parametrize("name", SMALL_STAGES)
def test_small_stages_cost_what_the_vit_of_their_size_costs(name):
    size = 8 if name.endswith("_nano") else 32
    vit = model_cost(f"vit_{name.partition('_')[2]}", image_size=size).multiply_adds
    assert 0.5 * vit < model_cost(name, image_size=size).multiply_adds < 2 * vit


@pytest.mark.parametrize(
    ("name", "sides"),
    [("pit_nano", (7, 4)), ("swin_nano", (8, 4)), ("pit_micro", (15, 8, 4)), ("swin_micro", (16, 8, 4))],
)
def test_units_and_stages_of_the_small_stages(name, sides):
    size, channels = (8, 1) if name.endswith("_nano") else (32, 3)
    model = create_model(name, image_size=size, channels=channels, seed=0)
    found = feature_variance(model, torch.randn(4, channels, size, size), progress=False)
    assert " ".join(found.kind.values) == "stem " + " subsample ".join(["msa mlp msa mlp"] * len(sides))
    assert found.grid_h.values.tolist() == found.grid_w.values.tolist() == [side for side in sides for _ in range(5)]


@pytest.mark.parametrize("name", SMALL_STAGES)
def test_small_stages_train_and_their_snapshots_restore(name, tmp_path):
    size, channels = (8, 1) if name.endswith("_nano") else (32, 3)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8, channels, size, size), generator=generator, dtype=torch.uint8)
    split = Split(images, torch.arange(8) % 2)
    half = (0.5,) * channels
    data = ImageData(spec="noise", name="noise", train=split, test=split, class_names=("a", "b"), mean=half, std=half)
    model = create_model(name, image_size=size, channels=channels, num_classes=2, seed=0)
    before = copy.deepcopy(model.state_dict())
    recipe = Recipe(epochs=1, batch_size=8, warmup_epochs=0, weight_decay=0.0, channels_last=True, snapshots=(0, 1))
    fit(model, data, recipe, folder=tmp_path, device="cpu", progress=False)
    after = copy.deepcopy(model.state_dict())
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert set(moved) == {key for key, _ in model.named_parameters()}  # one step of the optimizer moves them all
    for epoch, weights in ((0, before), (1, after)):
        load_snapshot(model, tmp_path, epoch)
        assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", BASELINES)
def test_published_networks_are_timms_own(name):
    """At the published settings, the weights of timm's model of that name fit."""
    published = {
        "deit_ti": ("deit_tiny_patch16_224", dict(patch_size=16)),
        "deit_s": ("deit_small_patch16_224", dict(patch_size=16)),
        "deit_b": ("deit_base_patch16_224", dict(patch_size=16)),
        "pit_ti": ("pit_ti_224", dict(patch_size=16, stride=8)),
        "swin_ti": ("swin_tiny_patch4_window7_224", dict(patch_size=4, window_size=7)),
        "twins_s": ("twins_svt_small", dict(patch_size=4, window_size=7)),
        "levit_128s": ("levit_128s", dict(stem_stride=16, distilled=True)),
    }
    their_name, options = published[name]
    with torch.device("meta"):
        theirs, ours = timm.create_model(their_name), create_model(name, image_size=224, num_classes=1000, **options)
    shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (theirs, ours)]
    assert shapes[0] == shapes[1]


def grids(model, x, kind):
    """Height and width of what goes into every module of a class."""
    found = []
    for module in model.modules():
        if type(module).__name__ == kind:
            module.register_forward_pre_hook(lambda _, args: found.append(tuple(args[0].shape[1:-1])))
    with torch.no_grad():
        model.eval()(x)
    return list(dict.fromkeys(found))


def test_maps_of_the_baselines():
    x = torch.randn(1, 3, 32, 32)
    small = dict(depth=(1, 1, 1), base_dims=(4, 4, 4), heads=(1, 1, 1), seed=0)
    assert grids(create_model("pit_ti", **small), x, "Attention") == [(31 * 31 + 1,), (16 * 16 + 1,), (8 * 8 + 1,)]
    swin = create_model("swin_ti", embed_dim=8, depths=(1,) * 4, num_heads=(1,) * 4)
    assert grids(swin, x, "SwinTransformerBlock") == [(32, 32), (16, 16), (8, 8), (4, 4)]
    assert grids(swin, x, "WindowAttention") == [(16,)]
    twins = create_model("twins_s", embed_dims=(8,) * 4, depths=(1,) * 4, num_heads=(1,) * 4)
    assert grids(twins, x, "LocallyGroupedAttn") == [(32 * 32,), (16 * 16,), (8 * 8,), (4 * 4,)]
    assert {module.ws for module in twins.modules() if type(module).__name__ == "LocallyGroupedAttn"} == {4}
    levit = create_model("levit_128s", embed_dim=(16, 16, 16), depth=(1, 1, 1), num_heads=(1, 1, 1))
    assert [getattr(levit.stem, f"conv{i}").linear.stride[0] for i in range(1, 5)] == [1, 1, 1, 2]
    assert grids(levit, x, "Attention") == [(16 * 16,), (8 * 8,), (4 * 4,)]
    assert grids(create_model("levit_128s", stem_stride=16), x, "Attention") == [(4,), (1,)]


def tiny(name, **options):
    small = {
        "deit": dict(embed_dim=24, depth=3, num_heads=3, patch_size=4),
        "pit_": dict(base_dims=(4, 4, 4), depth=(1, 2, 1), heads=(1, 1, 1), stride=2),
        "swin": dict(embed_dim=8, depths=(1, 1, 2, 1), num_heads=(1,) * 4),
        "twin": dict(embed_dims=(8,) * 4, depths=(1, 1, 2, 1), num_heads=(1,) * 4),
        "levi": dict(embed_dim=(16, 16, 16), depth=(1, 2, 1), num_heads=(1, 1, 1)),
    }
    return create_model(name, **{"seed": 0, **small[name[:4]], **options})


@pytest.mark.parametrize("name", BASELINES)
def test_stochastic_depth_waits_for_a_recipe(name):
    model = tiny(name).train()
    rates = [module.drop_prob for module in model.modules() if type(module).__name__ == "DropPath"]
    assert len(rates) > 2 and set(rates) == {0.0}
    set_stochastic_depth(model, 0.3)
    rates = [module.drop_prob for module in model.modules() if type(module).__name__ == "DropPath"]
    assert rates[0] == 0.0 and rates[-1] == 0.3
    given = tiny(name, drop_path_rate=0.2)
    rates = [module.drop_prob for module in given.modules() if type(module).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.2)


@pytest.mark.parametrize("name", [*BASELINES, "timm:resnet10t", "torchvision:squeezenet1_1"])
def test_seed_alone_decides_the_weights(name):
    build = tiny if name in BASELINES else create_model

    def weights(seed, global_seed):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        state = build(name, seed=seed).state_dict()
        assert torch.equal(before, torch.get_rng_state())
        return state

    first, again, other = weights(3, 0), weights(3, 1), weights(4, 0)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["levit_128s", "timm:tiny_vit_5m_224"])
def test_weights_loaded_after_an_evaluation_are_seen(name):
    """timm keeps attention biases of the first evaluation."""
    options = dict(seed=0) if name == "levit_128s" else dict(image_size=64, seed=0)
    build = tiny if name == "levit_128s" else create_model
    model = build(name, **options).eval()
    side = options.get("image_size", 32)
    x = torch.randn(2, 3, side, side)
    with torch.no_grad():
        before = model(x)
        state = model.state_dict()
        biases = [key for key in state if key.endswith("attention_biases")]
        assert biases
        changed = {**state, **{key: 5 * torch.randn_like(state[key]) for key in biases}}
        moved = torch.func.functional_call(model, changed, (x,))
        model.load_state_dict(changed)
        fresh = build(name, **options).eval()
        fresh.load_state_dict(changed)
        assert (before - fresh(x)).abs().max() > 1e-2 * before.abs().max()
        assert torch.equal(model(x), fresh(x))
        assert torch.equal(moved, fresh(x))
        assert torch.equal(copy.deepcopy(model)(x), fresh(x))


@pytest.mark.parametrize(
    ("name", "settings", "shape"),
    [
        ("timm:vit_tiny_patch16_224", dict(image_size=(32, 48), patch_size=8, channels=1), (1, 32, 48)),
        ("timm:resnet10t", dict(image_size=(64, 32), channels=4, drop_path_rate=0.1), (4, 64, 32)),
        ("timm:mixer_s32_224", dict(image_size=64), (3, 64, 64)),
        ("timm:vit_tiny_patch16_224.augreg_in21k", dict(image_size=64), (3, 64, 64)),
        ("torchvision:resnet18", dict(image_size=(40, 32)), (3, 40, 32)),
        ("torchvision:vit_b_16", dict(image_size=64), (3, 64, 64)),
        ("torchvision:swin_t", dict(image_size=(64, 96), dropout=0.1), (3, 64, 96)),
        ("torchvision:maxvit_t", dict(image_size=224), (3, 224, 224)),
    ],
)
def test_any_model_at_the_size_of_the_images(name, settings, shape):
    with torch.device("meta"):
        model = create_model(name, num_classes=7, **settings).eval()
        assert model(torch.empty(2, *shape)).shape == (2, 7)
    assert describe_model(name) == f"{name.partition(':')[2]} of {name.partition(':')[0]}."


def test_torchvisions_weights_are_torchvisions():
    ours = create_model("torchvision:resnet18", seed=0).eval()
    theirs = torchvision.models.resnet18(num_classes=10).eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("timm:vit_tinny_patch16_224", {}, "unknown timm model 'vit_tinny_patch16_224'. Did you mean 'vit_tiny"),
        ("torchvision:resnet19", {}, "unknown torchvision model 'resnet19'. Did you mean 'resnet18'"),
        ("torchvision:fcn_resnet50", {}, "unknown torchvision model"),  # segments, does not classify
        ("tim:vit_tiny_patch16_224", {}, "unknown library 'tim'. Did you mean 'timm'"),
        ("torchvision:resnet18", dict(channels=1), "take 3 channels, not 1: timm:NAME takes any number"),
        ("torchvision:vit_b_16", dict(image_size=(32, 64)), "square images, not 32x64"),
        ("levit_128s", dict(stem_stride=3), "stem_stride=3: the stem's convolutions give 2, 4, 8 or 16"),
        ("levit_128s", dict(image_size=30, stem_stride=4), "stem_stride=4 does not divide an image of 30x30 pixels"),
    ],
)
def test_wrong_names_and_settings_say_what_is_right(name, settings, words):
    with pytest.raises(ValueError) as error:
        create_model(name, **settings)
    assert words in str(error.value)


def test_options_of_timm_reach_timm():
    with pytest.raises(TypeError, match="no_such_option"):
        create_model("deit_ti", no_such_option=1)
    assert tiny("deit_ti", global_pool="avg", class_token=False).num_prefix_tokens == 0
