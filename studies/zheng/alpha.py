"""Share of tokens in the maps, by initialisation, and how fast training goes (Zheng et al. 2024, Tables 3-5, Fig. 6).

Claims     Z7: impulse initialisation beats mimetic and random at every share alpha of the tokens in the attention
           logits; beside it, random is best at 0, the others near 0.1. Published for augmented CIFAR-10: impulse above
           random by 3.2 to 7.1 points over alpha = 0 to 0.5. Z8: it converges faster than mimetic. Published at alpha =
           0.2: 80 % after 34 epochs against 49.
Command    vitprobe run zheng/alpha                          digits, 4 x 4 tokens
           vitprobe run zheng/alpha --scale cpu              CIFAR-10, 8 x 8 tokens, 5,000 images
           vitprobe run zheng/alpha --scale paper --device cuda                       Table 3, Fig. 6
           vitprobe run zheng/alpha --scale paper --device cuda --data cifar100       Table 4
           vitprobe run zheng/alpha --scale paper --device cuda --data svhn           Table 5
           With --data at the cpu scale give --train-size 5000 --test-size 2000 as well, and --out.
Cost       quick: 27 trainings, 179 s on two cores (measured). cpu: 36 trainings, 3368 s on two cores (measured, beside
           other work). paper: 54 trainings of each data set, not measured.
Networks   Nine heads, as many as a 3 x 3 kernel has taps (eight at the paper scale). Model I, whose queries and keys
           see alpha x tokens + (1 - alpha) x code in every layer; at alpha = 0 that is Model II. The initial weights
           are the same at every alpha. Images are augmented, but for SVHN, as published. Impulses are as in
           zheng/initialisations.py: sharp on small grids. At the cpu scale there are also ones as blurred as the
           published fit leaves them, with 0.3 of the attention on the wanted token.
Rule       Set before anything was measured, with sharp impulses. When these had lost at the cpu scale (by 8 points at
           alpha = 0.5, where the tokens move sharp logits most), blurred ones were added, since the claim is about
           such; where they are, they decide and take the place of impulse in all that follows, and the sharp ones are
           judged beside. Seeds are the units, differences are taken within them, and a part is supported or
           contradicted if its 95 % t interval over seeds lies wholly on one side of zero. Z7: test accuracy of impulse
           less random, and less mimetic, mean over the alphas, above zero, and at no alpha wholly below. "Z7 best",
           judged beside it: of random at 0 less that at 0.1, of impulse and of mimetic at 0.1 less that at 0 and at the
           largest alpha, all above zero; three seeds are too few for most of these. Z8, at alpha = 0.1 (0.2 at the
           paper scale): epochs of mimetic less those of impulse until the test accuracy reaches 70 % (quick), 40 %
           (cpu) or 80 % (paper), half of it for more than ten classes; above zero. Between epochs the curve is a
           straight line, from chance at the start; a network that never gets there counts with all its epochs, which
           makes the difference smaller. Judged beside it, and deciding nothing: the area under the curve, the same
           against random, and the area as a share of the final accuracy, because who ends higher also passes a
           threshold earlier. A network that did not learn its task (35 % of ten classes) makes its part inconclusive.
Expected   Differences of 2 to 5 points, of which three seeds resolve the larger; the best alpha is likely to stay open.
           The accuracy by the recipe of scales.SMALL["cpu"] with crops and flips, mean of seeds 0 to 2, at alpha = 0,
           0.1 and 0.5: random 48.8 %, 49.8 % and 45.7 %, mimetic 49.3 %, 49.5 % and 46.5 %, sharp impulses 49.2 %,
           47.7 % and 38.1 %, blurred ones 50.8 %, 50.8 % and 46.6 %.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.outcomes import Look, difference, judge, outcome, part, watched, where
from studies.scales import LEAST, by_seed, sized
from studies.zheng.initialisations import BLURRED, LOOKS, initialisers
from studies.zheng.shared import NINE_HEADS
from vitprobe.claims import CLAIMS, Verdict, combine
from vitprobe.figures.page import GREY, PAGE_WIDTH, interval, style
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

REFERENCES = "Zheng et al. 2024, arXiv:2401.12511"


@dataclass(frozen=True)
class Sweep:
    """What a scale trains.

    Attributes:
        alphas: shares of the tokens.
        shown: the one whose curves are compared.
        threshold: test accuracy whose epoch is asked for, of ten classes [%].
        options: of the network.
    """

    alphas: Sequence[float]
    shown: float
    threshold: float
    options: Mapping[str, Any]


SWEEPS = {
    "smoke": Sweep((0.0, 0.1), 0.1, 15.0, {**NINE_HEADS["smoke"], "depth": 1}),
    "quick": Sweep((0.0, 0.1, 0.5), 0.1, 70.0, NINE_HEADS["quick"]),
    "cpu": Sweep((0.0, 0.1, 0.5), 0.1, 40.0, NINE_HEADS["cpu"]),
    "paper": Sweep((0.0, 0.1, 0.2, 0.3, 0.4, 0.5), 0.2, 80.0, NINE_HEADS["paper"]),
}
# Test accuracy [%] by epoch, CIFAR-10, augmented, alpha = 0.2: outputs stored in the authors' notebook
# (github.com/osiriszjq/impulse_init). Their run with mimetic initialisation was stopped after 70 epochs.
PUBLISHED_EPOCHS = (1, 5, 10, 20, 30, 40, 50, 60, 70, 100)
PUBLISHED = {
    "impulse": (42.8, 59.6, 68.6, 75.1, 78.8, 81.3, 83.9, 84.8, 85.2, 86.65),
    "mimetic": (40.1, 54.2, 61.2, 69.3, 75.7, 78.6, 80.6, 81.8, 83.5),
}
PUBLISHED_THRESHOLD = 80.0
PUBLISHED_GAPS = "3.2 to 7.1 percentage points over alpha"  # impulse over random, Table 3, by a published summary


def grid(settings: Settings) -> list[Run]:
    """Every initialisation at every share of the tokens, seed by seed; then blurred impulses at the cpu scale."""
    sweep = SWEEPS[settings.scale]
    if settings.data == "svhn":
        runs = by_seed(settings, published="zheng_noaug", augment="none")
    else:
        runs = by_seed(settings, published="zheng_aug")
    blurred = crossed(runs, sweep.alphas, settings, names=[BLURRED]) if settings.scale == "cpu" else []
    return [*crossed(runs, sweep.alphas, settings), *blurred]


def crossed(
    runs: Sequence[Run], alphas: Sequence[float], settings: Settings, names: Iterable[str] = LOOKS, **options: Any
) -> list[Run]:
    """Every initialisation at some shares of the tokens, seed by seed.

    Args:
        runs: one without a network for each seed.
        alphas: the shares.
        settings: of the study.
        names: of the initialisations.
        **options: of the network, beside those of the scale.
    """
    options = {**SWEEPS[settings.scale].options, **options}
    return [
        _with(run, alpha, options, initialisers(name, settings, tokens=alpha > 0), settings)
        for run in runs
        for name in names
        for alpha in alphas
    ]


def _with(
    run: Run, alpha: float, options: Mapping[str, Any], written: Mapping[str, Mapping[str, Any]], settings: Settings
) -> Run:
    # By the names that zheng/architectures has for them, whose trainings serve where the recipes agree.
    name, given = {0.0: ("model_2", {}), 0.5: ("model_1", {})}.get(alpha, ("model_1", {"alpha": alpha}))
    return replace(run, model=sized(name, settings), options={**options, **given}, initialisers=written)


def alpha_of(run: Run) -> float:
    """The share of the tokens that a run's maps see."""
    return float(run.options.get("alpha", 0.0 if run.model.startswith("model_2") else 0.5))


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Test accuracy of one trained network, at the end and by epoch."""
    result, ds = outcome(run, settings, references=REFERENCES)
    sweep = SWEEPS[settings.scale]
    curve = {
        name: (
            "epoch",
            100 * result.history[f"test_accuracy{end}"].values,
            {"long_name": f"{said}test accuracy after each epoch", "units": "%"},
        )
        for name, end, said in (("curve", "", ""), ("curve_se", "_se", "standard error over images of the "))
    }
    name = next(iter(run.initialisers), "random").removesuffix("_")
    if settings.scale != "paper" and "target_mass" in run.initialisers.get("impulse_", {}):
        name = BLURRED
    epoch = ("epoch", np.arange(1, run.recipe.epochs + 1), {"long_name": "epoch", "units": "1"})
    return (
        ds
        .assign(curve)
        .assign_coords(
            epoch=epoch,
            initialisation=((), name, {"long_name": "initialisation of queries and keys"}),
            alpha=((), alpha_of(run), {"long_name": "share of the tokens in what maps are made of", "units": "1"}),
        )
        .assign_attrs(
            shown=sweep.shown,
            threshold=sweep.threshold if result.data.num_classes <= 10 else sweep.threshold / 2,
            augmented="no augmentation" if run.recipe.augment == "none" else "augmented",
        )
    )


def epochs_until(curve: np.ndarray, threshold: float, chance: float) -> float:
    """Epochs until a curve reaches a threshold; between epochs it is a straight line.

    Args:
        curve: after each epoch (epoch,).
        threshold: in the curve's unit.
        chance: before the first epoch.

    Returns:
        The epochs; all of them if it never does.
    """
    whole = np.concatenate([[chance], curve])
    reached = np.flatnonzero(whole >= threshold)
    if not reached.size:
        return float(len(curve))
    after = int(reached[0])
    if after == 0:
        return 0.0
    return after - 1 + float((threshold - whole[after - 1]) / (whole[after] - whole[after - 1]))


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """Z7 with its order and its best shares, and Z8 with the areas under the curves."""
    sharp = [verdict for verdict in _z7(ds, "impulse", "sharp ")[1:3] if _published(ds) == BLURRED]
    return [*_z7(ds, _published(ds)), *sharp, *_z8(ds, _published(ds))]


def _published(ds: xr.Dataset) -> str:
    """The impulses that are as blurred as the published ones; where none are, those that there are."""
    return BLURRED if (ds.initialisation == BLURRED).any() else "impulse"


def _z7(ds: xr.Dataset, impulse: str, word: str = "") -> list[Verdict]:
    alphas = np.unique(ds.alpha.values)
    order, each = [], []
    for rival in ("random", "mimetic"):
        runs = _of(ds, impulse, rival)
        by_alpha = {
            alpha: difference(
                ds,
                "accuracy",
                {"initialisation": impulse, "alpha": alpha},
                {"initialisation": rival, "alpha": alpha},
            )
            for alpha in alphas
        }
        published = PUBLISHED_GAPS if rival == "random" else "2.7 to 3.6 points, most likely above mimetic"
        claim = part(
            CLAIMS["Z7"],
            f"{word}over {rival}",
            f"{word}impulse does better than {rival}, mean over alpha",
            published=published,
        )
        detail = ", ".join(f"{values.mean():+.1f} at {alpha:g}" for alpha, values in by_alpha.items())
        order.append(judge(claim, np.mean(list(by_alpha.values()), axis=0), "above", runs, least=LEAST, detail=detail))
        for alpha, values in by_alpha.items():
            claim = part(
                CLAIMS["Z7"], f"over {rival} at {alpha:g}", f"impulse does better than {rival} at alpha = {alpha:g}",
                published=published,
            )  # fmt: skip
            each.append(judge(claim, values, "above", where(runs, alpha=alpha), least=LEAST))
    best = [_best(ds, name, alphas) for name in ("random", "mimetic", impulse)]
    against = [verdict for verdict in each if verdict.verdict == "contradicted"]
    shares = part(
        CLAIMS["Z7"], "best", "random is best at alpha = 0, mimetic and impulse near 0.1",
        published="random at 0, the others near 0.1; values not known",
    )  # fmt: skip
    return [combine(CLAIMS["Z7"], [*order, *against]), *order, combine(shares, best), *best, *each]


def _best(ds: xr.Dataset, name: str, alphas: np.ndarray) -> Verdict:
    """That an initialisation is best at 0 (random) or at 0.1."""
    best, others = (0.0, [0.1]) if name == "random" else (0.1, [0.0, float(alphas.max())])
    others = [alpha for alpha in others if alpha != best]
    whole = part(
        CLAIMS["Z7"], f"best {name}", f"{name} is best at alpha = {best:g}",
        published="best at 0" if name == "random" else "best near 0.1",
    )  # fmt: skip
    parts = [
        judge(
            part(
                whole, f"{other:g}", f"{name} does better at alpha = {best:g} than at {other:g}",
                published=whole.published,
            ),
            difference(
                ds,
                "accuracy",
                {"initialisation": name, "alpha": best},
                {"initialisation": name, "alpha": other},
            ),
            "above", _of(ds, name), least=LEAST,
        )
        for other in others
    ]  # fmt: skip
    return combine(whole, parts)


def _of(ds: xr.Dataset, *names: str) -> xr.Dataset:
    """The runs of some initialisations."""
    return ds.isel(run=np.flatnonzero(np.isin(ds.initialisation.values, names)))


def _z8(ds: xr.Dataset, impulse: str) -> list[Verdict]:
    shown = where(ds, alpha=ds.attrs["shown"])
    threshold, chance = float(ds.attrs["threshold"]), 100 / ds.attrs["classes"]
    shown = shown.assign(
        epochs_until=("run", [epochs_until(curve, threshold, chance) for curve in shown.curve.values]),
        area=shown.curve.mean("epoch"),
        share=shown.curve.mean("epoch") / shown.curve.isel(epoch=-1),  # of the same test images
    )

    def against(rival: str, variable: str) -> np.ndarray:
        return difference(shown, variable, {"initialisation": impulse}, {"initialisation": rival})

    until = {name: float(where(shown, initialisation=name).epochs_until.mean()) for name in (impulse, "mimetic")}
    whole = judge(
        CLAIMS["Z8"], -against("mimetic", "epochs_until"), "above", _of(shown, impulse, "mimetic"), least=LEAST,
        detail=f"until {threshold:g} %: {until[impulse]:.1f} epochs against {until['mimetic']:.1f}",
    )  # fmt: skip
    beside = []
    for rival in ("mimetic", "random"):
        for variable, name, statement, sign in (
            ("epochs_until", "epochs", f"impulse reaches {threshold:g} % in fewer epochs than {rival}", -1),
            ("area", "area", f"over all epochs, the mean test accuracy of impulse is above that of {rival} [%]", 1),
            ("share", "relative area", f"the same, each as a share of its own final accuracy, against {rival}", 1),
        ):
            if (rival, name) != ("mimetic", "epochs"):  # that one decides
                claim = part(CLAIMS["Z8"], f"{name} {rival}", statement)
                runs = _of(shown, impulse, rival)
                beside.append(judge(claim, sign * against(rival, variable), "above", runs, least=LEAST))
    return [whole, *beside]


def draw(ds: xr.Dataset) -> Figure:
    """Accuracy over the shares, our curves at one share, and the authors' curves."""
    seeds = len(np.unique(ds.seed.values))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 2.9), layout="constrained")
        shares, curves, published = figure.subplots(1, 3)
        looks = {**LOOKS, BLURRED: Look("impulse, blurred as published", "#CC79A7", "v")}
        if _published(ds) == BLURRED:
            looks["impulse"] = replace(LOOKS["impulse"], label="impulse, sharp")
        looks = {name: look for name, look in looks.items() if (ds.initialisation == name).any()}
        for place, (name, look) in enumerate(looks.items()):
            _shares(shares, where(ds, initialisation=name), look, place - (len(looks) - 1) / 2)
            _curves(curves, where(ds, initialisation=name, alpha=ds.attrs["shown"]), look.color, look.marker)
            if name in PUBLISHED:
                values = PUBLISHED[name]
                published.plot(
                    PUBLISHED_EPOCHS[: len(values)], values, color=look.color, marker=look.marker, markersize=3
                )
        shares.set_xlabel("share α of the tokens in the logits")
        shares.set_ylabel("test accuracy [%]")
        shares.set_title(f"ours: {ds.attrs['data']},\n{ds.attrs['augmented']}")
        _threshold(curves, float(ds.attrs["threshold"]))
        curves.set_title(f"ours, α = {ds.attrs['shown']:g}\n")
        _threshold(published, PUBLISHED_THRESHOLD)
        published.set_title("published: CIFAR-10, augmented,\nα = 0.2, one run each")
        for ax in (curves, published):
            ax.set_xlabel("epoch")
            ax.set_xlim(left=0)
        curves.set_ylabel("test accuracy [%]")
        figure.legend(*shares.get_legend_handles_labels(), loc="outside upper center", ncols=len(looks))
        bars = f"Bars: 95 % t interval over {seeds} seeds. " if seeds > 2 else "Bars: standard error over images. "
        figure.supxlabel(
            f"Mean of {seeds} seed{'s' if seeds > 1 else ''}; thin lines: single seeds. {bars}"
            f"Dotted: the accuracy whose epoch is compared.\n{watched(ds)}",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _shares(ax: Axes, runs: xr.Dataset, look: Look, place: float) -> None:
    """Mean and bar of one initialisation at every share, set apart a little so that bars do not hide each other."""
    alphas = np.unique(runs.alpha.values)
    apart = 0.012 * place * float(np.ptp(alphas)) / 0.5
    by_alpha = [where(runs, alpha=alpha) for alpha in alphas]
    middle = [float(chosen.accuracy.mean()) for chosen in by_alpha]
    bars = [
        float(interval(chosen.accuracy.values[:, None])[1][0])
        if chosen.sizes["run"] > 2
        else float(chosen.error_se.mean())
        for chosen in by_alpha
    ]
    ax.errorbar(
        alphas + apart, middle, bars, color=look.color, marker=look.marker, markersize=4, elinewidth=0.7, capsize=1.5,
        label=look.label,
    )  # fmt: skip
    ax.set_xticks(alphas)


def _curves(ax: Axes, runs: xr.Dataset, color: str, marker: str) -> None:
    """Test accuracy by epoch: every seed, and their mean."""
    if runs.sizes["run"] > 1:
        for curve in runs.curve.values:
            ax.plot(runs.epoch, curve, color=color, linewidth=0.5, alpha=0.45)
    few = max(1, runs.sizes["epoch"] // 8)
    ax.plot(
        runs.epoch, runs.curve.mean("run"), color=color, linewidth=1.4, marker=marker, markersize=3.5, markevery=few
    )


def _threshold(ax: Axes, value: float) -> None:
    ax.axhline(value, color=GREY, linewidth=0.7, linestyle=":", zorder=1)


STUDY = Study(
    name="zheng/alpha",
    title="Test accuracy by share of the tokens in attention and by initialisation",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
