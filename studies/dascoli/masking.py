"""What trained networks lose without position or without content (d'Ascoli et al. 2021, Tables 5 and 6).

Claim      D9: a trained ConViT loses less than a ViT if the absolute position codes are masked at test time (published:
           6.0 and 33.9 points). D10: its late gated layers live on content: with the gates of the first n layers forced
           to position (content masked) accuracy is gone for large n, forced to content (position masked) it is not
           (published: 62.3 and 63.5 % for n = 3, 35.0 and 53.1 % for 5, 1.3 and 46.8 % for 10).
Command    vitprobe run dascoli/masking                      digits; shares its networks with dascoli/ablations
           vitprobe run dascoli/masking --scale cpu
           vitprobe run dascoli/masking --scale paper --device cuda
Cost       no training beyond the ViT and the ConViT of all images of dascoli/sample_efficiency (6 networks). Beside it
           two passes over the test images for each gated layer: on two cores 20 s at quick (measured) and 159 s at the
           cpu scale (measured, beside other work).
Rule       Set before anything was measured. D9: of each seed what the ViT loses [points of test accuracy] less what the
           ConViT loses; supported if the 95 % t interval over seeds lies wholly above zero, contradicted if wholly
           below. D10, of each seed's ConViT what masking content costs less what masking position costs: with all gated
           layers masked, above zero; and that less the same with the first third of them masked (3 of 10, 2 of 5, 1 of
           3), above zero: late layers depend on content more than early ones. Supported if both intervals lie wholly
           above zero, contradicted if one lies wholly below. Networks that did not learn their task (35 % of ten
           classes) make both inconclusive. Differences are on the same test images, at the cpu scale the 2,000 that are
           seen after every epoch of training. The position codes of the ConViT that are masked are those added to its
           patches, as in the paper; the position part of its gated maps stays, which the ViT has not: masking cannot
           tell whether the ConViT needs position less, or has it from elsewhere. The gates start at a share of position
           of 0.731 and move little in few epochs (at the cpu scale the learning rates of all steps add up to 0.63, so
           that Adam leaves them above 0.57): then masking content changes the maps less than masking position does,
           whatever the layers need, and below 100 epochs D10 is inconclusive where it is not supported. The shares at
           the end are said with it.
Expected   D9 supported. D10 open at the cpu scale, whose 8 epochs leave the gates near their start. The accuracy by the
           recipe of scales.SMALL["cpu"], mean of seeds 0 to 2: 41.2 % ViT, 42.3 % ConViT.
"""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from studies.dascoli.pair import CONVIT, REFERENCES, VIT, in_time, kinds, pair
from studies.dascoli.published import TABLE_5, TABLE_6
from studies.outcomes import Look, difference, judge, outcome, part, where
from studies.scales import LEAST
from vitprobe.claims import CLAIMS, Verdict, combine
from vitprobe.figures.page import BLUE, GREY, PAGE_WIDTH, interval, style
from vitprobe.models.attention import Attention
from vitprobe.probes import masking
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

MASKS = {"content": Look("content masked", BLUE, "o"), "position": Look("position masked", "#009E73", "D")}


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """What one trained network loses without its position codes, and with its first gated layers masked.

    Returns:
        `intact_accuracy` (of the test images that are masked, which may be fewer than those of `accuracy`) and
        `codes_change` without dimensions, and along `layer`, the layers of attention, `content_change` and
        `position_change` with that layer and all before it masked, each with its standard error over images; and
        `position_share`, the mean over the layer's heads. Not-a-number where a layer has no gates.
    """
    result, ds = outcome(run, settings, references=REFERENCES)
    network = result.model
    batches = list(result.data.loader("test", batch_size=100, device=next(network.parameters()).device))
    layers = [module for module in network.modules() if isinstance(module, Attention)]
    share = [np.nan if layer.gate is None else float(layer.gate.detach().sigmoid().mean()) for layer in layers]
    codes = masking(network, batches, "position_codes", progress=False).isel(mask=0)
    found: dict[str, Any] = {"position_share": ("layer", share, _said("mean over heads of the share of position", "1"))}
    gated = None
    if np.isfinite(share).any():
        gated = masking(network, batches, list(MASKS), per="up_to_layer", progress=False)
    for ending, text in (("", ""), ("_se", "standard error over images of ")):
        intact = 100 * float(codes[f"intact_accuracy{ending}"])
        found[f"intact_accuracy{ending}"] = ((), intact, _said(f"{text}accuracy with nothing masked", "%"))
        lost = 100 * float(codes[f"accuracy_change{ending}"])
        said = f"{text}change of accuracy without position codes"
        found[f"codes_change{ending}"] = ((), lost, _said(said, "percentage points"))
        for place, mask in enumerate(MASKS):
            values = np.full(len(layers), np.nan)
            if gated is not None:
                values = 100 * gated[f"accuracy_change{ending}"].isel(mask=place).values
            said = f"{text}change of accuracy with {mask} masked up to this layer"
            found[f"{mask}_change{ending}"] = ("layer", values, _said(said, "percentage points"))
    return ds.assign(found).assign_coords(layer=np.arange(len(layers)))


def _said(text: str, units: str) -> dict[str, str]:
    return {"long_name": text, "units": units}


# --- verdicts ---------------------------------------------------------------------------------------


def curve(runs: xr.Dataset, mask: str) -> np.ndarray:
    """The change of accuracy with the first layers masked, by how many gated ones `(seed, 1 ... all)`.

    Args:
        runs: of the ConViT.
        mask: `"content"` or `"position"`.
    """
    values: np.ndarray = runs[f"{mask}_change"].transpose("run", "layer").values
    return values[:, np.isfinite(values).all(axis=0)]


def few(layers: int) -> int:
    """How many of so many gated layers are the first ones: three of ten, two of five, one of three."""
    return max(1, round(0.3 * layers))


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """D9; D10, and its halves."""
    plain, gated = kinds(ds)
    claims = [
        part(CLAIMS["D10"], "all", "in all gated layers, masking content costs more than masking position"),
        part(
            CLAIMS["D10"],
            "late",
            "what masking content costs more than masking position is more in all gated layers than in the first third",
        ),
    ]
    published = {layers: position - content for layers, (content, position) in TABLE_6.items()}
    spoken = (f"{published[10]:.1f} points", f"{published[10] - published[3]:.1f} points")
    claims = [replace(claim, published=value) for claim, value in zip(claims, spoken, strict=True)]
    lost = " and ".join(
        f"{look.label} {accuracy.mean():.1f} to {(accuracy + change).mean():.1f} %"
        for kind, look in ((plain, VIT), (gated, CONVIT))
        for accuracy, change in [(where(ds, **kind).intact_accuracy.values, where(ds, **kind).codes_change.values)]
    )
    runs = where(ds, **gated)
    gap = curve(runs, "position") - curve(runs, "content")
    share = ", ".join(f"{value:.2f}" for value in runs.position_share.mean("run").values if np.isfinite(value))
    values = (gap[:, -1], gap[:, -1] - gap[:, few(gap.shape[1]) - 1])
    details = (f"share of position by layer {share}", "")
    halves = [
        in_time(judge(claim, of_half, "above", runs, least=LEAST, detail=detail), int(ds.epochs.values.max()))
        for claim, of_half, detail in zip(claims, values, details, strict=True)
    ]
    # Masked less intact is negative: what the ViT loses less what the ConViT loses.
    more = difference(ds, "codes_change", gated, plain)
    return [
        judge(CLAIMS["D9"], more, "above", ds, least=LEAST, detail=f"{lost} of the images masked"),
        combine(CLAIMS["D10"], halves),
        *halves,
    ]


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Accuracy without position codes, and by how many layers have content or position masked; also published."""
    plain, gated = kinds(ds)
    count = len(np.unique(ds.seed.values))
    with style():
        figure = Figure(figsize=(PAGE_WIDTH, 2.9), layout="constrained")
        codes, codes_there, layers, layers_there = figure.subplots(1, 4, width_ratios=[1, 1, 1.3, 1.3])
        for kind, look, (with_codes, without) in zip((plain, gated), (VIT, CONVIT), TABLE_5.values(), strict=True):
            runs = where(ds, **kind)
            masked = runs.intact_accuracy + runs.codes_change
            _lines(codes, np.arange(2), np.stack([runs.intact_accuracy, masked], axis=1), look)
            _lines(codes_there, np.arange(2), np.array([[with_codes, without]]), look)
        runs = where(ds, **gated)
        for place, (mask, look) in enumerate(MASKS.items()):
            ours = runs.intact_accuracy.values[:, None] + np.pad(curve(runs, mask), ((0, 0), (1, 0)))
            _lines(layers, np.arange(ours.shape[1]), ours, look)
            theirs = np.array([[pair[place] for pair in TABLE_6.values()]])
            _lines(layers_there, np.array(list(TABLE_6)), theirs, look)
        for ax, title in (
            (codes, f"ours\n{ds.attrs['data']}"),
            (codes_there, "published: ImageNet\nDeiT-Ti, ConViT-Ti"),
            (layers, f"ours: ConViT\n{ds.attrs['data']}"),
            (layers_there, "published: ImageNet\nConViT-Ti"),
        ):
            ax.set_title(title)
            ax.set_ylabel("test accuracy [%]")
            ax.set_ylim(bottom=0)
        for ax in (codes, codes_there):
            ax.set_xticks([0, 1], ["intact", "no position\ncodes"])
            ax.set_xlim(-0.3, 1.3)
        for ax in (layers, layers_there):
            ax.set_xlabel("first gated layers masked")
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        figure.legend(*codes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        figure.legend(*layers.get_legend_handles_labels(), loc="outside upper right", ncols=2)
        bars = f"\nBars: 95 % t interval over {count} seeds; thin lines: single seeds." if count > 2 else ""
        figure.supxlabel(
            f"Without position codes the ConViT keeps the position part of its maps. Published: one run each.{bars}",
            fontsize=6.5,
            color=GREY,
        )
    return figure


def _lines(ax: Axes, x: np.ndarray, seeds: np.ndarray, look: Look) -> None:
    """Mean and interval over seeds `(seed, x)`, each seed a thin line."""
    mean, half_width = interval(seeds)
    ax.errorbar(
        x, mean, half_width if len(seeds) > 2 else None, color=look.color, marker=look.marker, markersize=4,
        elinewidth=0.7, label=look.label,
    )  # fmt: skip
    if len(seeds) > 1:
        ax.plot(x, seeds.T, color=look.color, linewidth=0.5, alpha=0.45)


STUDY = Study(
    name="dascoli/masking",
    title="Accuracy of trained networks without position codes, content or position",
    grid=pair,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
