"""The papers' trainings by name, with their exact settings, and versions of them for two cores."""

from dataclasses import dataclass, fields, replace
from typing import Any

from vitprobe.names import unknown
from vitprobe.training.recipe import Recipe


@dataclass(frozen=True)
class PublishedRecipe:
    """A recipe with where it is from.

    Attributes:
        recipe: the settings.
        source: the paper or code that has them, and what they are for.
        notes: what the source leaves open or contradicts itself in, and what was taken.
        scaled_from: of which published recipe this is the version for two cores; empty for those.
    """

    recipe: Recipe
    source: str
    notes: str = ""
    scaled_from: str = ""

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """What a scaled-down recipe changed: published and own value, by the name of the setting."""
        if not self.scaled_from:
            return {}
        published = RECIPES[self.scaled_from].recipe
        return {
            field.name: (getattr(published, field.name), getattr(self.recipe, field.name))
            for field in fields(Recipe)
            if getattr(published, field.name) != getattr(self.recipe, field.name)
        }


_PARK_KIM = Recipe(
    epochs=305,
    batch_size=96,
    optimizer="adamw",
    lr=1.25e-4,
    weight_decay=0.05,
    decay="all",
    warmup_epochs=5,
    schedule="cosine",
    schedule_per="epoch",
    augment="crop_flip+rand-m9-n2-mstd1.0",
    label_smoothing=0.1,
    mixup=1.0,
    cutmix=0.8,
    stochastic_depth=0.1,
    clip=5.0,
    snapshots=(0, 5, 105, 205, 305),
)
_ZHENG = Recipe(
    epochs=200,
    batch_size=512,
    optimizer="adam",
    lr=1e-4,
    weight_decay=0.0,
    warmup_epochs=0,
    schedule="cosine",
    schedule_per="epoch",
    precision="bfloat16",
)
_DEIT = Recipe(
    epochs=300,
    batch_size=1024,
    optimizer="adamw",
    lr=1e-3,
    weight_decay=0.05,
    decay="matrices",
    warmup_epochs=5,
    warmup_lr=1e-6,
    warmup_per="epoch",
    schedule="cosine_from_start",
    schedule_per="epoch",
    min_lr=1e-5,
    augment="crop_flip+rand-m9-n2-mstd0.5-inc1+erase-0.25-pixel",
    repeats=3,
    label_smoothing=0.1,
    mixup=0.8,
    cutmix=1.0,
    stochastic_depth=0.1,
    precision="bfloat16",
)

RECIPES: dict[str, PublishedRecipe] = {
    "park_kim_strong": PublishedRecipe(
        _PARK_KIM,
        "Park & Kim 2022, CIFAR, main results (their configuration files and training code)",
        "Five epochs of warm-up, then 300; snapshots before, after the warm-up, and 100, 200 and 300 epochs later. The "
        "padded crop is that of their CIFAR-100; their CIFAR-10 has augment='resized_crop-0.08+flip+...' instead.",
    ),
    "park_kim_weak": PublishedRecipe(
        replace(_PARK_KIM, augment="crop_flip", label_smoothing=0.0, mixup=0.0, cutmix=0.0, clip=None),
        "Park & Kim 2022, CIFAR, weak augmentation (Figure F.1)",
        "Their weak configurations do not clip gradients; stochastic depth stays.",
    ),
    "zheng_noaug": PublishedRecipe(
        _ZHENG,
        "Zheng et al. 2024, Tables 1 and 2: no augmentation (their training script)",
        "Their half precision is float16 with a loss scaler; here bfloat16. ConvMixers have lr=1e-3. They divide by "
        "other standard deviations (0.2471, 0.2435, 0.2616) than Park & Kim.",
    ),
    "zheng_aug": PublishedRecipe(
        replace(_ZHENG, augment="randaugment-n2-m14+crop_flip"),
        "Zheng et al. 2024, Tables 3 and 4: RandAugment(2, 14), crop and flip (their training script)",
        "Versions of their code differ: one has a resized crop, augment='randaugment-n2-m14+flip+resized_crop-0.08'; "
        "their notebook does not crop. Half precision and normalisation as for zheng_noaug.",
    ),
    "dascoli_deit": PublishedRecipe(
        _DEIT,
        "d'Ascoli et al. 2021, ConViT: DeiT's training (Touvron et al. 2021)",
        "The crop is the one they take up to 32 px. Colour jitter of 0.4 is among their options and has no effect, "
        "because timm leaves it out beside RandAugment; ten cooldown epochs likewise, because their loop ends at 300. "
        "The paper repeats augmentation three times; the released loop draws with class weights instead (repeats=1 is "
        "nearer to it). The '+' models have batch_size=512 and lr=4e-4.",
    ),
    "convmixer_cifar": PublishedRecipe(
        Recipe(
            epochs=25,
            batch_size=512,
            optimizer="adamw",
            lr=0.05,
            weight_decay=0.005,
            decay="all",
            warmup_epochs=10,
            schedule="triangular_tail",
            augment="flip+randaugment-n2-m12",
            precision="bfloat16",
        ),
        "Trockman & Kolter's script for ConvMixer-256/8 on CIFAR-10: 92.60 % after 25 epochs",
        "Their half precision is float16 with a loss scaler; they divide by other standard deviations (0.2471, 0.2435, "
        "0.2616). The warm-up is two fifths of the epochs: change both together.",
    ),
    "two_phase": PublishedRecipe(
        replace(_DEIT, batch_size=128, lr=5e-4, repeats=1),
        "Li et al. 2021, two-phase training on CIFAR-100",
        "The paper's optimiser and augmentation are not known: these are DeiT's, at a batch for small images. Each "
        "phase has the whole schedule over its share of the epochs.",
    ),
}

# Scaled down so that networks of two cores (the `_micro` models) learn from 10,000 images in 16 epochs: the published
# rates are for ten times the steps.
_SMALL = {"epochs": 16, "batch_size": 64, "lr": 1e-3, "precision": "float32", "channels_last": True}
_SCALED: dict[str, dict[str, Any]] = {
    "park_kim_strong": {**_SMALL, "warmup_epochs": 1.0, "snapshots": (0, 1, 6, 11, 16)},
    "park_kim_weak": {**_SMALL, "warmup_epochs": 1.0, "snapshots": (0, 1, 6, 11, 16)},
    "zheng_noaug": {**_SMALL, "warmup_epochs": 1.0},
    "zheng_aug": {**_SMALL, "warmup_epochs": 1.0},
    "dascoli_deit": {**_SMALL, "warmup_epochs": 1.0, "warmup_per": "step", "repeats": 1},
    "convmixer_cifar": {**_SMALL, "epochs": 10, "lr": 0.01, "warmup_epochs": 4.0, "augment": "crop_flip"},
    "two_phase": {**_SMALL, "warmup_epochs": 1.0, "warmup_per": "step"},
}
RECIPES |= {
    f"{name}_cpu": PublishedRecipe(
        replace(RECIPES[name].recipe, **changed),
        f"{name}, scaled down for two cores and 10,000 images",
        scaled_from=name,
    )
    for name, changed in _SCALED.items()
}


def make_recipe(name: str, **changes: Any) -> Recipe:
    """The recipe of that name, with changes. With fewer epochs, snapshots of later ones are left out.

    Args:
        name: one of `list_recipes()`.
        changes: settings that shall be others.

    Raises:
        ValueError: if the name is unknown, or a value is not allowed.
        TypeError: if there is no such setting.
    """
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    known = [field.name for field in fields(Recipe)]
    for setting in changes:
        if setting not in known:
            raise TypeError(str(unknown("setting of a recipe", setting, known)))
    recipe = RECIPES[name].recipe
    if "snapshots" not in changes and changes.get("epochs", recipe.epochs) < recipe.epochs:
        changes["snapshots"] = tuple(epoch for epoch in recipe.snapshots if epoch <= changes["epochs"])
    return replace(recipe, **changes)


def list_recipes() -> list[str]:
    """The names of the recipes."""
    return list(RECIPES)
