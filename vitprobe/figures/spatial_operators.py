"""How far token-mixing matrices look and what rank they have, layer by layer: of attention and of convolutions."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from vitprobe.figures.fourier import DEPTH_COLORS
from vitprobe.figures.page import BLUE, GREY, VERMILION, Model, columns, interval, limit, models, note, style

HEIGHT = 1.9  # inches of a row
MANY = 16  # heads of a layer: so many lines can be told apart
SINGLE = "Bars of a single run: standard error over images."


def spatial_operators(ds: xr.Dataset) -> Figure:
    """Distance profile, stable rank and share of power of the mean map, by layer and head, one column per model.

    Args:
        ds: the dataset of `vitprobe.probes.spatial_operators`, of one run or of stacked runs.

    Returns:
        The figure. A profile is a thin line per head and seed, and their mean; below, a head of a seed is a point, and
        the mean over heads a line with its interval over seeds.
    """
    with style():
        panels = models(ds)
        numbers = {"stable_rank": "stable rank", "fixed_power": "share of power\nin the mean map"}
        numbers = {name: label for name, label in numbers.items() if name in ds}
        figure, axes = columns(panels, rows=1 + len(numbers), height=HEIGHT)
        _profiles(figure, axes[0], panels, "head", "distance [patches]")
        axes[0, 0].set_ylabel("share of attention")
        for (name, label), row in zip(numbers.items(), axes[1:], strict=True):
            for ax, model in zip(row, panels, strict=True):
                _heads(ax, model, name)
                if name == "stable_rank":
                    _ranks(ax, model.runs[name].values)
                else:
                    ax.set_ylim(-0.05, 1.05)
                ax.set_xlabel("attention layer")
            row[0].set_ylabel(label)
        _legend(figure, {"one head": 0.5, "mean over heads": 1.4}, "uniform attention")
        note(figure, panels, single=SINGLE)
    return figure


def filter_statistics(ds: xr.Dataset) -> Figure:
    """Distance profile of the taps and stable rank of the bank of filters of each convolution, one column per model.

    Args:
        ds: the dataset of `vitprobe.probes.filter_statistics`, of one run or of stacked runs.

    Returns:
        The figure. A profile is the mean over channels and seeds; below are the bank's stable rank, a thin line per
        seed, and the number of taps, which bounds it.
    """
    with style():
        panels = models(ds)
        figure, axes = columns(panels, rows=2, height=HEIGHT)
        _profiles(figure, axes[0], panels, "channel", "distance [places]")
        axes[0, 0].set_ylabel("share of taps' weight")
        for ax, model in zip(axes[1], panels, strict=True):
            rank = model.runs["bank_stable_rank"].transpose("run", "layer").values
            layer = np.arange(1, rank.shape[1] + 1)
            taps = np.atleast_2d((model.runs["kernel_h"] * model.runs["kernel_w"]).values).max(0)
            mean, half_width = interval(rank)
            ax.fill_between(layer, mean - half_width, mean + half_width, color=BLUE, alpha=0.25, linewidth=0)
            ax.plot(layer, mean, color=BLUE, marker="o", markersize=3, zorder=4)
            ax.plot(layer, taps, color=VERMILION, linestyle="none", marker="_", markersize=5, zorder=2)
            _ranks(ax, np.concatenate([rank.ravel(), taps]))
            _by_layer(ax, len(layer))
            ax.set_xlabel("convolution")
        axes[1, 0].set_ylabel("stable rank of the filters")
        handle = Line2D([], [], color=VERMILION, linestyle="none", marker="_", markersize=5, label="number of taps")
        _legend(figure, {"mean over channels": 1.4}, "equal taps", handle)
        note(figure, panels)
    return figure


def _profiles(figure: Figure, axes: np.ndarray, panels: list[Model], each: str, label: str) -> None:
    """Mass by distance in each panel, coloured by depth, with that of equal weights."""
    for ax, model in zip(axes, panels, strict=True):
        mass = model.runs["mass"].transpose("layer", "run", each, "bin").values
        distance = model.runs["bin"].values
        depth = model.runs["depth"].mean("run").values
        depth = np.where(np.isfinite(depth), depth, np.linspace(0, 1, len(depth)))  # one that belongs to no unit
        for at, layer in zip(depth, mass, strict=True):
            lines = layer.reshape(-1, len(distance))
            lines = lines[np.isfinite(lines).any(1)]  # other layers have more heads or channels
            if each == "head" and layer.shape[1] <= MANY:
                ax.plot(distance, lines.T, color=DEPTH_COLORS(at), linewidth=0.4, alpha=0.5, zorder=2)
            ax.plot(distance, lines.mean(0), color=DEPTH_COLORS(at), linewidth=1.3, zorder=3)
        uniform = model.runs["uniform_mass"].transpose("run", "layer", "bin").values.reshape(-1, len(distance))
        for line in np.unique(uniform.round(2), axis=0):
            ax.plot(distance, line, color=GREY, linewidth=0.9, linestyle="--", zorder=4)
        ax.set_xlabel(label)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        limit([ax], [mass, uniform])
        ax.set_ylim(bottom=0)
    figure.colorbar(ScalarMappable(Normalize(0, 1), DEPTH_COLORS), ax=axes.tolist(), label="depth", pad=0.01, aspect=25)


def _heads(ax: Axes, model: Model, variable: str) -> None:
    """A number of each head by layer, with the mean over heads and its interval over seeds."""
    heads = model.runs[variable].transpose("run", "layer", "head").values
    layer = np.arange(1, heads.shape[1] + 1)
    heads = heads[:, :, np.isfinite(heads).any((0, 1))]  # other models have more
    # Heads have no order that two seeds share, so each is a point of its own.
    x = np.broadcast_to(layer[:, None] + np.linspace(-0.2, 0.2, heads.shape[2]), heads.shape)
    if len(heads) == 1:
        error = model.runs[f"{variable}_se"].transpose("run", "layer", "head").values[:, :, : heads.shape[2]]
        ax.errorbar(x.ravel(), heads.ravel(), error.ravel(), fmt="none", ecolor=BLUE, elinewidth=0.5, alpha=0.45)
    ax.scatter(x, heads, s=5, color=BLUE, alpha=0.45, linewidths=0, zorder=3)
    mean, half_width = interval(np.nanmean(heads, 2))
    ax.fill_between(layer, mean - half_width, mean + half_width, color=BLUE, alpha=0.25, linewidth=0)
    ax.plot(layer, mean, color=BLUE, marker="o", markersize=3, zorder=4)
    _by_layer(ax, len(layer))


def _by_layer(ax: Axes, layers: int) -> None:
    """Abscissae of layers, numbered from 1."""
    ax.set_xlim(0.5, layers + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def _ranks(ax: Axes, ranks: np.ndarray) -> None:
    """Ordinates of ranks: ratios count, and none is below 1."""
    ax.set_yscale("log")
    highest = max(2.0, 1.25 * np.nanmax(ranks))
    ax.set_ylim(highest**-0.05, highest)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest < 100 else (1,)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))


def _legend(figure: Figure, widths: dict[str, float], uniform: str, *others: Line2D) -> None:
    handles = [Line2D([], [], color=GREY, label=label, linewidth=width) for label, width in widths.items()]
    dashed = Line2D([], [], color=GREY, linewidth=0.9, linestyle="--", label=uniform)
    figure.legend(handles=[*handles, dashed, *others], loc="outside upper center", ncols=3)
