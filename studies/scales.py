"""What studies of small data share: images, networks' size, seeds and recipe by scale."""

from dataclasses import dataclass, replace
from typing import Any

from vitprobe.runs import DataSpec, Run
from vitprobe.study import Settings
from vitprobe.training import Recipe, make_recipe


@dataclass(frozen=True)
class Small:
    """One scale of a study of small data.

    Attributes:
        size: what ends the names of its networks, `"nano"` or `"micro"`; empty for those of the papers.
        data: the images.
        seeds: how many.
        recipe: of all its networks; at the paper scale a published one takes its place.
    """

    size: str
    data: DataSpec
    seeds: int
    recipe: Recipe


SMALL = {
    "smoke": Small(
        "nano",
        DataSpec(spec="digits", train_size=200, test_size=100),
        2,
        Recipe(epochs=1, batch_size=50, warmup_epochs=0.5),
    ),
    "quick": Small(
        "nano",
        DataSpec(spec="digits", train_size=500),
        3,
        Recipe(epochs=25, batch_size=32, lr=2e-3, augment="none", channels_last=True),
    ),
    "cpu": Small(
        "micro",
        DataSpec(spec="cifar10", train_size=5_000, test_size=2_000),
        3,
        Recipe(epochs=8, batch_size=32, lr=1e-3, augment="crop_flip", channels_last=True),
    ),
    "paper": Small("", DataSpec(spec="cifar10"), 3, Recipe()),
}
LEAST = 35.0  # test accuracy [%] of ten classes from which on a network of small data has learned its task


def chosen(settings: Settings, data: DataSpec) -> DataSpec:
    """The images of a scale, or those that the settings ask for instead.

    Args:
        settings: of the study.
        data: the scale's own.
    """
    if settings.data not in (None, data.spec):
        data = DataSpec(spec=settings.data)  # other data in full, unless sizes are asked for
    return DataSpec(
        spec=data.spec,
        root=str(settings.data_root) if settings.data_root else None,
        train_size=settings.train_size or data.train_size,
        test_size=settings.test_size or data.test_size,
        download=settings.download,
    )


def by_seed(settings: Settings, *, published: str, **changes: Any) -> list[Run]:
    """A run without a network for each seed, for `dataclasses.replace` to give it one.

    Args:
        settings: of the study.
        published: the recipe's name in `make_recipe`, for the paper scale.
        **changes: of the recipe, at every scale, e.g. `augment="none"`.

    Returns:
        One run for each seed; its model's name is empty.
    """
    small = SMALL[settings.scale]
    recipe = make_recipe(published) if settings.scale == "paper" else small.recipe
    data = chosen(settings, small.data)
    return [
        Run(model="", data=data, recipe=replace(recipe, seed=seed, **changes))
        for seed in range(settings.seeds or small.seeds)
    ]


def sized(name: str, settings: Settings) -> str:
    """The registered model of a name at a scale: `"simple_vit_nano"` of `"simple_vit"`, or the paper's own.

    Args:
        name: without a size.
        settings: of the study.
    """
    size = SMALL[settings.scale].size
    return f"{name}_{size}" if size else name
