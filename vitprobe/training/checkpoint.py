"""Weights and unfinished trainings on disk: written whole or not at all, loaded without running any code."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from vitprobe.results import differences

CURRENT, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"


def load_weights(model: nn.Module, source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
    """Loads weights from a checkpoint of this or of most other trainers into a model.

    Accepts a state dict, or one inside `{"state_dict": …}` or `{"model": …}`, with or without the `module.`
    and `_orig_mod.` that DataParallel, DDP and `torch.compile` put into the names, on either side. Files are
    loaded with `weights_only=True`: they cannot run code. Those of `fit` are compared with their checksum.

    Args:
        model: the model to fill, wrapped or not.
        source: a file, or what was in it.

    Raises:
        ValueError: if the source holds no weights, or damaged ones, or names or shapes differ from the model's.
    """
    where = "the given weights" if isinstance(source, Mapping) else str(source)
    content = source if isinstance(source, Mapping) else _read(Path(source))
    while isinstance(content, Mapping) and (
        inner := next((content[key] for key in ("state_dict", "model") if isinstance(content.get(key), Mapping)), None)
    ):
        content = inner
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} holds a {type(content).__name__}, not a state dict: save model.state_dict().")
    weights = plain_names(content)
    own = model.state_dict()
    expected = plain_names({name: (name, value) for name, value in own.items()})
    # Checkpoints older than PyTorch 0.4.1 lack BatchNorm's counter, which evaluation never reads.
    missing = [key for key in expected if key not in weights and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in weights if key not in expected]
    reshaped = [
        f"{key} {tuple(weights[key].shape)} instead of {tuple(value.shape)}"
        for key, (_, value) in expected.items()
        if isinstance(weights.get(key), Tensor) and weights[key].shape != value.shape
    ]
    problems = [("missing", missing), ("unexpected", unexpected), ("other shape", reshaped)]
    if any(names for _, names in problems):
        listing = "; ".join(f"{what}: {_some(names)}" for what, names in problems if names)
        raise ValueError(f"{where} does not fit the model ({type(model).__name__}). {listing}.")
    # Into the model's own, which carries the versions of its modules: some refuse to be loaded without (MNASNet).
    own.update({name: weights.get(key, value) for key, (name, value) in expected.items()})
    model.load_state_dict(own)


def _read(path: Path) -> Any:
    """What a file of weights holds; one of `fit` is compared with its checksum, which older ones lack."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the file of the weights in it, such as {path / CURRENT}.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:  # not there, or not to be read, as it says
        raise
    except Exception as error:  # what is no file of weights can fail in any way; torch would advise to run its code
        raise ValueError(
            f"{path} cannot be loaded with weights_only=True ({type(error).__name__}), which runs no code: it is"
            " damaged, or holds more than weights; write it by torch.save(model.state_dict(), FILE)."
        ) from error
    if isinstance(content, dict) and {"model", "epoch", "sha256"} <= content.keys():
        check_sum(content, path)
    return content


def check_sum(content: dict[str, Any], path: Path) -> None:
    """Takes the checksum out of what `fit` wrote, and refuses what does not agree with it."""
    expected = content.pop("sha256", None)  # older ones have none
    if expected is not None and digest(content) != expected:
        way_out = f"the same training goes on from {PREVIOUS}" if path.name == CURRENT else "train anew"
        raise ValueError(f"{path} is damaged, its checksum is another: {way_out}, or take another epoch's weights.")


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same entries without the `module` and `_orig_mod` that wrappers add, anywhere in their names.

    Args:
        state: entries by dotted name.

    Raises:
        ValueError: if two names become one.
    """
    plain = {
        ".".join(part for part in name.split(".") if part not in {"module", "_orig_mod"}): value
        for name, value in state.items()
    }
    if len(plain) != len(state):
        raise ValueError(
            "two parameters have the same name once `module.` and `_orig_mod.` are left out of it:"
            " rename the submodule called `module`."
        )
    return plain


def _some(names: list[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def save_checkpoint(folder: Path, content: dict[str, Any]) -> None:
    """Writes the training's state and its checksum to `checkpoint.pt`; the one there becomes the previous one."""
    summed = {**content, "sha256": digest(content)}
    temporary = _write(folder / CURRENT, lambda file: torch.save(summed, file))
    if (folder / CURRENT).exists():
        os.replace(folder / CURRENT, folder / PREVIOUS)
    os.replace(temporary, folder / CURRENT)


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The training's state in a folder: the last checkpoint, the one before if that is damaged, or `None`.

    Args:
        folder: the folder of a run.

    Raises:
        ValueError: if there are checkpoints and none can be read.
    """
    failures = []
    for name in (CURRENT, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            check_sum(content, path)
        except Exception as error:  # a damaged file can fail in any way
            failures.append(f"{path} ({type(error).__name__})")
            continue
        if name == PREVIOUS:
            if failures:
                warnings.warn(
                    f"{failures[0]} is damaged: going on from {path}, epoch {content['epoch']}.", stacklevel=3
                )
            os.replace(path, folder / CURRENT)  # or the next save would put the damaged file in its place
        return content
    if failures:
        raise ValueError(f"no checkpoint can be read: {', '.join(failures)}. Delete {folder} to train anew.")
    return None


def digest(content: Any) -> str:
    """The sha256 of nested mappings, lists, tensors and plain values, by content.

    Args:
        content: what a checkpoint holds.
    """
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
            sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, Mapping):
            sha.update(f"{{{len(value)}".encode())
            for key, part in value.items():
                sha.update(repr(key).encode())
                add(part)
        elif isinstance(value, list | tuple):
            sha.update(f"[{len(value)}".encode())
            for part in value:
                add(part)
        else:
            sha.update(repr(value).encode())

    add(content)
    return sha.hexdigest()


def snapshot_file(folder: str | os.PathLike[str], epoch: int) -> Path:
    """Where a run keeps its weights after so many epochs."""
    return Path(folder) / "snapshots" / f"epoch_{epoch:04d}.pt"


def save_snapshot(folder: Path, epoch: int, weights: Mapping[str, Tensor]) -> None:
    """Writes weights and their checksum whole or not at all."""
    path = snapshot_file(folder, epoch)
    path.parent.mkdir(exist_ok=True)
    content = {"model": dict(weights), "epoch": epoch}
    summed = {**content, "sha256": digest(content)}
    os.replace(_write(path, lambda file: torch.save(summed, file)), path)


def remove_snapshots(folder: Path) -> None:
    """Removes the snapshots of a run that starts anew."""
    for file in snapshot_file(folder, 0).parent.glob("epoch_*.pt"):
        file.unlink()


def load_snapshot(model: nn.Module, folder: str | os.PathLike[str], epoch: int) -> None:
    """Loads the weights that a run had after so many epochs into a model.

    Args:
        model: the model to fill, wrapped or not.
        folder: of the run.
        epoch: how many epochs were done; 0 are the initial weights.

    Raises:
        FileNotFoundError: if the run kept none of that epoch; says of which it did.
        ValueError: if the file is damaged, or the weights do not fit.
    """
    path = snapshot_file(folder, epoch)
    if not path.exists():
        kept = sorted(int(file.stem.removeprefix("epoch_")) for file in path.parent.glob("epoch_*.pt"))
        raise FileNotFoundError(
            f"{folder} has no snapshot of epoch {epoch}, but of {kept or 'none'}: train with a recipe whose snapshots"
            f" have {epoch} among them."
        )
    load_weights(model, path)


def require_same(folder: Path, saved: Mapping[str, Any], asked: Mapping[str, Any], what: str) -> None:
    """Refuses to go on in a folder whose training was another one.

    Args:
        folder: the folder of the run.
        saved: the configuration that the folder was made with.
        asked: the configuration of this call.
        what: `"recipe"`, `"data"`, `"network"`, `"teacher"` or `"start"`.

    Raises:
        ValueError: if any field differs; names each with both values.
    """
    if listing := differences(what, saved, asked):
        raise ValueError(
            f"{folder} holds a training with another {what}: {'; '.join(listing)}."
            f" Give the old {what} to go on with it, or another folder=, or delete {folder} to train anew."
        )


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object; empty if there is none that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file whole or not at all."""
    text = json.dumps(content, indent=1)
    os.replace(_write(path, lambda file: file.write(text.encode())), path)


def _write(path: Path, write: Callable[[BinaryIO], Any]) -> Path:
    """Writes beside `path`, down to the disk, and returns where: the caller moves it into place."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)  # of a full disk, say, whose room it takes
        raise
    return temporary
