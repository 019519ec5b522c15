"""The whole spectrum of the feature maps as images (Park & Kim 2022, Fig. 2a, before its diagonal is taken)."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from vitprobe.figures.depth_profile import KIND_NAMES
from vitprobe.figures.page import GREY, PAGE_WIDTH, Model, interval, models, style

ACROSS = 6  # panels in a row
ROWS = 2  # of panels, for a single model; several have a row each
SIDE = 0.92  # inches of a panel
SHORT_NAMES = KIND_NAMES | {"msa": "attention"}


@dataclass(frozen=True)
class _Panel:
    """The spectrum of one unit `(y, x)`, mean over seeds, and the most that it is uncertain by."""

    title: str
    grid: tuple[int, int]
    spectrum: np.ndarray
    error: float


def fourier_spectrum(ds: xr.Dataset) -> Figure:
    """Spectra of units as images, one scale of colours for all: twelve units of a model, six of each of several.

    Of networks with more units the first, the last, and evenly spaced ones between them are shown. Where a side has
    an even number of patches, its highest frequency stands at both ends of the axis: the two are one.

    Args:
        ds: the dataset of `vitprobe.fourier_spectrum`, of one run or of stacked runs.

    Returns:
        The figure.
    """
    panels = models(ds)
    across = [_panels(model, ACROSS * (ROWS if len(panels) == 1 else 1)) for model in panels]
    rows = [(model, part) for model, row in zip(panels, across, strict=True) for part in _lines(row)]
    width = max(len(row) for _, row in rows)
    drawn = [panel.spectrum for row in across for panel in row]
    norm = Normalize(min(map(np.min, drawn)), max(map(np.max, drawn)))
    named = sum(bool(model.title) for model in panels)
    with style():
        size = (min(PAGE_WIDTH, 1.5 + SIDE * width), 0.68 + (SIDE + 0.16) * len(rows) + 0.14 * named)
        layout = ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.03, wspace=0.0, hspace=0.0, compress=True)
        figure = Figure(figsize=size, layout=layout)
        axes = figure.subplots(len(rows), width, squeeze=False)
        for index, (beside, (model, row)) in enumerate(zip(axes, rows, strict=True)):
            for ax in beside[len(row) :]:
                ax.set_axis_off()
            for ax, panel in zip(beside, row, strict=False):
                image = _draw(ax, panel, norm)
                ax.tick_params(labelleft=ax is beside[0], labelbottom=False)
            beside[0].set_ylabel("y [π rad/patch]")
            if model.title and (index == 0 or rows[index - 1][0] is not model):
                beside[0].set_title(f"{model.title}\n", loc="left")  # above those of the units
        for down in axes.T:
            lowest = [ax for ax in down if ax.axison][-1]
            lowest.tick_params(labelbottom=True)
            lowest.set_xlabel("x [π rad/patch]")
        label = "relative log amplitude\n[natural log]"
        bar = figure.colorbar(image, ax=axes.ravel().tolist(), label=label, aspect=30, pad=0.01)
        bar.outline.set_visible(False)
        text = textwrap.fill(_note(panels, across), round(22 * size[0]))
        figure.supxlabel(text, fontsize=6.5, color=GREY)
    return figure


def _panels(model: Model, most: int) -> list[_Panel]:
    """The units of a model that have frequencies, at most so many."""
    there = [index for index in range(model.runs.sizes["layer"]) if math.prod(_grid(model, index)) > 1]
    if len(there) > most:
        there = [there[index] for index in np.linspace(0, len(there) - 1, most).round().astype(int)]
    return [_panel(model, index) for index in there]


def _lines(row: Sequence[_Panel]) -> list[Sequence[_Panel]]:
    """The same in lines of about equal length, none too long for a page."""
    length = math.ceil(len(row) / math.ceil(len(row) / ACROSS))
    return [row[start : start + length] for start in range(0, len(row), length)]


def _grid(model: Model, layer: int) -> tuple[int, int]:
    """Rows and columns of patches of a unit."""
    unit = model.runs.isel(run=0, layer=layer)
    return int(unit["grid_h"]), int(unit["grid_w"])


def _panel(model: Model, layer: int) -> _Panel:
    unit = model.runs.isel(layer=layer)
    kind = str(unit["kind"].values[0])
    own = unit.transpose("run", "y", "x", ...).dropna("y", subset=["relative_log_amplitude"], how="all")
    own = own.dropna("x", subset=["relative_log_amplitude"], how="all")
    seeds = own["relative_log_amplitude"].values
    mean, half_width = interval(seeds.reshape(len(seeds), -1))
    worst = np.max(own["relative_log_amplitude_se"] if len(seeds) == 1 else half_width)
    spectrum = mean.reshape(seeds.shape[1:])
    # The lowest frequency of an even side is also the highest: a period of two patches.
    rows, columns = _grid(model, layer)
    spectrum = np.pad(spectrum, ((0, 1 - rows % 2), (0, 1 - columns % 2)), mode="wrap")
    return _Panel(f"{layer + 1}: {SHORT_NAMES.get(kind, kind)}", (rows, columns), spectrum, float(worst))


def _draw(ax: Axes, panel: _Panel, norm: Normalize) -> Any:
    down, across = (side / of for side, of in zip(panel.spectrum.shape, panel.grid, strict=True))
    image = ax.imshow(
        panel.spectrum,
        norm=norm,
        cmap="viridis",
        interpolation="nearest",
        origin="lower",
        extent=(-across, across, -down, down),
    )
    # The halves of the highest frequency at both ends are one pixel together.
    ax.set(xlim=(-1, 1), ylim=(-1, 1), title=panel.title)
    ax.set_xticks([-1, 0, 1], labels=["−1", "0", "1"])
    ax.set_yticks([-1, 0, 1], labels=["−1", "0", "1"])
    ax.tick_params(length=2)
    ax.spines[:].set_visible(False)
    return image


def _note(panels: Sequence[Model], across: Sequence[Sequence[_Panel]]) -> str:
    seeds = [model.runs.sizes["run"] for model in panels]
    said = []
    if any(len(row) < model.runs.sizes["layer"] for model, row in zip(panels, across, strict=True)):
        said.append("Not all units are shown: see their numbers.")
    if max(seeds) > 1:
        said.append(f"Mean over {'up to ' if min(seeds) < max(seeds) else ''}{max(seeds)} seeds.")
    if any("±" in model.title for model in panels):
        said.append("±: standard deviation over seeds.")
    for several, what in ((True, "95 % t intervals over seeds"), (False, "Standard errors over images")):
        errors = [
            panel.error for runs, row in zip(seeds, across, strict=True) for panel in row if (runs > 1) is several
        ]
        if np.isfinite(errors).any():
            said.append(f"{what} within ± {np.nanmax(errors):.2g}.")
    return " ".join(said)
