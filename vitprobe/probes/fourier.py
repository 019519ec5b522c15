"""Fourier amplitude of activations along the half-diagonal of their spectrum (Park & Kim 2022, Fig. 2a and 8)."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import Activation, Unit
from vitprobe.names import unknown
from vitprobe.probes.base import FeatureProbe, RunningMean, along_layer

Definition = Literal["corrected", "paper"]

# The published code adds this to every amplitude before the logarithm.
EPSILON = 1e-6


def frequencies(grid: tuple[int, int], *, definition: Definition = "corrected") -> np.ndarray:
    """The frequencies at which the half-diagonal of a map is sampled [pi radians per patch].

    Both axes of the diagonal have the same frequency, so that it exists where `k/rows` equals `l/columns`: at
    multiples of `2/gcd(rows, columns)`.

    Args:
        grid: rows and columns.
        definition: `"corrected"` gives the true frequencies, up to 1 where the grid has it. `"paper"` gives the
            published code's: it leaves out the frequency 1 of even grids and stretches the rest over 0..1.

    Returns:
        Increasing frequencies, from 0.

    Raises:
        ValueError: if the diagonal has no frequency but zero, or the map is not square (`"paper"` only).
    """
    common = math.gcd(*grid)
    if common == 1:
        raise ValueError(
            f"a map of {grid[0]}x{grid[1]} has no diagonal frequency but zero: its sides have no common divisor."
        )
    if definition == "corrected":
        return 2.0 * np.arange(common // 2 + 1) / common
    if definition != "paper":
        raise unknown("definition", definition, ("corrected", "paper"))
    if grid[0] != grid[1]:
        raise ValueError(f"definition='paper' knows square maps only, not {grid[0]}x{grid[1]}: use 'corrected'.")
    # common = 2 leaves the frequency zero alone, which cannot be stretched
    return np.linspace(0.0, 1.0, (common + 1) // 2) if common > 2 else np.zeros(1)


@lru_cache(maxsize=64)
def _basis(grid: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Real and imaginary rows `(2 * frequency, patch)` whose product with a map is its half-diagonal spectrum.

    The wave of equal frequency on both axes depends on row + column alone.
    """
    common = math.gcd(*grid)
    y, x = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    turns = torch.outer(torch.arange(common // 2 + 1), (y + x).flatten()) % common
    angle = 2 * math.pi * turns.double() / common
    return torch.cat([angle.cos(), -angle.sin()]).to(device, dtype)


def half_diagonal(x: Tensor) -> Tensor:
    """Amplitudes of the two-dimensional Fourier transform where both axes have the same frequency.

    Equal to `abs(fft2(x))[k, l]` with `k/rows = l/columns`, for a matrix product's cost instead of a transform's.

    Args:
        x: maps `(batch, row, column, channel)`.

    Returns:
        `(batch, frequency, channel)` at `frequencies((rows, columns))`, unnormalised.

    Raises:
        ValueError: if the sides have no common divisor, so that the diagonal has no frequency but zero.
    """
    grid = (x.shape[1], x.shape[2])
    if math.gcd(*grid) == 1:
        frequencies(grid)
    basis = _basis(grid, x.dtype, x.device)
    flat = x.flatten(1, 2)
    real, imaginary = torch.bmm(basis.expand(len(flat), -1, -1), flat).chunk(2, dim=1)
    return torch.hypot(real, imaginary)


class Fourier(FeatureProbe):
    """Log amplitude of every unit's activation against frequency, along the half-diagonal of its spectrum.

    Of each map and channel the amplitude of the unnormalised transform, its natural logarithm, and the mean over
    channels and images (so a geometric mean of amplitudes); prefix tokens are left out. `relative_log_amplitude` is
    the difference to frequency zero (Park & Kim 2022, Fig. 2a), `high_frequency_amplitude` its value at the highest
    frequency sampled (Fig. 8). Standard errors are over images.

    Args:
        definition: `"corrected"` for true frequencies up to and with pi; `"paper"` for the published code's axis,
            which leaves pi out on even grids and stretches what is left, so that its "1.0 pi" is 0.964 pi at 56 and
            0.857 pi at 14 patches a side.
    """

    name = "fourier"
    title = "Fourier amplitude of activations by unit"
    references = "Park & Kim 2022, How Do Vision Transformers Work?, arXiv:2202.06709, Fig. 2a and 8"
    reads = "activation"

    def __init__(self, definition: Definition = "corrected") -> None:
        frequencies((2, 2), definition=definition)
        self.definition = definition

    def start(self) -> None:
        """Forget everything that was measured."""
        self._absolute: dict[int, RunningMean] = {}
        self._relative: dict[int, RunningMean] = {}

    def update(self, where: Unit, what: Activation) -> None:
        """Add a chunk of images of one unit."""
        grid = where.layout.grid
        if math.gcd(*grid) == 1:
            return
        amplitude = half_diagonal(what.patches.float() if what.patches.dtype != torch.float64 else what.patches)
        if self.definition == "paper":
            amplitude = amplitude[:, : len(frequencies(grid, definition="paper"))]
        logs = amplitude.add_(EPSILON).log_().mean(-1)
        self._absolute.setdefault(where.index, RunningMean()).add(logs)
        self._relative.setdefault(where.index, RunningMean()).add(logs - logs[:, :1])

    def dataset(self, places: Sequence[Unit]) -> xr.Dataset:
        """The statistics along `layer` and `frequency`; NaN where a unit's grid has no such frequency."""
        axes = {
            unit.index: np.round(frequencies(unit.layout.grid, definition=self.definition), 12)
            for unit in places
            if unit.index in self._absolute
        }
        if not axes:
            grids = sorted({unit.layout.grid for unit in places})
            raise ValueError(f"fourier: no unit's grid has a diagonal frequency but zero; the grids are {grids}.")
        axis = np.unique(np.concatenate(list(axes.values())))

        def spread(statistics: dict[int, RunningMean], attribute: str) -> list[np.ndarray]:
            rows = []
            for unit in places:
                row = np.full(len(axis), np.nan)
                if unit.index in axes:
                    row[np.searchsorted(axis, axes[unit.index])] = getattr(statistics[unit.index], attribute)
                rows.append(row)
            return rows

        def last(rows: list[np.ndarray]) -> list[float]:
            present = [row[~np.isnan(row)] for row in rows]
            return [float(row[-1]) if len(row) else math.nan for row in present]

        relative = spread(self._relative, "mean")
        error = spread(self._relative, "standard_error")
        top = [float(axes[unit.index][-1]) if unit.index in axes else math.nan for unit in places]
        spectrum = ["frequency"]
        return xr.Dataset(
            {
                "log_amplitude": along_layer(
                    spread(self._absolute, "mean"), spectrum, long_name="log amplitude", units="1"
                ),
                "log_amplitude_se": along_layer(
                    spread(self._absolute, "standard_error"),
                    spectrum,
                    long_name="standard error over images of log_amplitude",
                    units="1",
                ),
                "relative_log_amplitude": along_layer(
                    relative, spectrum, long_name="log amplitude relative to frequency zero", units="1"
                ),
                "relative_log_amplitude_se": along_layer(
                    error,
                    spectrum,
                    long_name="standard error over images of relative_log_amplitude",
                    units="1",
                ),
                "high_frequency_amplitude": along_layer(
                    last(relative), [], long_name="relative log amplitude at the highest frequency", units="1"
                ),
                "high_frequency_amplitude_se": along_layer(
                    last(error),
                    [],
                    long_name="standard error over images of high_frequency_amplitude",
                    units="1",
                ),
                "highest_frequency": along_layer(
                    top, [], long_name="the highest frequency of the unit's grid", units="pi rad/patch"
                ),
            },
            coords={
                "frequency": (
                    "frequency",
                    axis,
                    {
                        "long_name": "frequency along the diagonal"
                        + (", stretched as in the paper" if self.definition == "paper" else ""),
                        "units": "pi rad/patch",
                    },
                )
            },
        )

    def config(self) -> dict[str, Any]:
        """The definition used."""
        return {"definition": self.definition}


def fourier(
    model: nn.Module, batches: Iterable[Any], *, definition: Definition = "corrected", **options: Any
) -> xr.Dataset:
    """Fourier amplitude of every unit's activation (Park & Kim 2022, Fig. 2a and 8); see `Fourier`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        definition: `"corrected"` or `"paper"`.
        **options: `layers`, `prefix`, `forward` and `progress` of `probe`.

    Returns:
        `log_amplitude`, `relative_log_amplitude` (layer, frequency), `high_frequency_amplitude` (layer), each with
        its standard error over images.
    """
    return Fourier(definition).run(model, batches, **options)
