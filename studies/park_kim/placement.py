"""Attention at the ends of stages helps a ResNet, more of it hurts (Park & Kim 2022, Fig. 12a and b).

Claim      E20: attention at the ends of stages raises the accuracy of a ResNet, a second one in a stage before the last
           lowers it again. E21, its half about accuracy: AlterNet beats the ResNet, on corrupted images too. Published
           for Alter-ResNet-50 on CIFAR-100, against a ResNet of other size.
Command    vitprobe run park_kim/placement                   digits, two stages of four blocks
           vitprobe run park_kim/placement --scale cpu --data cifar10
           vitprobe run park_kim/placement --scale paper --device cuda
Cost       quick: 200 s on two cores with 8 trainings, two seeds (measured). cpu: 1710 s on two cores with 8 trainings
           of networks of twice the length of alternet_micro, two seeds, and 9,000 corrupted images for each (measured,
           beside other work). paper: 30 trainings of about 9 GPU hours each on the authors' machines, and 150,000
           corrupted images for each; not measured.
Rule       Set beforehand. Of each seed, differences of the test accuracy: AlterNet (the published pattern: two in the
           last stage, one in those before it, none in the first of three and more) less the same blocks without
           attention, and less a ResNet of AlterNet's own size, made by its width; and a second attention in the stage
           before the last less one there (where the paper did so: the last stage full, none before). E20 is supported
           if the 95 % t intervals over seeds lie wholly above zero for both of the former and wholly below for the
           latter, contradicted if one lies wholly on the other side. E21 likewise from the accuracy and the mean
           accuracy on corrupted images, against the ResNet of its size; where images are too small to be corrupted
           (below 32 px), it is inconclusive at best. A network that did not learn its task (45 % of ten classes) makes
           them inconclusive.
Expected   Steps below a percentage point, which the two seeds of quick do not resolve. In these small networks an
           attention block has fewer parameters than the block of convolutions it replaces, in the paper's more.
           The accuracy by the recipe of families.SCALES["cpu"], mean of seeds 0 and 1: 64.5 % AlterNet (0, 1, 2),
           63.9 % with (0, 2, 2), 64.2 % without attention, 61.3 % ResNet of AlterNet's size.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from studies.outcomes import (
    Look,
    around,
    bars_note,
    difference,
    judge,
    outcome,
    part,
    point,
    robustness,
    where,
)
from studies.park_kim.families import CLAIMS, REFERENCES
from studies.park_kim.families import grid as families_grid
from studies.park_kim.robustness import published_robustness
from vitprobe.claims import Verdict, combine
from vitprobe.figures.page import BLUE, GREY, PAGE_WIDTH, PALETTE, VERMILION, style
from vitprobe.models import create_model
from vitprobe.published import park_kim_2022
from vitprobe.runs import Run, load
from vitprobe.study import Settings, Study, main


@dataclass(frozen=True)
class Placements:
    """Where attention is put at a scale.

    Attributes:
        blocks: of each stage.
        widths: of each stage.
        bottleneck: 1 for basic blocks, 4 for bottleneck blocks.
        attentions: how many of each stage's blocks are attention, in the order of building up; the first has none.
        alternet: the one of them that is judged.
        crowded: the one with a second attention in the stage before the last.
        uncrowded: the same with one there.
        corrupted: how many test images are corrupted.
        severities: of the corruptions.
    """

    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    bottleneck: int
    attentions: tuple[tuple[int, ...], ...]
    alternet: tuple[int, ...]
    crowded: tuple[int, ...]
    uncrowded: tuple[int, ...]
    corrupted: int = 0
    severities: tuple[int, ...] = ()


_NANO = Placements(
    blocks=(4, 4),
    widths=(16, 32),
    bottleneck=1,
    attentions=((0, 0), (1, 2), (2, 2)),
    alternet=(1, 2),
    crowded=(2, 2),
    uncrowded=(1, 2),
)
SEEDS = {"quick": 2, "cpu": 2}  # fewer than families.grid has
PLACEMENTS = {
    "smoke": _NANO,
    "quick": _NANO,
    "cpu": Placements(
        blocks=(2, 4, 4),
        widths=(16, 32, 64),
        bottleneck=1,
        attentions=((0, 0, 0), (0, 1, 2), (0, 2, 2)),
        alternet=(0, 1, 2),
        crowded=(0, 2, 2),
        uncrowded=(0, 1, 2),
        corrupted=200,
        severities=(1, 3, 5),
    ),
    "paper": Placements(
        blocks=(3, 4, 6, 4),
        widths=(256, 512, 1024, 2048),
        bottleneck=4,
        attentions=(
            (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 1, 2), (0, 0, 2, 2), (0, 0, 3, 2), (0, 1, 1, 2),
            (0, 2, 1, 2), (1, 1, 1, 2),
        ),
        alternet=(0, 1, 1, 2),
        crowded=(0, 0, 2, 2),
        uncrowded=(0, 0, 1, 2),
        corrupted=2_000,
        severities=(1, 2, 3, 4, 5),
    ),
}  # fmt: skip


BARE = {"attention_blocks": 0, "matched": 0}  # the judged blocks without attention
STAGES = {"c4": BLUE, "c3": PALETTE[2], "c2": PALETTE[4], "c1": PALETTE[3]}


def grid(settings: Settings) -> list[Run]:
    """The AlterNet of families.grid with every placement, and the ResNet of its size, seed by seed."""
    placements = PLACEMENTS[settings.scale]
    settings = replace(settings, seeds=settings.seeds or SEEDS.get(settings.scale))
    bases = [run for run in families_grid(settings) if run.model.startswith("alternet")]
    kinds = [_options(placements, attentions) for attentions in placements.attentions]
    bare = {**kinds[0], "widths": _matched_widths(bases[0], placements)}
    return [replace(base, options=options) for base in bases for options in [*kinds, bare]]


def _options(placements: Placements, attentions: tuple[int, ...]) -> dict[str, Any]:
    return {"blocks": placements.blocks, "widths": placements.widths, "attentions": attentions}


def _matched_widths(base: Run, placements: Placements) -> tuple[int, ...]:
    """Widths that give the blocks without attention as many parameters as the judged AlterNet has."""
    data = load(base.data)

    def count(options: dict[str, Any]) -> int:
        model = create_model(
            base.model, image_size=data.image_size, channels=data.channels, num_classes=data.num_classes, **options
        )
        return sum(parameter.numel() for parameter in model.parameters())

    bare = _options(placements, placements.attentions[0])
    return same_size(
        lambda widths: count({**bare, "widths": widths}),
        placements.widths,
        target=count(_options(placements, placements.alternet)),
        step=placements.bottleneck,
    )


def same_size(
    count: Callable[[tuple[int, ...]], int], widths: tuple[int, ...], *, target: int, step: int
) -> tuple[int, ...]:
    """Widths in the proportions of others whose network comes nearest to a number of parameters.

    Args:
        count: the number of parameters by widths, which grows with them.
        widths: the proportions.
        target: the number wanted.
        step: what the widths are multiples of.

    Returns:
        The widths.
    """

    def scaled(factor: float) -> tuple[int, ...]:
        return tuple(step * max(1, round(width * factor / step)) for width in widths)

    low, high = 0.25, 4.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if count(scaled(middle)) < target else (low, middle)
    return min((scaled(low), scaled(high)), key=lambda found: abs(count(found) - target))


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Accuracy of one trained network, on corrupted images too where they are large enough, and where it attends."""
    placements = PLACEMENTS[settings.scale]
    result, ds = outcome(run, settings, references=REFERENCES)
    ds = ds.assign(robustness(result, images=placements.corrupted, severities=placements.severities))
    attentions = run.options["attentions"]
    return ds.assign_coords(
        placement=((), _name(attentions), {"long_name": "attention blocks of each stage"}),
        attention_blocks=((), sum(attentions), {"long_name": "number of attention blocks", "units": "1"}),
        matched=(
            (),
            int(tuple(run.options["widths"]) != placements.widths),
            {"long_name": "1: without attention, and as large as AlterNet", "units": "1"},
        ),
    ).assign_attrs(
        alternet=_name(placements.alternet),
        crowded=_name(placements.crowded),
        uncrowded=_name(placements.uncrowded),
        corrupted_images=placements.corrupted,
        severities=str(placements.severities),
    )


def _name(attentions: Sequence[int]) -> str:
    return " ".join(map(str, attentions))


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E20 by placement, and the accuracies of E21."""
    alternet = {"placement": ds.attrs["alternet"]}
    matched = {"matched": 1}
    sizes = [int(where(ds, **kind).parameters.values[0]) for kind in (alternet, BARE, matched)]
    said = (
        f"parameters: AlterNet {sizes[0]:,}, its blocks without attention {sizes[1]:,}, ResNet of its size {sizes[2]:,}"
    )
    steps = {
        "helps": "AlterNet is more accurate than its blocks without attention",
        "size": "AlterNet is more accurate than a ResNet of its size",
        "crowded": "a second attention in the stage before the last lowers the accuracy",
    }
    published = {"helps": "+1.54 percentage points", "size": "not published", "crowded": "-0.25 percentage points"}
    claims = {name: part(CLAIMS["E20"], name, text, published=published[name]) for name, text in steps.items()}
    crowding = difference(ds, "accuracy", {"placement": ds.attrs["crowded"]}, {"placement": ds.attrs["uncrowded"]})
    placing = [
        judge(claims["helps"], difference(ds, "accuracy", alternet, BARE), "above", ds, detail=said),
        judge(claims["size"], difference(ds, "accuracy", alternet, matched), "above", ds, detail=said),
        judge(claims["crowded"], crowding, "below", ds),
    ]
    small = [
        judge(
            part(CLAIMS["E21"], name, f"the {text} of AlterNet is above that of a ResNet of its size"),
            difference(ds, variable, alternet, matched),
            "above",
            ds,
            detail=said,
        )
        for name, variable, text in (
            ("clean", "accuracy", "accuracy"),
            ("corrupted", "robustness", "mean accuracy on corrupted images"),
        )
        if np.isfinite(ds[variable]).all()
    ]
    whole = part(CLAIMS["E21"], "accuracy", "AlterNet beats the convolutional network, on corrupted images too")
    whole = replace(whole, published=CLAIMS["E21"].published, counter_evidence=CLAIMS["E21"].counter_evidence)
    judged = combine(whole, small)
    if len(small) == 1 and judged.verdict == "supported":
        reason = f"{judged.detail}; nothing is known of corrupted images"
        judged = replace(judged, verdict="inconclusive", detail=reason)
    return [combine(CLAIMS["E20"], placing), *placing, judged, *small]


def draw(ds: xr.Dataset) -> Figure:
    """What attention gains by its number beside the paper's; below, where measured, on corrupted images too."""
    numbers = park_kim_2022()
    robust = bool(np.isfinite(ds.robustness).all())
    seeds = len(np.unique(ds.seed.values))
    with style():
        figure = Figure(figsize=(0.95 * PAGE_WIDTH, 5.6 if robust else 3.2), layout="constrained")
        axes = figure.subplots(2 if robust else 1, 2, squeeze=False)
        _gains(axes[0, 0], ds, "attention_blocks")
        without = where(ds, **BARE).accuracy.values.mean()
        said = f"{seeds} seed{'s' if seeds > 1 else ''}"
        axes[0, 0].set_title(f"ours: {ds.attrs['data']}, {said}\nwithout attention {without:.1f} %")
        published = numbers["alternet_acc_vs_msa_number"]
        without = next(iter(published.values()))[0][1]
        for name, series in published.items():
            stage = name.removeprefix("then ").partition(" ")[0]
            count, accuracy = np.transpose(series)
            axes[0, 1].plot(count, accuracy - without, marker="o", markersize=3.5, color=STAGES[stage], label=stage)
        axes[0, 1].legend(title="added in stage", loc="lower right")
        axes[0, 1].set_title(f"published: CIFAR-100, one run each (Fig. 12a)\nwithout attention {without:.1f} %")
        for ax in axes[0]:
            ax.set_xlabel("number of attention blocks")
            ax.set_ylabel("gain of test accuracy\n[percentage points]")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if robust:
            _gains(axes[1, 0], ds, "robustness")
            axes[1, 0].set_xlabel("gain of accuracy on corrupted images\n[percentage points]")
            axes[1, 0].set_ylabel("gain of test accuracy\n[percentage points]")
            looks = {"Alter-ResNet-50": Look("AlterNet", VERMILION, "o")}
            published_robustness(axes[1, 1], numbers["acc_vs_robustness_cifar100c"], looks)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4, handletextpad=0.2)
        note = f"Gain over the same blocks without attention in the same seed. {bars_note(seeds)}"
        if seeds < 3:
            note += "\nThey are as if the two networks saw different images, hence too wide, and cut at the frame."
            note += " Small marks: single seeds."
        figure.supxlabel(f"{note}\nNumbers at marks: attention blocks of each stage.", fontsize=6.5, color=GREY)
    return figure


def _gains(ax: Axes, ds: xr.Dataset, abscissa: str) -> None:
    """The accuracy of every placement less that without attention, by their number or the same on corrupted images."""
    matched = {"matched": 1}
    kinds: list[dict[str, Any]] = [
        {"placement": placement, "matched": 0} for placement in dict.fromkeys(ds.placement.values.tolist())
    ]
    bare, drawn = where(ds, **BARE), [np.zeros((2, 1))]
    ax.axhline(0, color=GREY, linewidth=0.8, zorder=1, label="without attention")
    if abscissa == "robustness":
        ax.axvline(0, color=GREY, linewidth=0.8, zorder=1)
    named = set()
    for kind in [*kinds, matched]:
        runs = where(ds, **kind)
        name = str(runs.placement.values[0])
        if kind != matched and not runs.attention_blocks.values[0]:
            continue
        judged = name == ds.attrs["alternet"]
        label = "ResNet of AlterNet's size" if kind == matched else "AlterNet" if judged else "other placements"
        color, marker = ("black", "D") if kind == matched else (VERMILION, "o") if judged else (BLUE, "s")
        y = difference(ds, "accuracy", kind, BARE)
        if abscissa == "robustness":
            x = difference(ds, "robustness", kind, BARE)
            x_error = np.hypot(runs.robustness_se.values, bare.robustness_se.values)
        else:
            x = runs.attention_blocks.values.astype(float)
            x_error = np.full(len(x), np.nan)
        errors = (x_error, np.hypot(runs.error_se.values, bare.error_se.values))
        point(ax, x, y, errors=errors, color=color, marker=marker, label=None if label in named else label)
        named.add(label)
        drawn.append(np.stack([x, y]))
        if kind != matched:
            ax.annotate(
                f"({name.replace(' ', ', ')})", (x.mean(), y.mean()), (5, 4), textcoords="offset points", fontsize=6,
                color=color, path_effects=[withStroke(linewidth=2, foreground="white")], zorder=5,
            )  # fmt: skip
    around(ax, *np.hstack(drawn))


STUDY = Study(
    name="park_kim/placement",
    title="Accuracy of AlterNets by the placement of attention",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
