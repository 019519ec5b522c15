"""The learning rate of every step."""

import math

from vitprobe.training.recipe import Recipe


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The learning rate of one step: a linear warm-up, then the recipe's schedule down to its `min_lr`.

    The first step of the warm-up is at `1 / warm-up steps` of the peak: a step at rate 0 would be wasted.

    Args:
        recipe: gives `lr`, `min_lr`, `warmup_epochs`, `schedule` and `epochs`.
        step: number of the step in the whole run, from 0.
        steps_per_epoch: how many steps one epoch has.
    """
    total = recipe.epochs * steps_per_epoch
    warmup = round(recipe.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    if recipe.schedule == "constant":
        return recipe.lr
    done = (step - warmup) / (total - warmup)
    left = (1 + math.cos(math.pi * done)) / 2 if recipe.schedule == "cosine" else 1 - done
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * left
