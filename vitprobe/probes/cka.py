"""How alike the units of one network, or of two, see the images: centred kernel alignment (Park & Kim 2022, App. D.3).

As mini-batches give it (Nguyen, Raghu & Kornblith 2021): the Gram matrices of a batch's images, one per unit, are
compared by HSIC, numerator and denominator are summed over batches, and the ratio is taken last.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import Activation, Plan, Unit, Watch, plan
from vitprobe.attach.watch import chunk_size
from vitprobe.calling import Described, as_batches, default_forward, described, to_model, untouched, unwrap
from vitprobe.intervals import t_quantile
from vitprobe.names import unknown
from vitprobe.probes.base import FeatureProbe, coordinates
from vitprobe.ranks import Ranks
from vitprobe.results import stack_runs

Estimator = Literal["unbiased", "biased"]
Tokens = Literal["patches", "all"]

FEWEST = 4  # images in a batch: with three, HSIC_1 divides by zero
GROUPS = 64  # groups of batches that the jackknife leaves out in turn: more would cost memory with the images
PSEUDO_STAGES = 4  # as many as ResNets, Swin and their like have


def gram(parts: Sequence[Tensor]) -> Tensor:
    """Inner products between images of the features of a batch, less the batch's mean features.

    Nothing here depends on the mean, but where it is large it would use up the digits of single precision. So it is
    taken off before the products, which then may be single; their sums over features are double.

    Args:
        parts: features `(image, ...)`, any number of tensors, all flattened.

    Returns:
        `(image, image)`, double; exactly zero where all images have the same features.
    """
    count = len(parts[0])
    total = torch.zeros(count, count, dtype=torch.float64, device=parts[0].device)
    for part in parts:
        # The order of features is free: in that of memory, most layouts are flattened without a copy.
        order = sorted(range(1, part.ndim), key=part.stride, reverse=True)
        flat = part.permute(0, *order).flatten(1)
        for x in flat.split(chunk_size(count, part.device), dim=1):
            x = x if x.dtype == torch.float64 else x.float()
            # The first image goes first, because the mean of equal numbers may differ from them by rounding.
            x = x - x[:1]
            x -= x.mean(0)
            with torch.autocast(x.device.type, enabled=False):  # of the user's forward, around which this may run
                total += (x @ x.T).double()
    return total


def centred(gram: Tensor, estimator: Estimator = "unbiased") -> Tensor:
    """A Gram matrix made so that the sum of the products of two is their HSIC.

    `"unbiased"` is HSIC_1 of Song et al. (2012) in the form of an inner product: the diagonal is left out, and the
    rest is projected onto matrices whose rows sum to zero. `"biased"` is HSIC of Gretton et al. (2005): rows and
    columns less their means, over images - 1.

    Args:
        gram: inner products `(image, image)`.
        estimator: `"unbiased"`, of four images or more, or `"biased"`.

    Returns:
        `(image, image)`.
    """
    n = len(gram)
    if estimator == "biased":
        row = gram.mean(0)
        return (gram - row - row[:, None] + row.mean()) / (n - 1)
    k = gram.clone().fill_diagonal_(0)
    row = k.sum(0) / (n - 2)
    k += row.sum() / (n - 1) - row - row[:, None]
    return k.fill_diagonal_(0) / math.sqrt(n * (n - 3))


@dataclass
class _Sums:
    """HSIC summed over batches, each times its images.

    Attributes:
        cross: of each unit with each of the other side `(layer, layer_other)`.
        own: of each unit with itself `(layer,)`.
        other: the same of the other side `(layer_other,)`.
        images: images in these batches.
    """

    cross: np.ndarray
    own: np.ndarray
    other: np.ndarray
    images: int

    @classmethod
    def of_batch(cls, grams: Tensor, others: Tensor) -> "_Sums":
        """Of the centred Gram matrices `(unit, image, image)` of one batch."""
        n = grams.shape[-1]
        mine, theirs = grams.flatten(1), others.flatten(1).to(grams.device)
        cross = mine @ theirs.T
        # Of one model from the same numbers, so that a unit is to itself exactly 1.
        own, other = 2 * [cross.diagonal()] if others is grams else [mine.square().sum(1), theirs.square().sum(1)]
        return cls(n * cross.cpu().numpy(), n * own.cpu().numpy(), n * other.cpu().numpy(), n)

    def __add__(self, more: "_Sums") -> "_Sums":
        return _Sums(self.cross + more.cross, self.own + more.own, self.other + more.other, self.images + more.images)

    def __sub__(self, less: "_Sums") -> "_Sums":
        return _Sums(self.cross - less.cross, self.own - less.own, self.other - less.other, self.images - less.images)

    def cka(self) -> np.ndarray:
        """The ratio `(layer, layer_other)`; NaN where a unit was constant over the images."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.cross / np.sqrt(self.own[:, None] * self.other)


class _Groups:
    """The sums of every batch, or from the 65th on of groups: batch b is in group b modulo their number."""

    def __init__(self) -> None:
        self.sums: list[_Sums] = []
        self.batches = 0

    def __len__(self) -> int:
        return len(self.sums)

    def add(self, sums: _Sums) -> None:
        """Add a batch."""
        self._put(self.batches, sums)
        self.batches += 1

    def merge(self, other: "_Groups") -> None:
        """Add the batches of another, in its order, after those that are here."""
        for group, sums in enumerate(other.sums):
            self._put(self.batches + group, sums)
        self.batches += other.batches

    def _put(self, batch: int, sums: _Sums) -> None:
        if batch < GROUPS:
            self.sums.append(sums)
        else:
            self.sums[batch % GROUPS] += sums


class CKA(FeatureProbe):
    """Centred kernel alignment between all pairs of units, from 0 (unlike) to 1 (equal but for rotation and scale).

    Of each batch and unit the Gram matrix of the images under the linear kernel of the flattened activation; of each
    pair of units HSIC; summed over batches, and then the ratio `HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))` (Nguyen,
    Raghu & Kornblith 2021). HSIC_1 has the same expectation for every size of batch, so batches of different size may
    be summed: each counts with its images, and for equal batches that is the published sum. It can make numbers
    between unlike units slightly negative. A batch of fewer than four images, the last perhaps, has no HSIC_1: it is
    left out and counted in `batches_left_out`.

    Standard errors are those of the jackknife over batches, which leaves out one in turn, as is right for a ratio of
    sums; beyond 64 batches, one of 64 groups of them. They are NaN for a single batch, and rough for few.

    Only one batch's Gram matrices `(unit, image, image)` and the sums are kept. Units that are constant over the
    images have no CKA: NaN, and the attribute `constant_units` (JSON) names them.

    Args:
        estimator: `"unbiased"` as published, or `"biased"`: HSIC with its diagonal (Kornblith et al. 2019), which
            takes unlike units for alike unless images outnumber features.
        tokens: `"patches"`, or `"all"` for prefix tokens too. The publication does not say which.
    """

    name = "cka"
    title = "Centred kernel alignment between units"
    references = (
        "Nguyen, Raghu & Kornblith 2021, Do Wide and Deep Networks Learn the Same Things?, arXiv:2010.15327, eq. 1-3; "
        "Park & Kim 2022, How Do Vision Transformers Work?, arXiv:2202.06709, Fig. 10a and App. D.3"
    )
    reads = "activation"
    whole_batches = True
    summed = ("_groups", "_left_out")

    def __init__(self, estimator: Estimator = "unbiased", tokens: Tokens = "patches") -> None:
        for what, given, known in (("estimator", estimator, Estimator), ("tokens", tokens, Tokens)):
            if given not in get_args(known):
                raise unknown(what, given, get_args(known))
        self.estimator: Estimator = estimator
        self.tokens: Tokens = tokens

    def start(self) -> None:
        """Forget everything that was measured."""
        self._grams: dict[int, Tensor] = {}
        self._groups = _Groups()
        self._left_out = 0

    def update(self, where: Unit, what: Activation) -> None:
        """Add all images of a batch of one unit."""
        self._keep(self._grams, where, what)

    def _keep(self, grams: dict[int, Tensor], where: Unit, what: Activation) -> None:
        if len(what.patches) >= FEWEST:
            parts = [what.patches] if self.tokens == "patches" else [what.patches, what.prefix]
            grams[where.index] = centred(gram(parts), self.estimator)

    def end_batch(self) -> None:
        """Compare the units by the batch that has come by."""
        if not self._grams:
            self._left_out += 1
            return
        mine = _stacked(self._grams)
        self._groups.add(_Sums.of_batch(mine, self._others(mine)))
        self._grams.clear()

    def _others(self, mine: Tensor) -> Tensor:
        """The centred Gram matrices to compare with: here the same."""
        return mine

    def _places_other(self, places: Sequence[Unit]) -> Sequence[Unit]:
        return places

    def _of_other(self) -> dict[str, Any]:
        """What the dataset says of the other model: here there is none."""
        return {}

    def dataset(self, places: Sequence[Unit]) -> xr.Dataset:
        """CKA along `layer` and `layer_other`, and the same without each batch, or group of batches, in turn."""
        if not self._groups:
            raise ValueError(
                f"cka: all {self._left_out} batches have fewer than {FEWEST} images, and images are compared with "
                "each other inside a batch: give larger ones, e.g. DataLoader(..., batch_size=128)."
            )
        other = self._places_other(places)
        groups = self._groups.sums
        total = sum(groups[1:], groups[0])
        value = total.cka()
        without = np.stack([(total - group).cka() for group in groups])
        images = np.array([group.images for group in groups])
        pairs = ("layer", "layer_other")
        text = "centred kernel alignment"
        ds = xr.Dataset(
            {
                "cka": (pairs, value, {"long_name": text, "units": "1"}),
                "cka_se": (
                    pairs,
                    jackknife_error(value, without, images),
                    {"long_name": "standard error of cka, jackknife over batches", "units": "1"},
                ),
                "cka_without": (
                    ("batch", *pairs),
                    without,
                    {"long_name": f"{text} without a batch, or group of batches", "units": "1"},
                ),
            },
            coords={
                **coordinates(places),
                **_renamed(coordinates(other)),
                "batch": ("batch", np.arange(len(images)), {"long_name": "batch, or group of batches, left out"}),
                "batch_images": ("batch", images, {"long_name": "images in it", "units": "1"}),
            },
            attrs={
                "images": total.images,
                "batches": self._groups.batches,
                "batches_left_out": self._left_out,
                **self._of_other(),
            },
        )
        sides = ((places, total.own), (other, total.other))
        if constant := [unit.name for units, own in sides for unit, hsic in zip(units, own, strict=True) if hsic == 0]:
            ds.attrs["constant_units"] = json.dumps(list(dict.fromkeys(constant)))
        with suppress(ValueError):  # two models, or too few units for stages
            blocks = block_structure(ds)
            ds.attrs["block_structure"] = float(blocks["block_structure"])
            ds.attrs["block_structure_se"] = float(blocks["block_structure_se"])
            ds.attrs["stages_from"] = blocks.attrs["stages_from"]
        return ds

    def config(self) -> dict[str, Any]:
        """The estimator and the tokens."""
        return {"estimator": self.estimator, "tokens": self.tokens}


def _stacked(grams: Mapping[int, Tensor]) -> Tensor:
    return torch.stack([grams[index] for index in sorted(grams)])


def _renamed(along_layer: Mapping[str, tuple[str, Any, dict[str, str]]]) -> dict[str, Any]:
    return {f"{name}_other": (f"{dim}_other", *rest) for name, (dim, *rest) in along_layer.items()}


class _Between(CKA):
    """CKA between the units of the probed model and those of another, which sees each batch just before."""

    def __init__(
        self,
        other: nn.Module,
        estimator: Estimator,
        tokens: Tokens,
        *,
        layers: str | Sequence[str] = "auto",
        prefix: int | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        super().__init__(estimator, tokens)
        self.other = other
        self.layers, self.prefix, self.forward = layers, prefix, forward or default_forward

    def start(self) -> None:
        """Forget everything that was measured."""
        super().start()
        self._other_grams: dict[int, Tensor] = {}
        self._plan: Plan | None = None

    def state(self) -> dict[str, Any]:
        """What was measured, and what the other model shows."""
        return {**super().state(), "plan": self._plan}

    def merge(self, state: dict[str, Any]) -> None:
        """Add what another process has measured; this one may have had no batches."""
        self._plan = self._plan or state["plan"]
        super().merge({name: value for name, value in state.items() if name in self.summed})

    def shown(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, each of which the other model has seen when it is handed out, in its own precision."""
        watch: Watch | None = None
        for batch in batches:
            moved = to_model(batch, self.other)
            if self._plan is None or watch is None:
                self._plan = plan(self.other, moved, layers=self.layers, prefix=self.prefix, forward=self.forward)
                if not self._plan.units:
                    raise ValueError(
                        "cka: the other model's forward pass shows no units; name its modules with "
                        'other_options={"layers": ["blocks.*"]} or the like.'
                    )
                watch = Watch(self.other, self._plan, on_whole_unit=self._see)
            watch(self.forward, self.other, moved)
            yield batch

    def _see(self, where: Unit, what: Activation) -> None:
        self._keep(self._other_grams, where, what)

    def _others(self, mine: Tensor) -> Tensor:
        return _stacked(self._other_grams)

    def _places_other(self, places: Sequence[Unit]) -> Sequence[Unit]:
        assert self._plan is not None
        return self._plan.units

    def _of_other(self) -> dict[str, Any]:
        assert self._plan is not None
        said = described(self.other) | {"skipped": json.dumps(list(self._plan.skipped))}
        return {f"{key}_other": value for key, value in said.items()}


def cka(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    other: nn.Module | None = None,
    estimator: Estimator = "unbiased",
    tokens: Tokens = "patches",
    other_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> xr.Dataset:
    """Centred kernel alignment between the units of one model, or of two, on the same images; see `CKA`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them; 64 to 256 in a batch are usual.
        other: a second model, whose units are compared with those of the first: another seed, another architecture.
            Each batch is given to both.
        estimator: `"unbiased"` or `"biased"`.
        tokens: `"patches"` or `"all"`.
        other_options: `layers`, `prefix` and `forward` of the other model, where they are not those of the first.
        **options: `layers`, `prefix`, `forward`, `group` and `progress` of `probe`.

    Returns:
        `cka` (layer, layer_other) with its standard error over batches, and `cka_without` (batch, layer, layer_other)
        for statistics of one's own. Of one model also attributes `block_structure` and `block_structure_se`.

    Raises:
        ValueError: if all batches have fewer than four images, or `other_options` are given without another model.
    """
    if other is None:
        if other_options:
            raise ValueError(f"other_options={dict(other_options)!r} are those of a second model: give other=...")
        return CKA(estimator, tokens).run(model, batches, **options)
    of_other = ("layers", "prefix", "forward")
    for key in other_options or {}:
        if key not in of_other:
            raise unknown("option of the other model", key, of_other)
    chosen = {key: value for key, value in options.items() if key in of_other} | dict(other_options or {})
    bare = unwrap(other)
    if (group := options.get("group")) is not None:
        Ranks(group, next((p.device for p in bare.parameters()), "cpu")).require_same(bare)
    one = _Between(bare, estimator, tokens, **chosen)
    with untouched(bare):
        return one.run(model, Described(one.shown(as_batches(batches)), batches), **options)


def jackknife_error(value: np.ndarray, without: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Standard error of a statistic from its values without each group of images in turn.

    The delete-m jackknife for groups of unequal size (Busing, Meijer & van der Leeden 1999); for equal ones it is the
    ordinary jackknife.

    Args:
        value: the statistic `(...)`.
        without: the same without a group `(group, ...)`.
        images: images in each group `(group,)`.

    Returns:
        `(...)`; NaN for a single group.
    """
    inverse = (images.sum() / images).reshape(-1, *[1] * value.ndim)
    change = without - value
    with np.errstate(invalid="ignore", divide="ignore"):
        # Of the pseudo-values from their mean; written in changes, so that what does not change has no error.
        deviation = (inverse - 1) * change - ((1 - 1 / inverse) * change).sum(0)
        return np.sqrt((deviation**2 / (inverse - 1)).mean(0))


# --- blocks -----------------------------------------------------------------------------------------


def block_structure(ds: xr.Dataset, stages: int | Sequence[int] | None = None) -> xr.Dataset:
    """How much more alike units of one stage are than units of two (Park & Kim 2022, App. D.3).

    `block_structure` is the mean CKA over pairs of different units within a stage less that over pairs across stages.
    Neighbours are alike in any network, and pairs within a stage are nearer to each other: the number is above zero
    for a network without stages too, so compare it with the pseudo-stages of one. `block_structure_equal_distance`
    compares pairs of units equally far apart only: of each distance that occurs both within and across stages, the
    difference of the means, averaged with the number of pairs within. It is NaN if there is no such distance.

    Pairs with a unit that has no CKA are left out. Standard errors are those of the jackknife over batches,
    intervals are Student's.

    Args:
        ds: the dataset of `cka` of one model, of one run or of stacked runs.
        stages: `None` ends a stage where the grid of patches changes; networks with one grid get four pseudo-stages,
            runs of units of equal length. A number gives as many pseudo-stages. A sequence gives the stage of every
            unit.

    Returns:
        `within_stages`, `across_stages`, `block_structure` and `block_structure_equal_distance`, each with `_se` and
        a 95 % interval `_low` and `_high`; attributes `stages` (JSON) and `stages_from`: `"grid"`, `"pseudo"` or
        `"given"`.

    Raises:
        ValueError: if the dataset compares two models, or the stages do not fit its units.
    """
    if "run" in ds.dims:
        runs = [ds.isel(run=run).drop_vars("run") for run in range(ds.sizes["run"])]
        return stack_runs([block_structure(run, stages) for run in runs])
    if ds.attrs.get("model_class_other", ds.coords.get("model_class_other", "")):
        raise ValueError("this dataset compares two models, and blocks are those of one: give cka(model, batches).")
    # Padding of stacked runs.
    ds = ds.isel(
        layer=ds["layer_name"].values != "",
        layer_other=ds["layer_name_other"].values != "",
        batch=np.isfinite(ds["batch_images"].values),
    )
    labels, source = _stages(ds, stages)
    order = ("layer", "layer_other")
    value = ds["cka"].transpose(*order).values
    known = np.isfinite(value)
    statistics = _contrasts(value[None], labels, known)
    replicates = _contrasts(ds["cka_without"].transpose("batch", *order).values, labels, known)
    groups = ds.sizes["batch"]
    found: dict[str, Any] = {}
    for name, text in (
        ("within_stages", "mean CKA of two units of one stage"),
        ("across_stages", "mean CKA of units of two stages"),
        ("block_structure", "mean CKA within stages less that across"),
        ("block_structure_equal_distance", "the same between units equally far apart"),
    ):
        number = statistics[name][0]
        error = jackknife_error(number, replicates[name], ds["batch_images"].values)
        half_width = error * t_quantile(0.95, groups) if groups > 1 else math.nan
        for suffix, what, content in (
            ("", "", number),
            ("_se", "standard error over batches: ", error),
            ("_low", "lower end of the 95 % interval: ", number - half_width),
            ("_high", "upper end of the 95 % interval: ", number + half_width),
        ):
            found[name + suffix] = ((), float(content), {"long_name": what + text, "units": "1"})
    attributes = ds.attrs | {"title": "Block structure of centred kernel alignment", "probe": "block_structure"}
    attributes |= {"stages": json.dumps(labels.tolist()), "stages_from": source}
    for name in found:
        attributes.pop(name, None)
    of_run = {
        name: ds[name].variable for name in ds.coords if not ds[name].dims and name not in {**found, **attributes}
    }
    return xr.Dataset(found, of_run, attributes)


def _stages(ds: xr.Dataset, stages: int | Sequence[int] | None) -> tuple[np.ndarray, str]:
    """The stage of every unit, and what says so."""
    units, source = ds.sizes["layer"], "pseudo"
    if stages is None:
        changed = [(ds[side].diff("layer") != 0).values for side in ("grid_h", "grid_w")]
        labels = np.concatenate([[0], np.cumsum(np.logical_or(*changed))])
        if labels[-1] > 0:
            return labels, "grid"
        stages = PSEUDO_STAGES
    if isinstance(stages, int):
        if not 2 <= stages <= units:
            raise ValueError(f"{stages} stages of {units} units: give stages from 2 to the number of units.")
        return np.arange(units) * stages // units, source
    labels = np.asarray(stages)
    if labels.shape != (units,) or labels.dtype.kind not in "iu":
        raise ValueError(
            f"stages={stages!r} of {units} units: give one whole number per unit, such as {[0] * (units // 2)!r} + "
            f"{[1] * (units - units // 2)!r}, how many stages, or None."
        )
    return labels, "given"


def _contrasts(cka: np.ndarray, labels: np.ndarray, known: np.ndarray) -> dict[str, np.ndarray]:
    """The statistics of `block_structure` of several matrices, over the pairs of units whose CKA is known.

    Args:
        cka: the matrices `(matrix, layer, layer)`.
        labels: the stage of every unit `(layer,)`.
        known: where there is a CKA `(layer, layer)`.

    Returns:
        Each statistic by its name `(matrix,)`.

    Raises:
        ValueError: if no pair of units lies within a stage, or none across stages.
    """
    first, second = np.triu_indices(len(labels), 1)
    here = known[first, second]
    first, second = first[here], second[here]
    pairs, distance, same = cka[:, first, second], second - first, labels[first] == labels[second]
    if same.all() or not same.any():
        where = "across stages" if same.all() else "within a stage"
        raise ValueError(f"the stages {labels.tolist()} have no pair of units {where}: give other stages=.")

    def difference(chosen: np.ndarray | bool) -> np.ndarray:
        return pairs[:, same & chosen].mean(1) - pairs[:, ~same & chosen].mean(1)

    both = np.intersect1d(distance[same], distance[~same])
    steps = [difference(distance == apart) for apart in both]
    weights = [np.count_nonzero(same & (distance == apart)) for apart in both]
    return {
        "within_stages": pairs[:, same].mean(1),
        "across_stages": pairs[:, ~same].mean(1),
        "block_structure": difference(True),
        "block_structure_equal_distance": (
            np.average(steps, axis=0, weights=weights) if steps else np.full(len(cka), np.nan)
        ),
    }
