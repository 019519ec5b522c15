"""Masked position codes and attention maps, against copies of the networks that were changed by hand."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from einops import rearrange
from torch import nn

from vitprobe.attach import plan
from vitprobe.calling import untouched
from vitprobe.models import create_model
from vitprobe.models.attention import Neighbourhood
from vitprobe.probes.masking import _near, masking
from vitprobe.results import check, load

CHANGES = ("accuracy_change", "accuracy_change_se", "nll_change", "nll_change_se")


def build(name="vit_nano", **options):
    return create_model(name, **({"image_size": 8, "seed": 0} | options))


def labelled(side=8, count=10, classes=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, side, side, generator=generator), torch.arange(count) % classes


def measure(model, batches, masks, **options):
    return masking(model, batches, masks, progress=False, **options)


@torch.no_grad()
def likelihoods(model, x, y):
    output = copy.deepcopy(model).eval()(x)
    return F.cross_entropy(getattr(output, "logits", output).double(), y, reduction="none").numpy()


def assert_is(ds, model, changed, x, y, tolerance=2e-6):
    """Whether numbers at one mask are those of a changed copy, and differ from those of the model as it is."""
    before, after = likelihoods(model, x, y), likelihoods(changed, x, y)
    assert float(ds.intact_nll) == pytest.approx(before.mean(), abs=tolerance)
    assert float(ds.masked_nll) == pytest.approx(after.mean(), abs=tolerance)
    assert float(ds.nll_change) == pytest.approx((after - before).mean(), abs=tolerance)
    error = (after - before).std(ddof=1) / np.sqrt(len(x))
    assert float(ds.nll_change_se) == pytest.approx(error, abs=tolerance)
    assert np.abs(after - before).max() > 5 * tolerance


def assert_unchanged(ds):
    for name in CHANGES:
        assert float(ds[name]) == pytest.approx(0, abs=1e-6), name


# --- position codes ---------------------------------------------------------------------------------


def timm_model(name, **options):
    import timm

    return timm.create_model(name, num_classes=10, **options)


def timm_swin():
    options = dict(depths=(1, 2), num_heads=(1, 2), embed_dim=8, img_size=56)
    return timm_model("swin_tiny_patch4_window7_224", **options)


def timm_levit():
    options = dict(embed_dim=(16, 24, 32), key_dim=8, num_heads=(2, 2, 2), depth=(1, 1, 1))
    return timm_model("levit_128s", img_size=32, **options)


def timm_eva():
    options = dict(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2, use_rot_pos_emb=True)
    from timm.models.eva import Eva

    return Eva(num_classes=10, **options)


def torchvision_vit():
    from torchvision.models import VisionTransformer

    sizes = dict(num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=10)
    return VisionTransformer(image_size=32, patch_size=8, **sizes)


def torchvision_swin(window=4):
    from torchvision.models import SwinTransformer

    sizes = dict(patch_size=[4, 4], embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=[window, window])
    return SwinTransformer(num_classes=10, **sizes)


def transformers_vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes))


CODES = {
    "ours": (build, 8, ["position"]),
    "ours, fixed": (lambda: build("vit", patch_size=4, dim=12, depth=1, position="sincos"), 8, ["position"]),
    "ours, gated": (lambda: build("convit_nano"), 8, ["position"]),
    "ours, table": (lambda: build("alternet_nano"), 8, ["stages.1.2.attention.position.table"]),
    "ours, mixed in": (lambda: build("simple_vit_nano"), 8, ["position.code"]),
    "ours, in the maps": (lambda: build("model_1_nano"), 8, ["blocks.0.attention.source.code.code"]),
    "timm vit": (
        lambda: timm_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=1),
        32,
        ["pos_embed"],
    ),
    "timm convit": (
        lambda: timm_model("convit_tiny", img_size=64, embed_dim=12, depth=2, local_up_to_layer=1),
        64,
        ["pos_embed"],
    ),
    "timm swin": (
        timm_swin,
        56,
        [f"layers.{place}.attn.relative_position_bias_table" for place in ("0.blocks.0", "1.blocks.0", "1.blocks.1")],
    ),
    "timm, beside rotary codes": (timm_eva, 32, ["pos_embed"]),
    "torchvision vit": (torchvision_vit, 32, ["encoder.pos_embedding"]),
    "torchvision swin": (
        torchvision_swin,
        32,
        [f"features.{stage}.{block}.attn.relative_position_bias_table" for stage in (1, 3) for block in (0, 1)],
    ),
    "transformers vit": (transformers_vit, 32, ["vit.embeddings.position_embeddings"]),
}


def strengthened(model):
    """With codes and layers that start at zero or small made large, so that masking shows."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() or "features" in name or "rope" in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if "pos" in name or "attention_biases" in name:
            tensor.data.copy_(noise)
        elif tensor.ndim == 2:
            tensor.data.copy_(noise / tensor.shape[1] ** 0.5)
    return model


@pytest.mark.parametrize(("construct", "side", "names"), CODES.values(), ids=CODES)
def test_position_codes_of_every_library(construct, side, names):
    torch.manual_seed(0)
    model = strengthened(construct())
    x, y = labelled(side, 6)
    model.eval()(x)  # timm's ConViT fills a buffer the first time
    before = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    ds = measure(model, [(x[:4], y[:4]), (x[4:], y[4:])], "position_codes")
    assert json.loads(ds.attrs["position_codes"]) == names
    assert ds.mask_name.values.tolist() == ["position_codes"]
    assert ds.masked.values.tolist() == [len(names)]
    bare = copy.deepcopy(model)
    for name in names:
        parent, _, child = name.rpartition(".")
        getattr(bare.get_submodule(parent), child).data.zero_()
    assert_is(ds.isel(mask=0), model, bare, x, y)
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_rotary_codes_are_named_as_left_out():
    torch.manual_seed(0)
    ds = measure(timm_eva(), labelled(32, 4), "position_codes")
    reasons = json.loads(ds.left_out.item())
    assert reasons and all(reason.endswith(": a rotary code") and "rope" in reason for reason in reasons)


def test_biases_that_a_model_keeps_are_masked_and_come_back():
    torch.manual_seed(0)
    model = timm_levit().eval()
    strengthened(model)
    x, y = labelled(32, 6)
    with torch.no_grad():
        plain = model(x)  # fills the caches
    ds = measure(model, (x, y), "position_codes")
    bare = copy.deepcopy(model)
    for module in bare.modules():
        if hasattr(module, "attention_biases"):
            module.attention_biases.data.zero_()
            module.attention_bias_cache = {}
    assert ds.masked.item() == sum(hasattr(module, "attention_biases") for module in model.modules())
    assert_is(ds.isel(mask=0), model, bare, x, y)
    with torch.no_grad():
        assert torch.equal(model(x), plain)


def test_patterns_of_ones_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = build()
            self.where = nn.Parameter(torch.randn(16, 48, generator=torch.Generator().manual_seed(0)))

        def forward(self, x):
            tokens = self.net.patches(x) + self.where
            return self.net.head(self.net.norm(self.net.blocks(tokens)).mean(1))

    model, (x, y) = Own(), labelled()
    ds = measure(model, (x, y), "position_codes", patterns="wh?re")
    bare = copy.deepcopy(model)
    bare.where.data.zero_()
    assert_is(ds.isel(mask=0), model, bare, x, y)
    assert ds.attrs["position_codes"] == '["where"]'
    with pytest.raises(ValueError, match=r"is called like place; give patterns= for yours\. Besides .* has where, net"):
        measure(model, (x, y), "position_codes", patterns=["place"])


def test_codes_in_several_places_are_masked_in_all():
    """The same parameter in two modules, which state dicts list twice, and in one module that is registered twice."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = build("vit", dim=12, depth=1), build("vit", dim=12, depth=1)
            self.second.position = self.first.position
            self.again = self.first

        def forward(self, x):
            return self.first(x) + 2 * self.second(x) + 3 * self.again(x)

    model, (x, y) = Twice(), labelled()
    code = model.first.position
    bare = copy.deepcopy(model)
    bare.first.position.data.zero_()
    assert not bare.second.position.any()
    ds = measure(model, (x, y), "position_codes", patterns="*position")
    assert_is(ds.isel(mask=0), model, bare, x, y)
    assert model.first.position is model.second.position is code and code.any()


def test_codes_are_as_they_were_after_an_exception():
    model, (x, y) = build(), labelled()
    code, before = model.position, model.position.clone()

    def interrupt(module, args):
        if not model.position.any():
            raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(model, (x, y), "position_codes")
    handle.remove()
    assert model.position is code and torch.equal(code, before)


# --- gated maps -------------------------------------------------------------------------------------


def timm_convit():
    return timm_model("convit_tiny", img_size=64, embed_dim=12, depth=3, local_up_to_layer=2)


GATED = {
    "ours": (lambda: build("convit_nano"), 8, "gate", 3),
    "timm": (timm_convit, 64, "gating_param", 2),
}


def forced(model, name, value, first):
    """A copy whose first gates are forced open for position (large) or for content (small)."""
    changed = copy.deepcopy(model)
    gates = [parameter for path, parameter in changed.named_parameters() if path.endswith(name)]
    for parameter in gates[first]:
        parameter.data.fill_(value)
    return changed


@pytest.mark.parametrize(("construct", "side", "gate", "count"), GATED.values(), ids=GATED)
def test_masking_a_part_is_forcing_the_gates(construct, side, gate, count):
    torch.manual_seed(0)
    model, (x, y) = construct(), labelled(side, 6)
    strength = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(gate):
            parameter.data.normal_(generator=strength)
    forces = {"content": 40.0, "position": -40.0}
    ds = measure(model, (x, y), ["content", "position"])
    for mask, value in forces.items():
        assert_is(ds.isel(mask=list(forces).index(mask)), model, forced(model, gate, value, slice(None)), x, y)
    assert ds.masked.values.tolist() == [count, count]
    (reason,) = json.loads(ds.left_out.values[0])
    assert reason.endswith(": no gated sum of content and position")

    for per, groups in (
        ("up_to_layer", [slice(n + 1) for n in range(count)]),
        ("layer", [slice(n, n + 1) for n in range(count)]),
    ):
        ds = measure(model, (x, y), ["content", "position"], per=per)
        assert ds.masked_nll.dims == ("mask", "layer") and ds.sizes["layer"] == count + 1
        for index, (_, value) in enumerate(forces.items()):
            for layer, first in enumerate(groups):
                changed = forced(model, gate, value, first)
                assert_is(ds.isel(mask=index, layer=layer), model, changed, x, y)
            assert ds.nll_change.isel(mask=index, layer=-1).isnull()
    assert set(ds.kind.values) == {"msa"}


def test_networks_without_gates_are_refused():
    with pytest.raises(ValueError, match=r"mask 'content': .* \(blocks\.0\.attention: no gated sum of content and"):
        measure(build(), labelled(), ["uniform", "content"])
    with pytest.raises(ValueError, match=r"mask 'uniform': .* \(it applies none between patches\)"):
        measure(build("resnet_nano"), labelled(), "uniform")


# --- windows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [1, 3, 5])
@pytest.mark.parametrize("registers", [None, 2], ids=["patches", "prefix tokens"])
def test_a_window_is_a_mask_before_the_softmax(side, registers):
    options = {} if registers is None else {"patch_size": 2, "dim": 12, "depth": 2, "registers": registers}
    model = build("vit_nano" if registers is None else "vit", **options)
    x, y = labelled()
    ds = measure(model, (x, y), f"window:{side}")
    local = copy.deepcopy(model)
    for block in local.blocks:
        block.attention.mask = Neighbourhood((4, 4), side, prefix=model.num_prefix_tokens)
    assert_is(ds.isel(mask=0), model, local, x, y)


def test_windows_of_single_layers():
    model, (x, y) = build(), labelled()
    ds = measure(model, (x, y), ["window:3", "window:7"], per="layer")
    for layer in range(4):
        local = copy.deepcopy(model)
        local.blocks[layer].attention.mask = Neighbourhood((4, 4), 3)
        assert_is(ds.isel(mask=0, layer=layer), model, local, x, y)
        assert_unchanged(ds.isel(mask=1, layer=layer))
    assert ds.layer_name.values.tolist() == [f"blocks.{layer}.attention" for layer in range(4)]


@pytest.mark.parametrize(
    ("construct", "side", "mask"),
    [
        (build, 8, "window:7"),
        (lambda: build("alternet_nano"), 8, "window:7"),
        (torchvision_swin, 32, "window:7"),
        (lambda: torchvision_swin(3), 32, "window:15"),
        (timm_swin, 56, "window:13"),
        (torchvision_vit, 32, "window:7"),
        (lambda: build("convit_nano"), 8, "window:9"),
    ],
    ids=["ours", "ours, windows", "torchvision swin", "padded windows", "timm swin", "multi-head function", "gated"],
)
def test_a_window_larger_than_the_grid_changes_nothing(construct, side, mask):
    torch.manual_seed(0)
    model, (x, y) = strengthened(construct()), labelled(side, 4)
    assert_unchanged(measure(model, (x, y), mask).isel(mask=0))


def test_windows_are_in_the_image_where_tokens_lie_elsewhere():
    """Windows of 3x3 on a grid of 8x8 are padded and shifted: by hand, from where each token lies in the image."""
    torch.manual_seed(0)
    model = torchvision_swin(3)
    with untouched(model):
        sites = plan(model, labelled(32, 4)).attentions
    assert all(site.positions is not None for site in sites)
    for site in sites[:2]:
        near = _near(site, 3)
        for window, tokens in enumerate(site.positions):
            for query, here in enumerate(tokens):
                for key, there in enumerate(tokens):
                    no_place = np.isnan(here).any() or np.isnan(there).any()
                    expected = no_place or max(abs(here - there)) <= 1
                    assert bool(near[window, query, key]) == expected
    assert np.isnan(sites[0].positions).any()


def test_rows_without_weight_in_the_window_give_nothing():
    class LooksAway(nn.Module):
        """Each of 16 patches looks at the one half the image away, and at nothing else."""

        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Conv2d(3, 6, 2, 2), nn.Linear(6, 10)

        def forward(self, x):
            x = self.embed(x).flatten(2).transpose(1, 2)
            maps = torch.eye(16).roll(8, dims=1).expand(len(x), 1, 16, 16) + 0 * x.mean()
            return self.head((x + (maps @ x[:, None])[:, 0]).mean(1))

    torch.manual_seed(0)
    model, (x, y) = LooksAway(), labelled()
    ds = measure(model, (x, y), ["window:3", "uniform"]).isel(mask=0)
    with torch.no_grad():
        logits = model.head(model.embed(x).flatten(2).mean(-1)).double()
    assert float(ds.masked_nll) == pytest.approx(float(F.cross_entropy(logits, y)), abs=1e-6)


# --- uniform and mean maps --------------------------------------------------------------------------


def test_uniform_maps_are_those_of_queries_of_zeros():
    for model in (build(), build("vit", patch_size=2, dim=12, depth=2, registers=1)):
        x, y = labelled()
        ds = measure(model, (x, y), "uniform")
        flat = copy.deepcopy(model)
        for block in flat.blocks:
            for parameter in block.attention.query_key.parameters():
                parameter.data.zero_()
        assert_is(ds.isel(mask=0), model, flat, x, y)


@pytest.mark.parametrize(("construct", "side"), [(torchvision_swin, 32), (timm_swin, 56)], ids=["torchvision", "timm"])
def test_uniform_maps_keep_to_what_shifted_windows_see(construct, side):
    torch.manual_seed(0)
    model, (x, y) = construct(), labelled(side, 6)
    ds = measure(model, (x, y), "uniform")
    flat = copy.deepcopy(model)
    for module in flat.modules():
        if hasattr(module, "relative_position_bias_table"):
            width = module.qkv.in_features
            module.relative_position_bias_table.data.zero_()
            module.qkv.weight.data[:width].zero_()
            module.qkv.bias.data[:width].zero_()
    assert_is(ds.isel(mask=0), model, flat, x, y, tolerance=1e-7)


class Fixed(nn.Module):
    """An attention layer with given maps `(window, head, query, key)` in the place of its own."""

    def __init__(self, attention, maps):
        super().__init__()
        self.attention, self.maps = attention, maps

    def forward(self, x):
        value = rearrange(self.attention.value(x), "b n (h d) -> b h n d", h=self.attention.heads)
        maps = self.maps.repeat(len(x) // len(self.maps), 1, 1, 1)
        return self.attention.project(rearrange(maps @ value, "b h n d -> b n (h d)"))


@pytest.mark.parametrize(
    ("name", "windows", "side"), [("vit_nano", 1, 8), ("convit_nano", 1, 8), ("alternet_nano", 4, 16)]
)
def test_mean_maps_are_the_means_over_images_of_the_maps_without_masks(name, windows, side):
    model = build(name, image_size=side)
    x, y = labelled(side)
    seen = {}
    with torch.no_grad():
        recording = copy.deepcopy(model).eval()
        for path, module in recording.named_modules():
            if hasattr(module, "weights"):
                module.register_forward_pre_hook(lambda module, args, path=path: seen.update({path: args[0]}))
        recording(x)
        fixed = copy.deepcopy(model)
        for path, inputs in seen.items():
            maps = recording.get_submodule(path).weights(inputs).unflatten(0, (-1, windows)).mean(0)
            parent, _, child = path.rpartition(".")
            setattr(fixed.get_submodule(parent), child, Fixed(fixed.get_submodule(path), maps))
    batches = list(zip(x.split(3), y.split(3), strict=True))
    ds = measure(model, batches, "mean")
    assert_is(ds.isel(mask=0), model, fixed, x, y)
    assert ds.masked.item() == len(seen)


@pytest.mark.parametrize("name", ["model_2_nano", "model_3_nano"])
def test_mean_maps_change_nothing_where_maps_know_no_image(name):
    assert_unchanged(measure(build(name), labelled(), "mean").isel(mask=0))


# --- the dataset, and what cannot be ----------------------------------------------------------------


def test_datasets_keep_the_schema():
    model, (x, y) = build("convit_nano"), labelled()
    masks = ["position_codes", "window:3", "uniform", "mean", "content", "position"]
    ds = measure(model, (x, y), masks)
    check(ds)
    check(measure(model, (x, y), ["uniform", "content"], per="layer"))
    assert ds.mask_name.values.tolist() == masks
    assert ds.masked.values.tolist() == [1, 4, 4, 4, 3, 3]
    assert (ds.attrs["probe"], ds.attrs["per"], ds.attrs["images"]) == ("masking", "network", 10)
    # Each mask is measured as if it were alone.
    for index, mask in enumerate(masks):
        alone = measure(model, (x, y), mask).isel(mask=0, drop=True)
        xr.testing.assert_equal(ds.isel(mask=index, drop=True), alone)


def test_batches_of_any_size_give_the_same_numbers():
    model, (x, y) = build("alternet_nano"), labelled()
    masks = ["position_codes", "window:3", "uniform", "mean"]
    parts = [{"x": images, "label": labels} for images, labels in zip(x.split(3), y.split(3), strict=True)]
    ds = measure(model, parts, masks, forward=lambda model, batch: model(batch["x"]))
    xr.testing.assert_allclose(ds, measure(model, (x, y), masks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("masks", "options", "words"),
    [
        ("unifrom", {}, "unknown mask 'unifrom'.*Did you mean 'uniform'"),
        (["window:4"], {}, "mask 'window:4': a window around a patch has an odd side, such as window:3"),
        (["window"], {}, "mask 'window': a window around a patch"),
        ([], {}, "no masks were given: pass some of position_codes, content"),
        ("uniform", {"per": "head"}, "unknown per 'head'"),
        ("position_codes", {"per": "layer"}, "position codes belong to no single layer: mask them with per='network'"),
    ],
)
def test_masks_that_are_none(masks, options, words):
    with pytest.raises(ValueError, match=words):
        measure(build(), labelled(), masks, **options)


def test_codes_that_are_not_there_labels_and_iterators():
    x, y = labelled()
    with pytest.raises(ValueError, match=r"'position_codes': no parameter or buffer is called like .* has none\."):
        measure(build("resnet_nano"), (x, y), "position_codes")
    for mask in ("uniform", "mean"):
        with pytest.raises(ValueError, match=r"the batch has no targets"):
            measure(build(), [x], mask)
    with pytest.raises(ValueError, match="goes through the batches twice, and an iterator can be read once"):
        measure(build(), iter([(x, y)]), "mean")


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_models_in_any_wrapping_are_handed_back_as_they_were():
    model = build("vit", patch_size=4, dim=12, depth=1)
    x, y = labelled(8, 6)
    masks = ["position_codes", "window:1", "uniform", "mean"]
    expected = measure(model, (x, y), masks)
    for wrapped in (torch.compile(copy.deepcopy(model), backend="eager"), nn.DataParallel(copy.deepcopy(model))):
        wrapped.train()
        before, random = copy.deepcopy(wrapped.state_dict()), torch.get_rng_state()
        xr.testing.assert_equal(measure(wrapped, (x, y), masks), expected)
        assert wrapped.training
        assert torch.equal(random, torch.get_rng_state())
        assert all(torch.equal(before[name], tensor) for name, tensor in wrapped.state_dict().items())
        assert all(p.grad is None and p.requires_grad for p in wrapped.parameters())


def test_an_interrupted_masking_goes_on_with_the_same_mean(tmp_path):
    model, (x, y) = build("vit", patch_size=4, dim=12, depth=1), labelled(8, 9)
    batches, masks = list(zip(x.split(3), y.split(3), strict=True)), ["position_codes", "mean"]
    expected, path, calls = measure(model, batches, masks), tmp_path / "masking.nc", []

    def count(module, args):
        calls.append(len(args[0]))
        if len(calls) == 14:  # 2 + 3 for the means; then 2 for the plan and 3 for each batch
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(count)
    with pytest.raises(KeyboardInterrupt):
        measure(model, batches, masks, path=path)
    handle.remove()
    assert load(path).attrs["batches"] == 2
    found = measure(model, batches, masks, path=path)
    xr.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="holds another measurement: mean_of was"):
        measure(model, batches[:2], masks, path=path)


class OfAnySize(nn.Module):
    """Attention between patches, of images of any size."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 6, 4, 4), nn.Linear(6, 10)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + (x @ x.transpose(1, 2)).softmax(-1) @ x
        return self.head(x.mean(1))


def test_mean_maps_are_those_of_images_of_one_size():
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"images of \(3, 16, 16\) after images of \(3, 8, 8\)"):
        measure(OfAnySize(), [(x[..., :8, :8], y), (x, y)], ["mean"])


def test_outputs_that_are_no_numbers_are_never_right():
    model, (x, y) = build("vit", patch_size=4, dim=12, depth=1), labelled(8, 4)
    ds = measure(model, (x, y * 0), ["uniform"], forward=lambda model, batch: model(batch[0]) * torch.nan)
    assert np.isnan(ds.intact_accuracy) and np.isnan(ds.masked_accuracy).all()
