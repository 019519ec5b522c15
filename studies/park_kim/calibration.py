"""Strong augmentation turns over-confidence into under-confidence (Park & Kim 2022, Fig. F.1a).

Claim      E22: on test images the confidence of networks is above their accuracy after training with weak augmentation
           and below it after strong augmentation. Published for CIFAR-100.
Command    vitprobe run park_kim/calibration                 digits, 12 small networks; 4 shared with park_kim/fourier
           vitprobe run park_kim/calibration --scale cpu --data cifar10
           vitprobe run park_kim/calibration --scale paper --device cuda
Cost       quick: 144 s on two cores with 8 trainings beside the shared ones, two seeds (measured). cpu: 6 trainings
           beside the shared ones, begun by park_kim/warmup: 787 s (measured, partly beside other work). The rest is a
           pass over the test images.
Expected   accuracy after training by the recipe of families.SCALES["cpu"] (weak augmentation), mean of seeds 0 to 2:
           63.8 % ResNet, 49.2 % ViT; after strong augmentation 55.5 % and 36.7 %.
Rule       Set before anything was measured. Of each seed the signed calibration error (ECSE, confidence minus accuracy
           by bin, corrected bins) on the test images. Supported if the 95 % t interval over seeds lies wholly above
           zero with weak and wholly below zero with strong augmentation, for the ResNet and for the ViT; contradicted
           if one lies wholly on the other side.
           The published strong augmentation also smooths and mixes the labels, which by itself asks for less
           confidence. So both are trained a third time with its images and hard labels ("images
           alone": RandAugment, no smoothing, no mixing), with a verdict of its own: ECSE below zero there too; but not
           at the cpu scale, for the sake of its time.
           Weak and strong differ in nothing else at scales below paper but the clipping of gradients, as published.
"""

import sys
from dataclasses import replace

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from studies.outcomes import if_learned
from studies.park_kim.families import CLAIMS, SCALES, family, headline
from studies.park_kim.families import grid as families_grid
from studies.park_kim.families import measure as measure_family
from vitprobe.claims import Claim, Direction, Verdict, combine, decide
from vitprobe.figures.page import BLUE, GREY, PAGE_WIDTH, VERMILION, attribute, interval, pretty, style, unit_interval
from vitprobe.probes import Calibration
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main
from vitprobe.training import Recipe, make_recipe

AUGMENTATIONS = {
    "weak": (BLUE, "o"),
    "images alone": ("#009E73", "^"),
    "strong": (VERMILION, "s"),
}
WITHOUT_CONTROL = ("cpu",)  # scales at which nothing is trained on augmented images alone
SEEDS = {"quick": 2}  # fewer than families.grid has
_STRONG = make_recipe("park_kim_strong")
_LABELS = {name: getattr(_STRONG, name) for name in ("label_smoothing", "mixup", "cutmix")}
_RAND_AUGMENT = _STRONG.augment.partition("+")[2]


def recipes(scale: str) -> dict[str, Recipe]:
    """The recipes of a scale by the strength of augmentation; one of them is that of all other studies.

    Args:
        scale: its name.
    """
    shared = SCALES[scale][3]
    if scale == "paper":
        weak = make_recipe("park_kim_weak", precision=shared.precision, channels_last=shared.channels_last)
        return {"weak": weak, "images alone": replace(weak, augment=shared.augment), "strong": shared}
    steps = [step for step in (shared.augment, _RAND_AUGMENT) if step != "none"]
    images = replace(shared, augment="+".join(steps))
    return {"weak": shared, "images alone": images, "strong": replace(images, clip=_STRONG.clip, **_LABELS)}


def grid(settings: Settings) -> list[Run]:
    """The paper's two families with weak and strong augmentation, and, but at cpu, with augmented images alone."""
    return [
        replace(run, recipe=replace(recipe, seed=run.recipe.seed))
        for run in families_grid(replace(settings, seeds=settings.seeds or SEEDS.get(settings.scale)))
        if family(run.model) in ("resnet", "vit")
        for name, recipe in recipes(settings.scale).items()
        if name != "images alone" or settings.scale not in WITHOUT_CONTROL
    ]


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Calibration of one trained network on its test set."""
    named = {replace(recipe, seed=run.recipe.seed): name for name, recipe in recipes(settings.scale).items()}
    return measure_family(run, settings, Calibration()).assign_attrs(augmentation=named[run.recipe])


# --- verdicts ---------------------------------------------------------------------------------------


def judge(ds: xr.Dataset, claim: Claim, augmentation: str, model: str, direction: Direction) -> Verdict:
    """The verdict on the sign of one family's calibration error after one augmentation.

    Args:
        ds: stacked runs.
        claim: the whole claim.
        augmentation: one of `AUGMENTATIONS`.
        model: the family.
        direction: where the claim says that the error lies.
    """
    runs = ds.isel(run=np.flatnonzero((ds.model == model) & (ds.augmentation == augmentation)))
    sure = "over" if direction == "above" else "under"
    part = replace(
        claim,
        id=f"{claim.id} {augmentation} {model}".replace("images alone images alone", "images alone"),
        statement=f"{model} is {sure}-confident after {augmentation} augmentation".replace(
            "images alone augmentation", "augmentation of images alone"
        ),
        published="",
        counter_evidence="",
    )
    detail = f"ECE {float(runs.ece.mean()):.3f}, accuracy {attribute(runs, 'accuracy').mean():.1f} %"
    verdict = decide(part, runs.ecse.values, threshold=0.0, direction=direction, detail=detail)
    return if_learned(verdict, runs)


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E22 from the signs after weak and strong augmentation; below zero after augmentation of images alone, too."""
    claim, deciding = CLAIMS["E22"], headline(ds)
    alone = replace(
        claim,
        id="E22 images alone",
        statement="Strong augmentation of images alone, with hard labels, gives under-confidence",
        published="not published",
        counter_evidence="",
    )
    parts = {
        (model, augmentation): judge(ds, claim, augmentation, model, direction)
        for model in dict.fromkeys(ds.model.values.tolist())
        for augmentation, direction in _SIGNS.items()
    }
    whole = combine(claim, [verdict for (model, _), verdict in parts.items() if model in deciding])
    if not (ds.augmentation == "images alone").any():
        return [whole, *parts.values()]
    alone_parts = [judge(ds, alone, "images alone", model, "below") for model in deciding]
    return [whole, *parts.values(), combine(alone, alone_parts), *alone_parts]


_SIGNS: dict[str, Direction] = {"weak": "above", "strong": "below"}

# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Reliability by family, one line per augmentation; below, the signed and the unsigned calibration error."""
    names = list(dict.fromkeys(ds.model.values.tolist()))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 4.4), layout="constrained")
        axes = figure.subplots(2, len(names), height_ratios=[1.15, 1], sharey="row", squeeze=False)
        for column, name in zip(axes.T, names, strict=True):
            runs = ds.isel(run=np.flatnonzero(ds.model == name))
            _reliability(column[0], runs)
            _errors(column[1], runs)
            accuracy = [f"{attribute(part, 'accuracy').mean():.0f}" for _, part in _by_augmentation(runs)]
            column[0].set_title(f"{pretty(name)}\n{', '.join(accuracy)} %")
        axes[0, 0].set_ylabel("accuracy [%]")
        axes[1, 0].set_ylabel("ECSE (filled), ECE (open) [%]")
        figure.legend(
            handles=[
                *(
                    Line2D([], [], color=color, marker=marker, markersize=4, label=_named(name))
                    for name, (color, marker) in AUGMENTATIONS.items()
                    if name in ds.augmentation.values
                ),
                Line2D([], [], color=GREY, linestyle="--", label="calibrated"),
            ],
            loc="outside upper center",
            ncols=4,
        )
        seeds = len(np.unique(attribute(ds, "seed")))
        figure.supxlabel(
            f"Bars: 95 % t interval over {seeds} seeds; small points: single seeds. Percent in titles: accuracy after "
            "each augmentation.\nReliability: bins that hold 1 % of the images or more; dots above the diagonal are "
            "under-confident. ECSE > 0: over-confident.",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _named(augmentation: str) -> str:
    return "strong, images alone" if augmentation == "images alone" else augmentation


def _by_augmentation(runs: xr.Dataset) -> list[tuple[str, xr.Dataset]]:
    found = [(name, runs.isel(run=np.flatnonzero(runs.augmentation == name))) for name in AUGMENTATIONS]
    return [(name, part) for name, part in found if part.sizes["run"]]


def _reliability(ax: Axes, runs: xr.Dataset) -> None:
    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=0.8, zorder=1)
    for name, part in _by_augmentation(runs):
        color, marker = AUGMENTATIONS[name]
        # Seeds weigh with their images, so that a bin of one image in one seed is no outlier.
        share = part.share.transpose("run", "bin").values
        weight = np.where(np.isfinite(part.bin_accuracy.transpose("run", "bin").values), share, 0)
        full = weight.mean(0) >= 0.01
        accuracy, confidence = (
            np.average(
                np.nan_to_num(part[each].transpose("run", "bin").values)[:, full], axis=0, weights=weight[:, full]
            )
            for each in ("bin_accuracy", "bin_confidence")
        )
        ax.plot(confidence, accuracy, color=color, marker=marker, markersize=3, zorder=3)
    ax.set_ylim(0, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    unit_interval(ax, "confidence")


def _errors(ax: Axes, runs: xr.Dataset) -> None:
    ax.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    for place, (name, part) in enumerate(_by_augmentation(runs)):
        color, marker = AUGMENTATIONS[name]
        for variable, shift, face in (("ecse", -0.15, color), ("ece", 0.15, "white")):
            values = part[variable].values
            mean, half_width = interval(values[:, None])
            bar = None if len(values) == 1 else half_width
            look = {"fmt": marker, "color": color, "markerfacecolor": face, "markersize": 4, "elinewidth": 0.8}
            ax.errorbar([place + shift], mean, bar, zorder=3, **look)
            ax.scatter(np.full(len(values), place + shift + 0.1), values, s=4, color=color, alpha=0.6, linewidths=0)
    ax.set_xlim(-0.6, len(_by_augmentation(runs)) - 0.4)
    ax.set_xticks([])
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))


STUDY = Study(
    name="park_kim/calibration",
    title="Calibration of a ResNet and a ViT after weak and strong augmentation",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
