"""The loss on planes and lines through the weights (Park & Kim 2022, Fig. 1a; Li et al. 2018)."""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures.page import BLUE, GREY, VERMILION, style

PUBLISHED_WEIGHT = 0.05  # of the sum of norms in the published picture


def loss_landscape(ds: xr.Dataset) -> Figure:
    """One row per pair of directions: the loss alone, and with the published weight term added.

    Both are relative to the centre, because the term's own size says nothing of the shape.

    Args:
        ds: the dataset of `vitprobe.loss_landscape`.

    Returns:
        The figure.
    """
    parts = {
        "NLL": ds.nll,
        f"NLL + {PUBLISHED_WEIGHT} · sum of norms": ds.nll + PUBLISHED_WEIGHT * ds.l2_sum_of_norms,
    }
    with style():
        return _planes(ds, parts) if "y" in ds.dims else _lines(ds, parts)


def _planes(ds: xr.Dataset, parts: dict[str, xr.DataArray]) -> Figure:
    pairs = ds.sizes["direction_pair"]
    figure = Figure(figsize=(6.0, 0.4 + 2.5 * pairs), layout="constrained")
    axes = figure.subplots(pairs, len(parts), squeeze=False, sharex=True, sharey=True)
    for column, (title, values) in enumerate(parts.items()):
        rise = values - values.sel(x=0, y=0, method="nearest")
        finite = rise.values[np.isfinite(rise.values)]
        # The bowl matters, not its rim: levels grow as the square of their number.
        levels = finite.min() + (finite.max() - finite.min()) * np.linspace(0, 1, 13) ** 2
        for row in range(pairs):
            ax = axes[row, column]
            drawn = ax.contourf(ds.x, ds.y, rise.isel(direction_pair=row), levels=levels, cmap="viridis")
            ax.contour(ds.x, ds.y, rise.isel(direction_pair=row), levels=levels, colors="white", linewidths=0.3)
            ax.plot(0, 0, marker="+", color="white", markersize=6)
            ax.set_aspect("equal")
            ax.set_ylabel("direction y" if column == 0 else "")
        axes[0, column].set_title(title)
        axes[-1, column].set_xlabel("direction x")
        ticks = levels[::3]
        bar = figure.colorbar(drawn, ax=axes[:, column].tolist(), label="rise from the centre [nats]", ticks=ticks)
        bar.ax.set_yticklabels([f"{tick:.3g}" for tick in ticks])
    _note(figure, ds)
    return figure


def _lines(ds: xr.Dataset, parts: dict[str, xr.DataArray]) -> Figure:
    figure = Figure(figsize=(3.5, 2.6), layout="constrained")
    ax = figure.subplots()
    for color, (title, values) in zip((BLUE, VERMILION), parts.items(), strict=True):
        rise = values - values.sel(x=0, method="nearest")
        for row in range(ds.sizes["direction_pair"]):
            ax.plot(ds.x, rise.isel(direction_pair=row), color=color, label=title if row == 0 else None)
    ax.set(xlabel="direction x", ylabel="rise from the centre [nats]")
    ax.legend(loc="upper center")
    _note(figure, ds)
    return figure


def _note(figure: Figure, ds: xr.Dataset) -> None:
    text = f"{ds.attrs['images']} images, the same for all cells. Normalisation: {ds.attrs['normalisation']}."
    figure.supxlabel(text, fontsize=6.5, color=GREY)
