"""A box blur acts as self-attention does (Park & Kim 2022, appendix B, and their paper on spatial smoothing).

Claim      E24: 2 x 2 box blurs before the subsampling of a ResNet are low-pass, lower the variance of feature maps, and
           flatten the loss. The paper gives the same signs as for self-attention; its values are not known.
Command    vitprobe run park_kim/blur                        digits; shares its plain ResNets with park_kim/fourier
           vitprobe run park_kim/blur --scale cpu --data cifar10
           vitprobe run park_kim/blur --scale paper --device cuda
Cost       quick: 135 s on two cores with six trainings of resnet_nano (measured). cpu: 3 of resnet_micro beyond those
           of families.grid, 686 s (measured); paper: 3 of preact_resnet50, not measured. Beside the training, the
           spectra of one epoch and one pass over the test images.
Protocol   The ResNet of families.grid, and the same with a blur that ends every stage: before each subsampling and, as
           in the authors' code, before the pooling. The blur has no weights, so that both start from the same ones and
           see the same images. It is the plain blur, and it keeps the grid (`smoothing="box"`). The published one
           bounds and rectifies the activation first and lets the grid grow (`smoothing="tanh"`): it is not measured
           here, because what it does would not be the blur's alone, and maps of two sizes differ in frequencies.
           Activations are those after every block and every blur, of all test images; APE is the mean of the positive
           eigenvalues of the loss's Hessian at the end of the warm-up, on batches that are the same for both networks
           of a seed, as in park_kim/spectra.
Rule       Set before anything was measured. Seeds are the units. E24 has three parts, each claimed to lie below zero:
           (a) the change of the relative log amplitude at the highest frequency by the blurs, mean over the blurs of a
           network; (b) the same of log2 of the variance over positions; (c) log2 of APE, with blurs less without, in
           the same seed. Supported if the 95 % t interval over seeds of each lies wholly below zero, contradicted if
           that of one lies wholly above. A network that did not learn its task (45 % of ten classes) is no evidence.
           (a) and (b) hold by construction for a blur of anything generic: at frequencies (f, g) it lets through
           cos(f/2) cos(g/2), which is nothing at the highest (so that the edges and the rounding make the size of (a),
           and its sign alone says something), and it leaves white noise a quarter of its variance, -2 doublings. So it
           is (c) that decides. At stake is also what becomes of the whole network, which learns with the blurs and may
           undo them: high frequencies, variance, and variance over mean square, with blurs less without, at the last
           map, and at the last block, before the last blur. These and the test error are judged beside it, below zero
           too, and decide nothing. The variance, unlike that over mean square, follows the scale of the stream.
Expected   (a) and (b) below zero. (c) as published: flatter.
           The accuracy by the recipe of families.SCALES["cpu"], mean of seeds 0 to 2: 63.7 % ResNet, 66.0 % with
           blurs.
"""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from studies.outcomes import difference, judge, outcome, part, where
from studies.park_kim.eigenvalues import STATISTICS, contrast, eigenvalues, measured_epochs
from studies.park_kim.families import CLAIMS, REFERENCES, family
from studies.park_kim.families import grid as families_grid
from vitprobe.claims import Verdict, combine
from vitprobe.figures.page import BLUE, GREY, PAGE_WIDTH, VERMILION, interval, limit, line_with_band, style
from vitprobe.models.resnet import Smoothing
from vitprobe.probes import FeatureVariance, Fourier, probe
from vitprobe.runs import Run, Trained
from vitprobe.study import Settings, Study, main

PLAIN, BLURRED = "none", "box"
WITH_AND_WITHOUT = {"smoothing": BLURRED}, {"smoothing": PLAIN}
LOOKS = {PLAIN: ("ResNet", BLUE), BLURRED: ("with box blurs", VERMILION)}
# Each on the scale where a change means the same everywhere: an amplitude's logarithm, and doublings of a variance.
QUANTITIES = {
    "high_frequency_amplitude": ("relative log amplitude at the highest frequency", "high frequency"),
    "variance": ("log2 of the variance over positions", "variance"),
    "normalised_variance": ("log2 of the variance over mean square", "normalised variance"),
}
WHITE = -2.0  # what a 2 x 2 box blur does to the variance of white noise, in doublings
ENDS = {"last map": ("block", "blur"), "last block": ("block",)}


def grid(settings: Settings) -> list[Run]:
    """The ResNet of families.grid without blurs and with them, seed by seed."""
    plain = [run for run in families_grid(settings) if family(run.model) == "resnet"]
    return [each for run in plain for each in (run, replace(run, options={"smoothing": BLURRED}))]


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Error and eigenvalues of one network, and what its activations are after every block and blur `(layer,)`."""
    result, ds = outcome(run, settings, references=REFERENCES)
    batches = result.data.loader("test", batch_size=100)
    tree = probe(result.model, batches, [Fourier(), FeatureVariance()], layers="stages.*.*", progress=False)
    found = [tree[name].to_dataset().drop_dims("frequency", errors="ignore") for name in tree]
    ds = xr.merge([ds, *found, spectrum(result, settings)], combine_attrs="override", compat="equals", join="exact")
    network: Any = result.model
    role = ["blur" if isinstance(layer, Smoothing) else "block" for stage in network.stages for layer in stage]
    blocks = np.cumsum([one == "block" for one in role])
    return ds.assign_coords(
        smoothing=((), run.options.get("smoothing", PLAIN), {"long_name": "what ends every stage"}),
        role=("layer", role, {"long_name": "block or blur"}),
        position=(
            "layer",
            np.where(np.array(role) == "block", blocks, blocks + 0.5),
            {"long_name": "number of the block; a blur lies half a block behind it", "units": "1"},
        ),
    )


def spectrum(result: Trained, settings: Settings) -> xr.Dataset:
    """NEP and APE at the end of the warm-up.

    Args:
        result: a trained run, which kept its network of that epoch.
        settings: of the study.

    Returns:
        Both with the ends of their intervals over batches, and `converged`, the share of eigenvalues that are.
    """
    ds = eigenvalues(result, measured_epochs(result.run)[0], settings)
    numbers = {name + end: ds[name + end] for name in STATISTICS for end in ("", "_low", "_high")}
    converged = ((), float(ds.converged.mean()), {"long_name": "share of converged eigenvalues", "units": "1"})
    return xr.Dataset(numbers | {"converged": converged})


# --- verdicts ---------------------------------------------------------------------------------------


def scaled(ds: xr.Dataset, variable: str) -> xr.DataArray:
    """A quantity on its scale `(run, layer)`: the amplitude is a logarithm already, the variances become log2.

    Args:
        ds: stacked runs.
        variable: one of `QUANTITIES`.
    """
    return ds[variable] if variable == "high_frequency_amplitude" else np.log2(ds[variable])


def changes(ds: xr.Dataset, variable: str) -> np.ndarray:
    """What each blur changes `(seed, blur)`: after it less before it.

    Args:
        ds: stacked runs.
        variable: one of `QUANTITIES`.
    """
    runs = where(ds, smoothing=BLURRED)
    values = scaled(runs, variable)
    steps = (values - values.shift(layer=1)).transpose("run", "layer").values
    blurs = (runs.role == "blur").transpose("run", "layer").values
    return np.stack([row[chosen] for row, chosen in zip(steps, blurs, strict=True)])


def ending(ds: xr.Dataset, variable: str, end: str) -> np.ndarray:
    """A quantity at the end of the network, with blurs less without, `(seed,)`.

    Args:
        ds: stacked runs.
        variable: one of `QUANTITIES`.
        end: `"last map"`, what is pooled; or `"last block"`, before the last blur.
    """
    values = scaled(ds, variable).transpose("run", "layer").values
    among = ds.role.isin(ENDS[end]).transpose("run", "layer").values
    last = [row[chosen][-1] for row, chosen in zip(values, among, strict=True)]
    return difference(ds.assign(end=("run", last)), "end", *WITH_AND_WITHOUT)


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E24, its three parts, and what becomes of the whole network."""
    whole = CLAIMS["E24"]
    deciding = []
    for variable in ("high_frequency_amplitude", "variance"):
        said, name = QUANTITIES[variable]
        of_blurs = changes(ds, variable)
        deciding.append(
            judge(
                part(whole, name, f"box blurs lower the {said}"),
                np.nanmean(of_blurs, 1),
                "below",
                where(ds, smoothing=BLURRED),
                detail=f"by construction; falls in {np.mean(of_blurs < 0):.0%} of {of_blurs.size} blurs",
            )
        )
    plain, blurred = (where(ds, smoothing=kind).ape.values.mean() for kind in (PLAIN, BLURRED))
    deciding.append(
        judge(
            part(whole, "APE", "box blurs lower the mean of the positive eigenvalues at the end of the warm-up"),
            contrast(ds, "ape", *WITH_AND_WITHOUT),
            "below",
            ds,
            detail=f"log2 of the ratio; APE {blurred:.3g} with blurs, {plain:.3g} without",
        )
    )
    beside = [
        judge(
            part(whole, f"{name}, {end}", f"a ResNet with box blurs has a lower {said} at its {end}"),
            ending(ds, variable, end),
            "below",
            ds,
            detail="partly by construction" if end == "last map" else "",
        )
        for end in ENDS
        for variable, (said, name) in QUANTITIES.items()
    ]
    error = difference(ds, "error", *WITH_AND_WITHOUT)
    beside.append(
        judge(part(whole, "error", "a ResNet with box blurs has a lower test error"), error, "below", ds, detail="%")
    )
    return [combine(whole, deciding), *deciding, *beside]


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Above: high frequencies and variance along the network, and APE. Below: what each blur does, and the error."""
    error = difference(ds, "error", *WITH_AND_WITHOUT)
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 4.6), layout="constrained")
        axes = figure.subplots(2, 3)
        _along_network(axes[0, 0], ds, "high_frequency_amplitude")
        axes[0, 0].set_ylabel("relative log amplitude\nat the highest frequency [nats]")
        _along_network(axes[0, 1], ds, "variance")
        axes[0, 1].set_ylabel("log2 of the variance\nover positions [doublings]")
        _by_blurs(axes[1, 0], ds, "high_frequency_amplitude")
        axes[1, 0].set_ylabel("change of that amplitude\nby the blur [nats]")
        _by_blurs(axes[1, 1], ds, "variance", expected=WHITE)
        axes[1, 1].set_ylabel("change of log2 variance\nby the blur [doublings]")
        _pairs(axes[0, 2], ds, "ape", contrast(ds, "ape", *WITH_AND_WITHOUT), "doublings")
        axes[0, 2].set_ylabel("APE at the end\nof warm-up [nats]")
        _pairs(axes[1, 2], ds, "error", error, "points")
        axes[1, 2].set_ylabel("test error [%]")
        handles = [
            Line2D([], [], color=color, marker="o", markersize=3, label=label) for label, color in LOOKS.values()
        ]
        handles.append(
            Line2D([], [], color=VERMILION, marker="s", markerfacecolor="white", linestyle="", label="after a blur")
        )
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
        seeds = len(np.unique(ds.seed.values))
        bars = (
            f"Bands, bars and brackets: 95 % t interval over {seeds} seeds (cut at the frame). Thin lines and small "
            "marks: single seeds."
            if seeds > 1
            else "Bands: standard error over images."
        )
        figure.supxlabel(f"{ds.attrs['data']}, {ds.attrs['test_images']} test images. {bars}", fontsize=6.5, color=GREY)
    return figure


def _along_network(ax: Axes, ds: xr.Dataset, variable: str) -> None:
    """A quantity after every block, and after every blur, with blurs and without."""
    lines = []
    for kind, (_, color) in LOOKS.items():
        runs = where(ds, smoothing=kind)
        runs = runs.isel(layer=np.flatnonzero(runs.role.isel(run=0) != ""))
        values = scaled(runs, variable).transpose("run", "layer").values
        error = runs[f"{variable}_se"]
        if variable != "high_frequency_amplitude":
            error = error / runs[variable] / np.log(2)
        position = runs.position.isel(run=0).values
        line_with_band(ax, position, values, error.transpose("run", "layer").values, color)
        blurs = runs.role.isel(run=0).values == "blur"
        ax.plot(
            position[blurs], values.mean(0)[blurs], "s", color=color, markerfacecolor="white", markersize=3.5, zorder=5
        )
        lines.append(values)
    limit([ax], lines)
    ax.set_xlabel("block")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _by_blurs(ax: Axes, ds: xr.Dataset, variable: str, *, expected: float | None = None) -> None:
    """What each blur does, in the mean over seeds and in each, and what it does to white noise."""
    values = changes(ds, variable)
    mean, half_width = interval(values)
    x = np.arange(1, values.shape[1] + 1)
    if len(values) > 1:
        ax.plot(x + 0.12, values.T, ".", color=VERMILION, markersize=3, alpha=0.6)
    ax.errorbar(
        x, mean, half_width, color=VERMILION, marker="s", markerfacecolor="white", markersize=4.5, linestyle="none",
        elinewidth=0.8,
    )  # fmt: skip
    ax.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    shown = [values, np.zeros(1)]
    if expected is not None:
        ax.axhline(expected, color=GREY, linewidth=0.8, linestyle="--", zorder=1)
        ax.annotate(
            "white noise", (0.98, expected), xycoords=("axes fraction", "data"), xytext=(0, -2),
            textcoords="offset points", ha="right", va="top", fontsize=6.5, color=GREY,
        )  # fmt: skip
        shown.append(np.array([expected]))
    limit([ax], shown)
    ax.set(xlabel="stage that the blur ends", xlim=(0.5, len(x) + 0.5))
    ax.set_xticks(x)


def _pairs(ax: Axes, ds: xr.Dataset, variable: str, change: np.ndarray, units: str) -> None:
    """A number of each network, without blurs and with them, seeds joined; the difference is in the title."""
    kinds = [where(ds, smoothing=kind) for kind in LOOKS]
    seeds = np.intersect1d(*(runs.seed.values for runs in kinds))
    values = np.stack([runs[variable].values[np.isin(runs.seed.values, seeds)] for runs in kinds])
    ax.plot([0, 1], values, color=GREY, linewidth=0.5, alpha=0.6, marker=".", markersize=3)
    for x, (of_kind, (_, color)) in enumerate(zip(values, LOOKS.values(), strict=True)):
        ax.plot(x, of_kind.mean(), "o", color=color, markersize=5, zorder=4)
    limit([ax], [values])
    ax.set_xticks([0, 1], labels=["without", "with blurs"])
    ax.set_xlim(-0.4, 1.4)
    mean, half_width = interval(change[:, None])
    said = f"{mean[0]:+.2g}"
    if np.isfinite(half_width[0]):
        said += f" [{mean[0] - half_width[0]:.2g}, {mean[0] + half_width[0]:.2g}]"
    ax.set_title(f"with blurs less without:\n{said} {units}")


STUDY = Study(
    name="park_kim/blur",
    title="What box blurs do to a ResNet's activations, loss and error",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
