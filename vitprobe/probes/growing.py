"""Long measurements that grow in a file: what is done is kept, the next call goes on, and nothing is mixed up."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import xarray as xr
from torch import nn

from vitprobe.calling import tensors_of
from vitprobe.results import differences, load, save, to_json

EVERY = 10.0  # seconds between two saves: losing this much work to a crash is no loss


def fingerprint(value: Any) -> str:
    """Sixteen hexadecimal digits of weights and buffers, or of a nest of tensors: equal bytes give equal digits.

    Args:
        value: a module, or tuples, lists and mappings of tensors.

    Returns:
        The first 64 bits of a SHA-256 of names, shapes, types and numbers.
    """
    named = value.state_dict() if isinstance(value, nn.Module) else value
    sha = hashlib.sha256(json.dumps(list(named)).encode() if isinstance(named, Mapping) else b"")
    for tensor in tensors_of(named):
        sha.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        # As bytes: not every type of torch is one of numpy.
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]


def require_same_value(path: str | os.PathLike[str] | None, what: str, saved: float, found: float) -> None:
    """Refuse to go on with a file whose numbers come from another function of the same name.

    Configurations know functions by name alone, and two lambdas have one. A value that is cheap to compute again tells
    most of them apart.

    Args:
        path: of the file.
        what: the value in words.
        saved: as the file has it.
        found: as it is now.

    Raises:
        ValueError: if they differ by more than devices and versions do.
    """
    if not np.isclose(found, saved, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise ValueError(
            f"{path} holds another measurement: {what} was {saved:.6g} and is now {found:.6g}. A function (forward=, "
            "loss=) is another one of the same name, or other parameters are frozen: give those of the file to go on "
            "with it, another path=, or delete the file to measure anew."
        )


class Growing:
    """A file that a measurement is saved to while it lasts, and found in when it is called again.

    Saved every ten seconds at most by `tick`, and on the way out of the `with`, whatever the reason (Ctrl-C too).
    Each save writes the whole file anew, so that it is whole at any time.

    Args:
        path: the file, or `None` to keep nothing.
        identity: everything that makes this measurement what it is; stored, and compared with that of a found file.
        dataset: gives what has been measured so far, or `None` for nothing.

    Attributes:
        found: what an earlier call left, or `None`.

    Raises:
        ValueError: if the file holds another measurement.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        identity: Mapping[str, Any],
        dataset: Callable[[], xr.Dataset | None],
    ) -> None:
        self.path = None if path is None else Path(path)
        self.identity = to_json(identity)
        self.dataset = dataset
        self.found = self._find()
        self._saved = time.monotonic()

    def _find(self) -> xr.Dataset | None:
        if self.path is None or not self.path.exists():
            return None
        ds = load(self.path)
        if (saved := ds.attrs.get("identity")) != self.identity:
            listing = (
                differences("", json.loads(saved), json.loads(self.identity)) if saved else ["it does not say what"]
            )
            raise ValueError(
                f"{self.path} holds another measurement: {'; '.join(listing)}. Give the old settings to go on with it, "
                "another path=, or delete the file to measure anew."
            )
        return ds

    def tick(self) -> None:
        """Save if the last time is long enough ago."""
        if time.monotonic() - self._saved > EVERY:
            self.save()

    def save(self) -> None:
        """Save what there is."""
        if self.path is not None and (ds := self.dataset()) is not None:
            save(self.mark(ds), self.path)
        self._saved = time.monotonic()

    def mark(self, ds: xr.Dataset) -> xr.Dataset:
        """The dataset with its identity, so that a copy saved over the file is still found."""
        return ds if self.path is None else ds.assign_attrs(identity=self.identity)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.save()
