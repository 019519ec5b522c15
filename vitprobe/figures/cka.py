"""How alike units see the images, as a matrix of colours (Park & Kim 2022, Fig. 10a and App. D.3)."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vitprobe.figures.depth_profile import KIND_NAMES, SHADES, kind_legend
from vitprobe.figures.page import GREY, PAGE_WIDTH, Model, attribute, pretty, style
from vitprobe.names import unknown

ACROSS = 3  # panels in a row
SIDE = 2.0  # inches, the widest that a panel becomes
STRIP = 0.045  # thickness of the strips that show the units' kinds, in sides of a matrix
MARKS = {"stem": "E", "subsample": "P"}
STEPS = (1, 2, 5, 10, 20, 50, 100)  # between numbered units


def cka(ds: xr.Dataset) -> Figure:
    """CKA of all pairs of units as one matrix per run, the first unit at the lower left.

    Strips along the matrix show the kinds of units; E marks the embedding and P each subsampling, where a line ends
    the stage.

    Args:
        ds: the dataset of `vitprobe.probes.cka`, of one run or of stacked runs; runs go by a coordinate `label`, else
            by `model` and `seed`.

    Returns:
        The figure.
    """
    runs = [_unpadded(ds.isel(run=run)) for run in range(ds.sizes["run"])] if "run" in ds.dims else [ds]
    columns = min(len(runs), ACROSS)
    rows = math.ceil(len(runs) / columns)
    with style():
        width = min(PAGE_WIDTH, 2.4 + SIDE * columns)
        figure = Figure(figsize=(width, 0.8 + (SIDE + 0.5) * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for run, name, ax in zip(runs, _names(runs), axes, strict=False):
            drawn = _draw(ax, run)
            ax.set_title("\n".join(filter(None, (name, _blocks(run)))))
        for ax in axes[len(runs) :]:
            ax.set_axis_off()
        below = any(float(run["cka"].min()) < 0 for run in runs)
        bar = figure.colorbar(drawn, ax=axes.tolist(), label="CKA [1]", extend="min" if below else "neither", aspect=30)
        bar.outline.set_visible(False)
        sides = [Model("", xr.Dataset({"kind": run[name]})) for run in runs for name in ("kind", "kind_other")]
        if any(np.isin(side.runs["kind"], list(KIND_NAMES)).any() for side in sides):
            kind_legend(figure, sides)
        figure.supxlabel(textwrap.fill(_note(ds, runs), round(22 * width)), fontsize=6.5, color=GREY)
    return figure


def _unpadded(run: xr.Dataset) -> xr.Dataset:
    return run.isel({
        dim: run[f"layer_name{dim.removeprefix('layer')}"].values != "" for dim in ("layer", "layer_other")
    })


def _names(runs: Sequence[xr.Dataset]) -> list[str]:
    """A title per run: its label; else its model, and its seed where there are several runs of a model."""
    if "label" in runs[0].coords:
        return [_text(run, "label") for run in runs]
    models = [pretty(_text(run, "model")) for run in runs]
    seeds = [attribute(run, "seed") for run in runs]
    return [
        f"{model}, seed {int(seed)}".removeprefix(", ") if models.count(model) > 1 and np.isfinite(seed) else model
        for model, seed in zip(models, seeds, strict=True)
    ]


def _draw(ax: Axes, run: xr.Dataset) -> Any:
    drawn = ax.imshow(
        run["cka"].transpose("layer", "layer_other").values,
        origin="lower",
        vmin=0,
        vmax=1,
        cmap="viridis",
        interpolation="nearest",
    )
    sides = (
        (ax.xaxis, run["kind_other"], ax.axvline, ax.secondary_xaxis("top")),
        (ax.yaxis, run["kind"], ax.axhline, ax.secondary_yaxis("right")),
    )
    for axis, units, line, opposite in sides:
        kinds = [str(kind) for kind in units.values]
        _strip(ax, kinds, vertical=axis is ax.yaxis)
        for index in np.flatnonzero(np.array(kinds) == "subsample"):
            line(index - 0.5, color="white", linewidth=0.8)
        step = next(step for step in STEPS if len(kinds) <= 8 * step)
        axis.set_ticks(places := range(step - 1, len(kinds), step), [str(place + 1) for place in places])
        axis.set_tick_params(length=0, pad=10)
        marks = {index: MARKS[kind] for index, kind in enumerate(kinds) if kind in MARKS}
        marked = opposite.yaxis if axis is ax.yaxis else opposite.xaxis
        marked.set_ticks(list(marks), list(marks.values()))
        marked.set_tick_params(length=0, pad=2)
        opposite.spines[:].set_visible(False)
    ax.spines[:].set_visible(False)
    ax.set(xlabel="unit of the other model" if _text(run, "model_class_other") else "unit", ylabel="unit")
    return drawn


def _strip(ax: Axes, kinds: Sequence[str], *, vertical: bool) -> None:
    """Shade the kind of every unit beside the matrix."""
    transform = ax.get_yaxis_transform() if vertical else ax.get_xaxis_transform()
    for index, kind in enumerate(kinds):
        if kind not in SHADES:
            raise unknown("kind of unit", kind, SHADES)
        corner, size = (index - 0.5, -STRIP), (1.0, STRIP)
        if vertical:
            corner, size = corner[::-1], size[::-1]
        look = {"edgecolor": "none"} | SHADES[kind]
        ax.add_patch(Rectangle(corner, *size, transform=transform, clip_on=False, linewidth=0, **look))


def _text(run: xr.Dataset, name: str) -> str:
    """What is an attribute of a single run, and a coordinate where stacked runs differ in it."""
    return str(run[name].item()) if name in run.coords else str(run.attrs.get(name, ""))


def _blocks(run: xr.Dataset) -> str:
    """The block structure with its standard error, if the run has one."""
    value, error = (float(attribute(run, name)) for name in ("block_structure", "block_structure_se"))
    if not math.isfinite(value):
        return ""
    return f"blocks {value:+.3f}" + (f" ± {error:.3f}" if math.isfinite(error) else "")


def _note(ds: xr.Dataset, runs: Sequence[xr.Dataset]) -> str:
    said = []
    if "estimator" in ds.attrs:
        said.append(f"HSIC: {ds.attrs['estimator']}.")
    if np.isfinite(errors := [float(run["cka_se"].max()) for run in runs]).any():
        said.append(f"Standard errors over batches up to {np.nanmax(errors):.2g}.")
    if any(_blocks(run) for run in runs):
        said.append("Blocks: mean CKA within stages less that across (± standard error); stages end where the grid of")
        said.append("patches changes, or are quarters of the depth.")
    marks = {str(kind) for run in runs for name in ("kind", "kind_other") for kind in np.unique(run[name].values)}
    words = {"stem": "E:\N{NO-BREAK SPACE}embedding.", "subsample": "P:\N{NO-BREAK SPACE}subsampling."}
    return " ".join([*said, *(text for kind, text in words.items() if kind in marks)])
