"""A small network with all that draws or remembers, and its data: what the tests of training share."""

import torch
from torch import nn

from vitprobe.data import ImageData, Split


class StochasticDepth(nn.Module):
    p = 0.0

    def forward(self, x):
        return x * (torch.rand(len(x), 1, 1, 1) >= self.p) if self.training else x


class Tiny(nn.Module):
    """Convolution, batch normalisation, a dropped branch, dropout: all that draws or remembers."""

    def __init__(self, classes=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.branch = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = StochasticDepth()
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * 36, classes))

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.drop(self.branch(x)))


def tiny(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Tiny()


def make_data(seed=0, train=41, test=23):
    """Three classes of noise, each with a bright band of its own; the last training batch of 16 is short."""

    def split(number, generator):
        labels = torch.arange(number) % 3
        images = torch.randint(150, (number, 1, 6, 6), generator=generator, dtype=torch.uint8)
        for label in range(3):
            images[labels == label, :, 2 * label : 2 * label + 2] += 60
        return Split(images, labels)

    generator = torch.Generator().manual_seed(seed)
    names = ("a", "b", "c")
    splits = {"train": split(train, generator), "test": split(test, generator)}
    return ImageData(spec="bands", name="bands", class_names=names, mean=(0.4,), std=(0.2,), **splits)


def same_weights(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def numbers(history):
    return history.drop_vars("seconds").to_dataframe()


class StopError(Exception):
    pass


def stop_after(epoch, kind=StopError):
    def stop(model, row):
        if row["epoch"] == epoch:
            raise kind

    return stop
