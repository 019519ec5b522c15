"""Relative log amplitude of the feature maps (Park & Kim 2022, Figs. 2a and 8)."""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from vitprobe.figures.depth_profile import depth_profile, kind_legend
from vitprobe.figures.page import (
    SINGLE_RUN,
    THIN_LINES,
    Model,
    columns,
    limit,
    models,
    note,
    style,
    unit_interval,
)

# Without its palest yellow, which vanishes on white paper.
DEPTH_COLORS = ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, 256)), name="depth")


def fourier(ds: xr.Dataset) -> Figure:
    """Spectra of all units over the high-frequency amplitude by depth, one column per model.

    Args:
        ds: the dataset of `vitprobe.fourier`, of one run or of stacked runs.

    Returns:
        The figure.
    """
    with style():
        panels = models(ds)
        figure, axes = columns(panels, rows=2, height=2.1)
        spectra(axes[0], panels)
        figure.colorbar(
            ScalarMappable(Normalize(0, 1), DEPTH_COLORS),
            ax=axes[0].tolist(),
            label="depth",
            pad=0.01,
            aspect=25,
        )
        depth_profile(
            axes[1].tolist(),
            panels,
            "high_frequency_amplitude",
            f"{_amplitude(panels)}\nat high frequency [natural log]",
        )
        kind_legend(figure, panels)
        definition = f"Definition: {ds.attrs['definition']}." if "definition" in ds.attrs else ""
        note(figure, panels, several=THIN_LINES, single=SINGLE_RUN, always=definition)
    return figure


def spectra(axes: Sequence[Axes], panels: Sequence[Model]) -> None:
    """Draw the relative log amplitude against frequency: one curve per unit, the mean over seeds.

    Args:
        axes: one per model.
        panels: the models.
    """
    for ax, model in zip(axes, panels, strict=True):
        amplitude = model.runs["relative_log_amplitude"].mean("run").transpose("layer", "frequency")
        for depth, curve in zip(model.runs["depth"].mean("run").values, amplitude, strict=True):
            curve = curve.dropna("frequency")  # a grid lacks the frequencies of a finer one
            ax.plot(curve.frequency, curve, color=DEPTH_COLORS(depth), linewidth=0.9, marker=".", markersize=2)
        unit_interval(ax, "radial frequency [π]" if _said(panels, "along") == "radius" else "frequency [π]")
    limit(axes, [model.runs["relative_log_amplitude"].mean("run").values for model in panels])
    for ax in axes[1:]:
        ax.tick_params(labelleft=False)
    axes[0].set_ylabel(f"{_amplitude(panels)}\n[natural log]")


def _amplitude(panels: Sequence[Model]) -> str:
    """What the logarithm is of."""
    return "relative log mean amplitude" if _said(panels, "average") == "log of mean" else "relative log amplitude"


def _said(panels: Sequence[Model], option: str) -> str:
    """An option of the measurement; files from before it was one do not say it."""
    return str(panels[0].runs.attrs.get(option, ""))
