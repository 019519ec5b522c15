"""Attention maps that initialisations give: random, mimetic, impulse, and the scale of the logits (Zheng et al. 2024).

Figure     Fig. 3 (random maps against impulses) and Fig. 5 (a small scale c gives flat maps, a large one spikes).
Command    vitprobe run initial_maps/impulse                    8x8 patches, seconds
           vitprobe run initial_maps/impulse --scale cpu        16x16 patches of 2x2 pixels, as on CIFAR, a minute
Shown      Where the heads of a Simple ViT's first layer look from the middle of a blank image. The blurred impulses
           stop at a mass of 0.3 on their targets, which is what the published fit reaches; the sharp ones at 0.95.
"""

import sys

from studies.initial_maps.drawn import SIDES, Initialised, measure, no_verdicts
from vitprobe.figures import draw
from vitprobe.study import Settings, Study, main

HEADS = 6
NETWORK = {"dim": 192, "depth": 1, "heads": HEADS}


def grid(settings: Settings) -> list[Initialised]:
    """The rows of the figure."""
    side = SIDES[settings.scale]

    def row(label: str, initialiser: str = "", arguments: dict | None = None, **options: object) -> Initialised:
        return Initialised(label, "simple_vit", side, NETWORK | options, initialiser, arguments or {})

    published = {"kernel_size": 3, "sampling": "without replacement"}
    return [
        row("random"),
        row("random, scale c = 1", scale=1.0),
        row("random, scale c = 10", scale=10.0),
        row("mimetic", "mimetic_"),
        row("impulse, mass 0.3", "impulse_", published | {"target_mass": 0.3}),
        row("impulse, mass 0.95", "impulse_", published | {"target_mass": 0.95}),
    ]


STUDY = Study(
    name="initial_maps/impulse",
    title="Attention maps of random, mimetic and impulse initialisations",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=no_verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
