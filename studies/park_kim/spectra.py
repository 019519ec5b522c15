"""Eigenvalues of the loss's Hessian during training: how many are negative, and how large (Park & Kim 2022, Fig. 4).

Claims     E3: at the end of warm-up a ViT has more negative eigenvalues than a ResNet. E5: its positive ones are
           smaller, then and later. E21, its part on curvature: AlterNet's positive eigenvalues are smaller than those
           of the convolutional network, and few are negative. E13: at the end of warm-up a PiT, which has stages, has
           fewer negative ones than a ViT, and the positive ones of a Swin, whose attention sees windows, are smaller
           than the ViT's. Published for ResNet-50, ViT-Ti, Alter-ResNet-50, PiT-Ti and Swin-Ti on CIFAR-100 (Fig. 1b,
           4, 12c and C.4b).
Command    vitprobe run park_kim/spectra                     digits; shares its trained networks with park_kim/fourier
           vitprobe run park_kim/spectra --scale cpu --data cifar10
           vitprobe run park_kim/spectra --scale paper --device cuda
Cost       beside the training. quick: 180 s on two cores (measured). cpu: 429 s on two cores (measured). paper was
           not measured.
Protocol   The five eigenvalues of largest magnitude of each batch of 16 training images, augmented, mixed and smoothed
           as in the training, weight decay counted as |w|^2 / 2 times its coefficient; the batches are drawn from the
           network's seed: networks of one seed see the same ones, at all epochs (at first all seeds did, which left out
           of the intervals which batches were drawn; measured again with the rules as they were). Each eigenvalue is
           stored with its residual. NEP is the share of negative ones, APE the mean of the positive ones, from the
           eigenvalues and not from a smoothed density. ResNet and ViT are measured all along, the others, of which no
           more is claimed, at the end of warm-up. ConvMixer is left out: no claim is about it, and its nearly equal
           eigenvalues take several times the work.
Rule       Set when four batches of one trained ViT of the quick scale (no negative eigenvalue) and of the untrained
           networks had been seen, and before any two trained networks were compared. Seeds are the units, the batches
           of a network are not. E3: NEP of the ViT less that of the ResNet. E5: log2 of APE of the ViT over that of the
           ResNet, at each epoch; all of them decide. E21: log2 of APE of AlterNet over that of the convolutional
           network; and few negatives are a NEP below 0.05, which lies between the published ones of AlterNet (0.006)
           and of the ViT (0.07); before that ViT was seen, it was a NEP below the ViT's own. Supported if the 95 % t
           interval over seeds lies wholly on the claimed side of zero, or of 0.05, contradicted if wholly on the other.
           A network that did not learn its task in the end (45 % of ten classes) is no evidence.
           E13, set before any PiT or Swin had been measured: at the end of warm-up NEP of the PiT less that of the ViT,
           and log2 of APE of the Swin over that of the ViT, both below zero; both decide. PiT and ViT also differ in
           overlapping patches, and the small ones in their end: the PiT has a class token, and the ViT averages, which
           is itself said to suppress negative eigenvalues (E7).
           The small AlterNets have the blocks of the small ResNets, so that these are their convolutional network; at
           the paper scale it is Alter-ResNet-50 without attention (28.2 million parameters, AlterNet has 33.0).
Expected   as published: E3, E5, E13 and E21 supported. The small ViTs have another training than the published one,
           which the sign of eigenvalues may depend on.
           The shared networks reach the accuracy that families.SCALES["cpu"]'s recipe gave, mean of seeds 0 to 2:
           61.3 % AlterNet, 49.6 % ConViT, 58.2 % ConvMixer, 54.3 % PiT, 63.8 % ResNet, 45.8 % Swin, 49.2 % ViT.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from studies.outcomes import Look, judge, part, where
from studies.park_kim.eigenvalues import STATISTICS, contrast, eigenvalues, measured_epochs, over_seeds
from studies.park_kim.families import CLAIMS, LOOKS, family
from studies.park_kim.families import grid as families_grid
from vitprobe.claims import Claim, Verdict, combine
from vitprobe.figures.page import GREY, PAGE_WIDTH, style
from vitprobe.published import park_kim_2022
from vitprobe.results import to_json
from vitprobe.runs import Run, trained
from vitprobe.study import Settings, Study, main

FAMILIES = ("resnet", "vit", "alternet", "convit", "pit", "swin")
BARE = "AlterNet without attention"
SHOWN = {LOOKS[name].label: LOOKS[name] for name in FAMILIES} | {BARE: Look(BARE, GREY, ">")}
FEW = 0.05  # NEP below which negative eigenvalues are few


def grid(settings: Settings) -> list[Run]:
    """The families but ConvMixer, seed by seed; at the paper scale also AlterNet's blocks without attention."""
    runs = [run for run in families_grid(settings) if family(run.model) in FAMILIES]
    if settings.scale != "paper":
        return runs
    bare = {"attentions": (0, 0, 0, 0)}
    return [
        each for run in runs for each in ([run, replace(run, options=bare)] if run.model == "alternet50" else [run])
    ]


def family_of(run: Run) -> str:
    """The family of a run's network, as papers write it."""
    return BARE if run.options else LOOKS[family(run.model)].label


def epochs_of(run: Run) -> list[int]:
    """When a network is measured: the published families all along, the others at the end of warm-up."""
    epochs = measured_epochs(run)
    return epochs if family(run.model) in ("resnet", "vit") else epochs[:1]


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Eigenvalues of one network at its snapshots `(epoch, batch, rank)`, of the same batches."""
    result = trained(run, cache=settings.cache, device=settings.device)
    spectra = {epoch: eigenvalues(result, epoch, settings) for epoch in epochs_of(run)}
    last = result.history.isel(epoch=-1)
    # Not-a-number where a network is not measured.
    return (
        along_epochs(spectra)
        .reindex(epoch=measured_epochs(run))
        .assign_coords(seed=((), run.recipe.seed, {"long_name": "seed of the run", "units": "1"}))
        .assign_attrs(
            probe="hessian_spectra",
            family=family_of(run),
            warmup_end=measured_epochs(run)[0],
            accuracy=100 * float(last.test_accuracy),
            accuracy_se=100
            * float(np.sqrt(last.test_accuracy * (1 - last.test_accuracy) / len(result.data.test.labels))),
            test_loss=float(last.test_loss),
            data=run.data.spec.partition(":")[0],
            classes=result.data.num_classes,
            run_config=to_json(run.config()),
        )
    )


def along_epochs(spectra: dict[int, xr.Dataset]) -> xr.Dataset:
    """Spectra of one network at several epochs, of the same batches, with `epoch` before their dimensions."""
    ds = xr.concat(
        [part.assign_coords(epoch=epoch) for epoch, part in spectra.items()],
        dim="epoch",
        coords="minimal",
        data_vars="all",
        compat="equals",  # also of the batches' hashes
        join="exact",
        combine_attrs="override",
    )
    ds["epoch"].attrs = {"long_name": "epochs of training", "units": "1"}
    return ds


# --- verdicts ---------------------------------------------------------------------------------------


def compare(
    ds: xr.Dataset, claim: Claim, variable: str, first: str, second: str, epoch: int, *, above: bool
) -> Verdict:
    """The verdict on the first family lying above, or below, the second: NEP by difference, APE by log2 of the ratio.

    Args:
        ds: stacked runs.
        claim: what is said.
        variable: `"nep"` or `"ape"`.
        first: a family.
        second: another one.
        epoch: after which.
        above: whether the claim says above.
    """
    ds = ds.sel(epoch=epoch)
    means = ", ".join(f"{where(ds, family=name)[variable].values.mean():.3g} {name}" for name in (first, second))
    values = contrast(ds, variable, {"family": first}, {"family": second})
    runs = ds.isel(run=np.flatnonzero(np.isin(ds.family, [first, second])))
    return judge(claim, values, "above" if above else "below", runs, detail=f"{variable.upper()} {means}")


def few(ds: xr.Dataset, claim: Claim, family: str, epoch: int) -> Verdict:
    """The verdict on few eigenvalues of a family's networks being negative."""
    runs = where(ds.sel(epoch=epoch), family=family)
    nep = runs.nep.values
    return judge(claim, nep, "below", runs, threshold=FEW, detail=f"NEP {nep.mean():.3g}")


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E3, E5 at every epoch, E13, and the curvature of E21."""
    warmup, *later = ds.epoch.values.astype(int).tolist()
    e3 = compare(ds, CLAIMS["E3"], "nep", "ViT", "ResNet", warmup, above=True)
    parts = [
        compare(
            ds,
            _part("E5", f"epoch {epoch}", f"After epoch {epoch} a ViT has smaller positive eigenvalues than a ResNet"),
            "ape",
            "ViT",
            "ResNet",
            epoch,
            above=False,
        )
        for epoch in (warmup, *later)
    ]
    stages = _part("E13", "NEP", "Several stages suppress negative eigenvalues")
    windows = _part("E13", "APE", "Attention in windows shrinks positive eigenvalues")
    e13 = [
        compare(ds, stages, "nep", "PiT", "ViT", warmup, above=False),
        compare(ds, windows, "ape", "Swin", "ViT", warmup, above=False),
    ]
    plain = BARE if (ds.family == BARE).any() else "ResNet"
    e21 = [
        compare(
            ds,
            _part("E21", "APE", "AlterNet has smaller positive eigenvalues than the network without attention"),
            "ape",
            "AlterNet",
            plain,
            warmup,
            above=False,
        ),
        few(ds, _part("E21", "NEP", f"AlterNet has few negative eigenvalues: NEP below {FEW:g}"), "AlterNet", warmup),
    ]
    whole = _part("E21", "curvature", "AlterNet has a flatter loss than the convolutional network, few negatives")
    return [
        e3,
        *(combine(CLAIMS["E5"], parts), *parts),
        *(combine(CLAIMS["E13"], e13), *e13),
        *(combine(whole, e21), *e21),
    ]


def _part(claim: str, words: str, statement: str) -> Claim:
    """A part of a claim, with the published values of the whole."""
    return part(CLAIMS[claim], words, statement, published=CLAIMS[claim].published)


# --- figure -----------------------------------------------------------------------------------------


def published() -> dict[str, dict[str, float]]:
    """NEP and APE at the end of warm-up as read off Fig. 4 and, for AlterNet, Fig. 12c."""
    numbers = park_kim_2022()
    four, twelve = numbers["hessian_warmup_fig4"], numbers["hessian_warmup_alternet"]
    found = {name: {"nep": four[name]["nep_if_same_yscale"], "ape": four[name]["ape"]} for name in ("ViT", "ResNet")}
    return found | {"AlterNet": {"nep": twelve["AlterNet"]["nep"], "ape": twelve["AlterNet"]["ape"]}}


def draw(ds: xr.Dataset) -> Figure:
    """Above: eigenvalues at the end of warm-up by family. Below: NEP and APE in training, and the published ones."""
    families = [name for name in SHOWN if (ds.family == name).any()]
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 5.0), layout="constrained")
        axes = figure.subplots(2, 2)
        spectra = {
            name: ds.eigenvalue.isel(run=np.flatnonzero(ds.family == name), epoch=0).values.ravel() for name in families
        }
        _densities(axes[0], spectra)
        axes[0, 0].set_title(f"negative, epoch {int(ds.epoch[0])} (end of warm-up)")
        axes[0, 1].set_title(f"positive, epoch {int(ds.epoch[0])} (end of warm-up)")
        for ax, name in zip(axes[1], STATISTICS, strict=True):
            _over_training(ax, ds, name, families)
        axes[1, 1].set_yscale("log")
        handles = [
            Line2D([], [], color=SHOWN[name].color, marker=SHOWN[name].marker, markersize=4, label=name)
            for name in families
        ]
        handles.append(
            Line2D([], [], color=GREY, marker="*", markerfacecolor="white", linestyle="", label="published, CIFAR-100")
        )
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
        counts = {int((ds.family == name).sum()) for name in families}
        bars = "95 % bootstrap interval over batches"
        if max(counts) > 1:
            bars = "95 % t interval over seeds, of APE that of its logarithm"
        figure.supxlabel(
            f"{ds.sizes['rank']} eigenvalues of largest magnitude of each of {ds.sizes['batch']} batches of "
            f"{ds.attrs['batch_size']} training images, {max(counts)} seed{'s' * (max(counts) > 1)}; weight decay "
            f"{ds.attrs['weight_decay']}, augmentation {ds.attrs['augment']}. Areas are shares of all.\n"
            f"Bars: {bars}. Thin lines: single seeds.",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _densities(axes: Sequence[Axes], spectra: dict[str, np.ndarray]) -> None:
    """Histograms of both signs over the logarithm of the magnitude, on one scale of ordinates."""
    sizes = np.abs(np.concatenate(list(spectra.values())))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    low, high = np.floor(10 * np.log10(sizes.min())) / 10, np.ceil(10 * np.log10(sizes.max())) / 10
    edges = np.arange(low, high + 0.15, 0.1)
    top = 0.0
    for sign, ax in zip((-1, 1), axes, strict=True):
        for name, values in spectra.items():
            values = values[np.isfinite(values)]
            side = np.log10(np.abs(values[sign * values > 0]))
            density = np.histogram(side, edges)[0] / (len(values) * np.diff(edges))
            top = max(top, density.max())
            ax.stairs(density, 10**edges, color=SHOWN[name].color, linewidth=1.0)
        ax.set(xscale="log", xlabel="magnitude of the eigenvalue [nats]", ylabel="density [1/decade]")
        ax.set_xlim(10**low, 10 ** edges[-1])
    axes[0].invert_xaxis()
    for ax in axes:
        ax.set_ylim(0, 1.05 * top)


def _over_training(ax: Axes, ds: xr.Dataset, variable: str, families: Sequence[str]) -> None:
    """A statistic at each epoch: the mean over seeds with its interval, each seed, and the published value."""
    epochs = ds.epoch.values.astype(float)
    reach = np.ptp(epochs) or 1.0
    for place, name in enumerate(families):
        look, runs = SHOWN[name], ds.isel(run=np.flatnonzero(ds.family == name))
        values = runs[variable].transpose("run", "epoch").values
        x = epochs + 0.012 * reach * (place - (len(families) - 1) / 2)
        mean, bars = over_seeds(values, variable)
        if len(values) == 1:
            ends = [runs[f"{variable}_{end}"].values[0] for end in ("low", "high")]
            bars = np.stack([mean - ends[0], ends[1] - mean]).clip(0)
        else:
            ax.plot(x, values.T, color=look.color, linewidth=0.5, alpha=0.45)
        ax.errorbar(x, mean, bars, color=look.color, marker=look.marker, markersize=3.5, elinewidth=0.8)
        if name in (known := published()):
            value = known[name][variable]
            ax.plot(x[0], value, "*", color=look.color, markerfacecolor="white", markersize=8, zorder=5)
    long_name, units = STATISTICS[variable]
    ax.set(xlabel="epochs of training", ylabel=f"{variable.upper()} [{units}]", title=long_name)
    ax.set_xticks(ds.epoch.values)


STUDY = Study(
    name="park_kim/spectra",
    title="Hessian eigenvalues of six families of networks during training",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
