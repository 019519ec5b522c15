"""Eigenvalues and spectral density of the loss's Hessian (Park & Kim 2022, Fig. 4; Ghorbani et al. 2019)."""

import itertools
import textwrap

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vitprobe.figures.page import BLUE, GREY, PAGE_WIDTH, PALETTE, attribute, by_model, pretty, style
from vitprobe.results import stack_runs

POINTS = 1000  # abscissae of a smoothed density
_PROTOCOL = {
    "loss": "{}",
    "weight_decay": "weight decay {}",
    "split": "{} images",
    "augment": "augmentation {}",
    "label_smoothing": "label smoothing {}",
    "mixup": "mixup {}",
    "cutmix": "cutmix {}",
    "batch_size": "batches of {}",
}
FEW = 8  # Hessians that are still told apart by rank


def hessian_eigenvalues(ds: xr.Dataset) -> Figure:
    """The largest eigenvalues of every Hessian: by rank where they are few, as densities where they are many.

    Each side of zero has a panel and a scale of its own, as published, and a density that does not leak over zero.

    Args:
        ds: the dataset of `vitprobe.hessian_eigenvalues`, of one run or of stacked runs.

    Returns:
        The figure.
    """
    with style():
        if "run" not in ds.dims and ds.sizes["batch"] <= FEW:
            return _by_rank(ds)
        return _spectra(ds if "run" in ds.dims else stack_runs([ds]))


def _by_rank(ds: xr.Dataset) -> Figure:
    figure = Figure(figsize=(PAGE_WIDTH / 2, 2.4), layout="constrained")
    ax = figure.subplots()
    count = ds.sizes["batch"]
    offsets = np.linspace(-0.25, 0.25, count) if count > 1 else np.zeros(1)
    for row, error, offset in zip(ds.eigenvalue.values, ds.residual.values, offsets, strict=True):
        ax.errorbar(ds["rank"].values + 1 + offset, row, yerr=error, fmt=".", color=BLUE, markersize=3, linewidth=0.7)
    ax.axhline(0, color=GREY, linewidth=0.6)
    ax.set(xlabel=f"rank ({ds.attrs['which']})", ylabel="eigenvalue [nats]", xticks=ds["rank"].values + 1)
    ax.set_title(f"{count} Hessian{'s' * (count > 1)}, bars: residuals")
    figure.supxlabel(textwrap.fill(_protocol(ds), 60), fontsize=6.5, color=GREY)
    return figure


def _spectra(ds: xr.Dataset) -> Figure:
    figure = Figure(figsize=(PAGE_WIDTH, 2.8), layout="constrained")
    sides = dict(zip((-1, 1), figure.subplots(1, 2), strict=True))
    runs = by_model(ds)
    handles = []
    for (name, of_model), color in zip(runs.items(), itertools.cycle(PALETTE), strict=False):
        values = of_model.eigenvalue.values.ravel()
        values = values[np.isfinite(values)]
        for sign, ax in sides.items():
            side = values[sign * values > 0]
            if not len(side):
                continue
            counts, edges = np.histogram(side, bins="auto")
            # Of all values, so that the areas of both sides are one: a side's area is its share.
            ax.stairs(counts / (len(values) * np.diff(edges)), edges, color=color, linewidth=1.0)
            ax.stairs(counts / (len(values) * np.diff(edges)), edges, color=color, alpha=0.15, fill=True)
        handles.append(Line2D([], [], color=color, label=_proportions(of_model, name)))
    for sign, ax in sides.items():
        ax.set(xlabel=f"{'negative' if sign < 0 else 'positive'} eigenvalues [nats]", ylabel="density [1/nats]")
        ax.set_ylim(bottom=0)
        if sign < 0:
            ax.set_xlim(right=0)
        else:
            ax.set_xlim(left=0)
    figure.legend(handles=handles, loc="outside lower center", title=_protocol(ds), title_fontsize=6.5)
    ranks = ds.sizes["rank"]
    figure.suptitle(
        f"{ranks} eigenvalue{'s' * (ranks > 1)} ({ds.attrs['which']}) of each batch; areas are shares", size=8
    )
    return figure


def _proportions(runs: xr.Dataset, name: str) -> str:
    """A model's name with its NEP and APE."""
    said = [pretty(name)] if name else []
    for statistic, digits, unit in (("nep", 3, ""), ("ape", 4, " nats")):
        values = np.ravel(attribute(runs, statistic))
        if not np.isfinite(values).all():
            continue
        text = f"{statistic.upper()} {values.mean():.{digits}g}"
        if len(values) > 1:
            text += f" ± {values.std(ddof=1):.2g} (s.d. of {len(values)} seeds)"
        else:
            low, high = (float(np.ravel(attribute(runs, f"{statistic}_{end}"))[0]) for end in ("low", "high"))
            text += f" [{low:.{digits}g}, {high:.{digits}g}]"
        said.append(text + unit)
    return ",  ".join(said) or "eigenvalues"


def _protocol(ds: xr.Dataset) -> str:
    """What the loss was over, since flatness depends on it: loss, decay, split, augmentation, batch size."""
    said = []
    for name, words in _PROTOCOL.items():
        # An attribute of all runs, or a coordinate where they differ.
        found = ds[name].values if name in ds.coords else ds.attrs.get(name, ())
        values = dict.fromkeys(str(value).removeprefix("torch.nn.functional.") for value in np.ravel(found))
        said += [words.format(" or ".join(values))] if values else []
    return ", ".join(said)


def hessian_density(ds: xr.Dataset) -> Figure:
    """The spectral density, every node smoothed by a Gaussian of a hundredth of the range.

    Args:
        ds: the dataset of `vitprobe.hessian_density`.

    Returns:
        The figure.
    """
    nodes, weights = ds.node.values, ds.weight.values
    low, high = np.nanmin(nodes), np.nanmax(nodes)
    width = 0.01 * ((high - low) or 1.0)
    axis = np.linspace(low - 5 * width, high + 5 * width, POINTS)
    bumps = np.exp(-0.5 * ((axis - nodes[..., None]) / width) ** 2) / (width * np.sqrt(2 * np.pi))
    density = np.nansum(weights[..., None] * bumps, axis=1)  # (sample, axis)
    with style():
        figure = Figure(figsize=(PAGE_WIDTH / 2, 2.6), layout="constrained")
        ax = figure.subplots()
        for sample in density:
            ax.plot(axis, sample, color=BLUE, linewidth=0.4, alpha=0.4)
        ax.plot(axis, density.mean(0), color=BLUE)
        floor = 1e-2 / (ds.attrs["parameters"] * width)
        ax.set(yscale="log", ylim=(floor, 3 * density.max()), xlabel="eigenvalue [nats]", ylabel="density [1/nats]")
        ax.set_title(f"trace {ds.attrs['trace_mean']:.4g} ± {ds.attrs['trace_se']:.3g} (s.e.)")
        figure.supxlabel(
            textwrap.fill(
                f"Thin lines: {len(density)} random vectors. Smoothed by {width:.2g}. {_protocol(ds)}".strip(), 60
            ),
            fontsize=6.5,
            color=GREY,
        )
    return figure
