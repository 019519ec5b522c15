"""A number of each unit against depth, the units shaded by their kind (Park & Kim 2022, Figs. 8 and 9)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vitprobe.figures.page import BLUE, Model, limit, line_with_band, unit_interval
from vitprobe.names import unknown

SHADES: Mapping[str, dict[str, Any]] = {
    "stem": {"facecolor": "white"},
    "msa": {"facecolor": "#D9D9D9"},
    "conv": {"facecolor": "#FBE6C8"},
    "mlp": {"facecolor": "white"},
    "module": {"facecolor": "white"},
    "subsample": {"facecolor": "white", "hatch": "/////", "edgecolor": "#B0B0B0"},
}
KIND_NAMES = {"msa": "self-attention", "conv": "convolution", "mlp": "MLP", "subsample": "subsampling"}


def depth_profile(axes: Sequence[Axes], panels: Sequence[Model], variable: str, ylabel: str) -> None:
    """Draw a variable `(run, layer)` against normalised depth, one axes per model.

    The shaded span of a unit reaches from the depth of the unit before to its own, so the line's change
    within a span is what that unit does. Each model has ordinates of its own, lest one flatten the steps of
    another.

    Args:
        axes: one per model.
        panels: the models.
        variable: the variable; `<variable>_se` is its standard error over images.
        ylabel: what it is, with its unit.
    """
    for ax, model in zip(axes, panels, strict=True):
        depth = model.runs["depth"].mean("run").values
        shade_kinds(ax, depth, model.runs["kind"].values[0])
        seeds = model.runs[variable].transpose("run", "layer").values
        standard_error = model.runs[f"{variable}_se"].transpose("run", "layer").values
        line_with_band(ax, depth, seeds, standard_error, BLUE)
        unit_interval(ax, "depth")
        band = [seeds - standard_error, seeds + standard_error] if len(seeds) == 1 else []
        limit([ax], [seeds, *band])
    axes[0].set_ylabel(ylabel)


def shade_kinds(ax: Axes, depth: np.ndarray, kinds: Sequence[str]) -> None:
    """Shade the span of each unit by its kind.

    Args:
        ax: where to draw.
        depth: of each unit, rising from 0 to 1 `(layer,)`.
        kinds: of each unit `(layer,)`.

    Raises:
        ValueError: if a kind is unknown.
    """
    for start, end, kind in zip([0.0, *depth[:-1]], depth, kinds, strict=True):
        if kind not in SHADES:
            raise unknown("kind of unit", str(kind), SHADES)
        if end > start:
            ax.axvspan(start, end, zorder=0, **({"edgecolor": "none"} | SHADES[kind]))


def kind_legend(figure: Figure, panels: Sequence[Model]) -> None:
    """One legend, above the panels, of the kinds of unit that they shade.

    Args:
        figure: the figure.
        panels: its models.
    """
    present = {str(kind) for model in panels for kind in np.unique(model.runs["kind"].values)}
    outlined: dict[str, Any] = {"edgecolor": "#808080", "linewidth": 0.5}
    handles = [Patch(label=name, **(outlined | SHADES[kind])) for kind, name in KIND_NAMES.items() if kind in present]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
