"""Accuracy lost with each unit, by depth (Park & Kim 2022, Fig. 10b and App. D.4)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitprobe.figures.depth_profile import kind_legend, shade_kinds
from vitprobe.figures.page import BLUE, GREY, Model, columns, interval, limit, models, style, unit_interval

NORMAL = 1.96  # half a 95 % interval, in standard errors over many images
BARS: dict[str, Any] = {"fmt": "o", "markersize": 3, "elinewidth": 0.8, "capsize": 1.5, "capthick": 0.8, "zorder": 4}


def lesion(ds: xr.Dataset) -> Figure:
    """Change of accuracy without each unit, at the middle of the unit's span of depth, one panel per model.

    Args:
        ds: the dataset of `vitprobe.lesion`, of one run or of stacked runs.

    Returns:
        The figure. A cross on the line of no change is a unit that was not removed.
    """
    with style():
        panels = models(ds)
        figure, axes = columns(panels, rows=1, height=2.3)
        kept = [_draw(ax, model) for ax, model in zip(axes[0], panels, strict=True)]
        axes[0, 0].set_ylabel("change of accuracy\n[percentage points]")
        kind_legend(figure, panels)
        note_of_bars(figure, panels, "×: not removed." if any(kept) else "")
    return figure


def note_of_bars(figure: Figure, panels: Sequence[Model], more: str = "") -> None:
    """A line under the figure that says what the bars are.

    Args:
        figure: the figure.
        panels: its models.
        more: what else to say.
    """
    counts = sorted(model.runs.sizes["run"] for model in panels)
    said = []
    if counts[-1] > 1:
        seeds = str(counts[0]) if counts[0] == counts[-1] else f"up to {counts[-1]}"
        said.append(f"Bars: 95 % t interval over {seeds} seeds; small points: single seeds.")
    if counts[0] == 1:
        said.append("Bars of a single run: 95 % interval over images, paired.")
    figure.supxlabel(" ".join(filter(None, [*said, more])), fontsize=6.5, color=GREY)


def _draw(ax: Axes, model: Model) -> bool:
    """Draw one model; whether units are among it that were not removed."""
    depth = model.runs["depth"].mean("run").values
    shade_kinds(ax, depth, model.runs["kind"].values[0])
    seeds = 100 * model.runs["accuracy_change"].transpose("run", "layer").values
    mean, half_width = interval(seeds)
    if len(seeds) == 1:
        half_width = NORMAL * 100 * model.runs["accuracy_change_se"].transpose("run", "layer").values[0]
    start = np.concatenate([[0.0], depth[:-1]])
    middle = (start + depth) / 2
    removed = np.isfinite(mean)
    ax.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    ax.errorbar(middle[removed], mean[removed], half_width[removed], color=BLUE, **BARS)
    if len(seeds) > 1:
        beside = np.linspace(-0.25, 0.25, len(seeds))[:, None] * (depth - start)
        ax.scatter(middle + beside, seeds, s=4, color=BLUE, alpha=0.6, linewidths=0, zorder=3)
    ax.plot(middle[~removed], np.zeros(int((~removed).sum())), "x", markersize=3.5, color=GREY, zorder=4, clip_on=False)
    unit_interval(ax, "depth")
    bounds = [mean[removed] - half_width[removed], mean[removed] + half_width[removed]] if len(seeds) == 1 else []
    limit([ax], [seeds, np.zeros(1), *bounds])
    intact = 100 * float(model.runs["intact_accuracy"].mean())
    if math.isfinite(intact) and "%" not in model.title:
        ax.set_title(f"{model.title}, intact {intact:.1f} %".removeprefix(", "))
    return bool((~removed).any())
