"""What a statistic says of a published statement: supported, contradicted or inconclusive.

The rule is declared before the numbers are seen, and the interval runs over independent units: seeds,
images or batches, never heads, tokens or eigenvalues of one model. No torch here.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from vitprobe.intervals import finite_units, mean_interval, t_quantile

Direction = Literal["above", "below"]
VERDICTS = ("supported", "contradicted", "inconclusive")
_MOST_UNITS = 100_000  # beyond this an estimate of the units needed says no more than "never"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published statement, in a form that a number can contradict.

    Attributes:
        id: its short name, e.g. `"E14"`.
        paper: where it was published.
        statement: what is claimed.
        statistic: the number that decides, in words.
        published: the value published, in words.
        source: where in the paper, and how the value was read.
        counter_evidence: what others, or the paper itself, found against it.
    """

    id: str
    paper: str
    statement: str
    statistic: str
    published: str
    source: str
    counter_evidence: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the measured values say of a claim.

    Attributes:
        claim: the claim.
        verdict: `"supported"`, `"contradicted"` or `"inconclusive"`.
        value: the statistic; not-a-number where the verdict combines several.
        low: lower end of its interval.
        high: upper end of its interval.
        n: how many independent units it rests on.
        unit: what one of them is, e.g. `"seed"`.
        rule: the rule that was declared before.
        detail: what else a reader must know.
        needed: about how many units would decide, where it is inconclusive and that can be estimated.
    """

    claim: Claim
    verdict: str
    value: float
    low: float
    high: float
    n: int
    unit: str
    rule: str
    detail: str = ""
    needed: int | None = None

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is not one of {', '.join(VERDICTS)}")


def sign_test(changes: ArrayLike, direction: Direction) -> tuple[float, float]:
    """How many of the changes have the claimed sign, and how likely chance alone gives as many or more.

    Args:
        changes: the changes; those of exactly zero have no sign and are left out.
        direction: `"above"` if they are claimed to be positive, `"below"` if negative.

    Returns:
        The share with the claimed sign, and the one-sided exact binomial p-value; without any sign,
        not-a-number and 1.
    """
    from scipy.stats import binomtest

    signed = _sign(direction) * finite_units(changes)
    n = int(np.count_nonzero(signed))
    if n == 0:
        return math.nan, 1.0
    claimed = int(np.count_nonzero(signed > 0))
    return claimed / n, float(binomtest(claimed, n, 0.5, alternative="greater").pvalue)


def _sign(direction: str) -> int:
    if direction not in {"above", "below"}:
        raise ValueError(f"direction {direction!r} is neither 'above' nor 'below'")
    return 1 if direction == "above" else -1


# --- verdicts --------------------------------------------------------------------------------------------


def decide(
    claim: Claim,
    values: ArrayLike,
    *,
    threshold: float,
    direction: Direction = "above",
    unit: str = "seed",
    detail: str = "",
    confidence: float = 0.95,
) -> Verdict:
    """The verdict on a claim that a statistic lies above, or below, a threshold.

    Supported if the whole t interval over the units lies on the claimed side, contradicted if the whole of it
    lies on the other, else inconclusive. Equal values show no spread from which to make an interval (a
    statistic may be saturated, or a seed without effect), so there the two-sided sign test decides, at the
    same confidence.

    Args:
        claim: the claim.
        values: the statistic of each independent unit `(unit,)`.
        threshold: the value that separates the sides.
        direction: the side that the claim says.
        unit: what one value comes from, e.g. `"seed"`.
        detail: what else a reader must know.
        confidence: of the interval.

    Returns:
        The verdict; one unit is always inconclusive.
    """
    sign, units = _sign(direction), finite_units(values)
    mean, low, high = mean_interval(units, confidence)
    equal = units.size > 1 and np.ptp(units) == 0
    decisive = low > threshold or high < threshold
    notes = [detail] if detail else []
    if units.size == 1:
        notes.append(f"one {unit} shows no spread")
    elif equal:
        p = 2 * 0.5**units.size
        decisive = decisive and p <= 1 - confidence
        notes.append(f"all {units.size} values are equal, so the sign test decides (two-sided p = {p:.2g})")
    side = "supported" if sign * (mean - threshold) > 0 else "contradicted"
    verdict = side if decisive else "inconclusive"
    return Verdict(
        claim=claim,
        verdict=verdict,
        value=mean,
        low=low,
        high=high,
        n=units.size,
        unit=unit,
        rule=f"{100 * confidence:g} % Student t interval over {unit}s wholly {direction} {threshold:g}",
        detail="; ".join(notes),
        needed=None if decisive else _needed(units, mean - threshold, confidence),
    )


def _needed(units: np.ndarray, distance: float, confidence: float) -> int | None:
    """How many units would keep the interval off the threshold, if mean and spread stay as they are."""
    if units.size == 1 or distance == 0:
        return None
    if np.ptp(units) == 0:
        return math.ceil(math.log2(2 / (1 - confidence)))
    ratio = abs(distance) / float(units.std(ddof=1))

    def decides(n: int) -> bool:
        return t_quantile(confidence, n) < ratio * math.sqrt(n)

    if not decides(_MOST_UNITS):
        return None
    undecided, decided = units.size, _MOST_UNITS
    while decided - undecided > 1:
        middle = (undecided + decided) // 2
        undecided, decided = (undecided, middle) if decides(middle) else (middle, decided)
    return decided


def combine(claim: Claim, parts: Sequence[Verdict]) -> Verdict:
    """The verdict on a claim that says several things at once.

    Args:
        claim: the whole claim.
        parts: verdicts on its parts.

    Returns:
        Supported if all parts are, contradicted if any is, else inconclusive; the parts are in its `detail`.

    Raises:
        ValueError: if there are no parts.
    """
    if not parts:
        raise ValueError(f"claim {claim.id} has no parts to combine; give the verdicts that decide gave")
    given = {part.verdict for part in parts}
    verdict = next((word for word in ("contradicted", "inconclusive") if word in given), "supported")
    unsure = sum(part.verdict == "inconclusive" for part in parts)
    undecided = [part.needed for part in parts if part.needed is not None]
    return Verdict(
        claim=claim,
        verdict=verdict,
        value=math.nan,
        low=math.nan,
        high=math.nan,
        n=min(part.n for part in parts),
        unit=parts[0].unit,
        rule="supported if all parts are, contradicted if any is",
        detail="; ".join(f"{part.verdict}: {_ours(part)} ({part.rule}) {part.detail}".strip() for part in parts),
        needed=max(undecided) if verdict == "inconclusive" and len(undecided) == unsure else None,
    )


# --- text ------------------------------------------------------------------------------------------------


def verdicts_to_json(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as JSON text; infinities and not-a-number, which JSON lacks, are text in it.

    Args:
        verdicts: the verdicts.

    Returns:
        The text.
    """

    def record(verdict: Verdict) -> dict[str, Any]:
        fields = dataclasses.asdict(verdict)
        return {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in fields.items()
        }

    return json.dumps([record(verdict) for verdict in verdicts], indent=1, sort_keys=True, allow_nan=False)


def verdicts_from_json(text: str) -> list[Verdict]:
    """The verdicts that `verdicts_to_json` wrote.

    Args:
        text: the JSON text.

    Returns:
        The verdicts.
    """
    return [
        Verdict(**{
            **record,
            "claim": Claim(**record["claim"]),
            **{key: float(record[key]) for key in ("value", "low", "high")},
        })
        for record in json.loads(text)
    ]


def table(verdicts: Sequence[Verdict]) -> str:
    """A Markdown table of claims beside what was measured, and below it the evidence of others against them.

    Args:
        verdicts: the verdicts, one a row.

    Returns:
        The text.
    """
    rows = [("Claim", "Statement", "Published", "Ours [interval], n", "Verdict"), ("---",) * 5]
    for verdict in verdicts:
        claim = verdict.claim
        word = verdict.verdict if verdict.verdict == "inconclusive" else f"**{verdict.verdict}**"
        if verdict.needed:
            word += f" (about {verdict.needed} {verdict.unit}s would decide)"
        ours = verdict.detail if math.isnan(verdict.value) else _ours(verdict)
        rows.append((claim.id, claim.statement, claim.published, ours, word))
    lines = [f"| {' | '.join(_cell(text) for text in row)} |" for row in rows]
    against = {verdict.claim.id: verdict.claim.counter_evidence for verdict in verdicts}
    notes = [f"- {name}, evidence against it: {text}" for name, text in against.items() if text]
    return "\n".join(lines + ([""] if notes else []) + notes) + "\n"


def _ours(verdict: Verdict) -> str:
    plural = "" if verdict.n == 1 else "s"
    if math.isnan(verdict.value):
        return f"n = {verdict.n} {verdict.unit}{plural}"
    interval = f"[{verdict.low:.3g}, {verdict.high:.3g}]"
    return f"{verdict.value:.3g} {interval}, n = {verdict.n} {verdict.unit}{plural}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# --- the published claims --------------------------------------------------------------------------------

_PARK_KIM = "Park & Kim, How Do Vision Transformers Work?, ICLR 2022 (arXiv:2202.06709)"

CLAIMS: Mapping[str, Claim] = {
    claim.id: claim
    for claim in [
        Claim(
            id="E14",
            paper=_PARK_KIM,
            statement=(
                "Self-attention is a low-pass filter, MLPs and convolutions are high-pass filters, except"
                " in the first blocks"
            ),
            statistic=(
                "change of the relative log amplitude at the highest frequency from the unit before: "
                "share of attention units where it falls, share of MLP and convolution units where it "
                "rises, by sign test"
            ),
            published="ViT-Ti, ImageNet: falls in 9 of 12 attention units, rises in 8 of 12 MLP units",
            source="Fig. 8; the 25 points were read from the vector plot of the authors' poster",
            counter_evidence=(
                "By the published points themselves neither share passes a sign test (one-sided p = 0.07 "
                "and 0.19), and the two largest changes by attention are rises, in blocks 2 and 3. They "
                "are one trained model, and its last sample is 0.857 pi, not pi. Users found the "
                "convolutions that end a stage of ConvNeXt to be low-pass, so the convolutional half "
                "depends on the architecture."
            ),
        ),
        Claim(
            id="E16",
            paper=_PARK_KIM,
            statement=("Self-attention lowers the variance of feature maps, MLPs and convolutions raise it"),
            statistic=(
                "change of the variance over positions from the unit before: share of attention units "
                "where it falls, share of MLP and convolution units where it rises (subsampling left "
                "out), by sign test"
            ),
            published=(
                "CIFAR-100: ViT-Ti falls in 12 of 12 attention units, rises in 8 of 12 MLP units; "
                "ResNet-50 rises in 12 of 13 convolution units"
            ),
            source="Fig. 9; the points were read from the vector plot of the authors' poster",
            counter_evidence=(
                "In the published ViT the MLPs of blocks 8 to 11 lower the variance, and the end of "
                "Swin's third stage is an exception by the authors' own account. The variance is not "
                "normalised, so it also follows the growing scale of the residual stream; look at the "
                "normalised one beside it. One trained model each."
            ),
        ),
    ]
}
