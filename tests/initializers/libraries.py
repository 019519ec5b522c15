"""One small ViT from each library, of the same size, for the tests of this folder."""

import timm
import torch
from torch import nn

from vitprobe.models import create_model

IMAGE, PATCH, DIM, HEADS, DEPTH = 16, 4, 32, 2, 2


def from_vitprobe(**options):
    sizes = dict(image_size=IMAGE, patch_size=PATCH, dim=DIM, heads=HEADS, depth=DEPTH, num_classes=5)
    return create_model("vit", seed=0, **{**sizes, **options})


def from_timm(**options):
    sizes = dict(img_size=IMAGE, patch_size=PATCH, embed_dim=DIM, num_heads=HEADS, depth=DEPTH, num_classes=5)
    return timm.models.VisionTransformer(**{**sizes, **options})


def from_torchvision(**options):
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        IMAGE, PATCH, num_layers=DEPTH, num_heads=HEADS, hidden_dim=DIM, mlp_dim=64, num_classes=5, **options
    )


def from_transformers(**options):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=IMAGE,
        patch_size=PATCH,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_hidden_layers=DEPTH,
        intermediate_size=64,
        num_labels=5,
        **options,
    )
    return ViTForImageClassification(config)


LIBRARIES = {
    "vitprobe": from_vitprobe,
    "timm": from_timm,
    "torchvision": from_torchvision,
    "transformers": from_transformers,
}


def randomise_(module, std=0.3):
    """Values everywhere, also in what starts at zero, where a mistake would not show."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return module


def call(module, x):
    """Self-attention of tokens `(batch, token, dim)`, as a tensor."""
    out = module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)
    return out[0] if isinstance(out, tuple) else out
