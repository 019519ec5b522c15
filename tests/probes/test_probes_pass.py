"""The pass that all feature probes share: batches of any kind, wrapped models, the datasets, and the errors."""

import copy
import json
import math
import warnings

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import vitprobe.attach.watch as watch_module
from vitprobe.models import create_model
from vitprobe.probes import FEATURE_PROBES, FeatureVariance, Fourier, Nonlocality, fourier, nonlocality, probe
from vitprobe.results import check, load, save


def build(name="vit_nano", **options):
    return create_model(name, image_size=8, seed=0, **options)


def images(count=4, side=8, seed=0):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def measure(model, batches, **options):
    """All feature probes in one pass, as one dataset per name."""
    probes = [Fourier(), FeatureVariance(), Nonlocality()]
    tree = probe(model, batches, probes, progress=False, **options)
    return {name: child.to_dataset() for name, child in tree.children.items()}


def assert_equal(a, b, *, rtol=0.0, atol=0.0):
    """Equal numbers and coordinates; bit for bit unless a tolerance is given."""
    assert a.keys() == b.keys()
    for name in a:
        if rtol or atol:
            xr.testing.assert_allclose(a[name], b[name], rtol=rtol, atol=atol)
        else:
            xr.testing.assert_equal(a[name], b[name])


@pytest.fixture(scope="module")
def expected():
    return measure(build(), images())


# --- batches ----------------------------------------------------------------------------------------


class Keywords(nn.Module):
    """`vit_nano` called as transformers models are."""

    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, pixel_values, labels=None):
        assert labels is None
        return {"logits": self.net(pixel_values)}


LABELS = torch.arange(4)
BATCHES = {
    "a tensor": lambda x: x,
    "a tuple with labels": lambda x: (x, LABELS),
    "a list of tensors": lambda x: [x[:3], x[3:]],
    "a tuple of tensors": lambda x: x.split(3),
    "a generator of tuples": lambda x: ((part, LABELS[: len(part)]) for part in x.split(2)),
    "a loader": lambda x: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, LABELS), batch_size=3),
}


@pytest.mark.parametrize("wrap", BATCHES.values(), ids=BATCHES)
def test_every_way_to_give_the_same_images(wrap, expected):
    found = measure(build(), wrap(images()))
    assert found["fourier"].images == 4
    assert_equal(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("several", [False, True])
def test_mappings_without_their_labels(several, expected):
    x = images()
    batch = {"pixel_values": x, "labels": LABELS}
    batches = [{"pixel_values": x[:1]}, {"pixel_values": x[1:], "labels": LABELS[1:]}] if several else batch
    found = measure(Keywords(), batches)
    for name in found:
        numbers = expected[name].drop_vars("layer_name")
        xr.testing.assert_allclose(found[name].drop_vars("layer_name"), numbers, rtol=1e-4, atol=1e-5)


def test_a_model_that_is_called_in_another_way(expected):
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = build()

        def forward(self, metadata, image):
            return self.net(image) + metadata

    found = measure(TwoInputs(), [(images(), 7)], forward=lambda model, batch: model(batch[1], batch[0]))
    for name in found:
        xr.testing.assert_equal(found[name].drop_vars("layer_name"), expected[name].drop_vars("layer_name"))


def test_images_and_not_batches_are_counted():
    """A short last batch weighs what its images weigh."""
    x = images(7)
    whole, parts = measure(build(), [x]), measure(build(), x.split([3, 3, 1]))
    assert_equal(whole, parts, rtol=1e-5, atol=1e-6)


def test_one_image_has_no_standard_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NaN is said on purpose, not divided out
        found = measure(build(), images(1))
    for name in ("fourier", "feature_variance", "nonlocality"):
        for variable in found[name].data_vars:
            assert bool(found[name][variable].isnull().all()) == variable.endswith("_se"), variable
        check(found[name])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.bfloat16, 0.05)], ids=["double", "bfloat16"]
)
def test_models_of_another_dtype_get_their_batches_in_it(dtype, tolerance, expected):
    model = build().to(dtype)
    found = measure(model, images())
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert_equal(found, expected, rtol=tolerance, atol=tolerance)
    assert all(variable.dtype == np.float64 for ds in found.values() for variable in ds.data_vars.values())


def test_double_models_are_measured_in_double():
    model, x = build().double(), images().double()
    with torch.no_grad():
        stem = model.patches(x) + model.position
    variance = stem.numpy().var(1, ddof=1).mean()
    assert float(measure(model, x)["feature_variance"].variance[0]) == pytest.approx(variance, rel=1e-12)


def test_images_of_two_sizes_are_refused():
    model = create_model("resnet_nano", image_size=8, seed=0)
    with pytest.raises(ValueError, match=r"\(3, 6, 6\) after images of \(3, 8, 8\) .* measure each size by itself"):
        fourier(model, [images(), images(side=6)], progress=False)


@pytest.mark.parametrize("batches", [[], (), iter([])])
def test_no_batches_are_an_error(batches):
    with pytest.raises(ValueError, match="the batches were empty"):
        fourier(build(), batches, progress=False)


def test_integer_images_are_answered_in_words():
    with pytest.raises(ValueError, match=r"no images .* convert them with \.float\(\)"):
        fourier(build(), torch.zeros(2, 3, 8, 8, dtype=torch.uint8), progress=False)


# --- probes and layers ------------------------------------------------------------------------------


def test_a_tree_is_the_datasets_of_the_single_probes(expected):
    assert list(expected) == ["fourier", "feature_variance", "nonlocality"]
    for name, probe_class in ((name, FEATURE_PROBES[name]) for name in expected):
        alone = probe_class().run(build(), images(), progress=False)
        xr.testing.assert_equal(alone, expected[name])
        moving = {"history"}
        assert {k: v for k, v in alone.attrs.items() if k not in moving} == {
            k: v for k, v in expected[name].attrs.items() if k not in moving
        }


def test_probes_forget_what_they_measured_before(expected):
    one = Fourier()
    one.run(build("resnet_nano"), images(), progress=False)
    xr.testing.assert_equal(one.run(build(), images(), progress=False), expected["fourier"])


@pytest.mark.parametrize(
    ("probes", "error", "words"),
    [
        (Fourier(), TypeError, r"probes are a list: write \[Fourier\(\.\.\.\)\]"),
        ([Fourier], TypeError, r"not <class .*Fourier'>; note the brackets"),
        (["fourier"], TypeError, r"a probe is a FeatureProbe such as Fourier\(\), not 'fourier'"),
        ([], ValueError, "no probes were given"),
        ([Fourier(), Fourier("paper")], ValueError, r"two probes of one name in \['fourier', 'fourier'\]"),
    ],
)
def test_probes_that_are_none(probes, error, words):
    with pytest.raises(error, match=words):
        probe(build(), images(), probes)


def test_no_attention_says_what_to_do():
    with pytest.raises(ValueError, match="nonlocality: the model has no attention"):
        nonlocality(build("resnet_nano"), images(), progress=False)


def test_attention_that_was_left_out_is_explained():
    class Channels(nn.Module):
        """Attention over 12 channels of a 4x4 grid."""

        def __init__(self):
            super().__init__()
            self.embed, self.qk, self.head = nn.Conv2d(3, 12, 2, 2), nn.Linear(12, 24), nn.Linear(12, 2)

        def forward(self, x):
            x = self.embed(x).flatten(2).transpose(1, 2)
            query, key = self.qk(x).mT.chunk(2, dim=1)
            x = x + ((query @ key.mT).softmax(-1) @ x.mT).mT
            return self.head(x.mean(1))

    with pytest.raises(ValueError, match="Left out: Channels: a map of 12x12 is over channels, not over tokens"):
        nonlocality(Channels(), images(), progress=False)


def test_no_units_say_what_to_do():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"fourier: .* shows no units; name modules with layers="):
        fourier(model, images(), progress=False)


def test_layers_by_pattern():
    found = measure(build(), images(), layers=["patches", "blocks.*"])
    # A module returns after what is in it, and the patches here carry no grid before they are flattened.
    assert found["fourier"].layer_name.values.tolist() == ["patches", *(f"blocks.{i}" for i in range(4))]
    assert set(found["fourier"].kind.values) == {"module"}
    whole = measure(build(), images())
    mlps = whole["fourier"].isel(layer=slice(2, None, 2))
    np.testing.assert_array_equal(found["fourier"].log_amplitude[1:], mlps.log_amplitude)
    xr.testing.assert_equal(found["nonlocality"], whole["nonlocality"])
    with pytest.raises(ValueError, match=r"no module of the model matches layers='layers\.\*'; it has .*blocks\.0"):
        measure(build(), images(), layers="layers.*")


def test_prefix_can_be_given():
    # Eight registers and a class token before 4x4 patches are 25 tokens, which are 5x5 just as well; where the pixels
    # of each token are followed, no number has to be guessed, and a given one is obeyed.
    class Undeclared(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = build("vit", patch_size=2, dim=12, depth=1, registers=8)

        def forward(self, x):
            return self.net(x)

    for options, expected in (({}, (4, 9)), ({"prefix": 9}, (4, 9)), ({"prefix": 0}, (5, 0))):
        for ds in measure(Undeclared(), images(), **options).values():
            assert set(zip(ds.grid_h.values.tolist(), ds.prefix.values.tolist(), strict=True)) == {expected}


# --- models as they come ----------------------------------------------------------------------------


def test_same_numbers_twice_bit_for_bit():
    for name in ("vit_nano", "alternet_nano", "convit_nano"):
        model = build(name).train()
        assert_equal(measure(model, images().split(3)), measure(model, images().split(3)))


def test_training_mode_and_random_state_do_not_matter(expected):
    model = build().train()
    for module in model.modules():
        if hasattr(module, "p"):
            module.p = 0.5
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert_equal(measure(model, images()), expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_compiled_and_wrapped_models_give_the_eager_numbers():
    def small():
        return build("vit", patch_size=4, dim=12, depth=2)

    expected = measure(small(), images())
    compiled, in_place, inside = torch.compile(small(), backend="eager"), small(), small()
    in_place.compile(backend="eager")
    inside.blocks[1] = torch.compile(inside.blocks[1], backend="eager")
    with torch.no_grad():
        for model in (compiled, in_place, inside):
            model(images())
    for model in (compiled, in_place, inside, nn.DataParallel(small()), nn.DataParallel(compiled)):
        assert_equal(measure(model, images()), expected)
    # The compiled model runs as before.
    with torch.no_grad():
        assert torch.equal(compiled(images()), small()(images()))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_torchscript_is_refused():
    with pytest.raises(TypeError, match=r"TorchScript .* give the nn\.Module it was made from"):
        fourier(torch.jit.script(nn.Conv2d(3, 2, 3)), images(), progress=False)


def test_output_is_bit_identical():
    model = build("convit_nano").eval()
    outputs = []

    def forward(net, batch):
        outputs.append(net(batch))
        return outputs[-1]

    measure(model, [images()], forward=forward)
    with torch.no_grad():
        plain = copy.deepcopy(model)(images())
    assert torch.equal(outputs[-1], plain)


@pytest.mark.parametrize("error", [OverflowError, KeyboardInterrupt])
def test_nothing_stays_behind_when_a_probe_fails(error, expected):
    class Failing(Fourier):
        def update(self, where, what):
            super().update(where, what)
            if where.index == 2:
                raise error

    model = build().train()
    hooks = copy.copy(nn.modules.module._global_forward_hooks)
    random = torch.get_rng_state()
    with pytest.raises(error):
        Failing().run(model, images(), progress=False)
    assert nn.modules.module._global_forward_hooks == hooks
    assert torch._C._len_torch_function_stack() == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled() and all(module.training for module in model.modules())
    assert_equal(measure(model, images()), expected)


# --- chunks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3000])
def test_chunks_do_not_change_the_numbers(chunk, monkeypatch):
    """One image at a time, or a few; 3000 is between, and divides nothing."""
    from timm.models.swin_transformer import SwinTransformer

    torch.manual_seed(0)
    swin = SwinTransformer(
        *(32, 2), num_classes=3, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(1, 2), strict_img_size=False
    )
    for model, x in ((build("vit", patch_size=2, dim=12, depth=2), images(7)), (swin, images(5, side=32))):
        monkeypatch.setattr(watch_module, "CHUNK", 1 << 30)
        whole = measure(model, [x])
        monkeypatch.setattr(watch_module, "CHUNK", chunk)
        assert_equal(measure(model, [x]), whole, rtol=1e-6, atol=1e-6)


def test_updates_come_in_chunks_of_whole_images(monkeypatch):
    sizes = []

    class Sizes(Nonlocality):
        def update(self, where, what):
            sizes.append(tuple(what.shape))
            super().update(where, what)

    monkeypatch.setattr(watch_module, "CHUNK", 2 * 3 * 16 * 16)  # two images of three heads
    Sizes().run(build(), images(5), progress=False)
    assert sizes == [(2, 1, 3, 16, 16), (2, 1, 3, 16, 16), (1, 1, 3, 16, 16)] * 4


# --- datasets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit_nano", "resnet_nano", "alternet_nano", "convit_nano"])
def test_datasets_survive_the_disk_and_pandas(name, tmp_path):
    probes = [Fourier(), FeatureVariance()] + ([Nonlocality()] if name != "resnet_nano" else [])
    tree = probe(build(name), images(), probes, progress=False)
    paths = save(tree, tmp_path / "all.nc")
    assert [path.name for path in paths] == [f"all_{one.name}.nc" for one in probes]
    for one, path in zip(probes, paths, strict=True):
        ds = tree[one.name].to_dataset()
        check(ds)
        xr.testing.assert_identical(load(path), ds)
        for variable in ds.data_vars.values():
            rows = variable.to_dataframe().dropna().reset_index()
            assert len(rows) == int(variable.notnull().sum()) > 0
            assert {"layer_name", "kind", "depth", "grid_h", "grid_w", "prefix"} <= set(rows)
            assert variable.attrs["long_name"] and variable.attrs["units"]


def test_datasets_say_what_was_measured(expected):
    ds = expected["nonlocality"]
    assert ds.probe == "nonlocality" and ds.device == "cpu"
    assert ds.model_class == "vitprobe.models.vit.ViT"
    assert (ds.images, ds.image_height, ds.image_width) == (4, 8, 8)
    assert ds.parameters == sum(p.numel() for p in build().parameters())
    assert json.loads(ds.skipped) == []
    assert json.loads(expected["fourier"].config) == {
        "probe": "fourier",
        "definition": "corrected",
        "average": "mean of log",
        "along": "diagonal",
    }
    assert ds.depth.values.tolist() == pytest.approx([1 / 8, 3 / 8, 5 / 8, 7 / 8])
    assert ds.kind.values.tolist() == ["msa"] * 4
    assert expected["fourier"].kind.values.tolist() == ["stem", *["msa", "mlp"] * 4]


def test_transformers_models_under_both_implementations():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    torch.manual_seed(0)
    models = [
        ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, attn_implementation=kind, **sizes))
        for kind in ("sdpa", "eager")
    ]
    models[1].load_state_dict(models[0].state_dict())
    batches = [{"pixel_values": images(), "labels": LABELS % 2}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused, eager = (measure(model, batches) for model in models)
    assert_equal(fused, eager, rtol=1e-4, atol=1e-5)
    assert fused["nonlocality"].prefix.values.tolist() == [1, 1]


def test_frequencies_and_distances_never_reach_beyond_the_grid(expected):
    assert float(expected["fourier"].frequency.max()) == 1
    assert (expected["nonlocality"].nonlocality < math.hypot(3, 3)).all()
    assert (expected["nonlocality"].nonlocality > 0).all()
