"""What the studies of accuracy share: what came of a run, differences within seeds, and their drawing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from scipy.stats import spearmanr

from vitprobe.claims import Claim, Direction, Verdict, decide
from vitprobe.data.corruption import SMALLEST
from vitprobe.figures.page import attribute, interval
from vitprobe.probes import corruption_robustness
from vitprobe.results import provenance, to_json
from vitprobe.runs import Run, Trained, load, trained
from vitprobe.study import Settings
from vitprobe.training import evaluate

NLL_LABEL = "NLL of training, above its floor [nats]"


@dataclass(frozen=True)
class Look:
    """How a kind of network is drawn, in every figure the same.

    Attributes:
        label: its name, as papers write it.
        color: of its lines.
        marker: of its points.
    """

    label: str
    color: str
    marker: str


def outcome(run: Run, settings: Settings, *, references: str) -> tuple[Trained, xr.Dataset]:
    """Train the run (or take it from the cache), and tell what came of it.

    The training loss is the paper's: the mean over the last epoch, in training mode, of the augmented, mixed and
    smoothed images; here less the entropy of their targets, below which no network gets. It has no standard error over
    images, because the network changes under it: seeds have to show its spread. `nll_clean` is the other definition:
    the trained network in evaluation mode on the training images as they are, against their labels.

    The test error is that of all test images, also where a scale trains with few of them after every epoch: networks
    are compared by a few points, and the seeds' images are the same, so that seeds do not show what few images cost.

    Args:
        run: what to train.
        settings: of the study.
        references: the paper.

    Returns:
        The trained run, and its dataset without dimensions: `error`, `nll_train`, `nll_clean`, `train_accuracy`, with
        their uncertainty where there is one, and what tells runs apart as coordinates.
    """
    result = trained(run, cache=settings.cache, device=settings.device)
    last = result.history.isel(epoch=-1)
    whole = load(replace(run.data, test_size=settings.test_size))
    final = evaluate(result.model, whole.loader("test", batch_size=500), device=settings.device)
    clean = evaluate(result.model, result.data.loader("train", batch_size=500), device=settings.device)
    floor = float(last.train_entropy_floor)
    numbers = {
        "error": (100 * (1 - final.accuracy), "test error", "%"),
        "error_se": (100 * final.accuracy_se, "standard error over images of error", "%"),
        "nll_train": (float(last.train_loss) - floor, "training loss of the last epoch above its floor", "nats"),
        "entropy_floor": (floor, "entropy of the targets of the last epoch", "nats"),
        "nll_clean": (clean.nll, "loss of the training images in evaluation mode", "nats"),
        "nll_clean_se": (clean.nll_se, "standard error over images of nll_clean", "nats"),
        "train_accuracy": (100 * clean.accuracy, "accuracy on the training images in evaluation mode", "%"),
    }
    labels = {
        "seed": (run.recipe.seed, "seed of the run"),
        "parameters": (sum(p.numel() for p in result.model.parameters()), "number of parameters"),
        "train_images": (len(result.data.train), "number of training images"),
        "epochs": (run.recipe.epochs, "epochs of training"),
        "accuracy": (100 * final.accuracy, "test accuracy [%]"),
    }
    described: dict[str, Any] = {
        name: ((), value, {"long_name": text, "units": units}) for name, (value, text, units) in numbers.items()
    }
    coords: dict[str, Any] = {
        name: ((), value, {"long_name": text, "units": "%" if name == "accuracy" else "1"})
        for name, (value, text) in labels.items()
    }
    ds = xr.Dataset(described, coords)
    return result, ds.assign_attrs(
        provenance(
            title="Error and training loss",
            references=references,
            config=run.config(),
            device=next(result.model.parameters()).device,
            data=run.data.spec.partition(":")[0],
            classes=result.data.num_classes,
            test_images=final.images,
            run_config=to_json(run.config()),
        )
    )


def watched(ds: xr.Dataset, during: str = "Curves", ended: str = "in the end") -> str:
    """For a caption, how many test images were seen after each epoch, where they are fewer than in the end.

    Args:
        ds: stacked runs of `outcome`.
        during: what of the figure is over training.
        ended: what of it is the outcome.

    Returns:
        A sentence with a space behind it; nothing where all test images are seen always, or that is not known.
    """
    if "run_config" not in ds.coords:
        return ""
    few = json.loads(str(ds.run_config.values[0]))["data"]["test_size"]
    whole = int(ds.attrs["test_images"])
    return f"{during}: {few:,} test images; {ended}: all {whole:,}. " if few < whole else ""


def robustness(result: Trained, *, images: int, severities: Sequence[int]) -> dict[str, Any]:
    """Mean accuracy over the fifteen corruptions and some severities, the paper's robustness.

    Args:
        result: the trained run.
        images: how many test images are corrupted, spread evenly over them, which may be in the order of their classes.
        severities: of the corruptions.

    Returns:
        `robustness` and `robustness_se` for `Dataset.assign`; not-a-number where there are no images to corrupt,
        because none are asked for, or they are grey or smaller than 32 px.
    """
    data, found = result.data, (np.nan, np.nan)
    if images and data.channels == 3 and min(data.image_size) >= SMALLEST:
        ds = corruption_robustness(result.model, data.few(images), severities=severities, progress=False)
        found = (100 * ds.attrs["mean_accuracy"], 100 * ds.attrs["mean_accuracy_se"])
    said = ("mean accuracy on corrupted images", "standard error over images of robustness")
    names = ("robustness", "robustness_se")
    return {
        name: ((), value, {"long_name": text, "units": "%"})
        for name, value, text in zip(names, found, said, strict=True)
    }


def where(ds: xr.Dataset, **chosen: Any) -> xr.Dataset:
    """The runs whose coordinates have these values, by seed.

    Args:
        ds: stacked runs.
        **chosen: the value of each coordinate.

    Returns:
        Those runs.
    """
    keep = np.ones(ds.sizes["run"], dtype=bool)
    for name, value in chosen.items():
        keep &= ds[name].values == value
    return ds.isel(run=np.flatnonzero(keep)).sortby("seed")


def difference(ds: xr.Dataset, variable: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> np.ndarray:
    """A variable of one kind of run less that of another, seed by seed: both share data, order and augmentation.

    Args:
        ds: stacked runs.
        variable: which.
        one: coordinates of the first kind.
        other: coordinates of the second.

    Returns:
        `(seed,)`, of the seeds that both have.
    """
    first, second = (where(ds, **kind) for kind in (one, other))
    seeds = np.intersect1d(first.seed.values, second.seed.values)
    pair = [runs[variable].values[np.isin(runs.seed.values, seeds)] for runs in (first, second)]
    return pair[0] - pair[1]


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's rank correlation; 0 where one side has no order at all."""
    return float(spearmanr(one, other).statistic) if np.ptp(one) and np.ptp(other) else 0.0


def part(claim: Claim, name: str, statement: str, *, published: str = "not published") -> Claim:
    """A part of a claim, or a control of it, with a name of its own.

    Args:
        claim: the whole.
        name: what to add to its id.
        statement: what the part says.
        published: its value.

    Returns:
        The part; the evidence against the whole stays with the whole.
    """
    return replace(
        claim, id=f"{claim.id} {name}", statement=statement, published=published, counter_evidence="", parts=()
    )


def learned(ds: xr.Dataset, least: float = 45.0) -> bool:
    """Whether every run of a dataset learned its task.

    Args:
        ds: stacked runs.
        least: the test accuracy that counts, of at most ten classes [%]; of more it is 4/9 of that, 20 for 45.
    """
    return bool((attribute(ds, "accuracy") >= (least if ds.attrs["classes"] <= 10 else least * 4 / 9)).all())


def if_learned(verdict: Verdict, runs: xr.Dataset, least: float = 45.0) -> Verdict:
    """The verdict, or that there is none: a network that did not learn is no evidence for anything."""
    if learned(runs, least):
        return verdict
    return without_evidence(verdict, "no evidence, because a seed did not learn its task")


def without_evidence(verdict: Verdict, reason: str) -> Verdict:
    """Inconclusive in place of the verdict, whatever its numbers.

    Args:
        verdict: what the numbers alone say.
        reason: why they are no evidence; it is added to the detail.
    """
    detail = "; ".join(filter(None, [verdict.detail, reason]))
    return replace(verdict, verdict="inconclusive", needed=None, detail=detail)


def judge(
    claim: Claim,
    values: Sequence[float] | np.ndarray,
    direction: Direction,
    runs: xr.Dataset,
    *,
    threshold: float = 0.0,
    least: float = 45.0,
    detail: str = "",
) -> Verdict:
    """The verdict on "above" or "below" a threshold; networks that did not learn are no evidence for anything.

    Args:
        claim: what is claimed.
        values: the statistic of each seed.
        direction: the claimed side of the threshold.
        runs: those that the values are from, as far as they must have learned.
        threshold: zero unless given.
        least: the accuracy from which on a network has learned, as in `learned`.
        detail: what else a reader must know.

    Returns:
        The verdict.
    """
    return if_learned(decide(claim, values, threshold=threshold, direction=direction, detail=detail), runs, least)


def point(ax: Axes, x: np.ndarray, y: np.ndarray, *, errors: tuple[np.ndarray, np.ndarray], **look: Any) -> None:
    """Seeds as small marks, their mean as a large one, with bars both ways.

    The bars are 95 % t intervals over seeds, of three seeds and more; else standard errors over images.

    Args:
        ax: where to draw.
        x: abscissa of each seed.
        y: ordinate of each seed.
        errors: standard errors over images of both, of each seed; not-a-number where there are none.
        **look: `color`, `marker` and `label`.
    """
    bars = []
    for values, error in zip((x, y), errors, strict=True):
        half_width = interval(values[:, None])[1][0] if len(values) > 2 else error.mean()
        bars.append(half_width if np.isfinite(half_width) else None)
    color, marker, label = look["color"], look["marker"], look.get("label")
    if len(x) > 1:
        ax.scatter(x, y, s=7, color=color, marker=marker, alpha=0.45, linewidths=0, zorder=3)
    ax.errorbar(
        x.mean(), y.mean(), xerr=bars[0], yerr=bars[1], color=color, marker=marker, markersize=5.5,
        markeredgecolor="white", markeredgewidth=0.5, linestyle="none", elinewidth=0.7, label=label, zorder=4,
    )  # fmt: skip


def around(ax: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """Limits by the points: bars of a few seeds would dwarf them.

    Args:
        ax: the axes.
        x: all abscissas.
        y: all ordinates.
    """
    for values, limits in ((x, ax.set_xlim), (y, ax.set_ylim)):
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        margin = 0.18 * ((high - low) or abs(high) or 1.0)
        limits(low - margin, high + margin)


def logarithmic(ax: Axes, values: Sequence[float] | np.ndarray) -> None:
    """A logarithmic abscissa that names the values measured.

    Args:
        ax: the axes.
        values: all of them.
    """
    ax.set_xscale("log")
    ax.set_xticks(values, labels=[f"{value:.3g}" for value in values])
    ax.xaxis.set_minor_locator(NullLocator())


def bars_note(seeds: int) -> str:
    """What the bars of `point` are."""
    if seeds > 2:
        return f"Bars: 95 % t interval over {seeds} seeds (cut at the frame). Small marks: single seeds."
    return "Bars: standard error over images."
