"""The training loop."""

import contextlib
import itertools
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn
from tqdm import tqdm

from vitprobe.calling import described, evaluation_mode, logits_of, unwrap
from vitprobe.data.images import local_part
from vitprobe.ranks import Group, Ranks
from vitprobe.results import provenance, to_json
from vitprobe.seeds import derive_seed
from vitprobe.training.checkpoint import (
    digest,
    load_checkpoint,
    load_weights,
    plain_names,
    read_json,
    remove_snapshots,
    require_same,
    save_checkpoint,
    save_snapshot,
    write_json,
)
from vitprobe.training.distillation import Teacher, two_outputs
from vitprobe.training.evaluation import evaluate
from vitprobe.training.folder import only_one
from vitprobe.training.mixing import mix_batch, soft_targets
from vitprobe.training.optimizer import make_optimizer
from vitprobe.training.parallel import gradients_stay, in_parallel, no_unused, same_statistics
from vitprobe.training.recipe import Recipe
from vitprobe.training.schedule import learning_rate
from vitprobe.training.switches import deterministic, flags, own_random_state, set_stochastic_depth

if TYPE_CHECKING:
    from vitprobe.data import ImageData

Row = dict[str, float]  # one epoch of the history
# What the trainings of a network in this process started from: one that was interrupted may be given again as it is.
_STARTED: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()
_STATISTICS = ("running_mean", "running_var")  # the buffers that a training changes; others may hold what they like

HISTORY = {
    "train_loss": ("mean cross-entropy with the mixed and smoothed targets while training", "nats"),
    "train_accuracy": ("share of training images whose largest output is at the largest target", "1"),
    "train_entropy_floor": ("mean entropy of the targets, below which train_loss cannot fall", "nats"),
    "distillation_loss": ("mean cross-entropy with the teacher's decisions while training", "nats"),
    "test_loss": ("mean negative log-likelihood on the test images", "nats"),
    "test_loss_se": ("standard error of test_loss over images", "nats"),
    "test_accuracy": ("accuracy on the test images", "1"),
    "test_accuracy_se": ("standard error of test_accuracy over images", "1"),
    "lr": ("learning rate of the last step of the epoch", "1"),
    "seconds": ("wall time of the training steps of the epoch", "s"),
}


def fit(
    model: nn.Module,
    data: "ImageData",
    recipe: Recipe,
    *,
    teacher: nn.Module | None = None,
    folder: str | os.PathLike[str] | None = None,
    on_epoch: Callable[[nn.Module, Row], None] | None = None,
    until: int | None = None,
    epochs_before: int = 0,
    initial: str | None = None,
    device: torch.device | str | None = None,
    group: Group = None,
    when_busy: Literal["refuse", "wait"] = "refuse",
    progress: bool = True,
) -> xr.Dataset:
    """Trains a model in place by a recipe and gives the history; with a folder, goes on where it stopped.

    All randomness comes from `recipe.seed`, the purpose and the epoch. So the same call gives the same
    numbers whatever ran before (bit for bit on a CPU, also when it was interrupted and resumed; `seconds`
    excepted), and the caller's random state stays as it was. The model ends in evaluation mode on the device.

    The folder gets `recipe.json` and `run.json` (network and data), after every epoch `checkpoint.pt` (the one before
    stays as `checkpoint.previous.pt`) and `progress.json`, which another process may poll, and the recipe's
    `snapshots/`. A folder whose training is finished loads the weights and gives the history at once.

    Args:
        model: any module from `(batch, channel, height, width)` to `(batch, class)`. One that gives two such outputs
            while it trains is distilled by the second (DeiT's distillation token; timm's are told to).
        data: the images, from `vitprobe.load_data`.
        recipe: the settings.
        teacher: whose decisions on the same augmented and mixed images are learned too, if `recipe.distillation` is
            above 0. It stays in evaluation mode, and is moved to the device.
        folder: where the run lives; `None` keeps nothing.
        on_epoch: called after each epoch is saved, with the model in evaluation mode and the row (which has `epoch`,
            from 1), and once more for an epoch whose call did not come to its end before an interruption.
        until: stop after this epoch of the recipe's; a later call with the same folder goes on from there. Where the
            folder is further already, nothing is trained, and the model and the history are of where it is.
        epochs_before: how many epochs an earlier phase took by the same seed: order, augmentation and mixing go on
            after them, and do not begin anew. The recipe's schedule does.
        initial: a name of the initial weights, by which a folder knows that it goes on from them; the sha256 of those
            of the model unless given. For weights that are computed anew for every call, whose last digits other
            machines may change. A model that trained in this folder before is always taken.
        device: where to train; `None` is the GPU if there is one, else where the model is.
        group: processes of `torch.distributed` that train together, each calling this with the same arguments and
            an equal model: each takes its part of every batch. Without dropout and stochastic depth, whose draws
            differ, the result is that of one process but for rounding. Only the first writes and calls `on_epoch`,
            and the others wait for it: give the group a timeout that is longer than that takes.
        when_busy: what to do if another process works in the folder.
        progress: whether a terminal shows a bar, and anything else gets a line per epoch.

    Returns:
        Along `epoch` (completed epochs, from 1): `train_loss`, `train_accuracy`, `train_entropy_floor`,
        `distillation_loss` if there is a teacher, `test_loss`, `test_accuracy`, their standard errors over test
        images, `lr` and `seconds`.

    Raises:
        ValueError: if model, data, recipe and teacher do not fit together, or the folder holds another training.
        FolderBusyError: if another process works in the folder.
        FloatingPointError: if the training loss is no longer finite; the last good checkpoint is kept.
        OSError: if a checkpoint cannot be written; the one before is kept.
        KeyboardInterrupt: on Ctrl-C, after saying how to go on.
    """
    _check(model, recipe, teacher, folder)
    end = _end(recipe, until)
    where = torch.device(device) if device is not None else _default_device(model)
    model.to(where)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    set_stochastic_depth(model, recipe.stochastic_depth)
    ranks = Ranks(group, where)
    path = None if folder is None or not ranks.first else Path(folder)
    shows = progress and ranks.first
    with contextlib.ExitStack() as stack:
        if folder is not None:
            ranks.from_first(lambda: stack.enter_context(only_one(Path(folder), wait=when_busy == "wait")))
        if teacher is not None:
            stack.enter_context(evaluation_mode(teacher))
        if recipe.distillation:
            stack.enter_context(two_outputs(model))
        stack.enter_context(deterministic(recipe.deterministic))
        run = _Run(model, data, recipe, where, ranks, teacher, epochs_before, initial)
        if folder is not None:
            run.restore(ranks.from_first(lambda: run.saved(Path(folder))))
        with ranks.together():  # what fails in the first process must not leave the others waiting
            if path is not None:
                _begin(path, run)
                if run.history and not _told(path, len(run.history)):
                    _tell(path, run, on_epoch)
        if ranks.first:
            stack.enter_context(_sentence_on_interrupt(run, path))
        bar = stack.enter_context(
            tqdm(
                total=max(end, len(run.history)) * run.steps_per_epoch,
                initial=len(run.history) * run.steps_per_epoch,
                unit="step",
                desc=path.name if path is not None else None,
                disable=None if shows else True,
            )
        )
        for epoch in range(len(run.history) + 1, end + 1):
            with same_statistics(model, ranks):
                row = run.epoch(epoch, bar)
            with ranks.together():
                if path is not None:
                    _save(path, run)
                if ranks.first:
                    _tell(path, run, on_epoch)
            if shows:
                _show(row, recipe, bar)
    model.eval()
    return run.dataset()


def _check(model: nn.Module, recipe: Recipe, teacher: nn.Module | None, folder: str | os.PathLike[str] | None) -> None:
    """Refuses what does not fit together, before anything is touched."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is {recipe!r}: give a Recipe(...), or one by name, make_recipe('park_kim_weak').")
    if teacher is model:
        raise ValueError("the model is its own teacher: give a copy.deepcopy of it, or another network.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no trainable parameter: call model.requires_grad_(True).")
    if recipe.distillation and teacher is None:
        raise ValueError(
            f"the recipe distils (distillation={recipe.distillation}) and there is no teacher: give teacher=, or"
            " distillation=0."
        )
    if teacher is not None and not recipe.distillation:
        raise ValueError("there is a teacher, and the recipe does not distil: set distillation=0.5, or leave it out.")
    if recipe.snapshots and folder is None:
        raise ValueError(
            f"the recipe keeps snapshots of epochs {', '.join(map(str, recipe.snapshots))}: give folder= to keep them"
            " in, or snapshots=()."
        )


def _end(recipe: Recipe, until: int | None) -> int:
    """The epoch to stop after."""
    if until is None:
        return recipe.epochs
    if not isinstance(until, int) or isinstance(until, bool) or not 1 <= until <= recipe.epochs:
        raise ValueError(f"until={until!r}: give an epoch of the recipe's, 1 to {recipe.epochs}, or None for all.")
    return until


def _begin(path: Path, run: "_Run") -> None:
    """Says in the folder what it holds."""
    said = {
        "recipe.json": run.recipe.config(),
        "run.json": run.network | {"data_name": run.data.name, "data": run.data_config},
    }
    if not run.history:
        if any(read_json(path / name) not in ({}, content) for name, content in said.items()):
            remove_snapshots(path)  # of another training, of which nothing else was saved
        run.keep_snapshot(path)
    for name, content in said.items():
        write_json(path / name, content)


def _save(path: Path, run: "_Run") -> None:
    try:
        run.keep_snapshot(path)
        save_checkpoint(path, run.state())
    except OSError as error:
        done = len(run.history) - 1
        raise OSError(
            error.errno,
            f"epoch {done + 1} cannot be saved ({error.strerror}): make room, and the same call goes on from epoch"
            f" {done}, which is kept in",
            str(path),
        ) from error


def _told(path: Path, epoch: int) -> bool:
    """Whether `progress.json`, which is written last, is of this epoch."""
    told: bool = read_json(path / "progress.json").get("epoch", 0) >= epoch
    return told


def _tell(path: Path | None, run: "_Run", on_epoch: Callable[[nn.Module, Row], None] | None) -> None:
    if on_epoch is not None:
        with evaluation_mode(run.model):
            on_epoch(run.model, dict(run.history[-1]))
    if path is not None:
        write_json(path / "progress.json", _progress(run))


def _show(row: Row, recipe: Recipe, bar: "tqdm[Any]") -> None:
    if not bar.disable:
        bar.set_postfix(loss=f"{row['train_loss']:.3f}", test_accuracy=f"{row['test_accuracy']:.4f}")
        return
    print(
        f"epoch {row['epoch']}/{recipe.epochs}: train loss {row['train_loss']:.4f},"
        f" test accuracy {row['test_accuracy']:.2%}, lr {row['lr']:.2e}, {row['seconds']:.1f} s",
        file=sys.stderr,
        flush=True,
    )


class _Run:
    """One training: what changes from epoch to epoch, and one epoch of it."""

    def __init__(
        self,
        model: nn.Module,
        data: "ImageData",
        recipe: Recipe,
        device: torch.device,
        ranks: Ranks,
        teacher: nn.Module | None,
        epochs_before: int,
        initial: str | None,
    ) -> None:
        self.model, self.data, self.recipe, self.device, self.ranks = model, data, recipe, device, ranks
        self.epochs_before = epochs_before
        self.start: dict[str, Any] | None = {
            "weights": digest(plain_names(model.state_dict())) if initial is None else initial,
            "epochs_before": epochs_before,
        }
        self.teacher = None if teacher is None else Teacher(teacher, device)
        size = recipe.batch_size
        self.train = data.loader(
            "train",
            batch_size=size,
            device=device,
            seed=recipe.seed,
            augment=recipe.augment,
            repeats=recipe.repeats,
            rank=ranks.rank,
            ranks=ranks.count,
        )
        self.test = data.loader("test", batch_size=size, device=device)
        self.steps_per_epoch = len(self.train)
        self.optimizer = make_optimizer(model, recipe)
        self.wrapped = in_parallel(model, ranks)
        self.forward: Callable[[Tensor], Any] = torch.compile(self.wrapped) if recipe.compile else self.wrapped
        self.history: list[Row] = []
        # What a checkpoint gives back must compare equal: tuples become lists here, not there.
        self.data_config = json.loads(json.dumps(data.config()))
        created = getattr(model, "vitprobe_created", None)  # by vitprobe.create_model, with these arguments
        self.network = json.loads(to_json({"created": created, **described(unwrap(model))}))
        # As many parts of a batch in every process, or what waits for the others would wait for ever.
        shares = {
            size: min(len(local_part(size, rank, ranks.count)) for rank in range(ranks.count))
            for size in set(self.train.batch_sizes)
        }
        self.parts = {size: min(recipe.accumulate, share) for size, share in shares.items()}

    def state(self) -> dict[str, Any]:
        return {
            "model": plain_names(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "epoch": len(self.history),
            "history": self.history,
            "recipe": self.recipe.config(),
            "data": self.data_config,
            "network": self.network,
            "teacher": None if self.teacher is None else self.teacher.digest,
            "start": self.start,
        }

    def saved(self, folder: Path) -> dict[str, Any] | None:
        """The last state of this training that a folder has; refuses one whose training was another."""
        saved = load_checkpoint(folder)
        if saved is None:
            return None
        # A setting that is newer than the checkpoint had its default then.
        require_same(folder, Recipe().config() | saved["recipe"], self.recipe.config(), "recipe")
        require_same(folder, saved["data"], self.data_config, "data")
        require_same(folder, saved.get("network", self.network), self.network, "network")  # older ones have none
        teacher = None if self.teacher is None else self.teacher.digest
        require_same(folder, {"weights": saved.get("teacher")}, {"weights": teacher}, "teacher")
        start = saved.get("start")
        if start is not None and start != self.start and self.start is not None:  # older ones have none
            same = {"weights": start["weights"]} if self._trained_here(saved) else {}
            require_same(folder, start, self.start | same, "start")
        return saved

    def _trained_here(self, saved: dict[str, Any]) -> bool:
        """Whether the model is no fresh one, but that of this very training."""
        if saved["start"]["weights"] in _STARTED.get(unwrap(self.model), ()):
            return True
        return digest(plain_names(self.model.state_dict())) == digest(saved["model"])

    def restore(self, saved: dict[str, Any] | None) -> None:
        if saved is not None:
            load_weights(self.model, saved["model"])
            self.history = saved["history"]
            self.start = saved.get("start")  # not this call's: what an older one started from is not known
            if len(self.history) < self.recipe.epochs:
                self._restore_optimizer(saved["optimizer"])
        if self.start is not None:
            _STARTED.setdefault(unwrap(self.model), set()).add(self.start["weights"])

    def _restore_optimizer(self, state: dict[str, Any]) -> None:
        try:
            self.optimizer.load_state_dict(state)
        except ValueError as error:
            raise ValueError(
                f"the folder's optimiser is of other parameters than this model's ({error}): freeze and let decay the"
                " same ones as then (an older vitprobe let fewer decay by decay='matrices'), or delete the folder."
            ) from error

    def keep_snapshot(self, folder: Path) -> None:
        """Keeps the weights of now, if the recipe wants those of this epoch."""
        epoch = len(self.history)
        if epoch in self.recipe.snapshots:
            save_snapshot(folder, epoch, plain_names(self.model.state_dict()))

    def epoch(self, epoch: int, bar: "tqdm[Any]") -> Row:
        recipe, drawn = self.recipe, self.epochs_before + epoch
        rng = np.random.default_rng(derive_seed(recipe.seed, "mixing", drawn))
        self.train.epoch = drawn
        sums: list[Tensor] = []
        lr = recipe.lr
        start = time.perf_counter()
        others = () if self.ranks.count == 1 else (self.ranks.rank,)  # dropout is drawn by every process for itself
        with own_random_state(derive_seed(recipe.seed, "forward", drawn, *others), self.device):
            self.wrapped.train()
            for number, (images, labels) in enumerate(self.train):
                lr = learning_rate(recipe, (epoch - 1) * self.steps_per_epoch + number, self.steps_per_epoch)
                targets = soft_targets(labels, self.data.num_classes, recipe.label_smoothing)
                images, targets = mix_batch(images, targets, recipe, rng)
                sums.append(self.step(images, targets, lr, self.train.batch_sizes[number]))
                # Where looking costs no waiting, and nobody waits for who has stopped.
                if self.device.type == "cpu" and self.ranks.count == 1:
                    self._require_finite(sums[-1][:1], epoch, number)
                bar.update()
            self.optimizer.zero_grad()
            # Nothing waited for the device before this.
            totals = self.ranks.sum(torch.stack(sums).double()).cpu()
            seconds = time.perf_counter() - start
            self._require_finite(totals[:, 0], epoch)
            train_loss, train_accuracy, floor, distillation = (totals.sum(0) / sum(self.train.batch_sizes)).tolist()
            self._require_finite_weights(epoch)
            part = itertools.islice(self.test, self.ranks.rank, None, self.ranks.count)
            test = evaluate(self.model, part, device=self.device, group=self.ranks.group)
        row = {
            "epoch": epoch,
            "train_loss": train_loss,
            "train_accuracy": train_accuracy,
            "train_entropy_floor": floor,
            **({} if self.teacher is None else {"distillation_loss": distillation}),
            "test_loss": test.nll,
            "test_loss_se": test.nll_se,
            "test_accuracy": test.accuracy,
            "test_accuracy_se": test.accuracy_se,
            "lr": lr,
            "seconds": seconds,
        }
        self.history = [*self.history, row]
        return row

    def step(self, images: Tensor, targets: Tensor, lr: float, batch_size: int) -> Tensor:
        """One step of the optimiser; gives sums over this process's images of loss, hits, entropy, distillation."""
        recipe = self.recipe
        if recipe.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        self.optimizer.zero_grad()
        count = self.parts[batch_size]
        parts = list(zip(images.tensor_split(count), targets.tensor_split(count), strict=True))
        sums = torch.zeros(4, device=self.device)
        for number, (some, wanted) in enumerate(parts, start=1):
            with gradients_stay(self.wrapped) if number < len(parts) else contextlib.nullcontext():
                loss, part = self.loss(some, wanted)
                # Processes' gradients are averaged, not added.
                (loss * (self.ranks.count / batch_size)).backward()
            sums += part
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return sums

    def loss(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over images that is minimised, and the sums that are told."""
        share = self.recipe.distillation
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16"):
            with no_unused(), self._sentence_on_one_image(len(images)):
                output = self.forward(images)
            decisions = None if self.teacher is None else self.teacher.decisions(images)
        logits, distilled = _outputs(output)
        if logits.shape != targets.shape:
            raise ValueError(
                f"the model gives {tuple(logits.shape)} for {len(images)} images of {self.data.num_classes}"
                f" classes: build it with num_classes={self.data.num_classes}."
            )
        loss = F.cross_entropy(logits, targets, reduction="sum")
        with torch.no_grad():
            hits = (logits.argmax(1) == targets.argmax(1)).sum()
            floor = torch.special.entr(targets).sum()
        if decisions is None:
            return loss, torch.stack([loss.detach(), hits.float(), floor, torch.zeros_like(floor)])
        taught = F.cross_entropy(distilled, decisions, reduction="sum")
        said = torch.stack([loss.detach(), hits.float(), floor, taught.detach()])
        return (1 - share) * loss + share * taught, said

    @contextlib.contextmanager
    def _sentence_on_one_image(self, images: int) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            if images > 1 or "more than 1 value per channel" not in str(error):
                raise
            total, size = sum(self.train.batch_sizes), self.recipe.batch_size
            better = next(number for number in itertools.count(size + 1) if total % number != 1)
            raise ValueError(
                f"one image alone has no statistics for batch normalisation, and {total} training images in batches of"
                f" {size} (accumulate={self.recipe.accumulate}) leave one alone: use e.g. batch_size={better}, or"
                " another train_size."
            ) from error

    def _require_finite(self, losses: Tensor, epoch: int, before: int = 0) -> None:
        finite = losses.isfinite()
        if not finite.all():
            first = before + int((~finite).nonzero()[0]) + 1
            step = (epoch - 1) * self.steps_per_epoch + first
            raise FloatingPointError(
                f"the training loss is {losses[first - before - 1].item()} from step {first} of epoch {epoch} on"
                f" (step {step} of the run). The last good epoch is {epoch - 1}. Try a lower lr, a longer"
                " warmup_epochs, or clip=1.0."
            )

    def _require_finite_weights(self, epoch: int) -> None:
        """The last step's loss is that before it."""
        trained: dict[str, Tensor] = dict(self.model.named_parameters())
        trained |= {name: value for name, value in self.model.named_buffers() if name.endswith(_STATISTICS)}
        finite = torch.stack([value.isfinite().all() for value in trained.values()]).tolist()
        if not all(finite):
            raise FloatingPointError(
                f"{list(trained)[finite.index(False)]} is no longer finite after the last step of epoch {epoch}. The"
                f" last good epoch is {epoch - 1}. Try a lower lr, a longer warmup_epochs, or clip=1.0."
            )

    def dataset(self) -> xr.Dataset:
        config = {"recipe": self.recipe.config(), "data": self.data_config, "flags": flags()}
        said: dict[str, Any] = described(unwrap(self.model))
        if self.ranks.count > 1:
            said["ranks"] = self.ranks.count
        if self.teacher is not None:
            said["teacher"] = self.teacher.digest
        return xr.Dataset(
            {
                name: ("epoch", [row.get(name, np.nan) for row in self.history], {"long_name": text, "units": units})
                for name, (text, units) in HISTORY.items()
                if name != "distillation_loss" or self.teacher is not None
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
                **said,
            ),
        )


def _outputs(output: Any) -> tuple[Tensor, Tensor]:
    """Logits of the classes, and those that a teacher is compared with: the second of two outputs, or the same."""
    two = isinstance(output, tuple) and len(output) == 2 and all(isinstance(part, Tensor) for part in output)
    if two and output[0].shape == output[1].shape:
        return output[0].float(), output[1].float()
    logits = logits_of(output).float()
    return logits, logits


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


def _progress(run: _Run) -> dict[str, Any]:
    names = ("train_loss", "test_accuracy", "test_accuracy_se", "seconds")
    row = run.history[-1]
    return {
        "epoch": row["epoch"],
        "epochs": run.recipe.epochs,
        **{name: row[name] for name in names if name in row},
        "device": str(run.device),
        "host": socket.gethostname(),
    }
