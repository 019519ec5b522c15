"""Variance of activations over positions (Park & Kim 2022, Fig. 9)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xarray as xr
from torch import float64, nn

from vitprobe.attach import Activation, Unit
from vitprobe.probes.base import FeatureProbe, RunningMean, along_layer


class FeatureVariance(FeatureProbe):
    """Variance of every unit's activation over the positions of an image.

    Of each image and channel the unbiased variance over rows and columns, and the mean of that over channels and
    images; prefix tokens are left out (the published code's definition; a thread on it describes variance over
    images instead). It grows with the scale of the stream, so `normalised_variance` gives it beside: the variance
    over the mean square, each averaged over channels first. Standard errors are over images.
    """

    name = "feature_variance"
    title = "Variance of activations over positions by unit"
    references = "Park & Kim 2022, How Do Vision Transformers Work?, arXiv:2202.06709, Fig. 9"
    reads = "activation"

    def start(self) -> None:
        """Forget everything that was measured."""
        self._raw: dict[int, RunningMean] = {}
        self._normalised: dict[int, RunningMean] = {}

    def update(self, where: Unit, what: Activation) -> None:
        """Add a chunk of images of one unit."""
        x = what.patches.flatten(1, 2)
        if x.dtype != float64:
            x = x.float()
        positions = x.shape[1]
        if positions < 2:
            return
        mean = x.mean(1, keepdim=True)
        biased = (x - mean).square_().mean(1)
        variance = biased.mean(-1) * (positions / (positions - 1))
        power = (biased + mean.squeeze(1).square()).mean(-1)
        self._raw.setdefault(where.index, RunningMean()).add(variance)
        # A constant image of zeros has no power and no variance: 0/0, which is not a number.
        self._normalised.setdefault(where.index, RunningMean()).add(variance / power)

    def dataset(self, places: Sequence[Unit]) -> xr.Dataset:
        """The statistics along `layer`; NaN for a unit with a single position."""
        if not self._raw:
            grids = sorted({unit.layout.grid for unit in places})
            raise ValueError(f"feature_variance: no unit has more than one position; the grids are {grids}.")

        def column(statistics: dict[int, RunningMean], attribute: str) -> list[float]:
            return [
                float(getattr(statistics[unit.index], attribute)) if unit.index in statistics else np.nan
                for unit in places
            ]

        text = "variance over positions"
        return xr.Dataset({
            "variance": along_layer(column(self._raw, "mean"), [], long_name=text, units="1"),
            "variance_se": along_layer(
                column(self._raw, "standard_error"),
                [],
                long_name="standard error over images of variance",
                units="1",
            ),
            "normalised_variance": along_layer(
                column(self._normalised, "mean"), [], long_name=f"{text} over mean square", units="1"
            ),
            "normalised_variance_se": along_layer(
                column(self._normalised, "standard_error"),
                [],
                long_name="standard error over images of normalised_variance",
                units="1",
            ),
        })


def feature_variance(model: nn.Module, batches: Iterable[Any], **options: Any) -> xr.Dataset:
    """Variance of every unit's activation over positions (Park & Kim 2022, Fig. 9); see `FeatureVariance`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        **options: `layers`, `prefix`, `forward` and `progress` of `probe`.

    Returns:
        `variance` and `normalised_variance` (layer), each with its standard error over images.
    """
    return FeatureVariance().run(model, batches, **options)
