"""Whether a model is right as often as it is sure: reliability diagram and confidence histogram (Guo et al. 2017)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from scipy.stats import t

from vitprobe.figures.page import BLUE, GREY, VERMILION, Model, by_model, columns, pretty, style, unit_interval

# What is written above a histogram: variable, its name in print, factor, format and unit.
_WRITTEN = (
    ("ece", "ECE", 100, ".1f", " %"),
    ("ecse", "ECSE", 100, "+.1f", " %"),
    ("nll", "NLL", 1, ".3f", " nats"),
    ("temperature", "best T", 1, ".2f", ""),
)


def calibration(ds: xr.Dataset) -> Figure:
    """Accuracy by confidence over the histogram of confidence, one column per model.

    Args:
        ds: the dataset of `vitprobe.calibration`, of one run or of stacked runs.

    Returns:
        The figure: bars of the accuracy of each bin with their 95 % intervals, and hatched the gap up or down to the
        bin's mean confidence, which on the diagonal would vanish; below, the share of images of each bin, right and
        wrong predictions on top of each other.
    """
    with style():
        panels = _models(ds)
        narrow = len(panels) > 3
        figure, axes = columns(panels, rows=2, height=2.3 if narrow else 2.0)
        for column, model in zip(axes.T, panels, strict=True):
            _reliability(column[0], model.runs)
            _histogram(column[1], model.runs)
            text = _numbers(model.runs, "\n" if narrow else " ")
            column[1].set_title(text, loc="left", fontsize=6.5, linespacing=1.3)
        highest = max(ax.get_ylim()[1] for ax in axes[1])
        for index, (upper, lower) in enumerate(axes.T):
            lower.set_ylim(0, highest)
            for ax in (upper, lower):
                ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
                ax.tick_params(labelleft=index == 0)
        axes[0, 0].set_ylabel("accuracy [%]")
        axes[1, 0].set_ylabel("share of images [%]")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        more, names = axes[1, 0].get_legend_handles_labels()
        ncols = 5 if len(panels) > 1 else 2
        figure.legend(handles + more, labels + names, loc="outside upper center", ncols=ncols, columnspacing=1.2)
        figure.supxlabel(_note(ds, panels), fontsize=6.5, color=GREY)
    return figure


def _models(ds: xr.Dataset) -> list[Model]:
    """One panel per model, in the order in which the models come; its title says how many images it gets right."""
    panels = []
    for name, runs in by_model(ds).items():
        right = 100 * runs["top1"].values
        spread = f" ± {right.std(ddof=1):.1f}" if len(right) > 1 else ""
        title = f"{pretty(name)}, " if name else "accuracy "
        panels.append(Model(f"{title}{right.mean():.1f}{spread} %", runs))
    return panels


def _reliability(ax: Axes, runs: xr.Dataset) -> None:
    """Accuracy with its interval, and the gap to the mean confidence, of every bin."""
    left, width = _bins(runs)
    accuracy, confidence = (_mean(runs[name]) for name in ("bin_accuracy", "bin_confidence"))
    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=0.8, zorder=4, label="calibrated")
    bar: dict[str, Any] = {"width": width, "align": "edge", "linewidth": 0.5}
    ax.bar(left, accuracy, color=BLUE, alpha=0.55, edgecolor="white", zorder=2, label="accuracy", **bar)
    # Without a face, so that a gap down into the bar of the accuracy looks like one up.
    gap: dict[str, Any] = {"bottom": accuracy, "fill": False, "edgecolor": VERMILION, "hatch": "//////", "zorder": 3}
    ax.bar(left, confidence - accuracy, label="gap to confidence", **bar, **gap)
    low, high = _ends(runs)
    seen = np.isfinite(low)
    reach = np.abs(np.stack([accuracy - low, high - accuracy]))[:, seen]
    ax.errorbar((left + width / 2)[seen], accuracy[seen], reach, fmt="none", ecolor="black", elinewidth=0.8, zorder=5)
    ax.set_ylim(0, 1)
    unit_interval(ax, "")
    ax.tick_params(labelbottom=False)


def _histogram(ax: Axes, runs: xr.Dataset) -> None:
    """Share of images of every bin, of right and of wrong predictions."""
    left, width = _bins(runs)
    right, wrong = (_mean(runs[name]) for name in ("share_correct", "share_wrong"))
    bar: dict[str, Any] = {"width": width, "align": "edge", "linewidth": 0.5, "edgecolor": "white"}
    ax.bar(left, right, color=GREY, alpha=0.45, label="right predictions", **bar)
    ax.bar(left, wrong, bottom=right, color=VERMILION, label="wrong predictions", **bar)
    unit_interval(ax, "confidence")


def _bins(runs: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Left edge and width of the bins, which are those of all runs."""
    low, high = (runs[name].isel(run=0).values for name in ("bin_low", "bin_high"))
    return low, high - low


def _mean(variable: xr.DataArray) -> np.ndarray:
    """The mean of every bin over the runs that have images there."""
    return variable.mean("run", skipna=True).values


def _ends(runs: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % interval of every bin's accuracy: over seeds if there are several, else over images."""
    if runs.sizes["run"] == 1:
        return runs["bin_accuracy_low"].values[0], runs["bin_accuracy_high"].values[0]
    accuracy = runs["bin_accuracy"].transpose("run", "bin")
    count = accuracy.count("run").values
    spread = accuracy.where(accuracy.count("run") > 1).std("run", ddof=1).values
    half_width = t.ppf(0.975, np.maximum(count - 1, 1)) * spread / np.sqrt(np.maximum(count, 1))
    mean = _mean(accuracy)
    return np.clip(mean - half_width, 0, 1), np.clip(mean + half_width, 0, 1)


def _numbers(runs: xr.Dataset, gap: str) -> str:
    """The numbers for all images, one in a line, with their uncertainty after a gap."""
    lines = []
    for name, said, factor, digits, unit in _WRITTEN:
        values = factor * runs[name].values
        text = f"{said} {values.mean():{digits}}"
        if len(values) > 1:
            text += f"{gap}± {values.std(ddof=1):{digits.removeprefix('+')}}"
        elif f"{name}_se" in runs:
            text += f"{gap}± {factor * float(runs[f'{name}_se'].item()):{digits}}"
        else:
            low, high = (factor * float(runs[f"{name}_{end}"].item()) for end in ("low", "high"))
            text += f"{gap}[{low:{digits}}, {high:{digits}}]"
        lines.append(text + unit)
    return "\n".join(lines).replace("-", "−")


def _note(ds: xr.Dataset, panels: Sequence[Model]) -> str:
    """What the error bars, the brackets and the signs ± are."""
    counts = sorted(model.runs.sizes["run"] for model in panels)
    said = []
    if counts[-1] > 1:
        seeds = str(counts[0]) if counts[0] == counts[-1] else f"up to {counts[-1]}"
        said.append(f"Error bars: 95 % t interval over {seeds} seeds; ±: standard deviation over seeds.")
    if counts[0] == 1:
        said.append("Single run: error bars and brackets 95 % over images; ±: standard error.")
    if "definition" in ds.attrs:
        said.append(f"Definition: {ds.attrs['definition']}, {ds.sizes['bin']} bins.")
    return "\n".join(said)
