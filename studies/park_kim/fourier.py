"""Attention is a low-pass filter, convolutions and MLPs are high-pass filters (Park & Kim 2022, Fig. 2a and 8).

Claim      E14: attention lowers the relative log amplitude at the highest frequency, MLPs and convolutions raise it,
           except in the first blocks. Published for ViT-Ti and ResNet-50.
Command    vitprobe run park_kim/fourier                     digits, 15 small networks
           vitprobe run park_kim/fourier --scale cpu --data cifar10 --train-size 10000
           vitprobe run park_kim/fourier --scale paper --device cuda
Expected   accuracy after training by the recipe of families.SCALES["cpu"], mean of seeds 0 to 2: 67.8 % AlterNet,
           60.3 % ConViT, 63.4 % ConvMixer, 67.9 % ResNet, 54.7 % ViT.
Rule       Set before the cpu scale was measured. Of each seed the median step over the units of a kind; supported if
           the 95 % t interval over seeds lies wholly on the claimed side of zero for attention and MLPs of the ViT
           and for the convolutions of the ResNet, contradicted if one lies wholly on the other side. A network that
           did not learn its task (45 % of ten classes) is no evidence.
"""

import sys

import xarray as xr

from studies.park_kim.families import CLAIMS, grid, headline, judge
from studies.park_kim.families import measure as measure_family
from vitprobe.claims import Verdict
from vitprobe.figures import draw
from vitprobe.probes import Fourier
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Fourier amplitudes of one trained network on its test set."""
    return measure_family(run, settings, Fourier())


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E14, from the steps of the relative log amplitude at the highest frequency."""
    return judge(ds, "high_frequency_amplitude", CLAIMS["E14"], headline(ds))


STUDY = Study(
    name="park_kim/fourier",
    title="Fourier amplitude of feature maps in five families of networks",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
