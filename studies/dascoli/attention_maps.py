"""Where the heads of a trained ViT and a trained ConViT look in an image (d'Ascoli et al. 2021, Fig. 7 and 15 to 17).

Figure     Above, as Fig. 7, 16 and 17, in the form of Fig. 3: the attention of one patch in one image, by layer and
           head, of both networks, with the share of position of every gated head. Middle, as Fig. 15: that of the ViT,
           mean over 100 images, before and after training. Fig. 3 itself, a ConViT before training, is
           initial_maps/gpsa. Below, beyond the paper: how much of a head's attention another image moves, by layer and
           by the share of position.
Command    vitprobe run dascoli/attention_maps                    digits, 4 x 4 patches
           vitprobe run dascoli/attention_maps --scale cpu        CIFAR-10, 8 x 8 patches
           vitprobe run dascoli/attention_maps --scale paper --device cuda
Cost       The trainings are those of dascoli/sample_efficiency with all images: quick 6, cpu 6, paper 6. Measuring
           takes seconds a network, on two cores: quick 22 s, cpu 34 s (measured).
Shown      The maps of the first seed in the first test image, whichever it is; the query is the patch in the middle.
           Layers: the first, the one in the middle of the gated ones, the last gated one, and the last; of more than
           four heads a layer without the middle one. The gated maps are drawn, not their parts.
Rule       No claim is judged: the paper's maps are examples. What another image moves is a description: half the sum of
           the absolute differences of a head's maps in two images, 0 if they are equal and 1 if they share nothing,
           mean over 50 disjoint pairs of test images, which are the independent units of its standard error. A share
           of position g leaves (1 - g) of what the content map would move, by construction: that a head of position
           moves less says nothing of its content map, and in the figure a line shows what is left of the ViT's mean.
Expected   Heads of position look at their neighbours in every image, heads of content at what is alike; after few
           epochs the shares are still near 0.73. The accuracy by the recipe of scales.SMALL["cpu"] on the 2,000 images
           of its test, mean of seeds 0 to 2: 41.7 % ViT, 41.3 % ConViT.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from torch import nn

from studies.dascoli.pair import CONVIT, REFERENCES, VIT, kinds, pair
from studies.initial_maps.drawn import no_verdicts
from studies.outcomes import where
from vitprobe.data import ImageData
from vitprobe.figures.heads import heads_by_layer
from vitprobe.figures.map_table import FLOOR
from vitprobe.figures.page import GREY, PAGE_WIDTH, VERMILION, style, unit_interval
from vitprobe.models.attention import Attention
from vitprobe.probes import attention_maps
from vitprobe.results import to_json
from vitprobe.runs import Run, trained
from vitprobe.study import Settings, Study, main

IMAGES = 100
MAP = ("layer", "head", "y", "x")


# --- measured ---------------------------------------------------------------------------------------


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Maps and gates of one network before and after training, along `epoch`."""
    result = trained(run, cache=settings.cache, device=settings.device)
    data = result.data.few(IMAGES)
    epochs = (0, run.recipe.epochs)
    ds = xr.concat(
        [looked(result.at(epoch), data).assign_coords(epoch=epoch) for epoch in epochs],
        "epoch",
        data_vars="all",
        coords="minimal",
        compat="override",
        combine_attrs="override",
    )
    ds["epoch"].attrs = {"long_name": "epochs of training", "units": "1"}
    accuracy = 100 * float(result.history.test_accuracy[-1])
    return ds.assign_coords(
        seed=((), run.recipe.seed, {"long_name": "seed of the run", "units": "1"}),
        accuracy=((), accuracy, {"long_name": "test accuracy", "units": "%"}),
    ).assign_attrs(
        references=REFERENCES,
        data=run.data.spec.partition(":")[0],
        images=len(data.test),
        run_config=to_json(run.config()),
    )


def looked(model: nn.Module, data: ImageData) -> xr.Dataset:
    """Where the middle patch looks in a network as it is.

    Args:
        model: the network.
        data: whose test images it sees, all of them.

    Returns:
        `attention` in the first image and `mean_attention` `(layer, head, y, x)`; `moved` and `gate` `(layer, head)`,
        the gate not-a-number where a layer has none; standard errors over images; and the first image, with pixels
        between 0 and 1, as a coordinate.
    """
    count = len(data.test)
    maps = attention_maps(model, data.loader("test", batch_size=50), images=count, progress=False)
    values = maps.attention.transpose("sample", *MAP).values
    numbers = {
        "mean_attention": (MAP, values.mean(0), "attention of the query to each patch, mean over images"),
        "mean_attention_se": (
            MAP, values.std(0, ddof=1) / math.sqrt(count), "standard error over images of mean_attention",
        ),
        **{
            name: (MAP[:2], found, text)
            for name, found, text in zip(("moved", "moved_se"), moved(values), _MOVED, strict=True)
        },
        "gate": (MAP[:2], gates(model), "share of the position map in the attention map"),
    }  # fmt: skip
    described: dict[str, Any] = {
        name: (dims, found, {"long_name": text, "units": "1"}) for name, (dims, found, text) in numbers.items()
    }
    pixels = data.test.images[0].numpy().astype(np.float32) / 255
    image = (("channel", "pixel_y", "pixel_x"), pixels, {"long_name": "the first image", "units": "1"})
    return maps.isel(sample=0, drop=True).assign(described).assign_coords(image=image)


_MOVED = ("share of the attention that another image moves", "standard error over pairs of images of moved")


def moved(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How much of the attention another image moves: half the sum of the absolute differences of two maps.

    Args:
        maps: `(image, layer, head, y, x)`; each image of the first half is compared with one of the second.

    Returns:
        The mean over pairs of images `(layer, head)` and its standard error.
    """
    pairs = len(maps) // 2
    found = np.abs(maps[:pairs] - maps[pairs : 2 * pairs]).sum((-2, -1)) / 2
    return found.mean(0), found.std(0, ddof=1) / math.sqrt(pairs)


def gates(model: nn.Module) -> np.ndarray:
    """The share of position of every head `(layer, head)`; not-a-number where a layer has no gates."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    return np.array([
        np.full(layer.heads, np.nan) if layer.gate is None else layer.gate.detach().sigmoid().cpu().numpy()
        for layer in layers
    ])


# --- figure -----------------------------------------------------------------------------------------

HIGH = 9.2  # inches, the highest that the figure becomes
IMAGE, NAMES, BAR, APART = 0.9, 0.62, 0.72, 0.15  # inches: image, names of layers, scale of colours, between blocks
HEAD, GAP, SAID = 0.4, 0.03, 0.13  # inches: over a block, between maps, and for a number over a map
PANELS, NOTE = 1.7, 0.95  # inches: the panels below with their legends, and what stands under them


@dataclass(frozen=True)
class Block:
    """Maps of one network, a row for each layer shown and a column for each head.

    Attributes:
        title: over them.
        maps: `(layer, head, y, x)`.
        gates: the share of position of every head `(layer, head)`, not-a-number where there is none; none unless given.
    """

    title: str
    maps: np.ndarray
    gates: np.ndarray | None = None

    @property
    def gap(self) -> float:
        """Inches between its rows."""
        return GAP if self.gates is None else GAP + SAID


def shown_layers(gated: np.ndarray, *, middle: bool = True) -> list[int]:
    """Which layers are drawn: the first, the one in the middle of the gated ones, the last gated one, and the last.

    Args:
        gated: which layers of the ConViT have gates `(layer,)`, the first ones.
        middle: whether to draw the one in the middle.
    """
    last = int(gated.sum()) - 1
    return sorted({0, last, len(gated) - 1} | ({last // 2} if middle else set()))


def draw(ds: xr.Dataset) -> Figure:
    """Above and in the middle: maps by layer and head. Below: what another image moves."""
    plain, gated = (where(ds, **kind) for kind in kinds(ds))
    one, other = plain.isel(run=0), gated.isel(run=0)
    heads = ds.sizes["head"]
    across = 2 if heads <= 4 else 1
    layers = shown_layers(other.gate.isel(epoch=-1).notnull().any("head").values, middle=across == 2)
    count = ds.attrs["images"]
    blocks = [
        _block(f"{VIT.label}, {float(one.accuracy):.1f} %: one image", one, layers),
        _block(
            f"{CONVIT.label}, {float(other.accuracy):.1f} %: the same image, shares of position",
            other,
            layers,
            said=True,
        ),
        _block(f"{VIT.label}: mean of {count} images, before training", one, layers, "mean_attention", epoch=0),
        _block(f"{VIT.label}: mean of {count} images, after training", one, layers, "mean_attention"),
    ]
    lines = [blocks[first : first + across] for first in range(0, len(blocks), across)]
    norm = _norm(blocks)
    origin = (int(one.query_y[0]), int(one.query_x[0]))
    left = IMAGE + NAMES
    gaps = [max(block.gap for block in line) for line in lines]
    room = PAGE_WIDTH - left - BAR - (across - 1) * APART
    high = HIGH - PANELS - NOTE - len(lines) * HEAD - len(layers) * sum(gaps)
    side = min(room / (across * heads) - GAP, high / (len(lines) * len(layers)))
    tall = sum(HEAD + len(layers) * (side + gap) for gap in gaps)
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, tall + PANELS + NOTE))
        figure.set_layout_engine("none")  # all places are given
        top = HEAD
        for line, gap in zip(lines, gaps, strict=True):
            for column, block in enumerate(line):
                start = left + column * (heads * (side + GAP) + APART)
                axes = _axes(figure, (len(layers), heads), (start, top), side, (GAP, gap))
                drawn = _draw_block(axes, block, layers if not column else [], origin, norm)
                _write(figure, block.title, start, top - HEAD + 0.13)
            top += HEAD + len(layers) * (side + gap)
        _draw_image(_axes(figure, (1, 1), (0.08, HEAD), IMAGE, (0, 0))[0, 0], one, origin)
        right = left + across * heads * (side + GAP) + (across - 1) * APART
        _color_bar(figure, drawn, 1 / one.attention[0, 0, 0].size, right, tall - HEAD - gaps[-1])
        size = figure.get_size_inches()
        panels: Any = figure.add_gridspec(
            1, 2, left=0.1, right=0.985, wspace=0.12, top=1 - (tall + 0.3) / size[1], bottom=(NOTE - 0.12) / size[1]
        ).subplots(sharey=True)
        _by_layer(panels[0], plain, gated)
        _by_share(panels[1], plain, gated)
        _write(figure, _note(ds, one), 0.08, size[1] - 0.17, fontsize=6.5, color=GREY)
    return figure


def _block(
    title: str,
    run: xr.Dataset,
    layers: Sequence[int],
    variable: str = "attention",
    *,
    epoch: int = -1,
    said: bool = False,
) -> Block:
    chosen = run.isel(epoch=epoch, layer=list(layers))
    return Block(title, chosen[variable].transpose(*MAP).values, chosen.gate.values if said else None)


def _norm(blocks: Sequence[Block]) -> LogNorm:
    """One logarithmic scale for all."""
    low, high = (float(end([end(block.maps) for block in blocks])) for end in (np.min, np.max))
    return LogNorm(min(max(low, FLOOR), high / 10), high)


def _axes(
    figure: Figure, count: tuple[int, int], corner: tuple[float, float], side: float, gaps: tuple[float, float]
) -> np.ndarray:
    """Square axes `(row, column)` whose left upper corner, side and gaps are in inches, from the left upper corner."""
    wide, high = figure.get_size_inches()
    (rows, columns), (left, top), (beside, below) = count, corner, gaps
    axes: np.ndarray = figure.add_gridspec(
        rows,
        columns,
        left=left / wide,
        right=(left + columns * side + (columns - 1) * beside) / wide,
        top=1 - top / high,
        bottom=1 - (top + rows * side + (rows - 1) * below) / high,
        wspace=beside / side,
        hspace=below / side,
    ).subplots(squeeze=False)
    return axes


def _draw_block(axes: np.ndarray, block: Block, layers: Sequence[int], origin: tuple[int, int], norm: LogNorm) -> Any:
    """The maps of a block, with the names of layers where they are given."""
    for row, across in enumerate(axes):
        for head, ax in enumerate(across):
            weights = np.maximum(block.maps[row, head], norm.vmin or 0)
            drawn = ax.imshow(weights, norm=norm, cmap="viridis", interpolation="nearest")
            _box(ax, (origin[1] - 0.5, origin[0] - 0.5), (1, 1))
            words = [] if row else [f"head {head + 1}"]
            if block.gates is not None and np.isfinite(block.gates[row, head]):
                words.append(f"{block.gates[row, head]:.2f}")
            ax.set_title("\n".join(words), fontsize=6, pad=1.5, linespacing=1.05)
            _bare(ax)
        if layers:
            across[0].set_ylabel(f"layer {layers[row] + 1}", rotation=0, ha="right", va="center")
    return drawn


def _draw_image(ax: Axes, run: xr.Dataset, origin: tuple[int, int]) -> None:
    """The image with its patches and the box around the query."""
    image = run.image.transpose("pixel_y", "pixel_x", "channel").values
    ax.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1)
    high, wide = (pixels / patches for pixels, patches in zip(image.shape[:2], run.attention.shape[-2:], strict=True))
    edge: dict[str, Any] = {"color": "white", "linewidth": 0.3, "alpha": 0.6}
    for place in np.arange(high, image.shape[0], high):
        ax.axhline(place - 0.5, **edge)
    for place in np.arange(wide, image.shape[1], wide):
        ax.axvline(place - 0.5, **edge)
    _box(ax, (origin[1] * wide - 0.5, origin[0] * high - 0.5), (wide, high))
    ax.set_title("first test image", fontsize=7, pad=3)
    _bare(ax)


def _box(ax: Axes, corner: tuple[float, float], size: tuple[float, float]) -> None:
    box = Rectangle(corner, *size, fill=False, edgecolor="white", linewidth=0.6)
    box.set_path_effects([withStroke(linewidth=1.3, foreground="black")])
    ax.add_patch(box)


def _bare(ax: Axes) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def _color_bar(figure: Figure, drawn: Any, uniform: float, left: float, high: float) -> None:
    """The scale of colours beside all maps, with a triangle at uniform attention."""
    size = figure.get_size_inches()
    place = ((left + 0.05) / size[0], 1 - (HEAD + high) / size[1], 0.11 / size[0], high / size[1])
    bar = figure.colorbar(drawn, cax=figure.add_axes(place), label="attention of the boxed patch to each patch [1]")
    bar.outline.set_visible(False)
    bar.ax.axhline(uniform, color="white", linewidth=1.2)
    bar.ax.plot(
        1.0, uniform, marker="<", color=VERMILION, markersize=4, clip_on=False,
        transform=bar.ax.get_yaxis_transform(),
    )  # fmt: skip


# Of a legend: off the data.
_ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 0.98), "ncols": 2, "borderaxespad": 0.0}


def _by_layer(ax: Axes, plain: xr.Dataset, gated: xr.Dataset) -> None:
    """What another image moves in every head of every layer, after training."""
    for runs, look in ((plain, VIT), (gated, CONVIT)):
        heads_by_layer(ax, runs.isel(epoch=-1), "moved", color=look.color, marker=look.marker, label=look.label)
    lines, names = ax.get_legend_handles_labels()
    chosen = [place for place, name in enumerate(names) if name != "head"]
    ax.legend([lines[place] for place in chosen], [names[place] for place in chosen], **_ABOVE)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("attention that another\nimage moves [1]")


def _by_share(ax: Axes, plain: xr.Dataset, gated: xr.Dataset) -> None:
    """What another image moves in gated heads by their share of position, and what is left of the ViT's mean."""
    end = gated.isel(epoch=-1)
    share, there, error = (end[name].values.ravel() for name in ("gate", "moved", "moved_se"))
    ax.errorbar(
        share, there, error, color=CONVIT.color, marker=CONVIT.marker, markersize=3.5, linestyle="none",
        elinewidth=0.6, alpha=0.8, markeredgewidth=0,
    )  # fmt: skip
    mean = float(plain.moved.isel(epoch=-1).mean())
    ax.plot(
        [0, 1], [mean, 0], color=VIT.color, linestyle="--", linewidth=0.9, label=f"{VIT.label}'s mean × (1 − share)"
    )
    ax.legend(**_ABOVE)
    unit_interval(ax, "share of position in gated heads [1]")


def _note(ds: xr.Dataset, run: xr.Dataset) -> str:
    count = len(np.unique(ds.seed.values))
    band = f", bands 95 % t intervals over {count} seeds" if count > 2 else ""
    grid = " x ".join(str(run.sizes[name]) for name in ("y", "x"))
    return (
        f"{ds.attrs['data']}, {grid} patches. Maps: seed {int(run.seed)}. Box: the query. Triangle: uniform attention. "
        f"Below: all heads of {count} seed{'s' * (count > 1)};\n"
        f"left means over heads as lines{band}; right bars of one standard error over pairs of images."
    )


def _write(figure: Figure, text: str, left: float, top: float, **look: Any) -> None:
    """Text at a place in inches from the left upper corner."""
    wide, high = figure.get_size_inches()
    figure.text(left / wide, 1 - top / high, text, ha="left", va="center", **{"fontsize": 7.5, **look})


STUDY = Study(
    name="dascoli/attention_maps",
    title="Where the heads of a trained ViT and ConViT look",
    grid=pair,
    measure=measure,
    draw=draw,
    verdicts=no_verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
