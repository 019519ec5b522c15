"""What a statistic says of a published statement: supported, contradicted or inconclusive.

The rule is declared before the numbers are seen, and the interval runs over independent units: seeds,
images or batches, never heads, tokens or eigenvalues of one model. No torch here.
"""

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from vitprobe.intervals import finite_units, mean_interval, t_quantile
from vitprobe.published import Claim, claims_dascoli, claims_li, claims_park_kim, claims_zheng

Direction = Literal["above", "below"]
CLAIMS: Mapping[str, Claim] = {
    **claims_park_kim.CLAIMS,
    **claims_zheng.CLAIMS,
    **claims_dascoli.CLAIMS,
    **claims_li.CLAIMS,
}
VERDICTS = ("supported", "contradicted", "inconclusive")
_MOST_UNITS = 100_000  # beyond this an estimate of the units needed says no more than "never"


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


@dataclasses.dataclass(frozen=True)
class Judged:
    """The verdicts that one dataset gave.

    Attributes:
        title: what its figure shows.
        scale: at which it was measured.
        data: the netCDF file, as a link.
        figure: its drawing, as a link; empty if there is none.
        verdicts: on published claims.
    """

    title: str
    scale: str
    data: str
    figure: str
    verdicts: Sequence[Verdict]


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
        rule=f"{_whole_interval(unit, confidence)}{direction} {threshold:g}",
        detail="; ".join(notes),
        needed=None if decisive else _needed(units, mean - threshold, confidence),
    )


def _whole_interval(unit: str, confidence: float = 0.95) -> str:
    """How the rule of `decide` begins; what follows is the side and the threshold."""
    return f"{100 * confidence:g} % Student t interval over {unit}s wholly "


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
        detail="; ".join(_of_whole(part, claim) for part in parts),
        needed=max(undecided) if verdict == "inconclusive" and len(undecided) == unsure else None,
    )


def _of_whole(part: Verdict, whole: Claim) -> str:
    """A part in a phrase; the whole has said which claim it is of, and the part's own record has its rule."""
    name = part.claim.id.removeprefix(whole.id).strip() or part.claim.statement
    numbers = "" if math.isnan(part.value) else f" at {_ours(part)}"
    return f"{name}: {part.verdict}{numbers}" + (f" ({part.detail})" if part.detail else "")


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
            "claim": Claim(**record["claim"] | {"parts": tuple(record["claim"].get("parts", ()))}),
            **{key: float(record[key]) for key in ("value", "low", "high")},
        })
        for record in json.loads(text)
    ]


def table(verdicts: Sequence[Verdict]) -> str:
    """A Markdown table of claims beside what was measured and said of it, and below it what speaks against them.

    Args:
        verdicts: the verdicts, one a row.

    Returns:
        The text.
    """
    rows = [("Claim", "Statement", "Published", "Ours [interval], n", "Supported if", "Verdict")]
    for verdict in verdicts:
        claim = verdict.claim
        asked = verdict.rule.removeprefix(_whole_interval(verdict.unit)).removeprefix("supported if ")
        word = verdict.verdict if verdict.verdict == "inconclusive" else f"**{verdict.verdict}**"
        if verdict.needed:
            word += f" (about {verdict.needed} {verdict.unit}s would decide)"
        numbers = "" if math.isnan(verdict.value) else _ours(verdict)
        ours = "; ".join(filter(None, [numbers, verdict.detail]))
        # The statistic of a claim is that of the whole; its parts say theirs in the statement.
        whole = numbers and " " not in claim.id and claim.statistic
        statement = f"{claim.statement} ({claim.statistic})" if whole else claim.statement
        rows.append((claim.id, statement, claim.published, ours, asked, word))
    return _table(rows, [verdict.claim for verdict in verdicts])


HOW_TO_READ = """# Verdicts on published claims

Generated from the datasets named here; a verdict holds at the scale and for the networks of its dataset. Where a side
and a threshold stand under "supported if", the whole 95 % t interval has to lie on that side; if all of it lies on the
other, the claim is contradicted, else it is inconclusive. Such an interval may reach beyond the values that a statistic
can have. Without evidence a verdict is inconclusive too, wherever the interval lies: because a network did not learn
its task, or was trained too briefly for a claim about the end of training; the row says so.

A row that is named as a claim is (E14) judges it. One with more words (E14 msa vit_micro) is a part of it, or was
judged beside it and decides nothing; the claim's own row names the parts that decided. A claim with parts is
contradicted if one of those that decide is.

The cpu scale is small networks (60,000 to 800,000 parameters), a part of CIFAR-10 (5,000 or 10,000 images unless said),
and 5 to 8 epochs, more on fewer images: evidence about such networks, at the beginning of their training. The paper
scale is the papers' own. Points are percentage points of test accuracy, nats those of the cross entropy. NEP is the
share of negative ones among a batch's five Hessian eigenvalues of largest magnitude, APE the mean of the positive ones.
"""


def scorecard(judged: Sequence[Judged], registry: Mapping[str, Claim] | None = None) -> str:
    """A Markdown page of verdicts by paper and dataset.

    Args:
        judged: the verdicts of each dataset.
        registry: claims by their ids; those that nothing has judged are listed as not measured.

    Returns:
        The text.
    """
    known = (registry or {}).values()
    missing = unmeasured(judged, known)
    verdicts = [verdict for one in judged for verdict in one.verdicts]
    parts = [HOW_TO_READ]
    if registry:
        parts.append(summary(judged, registry))
    for paper in dict.fromkeys(claim.paper for claim in [*known, *(verdict.claim for verdict in verdicts)]):
        parts.append(f"## {paper}\n")
        for one in judged:
            if of_paper := [verdict for verdict in one.verdicts if verdict.claim.paper == paper]:
                parts.append(f"### {one.title} ({one.scale} scale, [{one.data}]({one.data}))\n")
                parts += [f"[Figure]({one.figure})\n"] if one.figure else []
                parts.append(table(of_paper))
        if left := [claim for claim in missing if claim.paper == paper]:
            rows = [("Claim", "Statement", "Statistic", "Published", "Verdict")]
            rows += [(claim.id, claim.statement, claim.statistic, claim.published, "not measured") for claim in left]
            parts += ["### Not measured\n", _table(rows, left)]
    return "\n".join(parts)


def summary(judged: Sequence[Judged], registry: Mapping[str, Claim]) -> str:
    """A Markdown table that names the claims of each paper by their verdicts, and what those that are decided say.

    A claim that several datasets judge, or that is judged by its `parts`, counts as `combine` would have it; it is not
    supported while one of its parts is not measured. What is judged beside a claim does not count.

    Args:
        judged: the verdicts of each dataset.
        registry: claims by their ids.

    Returns:
        The text.
    """
    words: dict[str, dict[str, list[str]]] = {}
    for claim in registry.values():
        deciding = _deciding(judged, claim)
        word = combine(claim, deciding).verdict if deciding else "not measured"
        names = {v.claim.id for v in deciding}
        if word == "supported" and claim.id not in names and len(names) < len(claim.parts):
            word = "inconclusive"
        words.setdefault(claim.paper, {}).setdefault(word, []).append(claim.id)
    columns = [*VERDICTS, "not measured"]
    rows = [("Paper", *columns)]
    for paper, found in words.items():
        rows.append((paper, *(", ".join(found.get(column, ())) for column in columns)))
    decided = [
        f"- {word}: " + "; ".join(f"**{claim}** {registry[claim].statement}" for claim in ids)
        for word in ("supported", "contradicted")
        if (ids := [claim for found in words.values() for claim in found.get(word, ())])
    ]
    return "\n".join([_table(rows, []), *(f"{line}\n" for line in decided)])


def overview(judged: Sequence[Judged], registry: Mapping[str, Claim], *, width: int = 200) -> str:
    """A table of verdicts for a terminal, a line each, in the order of the claims.

    Args:
        judged: the verdicts of each dataset.
        registry: claims by their ids; those that nothing has judged are listed as not measured.
        width: characters of a line; statements and published values are cut to what the other columns leave of it.

    Returns:
        The text.
    """
    measured = [
        (verdict.claim, (_ours(verdict), one.scale, verdict.verdict, one.data))
        for one in judged
        for verdict in one.verdicts
    ]
    missing = [(claim, ("", "", "not measured", "")) for claim in unmeasured(judged, registry.values())]
    order = {_whole(claim): place for place, claim in enumerate(registry.values())}
    found = sorted(measured + missing, key=lambda row: order.get(_whole(row[0]), len(order)))
    rows = [("Claim", "Statement", "Published", "Ours [interval], n", "Scale", "Verdict", "Dataset")]
    rows += [(claim.id, claim.statement, claim.published, *rest) for claim, rest in found]
    name, _, _, *others = _widths(rows)
    room = max(24, (width - name - sum(others) - 2 * len(others)) // 2 - 2)
    rows = [(row[0], _short(row[1], room), _short(row[2], room), *row[3:]) for row in rows]
    widths = _widths(rows)
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def unmeasured(judged: Iterable[Judged], known: Iterable[Claim]) -> list[Claim]:
    """The claims on which there is no verdict, nor on one of their parts that decide.

    Args:
        judged: the verdicts of each dataset.
        known: claims.

    Returns:
        Those of the known.
    """
    judged = list(judged)
    return [claim for claim in known if not _deciding(judged, claim)]


def _deciding(judged: Iterable[Judged], claim: Claim) -> list[Verdict]:
    """The verdicts on a claim, or where there are none on the whole, on its parts that decide together."""
    of_paper = [v for one in judged for v in one.verdicts if v.claim.paper == claim.paper]
    parts = {f"{claim.id} {name}" for name in claim.parts}
    whole = [v for v in of_paper if v.claim.id == claim.id]
    return whole or [v for v in of_paper if v.claim.id in parts]


def _whole(claim: Claim) -> tuple[str, str]:
    """What a claim, or a part of it such as "E14 msa vit_micro", belongs to."""
    return claim.paper, claim.id.partition(" ")[0]


def _table(rows: Sequence[Sequence[str]], claims: Iterable[Claim]) -> str:
    """A Markdown table whose first row is its head, and what speaks against the claims."""
    lines = [f"| {' | '.join(_cell(text) for text in row)} |" for row in rows]
    lines.insert(1, f"| {' | '.join('---' for _ in rows[0])} |")
    against: dict[str, str] = {}
    for claim in claims:
        against.setdefault(claim.counter_evidence, claim.id)  # once, where parts share it
    notes = [f"- {name}, against it: {text}" for text, name in against.items() if text]
    return "\n".join(lines + ([""] if notes else []) + notes) + "\n"


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _short(text: str, width: int) -> str:
    return textwrap.shorten(text, width, placeholder=" ...", break_on_hyphens=False)


def _ours(verdict: Verdict) -> str:
    plural = "" if verdict.n == 1 else "s"
    if math.isnan(verdict.value):
        return f"n = {verdict.n} {verdict.unit}{plural}"
    interval = f"[{verdict.low:.3g}, {verdict.high:.3g}]"
    # What is left of numbers that cancel is no number.
    value = 0.0 if abs(verdict.value) < 1e-9 * (verdict.high - verdict.low) < math.inf else verdict.value
    return f"{value:.3g} {interval}, n = {verdict.n} {verdict.unit}{plural}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
