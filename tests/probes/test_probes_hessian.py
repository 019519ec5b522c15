"""Hessian eigenvalues of models, against dense truth and against PyHessian."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitprobe as vp
from vitprobe.results import check


def tiny(seed: int = 0) -> nn.Module:
    options = dict(patch_size=4, dim=8, depth=1, heads=2, mlp_ratio=1.0)
    return vp.create_model("vit", image_size=8, channels=1, num_classes=3, seed=seed, **options)


def batches(count: int = 2, images: int = 6):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(images, 1, 8, 8, generator=generator), torch.randint(3, (images,), generator=generator))
        for _ in range(count)
    ]


def truth(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """All eigenvalues by a dense Hessian in float64, largest magnitude first."""
    model = model.double().eval()
    named = dict(model.named_parameters())
    sizes = [p.numel() for p in named.values()]

    def value(flat):
        parts = [part.view_as(p) for part, p in zip(flat.split(sizes), named.values(), strict=True)]
        return F.cross_entropy(
            torch.func.functional_call(model, dict(zip(named, parts, strict=True)), (x.double(),)), y
        )

    flat = torch.cat([p.detach().reshape(-1) for p in named.values()])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        values = torch.linalg.eigvalsh(torch.func.jacrev(torch.func.grad(value), chunk_size=64)(flat)).numpy()
    return values[np.argsort(-np.abs(values))]


def test_each_batch_and_all_together():
    data = batches()
    ds = vp.hessian_eigenvalues(tiny(), data, dtype=torch.float64, tol=1e-8)
    for row, (x, y) in zip(ds.eigenvalue.values, data, strict=True):
        np.testing.assert_allclose(row, truth(tiny(), x, y)[:5], rtol=1e-8)
    both = vp.hessian_eigenvalues(tiny(), data, per="dataset", dtype=torch.float64, tol=1e-8)
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    np.testing.assert_allclose(both.eigenvalue.values[0], truth(tiny(), x, y)[:5], rtol=1e-8)
    assert both.images.values.tolist() == [12]


def test_single_precision_is_within_its_residual():
    (x, y) = batches(1)[0]
    ds = vp.hessian_eigenvalues(tiny(), [(x, y)])
    assert ds.converged.values.all()
    error = np.abs(ds.eigenvalue.values[0] - truth(tiny(), x, y)[:5])
    assert (error <= ds.residual.values[0] + 1e-5 * np.abs(ds.eigenvalue.values[0])).all()
    assert (ds.residual <= 1e-3 * abs(ds.eigenvalue)).all()


def test_weight_decay_shifts_every_eigenvalue():
    data = batches(1)
    plain, decayed = (
        vp.hessian_eigenvalues(tiny(), data, which="LA", dtype=torch.float64, tol=1e-9, weight_decay=wd)
        for wd in (0.0, 0.05)
    )
    np.testing.assert_allclose(decayed.eigenvalue, plain.eigenvalue + 0.05, rtol=1e-9)


def test_power_is_pyhessian_and_its_residuals_tell():
    (x, y) = batches(1)[0]
    with pytest.warns(UserWarning, match="not converged"):
        ds = vp.hessian_eigenvalues(tiny(), [(x, y)], k=2, method="power", tol=1e-7)
    values = truth(tiny(), x, y)
    # Whatever it returned, an eigenvalue lies within each residual.
    for value, residual in zip(ds.eigenvalue.values[0], ds.residual.values[0], strict=True):
        assert np.abs(values - value).min() <= residual + 1e-5
    assert 2 < int(ds.products[0]) <= 200


def test_untouched_repeatable_and_saved(tmp_path):
    model, data = tiny().train(), batches()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = vp.hessian_eigenvalues(model, data)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    torch.rand(3)
    second = vp.hessian_eigenvalues(model, data)
    np.testing.assert_array_equal(first.eigenvalue, second.eigenvalue)
    check(first)
    again = vp.load(vp.save(first, tmp_path / "h.nc"))
    assert again.eigenvalue.to_dataframe().reset_index().columns.tolist() == [
        "batch",
        "rank",
        "fingerprint",
        "eigenvalue",
    ]
    assert again.attrs["which"] == "LM" and again.attrs["per"] == "batch"


def test_soft_targets_and_mappings():
    x, y = batches(1)[0]
    hard = vp.hessian_eigenvalues(tiny(), [(x, y)], dtype=torch.float64)
    soft = vp.hessian_eigenvalues(tiny(), [(x, F.one_hot(y, 3).double())], dtype=torch.float64)
    np.testing.assert_allclose(soft.eigenvalue, hard.eigenvalue, rtol=1e-6)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny()

        def forward(self, pixel_values):
            return {"logits": self.inner(pixel_values)}

    named = vp.hessian_eigenvalues(Named(), [{"pixel_values": x, "labels": y}], dtype=torch.float64)
    np.testing.assert_allclose(named.eigenvalue, hard.eigenvalue, rtol=1e-6)


def test_a_foreign_vit_with_fused_attention():
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=4
    )
    x, y = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
    ds = vp.hessian_eigenvalues(model, [(x, y)], k=2)
    assert ds.converged.values.all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"which": "LX"}, "unknown which 'LX'"),
        ({"per": "image"}, "unknown per"),
        ({"method": "powr"}, "Did you mean 'power'"),
        ({"k": 0}, "at least 1"),
        ({"decay": "square"}, "unknown decay"),
        ({"stack": 2, "per": "dataset"}, "per='batch'"),
        ({"method": "power", "which": "LA"}, "published protocol"),
        ({"method": "power", "per": "dataset"}, "one batch at a time"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        vp.hessian_eigenvalues(tiny(), batches(), **options)


def test_no_labels_and_no_batches():
    with pytest.raises(ValueError, match="the batch has no targets"):
        vp.hessian_eigenvalues(tiny(), [batches(1)[0][0]])
    with pytest.raises(ValueError, match="empty"):
        vp.hessian_eigenvalues(tiny(), [])


def test_one_batch_without_a_list_around_it():
    (x, y) = batches(1)[0]
    alone, listed = vp.hessian_eigenvalues(tiny(), (x, y)), vp.hessian_eigenvalues(tiny(), [(x, y)])
    np.testing.assert_array_equal(alone.eigenvalue, listed.eigenvalue)


def alike(a, b, **tolerance) -> None:
    for name in ("eigenvalue", "residual", "products", "loss", "gradient_norm", "images"):
        np.testing.assert_allclose(a[name], b[name], **tolerance)


def test_stacked_batches_are_each_alone():
    data = [*batches(3), *batches(1, images=4), *batches(2)]
    options = dict(dtype=torch.float64, tol=1e-8, weight_decay=0.05)
    alone, stacked = (vp.hessian_eigenvalues(tiny(), data, stack=stack, **options) for stack in (1, 2))
    np.testing.assert_allclose(stacked.eigenvalue, alone.eigenvalue, rtol=1e-9)
    np.testing.assert_allclose(stacked.loss, alone.loss, rtol=1e-12)
    np.testing.assert_allclose(stacked.gradient_norm, alone.gradient_norm, rtol=1e-12)
    np.testing.assert_array_equal(stacked.images, [6, 6, 6, 4, 6, 6])


class Interrupted:
    """A loader that is interrupted before a batch."""

    def __init__(self, data, at: int) -> None:
        self.data, self.at = data, at

    def __iter__(self):
        for number, batch in enumerate(self.data):
            if number == self.at:
                raise KeyboardInterrupt
            yield batch


def test_an_interrupted_spectrum_goes_on_and_solves_nothing_twice(tmp_path):
    data, path, model = batches(5), tmp_path / "spectrum.nc", tiny()
    whole = vp.hessian_eigenvalues(tiny(), data)
    with pytest.raises(KeyboardInterrupt):
        vp.hessian_eigenvalues(model, Interrupted(data, 3), path=path)
    assert vp.load(path).sizes["batch"] == 3
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    resumed = vp.hessian_eigenvalues(model, data, path=path)
    alike(resumed, whole, rtol=0)
    first = len(calls)
    again = vp.hessian_eigenvalues(model, data, path=path)
    assert len(calls) - first == 2 < first  # the loss of one batch, which tells functions of one name apart
    alike(again, whole, rtol=0)
    alike(vp.load(path), whole, rtol=0)


def test_a_file_of_other_batches_weights_or_settings_is_refused(tmp_path):
    data, path = batches(3), tmp_path / "spectrum.nc"
    vp.hessian_eigenvalues(tiny(), data[:2], path=path)
    with pytest.raises(ValueError, match="batch 0 is not the one"):
        vp.hessian_eigenvalues(tiny(), data[1:], path=path)
    with pytest.raises(ValueError, match="model was"):
        vp.hessian_eigenvalues(tiny(seed=1), data, path=path)
    with pytest.raises(ValueError, match=r"config\.k was 5 and is now 4"):
        vp.hessian_eigenvalues(tiny(), data, path=path, k=4)


def test_proportions_of_a_spectrum():
    ds = vp.hessian_eigenvalues(tiny(), batches(6))
    values = ds.eigenvalue.values
    assert ds.attrs["nep"] == pytest.approx((values < 0).mean())
    assert ds.attrs["ape"] == pytest.approx(values[values > 0].mean())
    # Means over batches by the t interval, where every batch has the same number of positive ones.
    from vitprobe.probes.hessian import _proportions

    spectra = np.random.default_rng(0).normal(10, 2, (40, 5)) + np.random.default_rng(1).normal(0, 1, (40, 1))
    spectra[:, 4] = -1
    said = _proportions(spectra)
    per_batch = spectra[:, :4].mean(1)
    half_width = 2.02 * per_batch.std(ddof=1) / 40**0.5
    assert said["nep"] == said["nep_low"] == said["nep_high"] == 0.2
    assert said["ape_high"] - said["ape_low"] == pytest.approx(2 * half_width, rel=0.15)
    assert "nep" not in vp.hessian_eigenvalues(tiny(), batches(1), which="LA").attrs


def test_batches_are_drawn_one_by_one():
    drawn = []

    def stream():
        for batch in batches(3):
            drawn.append(len(drawn))
            yield batch

    model = tiny()
    seen = []
    model.register_forward_hook(lambda *_: seen.append(len(drawn)))
    vp.hessian_eigenvalues(model, stream())
    assert seen[0] == 1 and set(seen) == {1, 2, 3}


# --- files that are gone on with ----------------------------------------------------------------------


def test_a_file_that_is_read_again_never_gets_shorter(tmp_path, monkeypatch):
    data, path = batches(5), tmp_path / "spectrum.nc"
    whole = vp.hessian_eigenvalues(tiny(), data, path=path)
    monkeypatch.setattr("vitprobe.probes.growing.EVERY", 0.0)
    with pytest.raises(KeyboardInterrupt):
        vp.hessian_eigenvalues(tiny(), Interrupted(data, 2), path=path)
    with pytest.raises(ValueError, match="batch 2 is not the one"):
        vp.hessian_eigenvalues(tiny(), [*data[:2], data[0]], path=path)
    with pytest.raises(ValueError, match="results of 5 batches, and 3 were given"):
        vp.hessian_eigenvalues(tiny(), data[:3], path=path)
    alike(vp.load(path), whole, rtol=0)
    with pytest.raises(KeyboardInterrupt):
        vp.hessian_eigenvalues(tiny(), Interrupted([*data, *batches(7)[5:]], 6), path=path)
    assert vp.load(path).sizes["batch"] == 6


def head_of(call):
    return lambda model, batch: call(model(batch[0]))


def test_what_makes_it_another_measurement_is_told_apart(tmp_path):
    data, path = batches(2), tmp_path / "spectrum.nc"

    def measure(model=None, **options):
        return vp.hessian_eigenvalues(model or tiny(), data, k=2, path=path, **options)

    measure()
    frozen = tiny()
    frozen.get_parameter("head.weight").requires_grad_(False)
    with pytest.raises(ValueError, match=r"config\.frozen was '\(absent\)' and is now '1 parameters"):
        measure(frozen)
    with pytest.raises(ValueError, match=r"config\.forward was '\(absent\)'"):
        measure(forward=head_of(lambda logits: logits))
    path.unlink()
    measure(forward=head_of(lambda logits: logits))
    measure(forward=head_of(lambda logits: logits))
    with pytest.raises(ValueError, match=r"the first gradient was .* and is now .*of the same name"):
        measure(forward=head_of(lambda logits: 2 * logits))
    path.unlink()
    ds = measure(loss=nn.CrossEntropyLoss(label_smoothing=0.3))
    assert '"label_smoothing": 0.3' in ds.attrs["config"]
    assert ds.attrs["loss"] == "torch.nn.modules.loss.CrossEntropyLoss"
    with pytest.raises(ValueError, match=r"config\.loss\.label_smoothing was 0.3 and is now 0.0"):
        measure(loss=nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"config\.loss\.tensors was '\(absent\)'"):
        measure(loss=nn.CrossEntropyLoss(weight=torch.ones(3), label_smoothing=0.3))


# --- loaders, targets and models of other kinds -------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for x, y in batches(2):
            yield from zip(x, y, strict=True)


def test_a_loader_that_does_not_know_its_length():
    ds = vp.hessian_eigenvalues(tiny(), torch.utils.data.DataLoader(Stream(), batch_size=6), k=1)
    assert ds.sizes["batch"] == 2


def probes_of_the_loss():
    return [
        lambda model, data, **options: vp.hessian_eigenvalues(model, data, k=1, **options),
        lambda model, data, **options: vp.hessian_eigenvalues(model, data, k=1, stack=2, **options),
        lambda model, data, **options: vp.hessian_eigenvalues(model, data, k=1, per="dataset", **options),
        lambda model, data, **options: vp.hessian_density(model, data, samples=1, steps=2, **options),
        lambda model, data, **options: vp.loss_landscape(model, data, points=2, **options),
        lambda model, data, **options: vp.loss_landscape(model, data, points=2, stack=2, **options),
    ]


@pytest.mark.parametrize("probe", probes_of_the_loss())
def test_targets_and_outputs_that_no_cross_entropy_takes(probe):
    x, y = batches(1)[0]
    for targets, message in (
        (y + 1, "labels up to 3 for a model of 3 classes"),
        (y - 100, "labels from -100 to .* Drop them"),
        (y[:, None], r"int64 of \(6, 1\): give class numbers \(6,\)"),
        (F.one_hot(y, 3), r"int64 of \(6, 3\): .* in floating point"),
        (y.float(), r"float32 of \(6,\): .* as integers"),
        (torch.ones(6, 4), "probabilities of 4 classes for a model of 3"),
        (y.tolist(), r"list: give class numbers \(6,\) as a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            probe(tiny(), [(x, targets), (x, targets)])
    with pytest.raises(ValueError, match=r"the model gave \(6, 2, 3\) for 6 images"):
        probe(tiny(), [(x, y), (x, y)], forward=lambda model, batch: model(batch[0])[:, None].expand(-1, 2, -1))


def test_labels_in_any_kind_of_integer():
    x, y = batches(1)[0]
    whole = vp.hessian_eigenvalues(tiny(), [(x, y)], k=1)
    short = vp.hessian_eigenvalues(tiny(), [(x, y.int())], k=1)
    np.testing.assert_array_equal(short.eigenvalue, whole.eigenvalue)
    maps = [vp.loss_landscape(tiny(), [(x, labels)], points=2) for labels in (y, y.to(torch.uint8))]
    np.testing.assert_array_equal(maps[1].nll, maps[0].nll)
    with pytest.warns(UserWarning, match="not converged"):
        vp.hessian_eigenvalues(tiny(), [(x, y.int())], k=1, method="power", tol=1e-9)


@pytest.mark.parametrize("probe", probes_of_the_loss())
def test_models_without_parameters_and_batches_without_images(probe):
    x, y = batches(1)[0]
    with pytest.raises(ValueError, match="Flatten has no parameters"):
        probe(nn.Flatten(), [(x, y)])
    with pytest.raises(ValueError, match="a batch of 0 images"):
        probe(tiny(), [(x[:0], y[:0])])


@pytest.mark.parametrize("probe", probes_of_the_loss())
def test_random_numbers_of_the_loader_are_put_back_and_its_batches_are_those_of_the_seed(probe):
    x, y = (torch.cat(part) for part in zip(*batches(3), strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6, shuffle=True)
    torch.manual_seed(3)
    drawn = list(loader)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    ds = probe(tiny(), loader)
    assert torch.equal(torch.get_rng_state(), state)
    again = probe(tiny(), drawn)
    for name, variable in ds.data_vars.items():
        np.testing.assert_array_equal(variable, again[name])


def test_fewer_products_than_eigenvalues():
    with pytest.raises(ValueError, match="max_products=0 for 5 eigenvalues"):
        vp.hessian_eigenvalues(tiny(), batches(1), max_products=0)
    with pytest.raises(ValueError, match="max_products=4 for 5 eigenvalues"):
        vp.hessian_eigenvalues(tiny(), batches(1), max_products=4)


@torch.no_grad()
def test_power_without_gradients_around_it():
    with pytest.warns(UserWarning, match="not converged"):
        ds = vp.hessian_eigenvalues(tiny(), batches(1), k=1, method="power", tol=1e-9)
    assert np.isfinite(ds.eigenvalue).all()


def test_the_number_of_variables():
    model = tiny()
    model.get_parameter("head.bias").requires_grad_(False)
    for probe in probes_of_the_loss()[:4]:
        assert probe(model, batches(1), parameters="head.*").attrs["parameters"] == model.head.weight.numel()
