"""How far attention looks, and how much of it is position, over training (d'Ascoli et al. 2021, Fig. 5 and 6).

Claims     D3: the attention of a ViT first becomes local; later its upper layers look far again. D4: gated layers that
           start local escape locality, and end more local than the ViT's. D5: the gates turn from position to content,
           the deeper the layer the further (published for S: from 0.73 to about 0 in layers 6 to 10). Of nonlocality
           the published values are not known. Fig. 13 and 14 are the same of other sizes, which are not trained here.
Command    vitprobe run dascoli/locality                     digits, 4 x 4 patches
           vitprobe run dascoli/locality --scale cpu         CIFAR-10, 8 x 8 patches
           vitprobe run dascoli/locality --scale paper --device cuda
Cost       The trainings are those of dascoli/sample_efficiency with all images: quick 6, cpu 6, paper 6. Measuring
           takes seconds for each snapshot of a small network: quick 23 s, cpu 37 s on two cores (measured).
Protocol   Nonlocality is the attention-weighted distance between query and key [patches], the gated map for gated
           layers, each layer on its own input (the published code feeds the patch embedding to all), mean over heads,
           class token left out; on the same 256 test images, spread evenly over them, at every snapshot.
           Before training, plain attention is nearly uniform (4.14 patches for 8 x 8), and gated attention a mixture of
           a uniform map and Gaussians of position, whose nonlocality is known in closed form (1.80 for 8 x 8 and 4
           heads of strength 1).
Rule       Set before anything was measured. Statistics of each seed, from the snapshots. D3, of the ViT: the lowest
           nonlocality after the start over that at the start, of the layer where it is largest, below 0.98; the share
           of the fall that the upper half of the layers has regained at the end (the mean over these layers: end less
           lowest, over start less lowest), above 0.1; and the last layer less the first at the end, above zero. What
           has not come may need more epochs than small scales have (1,256 steps are one of the 300 published epochs):
           below 100 epochs these, D4's escape and D5's training are inconclusive where they are not supported. For D3's
           fall, D4's escape and D5's training this was added after the cpu scale had been measured, where it turns one
           part, D3's fall, from contradicted to inconclusive. D4: the change from start to end of the gated layer at
           one fifth from the smallest, so that it is above zero if four of five layers escape, less what weight decay
           alone would make of it (decay draws a gate to one half and flattens the Gaussians); and the mean over gated
           layers at the end, less that of the same layers of the ViT, below zero: at the cpu scale its start nearly
           forces that, since the learning rates of all steps add up to 0.63, which is how far Adam can move a gate or a
           strength from 1. D5: the share of position, mean over layers and heads, less what weight decay alone would
           make of it (decay draws a gate to one half): its slope over the epochs, below zero; and the slope of the
           share at the end, mean over heads, over the layers, below zero (a rank correlation, which is told beside it,
           shows no spread where the order is perfect). Supported if the 95 % t interval over seeds lies wholly on the
           claimed side, contradicted if wholly on the other; a claim of several parts needs all. A network that did not
           learn its task (35 % of ten classes) makes it inconclusive.
Expected   D3's fall and D4's escape; in 8 epochs the gates move little. The accuracy by the recipe of
           scales.SMALL["cpu"] on the 2,000 images of its test, mean of seeds 0 to 2: 41.7 % ViT, 41.3 % ConViT.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from scipy.stats import spearmanr
from torch import nn

from studies.dascoli.pair import CONVIT, REFERENCES, VIT, in_time, pair
from studies.outcomes import judge, part
from studies.scales import LEAST
from vitprobe.claims import CLAIMS, Verdict, combine
from vitprobe.data import ImageData
from vitprobe.figures.page import GREY, PAGE_WIDTH, attribute, interval, style
from vitprobe.models.attention import Attention
from vitprobe.probes import AttentionGates, Nonlocality, probe
from vitprobe.results import to_json
from vitprobe.runs import Run, Trained, trained
from vitprobe.study import Settings, Study, main
from vitprobe.training import Recipe
from vitprobe.training.schedule import learning_rate

IMAGES = 256
FALL = 0.98  # of the nonlocality at the start
REGAINED = 0.1  # of the fall


# --- measured ---------------------------------------------------------------------------------------


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Nonlocality and gates of one network at its snapshots `(epoch, layer, head)`; layers without gates have NaN."""
    result = trained(run, cache=settings.cache, device=settings.device)
    data = result.data.few(IMAGES)
    snapshots = {epoch: snapshot(result.at(epoch), data) for epoch in run.recipe.snapshots}
    ds = xr.concat(
        [part.assign_coords(epoch=epoch) for epoch, part in snapshots.items()],
        "epoch",
        data_vars="all",
        coords="minimal",
        compat="override",
        combine_attrs="override",
    )
    ds["epoch"].attrs = {"long_name": "epochs of training", "units": "1"}
    gate, reach = decayed(result, run.recipe)
    text = "share of position that weight decay alone would leave"
    ds["gate_by_decay"] = ("epoch", gate, {"long_name": text, "units": "1"})
    text = "nonlocality that weight decay alone would make of gated attention"
    ds["nonlocality_by_decay"] = ("epoch", reach, {"long_name": text, "units": "patches"})
    return ds.assign_attrs(
        references=REFERENCES,
        seed=run.recipe.seed,
        accuracy=100 * float(result.history.test_accuracy[-1]),
        data=run.data.spec.partition(":")[0],
        classes=result.data.num_classes,
        patches=" x ".join(map(str, layout(result.model)[0])),
        run_config=to_json(run.config()),
    )


def snapshot(model: nn.Module, data: ImageData) -> xr.Dataset:
    """Nonlocality and gates of a network as it is, with the nonlocality that its start has in closed form."""
    found = probe(
        model, data.loader("test", batch_size=64), [Nonlocality(), AttentionGates()], missing="skip", progress=False
    )
    ds = found["nonlocality"].to_dataset()
    text = {"long_name": "share of the position map in the attention map", "units": "1"}
    gate = np.full(ds.nonlocality.shape, np.nan)
    if "attention_gates" in found:
        gates = found["attention_gates"].to_dataset()
        rows = [ds.layer_name.values.tolist().index(name) for name in gates.layer_name.values.tolist()]
        gate[rows] = gates.gate.transpose("layer", "head").values
    ds["gate"] = (("layer", "head"), gate, text)
    patches, heads = layout(model)
    uniform = ds.uniform_nonlocality.values
    start = np.where(np.isnan(gate).all(1), uniform, initial_nonlocality(patches, heads))
    ds["initial_nonlocality"] = ("layer", start, {"long_name": "nonlocality before training", "units": "patches"})
    names = ["nonlocality", "layer_nonlocality", "layer_nonlocality_se", "gate", "initial_nonlocality"]
    return ds[[*names, "uniform_nonlocality"]]


def layout(model: nn.Module) -> tuple[tuple[int, int], int]:
    """Rows and columns of patches of a ViT or ConViT, and its number of heads."""
    network: Any = model
    heads = next(module.heads for module in network.modules() if isinstance(module, Attention))
    return network.patches.grid, heads


def initial_nonlocality(grid: tuple[int, int], heads: int, *, strength: float = 1.0, gate: float = 1.0) -> float:
    """Nonlocality of gated attention before training, if its content map is uniform, mean over heads [patches].

    Position is a Gaussian of `strength` around the head's place on a square lattice of spacing one; its share is the
    sigmoid of `gate`. A head beyond the square looks everywhere alike.

    Args:
        grid: rows and columns of patches.
        heads: how many.
        strength: of locality [1/patch^2].
        gate: logit of the share of position.
    """
    places = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1).reshape(-1, 2)
    offset = (places[None] - places[:, None]).astype(float)
    distance = np.linalg.norm(offset, axis=-1)
    side, share = math.isqrt(heads), 1 / (1 + math.exp(-gate))
    lattice = np.arange(side) - (side - 1) / 2
    position = []
    for center in np.stack(np.meshgrid(lattice, lattice), -1).reshape(-1, 2):
        bump = np.exp(-strength * ((offset - center) ** 2).sum(-1))
        position.append(float((bump / bump.sum(-1, keepdims=True) * distance).sum(-1).mean()))
    position += (heads - side**2) * [distance.mean()]
    return float(share * np.mean(position) + (1 - share) * distance.mean())


def decayed(result: Trained, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """What decoupled weight decay would leave at each snapshot of gated attention without a gradient.

    It draws a gate to one half and flattens the Gaussians of position, both of which make attention look further.
    Where matrices alone decay, as in the published code, the Gaussians do, whose vectors are some, and gates do not.

    Args:
        result: the trained run, for how many steps an epoch has and where its gates start.
        recipe: of the training.

    Returns:
        The share of position and the nonlocality `(snapshot,)`; not-a-number without gates.
    """
    gates = [
        module.gate for module in result.at(0).modules() if isinstance(module, Attention) and module.gate is not None
    ]
    if not gates:
        return np.full(len(recipe.snapshots), np.nan), np.full(len(recipe.snapshots), np.nan)
    start = float(gates[0].detach().mean())
    steps = math.ceil(len(result.data.train) / recipe.batch_size)
    rates = [learning_rate(recipe, step, steps) for step in range(recipe.epochs * steps)]
    products = np.cumprod([1 - recipe.weight_decay * rate for rate in rates])
    kept = np.array([1.0 if epoch == 0 else products[epoch * steps - 1] for epoch in recipe.snapshots])
    gate = start * (kept if recipe.decay == "all" else np.ones_like(kept))
    patches, heads = layout(result.model)
    reach = [
        initial_nonlocality(patches, heads, strength=left, gate=logit) for left, logit in zip(kept, gate, strict=True)
    ]
    return np.asarray(1 / (1 + np.exp(-gate))), np.array(reach)


# --- verdicts ---------------------------------------------------------------------------------------


def kind(ds: xr.Dataset, name: str) -> xr.Dataset:
    """The runs of `"vit"` or `"convit"` by seed, without padded layers and heads."""
    runs = ds.isel(run=[str(model).startswith(name) for model in ds.model.values])
    runs = runs.isel(run=np.argsort(np.broadcast_to(_seeds(runs), runs.sizes["run"])))
    return runs.isel(layer=(runs.layer_name != "").any("run").values)


def _seeds(runs: xr.Dataset) -> np.ndarray:
    return attribute(runs, "seed")


def reach(runs: xr.Dataset) -> np.ndarray:
    """Nonlocality by seed, snapshot and layer `(run, epoch, layer)`, mean over heads [patches]."""
    return np.asarray(runs.layer_nonlocality.transpose("run", "epoch", "layer").values)


def gated(runs: xr.Dataset) -> np.ndarray:
    """Which layers of a ConViT have gates."""
    return np.asarray(runs.gate.notnull().any(("run", "epoch", "head")).values)


def shares(runs: xr.Dataset) -> np.ndarray:
    """The share of position by seed, snapshot and gated layer, mean over heads."""
    return np.asarray(runs.gate.mean("head").transpose("run", "epoch", "layer").values[..., gated(runs)])


def lowest_over_start(values: np.ndarray) -> np.ndarray:
    """Of each seed the lowest nonlocality after the start over that at the start, in the layer that falls least."""
    return np.asarray((values[:, 1:].min(1) / values[:, 0]).max(1))


def regained(values: np.ndarray) -> np.ndarray:
    """Of each seed the share of its fall that the upper half of the layers has regained in the end."""
    upper = values[..., values.shape[-1] // 2 :].mean(-1)
    low = upper.min(1)
    fall = upper[:, 0] - low
    return np.where(fall > 0, (upper[:, -1] - low) / np.where(fall > 0, fall, 1), 0.0)


def escaping(values: np.ndarray, by_decay: np.ndarray) -> np.ndarray:
    """Of each seed the change beyond weight decay's of the layer at one fifth from the smallest change.

    Args:
        values: nonlocality by seed, snapshot and gated layer.
        by_decay: what weight decay alone would make it, by seed and snapshot.
    """
    change = np.sort(values[:, -1] - values[:, 0], axis=1) - (by_decay[:, -1] - by_decay[:, 0])[:, None]
    return np.asarray(change[:, change.shape[1] // 5])


def slopes(values: np.ndarray, over: Sequence[float] | np.ndarray) -> np.ndarray:
    """Of each seed the least-squares slope of its row of values."""
    return np.array([np.polyfit(np.asarray(over, dtype=float), row, 1)[0] for row in values])


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """D3 of the ViT, D4 of both, D5 of the ConViT, each with its parts."""
    plain, local = kind(ds, "vit"), kind(ds, "convit")
    epochs, has_gates = ds.epoch.values, gated(local)
    far, near, position = reach(plain), reach(local), shares(local)

    def verdict(
        name: str, statement: str, values: np.ndarray, side: Any, runs: xr.Dataset, *, late: bool = False, **rule: Any
    ) -> Verdict:
        """On a part; what comes late in training is not contradicted by a short one."""
        claim = part(CLAIMS[name.split()[0]], name.partition(" ")[2], statement)
        found = judge(claim, values, side, runs, least=LEAST, **rule)
        return in_time(found, int(epochs[-1])) if late else found

    falls = ", ".join(f"{fall:.3f}" for fall in (far[:, 1:].min(1) / far[:, 0]).mean(0))
    ends = f"last layer {far[:, -1, -1].mean():.2f}, first {far[:, -1, 0].mean():.2f} patches"
    d3 = [
        verdict("D3 fall", "Every layer of a ViT becomes more local than it starts",
                lowest_over_start(far), "below", plain, threshold=FALL, late=True, detail=f"by layer {falls}"),
        verdict("D3 return", "Later the upper layers of a ViT look far again",
                regained(far), "above", plain, threshold=REGAINED, late=True),
        verdict("D3 order", "In the end the last layer looks further than the first",
                far[:, -1, -1] - far[:, -1, 0], "above", plain, late=True, detail=ends),
    ]  # fmt: skip
    drift = local.nonlocality_by_decay.transpose("run", "epoch").values
    first, last = (near[:, at, has_gates].mean(1) - far[:, at, has_gates].mean(1) for at in (0, -1))
    changes = ", ".join(f"{change:+.2f}" for change in (near[:, -1] - near[:, 0])[:, has_gates].mean(0))
    d4 = [
        verdict("D4 escape", "Four of five gated layers look further in the end than at the start, beyond weight decay",
                escaping(near[..., has_gates], drift), "above", local, late=True,
                detail=f"changes by layer {changes} patches, by decay {(drift[:, -1] - drift[:, 0]).mean():+.2f}"),
        verdict("D4 below ViT", "Gated layers end more local than the same layers of a ViT", last, "below", ds,
                detail=f"patches; {first.mean():+.2f} at the start, of which a short training undoes little"),
    ]  # fmt: skip
    decay = local.gate_by_decay.transpose("run", "epoch").values
    order = [float(spearmanr(range(row.size), row).statistic) for row in position[:, -1]]
    above, below = position[:, -1, 0].mean(), position[:, -1, -1].mean()
    d5 = [
        verdict("D5 training", "The share of position falls over training, by more than weight decay",
                slopes(position.mean(-1) - decay, epochs), "below", local, late=True,
                detail=f"from {position[:, 0].mean():.3f} to {position[:, -1].mean():.3f}, by decay alone to "
                f"{decay[:, -1].mean():.3f}; slope per epoch"),
        verdict("D5 depth", "In the end the share of position falls with depth",
                slopes(position[:, -1], np.arange(position.shape[-1])), "below", local,
                detail=f"slope per layer, from {above:.3f} in the first gated layer to {below:.3f} in the last; rank "
                f"correlation {np.mean(order):+.2f}"),
    ]  # fmt: skip
    return [
        whole
        for name, parts in (("D3", d3), ("D4", d4), ("D5", d5))
        for whole in (combine(CLAIMS[name], parts), *parts)
    ]


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Above: nonlocality of each layer over training. Below: the share of position in each gated layer and head."""
    plain, local = kind(ds, "vit"), kind(ds, "convit")
    layers = np.flatnonzero(gated(local))
    columns = min(5, len(layers))
    rows = math.ceil(len(layers) / columns)
    count = plain.sizes["run"]
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.1 + 1.35 * rows), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=(2.6, 0.45 + 1.35 * rows))
        above, below = halves
        panels = above.subplots(1, 2)
        for ax, runs, look in zip(panels, (plain, local), (VIT, CONVIT), strict=True):
            _nonlocality(ax, runs, look.label)
        panels[0].set_ylabel("nonlocality [patches]")
        uniform = float(plain.uniform_nonlocality.isel(epoch=0, layer=0).values.ravel()[0])
        for ax in panels:
            ratio = ax.secondary_yaxis("right", functions=(lambda y: y / uniform, lambda y: y * uniform))
        ratio.set_ylabel("over that of uniform attention [1]")
        handles, labels = panels[1].get_legend_handles_labels()
        above.legend(
            handles, labels, loc="outside upper center", ncols=min(8, len(handles)), handlelength=1.5,
            columnspacing=1.2,
        )  # fmt: skip
        gates = below.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for ax in gates.ravel()[len(layers) :]:
            ax.set_axis_off()
        for ax, layer in zip(gates.ravel(), layers, strict=False):
            _gates(ax, local, int(layer))
        for ax in gates[:, 0]:
            ax.set_ylabel("share of position [1]")
        for ax in gates[-1]:
            ax.set_xlabel("epochs of training")
        below.legend(*gates[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
        bands = f" Bands: 95 % t interval over {count} seeds." if count > 2 else ""
        figure.supxlabel(
            f"{ds.attrs['data']}, {ds.attrs['patches']} patches, {IMAGES} test images or all (accuracies: those "
            f"seen after every epoch); {count} seed{'s' * (count > 1)}.\n"
            f"Above, each on its own scale: means over heads and seeds.{bands}",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _nonlocality(ax: Axes, runs: xr.Dataset, label: str) -> None:
    values, epochs, has_gates = reach(runs), runs.epoch.values, gated(runs)
    colors = mpl.colormaps["viridis"](np.linspace(0, 0.9, values.shape[-1]))
    for layer, color in enumerate(colors):
        mean, half = interval(values[..., layer])
        if len(values) > 2:
            ax.fill_between(epochs, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)
        # Plain attention of a network that has gates elsewhere is dotted.
        line = "-" if has_gates[layer] or not has_gates.any() else ":"
        ax.plot(epochs, mean, line, color=color, marker="o", markersize=2.5, label=f"layer {layer + 1}")
    start = np.unique(runs.initial_nonlocality.isel(epoch=0).values)
    ax.plot(0 * start, start, "kx", markersize=5, zorder=5, clip_on=False, label="closed form before training")
    uniform = float(runs.uniform_nonlocality.isel(epoch=0, layer=0).values.ravel()[0])
    ax.axhline(uniform, color=GREY, linewidth=0.8, linestyle="--", label="uniform attention")
    ax.set_title(f"{label}, {attribute(runs, 'accuracy').mean():.1f} %")
    _epochs(ax, epochs)
    ax.set_xlabel("epochs of training")


def _gates(ax: Axes, runs: xr.Dataset, layer: int) -> None:
    values = runs.gate.isel(layer=layer).transpose("run", "head", "epoch").values
    epochs = runs.epoch.values
    for number, head in enumerate(values.reshape(-1, len(epochs))):
        ax.plot(epochs, head, color=CONVIT.color, linewidth=0.7, alpha=0.7, label="heads" if not number else None)
    ax.plot(epochs, np.nanmean(values, (0, 1)), color="black", marker="o", markersize=2.2, label="mean over heads")
    decay = runs.gate_by_decay.transpose("run", "epoch").values[0]
    ax.plot(epochs, decay, color=GREY, linewidth=0.8, linestyle="--", label="weight decay alone")
    ax.set_title(f"layer {layer + 1}")
    _epochs(ax, epochs)


def _epochs(ax: Axes, epochs: np.ndarray) -> None:
    """A logarithmic axis that begins at zero and names the snapshots."""
    ax.set_xscale("symlog", linthresh=1)
    ax.set_xlim(-0.1, 1.2 * epochs[-1])
    ax.set_xticks(epochs, labels=[f"{epoch:g}" for epoch in epochs])
    ax.xaxis.set_minor_locator(NullLocator())


STUDY = Study(
    name="dascoli/locality",
    title="Nonlocality and gates of ViT and ConViT over training",
    grid=pair,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
