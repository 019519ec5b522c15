"""What the probes of a forward pass share: the pass, means with standard errors, coordinates, provenance."""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn
from tqdm import tqdm

from vitprobe.attach import AttentionSite, Inputs, Plan, Unit, Watch, plan
from vitprobe.calling import (
    as_batches,
    default_forward,
    described,
    described_batches,
    images_of,
    logits_of,
    targets_of,
    to_model,
    untouched,
    unwrap,
)
from vitprobe.names import unknown
from vitprobe.results import provenance

INPUTS: tuple[Inputs, ...] = ("patch embedding", "layer")


class RunningMean:
    """Mean and standard error over images of values that arrive in chunks `(image, ...)`, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Add a chunk (Chan, Golub & LeVeque's update, which does not cancel)."""
        values = values.detach().to(torch.float64)
        count, mean = len(values), values.mean(0)
        squares = (values - mean).square().sum(0)
        if self._mean is None or self._squares is None:
            self.count, self._mean, self._squares = count, mean, squares
            return
        total = self.count + count
        step = mean - self._mean
        self._squares += squares + step.square() * (self.count * count / total)
        self._mean += step * (count / total)
        self.count = total

    @property
    def mean(self) -> np.ndarray:
        """The mean over all images."""
        assert self._mean is not None
        return self._mean.cpu().numpy()

    @property
    def standard_error(self) -> np.ndarray:
        """The standard error of the mean, images being the independent units; NaN for one image."""
        assert self._squares is not None
        squares = self._squares.cpu().numpy()
        if self.count < 2:
            return np.full_like(squares, np.nan)
        return np.sqrt(squares / (self.count - 1) / self.count)


class RunningCovariance:
    """Mean over images of vectors that arrive in chunks `(image, entry)`, and the covariance of that mean."""

    def __init__(self) -> None:
        self.count = 0
        self._mean: Tensor | None = None
        self._products: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Add a chunk, as `RunningMean` does."""
        values = values.detach().to(torch.float64)
        count, mean = len(values), values.mean(0)
        products = (values - mean).T @ (values - mean)
        if self._mean is None or self._products is None:
            self.count, self._mean, self._products = count, mean, products
            return
        total = self.count + count
        step = mean - self._mean
        self._products += products + torch.outer(step, step) * (self.count * count / total)
        self._mean += step * (count / total)
        self.count = total

    @property
    def mean(self) -> np.ndarray:
        """The mean over all images `(entry,)`."""
        assert self._mean is not None
        return self._mean.cpu().numpy()

    @property
    def covariance(self) -> np.ndarray:
        """The covariance of the mean, images being the independent units; NaN for one image."""
        assert self._products is not None
        products = self._products.cpu().numpy()
        if self.count < 2:
            return np.full_like(products, np.nan)
        return products / (self.count - 1) / self.count


class UnitMean:
    """Mean over images of a value of every unit, and of the change from the unit before, with standard errors.

    Values come in chunks of images, unit after unit; the change is taken image by image, so that its standard error
    is that of paired differences. `end_batch` closes a batch.
    """

    def __init__(self) -> None:
        self.value: dict[int, RunningMean] = {}
        self.change: dict[int, RunningMean] = {}
        self._batch: dict[int, list[Tensor]] = {}

    def add(self, unit: Unit, values: Tensor) -> None:
        """Add the values `(image,)` of one unit for a chunk of images."""
        self._batch.setdefault(unit.index, []).append(values)

    def end_batch(self) -> None:
        """Take the batch into the means."""
        whole = {index: torch.cat(chunks) for index, chunks in sorted(self._batch.items())}
        for index, values in whole.items():
            if not len(values):
                continue
            self.value.setdefault(index, RunningMean()).add(values)
            if index - 1 in whole:
                self.change.setdefault(index, RunningMean()).add(values - whole[index - 1].to(values.device))
        self._batch.clear()

    def variables(self, places: Sequence[Unit], name: str, *, long_name: str, units: str) -> dict[str, Any]:
        """`name` and `name_change` along `layer` with their standard errors.

        The change is NaN for the first unit, and where the grid is another than that of the unit before.
        """
        same = {b.index for a, b in pairwise(places) if a.layout.grid == b.layout.grid}
        changes = {index: mean for index, mean in self.change.items() if index in same}
        found: dict[str, Any] = {}
        for key, text, means in (
            (name, long_name, self.value),
            (f"{name}_change", f"change of {name} from the unit before", changes),
        ):
            for suffix, attribute in (("", "mean"), ("_se", "standard_error")):
                column = [
                    float(getattr(means[unit.index], attribute)) if unit.index in means else math.nan for unit in places
                ]
                described = f"standard error over images of {key}" if suffix else text
                found[key + suffix] = along_layer(column, [], long_name=described, units=units)
        return found


class FeatureProbe(ABC):
    """A measurement that streams activations, attention maps or outputs into running statistics.

    A subclass sets the class attributes, empties its statistics in `start`, adds one chunk of images in `update`,
    and gives its variables in `dataset`. Everything else is done once, in `probe`.

    Attributes:
        name: of the probe, its function and its dataset.
        title: what it measures, for the dataset.
        references: its source, for the dataset.
        reads: what `update` gets: `(unit, activation)`; `(site, maps)`; `(site, (maps, content, position))` of sites
            whose maps are gated sums; or `(targets, logits)`.
        inputs: what attention sees in the pass: its layer's own input, or the patch embedding in every layer.
        whole_batches: whether an activation comes with all images of the batch at once instead of in chunks, for
            what compares images with each other.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    references: ClassVar[str]
    reads: ClassVar[Literal["activation", "attention", "gated attention", "output"]]
    inputs: Inputs = "layer"
    whole_batches: ClassVar[bool] = False

    @abstractmethod
    def start(self) -> None:
        """Forget everything that was measured."""

    @abstractmethod
    def update(self, where: Any, what: Any) -> None:
        """Add a unit's activation, a site's attention maps, or the targets and logits, for a chunk of images."""

    def start_batch(self, batch: Any) -> None:  # noqa: B027  (most probes have nothing to do here)
        """Called with each batch, on the model's device, before the model sees it."""

    def end_batch(self) -> None:  # noqa: B027  (most probes have nothing to do here)
        """Called when all units and sites of a batch have come by."""

    @abstractmethod
    def dataset(self, places: Sequence[Any]) -> xr.Dataset:
        """What was measured at the given units or sites, as variables along `layer`; of outputs, at no place."""

    def config(self) -> dict[str, Any]:
        """The options that the numbers depend on."""
        return {}

    def run(self, model: nn.Module, batches: Iterable[Any], **options: Any) -> xr.Dataset:
        """This probe alone: `probe(model, batches, [self])` as one flat dataset."""
        return _run(model, batches, [self], **options)[0][self.name]


def probe(
    model: nn.Module,
    batches: Iterable[Any],
    probes: Sequence[FeatureProbe],
    *,
    layers: str | Sequence[str] = "auto",
    prefix: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    missing: Literal["raise", "skip"] = "raise",
    progress: bool = True,
) -> xr.DataTree:
    """Measure a model with any number of probes in one pass over the batches.

    The model is watched, not changed: it runs in evaluation mode without gradients and is handed back as it was.

    Args:
        model: any eager PyTorch vision model, also compiled or wrapped in DataParallel or DDP.
        batches: an iterable of tensors of images, of tuples that start with one, or of mappings of keyword arguments;
            or a single such batch.
        probes: the measurements, e.g. `[Fourier(), FeatureVariance(), Nonlocality()]`.
        layers: `"auto"` finds the residual units; glob patterns of module paths measure those modules' outputs (`*`
            stays between two dots: `blocks.*` is the blocks and not what is in them). Attention maps are all taken.
        prefix: number of class, distillation and register tokens, where the inference (recorded in the dataset's
            coordinates) is wrong.
        forward: `forward(model, batch)` for models that are called in another way.
        missing: what to do about a probe that has nothing to measure here (attention in a network without it):
            `"raise"`, or `"skip"` and name it in the tree's attribute `left_out` (JSON: probe to reason).
        progress: whether a terminal shows a progress bar.

    Returns:
        One flat dataset per probe, by its name.

    Raises:
        TypeError: if the model cannot be watched, or a probe is none.
        ValueError: if there are no batches, or nothing to measure.
    """
    found, left_out = _run(
        model, batches, probes, layers=layers, prefix=prefix, forward=forward, missing=missing, progress=progress
    )
    tree = xr.DataTree.from_dict(found)
    if left_out:
        tree.attrs["left_out"] = json.dumps(left_out)
    return tree


def _run(
    model: nn.Module,
    batches: Iterable[Any],
    probes: Sequence[FeatureProbe],
    *,
    layers: str | Sequence[str] = "auto",
    prefix: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    missing: Literal["raise", "skip"] = "raise",
    progress: bool = True,
) -> tuple[dict[str, xr.Dataset], dict[str, str]]:
    if isinstance(probes, FeatureProbe):
        raise TypeError(f"probes are a list: write [{type(probes).__name__}(...)].")
    if not probes:
        raise ValueError("no probes were given: pass a list such as [Fourier(), FeatureVariance()].")
    for one in probes:
        if not isinstance(one, FeatureProbe):
            raise TypeError(f"a probe is a FeatureProbe such as Fourier(), not {one!r}; note the brackets.")
    if len(names := [one.name for one in probes]) > len(set(names)):
        raise ValueError(f"two probes of one name in {names}: datasets go by it; measure them one after the other.")
    if missing not in ("raise", "skip"):
        raise unknown("missing", missing, ("raise", "skip"))
    bare = unwrap(model)
    forward = forward or default_forward
    found: Plan | None = None
    watches: list[Watch] = []
    shape: tuple[int, ...] = ()
    images = 0
    left_out: dict[str, str] = {}
    for one in probes:
        one.start()
    with untouched(bare):
        for batch in tqdm(as_batches(batches), desc="probe", unit="batch", disable=None if progress else True):
            batch = to_model(batch, bare)
            size, *here = images_of(batch).shape
            if found is None:
                found, shape = plan(bare, batch, layers=layers, prefix=prefix, forward=forward), tuple(here)
                left_out = {one.name: reason for one in probes if (reason := _reason_against(one, found, batch))}
                if left_out and missing == "raise":
                    raise ValueError(next(iter(left_out.values())))
                probes = [one for one in probes if one.name not in left_out]
                # What attention sees is the same for all probes of a pass; the model's own comes last.
                of_input = {kind: [one for one in probes if one.inputs == kind] for kind in INPUTS}
                watches = [_watch(bare, found, readers, kind) for kind, readers in of_input.items() if readers]
            elif tuple(here) != shape:
                raise ValueError(
                    f"images of {tuple(here)} after images of {shape} (channel, y, x): frequencies and distances "
                    "are not comparable between sizes; measure each size by itself."
                )
            for one in probes:
                one.start_batch(batch)
            output = [watch(forward, bare, batch) for watch in watches][-1] if watches else None
            for one in probes:
                if one.reads == "output":
                    one.update(targets_of(batch), logits_of(output))
                one.end_batch()
            images += size
    if found is None:
        raise ValueError("the batches were empty: an iterator that was used up, or a loader without images?")
    said = described_batches(batches)
    device = next((str(p.device) for p in bare.parameters()), "cpu")
    datasets: dict[str, xr.Dataset] = {}
    for one in probes:
        try:
            datasets[one.name] = _dataset(one, found, bare, images, device, said)
        except ValueError as error:  # what only the whole measurement shows: no unit has a diagonal frequency, say
            if missing == "raise":
                raise
            left_out[one.name] = str(error)
    return datasets, left_out


def _places(one: FeatureProbe, found: Plan) -> Sequence[Unit] | Sequence[AttentionSite]:
    if one.reads == "output":
        return ()
    if one.reads == "gated attention":
        return [site for site in found.attentions if site.parts]
    return found.units if one.reads == "activation" else found.attentions


def _reason_against(one: FeatureProbe, found: Plan, batch: Any) -> str:
    """Why a probe has nothing to measure here; empty if it has."""
    if one.reads == "output":
        try:
            targets_of(batch)
        except ValueError as error:
            return f"{one.name}: {error}"
        return ""
    if _places(one, found):
        return ""
    if one.reads != "activation" and not found.attends:
        return f"{one.name}: the model has no attention."
    what, advice = {
        "activation": ("units", 'name modules with layers=["blocks.*"] or the like'),
        "attention": (
            "attention maps between patches",
            "attention kernels that bypass PyTorch cannot be seen: run it with SDPA",
        ),
        "gated attention": (
            "attention that is a gated sum of a map of content and one of position",
            "a ConViT's GPSA is",
        ),
    }[one.reads]
    reasons = f" Left out: {_grouped(found.skipped)}." if found.skipped and one.reads != "gated attention" else ""
    return f"{one.name}: the forward pass shows no {what}; {advice}.{reasons}"


def _grouped(skipped: Sequence[str]) -> str:
    """What was left out, each kind of reason once and three of them at most."""
    kinds: dict[str, list[str]] = {}
    for one in skipped:
        reason = one.rpartition(": ")[2]
        kinds.setdefault(re.sub(r"\d+", "", reason), []).append(one)
    told = [f"{ones[0]}{f' ({len(ones) - 1} more like it)' if len(ones) > 1 else ''}" for ones in kinds.values()]
    return "; ".join(told[:3]) + (f"; and {len(told) - 3} other reasons" if len(told) > 3 else "")


def _watch(model: nn.Module, found: Plan, probes: Sequence[FeatureProbe], inputs: Inputs) -> Watch:
    on_gated = [one.update for one in probes if one.reads == "gated attention"]
    on_maps = [one.update for one in probes if one.reads == "attention"]
    on_chunks = [one.update for one in probes if one.reads == "activation" and not one.whole_batches]
    on_batches = [one.update for one in probes if one.reads == "activation" and one.whole_batches]

    def each(updates: Sequence[Callable[[Any, Any], None]]) -> Callable[[Any, Any], None] | None:
        def call(where: Any, what: Any) -> None:
            for update in updates:
                update(where, what)

        return call if updates else None

    return Watch(
        model,
        found,
        on_unit=each(on_chunks),
        on_whole_unit=each(on_batches),
        on_attention=each(on_maps),
        on_gated=each(on_gated),
        inputs=inputs,
    )


def _dataset(
    one: FeatureProbe, found: Plan, model: nn.Module, images: int, device: str, said: dict[str, Any]
) -> xr.Dataset:
    ds = one.dataset(places := _places(one, found))
    if one.reads != "output":
        ds = ds.assign_coords(coordinates(places))
    options = one.config()
    # Options that are text say which definition was used: they stand by themselves, beside the whole configuration.
    named: dict[str, Any] = {key: value for key, value in options.items() if isinstance(value, str)}
    ds.attrs = (
        provenance(
            title=one.title,
            references=one.references,
            config={"probe": one.name, **options},
            device=device,
            probe=one.name,
            **described(model),
            **said,
            images=images,
            image_height=found.image[0],
            image_width=found.image[1],
            skipped=json.dumps(list(found.skipped)),
            **named,
        )
        | ds.attrs
    )
    return ds


def coordinates(places: Sequence[Unit] | Sequence[AttentionSite]) -> dict[str, Any]:
    """The coordinates along `layer` of units or attention sites."""
    grids = [place.layout.grid if isinstance(place, Unit) else place.grid for place in places]
    prefixes = [place.layout.prefix if isinstance(place, Unit) else place.prefix for place in places]
    return {
        "layer": ("layer", np.arange(len(places)), {"long_name": "place in the order of the forward pass"}),
        "layer_name": ("layer", [place.name for place in places], {"long_name": "path of the module"}),
        "kind": ("layer", [place.kind for place in places], {"long_name": "what ran since the unit before"}),
        "depth": (
            "layer",
            [place.depth for place in places],
            {"long_name": "normalised depth", "units": "1"},
        ),
        "grid_h": ("layer", [grid[0] for grid in grids], {"long_name": "rows of patches", "units": "1"}),
        "grid_w": ("layer", [grid[1] for grid in grids], {"long_name": "columns of patches", "units": "1"}),
        "prefix": ("layer", prefixes, {"long_name": "class, distillation and register tokens", "units": "1"}),
    }


def along_layer(
    values: Sequence[np.ndarray | float], dims: Sequence[str], *, long_name: str, units: str
) -> tuple[tuple[str, ...], np.ndarray, dict[str, str]]:
    """A dataset variable with one entry per unit, padded with NaN where units differ in size.

    Args:
        values: one array per unit.
        dims: names of the axes of each array.
        long_name: what it is.
        units: its units.

    Returns:
        `(dims, array, attributes)` with `layer` as the first axis.
    """
    arrays = [np.asarray(value, dtype=np.float64) for value in values]
    shape = tuple(max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True))
    padded = np.full((len(arrays), *shape), np.nan)
    for index, array in enumerate(arrays):
        corner: Any = (index, *map(slice, array.shape))
        padded[corner] = array
    return ("layer", *dims), padded, {"long_name": long_name, "units": units}
