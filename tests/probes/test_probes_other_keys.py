"""Maps whose keys are other tokens than their queries: what is measured of them, and what leaves them out."""

import json

import torch
import torch.nn.functional as F

from vitprobe.probes import attention_offsets, masking, nonlocality


def pvt():
    """A small PVT v2 of timm: 16x16, 8x8 and 4x4 patches attend to 2x2 pooled keys, in the last stage to themselves."""
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    sizes = dict(depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 16), num_heads=(1, 2, 2, 2))
    return PyramidVisionTransformerV2(num_classes=3, **sizes)


def test_probes_of_the_same_tokens_leave_other_keys_out():
    batch = (torch.randn(2, 3, 64, 64), torch.tensor([0, 1]))
    offsets = attention_offsets(pvt(), batch, progress=False)
    assert list(offsets.layer_name.values) == ["stages.3.blocks.0.attn"]
    left = json.loads(offsets.attrs["skipped"])
    assert left[0] == "stages.0.blocks.0.attn: attention_offsets wants keys that are the queries' tokens"
    assert len(left) == 3
    reach = nonlocality(pvt(), batch, progress=False)
    assert reach.sizes["layer"] == 4 and json.loads(reach.attrs["skipped"]) == []
    assert reach.key_grid_h.values.tolist() == [2, 2, 2, 2] and reach.grid_h.values.tolist() == [16, 8, 4, 2]


def test_masking_pooled_keys():
    model = pvt().eval()
    batch = (torch.randn(2, 3, 64, 64), torch.tensor([0, 1]))
    found = masking(model, batch, ["uniform", "mean", "window:3"], progress=False)
    assert found.masked.values.tolist() == [4, 4, 1]
    assert len(json.loads(str(found.left_out.values[2]))) == 3
    for block in [stage.blocks[0] for stage in model.stages]:
        block.attn.q.weight.data.zero_()
        block.attn.q.bias.data.zero_()
    with torch.no_grad():
        logits = model(batch[0])
    wanted = F.cross_entropy(logits.double(), batch[1])
    torch.testing.assert_close(float(found.masked_nll.values[0]), float(wanted), rtol=1e-5, atol=1e-6)
