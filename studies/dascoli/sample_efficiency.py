"""ConViT against ViT: size, speed and accuracy, and what fewer data do to both (d'Ascoli et al. 2021, Tables 1 and 2).

Claim      D1: a ConViT is more accurate than a ViT of the same heads, width and recipe (published for S+: 82.2 and
           79.0 %). D2: the fewer the data, the larger its relative gain (published for S: 37, 24, 12, 5 and 2 % with 5,
           10, 30, 50 and 100 % of ImageNet).
Command    vitprobe run dascoli/sample_efficiency            digits
           vitprobe run dascoli/sample_efficiency --scale cpu       5,000 images of CIFAR-10 and a tenth of them
           vitprobe run dascoli/sample_efficiency --scale paper --device cuda       CIFAR-100
Cost       quick: 12 trainings of nano networks, 6 of them those of dascoli/ablations; 16 s on two cores when all were
           there (measured). cpu: 1615 s on two cores with 12 trainings of micro networks (measured, beside other work).
           paper: 30 trainings of DeiT-S+ and ConViT-S+, not measured.
Rule       Set before anything was measured. D1: of each seed the test accuracy of the ConViT less that of the ViT, with
           all of the scale's images; supported if the 95 % t interval over seeds lies wholly above zero, contradicted
           if wholly below. A network that did not learn its task (35 % of ten classes) makes it inconclusive.
           D2: of each seed the slope of the relative gain [%] over the decimal logarithm of the share of the images, by
           least squares; supported if its interval lies wholly below zero, contradicted if wholly above. The networks
           of all images must have learned their task, all others be better than chance by half (15 % of ten classes).
           A relative gain grows by itself where accuracies are low: the slope of the gain in percentage points is
           judged beside it, and decides nothing.
           1,256 steps, those of the cpu scale, are early training: with all images both networks still underfit, with a
           tenth and ten times the epochs they do not. So the loss of the training images is said with both claims.
           Shares are the first images of each class, as in the paper, and see as many images in all (epochs, warm-up
           and schedule stretched alike). Both networks have the same heads and width; at the paper scale those of S+,
           while Table 2 compares networks of different heads and width.
           The speed is measured where the study runs: images a second of forward passes in evaluation mode, median and
           range over repeats and seeds. Other processes of the study slow it down, so that only their ratio means
           anything, and it roughly; measure it with `--workers 1 --recompute`, which keeps the trained networks.
Expected   D1 supported: a few points. D2 open at the cpu scale: with 500 images the accuracies of three seeds differ by
           as much as the gain may be. The accuracy by the recipe of scales.SMALL["cpu"], mean of seeds 0 to 2: 41.2 %
           ViT and 42.3 % ConViT with all 5,000 images, 29.0 % and 33.7 % with a tenth.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from matplotlib.transforms import Bbox
from torch import Tensor, nn

from studies.dascoli.ablations import shared_out
from studies.dascoli.pair import ABOVE_CHANCE, CONVIT, REFERENCES, VIT, convit, kinds, seeds, vit
from studies.dascoli.published import TABLE_1, TABLE_2
from studies.outcomes import Look, difference, if_learned, judge, outcome, part, where
from studies.scales import LEAST
from vitprobe.claims import CLAIMS, Verdict
from vitprobe.figures.page import GREY, PAGE_WIDTH, interval, style
from vitprobe.models import model_cost
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

SHARES = {"smoke": (0.5, 1.0), "quick": (0.2, 1.0), "cpu": (0.1, 1.0), "paper": (0.05, 0.1, 0.3, 0.5, 1.0)}
BATCH, WARM, REPEATS = 128, 2, 10  # of the measurement of speed


def grid(settings: Settings) -> list[Run]:
    """ViT and ConViT for every share of the images at equal images seen, seed by seed, all images first."""
    return [
        shared_out(run, share)
        for base in seeds(settings)
        for share in sorted(SHARES[settings.scale], reverse=True)
        for run in (vit(base, settings), convit(base, settings))
    ]


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Accuracy of one trained network, its size and its speed."""
    result, ds = outcome(run, settings, references=REFERENCES)
    data = result.data
    network: Any = result.model
    cost = model_cost(
        run.model, image_size=data.image_size, channels=data.channels, num_classes=data.num_classes, **run.options
    )
    images, _ = next(iter(data.loader("test", batch_size=BATCH, device=next(network.parameters()).device)))
    attention = next(module for module in network.modules() if hasattr(module, "heads"))
    numbers: dict[str, Any] = {
        "multiply_adds": (cost.multiply_adds, "multiply-adds of one image, convolutions and matrix products"),
        "heads": (attention.heads, "heads per layer"),
        "width": (network.norm.normalized_shape[0], "channels of a token"),
        "speed_batch": (len(images), "images of a batch of the measurement of speed"),
    }
    rates = speed(network, images)
    coordinates: dict[str, Any] = {
        name: ((), value, {"long_name": text, "units": "1"}) for name, (value, text) in numbers.items()
    }
    return ds.assign(speed=("batch", rates, {"long_name": "images a second, forward", "units": "1/s"})).assign_coords(
        batch=np.arange(len(rates)), **coordinates
    )


def speed(network: nn.Module, images: Tensor, *, repeats: int = REPEATS) -> np.ndarray:
    """Images a second of forward passes, one pass after the other `(batch,)`; the first passes do not count.

    Args:
        network: in the mode in which it shall be measured.
        images: one batch, on the network's device.
        repeats: how many passes count.
    """
    rates = []
    with torch.inference_mode():
        for _ in range(WARM + repeats):
            start = time.perf_counter()
            network(images)
            if images.device.type == "cuda":
                torch.cuda.synchronize(images.device)
            rates.append(len(images) / (time.perf_counter() - start))
    return np.array(rates[WARM:])


# --- verdicts ---------------------------------------------------------------------------------------


def gains(ds: xr.Dataset, *, relative: bool) -> tuple[np.ndarray, np.ndarray]:
    """What the ConViT has more than the ViT, by share of the images and seed.

    Args:
        ds: stacked runs.
        relative: as a percentage of the ViT's accuracy, else in percentage points.

    Returns:
        The shares, rising `(share,)`, and the gains `(share, seed)` of the seeds that have all of them.
    """
    plain, gated = kinds(ds)
    images = np.unique(ds.train_images.values)
    complete = [seed for seed in np.unique(ds.seed.values) if where(ds, seed=seed).sizes["run"] == 2 * len(images)]
    ds = ds.isel(run=np.flatnonzero(np.isin(ds.seed.values, complete)))
    found = []
    for count in images:
        of_share = where(ds, train_images=count)
        points = -difference(of_share, "error", gated, plain)
        found.append(100 * points / where(of_share, **plain).accuracy.values if relative else points)
    return images / images.max(), np.array(found)


def slopes(shares: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The slope of values over the decimal logarithm of the shares, by least squares, of each seed `(seed,)`."""
    x = np.log10(shares)
    x = x - x.mean()
    found: np.ndarray = x @ (values - values.mean(axis=0)) / (x @ x)
    return found


def fitted(ds: xr.Dataset) -> str:
    """How far both networks have fitted their training images: in words, their loss in evaluation mode."""
    losses = [float(where(ds, **kind).nll_clean.mean()) for kind in kinds(ds)]
    return "loss of the training images {:.2f} (ViT) and {:.2f} nats (ConViT)".format(*losses)


def said_speed(ds: xr.Dataset) -> str:
    """How fast the ConViT is beside the ViT of the same seed, measured one after the other: median and range."""
    plain, gated = (where(ds, **kind).speed.transpose("run", "batch").median("batch").values for kind in kinds(ds))
    ratios = 100 * gated / plain
    spread = f"{ratios.min():.0f} to {ratios.max():.0f} % by seed"
    return f"a ConViT makes {np.median(ratios):.0f} % ({spread}) as many images a second as a ViT"


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """D1 with all images; D2, and beside it the same in percentage points."""
    plain, gated = kinds(ds)
    whole = where(ds, train_images=ds.train_images.values.max())
    few = ds.isel(run=np.flatnonzero(ds.train_images.values < ds.train_images.values.max()))
    found = [
        judge(
            CLAIMS["D1"],
            -difference(whole, "error", gated, plain),
            "above",
            whole,
            least=LEAST,
            detail=f"{said_speed(whole)}; {fitted(whole)}",
        )
    ]
    in_points = part(
        CLAIMS["D2"],
        "points",
        "the fewer the training data, the more percentage points is the ConViT above the ViT",
        published=f"{_published_slope(relative=False):+.1f} points per decade",
    )
    for claim, relative in ((CLAIMS["D2"], True), (in_points, False)):
        shares, values = gains(ds, relative=relative)
        unit = "%" if relative else "points"
        detail = "; ".join(
            f"gain {mean:+.1f} {unit} with {100 * share:.3g} %, {fitted(where(ds, train_images=images))}"
            for share, mean, images in zip(shares, values.mean(axis=1), np.unique(ds.train_images.values), strict=True)
        )
        verdict = judge(claim, slopes(shares, values), "below", whole, least=LEAST, detail=detail)
        found.append(if_learned(verdict, few, ABOVE_CHANCE))
    return found


def _published_gains(*, relative: bool) -> tuple[np.ndarray, np.ndarray]:
    """Shares and gains of Table 2."""
    plain, gated = np.transpose(list(TABLE_2.values()))
    return np.array(list(TABLE_2)), 100 * (gated / plain - 1) if relative else gated - plain


def _published_slope(*, relative: bool) -> float:
    shares, values = _published_gains(relative=relative)
    return float(slopes(shares, values[:, None])[0])


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Table 1 with our networks, and accuracy and relative gain over the share of the images beside Table 2."""
    plain, gated = kinds(ds)
    shares, relative = gains(ds, relative=True)
    count = len(np.unique(ds.seed.values))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 4.4), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=[1.5, 2.6], squeeze=False).flat
        _table(top.subplots(), [_form(ds, kind, look) for kind, look in ((plain, VIT), (gated, CONVIT))])
        ours, theirs, gain = bottom.subplots(1, 3)
        there, published = _published_gains(relative=True)
        for column, (kind, look) in enumerate(((plain, VIT), (gated, CONVIT))):
            runs = where(ds, **kind)
            by_share = [where(runs, train_images=images).accuracy.values for images in np.unique(runs.train_images)]
            _curve(ours, shares, by_share, look)
            accuracies = [pair[column] for pair in TABLE_2.values()]
            theirs.plot(100 * there, accuracies, color=look.color, marker=look.marker, markersize=4)
        _curve(gain, shares, list(relative), Look("ours", CONVIT.color, CONVIT.marker))
        gain.plot(100 * there, published, color=GREY, marker="o", markersize=3, linestyle="--", label="published")
        gain.axhline(0, color=GREY, linewidth=0.6, zorder=1)
        gain.legend()
        whole = int(ds.train_images.max())
        ours.set_title(f"ours: {ds.attrs['data']}, 100 % are {whole:,} images")
        theirs.set_title("published: ImageNet, DeiT-S, ConViT-S")
        gain.set_title("gain of ConViT over ViT")
        for ax, here in ((ours, shares), (theirs, there), (gain, np.union1d(shares, there))):
            ax.set_xscale("log")
            ax.set_xticks(100 * here, [f"{100 * share:.3g}" for share in here])
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xlabel("share of the images [%]")
            ax.set_ylabel("test accuracy [%]")
        gain.set_ylabel("relative gain [%]")
        handles, labels = ours.get_legend_handles_labels()
        bottom.legend(handles, labels, loc="outside upper center", ncols=2)
        bars = f"Bars: 95 % t interval over {count} seeds. " if count > 2 else ""
        bottom.supxlabel(
            f"All shares see as many images in all. {bars}Small marks: single seeds. Published: one run each.\nSpeed: "
            f"median and range of forward passes, batch {int(ds.speed_batch.values.flat[0])}, over passes and runs; "
            "published: one GP100, batch 128, without a range.",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _form(ds: xr.Dataset, kind: Mapping[str, str], look: Look) -> list[str]:
    """A row of Table 1 for one of our networks."""
    runs = where(ds, **kind)
    first = runs.isel(run=0)
    rates = runs.speed.values[np.isfinite(runs.speed.values)]
    accuracy = where(runs, train_images=runs.train_images.values.max()).accuracy.values
    mean, half_width = (float(numbers[0]) for numbers in interval(accuracy[:, None]))
    spread = f" ± {half_width:.1f}" if np.isfinite(half_width) else ""
    return [
        f"ours: {look.label}",
        f"{int(first.heads)}",
        f"{int(first.width)}",
        f"{float(first.parameters) / 1e6:.3g} M",
        _amount(float(first.multiply_adds)),
        f"{np.median(rates):,.0f} ({rates.min():,.0f} to {rates.max():,.0f})",
        f"{mean:.1f}{spread}",
    ]


def _amount(number: float) -> str:
    """A number in millions or billions: `"19.3 M"`, `"10 G"`."""
    return f"{number / 1e9:.3g} G" if number >= 1e9 else f"{number / 1e6:.3g} M"


def _table(ax: Axes, ours: Sequence[Sequence[str]]) -> None:
    """Our networks above the published ones of S and S+."""
    theirs = [
        [
            f"published: {name}", f"{form.heads}", f"{form.width}", f"{form.parameters:g} M",
            f"{form.multiply_adds:g} G", f"{form.speed:,}", f"{form.accuracy}",
        ]
        for name, form in TABLE_1.items()
        if name.endswith(("-S", "-S+"))
    ]  # fmt: skip
    head = ["", "heads", "width", "parameters", "multiply-adds", "images / s", "accuracy [%]"]
    table = ax.table(
        [*ours, *theirs],
        colLabels=head,
        colWidths=[0.24, 0.07, 0.07, 0.11, 0.13, 0.24, 0.14],
        cellLoc="center",
        edges="horizontal",
        bbox=Bbox.unit(),
    )
    table.auto_set_font_size(False)
    table.set_fontsize(7)
    for (row, column), cell in table.get_celld().items():
        cell.set_linewidth(0.4)
        cell.set_edgecolor("0.7")
        if column == 0:
            cell.set_text_props(ha="left")
        if row > len(ours):
            cell.set_text_props(color=GREY)
    ax.set_axis_off()


def _curve(ax: Axes, shares: np.ndarray, values: Sequence[np.ndarray], look: Look) -> None:
    """Mean, interval and single seeds over the shares; limits by what is drawn, not by bars."""
    middle = np.array([of_share.mean() for of_share in values])
    bars = [interval(of_share[:, None])[1][0] if len(of_share) > 2 else 0.0 for of_share in values]
    ax.errorbar(
        100 * shares, middle, bars, color=look.color, marker=look.marker, markersize=4, elinewidth=0.7, label=look.label
    )
    for share, of_share in zip(shares, values, strict=True):
        if len(of_share) > 1:
            ax.scatter(
                np.full(len(of_share), 100 * share), of_share, s=7, color=look.color, marker=look.marker, alpha=0.45,
                linewidths=0, zorder=3,
            )  # fmt: skip


STUDY = Study(
    name="dascoli/sample_efficiency",
    title="Size, speed and accuracy of ConViT and ViT, by the share of the training images",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
