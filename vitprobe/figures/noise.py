"""The accuracy that noise of each band of frequencies costs (Park & Kim 2022, Fig. 2b)."""

import itertools

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from vitprobe.figures.page import (
    GREY,
    PALETTE,
    SINGLE_RUN,
    THIN_LINES,
    Model,
    by_model,
    limit,
    line_with_band,
    note,
    pretty,
    style,
)
from vitprobe.results import stack_runs

_DROP = ("accuracy_drop", "accuracy_drop_se")


def noise_by_frequency(ds: xr.Dataset) -> Figure:
    """Drop of accuracy against the centre of the noise's band, one line per model, over the strength of the noise.

    Args:
        ds: the dataset of `vitprobe.noise_by_frequency`, of one run or of stacked runs.

    Returns:
        The figure. Bands of equal power have a level line below; the published ones have not.
    """
    runs = ds if "run" in ds.dims else stack_runs([ds])
    panels = [Model(pretty(name), of_model) for name, of_model in by_model(runs).items()]
    frequency = runs["frequency"].values
    with style():
        figure = Figure(figsize=(4.6, 3.3), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        handles = []
        for model, color in zip(panels, itertools.cycle(PALETTE), strict=False):
            drops, errors = (100 * model.runs[name].transpose("run", "frequency").values for name in _DROP)
            line_with_band(top, frequency, drops, errors, color)
            handles.append(Line2D([], [], color=color, marker="o", markersize=2.4, label=model.title))
        top.axhline(0, color=GREY, linewidth=0.6)
        limit([top], [100 * runs["accuracy_drop"].values, np.zeros(1)])
        top.set_ylabel("accuracy lost\n[percentage points]")
        # Models that were given the same images have the same noise.
        strength = np.unique(runs["rms"].transpose("run", "frequency").values.round(6), axis=0)
        bottom.plot(frequency, strength.T, color=GREY, marker="o", markersize=2.4)
        bottom.set(xlabel="centre of the noise's band [π rad/px]", ylabel="noise RMS\n[1]")
        bottom.set_xlim(0, 1)
        bottom.set_ylim(0, 1.25 * np.nanmax(strength))
        bottom.yaxis.set_major_locator(MaxNLocator(3))
        if panels[0].title:
            figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 3))
        definition = f"Definition: {ds.attrs['definition']}." if "definition" in ds.attrs else ""
        note(figure, panels, several=THIN_LINES, single=SINGLE_RUN, always=definition)
    return figure
