"""Eigenvalues at the end of warm-up, by what is changed in a ViT (Park & Kim 2022, Fig. 4, 6, 7b, C.2, C.5-C.7, F.1b).

Claims     At the end of warm-up, of a ViT's loss: E4: with 6 % of the data it is less convex. E7: a classifier on the
           mean of the tokens makes it more convex than a class token does, and the network more accurate. E8, its half
           about eigenvalues: attention to 5 x 5 tokens makes it more convex than to 3 x 3 and to all. E10: with larger
           patches it is more convex and sharper. E11: with more and with wider heads it is flatter and more convex.
           E12: that of a larger network is flatter. E23: with strong augmentation it is flatter, a ResNet's too.
           Published for CIFAR-100 and ViT-Ti; NEP and APE are known for Fig. 4 and 7b only, a slope for C.5.
Command    vitprobe run park_kim/warmup                      digits
           vitprobe run park_kim/warmup --scale cpu --data cifar10
           vitprobe run park_kim/warmup --scale paper --device cuda
Cost       Variants are trained to the end of warm-up only, but for the class token, whose accuracy is wanted; ResNet
           and ViT come from families.grid. quick: 187 s on two cores, two seeds, with ViTs and ResNets of strong
           augmentation from park_kim/calibration (measured). cpu: 2252 s (measured, partly beside other work).
           paper was not measured.
Protocol   As in park_kim/spectra: the five eigenvalues of largest magnitude of batches of 16 training images, augmented
           and mixed as in the network's own training, weight decay as |w|^2 / 2 times its coefficient. NEP is the share
           of negative ones, APE the mean of the positive ones. Networks that share their data and augmentation share
           their batches. A sweep changes one thing; all its networks have the depth of the others (the paper halves it
           for C.5 and C.6).
Rule       Set before any variant was measured; single batches of an untrained and of one ResNet had been seen. Seeds
           are the units. E4: NEP with 6 % of the images less NEP with all, at as many epochs as published, which is
           6 % of the steps; the control at equally many images seen is judged beside it and does not decide. E7: NEP
           and test error, mean less class token, both below zero. E8: NEP of 5 x 5 less that of 3 x 3, and of all
           tokens, both below zero. E10: of each seed the slope over log2 of the patch size of NEP, below zero, and of
           log2 of APE, above zero. E11: the same slopes over log2 of the number of heads of equal width, and of their
           width, all four below zero. E12: log2 of APE, twice the width over the single one, below zero. E23: log2 of
           APE, strong over weak, below zero for the ViT and for the ResNet. Supported if the 95 % t interval over seeds
           lies wholly on the claimed side, contradicted if wholly on the other; a claim of several parts needs all.
           Networks that had not begun to learn at the end of warm-up (1.5 times the accuracy of chance) are no
           evidence, except with 6 % of the data, whose little training the claim is about; for E7's accuracy they must
           have learned in the end.
Expected   as published, where NEP is not zero throughout: a loss without negative eigenvalues shows no share of them.
           The shared networks reach in the end the accuracy that families.SCALES["cpu"]'s recipe gave, mean of seeds
           0 to 2: 63.8 % ResNet, 49.2 % ViT; that with a class token 49.1 %.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from studies.outcomes import difference, judge, part, where, without_evidence
from studies.park_kim import calibration
from studies.park_kim.eigenvalues import BATCH_SIZE, contrast, doublings, eigenvalues, measured_epochs, over_seeds
from studies.park_kim.families import CLAIMS, LOOKS, family
from studies.park_kim.families import grid as families_grid
from vitprobe.claims import Verdict, combine, decide
from vitprobe.figures.page import GREY, PAGE_WIDTH, style
from vitprobe.published import park_kim_2022
from vitprobe.results import to_json
from vitprobe.runs import Run, load, trained
from vitprobe.study import Settings, Study, main

FRACTION = 0.06
VIT, CLASS_TOKEN, FEW_DATA, FEW_DATA_LONG = "ViT", "class token", "6 % of the data", "6 %, as many images seen"
LARGE, OTHER, RESNET, RESNET_OTHER = "twice as wide", "other augmentation", "ResNet", "ResNet, other augmentation"
BEGUN = 1.5  # times the accuracy of chance


@dataclass(frozen=True)
class Sizes:
    """What the ViT has at a scale, and is given instead.

    Attributes:
        dim: its channels of a token.
        own_heads: how many it has.
        patch: its side of a patch [px].
        patches: others.
        kernels: sides of what attention sees [tokens]; it sees all.
        heads: other numbers of heads, each as wide as its own.
        head_widths: other widths of a head, as many as its own.
    """

    dim: int
    own_heads: int
    patch: int
    patches: Sequence[int]
    kernels: Sequence[int]
    heads: Sequence[int]
    head_widths: Sequence[int]


SIZES = {
    "smoke": Sizes(dim=48, own_heads=3, patch=2, patches=(4,), kernels=(3, 5), heads=(1,), head_widths=(8,)),
    "quick": Sizes(dim=48, own_heads=3, patch=2, patches=(1, 4), kernels=(3, 5), heads=(1, 6), head_widths=(8, 32)),
    "cpu": Sizes(dim=64, own_heads=4, patch=4, patches=(2, 8), kernels=(3, 5), heads=(1, 8), head_widths=(8, 32)),
    "paper": Sizes(
        dim=192, own_heads=3, patch=4, patches=(2, 8), kernels=(3, 5), heads=(1, 6, 12), head_widths=(32, 128)
    ),
}
SEEDS = {"quick": 2}  # fewer than families.grid has


def named(settings: Settings) -> list[tuple[str, Run]]:
    """ViT and ResNet of families.grid and what is made of them, with their names, seed by seed."""
    settings = replace(settings, seeds=settings.seeds or SEEDS.get(settings.scale))
    sizes, found = SIZES[settings.scale], list[tuple[str, Run]]()
    augmentations = calibration.recipes(settings.scale)
    for base in families_grid(settings):
        kind = family(base.model)
        if kind not in ("vit", "resnet"):
            continue
        other = next(recipe for name in ("strong", "weak") if (recipe := augmentations[name]).augment != _augment(base))
        other = replace(other, seed=base.recipe.seed, snapshots=base.recipe.snapshots)
        if kind == "resnet":
            found += [(RESNET, base), (RESNET_OTHER, replace(base, recipe=other))]
            continue
        if settings.scale == "paper":  # the small ViTs average their tokens already, and their runs are shared
            base = _with(base, pool="mean")
        elif settings.scale == "smoke":  # which has fifteen networks to show that everything runs
            base = _with(base, depth=1)
        few = replace(base.data, train_size=round(FRACTION * len(load(base.data).train)))
        width = sizes.dim // sizes.own_heads
        found += [
            (VIT, base),
            (CLASS_TOKEN, _with(base, pool="class")),
            (FEW_DATA, replace(base, data=few)),
            (FEW_DATA_LONG, replace(base, data=few, recipe=base.recipe.stretched(FRACTION))),
            *((f"patch {size}", _with(base, patch_size=size)) for size in sizes.patches),
            *((f"kernel {size}", _with(base, kernel_size=size, boundary="zero")) for size in sizes.kernels),
            *((f"heads {count}", _with(base, heads=count, head_dim=width)) for count in sizes.heads),
            *((f"head width {width}", _with(base, head_dim=width)) for width in sizes.head_widths),
            (LARGE, _with(base, dim=2 * sizes.dim, heads=2 * sizes.own_heads)),
            (OTHER, replace(base, recipe=other)),
        ]
    return found


def _augment(run: Run) -> str:
    return run.recipe.augment


def _with(run: Run, **options: Any) -> Run:
    return replace(run, options={**run.options, **options})


def grid(settings: Settings) -> list[Run]:
    """The runs of `named`."""
    return [run for _, run in named(settings)]


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Eigenvalues of one network at the end of its warm-up `(batch, rank)`, on batches of its own training."""
    name = next(name for name, other in named(settings) if other == run)
    epoch = measured_epochs(run)[0]
    # Whole only where the accuracy in the end is wanted: that of the ViT with both classifiers.
    whole = name in (VIT, CLASS_TOKEN)
    result = trained(run, cache=settings.cache, until=None if whole else epoch, device=settings.device)
    ds = eigenvalues(result, epoch, settings)
    at_warmup = result.history.sel(epoch=epoch)
    accuracy = 100 * float(result.history.test_accuracy[-1]) if whole else np.nan
    sizes, options = SIZES[settings.scale], run.options
    labels: dict[str, tuple[Any, str, str]] = {
        "variant": (name, "what the network is", ""),
        "seed": (run.recipe.seed, "seed of the run", "1"),
        "accuracy": (accuracy, "test accuracy in the end, where it was trained to its end", "%"),
        "warmup_accuracy": (100 * float(at_warmup.test_accuracy), "test accuracy at the end of warm-up", "%"),
        "train_images": (len(result.data.train), "number of training images", "1"),
        "epoch": (epoch, "epochs of training at the end of warm-up", "1"),
        "strong": (int(run.recipe.mixup > 0), "1: strong augmentation, 0: weak", "1"),
        "patch_size": (options.get("patch_size", sizes.patch), "side of a patch of the ViT", "px"),
        "heads": (options.get("heads", sizes.own_heads), "number of heads of the ViT", "1"),
        "head_width": (options.get("head_dim", sizes.dim // sizes.own_heads), "channels of a head of the ViT", "1"),
    }
    return ds.assign_coords({
        label: ((), value, {"long_name": text} | ({"units": units} if units else {}))
        for label, (value, text, units) in labels.items()
    }).assign_attrs(
        probe="hessian_warmup",
        data=run.data.spec.partition(":")[0],
        classes=result.data.num_classes,
        run_config=to_json(run.config()),
    )


# --- verdicts ---------------------------------------------------------------------------------------


def means(ds: xr.Dataset, variable: str, names: Sequence[str]) -> str:
    """In words, the mean over seeds of a variable of each named network."""
    return ", ".join(f"{name} {where(ds, variant=name)[variable].values.mean():.3g}" for name in names)


def slopes(ds: xr.Dataset, variable: str, sweep: str) -> list[float]:
    """Of each seed the slope, over log2 of what a sweep changes, of NEP or of log2 of APE."""
    runs = ds.isel(run=np.flatnonzero(np.isin(ds.variant.values, members(ds, sweep))))
    found = []
    for seed in np.unique(runs.seed.values):
        points = runs.isel(run=np.flatnonzero(runs.seed.values == seed))
        y = (doublings(points.ape) if variable == "ape" else points[variable]).values
        found.append(float(np.polyfit(np.log2(points[sweep].values), y, 1)[0]))
    return found


def members(ds: xr.Dataset, sweep: str) -> list[str]:
    """The names in a sweep, the ViT itself in its place.

    Args:
        ds: stacked runs.
        sweep: `"patch_size"`, `"heads"` or `"head_width"`.
    """
    prefix = {"patch_size": "patch", "heads": "heads", "head_width": "head width"}[sweep]
    values = {
        str(name): float(value)
        for name, value in zip(ds.variant.values, ds[sweep].values, strict=True)
        if name == VIT or str(name).removeprefix(f"{prefix} ").isdigit()
    }
    return sorted(values, key=values.__getitem__)


def begun(verdict: Verdict, ds: xr.Dataset, names: Sequence[str]) -> Verdict:
    """The verdict, or that there is none because a network had not begun to learn."""
    runs = ds.isel(run=np.flatnonzero(np.isin(ds.variant.values, names)))
    if (runs.warmup_accuracy >= BEGUN * 100 / ds.attrs["classes"]).all():
        return verdict
    return without_evidence(verdict, "no evidence, because a network had not begun to learn at the end of warm-up")


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E4, E7, E8 (eigenvalues), E10, E11, E12 and E23, each with its parts."""

    def against(
        claim: str, name: str, said: str, variable: str, one: str, other: str, *, below: bool = True, young: str = ""
    ) -> Verdict:
        verdict = decide(
            part(CLAIMS[claim], name, said),
            contrast(ds, variable, {"variant": one}, {"variant": other}),
            threshold=0.0,
            direction="below" if below else "above",
            detail=means(ds, variable, [one, other]),
        )
        return begun(verdict, ds, [which for which in (one, other) if which != young])

    def along(claim: str, name: str, said: str, variable: str, sweep: str, *, below: bool) -> Verdict:
        names = members(ds, sweep)
        detail = means(ds, variable, names)
        whole = part(CLAIMS[claim], name, said, published="-0.562" if name == "heads APE" else "not published")
        found = slopes(ds, variable, sweep)
        verdict = decide(whole, found, threshold=0.0, direction="below" if below else "above", detail=detail)
        return begun(verdict, ds, names)

    strong, weak = _by_augmentation(ds, VIT, OTHER)
    parts: dict[str, list[Verdict]] = {
        "E7": [
            against("E7", "NEP", "averaging the tokens lowers NEP", "nep", VIT, CLASS_TOKEN),
            _learned_accuracy(ds),
        ],
        "E8": [
            against("E8", f"NEP {name}", f"NEP of 5 x 5 tokens is below that of {name}", "nep", "kernel 5", other)
            for name, other in (("3x3", "kernel 3"), ("global", VIT))
        ],
        "E10": [
            along("E10", "NEP", "NEP falls with the size of the patches", "nep", "patch_size", below=True),
            along("E10", "APE", "APE grows with the size of the patches", "ape", "patch_size", below=False),
        ],
        "E11": [
            along("E11", f"{name} {symbol}", f"{symbol} falls with {said}", symbol.lower(), sweep, below=True)
            for name, sweep, said in (
                ("heads", "heads", "the number of heads of equal width"),
                ("width", "head_width", "the width of the heads"),
            )
            for symbol in ("APE", "NEP")
        ],
        "E23": [
            against("E23", "ViT", "strong augmentation lowers the ViT's APE", "ape", strong, weak),
            against(
                "E23", "ResNet", "strong augmentation lowers the ResNet's APE", "ape",
                *_by_augmentation(ds, RESNET, RESNET_OTHER),
            ),
        ],
    }  # fmt: skip
    e4 = against("E4", "", "", "nep", FEW_DATA, VIT, below=False, young=FEW_DATA)
    e12 = against("E12", "", "", "ape", LARGE, VIT)
    control = against(
        "E4", "images", "6 % of the data raise NEP at equally many images seen", "nep", FEW_DATA_LONG, VIT, below=False
    )
    eigenvalues = part(
        CLAIMS["E8"], "eigenvalues",
        "attention to 5 x 5 tokens has a lower NEP at the end of warm-up than global attention, and than that to 3 x 3",
    )  # fmt: skip
    wholes = {**CLAIMS, "E8": replace(eigenvalues, published=CLAIMS["E8"].published)}
    found = [replace(e4, claim=CLAIMS["E4"]), control]
    for claim, judged in parts.items():
        if claim == "E23":
            found.append(replace(e12, claim=CLAIMS["E12"]))
        found += [combine(wholes[claim], judged), *judged]
    return found


def _learned_accuracy(ds: xr.Dataset) -> Verdict:
    """E7 for the accuracy in the end."""
    both = ds.isel(run=np.flatnonzero(np.isin(ds.variant.values, (VIT, CLASS_TOKEN))))
    claim = part(
        CLAIMS["E7"], "accuracy", "averaging the tokens raises the test accuracy", published="+2.7 percentage points"
    )
    return judge(claim, difference(ds, "accuracy", {"variant": VIT}, {"variant": CLASS_TOKEN}), "above", both)


def _by_augmentation(ds: xr.Dataset, one: str, other: str) -> tuple[str, str]:
    """Of two names, that with strong augmentation first."""
    strong = int(ds.strong.values[np.flatnonzero(ds.variant.values == one)[0]])
    return (one, other) if strong else (other, one)


# --- figure -----------------------------------------------------------------------------------------

SWEEPS = {
    "data": "images of training",
    "classifier": "classifier",
    "kernel": "attention sees [tokens]",
    "patch_size": "side of a patch [px]",
    "heads": "heads",
    "head_width": "channels of a head",
    "size": "channels of a token",
    "augmentation": "augmentation",
}


def published(sweep: str) -> dict[str, dict[str, float]]:
    """NEP and APE of a panel's networks as read off Fig. 4 (patches of 2 px) and 7b (of 4 px), where they are known."""
    figures = {
        "data": ("fig4", {VIT: "ViT", FEW_DATA: "ViT(6%)"}),
        "kernel": ("localmsa", {"kernel 3": "P=3x3", "kernel 5": "P=5x5", VIT: "P=8x8"}),
    }
    if sweep not in figures:
        return {}
    figure, names = figures[sweep]
    numbers = park_kim_2022()[f"hessian_warmup_{figure}"]
    return {
        name: {"nep": numbers[theirs]["nep_if_same_yscale"], "ape": numbers[theirs]["ape"]}
        for name, theirs in names.items()
    }


def columns(ds: xr.Dataset, sweep: str) -> list[tuple[str, str]]:
    """The networks of a panel: their names in the dataset, and what stands below them."""
    if sweep in ("patch_size", "heads", "head_width"):
        return [(name, f"{float(ds[sweep].values[ds.variant.values == name][0]):g}") for name in members(ds, sweep)]
    vit = ds.variant.values == VIT
    dim = int(ds.heads.values[vit][0] * ds.head_width.values[vit][0])
    found = {
        "data": [(VIT, "all"), (FEW_DATA, "6 %"), (FEW_DATA_LONG, "6 %,\nas many\nseen")],
        "classifier": [(CLASS_TOKEN, "class\ntoken"), (VIT, "mean of\ntokens")],
        "kernel": [("kernel 3", "3 × 3"), ("kernel 5", "5 × 5"), (VIT, "all")],
        "size": [(VIT, f"{dim}"), (LARGE, f"{2 * dim}")],
    }
    if sweep in found:
        return found[sweep]
    pairs = (_by_augmentation(ds, VIT, OTHER), _by_augmentation(ds, RESNET, RESNET_OTHER))
    return [(name, word) for pair in pairs for name, word in zip(reversed(pair), ("weak", "strong"), strict=True)]


def draw(ds: xr.Dataset) -> Figure:
    """Of each sweep the eigenvalues with their positive mean, and the share of negative ones, by network."""
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 8.2), layout="constrained")
        axes = figure.subplots(4, 4, sharey="row")
        values = ds.eigenvalue.values
        reach = 1.6 * np.nanmax(np.abs(values))
        top = max(float(ds.nep.max()), 0.35)  # room for the published ones
        for number, (sweep, title) in enumerate(SWEEPS.items()):
            upper, lower = axes[2 * (number // 4) : 2 * (number // 4) + 2, number % 4]
            shown = columns(ds, sweep)
            for ax in (upper, lower):
                ax.set_xlim(-0.6, len(shown) - 0.4)
                ax.set_xticks(range(len(shown)), labels=[text for _, text in shown])
            for x, (name, _) in enumerate(shown):
                _network(upper, lower, x, ds.isel(run=np.flatnonzero(ds.variant.values == name)), published(sweep))
            upper.set_title(title)
            upper.set_yscale("symlog", linthresh=1.0, linscale=0.6)
            upper.set_ylim(-reach, reach)
            upper.axhline(0, color=GREY, linewidth=0.6, zorder=1)
            lower.set_ylim(-0.04 * top, 1.15 * top)
        for row in (0, 2):
            axes[row, 0].set_ylabel("eigenvalue [nats]")
            axes[row + 1, 0].set_ylabel("share of negative ones, NEP [1]")
        figure.legend(handles=_handles(), loc="outside upper center", ncols=4)
        seeds = len(np.unique(ds.seed.values))
        bars = "Marks: single seeds."
        if seeds > 2:
            bars = f"Bars: 95 % t interval over {seeds} seeds (cut at the frame), of APE that of its logarithm."
        figure.supxlabel(
            f"The {ds.sizes['rank']} eigenvalues of largest magnitude of each of {ds.sizes['batch']} batches of "
            f"{BATCH_SIZE} training images at the end of warm-up; {ds.attrs['data']}. The scale is linear from -1 to 1."
            f"\n{bars}",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _network(upper: Axes, lower: Axes, x: int, runs: xr.Dataset, known: Mapping[str, Mapping[str, float]]) -> None:
    """One network in its column: eigenvalues as a cloud, APE and NEP with their intervals and published values."""
    name, color = str(runs.variant.values[0]), _color(str(runs.variant.values[0]))
    cloud = runs.eigenvalue.values.ravel()
    cloud = cloud[np.isfinite(cloud)]
    aside = np.random.default_rng(0).uniform(-0.32, 0.32, cloud.size)
    upper.scatter(x + aside, cloud, s=1.5, color=color, alpha=0.3, linewidths=0, zorder=2)
    for ax, variable in ((upper, "ape"), (lower, "nep")):
        seeds = runs[variable].values
        mean, sides = over_seeds(seeds[:, None], variable)
        bars = sides if len(seeds) > 2 else None
        ax.errorbar([x], mean, bars, color="black", marker="_", markersize=11, elinewidth=0.9, capsize=2, zorder=4)
        if variable == "nep":
            across = np.linspace(-0.15, 0.15, len(seeds)) if len(seeds) > 1 else np.zeros(1)
            ax.scatter(x + across, seeds, s=9, color=color, alpha=0.8, linewidths=0, zorder=3)
        if name in known:
            ax.plot(x + 0.25, known[name][variable], "*", color=GREY, markerfacecolor="white", markersize=7, zorder=5)


def _color(name: str) -> str:
    return LOOKS["resnet" if name in (RESNET, RESNET_OTHER) else "vit"].color


def _handles() -> list[Line2D]:
    dots = [
        Line2D([], [], color=LOOKS[kind].color, marker="o", markersize=3, linestyle="", label=LOOKS[kind].label)
        for kind in ("vit", "resnet")
    ]
    mean = Line2D(
        [], [], color="black", marker="_", markersize=9, linestyle="", label="mean of the positive (APE), mean of NEP"
    )
    star = Line2D(
        [],
        [],
        color=GREY,
        marker="*",
        markerfacecolor="white",
        markersize=7,
        linestyle="",
        label="published, CIFAR-100",
    )
    return [*dots, mean, star]


STUDY = Study(
    name="park_kim/warmup",
    title="Hessian eigenvalues at the end of warm-up, by what is changed in a ViT",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
