"""The network of PyHessian's trained checkpoint: a ResNet-20 for CIFAR-10 with projections where the width grows."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""What its images are normalised by, channel by channel."""


def conv(inputs: int, outputs: int, stride: int = 1, kernel: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class Block(nn.Module):
    """Two convolutions beside a shortcut, added before the last ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs), nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, stride, kernel=1), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (branch + self.downsample(x)).relu()


class ResNet20(nn.Module):
    """Images `(batch, 3, 32, 32)` to logits `(batch, 10)`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 16), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def load(file: Path) -> ResNet20:
    """The trained network, in evaluation mode."""
    weights = torch.load(file, weights_only=True, map_location="cpu")
    model = ResNet20()
    model.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})
    return model.eval()
