"""All probes of attention in one pass over real images, against another library's own maps."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from scipy.stats import entropy

from vitprobe.data import load_data
from vitprobe.models import create_model
from vitprobe.probes import AttentionMaps, Nonlocality, probe
from vitprobe.probes.attention_entropy import AttentionEntropy
from vitprobe.probes.attention_gates import AttentionGates
from vitprobe.probes.attention_offsets import AttentionOffsets, local_mass
from vitprobe.probes.nonlocality import distances
from vitprobe.results import check


@pytest.fixture(scope="module")
def digits() -> torch.Tensor:
    """Twelve digits of 32x48 pixels in three colours."""
    images = load_data("digits", train_size=12, test_size=10).train.images.float() / 255
    return F.interpolate(images.expand(-1, 3, -1, -1), size=(32, 48), mode="bilinear")


def test_transformers_own_maps(digits):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=(32, 48),
        patch_size=8, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    probes = [
        Nonlocality(),
        AttentionEntropy(),
        AttentionOffsets(neighbourhood=3),
        AttentionMaps(queries=(1, 2), images=[2, 7]),
    ]
    found = probe(model, digits.split(5), probes, progress=False)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = torch.stack(model(digits, output_attentions=True).attentions, 1).double()  # (image, layer, head, q, k)
    patches = maps[..., 1:, 1:]
    rows = patches / patches.sum(-1, keepdim=True)
    apart = distances((4, 6)).double()
    expected = {
        ("nonlocality", "nonlocality"): (rows * apart).sum(-1).mean(-1),
        ("nonlocality", "prefix_mass"): maps[..., 1:, 0].mean(-1),
        ("attention_entropy", "entropy"): torch.tensor(entropy(patches.numpy(), axis=-1)).mean(-1),
        ("attention_offsets", "local_mass"): (patches * (apart < 1.5)).sum(-1).mean(-1),
        ("attention_offsets", "prefix_mass"): maps[..., 1:, 0].mean(-1),
    }
    for (name, variable), each in expected.items():
        here = found[name]
        np.testing.assert_allclose(here[variable], each.mean(0), rtol=1e-5)
        np.testing.assert_allclose(here[f"{variable}_se"], each.std(0) / np.sqrt(12), rtol=1e-4)
    assert float(found["nonlocality"]["nonlocality_ratio"].min()) < 0.97, "uniform maps would show nothing"
    sample = found["attention_maps"]
    np.testing.assert_array_equal(sample["sample"], [2, 7])
    np.testing.assert_allclose(sample["attention"].values.reshape(2, 3, 4, 24), patches[[2, 7]][..., 8, :], atol=1e-6)
    np.testing.assert_allclose(sample["image"], digits[[2, 7]], atol=1e-6)


def test_one_pass_is_each_alone(digits):
    model = create_model("convit", image_size=(32, 48), patch_size=8, dim=36, depth=3, heads=9, gpsa_layers=2, seed=0)
    classes = (Nonlocality, AttentionEntropy, AttentionOffsets, AttentionGates, AttentionMaps)
    tree = probe(model, digits.split(5), [one() for one in classes], progress=False)
    for one in classes:
        alone = one().run(model, digits.split(5), progress=False)
        check(alone)
        xr.testing.assert_equal(alone, tree[one.name].to_dataset())
    offsets, far = tree["attention_offsets"].to_dataset(), tree["nonlocality"].to_dataset()
    # The class token joins before the last layer: what patches pay to it is missing from the mass.
    total = offsets.mass.sum(["offset_y", "offset_x"])
    np.testing.assert_allclose(total, 1 - far.prefix_mass, rtol=1e-5)
    assert (far.prefix_mass[:2] == 0).all() and (far.prefix_mass[2] > 0).all()
    np.testing.assert_allclose(local_mass(offsets, 3), offsets.local_mass, rtol=1e-5)
    np.testing.assert_allclose(tree["attention_gates"].gate, torch.ones(2, 9).sigmoid(), rtol=1e-5)
