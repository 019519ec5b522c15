"""Eigenvalues and spectral density of the loss's Hessian (Park & Kim 2022, Fig. 4; Ghorbani et al. 2019)."""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitprobe.figures.page import BLUE, GREY, PAGE_WIDTH, VERMILION, style

POINTS = 1000  # abscissae of a smoothed density


def hessian_eigenvalues(ds: xr.Dataset) -> Figure:
    """The largest eigenvalues of every batch by rank, and their histogram on each side of zero.

    Args:
        ds: the dataset of `vitprobe.hessian_eigenvalues`.

    Returns:
        The figure.
    """
    values, errors = ds.eigenvalue.values, ds.residual.values
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 2.4), layout="constrained")
        by_rank, negative, positive = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
        offsets = np.linspace(-0.25, 0.25, len(values)) if len(values) > 1 else np.zeros(1)
        for row, error, offset in zip(values, errors, offsets, strict=True):
            by_rank.errorbar(
                ds["rank"].values + 1 + offset, row, yerr=error, fmt=".", color=BLUE, markersize=3, linewidth=0.7
            )
        by_rank.axhline(0, color=GREY, linewidth=0.6)
        by_rank.set(xlabel=f"rank ({ds.attrs['which']})", ylabel="eigenvalue [nats]", xticks=ds["rank"].values + 1)
        by_rank.set_title(f"{len(values)} Hessian{'s' * (len(values) > 1)}, bars: residuals")
        flat = values.ravel()
        for ax, side, color in ((negative, flat[flat < 0], VERMILION), (positive, flat[flat > 0], BLUE)):
            word = "negative" if ax is negative else "positive"
            ax.set(xlabel=f"{word} eigenvalues [nats]", ylabel="count")
            ax.set_title(f"{len(side)} of {flat.size} {word}")
            if len(side):
                ax.hist(side, bins=np.histogram_bin_edges(side, bins="auto"), color=color)
                ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


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
            f"Thin lines: {len(density)} random vectors. Smoothed by {width:.2g}.", fontsize=6.5, color=GREY
        )
    return figure
