"""A run is one trained model: a name, data, a recipe; trained once, kept by the hash of all of them."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import xarray as xr
from torch import nn

from vitprobe import initializers
from vitprobe.data import ImageData, load_data
from vitprobe.models import create_model
from vitprobe.names import unknown
from vitprobe.results import cache_folder, config_hash, plain_name
from vitprobe.training import Recipe, fit

INITIALISERS = [name for name in initializers.__all__ if name.endswith("_") and name != "convolution_"]


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Which images; the arguments of `load_data`."""

    spec: str = "digits"
    root: str | None = None
    train_size: int | None = None
    test_size: int | None = None
    download: bool = True


@dataclass(frozen=True, kw_only=True)
class Run:
    """One trained model.

    Attributes:
        model: its name, for `create_model`; its initial weights are drawn from the recipe's seed.
        options: arguments of its constructor.
        initialisers: what is written over its initial weights, in this order: functions of `vitprobe.initializers` by
            name, with their options, e.g. `{"impulse_": {"kernel_size": 3}}`; seeded as the weights are.
        data: the images it is trained on.
        recipe: how it is trained.
    """

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    initialisers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data: DataSpec = field(default_factory=DataSpec)
    recipe: Recipe = field(default_factory=Recipe)

    @property
    def label(self) -> str:
        """Model and seed, for people."""
        return f"{self.model} seed {self.recipe.seed}"

    def config(self) -> dict[str, Any]:
        """Everything the trained weights depend on, as plain JSON types; data by content, not by place."""
        config = {
            "model": self.model,
            "options": dict(self.options),
            "data": load(self.data).config(),
            "recipe": self.recipe.config(),
        }
        # A list, because their order counts; left out where there are none, as in runs from before there were any.
        listed = [[name, dict(options)] for name, options in self.initialisers.items()]
        return config | ({"initialisers": listed} if listed else {})

    def key(self) -> str:
        """The hash of the configuration."""
        return config_hash(self.config())

    def folder(self, cache: Path | None = None) -> Path:
        """Where the run is kept."""
        return (cache or cache_folder()) / "runs" / f"{plain_name(self.model)}-{self.key()}"

    def fraction(self, cache: Path | None = None) -> float:
        """How much of the training is done, 0 to 1, as another process may ask."""
        try:
            progress = json.loads((self.folder(cache) / "progress.json").read_text())
        except (OSError, ValueError):
            return 0.0
        return progress["epoch"] / progress["epochs"]


@dataclass(frozen=True)
class Trained:
    """A trained model with what it was trained on and how that went."""

    run: Run
    model: nn.Module
    data: ImageData
    history: xr.Dataset


def trained(run: Run, *, cache: Path | None = None, device: str | None = None, progress: bool = False) -> Trained:
    """The run's trained model, from the cache or trained now (and resumed where an interrupted one stopped).

    Args:
        run: what to train.
        cache: folder of trained runs; `cache_folder()` unless given.
        device: where to train; the GPU if there is one unless given.
        progress: whether a terminal shows a bar.

    Returns:
        The model in evaluation mode, its data, its history.

    Raises:
        ValueError: if an initialiser is unknown.
    """
    data = load(run.data)
    model = create_model(
        run.model,
        image_size=data.image_size,
        channels=data.channels,
        num_classes=data.num_classes,
        seed=run.recipe.seed,
        **run.options,
    )
    for name, options in run.initialisers.items():
        if name not in INITIALISERS:
            raise unknown("initialiser", name, INITIALISERS)
        initialiser = getattr(initializers, name)
        drawn = {"seed": run.recipe.seed} if "seed" in inspect.signature(initialiser).parameters else {}
        initialiser(model, **{**drawn, **options})
    history = fit(model, data, run.recipe, folder=run.folder(cache), device=device, progress=progress)
    return Trained(run, model, data, history)


@lru_cache(maxsize=4)
def load(spec: DataSpec) -> ImageData:
    """The images of a spec, kept in memory."""
    return load_data(**vars(spec))
