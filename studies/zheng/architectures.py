"""From a simple ViT towards a ConvMixer, step by step (Zheng et al. 2024, Table 1).

Claim      Z3: a simple ViT needs its position code (published for CIFAR-10 without augmentation: 71.91 % with it,
           57.97 % without it). Z4: Model I, which gives the code to queries and keys of every layer and to nothing
           else, does about as well (71.3 %). Z5: maps that no image changes, of Models II and III, do no worse than
           Model I's: a ConvMixer is nearer (values not known).
Command    vitprobe run zheng/architectures                  digits, 4 x 4 tokens
           vitprobe run zheng/architectures --scale cpu --data cifar10               8 x 8 tokens
           vitprobe run zheng/architectures --scale paper --device cuda              16 x 16 tokens
Cost       21 trainings: six ViTs and a ConvMixer of three seeds; the ConvMixers are shared with zheng/filters. quick:
           109 s on two cores (measured); cpu: 1297 s on two cores without the three that zheng/frozen has trained
           (measured, beside other work); paper: about one GPU hour each (estimated).
Protocol   Simple ViT with the sinusoidal code and without any; Model I with the sinusoidal and with the identity code;
           Model II with the sinusoidal code; Model III. Model II with the identity code is not here: its queries and
           keys are free matrices, so that it is Model III but for the width of the initial weights. All six have the
           same depth, width, heads and recipe, and no augmentation. Which code the paper's Model II has is not known.
           The ConvMixer has another size, and at the paper scale another learning rate (the paper's): it is the row
           towards which the others are said to move, and no like-for-like comparison.
Rule       Set before anything was measured. Of each seed, differences of the test accuracy [percentage points], with
           95 % t intervals over seeds. Z3: simple ViT with the code less without it, in shares of the accuracy above
           chance with it, supported if wholly above 0.08 (published: 0.23), contradicted if wholly below. Z4: Model I
           with the sinusoidal code less simple ViT, supported if wholly between -2 and 2, contradicted if wholly
           outside on one side. Z5: Model II less Model I, and Model III less Model I, both with the sinusoidal code
           where there is one: supported if both lie wholly above -2, contradicted if one lies wholly below. Judged
           beside it, deciding nothing: both above zero; the identity code in place of the sinusoidal one in Model I,
           which differs from it in rank (64 for 15 on 8 x 8 tokens) and in strength (length 1 for 6) at once; and
           the ConvMixer less Model I, without which "towards a ConvMixer" means nothing. What
           the others are compared with (for Z3 and Z4 the simple ViT with the code, for Z5 Model I) must have learned
           its task (35 % of ten classes), or there is no verdict.
Expected   Z3 supported at the cpu scale by less than the published 14 points, because 5,000 images in 8 epochs teach a
           ViT less. Z4 and Z5 may need more than three seeds. The accuracy by the recipe of SMALL["cpu"] without
           augmentation, mean of seeds 0 to 2: 47.1 % simple ViT, 44.4 % without code, 48.5 % Model I, 43.2 % with the
           identity code, 53.0 % Model II, 45.9 % Model III, 50.5 % ConvMixer.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.outcomes import difference, judge, outcome, part, where
from studies.scales import LEAST, by_seed, sized
from studies.zheng.shared import GREEN, NINE_HEADS, RECIPE, REFERENCES, Row, convmixer, draw_rows, of_reference
from vitprobe.claims import CLAIMS, Direction, Verdict, combine
from vitprobe.figures.page import BLUE, PALETTE, VERMILION
from vitprobe.runs import Run
from vitprobe.study import Settings, Study, main

NEEDS, ABOUT = 0.08, 2.0  # what counts as needing the code [share], and as equal [percentage points]
VITS: dict[str, tuple[str, dict[str, Any]]] = {
    "simple_vit": ("simple_vit", {}),
    "no_code": ("simple_vit", {"position": "none"}),
    "model_1": ("model_1", {}),
    "model_1_identity": ("model_1", {"position": "identity"}),
    "model_2": ("model_2", {}),
    "model_3": ("model_3", {}),
}
PUBLISHED = {"simple_vit": 71.91, "no_code": 57.97, "model_1": 71.3}  # Table 1: CIFAR-10, no augmentation [%]


def _less_simple_vit(kind: str) -> float:
    return PUBLISHED[kind] - PUBLISHED["simple_vit"]


ROWS = {
    "no_code": Row("simple ViT without code", VERMILION, _less_simple_vit("no_code")),
    "simple_vit": Row("simple ViT", BLUE),
    "model_1": Row("Model I, sinusoidal code", PALETTE[3], _less_simple_vit("model_1")),
    "model_1_identity": Row("Model I, identity code", PALETTE[3]),
    "model_2": Row("Model II, sinusoidal code", PALETTE[4]),
    "model_3": Row("Model III", PALETTE[4]),
    "convmixer": Row("ConvMixer", GREEN),
}


def grid(settings: Settings) -> list[Run]:
    """The table's networks, seed by seed."""
    return [
        network
        for run in by_seed(settings, published=RECIPE, augment="none")
        for network in [
            *(
                replace(run, model=sized(name, settings), options=_with(options, settings))
                for name, options in VITS.values()
            ),
            convmixer(run, settings),
        ]
    ]


def _with(options: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    return {**NINE_HEADS[settings.scale], **options}


def architecture(run: Run, settings: Settings) -> str:
    """Which row of the table a run is.

    Args:
        run: one of the grid.
        settings: of the study.
    """
    for kind, (name, options) in VITS.items():
        if (run.model, run.options) == (sized(name, settings), _with(options, settings)):
            return kind
    return "convmixer"


def measure(run: Run, settings: Settings) -> xr.Dataset:
    """Accuracy of one trained network, and which row it is."""
    _, ds = outcome(run, settings, references=REFERENCES)
    kind = architecture(run, settings)
    return ds.assign_coords(architecture=((), kind, {"long_name": "row of the table"}))


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """Z3, Z4 and Z5, the parts of the latter two, and what tells Z5's causes apart."""
    simple, model_1 = (where(ds, architecture=kind) for kind in ("simple_vit", "model_1"))

    def less(one: str, other: str) -> np.ndarray:
        return difference(ds, "accuracy", {"architecture": one}, {"architecture": other})

    needs, points = {"architecture": "simple_vit"}, less("simple_vit", "no_code")
    claim = replace(CLAIMS["Z3"], published=f"{CLAIMS['Z3'].published}: a share of 0.23")
    code = judge(
        claim, of_reference(ds, needs, needs, {"architecture": "no_code"}), "above", simple, threshold=NEEDS,
        least=LEAST, detail=f"a share of the accuracy above chance; {points.mean():+.1f} points",
    )  # fmt: skip
    published = f"{_less_simple_vit('model_1'):+.2f} points"
    margins: tuple[tuple[str, Direction, float], ...] = (("worse", "above", -ABOUT), ("better", "below", ABOUT))
    equal = [
        judge(
            part(CLAIMS["Z4"], said, f"Model I is less than 2 points {said} than the simple ViT", published=published),
            less("model_1", "simple_vit"),
            direction,
            simple,
            threshold=threshold,
            least=LEAST,
        )
        for said, direction, threshold in margins
    ]

    def beyond(kind: str, statement: str, *, name: str = "", threshold: float = 0.0) -> Verdict:
        claim = part(CLAIMS["Z5"], name or kind, statement, published="above 0; value not known")
        return judge(claim, less(kind, "model_1"), "above", model_1, threshold=threshold, least=LEAST)

    fixed = [
        beyond("model_2", "Model II is less than 2 points worse than Model I, both with the sinusoidal code",
               threshold=-ABOUT),
        beyond("model_3", "Model III is less than 2 points worse than Model I with the sinusoidal code",
               threshold=-ABOUT),
    ]  # fmt: skip
    beside = [
        beyond("model_2", "Model II does better than Model I", name="model_2 better"),
        beyond("model_3", "Model III does better than Model I", name="model_3 better"),
        beyond("model_1_identity", "Model I does better with the identity code than with the sinusoidal code"),
        beyond("convmixer", "a ConvMixer does better than Model I with the sinusoidal code"),
    ]
    return [code, combine(CLAIMS["Z4"], equal), *equal, combine(CLAIMS["Z5"], fixed), *fixed, *beside]


def draw(ds: xr.Dataset) -> Figure:
    """Accuracy of every row of the table, and its difference to the simple ViT, beside the published ones."""
    return draw_rows(
        ds,
        ROWS,
        name="architecture",
        reference="simple_vit",
        thresholds={"worse by 2": (-ABOUT, "left"), "better by 2": (ABOUT, "right")},
        note="Dotted: the margins of Z4. Z5 compares with Model I in the same seed instead, as the verdicts say.",
        published=f"published: CIFAR-10, one run (simple ViT: {PUBLISHED['simple_vit']} %)",
    )


STUDY = Study(
    name="zheng/architectures",
    title="Test accuracy from a simple ViT to a ConvMixer",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
