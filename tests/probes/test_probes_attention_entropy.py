"""Entropy of attention, against closed forms and scipy."""

import math

import numpy as np
import pytest
import torch
from fixed_maps import FixedMap, dilated, measured, random_maps
from scipy.stats import entropy

from vitprobe.models import create_model
from vitprobe.probes.attention_entropy import AttentionEntropy, attention_entropy
from vitprobe.results import check


def test_attention_to_one_patch_and_to_all():
    maps = torch.stack([torch.eye(6), torch.full((6, 6), 1 / 6)])[None, None].expand(3, -1, -1, -1, -1)
    found = measured(AttentionEntropy(), maps, (2, 3))
    np.testing.assert_allclose(found.entropy[0], [0, math.log(6)], atol=1e-6)
    np.testing.assert_allclose(found.entropy_ratio[0], [0, 1], atol=1e-6)
    np.testing.assert_allclose(found.entropy_se, 0, atol=1e-7)
    assert found.uniform_entropy.item() == pytest.approx(math.log(6))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_two_patches(share):
    maps = torch.zeros(2, 1, 1, 4, 4, dtype=torch.float64)
    maps[..., 0], maps[..., 3] = share, 1 - share
    expected = -sum(p * math.log(p) for p in (share, 1 - share) if p)
    assert measured(AttentionEntropy(), maps, (2, 2)).entropy.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("prefix", "windows"), [(0, 1), (1, 1), (5, 1), (0, 4)])
def test_scipy(prefix, windows):
    maps = random_maps(5, windows, 3, prefix + 12)
    found = measured(AttentionEntropy(), maps, (3, 4), prefix=prefix)
    each = entropy(maps[..., prefix:, prefix:].numpy(), axis=-1).mean((1, 3))  # scipy normalises rows anew
    np.testing.assert_allclose(found.entropy[0], each.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.entropy_se[0], each.std(0, ddof=1) / math.sqrt(5), rtol=1e-9)
    np.testing.assert_allclose(found.entropy_ratio, found.entropy / math.log(12), rtol=1e-12)
    np.testing.assert_allclose(found.entropy_ratio_se, found.entropy_se / math.log(12), rtol=1e-12)


def test_single_precision_is_enough():
    maps = random_maps(2, 1, 2, 196, spread=6.0)
    exact, found = (measured(AttentionEntropy(), one, (14, 14)) for one in (maps, maps.float()))
    np.testing.assert_allclose(found.entropy, exact.entropy, rtol=2e-6)


def test_padded_windows():
    """Of the second window only two tokens are patches."""
    maps = random_maps(3, 2, 1, 4)
    positions = np.array([[[0, 0], [0, 1], [1, 0], [1, 1]], [[0, 2], [np.nan] * 2, [1, 2], [np.nan] * 2]])
    found = measured(AttentionEntropy(), maps, (2, 2), positions=positions)
    rows = [
        *maps[:, 0, 0].numpy().transpose(1, 0, 2),
        *maps[:, 1, 0][:, [0, 2]][:, :, [0, 2]].numpy().transpose(1, 0, 2),
    ]
    assert found.entropy.item() == pytest.approx(np.mean([entropy(row, axis=-1).mean() for row in rows]))
    assert found.uniform_entropy.item() == pytest.approx((4 * math.log(4) + 2 * math.log(2)) / 6)


def test_dilated_windows_are_as_any():
    maps = random_maps(2, 6, 2, 6)
    plain, dilation = (
        measured(AttentionEntropy(), maps, (2, 3), positions=at) for at in (None, dilated((2, 3), (3, 2)))
    )
    np.testing.assert_allclose(plain.entropy, dilation.entropy, rtol=1e-12)
    np.testing.assert_allclose(plain.uniform_entropy, dilation.uniform_entropy, rtol=1e-12)


def test_a_network_with_a_class_token():
    maps = random_maps(1, 1, 2, 17)[:, 0].float()
    x = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = attention_entropy(FixedMap(maps), x.split(2), progress=False)
    check(found)
    np.testing.assert_allclose(found.entropy[0], entropy(maps[0, :, 1:, 1:].numpy(), axis=-1).mean(-1), rtol=1e-5)
    assert found.probe == "attention_entropy" and found.images == 3


def test_layers_with_fewer_heads_are_padded():
    found = attention_entropy(create_model("alternet_micro", image_size=16, seed=0), torch.randn(2, 3, 16, 16))
    assert found.entropy.isnull().sum("head").values.tolist() == [2, 0]


def test_queries_without_attention_to_patches_are_left_out_of_the_mean():
    maps = torch.full((1, 1, 1, 17, 17), 1 / 17)
    maps[..., 3, :] = torch.eye(17)[0]
    found = measured(AttentionEntropy(), maps, (4, 4), prefix=1)
    np.testing.assert_allclose(found.entropy, math.log(16), rtol=1e-6)
