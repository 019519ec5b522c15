"""Accuracy on corrupted images by kind and severity (Hendrycks & Dietterich 2019)."""

import itertools
import math

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vitprobe.figures.page import (
    PAGE_WIDTH,
    PALETTE,
    SINGLE_RUN,
    THIN_LINES,
    Model,
    attribute,
    by_model,
    line_with_band,
    note,
    pretty,
    style,
)
from vitprobe.results import stack_runs

COLUMNS = 5


def corruption_robustness(ds: xr.Dataset) -> Figure:
    """Accuracy against severity, one panel per corruption and one line per model; their means in the legend.

    Args:
        ds: the dataset of `vitprobe.corruption_robustness`, of one run or of stacked runs.

    Returns:
        The figure.
    """
    runs = ds if "run" in ds.dims else stack_runs([ds])
    panels = [Model(name, of_model) for name, of_model in by_model(runs).items()]
    kinds = [
        max(str(name) for name in column) for column in runs["corruption_name"].transpose("corruption", "run").values
    ]
    severity = runs["severity"].values
    rows, columns = math.ceil(len(kinds) / COLUMNS), min(COLUMNS, len(kinds))
    with style():
        figure = Figure(figsize=(max(4.6, PAGE_WIDTH * columns / COLUMNS), 0.7 + 1.25 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for ax in axes.flat[len(kinds) :]:
            ax.remove()
        for number, (ax, kind) in enumerate(zip(axes.flat, kinds, strict=False)):
            for model, color in zip(panels, itertools.cycle(PALETTE), strict=False):
                accuracy, error = (
                    100 * model.runs[name].isel(corruption=number).transpose("run", "severity").values
                    for name in ("accuracy", "accuracy_se")
                )
                there = np.isfinite(accuracy).all(axis=1)
                if there.any():
                    line_with_band(ax, severity, accuracy[there], error[there], color)
            ax.set_title(kind.replace("_", " ").replace("jpeg", "JPEG").replace("gaussian", "Gaussian"))
            ax.set_xticks(severity)
            ax.set_ylim(0, 103)  # lest a marker at 100 % be cut
            if number % columns == 0:
                ax.set_ylabel("accuracy [%]")
            if number + columns >= len(kinds):  # nothing below it
                ax.set_xlabel("severity")
                ax.tick_params(labelbottom=True)
        handles = [
            Line2D([], [], color=color, marker="o", markersize=2.4, label=_label(model))
            for model, color in zip(panels, itertools.cycle(PALETTE), strict=False)
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 2 if columns > 3 else 1))
        several = f"{THIN_LINES} ±: standard deviation over seeds."
        note(figure, panels, several=several, single=f"{SINGLE_RUN} In brackets: 95 % interval over images.")
    return figure


def _label(model: Model) -> str:
    """A model's name with its means over all sets."""
    said = []
    for name, text, scale, unit, digits in (("mean_accuracy", "mean", 100, " %", 1), ("mce", "mCE", 1, "", 3)):
        values = scale * np.ravel(attribute(model.runs, name))
        values = values[np.isfinite(values)]
        if not values.size:
            continue
        if values.size > 1:
            spread = f"± {values.std(ddof=1):.{digits}f}"
        else:
            low, high = (scale * float(np.ravel(attribute(model.runs, f"{name}_{end}"))[0]) for end in ("low", "high"))
            spread = f"({low:.{digits}f} to {high:.{digits}f})"
        said.append(f"{text} {values.mean():.{digits}f} {spread}{unit}")
    return ": ".join(filter(None, [pretty(model.title), ", ".join(said)]))
