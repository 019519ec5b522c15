"""Attention maps of gated positional self-attention before training (d'Ascoli et al. 2021, Fig. 3).

Command    vitprobe run initial_maps/gpsa                       8x8 patches, seconds
           vitprobe run initial_maps/gpsa --scale cpu           16x16 patches
Shown      Where the heads of a ConViT's first layer look from the middle of a blank image: at random, and started as a
           convolution of locality strength 0.5, 1 and 2 (the paper shows 0.5 and 2). Position has a share of 0.73 at
           the start; with four heads the code's centres (±0.5) lie between patches, the paper's (±1) on them.
"""

import sys

from studies.initial_maps.drawn import SIDES, Initialised, measure, no_verdicts
from vitprobe.figures import draw
from vitprobe.study import Settings, Study, main


def grid(settings: Settings) -> list[Initialised]:
    """The rows of the figure."""
    side = SIDES[settings.scale]

    def row(label: str, heads: int = 9, **options: object) -> Initialised:
        network = {"dim": 16 * heads, "depth": 1, "heads": heads, "gpsa_layers": 1, "pool": "mean"}
        return Initialised(label, "convit", side, network | options)

    return [
        row("random", local=False),
        *(row(f"strength {strength:g}", locality_strength=strength) for strength in (0.5, 1.0, 2.0)),
        *(
            row(f"4 heads, {centers} centres", 4, locality_strength=2.0, centers=centers)
            for centers in ("code", "paper")
        ),
    ]


STUDY = Study(
    name="initial_maps/gpsa",
    title="Attention maps of gated positional self-attention before training",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=no_verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
