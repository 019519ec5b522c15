"""Initialisation without augmentation, on CIFAR-10 and Tiny-ImageNet (Zheng et al. 2024, Tables 7 and 8, by inference).

Claim      Parts of Z7, its order alone: without augmentation too, impulse initialisation beats mimetic and random. The
           content of Tables 7 and 8 was not at hand. That they are the three initialisations on CIFAR-10 and on
           Tiny-ImageNet without augmentation is inferred from the loops of the authors' training script and from a
           summary that names Tiny-ImageNet; neither their values nor their shares of the tokens are known.
Command    vitprobe run zheng/no_augmentation                     digits, 4 x 4 tokens
           vitprobe run zheng/no_augmentation --scale cpu         CIFAR-10, 8 x 8 tokens, 5,000 images
           vitprobe run zheng/no_augmentation --scale paper --device cuda                            Table 7?
           vitprobe run zheng/no_augmentation --scale paper --device cuda --data folder:PATH         Table 8?
           For the last, PATH is Tiny-ImageNet as folders of classes, train/CLASS and val/CLASS: 200 classes of 64 px.
           The paper scale gives images above 32 px patches of 4 pixels, as published, which are 16 x 16 tokens again.
           Give --out as well, or it overwrites the results of CIFAR-10.
Cost       quick: none of its own, because digits are never augmented: the 9 trainings are some of zheng/alpha (21 s on
           two cores, measured). cpu: 274 s on two cores (measured, beside other work) with 3 trainings, random and
           impulse being some of zheng/frozen. paper: 9 trainings of each data set, not measured.
Networks   As in zheng/alpha.py, without tokens in the logits (Model II), at the paper scale with a share of 0.2 (Model
           I); the same initial weights and the same recipe but for the augmentation.
Rule       Set before anything was measured. Of each seed the test accuracy of impulse less that of random, and less
           that of mimetic; each part is supported if its 95 % t interval over seeds lies wholly above zero,
           contradicted if wholly below. "Z7 no augmentation" is supported if both are, contradicted if one is
           contradicted; it is no verdict on Z7, which zheng/alpha judges. A network that did not learn its task (35 %
           of ten classes) makes its part inconclusive. Images that are few and not augmented are learned by heart: the
           order may say which initialisation overfits less rather than which learns more, so the loss of the training
           images stands in the dataset.
Expected   Differences of 2 to 5 points, as with augmentation, of which three seeds resolve the larger. The accuracy by
           the recipe of scales.SMALL["cpu"] without crops and flips, mean of seeds 0 to 2: 53.0 % random, 52.9 %
           mimetic, 52.4 % impulse.
"""

import sys
from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.outcomes import difference, judge, part, where
from studies.scales import LEAST, by_seed
from studies.zheng.alpha import SWEEPS, crossed, measure
from studies.zheng.initialisations import LOOKS
from studies.zheng.shared import RECIPE, Row, draw_rows
from vitprobe.claims import CLAIMS, Verdict, combine
from vitprobe.figures.page import style
from vitprobe.runs import Run, load
from vitprobe.study import Settings, Study, main

ROWS = {name: Row(look.label, look.color) for name, look in LOOKS.items()}
RIVALS = ("random", "mimetic")


def grid(settings: Settings) -> list[Run]:
    """Every initialisation at one share of the tokens, seed by seed."""
    runs = by_seed(settings, published=RECIPE, augment="none")
    share = SWEEPS["paper"].shown if settings.scale == "paper" else 0.0
    return crossed(runs, [share], settings, **patches(runs[0], settings))


def patches(run: Run, settings: Settings) -> Mapping[str, int]:
    """The size of the patches as an option of the network, where the paper scale has another than the network's own.

    Args:
        run: whose data count.
        settings: of the study.
    """
    # Data sets with a name have at most 32 px.
    named = ":" not in run.data.spec
    if settings.scale != "paper" or named or max(load(run.data).image_size) <= 32:
        return {}
    return {"patch_size": 4}


def verdicts(ds: xr.Dataset) -> list[Verdict]:
    """That the order of Z7 holds without augmentation, and its two parts."""
    mean = {name: float(where(ds, initialisation=name).accuracy.mean()) for name in LOOKS}
    parts = [
        judge(
            part(
                CLAIMS["Z7"],
                f"no augmentation over {rival}",
                f"Without augmentation impulse initialisation does better than {rival}",
                published="not known",
            ),
            difference(ds, "accuracy", {"initialisation": "impulse"}, {"initialisation": rival}),
            "above",
            ds.isel(run=np.isin(ds.initialisation.values, ["impulse", rival])),
            least=LEAST,
            detail=f"impulse {mean['impulse']:.1f} %, {rival} {mean[rival]:.1f} %",
        )
        for rival in RIVALS
    ]
    whole = part(
        CLAIMS["Z7"],
        "no augmentation",
        "Without augmentation too, impulse initialisation beats mimetic and random initialisation",
        published="not known",
    )
    return [combine(whole, parts), *parts]


def draw(ds: xr.Dataset) -> Figure:
    """Accuracy of every initialisation, and what it differs by from that of impulse."""
    figure = draw_rows(ds, ROWS, name="initialisation", reference="impulse", thresholds={}, published="")
    with style():
        figure.axes[0].set_title(f"share α = {ds.alpha.values.flat[0]:g} of the tokens in the logits")
    return figure


STUDY = Study(
    name="zheng/no_augmentation",
    title="Test accuracy by initialisation without augmentation",
    grid=grid,
    measure=measure,
    draw=draw,
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
