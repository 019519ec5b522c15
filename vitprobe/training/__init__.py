"""A `Recipe` makes a trained model: `fit`, its schedule, mixing and checkpoints, and `evaluate`."""

from vitprobe.training.batches import TrainingBatches
from vitprobe.training.checkpoint import load_snapshot, load_weights
from vitprobe.training.evaluation import Evaluation, evaluate
from vitprobe.training.folder import FolderBusyError
from vitprobe.training.loop import fit
from vitprobe.training.measurements import Measurements
from vitprobe.training.mixing import mix_batch, soft_targets
from vitprobe.training.recipe import Recipe
from vitprobe.training.recipes import RECIPES, PublishedRecipe, list_recipes, make_recipe
from vitprobe.training.schedule import learning_rate
from vitprobe.training.two_phase import HandOver, fit_two_phases, function_gap, split_recipe

__all__ = [
    "RECIPES",
    "Evaluation",
    "FolderBusyError",
    "HandOver",
    "Measurements",
    "PublishedRecipe",
    "Recipe",
    "TrainingBatches",
    "evaluate",
    "fit",
    "fit_two_phases",
    "function_gap",
    "learning_rate",
    "list_recipes",
    "load_snapshot",
    "load_weights",
    "make_recipe",
    "mix_batch",
    "soft_targets",
    "split_recipe",
]
