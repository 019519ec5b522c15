"""A `Recipe` makes a trained model: `fit`, its schedule, mixing and checkpoints, and `evaluate`."""

from vitprobe.training.batches import TrainingBatches
from vitprobe.training.checkpoint import load_weights
from vitprobe.training.evaluation import Evaluation, evaluate
from vitprobe.training.loop import fit
from vitprobe.training.mixing import mix_batch, soft_targets
from vitprobe.training.recipe import Recipe
from vitprobe.training.schedule import learning_rate

__all__ = [
    "Evaluation",
    "Recipe",
    "TrainingBatches",
    "evaluate",
    "fit",
    "learning_rate",
    "load_weights",
    "mix_batch",
    "soft_targets",
]
