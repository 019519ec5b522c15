"""The training loop."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn
from tqdm import tqdm

from vitprobe.calling import described, logits_of
from vitprobe.results import provenance
from vitprobe.seeds import derive_seed
from vitprobe.training.checkpoint import (
    load_checkpoint,
    load_weights,
    plain_names,
    require_same,
    save_checkpoint,
    write_json,
)
from vitprobe.training.evaluation import evaluate
from vitprobe.training.mixing import mix_batch, soft_targets
from vitprobe.training.optimizer import make_optimizer
from vitprobe.training.recipe import Recipe
from vitprobe.training.schedule import learning_rate

if TYPE_CHECKING:
    from vitprobe.data import ImageData

Row = dict[str, float]  # one epoch of the history

HISTORY = {
    "train_loss": ("mean cross-entropy with the mixed and smoothed targets while training", "nats"),
    "train_accuracy": ("share of training images whose largest output is at the largest target", "1"),
    "train_entropy_floor": ("mean entropy of the targets, below which train_loss cannot fall", "nats"),
    "test_loss": ("mean negative log-likelihood on the test images", "nats"),
    "test_accuracy": ("accuracy on the test images", "1"),
    "lr": ("learning rate of the last step of the epoch", "1"),
    "seconds": ("wall time of the training steps of the epoch", "s"),
}


def fit(
    model: nn.Module,
    data: "ImageData",
    recipe: Recipe,
    *,
    folder: str | os.PathLike[str] | None = None,
    on_epoch: Callable[[nn.Module, Row], None] | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Trains a model in place by a recipe and gives the history; with a folder, goes on where it stopped.

    All randomness comes from `recipe.seed`, the purpose and the epoch. So the same call gives the same
    numbers whatever ran before (bit for bit on a CPU, also when it was interrupted and resumed; `seconds`
    excepted), and the caller's random state stays as it was. The model ends in evaluation mode on the device.

    The folder gets `recipe.json`, after every epoch `checkpoint.pt` (the one before stays as
    `checkpoint.previous.pt`) and `progress.json`, which another process may poll. A folder whose training is
    finished loads the weights and gives the history at once.

    Args:
        model: any module from `(batch, channel, height, width)` to `(batch, class)`.
        data: the images, from `vitprobe.load_data`.
        recipe: the settings.
        folder: where the run lives; `None` keeps nothing.
        on_epoch: called after each epoch is saved, with the model and the row (which has `epoch`, from 1).
        device: where to train; `None` is the GPU if there is one, else where the model is.
        progress: whether a terminal shows a bar.

    Returns:
        Along `epoch` (completed epochs, from 1): `train_loss`, `train_accuracy`, `train_entropy_floor`,
        `test_loss`, `test_accuracy`, `lr` and `seconds`.

    Raises:
        ValueError: if model, data and recipe do not fit together, or the folder holds another training.
        FloatingPointError: if the training loss is no longer finite; the last good checkpoint is kept.
        KeyboardInterrupt: on Ctrl-C, after saying how to go on.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no trainable parameter: call model.requires_grad_(True).")
    where = torch.device(device) if device is not None else _default_device(model)
    model.to(where)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    set_stochastic_depth(model, recipe.stochastic_depth)
    run = _Run(model, data, recipe, where)
    path = None if folder is None else Path(folder)
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        run.resume(path)
        write_json(path / "recipe.json", recipe.config())
    with (
        _deterministic(recipe.deterministic),
        _sentence_on_interrupt(run, path),
        tqdm(
            total=recipe.epochs * run.steps_per_epoch,
            initial=len(run.history) * run.steps_per_epoch,
            unit="step",
            disable=None if progress else True,
        ) as bar,
    ):
        for epoch in range(len(run.history) + 1, recipe.epochs + 1):
            row = run.epoch(epoch, bar)
            if path is not None:
                save_checkpoint(path, run.state())
                write_json(path / "progress.json", _progress(row, recipe))
            bar.set_postfix(loss=f"{row['train_loss']:.3f}", test_accuracy=f"{row['test_accuracy']:.4f}")
            if on_epoch is not None:
                on_epoch(model, dict(row))
    model.eval()
    return run.dataset()


class _Run:
    """One training: what changes from epoch to epoch, and one epoch of it."""

    def __init__(self, model: nn.Module, data: "ImageData", recipe: Recipe, device: torch.device) -> None:
        self.model, self.data, self.recipe, self.device = model, data, recipe, device
        size = recipe.batch_size
        self.train = data.loader("train", batch_size=size, device=device, seed=recipe.seed, augment=recipe.augment)
        self.test = data.loader("test", batch_size=size, device=device)
        self.steps_per_epoch = len(self.train)
        self.optimizer = make_optimizer(model, recipe)
        self.history: list[Row] = []
        # What a checkpoint gives back must compare equal: tuples become lists here, not there.
        self.data_config = json.loads(json.dumps(data.config()))

    def state(self) -> dict[str, Any]:
        return {
            "model": plain_names(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "epoch": len(self.history),
            "history": self.history,
            "recipe": self.recipe.config(),
            "data": self.data_config,
        }

    def resume(self, folder: Path) -> None:
        saved = load_checkpoint(folder)
        if saved is None:
            return
        # A setting that is newer than the checkpoint had its default then.
        require_same(folder, Recipe().config() | saved["recipe"], self.recipe.config(), "recipe")
        require_same(folder, saved["data"], self.data_config, "data")
        load_weights(self.model, saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.history = saved["history"]

    def epoch(self, epoch: int, bar: "tqdm[Any]") -> Row:
        recipe = self.recipe
        rng = np.random.default_rng(derive_seed(recipe.seed, "mixing", epoch))
        self.train.epoch = epoch
        losses, floors, hits, sizes = [], [], [], []
        lr = recipe.lr
        start = time.perf_counter()
        with _own_random_state(derive_seed(recipe.seed, "forward", epoch), self.device):
            self.model.train()
            for number, (images, labels) in enumerate(self.train):
                lr = learning_rate(recipe, (epoch - 1) * self.steps_per_epoch + number, self.steps_per_epoch)
                targets = soft_targets(labels, self.data.num_classes, recipe.label_smoothing)
                images, targets = mix_batch(images, targets, recipe, rng)
                loss, logits = self.step(images, targets, lr)
                losses.append(loss.detach())
                floors.append(torch.special.entr(targets).sum(1).mean())
                hits.append((logits.detach().argmax(1) == targets.argmax(1)).float().mean())
                sizes.append(len(labels))
                bar.update()
            self.optimizer.zero_grad()
            # The only wait for the device in the epoch. Batch means are weighted by batch size.
            means = torch.stack([torch.stack(values) for values in (losses, hits, floors)]).double().cpu()
            seconds = time.perf_counter() - start
            self._require_finite(means[0], epoch)
            weights = torch.tensor(sizes, dtype=torch.float64)
            train_loss, train_accuracy, floor = (means @ weights / weights.sum()).tolist()
            test = evaluate(self.model, self.test, device=self.device)
        row = {
            "epoch": epoch,
            "train_loss": train_loss,
            "train_accuracy": train_accuracy,
            "train_entropy_floor": floor,
            "test_loss": test.nll,
            "test_accuracy": test.accuracy,
            "lr": lr,
            "seconds": seconds,
        }
        self.history = [*self.history, row]
        return row

    def step(self, images: Tensor, targets: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        recipe = self.recipe
        if recipe.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
            logits = logits_of(self.model(images))
        if logits.shape != targets.shape:
            raise ValueError(
                f"the model gives {tuple(logits.shape)} for {len(images)} images of {self.data.num_classes}"
                f" classes: build it with num_classes={self.data.num_classes}."
            )
        logits = logits.float()
        loss = F.cross_entropy(logits, targets)
        self.optimizer.zero_grad()
        loss.backward()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return loss, logits

    def _require_finite(self, losses: Tensor, epoch: int) -> None:
        finite = losses.isfinite()
        if not finite.all():
            first, before = int((~finite).nonzero()[0]) + 1, (epoch - 1) * self.steps_per_epoch
            raise FloatingPointError(
                f"the training loss is {losses[first - 1].item()} from step {first} of epoch {epoch} on"
                f" (steps {before + first} to {before + len(losses)} of the run). The last good epoch is"
                f" {epoch - 1}. Try a lower lr, a longer warmup_epochs, or clip=1.0."
            )

    def dataset(self) -> xr.Dataset:
        config = {"recipe": self.recipe.config(), "data": self.data_config, "flags": _flags()}
        return xr.Dataset(
            {
                name: ("epoch", [row[name] for row in self.history], {"long_name": text, "units": units})
                for name, (text, units) in HISTORY.items()
            },
            coords={
                "epoch": (
                    "epoch",
                    [int(row["epoch"]) for row in self.history],
                    {"long_name": "completed epochs", "units": "1"},
                )
            },
            attrs=provenance(
                title="Training history",
                config=config,
                device=str(self.device),
                seed=self.recipe.seed,
                **described(self.model),
            ),
        )


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
def _own_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds PyTorch's global generators, which dropout draws from, and gives them back as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
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


@contextlib.contextmanager
def _sentence_on_interrupt(run: _Run, folder: Path | None) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        done = len(run.history)
        if folder is None:
            advice = "nothing was saved; give folder= to be able to go on"
        else:
            advice = f"call fit again with folder={str(folder)!r} to go on from there"
        print(f"\nInterrupted after {done} of {run.recipe.epochs} epochs: {advice}.", file=sys.stderr)
        raise


def _default_device(model: nn.Module) -> torch.device:
    return torch.device("cuda") if torch.cuda.is_available() else next(model.parameters()).device


def _progress(row: Row, recipe: Recipe) -> dict[str, Any]:
    names = ("train_loss", "test_accuracy", "seconds")
    return {"epoch": row["epoch"], "epochs": recipe.epochs, **{name: row[name] for name in names}}


def _flags() -> dict[str, Any]:
    """Global switches of PyTorch that change numbers on a GPU."""
    return {
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
