"""The optimiser of a recipe, and what it lets decay."""

from typing import Any

import torch
from torch import nn

from vitprobe.training.recipe import Recipe


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """The trainable parameters, in one group for `decay="all"` and in two for `decay="matrices"`.

    A parameter is a matrix if it has two or more dimensions, is called `…weight` and is not an embedding's:
    class tokens, position codes and relative-bias tables have two dimensions too, but are no map's weights.
    A module whose matrix goes by another name says so in an attribute `matrices`, a tuple of names of its own
    parameters (the position vectors of ConViT, which the published code has as a layer's weight, and lets decay).
    Frozen parameters (`requires_grad=False`) are left out.

    Args:
        model: any module.
        recipe: gives `weight_decay` and `decay`.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if recipe.decay == "all":
        return [{"params": list(trainable.values()), "weight_decay": recipe.weight_decay}]
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    declared = {id(parameter) for module in model.modules() for parameter in _declared(module)}
    matrices: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in trainable.items():
        is_matrix = parameter.ndim >= 2 and name.endswith("weight") and id(parameter) not in embeddings
        (matrices if is_matrix or id(parameter) in declared else free).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _declared(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module calls matrices; an attribute of this name that is anything else is not for us."""
    names = getattr(module, "matrices", ())
    own = dict(module.named_parameters(recurse=False))
    return [own[name] for name in names if name in own] if isinstance(names, tuple) else []


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimiser over the model's trainable parameters; its rate is set anew at every step."""
    groups = parameter_groups(model, recipe)
    # Fused: one kernel for a tensor's whole update, on a CPU too, where a small network has many small tensors.
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, fused=True)
    kind = torch.optim.AdamW if recipe.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)
