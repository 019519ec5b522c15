"""Models that do unusual things to their input, their tables, their buffers and their hooks."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from vitprobe.attach.places import _middles
from vitprobe.calling import uncached
from vitprobe.models import create_model
from vitprobe.probes import calibration, feature_variance, hessian_eigenvalues, lesion, loss_landscape, nonlocality


def batch(count=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 8, 8, generator=generator), torch.arange(count) % 2


def vit(**options):
    return create_model("vit_nano", image_size=8, num_classes=2, seed=0, **options).eval()


class Standardising(nn.Module):
    """Standardises the images in place."""

    def __init__(self):
        super().__init__()
        self.net = vit()

    def forward(self, x):
        x -= 0.5
        return self.net(x)


def test_a_model_that_writes_to_its_images_is_refused_and_they_are_kept():
    images, labels = batch()
    before = images.clone()
    for measure in (feature_variance, lesion, calibration):
        with pytest.raises(ValueError, match=r"Standardising writes to the images .*batch.clone"):
            measure(Standardising(), [(images, labels)], progress=False)
        assert torch.equal(images, before)
    found = feature_variance(
        Standardising(), [(images, labels)], progress=False, forward=lambda model, batch: model(batch[0].clone())
    )
    wanted = feature_variance(vit(), [(images - 0.5, labels)], progress=False)
    np.testing.assert_allclose(found.variance, wanted.variance, rtol=1e-5)


class Tabled(nn.Module):
    """A ViT that makes a table by an addition the first time it is called."""

    def __init__(self):
        super().__init__()
        self.net, self.table = vit(), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(8.0) + x.new_zeros(8) + 1
        return self.net(x * self.table / self.table)


def test_a_table_that_is_made_once_changes_nothing():
    model = Tabled()
    first, second = (feature_variance(model, [batch()], progress=False) for _ in range(2))
    np.testing.assert_array_equal(first.variance, second.variance)
    np.testing.assert_allclose(first.variance, feature_variance(vit(), [batch()], progress=False).variance, rtol=1e-4)


class Counting(nn.Module):
    """Puts another tensor in the place of a buffer at every call."""

    def __init__(self):
        super().__init__()
        self.net = vit()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 2, 3))
        return self.net(x)


def test_a_buffer_that_is_replaced_is_put_back():
    model = Counting()
    own = model.mean
    feature_variance(model, [batch()], progress=False)
    assert model.mean is own and not own.any()


def test_what_a_modules_own_hook_makes_of_its_output_is_measured():
    model = vit()
    plain = feature_variance(model, [batch()], layers="blocks.0", progress=False)
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: 3 * output)
    steered = feature_variance(model, [batch()], layers="blocks.0", progress=False)
    np.testing.assert_allclose(steered.variance, 9 * plain.variance, rtol=1e-5)
    assert list(model.blocks[0]._forward_hooks) == [handle.id]


class Masked(nn.Module):
    """One attention of 16 patches, one of which may see nothing."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 2)
        self.mask = torch.ones(16, 16, dtype=torch.bool)
        self.mask[3] = False

    def forward(self, x):
        x = self.embed(x).flatten(2).mT
        q = x[:, None]
        x = x + nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.mask)[:, 0]
        return self.head(x.mean(1))


def test_a_query_that_may_see_nothing_is_left_out():
    torch.manual_seed(0)
    model = Masked()
    found = nonlocality(model, [batch()], progress=False)
    with torch.no_grad():
        x = model.embed(batch()[0]).flatten(2).mT.double().numpy()
    logits = x @ x.swapaxes(1, 2) / 8**0.5
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    places = np.stack(np.divmod(np.arange(16), 4), -1)
    far = np.linalg.norm(places[:, None] - places[None], axis=-1)
    wanted = np.delete((weights * far).sum(-1), 3, axis=1).mean()
    assert float(found.nonlocality.squeeze()) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [(10, 7), (7, 7), (5, 7), (8, 4), (9, 2)])
def test_adaptive_windows_lie_where_pooling_takes_them_from(before, after):
    index = torch.arange(float(before))[None, None]
    rows = nn.functional.adaptive_avg_pool1d(index, after)[0, 0]
    torch.testing.assert_close(_middles(before, after), rows)


def test_weight_norm_has_no_second_derivative():
    model = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(192, 2)))
    with pytest.raises(TypeError, match=r"1\.parametrizations\.weight\.0 has weight norm, .*remove_parametrizations"):
        hessian_eigenvalues(model, [batch()], k=1, progress=False)
    nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    assert hessian_eigenvalues(model, [batch()], k=1, progress=False).eigenvalue.notnull().all()


class Named(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


def test_named_batches_keep_their_names_where_they_are_stacked():
    batches, named = [batch(), batch()], [Named(*batch()), Named(*batch())]
    wanted = hessian_eigenvalues(vit(), batches, k=1, stack=2, progress=False)
    found = hessian_eigenvalues(
        vit(), named, k=1, stack=2, progress=False, forward=lambda model, batch: model(batch.images)
    )
    np.testing.assert_allclose(found.eigenvalue, wanted.eigenvalue, rtol=1e-5)


def test_tables_made_of_weights_are_those_of_the_weights_of_each_cell():
    """timm's TinyViT keeps what it made of its biases: around the weights they are others."""
    from timm.models.tiny_vit import TinyVit

    torch.manual_seed(0)
    sizes = dict(embed_dims=(8, 16), depths=(1, 2), num_heads=(1, 2), window_sizes=(4, 4))
    model = TinyVit(num_classes=2, **sizes).eval()
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4) % 2
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    with torch.no_grad():
        before = model(images)  # fills the tables
    ds = loss_landscape(model, [(images, labels)], points=3, pairs=1, progress=False)
    with torch.no_grad():
        torch.testing.assert_close(model(images), before)
        fresh = uncached(lambda net, x: net(x))(model, images)
    nll = nn.functional.cross_entropy(fresh.double(), labels)
    assert float(ds.nll.squeeze()[1, 1]) == pytest.approx(float(nll), rel=1e-5)
