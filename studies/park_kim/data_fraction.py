"""ViTs do not overfit: with less data, training loss and error rise together (Park & Kim 2022, Fig. 5b, C.2, C.3).

Claim      E2: over shares of the training set (2 to 100 %) and over lengths of training (75 to 1200 epochs), NLL_train
           and test error of a ViT change with the same sign, where an overfitting network trades one for the other.
           Also drawn: the patch size of the ViT (Fig. C.2, error and NLL_train only).
Command    vitprobe run park_kim/data_fraction               digits
           vitprobe run park_kim/data_fraction --scale cpu --data cifar10
           vitprobe run park_kim/data_fraction --scale paper --device cuda
Cost       quick: 235 s on two cores with two seeds (measured). cpu: 1231 s on two cores, two seeds, with 20 trainings
           beyond those of families.grid (measured, stopped once, beside other work). paper: about 40 GPU days on the
           authors' machines, by their images a second; not measured.
Rule       Set beforehand. A sweep changes one thing. Of each seed, the correlation over the sweep of NLL_train (loss of
           the last epoch less the entropy of its targets) with the test error; E2 is supported if the 95 % t interval
           over seeds lies wholly above zero for both sweeps of the ViT (share of the data at equal epochs, epochs),
           contradicted if one lies wholly below. A network that did not learn its task from all of the data for the
           whole length (45 % of ten classes) makes it inconclusive. Fewer images at equal epochs are also fewer steps,
           so that underfitting alone would support the claim: the control sees as many images in all (epochs stretched
           by the inverse share), is judged beside it, and decides nothing. Neither does the ResNet.
Expected   E2 supported at equal epochs (from three seeds on: the two of quick leave it open). At equal images seen,
           without strong augmentation, the training loss should fall as the data shrink while the error rises:
           overfitting, of both families.
           The accuracy by the recipe of families.SCALES["cpu"], mean of seeds 0 and 1: 63.7 % ResNet, and 24.6 %,
           36.3 % and 48.2 % with 2, 10 and 30 % of the images; 48.5 % ViT, and 22.9 %, 28.5 % and 36.9 % with these
           shares, 37.1 % with 10 % in ten times the epochs, 35.7 % after 2 epochs and 41.6 % after 4, 40.6 % with
           patches of 8 px.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.outcomes import judge, logarithmic, outcome, part, where
from studies.park_kim.families import CLAIMS, LOOKS, REFERENCES, family
from studies.park_kim.families import grid as families_grid
from vitprobe.claims import Verdict, combine
from vitprobe.figures.page import GREY, PAGE_WIDTH, interval, pretty, style
from vitprobe.runs import Run, load
from vitprobe.study import Settings, Study, main


@dataclass(frozen=True)
class Sweeps:
    """What is varied at a scale, around the run of all data and the families' own recipe.

    Attributes:
        fractions: shares of the training images, at equal epochs.
        controls: those of them that are trained on equally many images in all, too.
        lengths: epochs, as shares of the recipe's own.
        patches: patch sizes of the ViT [px].
        resnet: whether the ResNet, which decides nothing, has the control and the lengths too.
    """

    fractions: Sequence[float]
    controls: Sequence[float]
    lengths: Sequence[float]
    patches: Sequence[int]
    resnet: bool = True


SWEEPS = {
    "smoke": Sweeps(fractions=(0.5,), controls=(0.5,), lengths=(2,), patches=()),
    "quick": Sweeps(fractions=(0.1, 0.3), controls=(0.1, 0.3), lengths=(0.2, 0.5), patches=(4,)),
    "cpu": Sweeps(fractions=(0.02, 0.1, 0.3), controls=(0.1,), lengths=(0.25, 0.5), patches=(8,), resnet=False),
    "paper": Sweeps(
        fractions=(0.02, 0.06, 0.1, 0.25, 0.5),
        controls=(0.02, 0.06, 0.1, 0.25, 0.5),
        lengths=(0.25, 0.5, 2, 4),
        patches=(2, 8),
    ),
}
SEEDS = {"quick": 2, "cpu": 2}  # fewer than families.grid has
FAMILIES = ("resnet", "vit")


def grid(settings: Settings) -> list[Run]:
    """ResNet and ViT of families.grid, and what the sweeps make of each, seed by seed."""
    sweeps = SWEEPS[settings.scale]
    settings = replace(settings, seeds=settings.seeds or SEEDS.get(settings.scale))
    bases = [run for run in families_grid(settings) if family(run.model) in FAMILIES]
    return [run for base in bases for run in _around(base, sweeps)]


def _around(base: Run, sweeps: Sweeps) -> Iterator[Run]:
    """The run and its variants."""
    # The snapshots of the families' recipe are for their spectra; whoever wants them here pays for them.
    plain = replace(base.recipe, snapshots=())
    yield base
    images = len(load(base.data).train)
    if family(base.model) == "resnet" and not sweeps.resnet:
        sweeps = replace(sweeps, controls=(), lengths=())
    for fraction in sweeps.fractions:
        data = replace(base.data, train_size=round(fraction * images))
        yield replace(base, data=data, recipe=plain)
        if fraction in sweeps.controls:
            yield replace(base, data=data, recipe=plain.stretched(fraction))
    for length in sweeps.lengths:
        # The warm-up stays, as in the paper: it is five epochs however many follow.
        epochs = max(1, round(length * plain.epochs))
        yield replace(base, recipe=replace(plain, epochs=epochs))
    if base.model.startswith("vit"):
        for patch in sweeps.patches:
            yield replace(base, options={**base.options, "patch_size": patch})  # shared with park_kim/warmup


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Error and training loss of one trained network, and where it lies in the sweeps."""
    result, ds = outcome(run, settings, references=REFERENCES)
    patches = getattr(result.model, "patches", None)
    size = 1 if patches is None else result.data.image_size[0] // patches.grid[0]
    return ds.assign_coords(
        patch_size=((), size, {"long_name": "side of a patch [px]; 1 without patches", "units": "1"})
    )


def base_of(runs: xr.Dataset) -> dict[str, int]:
    """Images, epochs and patch size of the run around which a model's sweeps go.

    It is the first of the grid: the only one that is in every sweep.

    Args:
        runs: of one model, in the order of the grid.

    Returns:
        The values by coordinate.
    """
    return {name: int(runs[name].values[0]) for name in ("train_images", "epochs", "patch_size")}


def sweep(runs: xr.Dataset, name: str) -> xr.Dataset:
    """The runs of one model that belong to a sweep.

    Args:
        runs: of one model, in the order of the grid.
        name: `"data"` (share of the images, equal epochs), `"images"` (share, equal images seen), `"epochs"` or
            `"patch_size"`.

    Returns:
        Those runs, with what is varied as the coordinate `value`.
    """
    base = base_of(runs)
    same = {key: (runs[key] == value).values for key, value in base.items()}
    images_seen = runs.train_images.values * runs.epochs.values
    whole = base["train_images"] * base["epochs"]
    # Epochs and images are whole numbers, so that the images seen differ by up to half of either.
    equal_images = np.abs(images_seen - whole) <= (runs.train_images.values + runs.epochs.values) / 2
    keep, value = {
        "data": (same["epochs"] & same["patch_size"], runs.train_images / base["train_images"]),
        "images": (equal_images & same["patch_size"], runs.train_images / base["train_images"]),
        "epochs": (same["train_images"] & same["patch_size"], runs.epochs),
        "patch_size": (same["train_images"] & same["epochs"], runs.patch_size),
    }[name]
    return runs.assign_coords(value=value).isel(run=np.flatnonzero(keep))


def together(runs: xr.Dataset) -> list[float]:
    """Of each seed, the correlation over a sweep of training loss and test error; 0 where one of them never changes."""
    found = []
    for seed in np.unique(runs.seed.values):
        points = where(runs, seed=seed)
        loss, error = points.nll_train.values, points.error.values
        found.append(float(np.corrcoef(loss, error)[0, 1]) if np.ptp(loss) and np.ptp(error) else 0.0)
    return found


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E2 of the ViT; beside it the control at equal images seen, and the ResNet."""
    parts = {}
    for model in dict.fromkeys(ds.model.values.tolist()):
        runs = where_model(ds, model)
        base = base_of(runs)
        learners = where(runs, **base)
        for name, said in (
            ("data", "share of the data at equal epochs"),
            ("images", "share of the data at equal images seen"),
            ("epochs", "number of epochs"),
        ):
            points = sweep(runs, name)
            if len(np.unique(points.value)) < 2:
                continue
            claim = part(
                CLAIMS["E2"],
                f"{name} {model}",
                f"training loss and test error of {model} change together with the {said}",
                published="same sign" if name != "images" and model.startswith("vit") else "not published",
            )
            parts[model, name] = judge(claim, together(points), "above", learners, detail=_ends(points))
    deciding = [
        verdict for (model, name), verdict in parts.items() if model.startswith("vit") and name in ("data", "epochs")
    ]
    return [combine(CLAIMS["E2"], deciding), *parts.values()]


def where_model(ds: xr.Dataset, model: str) -> xr.Dataset:
    """The runs of a model, in the order of the grid."""
    return ds.isel(run=np.flatnonzero(ds.model.values == model))


def _ends(points: xr.Dataset) -> str:
    """How far the loss and the error go from the largest value of a sweep to the smallest."""
    ends = []
    for name, unit in (("nll_train", "nats"), ("error", "percentage points")):
        first, last = (
            points[name].values[points.value.values == end].mean()
            for end in (points.value.values.max(), points.value.values.min())
        )
        ends.append(f"{last - first:+.2f} {unit} of {'training loss' if name == 'nll_train' else 'error'}")
    return "from the largest to the smallest: " + ", ".join(ends)


def draw(ds: xr.Dataset) -> Figure:
    """Test error and training loss along every sweep; a network that overfits has them run apart."""
    names = [name for name in ("data", "images", "epochs", "patch_size") if _values(ds, name).size > 1]
    labels = {
        "data": "share of the images [%]",
        "images": "share of the images [%]",
        "epochs": "epochs",
        "patch_size": "patch size of the ViT [px]",
    }
    titles = {
        "data": "equal epochs",
        "images": "equal images seen",
        "epochs": "all images",
        "patch_size": "all images, equal epochs",
    }
    seeds = len(np.unique(ds.seed.values))
    with style():
        figure = Figure(figsize=(min(PAGE_WIDTH, 2.1 * len(names) + 0.9), 3.9), layout="constrained")
        axes = figure.subplots(2, len(names), squeeze=False, sharey="row", sharex="col")
        for column, name in zip(axes.T, names, strict=True):
            for model in dict.fromkeys(ds.model.values.tolist()):
                points = sweep(where_model(ds, model), name)
                if len(np.unique(points.value.values)) > 1:
                    _curves(column, points, model, percent=name in ("data", "images"))
            column[0].set_title(titles[name])
            logarithmic(column[1], _values(ds, name) * (100 if name in ("data", "images") else 1))
            column[1].set_xlabel(labels[name])
        axes[0, 0].set_ylabel("test error [%]")
        axes[1, 0].set_ylabel("NLL of training,\nabove its floor [nats]")
        handles, said = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, said, loc="outside upper center", ncols=len(handles))
        bars = " Bars: 95 % t interval over seeds." if seeds > 2 else ""
        said = f"Mean of {seeds} seeds; small marks: single seeds.{bars}" if seeds > 1 else "One seed."
        figure.supxlabel(said, fontsize=6.5, color=GREY)
    return figure


def _values(ds: xr.Dataset, name: str) -> np.ndarray:
    """What a sweep goes through, over all models that have it."""
    of_model = [np.unique(sweep(where_model(ds, model), name).value.values) for model in np.unique(ds.model.values)]
    return np.unique(np.concatenate([values for values in of_model if values.size > 1] or [[]]))


def _curves(column: Sequence[Axes], points: xr.Dataset, model: str, *, percent: bool) -> None:
    """Mean and interval over seeds of one model along one sweep."""
    look = LOOKS[family(model)]
    values = np.unique(points.value.values)
    for ax, name in zip(column, ("error", "nll_train"), strict=True):
        by_value = [points[name].values[points.value.values == value] for value in values]
        middle = np.array([of_value.mean() for of_value in by_value])
        bars = np.array([interval(of_value[:, None])[1][0] if len(of_value) > 2 else np.nan for of_value in by_value])
        ax.errorbar(
            values * (100 if percent else 1), middle, bars if np.isfinite(bars).any() else None,
            label=pretty(model), markersize=3.5, elinewidth=0.7, capsize=1.5, color=look.color, marker=look.marker,
        )  # fmt: skip
        if len(np.unique(points.seed)) > 1:
            ax.scatter(
                points.value * (100 if percent else 1), points[name], s=7, color=look.color, marker=look.marker,
                alpha=0.45, linewidths=0,
            )  # fmt: skip


STUDY = Study(
    name="park_kim/data_fraction",
    title="Test error and training loss by amount of data and of training",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
