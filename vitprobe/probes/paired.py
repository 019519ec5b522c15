"""A model as it is and under changes, on the same images: accuracy, likelihood, and differences with paired errors."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn
from tqdm import tqdm

from vitprobe.attach import Intervention, Plan, plan
from vitprobe.calling import Forward, default_forward, described, described_batches, images_of, untouched, unwrap
from vitprobe.probes.answers import answers
from vitprobe.probes.base import RunningMean
from vitprobe.probes.growing import Growing, fingerprint, require_same_value
from vitprobe.probes.objective import drawn
from vitprobe.results import provenance

MEASURED = {
    "accuracy": ("share of images whose largest output is the label's", "1"),
    "nll": ("negative log-likelihood of the label", "nats"),
}


@dataclass(frozen=True)
class Changes:
    """What is changed, one change at a time, and where its numbers stand in the dataset.

    Attributes:
        forwards: `forward(model, batch)` for each change, flat; `None` where nothing can be changed.
        dims: axes of the numbers.
        shape: their lengths.
        coords: coordinates along the axes.
        attributes: of the dataset.
    """

    forwards: Sequence[Forward | None]
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    coords: Mapping[str, Any]
    attributes: Mapping[str, str | int | float]


def changing(change: Intervention, forward: Forward) -> Forward:
    """A way to call the model: with an intervention.

    Args:
        change: the intervention.
        forward: calls the model as it is.

    Returns:
        `forward(model, batch)`.
    """
    return lambda model, batch: change(forward, model, batch)


def chained(before: str, batch: Any) -> str:
    """Digits that name a sequence of batches.

    Args:
        before: those of the batches before.
        batch: the next one.

    Returns:
        Sixteen hexadecimal digits.
    """
    return hashlib.sha256((before + fingerprint(batch)).encode()).hexdigest()[:16]


def compare(
    model: nn.Module,
    batches: Iterable[Any],
    changes: Callable[[Plan], Changes],
    *,
    word: str,
    config: Mapping[str, Any],
    title: str,
    references: str,
    identity: Mapping[str, Any] | None = None,
    layers: str | Sequence[str] = "auto",
    prefix: int | None = None,
    forward: Forward | None = None,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Accuracy and negative log-likelihood of a model as it is, and under each change, on the same images.

    Batches stream: every one is answered by the model as it is and under all changes before the next is drawn.
    Differences are taken image by image, so that their standard errors are those of paired differences.

    Args:
        model: as the user has it.
        batches: with labels.
        changes: gives the changes, once the first batch has been traced.
        word: what a changed model is called in the names of its variables: `<word>_accuracy`, `<word>_nll`.
        config: the options that the numbers depend on, the probe's name first.
        title: of the dataset.
        references: of the dataset.
        identity: what else tells this measurement from others in a file.
        layers: of `plan`.
        prefix: of `plan`.
        forward: `forward(model, batch)` for models that are called in another way.
        path: netCDF file that grows with every batch.
        progress: whether a terminal shows a progress bar.

    Returns:
        `<word>_accuracy`, `accuracy_change`, `<word>_nll` and `nll_change` along the axes of the changes, and
        `intact_accuracy` and `intact_nll`, each with its standard error over images.

    Raises:
        ValueError: if there are no batches, no class numbers, images of several sizes, or the file holds another
            measurement or one of other batches.
    """
    bare, call = unwrap(model), forward or default_forward
    name = str(config["probe"])
    means = _Means(word)
    settled: list[Changes] = []
    attributes: dict[str, Any] = {
        "title": title,
        "references": references,
        "device": next((str(p.device) for p in bare.parameters()), "cpu"),
        "probe": name,
        **described(bare),
        **described_batches(batches),
    }

    def dataset() -> xr.Dataset | None:
        if file.found is not None and means.images == int(file.found.attrs["images"]):
            return file.found.assign_attrs(complete=attributes["complete"])  # nothing new: the same to the last bit
        return means.dataset(settled[0], config, attributes) if means.images else None

    whole = {} if path is None else {"config": config, "model": fingerprint(bare), **(identity or {})}
    with (
        Growing(path, whole, dataset) as file,
        untouched(bare),
        tqdm(drawn(batches, bare), desc=name, unit="batch", disable=None if progress else True) as bar,
    ):
        known = 0 if file.found is None else int(file.found.attrs["batches"])
        digits = ""
        shape: tuple[int, ...] = ()
        for number, batch in enumerate(bar, start=1):
            here = tuple(images_of(batch).shape[1:])
            if not settled:
                shape, found = here, plan(bare, batch, layers=layers, prefix=prefix, forward=call)
                intact = changing(Intervention(bare, found), call)
                settled.append(changes(found))
                attributes |= {"image_height": found.image[0], "image_width": found.image[1]}
                attributes |= {"skipped": json.dumps(list(found.skipped)), **settled[0].attributes}
            require_size(shape, here)
            digits = "" if path is None else chained(digits, batch)
            if number == 1 and path is not None and forward is not None:
                attributes["first_batch_nll"] = first = float(answers(bare, batch, intact)[1].mean())
                # Older files do not have it.
                saved = first if file.found is None else file.found.attrs.get("first_batch_nll", first)
                require_same_value(path, "nll of the first batch", saved, first)
            if number > known:
                means.add(_answers(bare, batch, intact, settled[0].forwards))
            elif number == known:
                _require_same(file, digits)
                means.go_on(file.found)
            attributes |= {"images": means.images, "batches": number, "complete": 0}
            attributes |= {"fingerprint": digits} if digits else {}
            file.tick()
        if number < known:
            raise ValueError(
                f"{file.path} has results of {known} batches, and {number} were given: to go on, give the same batches "
                "from the first on, or another path=."
            )
        attributes["complete"] = 1
    ds = dataset()
    assert ds is not None
    return file.mark(ds)


def require_size(first: tuple[int, ...], here: tuple[int, ...]) -> None:
    """Refuse images `(channel, y, x)` of another size than the first."""
    if here != first:
        raise ValueError(
            f"images of {here} after images of {first} (channel, y, x): units and maps are those of one size; "
            "measure each size by itself."
        )


def _require_same(file: Growing, digits: str) -> None:
    assert file.found is not None
    if digits != file.found.attrs["fingerprint"]:
        raise ValueError(
            f"{file.path} has results of {file.found.attrs['batches']} batches, and those given are others: to go on, "
            "give the same batches in the same order (no shuffling without a fixed seed), or another path=."
        )


def _answers(model: nn.Module, batch: Any, intact: Forward, forwards: Sequence[Forward | None]) -> Tensor:
    """Correctness and likelihood, under no change and under each `(image, quantity, 1 + change)`; NaN for no change."""
    before = torch.stack(answers(model, batch, intact), dim=1).cpu()
    columns = [before]
    for forward in forwards:
        if forward is None:
            columns.append(torch.full_like(before, torch.nan))
        else:
            columns.append(torch.stack(answers(model, batch, forward), dim=1).cpu())
    return torch.stack(columns, dim=-1)


class _Means:
    """Means over images, with standard errors, of answers and of their differences from those of the intact model."""

    def __init__(self, word: str) -> None:
        self.word = word
        self._answers, self._changes = _Resumed(), _Resumed()

    @property
    def images(self) -> int:
        return self._answers.count

    def add(self, found: Tensor) -> None:
        """Add the answers `(image, quantity, 1 + change)` of a batch."""
        self._answers.add(found)
        self._changes.add(found[..., 1:] - found[..., :1])

    def go_on(self, ds: xr.Dataset | None) -> None:
        """Begin with what an earlier call left."""
        assert ds is not None

        def stored(suffix: str) -> tuple[np.ndarray, np.ndarray]:
            intact = np.stack([ds[f"intact_{name}{suffix}"].values.reshape(1) for name in MEASURED])
            changed = np.stack([ds[f"{self.word}_{name}{suffix}"].values.ravel() for name in MEASURED])
            change = np.stack([ds[f"{name}_change{suffix}"].values.ravel() for name in MEASURED])
            return np.concatenate([intact, changed], axis=1), change

        for part, mean, error in zip((self._answers, self._changes), stored(""), stored("_se"), strict=True):
            part.go_on(int(ds.attrs["images"]), mean, error)

    def dataset(self, changes: Changes, config: Mapping[str, Any], attributes: Mapping[str, Any]) -> xr.Dataset:
        variables: dict[str, Any] = {}
        for suffix, attribute in (("", "mean"), ("_se", "standard_error")):
            both, change = getattr(self._answers, attribute), getattr(self._changes, attribute)
            for row, (name, (long_name, units)) in enumerate(MEASURED.items()):
                for key, dims, values, text in (
                    (f"intact_{name}", (), both[row, 0], f"{long_name}, model as it is"),
                    (f"{self.word}_{name}", changes.dims, both[row, 1:].reshape(changes.shape), long_name),
                    (
                        f"{name}_change",
                        changes.dims,
                        change[row].reshape(changes.shape),
                        f"{self.word}_{name} minus intact_{name}",
                    ),
                ):
                    described = f"standard error over images of {key}" if suffix else text
                    variables[key + suffix] = (dims, values, {"long_name": described, "units": units})
        return xr.Dataset(dict(sorted(variables.items())), coords=changes.coords).assign_attrs(
            provenance(config=config, **attributes)
        )


class _Resumed(RunningMean):
    """A running mean that can begin with one that was saved."""

    def go_on(self, count: int, mean: np.ndarray, standard_error: np.ndarray) -> None:
        """Begin with so many values of this mean and standard error, which is not a number for one value."""
        self.count = count
        self._mean = torch.from_numpy(mean.copy())
        squares = standard_error**2 * count * (count - 1) if count > 1 else np.zeros_like(mean)
        self._products = torch.from_numpy(squares.copy())
