"""Verdicts against closed forms, simulation and the binomial distribution."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitprobe import claims
from vitprobe.claims import CLAIMS, Claim, Judged, Verdict, combine, decide
from vitprobe.intervals import bootstrap_interval, mean_interval

CLAIM = CLAIMS["E14"]


def test_no_torch():
    code = (
        "import sys, vitprobe.claims, vitprobe.intervals as i; i.mean_interval([1, 2]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- intervals -------------------------------------------------------------------------------------------


def test_t_interval_of_two_units_is_the_cauchy_quantile():
    # One degree of freedom: the t distribution is Cauchy, whose quantile is tan(pi (p - 1/2)).
    mean, low, high = mean_interval([1.0, 3.0], confidence=0.9)
    half_width = math.tan(math.pi * 0.45)  # times sd sqrt(2) over sqrt(2)
    assert (mean, low, high) == pytest.approx((2, 2 - half_width, 2 + half_width))


def test_t_interval_of_three_units():
    # Two degrees of freedom: quantile (2p - 1) / sqrt(2 p (1 - p)).
    quantile = 0.95 / math.sqrt(2 * 0.975 * 0.025)
    assert mean_interval([1, 2, 3]) == pytest.approx((
        2,
        2 - quantile / math.sqrt(3),
        2 + quantile / math.sqrt(3),
    ))


def test_t_interval_covers_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(1.0, 2.0, (2000, 4))
    covered = [low <= 1.0 <= high for _, low, high in map(mean_interval, draws)]
    assert np.mean(covered) == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 2000))


def test_one_unit_knows_no_spread():
    assert mean_interval([0.3]) == (0.3, -math.inf, math.inf)
    assert bootstrap_interval([0.3], np.mean, seed=0) == (0.3, -math.inf, math.inf)
    assert mean_interval([0.1] * 3) == (0.1, 0.1, 0.1)


def test_bootstrap_draws_whole_units():
    rng = np.random.default_rng(0)
    per_image = rng.normal(2.0, 1.0, (200, 1))
    repeated = np.broadcast_to(per_image, (200, 50))  # tokens of one image say nothing new
    value, low, high = bootstrap_interval(repeated, np.mean, seed=1, resamples=2000)
    _, t_low, t_high = mean_interval(per_image[:, 0])
    assert value == pytest.approx(per_image.mean())
    assert (low, high) == pytest.approx((t_low, t_high), abs=0.03)
    assert (value, low, high) == bootstrap_interval(repeated, np.mean, seed=1, resamples=2000)
    assert bootstrap_interval([2.0] * 4, np.mean, seed=0) == (2, 2, 2)


@pytest.mark.parametrize(("claimed", "n"), [(9, 12), (8, 12), (12, 12), (0, 5)])
def test_sign_test_is_the_binomial_tail(claimed, n):
    changes = [-0.5] * claimed + [0.25] * (n - claimed) + [0.0, 0.0]
    share, p = claims.sign_test(changes, "below")
    assert share == pytest.approx(claimed / n)
    assert p == pytest.approx(sum(math.comb(n, k) for k in range(claimed, n + 1)) / 2**n)
    assert claims.sign_test(np.negative(changes), "above") == (share, p)


def test_sign_test_without_signs():
    share, p = claims.sign_test([0.0, 0.0], "above")
    assert math.isnan(share)
    assert p == 1


# --- verdicts --------------------------------------------------------------------------------------------


def test_verdicts():
    values = [0.9, 1.0, 1.1]
    assert decide(CLAIM, values, threshold=0).verdict == "supported"
    assert decide(CLAIM, values, threshold=0, direction="below").verdict == "contradicted"
    assert decide(CLAIM, values, threshold=1.05).verdict == "inconclusive"
    assert decide(CLAIM, values, threshold=0).needed is None
    assert decide(CLAIM, values, threshold=1.0).needed is None
    verdict = decide(CLAIM, values, threshold=0.5, direction="below", unit="image", detail="MLP units")
    assert (verdict.n, verdict.unit, verdict.detail) == (3, "image", "MLP units")
    assert verdict.rule == "95 % Student t interval over images wholly below 0.5"


def test_needed_is_the_first_number_that_decides():
    values = np.array([-1.0, 0.5, 2.0])  # mean 0.5, deviation 1.5
    needed = decide(CLAIM, values, threshold=0).needed
    assert needed is not None

    def decided(n: int) -> bool:
        normal = np.linspace(-1, 1, n)
        again = 0.5 + 1.5 * normal / normal.std(ddof=1)  # as many units, with this mean and deviation
        return decide(CLAIM, again, threshold=0).verdict == "supported"

    assert decided(needed)
    assert not decided(needed - 1)


def test_one_unit_is_always_inconclusive():
    verdict = decide(CLAIM, [1e9], threshold=0)
    assert (verdict.verdict, verdict.needed, verdict.n) == ("inconclusive", None, 1)
    assert "one seed shows no spread" in verdict.detail


def test_equal_values_are_left_to_the_sign_test():
    # Six of six is the first two-sided sign test below 5 %.
    five, six = (decide(CLAIM, [1.0] * n, threshold=0.5) for n in (5, 6))
    assert (five.verdict, five.needed) == ("inconclusive", 6)
    assert (six.verdict, six.needed) == ("supported", None)
    assert "sign test" in six.detail
    assert decide(CLAIM, [1.0] * 6, threshold=0.5, direction="below").verdict == "contradicted"
    assert decide(CLAIM, [0.5] * 20, threshold=0.5).verdict == "inconclusive"


def test_bad_input():
    with pytest.raises(ValueError, match="one number per independent unit"):
        decide(CLAIM, [[1, 2]], threshold=0)
    with pytest.raises(ValueError, match="one number per independent unit"):
        decide(CLAIM, [], threshold=0)
    with pytest.raises(ValueError, match="not all finite"):
        decide(CLAIM, [1, math.nan], threshold=0)
    with pytest.raises(ValueError, match="'up'"):
        decide(CLAIM, [1, 2], threshold=0, direction="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"0\.95"):
        mean_interval([1, 2], confidence=95)
    with pytest.raises(ValueError, match="'maybe'"):
        Verdict(CLAIM, "maybe", 0, 0, 0, 1, "seed", "")


# Eighths, so that shifts and signs are exact and no interval end falls on the threshold by rounding alone.
EIGHTHS = st.integers(-80, 80).map(lambda k: k / 8)
ORDER = {"contradicted": 0, "inconclusive": 1, "supported": 2}


@given(st.lists(EIGHTHS, min_size=1, max_size=8), EIGHTHS)
def test_claim_and_numbers_mirrored_give_the_same_verdict(values, threshold):
    above = decide(CLAIM, values, threshold=threshold)
    below = decide(CLAIM, np.negative(values), threshold=-threshold, direction="below")
    assert (above.verdict, above.needed) == (below.verdict, below.needed)
    assert (above.value, above.low, above.high) == pytest.approx((-below.value, -below.high, -below.low))


@given(st.lists(EIGHTHS, min_size=1, max_size=8), EIGHTHS, st.integers(0, 40).map(lambda k: k / 8))
def test_moving_all_values_to_the_claimed_side_never_hurts(values, threshold, shift):
    before = decide(CLAIM, values, threshold=threshold).verdict
    after = decide(CLAIM, np.add(values, shift), threshold=threshold).verdict
    assert ORDER[after] >= ORDER[before]


@given(st.lists(EIGHTHS, min_size=1, max_size=8), EIGHTHS)
def test_the_opposite_claim_has_the_opposite_verdict(values, threshold):
    above, below = (decide(CLAIM, values, threshold=threshold, direction=d).verdict for d in ("above", "below"))
    assert ORDER[above] + ORDER[below] == 2


def test_combined_verdicts():
    yes = decide(CLAIM, [0.9, 1.0, 1.1], threshold=0, detail="attention units")
    no = decide(CLAIM, [0.9, 1.0, 1.1], threshold=2)
    open_ = decide(CLAIM, [-1.0, 0.5, 2.0], threshold=0)
    single = decide(CLAIM, [1.0], threshold=0)
    assert combine(CLAIM, [yes, yes]).verdict == "supported"
    assert combine(CLAIM, [yes, open_, no]).verdict == "contradicted"
    assert combine(CLAIM, [yes, open_]).needed == open_.needed
    both = combine(CLAIM, [yes, open_, single])
    assert (both.verdict, both.needed, both.n) == ("inconclusive", None, 1)
    named = replace(yes, claim=replace(CLAIM, id=f"{CLAIM.id} msa"))
    assert combine(CLAIM, [named]).detail == "msa: supported at 1 [0.752, 1.25], n = 3 seeds (attention units)"
    assert combine(CLAIM, [no]).detail.startswith(f"{CLAIM.statement}: contradicted at 1 [")
    nested = combine(replace(CLAIM, id=f"{CLAIM.id} all"), [named])
    assert combine(CLAIM, [nested]).detail.startswith("all: supported (")
    with pytest.raises(ValueError, match="no parts"):
        combine(CLAIM, [])


# --- text ------------------------------------------------------------------------------------------------


def test_json_round_trip():
    some = [decide(CLAIM, [1.0], threshold=0), decide(CLAIMS["E16"], [0.25, 0.5], threshold=0)]
    text = claims.verdicts_to_json(some)
    assert json.loads(text, parse_constant=pytest.fail)[0]["low"] == "-inf"
    assert claims.verdicts_from_json(text) == some
    (combined,) = claims.verdicts_from_json(claims.verdicts_to_json([combine(CLAIM, some)]))
    assert math.isnan(combined.value)
    assert combined.detail == combine(CLAIM, some).detail


def test_table():
    awkward = replace(CLAIM, statement="a | b\nc", counter_evidence="")
    verdicts = [
        decide(awkward, [0.25, 0.5, 1.0], threshold=0),
        decide(CLAIMS["E16"], [1.0, 1.5], threshold=1),
    ]
    head, rule, first, second, blank, note = claims.table(verdicts).splitlines()
    assert head.count("|") == rule.count("|") == second.count("|") == 7
    assert r"a \| b c" in first
    assert "0.583 [-0.365, 1.53], n = 3 seeds | above 0 |" in first
    assert "inconclusive (about" in first
    assert f"({CLAIMS['E16'].statistic})" in second
    assert blank == ""
    assert note == f"- E16, against it: {CLAIMS['E16'].counter_evidence}"


# --- the scorecard ---------------------------------------------------------------------------------------

REGISTRY = {
    name: Claim(name, paper, f"{name} holds", "a number", "above 0", "Fig. 1", against)
    for name, paper, against in [("A1", "One", ""), ("A2", "One", "others differ"), ("B1", "Two", "")]
}
HALVES = {**REGISTRY, "A1": replace(REGISTRY["A1"], parts=("left", "right"))}


def found(*names: str, scale: str = "cpu", data: str = "one/a_cpu.nc", figure: str = "one/a_cpu.png") -> Judged:
    claims_found = [replace(REGISTRY[name.partition(" ")[0]], id=name) for name in names]
    return Judged("A", scale, data, figure, [decide(claim, [0.5, 1.0, 1.5], threshold=0) for claim in claims_found])


def test_unmeasured_are_those_of_which_nothing_that_decides_is_judged():
    def left(*judged: Judged) -> list[str]:
        return [claim.id for claim in claims.unmeasured(judged, REGISTRY.values())]

    assert left() == ["A1", "A2", "B1"]
    assert left(found("A2"), found("B1")) == ["A1"]
    assert left(found("A2 beside"), found("B1 msa vit")) == ["A1", "A2", "B1"]
    # A claim of another paper with the same name is another claim.
    of_two = decide(replace(REGISTRY["A1"], paper="Two"), [1.0, 2.0], threshold=0)
    assert left(Judged("A", "cpu", "a.nc", "", [of_two])) == ["A1", "A2", "B1"]


def test_scorecard_is_grouped_by_paper():
    page = claims.scorecard([found("A1", "B1"), found("A1", data="one/b.nc", figure="")], REGISTRY)
    assert [line for line in page.splitlines() if line.startswith("#")] == [
        "# Verdicts on published claims",
        "## One",
        "### A (cpu scale, [one/a_cpu.nc](one/a_cpu.nc))",
        "### A (cpu scale, [one/b.nc](one/b.nc))",
        "### Not measured",
        "## Two",
        "### A (cpu scale, [one/a_cpu.nc](one/a_cpu.nc))",
    ]
    assert page.count("[Figure](one/a_cpu.png)") == 2 and page.count("[Figure]") == 2
    assert "| A2 | A2 holds | a number | above 0 | not measured |" in page.splitlines()
    assert "- A2, against it: others differ" in page.splitlines()
    said = Judged("A", "cpu", "a.nc", "", [decide(REGISTRY["A1"], [1.0, 1.1], threshold=0, detail="points | of ten")])
    assert "n = 2 seeds; points \\| of ten |" in claims.scorecard([said])
    ours, word = "1 [-0.242, 2.24], n = 3 seeds", "inconclusive (about 4 seeds would decide)"
    row = f"| A1 | A1 holds (a number) | above 0 | {ours} | above 0 | {word} |"
    assert page.splitlines().count(row) == 2


def test_summary_names_the_claims_by_their_verdicts():
    yes, no = (decide(REGISTRY["A1"], [0.9, 1.0, 1.1], threshold=threshold) for threshold in (0, 2))
    left, right, beside = (
        {word: replace(verdict, claim=replace(REGISTRY["A1"], id=f"A1 {name}")) for word, verdict in given.items()}
        for given in [{"yes": yes, "no": no}]
        for name in ("left", "right", "beside")
    )

    def row(*verdicts: Verdict, registry: Mapping[str, Claim] = REGISTRY) -> list[str]:
        text = claims.summary([Judged("A", "cpu", "a.nc", "", verdicts)], registry)
        head, _, one, two, *said = text.splitlines()
        for word, names in zip(("supported", "contradicted"), one.split("|")[2:4], strict=True):
            line = "; ".join(f"**{name}** {name} holds" for name in names.replace(",", " ").split())
            assert (f"- {word}: {line}" in said) == bool(line)
        assert head == "| Paper | supported | contradicted | inconclusive | not measured |"
        assert two == "| Two |  |  |  | B1 |"
        return [cell.strip() for cell in one.split("|")[1:-1]]

    assert row() == ["One", "", "", "", "A1, A2"]
    # What is judged beside a claim does not count, whatever is said of the claim.
    assert row(yes, beside["no"]) == ["One", "A1", "", "", "A2"]
    assert row(beside["no"]) == ["One", "", "", "", "A1, A2"]
    # Parts that decide count together, where the whole is not judged; one alone does not support it.
    assert row(left["yes"], right["yes"], beside["no"], registry=HALVES) == ["One", "A1", "", "", "A2"]
    assert row(left["yes"], right["no"], registry=HALVES) == ["One", "", "A1", "", "A2"]
    assert row(left["yes"], beside["yes"], registry=HALVES) == ["One", "", "", "A1", "A2"]
    assert row(left["no"], yes, registry=HALVES) == ["One", "A1", "", "", "A2"]
    # Two datasets that judge one claim: it is contradicted if one of them says so.
    assert row(yes, no, replace(yes, claim=REGISTRY["A2"])) == ["One", "A2", "A1", "", ""]


def test_scorecard_without_a_registry_has_only_what_is_judged():
    page = claims.scorecard([found("A1")])
    assert "## One" in page and "Two" not in page and "Not measured" not in page
    assert "##" not in claims.scorecard([])


def test_overview_is_in_the_order_of_the_claims():
    awkward = replace(decide(CLAIM, [1.0], threshold=0), claim=replace(CLAIM, id="Z9", statement="word " * 50))
    judged = [Judged("Z", "quick", "z_quick.nc", "", [awkward]), found("B1", "A1 part", "A1", scale="paper")]
    head, *rows = claims.overview(judged, REGISTRY, width=120).splitlines()
    assert [re.split(r"  +", row)[0] for row in rows] == ["A1 part", "A1", "A2", "B1", "Z9"]
    assert re.split(r"  +", head) == [
        "Claim", "Statement", "Published", "Ours [interval], n", "Scale", "Verdict", "Dataset",
    ]  # fmt: skip
    assert re.split(r"  +", rows[1]) == [
        "A1", "A1 holds", "above 0", "1 [-0.242, 2.24], n = 3 seeds", "paper", "inconclusive", "one/a_cpu.nc",
    ]  # fmt: skip
    assert re.split(r"  +", rows[2]) == ["A2", "A2 holds", "above 0", "not measured"]
    assert re.split(r"  +", rows[4])[1].endswith("word ...")
    # Columns begin where their heads do.
    assert {row.index("A1 holds") for row in rows[:2]} == {head.index("Statement")}
    assert all(row[head.index("Verdict") :].startswith(("inconclusive", "not measured")) for row in rows)
    assert claims.overview([], {}) == "  ".join(re.split(r"  +", head)) + "\n"


@pytest.mark.parametrize("width", [140, 171, 300])
def test_overview_keeps_to_the_width(width):
    judged = [Judged("A", "cpu", "park_kim/fourier_cpu.nc", "", [decide(CLAIM, [0.5, 1.0], threshold=0)])]
    assert max(map(len, claims.overview(judged, CLAIMS, width=width).splitlines())) <= width


# --- the published claims --------------------------------------------------------------------------------


def test_registry():
    papers = {"E": 24, "Z": 9, "D": 11, "L": 5}
    assert list(CLAIMS) == [f"{letter}{number}" for letter, count in papers.items() for number in range(1, count + 1)]
    assert (
        len({claim.paper for claim in CLAIMS.values()})
        == len({(key[0], claim.paper) for key, claim in CLAIMS.items()})
        == 4
    )
    assert {key: claim.id for key, claim in CLAIMS.items()} == {key: key for key in CLAIMS}
    for claim in CLAIMS.values():
        texts = [claim.statement, claim.statistic, claim.published, claim.source]
        assert all(texts) and len(set(texts)) == 4
        assert not any(text.endswith(".") for text in texts), claim.id  # a cell of a table
        assert claim.counter_evidence.endswith(".") or not claim.counter_evidence
    assert len({claim.statement for claim in CLAIMS.values()}) == len(CLAIMS)
    # The counter-evidence quotes the sign tests of the published counts.
    assert claims.sign_test([-1] * 9 + [1] * 3, "below")[1] == pytest.approx(0.07, abs=0.005)
    assert claims.sign_test([1] * 8 + [-1] * 4, "above")[1] == pytest.approx(0.19, abs=0.005)


@pytest.mark.parametrize("values", [[1, 2, math.nan], [[1, 2], [math.inf, 3]]])
def test_a_bootstrap_refuses_what_could_not_be_measured(values):
    with pytest.raises(ValueError, match="not all finite; leave out"):
        bootstrap_interval(values, np.mean, seed=0)


@pytest.mark.parametrize("confidence", [95, 0, 1])
def test_a_confidence_is_a_share_also_where_nothing_spreads(confidence):
    with pytest.raises(ValueError, match=r"95 % is 0\.95"):
        mean_interval([1, 1, 1], confidence=confidence)
    with pytest.raises(ValueError, match=r"95 % is 0\.95"):
        bootstrap_interval([1], np.mean, seed=0, confidence=confidence)
