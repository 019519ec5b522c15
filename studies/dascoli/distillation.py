"""What a convolutional teacher gives a ViT and a ConViT (d'Ascoli et al. 2021, Table 4 and Fig. 10).

Claim      D11: hard distillation helps a ConViT, but less than a ViT. Published: DeiT-S from 79.8 to 80.9 %, DeiT-B
           from 81.8 to 83.0 %, ConViT-S+ from 82.2 to 82.9 %. Also drawn: the nonlocality of attention with and without
           a teacher (Fig. 10, whose values were not at hand; it decides nothing).
Command    vitprobe run dascoli/distillation                 digits
           vitprobe run dascoli/distillation --scale cpu
           vitprobe run dascoli/distillation --scale paper --device cuda    CIFAR-100
Cost       quick: 9 trainings of nano networks beyond dascoli/ablations, 3 of them teachers, 79 s on two cores
           (measured). cpu: 9 trainings of micro networks beyond dascoli/ablations, 3 of them teachers; a taught one
           takes a pass of the teacher more; 695 s on two cores (measured, beside other work). paper: 9 trainings beyond
           dascoli/sample_efficiency, not measured.
Rule       Set before anything was measured. Of each seed the gain of test accuracy by distillation: of the ConViT,
           above zero; and that of the ViT less that of the ConViT, above zero. D11 is supported if the 95 % t intervals
           over seeds of both lie wholly above zero, contradicted if one lies wholly below. Networks that did not learn
           their task (35 % of ten classes) make it inconclusive. The gain of the ViT is judged beside it, and decides
           nothing. As in Table 4, half of the loss is the cross-entropy with the teacher's decision, and there is no
           distillation token. The teacher is a ResNet trained on the same images by the same recipe and seed, not a
           RegNetY of all of ImageNet: it has no more data than its pupils, and its accuracy is said. Where its decision
           is the label, it teaches nothing; so a teacher that has fitted the training images (98 %), or is no better on
           the test images than the pupils are without it, makes all inconclusive.
           Both pupils have the same heads and width, where Table 4 compares networks of different size.
Expected   Gains of some points for both where the teacher is better than its pupils, as a ResNet is on few images;
           which gain is the larger stays open with three seeds. The accuracy by the recipe of scales.SMALL["cpu"], mean
           of seeds 0 to 2: 41.2 % ViT and 42.3 % ConViT without a teacher, 42.5 % and 44.4 % with one of 54.7 %.
"""

import sys
from dataclasses import replace

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from studies.dascoli.pair import CONVIT, REFERENCES, VIT, convit, kinds, seeds, vit
from studies.dascoli.published import TABLE_4
from studies.outcomes import Look, difference, judge, outcome, part, where, without_evidence
from studies.scales import LEAST
from vitprobe.claims import CLAIMS, Verdict, combine
from vitprobe.figures.page import GREY, PAGE_WIDTH, interval, style
from vitprobe.probes import nonlocality
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

TEACHERS = {"smoke": "resnet_nano", "quick": "resnet_nano", "cpu": "resnet_micro", "paper": "preact_resnet50"}
SHARE = 0.5  # of the loss, with the teacher's decision
FITTED = 98.0  # accuracy on the training images [%] above which a teacher decides as the labels do


def grid(settings: Settings) -> list[Run]:
    """ViT and ConViT without a teacher, as in the other studies, and with one, seed by seed."""
    found = []
    for base in seeds(settings):
        pupils = [vit(base, settings), convit(base, settings)]
        alone = replace(base.recipe, snapshots=())
        teacher = replace(base, model=TEACHERS[settings.scale], recipe=alone)
        taught = replace(alone, distillation=SHARE)
        found += [*pupils, *(replace(pupil, teacher=teacher, recipe=taught) for pupil in pupils)]
    return found


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Accuracy of one trained network and the nonlocality of its layers, and how good its teacher is."""
    result, ds = outcome(run, settings, references=REFERENCES)
    batches = result.data.loader("test", batch_size=100, device=next(result.model.parameters()).device)
    reach = nonlocality(result.model, batches, progress=False)
    accuracy = fitted = np.nan
    if run.teacher is not None:
        _, of_teacher = outcome(run.teacher, settings, references=REFERENCES)
        accuracy, fitted = float(of_teacher.accuracy), float(of_teacher.train_accuracy)
    kept = ("layer_nonlocality", "layer_nonlocality_se", "uniform_nonlocality")
    return ds.assign({name: ("layer", reach[name].values, reach[name].attrs) for name in kept}).assign_coords(
        layer=np.arange(reach.sizes["layer"]),
        taught=((), int(run.teacher is not None), {"long_name": "1 with a teacher, else 0", "units": "1"}),
        teacher_accuracy=((), accuracy, {"long_name": "test accuracy of the teacher", "units": "%"}),
        teacher_fitted=((), fitted, {"long_name": "accuracy of the teacher on the training images", "units": "%"}),
    )


# --- verdicts ---------------------------------------------------------------------------------------


def gain(ds: xr.Dataset, kind: dict[str, str]) -> np.ndarray:
    """What a teacher adds to the accuracy of one kind of network, of each seed [percentage points]."""
    return -difference(ds, "error", {**kind, "taught": 1}, {**kind, "taught": 0})


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """D11 and its halves, and the gain of the ViT."""
    plain, gated = kinds(ds)
    claim = CLAIMS["D11"]
    gains = {name: after - before for name, (before, after) in TABLE_4.items()}
    of_vits = f"{gains['DeiT-S']:+.1f} and {gains['DeiT-B']:+.1f} points"
    more = [gains[name] - gains["ConViT-S+"] for name in ("DeiT-S", "DeiT-B")]
    with_teacher = where(ds, taught=1)
    better, fitted = (float(with_teacher[name].mean()) for name in ("teacher_accuracy", "teacher_fitted"))
    detail = f"teacher {better:.1f} %, on the training images {fitted:.1f} %"
    pupils = [float(where(ds, taught=0, **kind).accuracy.mean()) for kind in (plain, gated)]
    teaches = fitted <= FITTED and better > max(pupils)
    found = {
        "ConViT": ("a teacher helps the ConViT", gain(ds, gated), f"{gains['ConViT-S+']:+.1f} points"),
        "less": (
            "a teacher helps the ViT more than the ConViT",
            gain(ds, plain) - gain(ds, gated),
            f"{more[0]:+.1f} and {more[1]:+.1f} points",
        ),
        "ViT": ("a teacher helps the ViT", gain(ds, plain), of_vits),
    }
    parts = {
        name: _if_taught(
            judge(part(claim, name, said, published=published), values, "above", ds, least=LEAST, detail=detail),
            teaches,
        )
        for name, (said, values, published) in found.items()
    }
    return [combine(claim, [parts["ConViT"], parts["less"]]), *parts.values()]


def _if_taught(verdict: Verdict, teaches: bool) -> Verdict:
    """The verdict, or that there is none, because the teacher had nothing to give."""
    if teaches:
        return verdict
    reason = "no evidence, because the teacher is no better than its pupils or decides as the labels do"
    return without_evidence(verdict, reason)


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Accuracy without and with a teacher, ours and published, and what a teacher does to the layers' nonlocality."""
    plain, gated = kinds(ds)
    count = len(np.unique(ds.seed.values))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 2.9), layout="constrained")
        ours, theirs, reach = figure.subplots(1, 3, width_ratios=[1, 1, 1.5])
        for kind, look in ((plain, VIT), (gated, CONVIT)):
            both = [where(ds, **kind, taught=taught) for taught in (0, 1)]
            beside = -0.04 if look is VIT else 0.04
            _accuracies(ours, np.arange(2) + beside, np.stack([runs.accuracy.values for runs in both], axis=1), look)
            _by_layer(reach, *both, look)
        teacher = float(np.nanmean(ds.teacher_accuracy.values))
        ours.axhline(teacher, color=GREY, linestyle=":", linewidth=0.8)
        ours.annotate("teacher", (1.3, teacher), xytext=(0, 2), textcoords="offset points", ha="right", color=GREY)
        for (name, accuracies), color in zip(TABLE_4.items(), (VIT.color, VIT.color, CONVIT.color), strict=True):
            marker = CONVIT.marker if name.startswith("ConViT") else VIT.marker
            theirs.plot([0, 1], accuracies, color=color, marker=marker, markersize=4)
            # Of two that start close together one name stands below its line.
            below = name == "DeiT-B"
            theirs.annotate(
                name, (1, accuracies[1]), xytext=(6, 5 if below else -5 if name != "DeiT-S" else 0),
                textcoords="offset points", va="center", color=color,
            )  # fmt: skip
        reach.axhline(0, color=GREY, linewidth=0.6)
        ours.set_title(f"ours: {ds.attrs['data']}")
        theirs.set_title("published: ImageNet")
        reach.set_title("ours: with teacher less without")
        for ax, right in ((ours, 1.35), (theirs, 2.0)):
            ax.set_xticks([0, 1], ["without\nteacher", "with\nteacher"])
            ax.set_xlim(-0.3, right)
            ax.set_ylabel("test accuracy [%]")
        reach.set_xlabel("attention layer")
        reach.set_ylabel("change of nonlocality [patches]")
        reach.xaxis.set_major_locator(MaxNLocator(integer=True))
        handles = [
            Line2D([], [], color=look.color, marker=look.marker, markersize=4, label=look.label)
            for look in (VIT, CONVIT)
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=2)
        plain_reach, gated_reach = (
            float(where(ds, **kind, taught=0).layer_nonlocality.mean()) for kind in (plain, gated)
        )
        bars = f" Bars: 95 % t interval over {count} seeds; thin lines: single seeds." if count > 2 else ""
        figure.supxlabel(
            f"Published: one run each, networks of different size. Right: means over heads, within seeds; without a "
            f"teacher {plain_reach:.2f} (ViT) and {gated_reach:.2f} patches.\n{bars.strip()}",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _accuracies(ax: Axes, x: np.ndarray, seeds: np.ndarray, look: Look) -> None:
    """Without and with a teacher `(seed, 2)`."""
    mean, half_width = interval(seeds)
    ax.errorbar(
        x, mean, half_width if len(seeds) > 2 else None, color=look.color, marker=look.marker, markersize=4,
        elinewidth=0.7,
    )  # fmt: skip
    if len(seeds) > 1:
        ax.plot(x, seeds.T, color=look.color, linewidth=0.5, alpha=0.45)


def _by_layer(ax: Axes, alone: xr.Dataset, taught: xr.Dataset, look: Look) -> None:
    """What a teacher changes of the nonlocality of every layer, within seeds."""
    without, with_it = (runs.layer_nonlocality.transpose("run", "layer").values for runs in (alone, taught))
    mean, half_width = interval(with_it - without)
    beside = -0.06 if look is VIT else 0.06  # so that bars can be told apart
    ax.errorbar(
        np.arange(1, len(mean) + 1) + beside, mean, half_width if len(without) > 2 else None, color=look.color,
        marker=look.marker, markersize=4, elinewidth=0.7,
    )  # fmt: skip


STUDY = Study(
    name="dascoli/distillation",
    title="Accuracy and nonlocality of ViT and ConViT with a convolutional teacher",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
