"""The named recipes: the papers' settings as facts state them, and schedules against those of the papers' libraries."""

import math

import pytest
import torch
from timm.scheduler import CosineLRScheduler

from vitprobe.data.augment import augmentation
from vitprobe.training import RECIPES, Recipe, learning_rate, list_recipes, make_recipe

PUBLISHED = {
    "park_kim_strong": {
        "epochs": 305,
        "batch_size": 96,
        "optimizer": "adamw",
        "lr": 1.25e-4,
        "weight_decay": 0.05,
        "decay": "all",
        "warmup_epochs": 5,
        "augment": "crop_flip+rand-m9-n2-mstd1.0",
        "label_smoothing": 0.1,
        "mixup": 1.0,
        "cutmix": 0.8,
        "mix_probability": 1.0,
        "mix_switch": 0.5,
        "stochastic_depth": 0.1,
        "clip": 5.0,
        "snapshots": (0, 5, 105, 205, 305),
    },
    "park_kim_weak": {
        "augment": "crop_flip",
        "label_smoothing": 0,
        "mixup": 0,
        "cutmix": 0,
        "clip": None,
        "lr": 1.25e-4,
    },
    "zheng_noaug": {
        "epochs": 200,
        "batch_size": 512,
        "optimizer": "adam",
        "lr": 1e-4,
        "weight_decay": 0,
        "warmup_epochs": 0,
        "augment": "none",
        "label_smoothing": 0,
    },
    "zheng_aug": {"augment": "randaugment-n2-m14+crop_flip", "lr": 1e-4},
    "dascoli_deit": {
        "epochs": 300,
        "batch_size": 1024,
        "lr": 5e-4 * 1024 / 512,
        "weight_decay": 0.05,
        "decay": "matrices",
        "warmup_epochs": 5,
        "warmup_lr": 1e-6,
        "min_lr": 1e-5,
        "label_smoothing": 0.1,
        "mixup": 0.8,
        "cutmix": 1.0,
        "repeats": 3,
        "stochastic_depth": 0.1,
        "clip": None,
    },
    "convmixer_cifar": {"epochs": 25, "batch_size": 512, "lr": 0.05, "weight_decay": 0.005, "optimizer": "adamw"},
}

# Learning rates at the end of each epoch that the ConvMixer authors' log prints.
CONVMIXER_LOG = [0.005 * n for n in range(1, 11)] + [0.05 - 0.00475 * n for n in range(1, 11)]
CONVMIXER_LOG += [0.002, 0.0015, 0.001, 0.0005, 0.0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_the_published_ones(name):
    recipe = make_recipe(name)
    assert {key: getattr(recipe, key) for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_can_be_used_and_says_where_it_is_from(name):
    one = RECIPES[name]
    augmentation(one.recipe.augment)
    assert one.source
    assert Recipe(**one.recipe.config()) == one.recipe
    if name.endswith("_cpu"):
        changes = one.changes()
        assert {"epochs", "batch_size"} <= set(changes)
        published = RECIPES[name.removesuffix("_cpu")].recipe
        undone = {key: old for key, (old, _) in changes.items()}
        assert Recipe(**{**one.recipe.config(), **undone}) == published
    else:
        assert one.changes() == {}


def test_changes_unknown_names_and_unknown_settings():
    assert make_recipe("zheng_aug", seed=3, epochs=10).seed == 3
    with pytest.raises(ValueError, match="Did you mean 'park_kim_weak'"):
        make_recipe("park_kim_wek")
    with pytest.raises(TypeError, match="Did you mean 'epochs'"):
        make_recipe("zheng_aug", epoch=3)


def test_convmixers_rates_are_those_of_its_log():
    recipe = make_recipe("convmixer_cifar")
    steps = math.ceil(50_000 / 512)
    found = [learning_rate(recipe, epoch * steps - 1, steps) for epoch in range(1, 26)]
    assert found == pytest.approx(CONVMIXER_LOG, abs=1e-9)


def test_deits_rates_are_those_of_timm():
    recipe, steps = make_recipe("dascoli_deit"), 7
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=recipe.lr)
    schedule = CosineLRScheduler(
        optimizer, t_initial=300, lr_min=recipe.min_lr, warmup_t=5, warmup_lr_init=recipe.warmup_lr, warmup_prefix=False
    )
    for epoch in range(recipe.epochs):
        schedule.step(epoch)
        for step in (0, 3, 6):
            found = learning_rate(recipe, epoch * steps + step, steps)
            assert found == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), epoch


@pytest.mark.parametrize("name", ["park_kim_strong", "zheng_noaug"])
def test_cosines_per_epoch_are_those_of_pytorch(name):
    """Park & Kim warm up for five epochs, step by step from 0; then both go down once per epoch."""
    recipe, steps = make_recipe(name), 4
    warmup = int(recipe.warmup_epochs)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=recipe.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs - warmup)
    for step in range(warmup * steps):
        assert learning_rate(recipe, step, steps) == pytest.approx(recipe.lr * (step + 1) / (warmup * steps))
    for epoch in range(warmup, recipe.epochs):
        for step in range(steps):
            found = learning_rate(recipe, epoch * steps + step, steps)
            assert found == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-12)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.3, 0.5, 1.0])
def test_a_part_of_the_images_sees_as_many_in_all(fraction):
    recipe = make_recipe("dascoli_deit")
    stretched = recipe.stretched(fraction)
    assert stretched.epochs * fraction == pytest.approx(recipe.epochs, rel=0.01)
    assert stretched.warmup_epochs / stretched.epochs == pytest.approx(recipe.warmup_epochs / recipe.epochs, rel=0.01)
    steps = 100
    for done in (0.3, 0.7, 0.95):
        rates = [
            learning_rate(one, round(done * one.epochs * part), part)
            for one, part in ((recipe, steps), (stretched, max(1, round(steps * fraction))))
        ]
        assert rates[1] == pytest.approx(rates[0], rel=0.05)


def test_a_part_of_no_images_is_refused():
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        Recipe().stretched(0)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"accumulate": 300}, "accumulate must be at most batch_size, 128"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"snapshots": (3, 30)}, "snapshots must be whole epochs from 0 to 20"),
        ({"distillation": 1.5}, "distillation must be between 0 and 1"),
        ({"warmup_lr": 1.0}, "warmup_lr must be at most lr"),
        ({"schedule": "cosinus"}, "Did you mean 'cosine'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, wanted):
    with pytest.raises(ValueError, match=wanted):
        Recipe(**settings)
