"""Public bug reports of other tools, one small test each: what they got wrong is right here.

Numbers are those of the project's list of cases; where a whole kind of fault is tested, that is in the tests of the
room it belongs to.
"""

import copy
import inspect
import json
import re
import shutil
import tomllib
import warnings
from collections import defaultdict
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.text import Text
from torch import nn

import vitprobe as vp
from vitprobe.attach import Layout, infer_layout
from vitprobe.calling import images_of
from vitprobe.curvature import Lanczos, LossOperator
from vitprobe.curvature.directions import random_direction
from vitprobe.models.convit import gpsa
from vitprobe.probes import Fourier
from vitprobe.results import check, provenance
from vitprobe.training.mixing import mix_batch, soft_targets

ROOT = Path(__file__).parents[1]
quiet = {"progress": False}


def images(count: int = 2, side: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(0))


def timm_vit(**options) -> nn.Module:
    """timm's ViT, small, with its fused attention."""
    from timm.models.vision_transformer import VisionTransformer

    sizes = dict(img_size=32, patch_size=8, embed_dim=12, depth=2, num_heads=3, num_classes=4)
    torch.manual_seed(0)
    return VisionTransformer(**{**sizes, **options})


def transformers_vit(**options) -> nn.Module:
    """The ViT of transformers, small, with the attention that it chooses itself."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=24)
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=4, **sizes, **options))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` as PyTorch builds it, over 16 patches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, 8, 8, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x).flatten(2).mT).mean(1))


def distance_by_head(maps: torch.Tensor) -> torch.Tensor:
    """Attention-weighted distance of maps over 4x4 patches, mean over images and queries."""
    place = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))
    return (maps * torch.cdist(place, place)).sum(-1).mean((0, 2)).detach()


class Diagonal(nn.Module):
    """A model whose loss has the given eigenvalues, whatever the batch: `mean_output` of half a weighted square."""

    def __init__(self, *spectrum: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(spectrum), dtype=torch.float64))
        self.register_buffer("spectrum", torch.tensor(spectrum, dtype=torch.float64))

    def forward(self, x):
        return 0.5 * (self.spectrum * self.weight**2).sum().expand(len(x), 1)


def mean_output(output, targets):
    return output.mean()


def tiny_net(seed: int = 0) -> nn.Module:
    options = dict(image_size=8, channels=1, patch_size=4, dim=8, depth=1, heads=2, mlp_ratio=1.0)
    return vp.create_model("vit", num_classes=10, seed=seed, **options)


def labelled(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return images(count, 8, 1), torch.arange(count) % 10


# --- attention maps and activations -----------------------------------------------------------------


def test_case_01_fused_attention_of_timm_has_maps():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=12, num_heads=2)
    assert all(block.attn.fused_attn for block in model.blocks)
    assert vp.nonlocality(model, images(), **quiet).nonlocality.shape == (12, 2)


def test_case_02_default_attention_of_transformers_has_maps_and_stays():
    model = transformers_vit()
    assert model.config._attn_implementation == "sdpa"
    ds = vp.nonlocality(model, [{"pixel_values": images()}], **quiet)
    assert model.config._attn_implementation == "sdpa"
    eager = transformers_vit(attn_implementation="eager")
    expected = vp.nonlocality(eager, [{"pixel_values": images()}], **quiet)
    xr.testing.assert_allclose(ds.nonlocality, expected.nonlocality, rtol=1e-5)
    assert ds.nonlocality.shape == (2, 3)


@pytest.mark.parametrize("asked", [False, True])
def test_case_03_activations_do_not_hang_on_flags(asked):
    from transformers import PretrainedConfig, PreTrainedModel

    class Ignoring(PreTrainedModel):
        """Takes the flags and forgets them."""

        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.net = timm_vit()

        def forward(self, pixel_values, output_hidden_states=None, output_attentions=None):
            return {"logits": self.net(pixel_values)}

    flags = {"output_hidden_states": asked, "output_attentions": asked}
    model = Ignoring(PretrainedConfig(**flags))
    found = vp.probe(model, [{"pixel_values": images(), **flags}], [vp.Fourier(), vp.Nonlocality()], **quiet)
    assert found["fourier"].sizes["layer"] == 5 and found["nonlocality"].sizes["layer"] == 2


def test_case_04_encoder_fast_path_shows_both_layers():
    model = Encoder().eval()
    with torch.no_grad():
        ds = vp.nonlocality(model, images(), **quiet)
    assert ds.layer_name.values.tolist() == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]


def test_case_05_maps_of_an_encoder_by_head():
    model, x = Encoder().eval(), images()
    ds = vp.nonlocality(model, x, **quiet)
    with torch.no_grad():
        tokens = model.embed(x).flatten(2).mT
        maps = model.encoder.layers[0].self_attn(tokens, tokens, tokens, average_attn_weights=False)[1]
    np.testing.assert_allclose(ds.nonlocality[0], distance_by_head(maps), rtol=1e-5)
    assert abs(float(ds.nonlocality[0, 0] - ds.nonlocality[0, 1])) > 1e-4


def test_case_06_compiled_and_called_before():
    compiled = torch.compile(timm_vit().eval(), backend="eager")
    with torch.no_grad():
        compiled(images())
    xr.testing.assert_equal(
        vp.nonlocality(compiled, images(), **quiet), vp.nonlocality(timm_vit().eval(), images(), **quiet)
    )


def test_case_07_models_that_fx_cannot_trace():
    class Deciding(nn.Module):
        """Looks at its data."""

        def __init__(self) -> None:
            super().__init__()
            self.net = timm_vit()

        def forward(self, x):
            return self.net(x) if x.mean() < 100 else x

    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(Deciding())
    assert vp.fourier(Deciding(), images(), **quiet).sizes["layer"] == 5
    sources = [file.read_text() for file in (ROOT / "vitprobe").rglob("*.py")]
    assert not any(re.search(r"torch\.fx|from torch import .*\bfx\b|feature_extraction", text) for text in sources)


def test_case_08_attention_that_cannot_be_seen_is_a_sentence_of_this_library():
    from timm.layers import Attention

    class Extension(Attention):
        """timm's attention with the kernel of an extension, which PyTorch's functions do not see."""

        def forward(self, x, attn_mask=None, **options):
            query, key, value = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            mixed = torch.ops.aten.scaled_dot_product_attention(query, key, value)
            return self.proj(mixed.transpose(1, 2).flatten(2))

    model = timm_vit()
    for block in model.blocks:
        block.attn = Extension(12, 3)
    said = r"nonlocality: .*no attention maps.*run it with SDPA.*blocks\.0\.attn.*(blocks\.1\.attn|1 more)"
    with pytest.raises(ValueError, match=said):
        vp.nonlocality(model, images(), **quiet)


def test_case_09_registers_leave_a_grid():
    ds = vp.nonlocality(timm_vit(reg_tokens=4), images(), **quiet)
    assert (ds.prefix == 5).all() and (ds.grid_h == 4).all() and (ds.grid_w == 4).all()
    # Nothing declared: 29 x 29 patches of DINOv2, a class token and four registers.
    assert infer_layout((2, 846, 8), batch=2, image=(406, 406)) == Layout("bnc", (29, 29), 5)


def test_case_10_non_square_images():
    ds = vp.nonlocality(timm_vit(img_size=(224, 112), patch_size=16), torch.randn(2, 3, 224, 112), **quiet)
    assert set(zip(ds.grid_h.values, ds.grid_w.values, ds.prefix.values, strict=True)) == {(14, 7, 1)}


def test_case_11_blocks_without_a_class_token():
    from timm.models.convit import ConVit

    model = ConVit(img_size=32, patch_size=8, embed_dim=12, depth=2, num_heads=4, local_up_to_layer=1, num_classes=4)
    ds = vp.nonlocality(model, images(), **quiet)
    assert ds.prefix.values.tolist() == [0, 1] and ds.grid_h.values.tolist() == [4, 4]


def test_case_13_windows_and_shifts():
    from timm.models.swin_transformer import SwinTransformer

    sizes = dict(embed_dim=8, depths=(2,), num_heads=(2,), num_classes=4)
    model = SwinTransformer(img_size=32, patch_size=4, window_size=4, **sizes)
    ds = vp.nonlocality(model, images(), **quiet)
    assert ds.windows.values.tolist() == [4, 4] and ds.grid_h.values.tolist() == [4, 4]
    assert float(ds.nonlocality.min()) > 0 and float(ds.nonlocality.max()) < 3 * 2**0.5  # a window's diagonal
    # Maps of windows do not multiply to a map of the image: there is no rollout to get wrong.
    assert not hasattr(vp, "rollout") and "rollout" not in vp.probes.__all__


def test_case_16_nonlocality_of_the_layers_own_input_or_of_the_patch_embedding():
    """The published code gives every block the bare patch embedding, without norm and position code."""
    options = dict(image_size=32, patch_size=8, dim=12, depth=2, gpsa_layers=2, gate=-2.0, num_classes=4)
    model, x = vp.create_model("convit", seed=0, **options), images()
    first, second = model.local_blocks
    with torch.no_grad():
        own = second.attention_norm(first(model.patches(x) + model.position))
        inputs = {"layer": own, "patch embedding": model.patches(x)}
    for name, tokens in inputs.items():
        ds = vp.nonlocality(model, x, inputs=name, **quiet)
        np.testing.assert_allclose(ds.nonlocality[1], distance_by_head(second.attention.weights(tokens)), rtol=1e-4)
        assert ds.attrs["inputs"] == name
        same = np.array_equal(ds.nonlocality, vp.nonlocality(model, x, **quiet).nonlocality)
        assert same == (name == "layer")


@pytest.mark.parametrize("gate", [-30.0, -1.0, 0.0, 1.0, 30.0])
def test_case_17_gated_rows_sum_to_one(gate):
    maps = gpsa(12, 4, grid=(2, 3), gate=gate).weights(torch.randn(2, 6, 12))
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 4, 6))


# --- curvature --------------------------------------------------------------------------------------


def test_case_18_second_derivatives_through_fused_attention():
    model, x, y = timm_vit().eval(), images(), torch.arange(2)
    slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(sum(slope.sum() for slope in slopes), list(model.parameters()))
    plain = copy.deepcopy(model)
    for block in plain.blocks:
        block.attn.fused_attn = False
    found, expected = (vp.hessian_eigenvalues(one, [(x, y)], k=1, **quiet) for one in (model, plain))
    np.testing.assert_allclose(found.eigenvalue, expected.eigenvalue, rtol=1e-4)


def test_case_19_forward_derivatives_through_fused_attention():
    model, x, y = timm_vit().eval(), images(), torch.arange(2)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    along = {name: torch.randn_like(p) for name, p in weights.items()}

    def loss(weights):
        return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(loss, (weights,), (along,))
    operator = LossOperator(
        model, [(x, y)], forward=lambda m, b: (m(b[0]), b[1]), images=lambda b: len(images_of(b)), loss=F.cross_entropy
    )
    with operator.quiet():
        slope = torch.func.jvp(loss, (weights,), (along,))[1]
    expected = operator.gradient() @ torch.cat([step.flatten() for step in along.values()])
    torch.testing.assert_close(slope.detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def spectrum():
    """A Hessian spectrum as published: augmented batches of 16 of the training images, with the decay."""
    data = vp.load_data("digits", train_size=100)
    recipe = vp.Recipe(augment="crop", label_smoothing=0.1, weight_decay=0.05)
    batches = vp.TrainingBatches(data, recipe, share=0.3)
    return vp.hessian_eigenvalues(tiny_net(), batches, k=3, weight_decay=recipe.weight_decay, **quiet)


def test_case_20_hessian_spectra_as_published(spectrum):
    eigenvalues = spectrum.eigenvalue.values
    assert eigenvalues.shape == (2, 3) and spectrum.converged.values.all()
    assert spectrum.attrs["nep"] == (eigenvalues < 0).mean()
    assert spectrum.attrs["ape"] == pytest.approx(eigenvalues[eigenvalues > 0].mean())
    check(spectrum)


def test_case_21_weight_decay_shifts_every_eigenvalue():
    options = dict(which="LA", dtype=torch.float64, tol=1e-9, k=3, **quiet)
    plain, decayed = (
        vp.hessian_eigenvalues(tiny_net(), [labelled()], weight_decay=decay, **options) for decay in (0.0, 0.05)
    )
    np.testing.assert_allclose(decayed.eigenvalue, plain.eigenvalue + 0.05, rtol=1e-9)


def test_case_22_protocols_stand_in_the_dataset_and_in_the_figure(spectrum):
    """Two papers contradict each other because nobody can see what they differ in."""
    said = {name: spectrum.attrs[name] for name in ("loss", "weight_decay", "augment", "batch_size", "split")}
    assert said["loss"] == "torch.nn.functional.cross_entropy"
    assert (said["weight_decay"], said["augment"], said["batch_size"], said["split"]) == (0.05, "crop", 16, "train")
    texts = " ".join(text.get_text() for text in vp.draw(spectrum).findobj(Text))
    assert all(word in texts for word in ("cross_entropy", "0.05", "crop", "16", "train")), texts


def test_case_23_density_weights_are_squared_first_components():
    ds = vp.hessian_density(Diagonal(1.0, 2.0, 4.0), [labelled()], loss=mean_output, samples=2, steps=3, **quiet)
    np.testing.assert_allclose(ds.node, [[1, 2, 4]] * 2, rtol=1e-12)
    np.testing.assert_allclose(ds.weight, 1 / 3, rtol=1e-12)  # of a vector of signs
    lanczos, matrix = Lanczos(torch.randn(9, dtype=torch.float64)), torch.diag(torch.arange(9.0).double())
    for _ in range(5):
        lanczos.grow(matrix @ lanczos.direction)
    off = np.diag(lanczos.betas[:-1], 1)
    values, vectors = np.linalg.eigh(np.diag(lanczos.alphas) + off + off.T)
    ritz, _, coordinates = lanczos.ritz()
    np.testing.assert_allclose(ritz, values, rtol=1e-12)
    np.testing.assert_allclose(coordinates[0] ** 2, vectors[0] ** 2, rtol=1e-9)
    assert (coordinates[0] ** 2).sum() == pytest.approx(1, rel=1e-12)


def test_case_24_same_eigenvalues_whatever_ran_before():
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        runs.append(vp.hessian_eigenvalues(tiny_net(), [labelled()], k=2, **quiet))
    xr.testing.assert_equal(*runs)
    other = vp.hessian_eigenvalues(tiny_net(), [labelled()], k=2, seed=1, **quiet)
    assert (abs(other.eigenvalue - runs[0].eigenvalue) <= other.residual + runs[0].residual).all()


def test_case_25_batches_together_are_their_union():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False)).double()
    x, y = images(4, 2, 1).double(), torch.tensor([0, 1, 1, 0])

    def loss(weight):
        return F.cross_entropy(x.flatten(1) @ weight.view(2, 4).T, y)

    dense = torch.autograd.functional.hessian(loss, model[1].weight.detach().flatten())
    parts = [(x[:3], y[:3]), (x[3:], y[3:])]
    ds = vp.hessian_eigenvalues(model, parts, k=2, per="dataset", tol=1e-9, which="LA", **quiet)
    np.testing.assert_allclose(ds.eigenvalue[0], torch.linalg.eigvalsh(dense).flip(0)[:2], rtol=1e-9)


def test_case_26_batches_and_outputs_of_transformers():
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = transformers_vit()

        def forward(self, x):
            return self.net(pixel_values=x).logits

    x, y = images(), torch.arange(2)
    found = vp.hessian_eigenvalues(transformers_vit(), [{"pixel_values": x, "labels": y}], k=1, **quiet)
    np.testing.assert_array_equal(found.eigenvalue, vp.hessian_eigenvalues(Logits(), [(x, y)], k=1, **quiet).eigenvalue)


# --- landscapes and definitions ---------------------------------------------------------------------


def test_case_28_filter_normalisation_of_biases():
    weights = dict(nn.Linear(3, 2).named_parameters())
    li, layer = (
        random_direction(weights, normalisation=kind, generator=torch.Generator().manual_seed(0))
        for kind in ("li", "layer")
    )
    assert not li["bias"].any()
    torch.testing.assert_close(li["weight"].norm(dim=1), weights["weight"].detach().norm(dim=1))
    torch.testing.assert_close(layer["bias"].norm(), weights["bias"].detach().norm())
    assert "less than two dimensions get zero" in random_direction.__doc__


def test_case_29_axes_of_a_landscape_say_what_they_are():
    ds = vp.loss_landscape(tiny_net(), [labelled()], points=2, normalisation="layer", **quiet)
    for axis in "xy":
        assert ds[axis].attrs == {"long_name": f"steps along direction {axis}, normalised by 'layer'", "units": "1"}
    assert ds.attrs["normalisation"] == "layer" and ds.nll.attrs["units"] == "nats"


def test_case_30_variance_and_amplitude_are_what_their_docstrings_say():
    """A diagonal wave of amplitude 3 on two images of different brightness."""
    y, x = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    wave = 3 * torch.cos(2 * np.pi * (x + y) / 8)
    batch = torch.stack([wave - 5, wave + 5])[:, None]
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2))
    with torch.no_grad():
        model[0].weight.fill_(1)
        model[0].bias.zero_()
    ds = vp.feature_variance(model, batch, layers="0", **quiet)
    np.testing.assert_allclose(ds.variance, 9 / 2 * 64 / 63, rtol=1e-5)  # over positions, not over images
    across = vp.feature_variance(model, batch, layers="0", over="images", **quiet)
    np.testing.assert_allclose(across.variance, 50, rtol=1e-5)
    amplitude = vp.fourier(model, batch, layers="0", **quiet).log_amplitude.sel(layer=0)
    np.testing.assert_allclose(amplitude.sel(frequency=0.25), np.log(3 * 64 / 2), rtol=1e-5)
    np.testing.assert_allclose(amplitude.sel(frequency=0), np.log(5 * 64), rtol=1e-5)
    assert "variance over rows and columns" in vp.FeatureVariance.__doc__
    assert "natural logarithm" in Fourier.__doc__ and "unnormalised" in Fourier.__doc__


# --- files ------------------------------------------------------------------------------------------


def result(values=(1.0, 2.0), **coords) -> xr.Dataset:
    """A dataset that keeps the schema."""
    variable = ("layer", np.asarray(values), {"long_name": "a number", "units": "1"})
    return xr.Dataset({"value": variable}, {"layer": np.arange(len(values)), **coords}, provenance(title="test"))


@pytest.mark.parametrize("value", [None, {"a": 1}], ids=["None", "dict"])
def test_case_33_attributes_that_a_file_cannot_hold(value, tmp_path):
    with pytest.raises(TypeError, match=r"attribute 'a' of the dataset is a (NoneType|dict)"):
        vp.save(result().assign_attrs(a=value), tmp_path / "folder" / "r.nc")
    assert not list(tmp_path.iterdir())
    assert json.loads(provenance(title="test", config={"a": value})["config"]) == {"a": value}


def test_case_35_complex_numbers(tmp_path):
    with pytest.raises(TypeError, match=r"complex128.*store amplitude and phase"):
        vp.save(result(np.fft.fft([1.0, 2.0])), tmp_path / "r.nc")


def test_case_36_a_failed_overwrite_leaves_the_old_file(tmp_path, monkeypatch):
    path = vp.save(result(), tmp_path / "r.nc")
    before = path.read_bytes()

    def fail(self, file, **options):
        Path(file).write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(xr.Dataset, "to_netcdf", fail)
    with pytest.raises(OSError, match="the disk is full"):
        vp.save(result((3.0, 4.0)), path)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["r.nc"]


def test_case_38_text_is_not_compressed(tmp_path):
    names = [f"{'a long name ' * 20}{i}" for i in range(1000)]
    path = vp.save(result(np.arange(1000.0), layer_name=("layer", names)), tmp_path / "r.nc")
    with netCDF4.Dataset(path) as file:
        assert not (file["layer_name"].filters() or {}).get("zlib")
        assert file["layer_name"][999] == names[999]


def test_case_39_a_multiindex_is_refused(tmp_path):
    stacked = result().expand_dims(head=[0, 1]).stack(run=("layer", "head"))
    with pytest.raises(TypeError, match=r"MultiIndex, which netCDF lacks; type ds\.unstack"):
        vp.save(stacked, tmp_path / "r.nc")


def test_case_40_coordinates_have_no_fill_value(tmp_path):
    path = vp.save(result((1.0, np.nan), depth=("layer", [0.0, 1.0])), tmp_path / "r.nc")
    with netCDF4.Dataset(path) as file:
        assert "_FillValue" not in file["depth"].ncattrs() and "_FillValue" not in file["layer"].ncattrs()
        assert np.isnan(file["value"].getncattr("_FillValue"))


def test_case_41_one_family_of_dimensions_in_a_dataset(tmp_path):
    other = xr.DataArray(np.zeros(3), {"epoch": range(3)}, ["epoch"], attrs={"long_name": "b", "units": "1"})
    with pytest.raises(ValueError, match=r"to_dataframe\(\) would invent rows"):
        vp.save(result().assign(other=other), tmp_path / "r.nc")
    assert len(result().to_dataframe()) == 2


def test_case_42_stacked_runs_keep_both_recipes():
    first, second = (result().assign_attrs(recipe=f'{{"seed": {seed}}}', same="yes") for seed in (0, 1))
    ds = vp.stack_runs([first, second])
    assert ds.recipe.dims == ("run",) and ds.recipe.values.tolist() == ['{"seed": 0}', '{"seed": 1}']
    assert ds.attrs["same"] == "yes" and "recipe" not in ds.attrs


def test_case_43_h5py_is_no_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [one for one in project["dependencies"] if re.match(r"h5(py|netcdf)", one)]
    sources = [file.read_text() for file in (ROOT / "vitprobe").rglob("*.py")]
    assert not any(re.search(r"^\s*(import|from) h5(py|netcdf)", text, re.MULTILINE) for text in sources)


# --- training ---------------------------------------------------------------------------------------


def test_case_44_patches_of_small_images_are_small():
    for name in ("vit_ti", "simple_vit_micro", "convit_ti", "convmixer_micro"):
        model = vp.create_model(name, image_size=32)
        project = next(module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear))
        assert project.weight[0].numel() <= 3 * 4 * 4, name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vp.create_model("vit", image_size=32, patch_size=16, dim=12, depth=1)
    assert "use patches of 2 or 4 pixels: with 16 a ViT sees four tokens" in (ROOT / "README.md").read_text()


STUDIES = sorted(
    file for file in (ROOT / "studies").rglob("*.py") if re.search(r"Run\b[^\0]*STUDY = ", file.read_text())
)


def of_any_seed(config):
    """A run's configuration without the seeds of its recipe, of its teacher's and of its first phase's."""
    if isinstance(config, dict):
        return {key: None if key == "seed" else of_any_seed(value) for key, value in config.items()}
    return config


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_case_45_studies_that_train_say_which_accuracy_to_expect(file):
    expected = file.read_text().split('"""')[1].partition("\nExpected ")[2]
    assert all(word in expected for word in ("accuracy", "seed", "recipe")), "the header does not say what to expect"
    result = ROOT / "results" / file.parent.name / f"{file.stem}_cpu.nc"
    if result.exists():
        ds = vp.load(result)
        said = np.array([float(number) for number in re.findall(r"(\d+(?:\.\d+)?) %", expected)])
        configs = [json.loads(str(config)) for config in ds.run_config.values]
        of_network = defaultdict(list)  # by all that makes it but the seed
        for config, accuracy in zip(configs, ds.get("network_accuracy", ds.accuracy).values, strict=True):
            of_network[json.dumps(of_any_seed(config), sort_keys=True)].append(float(accuracy))
        far = {
            name: np.mean(each)
            for name, each in of_network.items()
            if np.isfinite(each).all() and abs(said - np.mean(each)).min() > 0.5
        }
        assert not far, far
        assert [config["recipe"]["seed"] for config in configs] == ds.seed.values.tolist()


def test_case_46_mixup_hides_no_label_smoothing():
    recipe = vp.Recipe(mixup=1.0)
    assert recipe.label_smoothing == 0.0
    targets = soft_targets(torch.arange(6), 10, recipe.label_smoothing)
    mixed = mix_batch(images(6, 8), targets, recipe, np.random.default_rng(0))[1]
    assert ((mixed > 0).sum(1) == 2).all()


RECIPE = vp.Recipe(epochs=3, batch_size=16, warmup_epochs=0.0, augment="crop")


class StopError(Exception):
    """The machine goes away."""


def train(data, folder, *, stop: int | None = None):
    """Weights and history, or a stop after an epoch."""

    def on_epoch(model, row):
        if row["epoch"] == stop:
            raise StopError

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    history = vp.fit(model, data, RECIPE, folder=folder, on_epoch=on_epoch, **quiet)
    return model, history.drop_vars("seconds")


@pytest.fixture(scope="module")
def digits():
    return vp.load_data("digits", train_size=40, test_size=20)


def test_case_49_a_resumed_run_has_its_own_epochs_order(digits, tmp_path):
    loader = digits.loader("train", batch_size=40, seed=0)
    orders = []
    for epoch in (0, 1, 1):
        loader.epoch = epoch
        orders.append(next(iter(loader))[1])
        torch.rand(3)
    assert not torch.equal(orders[0], orders[1]) and torch.equal(orders[1], orders[2])
    whole, expected = train(digits, None)
    with pytest.raises(StopError):
        train(digits, tmp_path, stop=1)
    resumed, history = train(digits, tmp_path)
    assert torch.equal(whole[1].weight, resumed[1].weight) and torch.equal(whole[1].bias, resumed[1].bias)
    xr.testing.assert_equal(history, expected)


def test_case_50_initialisation_is_a_named_argument():
    """timm and transformers start their patch embedding in different ways."""
    models = {style: timm_vit() for style in ("timm", "transformers")}
    for style, model in models.items():
        vp.initializers.default_(model, style, seed=0)
        assert style in model.initialisation
    stds = {style: float(model.patch_embed.proj.weight.detach().std()) for style, model in models.items()}
    assert stds["transformers"] == pytest.approx(0.02, rel=0.1)
    assert stds["timm"] == pytest.approx((3 * 3 * 8 * 8) ** -0.5, rel=0.1)  # uniform on ±1/sqrt(fan in)
    assert not models["transformers"].patch_embed.proj.bias.any() and models["timm"].patch_embed.proj.bias.any()
    assert inspect.signature(vp.initializers.default_).parameters["style"].default is inspect.Parameter.empty


def test_case_51_a_folder_is_all_that_a_training_needs_to_go_on(digits, tmp_path):
    """Wherever the job starts again: nothing outside the folder, and no path in it, is needed."""
    whole, expected = train(digits, tmp_path / "whole")
    with pytest.raises(StopError):
        train(digits, tmp_path / "before", stop=2)
    assert str(tmp_path) not in (tmp_path / "before" / "progress.json").read_text()
    shutil.move(tmp_path / "before", tmp_path / "elsewhere" / "after")
    resumed, history = train(digits, tmp_path / "elsewhere" / "after")
    assert torch.equal(whole[1].weight, resumed[1].weight)
    xr.testing.assert_equal(history, expected)


def test_all_cases_are_here():
    numbers = {int(number) for number in re.findall(r"^def test_case_(\d+)_", Path(__file__).read_text(), re.MULTILINE)}
    left_out = {12, 14, 15, 27, 31, 32, 34, 37, 47, 48}  # no cases of these numbers
    assert numbers == set(range(1, 52)) - left_out
