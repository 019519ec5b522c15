"""Every registered model: forward, backward, batches and images of odd shapes, weights, precision, compilation.

Models are tested as registered, but for those that are too big for that; they keep their family's architecture with
fewer and narrower layers.
"""

import copy
import inspect
import io
from functools import cache

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from vitprobe.models import create_model, describe_model, list_models, registry

RESNET = dict(widths=(8, 16), blocks=(1, 2))
DEIT = dict(embed_dim=24, depth=2, num_heads=3)
SMALL = {
    "vit": dict(dim=24, depth=2, heads=3),
    "convit": dict(dim=16, depth=3, gpsa_layers=2, heads=4),
    "simple_vit": dict(dim=64, depth=2, heads=2, patch_size=8),
    "convolutional_vit": dict(dim=18, depth=2),
    "convmixer": dict(dim=8, depth=2),
    "mixer": dict(dim=16, depth=2, token_hidden=8, channel_hidden=24, patch_size=4),
    "resnet": RESNET,
    "preact_resnet": RESNET,
    "alternet": dict(widths=(16, 32), blocks=(1, 2), attentions=(0, 1), heads=(1, 2), head_dim=4),
    "deit_ti": DEIT,
    "pit_ti": dict(base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 1, 2), stride=2),
    "swin_ti": dict(embed_dim=8, depths=(1, 2, 1, 1), num_heads=(1, 1, 2, 2)),
    "twins_s": dict(embed_dims=(8, 8, 16, 16), depths=(2, 1, 1, 1), num_heads=(1, 1, 2, 2)),
    "levit_128s": dict(embed_dim=(16, 16, 16), depth=(1, 1, 1), num_heads=(1, 1, 2)),
}
# A family's named sizes run the same code; what runs other code, beside the families themselves, to be compiled.
OTHER_CODE = {
    "model_1": ("model_1", {}),
    "model_3": ("model_3", {}),
    "relative_vit": ("relative_vit", {}),
    "resnet, bottlenecks, smoothing": ("resnext50", dict(stem="imagenet", smoothing="tanh")),
    "convmixer, few filters": ("convmixer", dict(filters="softmax", distinct=3)),
    "convmixer, matrices": ("convmixer", dict(filters="permutation", patch_size=8)),
}
every_model = pytest.mark.parametrize("name", list_models())


def family(name):
    """The registered constructor that a named size is a variant of."""
    return inspect.unwrap(registry._CONSTRUCTORS[name]).__name__


def oblong(name):
    """A size that is not square; windows have to divide the maps."""
    if name == "alternet50_imagenet":
        return (56, 112)
    if name.endswith("_nano"):
        return (8, 16) if name == "alternet_nano" else (8, 12)
    return (32, 48)


def build(name, **settings):
    small = {} if name.endswith(("_micro", "_nano")) else SMALL.get(family(name), {})
    if name == "resnext50":
        small = {**small, "widths": (64, 128)}  # room for 32 groups
    return create_model(name, **{"image_size": oblong(name), "seed": 0, **small, **settings})


@cache
def trained_a_little(name):
    """A network of odd settings whose parameters and running statistics are nothing special any more."""
    model = build(name, channels=2, num_classes=7)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
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
    other = build(name, channels=2, num_classes=7, seed=1).eval().requires_grad_(False)
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), model(x))


@every_model
def test_double_precision(name):
    model, x, _, _ = trained_a_little(name)
    out = copy.deepcopy(model).double()(x.double())
    assert out.dtype == torch.float64
    torch.testing.assert_close(model(x), out.float(), rtol=1e-4, atol=1e-4)


def test_every_family_has_a_small_member():
    assert {family(name) for name in list_models()} == set(SMALL)


@pytest.mark.parametrize("name", [*SMALL, *OTHER_CODE])
def test_compiles_without_a_graph_break(name):
    name, options = OTHER_CODE.get(name, (name, {}))
    torch.compiler.reset()
    model = build(name, **options).eval().requires_grad_(False)
    x = torch.randn(3, 3, *oblong(name))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


# timm's are timm's, and the others' files say what their maps are.
TRANSPOSED = ("vit", "convit", "convmixer", "mixer", "preact_resnet", "resnet", "alternet")


@pytest.mark.parametrize("name", [name for name in list_models() if family(name) in TRANSPOSED])
def test_transposed_network_sees_the_transposed_image(name):
    """Any confusion of rows and columns shows on an image that is not square."""
    model, x, _, _ = trained_a_little(name)
    other = build(name, image_size=oblong(name)[::-1], channels=2, num_classes=7).eval()
    state = model.state_dict()

    def transposed(value, dim=0):
        return value.unflatten(dim, model.patches.grid).transpose(dim, dim + 1).flatten(dim, dim + 1)

    for key, value in state.items():
        if value.ndim == 4 or key.endswith("table"):  # kernels, relative biases
            state[key] = value.transpose(-1, -2)
        elif key.endswith("position.vector"):
            state[key] = value[:, [0, 2, 1]]
        elif key == "position" or "token_mlp.2" in key:
            state[key] = transposed(value)
        elif "token_mlp.0.weight" in key:
            state[key] = transposed(value, 1)
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


@every_model
def test_described_in_one_sentence(name):
    assert len(describe_model(name)) > 20
