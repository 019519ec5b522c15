"""All probes in the situations that users' models and batches are in: the numbers of the plain situation.

What cannot be watched, or has no curvature, is refused in a sentence.
"""

import copy
import json
import re
import warnings
from collections import UserDict
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import xarray as xr
from test_attach_untouched import assert_same, state
from torch import Tensor, nn

import vitprobe as vp
from vitprobe.probes import CHANGE_PROBES, FEATURE_PROBES, LOSS_PROBES, FeatureProbe, probe

GATED = {name for name, one in FEATURE_PROBES.items() if one.reads == "gated attention"}
ATTENTION = {name for name, one in FEATURE_PROBES.items() if one.reads == "attention"} | GATED
OUTPUT = {name for name, one in FEATURE_PROBES.items() if one.reads == "output"}
WHOLE_BATCHES = {name for name, one in FEATURE_PROBES.items() if one.whole_batches}
OWN_PASSES: dict[str, Callable[..., xr.Dataset]] = {**LOSS_PROBES, **CHANGE_PROBES}
SMALLEST: dict[str, dict[str, Any]] = {
    "calibration": {"resamples": 20},
    "hessian_eigenvalues": {"k": 1},
    "hessian_density": {"samples": 1, "steps": 2},
    "loss_landscape": {"points": 2},
    "masking": {"masks": "uniform"},
    "noise_by_frequency": {"frequencies": (0.5,), "width": 0.3},
}
of_hessian = pytest.mark.parametrize("name", ["hessian_eigenvalues", "hessian_density"])

SIDE, CLASSES = 16, 5
SIZES = dict(image_size=SIDE, patch_size=4, dim=12, depth=2, mlp_ratio=2.0, num_classes=CLASSES, seed=0)


def vit(**options: Any) -> nn.Module:
    return vp.create_model("vit", **{**SIZES, "heads": 3, **options})


def convit() -> nn.Module:
    """A gated block on the patches, then a plain one with a class token."""
    return vp.create_model("convit", **SIZES, gpsa_layers=1, heads=4)


def resnet(image_size: int | tuple[int, int] = SIDE) -> nn.Module:
    options = dict(widths=(8, 16), blocks=(1, 2), num_classes=CLASSES, seed=0)
    return vp.create_model("preact_resnet", image_size=image_size, **options)


NETWORKS = {"attention": convit, "convolution": resnet}
every_network = pytest.mark.parametrize("network", NETWORKS)


def images(count: int = 6, height: int = SIDE, width: int = SIDE) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


X, Y = images(), torch.arange(6) % CLASSES


def feature_probe(name: str) -> FeatureProbe:
    return FEATURE_PROBES[name](**SMALLEST.get(name, {}))


def measured(model: nn.Module, batches: Any, names: Iterable[str]) -> tuple[dict[str, xr.Dataset], dict[str, str]]:
    """Datasets of one pass, and why the others have none."""
    tree = probe(model, batches, [feature_probe(name) for name in names], missing="skip", progress=False)
    found = {name: child.to_dataset() for name, child in tree.children.items()}
    return found, json.loads(tree.attrs.get("left_out", "{}"))


def measure(model: nn.Module, batches: Any, *, without: Iterable[str] = ()) -> dict[str, xr.Dataset]:
    """All probes but some; only those of attention may have nothing to measure."""
    found, left_out = measured(model, batches, [name for name in FEATURE_PROBES if name not in without])
    assert left_out.keys() <= ATTENTION
    return found


def assert_numbers(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    """The same probes, numbers and coordinates, names of layers excepted; bit for bit without a tolerance."""
    assert found.keys() == expected.keys()
    for name in found:
        names = ["layer_name", "layer_name_other"]
        a, b = (ds.drop_vars(names, errors="ignore") for ds in (found[name], expected[name]))
        if tolerance:
            xr.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        else:
            xr.testing.assert_equal(a, b)


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, xr.Dataset]]:
    """The numbers of each network as it comes, on one batch of images and labels."""
    found = {network: measure(build(), [(X, Y)]) for network, build in NETWORKS.items()}
    assert found["attention"].keys() == FEATURE_PROBES.keys()
    assert found["convolution"].keys() == FEATURE_PROBES.keys() - ATTENTION
    return found


# --- models -----------------------------------------------------------------------------------------


class Returning(nn.Module):
    """The same logits in another wrapping."""

    def __init__(self, net: nn.Module, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.wrap = net, wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.net(x))


def compiled(model: nn.Module) -> nn.Module:
    """Compiled, and called once: hooks that are set now would never be called."""
    wrapped = torch.compile(model.eval(), backend="eager")
    with torch.no_grad():
        wrapped(X)
    return wrapped.train()


# What becomes of which network, and how far its numbers may be from the plain ones.
MODELS: dict[str, tuple[str, Callable[[nn.Module], nn.Module], float]] = {
    "compiled": ("attention", compiled, 0.0),
    "data parallel": ("attention", nn.DataParallel, 0.0),
    "evaluation mode": ("attention", nn.Module.eval, 0.0),
    "frozen": ("attention", lambda model: model.requires_grad_(False), 0.0),
    "channels last": ("attention", lambda model: model.to(memory_format=torch.channels_last), 1e-4),
    "channels last, convolution": ("convolution", lambda model: model.to(memory_format=torch.channels_last), 1e-4),
    "double precision": ("attention", nn.Module.double, 1e-4),
    "bfloat16": ("attention", nn.Module.bfloat16, 0.1),
    "bfloat16, convolution": ("convolution", nn.Module.bfloat16, 0.1),
    "float16": ("attention", nn.Module.half, 0.02),
    "returns a tuple": ("attention", lambda model: Returning(model, lambda logits: (logits, X)), 0.0),
    "returns a dict": ("attention", lambda model: Returning(model, lambda logits: {"x": X, "logits": logits}), 0.0),
}


@pytest.mark.parametrize("situation", MODELS)
def test_model(situation, plain):
    network, change, tolerance = MODELS[situation]
    model = change(NETWORKS[network]())
    before = state(model)
    assert_numbers(measure(model, [(X, Y)]), plain[network], tolerance)
    assert_same(before, state(model))


def test_distributed_data_parallel(plain):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(convit())
        before = state(model)
        assert_numbers(measure(model, [(X, Y)]), plain["attention"])
        assert_same(before, state(model))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_network
def test_model_on_a_gpu_and_batches_in_main_memory(network, plain):
    model = NETWORKS[network]().cuda()
    found = measure(model, [(X, Y)])
    assert {ds.device for ds in found.values()} == {"cuda:0"}
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert_numbers(found, plain[network], 0.01)


def test_inside_autocast(plain):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_numbers(measure(convit(), [(X, Y)]), plain["attention"], 0.1)
        assert torch.is_autocast_enabled("cpu")


def test_inside_inference_mode(plain):
    with torch.inference_mode():
        assert_numbers(measure(convit(), [(X, Y)]), plain["attention"])


def test_weight_sharing_is_two_layers():
    """A block that is used twice, and weights that two blocks share, against two blocks of equal weights."""
    copied, twice, tied = vit(), vit(), vit()
    copied.blocks[1] = copy.deepcopy(copied.blocks[0])
    twice.blocks[1] = twice.blocks[0]
    for name, parameter in list(tied.blocks[0].named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(tied.blocks[1].get_submodule(owner), last, parameter)
    expected = measure(copied, [(X, Y)])
    for model in (twice, tied):
        before = state(model)
        found = measure(model, [(X, Y)])
        assert_numbers(found, expected)
        assert_same(before, state(model))
        second = "blocks.0.attention#2" if model is twice else "blocks.1.attention"
        assert found["nonlocality"].layer_name.values.tolist() == ["blocks.0.attention", second]


class Counting(nn.Module):
    """Counts its calls in a buffer, in evaluation mode too."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x)


def test_buffers_that_a_model_writes_are_put_back(plain):
    model = Counting(convit())
    assert_numbers(measure(model, [(X, Y)]), plain["attention"])
    for name in OWN_PASSES:
        run_any(name, model)
    assert model.calls == 0


def quantised(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, dtype=torch.qint8)


def test_quantised_linear_layers(plain):
    """Eight bits leave activations and attention to be seen."""
    model = quantised(convit())
    with torch.no_grad():
        before = model(X)
    found = measure(model, [(X, Y)])
    with torch.no_grad():
        assert torch.equal(model(X), before)
    for name, variable in (("nonlocality", "nonlocality"), ("fourier", "relative_log_amplitude")):
        np.testing.assert_allclose(found[name][variable], plain["attention"][name][variable], atol=0.1)


# --- batches ----------------------------------------------------------------------------------------


class Keywords(nn.Module):
    """Takes its images by name, as transformers models do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        assert labels is None
        return {"logits": self.net(pixel_values)}


def test_dict_batch(plain):
    batch = {"pixel_values": X, "labels": Y}
    assert_numbers(measure(Keywords(convit()), [batch]), plain["attention"])
    assert list(batch) == ["pixel_values", "labels"]


class Labelled(NamedTuple):
    """A batch whose images go by name."""

    label: Tensor
    image: Tensor


class Features(UserDict):
    """A mapping whose items are attributes too, as a processor of transformers gives it."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


BATCHES = {
    "named tuple": Labelled(Y, X),
    "mapping with attributes": Features(image=X, label=Y),
    "read-only mapping": MappingProxyType({"image": X, "label": Y}),
    "nest": (Labelled(Y, X), [Y]),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_the_users_own_types_reach_forward(kind, plain):
    """As they are: by attribute, where they have any, in the traced pass as in all others."""
    batch = BATCHES[kind]
    images = {"read-only mapping": lambda b: b["image"], "nest": lambda b: b[0].image}.get(kind, lambda b: b.image)
    ds = vp.fourier(convit(), [batch], forward=lambda model, b: model(images(b)), progress=False)
    assert_numbers({"fourier": ds}, {"fourier": plain["attention"]["fourier"]})
    assert images(batch) is X


@pytest.mark.parametrize("kind", [list, tuple])
def test_one_batch_without_a_list_around_it(kind, plain):
    assert_numbers(measure(convit(), kind((X, Y))), plain["attention"])


def test_channels_last_batch(plain):
    batch = X.to(memory_format=torch.channels_last)
    assert_numbers(measure(resnet(), [(batch, Y)]), plain["convolution"], 1e-4)
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_no_labels(plain):
    found = measure(convit(), [X], without=OUTPUT)
    assert_numbers(found, {name: ds for name, ds in plain["attention"].items() if name not in OUTPUT})
    for name in OUTPUT:
        with pytest.raises(ValueError, match=r"no targets: give batches of \(images, labels\)"):
            feature_probe(name).run(convit(), X, progress=False)


@pytest.mark.parametrize(
    ("network", "sizes"), [("attention", (5, 1)), ("attention", (1, 5)), ("convolution", (4, 2))], ids=str
)
def test_batches_of_several_sizes(network, sizes, plain):
    """Images count, in batches of any size: a short last one, or a single first one, on which the pass is planned."""
    batches = list(zip(X.split(sizes), Y.split(sizes), strict=True))
    found = measure(NETWORKS[network](), batches, without=WHOLE_BATCHES)
    assert_numbers(found, {name: plain[network][name] for name in found}, 1e-4)


@pytest.mark.parametrize("name", sorted(WHOLE_BATCHES))
def test_images_that_are_compared_with_each_other(name):
    """They are compared inside their batch; a short last one breaks nothing."""
    ds = feature_probe(name).run(convit(), [(X[:4], Y[:4]), (X[2:], Y[2:]), (X[4:], Y[4:])], progress=False)
    assert all(np.isfinite(ds[variable].values).any() for variable in ds.data_vars)


@every_network
def test_single_image(network):
    """One image has numbers but no standard error over images; no number comes of a division by nothing."""
    model = NETWORKS[network]()
    before = state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, left_out = measured(model, [(X[:1], Y[:1])], FEATURE_PROBES)
    assert_same(before, state(model))
    for name, reason in left_out.items():
        assert "image" in reason if name in WHOLE_BATCHES else name in ATTENTION and network == "convolution", reason
    for name, ds in found.items():
        for variable in ds.data_vars:
            assert not variable.endswith("_se") or ds[variable].isnull().all(), (name, variable)
        assert any(ds[variable].notnull().any() for variable in ds.data_vars), name


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_one_token(pool):
    """A patch as large as the image: each probe has a number, or a sentence that says that there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, left_out = measured(vit(patch_size=SIDE, pool=pool), [(X, Y)], FEATURE_PROBES)
    assert found.keys() | left_out.keys() == FEATURE_PROBES.keys()
    for name, reason in left_out.items():
        assert reason.startswith(f"{name}: ") and ("(1, 1)" in reason or "shows no" in reason), reason
    for name, ds in found.items():
        assert any(ds[variable].notnull().any() for variable in ds.data_vars), f"{name}: nothing measured nor said"


def turned(ds: xr.Dataset, like: xr.Dataset) -> xr.Dataset:
    """The same with rows for columns, its axes in the order of another."""
    pairs = {"y": "x", "query_y": "query_x", "offset_y": "offset_x", "grid_h": "grid_w", "grid_h_other": "grid_w_other"}
    both = {**pairs, **{b: a for a, b in pairs.items()}}
    ds = ds.rename({a: b for a, b in both.items() if a in ds.variables})
    return ds.assign({name: array.transpose(*like[name].dims) for name, array in ds.data_vars.items()})


@pytest.mark.parametrize("build", [lambda size: vit(image_size=size, pool="mean", position="none"), resnet])
def test_non_square_images(build):
    """An image on its side is seen as it is upright, by a network on its side."""
    tall, wide = build((SIDE, SIDE // 2)), build((SIDE // 2, SIDE))
    wide.load_state_dict({name: p.mT if p.ndim == 4 else p for name, p in tall.state_dict().items()})
    x = images(height=SIDE, width=SIDE // 2)
    upright, lying = measure(tall, [(x, Y)]), measure(wide, [(x.mT.contiguous(), Y)])
    assert (upright["fourier"].grid_h == 2 * upright["fourier"].grid_w).all()
    assert_numbers({name: turned(ds, upright[name]) for name, ds in lying.items()}, upright, 1e-4)


def test_images_of_another_size_than_trained():
    """A convolutional network takes any; a transformer that stretches its position code is one with the longer code."""
    small, large = resnet(), resnet(24)
    large.load_state_dict(small.state_dict())
    x = images(height=24, width=24)
    assert_numbers(measure(small, [(x, Y)]), measure(large, [(x, Y)]))

    from timm.layers import resample_abs_pos_embed
    from timm.models.vision_transformer import VisionTransformer

    sizes = dict(patch_size=4, embed_dim=12, depth=1, num_heads=3, num_classes=CLASSES)
    torch.manual_seed(0)
    stretched, longer = VisionTransformer(img_size=SIDE, dynamic_img_size=True, **sizes), VisionTransformer(24, **sizes)
    weights = stretched.state_dict()
    longer.load_state_dict(weights | {"pos_embed": resample_abs_pos_embed(weights["pos_embed"], [6, 6])})
    before = state(stretched)
    assert_numbers(measure(stretched, [(x, Y)]), measure(longer, [(x, Y)]), 1e-4)
    assert_same(before, state(stretched))


# --- probes that make passes of their own -----------------------------------------------------------


def run_any(name: str, model: nn.Module, batches: Any = ((X, Y),)) -> xr.Dataset:
    """Any probe by its name, at the smallest."""
    if name in FEATURE_PROBES:
        return feature_probe(name).run(model, list(batches), progress=False)
    return OWN_PASSES[name](model, list(batches), progress=False, **SMALLEST.get(name, {}))


@pytest.mark.parametrize("name", OWN_PASSES)
def test_wrapped_model_and_dict_batch(name):
    batch = {"pixel_values": X, "labels": Y}
    model = nn.DataParallel(Keywords(vit()))
    before = state(model)
    found = run_any(name, model, [batch])
    assert_same(before, state(model))
    moving = ["layer_name", "fingerprint", "plane"]  # names and hashes
    a, b = (ds.drop_vars(moving, errors="ignore") for ds in (found, run_any(name, vit())))
    xr.testing.assert_equal(a, b)


# --- refused in a sentence --------------------------------------------------------------------------

ALL = (*FEATURE_PROBES, *OWN_PASSES)


@pytest.mark.filterwarnings("ignore")
def test_sharded_models_are_refused():
    """Whole or in a block alone, in both ways that PyTorch has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, cpu = init_device_mesh("cpu", (1,)), torch.device("cpu")
        models = [vit() for _ in range(4)]
        models[0] = FullyShardedDataParallel(models[0], device_id=cpu)
        models[1].blocks[0] = FullyShardedDataParallel(models[1].blocks[0], device_id=cpu)
        fully_shard(models[2], mesh=mesh)
        fully_shard(models[3].blocks[0], mesh=mesh)
        for model in models:
            for name in ALL:
                with pytest.raises(TypeError, match=r"FSDP .* unsharded"):
                    run_any(name, model)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_torchscript_is_refused():
    traced = torch.jit.trace(nn.Sequential(nn.Conv2d(3, CLASSES, 4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten()), X)
    for name in ALL:
        with pytest.raises(TypeError, match=r"TorchScript .* give the nn\.Module it was made from"):
            run_any(name, nn.DataParallel(traced))


@pytest.mark.parametrize("name", LOSS_PROBES)
def test_quantised_models_have_no_curvature(name):
    """Most of their weights are no parameters: zeros would be said of a Hessian that nobody looked at."""
    with pytest.raises(TypeError, match="quantised"):
        run_any(name, quantised(vit()))


@of_hessian
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_no_curvature_of_its_own(name, dtype):
    """One is five per cent off, the other overflows; a copy in single precision has the right one."""
    model = vit().to(dtype)
    with pytest.raises(ValueError, match=r"dtype=torch\.float32"):
        run_any(name, model)
    options = {"progress": False, **SMALLEST[name]}
    ds = LOSS_PROBES[name](model, [(X, Y)], dtype=torch.float32, **options)
    same = LOSS_PROBES[name](copy.deepcopy(model).float(), [(X, Y)], **options)
    for variable in ds.data_vars:
        np.testing.assert_allclose(ds[variable], same[variable], rtol=1e-3)
    assert {p.dtype for p in model.parameters()} == {dtype}


@of_hessian
def test_inference_mode_has_no_curvature(name):
    model = vit()
    with torch.inference_mode():
        made_inside = vit()
        with pytest.raises(ValueError, match="inference"):
            run_any(name, model)
    with pytest.raises(ValueError, match="inference"):
        run_any(name, made_inside)


@of_hessian
def test_frozen_models_have_no_curvature(name):
    with pytest.raises(ValueError, match="no trainable parameter"):
        run_any(name, vit().requires_grad_(False))


def test_frozen_models_have_a_landscape():
    xr.testing.assert_equal(
        run_any("loss_landscape", vit().requires_grad_(False)).drop_vars("plane"),
        run_any("loss_landscape", vit()).drop_vars("plane"),
    )


# --- kernels that cannot be seen --------------------------------------------------------------------


@torch.library.custom_op("vitprobe_tests::attend", mutates_args=())
def hidden(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as an extension's kernel does it."""
    return F.scaled_dot_product_attention(query, key, value).clone()


class Attn(nn.Module):
    """Attention in a module of its own, as libraries name it."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.proj, self.attend = nn.Linear(12, 36), nn.Linear(12, 12), attend

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(query, key, value).transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    """Blocks of attention and MLP; `attends` are the attention of each."""

    def __init__(self, *attends: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 12, 4, 4)
        self.blocks = nn.ModuleList([
            nn.ModuleDict({"attn": Attn(attend), "mlp": nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))})
            for attend in attends
        ])
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block["attn"](x)
            x = x + block["mlp"](x)
        return self.head(x.mean(1))


def test_invisible_kernels_are_named():
    """Their modules by their paths, and the user is told what to run them with."""
    found, left_out = measured(Blocks(hidden, hidden), [(X, Y)], FEATURE_PROBES)
    assert left_out.keys() == ATTENTION
    for name in ATTENTION - GATED:
        reason = left_out[name]
        assert re.search(r"blocks\.0\.attn.*(blocks\.1\.attn|1 more)", reason) and "mlp" not in reason, reason
        assert "SDPA" in reason, reason
    seen = measure(Blocks(F.scaled_dot_product_attention, F.scaled_dot_product_attention), [(X, Y)])
    for name, ds in found.items():
        kinds = [coordinate for coordinate in ds.coords if coordinate.startswith("kind")]
        xr.testing.assert_allclose(ds.drop_vars(kinds), seen[name].drop_vars(kinds), rtol=1e-4, atol=1e-5)


def test_what_took_queries_keys_and_values_is_no_mlp():
    ds = vp.fourier(Blocks(F.scaled_dot_product_attention, hidden), [X], progress=False)
    assert ds.kind.values.tolist() == ["stem", "msa", "mlp", "msa", "mlp"]


def test_one_invisible_kernel_among_others_stands_in_the_dataset():
    found = measure(Blocks(F.scaled_dot_product_attention, hidden), [(X, Y)])
    assert found.keys() == FEATURE_PROBES.keys() - GATED
    for name in ATTENTION - GATED:
        assert found[name].layer_name.values.tolist() == ["blocks.0.attn"]
        assert "blocks.1.attn" in found[name].skipped and "blocks.0.attn" not in found[name].skipped


class Attend(torch.autograd.Function):
    """Attention with a derivative of its own, in Python."""

    @staticmethod
    def forward(ctx, query, key, value):
        return F.scaled_dot_product_attention(query, key, value)

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


@pytest.mark.parametrize(
    "wrap",
    [
        lambda attend: Attend.apply,
        lambda attend: torch.compile(lambda *parts: attend(*parts), backend="eager"),
    ],
    ids=["autograd function", "compiled function"],
)
def test_attention_in_functions_of_the_models_own_is_seen(wrap):
    model = Blocks(wrap(F.scaled_dot_product_attention))
    with torch.no_grad():
        model(X)
    expected = vp.nonlocality(Blocks(F.scaled_dot_product_attention), [X], progress=False)
    xr.testing.assert_equal(vp.nonlocality(model, [X], progress=False), expected)
