"""MLP-Mixer: one learned matrix mixes the patches of all channels (Tolstikhin et al. 2021, *MLP-Mixer*)."""

from einops import rearrange
from torch import Tensor, nn

from vitprobe.models.layers import MLP, LayerNorm, PatchEmbedding, StochasticDepth, init_transformer_
from vitprobe.models.registry import register, variant


class MixerBlock(nn.Module):
    """An MLP over the patches of every channel, then one over the channels of every patch, each with norm and skip."""

    def __init__(self, tokens: int, dim: int, *, token_hidden: int, channel_hidden: int) -> None:
        super().__init__()
        self.token_norm = LayerNorm(dim)
        self.token_mlp = MLP(tokens, token_hidden)
        self.channel_norm = LayerNorm(dim)
        self.channel_mlp = MLP(dim, channel_hidden)
        self.drop_tokens = StochasticDepth()
        self.drop_channels = StochasticDepth()

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, token, dim)` to the same shape."""
        mixed = self.token_mlp(rearrange(self.token_norm(x), "b n d -> b d n"))
        x = x + self.drop_tokens(rearrange(mixed, "b d n -> b n d"))
        return x + self.drop_channels(self.channel_mlp(self.channel_norm(x)))


class Mixer(nn.Module):
    """Patches, Mixer blocks, norm, average pooling. No positions: the token MLPs know every place."""

    def __init__(
        self,
        *,
        image_size: tuple[int, int],
        channels: int,
        num_classes: int,
        patch_size: int,
        dim: int,
        depth: int,
        token_hidden: int,
        channel_hidden: int,
    ) -> None:
        super().__init__()
        self.patches = PatchEmbedding(image_size=image_size, patch_size=patch_size, channels=channels, dim=dim)
        tokens = self.patches.grid[0] * self.patches.grid[1]
        self.blocks = nn.Sequential(*[
            MixerBlock(tokens, dim, token_hidden=token_hidden, channel_hidden=channel_hidden) for _ in range(depth)
        ])
        self.norm = LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        init_transformer_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(batch, class)` of images `(batch, channel, y, x)`."""
        return self.head(self.norm(self.blocks(self.patches(x))).mean(1))


@register
def mixer(
    *,
    image_size: tuple[int, int],
    channels: int,
    num_classes: int,
    patch_size: int = 2,
    dim: int = 256,
    depth: int = 8,
    token_hidden: int = 128,
    channel_hidden: int = 1024,
) -> Mixer:
    """MLP-Mixer: MLPs mix patches and channels in turn, without convolution or attention.

    Args:
        image_size: `(height, width)` [pixels].
        channels: channels of the images.
        num_classes: width of the classifier.
        patch_size: side of a patch [pixels].
        dim: channels of a token.
        depth: number of blocks.
        token_hidden: hidden width of the MLPs over patches.
        channel_hidden: hidden width of the MLPs over channels.

    Returns:
        The network.
    """
    return Mixer(**locals())


@variant(mixer, patch_size=2, dim=256, depth=8, token_hidden=128, channel_hidden=1024)
def mixer_ti() -> None:
    """MLP-Mixer-Ti for CIFAR (Park & Kim): 256 wide, 8 deep, MLPs 128 (patches) and 1024 (channels) wide, patch 2."""


@variant(mixer, patch_size=4, dim=64, depth=6, token_hidden=64, channel_hidden=128)
def mixer_micro() -> None:
    """An MLP-Mixer for two cores and 32x32 images: 64 wide, 6 deep, patch 4."""


@variant(mixer, patch_size=2, dim=48, depth=4, token_hidden=48, channel_hidden=96)
def mixer_nano() -> None:
    """An MLP-Mixer for seconds and 8x8 images: 48 wide, 4 deep, patch 2."""
