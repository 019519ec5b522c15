"""What the convolutions of a network are like: the rank of their filters, and how far their taps look."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import Unit, plan
from vitprobe.attach.trace import Clock, Event
from vitprobe.calling import (
    as_batches,
    default_forward,
    described,
    first_images,
    images_of,
    to_model,
    untouched,
    unwrap,
)
from vitprobe.probes.base import along_layer
from vitprobe.probes.spatial import (
    BIN,
    RANK_REFERENCES,
    RANKS,
    REFERENCES,
    TOLERANCE,
    check_tolerance,
    mass_by_distance,
    rank_statistics,
)
from vitprobe.results import provenance


def filter_statistics(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    tolerance: float = TOLERANCE,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> xr.Dataset:
    """Rank and reach of every convolution with a spatial kernel, depthwise, grouped or dense, by its taps.

    The convolutions are those that one forward pass runs, in its order, with the weights that it runs them with; only
    the first batch's first images are looked at, and the numbers depend on their size alone. Nothing is estimated, so
    that there are no standard errors.

    The operator of an output channel is the matrix from all places of the channels that it reads to its own places: for
    a depthwise convolution, its token-mixing matrix. How far it looks is counted from the middle of the kernel, on the
    grid that it reads, with the weight of a tap being the root of its sum of squares over inputs (how strongly white
    inputs arrive): taps count at each place where they fall on the grid, and not where on the zeros that the
    convolution pads with. Ranks are those of the same taps on a grid whose opposite borders touch, as large as that
    which it makes, since its singular values are then a Fourier transform (Sedghi et al. 2019) and no matrix of places
    is needed; zeros around a grid of 14x14 lower the stable rank of random filters by 5 to 10 %. `outputs_h` times
    `outputs_w` is the most that ranks can be. `bank_...` are ranks of all of the layer's filters as rows of taps, of
    which there are `kernel_h` times `kernel_w`: how many different filters it has.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        tolerance: share of the largest singular value that others have to exceed to count in numerical ranks.
        forward: `forward(model, batch)` for models that are called in another way.

    Returns:
        `stable_rank`, `effective_rank`, `numerical_rank` and `mean_distance` (layer, channel), `mass` (layer, channel,
        bin), the same of equal taps as `uniform_mass` (layer, bin) and `uniform_mean_distance` (layer), and
        `bank_stable_rank`, `bank_effective_rank` and `bank_numerical_rank` (layer).

    Raises:
        ValueError: if there are no batches, or no such convolutions.
    """
    check_tolerance(tolerance)
    bare, call = unwrap(model), forward or default_forward
    batch = next(iter(as_batches(batches)), None)
    if batch is None:
        raise ValueError("the batches were empty: an iterator that was used up, or a loader without images?")
    batch = first_images(to_model(batch, bare), 2)
    with untouched(bare):
        convolutions = _Convolutions(bare, plan(bare, batch, forward=call).units)
        with convolutions.running():
            call(bare, batch)
        found = convolutions.found
        if not found:
            raise ValueError(
                "filter_statistics: the forward pass runs no two-dimensional convolution with a spatial kernel."
            )
        ds = xr.Dataset(_of_filters(found, tolerance), _filter_coordinates(found))
    device = next((str(p.device) for p in bare.parameters()), "cpu")
    image = images_of(batch).shape[-2:]
    ds.attrs = provenance(
        title="Rank and reach of convolutions by layer and channel",
        references=f"{REFERENCES}; {RANK_REFERENCES}; Sedghi, Gupta & Long 2019, arXiv:1805.10408",
        config={"probe": "filter_statistics", "tolerance": tolerance},
        device=device,
        probe="filter_statistics",
        **described(bare),
        image_height=image[0],
        image_width=image[1],
    )
    return ds.assign_coords(
        channel=("channel", np.arange(ds.sizes["channel"]), {"long_name": "channel that is made", "units": "1"}),
        bin=("bin", np.arange(ds.sizes["bin"]), BIN),
    )


@dataclass(frozen=True)
class _Convolution:
    """One convolution of a forward pass; pairs are of rows and columns.

    Attributes:
        name: path of the module that runs it; `#2` and so on for further ones in that module.
        kind: of the unit that it belongs to.
        depth: of that unit; NaN if it belongs to none.
        weight: `(channel out, channel in, y, x)`.
        stride: of the convolution.
        before: zeros that it puts before the first row and column.
        dilation: of the convolution.
        grid: that it reads.
        repeated: rows and columns around it that repeat or mirror its own, instead of zeros.
        outputs: grid that it makes.
    """

    name: str
    kind: str
    depth: float
    weight: Tensor
    stride: tuple[int, int]
    before: tuple[int, int]
    dilation: tuple[int, int]
    grid: tuple[int, int]
    repeated: tuple[int, int]
    outputs: tuple[int, int]

    @property
    def kernel(self) -> tuple[int, int]:
        return self.weight.shape[2], self.weight.shape[3]


class _Convolutions(Clock):
    """Collects the convolutions with a spatial kernel of one forward pass, and which units they belong to."""

    _ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        super().__init__(model)
        self.found: list[_Convolution] = []
        self._units = {unit.event: unit for unit in units}
        self._modules = dict(model.named_modules())
        self._assigned = 0
        self._uses: dict[str, int] = {}

    def on_operation(
        self, event: Event, func: Callable, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        """Keep what a convolution is called with."""
        if func is F.conv2d:
            given = dict(zip(self._ARGUMENTS, args, strict=False)) | kwargs
            if max(given["weight"].shape[2:]) > 1:
                self._keep(given, tensors[0])
        self._end_unit(event)

    def on_module(self, event: Event, name: str, args: Any, tensors: list[Tensor]) -> None:
        """A unit may end with a module's return."""
        self._end_unit(event)

    def _keep(self, given: Mapping[str, Any], output: Tensor) -> None:
        weight, name = given["weight"].detach(), self.stack[-1].name
        self._uses[name] = self._uses.get(name, 0) + 1
        dilation, padding = _pair(given.get("dilation", 1)), given.get("padding", 0)
        if padding == "same":
            before = tuple(d * (side - 1) // 2 for d, side in zip(dilation, weight.shape[2:], strict=True))
        else:
            before = (0, 0) if padding == "valid" else _pair(padding)
        rows, columns = _repeated(self._modules.get(name))
        height, width = _pair(given["input"].shape[-2:])
        self.found.append(
            _Convolution(
                name=name if self._uses[name] == 1 else f"{name}#{self._uses[name]}",
                kind="conv",
                depth=float("nan"),
                weight=weight,
                stride=_pair(given.get("stride", 1)),
                before=_pair(before),
                dilation=dilation,
                grid=(height - rows, width - columns),
                repeated=(rows, columns),
                outputs=_pair(output.shape[-2:]),
            )
        )

    def _end_unit(self, event: Event) -> None:
        if unit := self._units.get(event):
            waiting = self.found[self._assigned :]
            self.found[self._assigned :] = [replace(one, kind=unit.kind, depth=unit.depth) for one in waiting]
            self._assigned = len(self.found)


def _repeated(module: nn.Module | None) -> tuple[int, int]:
    """Rows and columns that a module adds to its input by itself before it convolves: all but zeros are added so."""
    if not isinstance(module, nn.Conv2d) or module.padding_mode == "zeros":
        return 0, 0
    left, right, above, below = module._reversed_padding_repeated_twice
    return above + below, left + right


def _pair(value: Any) -> tuple[int, int]:
    """Rows and columns, of one number for both or of two."""
    if isinstance(value, int):
        return value, value
    return int(value[0]), int(value[-1])


def torus_singular_values(
    weight: Tensor,
    outputs: tuple[int, int],
    *,
    stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
) -> Tensor:
    """Singular values of a convolution on a grid whose opposite borders touch, for each output channel by itself.

    The matrix from all places of all inputs to the places of one output channel, times its transpose, is a circular
    convolution too: with the autocorrelation of the kernels, summed over inputs, at multiples of the stride. Its
    eigenvalues are a Fourier transform.

    Args:
        weight: `(channel out, channel in, y, x)`, in double precision.
        outputs: rows and columns of places that the convolution makes; it reads as many times the stride.
        stride: of rows and columns.
        dilation: of rows and columns.

    Returns:
        `(channel out, value)`, to 1e-8 of the largest, as many as there are places.
    """
    size = [2 * side - 1 for side in weight.shape[2:]]
    power = torch.fft.rfft2(weight, s=size).abs().square().sum(1)
    found = torch.fft.irfft2(power, s=size)  # autocorrelation, lag l at l modulo the size
    for axis in (1, 2):
        lag = torch.arange(size[axis - 1], device=weight.device)
        lag = torch.where(lag <= size[axis - 1] // 2, lag, lag - size[axis - 1]) * dilation[axis - 1]
        kept = lag % stride[axis - 1] == 0
        place = lag[kept] // stride[axis - 1] % outputs[axis - 1]
        shape = list(found.shape)
        shape[axis] = outputs[axis - 1]
        found = found.new_zeros(shape).index_add_(axis, place, found[:, kept] if axis == 1 else found[:, :, kept])
    return torch.fft.fft2(found).real.clamp_min(0).sqrt().flatten(1)


def _of_filters(found: Sequence[_Convolution], tolerance: float) -> dict[str, Any]:
    """The variables of `filter_statistics`."""
    values: dict[str, list[np.ndarray]] = {}
    for one in found:
        weight = one.weight.double()
        singular = torus_singular_values(weight, one.outputs, stride=one.stride, dilation=one.dilation)
        strength = weight.square().sum(1).sqrt()
        named = rank_statistics(singular, tolerance) | _kernel_reach(one, strength)
        equal = _kernel_reach(one, torch.ones_like(strength[:1]))
        named |= {f"uniform_{name}": numbers[0] for name, numbers in equal.items()}
        bank = rank_statistics(_bank_singular_values(weight.flatten(0, 1).flatten(1)), tolerance)
        named |= {f"bank_{name}": number for name, number in bank.items()}
        for name, numbers in named.items():
            values.setdefault(name, []).append(numbers.cpu().numpy())
    weights = "the weights by distance from the middle of the kernel"
    texts: dict[str, tuple[tuple[str, ...], str, str]] = {
        name: (("channel",), f"{text}, borders touching", "1") for name, text in RANKS.items()
    }
    texts["mean_distance"] = (("channel",), "distance from the middle of the kernel, weighted by taps", "patches")
    texts["mass"] = (("channel", "bin"), f"share of {weights}", "1")
    texts["uniform_mean_distance"] = ((), "mean_distance of equal taps", "patches")
    texts["uniform_mass"] = (("bin",), "mass of equal taps", "1")
    texts |= {f"bank_{name}": ((), f"{text}, of filters by taps", "1") for name, text in RANKS.items()}
    return {
        name: along_layer(values[name], dims, long_name=text, units=units)
        for name, (dims, text, units) in texts.items()
    }


def _kernel_reach(one: _Convolution, strength: Tensor) -> dict[str, Tensor]:
    """How taps of given strength `(channel, y, x)` spread over distances, at the places where they fall on the grid."""
    uses, offset = [], []
    for axis in (0, 1):
        tap = torch.arange(one.kernel[axis], device=strength.device) * one.dilation[axis]
        output = torch.arange(one.outputs[axis], device=strength.device) * one.stride[axis]
        place = output[:, None] + tap - one.before[axis]
        uses.append(((place >= 0) & (place < one.grid[axis] + one.repeated[axis])).sum(0))
        offset.append((tap - tap[-1] / 2).double())
    counted = strength * uses[0][:, None] * uses[1]
    return mass_by_distance(counted.flatten(1), torch.hypot(offset[0][:, None], offset[1]).flatten())


def _bank_singular_values(filters: Tensor) -> Tensor:
    """Singular values of filters as rows `(filter, tap)`, to 1e-8 of the largest."""
    tall = filters if len(filters) >= filters.shape[1] else filters.T
    return torch.linalg.eigvalsh(tall.T @ tall).clamp_min(0).sqrt()


def _filter_coordinates(found: Sequence[_Convolution]) -> dict[str, Any]:
    """The coordinates along `layer` of convolutions."""

    def numbers(long_name: str, values: list[int]) -> Any:
        return "layer", values, {"long_name": long_name, "units": "1"}

    return {
        "layer": ("layer", np.arange(len(found)), {"long_name": "place in the order of the forward pass"}),
        "layer_name": ("layer", [one.name for one in found], {"long_name": "path of the module"}),
        "kind": ("layer", [one.kind for one in found], {"long_name": "kind of the unit"}),
        "depth": ("layer", [one.depth for one in found], {"long_name": "normalised depth of the unit", "units": "1"}),
        "grid_h": numbers("rows that the convolution reads", [one.grid[0] for one in found]),
        "grid_w": numbers("columns that the convolution reads", [one.grid[1] for one in found]),
        "outputs_h": numbers("rows that the convolution makes", [one.outputs[0] for one in found]),
        "outputs_w": numbers("columns that the convolution makes", [one.outputs[1] for one in found]),
        "kernel_h": numbers("rows of taps", [one.kernel[0] for one in found]),
        "kernel_w": numbers("columns of taps", [one.kernel[1] for one in found]),
        "inputs": numbers("channels that each channel reads", [one.weight.shape[1] for one in found]),
    }


# --- matrices ---------------------------------------------------------------------------------------
