"""How well, and how fast, queries and keys are fitted to impulses (Zheng et al. 2024, Fig. 5 and the method's section).

Claim      Z9: queries and keys can be fitted to impulse maps quickly, before any training on images. Published: squared
           error of 0.0018 to 0.0019 after 10,000 steps, on 16 x 16 tokens with kernels of 5.
Command    vitprobe run zheng/fit                            8 x 8 tokens, kernel of 3
           vitprobe run zheng/fit --scale cpu                16 x 16 tokens, kernel of 5, as published
           vitprobe run zheng/fit --scale paper              the same with 10,000 steps of every setting
Cost       Processor time of one step of one layer: 14 ms (8 x 8), 28 ms (16 x 16), measured. quick: 57 s on two cores
           (measured); cpu: about 19 minutes of two cores (measured, less a pause); paper: 90 minutes of one core
           (estimated). Nothing is trained, and no image is seen.
Shown      Attention on the wanted token over the steps of the fit, for the published settings and what changes them
           one by one: the learning rate, the normalisation of the weights every 100 steps, and the scale c of the
           softmax. The squared error over that attention: uniform maps have little of both. Fig. 5: the largest
           attention of random and of fitted maps over c. What a share alpha of random normed tokens, in place of the
           position code, leaves of the impulses. Eight heads of 64 channels, as published (fewer at smoke scale).
Exact      Uniform maps of N = n x n tokens have the error [s (1 - 1/N) + (1 - s) / N] / N for a head whose target is in
           the grid for a share s of the queries: 0.0130 on average over a 3 x 3 kernel on 8 x 8 tokens (0.0118 corner,
           0.0135 edge, 0.0154 centre), 0.0033 over 5 x 5 on 16 x 16 (0.0030 to 0.0039). The sine-cosine code is a
           function of the row plus one of the column, so that its rank is 2n - 1 at most: 15 and 31, which it has in
           float64 from 192 channels on; float32 sees 13 and 21 of them at 512.
Rule       Set beforehand, knowing one seed of three of the fits on 8 x 8 tokens. Seeds (taps and starting weights) are
           the units. Z9 is supported if, at learning rate 0.01 without normalisation and 300 steps, the 95 % t interval
           over seeds of the mean attention on the wanted token lies wholly above 0.9, that of the share of queries
           whose largest attention is on it above 0.99, and that of the processor time of a layer below 60 s;
           contradicted if one lies wholly on the other side. Judged beside it, and deciding nothing: the same attention
           and share at the published settings and most steps of the scale, and whether half tokens (Model I) leave less
           than 0.1 of attention on the wanted token, which is why a small alpha may suit impulses (Z7).
Expected   Z9 supported, and published settings with less than 0.5: their maps are blurred impulses, whose largest
           attention is where it should be.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullLocator

from studies.initial_maps.drawn import PATCH, Initialised
from studies.outcomes import Look, part
from studies.zheng.initialisations import LOOKS
from vitprobe.claims import CLAIMS, Verdict, combine, decide
from vitprobe.figures.page import BLUE, GREY, PAGE_WIDTH, VERMILION, interval, style
from vitprobe.initializers import impulse_
from vitprobe.initializers.impulse_fit import Impulses
from vitprobe.initializers.report import generator
from vitprobe.models import create_model
from vitprobe.models.attention import Attention, Mixture
from vitprobe.results import provenance
from vitprobe.study import Settings, Study, main

SIZES = {"smoke": (4, 3), "quick": (8, 3), "cpu": (16, 5), "paper": (16, 5)}  # tokens a side, kernel
NETWORKS = {"smoke": {"dim": 48, "heads": 4, "depth": 1}}
STEPS: Mapping[str, Sequence[int]] = {
    "smoke": (30,),
    "quick": (30, 100, 300),
    "cpu": (100, 300, 1000),
    "paper": (100, 300, 1000, 3000, 10_000),
}
LONGEST = {"cpu": 10_000}  # steps of the published settings alone
SEEDS, DECIDING_SEEDS = 3, 6  # six, because shares of queries that are all 1 are judged by their sign
QUICK_STEPS = 300
PUBLISHED, QUICK, SHARP = "published", "lr 0.01, no norm", "cross entropy"
FITS: Mapping[str, Mapping[str, Any]] = {
    PUBLISHED: {},
    "no norm": {"weight_norm": None},
    "c = 1": {"scale": 1.0},
    "lr 0.01": {"lr": 1e-2},
    QUICK: {"lr": 1e-2, "weight_norm": None},
}
FIT_LOOKS = {
    PUBLISHED: Look("published (lr 0.0001, c = 0.1, norm every 100)", "black", "o"),
    "no norm": Look("without normalisation", "#56B4E9", "v"),
    "c = 1": Look("c = 1", "#E69F00", "P"),
    "lr 0.01": Look("lr 0.01", "#009E73", "D"),
    QUICK: Look("lr 0.01, without normalisation", VERMILION, "^"),
    SHARP: Look("cross entropy, until 0.95", BLUE, "*"),
}
SCALES = 10.0 ** np.arange(-2, 4.5, 0.5)  # of the softmax, in units of the layer's own; 1 is among them
ALPHAS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
IMAGES = 2  # draws of tokens
PUBLISHED_ERROR = 0.0019  # after 10,000 steps, 16 x 16 tokens: outputs stored in the authors' notebook


def grid(settings: Settings) -> list[Initialised]:
    """Every setting with every number of steps, seed by seed."""
    side, kernel = SIZES[settings.scale]
    seeds, deciding = settings.seeds or SEEDS, settings.seeds or DECIDING_SEEDS

    def row(name: str, seed: int, arguments: Mapping[str, Any]) -> Initialised:
        network = NETWORKS.get(settings.scale, {"dim": 512, "heads": 8, "depth": 1})
        fit = {"kernel_size": kernel, "seed": seed, **arguments}
        return Initialised(name, "model_2", side, network, "impulse_", fit)

    rows = []
    for seed in range(max(seeds, deciding)):
        for name, changed in FITS.items():
            steps = {*STEPS[settings.scale]} | ({LONGEST.get(settings.scale, 0)} if name == PUBLISHED else set())
            steps = steps if seed < seeds else set()
            steps |= {QUICK_STEPS} if name == QUICK and seed < deciding else set()
            rows += [row(name, seed, {"settings": "paper", "steps": count, **changed}) for count in sorted(steps - {0})]
        rows += [row(SHARP, seed, {"settings": "sharp"})] if seed < seeds else []
    return rows


def uniform_errors(side: int, kernel: int) -> np.ndarray:
    """The mean squared error of uniform maps to the convolution matrix of each tap of a kernel (tap,).

    Args:
        side: of the grid [tokens].
        kernel: its side [tokens].
    """
    tokens, reach = side**2, kernel // 2
    inside = side - np.abs(np.arange(-reach, reach + 1))
    share = np.outer(inside, inside).ravel() / tokens
    return (share * (1 - 1 / tokens) + (1 - share) / tokens) / tokens


def code_rank(side: int, dim: int, dtype: type[np.floating[Any]] = np.float64) -> int:
    """The numerical rank of the sine-cosine code, at numpy's tolerance for the precision it is computed in.

    Args:
        side: of the grid [tokens].
        dim: channels.
        dtype: of code and decomposition.
    """
    frequency = 10000.0 ** (-np.arange(dim // 4) / (dim // 4 - 1))
    angles = np.arange(side)[:, None] * frequency
    axis = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    code = np.concatenate([np.tile(axis, (side, 1)), np.repeat(axis, side, axis=0)], axis=1)
    return int(np.linalg.matrix_rank(code.astype(dtype)))


@torch.no_grad()
def peaks(attention: Attention) -> np.ndarray:
    """The largest attention of a query, mean over queries and heads, for every scale of the softmax (scale,)."""
    tokens, own = torch.zeros(1, 1, 1), attention.scale
    found = []
    for scale in SCALES:
        attention.scale = float(scale) * own
        found.append(float(attention.weights(tokens).max(-1).values.mean()))
    attention.scale = own
    return np.array(found)


@torch.no_grad()
def diluted_mass(attention: Attention, target: Impulses, *, seed: int) -> np.ndarray:
    """Attention on the target where random normed tokens have a share in the maps, mean over heads (scale, alpha).

    Args:
        attention: of data-free maps, in float64.
        target: what its heads are to look at.
        seed: of the tokens.
    """
    source, own = attention.source, attention.scale
    assert isinstance(source, Mixture)
    code = source.code()
    drawn = torch.randn(IMAGES, *code.shape, generator=generator(seed, "fit tokens"), dtype=torch.float64)
    tokens = F.layer_norm(drawn, code.shape[-1:])
    found = np.empty((len(SCALES), len(ALPHAS)))
    for row, column in np.ndindex(found.shape):
        attention.scale, source.alpha = float(SCALES[row]) * own, ALPHAS[column]
        found[row, column] = float(torch.stack([target.mass(maps) for maps in attention.weights(tokens)]).mean())
    attention.scale, source.alpha = own, 0.0
    return found


def measure(row: Initialised, settings: Settings) -> xr.Dataset:
    """Fit one layer, and tell what it attends to."""
    seed, (side, kernel) = row.arguments["seed"], SIZES[settings.scale]
    model = create_model(row.network, image_size=PATCH * side, patch_size=PATCH, seed=seed, **row.options)
    attention: Any = model.get_submodule("blocks.0.attention")
    before = peaks(attention)
    began = time.process_time()
    fitted = impulse_(model, **row.arguments).isel(layer=0)
    processor = time.process_time() - began
    offsets = torch.tensor(np.stack([fitted.offset_y.values, fitted.offset_x.values], axis=1)).long()
    after = peaks(attention)
    diluted = diluted_mass(attention.double(), Impulses.of((side, side), offsets), seed=seed)
    numbers = {
        "mass": (fitted.mass.mean(), "attention on the wanted token, mean over heads", "1"),
        "worst_mass": (fitted.mass.min(), "the same of the worst head", "1"),
        "argmax_accuracy": (fitted.argmax_accuracy.mean(), "queries that attend to the wanted token most", "1"),
        "squared_error": (fitted.mean_squared_error.mean(), "squared error to the convolution matrix", "1"),
        "uniform_error": (fitted.uniform_mean_squared_error.mean(), "squared error of uniform maps to it", "1"),
        "steps": (fitted.steps, "steps of the fit", "1"),
        "seconds": (fitted.seconds, "time that the fit of one layer took", "s"),
        "processor_seconds": (processor, "processor time of it, over all threads", "s"),
    }
    curves = {
        "peak": (("bin",), after, "largest attention of a query after the fit"),
        "random_peak": (("bin",), before, "largest attention of a query before the fit"),
        "diluted_mass": (("bin", "sample"), diluted, "attention on the wanted token, with a share of random tokens"),
    }
    ds = xr.Dataset(
        {
            name: ((), float(value), {"long_name": text, "units": units})
            for name, (value, text, units) in numbers.items()
        }
        | {name: (dims, values, {"long_name": text, "units": "1"}) for name, (dims, values, text) in curves.items()},
        coords={
            "bin": ("bin", SCALES, {"long_name": "scale of the softmax over the layer's own", "units": "1"}),
            "sample": ("sample", np.array(ALPHAS), {"long_name": "share of the tokens", "units": "1"}),
            "fit": ((), row.label, {"long_name": "settings of the fit"}),
            "seed": ((), seed, {"long_name": "seed of taps and starting weights", "units": "1"}),
        },
    )
    uniform = uniform_errors(side, kernel)
    return ds.assign_attrs(
        provenance(
            title="Fit of queries and keys to impulses",
            references="Zheng et al. 2024, arXiv:2401.12511",
            config=row.config(),
            device="cpu",
        )
        | {
            "side": side,
            "kernel": kernel,
            "uniform_error_mean": float(uniform.mean()),
            "uniform_error_least": float(uniform.min()),
            "uniform_error_most": float(uniform.max()),
            "code_rank": code_rank(side, int(row.options["dim"])),
            "code_rank_float32": code_rank(side, int(row.options["dim"]), np.float32),
        }
    )


def last(ds: xr.Dataset, name: str) -> xr.Dataset:
    """The fits of one setting with the most steps, by seed; all of those that end by themselves, each at its own."""
    runs = ds.isel(run=np.flatnonzero(ds.fit.values == name))
    if name != SHARP:
        runs = runs.isel(run=np.flatnonzero(runs.steps.values == runs.steps.values.max()))
    return runs.sortby("seed")


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """Z9 by the quick settings; beside it the published ones, and what half tokens leave of the impulses."""
    quick = ds.isel(run=np.flatnonzero((ds.fit.values == QUICK) & (ds.steps.values == QUICK_STEPS)))
    published, sharp = last(ds, PUBLISHED), last(ds, SHARP)
    steps = int(published.steps.values.max())
    deciding = [
        decide(
            part(CLAIMS["Z9"], "mass", f"{QUICK_STEPS} steps put most of the attention on the wanted token"),
            quick.mass.values,
            threshold=0.9,
        ),
        decide(
            part(CLAIMS["Z9"], "argmax", f"after {QUICK_STEPS} steps queries attend to the wanted token most"),
            quick.argmax_accuracy.values,
            threshold=0.99,
        ),
        decide(
            part(CLAIMS["Z9"], "time", f"{QUICK_STEPS} steps of one layer take less than a minute of a processor [s]"),
            quick.processor_seconds.values,
            threshold=60.0,
            direction="below",
        ),
    ]
    beside = [
        decide(
            part(
                CLAIMS["Z9"], "published mass", f"{steps} steps as published put most of the attention there",
                published="about 0.28, by our computation",
            ),
            published.mass.values, threshold=0.9,
            detail=f"squared error {published.squared_error.values.mean():.4f}, "
            f"that of uniform maps {published.uniform_error.values.mean():.4f}",
        ),
        decide(
            part(CLAIMS["Z9"], "published argmax", f"after {steps} steps as published queries attend there most"),
            published.argmax_accuracy.values, threshold=0.99,
        ),
        decide(
            part(CLAIMS["Z7"], "diluted", "half tokens in the maps wash sharp impulses out"),
            sharp.diluted_mass.sel(bin=1.0, sample=0.5).values, threshold=0.1, direction="below",
            detail=f"{float(sharp.diluted_mass.sel(bin=1.0, sample=0.0).mean()):.2f} without tokens, "
            f"{float(sharp.diluted_mass.sel(bin=1.0, sample=0.1).mean()):.2f} with a share of 0.1",
        ),
    ]  # fmt: skip
    return [combine(CLAIMS["Z9"], deciding), *deciding, *beside]


def draw(ds: xr.Dataset) -> Figure:
    """Attention over steps, error over attention, largest attention over the softmax's scale, and dilution."""
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 5.0), layout="constrained")
        ((over_steps, error), (sharpness, dilution)) = figure.subplots(2, 2)
        uniform = 1 / ds.attrs["side"] ** 2
        for name, look in FIT_LOOKS.items():
            _over_steps(over_steps, _by_steps(ds, name), look)
            _error(error, ds.isel(run=np.flatnonzero(ds.fit.values == name)), look)
        for ax in (over_steps, dilution):
            ax.axhline(uniform, color=GREY, linewidth=0.7, linestyle=":")
            ax.set_ylabel("attention on the wanted token")
            ax.set_ylim(-0.03, 1.03)
        over_steps.set_xscale("log")
        asked = np.unique(ds.steps.values[ds.fit.values != SHARP])
        over_steps.set_xticks(asked, labels=[f"{steps:g}" for steps in asked])
        over_steps.xaxis.set_minor_locator(NullLocator())
        over_steps.set_xlabel("steps of the fit")
        _error_lines(error, ds)
        _line(sharpness, SCALES, ds.random_peak.isel(run=_first_of_seeds(ds)).values, LOOKS["random"])
        for name in (PUBLISHED, QUICK, SHARP):
            runs = last(ds, name)
            _line(sharpness, SCALES, runs.peak.values, FIT_LOOKS[name])
            _line(dilution, np.array(ALPHAS), runs.diluted_mass.sel(bin=1.0).values, FIT_LOOKS[name])
        sharpness.axhline(uniform, color=GREY, linewidth=0.7, linestyle=":")
        sharpness.set_xscale("log")
        sharpness.set_xlabel("scale c of the softmax, over the layer's own")
        sharpness.set_xlim(SCALES[0], SCALES[-1])
        sharpness.set_ylabel("largest attention of a query")
        sharpness.annotate(
            "random", _middle(ds), xytext=(5, -7), textcoords="offset points", color=LOOKS["random"].color, fontsize=7,
            path_effects=[withStroke(linewidth=2, foreground="white")], zorder=5,
        )  # fmt: skip
        dilution.set_xlabel("share α of random tokens in the maps")
        for ax, title in (
            (over_steps, "the fit"),
            (error, "its squared error"),
            (sharpness, "scale of the softmax (Fig. 5), after most steps"),
            (dilution, "tokens in the maps, after most steps"),
        ):
            ax.set_title(title)
        figure.legend(*over_steps.get_legend_handles_labels(), loc="outside upper center", ncols=3)
        counts = [group.sizes["run"] for name in FIT_LOOKS for group in _by_steps(ds, name)]
        seeds = str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        bars = f"Bars and bands: 95 % t interval over {seeds} seeds. " if max(counts) > 2 else ""
        figure.supxlabel(
            f"{ds.attrs['side']} × {ds.attrs['side']} tokens, kernel of {ds.attrs['kernel']}; the position code spans "
            f"{ds.attrs['code_rank']} of {ds.attrs['side'] ** 2} directions. {bars}Dotted: uniform maps.",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _first_of_seeds(ds: xr.Dataset) -> np.ndarray:
    """One run of every seed: before the fit, all of a seed are the same."""
    return np.unique(ds.seed.values, return_index=True)[1]


def _middle(ds: xr.Dataset) -> tuple[float, float]:
    """Where the curve of random maps is half way up."""
    curve = ds.random_peak.isel(run=_first_of_seeds(ds)).values.mean(0)
    place = int(np.argmin(np.abs(curve - 0.5)))
    return float(SCALES[place]), float(curve[place])


def _by_steps(ds: xr.Dataset, name: str) -> list[xr.Dataset]:
    """The fits of one setting by their number of steps; those that stop by themselves are together."""
    runs = ds.isel(run=np.flatnonzero(ds.fit.values == name))
    if name == SHARP:
        return [runs]
    return [runs.isel(run=np.flatnonzero(runs.steps.values == steps)) for steps in np.unique(runs.steps.values)]


def _over_steps(ax: Axes, groups: Sequence[xr.Dataset], look: Look) -> None:
    """Mean attention over the steps taken, a point for each group."""
    own = look is FIT_LOOKS[SHARP]
    middle = [float(group.mass.mean()) for group in groups]
    bars = [float(interval(g.mass.values[:, None])[1][0]) if g.sizes["run"] > 2 else 0.0 for g in groups]
    ax.errorbar(
        [float(group.steps.mean()) for group in groups], middle, bars, color=look.color, marker=look.marker,
        markersize=7 if own else 4, elinewidth=0.7, linestyle="none" if own else "-", label=look.label,
    )  # fmt: skip


def _error(ax: Axes, runs: xr.Dataset, look: Look) -> None:
    ax.scatter(runs.mass, runs.squared_error, s=14, color=look.color, marker=look.marker, linewidths=0, alpha=0.7)


def _error_lines(ax: Axes, ds: xr.Dataset) -> None:
    """What uniform maps have, by closed form, and the published error where the grid is the published one."""
    ax.axhspan(ds.attrs["uniform_error_least"], ds.attrs["uniform_error_most"], color=GREY, alpha=0.15, linewidth=0)
    ax.axhline(ds.attrs["uniform_error_mean"], color=GREY, linewidth=0.7, linestyle=":")
    if ds.attrs["side"] == 16:
        ax.axhline(PUBLISHED_ERROR, color=GREY, linewidth=0.7, linestyle="--")
        ax.annotate(
            "published", (1, PUBLISHED_ERROR), xytext=(0, 2), textcoords="offset points", ha="right", color=GREY
        )
    top = max(ds.attrs["uniform_error_most"], float(ds.squared_error.max()))
    ax.set_ylim(-0.03 * top, 1.08 * top)
    ax.set_xlim(-0.03, 1.03)
    ax.set_xlabel("attention on the wanted token")
    ax.set_ylabel("squared error\n(band: uniform maps, by tap)")


def _line(ax: Axes, x: np.ndarray, seeds: np.ndarray, look: Look) -> None:
    """Mean over seeds and its band."""
    middle, half_width = interval(seeds)
    if len(seeds) > 2:
        ax.fill_between(x, middle - half_width, middle + half_width, color=look.color, alpha=0.2, linewidth=0)
    few = max(1, len(x) // 8)
    ax.plot(x, middle, color=look.color, marker=look.marker, markersize=3.5, markevery=few)


STUDY = Study(
    name="zheng/fit",
    title="Fit of queries and keys to impulse maps",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
