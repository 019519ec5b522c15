"""What the studies of d'Ascoli et al. (2021) share: a ViT and a ConViT of the same heads, width and recipe."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import xarray as xr

from studies.outcomes import without_evidence
from studies.park_kim.families import LOOKS
from studies.scales import by_seed
from vitprobe.claims import Verdict
from vitprobe.runs import Run
from vitprobe.study import Settings

REFERENCES = "d'Ascoli et al. 2021, arXiv:2103.10697"
VIT, CONVIT = LOOKS["vit"], LOOKS["convit"]
LONG = 100  # epochs, from which on it is evidence that something did not come
ABOVE_CHANCE = 15.0  # test accuracy [%] of ten classes from which on networks of a share of the images can be compared

# scale: the ViT and the ConViT, with options. Those of the paper scale are DeiT-S+ and ConViT-S+ of Tables 1 and 3; the
# small ones average their patches, where the paper's have a class token.
MODELS: dict[str, tuple[tuple[str, Mapping[str, Any]], tuple[str, Mapping[str, Any]]]] = {
    "smoke": (("vit_nano", {"heads": 4}), ("convit_nano", {})),
    "quick": (("vit_nano", {"heads": 4}), ("convit_nano", {})),
    "cpu": (("vit_micro", {}), ("convit_micro", {})),
    "paper": (("vit_s", {"dim": 576, "heads": 9}), ("convit_s_plus", {})),
}


def seeds(settings: Settings) -> list[Run]:
    """A run without a network for each seed, with snapshots early, in the middle and late.

    At the paper scale the images are those of CIFAR-100 unless the settings say otherwise, and the recipe has the batch
    and the learning rate of the paper's "+" models.

    Args:
        settings: of the study.
    """
    changes: dict[str, Any] = {}
    if settings.scale == "paper":
        settings = replace(settings, data=settings.data or "cifar100")
        changes = {"batch_size": 512, "lr": 4e-4}
    return [
        replace(run, recipe=replace(run.recipe, snapshots=snapshots(run.recipe.epochs)))
        for run in by_seed(settings, published="dascoli_deit", **changes)
    ]


def snapshots(epochs: int) -> tuple[int, ...]:
    """The epochs after which weights are kept: none, one, a tenth, a quarter, half, and all of them.

    Args:
        epochs: of the recipe.
    """
    return tuple(sorted({0, 1, *(max(1, round(share * epochs)) for share in (0.1, 0.25, 0.5)), epochs}))


def vit(run: Run, settings: Settings) -> Run:
    """The run of a seed with the ViT.

    Args:
        run: of `seeds`.
        settings: of the study.
    """
    model, options = MODELS[settings.scale][0]
    return replace(run, model=model, options=options)


def convit(run: Run, settings: Settings, **options: Any) -> Run:
    """The run of a seed with the ConViT.

    Args:
        run: of `seeds`.
        settings: of the study.
        **options: of the network, beside those that it has at the scale, e.g. `gpsa_layers=0`.
    """
    model, usual = MODELS[settings.scale][1]
    return replace(run, model=model, options={**usual, **options})


def pair(settings: Settings) -> list[Run]:
    """ViT and ConViT of dascoli/sample_efficiency on all images, seed by seed: the grid of studies that train nothing.

    Args:
        settings: of the study.
    """
    return [run for base in seeds(settings) for run in (vit(base, settings), convit(base, settings))]


def kinds(ds: xr.Dataset) -> tuple[dict[str, str], dict[str, str]]:
    """What tells the runs of the ViT and those of the ConViT, for `where`.

    Args:
        ds: stacked runs of the two.
    """
    names = dict.fromkeys(ds.model.values.tolist())
    (plain,), (gated,) = ([name for name in names if name.startswith(start)] for start in ("vit", "convit"))
    return {"model": plain}, {"model": gated}


def in_time(verdict: Verdict, epochs: int) -> Verdict:
    """The verdict, or that there is none because what was not seen may need a longer training.

    Args:
        verdict: on what comes late in training.
        epochs: of the training.
    """
    if verdict.verdict != "contradicted" or epochs >= LONG:
        return verdict
    return without_evidence(verdict, f"no evidence against it, because {epochs} epochs may be too few")
