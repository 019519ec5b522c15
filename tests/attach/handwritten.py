"""Small networks as users write them, for the tests of this folder."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class TinyViT(nn.Module):
    """16 patches of a 16x16 image, one pre-norm block whose attention is `attend(query, key, value)`.

    Queries, keys and values are `(batch, head, token, channel)`; the last pass's stay in `seen`.
    """

    def __init__(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], *, dim: int = 12, heads: int = 3, prefix: int = 0
    ) -> None:
        super().__init__()
        self.attend, self.heads = attend, heads
        self.embed = nn.Conv2d(3, dim, 4, 4)
        self.prefix = nn.Parameter(torch.randn(1, prefix, dim)) if prefix else None
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        if self.prefix is not None:
            x = torch.cat([self.prefix.expand(len(x), -1, -1), x], dim=1)
        qkv = self.qkv(self.norm(x))
        qkv = qkv.reshape(*qkv.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        self.seen = tuple(part.clone() for part in qkv)
        x = x + self.project(self.attend(*qkv).transpose(1, 2).flatten(2))
        x = x + self.mlp(x)
        return self.head(x.mean(1))


class TinyMHA(nn.Module):
    """The same with `nn.MultiheadAttention`, called with the options given; what it returned stays in `returned`."""

    def __init__(self, options: dict | None = None, repeat: int = 1, **settings) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 4, 4)
        self.attention = nn.MultiheadAttention(12, 3, **({"batch_first": True} | settings))
        self.options, self.repeat = options or {}, repeat
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for _ in range(self.repeat):
            self.inputs = x.clone()
            y = x if self.attention.batch_first else x.transpose(0, 1)
            options = {name: value(x) if callable(value) else value for name, value in self.options.items()}
            y, self.returned = self.attention(y, y, y, **options)
            x = x + (y if self.attention.batch_first else y.transpose(0, 1))
        return self.head(x.mean(1))


class PostNormEncoder(nn.Module):
    """`nn.TransformerEncoder`, post-norm, over 16 patches."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Conv2d(3, 16, 4, 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2)
        x = self.encoder(x.permute(0, 2, 1) if self.batch_first else x.permute(2, 0, 1))
        return self.head(x.mean(1 if self.batch_first else 0))


class InPlaceViT(nn.Module):
    """Pre-norm with `+=`; one block's weights are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)
        self.block = InPlaceBlock()
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for _ in range(2):
            x = self.block(x)
        return self.head(x.mean(1))


class InPlaceBlock(nn.Module):
    """`x += attention(norm(x))`, then `x += mlp(norm(x))`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x += self.attention(y, y, y, need_weights=False)[0]
        x += self.mlp(self.mlp_norm(x))
        return x


class GatedBranches(nn.Module):
    """Two residual branches full of additions that are none of the stream: gates, biases, summed sub-branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 5, padding=2)
        self.bias = nn.Parameter(torch.randn(8, 16, 16))
        self.narrow, self.wide = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.bias
        left, right = self.left(x), self.right(x)
        gate = (left + right).sigmoid()
        x = x + (gate * left + (1 - gate) * right + self.bias)
        inner = self.narrow(x)
        inner = inner + self.wide(inner)
        x = x + inner
        return self.head(x.mean((2, 3)))


class ParallelBranches(nn.Module):
    """`x + attention(y) + mlp(y)`: one unit of two branches, added one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)
        self.block = InPlaceBlock()
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        y = self.block.norm(x)
        x = x + self.block.attention(y, y, y)[0] + self.block.mlp(y)
        return self.head(x.mean(1))


class PoolMixer(nn.Module):
    """Positions mixed by average pooling alone, then a channel MLP of 1x1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 4, 4), nn.AvgPool2d(3, 1, 1)
        self.mlp, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + (self.pool(x) - x)
        x = x + self.mlp(x)
        return self.head(x.mean((2, 3)))


class PositionModule(nn.Module):
    """A position code computed in a module of its own from the shape of what it gets, then one MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 4, 4)
        self.position = Ramp()
        self.mlp = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.position(x)
        x = x + self.mlp(x)
        return self.head(x.mean(1))


class Ramp(nn.Module):
    """A code that depends on the shape of its input alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linspace(0, 1, x.shape[1])[None, :, None].expand(x.shape)


class ChannelsLast(nn.Module):
    """A 4x4 grid of four channels, kept channels-last after the stem: the shape `(batch, 4, 4, 4)` fits both ways.

    `move` puts the channels last.
    """

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.move = move
        self.stem = nn.Conv2d(3, 4, 4, 4)
        self.norm, self.mlp = nn.LayerNorm(4), nn.Linear(4, 4)
        self.back = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.move(self.stem(x))
        x = x + self.mlp(self.norm(x))
        x = x.permute(0, 3, 1, 2)
        x = x + self.back(x)
        return self.head(x.mean((2, 3)))


def plain_cnn() -> nn.Sequential:
    """No skip connections: three convolutions, one pooling."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


class InvertedResidual(nn.Module):
    """MobileNet's block: 1x1, depthwise, 1x1; a skip only where the shape allows."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.skip = stride == 1 and width == out
        self.branch = nn.Sequential(
            *(nn.Conv2d(width, 2 * width, 1), nn.BatchNorm2d(2 * width), nn.ReLU6()),
            *(nn.Conv2d(2 * width, 2 * width, 3, stride, 1, groups=2 * width), nn.ReLU6()),
            nn.Conv2d(2 * width, out, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) if self.skip else self.branch(x)


def mobile_net() -> nn.Sequential:
    """A stem, then inverted residuals, two of which have no skip connection."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        InvertedResidual(8, 8, 1),
        InvertedResidual(8, 16, 2),
        InvertedResidual(16, 16, 1),
        InvertedResidual(16, 24, 1),
        InvertedResidual(24, 24, 1),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4)),
    )
