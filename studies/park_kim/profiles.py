"""What the studies of feature maps share: a number of every unit by depth, ours by family beside the published ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from studies.park_kim.families import LOOKS, family
from vitprobe.figures.depth_profile import shade_kinds
from vitprobe.figures.page import PAGE_WIDTH, Model, limit, line_with_band, models, unit_interval

# The published network that families are compared with, and which they are; all others are compared with the ViT.
CONVOLUTIONAL = ("resnet", "convmixer", "alternet")


@dataclass(frozen=True)
class Published:
    """A published number of every unit of one network.

    Attributes:
        name: the network.
        data: what it was trained on.
        values: of its units, in order `(unit,)`.
    """

    name: str
    data: str
    values: np.ndarray

    @property
    def family(self) -> str:
        """Its family, one of `LOOKS`."""
        return "resnet" if self.name.startswith("ResNet") else "vit"

    @property
    def kinds(self) -> list[str]:
        """The kinds of its units: of ResNet-50's blocks the first of stages 2 to 4 change the grid."""
        if self.family == "vit":
            return ["stem"] + ["msa", "mlp"] * ((len(self.values) - 1) // 2)
        return ["subsample" if place in (4, 8, 14) else "conv" if place else "stem" for place in range(17)]


@dataclass(frozen=True)
class Panel:
    """One network's place in a figure.

    Attributes:
        ax: where to draw.
        network: a published one, or runs of ours.
        first: whether it begins its row.
    """

    ax: Axes
    network: Published | Model
    first: bool

    @property
    def color(self) -> str:
        """Its family's."""
        if isinstance(self.network, Published):
            return LOOKS[self.network.family].color
        return LOOKS[family(name_of(self.network))].color


def name_of(model: Model) -> str:
    """The registered name of a figure's model."""
    return str(model.runs.model.values[0])


def rows(ds: xr.Dataset, published: Sequence[Published]) -> list[list[Published | Model]]:
    """The published ResNet and our convolutional families, then the published ViT and all others.

    Args:
        ds: stacked runs.
        published: one network of each.

    Returns:
        The networks of each row; a row without one of ours is left out.
    """
    both = []
    for convolutional in (True, False):
        ours = [model for model in models(ds) if (family(name_of(model)) in CONVOLUTIONAL) == convolutional]
        theirs = [one for one in published if (one.family == "resnet") == convolutional]
        if ours:
            both.append([*theirs, *ours])
    return both


def panels(figure: Figure | SubFigure, networks: Sequence[Sequence[Published | Model]]) -> Iterator[Panel]:
    """One panel per network, titled, in rows; places without a network stay empty.

    Args:
        figure: where to draw.
        networks: those of each row.
    """
    axes = figure.subplots(len(networks), max(map(len, networks)), squeeze=False)
    for in_row, of_row in zip(axes, networks, strict=True):
        for ax in in_row[len(of_row) :]:
            ax.set_axis_off()
        for ax, network in zip(in_row, of_row, strict=False):
            if isinstance(network, Published):
                ax.set_title(f"{network.name}\n{network.data}, published")
            else:
                ax.set_title(network.title.replace(", ", "\n"))
            yield Panel(ax, network, first=ax is in_row[0])


def page(networks: Sequence[Sequence[Published | Model]], height: float) -> Figure:
    """An empty figure for rows of panels, no wider than a page.

    Args:
        networks: those of each row.
        height: of the figure [inches].
    """
    columns = max(map(len, networks))
    return Figure(figsize=(min(PAGE_WIDTH, 1.2 + 1.8 * columns), height), layout="constrained")


def profile(panel: Panel, variable: str, label: str) -> None:
    """A number of each unit against normalised depth, on a scale of its own; a unit's span is shaded by its kind.

    Args:
        panel: the network and its place.
        variable: of our runs; `<variable>_se` is its standard error over images.
        label: what it is, with its unit.
    """
    ax, network = panel.ax, panel.network
    if isinstance(network, Published):
        shade_kinds(ax, depth := np.linspace(0, 1, len(network.values)), network.kinds)
        style = {"linestyle": "--", "marker": "o", "markersize": 2.6, "markerfacecolor": "white"}
        ax.plot(depth, network.values, color=panel.color, **style)
        limit([ax], [network.values])
    else:
        depth = network.runs["depth"].mean("run").values
        shade_kinds(ax, depth, network.runs["kind"].values[0])
        seeds, errors = (network.runs[name].transpose("run", "layer").values for name in (variable, f"{variable}_se"))
        line_with_band(ax, depth, seeds, errors, panel.color)
        limit([ax], [seeds, *([seeds - errors, seeds + errors] if len(seeds) == 1 else [])])
    unit_interval(ax, "depth")
    if panel.first:
        ax.set_ylabel(label)


def kinds_shown(networks: Sequence[Sequence[Published | Model]]) -> list[Model]:
    """Our models of all rows, whose kinds of units a legend has to name."""
    return [network for of_row in networks for network in of_row if isinstance(network, Model)]


def stage_of(grids: np.ndarray) -> np.ndarray:
    """The number of the stage of each unit; a stage begins where the grid changes.

    Args:
        grids: rows and columns of patches `(layer, 2)`.

    Returns:
        `(layer,)`.
    """
    return np.concatenate([[0], np.cumsum((np.diff(grids, axis=0) != 0).any(1))])


def stages_of(run: xr.Dataset) -> np.ndarray:
    """The number of the stage of each unit of one run `(layer,)`."""
    return stage_of(np.stack([run.grid_h.values, run.grid_w.values], axis=1))
