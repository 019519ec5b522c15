"""All families, all probes, the same data: what goes with accuracy on small data?

Question   None of the four papers puts its families and measurements side by side. Here each of seven families of
           networks, trained alike on a small part of CIFAR-10, is measured by what the papers say matters: eigenvalues
           of the loss at the end of warm-up, what units do to high frequencies and to the variance, how far the network
           looks, calibration. Which of them has the order of the test accuracies?
Command    vitprobe run across/small_data                    digits; shares its networks with park_kim/fourier
           vitprobe run across/small_data --scale cpu --data cifar10
           vitprobe run across/small_data --scale paper --device cuda
Cost       no training beyond families.grid: 396 s on two cores at quick with all of it (measured). Beside it, the
           eigenvalues of one epoch, and three passes over the test images for all other probes: 369 s on two cores at
           the cpu scale (measured, eigenvalues taken from park_kim/spectra but for the ConvMixers).
Measures   NEP and APE at the end of warm-up, as in park_kim/spectra. Change of the relative log amplitude at the
           highest frequency, and of the variance over mean square, by units that keep the grid: summed over them, since
           units of different kinds change them differently, and a median would fall between the kinds.
           Reach: the distance from query to key, weighted with attention, or with the size of a convolution's taps, in
           pixels of the image; mean over heads, channels and layers. ECE and signed ECE, corrected bins. Parameters,
           as a confound.
Rule       Set before PiT and Swin were measured, and before anything was compared with accuracy; the changes of high
           frequencies and of the variance had been seen in the other five. The families are the units: for each measure
           Spearman's rank correlation with the test accuracy, over the families' means over seeds. It is told from
           nothing if the exact permutation test over all orders of the families, two-sided, with Holm's correction for
           five measures, gives p < 0.05; seven families need a correlation of 0.93 for that. Calibration, which is made
           of accuracy, and parameters, a confound, are drawn and not judged. The range of the correlations of single
           seeds says how far the order is settled, which is another question. A network that did not learn its task
           (45 % of ten classes) makes all inconclusive. Nothing follows about causes: bias, size and all measures
           change together between families, and reach tells attention from convolution before anything else.
Expected   With seven families, nothing passes but what follows accuracy by its making. The shared networks reach the
           accuracy that families.SCALES["cpu"]'s recipe gave, mean of seeds 0 to 2: 61.5 % AlterNet, 50.2 % ConViT,
           58.2 % ConvMixer, 54.5 % PiT, 63.7 % ResNet, 45.8 % Swin, 48.8 % ViT.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from scipy.stats import rankdata

from studies.outcomes import around, bars_note, if_learned, outcome, point, rank_correlation
from studies.park_kim.eigenvalues import doublings, eigenvalues, measured_epochs
from studies.park_kim.families import LOOKS, family, grid, steps
from vitprobe.claims import Claim, Verdict
from vitprobe.figures.page import GREY, PAGE_WIDTH, style
from vitprobe.probes import Calibration, FeatureVariance, Fourier, filter_statistics, nonlocality, probe
from vitprobe.runs import Run, Trained
from vitprobe.study import Settings, Study, main

REFERENCES = "Park & Kim 2022, arXiv:2202.06709; d'Ascoli et al. 2021, arXiv:2103.10697"
# What is measured: its name in figures, and its unit.
MEASURES = {
    "nep": ("negative eigenvalues, NEP", "1"),
    "log2_ape": ("log2 of positive ones, APE", "log2 nats"),
    "high_frequency_change": ("change of high frequencies", "ln"),
    "variance_change": ("change of normalised variance", "1"),
    "reach": ("reach", "px"),
    "ece": ("calibration error, ECE", "1"),
    "ecse": ("over-confidence, ECSE", "1"),
    "log10_parameters": ("log10 of parameters", "1"),
}
JUDGED = ("nep", "log2_ape", "high_frequency_change", "variance_change", "reach")


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Every measure of one trained network, without dimensions."""
    result, ds = outcome(run, settings, references=REFERENCES)
    batches = result.data.loader("test", batch_size=100)
    tree = probe(result.model, batches, [Fourier(), FeatureVariance(), Calibration()], progress=False)
    early = eigenvalues(result, measured_epochs(run)[0], settings)
    found = {
        "nep": float(early.nep),
        "log2_ape": float(doublings(early.ape)),
        "high_frequency_change": _summed_steps(tree["fourier"].to_dataset(), "high_frequency_amplitude"),
        "variance_change": _summed_steps(tree["feature_variance"].to_dataset(), "normalised_variance"),
        "reach": reach(result),
        "ece": float(tree["calibration"].ece),
        "ecse": float(tree["calibration"].ecse),
        "log10_parameters": math.log10(float(ds.parameters)),
    }
    return ds.assign({
        name: ((), value, {"long_name": MEASURES[name][0], "units": MEASURES[name][1]}) for name, value in found.items()
    })


def _summed_steps(ds: xr.Dataset, variable: str) -> float:
    """What the units that keep the grid do to a variable, all together."""
    return float(np.nansum(steps(ds.expand_dims("run"), variable).values))


def reach(result: Trained) -> float:
    """How far a network looks in a unit of attention or convolution [px of the image]: mean over its layers.

    A layer's reach is the mean over heads, or channels, of the distance from query to key, weighted with attention or
    with the size of taps; a patch is as many pixels as the image has for it. Stems and subsampling do not count.
    """
    model, pixels = result.model, math.prod(result.data.image_size)
    images, found = result.data.loader("test", batch_size=100), list[float]()
    with _without("no attention"):
        ds = nonlocality(model, images, progress=False)
        patch = np.sqrt(pixels / (ds.grid_h * ds.grid_w * ds.windows))
        found += (ds.layer_nonlocality * patch).values.tolist()
    with _without("no two-dimensional convolution"):
        ds = filter_statistics(model, images)
        ds = ds.isel(layer=np.flatnonzero(ds.kind == "conv"))
        patch = np.sqrt(pixels / (ds.grid_h * ds.grid_w))
        found += (ds.mean_distance.mean("channel") * patch).values.tolist()
    return float(np.mean(found))


@contextmanager
def _without(said: str) -> Iterator[None]:
    """Go on where a network has nothing of a kind to measure, as the probe says."""
    try:
        yield
    except ValueError as error:
        if said not in str(error):
            raise


# --- what goes with accuracy ------------------------------------------------------------------------


def permutation_p(one: np.ndarray, other: np.ndarray) -> float:
    """Two-sided p of Spearman's rank correlation: the share of all orders that give one as far from zero.

    Exact; of more than eight families, whose orders are too many, it is that of 40,000 random ones. One where a number
    is missing, which has no rank.
    """
    if not np.isfinite([*one, *other]).all():
        return 1.0
    ranks, reference = rankdata(one), rankdata(other)
    n = len(ranks)
    if n <= 8:
        orders = np.array(list(itertools.permutations(range(n))))
    else:
        rng = np.random.default_rng(0)
        orders = np.array([np.arange(n), *(rng.permutation(n) for _ in range(40_000))])
    products = np.abs((ranks[orders] - ranks.mean()) @ (reference - reference.mean()))
    found = abs((ranks - ranks.mean()) @ (reference - reference.mean()))
    return float((products >= found - 1e-9).mean())


def holm(p: Sequence[float]) -> list[float]:
    """Holm's corrected p values, in the given order."""
    order = np.argsort(p)
    corrected = np.maximum.accumulate([min(1.0, p[k] * (len(p) - place)) for place, k in enumerate(order)])
    return [float(corrected[np.flatnonzero(order == k)[0]]) for k in range(len(p))]


def means(ds: xr.Dataset, variable: str) -> np.ndarray:
    """A variable's mean over the seeds of each family, in the order of the families."""
    return np.array([ds[variable].values[ds.model.values == model].mean() for model in models(ds)])


def models(ds: xr.Dataset) -> list[str]:
    """The networks, in the order of the grid."""
    return list(dict.fromkeys(ds.model.values.tolist()))


def of_seeds(ds: xr.Dataset, variable: str) -> list[float]:
    """The rank correlation with accuracy over the families of each seed."""
    found = []
    for seed in np.unique(ds.seed.values):
        runs = ds.isel(run=np.flatnonzero(ds.seed.values == seed))
        found.append(rank_correlation(runs[variable].values, runs.accuracy.values))
    return found


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """For each measure that is judged, whether it goes with accuracy over the families."""
    accuracy = means(ds, "accuracy")
    p = [permutation_p(means(ds, name), accuracy) for name in JUDGED]
    found = []
    for name, raw, corrected in zip(JUDGED, p, holm(p), strict=True):
        rho = rank_correlation(means(ds, name), accuracy)
        single = of_seeds(ds, name)
        low, high = min(single), max(single)
        claim = Claim(
            id=f"A {name}",
            paper="ours",
            statement=f"{MEASURES[name][0]} goes with the test accuracy over the families",
            statistic="Spearman's rank correlation over the families, of means over seeds",
            published="not published",
            source="studies/across/small_data.py",
        )
        verdict = Verdict(
            claim=claim,
            verdict="supported" if corrected < 0.05 else "inconclusive",
            value=rho,
            low=low,
            high=high,
            n=len(accuracy),
            unit="network",
            rule="exact permutation test over families, two-sided, p < 0.05 after Holm's correction",
            detail=f"p = {raw:.3f}, corrected {corrected:.3f}; the interval is the range over single seeds",
        )
        found.append(if_learned(verdict, ds))
    return found


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """The test accuracy against each measure, a point for each family, with its rank correlation."""
    accuracy = means(ds, "accuracy")
    seeds = len(np.unique(ds.seed.values))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 4.4), layout="constrained")
        axes = figure.subplots(2, 4, sharey=True)
        for ax, (name, (text, units)) in zip(axes.flat, MEASURES.items(), strict=True):
            for model in models(ds):
                runs, look = ds.isel(run=np.flatnonzero(ds.model.values == model)), LOOKS[family(model)]
                errors = (np.full(runs.sizes["run"], np.nan), runs.error_se.values)
                drawn = {"color": look.color, "marker": look.marker, "label": look.label}
                point(ax, runs[name].values, runs.accuracy.values, errors=errors, **drawn)
            around(ax, ds[name].values, ds.accuracy.values)
            p = permutation_p(means(ds, name), accuracy)
            ax.set_title(f"ρ = {rank_correlation(means(ds, name), accuracy):+.2f}, p = {p:.2f}")
            ax.set_xlabel(f"{text}\n[{units}]")
        for ax in axes[:, 0]:
            ax.set_ylabel("test accuracy [%]")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(handles), handletextpad=0.2)
        figure.supxlabel(
            f"{ds.attrs['data']}, {int(ds.train_images.values.flat[0]):,} training images. ρ: Spearman's over the "
            f"families; p: exact permutation test, not corrected for {len(MEASURES)} measures.\n{bars_note(seeds)}",
            fontsize=6.5,
            color=GREY,
        )
    return figure


STUDY = Study(
    name="across/small_data",
    title="What goes with accuracy on small data, over seven families of networks",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
