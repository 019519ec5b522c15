"""Attention lowers the variance of feature maps, convolutions and MLPs raise it (Park & Kim 2022, Fig. 9 and D.1).

Claim      E16: the variance over positions falls in attention units and rises in MLP and convolution units, where the
           grid stays. Published for ViT-Ti and ResNet-50 on CIFAR-100; Fig. D.1 shows PiT and Swin, whose values are
           not known.
           E17: in a ResNet the variance is largest at the end of each stage. Published for ResNet-50.
Command    vitprobe run park_kim/variance                    digits; shares its trained networks with park_kim/fourier
           vitprobe run park_kim/variance --scale cpu --data cifar10
           vitprobe run park_kim/variance --scale paper --device cuda
Cost       beside the training a pass over the test images: on two cores 36 s at quick and 49 s at cpu (measured).
Expected   accuracy after training by the recipe of families.SCALES["cpu"], mean of seeds 0 to 2: 61.3 % AlterNet,
           49.6 % ConViT, 58.2 % ConvMixer, 54.3 % PiT, 63.8 % ResNet, 45.8 % Swin, 49.2 % ViT.
Rule       Set before the cpu scale was measured. Of each seed the median step over the units of a kind; supported if
           the 95 % t interval over seeds lies wholly on the claimed side of zero for attention and MLPs of the ViT
           and for the convolutions of the ResNet, contradicted if one lies wholly on the other side. A network that
           did not learn its task (45 % of ten classes) is no evidence. The same rule is applied to the variance over
           the mean square, because the raw one follows the growing scale of the residual stream; that part was added
           after the raw result of two seeds had been seen, and before any normalised one. PiT and Swin, which came
           later, are reported and do not decide.
           E17 was set when all three seeds of the cpu scale had been drawn for E16, where it shows that the ResNet's
           stages peak at their ends: there it is no test of a guess. Of each seed, the share of stages whose largest
           variance is that of their last unit; the stem is left out, as are stages of a single unit. Supported if the
           95 % t interval over seeds lies wholly above what chance gives, the mean over stages of one over the number
           of units; contradicted if it lies wholly below. Shares of few stages are often the same in all seeds: then it
           takes six seeds (a sign test). The ResNet decides; other networks with stages are reported. The same again
           for the variance over the mean square, with a verdict of its own.
Figure     Published points beside ours, on scales of their own: they are of other, larger networks on CIFAR-100.
"""

import sys
from dataclasses import replace

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.outcomes import if_learned
from studies.park_kim.families import CLAIMS, family, grid, headline, judge
from studies.park_kim.families import measure as measure_family
from studies.park_kim.profiles import Panel, Published, kinds_shown, page, panels, profile, rows, stages_of
from vitprobe.claims import Claim, Verdict, decide
from vitprobe.figures.depth_profile import kind_legend
from vitprobe.figures.page import SINGLE_RUN, THIN_LINES, note, style
from vitprobe.probes import FeatureVariance
from vitprobe.published import park_kim_2022
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Feature variance of one trained network on its test set."""
    return measure_family(run, settings, FeatureVariance())


# --- verdicts ---------------------------------------------------------------------------------------


def peaks(values: np.ndarray, stages: np.ndarray) -> list[tuple[bool, int]]:
    """Whether the largest of each stage is its last.

    Args:
        values: of the units, the first of which is the stem `(unit,)`.
        stages: their stages `(unit,)`.

    Returns:
        Of each stage of more than one unit, the stem left out, whether it is, and the number of its units.
    """
    found = []
    for stage in np.unique(stages):
        of_stage = values[1:][stages[1:] == stage]
        if len(of_stage) > 1:
            found.append((int(of_stage.argmax()) == len(of_stage) - 1, len(of_stage)))
    return found


def judge_peaks(ds: xr.Dataset, variable: str, claim: Claim) -> list[Verdict]:
    """Verdicts on one version of E17: of the ResNet, then of others with stages.

    Args:
        ds: stacked runs.
        variable: the variance.
        claim: this version of the claim.
    """
    found = []
    for model in sorted(dict.fromkeys(ds.model.values.tolist()), key=lambda name: family(name) != "resnet"):
        runs = ds.isel(run=np.flatnonzero(ds.model == model))
        runs = runs.isel(layer=runs.layer_name.isel(run=0).values != "")
        stages = stages_of(runs.isel(run=0))
        by_seed = [peaks(row, stages) for row in runs[variable].transpose("run", "layer").values]
        if stages[-1] == 0 or not by_seed[0]:
            continue
        at_end = np.array([[last for last, _ in of_seed] for of_seed in by_seed])
        part = claim
        if family(model) != "resnet":
            statement = f"the {variable.replace('_', ' ')} in {model} peaks at the last unit of each stage"
            part = replace(claim, id=f"{claim.id} {model}", statement=statement, published="", counter_evidence="")
        verdict = decide(
            part,
            at_end.mean(1),
            threshold=float(np.mean([1 / units for _, units in by_seed[0]])),
            detail="stages " + ", ".join(f"{share:.2f}" for share in at_end.mean(0)),
        )
        found.append(if_learned(verdict, runs))
    return found


def relative(claim: Claim) -> Claim:
    """A claim, of the variance over the mean square."""
    return replace(
        claim,
        id=f"{claim.id} normalised",
        statement=f"{claim.statement}, relative to the mean square",
        published="not published",
    )


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E16 from the steps of the variance and E17 from its peaks, each also for the variance over the mean square."""
    steps, ends = CLAIMS["E16"], CLAIMS["E17"]
    return [
        *judge(ds, "variance", steps, headline(ds)),
        *judge(ds, "normalised_variance", relative(steps), headline(ds)),
        *judge_peaks(ds, "variance", ends),
        *judge_peaks(ds, "normalised_variance", relative(ends)),
    ]


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Variance by depth, published networks beside our families; the largest of each stage is ringed."""
    numbers = park_kim_2022()
    published = [
        Published("ResNet-50", "CIFAR-100", np.array(numbers["variance_resnet50_cifar100"])),
        Published("ViT-Ti", "CIFAR-100", np.array(numbers["variance_vit_ti_cifar100"])),
    ]
    networks = rows(ds, published)
    with style():
        figure = page(networks, height=1.9 * len(networks) + 0.6)
        for panel in panels(figure, networks):
            profile(panel, "variance", "feature-map\nvariance [1]")
            _rings(panel)
        ours = kinds_shown(networks)
        kind_legend(figure, ours)
        note(
            figure,
            ours,
            several=THIN_LINES,
            single=SINGLE_RUN,
            always="Rings: the largest of each stage.",
        )
    return figure


def _rings(panel: Panel) -> None:
    """Mark the largest of each stage of a network that has several."""
    network = panel.network
    if isinstance(network, Published):
        values = network.values
        depth, stages = np.linspace(0, 1, len(values)), np.cumsum([kind == "subsample" for kind in network.kinds])
    else:
        values = network.runs["variance"].mean("run").values
        depth, stages = network.runs["depth"].mean("run").values, stages_of(network.runs.isel(run=0))
    if stages[-1] == 0:
        return
    places = np.arange(len(values))
    for stage in np.unique(stages[1:]):
        units = places[1:][stages[1:] == stage]
        peak = units[values[units].argmax()]
        look = {"color": "black", "markersize": 6, "markerfacecolor": "none", "markeredgewidth": 0.7}
        panel.ax.plot(depth[peak], values[peak], "o", zorder=5, clip_on=False, **look)


STUDY = Study(
    name="park_kim/variance",
    title="Variance of feature maps by family of networks",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
