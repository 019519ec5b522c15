"""The whole two-dimensional spectrum of activations (Park & Kim 2022, Fig. 2a, before its diagonal is taken)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import Activation, Unit
from vitprobe.probes.base import FeatureProbe, RunningMean, along_layer
from vitprobe.probes.fourier import EPSILON


class FourierSpectrum(FeatureProbe):
    """Log amplitude of every unit's activation over the plane of frequencies.

    Of each map and channel the amplitude of the unnormalised transform, its natural logarithm, the mean over channels
    and images, and the difference to frequency zero; prefix tokens are left out. Standard errors are over images.
    `x` and `y` count periods over the map, so that the frequency in pi radians per patch is `2 y / grid_h` and
    `2 x / grid_w`; a spectrum of real maps is symmetric about zero, and the highest frequency of an even side stands
    at its negative end alone. It costs a full transform; `Fourier` gives the diagonal and the mean over directions.
    """

    name = "fourier_spectrum"
    title = "Two-dimensional Fourier amplitude of activations by unit"
    references = "Park & Kim 2022, How Do Vision Transformers Work?, arXiv:2202.06709, Fig. 2a"
    reads = "activation"
    summed = ("_relative",)

    def start(self) -> None:
        """Forget everything that was measured."""
        self._relative: dict[int, RunningMean] = {}

    def update(self, where: Unit, what: Activation) -> None:
        """Add a chunk of images of one unit."""
        x = what.patches if what.patches.dtype == torch.float64 else what.patches.float()
        logs = torch.fft.rfft2(x, dim=(1, 2)).abs().add_(EPSILON).log_().mean(-1)
        self._relative.setdefault(where.index, RunningMean()).add(_whole(logs - logs[:, :1, :1], where.layout.grid[1]))

    def dataset(self, places: Sequence[Unit]) -> xr.Dataset:
        """The spectra along `layer`, `y` and `x`; NaN beyond the frequencies of a unit's grid."""
        grids = np.array([unit.layout.grid for unit in places])
        if grids.max() < 2:
            raise ValueError("fourier_spectrum: no unit has more than one position, so no frequency but zero.")
        axes = [np.arange(-(side // 2), (side + 1) // 2) for side in grids.max(0)]

        def centred(attribute: str) -> list[np.ndarray]:
            panels = []
            for unit, grid in zip(places, grids, strict=True):
                panel = np.full(tuple(grids.max(0)), np.nan)
                rows, columns = (
                    slice(most // 2 - side // 2, most // 2 - side // 2 + side)
                    for most, side in zip(grids.max(0), grid, strict=True)
                )
                panel[rows, columns] = np.fft.fftshift(getattr(self._relative[unit.index], attribute))
                panels.append(panel)
            return panels

        name, text = "relative_log_amplitude", "log amplitude relative to frequency zero"
        periods = {"units": "1"}
        return xr.Dataset(
            {
                name: along_layer(centred("mean"), ["y", "x"], long_name=text, units="1"),
                f"{name}_se": along_layer(
                    centred("standard_error"),
                    ["y", "x"],
                    long_name=f"standard error over images of {name}",
                    units="1",
                ),
            },
            coords={
                "y": ("y", axes[0], periods | {"long_name": "periods over the rows of the map"}),
                "x": ("x", axes[1], periods | {"long_name": "periods over the columns of the map"}),
            },
        )


def _whole(half: Tensor, columns: int) -> Tensor:
    """The full spectrum `(image, row, column)` of real maps from the half that `rfft2` gives, by its symmetry."""
    rest = half[:, :, 1 : (columns + 1) // 2].flip(2)
    mirrored = torch.cat([rest[:, :1], rest[:, 1:].flip(1)], 1)  # row k of the one is row -k of the other
    return torch.cat([half, mirrored], 2)


def fourier_spectrum(model: nn.Module, batches: Iterable[Any], **options: Any) -> xr.Dataset:
    """The two-dimensional spectrum of every unit's activation (Park & Kim 2022); see `FourierSpectrum`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        **options: `layers`, `prefix`, `forward`, `group` and `progress` of `probe`.

    Returns:
        `relative_log_amplitude` (layer, y, x) with its standard error over images.
    """
    return FourierSpectrum().run(model, batches, **options)
