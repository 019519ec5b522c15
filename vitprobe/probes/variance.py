"""Variance of activations over positions, or over images (Park & Kim 2022, Fig. 9)."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import Activation, Unit
from vitprobe.names import unknown
from vitprobe.probes.base import FeatureProbe, UnitMean

Over = Literal["positions", "images"]


class FeatureVariance(FeatureProbe):
    """Variance of every unit's activation over the positions of an image, or over images.

    Over positions: of each image and channel the unbiased variance over rows and columns, and the mean of that over
    channels and images (the published code's definition). Over images: of each position and channel the unbiased
    variance over images, and the mean of that over positions and channels (what a thread on it describes). Prefix
    tokens are left out. Variance grows with the scale of the stream, so `normalised_variance` gives it over the mean
    square of the activation, and `_change` what the unit adds to it. Standard errors are over images.

    Args:
        over: `"positions"` or `"images"`.
    """

    name = "feature_variance"
    title = "Variance of activations by unit"
    references = "Park & Kim 2022, How Do Vision Transformers Work?, arXiv:2202.06709, Fig. 9"
    reads = "activation"
    summed = ("_raw", "_normalised")

    def __init__(self, over: Over = "positions") -> None:
        if over not in get_args(Over):
            raise unknown("over", over, get_args(Over))
        self.over = over

    def config(self) -> dict[str, Any]:
        """What the variance is over."""
        return {"over": self.over}

    def alone(self) -> str:
        """Over images, each is compared with the mean of all before it."""
        return "" if self.over == "positions" else "with over='images' each image is compared with all before it"

    def start(self) -> None:
        """Forget everything that was measured."""
        self._raw = UnitMean()
        self._normalised = UnitMean()
        self._across: dict[int, _AcrossImages] = {}

    def update(self, where: Unit, what: Activation) -> None:
        """Add a chunk of images of one unit."""
        x = what.patches.flatten(1, 2)
        if x.dtype != torch.float64:
            x = x.float()
        positions = x.shape[1]
        if self.over == "images":
            variance = self._across.setdefault(where.index, _AcrossImages()).add(x)
            power = x.square().mean((1, 2))[len(x) - len(variance) :]
        elif positions > 1:
            mean = x.mean(1, keepdim=True)
            biased = (x - mean).square_().mean(1)
            variance = biased.mean(-1) * (positions / (positions - 1))
            power = (biased + mean.squeeze(1).square()).mean(-1)
        else:
            return
        self._raw.add(where, variance)
        # A constant image of zeros has no power and no variance: 0/0, which is not a number.
        self._normalised.add(where, variance / power)

    def end_batch(self) -> None:
        """Take the batch into the means."""
        self._raw.end_batch()
        self._normalised.end_batch()

    def dataset(self, places: Sequence[Unit]) -> xr.Dataset:
        """The statistics along `layer`; NaN for a unit with a single position."""
        if not self._raw.value:
            grids = sorted({unit.layout.grid for unit in places})
            raise ValueError(
                "feature_variance: a variance over images needs two images or more."
                if self.over == "images"
                else f"feature_variance: no unit has more than one position; the grids are {grids}."
            )
        text = f"variance over {self.over}"
        return xr.Dataset(
            self._raw.variables(places, "variance", long_name=text, units="1")
            | self._normalised.variables(places, "normalised_variance", long_name=f"{text} over mean square", units="1")
        )


class _AcrossImages:
    """The variance over images of every position and channel, image by image.

    Image `i` adds `(x - mean of those before)^2 (i - 1) / i`, which is the variance in expectation; the mean of these
    over images from the second on is the unbiased variance (Welford 1962), and their spread its standard error.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean: Tensor | None = None

    def add(self, x: Tensor) -> Tensor:
        """What each image of `(image, position, channel)` adds, averaged over positions and channels `(image,)`."""
        x = x.to(torch.float64)
        before = torch.zeros_like(x[:1]) if self._mean is None else self._mean[None]
        count = torch.arange(self.count, self.count + len(x), dtype=torch.float64, device=x.device)[:, None, None]
        sums = torch.cat([before * self.count, before * self.count + x.cumsum(0)])
        means = sums[:-1] / count.clamp(min=1)
        added = ((x - means).square() * (count / (count + 1))).mean((1, 2))
        first = self.count == 0
        self.count += len(x)
        self._mean = sums[-1] / self.count
        return added[1:] if first else added


def feature_variance(
    model: nn.Module, batches: Iterable[Any], *, over: Over = "positions", **options: Any
) -> xr.Dataset:
    """Variance of every unit's activation (Park & Kim 2022, Fig. 9); see `FeatureVariance`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        over: `"positions"` or `"images"`.
        **options: `layers`, `prefix`, `forward`, `group` and `progress` of `probe`.

    Returns:
        `variance` and `normalised_variance` (layer), and the change of each from the unit before, each with its
        standard error over images.
    """
    return FeatureVariance(over).run(model, batches, **options)
