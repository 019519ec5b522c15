"""MLP-Mixer: its size, and that it agrees with timm's after timm's weights are copied over."""

import pytest
import torch
from timm.models.mlp_mixer import MlpMixer

from vitprobe.models import create_model

NAMES = {
    "stem.proj": "patches.project",
    "norm1": "token_norm",
    "norm2": "channel_norm",
    "mlp_tokens": "token_mlp",
    "mlp_channels": "channel_mlp",
    "fc1": "0",
    "fc2": "2",
}


def test_parameters():
    """Park & Kim 2022, CIFAR-100, and by hand."""
    with torch.device("meta"):
        count = sum(p.numel() for p in create_model("mixer_ti", num_classes=100).parameters())
    assert count / 1e6 == pytest.approx(4.770, abs=5.1e-4)
    tokens, dim, token_hidden, channel_hidden = 16 * 16, 256, 128, 1024
    mlps = 2 * tokens * token_hidden + token_hidden + tokens + 2 * dim * channel_hidden + channel_hidden + dim
    assert count == 13 * dim + 8 * (mlps + 4 * dim) + 2 * dim + 100 * (dim + 1)


@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
def test_mixer_of_timm(size):
    torch.manual_seed(0)
    theirs = MlpMixer(
        num_classes=10, img_size=size, patch_size=4, num_blocks=3, embed_dim=24, mlp_ratio=(0.5, 4.0), global_pool="avg"
    ).eval()
    state = {}
    with torch.no_grad():
        for key, value in theirs.state_dict().items():
            value.add_(0.2 * torch.rand_like(value))
            for their_name, our_name in NAMES.items():
                key = key.replace(their_name, our_name)
            state[key] = value
    options = dict(patch_size=4, dim=24, depth=3, token_hidden=12, channel_hidden=96)
    ours = create_model("mixer", image_size=size, **options).eval()
    ours.load_state_dict(state)
    x = torch.randn(2, 3, *size)
    expected = theirs(x)
    assert expected.std() > 0.05
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)


def test_token_mlps_mix_patches_and_nothing_else():
    """Without them, an image and its patches in another order give the same logits."""
    model = create_model("mixer_nano", image_size=8, seed=0).eval()
    x = torch.randn(1, 3, 8, 8)
    halves = torch.cat([x[..., 4:], x[..., :4]], dim=-1)
    assert not torch.allclose(model(x), model(halves), atol=1e-3)
    for block in model.blocks:
        torch.nn.init.zeros_(block.token_mlp[2].weight)
    torch.testing.assert_close(model(x), model(halves))


def test_wrong_image_says_what_is_right():
    with pytest.raises(ValueError, match="patch_size=4 does not divide an image of 30x30 pixels; use patch_size=3"):
        create_model("mixer_micro", image_size=30)
    with pytest.raises(ValueError, match="built for images of 32x32 pixels and got 32x16"):
        create_model("mixer_micro")(torch.zeros(1, 3, 32, 16))
