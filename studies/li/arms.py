"""What the studies of two-phase training share: its arms, and what came of both phases of a run."""

import json
from dataclasses import replace
from typing import Any

import xarray as xr

from studies.outcomes import Look, outcome
from studies.scales import by_seed, sized
from vitprobe.figures.page import BLUE, GREY, PALETTE, VERMILION
from vitprobe.published.claims_li import PAPER
from vitprobe.runs import Run, trained
from vitprobe.study import Settings
from vitprobe.training import split_recipe

TWO_PHASES, SCRATCH, CONVOLUTION, TWICE = "two phases", "from scratch", "convolution", "convolution, twice"
ARMS = {
    TWO_PHASES: Look(TWO_PHASES, VERMILION, "s"),
    SCRATCH: Look(SCRATCH, BLUE, "o"),
    CONVOLUTION: Look(CONVOLUTION, PALETTE[2], "^"),
    TWICE: Look(TWICE, GREY, "v"),
}
_HANDED = {
    "first_accuracy": ("accuracy_before", 100, "test accuracy before the hand-over", "%"),
    "handed_accuracy": ("accuracy_after", 100, "test accuracy after the hand-over", "%"),
    "relative_gap": ("relative_gap", 1, "distance of logits at the hand-over over their norm", "1"),
    "agreement": ("agreement", 1, "share of test images decided alike at the hand-over", "1"),
}


def of_arm(settings: Settings, **changes: Any) -> list[dict[str, Run]]:
    """The runs by arm, one mapping for each seed; at the paper scale on CIFAR-100 unless the settings say otherwise.

    Args:
        settings: of the study.
        **changes: of the recipe, e.g. `lr=1e-3`.
    """
    if settings.scale == "paper":
        settings = replace(settings, data=settings.data or "cifar100")
    elif settings.scale == "smoke":
        changes = {"epochs": 2} | changes  # its one epoch cannot be shared
    found = []
    for base in by_seed(settings, published="two_phase", **changes):
        convolution = replace(base, model=sized("convolutional_vit", settings))
        attention = replace(base, model=sized("relative_vit", settings))
        first, second = split_recipe(base.recipe)
        start = replace(convolution, recipe=first)
        found.append({
            TWO_PHASES: replace(attention, start=start, recipe=second),
            SCRATCH: attention,
            CONVOLUTION: convolution,
            TWICE: replace(convolution, start=start, recipe=second),
        })
    return found


def arm(run: Run) -> str:
    """The arm that a run belongs to."""
    convolution = run.model.startswith("convolutional")
    if run.start is None:
        return CONVOLUTION if convolution else SCRATCH
    return TWICE if convolution else TWO_PHASES


def outcome_of_both(run: Run, settings: Settings) -> xr.Dataset:
    """Train both phases of a run, or its only one, and tell what came of it.

    Args:
        run: of `of_arm`.
        settings: of the study.

    Returns:
        The dataset of `outcome`, with `test_accuracy` and `train_loss` along the `epoch` of both phases, `seconds` of
        training, and the hand-over's `first_accuracy`, `handed_accuracy`, `relative_gap` and `agreement`, not-a-number
        where there was none. The coordinate `epochs` is of both phases.
    """
    result, ds = outcome(run, settings, references=PAPER)
    histories, first = [result.history], 0
    if run.start is not None:
        histories.insert(0, trained(run.start, cache=settings.cache, device=settings.device).history)
        first = run.start.recipe.epochs
        histories[1] = histories[1].assign_coords(epoch=histories[1].epoch + first)
    names = ["test_accuracy", "train_loss", "seconds"]
    history = xr.concat([one[names] for one in histories], "epoch", combine_attrs="override")
    history["epoch"].attrs = {"long_name": "epochs of training", "units": "1"}
    handed = json.loads(result.history.attrs.get("hand_over", "{}"))
    numbers: dict[str, Any] = {
        name: ((), factor * handed.get(key, float("nan")), {"long_name": text, "units": units})
        for name, (key, factor, text, units) in _HANDED.items()
    }
    seconds = ((), float(history.seconds.sum()), {"long_name": "wall time of all steps of training", "units": "s"})
    labels: dict[str, tuple[Any, str]] = {
        "arm": (arm(run), "how the network is trained"),
        "epochs": (history.sizes["epoch"], "epochs of training"),
        "first_epochs": (first, "epochs of the first phase; 0 where there is none"),
        "handed_images": (len(result.data.test), "number of test images of the hand-over"),
        "lr": (run.recipe.lr, "peak learning rate"),
    }
    return ds.assign(
        test_accuracy=history.test_accuracy, train_loss=history.train_loss, seconds=seconds, **numbers
    ).assign_coords({name: ((), value, {"long_name": text}) for name, (value, text) in labels.items()})
