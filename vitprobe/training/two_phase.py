"""Two-phase training (Li et al. 2021): convolution first, then attention that starts as the same function."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xarray as xr
from torch import nn

from vitprobe.calling import evaluation_mode, logits_of
from vitprobe.results import provenance
from vitprobe.training.checkpoint import digest, plain_names
from vitprobe.training.evaluation import device_of
from vitprobe.training.loop import fit
from vitprobe.training.recipe import Recipe

if TYPE_CHECKING:
    from vitprobe.data import ImageData, Loader

Transfer = Callable[[nn.Module, nn.Module], None]
FIRST, SECOND = "convolution", "attention"


@dataclass(frozen=True)
class HandOver:
    """How far the second network is from the first one, right after it took over its weights, over images.

    Attributes:
        gap: mean Euclidean distance between the two networks' logits.
        gap_se: its standard error over images.
        relative_gap: the same in units of the mean norm of the first network's logits.
        largest_gap: the largest difference of any logit of any image.
        agreement: share of images on which both decide for the same class.
        accuracy_before: of the first network.
        accuracy_after: of the second network.
        images: how many there were.
    """

    gap: float
    gap_se: float
    relative_gap: float
    largest_gap: float
    agreement: float
    accuracy_before: float
    accuracy_after: float
    images: int


HAND_OVER = {
    "gap": ("mean distance between the logits of both phases' networks at the hand-over", "1"),
    "gap_se": ("standard error of gap over images", "1"),
    "relative_gap": ("gap in units of the mean norm of the first network's logits", "1"),
    "largest_gap": ("largest difference of any logit at the hand-over", "1"),
    "agreement": ("share of test images on which both networks decide alike at the hand-over", "1"),
    "accuracy_before": ("accuracy on the test images before the hand-over", "1"),
    "accuracy_after": ("accuracy on the test images after the hand-over", "1"),
    "images": ("test images that the hand-over was measured on", "1"),
}


@torch.no_grad()
def function_gap(first: nn.Module, second: nn.Module, batches: "Loader") -> HandOver:
    """How far two networks are from each other as functions, in evaluation mode.

    Args:
        first: the network whose logits are the reference.
        second: the other one, on the same device.
        batches: of `(images, labels)`.
    """
    device = device_of(first)
    distances, norms, largest, same, right = [], [], [], [], []
    with evaluation_mode(first), evaluation_mode(second):
        for images, labels in batches:
            one, other = (logits_of(model(images.to(device))).double() for model in (first, second))
            distances.append((one - other).norm(dim=1))
            norms.append(one.norm(dim=1))
            largest.append((one - other).abs().amax(1))
            decisions = torch.stack([one.argmax(1), other.argmax(1)])
            same.append(decisions[0] == decisions[1])
            right.append(decisions == labels.to(device))
    distance, count = torch.cat(distances), sum(map(len, distances))
    before, after = torch.cat(right, 1).double().mean(1).tolist()
    return HandOver(
        gap=distance.mean().item(),
        gap_se=distance.std().item() / count**0.5 if count > 1 else float("nan"),
        relative_gap=(distance.mean() / torch.cat(norms).mean()).item(),
        largest_gap=torch.cat(largest).max().item(),
        agreement=torch.cat(same).double().mean().item(),
        accuracy_before=before,
        accuracy_after=after,
        images=count,
    )


def split_recipe(recipe: Recipe, share: float = 0.5) -> tuple[Recipe, Recipe]:
    """The recipes of both phases: each has the whole schedule, warm-up included, over its share of the epochs.

    Args:
        recipe: of both together.
        share: of the epochs that the first phase gets, above 0 and below 1.

    Raises:
        ValueError: if a phase would have no epoch.
    """
    first = round(share * recipe.epochs)
    if not 0 < first < recipe.epochs:
        raise ValueError(
            f"share={share} of {recipe.epochs} epochs leaves {first} and {recipe.epochs - first}: each phase needs at"
            " least one."
        )
    phases = []
    for start, epochs in ((0, first), (first, recipe.epochs - first)):
        kept = tuple(
            epoch - start for epoch in recipe.snapshots if (epoch > start or start == 0) and epoch <= start + epochs
        )
        warmup = min(recipe.warmup_epochs, epochs)
        phases.append(replace(recipe, epochs=epochs, warmup_epochs=warmup, snapshots=kept))
    return phases[0], phases[1]


def fit_two_phases(
    first: nn.Module,
    second: nn.Module,
    data: "ImageData",
    recipe: Recipe,
    *,
    transfer: Transfer,
    share: float = 0.5,
    folder: str | os.PathLike[str] | None = None,
    on_epoch: Callable[[nn.Module, dict[str, float]], None] | None = None,
    **options: Any,
) -> xr.Dataset:
    """Trains the first network, hands its weights over, and trains the second: Li et al. 2021, section 4.

    What the hand-over changes is measured on the test images. The paper's kernels, widths, share of the epochs, bias
    strength and restart of the learning rate are not known; here each phase has the recipe's whole schedule, and the
    second sees the images in the orders and augmentations that come next.

    Args:
        first: the network of the convolutional phase, e.g. `create_model("convolutional_vit")`.
        second: the network of the attention phase, of the same options, e.g. `create_model("relative_vit")`.
        data: the images.
        recipe: of both phases together.
        transfer: `transfer(second, first)` writes the first network's function into the second; for those two models
            `vitprobe.models.convolutional_vit.transfer_`.
        share: of the epochs that the first phase gets.
        folder: where both phases live, in folders of their own; `None` keeps nothing.
        on_epoch: as in `fit`; the second phase's epochs count on from the first one's.
        options: further arguments of `fit`, for both phases.

    Returns:
        The histories of both phases along `epoch`, with coordinate `phase`, and the numbers of `HandOver`.

    Raises:
        ValueError: if a phase would have no epoch, or as `fit` does.
        TypeError: if `until` is given, which is of one training.
    """
    if "until" in options:
        raise TypeError("until= stops one training, and these are two: shorten the recipe, or fit the phases apart.")
    recipes = split_recipe(recipe, share)
    folders = [None if folder is None else Path(folder) / phase for phase in (FIRST, SECOND)]
    histories = [fit(first, data, recipes[0], folder=folders[0], on_epoch=on_epoch, **options)]
    second.to(device_of(first))
    transfer(second, first)
    measured = function_gap(first, second, data.loader("test", batch_size=recipe.batch_size, device=device_of(first)))

    def count_on(model: nn.Module, row: dict[str, float]) -> None:
        assert on_epoch is not None
        on_epoch(model, row | {"epoch": row["epoch"] + recipes[0].epochs})

    follow = None if on_epoch is None else count_on
    # By the first one's weights: what the transfer makes of them may differ in its last digits.
    start: dict[str, Any] = {
        "epochs_before": recipes[0].epochs,
        "initial": f"after {digest(plain_names(first.state_dict()))}",
    }
    histories.append(fit(second, data, recipes[1], folder=folders[1], on_epoch=follow, **start, **options))
    phases = [phase for phase, one in zip((FIRST, SECOND), histories, strict=True) for _ in one.epoch]
    histories[1] = histories[1].assign_coords(epoch=histories[1].epoch + recipes[0].epochs)
    both = xr.concat(histories, "epoch", combine_attrs="drop_conflicts", data_vars="minimal", coords="minimal")
    both.epoch.attrs |= histories[0].epoch.attrs
    both = both.assign_coords(phase=("epoch", phases, {"long_name": "phase"}))
    for name, (text, units) in HAND_OVER.items():
        both[f"hand_over_{name}"] = ((), getattr(measured, name), {"long_name": text, "units": units})
    configs = {phase: json.loads(one.attrs["config"]) for phase, one in zip((FIRST, SECOND), histories, strict=True)}
    own = {"share": share, "models": [one.attrs["model_class"] for one in histories]}
    return both.assign_attrs(
        provenance(
            title="Training history of two phases",
            config=own | configs,
            device=histories[1].attrs["device"],
            seed=recipe.seed,
        )
    )
