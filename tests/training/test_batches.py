"""Batches as a training sees them, drawn once."""

import pytest
import torch

import vitprobe as vp


@pytest.fixture(scope="module")
def data():
    return vp.load_data("digits", train_size=400)


def test_each_pass_is_the_same_and_seeds_are_not(data):
    recipe = vp.Recipe(augment="crop", mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    batches = vp.TrainingBatches(data, recipe, share=0.5)
    first, second = list(batches), list(batches)
    assert len(batches) == len(first) == 12  # half of 400 images by 16
    for (x, y), (u, v) in zip(first, second, strict=True):
        assert torch.equal(x, u) and torch.equal(y, v) and x.shape == (16, 1, 8, 8)
    other = next(iter(vp.TrainingBatches(data, recipe, share=0.5, seed=1)))
    assert not torch.equal(other[0], first[0][0])


def test_plain_recipes_give_the_images_themselves_each_once(data):
    batches = list(vp.TrainingBatches(data, vp.Recipe(), share=1.0))
    assert len(batches) == 25
    originals = {x.numpy().tobytes(): int(y) for xs, ys in data.loader("train") for x, y in zip(xs, ys, strict=True)}
    seen = [(x.numpy().tobytes(), y) for xs, ys in batches for x, y in zip(xs, ys, strict=True)]
    assert len({x for x, _ in seen}) == len(originals)
    for x, target in seen:
        assert target[originals[x]] == 1 and target.sum() == 1


def test_targets_are_smoothed_and_mixed_as_trained(data):
    recipe = vp.Recipe(mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    for _, targets in vp.TrainingBatches(data, recipe):
        torch.testing.assert_close(targets.sum(1), torch.ones(16))
        assert targets.min() == pytest.approx(0.01)
    mixed = torch.cat([targets for _, targets in vp.TrainingBatches(data, recipe, share=1.0)])
    assert ((mixed > 0.011).sum(1) == 2).float().mean() > 0.5


def test_a_spectrum_as_published(data, tmp_path):
    recipe = vp.Recipe(augment="crop", mixup=0.8, cutmix=1.0, label_smoothing=0.1, weight_decay=0.05)
    model = vp.create_model("vit_nano", image_size=8, channels=1, num_classes=10, seed=0)
    batches = vp.TrainingBatches(data, recipe, share=0.08)
    ds = vp.hessian_eigenvalues(model, batches, k=3, weight_decay=recipe.weight_decay, path=tmp_path / "s.nc")
    assert ds.eigenvalue.shape == (2, 3) and ds.converged.values.all()


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_a_share_that_is_none(data, share):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        vp.TrainingBatches(data, vp.Recipe(), share=share)
