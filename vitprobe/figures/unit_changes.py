"""What each unit does to high frequencies, or to the variance: signs by kind (Park & Kim 2022, Fig. 8 and 9)."""

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from vitprobe.figures.depth_profile import KIND_NAMES, SHADES
from vitprobe.figures.lesion import BARS, NORMAL
from vitprobe.figures.page import BLUE, GREY, PALETTE, Model, columns, interval, limit, models, style
from vitprobe.names import unknown

COLORS: Mapping[str, str] = {"msa": BLUE, "conv": PALETTE[4], "mlp": PALETTE[2], "module": GREY}
SHORT_NAMES = {"msa": "attention", "conv": "conv.", "mlp": "MLP", "module": "modules"}
CHANGES: Mapping[str, str] = {
    "high_frequency_amplitude_change": "change of relative log{mean}\namplitude at high frequency\n[natural log]",
    "variance_change": "change of variance{over} [1]",
    "normalised_variance_change": "change of variance{over}\n/ mean square [1]",
}


def unit_changes(ds: xr.Dataset) -> Figure:
    """The change that each unit makes as a bar in the colour of its kind, one column per model.

    A pale bar is that of a unit whose interval reaches over zero. Over each panel stands in how many units of a kind
    the number falls. Stems, and units that change the grid, have no change.

    Args:
        ds: the dataset of `vitprobe.fourier` or `vitprobe.feature_variance`, of one run or of stacked runs.

    Returns:
        The figure.

    Raises:
        ValueError: if the dataset holds no changes.
    """
    there = [name for name in CHANGES if name in ds]
    if not there:
        raise ValueError(
            f"the dataset of probe {ds.attrs.get('probe', '')!r} holds none of {', '.join(CHANGES)}: measure it with "
            "vitprobe.fourier or vitprobe.feature_variance of this version."
        )
    options = {
        "mean": " mean" if ds.attrs.get("average") == "log of mean" else "",
        "over": "\nover images" if ds.attrs.get("over") == "images" else "",
    }
    with style():
        panels = models(ds)
        figure, axes = columns(panels, rows=len(there), height=2.0)
        for beside, variable in zip(axes, there, strict=True):
            for ax, model in zip(beside, panels, strict=True):
                _draw(ax, model, variable, ", " if len(panels) <= 3 else "\n")
            beside[0].set_ylabel(CHANGES[variable].format(**options))
        for ax in axes[-1]:
            ax.set_xlabel("unit")
        present = {str(kind) for model in panels for kind in np.unique(model.runs["kind"].values)}
        names = {**KIND_NAMES, "module": "module"}
        handles = [Patch(color=color, label=names[kind]) for kind, color in COLORS.items() if kind in present]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
        text = textwrap.fill(_note(panels), round(22 * figure.get_figwidth()))
        figure.supxlabel(text, fontsize=6.5, color=GREY)
    return figure


def _note(panels: Sequence[Model]) -> str:
    counts = sorted(model.runs.sizes["run"] for model in panels)
    said = []
    if counts[-1] > 1:
        seeds = str(counts[0]) if counts[0] == counts[-1] else f"up to {counts[-1]}"
        said.append(f"Lines: 95 % t interval over {seeds} seeds; points: single seeds.")
    if any("±" in model.title for model in panels):
        said.append("±: standard deviation over seeds.")
    if counts[0] == 1:
        said.append("Lines of a single run: 95 % interval over images, paired.")
    return " ".join([*said, "Pale: the interval holds zero. ↓: in how many units it falls."])


def _draw(ax: Axes, model: Model, variable: str, between: str) -> None:
    seeds = model.runs[variable].transpose("run", "layer").values
    mean, half_width = interval(seeds)
    if len(seeds) == 1:
        half_width = NORMAL * model.runs[f"{variable}_se"].transpose("run", "layer").values[0]
    kinds = model.runs["kind"].values[0].astype(str)
    for kind in kinds.tolist():
        if kind not in SHADES:
            raise unknown("kind of unit", kind, SHADES)
    shown = np.isfinite(mean) & np.isin(kinds, list(COLORS))
    numbers = np.arange(1, len(mean) + 1)
    ax.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    falls = []
    for kind in dict.fromkeys(kinds[shown].tolist()):
        here = (kinds == kind) & shown
        for decided, alpha in ((True, 1.0), (False, 0.35)):
            some = here & ((np.abs(mean) > half_width) == decided)
            ax.bar(numbers[some], mean[some], width=0.8, color=COLORS[kind], alpha=alpha, linewidth=0, zorder=2)
        falls.append(f"{SHORT_NAMES[kind]} {int((mean[here] < 0).sum())} of {int(here.sum())}")
    ax.errorbar(numbers[shown], mean[shown], half_width[shown], **BARS | {"fmt": "none", "color": GREY})
    if len(seeds) > 1:
        at = np.broadcast_to(numbers, seeds.shape)
        ax.scatter(at, seeds, s=3, color="black", alpha=0.45, linewidths=0, zorder=5)
    bounds = [mean[shown] - half_width[shown], mean[shown] + half_width[shown]] if len(seeds) == 1 else []
    limit([ax], [seeds, np.zeros(1), *bounds])
    ax.set_xlim(0.2, len(mean) + 0.8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title("\n".join(filter(None, (ax.get_title(), f"↓ {between.join(falls)}" if falls else ""))))
