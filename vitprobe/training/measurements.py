"""What is measured of a model while it trains."""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import xarray as xr
from torch import nn

from vitprobe.calling import unwrap
from vitprobe.names import unknown
from vitprobe.results import load, save
from vitprobe.training.checkpoint import digest

Measure = Callable[[nn.Module], xr.Dataset]


class Measurements:
    """Measures a model after chosen epochs; for `fit(..., on_epoch=measurements)`.

    Each measurement of each epoch is a netCDF file, written whole or not at all, and not taken again of the same
    weights: an interrupted training goes on with what was measured before. One of other weights, such as those of
    another seed that were in the folder before, is overwritten. What is measured goes by its name: give a probe with
    other options another one.

    Args:
        measures: what is measured, by name: functions of the model, such as
            `lambda model: vp.nonlocality(model, batches)`.
        folder: where the files go; the folder of the run is a good place.
        epochs: after which epochs; every one unless given. For epoch 0, call `measurements(model, {"epoch": 0})`
            before `fit`.
    """

    def __init__(
        self,
        measures: Mapping[str, Measure],
        folder: str | os.PathLike[str],
        *,
        epochs: Collection[int] | None = None,
    ) -> None:
        self.measures = dict(measures)
        self.folder = Path(folder) / "measured"
        self.epochs = epochs

    def __call__(self, model: nn.Module, row: Mapping[str, float]) -> None:
        """Measures, if this epoch is one of those wanted.

        Args:
            model: the model that trains.
            row: of the history; its `epoch` counts.
        """
        epoch = int(row["epoch"])
        if self.epochs is not None and epoch not in self.epochs:
            return
        weights = digest(unwrap(model).state_dict())
        for name, measure in self.measures.items():
            file = self.folder / name / f"epoch_{epoch:04d}.nc"
            if file.exists() and load(file).attrs.get("weights") == weights:
                continue
            at = {"epoch": ((), epoch, {"long_name": "completed epochs", "units": "1"})}
            save(measure(model).assign_coords(at).assign_attrs(weights=weights), file)

    def dataset(self, name: str) -> xr.Dataset:
        """All that was measured under a name, along `epoch`.

        Args:
            name: of a measurement.

        Raises:
            ValueError: if there is no measurement of that name, or nothing measured yet.
        """
        if name not in self.measures:
            raise unknown("measurement", name, self.measures)
        files = sorted((self.folder / name).glob("epoch_*.nc"))
        if not files:
            raise ValueError(
                f"nothing is measured yet in {self.folder / name}, and a finished training measures no more: probe its"
                f" network as it is (vitprobe probe {self.folder.parent}), or train it anew in another folder."
            )
        parts = [load(file) for file in files]
        # Layers are the same in all epochs, or these are none of one training; what a unit is differs in two phases.
        ds = xr.concat(
            parts, "epoch", join="exact", coords="different", compat="equals", combine_attrs="drop_conflicts"
        )
        return ds.assign_attrs(history=parts[-1].attrs["history"])  # the call and time of the last
