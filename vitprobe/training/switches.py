"""Switches of models and of PyTorch that a training sets, and sets back."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def set_stochastic_depth(model: nn.Module, rate: float) -> None:
    """Sets drop rates that grow linearly from 0 at the first to `rate` at the last branch that can drop.

    Branches are modules of a class called `StochasticDepth` (torchvision's, with `p`) or `DropPath` (timm's,
    with `drop_prob`).

    Args:
        model: any module.
        rate: drop rate of the last branch; 0 switches all off.

    Raises:
        ValueError: if the rate is above 0 and the model has no such module.
    """
    attributes = {"StochasticDepth": "p", "DropPath": "drop_prob"}
    branches = [module for module in model.modules() if type(module).__name__ in attributes]
    if rate > 0 and not branches:
        raise ValueError(
            f"the recipe wants stochastic_depth={rate}, but the model has no StochasticDepth or DropPath:"
            " build the model with it (in timm, drop_path_rate above 0), or set stochastic_depth=0."
        )
    for number, module in enumerate(branches):
        depth = number / (len(branches) - 1) if len(branches) > 1 else 1.0
        setattr(module, attributes[type(module).__name__], rate * depth)


@contextlib.contextmanager
def own_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds PyTorch's global generators, which dropout draws from, and gives them back as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms for the length of a training."""
    if not wanted:
        yield
        return
    enabled, warn_only, benchmark = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    # cuBLAS reads this once, at the first CUDA product: after that it comes too late, and PyTorch warns.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark


def flags() -> dict[str, Any]:
    """Global switches of PyTorch that change numbers on a GPU."""
    return {
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
