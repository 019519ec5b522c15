"""What all figures share: the page, a panel per model, models' names, intervals over seeds, and saving."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import matplotlib.style
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import t

from vitprobe.results import replacing, stack_runs

PAGE_WIDTH = 7.0  # inches, both columns of a paper
# Okabe & Ito's colours, told apart by colour-blind readers.
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#4D4D4D"
PALETTE = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

THIN_LINES = "Thin lines: single seeds."
SINGLE_RUN = "Band of a single run: standard error over images."

_STYLE = {
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.1,
    "hatch.linewidth": 0.5,
    "figure.constrained_layout.use": True,
}
_WORDS = {
    "vit": "ViT", "convit": "ConViT", "deit": "DeiT", "pit": "PiT", "levit": "LeViT", "resnet": "ResNet",
    "resnext": "ResNeXt", "convnext": "ConvNeXt", "convmixer": "ConvMixer", "alternet": "AlterNet",
    "swin": "Swin", "mixer": "Mixer", "mlp": "MLP", "cnn": "CNN", "gpsa": "GPSA", "alter": "Alter",
    "ti": "Ti", "s": "S", "b": "B", "l": "L",
}  # fmt: skip


@contextlib.contextmanager
def style() -> Iterator[None]:
    """The project's look while the `with` lasts; the user's own settings neither count nor change."""
    with matplotlib.style.context(["default", _STYLE]):
        yield


def pretty(name: str) -> str:
    """A model's name as papers write it: `"vit_micro"` is "ViT micro".

    Args:
        name: the registered name.

    Returns:
        The name with its underscores as spaces and its acronyms as usual.
    """
    words = []
    for word in name.split("_"):
        letters = word.rstrip("0123456789")
        words.append(_WORDS.get(letters, letters) + word[len(letters) :])
    return " ".join(words)


@dataclasses.dataclass(frozen=True)
class Model:
    """The runs of one model: its panel's title and its dataset `(run, layer, ...)` without padded layers."""

    title: str
    runs: xr.Dataset


def models(ds: xr.Dataset) -> list[Model]:
    """One panel per model, in the order in which the models come.

    Args:
        ds: a dataset of one run, or of stacked runs with a coordinate `model` along `run`.

    Returns:
        The models.
    """
    return [
        Model(_title(name, runs), runs.isel(layer=(runs.layer_name != "").any("run").values))
        for name, runs in by_model(ds).items()
    ]


def by_model(ds: xr.Dataset) -> dict[str, xr.Dataset]:
    """The runs of every model by its name, which may be empty, in the order in which the models come.

    Args:
        ds: a dataset of one run, or of stacked runs with a coordinate `model` along `run`.
    """
    if "run" not in ds.dims:
        ds = stack_runs([ds])
    names = ds["model"].values if "model" in ds.coords else np.full(ds.sizes["run"], ds.attrs.get("model", ""))
    return {str(name): ds.isel(run=np.flatnonzero(names == name)) for name in dict.fromkeys(names)}


def _title(name: str, runs: xr.Dataset) -> str:
    accuracy = attribute(runs, "accuracy")
    accuracy = accuracy[np.isfinite(accuracy)]
    if not accuracy.size:
        return pretty(name)
    spread = f" ± {accuracy.std(ddof=1):.1f}" if accuracy.size > 1 else ""
    return f"{pretty(name)}, {accuracy.mean():.1f}{spread} %"


def attribute(runs: xr.Dataset, name: str) -> np.ndarray:
    """What is an attribute of a single run, and a coordinate where stacked runs differ in it.

    Args:
        runs: the dataset.
        name: of the attribute.

    Returns:
        The numbers, one per run or one for all; not-a-number where there are none.
    """
    return np.asarray(runs[name] if name in runs.coords else runs.attrs.get(name, math.nan), dtype=float)


def columns(panels: Sequence[Model], rows: int, height: float) -> tuple[Figure, np.ndarray]:
    """A figure of one column per model, no wider than a page.

    Args:
        panels: the models.
        rows: how many rows.
        height: of a row [inches].

    Returns:
        The figure and its axes `(row, column)`; the titles stand over the first row.
    """
    figure = Figure(figsize=(min(PAGE_WIDTH, 1.2 + 2.4 * len(panels)), rows * height + 0.4), layout="constrained")
    axes = figure.subplots(rows, len(panels), squeeze=False)
    for ax, model in zip(axes[0], panels, strict=True):
        # More than three titles do not fit beside each other on one line.
        ax.set_title(model.title.replace(", ", "\n") if len(panels) > 3 else model.title)
    return figure, axes


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean over seeds and the half width of its 95 % Student t interval.

    Args:
        values: one row per seed `(seed, point)`.

    Returns:
        Mean and half width `(point,)`; the half width of one seed is not-a-number.
    """
    n = len(values)
    half_width = t.ppf(0.975, n - 1) * values.std(axis=0, ddof=1) / math.sqrt(n) if n > 1 else np.nan * values[0]
    return values.mean(axis=0), half_width


def line_with_band(ax: Axes, x: np.ndarray, seeds: np.ndarray, standard_error: np.ndarray, color: str) -> None:
    """The mean over seeds as a line, each seed as a thin one, and the uncertainty as a band.

    Args:
        ax: where to draw.
        x: the abscissa `(point,)`.
        seeds: one row per seed `(seed, point)`.
        standard_error: over images `(seed, point)`; the band of a single seed, which has no spread.
        color: of all three.
    """
    mean, half_width = interval(seeds)
    if len(seeds) == 1:
        half_width = standard_error[0]
    ax.fill_between(x, mean - half_width, mean + half_width, color=color, alpha=0.25, linewidth=0, zorder=2)
    if len(seeds) > 1:
        for seed in seeds:
            ax.plot(x, seed, color=color, linewidth=0.5, alpha=0.45, zorder=3)
    ax.plot(x, mean, color=color, marker="o", markersize=2.4, zorder=4, label="mean")


def limit(axes: Iterable[Axes], lines: Iterable[np.ndarray]) -> None:
    """The same range of ordinates on all axes, made by the lines: the band of two seeds would dwarf them.

    Args:
        axes: the axes.
        lines: everything drawn in them but bands.
    """
    drawn = np.concatenate([np.ravel(line) for line in lines])
    low, high = np.nanmin(drawn), np.nanmax(drawn)
    margin = 0.15 * ((high - low) or abs(high) or 1.0)
    for ax in axes:
        ax.set_ylim(low - margin, high + margin)


def unit_interval(ax: Axes, label: str) -> None:
    """An abscissa from 0 to 1, with few enough ticks for six panels on a page.

    Args:
        ax: the axes.
        label: what it is, with its unit.
    """
    ax.set_xlim(0, 1)
    ax.set_xticks([0, 0.5, 1], labels=["0", "0.5", "1"])
    ax.set_xlabel(label)


def note(figure: Figure, panels: Sequence[Model], *, several: str = "", single: str = "", always: str = "") -> None:
    """A line under the figure that says what the bands and the signs ± are.

    Args:
        figure: the figure.
        panels: its models.
        several: what to add where a model has several runs.
        single: what to add where a model has a single run.
        always: what else to add.
    """
    counts = sorted(model.runs.sizes["run"] for model in panels)
    said = []
    if counts[-1] > 1:
        seeds = str(counts[0]) if counts[0] == counts[-1] else f"up to {counts[-1]}"
        said += [f"Band: 95 % t interval over {seeds} seeds.", several]
    if any("±" in model.title for model in panels):
        said.append("±: standard deviation over seeds.")
    if counts[0] == 1:
        said.append(single)
    if text := " ".join(filter(None, [*said, always])):
        figure.supxlabel(text, fontsize=6.5, color=GREY)


def save_figure(figure: Figure, path: str | os.PathLike[str], dpi: int = 200) -> Path:
    """Write a figure as PNG, whole or not at all; equal figures give equal bytes.

    Args:
        figure: the figure.
        path: the file, `<stem>.png`; missing folders are made.
        dpi: pixels per inch.

    Returns:
        The path.

    Raises:
        ValueError: if the name does not end in `.png`.
    """
    path = Path(path)
    if path.suffix != ".png":
        raise ValueError(f"{path}: type {path.name}.png, or figure.savefig for other formats")
    with style(), replacing(path) as unfinished:
        # Without the software's version, so that the file changes when the picture does.
        figure.savefig(unfinished, format="png", dpi=dpi, metadata={"Software": None})
    return path
