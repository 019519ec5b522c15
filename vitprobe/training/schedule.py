"""The learning rate of every step."""

import math

from vitprobe.training.recipe import Recipe


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The learning rate of one step: a linear warm-up, then the recipe's schedule down to its `min_lr`.

    The first step of a warm-up per step is at `1 / warm-up steps` of the way: one at rate 0 would be wasted.

    Args:
        recipe: gives `lr`, `min_lr`, `epochs`, and the settings of warm-up and schedule.
        step: number of the step in the whole run, from 0.
        steps_per_epoch: how many steps one epoch has.
    """
    total = recipe.epochs * steps_per_epoch
    warmup = round(recipe.warmup_epochs * steps_per_epoch)
    if step < warmup:
        reached = step + 1 if recipe.warmup_per == "step" else step // steps_per_epoch * steps_per_epoch
        return recipe.warmup_lr + (recipe.lr - recipe.warmup_lr) * reached / warmup
    if recipe.schedule == "constant":
        return recipe.lr
    start = 0 if recipe.schedule == "cosine_from_start" else warmup
    # An epoch has the rate of its first step, or that of the warm-up's end, if it ends within it.
    now = step if recipe.schedule_per == "step" else step - step % steps_per_epoch
    past = max(now - start, 0)
    if recipe.schedule == "triangular_tail":
        return _with_tail(recipe, (past + 1) / (total - start))
    done = past / (total - start)
    left = 1 - done if recipe.schedule == "triangular" else (1 + math.cos(math.pi * done)) / 2
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * left


def _with_tail(recipe: Recipe, done: float) -> float:
    knee, tail = 2 / 3, recipe.lr / 20
    if done < knee:
        return recipe.lr + (tail - recipe.lr) * done / knee
    return tail + (recipe.min_lr - tail) * (done - knee) / (1 - knee)
