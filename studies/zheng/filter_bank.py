"""Accuracy of a ConvMixer by the rank of its fixed filters (Zheng et al. 2024, Table 6).

Claim      Z2: the more linearly independent fixed Gaussian filters are (the narrower, and the more distinct ones), the
           better a ConvMixer does with them, and eight distinct filters are enough. Published for a ConvMixer-512/6 on
           CIFAR-10 over widths 10 to 0.01 and 512 to 2 distinct filters: about equal down to 8, lower with 4 and 2,
           higher the narrower; values not known.
Command    vitprobe run zheng/filter_bank                    digits, filters of 3, 2 widths x 3 numbers
           vitprobe run zheng/filter_bank --scale cpu --data cifar10       filters of 5, 3 widths, 3 numbers, 5 epochs
           vitprobe run zheng/filter_bank --scale paper --device cuda      filters of 5, 5 widths x 5 numbers
Cost       quick: 18 trainings, 47 s on two cores (measured); cpu: 15 trainings of 5 epochs, 479 s on two cores
           (measured); paper: 75 trainings of about half a GPU hour each (estimated). The grid is coarse at quick and
           cpu, for the sake of three seeds; at cpu it is a cross: all filters distinct at every width, and every number
           of them at the narrowest, so that (a) is over five cells.
Protocol   Filters are exp(-r^2 / 2s) around a place drawn at random, frozen, banks of the same mean squared norm; s is
           the variance [patches^2] that the published code calls sigma. Each layer draws its own filters, and each of
           its channels draws one of them, so that a layer may by chance hold fewer than it is given. Rank: the stable
           rank (sum of the squared singular values over the largest of them) of the bank as it is, channels by taps, by
           exact singular values, mean over layers; for 5 x 5 filters it goes from 1.0 (flat filters, or one filter) to
           about 12 for impulses in 96 channels. No augmentation.
Rule       Set before anything was measured. Of each seed: (a) the correlation, over the cells of the table, of the test
           accuracy with the logarithm of the stable rank, claimed to lie above 0.5 (not higher, because the claim
           itself says that the accuracy is flat where the rank still grows from 8 filters to all; and not of ranks,
           because over few cells all seeds may have the same one, which shows no spread to judge by); and at the
           narrowest width, where the filters differ most: (b) the accuracy of 8 distinct filters less that of all,
           above -2 points; (c) of 8 less that of 2, above zero. Z2 is supported if the 95 % t interval over seeds lies
           wholly on the claimed side for all three, contradicted if one lies wholly on the other. (b) and (c) change
           the rank at an equal shape, (a) both together: the narrowest less the widest at all distinct filters is
           judged beside it, above zero, and decides nothing. The network with all filters at the narrowest width must
           have learned its task (35 % of ten classes), or there is no verdict.
Expected   (a) and (c) supported at the cpu scale; (b) may need more than three seeds. At quick, digits may be so easy
           that the table is flat. The accuracy by the recipe of SMALL["cpu"] without augmentation and with 5 epochs,
           mean of seeds 0 to 2: all distinct 41.5 %, 45.8 % and 47.9 % for variances of 10, 1 and 0.1; of 0.1 also
           47.8 % with 8 filters and 46.7 % with 2.
"""

import sys
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from studies.outcomes import difference, judge, logarithmic, outcome, part, point, where
from studies.scales import LEAST, by_seed
from studies.zheng.shared import RECIPE, REFERENCES, convmixer, seeds_note
from vitprobe.claims import CLAIMS, Verdict, combine
from vitprobe.figures.page import GREY, PAGE_WIDTH, style
from vitprobe.probes import filter_statistics
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main


@dataclass(frozen=True)
class Table:
    """The cells at a scale.

    Attributes:
        variances: of the Gaussian filters [patches^2], from wide to narrow.
        distinct: numbers of distinct filters; `None` is one for each channel.
        changes: of the scale's recipe.
        cross: whether there are only the cells of all distinct filters and those of the narrowest width.
    """

    variances: tuple[float, ...]
    distinct: tuple[int | None, ...]
    changes: dict[str, int]
    cross: bool = False

    def cells(self) -> list[tuple[float, int | None]]:
        """Width and number of filters of every cell."""
        return [
            (variance, number)
            for variance in self.variances
            for number in self.distinct
            if not self.cross or number is None or variance == self.variances[-1]
        ]


TABLES = {
    "smoke": Table((10.0, 0.1), (None, 8, 2), {}),
    "quick": Table((10.0, 0.1), (None, 8, 2), {"epochs": 10}),
    "cpu": Table((10.0, 1.0, 0.1), (None, 8, 2), {"epochs": 5}, cross=True),
    "paper": Table((10.0, 1.0, 0.3, 0.1, 0.01), (None, 32, 8, 4, 2), {}),
}
ENOUGH, FEW = 8, 2  # distinct filters
CORRELATION, LITTLE = 0.5, 2.0  # of (a), and of (b) [percentage points]
MARKERS = ("o", "s", "^", "D", "v", "P")


def grid(settings: Settings) -> list[Run]:
    """The ConvMixer with every width and number of fixed filters, seed by seed."""
    table = TABLES[settings.scale]
    return [
        convmixer(run, settings, filters="gaussian", gaussian_variance=variance, distinct=distinct)
        for run in by_seed(settings, published=RECIPE, augment="none", **table.changes)
        for variance, distinct in table.cells()
    ]


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Accuracy of one trained network, and the stable rank of its filters, which the training left as they were."""
    result, ds = outcome(run, settings, references=REFERENCES)
    network: Any = result.model
    filters = filter_statistics(network, result.data.loader("test", batch_size=2))
    # The stem that makes the patches is a convolution too.
    ranks = filters.bank_stable_rank.values[[name.startswith("blocks.") for name in filters.layer_name.values]]
    described = {
        "variance": (run.options["gaussian_variance"], "variance of the Gaussian filters", "patches^2"),
        "distinct": (network.blocks[0].spatial[0].spec.distinct, "distinct filters of a layer", "1"),
        "channels": (network.head.in_features, "channels", "1"),
        "stable_rank": (float(ranks.mean()), "stable rank of the filters of a layer, mean over layers", "1"),
    }
    return ds.assign_coords({
        name: ((), value, {"long_name": text, "units": units}) for name, (value, text, units) in described.items()
    })


def together(ds: xr.Dataset) -> list[float]:
    """Of each seed, the correlation over the cells of accuracy and log stable rank; 0 where the accuracy is flat."""
    found = []
    for seed in np.unique(ds.seed.values):
        cells = where(ds, seed=seed)
        accuracy, rank = cells.accuracy.values, np.log2(cells.stable_rank.values)
        found.append(float(np.corrcoef(accuracy, rank)[0, 1]) if np.ptp(accuracy) else 0.0)
    return found


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """Z2, its three parts, and what the width does at all distinct filters."""
    wide, narrow, every = float(ds.variance.max()), float(ds.variance.min()), int(ds.distinct.max())
    best = where(ds, variance=narrow, distinct=every)

    def less(one: int, other: int) -> np.ndarray:
        return difference(
            ds, "accuracy", {"variance": narrow, "distinct": one}, {"variance": narrow, "distinct": other}
        )

    def claimed(name: str, statement: str, values: Any, threshold: float) -> Verdict:
        claim = part(CLAIMS["Z2"], name, statement, published="the order only")
        return judge(claim, values, "above", best, threshold=threshold, least=LEAST)

    deciding = [
        claimed("rank", "accuracy and stable rank rise together over the table", together(ds), CORRELATION),
        claimed("8-all", "8 distinct filters lose less than 2 points against all", less(ENOUGH, every), -LITTLE),
        claimed("8-2", "8 distinct filters do better than 2", less(ENOUGH, FEW), 0.0),
    ]
    by_width = difference(
        ds, "accuracy", {"variance": narrow, "distinct": every}, {"variance": wide, "distinct": every}
    )
    beside = claimed("width", "the narrowest filters do better than the widest, all distinct", by_width, 0.0)
    return [combine(CLAIMS["Z2"], deciding), *deciding, beside]


def draw(ds: xr.Dataset) -> Figure:
    """Accuracy by the number of distinct filters and by the rank of the bank, a colour for each width."""
    variances = np.unique(ds.variance.values)[::-1]
    numbers = np.unique(ds.distinct.values)[::-1]
    colors = dict(zip(variances, matplotlib.colormaps["viridis"](np.linspace(0.85, 0.0, len(variances))), strict=True))
    markers = dict(zip(numbers, MARKERS, strict=False))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for place, variance in enumerate(variances):
            beside = 1.05 ** (place - (len(variances) - 1) / 2)  # so that the widths' bars do not hide each other
            there = np.unique(where(ds, variance=variance).distinct.values)[::-1]
            means = [where(ds, variance=variance, distinct=number).accuracy.values.mean() for number in there]
            left.plot(beside * there, means, color=colors[variance], linewidth=0.9, zorder=2)
            for number in there:
                cell = where(ds, variance=variance, distinct=number)
                look = {"color": colors[variance], "marker": markers[number]}
                error = (np.full(cell.sizes["run"], np.nan), cell.error_se.values)
                for ax, x in ((left, beside * cell.distinct.values), (right, cell.stable_rank.values)):
                    point(ax, x, cell.accuracy.values, errors=error, **look)
        _logarithmic(left, [float(number) for number in numbers])
        _logarithmic(right, [1.0, 2.0, 4.0, 8.0, 16.0], limit=float(ds.stable_rank.max()))
        low, high = float(ds.accuracy.min()), float(ds.accuracy.max())
        margin = 0.1 * ((high - low) or 1.0)
        left.set_ylim(low - margin, high + margin)
        left.set_ylabel("test accuracy [%]")
        left.set_xlabel("distinct filters in a layer")
        right.set_xlabel("stable rank of a layer's filters, mean over layers")
        right.set_title("correlation, mean of seeds: " + f"{np.mean(together(ds)):.2f}".replace("-", "−"))
        widths = [Line2D([], [], color=colors[value], label=f"variance {value:g} patches²") for value in variances]
        counts = [
            Line2D([], [], color=GREY, marker=markers[number], linestyle="none", label=f"{number} filters")
            for number in numbers
        ]
        # A legend is filled column by column: widths above, numbers below.
        empty = Line2D([], [], linestyle="none", label=" ")
        columns = list(zip_longest(widths, counts, fillvalue=empty))
        figure.legend(
            handles=[handle for column in columns for handle in column], loc="outside upper center", ncols=len(columns)
        )
        figure.supxlabel(seeds_note(ds), fontsize=6.5, color=GREY)
    return figure


def _logarithmic(ax: Axes, ticks: list[float], limit: float = np.inf) -> None:
    """A logarithmic axis that names these values, up to the first beyond a limit."""
    shown = [tick for tick in ticks if tick < 2 * limit]
    logarithmic(ax, shown)


STUDY = Study(
    name="zheng/filter_bank",
    title="Test accuracy of ConvMixers by width and number of their fixed filters",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
