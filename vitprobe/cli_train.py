"""The command `vitprobe train`."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
import xarray as xr
from torch import nn
from tyro.conf import OmitArgPrefixes, Positional, arg

from vitprobe.cli import parse_options
from vitprobe.data import ImageData, load_data
from vitprobe.models import create_model
from vitprobe.models.convolutional_vit import transfer_
from vitprobe.names import require_device, unknown
from vitprobe.probes import FEATURE_PROBES
from vitprobe.ranks import Ranks
from vitprobe.results import load, save
from vitprobe.runs import load_run, take_over
from vitprobe.training import Measurements, Recipe, fit, fit_two_phases, make_recipe
from vitprobe.training.checkpoint import digest, plain_names


def train(
    model: Annotated[Positional[str], arg(metavar="MODEL")],
    *,
    folder: Path,
    recipe: str = "",
    data: str = "digits",
    data_root: Path | None = None,
    download: bool = True,
    train_size: int | None = None,
    test_size: int | None = None,
    option: Annotated[list[str], tyro.conf.UseAppendAction] = [],  # noqa: B006  (tyro's way; never changed)
    start: Path | None = None,
    first: str = "",
    teacher: Path | None = None,
    measure: str = "",
    measure_every: int = 1,
    device: str | None = None,
    settings: OmitArgPrefixes[Recipe],
) -> None:
    """Train a network and keep it in a folder; the same command goes on after an interruption.

    On several GPUs or processes: torchrun --nproc-per-node 2 -m vitprobe train ...

    Args:
        model: a name from `vitprobe list`.
        folder: where the checkpoint and the history go.
        recipe: a name from `vitprobe list recipes`, e.g. park_kim_strong; the flags below change single settings of it.
        data: digits, cifar10, cifar100, svhn, fashion_mnist, folder:PATH, npz:TRAIN,TEST, synthetic:low.
        data_root: folder of downloaded data sets.
        download: fetch a data set that is not in its folder.
        train_size: use this many training images, balanced over the classes.
        test_size: use this many test images.
        option: an argument of the network, e.g. --option patch_size=2; may be repeated.
        start: folder of a trained run whose weights are the start; a relative_vit can go on from a convolutional_vit.
        first: a network that is trained for the first half of the epochs and hands its weights over (two-phase
            training), e.g. convolutional_vit before relative_vit.
        teacher: folder of a trained run that teaches, where the recipe has distillation above 0.
        measure: probes of the first 500 test images while it trains, separated by commas, e.g.
            nonlocality,attention_gates; a netCDF file each, in the folder.
        measure_every: after every so many epochs, and after the last.
        device: cpu, cuda or cuda:1; the GPU if there is one unless given.
        settings: the settings of the training.
    """
    if start is not None and first:
        raise ValueError("--start and --first both say where the network's weights come from: give one of them.")
    if measure_every < 1:
        raise ValueError(f"--measure-every {measure_every}: give 1 or more.")
    read = functools.partial(
        load_data, data, root=data_root, download=download, train_size=train_size, test_size=test_size
    )
    options = parse_options(option)
    origin = "" if start is None else start.absolute().name
    _require_same_start(folder, origin)
    said: dict[str, Any] = {"recipe": recipe} if recipe else {}
    with _processes(device) as (group, device):
        require_device(device)
        ranks = Ranks(group, device or "cpu")
        ranks.from_first(lambda: read() and None)  # downloads, if need be, once
        images = read()
        shape: dict[str, Any] = {
            "image_size": images.image_size,
            "channels": images.channels,
            "num_classes": images.num_classes,
        }
        network = create_model(model, seed=settings.seed, **shape, **options)
        training: dict[str, Any] = {}
        if start is not None:
            source = load_run(start)
            # By their origin: what a hand-over makes of them may differ in its last digits.
            training["initial"] = f"after {digest(plain_names(source.state_dict()))}"
            said |= {"start": origin, "hand_over": take_over(network, source, images)}
        epochs = {*range(measure_every, settings.epochs, measure_every), settings.epochs}
        measurements = _measurements(measure, epochs, images, folder) if measure else None
        training |= {
            "folder": folder,
            "device": device,
            "group": group,
            "teacher": None if teacher is None else load_run(teacher),
            "on_epoch": measurements,
        }
        if first:
            one = create_model(first, seed=settings.seed, **shape, **options)
            history = fit_two_phases(one, network, images, settings, transfer=transfer_, **training)
        else:
            history = fit(network, images, settings, **training)
        if not ranks.first:
            return
    path = save(history.assign_attrs(said), folder / "history.nc")
    if measurements is not None:
        for name in measurements.measures:
            print(save(measurements.dataset(name), folder / f"{name}.nc"))
    last = history.isel(epoch=-1)
    print(
        f"test accuracy {float(last.test_accuracy):.1%} ± {float(last.test_accuracy_se):.1%} after {settings.epochs}"
        f" epochs; history in {path}"
    )


def _require_same_start(folder: Path, origin: str) -> None:
    """That a folder's history is of a training with this start; its checkpoint may be from before it could tell."""
    try:
        was = str(load(folder / "history.nc").attrs.get("start", ""))
    except (OSError, ValueError):  # there is none
        return
    if was != origin:
        before, now = (f"the weights of {name}" if name else "fresh weights" for name in (was, origin))
        raise ValueError(
            f"{folder} holds a training that started from {before}, not from {now}: give --start as it was then, or"
            f" another --folder, or delete {folder} to train anew."
        )


@contextlib.contextmanager
def _processes(device: str | None) -> Iterator[tuple[Any, str | None]]:
    """The group of processes that torchrun started, and this one's device; no group without torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield None, device
        return
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    # The others wait while the first one measures, or for a folder that somebody else works in.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(hours=6))
    try:
        yield dist.group.WORLD, device
    finally:
        dist.destroy_process_group()


def _measurements(names: str, epochs: Collection[int], images: ImageData, folder: Path) -> Measurements:
    some = images.few(500)

    def measure(probe: Any) -> Callable[[nn.Module], xr.Dataset]:
        def run(network: nn.Module) -> xr.Dataset:
            return probe.run(network, some.loader("test", batch_size=100), progress=False)

        return run

    measures = {}
    for name in (name.strip() for name in names.split(",")):
        if name not in FEATURE_PROBES:
            raise unknown("probe", name, FEATURE_PROBES)
        measures[name] = measure(FEATURE_PROBES[name]())
    return Measurements(measures, folder, epochs=epochs)


def train_by(arguments: Sequence[str]) -> Callable[..., None]:
    """`train`, whose settings have the values of the recipe that the arguments name.

    Args:
        arguments: the command line.

    Returns:
        The function for the command line to call.

    Raises:
        ValueError: if there is no such recipe.
    """

    def typed(flag: str) -> list[str]:
        apart = [value for one, value in itertools.pairwise(arguments) if one == flag]
        return apart + [one.partition("=")[2] for one in arguments if one.startswith(f"{flag}=")]

    names, epochs = typed("--recipe"), typed("--epochs")

    @functools.wraps(train)
    def command(*positional: Any, **named: Any) -> None:
        train(*positional, **named)

    signature = inspect.signature(train)
    settings = make_recipe(names[-1]) if names else Recipe()
    if epochs and epochs[-1].isdecimal():  # fewer epochs leave later snapshots out, as make_recipe does
        kept = tuple(epoch for epoch in settings.snapshots if epoch <= int(epochs[-1]))
        settings = dataclasses.replace(settings, snapshots=kept)
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            one.replace(default=settings) if name == "settings" else one for name, one in signature.parameters.items()
        ]
    )
    return command
