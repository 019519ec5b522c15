"""Accuracy by strength of locality and number of gated layers, and without gates (d'Ascoli et al. 2021, Fig. 8 and 9).

Claims     D6: more gated layers and a stronger initial locality help, most of all early (published for 100 classes of
           ImageNet: 77 to 81 % in the end, about twice the accuracy at epoch 20 of 300 with 9 gated layers). D8:
           without gates, positional attention that starts as a convolution has an early lead over a ViT, and loses it
           (published values not known).
Command    vitprobe run dascoli/strength                     digits
           vitprobe run dascoli/strength --scale cpu         5,000 images of CIFAR-10
           vitprobe run dascoli/strength --scale paper --device cuda
Cost       The ViT and the whole ConViT are those of dascoli/sample_efficiency. Beyond them quick: 12 trainings of nano
           networks, 55 s on two cores (measured); cpu: 9 of micro networks, 616 s on two cores (measured). paper: 27
           trainings of ConViT-S+, not measured.
Rule       Set before anything was measured. Statistics are test accuracies of each seed. D6: the least-squares slope
           over the number of gated layers at strength 1 (no gated layer is the ViT), in the end, above zero; the slope
           over the decimal logarithm of the strength, most layers gated, in the end, above zero; and the accuracy of
           most layers gated over that of none, at a tenth of the epochs less in the end, both of the test images that
           are seen after each epoch, above zero: the head start shrinks. Both ends of a training of less than 100
           epochs may lie before the point of the published one (about 2,500 steps), so that this too is inconclusive
           there where it is not supported; of 8 epochs the first is the tenth, at the end of the warm-up. D8: the
           network without gates less the ViT, at a tenth of the epochs above zero, and in the end below zero; a
           training of less than 100 epochs may be too short for the latter, too. Supported if the 95 % t interval over
           seeds lies wholly on the claimed side, contradicted if wholly on the other; a claim of several parts needs
           all. A network that did not learn its task (35 % of ten classes) makes it inconclusive. The heads' places are
           those of the authors' code: of four heads half a patch from the query, so that weak Gaussians are nearly one
           (the maps of strength 0.1 have a cosine of 0.94 with each other, of 1 one of 0.55). The cpu scale leaves 0.1
           out. The ViT and a ConViT of no gated layers are one network where both average their patches; at the paper
           scale the ViT's class token also goes through all layers.
Expected   D6's head start, and D8's early lead. The accuracy by the recipe of scales.SMALL["cpu"], mean of seeds 0 to
           2: 41.2 % ViT, 42.3 % ConViT (5 gated layers of strength 1), 43.9 % with 2 gated layers, 41.1 % with strength
           0.01, 47.3 % without gates.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from studies.dascoli.pair import CONVIT, REFERENCES, VIT, convit, in_time, seeds, vit
from studies.outcomes import if_learned, judge, outcome, part, watched, where
from studies.scales import LEAST
from vitprobe.claims import CLAIMS, Verdict, combine, decide
from vitprobe.figures.page import GREY, PAGE_WIDTH, PALETTE, interval, style
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main


@dataclass(frozen=True)
class Sweep:
    """What is varied at a scale.

    Attributes:
        layers: numbers of gated layers at strength 1; the last is the network's own.
        strengths: other strengths, with most layers gated.
        corners: other pairs of layers and strength, which complete the figure and decide nothing.
    """

    layers: Sequence[int]
    strengths: Sequence[float]
    corners: Sequence[tuple[int, float]] = ()


SWEEPS = {
    "smoke": Sweep((3,), (0.1,)),
    "quick": Sweep((1, 3), (0.01, 0.1)),
    "cpu": Sweep((2, 5), (0.01,)),
    "paper": Sweep((3, 6, 10), (0.01, 0.1), ((3, 0.01), (3, 0.1), (6, 0.01), (6, 0.1))),
}


def grid(settings: Settings) -> list[Run]:
    """ViT, ConViTs by layers and strength, and one without gates, seed by seed; snapshots for the shared ones only."""
    sweep, found = SWEEPS[settings.scale], list[Run]()
    most = sweep.layers[-1]
    pairs = [
        *((count, 1.0) for count in sweep.layers[:-1]),
        *((most, each) for each in sweep.strengths),
        *sweep.corners,
    ]
    for base in seeds(settings):
        plain = replace(base, recipe=replace(base.recipe, snapshots=()))
        found += [vit(base, settings), convit(base, settings)]
        found += [
            convit(plain, settings, **({"gpsa_layers": count} if count != most else {}), locality_strength=strength)
            for count, strength in pairs
        ]
        found.append(convit(plain, settings, gated=False))
    return found


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Accuracy of one network along `epoch`, and what is varied in it."""
    result, ds = outcome(run, settings, references=REFERENCES)
    plain = run.model.startswith("vit")
    most = SWEEPS[settings.scale].layers[-1]
    labels: dict[str, tuple[Any, str]] = {
        "layers": (0 if plain else run.options.get("gpsa_layers", most), "gated layers; 0: ViT"),
        "strength": (
            float("nan") if plain else run.options.get("locality_strength", 1.0), "locality strength [1/patch^2]",
        ),
        "gates": (int(not plain and run.options.get("gated", True)), "1 with gates"),
    }  # fmt: skip
    return ds.assign(test_accuracy=result.history.test_accuracy).assign_coords({
        name: ((), value, {"long_name": text}) for name, (value, text) in labels.items()
    })


# --- verdicts ---------------------------------------------------------------------------------------


def early(ds: xr.Dataset) -> int:
    """The epoch at a tenth of training."""
    return max(1, round(0.1 * int(ds.epoch[-1])))


def accuracy(ds: xr.Dataset, **chosen: Any) -> np.ndarray:
    """Test accuracy of a trained network, all test images, by seed [%]."""
    return np.asarray(where(ds, **chosen).accuracy.values)


def accuracy_at(ds: xr.Dataset, epoch: int, **chosen: Any) -> np.ndarray:
    """Test accuracy of a network after an epoch, of the test images that are seen after each, by seed [%]."""
    return np.asarray(100 * where(ds, **chosen).test_accuracy.sel(epoch=epoch).values)


def slope(x: Sequence[float], rows: Sequence[np.ndarray]) -> np.ndarray:
    """Of each seed the least-squares slope of the rows' values, one row for each abscissa."""
    return np.asarray(np.polyfit(np.asarray(x, dtype=float), np.stack(rows), 1)[0])


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """D6 and D8, each with its parts."""
    last, tenth = int(ds.epoch[-1]), early(ds)
    gates = ds.isel(run=np.flatnonzero((ds.gates.values == 1) | (ds.layers.values == 0)))
    counts, most, strengths = varied(ds)
    none: dict[str, Any] = {"layers": 0}
    whole: dict[str, Any] = {"layers": most, "strength": 1.0, "gates": 1}
    by_layers = [none, *({"layers": count, "strength": 1.0, "gates": 1} for count in counts[1:])]
    by_strength = [{"layers": most, "strength": each, "gates": 1} for each in strengths]
    # Of the same images at both ends: networks are ahead on some images and not on others.
    head_start = [accuracy_at(ds, epoch, **whole) / accuracy_at(ds, epoch, **none) for epoch in (tenth, last)]
    said = ", ".join(
        f"{ratio.mean():.2f} at epoch {epoch}" for ratio, epoch in zip(head_start, (tenth, last), strict=True)
    )
    d6 = [
        judge(part(CLAIMS["D6"], "layers", "More gated layers give a higher accuracy"),
              slope(counts, [accuracy(ds, **one) for one in by_layers]), "above", gates, least=LEAST,
              detail="points per layer"),
        judge(part(CLAIMS["D6"], "strength", "A stronger locality at the start gives a higher accuracy"),
              slope(np.log10(strengths).tolist(), [accuracy(ds, **one) for one in by_strength]), "above", gates,
              least=LEAST, detail="points per decade"),
        in_time(judge(part(CLAIMS["D6"], "early", "Gated layers help early in training more than in the end",
                           published="about 2 at epoch 20, with 9 gated layers over none"),
                      head_start[0] - head_start[1], "above", gates, least=LEAST,
                      detail=f"accuracy over that of none: {said}"), last),
    ]  # fmt: skip
    ungated: dict[str, Any] = {"layers": most, "gates": 0}
    lead = accuracy_at(ds, tenth, **ungated) - accuracy_at(ds, tenth, **none)
    left = accuracy(ds, **ungated) - accuracy(ds, **none)
    pair = ds.isel(run=np.flatnonzero(ds.gates.values == 0))
    lost = judge(part(CLAIMS["D8"], "lost", "In the end positional attention without gates is below the ViT"),
                 left, "below", pair, least=LEAST, detail=f"epoch {last}")  # fmt: skip
    ahead = part(CLAIMS["D8"], "early", "Early in training positional attention without gates leads the ViT")
    d8 = [
        if_learned(decide(ahead, lead, threshold=0.0, detail=f"epoch {tenth}"), pair, LEAST),
        in_time(lost, last),
    ]
    return [combine(CLAIMS["D6"], d6), *d6, combine(CLAIMS["D8"], d8), *d8]


def varied(ds: xr.Dataset) -> tuple[list[int], int, list[float]]:
    """Numbers of gated layers at strength 1, with none; the largest; and strengths with that many."""
    local = ds.isel(run=np.flatnonzero(ds.gates.values == 1))
    most = int(local.layers.max())
    counts = np.unique(local.layers.values[local.strength.values == 1.0]).astype(int)
    strengths = np.unique(local.strength.values[local.layers.values == most])
    return [0, *counts.tolist()], most, strengths.tolist()


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Left: accuracy by gated layers and strength. Middle: at several epochs. Right: without gates, over training."""
    count = len(np.unique(ds.seed.values))
    counts, most, strengths = varied(ds)
    last = int(ds.epoch[-1])
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.4), layout="constrained")
        by_strength, by_epoch, ungated = figure.subplots(1, 3)
        local = ds.isel(run=np.flatnonzero(ds.gates.values == 1))
        none = accuracy(ds, layers=0)
        for strength, color, mark in zip(strengths, PALETTE, "^so", strict=False):
            present = np.unique(local.layers.values[local.strength.values == strength]).astype(int)
            rows = [none, *(accuracy(ds, layers=one, strength=strength, gates=1) for one in present)]
            apart = 0.12 * (strengths.index(strength) - (len(strengths) - 1) / 2)  # bars at one place hide each other
            _curve(by_strength, [0, *(present + apart)], rows, color=color, marker=mark, label=f"{strength:g}")
        epochs = np.unique([early(ds), *np.round(np.array([0.25, 0.5, 1]) * last).clip(1).astype(int)])
        for epoch, shade, mark in zip(epochs, np.linspace(0.75, 0.0, len(epochs)), "v^so", strict=False):
            rows = [accuracy_at(ds, epoch, layers=0)]
            rows += [accuracy_at(ds, epoch, layers=one, strength=1.0, gates=1) for one in counts[1:]]
            apart = 0.1 * (epochs.tolist().index(epoch) - (len(epochs) - 1) / 2)
            _curve(by_epoch, np.asarray(counts) + apart, rows, color=str(shade), marker=mark, label=f"{epoch}")
        for shift, (name, color, mark, chosen) in zip((-0.12, 0.0, 0.12), (
            (VIT.label, VIT.color, VIT.marker, {"layers": 0}),
            (CONVIT.label, CONVIT.color, CONVIT.marker, {"layers": most, "strength": 1.0, "gates": 1}),
            ("no gates", GREY, "v", {"layers": most, "gates": 0}),
        ), strict=True):  # fmt: skip
            rows = list(100 * where(ds, **chosen).test_accuracy.transpose("epoch", "run").values)
            _curve(ungated, ds.epoch.values + shift, rows, color=color, marker=mark, label=name)
        for ax, said in (
            (by_strength, "locality strength [1/patch²]"),
            (by_epoch, "epoch, strength 1"),
            (ungated, "network"),
        ):
            handles, labels = ax.get_legend_handles_labels()
            ax.legend(
                handles, labels, title=said, loc="lower center", bbox_to_anchor=(0.5, 1.12), ncols=len(handles),
                columnspacing=0.9, handletextpad=0.3, handlelength=1.2,
            )  # fmt: skip
        for ax, title in (
            (by_strength, f"epoch {last}"),
            (by_epoch, "over training"),
            (ungated, f"{most} local layers"),
        ):
            ax.set_title(title)
        for ax in (by_strength, by_epoch):
            ax.set_xticks(counts)
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xlabel("gated layers (0: ViT)")
        ungated.set_xlabel("epochs of training")
        by_strength.set_ylabel("test accuracy [%]")
        bars = f" Bars: 95 % t interval over {count} seeds." if count > 2 else ""
        seen = watched(ds, "Middle and right", "left")
        figure.supxlabel(
            f"{ds.attrs['data']}; means over {count} seed{'s' * (count > 1)}.{bars}\n{seen}",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _curve(ax: Axes, x: Sequence[int] | np.ndarray, rows: Sequence[np.ndarray], **look: Any) -> None:
    """Mean and interval over seeds."""
    mean, half = interval(np.stack(rows, axis=1))
    bars = half if len(rows[0]) > 2 else None
    ax.errorbar(x, mean, bars, markersize=3.5, elinewidth=0.7, **look)


STUDY = Study(
    name="dascoli/strength",
    title="Test accuracy by strength of locality, number of gated layers, and without gates",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
