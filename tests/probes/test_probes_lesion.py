"""What a network loses with each unit, against copies that were cut by hand and NumPy's paired errors."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from torch import nn

from vitprobe.models import create_model
from vitprobe.probes.lesion import lesion
from vitprobe.results import check, load, save, stack_runs


def build(name="vit_nano", **options):
    return create_model(name, image_size=8, seed=0, **options)


def labelled(model, count=24, seed=0):
    """Images with the labels that the model gives most of them, so that it is right for three in four."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 8, 8, generator=generator)
    y = copy.deepcopy(model).eval()(x).argmax(1)
    y[::4] = (y[::4] + 1) % 10
    return x, y


def measure(model, batches, **options):
    return lesion(model, batches, progress=False, **options)


@torch.no_grad()
def by_hand(model, x, y):
    """Correctness and likelihood `(image,)` in double precision, with torch's own functions."""
    logits = copy.deepcopy(model).eval()(x).double()
    return (logits.argmax(1) == y).double().numpy(), F.cross_entropy(logits, y, reduction="none").numpy()


def standard_error(values):
    return values.std(ddof=1) / np.sqrt(len(values))


def assert_row(ds, intact, cut):
    for name, before, after in zip(("accuracy", "nll"), intact, cut, strict=True):
        found = {key: float(ds[key]) for key in ds.data_vars if name in key}
        assert found.pop(f"intact_{name}") == pytest.approx(before.mean(), abs=1e-6)
        assert found.pop(f"intact_{name}_se") == pytest.approx(standard_error(before), abs=1e-6)
        assert found.pop(f"lesioned_{name}") == pytest.approx(after.mean(), abs=1e-6)
        assert found.pop(f"lesioned_{name}_se") == pytest.approx(standard_error(after), abs=1e-6)
        assert found.pop(f"{name}_change") == pytest.approx((after - before).mean(), abs=1e-6)
        assert found.pop(f"{name}_change_se") == pytest.approx(standard_error(after - before), abs=1e-6)
        assert not found


def test_every_unit_is_that_of_a_copy_without_its_branch():
    model = build().train()
    x, y = labelled(model)
    ds = measure(model, list(zip(x.split(10), y.split(10), strict=True)))
    check(ds)
    intact = by_hand(model, x, y)
    assert intact[0].mean() == 0.75
    assert ds.kind.values.tolist() == ["stem", *["msa", "mlp"] * 4]
    assert ds.removed.values.tolist() == ["kept: no skip connection, and the shape changes", *["residual branch"] * 8]
    for index in range(1, 9):
        cut = copy.deepcopy(model)
        block = cut.blocks[(index - 1) // 2]
        last = block.attention.project if index % 2 else block.mlp[-1]
        for parameter in last.parameters():
            parameter.data.zero_()
        assert_row(ds.sel(layer=index), intact, by_hand(cut, x, y))
    stem = ds.sel(layer=0)
    assert all(np.isnan(float(stem[name])) for name in ds.data_vars if ds[name].dims)
    assert (np.abs(ds.nll_change[1:]) > 0).all()
    assert json.loads(ds.attrs["config"])["probe"] == ds.attrs["probe"] == "lesion"
    assert (ds.attrs["images"], ds.attrs["batches"], ds.attrs["complete"]) == (24, 3, 1)


def test_a_unit_that_does_nothing_changes_nothing():
    for name in ("vit_nano", "convit_nano"):
        model = build(name)
        block = model.blocks[2] if name == "vit_nano" else model.local_blocks[2]
        for parameter in block.mlp[-1].parameters():
            parameter.data.zero_()
        ds = measure(model, labelled(model)).isel(layer=6)
        for variable in ("accuracy_change", "accuracy_change_se", "nll_change", "nll_change_se"):
            assert float(ds[variable]) == 0
        assert float(ds.intact_nll_se) > 0


def test_paired_errors_are_smaller_than_those_of_separate_images():
    """The point of pairing: an image's difficulty is no noise of the change."""
    model = build()
    for parameter in model.blocks[1].mlp[-1].parameters():
        parameter.data.mul_(0.01)
    ds = measure(model, labelled(model, 60)).isel(layer=4)
    separate = float(np.hypot(ds.intact_nll_se, ds.lesioned_nll_se))
    assert 0 < float(ds.nll_change_se) < 0.1 * separate


def identities(model, names):
    cut = copy.deepcopy(model)
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(cut.get_submodule(parent), child, nn.Identity())
    return cut


def test_convolutions_of_bottlenecks_but_those_with_a_stride():
    model = build("resnet", widths=(16, 32), blocks=(2, 2), bottleneck=4)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.weight.data.normal_(generator=generator)
    x, y = labelled(model, 12)
    ds = measure(model, (x, y), remove="convolution")
    check(ds)
    kept = "kept: a stem, or no convolution with a spatial kernel that keeps the shape"
    one = "1 convolution; what changes the shape is kept"
    assert ds.removed.values.tolist() == [kept, one, "1 convolution", kept, "1 convolution"]
    intact = by_hand(model, x, y)
    for index in (1, 2, 4):
        block = str(ds.layer_name[index].item())
        (name,) = (
            f"{block}.{name}"
            for name, module in model.get_submodule(block).named_modules()
            if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3)
        )
        assert_row(ds.sel(layer=index), intact, by_hand(identities(model, [name]), x, y))
    assert np.isnan(ds.nll_change.values[[0, 3]]).all()
    assert ds.attrs["remove"] == "convolution"
    # As branches, the bottlenecks with a stride can go, too; their shortcuts stay.
    branches = measure(model, (x, y))
    assert branches.removed.values.tolist()[1:] == ["residual branch"] * 4
    cut = copy.deepcopy(model)
    *_, last = (module for module in cut.stages[1][0].branch if isinstance(module, nn.BatchNorm2d))
    last.weight.data.zero_()
    last.bias.data.zero_()
    assert_row(branches.sel(layer=3), intact, by_hand(cut, x, y))


def test_attention_between_convolutions_loses_its_branch():
    model = build("alternet_nano")
    x, y = labelled(model)
    convolutions, branches = (measure(model, (x, y), remove=remove) for remove in ("convolution", "branch"))
    assert convolutions.kind.values.tolist() == ["stem", "conv", "conv", "conv", "subsample", "conv", "msa"]
    assert convolutions.removed.values.tolist()[-2:] == ["2 convolutions", "residual branch"]
    msa = {"layer": 6}
    xr.testing.assert_equal(convolutions.isel(msa), branches.isel(msa))
    block = model.get_submodule(str(convolutions.layer_name[1].item()))
    names = [
        f"{convolutions.layer_name[1].item()}.{name}"
        for name, module in block.named_modules()
        if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)
    ]
    assert_row(convolutions.isel(layer=1), by_hand(model, x, y), by_hand(identities(model, names), x, y))


def test_units_without_a_skip_connection():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)),
    )
    x, y = labelled(model)
    ds = measure(model, (x, y))
    kept = "kept: no skip connection, and the shape changes"
    assert ds.removed.values.tolist()[:3] == [kept, "bypassed", kept]
    assert_row(ds.isel(layer=1), by_hand(model, x, y), by_hand(identities(model, ["2", "3"]), x, y))


def test_modules_by_pattern():
    model = build()
    x, y = labelled(model)
    ds = measure(model, (x, y), layers="blocks.*")
    assert ds.removed.values.tolist() == [
        "kept: no skip connection, and the shape changes", "bypassed", "bypassed", "bypassed"
    ]  # fmt: skip
    assert_row(ds.isel(layer=2), by_hand(model, x, y), by_hand(identities(model, ["blocks.2"]), x, y))


def test_batches_of_any_kind_give_the_same_numbers():
    model = build("convit_nano")
    x, y = labelled(model, 10)
    expected = measure(model, (x, y))
    mappings = [{"x": part, "labels": target} for part, target in zip(x.split(3), y.split(3), strict=True)]
    options = {"forward": lambda model, batch: model(batch["x"])}
    for batches, how in ((zip(x.split(4), y.split(4), strict=True), {}), (mappings, options)):
        xr.testing.assert_allclose(measure(model, batches, **how), expected, rtol=1e-5, atol=1e-5)


def test_runs_can_be_stacked_beside_their_accuracy():
    runs = [
        measure(build(name), labelled(build(name))).assign_attrs(accuracy=60.0 + index)
        for index, name in enumerate(("vit_nano", "alternet_nano"))
    ]
    stacked = stack_runs(runs, model=["vit_nano", "alternet_nano"])
    assert stacked.accuracy_change.dims == ("run", "layer")
    assert stacked.intact_nll.dims == ("run",)


# --- what cannot be -------------------------------------------------------------------------------


def test_labels_are_needed():
    model = build()
    x, y = labelled(model)
    with pytest.raises(ValueError, match=r"the batch has no targets: give batches of \(images, labels\)"):
        measure(model, [x])
    with pytest.raises(ValueError, match=r"accuracy needs class numbers .* without mixup"):
        measure(model, (x, F.one_hot(y, 10).float()))


def test_nothing_to_remove_unknown_options_and_images_of_two_sizes():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    x, y = labelled(build())
    with pytest.raises(ValueError, match=r"lesion: no unit can be removed \(.*0: kept: no skip connection"):
        measure(model, (x, y))
    with pytest.raises(ValueError, match=r"unknown remove 'convolutions'.*Did you mean 'convolution'"):
        measure(model, (x, y), remove="convolutions")
    with pytest.raises(ValueError, match=r"\(3, 6, 6\) after images of \(3, 8, 8\)"):
        measure(build("resnet_nano"), [(x, y), (x[..., :6, :6], y)])
    with pytest.raises(ValueError, match="the batches were empty"):
        measure(model, [])


# --- the model as it was --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_models_in_any_wrapping_are_handed_back_as_they_were():
    model = build("vit", patch_size=4, dim=12, depth=1)
    x, y = labelled(model, 8)
    expected = measure(model, (x, y))
    for wrapped in (torch.compile(copy.deepcopy(model), backend="eager"), nn.DataParallel(copy.deepcopy(model))):
        wrapped.train()
        before, random = copy.deepcopy(wrapped.state_dict()), torch.get_rng_state()
        xr.testing.assert_equal(measure(wrapped, (x, y)), expected)
        assert wrapped.training
        assert torch.equal(random, torch.get_rng_state())
        assert all(torch.equal(before[name], tensor) for name, tensor in wrapped.state_dict().items())
        assert all(p.grad is None and p.requires_grad for p in wrapped.parameters())


# --- files ----------------------------------------------------------------------------------------


class Interrupted:
    """Batches that end with Ctrl-C after some of them."""

    def __init__(self, batches, after):
        self.batches, self.after = batches, after

    def __iter__(self):
        yield from self.batches[: self.after]
        raise KeyboardInterrupt


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_lesion_goes_on(after, tmp_path):
    model = build("vit", patch_size=4, dim=12, depth=1)
    x, y = labelled(model, 13)
    batches = list(zip(x.split([1, 4, 4, 4]), y.split([1, 4, 4, 4]), strict=True))
    expected = measure(model, batches)
    path = tmp_path / "lesion.nc"
    with pytest.raises(KeyboardInterrupt):
        measure(model, Interrupted(batches, after), path=path)
    left = load(path)
    assert (left.attrs["batches"], left.attrs["complete"]) == (after, 0)
    xr.testing.assert_allclose(left.load(), measure(model, batches[:after]), rtol=1e-12, atol=1e-12)

    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    found = measure(model, batches, path=path)
    # Two images are traced, the second time they are called on; what was done before is not done again.
    assert calls == [min(2, len(batches[0][0]))] * 2 + [4] * (3 * (4 - after))
    xr.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    xr.testing.assert_equal(load(path), found)
    assert found.attrs["complete"] == 1
    # A finished one is found again, and grows with more batches.
    xr.testing.assert_equal(measure(model, batches, path=path), found)
    more = [*batches, (x[:2], y[:2])]
    xr.testing.assert_allclose(measure(model, more, path=path), measure(model, more), rtol=1e-12, atol=1e-12)


def test_a_forward_of_the_same_name_is_another_lesion(tmp_path):
    def scaled(by):
        return lambda model, batch: by * model(batch[0])

    model, path = build("vit", patch_size=4, dim=12, depth=1), tmp_path / "lesion.nc"
    x, y = labelled(model, 8)
    batches = list(zip(x.split(4), y.split(4), strict=True))
    first = measure(model, batches, path=path, forward=scaled(1))
    xr.testing.assert_equal(measure(model, batches, path=path, forward=scaled(1)), first)
    with pytest.raises(ValueError, match=r"nll of the first batch was .* of the same name"):
        measure(model, batches, path=path, forward=scaled(3))
    xr.testing.assert_equal(load(path), first)


def test_outputs_that_are_no_numbers_are_never_right():
    model = build("vit", patch_size=4, dim=12, depth=1)
    x, y = labelled(model, 8)
    spoil = torch.zeros(8, 1).index_fill_(0, torch.tensor([3]), torch.nan)
    ds = measure(model, (x, torch.zeros_like(y)), forward=lambda model, batch: model(batch[0]) + spoil[: len(batch[0])])
    assert np.isnan(ds.intact_accuracy) and np.isnan(ds.lesioned_accuracy).all() and np.isnan(ds.accuracy_change).all()


def test_batches_without_images_and_outputs_of_another_shape():
    model = build("vit", patch_size=4, dim=12, depth=1)
    x, y = labelled(model, 8)
    with pytest.raises(ValueError, match=r"a batch of 0 images \(0, 3, 8, 8\)"):
        measure(model, (x[:0], y[:0]))
    with pytest.raises(ValueError, match=r"the model gave \(2, 1, 10\)|the model gave \(8, 1, 10\)"):
        measure(model, (x, y), forward=lambda model, batch: model(batch[0])[:, None])


def test_a_file_of_another_lesion_is_refused(tmp_path):
    model = build()
    x, y = labelled(model, 8)
    batches, path = list(zip(x.split(4), y.split(4), strict=True)), tmp_path / "lesion.nc"
    save(measure(model, batches, path=path), path)  # a copy saved over the file is the file
    with pytest.raises(ValueError, match=r"has results of 2 batches, and those given are others: .* same order"):
        measure(model, batches[::-1], path=path)
    with pytest.raises(ValueError, match="has results of 2 batches, and 1 were given"):
        measure(model, batches[:1], path=path)
    with pytest.raises(ValueError, match=r"holds another measurement: config\.remove was 'branch'"):
        measure(model, batches, path=path, remove="convolution")
    with pytest.raises(ValueError, match="holds another measurement: model was"):
        measure(create_model("vit_nano", image_size=8, seed=1), batches, path=path)
    assert load(path).attrs["batches"] == 2
