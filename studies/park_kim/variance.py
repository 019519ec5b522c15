"""Attention lowers the variance of feature maps, convolutions and MLPs raise it (Park & Kim 2022, Fig. 9).

Claim      E16: the variance over positions falls in attention units and rises in MLP and convolution units, where the
           grid stays. Published for ViT-Ti and ResNet-50 on CIFAR-100.
Command    vitprobe run park_kim/variance                    digits; shares its trained networks with park_kim/fourier
           vitprobe run park_kim/variance --scale cpu --data cifar10 --train-size 10000
           vitprobe run park_kim/variance --scale paper --device cuda
Expected   accuracy after training by the recipe of families.SCALES["cpu"], mean of seeds 0 to 2: 67.8 % AlterNet,
           60.3 % ConViT, 63.4 % ConvMixer, 67.9 % ResNet, 54.7 % ViT.
Rule       Set before the cpu scale was measured. Of each seed the median step over the units of a kind; supported if
           the 95 % t interval over seeds lies wholly on the claimed side of zero for attention and MLPs of the ViT
           and for the convolutions of the ResNet, contradicted if one lies wholly on the other side. A network that
           did not learn its task (45 % of ten classes) is no evidence. The same rule is applied to the variance over
           the mean square, because the raw one follows the growing scale of the residual stream; that part was added
           after the raw result of two seeds had been seen, and before any normalised one.
"""

import sys
from dataclasses import replace

import xarray as xr

from studies.park_kim.families import CLAIMS, grid, headline, judge
from studies.park_kim.families import measure as measure_family
from vitprobe.claims import Verdict
from vitprobe.figures import draw
from vitprobe.probes import FeatureVariance
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Feature variance of one trained network on its test set."""
    return measure_family(run, settings, FeatureVariance())


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """E16 from the steps of the variance, as published, and of the variance over the mean square."""
    normalised = replace(
        CLAIMS["E16"],
        id="E16 normalised",
        statement=f"{CLAIMS['E16'].statement}, relative to the mean square",
        published="not published",
    )
    return [
        *judge(ds, "variance", CLAIMS["E16"], headline(ds)),
        *judge(ds, "normalised_variance", normalised, headline(ds)),
    ]


STUDY = Study(
    name="park_kim/variance",
    title="Variance of feature maps in five families of networks",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
