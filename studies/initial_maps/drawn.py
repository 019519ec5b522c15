"""What the studies of initialisations share: a network that is initialised and looked at, but not trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xarray as xr

from vitprobe import initializers
from vitprobe.claims import Verdict
from vitprobe.models import create_model
from vitprobe.probes import attention_maps
from vitprobe.results import config_hash
from vitprobe.study import Settings

SIDES = {"smoke": 4, "quick": 8, "cpu": 16, "paper": 16}  # patches along each side, by scale
PATCH = 2  # pixels: the papers' on CIFAR


@dataclass(frozen=True)
class Initialised:
    """One row of the figure: a network and how it is initialised.

    Attributes:
        label: the row's name.
        network: name of the model.
        side: patches along each side.
        options: of the model.
        initialiser: name of a function of `vitprobe.initializers`; empty for the model's own.
        arguments: of that function.
    """

    label: str
    network: str
    side: int
    options: Mapping[str, Any] = field(default_factory=dict)
    initialiser: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """A name for files, which tells the rows of a figure apart."""
        return f"{self.network}-{config_hash(self.config())[:6]}"

    def config(self) -> dict[str, Any]:
        """Everything the maps depend on."""
        return vars(self)

    def fraction(self, cache: Path | None) -> float:
        """Nothing is trained."""
        return 0.0


def measure(row: Initialised, settings: Settings) -> xr.Dataset:
    """Attention maps of the first layer for a blank image: what the position code alone makes of them."""
    size = PATCH * row.side
    model = create_model(row.network, image_size=size, patch_size=PATCH, seed=0, **row.options)
    if row.initialiser:
        getattr(initializers, row.initialiser)(model, seed=0, **row.arguments)
    ds = attention_maps(model, torch.zeros(1, 3, size, size), progress=False).isel(layer=[0])
    return ds.assign_attrs(label=row.label, initialisation=str(getattr(model, "initialisation", "")))


def no_verdicts(ds: xr.Dataset) -> Sequence[Verdict]:
    """These figures show a construction; they claim nothing."""
    return []
