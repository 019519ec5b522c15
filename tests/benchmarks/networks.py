"""The trained networks that curvature.py looks at."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitprobe as vp
from vitprobe.data import ImageData
from vitprobe.probes.objective import keep

AUGMENT = "crop_flip"
RESNET20 = "resnet20"


@dataclass(frozen=True)
class Network:
    """A trained network in evaluation mode, and the data its batches come from."""

    name: str
    how: str
    model: nn.Module
    data: ImageData

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def describe(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        height, width = self.data.image_size
        return f"{self.name}: {size / 1e6:.3g} M parameters, {self.data.name}, {height}x{width} px, {self.how}"

    def batches(self, size: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """The first training batches in a fixed order, augmented once, on the network's device."""
        loader = self.data.loader("train", batch_size=size, seed=0, augment=AUGMENT, drop_last=True)
        if count > len(loader):
            raise ValueError(f"{count} batches of {size} are wanted, the data have {len(loader)}: fewer rounds")
        return keep(islice(loader, count), self.model)


def load(*, small: bool, spec: str, root: str | None) -> ImageData:
    """The data: of the big ones 4,000 and 1,000 images."""
    if small or spec == "digits":
        return vp.load_data("digits")
    return vp.load_data(spec, root=root, train_size=4000, test_size=1000)


def train(
    data: ImageData, folder: Path, *, small: bool, device: str, wanted: Sequence[str] | None
) -> Iterator[Network]:
    """A ViT and a ConvMixer, half trained, or loaded if the folder has them.

    Args:
        data: what they are trained on.
        folder: where they are kept.
        small: two tiny ones in their place.
        device: where they are trained, and stay.
        wanted: names of those to be made; all unless given.

    Yields:
        One after the other.
    """
    patch = max(data.image_size[0] // 8, 1)  # 64 patches, whatever the images
    choices: dict[str, tuple[dict[str, Any], int]] = {
        "vit": ({"patch_size": patch, "dim": 192, "depth": 6, "heads": 3}, 8),
        "convmixer": ({"patch_size": patch, "dim": 256, "depth": 8}, 3),
    }
    if small:
        choices = {
            "vit_nano": ({"dim": 24, "depth": 2}, 2),
            "convmixer_nano": ({"patch_size": 2, "dim": 8, "depth": 1}, 2),
        }
    for name, (options, epochs) in choices.items():
        if wanted and name not in wanted:
            continue
        sizes: dict[str, Any] = {
            "image_size": data.image_size,
            "channels": data.channels,
            "num_classes": data.num_classes,
        }
        model = vp.create_model(name, seed=0, **sizes, **options)
        recipe = vp.Recipe(epochs=epochs, batch_size=64, lr=5e-4, augment=AUGMENT)
        history = vp.fit(model, data, recipe, folder=folder / f"bench_{name}", device=device)
        yield Network(name, f"{epochs} epochs, test accuracy {history.test_accuracy.values[-1]:.3f}", model, data)


class ResNet20(nn.Module):
    """The network of PyHessian's checkpoint, under its names (He et al. 2016, for CIFAR, shortcuts of option B)."""

    def __init__(self) -> None:
        from torchvision.models.resnet import BasicBlock  # 160 MiB, which no process whose memory counts should hold

        def halving(width: int) -> nn.Sequential:
            shortcut = nn.Sequential(nn.Conv2d(width // 2, width, 1, stride=2, bias=False), nn.BatchNorm2d(width))
            first = BasicBlock(width // 2, width, 2, shortcut)
            return nn.Sequential(first, BasicBlock(width, width), BasicBlock(width, width))

        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*[BasicBlock(16, 16) for _ in range(3)])
        self.layer2, self.layer3 = halving(32), halving(64)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def pyhessian_resnet20(data: ImageData, file: str, device: str) -> Network:
    """PyHessian's own trained network, which wants CIFAR-10 with the published normalisation, as `load_data` gives."""
    model = ResNet20().to(device).eval()
    saved = torch.load(file, weights_only=True, map_location=device)
    model.load_state_dict({key.removeprefix("module."): value for key, value in saved.items()})
    return Network(RESNET20, "PyHessian's own checkpoint", model, data)
