"""Test accuracy over training, by share of the images and with parts left out (d'Ascoli et al. 2021, Fig. 11 and 12).

Figure     Left, as Fig. 11: ConViT against ViT for every share of the images. Right, as Fig. 12: the seven rows of
           Table 3, ConViTs with parts left out. The abscissa counts images seen, in passes over all of them: where the
           images are a tenth, ten epochs are one pass, and all networks end at the same place.
Command    vitprobe run dascoli/learning_curves                    digits
           vitprobe run dascoli/learning_curves --scale cpu        5,000 images of CIFAR-10 and a tenth of them
           vitprobe run dascoli/learning_curves --scale paper --device cuda        CIFAR-100
Cost       no training of its own: the runs are those of dascoli/sample_efficiency and dascoli/ablations (quick 27
           together, cpu 42, paper 60), whose histories are drawn. Reading them takes seconds a run: on two cores 82 s
           at quick, with 6 trainings of dascoli/sample_efficiency that were missing, and at the cpu scale 133 s for 16
           of them and 96 s for 15 more (measured).
Rule       No claim is judged: the ends of these curves decide D1 and D2 in dascoli/sample_efficiency and D7 in
           dascoli/ablations, their beginnings D6 and D8 in dascoli/strength. The accuracies of Fig. 11 and 12 were not
           at hand; the paper's text has 82.1 % as its best on CIFAR-100 (224 px, 3,000 epochs), which the paper scale
           does not repeat.
Expected   The ConViT leads from the first epochs on, and most where the images are few; frozen attention ends its climb
           early. The accuracy by the recipe of scales.SMALL["cpu"], mean of seeds 0 to 2, all test images: 41.2 % ViT
           (e) and 42.3 % ConViT (a), 29.0 % and 33.7 % with a tenth of the images; 41.8 % (b), 41.1 % (c), 41.4 % (d),
           40.3 % (f), 37.7 % (g), with a tenth 32.4 % (b), 31.9 % (c), 30.5 % (d), 30.8 % (f), 29.4 % (g).
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from studies.dascoli import ablations, sample_efficiency
from studies.dascoli.ablations import ROWS, row_of
from studies.dascoli.pair import CONVIT, REFERENCES, VIT
from studies.initial_maps.drawn import no_verdicts
from studies.outcomes import outcome, watched, where
from vitprobe.figures.page import BLUE, GREY, PAGE_WIDTH, interval, limit, style
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

WHOLE = {"e": VIT, "a": CONVIT}  # the rows that have all shares of the images
# Colour, line and marker of every row; frozen attention is dashed.
LINES: dict[str, tuple[str, Any, str]] = {
    "a": (CONVIT.color, "-", CONVIT.marker),
    "b": (BLUE, "-", "v"),
    "c": ("#009E73", "-", "^"),
    "d": ("#56B4E9", "-", "<"),
    "e": (VIT.color, "-", VIT.marker),
    "f": ("#E69F00", "--", "P"),
    "g": (GREY, "--", "X"),
}
BY_SHARE: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (4, 1, 1, 1, 1, 1)))  # all images, and ever fewer


def grid(settings: Settings) -> list[Run]:
    """The runs of dascoli/sample_efficiency and dascoli/ablations, each once, seed by seed."""
    found: list[Run] = []
    for run in (*sample_efficiency.grid(settings), *ablations.grid(settings)):
        if run not in found:
            found.append(run)
    return sorted(found, key=lambda run: run.recipe.seed)


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Test accuracy of one network after every epoch, and which row of Table 3 it is."""
    result, ds = outcome(run, settings, references=REFERENCES)
    history = result.history
    return ds.assign(test_accuracy=history.test_accuracy, test_accuracy_se=history.test_accuracy_se).assign_coords(
        row=((), row_of(run), {"long_name": "row of Table 3"})
    )


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Left: ViT and ConViT by share of the images. Right: the rows of Table 3, a panel for each share that has all."""
    images = np.unique(ds.train_images.values)[::-1]
    complete = [count for count in images if len(np.unique(where(ds, train_images=count).row.values)) == len(ROWS)]
    seeds = len(np.unique(ds.seed.values))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.1), layout="constrained")
        by_share, *by_row = figure.subplots(1, 1 + len(complete), sharey=True)
        for count, line in zip(images, BY_SHARE, strict=False):
            for row, look in WHOLE.items():
                _curve(
                    by_share,
                    where(ds, row=row, train_images=count),
                    images[0],
                    look.color,
                    line,
                    marker=look.marker,
                    band=True,
                )
                _end(by_share, where(ds, row=row, train_images=count), images[0], look.color, 1.03)
        by_share.set_title("by share of the images")
        by_share.set_ylabel("test accuracy [%]")
        for ax, count in zip(by_row, complete, strict=True):
            for place, (row, (color, line, marker)) in enumerate(LINES.items()):
                runs = where(ds, row=row, train_images=count)
                _curve(ax, runs, images[0], color, line, marker=marker)
                _end(ax, runs, images[0], color, 1.02 + 0.015 * place)
            ax.set_title(f"parts left out, {100 * count / images[0]:.3g} % of the images")
        drawn = [line.get_ydata() for ax in (by_share, *by_row) for line in ax.lines]
        limit((by_share, *by_row), [np.asarray(line, dtype=float) for line in drawn])
        for ax in (by_share, *by_row):
            ax.set_xlabel("images seen [passes over all of them]")
            ax.set_xlim(left=0)
        shares = [f"{100 * count / images[0]:.3g} %" for count in images]
        figure.legend(handles=_of_shares(shares), loc="outside upper left", ncols=2, columnspacing=1.2)
        figure.legend(handles=_of_rows(), loc="outside upper right", ncols=4, columnspacing=1.2, handlelength=1.8)
        seen = watched(ds, ended="beside their ends")
        bands = f"Bands, and bars beside the ends: 95 % t interval over {seeds} seeds. " if seeds > 2 else ""
        figure.supxlabel(
            f"{ds.attrs['data']}, 100 % are {images[0]:,} training images; means over {seeds} "
            f"seed{'s' * (seeds > 1)}. {seen}\n{bands}Dashed on the right: gated attention frozen as it starts.",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def passes(runs: xr.Dataset, whole: int) -> np.ndarray:
    """Images seen after each epoch, in passes over all of them `(epoch,)`.

    Args:
        runs: of equally many training images.
        whole: how many all images are.
    """
    return np.asarray(runs.epoch.values * float(runs.train_images[0]) / whole)


def curves(runs: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Mean over seeds of the test accuracy after each epoch, and the half width of its interval `(epoch,)` [%]."""
    return interval(100 * runs.test_accuracy.transpose("run", "epoch").values)


def _curve(
    ax: Axes, runs: xr.Dataset, whole: int, color: str, line: Any, *, marker: str = "", band: bool = False
) -> None:
    """The mean over seeds; of three seeds and more with its interval, if a band is asked for."""
    runs = runs.dropna("epoch", how="all", subset=["test_accuracy"])  # others are trained longer
    x, (mean, half) = passes(runs, whole), curves(runs)
    if band and runs.sizes["run"] > 2:
        ax.fill_between(x, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)
    marker = marker or ("o" if len(x) < 5 else "")  # a single epoch makes no line
    ax.plot(x, mean, color=color, linestyle=line, marker=marker, markersize=3, markevery=max(1, len(x) // 8))


def _end(ax: Axes, runs: xr.Dataset, whole: int, color: str, place: float) -> None:
    """The trained networks on all test images, beside the curve: seven bands would hide each other."""
    runs = runs.dropna("epoch", how="all", subset=["test_accuracy"])
    if runs.sizes["run"] > 2:
        mean, half = interval(runs.accuracy.values[:, None])
        x = place * passes(runs, whole)[-1:]
        ax.errorbar(x, mean, half, color=color, marker="_", markersize=4, elinewidth=0.9)


def _of_shares(shares: Sequence[str]) -> list[Line2D]:
    found = [
        Line2D([], [], color=look.color, marker=look.marker, markersize=3, label=look.label) for look in WHOLE.values()
    ]
    return found + [
        Line2D([], [], color=GREY, linestyle=line, label=share) for share, line in zip(shares, BY_SHARE, strict=False)
    ]


def _of_rows() -> list[Line2D]:
    return [
        Line2D([], [], color=color, linestyle=line, marker=marker, markersize=3, label=f"{row} {ROWS[row].name}")
        for row, (color, line, marker) in LINES.items()
    ]


STUDY = Study(
    name="dascoli/learning_curves",
    title="Test accuracy over training by share of the images, and with parts left out",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=no_verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
