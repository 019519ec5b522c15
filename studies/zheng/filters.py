"""What a ConvMixer's spatial filters are for: learned against fixed ones (Zheng et al. 2024, Fig. 4).

Claim      Z1: frozen random filters and frozen impulses lose little against learned ones, boxes lose much, permutations
           of the tokens most. Published for a ConvMixer-512/6 on CIFAR-10, patches of 2, filters of 5: the order only;
           its values were not at hand.
Command    vitprobe run zheng/filters                        digits, 8 x 8 tokens, filters of 3
           vitprobe run zheng/filters --scale cpu --data cifar10                     8 x 8 tokens, filters of 5
           vitprobe run zheng/filters --scale paper --device cuda                    16 x 16 tokens, filters of 5
Cost       15 trainings of ConvMixers, 3 of them shared with zheng/architectures. quick: 66 s on two cores for the other
           12 (measured); cpu: 363 s on two cores for the other 12 (measured, beside other work); paper: about half a
           GPU hour each, and 0.8 GB of frozen matrices in every checkpoint of the permutations (estimated).
Protocol   Five kinds of filters, all else the same: data, order, recipe (no augmentation; which one the figure had is
           not known). Frozen filters keep their biases too, as in the authors' code, and there is no activation after
           the filters, as there. All frozen kinds have the same mean squared norm, that of the initial learned ones. A
           box has all taps equal and is one and the same filter in all channels; a permutation is a dense matrix of its
           own in every channel, each row with a one at a place drawn independently of the others.
Rule       Set before anything was measured. Of each seed, the test accuracy with learned filters less that with each
           frozen kind, in shares of the accuracy above chance with learned ones. Z1 is supported if the 95 % t interval
           over seeds lies wholly below 0.036 for random and for impulse, wholly above 0.06 for box and for permutation
           (3 and 5 points of a network of 93 %), and that of box less permutation wholly above zero; contradicted if
           one lies wholly on the other side. A network with learned filters that did not learn
           its task (35 % of ten classes) makes it inconclusive; that one with frozen filters does not learn is what
           the claim is about.
Expected   The order as published at the cpu scale. At quick, digits may be so easy that even boxes lose less. The
           accuracy by the recipe of SMALL["cpu"] without augmentation, mean of seeds 0 to 2: 50.5 % learned, 51.6 %
           random, 50.1 % impulse, 43.4 % box, 44.5 % permutation.
"""

import sys
from typing import Any

import xarray as xr
from matplotlib.figure import Figure

from studies.outcomes import difference, judge, outcome, part, where
from studies.scales import LEAST, by_seed
from studies.zheng.shared import GREEN, RECIPE, REFERENCES, Row, convmixer, draw_rows, of_reference
from vitprobe.claims import CLAIMS, Direction, Verdict, combine
from vitprobe.figures.page import BLUE, PALETTE, VERMILION
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

KINDS = ("learned", "random", "impulse", "box", "permutation")
LITTLE, MUCH = 0.036, 0.06  # losses in shares of what learned filters have above chance
# The difference of the later paper, which has one value for random filters and impulses, learned filters of 3 x 3.
PUBLISHED = 92.20 - 92.82
ROWS = {
    "learned": Row("learned filters", GREEN),
    "random": Row("random, frozen", BLUE, PUBLISHED),
    "impulse": Row("impulse, frozen", PALETTE[5], PUBLISHED),
    "box": Row("box, frozen", PALETTE[4]),
    "permutation": Row("permutation, frozen", VERMILION),
}


def grid(settings: Settings) -> list[Run]:
    """The ConvMixer with every kind of filters, seed by seed."""
    return [
        convmixer(run, settings, **options(kind))
        for run in by_seed(settings, published=RECIPE, augment="none")
        for kind in KINDS
    ]


def options(kind: str) -> dict[str, Any]:
    """What makes a ConvMixer's filters of a kind; those learned are its own."""
    return {} if kind == "learned" else {"filters": kind}


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Accuracy of one trained network, and the kind of its filters."""
    _, ds = outcome(run, settings, references=REFERENCES)
    kind = run.options.get("filters", "learned")
    return ds.assign_coords(filters=((), kind, {"long_name": "kind of the spatial filters"}))


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """Z1, and its parts."""
    learned = where(ds, filters="learned")
    rules: tuple[tuple[str, str, float, Direction, str], ...] = (
        ("learned", "random", LITTLE, "below", "random filters, frozen, lose less than 3.6 % of what is learned"),
        ("learned", "impulse", LITTLE, "below", "impulses, frozen, lose less than 3.6 % of what is learned"),
        ("learned", "box", MUCH, "above", "boxes lose more than 6 % of what is learned"),
        ("learned", "permutation", MUCH, "above", "permutations of the tokens lose more than 6 % of what is learned"),
        ("box", "permutation", 0.0, "above", "permutations of the tokens do worse than boxes"),
    )
    parts = [
        judge(
            part(CLAIMS["Z1"], f"{one}-{other}", statement, published=_published(other)),
            of_reference(ds, {"filters": "learned"}, {"filters": one}, {"filters": other}),
            direction,
            learned,
            threshold=threshold,
            least=LEAST,
            detail=f"{difference(ds, 'accuracy', {'filters': one}, {'filters': other}).mean():+.1f} points",
        )
        for one, other, threshold, direction, statement in rules
    ]
    return [combine(CLAIMS["Z1"], parts), *parts]


def _published(kind: str) -> str:
    known = ROWS[kind].published
    return "the order only" if known is None else f"{-known:.2f} points in a later paper, filters of 3"


def draw(ds: xr.Dataset) -> Figure:
    """Accuracy with every kind of filters, and what the frozen ones lose."""
    learned = float(where(ds, filters="learned").accuracy.mean()) - 100 / ds.attrs["classes"]
    return draw_rows(
        ds,
        ROWS,
        name="filters",
        reference="learned",
        thresholds={"little": (-LITTLE * learned, "right"), "much": (-MUCH * learned, "left")},
        published="published in a later paper: CIFAR-10, filters of 3, by a review",
        note=f"Dotted: little and much by the rule, {LITTLE:g} and {MUCH:g} of the accuracy above chance.",
    )


STUDY = Study(
    name="zheng/filters",
    title="Test accuracy of ConvMixers by kind of spatial filters",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
