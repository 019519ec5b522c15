"""The path of the weights in training (Park & Kim 2022, arXiv v1, Fig. 1; Li et al. 2018, section 7)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vitprobe.figures.loss_landscape import OUTLINE, axis_label, color_bar, contours, levels_of, rise_label, rises
from vitprobe.figures.page import GREY, PAGE_WIDTH, PALETTE, pretty, style
from vitprobe.results import stack_runs

OVER_CONTOURS = "white"


def trajectory(ds: xr.Dataset, landscape: xr.Dataset | None = None) -> Figure:
    """Distance and angle of every checkpoint from the model, and its place on the plane, over the loss if given.

    On the left the model is the origin and the start lies at radius 1 and angle 0: a straight training stays on the
    base line. Runs of one model share a colour. On the right each run lies on its own plane; along a line in place of
    a plane, its coordinate is drawn over the epochs. Rings are the starts.

    Args:
        ds: the dataset of `vitprobe.trajectory`, of one run or of stacked runs with a coordinate `model`.
        landscape: of `vitprobe.loss_landscape` on the same plane; then of one run only.

    Returns:
        The figure.

    Raises:
        ValueError: if the landscape is of another plane, or there are several runs to draw over it.
    """
    runs = ds if "run" in ds.dims else stack_runs([ds])
    pair = 0 if landscape is None else _pair(runs, landscape)
    runs = runs.isel(direction_pair=pair)
    names = runs["model"].values if "model" in runs.coords else np.full(runs.sizes["run"], ds.attrs.get("model", ""))
    models = list(dict.fromkeys(str(name) for name in names))
    colors = {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(models)}
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.2), layout="constrained")
        polar: Any = figure.add_subplot(1, 2, 1, projection="polar")
        plane = figure.add_subplot(1, 2, 2)
        if landscape is not None:
            title, values = next(iter(rises(landscape).items()))
            drawn = contours(plane, values.isel(direction_pair=pair), levels_of(values))
            color_bar(figure, drawn, [plane], f"{title}: {rise_label(landscape)}")
        for number, name in enumerate(names):
            run = runs.isel(run=number).dropna("epoch", subset=["radius"])
            color = colors[str(name)]
            # The model itself has no angle, and lies at the origin whatever its angle.
            _path(polar, run["angle"].fillna(0.0), run["radius"], color)
            if "along_y" in run:
                _path(plane, run["along_x"], run["along_y"], color if landscape is None else OVER_CONTOURS)
            else:
                _path(plane, run["epoch"], run["along_x"], color)
        _finish(polar, plane, runs, landscape)
        _legend(figure, colors)
        outside = runs["off_plane"].values
        figure.supxlabel(
            f"Outside the {'plane' if 'along_y' in runs else 'line'}: {100 * np.nanmin(outside):.0f} to "
            f"{100 * np.nanmax(outside):.0f} % of the squared distance from the model.",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _pair(runs: xr.Dataset, landscape: xr.Dataset) -> int:
    """The first pair of directions that both have."""
    if runs.sizes["run"] > 1:
        raise ValueError("a landscape is that of one run: draw ds.isel(run=[0]) over it.")
    ours, theirs = runs["plane"].values[0], landscape["plane"].values
    for pair, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one == other:
            return pair
    raise ValueError(
        f"the landscape is of the plane {', '.join(theirs)}, the trajectory of {', '.join(ours)}: give both the same "
        "model and the same directions, e.g. vitprobe.curvature.principal_directions(model, checkpoints)."
    )


def _path(ax: Axes, x: xr.DataArray, y: xr.DataArray, color: str) -> None:
    outline = OUTLINE if color == OVER_CONTOURS else []
    ax.plot(x, y, color=color, marker="o", markersize=2.5, path_effects=outline, zorder=3, clip_on=False)
    ax.plot(x[:1], y[:1], color=color, marker="o", markersize=6, markerfacecolor="none", zorder=3, clip_on=False)


def _finish(polar: Any, plane: Axes, runs: xr.Dataset, landscape: xr.Dataset | None) -> None:
    polar.set_thetamin(0)
    polar.set_thetamax(90 if np.nanmax(runs["angle"]) <= np.pi / 2 else 180)
    polar.set_ylim(0, 1.05 * float(runs["radius"].max()))
    polar.grid(linewidth=0.4)
    polar.set_title("distance from the model, over that of the start,\nand angle to the start")
    if "along_y" not in runs:
        plane.set(xlabel="epoch", ylabel=runs["along_x"].attrs["long_name"])
        plane.axhline(0, color=GREY, linewidth=0.6, linestyle=":")
        return
    if landscape is None:
        plane.set_aspect("equal", adjustable="datalim")
    plane.plot(0, 0, marker="+", color=GREY if landscape is None else OVER_CONTOURS, markersize=7, zorder=4)
    for axis in ("x", "y"):
        text = runs[f"along_{axis}"].attrs["long_name"].partition(",")[0]
        getattr(plane, f"set_{axis}label")(text if landscape is None else axis_label(landscape, axis))


def _legend(figure: Figure, colors: Mapping[str, str]) -> None:
    if named := {name: color for name, color in colors.items() if name}:
        lines = [Line2D([], [], color=color, marker="o", markersize=2.5) for color in named.values()]
        figure.legend(lines, [pretty(name) for name in named], loc="outside upper center", ncols=len(named))
