"""Spatial filters that a ConvMixer may keep as they were drawn (Zheng et al. 2024, Fig. 4 and Table 6).

Command    vitprobe run initial_maps/filters                    8x8 patches, seconds
Shown      Where the first nine channels of the first layer look from the middle, in absolute value. All kinds but the
           softmax have a mean squared norm of 1/3.
"""

import sys

import torch
import xarray as xr

from studies.initial_maps.drawn import PATCH, SIDES, Initialised, no_verdicts
from vitprobe.attach import spatial_operator
from vitprobe.figures import draw
from vitprobe.models import create_model
from vitprobe.probes import operator_map
from vitprobe.study import Settings, Study, main

CHANNELS = 9
KINDS = {
    "random": {"filters": "random"},
    "impulse": {"filters": "impulse"},
    "box of 25": {"filters": "box"},
    "box of 5": {"filters": "box", "box_taps": 5},
    "gaussian, variance 1": {"filters": "gaussian", "gaussian_variance": 1.0},
    "softmax": {"filters": "softmax"},
    "permutation": {"filters": "permutation"},
}


def grid(settings: Settings) -> list[Initialised]:
    """The rows of the figure."""
    side = SIDES[settings.scale]
    network = {"dim": CHANNELS, "depth": 1, "kernel_size": 3 if side < 8 else 5}
    taken = KINDS if side >= 8 else {name: kind for name, kind in KINDS.items() if "box" not in name}
    return [Initialised(label, "convmixer", side, network | kind) for label, kind in taken.items()]


def measure(row: Initialised, settings: Settings) -> xr.Dataset:
    """The token-mixing matrices of the first layer's spatial filters, from the middle."""
    size = PATCH * row.side
    model = create_model(row.network, image_size=size, patch_size=PATCH, seed=0, **row.options)
    spatial = model.blocks[0].spatial[0]
    images = torch.zeros(1, CHANNELS, row.side, row.side)
    operator = spatial_operator(spatial, (row.side, row.side), images)
    ds = operator_map(operator, (row.side, row.side)).assign_attrs(label=row.label)
    ds["head"].attrs["long_name"] = "channel"
    return ds


STUDY = Study(
    name="initial_maps/filters",
    title="Fixed spatial filters of ConvMixers",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=no_verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
