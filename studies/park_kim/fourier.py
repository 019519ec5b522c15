"""Attention is a low-pass filter, convolutions and MLPs are high-pass filters (Park & Kim 2022, Fig. 2a, 8 and D.2).

Claim      E14: attention lowers the relative log amplitude at the highest frequency, MLPs and convolutions raise it,
           except in the first blocks. Published for ViT-Ti and ResNet-50; Fig. D.2 shows PiT and Swin, whose values
           are not known.
Command    vitprobe run park_kim/fourier                     digits, 21 small networks
           vitprobe run park_kim/fourier --scale cpu --data cifar10
           vitprobe run park_kim/fourier --scale paper --device cuda
Cost       The trainings, which most other studies share, and a pass over the test images. quick: 21 of about half a
           minute of one core; with those trained, 34 s on two cores. cpu: 21 of 2 (ConvMixer) to 5
           minutes (PiT) of one core; with those trained, 49 s on two cores (measured). paper: not measured.
Expected   accuracy after training by the recipe of families.SCALES["cpu"], mean of seeds 0 to 2: 61.3 % AlterNet,
           49.6 % ConViT, 58.2 % ConvMixer, 54.3 % PiT, 63.8 % ResNet, 45.8 % Swin, 49.2 % ViT.
Rule       Set before the cpu scale was measured. Of each seed the median step over the units of a kind; supported if
           the 95 % t interval over seeds lies wholly on the claimed side of zero for attention and MLPs of the ViT
           and for the convolutions of the ResNet, contradicted if one lies wholly on the other side. A network that
           did not learn its task (45 % of ten classes) is no evidence. PiT and Swin, which came later, are reported
           and do not decide.
Figure     Published points beside ours, on scales of their own. They are of other networks on other data, and by the
           published code, whose last sample is 0.857 to 0.964 pi; ours is pi.
"""

import sys

import numpy as np
import xarray as xr
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from studies.park_kim.families import CLAIMS, grid, headline, judge
from studies.park_kim.families import measure as measure_family
from studies.park_kim.profiles import Panel, Published, kinds_shown, page, panels, profile, rows
from vitprobe.claims import Verdict
from vitprobe.figures.depth_profile import kind_legend
from vitprobe.figures.fourier import DEPTH_COLORS
from vitprobe.figures.page import SINGLE_RUN, THIN_LINES, limit, note, style, unit_interval
from vitprobe.probes import Fourier
from vitprobe.published import park_kim_2022
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Fourier amplitudes of one trained network on its test set."""
    return measure_family(run, settings, Fourier())


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E14, from the steps of the relative log amplitude at the highest frequency."""
    return judge(ds, "high_frequency_amplitude", CLAIMS["E14"], headline(ds))


# --- figure -----------------------------------------------------------------------------------------


def draw(ds: xr.Dataset) -> Figure:
    """Spectra of all units, and below them their last samples by depth; published networks beside our families."""
    numbers = park_kim_2022()
    resnet, vit = numbers["fourier_resnet50_imagenet"], numbers["fourier_vit_ti_highfreq_by_depth"]
    published = [
        Published("ResNet-50", "ImageNet", np.array([curve[-1][1] for curve in resnet])),
        Published("ViT-Ti", "ImageNet", np.array(vit)),
    ]
    networks = rows(ds, published)
    with style():
        figure = page(networks, height=3.7 * len(networks) + 0.6)
        above, below = figure.subfigures(2, 1, height_ratios=[1.05, 1])
        drawn = list(panels(above, networks))
        for panel in drawn:
            _spectra(panel)
        above.colorbar(
            ScalarMappable(Normalize(0, 1), DEPTH_COLORS),
            ax=[panel.ax for panel in drawn],
            label="depth",
            pad=0.01,
            aspect=40,
        )
        for panel in panels(below, networks):
            profile(panel, "high_frequency_amplitude", "relative log amplitude\nat highest freq. [ln]")
        ours = kinds_shown(networks)
        kind_legend(figure, ours)
        note(figure, ours, several=THIN_LINES, single=SINGLE_RUN, always="Published: one network, last sample below π.")
    return figure


def _spectra(panel: Panel) -> None:
    """The relative log amplitude against frequency, one curve per unit: the mean over seeds."""
    ax, network = panel.ax, panel.network
    curves: list[tuple[np.ndarray, np.ndarray]]
    if isinstance(network, Published):
        curves = [published_spectrum(curve) for curve in park_kim_2022()[f"fourier_{_KEYS[network.name]}_imagenet"]]
        depths = np.linspace(0, 1, len(curves))
    else:
        amplitude = network.runs["relative_log_amplitude"].mean("run").transpose("layer", "frequency")
        # A grid lacks the frequencies of a finer one.
        each = [curve.dropna("frequency") for curve in amplitude]
        curves = [(curve.frequency.values, curve.values) for curve in each]
        depths = network.runs["depth"].mean("run").values
    for depth, (frequency, values) in zip(depths, curves, strict=True):
        ax.plot(frequency, values, color=DEPTH_COLORS(depth), linewidth=0.9, marker=".", markersize=2)
    limit([ax], [values for _, values in curves])
    unit_interval(ax, "frequency [π]")
    if panel.first:
        ax.set_ylabel("relative log\namplitude [ln]")


_KEYS = {"ResNet-50": "resnet50", "ViT-Ti": "vit_ti"}
_SIDES = {28: 56, 14: 28, 7: 14, 4: 7}  # of maps, by the samples of their half-diagonals


def published_spectrum(curve: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """A published curve at its true frequencies, which its axis stretches to end at pi.

    Args:
        curve: pairs of stretched frequency and relative log amplitude.

    Returns:
        True frequencies [pi rad/px] and amplitudes, `(sample,)` each.
    """
    stretched, values = np.array(curve).T
    side = _SIDES[len(curve)]
    last = (side - 1) // 2  # the wave number of the last sample
    return np.abs(stretched) * 2 * last / side, values


STUDY = Study(
    name="park_kim/fourier",
    title="Fourier amplitude of feature maps by family of networks",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
