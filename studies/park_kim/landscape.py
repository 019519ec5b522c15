"""The loss around trained networks along random directions (Park & Kim 2022, Fig. 1a).

Claim      E6: the loss surface around a trained ViT is flatter than around a trained ResNet. Published for ViT-Ti and
           ResNet-50 on CIFAR-100, from one pair of directions, as cross entropy plus 0.05 times the sum of the lengths
           of the weight tensors, of which the second makes most of the difference. AlterNet, PiT and Swin (Fig. C.4a,
           whose values are not known) are drawn and reported beside them.
Command    vitprobe run park_kim/landscape                   digits; shares its trained networks with park_kim/fourier
           vitprobe run park_kim/landscape --scale cpu --data cifar10
           vitprobe run park_kim/landscape --scale paper --device cuda
Cost       beside the training. quick: 186 s on two cores, 242 cells of 320 images of 8x8 for each of 15 networks, and
           as many again for those with batch norm (measured). cpu: 395 s, 147 cells of 192 images of 32x32
           (fewer than it had before its cost was reckoned, and before it was run).
Protocol   Planes of random directions, normalised filter by filter as Li et al. 2018 (the published normalisation runs
           over another axis). The images are training images, augmented, mixed and smoothed as in the training, drawn
           once: the same for all cells, networks and directions (common random numbers), so that the interval over
           seeds is one of these images. Cross entropy and weight decay are apart. Batch norm keeps the statistics of
           the trained network, as published, and a second time they are estimated anew at each cell: statistics that no
           longer fit are a rise that no ViT can have.
Rule       Set before anything was measured. Of each seed log2 of the rise of the cross entropy at distance 1 (mean
           over the ring of cells), mean over pairs of directions: ResNet less ViT. Supported if the 95 % t interval
           over seeds lies wholly above zero, contradicted if wholly below. The same is said of the rise with
           re-estimated batch norm, of the published weight term alone, and of the rise around PiT and Swin in the
           place of the ViT; they do not decide. A network that did not
           learn its task (45 % of ten classes), or around which the loss does not rise, is no evidence.
Expected   as published: 2.6 nats for the ViT and 3.7 for the ResNet, which is 0.51 doublings.
           The shared networks reach the accuracy that families.SCALES["cpu"]'s recipe gave, mean of seeds 0 to 2:
           61.3 % AlterNet, 49.6 % ConViT, 58.2 % ConvMixer, 54.3 % PiT, 63.8 % ResNet, 45.8 % Swin, 49.2 % ViT.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from studies.outcomes import learned, part, without_evidence
from studies.park_kim.families import CLAIMS, LOOKS, family
from studies.park_kim.families import grid as families_grid
from vitprobe.claims import Claim, Verdict, decide
from vitprobe.figures.loss_landscape import PUBLISHED_WEIGHT
from vitprobe.figures.page import GREY, PAGE_WIDTH, interval, style
from vitprobe.probes import loss_landscape
from vitprobe.results import to_json
from vitprobe.runs import Run, trained
from vitprobe.study import Settings, Study, main
from vitprobe.training import TrainingBatches

# scale: images, pairs of directions, cells along each
SIZES = {"smoke": (16, 1, 5), "quick": (320, 2, 11), "cpu": (192, 3, 7), "paper": (5000, 5, 21)}
BATCH_SIZE = 96  # the published one
FAMILIES = ("resnet", "vit", "alternet", "pit", "swin")
SHOWN = {LOOKS[name].label: LOOKS[name] for name in FAMILIES}
# Mean rise of the cross entropy over rings of finite cells of the grids in the authors' repository [nats].
PUBLISHED = {"ResNet": {0.5: 3.11, 0.8: 3.70, 1.0: 3.71}, "ViT": {0.5: 2.03, 0.8: 2.48, 1.0: 2.61}}
PANELS = {
    "nll": "cross entropy",
    "nll_reestimated": "cross entropy, batch norm re-estimated",
    "l2_sum_of_norms": f"{PUBLISHED_WEIGHT} · sum of norms",
}


def grid(settings: Settings) -> list[Run]:
    """ResNet, ViT, AlterNet, PiT and Swin, seed by seed."""
    return [run for run in families_grid(settings) if family(run.model) in FAMILIES]


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """The loss around one trained network `(direction_pair, y, x)`, with batch norm kept and re-estimated."""
    result = trained(run, cache=settings.cache, device=settings.device)
    images, pairs, points = SIZES[settings.scale]
    batches = TrainingBatches(
        result.data,
        run.recipe,
        batch_size=min(BATCH_SIZE, images),
        share=min(1.0, images / len(result.data.train.labels)),
        seed=0,  # and not the run's: all networks see the same images
    )
    common: dict[str, Any] = {"points": points, "pairs": pairs, "seed": run.recipe.seed, "progress": False}
    ds = loss_landscape(result.model, batches, **common)
    again = ds
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in result.model.modules()):
        again = loss_landscape(result.model, batches, batch_norm="reestimated", **common)
    for name in ("nll", "accuracy"):
        ds[f"{name}_reestimated"] = again[name].assign_attrs(
            long_name=f"{ds[name].attrs['long_name']}, batch norm re-estimated"
        )
    last = result.history.isel(epoch=-1)
    return ds.assign_attrs(
        probe="loss_landscapes",
        batch_norm="kept; variables that end in _reestimated: re-estimated",
        family=LOOKS[family(run.model)].label,
        batches_seed=0,
        seed=run.recipe.seed,
        network_accuracy=100 * float(last.test_accuracy),
        test_loss=float(last.test_loss),
        data=run.data.spec.partition(":")[0],
        classes=result.data.num_classes,
        run_config=to_json(run.config()),
    )


# --- rises ------------------------------------------------------------------------------------------


def rise(ds: xr.Dataset, variable: str, radius: float) -> xr.DataArray:
    """The mean rise from the centre over the ring of cells at a radius, half a cell to each side.

    Args:
        ds: landscapes `(..., y, x)`.
        variable: whose; the sum of norms is weighted as published.
        radius: in units of the directions.

    Returns:
        `(...)`; not-a-number where a cell of the ring is.
    """
    values = ds[variable] * (PUBLISHED_WEIGHT if variable == "l2_sum_of_norms" else 1.0)
    distance = np.hypot(ds["x"], ds["y"])
    ring = abs(distance - radius) <= (1 + 1e-9) * float(ds["x"][1] - ds["x"][0]) / 2
    return (
        (values - values.sel(x=0, y=0))
        .where(ring)
        .mean(["y", "x"], skipna=True)
        .where((values.notnull() | ~ring).all(["y", "x"]))
    )


def seed_values(ds: xr.Dataset, family: str, variable: str) -> dict[int, float]:
    """log2 of the rise at radius 1, mean over pairs of directions, by seed; not-a-number where a loss does not rise."""
    runs = ds.isel(run=np.flatnonzero(ds.family == family))
    heights = rise(runs, variable, 1.0).transpose("run", "direction_pair").values
    values = np.log2(np.where(heights > 0, heights, np.nan)).mean(axis=1)
    seeds = np.broadcast_to(runs.seed if "seed" in runs.coords else runs.attrs["seed"], len(values))
    return dict(zip(seeds.tolist(), values.tolist(), strict=True))


def compare(ds: xr.Dataset, claim: Claim, variable: str, other: str = "ViT") -> Verdict:
    """The verdict on the ResNet's rise being larger than another family's.

    Args:
        ds: stacked runs.
        claim: what is said.
        variable: whose rise.
        other: the other family.
    """
    pair = {name: seed_values(ds, name, variable) for name in ("ResNet", other)}
    values = [pair["ResNet"][seed] - pair[other][seed] for seed in pair["ResNet"] if seed in pair[other]]
    finite = [value for value in values if np.isfinite(value)]
    runs = ds.isel(run=np.flatnonzero(np.isin(ds.family, list(pair))))
    detail = "; ".join(f"{name} {2 ** np.mean(list(each.values())):.3g} nats" for name, each in pair.items())
    verdict = decide(claim, finite or [0.0], threshold=0.0, detail=f"geometric means at radius 1: {detail}")
    reason = ""
    if len(finite) < len(values):
        reason = "no evidence, because around a network the loss does not rise, or is no number"
    if not learned(runs.drop_vars("accuracy", errors="ignore").assign_coords(accuracy=runs.network_accuracy)):
        reason = "no evidence, because a seed did not learn its task"
    if reason:
        return without_evidence(verdict, reason)
    return verdict


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E6 from the cross entropy; beside it with batch norm re-estimated, of the weight term, and of PiT and Swin."""
    claim = CLAIMS["E6"]
    again = part(
        claim, "batch norm re-estimated",
        "The loss around a ResNet rises more steeply than around a ViT where batch norm is re-estimated at every cell",
    )  # fmt: skip
    weights = part(
        claim, "weight term", "The published weight term alone rises more steeply around a ResNet than around a ViT"
    )
    controlled = compare(ds, again, "nll_reestimated")
    found = compare(ds, claim, "nll")
    rises = controlled.detail.removeprefix("geometric means at radius 1: ")
    return [
        replace(found, detail=f"{found.detail}; with batch norm re-estimated at every cell, {rises}"),
        controlled,
        compare(ds, weights, "l2_sum_of_norms"),
        *(compare(ds, _around(name), "nll", name) for name in ("PiT", "Swin")),
    ]


def _around(name: str) -> Claim:
    return replace(
        CLAIMS["E6"],
        id=f"E6 {name}",
        statement=f"The loss surface around a trained {name} is flatter than around a trained ResNet",
        statistic=CLAIMS["E6"].statistic.replace("ViT", name),
        published="values not known",
        source="Fig. C.4a",
        counter_evidence="",
    )


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """The rise of each part over the distance from the weights, by family, and the published rings."""
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.0), layout="constrained")
        axes = figure.subplots(1, len(PANELS))
        for ax, (variable, title) in zip(axes, PANELS.items(), strict=True):
            _rises(ax, ds, variable)
            ax.set(xlabel="distance from the weights [1]", title=title)
        axes[0].set_ylabel("rise from the centre [nats]")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(handles))
        seeds = max(int((ds.family == name).sum()) for name in SHOWN)
        figure.supxlabel(
            f"Means over rings of cells, {ds.sizes['direction_pair']} pairs of filter-normalised directions, {seeds} "
            f"seed{'s' * (seeds > 1)}; {ds.attrs['images']} training images, the same for all cells.\nMarks with "
            "bars, all of distance 1: 95 % t interval over seeds (cut at the frame). Thin lines: single seeds.",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _rises(ax: Axes, ds: xr.Dataset, variable: str) -> None:
    """One part of the loss: `(seed, radius)` of each family."""
    step = float(ds["x"][1] - ds["x"][0])
    radii: Sequence[float] = np.arange(0, 1 + step / 2, step).tolist()
    top = 0.0
    for place, (name, look) in enumerate(SHOWN.items()):
        runs = ds.isel(run=np.flatnonzero(ds.family == name))
        if not runs.sizes["run"]:
            continue
        rows = [rise(runs, variable, radius).mean("direction_pair").values for radius in radii]
        values = np.stack(rows, axis=1)
        mean, half_width = interval(values)
        if len(values) > 1:
            ax.plot(radii, values.T, color=look.color, linewidth=0.5, alpha=0.45)
        ax.plot(radii, mean, color=look.color, label=name)
        bar = (1.06 + 0.05 * place, mean[-1], np.nan_to_num(half_width[-1]))
        ax.errorbar(*bar, color=look.color, marker=look.marker, markersize=3.5, elinewidth=0.8)
        top = max(top, float(np.nanmax(values)))
        if variable == "nll" and name in PUBLISHED:
            ax.plot(
                list(PUBLISHED[name]),
                list(PUBLISHED[name].values()),
                "*",
                color=look.color,
                markerfacecolor="white",
                markersize=7,
                label=f"{name}, published",
            )
            top = max(top, *PUBLISHED[name].values())
    ax.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    ax.set_xticks(np.linspace(0, 1, 6))
    ax.set_ylim(-0.08 * top, 1.1 * top)  # the bars of few seeds may leave the panel


STUDY = Study(
    name="park_kim/landscape",
    title="The loss around trained networks, along random directions",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
