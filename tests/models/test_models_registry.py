import copy
import io
from functools import cache

import pytest
import torch
from torch import nn

from vitprobe.models import create_model, describe_model, list_models, register, registry

# Every model is tested as registered, but for those that are too big for that.
TRANSFORMER = dict(dim=24, depth=2)
CONVIT = dict(dim=16, depth=3, gpsa_layers=2)
RESNET = dict(widths=(8, 16), blocks=(1, 2))
ALTERNET = dict(widths=(16, 32), blocks=(1, 2), attentions=(0, 1), heads=(1, 2), head_dim=4)
SMALL = {
    "vit": TRANSFORMER,
    "vit_ti": TRANSFORMER,
    "vit_s": TRANSFORMER,
    "convit": CONVIT,
    "convit_ti": CONVIT,
    "convmixer": dict(dim=8, depth=2),
    "preact_resnet": RESNET,
    "preact_resnet18": RESNET,
    "preact_resnet50": RESNET,
    "alternet": ALTERNET,
    "alternet50": ALTERNET,
}
every_model = pytest.mark.parametrize("name", list_models())


def side(name):
    return 8 if name.endswith("_nano") else 32


def oblong(name):
    """A size that is not square; AlterNet's windows of 4 have to divide the half of it."""
    return (8, 16) if name == "alternet_nano" else (side(name), side(name) * 3 // 2)


def build(name, **settings):
    return create_model(name, **{"image_size": side(name), "seed": 0, **SMALL.get(name, {}), **settings})


@cache
def trained_a_little(name):
    """A non-square network of odd settings whose parameters and running statistics are nothing special any more."""
    model = build(name, image_size=oblong(name), channels=2, num_classes=7)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # else the statistics hardly move and the signal dies in evaluation
    x = torch.randn(3, 2, *oblong(name), generator=torch.Generator().manual_seed(0))
    out = model(x)
    out.logsumexp(1).sum().backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
            p.grad = None
    return model.eval().requires_grad_(False), x, out, gradients


@every_model
def test_shape_and_gradients(name):
    _, _, out, gradients = trained_a_little(name)
    assert out.shape == (3, 7)
    assert out.isfinite().all()
    for key, gradient in gradients.items():
        assert gradient is not None, f"{key} is not used"
        assert gradient.isfinite().all(), key


@every_model
def test_images_do_not_see_each_other_in_evaluation(name):
    model, x, _, _ = trained_a_little(name)
    out = model(x)
    assert torch.equal(out, model(x))
    torch.testing.assert_close(out, torch.cat([model(x[i : i + 1]) for i in range(3)]), rtol=1e-4, atol=1e-5)
    assert (out[0] - out[1]).abs().max() > 1e-3


@every_model
def test_state_dict_round_trip(name):
    model, x, _, _ = trained_a_little(name)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = build(name, image_size=oblong(name), channels=2, num_classes=7, seed=1).eval()
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), model(x))


@every_model
def test_double_precision(name):
    model, x, _, _ = trained_a_little(name)
    out = copy.deepcopy(model).double()(x.double())
    assert out.dtype == torch.float64
    torch.testing.assert_close(model(x), out.float(), rtol=1e-4, atol=1e-4)


@every_model
def test_transposed_network_sees_the_transposed_image(name):
    """Any confusion of rows and columns shows on an image that is not square."""
    model, x, _, _ = trained_a_little(name)
    other = build(name, image_size=oblong(name)[::-1], channels=2, num_classes=7).eval()
    state = model.state_dict()
    for key, value in state.items():
        if value.ndim == 4 or key.endswith("table"):  # kernels, relative biases
            state[key] = value.transpose(-1, -2)
        elif key.endswith("position.vector"):
            state[key] = value[:, [0, 2, 1]]
        elif key == "position":
            rows, columns = model.patches.grid
            state[key] = value.unflatten(0, (rows, columns)).transpose(0, 1).flatten(0, 1)
    other.load_state_dict(state)
    torch.testing.assert_close(other(x.transpose(-1, -2)), model(x), rtol=1e-4, atol=1e-5)


@every_model
def test_seed_alone_decides_the_weights(name):
    def weights(seed, global_seed):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        state = build(name, seed=seed).state_dict()
        assert torch.equal(before, torch.get_rng_state())
        return state

    first, again, other = weights(3, 0), weights(3, 1), weights(4, 0)
    assert all(torch.equal(first[key], again[key]) for key in first)
    drawn = [key for key in first if key.endswith("weight") and first[key].ndim > 1 and "value" not in key]
    assert drawn
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


def test_seed_leaves_other_devices_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeds every GPU"))
    create_model("resnet_nano", seed=0)


def test_without_a_seed_the_global_state_decides():
    def weights(global_seed):
        torch.manual_seed(global_seed)
        return create_model("resnet_nano").stem.weight

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vit", dict(dim=12, depth=1)),
        ("convit", dict(dim=8, depth=2, gpsa_layers=1)),
        ("convmixer", dict(dim=4, depth=1)),
        ("preact_resnet", RESNET),
        ("alternet", ALTERNET),
    ],
)
def test_compiles_without_a_graph_break(name, settings):
    torch.compiler.reset()
    model = create_model(name, image_size=16, seed=0, **settings).eval().requires_grad_(False)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


@every_model
def test_described_in_one_sentence(name):
    assert len(describe_model(name)) > 20


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
        ("vit_micro", dict(heads=5), "heads=5 does not divide dim=96; use heads=4"),
        ("convit_micro", dict(heads=0), "heads=0 does not divide dim=96; use heads=1"),
        ("vit_micro", dict(pool="avg"), "pool is 'class' (a class token) or 'mean'"),
        ("convit_micro", dict(pool="avg"), "pool is 'class' (a class token) or 'mean'"),
        ("vit_micro", dict(position="sine"), "position is 'learned', 'sincos' or 'none', not 'sine'"),
        ("vit_micro", dict(position="sincos", dim=90), "multiple of 4 and at least 8, not 90"),
        ("convit_micro", dict(gpsa_layers=7), "gpsa_layers=7 of 6 blocks: use 0 to 6"),
        ("convit_micro", dict(centers="figure"), "centers is 'code' or 'paper', not 'figure'"),
        ("resnet_micro", dict(blocks=(3, 3)), "need one entry per stage"),
        ("alternet_micro", dict(heads=(1, 2)), "need one entry per stage"),
        ("alternet_micro", dict(attentions=(0, 2, 1)), "a stage of 3 blocks takes at most 1"),
        ("alternet_micro", dict(window=5), "window=5 does not divide a map of 16x16; use window=4"),
        ("alternet_micro", dict(image_size=24), "window=4 does not divide a map of 6x6; use window=3"),
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
    with pytest.raises(ValueError, match="'borrowed' is registered already"):
        register(borrowed)
