"""AlterNet withstands corruptions better than the ResNet (Park & Kim 2022, Fig. 12b and E.2).

Claim      E21, its half about corrupted images: AlterNet is more robust than the ResNet. Robustness is the plain mean
           accuracy over fifteen corruptions and their severities. Published for CIFAR-100-C (12b) and ImageNet-C (E.2,
           whose numbers are not known).
Command    vitprobe run park_kim/robustness                  made-up shapes of 32 px: digits are too small to corrupt
           vitprobe run park_kim/robustness --scale cpu --data cifar10
           vitprobe run park_kim/robustness --scale paper --device cuda
           Fig. E.2 is not a study: nothing is trained. A network of timm, its weights in FILE, on the validation images
           of ImageNet at 224 px in VAL/CLASS, of which the last fifth of each class counts, all of them in memory:
           vitprobe probe timm:vit_tiny_patch16_224 --checkpoint FILE --data folder:VAL --images 2000
           --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5 --probes corruption_robustness -o robust.nc
Cost       quick: 7 trainings of 8,000 images, one seed, and 4,500 corrupted images for each network: 206 s on two cores
           (measured). cpu: the networks of families.grid, and 9,000 corrupted images for each, 475 s on two cores
           (measured). paper: the same with 150,000 corrupted images for each; not measured.
Rule       Set beforehand. Of each seed, the robustness of AlterNet less that of the ResNet; supported if the 95 % t
           interval over seeds lies wholly above zero, contradicted if wholly below. Robust because accurate? Judged
           beside it as a control, which decides nothing: the robustness of AlterNet less what its accuracy predicts, by
           the least-squares line of robustness on accuracy through the other families of the same seed. A line through
           noisy accuracies is too flat, which favours an accurate network; the six points need not lie on one. A
           network that did not learn its task (45 % of at most ten classes) makes them inconclusive.
           All networks see the same corrupted images, made here by the functions and constants of ImageNet-C, which are
           harder on 32 px than the files of CIFAR-10-C and CIFAR-100-C.
Expected   Robustness follows accuracy, as in the published points. Size speaks against AlterNet here and for it in the
           paper: 0.109 million parameters and 0.175 of the ResNet (cpu), 33.0 and 23.7 (paper).
           The shared networks reach the accuracy that families.SCALES["cpu"]'s recipe gave, mean of seeds 0 to 2:
           61.5 % AlterNet, 50.2 % ConViT, 58.2 % ConvMixer, 54.5 % PiT, 63.7 % ResNet, 45.8 % Swin, 48.8 % ViT.
           Made-up shapes test the study and no claim: they differ in low frequencies alone. What the small networks
           learn of them at quick scale has not been measured.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.outcomes import (
    Look,
    around,
    bars_note,
    difference,
    judge,
    outcome,
    part,
    point,
    robustness,
    where,
)
from studies.park_kim.families import CLAIMS, LOOKS, REFERENCES, family
from studies.park_kim.families import grid as families_grid
from vitprobe.claims import Verdict
from vitprobe.data.corruption import SMALLEST, GeneratedCorruptions
from vitprobe.figures.page import GREY, PAGE_WIDTH, style
from vitprobe.published import park_kim_2022
from vitprobe.runs import DataSpec, Run, load
from vitprobe.study import Settings, Study, main


@dataclass(frozen=True)
class Corrupted:
    """How much is corrupted at a scale.

    Attributes:
        images: how many test images.
        severities: of the corruptions.
    """

    images: int
    severities: tuple[int, ...]


CORRUPTED = {
    "smoke": Corrupted(6, (3,)),
    "quick": Corrupted(100, (1, 3, 5)),
    "cpu": Corrupted(200, (1, 3, 5)),
    "paper": Corrupted(2_000, (1, 2, 3, 4, 5)),
}
# Digits cannot be corrupted: the small scales have images of 32 px, and shorter trainings.
MADE_UP = {
    "smoke": (DataSpec(spec="synthetic:low", train_size=64, test_size=40), 1),
    "quick": (DataSpec(spec="synthetic:low", train_size=1_000, test_size=400), 8),
}
SEEDS = {"quick": 1}  # fewer than families.grid has
# The nano networks are made for 8 px. On 32 px those of patches look at 8 x 8 of them, as the micro networks do.
PATCHES = {
    **{kind: {"patch_size": 4} for kind in ("convmixer", "swin", "convit", "vit")},
    "pit": {"patch_size": 4, "stride": 4},
}
PUBLISHED = {
    "Alter-ResNet-50": "alternet", "ResNet-50": "resnet", "Swin-Ti": "swin", "PiT-Ti": "pit", "ViT-Ti": "vit",
    "MLP-Mixer-Ti": "mixer",
}  # fmt: skip

# Where the names stand beside the published points of Fig. 12b, which lie close [points], and how they are aligned.
LABELS = {
    "MLP-Mixer-Ti": (6, -8, "left"), "ViT-Ti": (6, 0, "left"), "PiT-Ti": (-6, -2, "right"), "Swin-Ti": (-2, 8, "right"),
    "Twins-S": (6, 0, "left"), "ResNeXt-50": (-6, 0, "right"), "ResNet-50": (6, -1, "left"),
    "Alter-ResNet-50": (-6, 2, "right"),
}  # fmt: skip


def grid(settings: Settings) -> list[Run]:
    """All families, seed by seed, on images that can be corrupted."""
    runs = families_grid(replace(settings, seeds=settings.seeds or SEEDS.get(settings.scale)))
    if settings.scale in MADE_UP:
        data, epochs = MADE_UP[settings.scale]
        runs = [_on_larger_images(run, settings, data, epochs) for run in runs]
    images = load(runs[0].data)
    if images.channels != 3 or min(images.image_size) < SMALLEST:
        raise ValueError(
            f"{images.spec} has images of {images.image_size} px and {images.channels} channel(s); those in colour "
            f"and of {SMALLEST} px or more a side can be corrupted: use --data cifar10 or synthetic:low."
        )
    GeneratedCorruptions(images)  # without its library, better now than after all trainings
    return runs


def _on_larger_images(run: Run, settings: Settings, data: DataSpec, epochs: int) -> Run:
    if settings.data in (None, data.spec):
        data = replace(
            data,
            train_size=settings.train_size or data.train_size,
            test_size=settings.test_size or data.test_size,
        )
    else:
        data = run.data
    recipe = replace(run.recipe, epochs=epochs, snapshots=())
    return replace(run, data=data, recipe=recipe, options=PATCHES.get(family(run.model), {}))


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Accuracy of one trained network on clean and on corrupted images."""
    corrupted = CORRUPTED[settings.scale]
    result, ds = outcome(run, settings, references=REFERENCES)
    ds = ds.assign(robustness(result, images=corrupted.images, severities=corrupted.severities))
    return ds.assign_attrs(
        corrupted_images=min(corrupted.images, len(result.data.test)), severities=str(corrupted.severities)
    )


def line(accuracy: np.ndarray, robust: np.ndarray) -> tuple[float, float]:
    """The least-squares line of robustness on accuracy.

    Args:
        accuracy: of each network [%].
        robust: their robustness [%].

    Returns:
        Slope, and intercept [%]; slope 0 where all are equally accurate.
    """
    spread = float(np.var(accuracy))
    slope = float(np.mean((accuracy - accuracy.mean()) * (robust - robust.mean()))) / spread if spread else 0.0
    return slope, float(robust.mean() - slope * accuracy.mean())


def beyond_accuracy(accuracy: np.ndarray, robust: np.ndarray, judged: np.ndarray) -> float:
    """How much more robust a network is than its accuracy predicts, by the line through all others [points].

    Args:
        accuracy: of each network [%].
        robust: their robustness [%].
        judged: which of them is the one, the only True.

    Returns:
        Its robustness less that on the line.
    """
    slope, intercept = line(accuracy[~judged], robust[~judged])
    return float(robust[judged].item() - (intercept + slope * accuracy[judged].item()))


def model_of(ds: xr.Dataset, name: str) -> str:
    """The model of a family in stacked runs."""
    return next(model for model in ds.model.values.tolist() if family(model) == name)


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E21 on corrupted images, and whether more than the accuracy is behind it."""
    alternet, resnet = ({"model": model_of(ds, name)} for name in ("alternet", "resnet"))
    sizes = [int(where(ds, **kind).parameters.values[0]) for kind in (alternet, resnet)]
    gain = difference(ds, "accuracy", alternet, resnet).mean()
    said = f"AlterNet is {gain:+.2f} points more accurate; parameters: AlterNet {sizes[0]:,}, ResNet {sizes[1]:,}"
    beyond = []
    for seed in np.unique(ds.seed.values):
        runs = where(ds, seed=seed)
        beyond.append(
            beyond_accuracy(runs.accuracy.values, runs.robustness.values, runs.model.values == alternet["model"])
        )
    points = _published_points()
    accuracies, robust = np.transpose(list(points.values()))
    published = beyond_accuracy(accuracies, robust, np.array(list(points)) == "Alter-ResNet-50")
    whole = part(
        CLAIMS["E21"],
        "robustness",
        "the mean accuracy of AlterNet on corrupted images is above that of the ResNet",
        published=f"{points['Alter-ResNet-50'][1] - points['ResNet-50'][1]:+.2f} percentage points",
    )
    control = part(
        CLAIMS["E21"],
        "beyond accuracy",
        "the mean accuracy of AlterNet on corrupted images is above what its accuracy predicts by the other families",
        published=f"{published:+.2f} percentage points, from the published points",
    )
    both = xr.concat([where(ds, **alternet), where(ds, **resnet)], dim="run", combine_attrs="override")
    return [
        judge(
            replace(whole, counter_evidence=CLAIMS["E21"].counter_evidence),
            difference(ds, "robustness", alternet, resnet), "above", both, detail=said,
        ),
        judge(control, beyond, "above", ds, detail=said),
    ]  # fmt: skip


def _published_points() -> dict[str, tuple[float, float]]:
    """Accuracy and robustness of the published networks [%]."""
    points = park_kim_2022()["acc_vs_robustness_cifar100c"]
    return {entry.partition(" (")[0]: tuple(values) for entry, values in points.items()}


def draw(ds: xr.Dataset) -> Figure:
    """Accuracy on clean against that on corrupted images of every family, and beside it the paper's."""
    seeds = len(np.unique(ds.seed.values))
    models = list(dict.fromkeys(ds.model.values.tolist()))
    means = {model: (float(runs.accuracy.mean()), float(runs.robustness.mean())) for model, runs in _by(ds, models)}
    points = _published_points()
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.9), layout="constrained")
        ours, theirs = figure.subplots(1, 2)
        for model, runs in _by(ds, models):
            look = LOOKS[family(model)]
            errors = (runs.robustness_se.values, runs.error_se.values)
            x, y = runs.robustness.values, runs.accuracy.values
            point(ours, x, y, errors=errors, color=look.color, marker=look.marker, label=look.label)
        around(ours, ds.robustness.values, ds.accuracy.values)
        _line(ours, means, model_of(ds, "alternet"))
        ours.set_title(f"ours: {ds.attrs['data']}, {seeds} seed{'s' if seeds > 1 else ''}")
        ours.set_xlabel(f"accuracy on corrupted images, {ds.attrs['corrupted_images']} images [%]")
        ours.set_ylabel("test accuracy [%]")
        published_robustness(theirs, points, {name: LOOKS[kind] for name, kind in PUBLISHED.items()})
        _line(theirs, points, "Alter-ResNet-50")
        handles, said = ours.get_legend_handles_labels()
        figure.legend(handles, said, loc="outside upper center", ncols=4, handletextpad=0.2)
        note = "Dashed: robustness predicted from accuracy by the families without AlterNet."
        figure.supxlabel(f"{note}\n{bars_note(seeds)}", fontsize=6.5, color=GREY)
    return figure


def _by(ds: xr.Dataset, models: Sequence[str]) -> list[tuple[str, xr.Dataset]]:
    return [(model, where(ds, model=model)) for model in models]


def _line(ax: Axes, points: Mapping[str, tuple[float, float]], left_out: str) -> None:
    """The line of robustness on accuracy through all points but one, over the axes as they are."""
    others = np.array([values for name, values in points.items() if name != left_out])
    slope, intercept = line(*others.T)
    limits = ax.get_xlim(), ax.get_ylim()
    accuracy = np.array(limits[1])
    ax.plot(intercept + slope * accuracy, accuracy, "--", color=GREY, linewidth=0.7, zorder=1)
    ax.set_xlim(limits[0])
    ax.set_ylim(limits[1])


def published_robustness(ax: Axes, points: Mapping[str, tuple[float, float]], looks: Mapping[str, Look]) -> None:
    """The paper's accuracies on clean and corrupted images, each point with its name.

    Args:
        ax: where to draw.
        points: accuracy and robustness of each network [%].
        looks: of the networks, by their names; grey for the others.
    """
    for entry, (accuracy, robust) in points.items():
        name = entry.partition(" (")[0]
        look = looks.get(name, Look(name, GREY, "o"))
        right, up, align = LABELS[name]
        ax.plot(robust, accuracy, look.marker, color=look.color, markersize=4.5)
        ax.annotate(
            name, (robust, accuracy), (right, up), textcoords="offset points", ha=align, va="center", fontsize=6,
            color=GREY,
        )  # fmt: skip
    ax.margins(0.25, 0.1)
    ax.set_title("published: one run each (Fig. 12b)")
    ax.set_xlabel("accuracy on corrupted images, CIFAR-100-C [%]")
    ax.set_ylabel("test accuracy [%]")


STUDY = Study(
    name="park_kim/robustness",
    title="Accuracy of seven families of networks on corrupted images",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
