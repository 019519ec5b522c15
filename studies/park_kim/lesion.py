"""Stages begin with convolutions that matter and end with attention that does (Park & Kim 2022, Fig. 10b and D.4).

Claim      E19: of a stage's convolutions or MLPs the first costs most accuracy when it is removed, of its attention
           units the last. Published for ResNet and Swin; PiT and ViT are shown. Values are known of Swin alone. For a
           plain deep ViT it is contested: its authors concede that units in the middle matter most there.
Command    vitprobe run park_kim/lesion                      digits; shares its trained networks with park_kim/fourier
           vitprobe run park_kim/lesion --scale cpu --data cifar10
           vitprobe run park_kim/lesion --scale paper --device cuda
Cost       beside the training, two passes over the test images for each unit. quick: 46 s, cpu: 483 s on two cores
           (measured). paper was not measured.
Expected   accuracy after training by the recipe of families.SCALES["cpu"], mean of seeds 0 to 2: 61.3 % AlterNet,
           49.6 % ConViT, 58.2 % ConvMixer, 54.3 % PiT, 63.8 % ResNet, 45.8 % Swin, 49.2 % ViT.
Rule       Of each seed and stage, which share of the other units of its kind costs less accuracy than the first
           convolution or MLP, or than the last attention unit; the mean over stages, and 0.5 by chance. Where a stage
           has one unit of the kind, it is ranked among all units of the stage. Supported if the 95 % t interval over
           seeds lies wholly above 0.5 for the convolutions of the ResNet and for the MLPs and the attention of Swin,
           contradicted if one lies wholly below. All others are reported, and do not decide; networks without stages
           are one stage each. Ranks among few units are often the same in all seeds: then it takes six seeds (a sign
           test).
           The statistic was set before anything was measured. What decides was changed when results of the quick scale
           (ResNet and AlterNet, inconclusive, because all seeds had the same ranks) had been seen, and before any Swin
           was measured: AlterNet, which stood in for it, decides no more.
           Because ranks saturate, the excess is said beside them: the points that the unit costs, less the mean of the
           others with which it is ranked, averaged over stages. It has a verdict of its own, above zero by the claim,
           and does not decide E19; it too was added after those results.
           The block that changes the grid counts as the first convolution of its stage, because it is a ResNet's. Two
           more versions, each with a verdict of its own: without those blocks, which lose their branch and keep the
           convolution on their skip connection; and with the published lesion, which takes the spatial convolutions
           alone. Batch norm keeps the statistics of the whole network in all of them, which makes what is lost larger.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import nn

from studies.outcomes import if_learned
from studies.park_kim.families import CLAIMS, family, grid
from studies.park_kim.families import measure as measure_family
from studies.park_kim.profiles import stages_of
from vitprobe import probes
from vitprobe.claims import Claim, Verdict, combine, decide
from vitprobe.figures.page import BLUE, GREY, PAGE_WIDTH, VERMILION, attribute, interval, pretty, style
from vitprobe.intervals import mean_interval
from vitprobe.published import park_kim_2022
from vitprobe.results import to_json
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

KINDS = {"conv": "convolution", "mlp": "MLP", "msa": "attention unit"}
DECIDING = {"resnet": ("conv",), "swin": ("mlp", "msa")}  # kinds by the family that the claim was published for


@dataclass(frozen=True)
class BothLesions:
    """`lesion` by both definitions, with the method that `families.measure` calls."""

    def run(self, model: nn.Module, batches: Iterable[Any], *, progress: bool) -> xr.Dataset:
        """Numbers of the removed branch; those of the published lesion end in `_convolution`."""
        given = list(batches)
        branch = probes.lesion(model, given, progress=progress)
        published = probes.lesion(model, given, remove="convolution", progress=progress)
        for name in ("accuracy_change", "nll_change"):
            for ending in ("", "_se"):
                branch[f"{name}_convolution{ending}"] = published[name + ending]
        branch["removed_convolution"] = published["removed"]
        return branch.set_coords("removed_convolution").assign_attrs(
            remove="both", config=to_json({"probe": "lesion", "remove": ["branch", "convolution"]})
        )


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Accuracy of one trained network without each of its units, on its test set."""
    return measure_family(run, settings, BothLesions())


# --- statistics of one run --------------------------------------------------------------------------


def share_below(lost: np.ndarray, which: int) -> float:
    """The share of the others that lost less; ties count half.

    Args:
        lost: by all units that are compared `(unit,)`.
        which: the place of the one.

    Returns:
        From 0 (all others lost more) to 1.
    """
    others = np.delete(lost, which)
    return float(np.mean((others < lost[which]) + 0.5 * (others == lost[which])))


def excess(lost: np.ndarray, which: int) -> float:
    """What one loses more than the others do on average.

    Args:
        lost: by all units that are compared `(unit,)`.
        which: the place of the one.

    Returns:
        The difference, in units of `lost`.
    """
    return float(lost[which] - np.delete(lost, which).mean())


def by_stage(
    statistic: Callable[[np.ndarray, int], float],
    lost: np.ndarray,
    kinds: Sequence[str],
    stages: Sequence[int] | np.ndarray,
    kind: str,
) -> list[float]:
    """A statistic of the first convolution or MLP, or the last attention unit, of every stage that has one.

    Args:
        statistic: `share_below` or `excess`.
        lost: accuracy `(unit,)`; not-a-number of units that were not removed.
        kinds: of the units.
        stages: their stages.
        kind: whose; where it is the only one of its kind in a stage, it is compared with all units of the stage.

    Returns:
        The statistic, one per stage; none of a stage of one unit.
    """
    kinds_, stages_ = np.asarray(kinds), np.asarray(stages)
    found = []
    for stage in np.unique(stages_):
        here = (stages_ == stage) & np.isfinite(lost)
        group = np.flatnonzero(here & (kinds_ == kind))
        if not len(group):
            continue
        unit = group[-1 if kind == "msa" else 0]
        among = group if len(group) > 1 else np.flatnonzero(here)
        if len(among) > 1:
            found.append(statistic(lost[among], int(np.flatnonzero(among == unit)[0])))
    return found


def of_run(
    statistic: Callable[[np.ndarray, int], float], run: xr.Dataset, kind: str, variable: str, *, subsampling: bool
) -> list[float]:
    """A statistic of one run by stage, of losses in percentage points.

    Args:
        statistic: `share_below` or `excess`.
        run: its dataset.
        kind: of the units.
        variable: the change of accuracy.
        subsampling: whether a block that changes the grid counts as a convolution, or not at all.
    """
    run = run.isel(layer=run.layer_name.values != "")
    kinds = run.kind.values.astype(str)
    # A pool or a strided projection alone has no branch, and so was not removed.
    kept = ~np.isin(kinds, ["stem"] if subsampling else ["stem", "subsample"])
    kinds = np.where(kinds == "subsample", "conv", kinds)
    return by_stage(statistic, np.where(kept, -100 * run[variable].values, np.nan), kinds, stages_of(run), kind)


def has_stages(ds: xr.Dataset) -> bool:
    """Whether the networks of a dataset have more than one grid."""
    return bool((ds.grid_h.max("layer") > ds.grid_h.min("layer")).all())


# --- verdicts ---------------------------------------------------------------------------------------


def judge(
    ds: xr.Dataset,
    claim: Claim,
    variable: str = "accuracy_change",
    *,
    subsampling: bool = True,
    statistic: Callable[[np.ndarray, int], float] = share_below,
) -> list[Verdict]:
    """Verdicts on one version of E19: the whole, then every family and kind.

    Args:
        ds: stacked runs.
        claim: this version of the claim.
        variable: the change of accuracy.
        subsampling: as in `of_run`.
        statistic: `share_below`, which by chance is 0.5, or `excess`, by chance zero.
    """
    parts, deciding = [], []
    for model in dict.fromkeys(ds.model.values.tolist()):
        runs = ds.isel(run=np.flatnonzero(ds.model == model))
        each = [runs.isel(run=i) for i in range(runs.sizes["run"])]
        for kind in KINDS:
            values = [of_run(statistic, run, kind, variable, subsampling=subsampling) for run in each]
            if not all(values):
                continue
            where = "last" if kind == "msa" else "first"
            of = "of each stage of" if has_stages(runs) else "of"
            part = replace(
                claim,
                id=f"{claim.id} {kind} {model}",
                statement=f"the {where} {KINDS[kind]} {of} {model} costs more than the others",
                published="",
                counter_evidence="",
            )
            detail = "stages " + ", ".join(f"{value:.2f}" for value in np.mean(values, axis=0))
            if statistic is share_below:
                more = [np.mean(of_run(excess, run, kind, variable, subsampling=subsampling)) for run in each]
                mean, low, high = mean_interval(more)
                detail += f"; costs {mean:.1f} [{low:.1f}, {high:.1f}] points more than the others"
            threshold = 0.5 if statistic is share_below else 0.0
            verdict = decide(part, [float(np.mean(one)) for one in values], threshold=threshold, detail=detail)
            parts.append(if_learned(verdict, runs))
            if kind in DECIDING.get(family(model), ()):
                deciding.append(parts[-1])
    return [combine(claim, deciding), *parts]


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E19 with the branch removed, in every family; its excess; without subsampling, and with the published lesion."""
    claim = CLAIMS["E19"]
    more = replace(
        claim,
        id="E19 excess",
        statement=f"{claim.statement}: by how many percentage points",
        published=(
            "CIFAR-100, Swin-Ti: values of stages 2 to 4, the first MLP by " + _published_excess("mlp") + ", the last "
            "attention unit by " + _published_excess("msa") + " points"
        ),
    )
    plain = replace(
        claim,
        id="E19 inner units",
        statement=f"{claim.statement}; blocks that change the grid left out",
        published="not published",
    )
    published = replace(claim, id="E19 convolution", statement=f"{claim.statement}; spatial convolutions alone removed")
    return [
        *judge(ds, claim),
        *judge(ds, more, statistic=excess),
        judge(ds, plain, subsampling=False)[0],
        judge(ds, published, "accuracy_change_convolution")[0],
    ]


def _published_excess(kind: str) -> str:
    """The excess of the published Swin, stage by stage; its first stage leaves the plot."""
    swin = [unit for unit in park_kim_2022()["lesion_swin_ti"] if unit["stage"] > 1]
    lost = np.array([-unit["delta_acc_pct"] for unit in swin])
    kinds, stages = [unit["unit"].lower() for unit in swin], [unit["stage"] for unit in swin]
    return ", ".join(f"{value:.2f}" for value in by_stage(excess, lost, kinds, stages, kind))


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Accuracy lost with each unit in order, ours by family and the published Swin; stage starts and ends marked."""
    names = list(dict.fromkeys(ds.model.values.tolist()))
    with style():
        columns = 4 if len(names) > 5 else 3
        rows = -(-(len(names) + 1) // columns)
        figure = Figure(figsize=(PAGE_WIDTH, 1.8 * rows + 0.6), layout="constrained")
        axes = figure.subplots(rows, columns).ravel()
        for ax, name in zip(axes, names, strict=False):
            runs = ds.isel(run=np.flatnonzero(ds.model == name))
            runs = runs.isel(layer=runs.layer_name.isel(run=0).values != "")
            first = runs.isel(run=0)
            kinds = np.where(first.kind == "subsample", "conv", first.kind).astype(str)
            stages = stages_of(first)
            lost = -100 * runs.accuracy_change.transpose("run", "layer").values
            _panel(ax, lost, kinds, stages)
            published = -100 * runs.accuracy_change_convolution.mean("run").values
            if not np.allclose(published, lost.mean(0), equal_nan=True):
                ax.plot(np.arange(len(kinds)), published, "_", color=GREY, markersize=6, zorder=3)
            ax.set_title(f"{pretty(name)}\n{attribute(runs, 'accuracy').mean():.1f} %")
        swin = park_kim_2022()["lesion_swin_ti"]
        lost = np.array([[np.nan if unit["delta_acc_pct"] is None else -unit["delta_acc_pct"] for unit in swin]])
        ax = axes[len(names)]
        _panel(ax, lost, [unit["unit"].lower() for unit in swin], [unit["stage"] for unit in swin])
        ax.set_title("Swin-Ti\nCIFAR-100, published")
        for ax in axes[len(names) + 1 :]:
            ax.set_axis_off()
        for ax in axes[::columns]:
            ax.set_ylabel("accuracy lost\n[percentage points]")
        _legend(figure, ds.sizes["run"] // len(names))
    return figure


def _panel(ax: Axes, lost: np.ndarray, kinds: Sequence[str], stages: Sequence[int]) -> None:
    """One network: `(seed, unit)`, filled where the claim says that much is lost."""
    kinds_, stages_ = np.asarray(kinds), np.asarray(stages)
    mean, half_width = interval(lost)
    place = np.arange(len(mean))
    ax.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    for start in np.flatnonzero(np.diff(stages_)):
        ax.axvline(start + 0.5, color=GREY, linewidth=0.6, linestyle=":", zorder=1)
    for kind, (color, marker) in _LOOK.items():
        of_kind = np.flatnonzero(kinds_ == kind)
        here = of_kind[np.isfinite(mean[of_kind])]
        # The ends may be without a number: those of the published network's first stage leave its plot.
        ends = [
            units[-1 if kind == "msa" else 0]
            for stage in np.unique(stages_)
            if len(units := of_kind[stages_[of_kind] == stage])
        ]
        if len(lost) > 1:
            ax.errorbar(place[here], mean[here], half_width[here], fmt="none", ecolor=color, elinewidth=0.8, zorder=2)
        ax.plot(place[here], mean[here], marker, markerfacecolor="white", color=color, markersize=4, zorder=4)
        ax.plot(place[ends], mean[ends], marker, color=color, markersize=4, zorder=5)
    ax.set_xlabel("unit, in order")
    ax.set_xlim(-0.7, len(mean) - 0.3)
    ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    finite = lost[np.isfinite(lost)]
    margin = 0.1 * max(finite.max(), 1.0)
    ax.set_ylim(min(finite.min(), 0) - margin, finite.max() + margin)


_LOOK = {"conv": ("#009E73", "^"), "mlp": (BLUE, "s"), "msa": (VERMILION, "o")}


def _legend(figure: Figure, seeds: int) -> None:
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="", markersize=4, label=KINDS[kind])
        for kind, (color, marker) in _LOOK.items()
    ]
    handles.append(Line2D([], [], color=GREY, marker="_", linestyle="", label="spatial convolutions alone"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    bars = f" Bars: 95 % t interval over {seeds} seeds; they may leave the panel." if seeds > 1 else ""
    figure.supxlabel(
        "Filled: where the claim says that most is lost, the first convolution or MLP and the last attention unit of a "
        f"stage.\nDotted: stages. Published: the first two units lose more than its plot shows.{bars}",
        fontsize=6.5,
        color=GREY,
    )


STUDY = Study(
    name="park_kim/lesion",
    title="Accuracy lost with each unit by family of networks",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
