"""What the probes of a forward pass share: the pass, means with standard errors, coordinates, provenance."""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

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
from vitprobe.ranks import Group, Ranks, agreed, merged
from vitprobe.results import provenance

INPUTS: tuple[Inputs, ...] = ("patch embedding", "layer")


class _Moments(ABC):
    """Mean and products of deviations over images of values that arrive in chunks `(image, ...)`, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self._mean: Tensor | None = None
        self._products: Tensor | None = None

    @abstractmethod
    def _multiplied(self, deviations: Tensor) -> Tensor:
        """The products of deviations `(image, ...)`, summed over images."""

    def add(self, values: Tensor) -> None:
        """Add a chunk (Chan, Golub & LeVeque's update, which does not cancel)."""
        values = values.detach().to(torch.float64)
        mean = values.mean(0)
        self._take(len(values), mean, self._multiplied(values - mean))

    def merge(self, other: Self) -> None:
        """Add the images that another of its kind has seen, by the same update."""
        if other._mean is not None and other._products is not None:
            self._take(other.count, other._mean.clone(), other._products.clone())

    def _take(self, count: int, mean: Tensor, products: Tensor) -> None:
        if self._mean is None or self._products is None:
            self.count, self._mean, self._products = count, mean, products
            return
        total = self.count + count
        step = mean.to(self._mean.device) - self._mean
        self._products += products.to(step.device) + self._multiplied(step[None]) * (self.count * count / total)
        self._mean += step * (count / total)
        self.count = total

    @property
    def mean(self) -> np.ndarray:
        """The mean over all images."""
        assert self._mean is not None
        return self._mean.cpu().numpy()

    def _of_mean(self) -> np.ndarray:
        """The products of the mean's own deviations, images being the independent units; NaN for one image."""
        assert self._products is not None
        products = self._products.cpu().numpy()
        if self.count < 2:
            return np.full_like(products, np.nan)
        return products / (self.count - 1) / self.count


class RunningMean(_Moments):
    """Mean and standard error over images of values that arrive in chunks `(image, ...)`, in float64."""

    def _multiplied(self, deviations: Tensor) -> Tensor:
        return deviations.square().sum(0)

    @property
    def standard_error(self) -> np.ndarray:
        """The standard error of the mean, images being the independent units; NaN for one image."""
        return np.sqrt(self._of_mean())


class RunningCovariance(_Moments):
    """Mean over images of vectors that arrive in chunks `(image, entry)`, and the covariance of that mean."""

    def _multiplied(self, deviations: Tensor) -> Tensor:
        return deviations.T @ deviations

    @property
    def covariance(self) -> np.ndarray:
        """The covariance of the mean, images being the independent units; NaN for one image."""
        return self._of_mean()


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

    def merge(self, other: "UnitMean") -> None:
        """Add the images of whole batches that another has seen."""
        self.value = merged(self.value, other.value)
        self.change = merged(self.change, other.change)

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
        other_keys: whether maps are read too whose keys are other tokens than their queries, such as pooled ones.
        whole_batches: whether an activation comes with all images of the batch at once instead of in chunks, for
            what compares images with each other.
        summed: names of the attributes that hold what was measured when a batch is over, if processes can sum that up:
            what `vitprobe.ranks.merged` puts together.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    references: ClassVar[str]
    reads: ClassVar[Literal["activation", "attention", "gated attention", "output"]]
    inputs: Inputs = "layer"
    other_keys: ClassVar[bool] = False
    whole_batches: ClassVar[bool] = False
    summed: ClassVar[tuple[str, ...]] = ()

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

    def alone(self) -> str:
        """Why processes cannot measure this together; empty if they can."""
        return "" if self.summed else "it names no attributes in `summed` that could be"

    def state(self) -> dict[str, Any]:
        """What was measured, for `merge` in another process."""
        return {name: getattr(self, name) for name in self.summed}

    def merge(self, state: dict[str, Any]) -> None:
        """Add what another process has measured, as if its batches had come after those of this one."""
        for name, theirs in state.items():
            setattr(self, name, merged(getattr(self, name), theirs))

    def run(self, model: nn.Module, batches: Iterable[Any], **options: Any) -> xr.Dataset:
        """This probe alone: `probe(model, batches, [self])` as one flat dataset; an error if there is none."""
        found, left_out = _run(model, batches, [self], **options)
        if self.name not in found:
            raise ValueError(f"{left_out[self.name]} missing='skip' is for several probes: of one it leaves nothing.")
        return found[self.name]


def probe(
    model: nn.Module,
    batches: Iterable[Any],
    probes: Sequence[FeatureProbe],
    *,
    layers: str | Sequence[str] = "auto",
    prefix: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    missing: Literal["raise", "skip"] = "raise",
    group: Group = None,
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
        group: a group of `torch.distributed` whose processes call this together, each with batches of its own or
            none: all get what one of them would give over the batches of rank 0, then those of rank 1, and so on.
            Unless given, this process measures alone, whatever others do.
        progress: whether a terminal shows a progress bar.

    Returns:
        One flat dataset per probe, by its name.

    Raises:
        TypeError: if the model cannot be watched, or a probe is none.
        ValueError: if there are no batches, or nothing to measure; if the ranks of a group have other models or sizes
            of images, a probe cannot be summed over them, or one of them fails.
    """
    found, left_out = _run(
        model,
        batches,
        probes,
        layers=layers,
        prefix=prefix,
        forward=forward,
        missing=missing,
        group=group,
        progress=progress,
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
    group: Group = None,
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
    for one in probes:
        if group is not None and (reason := one.alone()):
            raise ValueError(
                f"{one.name} cannot be summed over ranks: {reason}. Measure it on one rank, without group=."
            )
    bare = unwrap(model)
    device = next((p.device for p in bare.parameters()), torch.device("cpu"))
    ranks = Ranks(group, device)
    ranks.require_same(bare)
    with ranks.together():
        seen = _pass(
            bare,
            batches,
            probes,
            layers=layers,
            prefix=prefix,
            forward=forward or default_forward,
            missing=missing,
            progress=progress and ranks.first,
        )
    seen = _Seen.of_all(ranks.gathered(seen))
    probes = [one for one in probes if one.name not in seen.left_out]

    def take(states: list[dict[str, Any]]) -> None:
        for one, state in zip(probes, states, strict=True):
            one.merge(state)

    def datasets() -> tuple[dict[str, xr.Dataset], dict[str, str]]:
        found: dict[str, xr.Dataset] = {}
        left_out = dict(seen.left_out)
        for one in probes:
            try:
                found[one.name] = _dataset(one, seen, bare, device, {} if group is None else {"ranks": ranks.count})
            except ValueError as error:  # what only the whole measurement shows: no unit has a diagonal frequency, say
                if missing == "raise":
                    raise
                left_out[one.name] = str(error)
        return found, left_out

    if group is not None:
        ranks.to_first([one.state() for one in probes], take)
    return ranks.from_first(datasets)


@dataclass
class _Seen:
    """What a pass was over.

    Attributes:
        plan: what the model shows; `None` if there were no batches.
        shape: of the images `(channel, y, x)`.
        images: number of them.
        left_out: probes that have nothing to measure here, and why.
        said: what the batches say of themselves.
    """

    plan: Plan | None
    shape: tuple[int, ...]
    images: int
    left_out: dict[str, str]
    said: dict[str, Any]

    @classmethod
    def of_all(cls, shares: "Sequence[_Seen]") -> "_Seen":
        """What the passes of all ranks were over together; an error if there were no batches, or they do not fit."""
        some = {rank: one for rank, one in enumerate(shares) if one.plan is not None}
        if not some:
            raise ValueError("the batches were empty: an iterator that was used up, or a loader without images?")
        number, first = next(iter(some.items()))
        advice = "give all ranks batches of one kind, and the same layers=, prefix= and forward=."
        for rank, one in some.items():
            for what, mine, theirs in (
                ("images (channel, y, x) of", first.shape, one.shape),
                ("nothing to measure for", sorted(first.left_out), sorted(one.left_out)),
            ):
                if mine != theirs:
                    raise ValueError(f"rank {rank} has {what} {theirs}, where rank {number} has {mine}: {advice}")
            if other := first._shown() ^ one._shown():
                raise ValueError(
                    f"ranks {number} and {rank} see other units or attention maps: {sorted(other)[:3]}: {advice}"
                )
        said = agreed([one.said for one in shares])
        return cls(first.plan, first.shape, sum(one.images for one in shares), first.left_out, said)

    def _shown(self) -> set[tuple[str, tuple[int, int]]]:
        """Names and grids of all units and attention maps."""
        assert self.plan is not None
        units = {(unit.name, unit.layout.grid) for unit in self.plan.units}
        return units | {(site.name, site.grid) for site in self.plan.attentions}


def _pass(
    model: nn.Module,
    batches: Iterable[Any],
    probes: Sequence[FeatureProbe],
    *,
    layers: str | Sequence[str],
    prefix: int | None,
    forward: Callable[[nn.Module, Any], Any],
    missing: Literal["raise", "skip"],
    progress: bool,
) -> _Seen:
    """The pass over this process's batches, which leaves the probes full."""
    seen = _Seen(None, (), 0, {}, {})
    watches: list[Watch] = []
    for one in probes:
        one.start()
    with untouched(model):
        for batch in tqdm(as_batches(batches), desc="probe", unit="batch", disable=None if progress else True):
            batch = to_model(batch, model)
            size, *here = images_of(batch).shape
            if seen.plan is None:
                seen.plan = plan(model, batch, layers=layers, prefix=prefix, forward=forward)
                seen.shape = tuple(here)
                seen.left_out = {one.name: why for one in probes if (why := _reason_against(one, seen.plan, batch))}
                if seen.left_out and missing == "raise":
                    raise ValueError(next(iter(seen.left_out.values())))
                probes = [one for one in probes if one.name not in seen.left_out]
                # What attention sees is the same for all probes of a pass; the model's own comes last.
                of_input = {kind: [one for one in probes if one.inputs == kind] for kind in INPUTS}
                watches = [_watch(model, seen.plan, readers, kind) for kind, readers in of_input.items() if readers]
            elif tuple(here) != seen.shape:
                raise ValueError(
                    f"images of {tuple(here)} after images of {seen.shape} (channel, y, x): frequencies and distances "
                    "are not comparable between sizes; measure each size by itself."
                )
            for one in probes:
                one.start_batch(batch)
            output = [watch(forward, model, batch) for watch in watches][-1] if watches else None
            for one in probes:
                if one.reads == "output":
                    one.update(targets_of(batch), logits_of(output))
                one.end_batch()
            seen.images += size
    seen.said = described_batches(batches)
    return seen


def _places(one: FeatureProbe, found: Plan) -> Sequence[Unit] | Sequence[AttentionSite]:
    if one.reads == "output":
        return ()
    if one.reads == "activation":
        return found.units
    return [site for site in found.attentions if _reads(one, site)]


def _reads(one: FeatureProbe, site: AttentionSite) -> bool:
    """Whether a probe of attention reads the maps of a site."""
    return bool(site.parts) if one.reads == "gated attention" else site.keys is None or one.other_keys


def _left_out(one: FeatureProbe, found: Plan) -> list[str]:
    """What the pass shows and a probe does not read, or cannot be shown, and why."""
    maps = [site for site in found.attentions if one.reads == "attention" and not _reads(one, site)]
    return [*found.skipped, *(f"{site.name}: {one.name} wants keys that are the queries' tokens" for site in maps)]


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
    left_out = _left_out(one, found) if one.reads != "gated attention" else []
    reasons = f" Left out: {_grouped(left_out)}." if left_out else ""
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
    on_gated = [one for one in probes if one.reads == "gated attention"]
    on_maps = [one for one in probes if one.reads == "attention"]
    on_chunks = [one for one in probes if one.reads == "activation" and not one.whole_batches]
    on_batches = [one for one in probes if one.reads == "activation" and one.whole_batches]

    def each(readers: Sequence[FeatureProbe]) -> Callable[[Any, Any], None] | None:
        def call(where: Unit | AttentionSite, what: Any) -> None:
            for one in readers:
                if isinstance(where, Unit) or _reads(one, where):
                    one.update(where, what)

        return call if readers else None

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
    one: FeatureProbe, seen: _Seen, model: nn.Module, device: torch.device, more: dict[str, int]
) -> xr.Dataset:
    assert seen.plan is not None
    ds = one.dataset(places := _places(one, seen.plan))
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
            **seen.said,
            images=seen.images,
            image_height=seen.plan.image[0],
            image_width=seen.plan.image[1],
            skipped=json.dumps(_left_out(one, seen.plan)),
            **more,
            **named,
        )
        | ds.attrs
    )
    return ds


def coordinates(places: Sequence[Unit] | Sequence[AttentionSite]) -> dict[str, Any]:
    """The coordinates along `layer` of units or attention sites."""
    grids = [place.layout.grid if isinstance(place, Unit) else place.grid for place in places]
    prefixes = [place.layout.prefix if isinstance(place, Unit) else place.prefix for place in places]
    sites = [place for place in places if isinstance(place, AttentionSite)]  # all of them, or none
    apart: dict[str, Any] = {}
    if any(site.keys is not None for site in sites):
        for axis, (name, text) in enumerate({"key_grid_h": "rows", "key_grid_w": "columns"}.items()):
            grid = [site.key_grid[axis] for site in sites]
            apart[name] = ("layer", grid, {"long_name": f"{text} of patches that are looked at", "units": "1"})
    return apart | {
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
