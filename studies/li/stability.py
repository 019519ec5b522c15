"""How much the learning rate matters with two phases of training, and from scratch (Li et al. 2021, stability).

Claim      L5: training in two phases is more stable than from scratch. The paper shows curves that were not at hand;
           here stability is how little of the accuracy is lost at the worst of several learning rates.
Command    vitprobe run li/stability                         digits
           vitprobe run li/stability --scale cpu             5,000 images of CIFAR-10, six epochs
           vitprobe run li/stability --scale paper --device cuda     CIFAR-100, 20 epochs
Cost       Each seed takes three trainings from scratch and three of two phases. quick: 18 trainings of nano networks of
           ten epochs, 54 s on two cores (measured); cpu: 18 of micro networks of six epochs, 2009 s on two cores
           (measured, beside other work). paper: not measured.
Rule       Set before anything was measured. The recipe's learning rate, four and sixteen times it: towards smaller ones
           a short training shows how fast and not how stable it is. Of each seed and
           arm the test accuracy above chance at the worst of the three, over that at the best; a training whose loss
           is no longer finite counts as chance. L5: that share for two phases less that from scratch, above zero;
           supported if the 95 % t interval over seeds lies wholly above, contradicted if wholly below. An arm that is
           nowhere better than twice chance makes it inconclusive: it has learned nothing that could be lost. Few epochs
           show the beginning of training only, where each phase has a warm-up of its own, of half an epoch. Norms of
           gradients are not measured.
Expected   Two phases lose less, since a convolutional network tolerates more learning rates than a ViT. The accuracy by
           the recipe of scales.SMALL["cpu"] cut to six epochs, mean of seeds 0 to 2: at its learning rate 42.7 % with
           two phases and 40.2 % from scratch, at four times it 41.5 % and 40.4 %, at sixteen times it 34.9 % and
           30.5 %.
"""

import sys

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from studies.li.arms import ARMS, SCRATCH, TWO_PHASES, arm, of_arm, outcome_of_both
from studies.outcomes import where, without_evidence
from studies.scales import by_seed
from vitprobe.claims import CLAIMS, Verdict, decide
from vitprobe.figures.page import GREY, PAGE_WIDTH, interval, style
from vitprobe.published.claims_li import PAPER
from vitprobe.results import provenance, to_json
from vitprobe.runs import Run, load
from vitprobe.study import Settings, Study, main

FACTORS = (1.0, 4.0, 16.0)  # of the recipe's learning rate
EPOCHS = {"smoke": 2, "quick": 10, "cpu": 6, "paper": 20}
WARMUP = 0.5  # epochs: two phases warm up twice
BEGUN = 2.0  # times the accuracy of chance


def grid(settings: Settings) -> list[Run]:
    """Both arms at each learning rate, seed by seed."""
    usual = by_seed(settings, published="two_phase")[0].recipe.lr
    rates = [
        of_arm(settings, lr=factor * usual, epochs=EPOCHS[settings.scale], warmup_epochs=WARMUP) for factor in FACTORS
    ]
    return [arms[name] for of_seed in zip(*rates, strict=True) for arms in of_seed for name in (TWO_PHASES, SCRATCH)]


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """The accuracy that one training ends at; that of chance if its loss was no longer finite."""
    data = load(run.data)
    try:
        ds = outcome_of_both(run, settings)
        accuracy, loss, diverged = float(ds.accuracy), float(ds.train_loss[-1]), 0.0
    except FloatingPointError:
        accuracy, loss, diverged = 100 / data.num_classes, float("nan"), 1.0
    numbers = {
        "train_loss": (loss, "training loss of the last epoch", "nats"),
        "diverged": (diverged, "1 where the training loss was no longer finite", "1"),
    }
    labels = {
        "accuracy": (accuracy, "test accuracy in the end [%]"),
        "arm": (arm(run), "how the network is trained"),
        "lr": (run.recipe.lr, "peak learning rate"),
        "seed": (run.recipe.seed, "seed of the run"),
    }
    return xr.Dataset(
        {name: ((), value, {"long_name": text, "units": units}) for name, (value, text, units) in numbers.items()},
        {name: ((), value, {"long_name": text}) for name, (value, text) in labels.items()},
    ).assign_attrs(
        provenance(
            title="Accuracy by learning rate", references=PAPER, config=run.config(), device=settings.device or ""
        ),
        data=run.data.spec.partition(":")[0],
        classes=data.num_classes,
        epochs=EPOCHS[settings.scale],
        train_images=len(data.train),
        run_config=to_json(run.config()),
    )


# --- verdict ----------------------------------------------------------------------------------------


def kept(ds: xr.Dataset, name: str) -> np.ndarray:
    """Of each seed the accuracy above chance at an arm's worst learning rate, over that at its best.

    Args:
        ds: stacked runs.
        name: of the arm.

    Returns:
        `(seed,)`; 0 where nothing is above chance.
    """
    chance = 100 / ds.attrs["classes"]
    found = []
    for seed in np.unique(ds.seed.values):
        above = np.maximum(where(ds, arm=name, seed=seed).accuracy.values - chance, 0)
        found.append(above.min() / above.max() if above.max() else 0.0)
    return np.array(found)


def begun(ds: xr.Dataset) -> bool:
    """Whether every seed of both arms is somewhere well above chance."""
    best = [
        where(ds, arm=name, seed=seed).accuracy.values.max()
        for name in (TWO_PHASES, SCRATCH)
        for seed in np.unique(ds.seed.values)
    ]
    return min(best) >= BEGUN * 100 / ds.attrs["classes"]


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """L5."""
    shares = {name: kept(ds, name) for name in (TWO_PHASES, SCRATCH)}
    said = ", ".join(f"{share.mean():.2f} {name}" for name, share in shares.items())
    diverged = int(ds.diverged.sum())
    said = f"kept at the worst learning rate: {said}" + (f"; {diverged} trainings diverged" if diverged else "")
    verdict = decide(CLAIMS["L5"], shares[TWO_PHASES] - shares[SCRATCH], threshold=0.0, detail=said)
    return [verdict if begun(ds) else unlearned(verdict)]


def unlearned(verdict: Verdict) -> Verdict:
    """The verdict where an arm has nothing to lose."""
    return without_evidence(verdict, f"no evidence, because an arm was nowhere better than {BEGUN:g} times chance")


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Left: test accuracy by learning rate. Right: the share of it that is kept at the worst of them."""
    seeds, rates = np.unique(ds.seed.values), np.unique(ds.lr.values)
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 2.7), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.7, 1.0))
        for place, name in enumerate((TWO_PHASES, SCRATCH)):
            look, runs = ARMS[name], where(ds, arm=name)
            values = np.array([where(runs, seed=seed).sortby("lr").accuracy.values for seed in seeds])
            mean, half = interval(values)
            if len(seeds) > 1:
                left.plot(rates, values.T, color=look.color, linewidth=0.5, alpha=0.4)
            left.errorbar(
                rates * 1.03 ** (2 * place - 1), mean, half if len(seeds) > 2 else None, color=look.color,
                marker=look.marker, markersize=4, elinewidth=0.8, label=look.label, zorder=3,
            )  # fmt: skip
            share = kept(ds, name)
            bar = interval(share[:, None])[1][0] if len(seeds) > 2 else None
            right.errorbar(share.mean(), place, xerr=bar, color=look.color, marker=look.marker, elinewidth=0.9)
            right.scatter(share, np.full(len(share), place + 0.15), color=look.color, s=9, linewidths=0, alpha=0.7)
        chance = 100 / ds.attrs["classes"]
        left.axhline(chance, color=GREY, linewidth=0.7, linestyle="--", label="chance")
        left.set_xscale("log")
        left.set_xticks(rates, labels=[f"{rate:g}" for rate in rates])
        left.xaxis.set_minor_locator(NullLocator())
        left.set_ylim(0, None)
        left.set(xlabel="peak learning rate [1]", ylabel="test accuracy [%]")
        right.set_yticks((0, 1), labels=(TWO_PHASES, SCRATCH))
        right.set_ylim(1.5, -0.5)
        right.set_xlim(0, 1.02)
        right.set_xlabel("accuracy above chance, worst over best\nof the learning rates [1]")
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=3)
        bars = f" Bars: 95 % t interval over {len(seeds)} seeds." if len(seeds) > 2 else ""
        figure.supxlabel(
            f"{ds.attrs['data']}, {ds.attrs['train_images']} training images, {ds.attrs['epochs']} epochs. "
            f"Thin lines and small marks: single seeds.{bars}",
            fontsize=6.5,
            color=GREY,
        )
    return figure


STUDY = Study(
    name="li/stability",
    title="Test accuracy by learning rate, in two phases and from scratch",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
