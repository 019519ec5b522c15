"""Fourier amplitude of activations against frequency (Park & Kim 2022, Fig. 2a and 8)."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import Activation, Unit
from vitprobe.names import unknown
from vitprobe.probes.base import FeatureProbe, RunningCovariance, RunningMean, UnitMean, along_layer

Definition = Literal["corrected", "paper"]
Average = Literal["mean of log", "log of mean"]
Along = Literal["diagonal", "radius"]

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


def radii(grid: tuple[int, int]) -> np.ndarray:
    """The frequencies of the radial profile of a map [pi radians per patch].

    Rings as wide as the spacing of the longer side's frequencies, up to pi; the corners of the spectrum, beyond pi,
    are in none.

    Args:
        grid: rows and columns.

    Returns:
        Increasing frequencies, from 0; the middle of each ring.
    """
    longer = max(grid)
    return 2.0 * np.arange(longer // 2 + 1) / longer


@lru_cache(maxsize=64)
def _rings(grid: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The ring of every frequency of `rfft2` `(row, column)`, the last for the corners; and how often it counts."""
    down = torch.fft.fftfreq(grid[0], dtype=torch.float64)[:, None]
    across = torch.fft.rfftfreq(grid[1], dtype=torch.float64)[None]
    last = max(grid) // 2 + 1
    ring = (torch.hypot(down, across) * max(grid)).round().long().clamp(max=last)
    # Half of the columns stand for two frequencies, the other being the mirrored one.
    weight = torch.full(ring.shape, 2.0, dtype=torch.float64)
    weight[:, 0] = 1.0
    if grid[1] % 2 == 0:
        weight[:, -1] = 1.0
    return ring.to(device), weight.to(device)


def radial_mean(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """The mean over rings of equal frequency.

    Args:
        values: of a real map's spectrum, as `rfft2` orders it `(..., row, column)`.
        grid: rows and columns of the map.

    Returns:
        `(..., frequency)` at `radii(grid)`; NaN for a ring without a frequency.
    """
    ring, weight = _rings(grid, values.device)
    rings = len(radii(grid))
    total = values.new_zeros(*values.shape[:-2], rings + 1)
    total.index_add_(-1, ring.flatten(), (values * weight.to(values.dtype)).flatten(-2))
    share = weight.new_zeros(rings + 1).index_add_(0, ring.flatten(), weight.flatten())
    return (total / share.to(values.dtype))[..., :rings]


class Fourier(FeatureProbe):
    """Log amplitude of every unit's activation against frequency.

    Of each map and channel the amplitude of the unnormalised transform, its natural logarithm, and the mean over
    channels and images; prefix tokens are left out. `relative_log_amplitude` is the difference to frequency zero
    (Park & Kim 2022, Fig. 2a), `high_frequency_amplitude` its value at the highest frequency sampled (Fig. 8), and
    `high_frequency_amplitude_change` what the unit does to that. Standard errors are over images.

    Args:
        definition: `"corrected"` for true frequencies up to and with pi; `"paper"` for the published code's axis,
            which leaves pi out on even grids and stretches what is left, so that its "1.0 pi" is 0.964 pi at 56 and
            0.857 pi at 14 patches a side.
        average: `"mean of log"` as the published code does, a geometric mean of amplitudes; `"log of mean"` takes the
            mean over channels and images first, so that the strongest of them count most.
        along: `"diagonal"` samples the spectrum where both axes have the same frequency, as the paper does;
            `"radius"` takes the mean over all directions, and costs a full transform.
    """

    name = "fourier"
    title = "Fourier amplitude of activations by unit"
    references = "Park & Kim 2022, How Do Vision Transformers Work?, arXiv:2202.06709, Fig. 2a and 8"
    reads = "activation"
    summed = ("_absolute", "_relative", "_high", "_means", "_pairs")

    def __init__(
        self, definition: Definition = "corrected", average: Average = "mean of log", along: Along = "diagonal"
    ) -> None:
        frequencies((2, 2), definition=definition)
        if average not in get_args(Average):
            raise unknown("average", average, get_args(Average))
        if along not in get_args(Along):
            raise unknown("along", along, get_args(Along))
        if along == "radius" and definition == "paper":
            raise ValueError("definition='paper' is of the diagonal: use along='diagonal', or definition='corrected'.")
        self.definition = definition
        self.average = average
        self.along = along

    def config(self) -> dict[str, Any]:
        """The definitions used."""
        return {"definition": self.definition, "average": self.average, "along": self.along}

    def start(self) -> None:
        """Forget everything that was measured."""
        self._absolute: dict[int, RunningMean] = {}
        self._relative: dict[int, RunningMean] = {}
        self._high = UnitMean()
        # For the log of means: amplitudes by frequency, those of the highest and of zero in this batch, and these two
        # of a unit and of the one before together.
        self._means: dict[int, RunningCovariance] = {}
        self._ends: dict[int, list[Tensor]] = {}
        self._pairs: dict[int, RunningCovariance] = {}

    def update(self, where: Unit, what: Activation) -> None:
        """Add a chunk of images of one unit."""
        grid = where.layout.grid
        if self._axis(grid) is None:
            return
        x = what.patches if what.patches.dtype == torch.float64 else what.patches.float()
        values = self._of_images(x, grid)
        if self.average == "log of mean":
            self._means.setdefault(where.index, RunningCovariance()).add(values)
            self._ends.setdefault(where.index, []).append(values[:, [-1, 0]])
            return
        relative = values - values[:, :1]
        self._absolute.setdefault(where.index, RunningMean()).add(values)
        self._relative.setdefault(where.index, RunningMean()).add(relative)
        self._high.add(where, relative[:, -1])

    def _of_images(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Per image and frequency the mean over channels of the log amplitude, or of the amplitude."""
        if self.along == "radius":
            amplitude = torch.fft.rfft2(x, dim=(1, 2)).abs().movedim(-1, 1)  # (image, channel, row, column)
        else:
            amplitude = half_diagonal(x)
            if self.definition == "paper":
                amplitude = amplitude[:, : len(frequencies(grid, definition="paper"))]
        if self.average == "mean of log":
            amplitude = amplitude.add_(EPSILON).log_()
        return radial_mean(amplitude.mean(1), grid) if self.along == "radius" else amplitude.mean(-1)

    def _axis(self, grid: tuple[int, int]) -> np.ndarray | None:
        """The frequencies of a grid; `None` if it has but one."""
        if self.along == "radius":
            return radii(grid) if max(grid) > 1 else None
        return frequencies(grid, definition=self.definition) if math.gcd(*grid) > 1 else None

    def end_batch(self) -> None:
        """Take the batch into the means."""
        self._high.end_batch()
        ends = {index: torch.cat(chunks) for index, chunks in self._ends.items()}
        for index, here in ends.items():
            if index - 1 in ends:
                both = torch.cat([here, ends[index - 1].to(here)], 1)
                self._pairs.setdefault(index, RunningCovariance()).add(both)
        self._ends.clear()

    def dataset(self, places: Sequence[Unit]) -> xr.Dataset:
        """The statistics along `layer` and `frequency`; NaN where a unit's grid has no such frequency."""
        axes = {unit.index: np.round(axis, 12) for unit in places if (axis := self._axis(unit.layout.grid)) is not None}
        if not axes:
            grids = sorted({unit.layout.grid for unit in places})
            raise ValueError(f"fourier: no unit's grid has a diagonal frequency but zero; the grids are {grids}.")
        axis = np.unique(np.concatenate(list(axes.values())))

        def spread(measured: Callable[[int], tuple[np.ndarray, np.ndarray]], part: int) -> list[np.ndarray]:
            rows = []
            for unit in places:
                row = np.full(len(axis), np.nan)
                if unit.index in axes:
                    row[np.searchsorted(axis, axes[unit.index])] = measured(unit.index)[part]
                rows.append(row)
            return rows

        variables: dict[str, Any] = {}
        for name, text, measured in (
            ("log_amplitude", "log amplitude", self._log),
            ("relative_log_amplitude", "log amplitude relative to frequency zero", self._relative_log),
        ):
            for part, suffix in enumerate(("", "_se")):
                long_name = f"standard error over images of {name}" if suffix else text
                rows = spread(measured, part)
                variables[name + suffix] = along_layer(rows, ["frequency"], long_name=long_name, units="1")
        variables |= self._high_frequency(places, axes)
        variables["highest_frequency"] = along_layer(
            [float(axes[unit.index][-1]) if unit.index in axes else math.nan for unit in places],
            [],
            long_name="the highest frequency of the unit's grid",
            units="pi rad/patch",
        )
        where = "along the diagonal" if self.along == "diagonal" else "in any direction"
        stretched = ", stretched as in the paper" if self.definition == "paper" else ""
        about = {"long_name": f"frequency {where}{stretched}", "units": "pi rad/patch"}
        return xr.Dataset(variables, coords={"frequency": ("frequency", axis, about)})

    def _log(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Log amplitude of a unit by frequency, and its standard error."""
        if self.average == "mean of log":
            return self._absolute[index].mean, self._absolute[index].standard_error
        mean = self._means[index].mean + EPSILON
        return np.log(mean), np.sqrt(np.diag(self._means[index].covariance)) / mean

    def _relative_log(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The same relative to frequency zero."""
        if self.average == "mean of log":
            return self._relative[index].mean, self._relative[index].standard_error
        means = self._means[index]
        mean = means.mean + EPSILON
        slopes = np.diag(1 / mean)
        slopes[:, 0] -= 1 / mean[0]  # of log(mean / mean at zero), row by row
        return np.log(mean / mean[0]), np.sqrt(np.einsum("fi,ij,fj->f", slopes, means.covariance, slopes).clip(0))

    def _high_frequency(self, places: Sequence[Unit], axes: dict[int, np.ndarray]) -> dict[str, Any]:
        """`high_frequency_amplitude` and its change from the unit before, with standard errors."""
        name, text = "high_frequency_amplitude", "relative log amplitude at the highest frequency"
        if self.average == "mean of log":
            return self._high.variables(places, name, long_name=text, units="1")
        nothing = (math.nan, math.nan)
        values = {unit: tuple(part[-1] for part in self._relative_log(unit)) for unit in axes}
        changes: dict[int, tuple[float, float]] = {}
        for before, unit in pairwise(places):
            if before.layout.grid == unit.layout.grid and unit.index in self._pairs:
                pair = self._pairs[unit.index]
                slope = np.array([1.0, -1.0, -1.0, 1.0]) / (pair.mean + EPSILON)
                error = math.sqrt(max(slope @ pair.covariance @ slope, 0.0))
                changes[unit.index] = (values[unit.index][0] - values[before.index][0], error)
        variables: dict[str, Any] = {}
        for key, described, found in (
            (name, text, values),
            (f"{name}_change", f"change of {name} from the unit before", changes),
        ):
            for part, suffix in enumerate(("", "_se")):
                long_name = f"standard error over images of {key}" if suffix else described
                column = [found.get(unit.index, nothing)[part] for unit in places]
                variables[key + suffix] = along_layer(column, [], long_name=long_name, units="1")
        return variables


def fourier(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    definition: Definition = "corrected",
    average: Average = "mean of log",
    along: Along = "diagonal",
    **options: Any,
) -> xr.Dataset:
    """Fourier amplitude of every unit's activation (Park & Kim 2022, Fig. 2a and 8); see `Fourier`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        definition: `"corrected"` or `"paper"`.
        average: `"mean of log"` or `"log of mean"`.
        along: `"diagonal"` or `"radius"`.
        **options: `layers`, `prefix`, `forward`, `group` and `progress` of `probe`.

    Returns:
        `log_amplitude`, `relative_log_amplitude` (layer, frequency), `high_frequency_amplitude` and its change from the
        unit before (layer), each with its standard error over images.
    """
    return Fourier(definition, average, along).run(model, batches, **options)
