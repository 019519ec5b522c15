"""What the studies of Zheng et al. (2024) share: their ConvMixer, and tables drawn as rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from studies.outcomes import difference, where
from studies.scales import sized
from vitprobe.figures.page import GREY, PAGE_WIDTH, interval, style
from vitprobe.runs import Run
from vitprobe.study import Settings

REFERENCES = "Zheng et al. 2024, arXiv:2401.12511"
RECIPE = "zheng_noaug"  # of the paper scale; no study of filters or architectures augments
GREEN = "#009E73"
# As many heads as a 3 x 3 kernel has taps, where impulses are of that kernel; the paper's own have eight.
NINE_HEADS: Mapping[str, Mapping[str, int]] = {
    "smoke": {"dim": 72, "heads": 9},
    "quick": {"dim": 72, "heads": 9},
    "cpu": {"dim": 72, "heads": 9},
    "paper": {},
}


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        label: what is left of it.
        color: of its marks.
        published: the published accuracy less that of the table's reference [percentage points]; none if not known.
    """

    label: str
    color: str
    published: float | None = None


def of_reference(
    ds: xr.Dataset, reference: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]
) -> np.ndarray:
    """Of each seed the accuracy of one kind of run less that of another, in shares of what a reference learned.

    Points mean less where networks learn less: the paper's thresholds are of networks of 70 to 90 %. What is learned is
    the accuracy above chance.

    Args:
        ds: stacked runs.
        reference: coordinates of the reference, a kind that learned.
        one: coordinates of the first kind.
        other: coordinates of the second.

    Returns:
        `(seed,)`.
    """
    kinds = [where(ds, **kind) for kind in (reference, one, other)]
    seeds = [seed for seed in np.unique(ds.seed.values) if all(seed in kind.seed.values for kind in kinds)]
    learned, first, second = (kind.isel(run=np.isin(kind.seed.values, seeds)).accuracy.values for kind in kinds)
    # A network at chance is no reference; `judge` says so, and needs a number.
    return np.asarray((first - second) / np.maximum(learned - 100 / ds.attrs["classes"], 1))


def convmixer(run: Run, settings: Settings, **options: Any) -> Run:
    """The run with the paper's ConvMixer: without an activation after the spatial filters, as in the authors' code.

    At the paper scale its learning rate is ten times that of the ViTs.

    Args:
        run: gives data and recipe.
        settings: of the study.
        **options: of the network.
    """
    options = {"spatial_activation": False, **options}
    if settings.scale == "paper":
        return replace(run, model="convmixer_zheng", options=options, recipe=replace(run.recipe, lr=1e-3))
    return replace(run, model=sized("convmixer", settings), options=options)


def draw_rows(
    ds: xr.Dataset,
    rows: Mapping[str, Row],
    *,
    name: str,
    reference: str,
    thresholds: Mapping[str, tuple[float, str]],
    published: str,
    note: str = "",
) -> Figure:
    """Test accuracy of every kind of network, and what it differs by from one of them in the same seed.

    Args:
        ds: stacked runs.
        rows: by the value of the coordinate `name`, from top to bottom; those without runs are left out.
        name: the coordinate that tells the kinds apart.
        reference: the kind that the others are compared with.
        thresholds: of the rules, by the word for what lies beyond [percentage points], and on which side, "left" or
            "right".
        published: what the published marks are.
        note: what else stands below.

    Returns:
        The figure.
    """
    rows = {kind: row for kind, row in rows.items() if (ds[name] == kind).any()}
    seeds = len(np.unique(ds.seed.values))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 1.5 + 0.27 * len(rows)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        drawn: list[list[float]] = [[], [0.0, *(threshold for threshold, _ in thresholds.values())]]
        base = where(ds, **{name: reference})
        for place, (kind, row) in enumerate(rows.items()):
            runs = where(ds, **{name: kind})
            drawn[0] += _row(left, runs.accuracy.values, runs.error_se.values, place, row.color)
            if kind != reference:
                values = difference(ds, "accuracy", {name: kind}, {name: reference})
                # As if of different images: too wide, since both networks saw the same ones.
                error = np.hypot(runs.error_se.values.mean(), base.error_se.values.mean())
                drawn[1] += _row(right, values, np.array([error]), place, row.color)
            if row.published is not None and kind != reference:
                right.plot(row.published, place - 0.27, "D", color=GREY, markersize=4.5, fillstyle="none")
                drawn[1].append(row.published)
        for ax, seen in zip((left, right), drawn, strict=True):
            margin = 0.08 * (np.ptp(seen) or 1.0)
            ax.set_xlim(min(seen) - margin, max(seen) + margin)
            ax.xaxis.set_major_locator(MaxNLocator(6))
        right.axvline(0, color=GREY, linewidth=0.6, zorder=1)
        for said, (threshold, side) in thresholds.items():
            right.axvline(threshold, color=GREY, linewidth=0.6, linestyle=":", zorder=1)
            right.annotate(
                f"← {said}" if side == "left" else f"{said} →", (threshold, 1), xycoords=("data", "axes fraction"),
                ha="right" if side == "left" else "left", va="bottom", fontsize=6.5, color=GREY,
            )  # fmt: skip
        left.set_yticks(range(len(rows)), labels=[row.label for row in rows.values()])
        left.set_ylim(len(rows) - 0.5, -0.6)
        left.set_xlabel("test accuracy [%]")
        right.set_xlabel(f"test accuracy less that of {rows[reference].label}\nin the same seed [percentage points]")
        known = any(row.published is not None for row in rows.values())
        handles = _legend(published if known else "", several=seeds > 1)
        figure.legend(handles=handles, loc="outside upper center", ncols=3, handletextpad=0.2)
        figure.supxlabel("\n".join(filter(None, [seeds_note(ds), note])), fontsize=6.5, color=GREY)
    return figure


def seeds_note(ds: xr.Dataset) -> str:
    """What was trained on what, and what the bars are.

    Args:
        ds: stacked runs.
    """
    seeds = len(np.unique(ds.seed.values))
    bars = f"95 % t interval over {seeds} seeds (cut at the frame)" if seeds > 2 else "standard error over images"
    images = int(np.unique(ds.train_images.values).max())
    return f"{ds.attrs['data']}, {images:,} training images, no augmentation. Bars: {bars}."


def _row(ax: Axes, values: np.ndarray, error: np.ndarray, place: int, color: str) -> list[float]:
    """Mean, bar and single seeds of one row; gives the values that must be seen."""
    half_width = interval(values[:, None])[1][0] if len(values) > 2 else error.mean()
    ax.errorbar(
        values.mean(), place, xerr=half_width, fmt="o", color=color, markersize=5, markeredgecolor="white",
        markeredgewidth=0.5, elinewidth=0.8, zorder=4,
    )  # fmt: skip
    if len(values) > 1:
        ax.scatter(values, np.full(len(values), place + 0.22), s=7, color=color, alpha=0.6, linewidths=0, zorder=3)
    return [float(value) for value in values]


def _legend(published: str, *, several: bool) -> Sequence[Line2D]:
    look: dict[str, Any] = {"color": GREY, "linestyle": "none"}
    handles = [Line2D([], [], marker="o", markersize=5, label="mean of seeds", **look)]
    if several:
        handles.append(Line2D([], [], marker="o", markersize=2.5, label="single seeds", **look))
    if published:
        handles.append(Line2D([], [], marker="D", markersize=4.5, fillstyle="none", label=published, **look))
    return handles
