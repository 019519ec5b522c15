"""What each part of a ConViT gives when data are few: seven ablations (d'Ascoli et al. 2021, Table 3).

Claim      D7: with few data a ConViT (a) beats a ViT (e), even if its attention stays frozen at the convolutional start
           (f), but not at a random one (g). Published for ConViT-S+ on 10 % of ImageNet: 59.7, 47.8, 54.3 and 44.8 %;
           gates fixed (b) 57.4, random start (c) 56.9, both (d) 54.6 %. With all data f is below e, and c below d.
Command    vitprobe run dascoli/ablations                    digits
           vitprobe run dascoli/ablations --scale cpu        5,000 images of CIFAR-10, a tenth of it
           vitprobe run dascoli/ablations --scale paper --device cuda       CIFAR-100, a tenth and all of it
Cost       quick: 21 trainings of nano networks, 114 s on two cores (measured); 6 of them are those of
           dascoli/sample_efficiency. cpu: 42 trainings of micro networks, 12 of them shared likewise: 2052 s on two
           cores for 15 of those with a tenth of the images (measured, beside other work), which are watched on 2,000
           test images after each of their 80 epochs. paper: 42 trainings of ConViT-S+ and DeiT-S+, not measured.
Rule       Set before anything was measured, for the scale's images; the tenth of them was added to the cpu scale when
           5,000 images had been seen to be limited by their 8 epochs rather than by how few they are, and before it was
           measured (but for a and e, which other studies had). Of each seed the differences a - e, f - e and e - g of
           test accuracy, at the smallest share of the data. D7 is supported if the 95 % t intervals over seeds of all
           three lie wholly above zero, contradicted if one lies wholly below. Where a, e or f did not learn its task
           (35 % of ten classes, 15 % with a tenth of the images), the differences that it is in are inconclusive; of g
           that is not asked. Judged beside it, without deciding: Kendall's tau of the accuracies with the published
           order a > b > c > d > f > e > g, above zero; and what gating (d - e), gates that start at 0.73 and train
           instead of gates fixed at a half (c - d), the convolutional start (b - d) and both (a - d) give. All of these
           at the scale's full data too, which decides nothing, where there is a tenth.
Networks   All have the same heads, width and recipe. Gates are fixed at 0, half content and half position, as in the
           paper. Frozen is the whole attention of the gated layers, values and projection as well; the last layers have
           plain attention, which is trained. In the smaller networks e differs from d by its attention alone; at the
           paper scale its class token also goes through all layers. The paper trains ten times as many epochs on a
           tenth of the data; so do the cpu and the paper scale.
Expected   f > e > g and a > e by several points, the other parts within the spread of three seeds. Published deltas:
           6.8 (d - e), 2.3 (c - d), 2.8 (b - d), 5.1 (a - d), 6.5 (f - e) points. The accuracy by the recipe of
           scales.SMALL["cpu"], mean of seeds 0 to 2: with all images 42.3 % ConViT (a), 41.8 % (b), 41.1 % (c), 41.4 %
           (d), 41.2 % ViT (e), 40.3 % (f), 37.7 % (g); with a tenth 33.7 % (a), 32.4 % (b), 31.9 % (c), 30.5 % (d),
           29.0 % (e), 30.8 % (f), 29.4 % (g).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import kendalltau

from studies.dascoli.pair import ABOVE_CHANCE, CONVIT, REFERENCES, VIT, convit, seeds, vit
from studies.dascoli.published import TABLE_3
from studies.outcomes import difference, judge, outcome, part, where
from studies.scales import LEAST
from vitprobe.claims import CLAIMS, Verdict, combine
from vitprobe.figures.page import GREY, PAGE_WIDTH, interval, style
from vitprobe.runs import Run, load
from vitprobe.study import Settings, Study, main


@dataclass(frozen=True)
class Row:
    """A row of Table 3.

    Attributes:
        name: what it is.
        parts: whether it trains its gates, starts as a convolution, trains the gated attention, and has it at all.
        options: of the ConViT; the ViT has none.
    """

    name: str
    parts: tuple[bool, bool, bool, bool]
    options: dict[str, Any] | None


_FIXED = {"gate": 0.0, "train_gate": False}
_FROZEN = {**_FIXED, "train_gpsa": False}
ROWS = {
    "a": Row("ConViT", (True, True, True, True), {}),
    "b": Row("gates fixed", (False, True, True, True), _FIXED),
    "c": Row("random start", (True, False, True, True), {"local": False}),
    "d": Row("fixed and random", (False, False, True, True), {**_FIXED, "local": False}),
    "e": Row("ViT", (False, False, False, False), None),
    "f": Row("frozen convolution", (False, True, False, True), _FROZEN),
    "g": Row("frozen random", (False, False, False, True), {**_FROZEN, "local": False}),
}
PARTS = ("train gates", "convolutional start", "train gated attention", "gated attention")
ORDER = "abcdfeg"  # of the published accuracies with few data, the best first
DECIDING = {"ae": "a ConViT beats a ViT", "fe": "frozen at the convolutional start it beats a ViT",
            "eg": "frozen at a random start it does not"}  # fmt: skip
BESIDE = {
    "de": "gated attention helps",
    "cd": "gates that start at 0.73 and train do better than gates fixed at a half",
    "bd": "the convolutional start helps",
    "ad": "both together help",
}
SHARES: dict[str, Sequence[float]] = {"cpu": (0.1, 1.0), "paper": (0.1, 1.0)}  # else the scale's images


def grid(settings: Settings) -> list[Run]:
    """The seven rows, seed by seed; where the scale has shares of its images, for each, at equally many seen."""
    found = []
    for base in seeds(settings):
        for share in SHARES.get(settings.scale, (1.0,)):
            of_share = shared_out(base, share)
            for row in ROWS.values():
                run = vit(of_share, settings) if row.options is None else convit(of_share, settings, **row.options)
                # The whole ConViT and the ViT are those of other studies, which want their snapshots.
                found.append(run if row.options in (None, {}) else _plain(run))
    return found


def shared_out(run: Run, share: float) -> Run:
    """The run with a share of its images and as many images seen in all; without snapshots unless it has them all.

    Args:
        run: with all images of its scale.
        share: above 0, at most 1.
    """
    if share == 1:
        return run
    data = replace(run.data, train_size=round(share * len(load(run.data).train)))
    return _plain(replace(run, data=data, recipe=run.recipe.stretched(share)))


def _plain(run: Run) -> Run:
    return replace(run, recipe=replace(run.recipe, snapshots=()))


def row_of(run: Run) -> str:
    """The letter of a run's row in Table 3."""
    if run.model.startswith("vit"):
        return "e"
    options = {name: value for name, value in run.options.items() if name in {*_FROZEN, "local"}}
    return next(letter for letter, row in ROWS.items() if row.options == options)


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Accuracy of one trained network, and which row it is."""
    _, ds = outcome(run, settings, references=REFERENCES)
    return ds.assign_coords(row=((), row_of(run), {"long_name": "row of Table 3"}))


# --- verdicts ---------------------------------------------------------------------------------------


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """D7 by the fewest data; its parts, the other differences and the order, also by all of them where there are."""
    few, whole = int(ds.train_images.min()), int(ds.train_images.max())
    found: dict[str, Verdict] = {}
    for images in np.unique(ds.train_images.values):
        runs = where(ds, train_images=images)
        column, said = (1, "") if images == few else (0, " full")
        least = LEAST if images == whole else ABOVE_CHANCE
        for pair, statement in {**DECIDING, **BESIDE}.items():
            found[pair + said] = _difference(runs, pair, statement, column, said, least)
        claim = part(
            CLAIMS["D7"],
            f"order{said}",
            "the ablations have the published order a > b > c > d > f > e > g: Kendall's tau",
            published=f"{tau([TABLE_3[letter][column] for letter in ORDER]):.2f}",
        )
        learners = runs.isel(run=np.isin(runs.row.values, ["a", "e"]))
        found[f"order{said}"] = judge(claim, taus(runs), "above", learners, least=least)
    return [combine(CLAIMS["D7"], [found[pair] for pair in DECIDING]), *found.values()]


def _difference(runs: xr.Dataset, pair: str, statement: str, column: int, said: str, least: float) -> Verdict:
    one, other = pair[0], pair[1]
    values = -difference(runs, "error", {"row": one}, {"row": other})
    learners = runs.isel(run=np.isin(runs.row.values, [letter for letter in pair if letter != "g"]))
    published = TABLE_3[one][column] - TABLE_3[other][column]
    claim = part(
        CLAIMS["D7"], f"{one}-{other}{said}", f"{statement} ({one} > {other})", published=f"{published:+.1f} points"
    )
    losses = [float(where(runs, row=letter).nll_clean.mean()) for letter in pair]
    images = int(runs.train_images.values[0])
    detail = f"{images:,} training images, whose loss ends at {losses[0]:.2f} and {losses[1]:.2f} nats"
    return judge(claim, values, "above", learners, least=least, detail=detail)


def tau(accuracies: Sequence[float]) -> float:
    """Kendall's tau-b of accuracies, in the order of `ORDER`, with that order; 0 where all are equal."""
    found = float(kendalltau(accuracies, range(len(accuracies), 0, -1)).statistic)
    return found if np.isfinite(found) else 0.0


def taus(runs: xr.Dataset) -> list[float]:
    """Kendall's tau with the published order, of each seed that has all rows."""
    found = []
    for seed in np.unique(runs.seed.values):
        of_seed = where(runs, seed=seed)
        by_row = dict(zip(of_seed.row.values.tolist(), of_seed.accuracy.values.tolist(), strict=True))
        if len(by_row) == len(ORDER):
            found.append(tau([by_row[letter] for letter in ORDER]))
    return found


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Table 3 as a picture: which parts each row has, our accuracies, and the published ones."""
    shares = np.unique(ds.train_images.values)
    count = len(np.unique(ds.seed.values))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 2.9), layout="constrained")
        widths = [1.5, *[2.2] * len(shares), 2.2]
        marks, *ours, theirs = figure.subplots(1, 2 + len(shares), sharey=True, width_ratios=widths)
        _marks(marks)
        for ax, images in zip(ours, shares, strict=True):
            _accuracies(ax, where(ds, train_images=images))
            ax.set_title(f"ours: {ds.attrs['data']}\n{images:,} images")
        for column, filled, label in ((1, True, "10 % of the images"), (0, False, "all images")):
            for place, letter in enumerate(ROWS):
                color, marker = _look(letter)
                theirs.plot(
                    TABLE_3[letter][column], place, marker, color=color, markersize=5,
                    markerfacecolor=color if filled else "white", linestyle="none",
                )  # fmt: skip
            theirs.plot([], [], "o", color=GREY, markerfacecolor=GREY if filled else "white", label=label)
        theirs.set_title("published: ImageNet\nConViT-S+")
        theirs.set_xlim(theirs.get_xlim()[0] - 1, theirs.get_xlim()[1] + 1)
        for ax in (*ours, theirs):
            ax.set_xlabel("test accuracy [%]")
            ax.grid(axis="y", color="0.9", linewidth=0.6)
            ax.tick_params(axis="y", length=0)
        handles, labels = theirs.get_legend_handles_labels()
        figure.legend(handles, labels, title="published", loc="outside upper right", ncols=2, handletextpad=0.2)
        bars = f" Bars: 95 % t interval over {count} seeds (cut at the frame)." if count > 2 else ""
        figure.supxlabel(
            "Squares: filled where a row has the part. e is the ViT, f and g keep their gated attention as it starts.\n"
            f"Published: one run each.{bars}{' Small marks: single seeds.' * (count > 1)}",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _look(letter: str) -> tuple[str, str]:
    """The ViT in its colour, the ConViT and its ablations in theirs."""
    look = VIT if letter == "e" else CONVIT
    return look.color, look.marker


def _marks(ax: Axes) -> None:
    """Which parts each row has: filled."""
    for place, row in enumerate(ROWS.values()):
        for column, has in enumerate(row.parts):
            ax.plot(column, place, "s", color=GREY, markersize=4.5, markerfacecolor=GREY if has else "white")
    ax.set_yticks(range(len(ROWS)), [f"{letter}  {row.name}" for letter, row in ROWS.items()])
    ax.set_ylim(len(ROWS) - 0.5, -0.5)
    ax.set_xticks(range(len(PARTS)), PARTS, rotation=35, ha="right", rotation_mode="anchor")
    ax.set_xlim(-0.5, len(PARTS) - 0.5)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _accuracies(ax: Axes, runs: xr.Dataset) -> None:
    """Mean, interval and single seeds of every row."""
    for place, letter in enumerate(ROWS):
        values = where(runs, row=letter).accuracy.values
        if not len(values):
            continue
        color, marker = _look(letter)
        mean, half_width = (float(numbers[0]) for numbers in interval(values[:, None]))
        if len(values) > 2:
            ax.errorbar(mean, place, xerr=half_width, color=color, elinewidth=0.8, zorder=2)
        if len(values) > 1:
            beside = np.linspace(-0.16, 0.16, len(values))
            ax.scatter(values, place + beside, s=6, color=color, marker=marker, alpha=0.5, linewidths=0, zorder=3)
        ax.plot(mean, place, marker, color=color, markersize=5, markeredgecolor="white", markeredgewidth=0.4, zorder=4)
    low, high = float(runs.accuracy.min()), float(runs.accuracy.max())
    margin = 0.15 * ((high - low) or 1.0)
    ax.set_xlim(low - margin, high + margin)


STUDY = Study(
    name="dascoli/ablations",
    title="Accuracy of a ConViT with parts of it left out, on few data",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
