"""Attention maps that stay as they were initialised (Zheng et al. 2024, Table 2).

Claim      Z6: maps frozen as drawn at random are very bad, maps frozen at impulses are good. Published for CIFAR-10
           without augmentation: impulse ahead of random by 26 and 29 points with queries and keys frozen (with and
           without values, which is which is not certain), by about 2 with both trained.
Command    vitprobe run zheng/frozen                         digits, 4 x 4 tokens
           vitprobe run zheng/frozen --scale cpu             CIFAR-10, 8 x 8 tokens, 5,000 images
           vitprobe run zheng/frozen --scale paper --device cuda
Cost       quick: 33 trainings, 146 s on two cores (measured). cpu: 18 trainings, three of them shared with
           zheng/architectures: 1366 s on two cores for 15 of them, 6 minutes with the other three (measured, beside
           other work). paper: 81 trainings, not measured.
Networks   Data-free maps: Model II, whose queries and keys see the position code alone. Mixed maps: Model I, half
           tokens, half code. Nine heads, as many as a 3 x 3 kernel has taps, drawn with replacement as published (eight
           and 5 x 5 at the paper scale). Impulses are as in zheng/initialisations.py.
Rule       Set before anything was measured. Of each seed, with data-free maps and values: the test accuracy of impulse
           less that of random, both frozen, in shares of the accuracy above chance of random trained maps, has a 95 % t
           interval over seeds wholly above 0.16 (very bad; 10 points of a network of 72 %), and the gain of frozen
           impulses over frozen random maps is wholly above half of the gain of trained impulses (good); contradicted if
           one of the two lies wholly below. Random maps as a network begins with them are nearly uniform, so that blur
           and lack of locality are confounded. Two controls are judged beside it: impulses as sharp that lie anywhere
           within 7 x 7 tokens (cpu and paper scale), compared with impulses at all nine taps near the query, because
           those drawn with replacement look to about six different places near it and to about nine far from it (and
           more of the far ones lie beyond the border, where queries look anywhere; the nine different taps were added
           when the others had been measured), and random maps as sharp, by a larger scale of the softmax (quick and
           paper), whose queries see the same few tokens, so that tokens are lost as well. So are the gap of trained
           maps and, at the quick and paper scale, maps without values, mixed maps, for which the paper finds no gap,
           and mimetic ones; none of these decides. Patches of 4 pixels see more by themselves than the published ones
           of 2, so that frozen random maps leave less to gain: what training gives to random maps is said beside the
           gap. A network with trained maps that did not learn its task (35 % of ten classes) makes it inconclusive; one
           with frozen maps does not, because that is what is claimed.
Expected   Z6 supported: without local maps the network is a bag of patches. The accuracy by the recipe of
           scales.SMALL["cpu"], mean of seeds 0 to 2: trained 53.0 % random and 52.4 % impulse, frozen 43.3 % random,
           46.4 % impulse, 47.7 % far and 46.8 % all taps.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from studies.outcomes import Look, difference, judge, outcome, part, where
from studies.scales import LEAST, by_seed, sized
from studies.zheng.initialisations import LOOKS, initialisers
from studies.zheng.shared import NINE_HEADS, of_reference
from vitprobe.claims import CLAIMS, Direction, Verdict, combine
from vitprobe.figures.page import GREY, PAGE_WIDTH, interval, style
from vitprobe.intervals import mean_interval
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

REFERENCES = "Zheng et al. 2024, arXiv:2401.12511"
SPIKES = "random, sharp"
# Softmax scale of random maps whose largest attention is about that of the impulses: 0.93, and 0.44 at the paper scale.
SCALES = {"quick": 100.0, "paper": 10.0}
FAR, AWAY = "impulse, far", 7  # impulses as sharp, anywhere in a kernel of so many tokens
# Heads draw their taps with replacement: of nine, about six are different near the query, and about nine far from it.
DIFFERENT = "impulse, all taps"
GAP, GOOD = 0.16, 0.5  # shares of what random trained maps learn, and of what trained impulses gain
ALL_LOOKS = {
    **LOOKS,
    SPIKES: Look(SPIKES, "#CC79A7", "D"),
    FAR: Look(FAR, "#009E73", "v"),
    DIFFERENT: Look(DIFFERENT, "#E69F00", "P"),
}
# Gaps of impulse and random on CIFAR-10 without augmentation: Table 2, by a published summary.
PUBLISHED = {"frozen": (26.0, 29.0), "trained": (2.0,)}


@dataclass(frozen=True)
class Cell:
    """A cell of the table.

    Attributes:
        initialisation: a key of `ALL_LOOKS`.
        query_key: `"trained"` or `"frozen"`.
        maps: `"data-free"` or `"mixed"`.
        value: `"with"` values or `"without"`.
    """

    initialisation: str
    query_key: str = "frozen"
    maps: str = "data-free"
    value: str = "with"


_NEEDED = [Cell(name, query_key) for query_key in ("trained", "frozen") for name in ("random", "impulse")]
_SHARP = Cell(SPIKES)
CELLS = {
    "smoke": _NEEDED,
    "quick": [
        *_NEEDED,
        *(Cell("mimetic", query_key) for query_key in ("trained", "frozen")),
        *(Cell(name, value="without") for name in ("random", "impulse")),
        *(Cell(name, maps="mixed") for name in ("random", "impulse")),
        _SHARP,
    ],
    "cpu": [*_NEEDED, Cell(FAR), Cell(DIFFERENT)],
    "paper": [
        *(
            Cell(name, query_key, maps, value)
            for maps, value, query_key, name in product(
                ("data-free", "mixed"), ("with", "without"), ("trained", "frozen"), LOOKS
            )
        ),
        _SHARP,
        Cell(FAR),
        Cell(DIFFERENT),
    ],
}


def grid(settings: Settings) -> list[Run]:
    """The cells of the table, seed by seed."""
    runs = by_seed(settings, published="zheng_noaug", augment="none")
    return [_with(run, cell, settings) for run in runs for cell in CELLS[settings.scale]]


def _with(run: Run, cell: Cell, settings: Settings) -> Run:
    name = "model_2" if cell.maps == "data-free" else "model_1"
    options: dict[str, Any] = {**NINE_HEADS[settings.scale], **({"depth": 1} if settings.scale == "smoke" else {})}
    if cell.query_key == "frozen":
        options["train_query_key"] = False
    if cell.value == "without":
        options["use_value"] = False
    if cell.initialisation == SPIKES:
        return replace(run, model=sized(name, settings), options=options | {"scale": SCALES[settings.scale]})
    if cell.initialisation in (FAR, DIFFERENT):
        (usual,) = initialisers("impulse", settings).values()
        changed = {"kernel_size": AWAY} if cell.initialisation == FAR else {"sampling": "without replacement"}
        written: Mapping[str, Mapping[str, Any]] = {"impulse_": {**usual, **changed}}
    else:
        written = initialisers(cell.initialisation, settings, tokens=cell.maps == "mixed")
    return replace(run, model=sized(name, settings), options=options, initialisers=written)


def cell_of(run: Run) -> Cell:
    """The cell that a run is in."""
    written = next(iter(run.initialisers), "")
    named = written.removesuffix("_") or (SPIKES if "scale" in run.options else "random")
    options = run.initialisers.get(written, {})
    if options.get("kernel_size") == AWAY:
        named = FAR
    elif "sampling" in options:
        named = DIFFERENT
    return Cell(
        named,
        "trained" if run.options.get("train_query_key", True) else "frozen",
        "data-free" if run.model.startswith("model_2") else "mixed",
        "with" if run.options.get("use_value", True) else "without",
    )


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Test accuracy of one trained network, and which cell it is in."""
    ds = outcome(run, settings, references=REFERENCES)[1]
    said = {
        "initialisation": "initialisation of queries and keys",
        "query_key": "whether queries and keys are trained",
        "maps": "what queries and keys see: the position code, or tokens and code",
        "value": "with or without a value projection",
    }
    cell = vars(cell_of(run))
    return ds.assign_coords({name: ((), cell[name], {"long_name": text}) for name, text in said.items()})


@dataclass(frozen=True)
class _Test:
    """One comparison within seeds, and the side of the threshold that is claimed.

    Attributes:
        name: of the part.
        statement: what it says.
        published: its value.
        one: a cell.
        other: the cell that it is compared with.
        threshold: of the difference, in shares of what random trained maps have above chance.
        direction: the side that is claimed.
    """

    name: str
    statement: str
    published: str
    one: Cell
    other: Cell
    threshold: float
    direction: Direction = "above"


_POINTS = "26 or 29 percentage points, a share of about 0.4"
_TESTS = (
    _Test(
        "frozen", "frozen impulse maps do much better than frozen random maps", _POINTS,
        Cell("impulse"), Cell("random"), GAP,
    ),
    _Test(
        "trained", "trained maps do better if they start as impulses", "about 2 percentage points",
        Cell("impulse", "trained"), Cell("random", "trained"), 0.0,
    ),
    _Test(
        "without values", "without values, frozen impulse maps do much better than frozen random maps",
        _POINTS, Cell("impulse", value="without"), Cell("random", value="without"), GAP,
    ),
    _Test(
        "mixed", "frozen maps of tokens and code do not do much better for being impulses of the code",
        "impulse not ahead; value not known", Cell("impulse", maps="mixed"), Cell("random", maps="mixed"), GAP, "below",
    ),
    _Test(
        "mimetic", "frozen impulse maps do better than frozen mimetic maps", "impulse ahead; value not known",
        Cell("impulse"), Cell("mimetic"), 0.0,
    ),
    _Test(
        "sharp", "frozen impulse maps do much better than random maps that are as sharp", "not published",
        Cell("impulse"), _SHARP, GAP,
    ),
    _Test(
        "near", "frozen impulses at all taps near their query do better than ones anywhere within 7 x 7 tokens",
        "not published", Cell(DIFFERENT), Cell(FAR), 0.0,
    ),
    _Test(
        "taps", "frozen impulses at all nine taps do better than at nine that are drawn with replacement",
        "not published", Cell(DIFFERENT), Cell("impulse"), 0.0,
    ),
)  # fmt: skip
_REFERENCE = Cell("random", "trained")


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """Z6; beside it trained maps, maps without values, mixed and mimetic maps, and sharp random and far ones."""
    learners = where(ds, query_key="trained")

    room, low, high = mean_interval(difference(ds, "accuracy", vars(_REFERENCE), vars(Cell("random"))))
    beside = f"; random maps gain {room:.1f} [{low:.1f}, {high:.1f}] points by training"

    def judged(test: _Test, values: np.ndarray, more: str = "") -> Verdict:
        claim = part(CLAIMS["Z6"], test.name, test.statement, published=test.published)
        points = difference(ds, "accuracy", vars(test.one), vars(test.other)).mean()
        return judge(
            claim, values, test.direction, learners, threshold=test.threshold, least=LEAST,
            detail=f"{_mean(ds, test.one):.1f} against {_mean(ds, test.other):.1f} %, {points:+.1f} points"
            + beside * (test.name == "frozen") + more,
        )  # fmt: skip

    parts = {}
    for test in _TESTS:
        values = of_reference(ds, vars(_REFERENCE), vars(test.one), vars(test.other))
        if values.size:
            parts[test.name] = judged(test, values)
    good = _Test(
        "good", "frozen impulse maps recover half of what trained ones have beyond frozen random maps [points above]",
        "not known",
        Cell("impulse"), Cell("impulse", "trained"), 0.0,
    )  # fmt: skip
    pairs = [vars(Cell("impulse")), vars(Cell("impulse", "trained"))]
    gain, most = (difference(ds, "accuracy", one, vars(Cell("random"))) for one in pairs)
    recovered = f"; recovered: {gain.mean() / most.mean():.2f} of {most.mean():.1f} points" if most.mean() else ""
    parts["good"] = judged(good, gain - GOOD * most, recovered)
    return [combine(CLAIMS["Z6"], [parts[name] for name in ("frozen", "good")]), *parts.values()]


def _mean(ds: xr.Dataset, cell: Cell) -> float:
    return float(where(ds, **vars(cell)).accuracy.mean())


def draw(ds: xr.Dataset) -> Figure:
    """Accuracy of every cell, and the gap of impulse and random beside the published one."""
    combinations = list(dict.fromkeys(zip(ds.maps.values.tolist(), ds.value.values.tolist(), strict=True)))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.1), layout="constrained")
        places = figure.add_gridspec(1, len(combinations) + 1, width_ratios=[*[1.0] * len(combinations), 1.5])
        first = None
        for column, (maps, value) in enumerate(combinations):
            ax = figure.add_subplot(places[0, column], sharey=first)
            ax.tick_params(labelleft=first is None)
            first = first or ax
            _cells(ax, where(ds, maps=maps, value=value))
            ax.set_title(f"{maps} maps\n{value} values")
        figure.axes[0].set_ylabel("test accuracy [%]")
        _gaps(figure.add_subplot(places[0, -1]), ds, combinations)
        marks = [
            Line2D(
                [], [], color=GREY, marker="o", linestyle="none", markerfacecolor=face, label=f"queries and keys {word}"
            )
            for word, face in (("trained", GREY), ("frozen", "white"))
        ]
        figure.legend(handles=marks, loc="outside upper center", ncols=2, handletextpad=0.2)
        seeds = len(np.unique(ds.seed.values))
        bars = f"95 % t interval over {seeds} seeds" if seeds > 2 else "standard error over images"
        figure.supxlabel(
            f"{ds.attrs['data']}, no augmentation. Differences within seeds. Bars: {bars}; small marks: single seeds. "
            f"Published: CIFAR-10, one run each.\nDotted: what the rule asks of frozen maps, {GAP:g} of the "
            "reference's accuracy above chance.",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _cells(ax: Axes, runs: xr.Dataset) -> None:
    """Initialisations side by side, trained and frozen."""
    present = runs.initialisation.values.tolist()
    names = [name for name in ALL_LOOKS if name in present]
    for place, name in enumerate(names):
        look = ALL_LOOKS[name]
        for query_key, shift in (("trained", -0.15), ("frozen", 0.15)):
            chosen = where(runs, initialisation=name, query_key=query_key)
            if chosen.sizes["run"]:
                filled = query_key == "trained"
                error = float(chosen.error_se.mean())
                _mark(ax, place + shift, chosen.accuracy.values, error, look=look, filled=filled)
    ax.set_xticks(range(len(names)), labels=[name.replace(", ", ",\n") for name in names], rotation=35)
    ax.set_xlim(-0.6, len(names) - 0.4)


def _mark(
    ax: Axes, place: float, values: np.ndarray, error: float, *, look: Look, filled: bool, upright: bool = True
) -> None:
    """Mean, bar and seeds of one cell, at a place along the axis of cells."""
    half_width = float(interval(values[:, None])[1][0]) if len(values) > 2 else error
    mean = float(values.mean())
    ax.errorbar(
        *((place, mean) if upright else (mean, place)),
        xerr=None if upright else half_width, yerr=half_width if upright else None, color=look.color,
        marker=look.marker, markersize=5.5, markerfacecolor=look.color if filled else "white", elinewidth=0.8,
        linestyle="none", zorder=3,
    )  # fmt: skip
    if len(values) > 1:
        places = np.full(len(values), place)
        aside = ScaledTranslation(5 / 72 * upright, -5 / 72 * (not upright), ax.figure.dpi_scale_trans)
        x, y = (places, values) if upright else (values, places)
        ax.scatter(x, y, s=6, color=look.color, alpha=0.5, linewidths=0, zorder=4, transform=ax.transData + aside)


def _gaps(ax: Axes, ds: xr.Dataset, combinations: Sequence[tuple[str, str]]) -> None:
    """Impulse less random, within seeds, and what is published."""
    labels = [f"{maps}\n{value} values" for maps, value in combinations]
    rows: Mapping[str, tuple[float, bool]] = {"trained": (-0.15, True), "frozen": (0.15, False)}
    for query_key, (shift, filled) in rows.items():
        for place, (maps, value) in enumerate(combinations):
            pair = [Cell(name, query_key, maps, value) for name in ("impulse", "random")]
            values = difference(ds, "accuracy", vars(pair[0]), vars(pair[1]))
            if values.size:
                error = float(np.hypot(*(where(ds, **vars(cell)).error_se.mean() for cell in pair)))
                look = LOOKS["impulse"]
                _mark(ax, place + shift, values, error, look=look, filled=filled, upright=False)
        for published in PUBLISHED[query_key]:
            ax.plot(
                published, len(combinations) + shift, "D", color=GREY, markersize=5,
                markerfacecolor=GREY if filled else "white",
            )  # fmt: skip
    ax.axvline(0, color=GREY, linewidth=0.6, zorder=1)
    gap = GAP * (_mean(ds, _REFERENCE) - 100 / ds.attrs["classes"])
    ax.axvline(gap, color=GREY, linewidth=0.6, linestyle=":", zorder=1)
    ax.set_yticks(range(len(labels) + 1), labels=[*labels, "published"])
    ax.set_ylim(len(labels) + 0.5, -0.5)
    ax.set_title(f"impulse less random\n(dotted: {gap:.1f} points)")
    ax.set_xlabel("difference of accuracy\n[percentage points]")


STUDY = Study(
    name="zheng/frozen",
    title="Test accuracy with attention maps frozen and trained, by their initialisation",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
