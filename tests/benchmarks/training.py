"""What training costs over its bare steps and over timm's loop, how long it takes to an accuracy, and how much memory.

    python tests/benchmarks/training.py --small --data-root ROOT                 does it all run?
    python tests/benchmarks/training.py --data-root ROOT --clock cpu --threads 1 --write results/benchmarks/training_cpu
    python tests/benchmarks/training.py --data-root ROOT --parts accuracy --folder FOLDER --write FILE

For the smallest network of every family, on images of CIFAR-10:

- steps: the steps of `fit` over the bare ones (forward, loss, backward, optimiser) of an equal network on a batch that
  is ready and lies in memory in the same way, with the same optimiser; without augmentation and with the strong recipe
  (RandAugment, mixup, CutMix, label smoothing, clipping). Steps of both take turns, one by one. On a GPU also the share
  of the chip's peak in bfloat16, where that is known or given: of the network's multiply-adds, doubled, and three times
  for forward and backward.
- overhead: the same for a network that computes hardly anything and has as many parameters as a small one, in
  milliseconds that `fit` adds to a step. What other work does to the times of large steps is larger than that.
- timm: the steps of timm's training loop (its transforms of single Pillow images, its loader, mixing, loss, optimiser,
  scheduler, clipping and meter, put together as its training script does) over those of `fit`, for an equal network on
  the same images. Both in one process, without workers for the data.
- memory: the peak of a process that trains three steps of 128 images less what it had before the network, and the same
  of bare steps. Without and with accumulation.
- accuracy: epochs and seconds to 60 % of test images on 10,000 training images, by the weak recipe over 24 epochs. It
  goes on where it was stopped, if it has a folder.

In overhead and timm, epochs of `fit` and of the other ways take turns in one run; given are medians over rounds
(least to most). What is timed is training alone: neither evaluation nor checkpoints. On a machine that other work
shares, --clock cpu counts what this process has used. Parts that FILE.json already has and that are not asked for
stay in it.
"""

import argparse
import contextlib
import copy
import dataclasses
import datetime
import gc
import itertools
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import probe_overhead
import timm.data
import timm.loss
import timm.optim
import timm.scheduler
import timm.utils
import torch
import torch.nn.functional as F
from PIL import Image
from probe_overhead import CLOCKS, load, progress, spread
from scipy.stats import bootstrap
from torch import Tensor, nn
from torchvision.transforms import RandomCrop

import vitprobe as vp
from vitprobe.data import ImageData
from vitprobe.data.split import Split
from vitprobe.models import model_cost
from vitprobe.training import Recipe, fit, loop, make_recipe
from vitprobe.training.mixing import mix_batch, soft_targets
from vitprobe.training.optimizer import make_optimizer
from vitprobe.training.switches import set_stochastic_depth

PACKAGES = ("vitprobe", "torch", "torchvision", "timm", "pillow", "numpy")
FAMILIES = ("convmixer_micro", "resnet_micro", "alternet_micro", "convit_micro", "vit_micro")
AGAINST_TIMM = ("vit_micro", "convmixer_micro")
STRONG = make_recipe("park_kim_strong_cpu", snapshots=())
PLAIN = dataclasses.replace(STRONG, augment="none", mixup=0.0, cutmix=0.0, label_smoothing=0.0, clip=None)
RECIPES = {"plain": PLAIN, "strong": STRONG}
GOALS = {"plain": 1.05, "strong": 1.15}
WANTED, EPOCHS, TRAIN_SIZE, TEST_SIZE = 0.6, 24, 10_000, 2_000
PEAKS = {"H200": 989e12, "H100 80GB HBM3": 989e12, "A100": 312e12}  # dense bfloat16, as their makers state it [1/s]
STEPS, MEMORY_BATCH = 3, 128  # of the memory part


class Report:
    """The tables in Markdown, and the same as numbers; both are written anew whenever a table has another row."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.path = Path(arguments.write) if arguments.write else None
        self.conditions: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "processor": probe_overhead._processor(),
            "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else arguments.device,
            "threads": torch.get_num_threads(),
            "clock": CLOCKS[arguments.clock][1],
            "load at the start": load(),
            "python": platform.python_version(),
            **{package: probe_overhead._version(package) for package in PACKAGES},
        }
        kept = self.path and self.path.with_suffix(".json")
        self.parts: dict[str, Any] = json.loads(kept.read_text()) if kept and kept.exists() else {}

    def table(self, part: str, figures: Any, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        conditions = self.conditions | {"load at the end": load()}
        text = [f"## {title}", "", *("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))]
        self.parts[part] = {"conditions": conditions, "figures": figures, "text": text}
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.with_suffix(".md").write_text(self.markdown())
            self.path.with_suffix(".json").write_text(json.dumps(self.parts, indent=1) + "\n")

    def markdown(self) -> str:
        lines = ["# Training: cost, side by side", ""]
        lines += ["Made by `tests/benchmarks/training.py`, which says what is measured and how to repeat it."]
        for part in sorted(self.parts, key=list(PARTS).index):
            said = ", ".join(f"{key} {value}" for key, value in self.parts[part]["conditions"].items())
            lines += ["", *self.parts[part]["text"], "", f"({said})"]
        return "\n".join(lines) + "\n"


# --- networks and images ----------------------------------------------------------------------------


def network(name: str, data: ImageData) -> nn.Module:
    return vp.create_model(
        name, image_size=data.image_size, channels=data.channels, num_classes=data.num_classes, seed=0
    )


def cifar(arguments: argparse.Namespace, train_size: int, test_size: int) -> ImageData:
    return vp.load_data("cifar10", root=arguments.data_root, train_size=train_size, test_size=test_size)


class Stopwatch:
    """Seconds of the training steps of each epoch of `fit`: from the end of `on_epoch` until it evaluates.

    Attributes:
        taken: of every epoch, on the clock.
    """

    def __init__(self, clock: Callable[[], float], device: str) -> None:
        self.clock, self.device = clock, device
        self.taken: list[float] = []
        self.start = 0.0

    def now(self) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        return self.clock()

    def again(self) -> None:
        self.start = self.now()

    def passed(self) -> float:
        return self.now() - self.start

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        evaluate = loop.evaluate

        def evaluated(*arguments: Any, **options: Any) -> Any:
            self.taken.append(self.passed())
            return evaluate(*arguments, **options)

        with mock.patch.object(loop, "evaluate", evaluated):
            self.again()
            yield


# --- steps ------------------------------------------------------------------------------------------

OURS, BARE, BATCHES = "vitprobe", "bare steps", "batches alone"
Way = Callable[[], None]  # one epoch of training, or a part of one


def in_turn(
    model: nn.Module, data: ImageData, recipe: Recipe, others: Mapping[str, Way], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of the training steps of an epoch of `fit` and of each other way, in turn in every round.

    The first round, a warm-up, is left out.
    """
    watch = Stopwatch(CLOCKS[arguments.clock][0], arguments.device)
    times: dict[str, list[float]] = {name: [] for name in others}

    def on_epoch(_: nn.Module, row: dict[str, float]) -> None:
        for name, other in others.items():
            gc.collect()
            watch.again()
            other()
            times[name].append(watch.passed())
        gc.collect()
        watch.again()

    with watch.watching():
        recipe = dataclasses.replace(recipe, epochs=arguments.rounds + 1)
        fit(model, data, recipe, on_epoch=on_epoch, device=arguments.device, progress=False)
    return {name: taken[1:] for name, taken in {OURS: watch.taken, **times}.items()}


def step_by_step(
    model: nn.Module, data: ImageData, recipe: Recipe, step: Way, arguments: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Seconds of every step of `fit`, its batch included, and of another step right after it.

    What other work does to the machine comes and goes in seconds, and meets both. The first epoch, a warm-up, is left
    out.
    """
    watch = Stopwatch(CLOCKS[arguments.clock][0], arguments.device)
    ours: list[float] = []
    others: list[float] = []

    class Bar:
        """Stands for the progress bar, which `fit` tells of every step."""

        disable = True

        def __init__(self, **options: Any) -> None: ...

        def __enter__(self) -> "Bar":
            watch.again()
            return self

        def __exit__(self, *error: object) -> None: ...

        def update(self) -> None:
            ours.append(watch.passed())
            watch.again()
            step()
            others.append(watch.passed())
            watch.again()

    def on_epoch(_: nn.Module, row: dict[str, float]) -> None:
        gc.collect()
        watch.again()

    with mock.patch.object(loop, "tqdm", Bar):
        recipe = dataclasses.replace(recipe, epochs=arguments.rounds + 1)
        fit(model, data, recipe, on_epoch=on_epoch, device=arguments.device, progress=False)
    return ours[arguments.steps :], others[arguments.steps :]


def equal(model: nn.Module, recipe: Recipe, device: str) -> nn.Module:
    """A copy, set up as `fit` sets a model up."""
    twin = copy.deepcopy(model).to(device)
    if recipe.channels_last:
        twin.to(memory_format=torch.channels_last)
    set_stochastic_depth(twin, recipe.stochastic_depth)
    return twin.train()


def ready(data: ImageData, recipe: Recipe, device: str) -> tuple[Tensor, Tensor]:
    """One batch as a step takes it, not augmented, and its soft targets."""
    images, labels = next(iter(data.loader("train", batch_size=recipe.batch_size, device=device, seed=0)))
    if recipe.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, soft_targets(labels, data.num_classes, recipe.label_smoothing)


def bare_steps(model: nn.Module, batch: tuple[Tensor, Tensor], recipe: Recipe, steps: int) -> Way:
    """Steps of a model, which changes, on the same batch over and over."""
    images, targets = batch
    optimizer = make_optimizer(model, recipe)

    def step() -> None:  # which keeps nothing: logits that live on to the next forward pass cost memory
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
            logits = model(images)
        F.cross_entropy(logits.float(), targets).backward()
        optimizer.step()

    def run() -> None:
        for _ in range(steps):
            step()

    return run


def batches_alone(data: ImageData, recipe: Recipe, device: str) -> Way:
    """The batches of an epoch, made and mixed, and nothing done with them."""
    loader = data.loader("train", batch_size=recipe.batch_size, device=device, seed=0, augment=recipe.augment)
    rng = np.random.default_rng(0)

    def run() -> None:
        for images, labels in loader:
            mix_batch(images, soft_targets(labels, data.num_classes, recipe.label_smoothing), recipe, rng)

    return run


def recipes(arguments: argparse.Namespace) -> dict[str, Recipe]:
    changes = {"batch_size": arguments.batch, "precision": arguments.precision}
    return {name: dataclasses.replace(recipe, **changes) for name, recipe in RECIPES.items()}


def peak_of(arguments: argparse.Namespace) -> float | None:
    """Of the chip, in bfloat16 [1/s]; `None` where that says nothing."""
    if not arguments.device.startswith("cuda") or arguments.precision != "bfloat16":
        return None
    if arguments.peak_tflops:
        return 1e12 * arguments.peak_tflops
    name = torch.cuda.get_device_name(arguments.device)
    return next((peak for chip, peak in PEAKS.items() if chip in name), None)


def part_steps(report: Report, arguments: argparse.Namespace) -> None:
    data = cifar(arguments, arguments.steps * arguments.batch, test_size=10)
    peak = peak_of(arguments)
    figures: dict[str, Any] = {}
    table = []
    for name in arguments.models:
        operations = 2 * 3 * model_cost(name, image_size=data.image_size, num_classes=data.num_classes).multiply_adds
        for what, recipe in recipes(arguments).items():
            progress(f"{name}, {what}")
            model = network(name, data)
            batch = ready(data, recipe, arguments.device)
            bare = bare_steps(equal(model, recipe, arguments.device), batch, recipe, 1)
            ours, others = step_by_step(model, data, recipe, bare, arguments)
            figures.setdefault(name, {})[what] = {OURS: ours, BARE: others}
            speeds = [arguments.batch / taken for taken in ours]
            pairs = np.divide(ours, others)
            error = bootstrap([pairs], statistic=np.median, n_resamples=2000, rng=0).standard_error
            table.append([
                name,
                what,
                spread([1e3 * taken for taken in others], ".0f"),
                f"{np.median(pairs):.3f} ± {error:.3f}",
                f"{sum(ours) / sum(others):.3f}",
                f"at most {GOALS[what]}",
                spread(speeds, ".0f"),
                *([spread([operations * speed / peak for speed in speeds], ".1%")] if peak else []),
            ])
            head = ["network", "recipe", "bare step, ms", "`fit` over bare", "of the sums", "goal"]
            head += ["images per second", *(["share of the peak"] if peak else [])]
            title = f"{described(arguments)}, over bare steps in turn: median over pairs ± its standard error"
            report.table("steps", figures, title, head, table)


def described(arguments: argparse.Namespace) -> str:
    rounds, steps, batch = arguments.rounds, arguments.steps, arguments.batch
    return f"{rounds} rounds of {steps} steps of {batch} images, {arguments.precision}"


def ratios(slow: Sequence[float], fast: Sequence[float]) -> str:
    return spread([a / b for a, b in zip(slow, fast, strict=True)])


class Light(nn.Module):
    """As many parameters as a small network has, and hardly anything to compute."""

    def __init__(self, data: ImageData) -> None:
        super().__init__()
        self.linear = nn.Linear(data.channels * data.image_size[0] * data.image_size[1], data.num_classes)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(100)) for _ in range(80)])

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1)) * torch.stack([scale.mean() for scale in self.scales]).mean()


def part_overhead(report: Report, arguments: argparse.Namespace) -> None:
    longer = argparse.Namespace(**vars(arguments) | {"steps": 10 * arguments.steps})
    data = cifar(longer, longer.steps * longer.batch, test_size=10)
    figures, table = {}, []
    for what, recipe in recipes(longer).items():
        progress(what)
        recipe = dataclasses.replace(recipe, stochastic_depth=0.0)
        torch.manual_seed(0)
        model = Light(data)
        batch = ready(data, recipe, longer.device)
        others = {
            BARE: bare_steps(equal(model, recipe, longer.device), batch, recipe, longer.steps),
            BATCHES: batches_alone(data, recipe, longer.device),
        }
        times = in_turn(model, data, recipe, others, longer)
        figures[what] = times
        step = {way: [1e3 * seconds / longer.steps for seconds in taken] for way, taken in times.items()}
        added = [ours - bare for ours, bare in zip(step[OURS], step[BARE], strict=True)]
        table.append([what, *(spread(values, ".1f") for values in (step[BARE], step[OURS], added, step[BATCHES]))])
        head = ["recipe", "bare step, ms", "step of `fit`, ms", "added, ms", "its batches alone, ms"]
        report.table("overhead", figures, f"{described(longer)}, of a network with hardly any work", head, table)


# --- timm's loop ------------------------------------------------------------------------------------


class Pillow(torch.utils.data.Dataset):
    """Single Pillow images with their labels; timm puts the transform in."""

    transform: Any

    def __init__(self, split: Split) -> None:
        self.images = [Image.fromarray(image) for image in split.images.permute(0, 2, 3, 1).numpy()]
        self.labels = split.labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), self.labels[index]


def timm_epochs(
    model: nn.Module, data: ImageData, recipe: Recipe, arguments: argparse.Namespace, *, prefetch: bool
) -> Way:
    """Epochs of timm's training loop for a model, which changes.

    Args:
        model: in training mode, on the device.
        data: the images.
        recipe: one of `RECIPES`.
        arguments: say device and rounds.
        prefetch: whether batches are normalised as a whole, and mixed as bytes (timm's default), or image by image.
    """
    mixing = {"mixup_alpha": recipe.mixup, "cutmix_alpha": recipe.cutmix}
    mixing |= {"label_smoothing": recipe.label_smoothing, "num_classes": data.num_classes}
    mixes, augments = recipe.mixup + recipe.cutmix > 0, recipe.augment != "none"
    images = Pillow(data.train)
    loader = timm.data.create_loader(
        images,  # type: ignore[arg-type]  # any data set with an attribute `transform`
        (data.channels, *data.image_size),
        recipe.batch_size,
        is_training=True,
        no_aug=not augments,
        auto_augment=recipe.augment.split("+")[-1],
        mean=data.mean,
        std=data.std,
        num_workers=0,
        device=torch.device(arguments.device),
        use_prefetcher=prefetch,
        collate_fn=timm.data.FastCollateMixup(**mixing) if mixes and prefetch else None,
    )
    if augments:  # timm's first transform is a resized crop: DeiT changes it so for small images
        images.transform.transforms[0] = RandomCrop(data.image_size, padding=4)
    mix = timm.data.Mixup(**mixing) if mixes and not prefetch else None
    criterion = timm.loss.SoftTargetCrossEntropy() if mixes else nn.CrossEntropyLoss()
    optimizer = timm.optim.create_optimizer_v2(
        model, "adamw", lr=recipe.lr, weight_decay=recipe.weight_decay, betas=recipe.betas, eps=recipe.eps
    )
    scheduler, _ = timm.scheduler.create_scheduler_v2(
        optimizer,
        num_epochs=arguments.rounds + 1,
        warmup_epochs=1,
        step_on_epochs=False,
        updates_per_epoch=len(loader),
    )
    losses, updates = timm.utils.AverageMeter(), itertools.count(1)

    def run() -> None:
        model.train()
        for batch, labels in loader:
            x, targets = batch.to(arguments.device), labels.to(arguments.device)
            if mix is not None:
                x, targets = mix(x, targets)
            if recipe.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
                loss = criterion(model(x), targets)
            optimizer.zero_grad()
            loss.backward()
            if recipe.clip is not None:
                timm.utils.dispatch_clip_grad(model.parameters(), recipe.clip)
            optimizer.step()
            losses.update(loss.item(), len(x))
            scheduler.step_update(next(updates), metric=losses.avg)

    return run


def part_timm(report: Report, arguments: argparse.Namespace) -> None:
    data = cifar(arguments, arguments.steps * arguments.batch, test_size=10)
    figures: dict[str, Any] = {}
    table = []
    for name in [name for name in arguments.models if name in AGAINST_TIMM]:
        for what, recipe in recipes(arguments).items():
            progress(f"{name}, {what}")
            model = network(name, data)
            others = {
                text: timm_epochs(equal(model, recipe, arguments.device), data, recipe, arguments, prefetch=prefetch)
                for text, prefetch in {"timm, its prefetcher": True, "timm, --no-prefetcher": False}.items()
            }
            times = in_turn(model, data, recipe, others, arguments)
            figures.setdefault(name, {})[what] = times
            for way, taken in times.items():
                speeds = spread([len(data.train) / seconds for seconds in taken], ".0f")
                table.append([name, what, way, speeds, ratios(taken, times[OURS])])
            head = ["network", "recipe", "loop", "images per second", "time over vitprobe's"]
            title = f"{described(arguments)}, without workers, against timm's loop"
            report.table("timm", figures, title, head, table)


# --- memory -----------------------------------------------------------------------------------------


def peak_memory(name: str, accumulate: int, way: str, arguments: argparse.Namespace) -> float:
    """Peak of a fresh process that trains, less what it had before the network [MiB]."""
    progress(f"memory: {name}, {way}, accumulate={accumulate}")
    told = json.dumps([name, accumulate, way])
    command = [sys.executable, __file__, "--child", told, "--threads", str(arguments.threads)]
    command += ["--device", arguments.device, "--precision", arguments.precision]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def child(name: str, accumulate: int, way: str, arguments: argparse.Namespace) -> None:
    count = STEPS * MEMORY_BATCH
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    split = Split(images, torch.arange(count) % 10)
    few = Split(images[:10], torch.arange(10))
    data = ImageData("noise", "noise", split, few, tuple("abcdefghij"), (0.5,) * 3, (0.25,) * 3)
    changes = {"batch_size": MEMORY_BATCH, "accumulate": accumulate, "precision": arguments.precision}
    recipe = dataclasses.replace(STRONG, epochs=1, **changes)
    cuda = arguments.device.startswith("cuda")
    if not cuda:
        before = _resident("VmRSS")
    model = network(name, data)
    if way == BARE:
        bare_steps(equal(model, recipe, arguments.device), ready(data, recipe, arguments.device), recipe, STEPS)()
    else:
        fit(model, data, recipe, device=arguments.device, progress=False)
    print(torch.cuda.max_memory_allocated() / 2**20 if cuda else _resident("VmHWM") - before)


def _resident(what: str) -> float:
    """Resident memory of this process, now or at most [MiB]; a child's maximum of getrusage starts at its parent's."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[what].split()[0]) / 1024


def part_memory(report: Report, arguments: argparse.Namespace) -> None:
    if arguments.device == "cpu" and not Path("/proc/self/status").exists():
        print("\nMemory is measured on Linux and on GPUs: left out.")
        return
    figures, table = {}, []
    for name in arguments.models:
        bare = peak_memory(name, 1, BARE, arguments)
        whole, parts = (peak_memory(name, accumulate, OURS, arguments) for accumulate in (1, 4))
        figures[name] = {BARE: bare, "accumulate=1": whole, "accumulate=4": parts}
        table.append([name, f"{bare:.0f}", f"{whole:.0f}", f"{whole / bare:.2f}", f"{parts:.0f}"])
        head = ["network", "bare steps, MiB", "`fit`, MiB", "over bare", "with `accumulate=4`, MiB"]
        title = f"Peak memory of {STEPS} steps of {MEMORY_BATCH} images, {arguments.precision}, strong recipe"
        report.table("memory", figures, title, head, table)


# --- time to an accuracy ----------------------------------------------------------------------------


class _ReachedError(Exception):
    """The wanted accuracy is there."""


def until(name: str, data: ImageData, folder: Path, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """The epochs of a training up to the first of the wanted accuracy, with processor time; resumed from the folder."""
    file = folder / "epochs.json"
    rows: list[dict[str, float]] = json.loads(file.read_text()) if file.exists() else []
    recipe = make_recipe("park_kim_weak_cpu", epochs=arguments.epochs, snapshots=())
    if rows and (len(rows) == recipe.epochs or rows[-1]["test_accuracy"] >= WANTED):
        return rows
    watch = Stopwatch(time.process_time, arguments.device)

    def on_epoch(_: nn.Module, row: dict[str, float]) -> None:
        # An epoch whose call did not come to its end is told again, by a process that did not train it.
        if len(rows) < row["epoch"]:
            rows.append(row | {"processor_seconds": watch.taken[-1] if watch.taken else math.nan})
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(rows, indent=1) + "\n")
        progress(f"{name}: epoch {row['epoch']:.0f}, test accuracy {row['test_accuracy']:.3f}")
        if row["test_accuracy"] >= WANTED:
            raise _ReachedError
        watch.again()

    with watch.watching(), contextlib.suppress(_ReachedError):
        fit(
            network(name, data),
            data,
            recipe,
            folder=folder / "run",
            on_epoch=on_epoch,
            device=arguments.device,
            progress=False,
        )
    return rows


def part_accuracy(report: Report, arguments: argparse.Namespace) -> None:
    data = cifar(arguments, arguments.train_size, arguments.test_size)
    figures, table = {}, []
    with contextlib.ExitStack() as stack:
        if arguments.folder is None:
            arguments.folder = stack.enter_context(tempfile.TemporaryDirectory())
        for name in arguments.models:
            rows = until(name, data, Path(arguments.folder) / name, arguments)
            figures[name] = rows
            best = max(rows, key=lambda row: row["test_accuracy"])
            reached = best["test_accuracy"] >= WANTED
            accuracy = f"{best['test_accuracy']:.1%} ± {best['test_accuracy_se']:.1%}"
            table.append([
                name,
                str(len(rows)) if reached else f"not reached in {len(rows)}",
                f"{sum(row['processor_seconds'] for row in rows):.0f}",
                f"{sum(row['seconds'] for row in rows):.0f}",
                accuracy if reached else f"best {accuracy}",
            ])
            head = ["network", "epochs", "processor seconds", "wall seconds", "test accuracy"]
            title = f"Training to {WANTED:.0%} of {len(data.test)} test images, {len(data.train)} training images"
            report.table("accuracy", figures, title, head, table)


PARTS: dict[str, Callable[[Report, argparse.Namespace], None]] = {
    "steps": part_steps,
    "overhead": part_overhead,
    "timm": part_timm,
    "memory": part_memory,
    "accuracy": part_accuracy,
}
SMALL = {"rounds": 1, "steps": 2, "train_size": 200, "test_size": 50, "epochs": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", help="folder of the files of CIFAR-10")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2, help="of each way in a round")
    parser.add_argument("--batch", type=int, help="of steps and timm; 64, on a GPU 512")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], help="on a GPU bfloat16, else float32")
    parser.add_argument("--peak-tflops", type=float, help="of the GPU in bfloat16, where it is not known")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a machine that other work shares")
    parser.add_argument("--folder", help="where trainings to an accuracy live, to go on with them later")
    parser.add_argument("--write", metavar="FILE", help="writes FILE.md and FILE.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="few images and one round, to see that it runs")
    arguments = parser.parse_args()
    cuda = arguments.device.startswith("cuda")
    arguments.batch = arguments.batch or (512 if cuda else STRONG.batch_size)
    arguments.precision = arguments.precision or ("bfloat16" if cuda else "float32")
    vars(arguments).update(train_size=TRAIN_SIZE, test_size=TEST_SIZE, epochs=EPOCHS)
    if arguments.small:
        vars(arguments).update(SMALL)
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        name, accumulate, way = json.loads(arguments.child)
        return child(name, accumulate, way, arguments)
    report = Report(arguments)
    for part in arguments.parts:
        progress(part)
        PARTS[part](report, arguments)
        print("\n".join(["", *report.parts.get(part, {"text": []})["text"]]), flush=True)


if __name__ == "__main__":
    main()
