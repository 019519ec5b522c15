"""ResNets lose accuracy to noise of high frequencies, ViTs to noise of low ones (Park & Kim 2022, Fig. 2b).

Claim      E15: noise of one band of frequencies costs the ViT more than the ResNet where the band is low, and the
           ResNet more where it is high; the curves cross once. Published for ViT-Ti and ResNet-50 on ImageNet, where
           they cross between 0.5 and 0.6 pi.
Command    vitprobe run park_kim/noise                       digits; shares its trained networks with park_kim/fourier
           vitprobe run park_kim/noise --scale cpu --data cifar10
           vitprobe run park_kim/noise --scale paper --device cuda
Cost       beside the training, 8 passes over the test images for each band. quick: 65 s, cpu (the first 500
           test images, 9 bands): 403 s on two cores (measured). paper (all 10,000) was not measured.
Expected   accuracy after training by the recipe of families.SCALES["cpu"], mean of seeds 0 to 2: 61.3 % AlterNet,
           49.6 % ConViT, 58.2 % ConvMixer, 54.3 % PiT, 63.8 % ResNet, 45.8 % Swin, 49.2 % ViT.
Rule       Set when the losses of one ViT by band and strength had been seen, and before any two networks were
           compared. Of each seed, what the ViT loses minus what the ResNet loses, under the
           same noise on the same images, averaged over the bands below 0.55 pi and over those above. Supported if the
           95 % t interval over seeds of the first lies wholly above zero and that of the second wholly below,
           contradicted if one lies wholly on the other side. Three versions, each with a verdict of its own:
           as published, bands cut out of white noise, so that the highest are three times as strong as the lowest;
           with equal power in all bands; and that again with the loss as a share of the accuracy above chance, because
           the two networks are not equally accurate.
           Of two networks one may be hurt more by any noise. So the second minus the first is judged too, below zero by
           the claim; it does not decide (added after the curves of one seed at the quick scale had been seen).
           The published strength of the noise is not known, and which way the difference goes may hang on it. So four
           strengths are measured, and the one counts at which the two networks lose about what the published two lose
           on average over bands, 9.9 points; the others are stated beside it. (Which four was set by the losses of that
           one ViT.) Both definitions have the same power on average over bands. Images too small for
           the published bands have one band for each of their frequencies.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import nn

from studies.outcomes import if_learned
from studies.park_kim.families import CLAIMS, LOOKS, family, grid, headline
from studies.park_kim.families import measure as measure_family
from vitprobe.claims import Claim, Direction, Verdict, combine, decide
from vitprobe.data.band_noise import ring
from vitprobe.figures.page import GREY, PAGE_WIDTH, attribute, limit, line_with_band, style
from vitprobe.probes import noise_by_frequency
from vitprobe.probes.noise import FREQUENCIES
from vitprobe.published import park_kim_2022
from vitprobe.results import to_json
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

WIDTH = 0.1  # of a band [pi rad/px]
STRENGTHS = (0.1, 0.2, 0.3, 0.4)  # root mean square, in units of the normalised images
CROSSING = 0.55  # between the published bands between which the published curves cross [pi rad/px]
BATCHES = {"cpu": 5}  # of 100 test images; all of them at the other scales
DEFINITIONS = {"accuracy_drop_paper": "published bands", "accuracy_drop": "bands of equal power"}


@dataclass(frozen=True)
class BothNoises:
    """`noise_by_frequency` by both definitions, at all strengths, with the method that `families.measure` calls.

    Attributes:
        batches: how many are measured; all unless given.
    """

    batches: int | None = None

    def run(self, model: nn.Module, batches: Iterable[Any], *, progress: bool) -> xr.Dataset:
        """Numbers along `severity` and `frequency`; those of the published definition end in `_paper`."""
        given = list(islice(batches, self.batches))
        size = (int(given[0][0].shape[-2]), int(given[0][0].shape[-1]))
        frequencies = bands(size)
        share = np.mean([published_power(size, frequency) for frequency in frequencies])
        rows = []
        for strength in STRENGTHS:
            options: dict[str, Any] = {"frequencies": frequencies, "width": WIDTH, "progress": progress}
            equal = noise_by_frequency(model, given, rms=strength, **options)
            # White noise of this amplitude has the same power on average over bands.
            amplitude = strength / float(np.sqrt(share))
            paper = noise_by_frequency(model, given, rms=amplitude, definition="paper", **options)
            rows.append(_renamed(equal).merge(_renamed(paper, "_paper")).assign_attrs(equal.attrs))
        ds = xr.concat(rows, dim="severity", combine_attrs="override")
        config = {"width": WIDTH, "strengths": STRENGTHS, "frequencies": frequencies, "batches": self.batches}
        return ds.assign_coords(
            severity=("severity", np.arange(1, len(STRENGTHS) + 1), {"long_name": "rung of strength"}),
            strength=(
                "severity",
                list(STRENGTHS),
                {"long_name": "root mean square of the noise, on average over bands", "units": "1"},
            ),
        ).assign_attrs(definition="both", config=to_json(config))


def bands(size: tuple[int, int]) -> tuple[float, ...]:
    """Centres of the bands: the published ones, or the image's own frequencies where some of those would be empty.

    Args:
        size: of the images [px].

    Returns:
        The centres [pi rad/px].
    """
    if max(size) * WIDTH >= 2:
        return FREQUENCIES
    return tuple(2 * waves / max(size) for waves in range(1, max(size) // 2 + 1))


def published_power(size: tuple[int, int], frequency: float) -> float:
    """The power that a published band keeps of white noise: of a wave without its mirror image, half is imaginary.

    Args:
        size: of the images [px].
        frequency: the centre of the band [pi rad/px].

    Returns:
        From 0 to 1.
    """
    inside = ring(size, frequency, width=WIDTH, definition="paper").double()
    mirrored = inside.flip(0, 1).roll((1, 1), (0, 1))
    return float(((inside + mirrored) / 2).square().mean())


def strengths(ds: xr.Dataset) -> np.ndarray:
    """The root mean squares of stacked runs `(severity,)`, which all have the same."""
    return ds.strength.isel(run=0).values


def _renamed(ds: xr.Dataset, ending: str = "") -> xr.Dataset:
    """The definition in the names of the variables; `accuracy` alone is what a run has without noise."""
    names = {}
    for name in map(str, ds.data_vars):
        stem, error = name.removesuffix("_se"), "_se" if name.endswith("_se") else ""
        names[name] = ("noisy_accuracy" if stem == "accuracy" else stem) + ending + error
    return ds.rename(names)


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Accuracy under noise of one trained network, on its test set or the first part of it."""
    return measure_family(run, settings, BothNoises(BATCHES.get(settings.scale)))


# --- verdicts ---------------------------------------------------------------------------------------


def losses(ds: xr.Dataset, variable: str, *, relative: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """What the ResNet and the ViT lose, seed by seed.

    Args:
        ds: stacked runs.
        variable: one of `DEFINITIONS`.
        relative: as a share of the accuracy above chance, in percent, not in percentage points.

    Returns:
        Both `(seed, severity, frequency)`.
    """
    # A network at chance would divide by zero; it is no evidence anyway.
    above_chance = np.maximum(attribute(ds, "clean_accuracy") - 1 / ds.attrs["classes"], 0.01)
    scale = np.broadcast_to(100 / above_chance if relative else 100.0, ds.sizes["run"])
    lost = scale[:, None, None] * ds[variable].transpose("run", "severity", "frequency").values
    vit = [name for name in headline(ds) if name.startswith("vit")]
    resnet = [name for name in headline(ds) if name not in vit]
    return lost[np.isin(ds.model, resnet)], lost[np.isin(ds.model, vit)]


def chosen_strength(ds: xr.Dataset, variable: str) -> int:
    """The place of the strength at which ResNet and ViT lose about what the published ones lose on average."""
    published = park_kim_2022()["noise_freq_delta_acc_pct"]
    wanted = -np.mean([published["ResNet-50"], published["ViT-Ti"]])
    lost = np.mean([each.mean((0, 2)) for each in losses(ds, variable)], axis=0)
    return int(np.abs(lost - wanted).argmin())


def crossings(frequency: np.ndarray, difference: np.ndarray) -> list[float]:
    """Where a difference, linear between its points, changes its sign [as the frequency]."""
    places = np.flatnonzero(np.sign(difference[:-1]) * np.sign(difference[1:]) < 0)
    return [
        float(np.interp(0, np.sort(difference[i : i + 2]), frequency[i : i + 2][np.argsort(difference[i : i + 2])]))
        for i in places
    ]


def judge(ds: xr.Dataset, variable: str, claim: Claim, *, relative: bool = False) -> list[Verdict]:
    """Verdicts on one version of E15: the whole, the low and the high bands, and the difference of both.

    Args:
        ds: stacked runs.
        variable: one of `DEFINITIONS`.
        claim: this version of the claim.
        relative: whether losses are shares of the accuracy above chance.
    """
    resnet, vit = losses(ds, variable, relative=relative)
    if len(resnet) != len(vit):
        raise ValueError(f"{len(resnet)} runs of the ResNet and {len(vit)} of the ViT: each seed has one of both.")
    difference, strength = vit - resnet, chosen_strength(ds, variable)
    frequency, rungs = ds.frequency.values, strengths(ds)
    found = crossings(frequency, difference[:, strength].mean(0))
    place = "cross at " + ", ".join(f"{one:.2f}" for one in found) + " pi" if found else "do not cross"
    unit = "%" if relative else "points"
    low, high = (difference[..., where].mean(-1) for where in (frequency < CROSSING, frequency > CROSSING))
    runs = ds.isel(run=np.isin(ds.model, headline(ds)))

    def part(name: str, statement: str, values: np.ndarray, direction: Direction) -> Verdict:
        others = ", ".join(f"{values[:, i].mean():+.1f} at {rms:g}" for i, rms in enumerate(rungs) if i != strength)
        verdict = decide(
            replace(claim, id=f"{claim.id} {name}", statement=statement, published="", counter_evidence=""),
            values[:, strength],
            threshold=0.0,
            direction=direction,
            detail=f"{unit} at RMS {rungs[strength]:g}; other strengths: {others}; mean curves {place}",
        )
        return if_learned(verdict, runs)

    parts = [
        part("low", "the ViT loses more than the ResNet to low bands", low, "above"),
        part("high", "the ViT loses less than the ResNet to high bands", high, "below"),
    ]
    tilt = "the ViT minus the ResNet loses less to high bands than to low ones"
    return [combine(claim, parts), *parts, part("tilt", tilt, high - low, "below")]


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E15 as published, with bands of equal power, and with losses as shares of what there is to lose."""
    claim = CLAIMS["E15"]
    equal = replace(
        claim, id="E15 equal power", statement=f"{claim.statement}, by bands of equal power", published="not published"
    )
    relative = replace(
        equal, id="E15 relative", statement=f"{equal.statement}, as a share of the accuracy above chance"
    )
    return [
        *judge(ds, "accuracy_drop_paper", claim),
        *judge(ds, "accuracy_drop", equal),
        *judge(ds, "accuracy_drop", relative, relative=True),
    ]


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Accuracy lost by band: the published curves, ours by both definitions, and below how strong the noise is."""
    published = park_kim_2022()["noise_freq_delta_acc_pct"]
    names = list(dict.fromkeys(ds.model.values.tolist()))
    looks = {name: LOOKS[family(name)] for name in names}
    main_ones = headline(ds)
    frequency = ds.frequency.values
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 3.5), layout="constrained")
        axes = figure.subplots(2, 3, sharex=True, height_ratios=[3, 1])
        axes[0, 0].set_title("published\non ImageNet")
        for name in main_ones:
            theirs = published["ViT-Ti" if family(name) == "vit" else "ResNet-50"]
            look = {"color": looks[name].color, "marker": looks[name].marker, "markersize": 2.4}
            axes[0, 0].plot(published["freq_pi"], -np.array(theirs), **look)
        axes[1, 0].text(0.5, 0.5, "not known", transform=axes[1, 0].transAxes, ha="center", va="center", color=GREY)
        axes[1, 0].set_yticks([])
        for column, (variable, title) in zip(axes.T[1:], DEFINITIONS.items(), strict=True):
            at = ds.isel(severity=(strength := chosen_strength(ds, variable)))
            column[0].set_title(f"{title}\nof mean RMS {strengths(ds)[strength]:g}")
            for name, look in looks.items():
                runs = at.isel(run=np.flatnonzero(at.model == name))
                drops, errors = (
                    100 * runs[each].transpose("run", "frequency").values for each in (variable, f"{variable}_se")
                )
                if name in main_ones:
                    line_with_band(column[0], frequency, drops, errors, look.color)
                    column[0].lines[-1].set_marker(look.marker)  # of the mean
                else:
                    thin = {"linewidth": 0.7, "linestyle": "--", "marker": look.marker, "markersize": 1.8}
                    column[0].plot(frequency, drops.mean(0), color=look.color, **thin)
            limit([column[0]], [100 * at[variable].values, np.zeros(1)])
            rms = at["rms_paper" if variable.endswith("paper") else "rms"].isel(run=0).values
            column[1].plot(frequency, rms, color=GREY, marker="o", markersize=2.4)
            column[1].set_ylim(0, 1.25 * max(float(at[name].max()) for name in ("rms", "rms_paper")))
        for ax in axes[0]:
            ax.axhline(0, color=GREY, linewidth=0.6)
            ax.axvline(CROSSING, color=GREY, linewidth=0.6, linestyle=":")
        axes[0, 0].set(ylabel="accuracy lost\n[percentage points]", xlim=(0, 1.02))
        axes[1, 0].set_ylabel("noise\nRMS [1]")
        axes[1, 1].set_xlabel("centre of the noise's band [π rad/px]")
        handles = [
            Line2D(
                [],
                [],
                color=look.color,
                marker=look.marker,
                markersize=3,
                linewidth=1.1 if name in main_ones else 0.7,
                linestyle="-" if name in main_ones else "--",
                label=look.label,
            )
            for name, look in looks.items()
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), columnspacing=1.4)
        seeds = ds.sizes["run"] // len(names)
        what = f"95 % t interval over {seeds} seeds; thin lines: single seeds" if seeds > 1 else "standard error"
        figure.supxlabel(
            f"Bands, of the two families of the claim: {what}. Dotted: where the published curves cross.",
            fontsize=6.5,
            color=GREY,
        )
    return figure


STUDY = Study(
    name="park_kim/noise",
    title="Accuracy under noise of one band of frequencies by family of networks",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
