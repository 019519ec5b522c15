"""Accuracy with parts of attention masked, mask by mask or layer by layer (d'Ascoli et al. 2021, Tables 5 and 6)."""

import itertools

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from vitprobe.figures.lesion import BARS, NORMAL, note_of_bars
from vitprobe.figures.page import (
    GREY,
    PALETTE,
    THIN_LINES,
    Model,
    by_model,
    columns,
    interval,
    limit,
    line_with_band,
    models,
    note,
    pretty,
    style,
)
from vitprobe.results import stack_runs

LABEL = "change of accuracy [percentage points]"
WORDS = {
    "position_codes": "no position codes",
    "content": "content masked",
    "position": "position masked",
    "uniform": "uniform maps",
    "mean": "mean maps",
}


def masking(ds: xr.Dataset) -> Figure:
    """Change of accuracy under each mask, one colour per model; by layer, one panel per model and a colour per mask.

    Args:
        ds: the dataset of `vitprobe.masking`, of one run or of stacked runs.

    Returns:
        The figure.
    """
    runs = ds if "run" in ds.dims else stack_runs([ds])
    with style():
        return _by_layer(runs) if "layer" in runs.dims else _by_mask(runs)


def _mask_names(runs: xr.Dataset) -> list[str]:
    names = runs["mask_name"].transpose("run", "mask").values
    return [_words(next(filter(None, map(str, column)))) for column in names.T]


def _words(mask: str) -> str:
    kind, _, size = mask.partition(":")
    return f"{size}×{size} windows" if kind == "window" else WORDS.get(mask, mask)


def _by_mask(runs: xr.Dataset) -> Figure:
    panels = [Model(pretty(name), of_model) for name, of_model in by_model(runs).items()]
    masks = _mask_names(runs)
    figure = Figure(figsize=(4.6, 0.9 + 0.2 * len(masks) * (1 + 0.5 * len(panels))), layout="constrained")
    ax = figure.subplots()
    ax.axvline(0, color=GREY, linewidth=0.6, zorder=1)
    handles = []
    for index, (model, color) in enumerate(zip(panels, itertools.cycle(PALETTE), strict=False)):
        seeds = 100 * model.runs["accuracy_change"].transpose("run", "mask").values
        mean, half_width = interval(seeds)
        if len(seeds) == 1:
            half_width = NORMAL * 100 * model.runs["accuracy_change_se"].transpose("run", "mask").values[0]
        y = np.arange(len(masks)) + 0.6 * ((index + 0.5) / len(panels) - 0.5)
        ax.errorbar(mean, y, xerr=half_width, color=color, **BARS)
        if len(seeds) > 1:
            beside = np.linspace(-0.15, 0.15, len(seeds))[:, None] / len(panels)
            ax.scatter(seeds, y + beside, s=4, color=color, alpha=0.6, linewidths=0, zorder=3)
        handles.append(Line2D([], [], color=color, marker="o", markersize=3.5, linestyle="none", label=model.title))
    ax.set_yticks(range(len(masks)), masks)
    ax.set_ylim(len(masks) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(LABEL)
    if len(panels) > 1:
        figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 3))
    else:
        ax.set_title(panels[0].title)
    note_of_bars(figure, panels)
    return figure


def _by_layer(runs: xr.Dataset) -> Figure:
    panels = models(runs)
    masks = _mask_names(runs)
    figure, axes = columns(panels, rows=1, height=2.3)
    handles = [
        Line2D([], [], color=color, marker="o", markersize=2.4, label=name)
        for name, color in zip(masks, itertools.cycle(PALETTE), strict=False)
    ]
    cumulative = runs.attrs.get("per") == "up_to_layer"
    for ax, model in zip(axes[0], panels, strict=True):
        change = 100 * model.runs["accuracy_change"].transpose("mask", "run", "layer").values
        error = NORMAL * 100 * model.runs["accuracy_change_se"].transpose("mask", "run", "layer").values
        layer = np.arange(1, model.runs.sizes["layer"] + 1)
        ax.axhline(0, color=GREY, linewidth=0.6, zorder=1)
        for seeds, errors, handle in zip(change, error, handles, strict=True):
            line_with_band(ax, layer, seeds, errors, str(handle.get_color()))
        ax.set_xlabel("first layers masked" if cumulative else "attention layer masked")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        limit([ax], [change, np.zeros(1)])
    axes[0, 0].set_ylabel(LABEL.replace(" [", "\n["))
    across = max(2, int(figure.get_figwidth() / 1.2))  # names as long as "no position codes"
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), across))
    note(figure, panels, several=THIN_LINES, single="Band of a single run: 95 % interval over images, paired.")
    return figure
