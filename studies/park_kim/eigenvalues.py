"""What the studies of the Hessian share: the paper's eigenvalues of a network at an epoch, with NEP and APE."""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import xarray as xr

from studies.outcomes import difference
from vitprobe.figures.page import interval
from vitprobe.probes import hessian_eigenvalues
from vitprobe.results import config_hash
from vitprobe.runs import Run, Trained
from vitprobe.study import Settings
from vitprobe.training import TrainingBatches

BATCH_SIZE, RANKS = 16, 5
BATCHES = {"smoke": 1, "quick": 8, "cpu": 6}  # the paper's own: a tenth of the training images
# Hessian-vector products to spend on a batch: smoke only shows that everything runs.
PRODUCTS = {"smoke": 20}
STATISTICS = {
    "nep": ("share of negative eigenvalues", "1"),
    "ape": ("mean of the positive eigenvalues", "nats"),
}
_Array = TypeVar("_Array", xr.DataArray, np.ndarray)
_ENDS = {"": "", "_low": ", lower end over batches", "_high": ", upper end over batches"}


def eigenvalues(result: Trained, epoch: int, settings: Settings) -> xr.Dataset:
    """The five eigenvalues of largest magnitude of each batch of 16 training images, by the paper's protocol.

    The images are augmented, mixed and smoothed as in the network's own training, and weight decay counts as
    |w|^2 / 2 times its coefficient. The batches are drawn from the network's own seed: networks of one seed, and of
    equal data and augmentation, see the same ones, and an interval over seeds covers which batches were drawn. They are
    kept beside the trained network, batch by batch: studies share them, and one that is stopped goes on with the next
    batch.

    Args:
        result: the trained network.
        epoch: which of its snapshots.
        settings: of the study; the scale says how many batches.

    Returns:
        As `hessian_eigenvalues`; `nep` and `ape` with their intervals over batches are variables.
    """
    run, images, seed = result.run, len(result.data.train), result.run.recipe.seed
    few = BATCHES.get(settings.scale)
    share = min(1.0, few * BATCH_SIZE / images) if few else 0.1
    options: dict[str, Any] = {
        "k": RANKS,
        "max_products": PRODUCTS.get(settings.scale, 200),
        "weight_decay": run.recipe.weight_decay,
        "stack": 4 if settings.scale in ("smoke", "quick") else 1,
    }
    kept = result.folder / f"eigenvalues_{config_hash({'epoch': epoch, 'share': share, 'seed': seed, **options})}.nc"
    if settings.recompute:
        kept.unlink(missing_ok=True)
    ds = hessian_eigenvalues(
        result.at(epoch),
        TrainingBatches(result.data, run.recipe, batch_size=BATCH_SIZE, share=share, seed=seed),
        **options,
        path=kept,
        progress=False,
    )
    del ds.attrs["identity"]  # the file's own, which tells whose it is
    numbers = {
        name + end: ((), ds.attrs.pop(name + end), {"long_name": text + of_end, "units": units})
        for name, (text, units) in STATISTICS.items()
        for end, of_end in _ENDS.items()
    }
    return ds.assign(numbers)


def measured_epochs(run: Run) -> list[int]:
    """The snapshots from the end of warm-up on; the first of them is what the paper's Fig. 4 is of."""
    kept = [epoch for epoch in run.recipe.snapshots if epoch]
    # Where both are stretched, the end of warm-up need not be a whole epoch.
    first = min(kept, key=lambda epoch: abs(epoch - run.recipe.warmup_epochs))
    return [epoch for epoch in kept if epoch >= first]


def doublings(ape: _Array) -> _Array:
    """The logarithm of APE to base 2, kept finite where a network has no positive eigenvalue at all."""
    return np.log2(ape.clip(float(np.finfo(np.float32).tiny)))


def over_seeds(values: np.ndarray, variable: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean over seeds and what its 95 % t interval reaches to both sides, as `Axes.errorbar` takes it.

    APE is compared by its logarithm: its mean is the geometric one, and its interval that of the logarithm. That of a
    share ends at zero.

    Args:
        values: one row per seed `(seed, point)`.
        variable: `"nep"` or `"ape"`.

    Returns:
        Mean `(point,)` and both sides `(2, point)`, which are not-a-number for one seed.
    """
    if variable == "ape":
        mean, half_width = interval(doublings(values))
        return 2**mean, np.stack([2**mean - 2 ** (mean - half_width), 2 ** (mean + half_width) - 2**mean])
    mean, half_width = interval(values)
    return mean, np.stack([np.minimum(half_width, mean), half_width])


def contrast(ds: xr.Dataset, variable: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> np.ndarray:
    """Of each seed one kind of network against another: APE in doublings, anything else by difference.

    Args:
        ds: stacked runs, at one epoch.
        variable: which, e.g. `"nep"`.
        one: coordinates of the first kind.
        other: coordinates of the second.

    Returns:
        `(seed,)`, of the seeds that both have.
    """
    if variable == "ape":
        ds = ds.assign(ape=doublings(ds.ape))
    return difference(ds, variable, one, other)
