"""A run is one trained model: a name, data, a recipe; trained once, kept by the hash of all of them."""

import copy
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr
from torch import nn

from vitprobe import initializers
from vitprobe.data import ImageData, load_data
from vitprobe.models import create_model
from vitprobe.models.convolutional_vit import transfer_
from vitprobe.names import unknown
from vitprobe.results import cache_folder, config_hash, plain_name, to_json
from vitprobe.training import Recipe, fit, function_gap, load_snapshot, load_weights
from vitprobe.training.checkpoint import CURRENT, read_json
from vitprobe.training.folder import in_use
from vitprobe.training.two_phase import SECOND

_SAID = ("recipe.json", "run.json", "progress.json")
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
        start: the run whose trained weights it starts from: of the same architecture, or of the `convolutional_vit`
            that a `relative_vit` goes on from (two-phase training).
        teacher: the run whose trained network teaches it, if the recipe distils.
        data: the images it is trained on.
        recipe: how it is trained.
    """

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    initialisers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    start: "Run | None" = None
    teacher: "Run | None" = None
    data: DataSpec = field(default_factory=DataSpec)
    recipe: Recipe = field(default_factory=Recipe)

    @property
    def label(self) -> str:
        """Model and seed, for people."""
        return f"{self.model} seed {self.recipe.seed}"

    def config(self) -> dict[str, Any]:
        """All settings that the trained weights depend on, as plain JSON types; data by content, not by place.

        Code is none of them: after a change of what a default means, or of a library, empty the cache.
        """
        config = {
            "model": self.model,
            "options": dict(self.options),
            "data": load(self.data).config(),
            "recipe": self.recipe.key(),
        }
        # A list, because their order counts; left out where there are none, as in runs from before there were any.
        listed = [[name, dict(options)] for name, options in self.initialisers.items()]
        others = {"start": self.start, "teacher": self.teacher}
        return (
            config
            | ({"initialisers": listed} if listed else {})
            | {name: run.config() for name, run in others.items() if run is not None}
        )

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
    """A trained model with what it was trained on, how that went, and where it is kept."""

    run: Run
    model: nn.Module
    data: ImageData
    history: xr.Dataset
    folder: Path

    def at(self, epoch: int) -> nn.Module:
        """A copy of the model with the weights it had after so many epochs.

        Args:
            epoch: one of the recipe's `snapshots`; 0 are the initial weights.

        Raises:
            FileNotFoundError: if the run kept none of that epoch.
        """
        model = copy.deepcopy(self.model)
        load_snapshot(model, self.folder, epoch)
        return model


def trained(
    run: Run,
    *,
    cache: Path | None = None,
    until: int | None = None,
    device: str | None = None,
    on_epoch: Callable[[nn.Module, dict[str, float]], None] | None = None,
    progress: bool = False,
) -> Trained:
    """The run's trained model, from the cache or trained now (and resumed where an interrupted one stopped).

    Where another process trains the same run, its end is waited for. The runs it starts from and is taught by are
    trained first, if they are not yet.

    Args:
        run: what to train.
        cache: folder of trained runs; `cache_folder()` unless given.
        until: train to this epoch only, as in `fit`, for what is measured early in training. The model may be further:
            take that of the epoch with `.at(epoch)`.
        device: where to train; the GPU if there is one unless given.
        on_epoch: as in `fit`; not called for a run that is finished.
        progress: whether a terminal shows a bar.

    Returns:
        The model in evaluation mode, its data, its history. Of a run that a `convolutional_vit` handed its weights
        to, the history's attribute `hand_over` tells how far the functions were apart (JSON, see `HandOver`).

    Raises:
        ValueError: if an initialiser is unknown, or the weights to start from do not fit.
    """
    data = load(run.data)
    model = _initial(run, data)
    said = {}
    if run.start is not None:
        source = trained(run.start, cache=cache, device=device, progress=progress).model
        said["hand_over"] = take_over(model, source, data)
    teacher = None if run.teacher is None else trained(run.teacher, cache=cache, device=device, progress=progress).model
    folder = run.folder(cache)
    history = fit(
        model,
        data,
        run.recipe,
        teacher=teacher,
        folder=folder,
        on_epoch=on_epoch,
        until=until,
        epochs_before=epochs_before(run),
        initial=run.key(),  # which has all that they come from, and names the folder
        device=device,
        when_busy="wait",
        progress=progress,
    )
    return Trained(run, model, data, history.assign_attrs(said), folder)


def epochs_before(run: Run) -> int:
    """How many epochs the runs took that a run goes on from, as far as they share its seed.

    Args:
        run: whose `start`, and the start's own, count.
    """
    if run.start is None or run.start.recipe.seed != run.recipe.seed:
        return 0
    return run.start.recipe.epochs + epochs_before(run.start)


def _initial(run: Run, data: ImageData) -> nn.Module:
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
    return model


def take_over(model: nn.Module, source: nn.Module, data: ImageData) -> str:
    """Write a trained network's function into a fresh one.

    Args:
        model: of the same architecture, or the `relative_vit` that a `convolutional_vit` goes on as.
        source: the trained network.
        data: on whose test images the two functions are compared.

    Returns:
        How far they are apart (JSON text, see `HandOver`).

    Raises:
        ValueError: if the weights do not fit.
    """
    model.to(next(source.parameters()).device)
    shapes = ({name: value.shape for name, value in one.state_dict().items()} for one in (model, source))
    if next(shapes) == next(shapes):
        model.load_state_dict(source.state_dict())
    else:
        transfer_(model, source)
    return to_json(asdict(function_gap(source, model, data.loader("test"))))


def load_run(folder: str | os.PathLike[str], epoch: int | None = None) -> nn.Module:
    """The trained network of a run's folder, in evaluation mode on the CPU.

    Args:
        folder: of `fit`, `trained` or `vitprobe train`; the network must have been made by `create_model`.
        epoch: with the weights after so many epochs, one of the recipe's `snapshots`; the last ones unless given.

    Raises:
        FileNotFoundError: if the folder holds no run, or no weights of that epoch.
        ValueError: if the network was made in another way, or the weights are damaged.
    """
    if not (Path(folder) / "run.json").exists() and (Path(folder) / SECOND / "run.json").exists():
        folder = Path(folder) / SECOND  # of two phases
    run, weights = read_json(Path(folder) / "run.json"), Path(folder) / CURRENT
    if not run or (epoch is None and not weights.exists()):
        raise FileNotFoundError(
            f"{folder} holds no trained network (run.json and {CURRENT}): give the folder of a training, or build the"
            " network and call load_weights(model, FILE)."
        )
    try:
        model = create_model(**run["created"])
        if initialisation := run.get("initialisation"):
            model.initialisation = initialisation  # what the datasets of it say
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the {run.get('model_class', 'network')} in {folder} cannot be made by create_model: build it as it was"
            f" then, and give it to load_weights(model, {str(weights)!r})."
        ) from error
    if epoch is None:
        load_weights(model, weights)
    else:
        load_snapshot(model, folder, epoch)
    return model.eval()


def list_runs(folder: str | os.PathLike[str] | None = None) -> pd.DataFrame:
    """The trained and unfinished runs below a folder, one row each.

    Args:
        folder: where to look, at any depth; the cache unless given.

    Returns:
        Columns `model` (its class if it was not made by name), `data`, `seed`, `epoch` and `epochs`, `test_accuracy`,
        `state` (finished, running or stopped), `where` (host and device), `changed` (UTC) and `folder`; the last
        changed first.

    Raises:
        FileNotFoundError: if there is no such folder.
    """
    root = cache_folder() if folder is None else Path(folder)
    if folder is not None and not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}: name one that trainings are in, or none for the cache.")
    rows = [_listed(path.parent, root) for path in root.glob("**/recipe.json")]
    columns = ["model", "data", "seed", "epoch", "epochs", "test_accuracy", "state", "where", "changed", "folder"]
    table = pd.DataFrame(rows, columns=columns)
    return table.sort_values("changed", ascending=False, ignore_index=True)


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # never there, or just being replaced
        return 0.0


def _listed(path: Path, root: Path) -> dict[str, Any]:
    recipe, run, progress = (read_json(path / f"{name}.json") for name in ("recipe", "run", "progress"))
    epoch = progress.get("epoch", 0)
    user = in_use(path)
    newest = max(_changed(path / name) for name in (CURRENT, *_SAID))
    return {
        "model": (run.get("created") or {}).get("name") or run.get("model_class", ""),
        "data": run.get("data_name", ""),
        "seed": recipe.get("seed"),
        "epoch": epoch,
        "epochs": recipe.get("epochs"),
        "test_accuracy": progress.get("test_accuracy"),
        "state": "running" if user else "finished" if epoch == recipe.get("epochs") else "stopped",
        "where": user or " ".join(filter(None, [progress.get("host"), progress.get("device")])),
        "changed": pd.Timestamp(newest, unit="s").floor("s"),
        "folder": str(path.relative_to(root)),
    }


@lru_cache(maxsize=4)
def load(spec: DataSpec) -> ImageData:
    """The images of a spec, kept in memory."""
    return load_data(**vars(spec))
