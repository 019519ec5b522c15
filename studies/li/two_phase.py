"""Two-phase training: a convolutional network first, then attention that starts as the same function (Li et al. 2021).

Claims     L3: at equal epochs two phases give a more accurate ViT than training from scratch (published for CIFAR-100:
           78.74 % top-1 in 0.98 of the time; from scratch not known). L4: the hand-over loses nothing, and the second
           phase adds to what the convolutional network alone would reach.
Command    vitprobe run li/two_phase                         digits
           vitprobe run li/two_phase --scale cpu             5,000 images of CIFAR-10
           vitprobe run li/two_phase --scale paper --device cuda     CIFAR-100; --train-size 5000 for little data
Cost       Each seed takes two whole trainings and three of half their length. quick: 15 trainings of nano networks, 64
           s on two cores (measured); cpu: 1096 s on two cores with 15 trainings of micro networks of nine heads
           (measured, beside other work). paper: not measured.
Arms       All have nine heads, the same width and number of epochs, and share data, order and augmentation. "two
           phases": convolutional_vit for half of the epochs, then relative_vit, whose heads start by looking at the
           nine taps (logit 8); each phase has the recipe's whole schedule. "from scratch": relative_vit, which too has
           a ring of zero tokens around the image for its heads to look at, so that at the start about a third of its
           attention goes to nothing. "convolution": convolutional_vit. "convolution, twice": it goes on as itself after
           the first phase, with the same second schedule, so that it differs from two phases in the attention alone.
Rule       Set before anything was measured. Statistics are test accuracies of each seed. L3: two phases less from
           scratch, above zero. L4: after the hand-over less before it, above -0.5 percentage points; and two phases
           less convolution, and less convolution twice, above zero; all three decide, because either difference could
           be the restart of the learning rate alone. Supported if the 95 % t interval over seeds lies wholly on the
           claimed side, contradicted if one lies wholly on the other. A network that did not learn its task (35 % of
           ten classes) makes the comparisons inconclusive. Where no decision changes at the hand-over in any seed, the
           differences are all zero and six seeds are needed, as for all equal values. The time of training is told
           beside L3 and decides nothing: it is a wall time, and processes share the cores.
Expected   L3 supported on little data, since half of the training is a convolutional network's. The second half of L4
           is the honest test and may well come out as nothing or a loss. The accuracy by the recipe of
           scales.SMALL["cpu"], mean of seeds 0 to 2: 44.4 % two phases, 43.0 % from scratch, 44.6 % convolution, 44.0 %
           convolution twice.
"""

import sys
from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from studies.li.arms import ARMS, CONVOLUTION, SCRATCH, TWICE, TWO_PHASES, of_arm, outcome_of_both
from studies.outcomes import difference, if_learned, judge, part, watched, where
from studies.scales import LEAST
from vitprobe.claims import CLAIMS, Verdict, combine, decide
from vitprobe.figures.page import GREY, PAGE_WIDTH, interval, style
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

LOSS = -0.5  # percentage points that a hand-over may cost


def grid(settings: Settings) -> list[Run]:
    """The four arms, seed by seed."""
    return [run for arms in of_arm(settings) for run in arms.values()]


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """What came of both phases of one run, its accuracy along `epoch`, and the hand-over."""
    return outcome_of_both(run, settings)


# --- verdicts ---------------------------------------------------------------------------------------


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """L3, and L4 with its parts."""
    times = _mean(difference_ratio(ds, "seconds", TWO_PHASES, SCRATCH))
    l3 = gain(ds, "L3", SCRATCH, detail=f"in {times:.2f} of the wall time of training (published 0.98)")
    both = where(ds, arm=TWO_PHASES)
    gap, agreement = _mean(both.relative_gap.values), _mean(both.agreement.values)
    handed = if_learned(
        decide(
            part(CLAIMS["L4"], "hand-over", "The hand-over from convolution to attention loses no accuracy"),
            both.handed_accuracy.values - both.first_accuracy.values,
            threshold=LOSS,
            detail=f"logits {100 * gap:.2g} % of their norm apart, {100 * agreement:.4g} % of decisions alike",
        ),
        both.assign_coords(accuracy=both.first_accuracy),  # whose function is handed over
        LEAST,
    )
    adds = [
        gain(
            ds, "L4", other, name=f"less {other}", statement=f"The second phase adds accuracy: two phases less {other}"
        )
        for other in (CONVOLUTION, TWICE)
    ]
    return [l3, combine(CLAIMS["L4"], [handed, *adds]), handed, *adds]


def gain(ds: xr.Dataset, claim: str, other: str, *, name: str = "", statement: str = "", detail: str = "") -> Verdict:
    """The verdict on two phases being more accurate than another arm.

    Args:
        ds: stacked runs.
        claim: its id.
        other: the other arm.
        name: of the part of the claim; the whole unless given.
        statement: what the part says.
        detail: what else a reader must know.
    """
    whole = CLAIMS[claim]
    runs = ds.isel(run=np.flatnonzero(np.isin(ds.arm.values, (TWO_PHASES, other))))
    return judge(
        part(whole, name, statement) if name else whole,
        difference(ds, "accuracy", {"arm": TWO_PHASES}, {"arm": other}),
        "above",
        runs,
        least=LEAST,
        detail=detail,
    )


def difference_ratio(ds: xr.Dataset, variable: str, one: str, other: str) -> np.ndarray:
    """A variable of one arm over that of another, seed by seed."""
    first, second = (where(ds, arm=arm) for arm in (one, other))
    return np.asarray(first[variable].values / second[variable].values)


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values))


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Left: test accuracy along the epochs. Right: two phases less each other arm, and what the hand-over costs."""
    seeds = len(np.unique(ds.seed.values))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.0), layout="constrained")
        curves, gains = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
        _curves(curves, ds)
        _gains(gains, ds)
        handles, said = curves.get_legend_handles_labels()
        figure.legend(handles, said, loc="outside upper center", ncols=len(handles))
        seen = watched(ds, "Left and the hand-over", "other differences")
        spread = f"95 % t interval over {seeds} seeds" if seeds > 2 else "standard error over images"
        figure.supxlabel(
            f"Test images of {ds.attrs['data']}, {int(ds.train_images.values[0])} training images. Lines: means over "
            f"seeds; thin lines and small marks: single seeds. Bars: {spread}.\n{seen}",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _curves(ax: Axes, ds: xr.Dataset) -> None:
    first = int(where(ds, arm=TWO_PHASES).first_epochs.values[0])
    for arm, look in ARMS.items():
        # The same run as that of two phases up to the hand-over, which it would hide.
        curve = where(ds, arm=arm).test_accuracy.isel(epoch=slice(first - 1 if arm == TWICE else 0, None))
        values = 100 * curve.transpose("run", "epoch").values
        if len(values) > 1:
            ax.plot(curve.epoch, values.T, color=look.color, linewidth=0.5, alpha=0.4)
        ax.plot(
            curve.epoch, values.mean(0), color=look.color, marker=look.marker, markersize=2.8, label=look.label,
            zorder=3,
        )  # fmt: skip
    ax.axvline(first + 0.5, color=GREY, linewidth=0.7, linestyle="--")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="epochs of training (dashed: hand-over)", ylabel="test accuracy [%]")


def _gains(ax: Axes, ds: xr.Dataset) -> None:
    rows: Mapping[str, tuple[np.ndarray, np.ndarray]] = {
        ARMS[other].label: (
            difference(ds, "accuracy", {"arm": TWO_PHASES}, {"arm": other}),
            np.hypot(where(ds, arm=TWO_PHASES).error_se.values, where(ds, arm=other).error_se.values),
        )
        for other in (SCRATCH, CONVOLUTION, TWICE)
    }
    both = where(ds, arm=TWO_PHASES)
    handed = both.handed_accuracy.values - both.first_accuracy.values
    # Of the same images: only those on which the decision changed tell the two apart.
    changed = 100 * np.sqrt(np.maximum(1 - both.agreement.values, 0) / both.handed_images.values)
    rows = {**rows, "hand-over": (handed, changed)}
    colors = [ARMS[other].color for other in (SCRATCH, CONVOLUTION, TWICE)] + ["black"]
    for place, ((values, errors), color) in enumerate(zip(rows.values(), colors, strict=True)):
        half = interval(values[:, None])[1][0] if len(values) > 2 else float(errors.mean())
        ax.errorbar(values.mean(), place, xerr=half, color=color, marker="o", markersize=5, elinewidth=0.9, zorder=3)
        ax.scatter(values, np.full(len(values), place + 0.22), color=color, s=9, linewidths=0, alpha=0.7)
    ax.axvline(0, color=GREY, linewidth=0.6, zorder=1)
    ax.plot([LOSS, LOSS], [2.65, 3.45], color=GREY, linewidth=0.9, linestyle=":")
    labels = [f"less {label}" for label in list(rows)[:-1]] + [f"hand-over: after less\nbefore (dotted: {LOSS:g})"]
    ax.set_yticks(range(len(rows)), labels=labels)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set(xlabel="difference of test accuracy\n[percentage points]", title="two phases …")


STUDY = Study(
    name="li/two_phase",
    title="Two-phase training against training from scratch and convolution only",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
