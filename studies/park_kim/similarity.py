"""Networks with stages see the images alike within a stage, plain ViTs throughout (Park & Kim 2022, Fig. 10a and D.3).

Claim      E18: the CKA of units of one stage is higher than that of units of two stages in a network with stages, and
           more so than in a ViT that is cut into stages of the same lengths. Published for ResNet, PiT and Swin against
           ViT, as matrices without numbers, so that none are drawn here.
Command    vitprobe run park_kim/similarity                  digits; shares its trained networks with park_kim/fourier
           vitprobe run park_kim/similarity --scale cpu --data cifar10
           vitprobe run park_kim/similarity --scale paper --device cuda
Cost       beside the training, one pass over the test images. quick: 40 s, cpu: 57 s on two cores (measured). paper was
           not measured.
Expected   accuracy after training by the recipe of families.SCALES["cpu"], mean of seeds 0 to 2: 61.3 % AlterNet,
           49.6 % ConViT, 58.2 % ConvMixer, 54.3 % PiT, 63.8 % ResNet, 45.8 % Swin, 49.2 % ViT.
Rule       Set before anything was measured. Of each seed, mean CKA of units of one stage minus that of units of two
           stages, of the network with stages minus of the ViT, cut in proportion to the stages of the other. Supported
           if the 95 % t intervals over seeds of ResNet, PiT and Swin lie wholly above zero, contradicted if one lies
           wholly below. AlterNet is reported, and does not decide. PiT and Swin were added to the ResNet before either
           was measured, when results of the quick scale without them (supported) had been seen.
           Units of one stage are nearer to each other than units of two, and neighbours are alike in any network: the
           difference is above zero without any stages. So there is a second version, with a verdict of its own, that
           compares pairs of units at equal distance only. A stage begins with the unit that changes the grid.
"""

import json
import sys
from dataclasses import replace

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from studies.outcomes import if_learned
from studies.park_kim.families import CLAIMS, LOOKS, family, grid
from studies.park_kim.families import measure as measure_family
from vitprobe.claims import Claim, Verdict, combine, decide
from vitprobe.figures.page import GREY, PAGE_WIDTH, attribute, interval, pretty, style
from vitprobe.probes import CKA
from vitprobe.probes.cka import block_structure
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

CONTRASTS = {"block_structure": "all pairs", "block_structure_equal_distance": "pairs at equal distance"}
DECIDING = ("resnet", "pit", "swin")  # families with stages that the claim was published for


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """CKA between the units of one trained network on its test set."""
    return measure_family(run, settings, CKA())


# --- verdicts ---------------------------------------------------------------------------------------


def contrasts(ds: xr.Dataset, reference: str) -> xr.Dataset:
    """Block structure of every run, those without stages cut as another network is.

    Args:
        ds: stacked runs.
        reference: the name of a network with stages.

    Returns:
        The variables of `block_structure` along `run`, with the coordinates `model`, `staged` and, as JSON, `stages`.
    """
    runs = [ds.isel(run=run).drop_vars("run") for run in range(ds.sizes["run"])]
    followed = next(run for run in runs if run.model.item() == reference)
    reference_stages = json.loads(block_structure(followed).attrs["stages"])
    found, staged, stages = [], [], []
    for run in runs:
        of_run = block_structure(run)
        staged.append(of_run.attrs["stages_from"] == "grid")
        if not staged[-1]:
            of_run = block_structure(run, proportional(reference_stages, int((run.layer_name != "").sum())))
        stages.append(of_run.attrs["stages"])
        found.append(of_run[[name + ending for name in CONTRASTS for ending in ("", "_se")]].drop_vars(of_run.coords))
    joined = xr.concat([one.assign_attrs({}) for one in found], dim="run")
    return joined.assign_coords(model=("run", ds.model.values), staged=("run", staged), stages=("run", stages))


def of_family(ds: xr.Dataset, name: str) -> str:
    """The network of a family in a dataset."""
    return next(model for model in ds.model.values.tolist() if family(model) == name)


def proportional(reference: list[int], units: int) -> list[int]:
    """Stages of the same relative lengths for another number of units.

    Args:
        reference: the stage of every unit of the network that is followed.
        units: of the other network.

    Returns:
        The stage of each of its units.
    """
    return [reference[unit * len(reference) // units] for unit in range(units)]


def judge(ds: xr.Dataset, variable: str, claim: Claim) -> list[Verdict]:
    """Verdicts on one version of E18: the whole, then every family with stages.

    Args:
        ds: stacked runs.
        variable: one of `CONTRASTS`.
        claim: this version of the claim.
    """
    vit = of_family(ds, "vit")
    as_resnet = contrasts(ds, of_family(ds, "resnet"))
    parts = []
    for model in dict.fromkeys(ds.model.values[as_resnet.staged.values].tolist()):
        # Of both networks alone, with the ViT cut as this one.
        both = ds.isel(run=np.isin(ds.model, [model, vit]))
        blocks = contrasts(both, model)
        values, of_vit = (blocks[variable].values[blocks.model == name] for name in (model, vit))
        part = replace(
            claim,
            id=f"{claim.id} {model}",
            statement=f"units of {model} are more alike within stages than those of {vit}",
            published="",
            counter_evidence="",
        )
        detail = f"{model} {values.mean():+.3f}, {vit} {of_vit.mean():+.3f}"
        parts.append(if_learned(decide(part, values - of_vit, threshold=0.0, detail=detail), both))
    deciding = [part for part in parts if family(part.claim.id.rpartition(" ")[2]) in DECIDING]
    return [combine(claim, deciding), *parts]


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E18 from all pairs of units, and from pairs at equal distance."""
    equal = replace(
        CLAIMS["E18"],
        id="E18 equal distance",
        statement=f"{CLAIMS['E18'].statement}, of units equally far apart",
        published="not published",
    )
    return [
        *judge(ds, "block_structure", CLAIMS["E18"]),
        *judge(ds, "block_structure_equal_distance", equal),
    ]


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """CKA of all pairs of units, mean over seeds, one matrix per family; below, both contrasts of every family."""
    names = list(dict.fromkeys(ds.model.values.tolist()))
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 2.1 * rows + 2.1), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=[2.1 * rows, 2.1])
        axes = above.subplots(rows, columns, squeeze=False)
        blocks = contrasts(ds, of_family(ds, "resnet"))
        for ax, name in zip(axes.flat, names, strict=False):
            here = np.flatnonzero(ds.model == name)
            image = _matrix(ax, ds.isel(run=here), name, blocks.isel(run=here[0]))
            if names.index(name) + columns >= len(names):  # the last of its column
                ax.set_xlabel("unit")
        for ax in axes.flat[len(names) :]:
            ax.set_axis_off()
        for ax in axes[:, 0]:
            ax.set_ylabel("unit")
        bar = above.colorbar(image, ax=axes.ravel().tolist(), label="CKA [1]", aspect=15 * rows)
        bar.outline.set_visible(False)
        _points(below.subplots(), blocks, names)
        seeds = ds.sizes["run"] // len(names)
        bars = f"\nBars: 95 % t interval over {seeds} seeds; small points: single seeds." if seeds > 1 else ""
        below.supxlabel(
            "Matrices: mean over seeds; white lines end stages, dotted ones cut networks without stages as the ResNet."
            + bars,
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _matrix(ax: Axes, runs: xr.Dataset, name: str, blocks: xr.Dataset) -> AxesImage:
    known = runs.layer_name.isel(run=0).values != ""
    matrix = runs.cka.mean("run").transpose("layer", "layer_other").values[np.ix_(known, known)]
    image = ax.imshow(matrix, origin="lower", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    look = {"color": "white", "linewidth": 0.8, "linestyle": "-" if blocks.staged else ":"}
    for end in np.flatnonzero(np.diff(json.loads(str(blocks.stages.values)))):
        ax.axhline(end + 0.5, **look)
        ax.axvline(end + 0.5, **look)
    ax.set_title(f"{pretty(name)}\n{attribute(runs, 'accuracy').mean():.1f} %")
    ticks = np.arange(0, known.sum(), 4 if known.sum() > 5 else 1)
    ax.set_xticks(ticks, ticks + 1)
    ax.set_yticks(ticks, ticks + 1)
    ax.spines[:].set_visible(False)
    return image


def _points(ax: Axes, blocks: xr.Dataset, names: list[str]) -> None:
    """Both contrasts of every family in its colour, filled and open."""
    ax.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    ways = dict(zip(CONTRASTS, ((-0.14, None), (0.1, "white")), strict=True))  # None: filled with the line's colour
    drawn = []
    for variable, (shift, face) in ways.items():
        for place, name in enumerate(names):
            look = LOOKS[family(name)]
            values = blocks[variable].values[blocks.model == name]
            mean, half_width = interval(values[:, None])
            bar = None if len(values) == 1 else half_width
            style_ = {"color": look.color, "markerfacecolor": face or look.color, "elinewidth": 0.8}
            ax.errorbar([place + shift], mean, bar, fmt=look.marker, markersize=4.5, zorder=3, **style_)
            ax.scatter(
                np.full(len(values), place + shift + 0.08), values, s=5, color=look.color, alpha=0.6, linewidths=0
            )
            drawn.append(values)
    low, high = np.concatenate(drawn).min(), np.concatenate(drawn).max()
    margin = 0.2 * (high - min(low, 0))
    ax.set_ylim(min(low, 0) - margin, high + margin)
    ends = ["stages" if blocks.staged.values[blocks.model == name].all() else "cut" for name in names]
    labels = [f"{LOOKS[family(name)].label}\n({end})" for name, end in zip(names, ends, strict=True)]
    ax.set_xticks(range(len(names)), labels)
    ax.set_xlim(-0.5, len(names) - 0.5)
    ax.set_ylabel("CKA within minus\nacross stages [1]")
    ax.legend(
        handles=[
            Line2D([], [], color=GREY, marker="o", markersize=4, markerfacecolor=face or GREY, linestyle="", label=text)
            for (_, face), text in zip(ways.values(), CONTRASTS.values(), strict=True)
        ],
        loc="upper right",
        bbox_to_anchor=(1.0, 1.18),
        ncols=2,
    )


STUDY = Study(
    name="park_kim/similarity",
    title="Centred kernel alignment between units by family of networks",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
