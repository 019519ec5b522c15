"""Table 3: verdicts on datasets made by hand, the grid, a smoke run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.dascoli import ablations, sample_efficiency
from studies.dascoli.ablations import ORDER, ROWS, row_of, tau
from studies.dascoli.published import TABLE_3
from vitprobe.models import create_model
from vitprobe.results import load
from vitprobe.study import Settings


def stacked(accuracies: dict[str, float], *, seeds: int = 3, images: int = 100) -> xr.Dataset:
    """The accuracies of the rows, each seed with a level of its own."""
    rng = np.random.default_rng(0)
    rows = [(seed, letter) for seed in range(seeds) for letter in accuracies]
    level = rng.normal(0, 3, seeds)
    accuracy = np.array([accuracies[letter] + level[seed] + rng.normal(0, 0.05) for seed, letter in rows])
    return xr.Dataset(
        {"error": ("run", 100 - accuracy), "nll_clean": ("run", accuracy / 100)},
        coords={
            "run": np.arange(len(rows)),
            "seed": ("run", [seed for seed, _ in rows]),
            "row": ("run", [letter for _, letter in rows]),
            "train_images": ("run", [images] * len(rows)),
            "accuracy": ("run", accuracy),
        },
        attrs={"classes": 10, "data": "made"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in ablations.verdicts(ds)}


PUBLISHED = {letter: few for letter, (_, few) in TABLE_3.items()}


def test_published_accuracies_support_it():
    found = verdicts(stacked(PUBLISHED))
    assert found["D7"] == "supported"
    assert {found[f"D7 {pair}"] for pair in ("a-e", "f-e", "e-g", "d-e", "c-d", "b-d", "a-d")} == {"supported"}


@pytest.mark.parametrize(
    ("changed", "whole"),
    [
        ({"f": 45}, "contradicted"),
        ({"g": 49}, "contradicted"),
        ({"a": 40}, "contradicted"),
        ({"f": 47.8}, "inconclusive"),
        ({"b": 40, "c": 40, "d": 40}, "supported"),  # judged beside it
    ],
)
def test_verdicts(changed, whole):
    assert verdicts(stacked(PUBLISHED | changed))["D7"] == whole


def test_only_g_need_not_learn():
    assert verdicts(stacked(PUBLISHED | {"g": 20}))["D7 e-g"] == "supported"
    low = {letter: accuracy - 20 for letter, accuracy in PUBLISHED.items()}
    assert set(verdicts(stacked(low)).values()) == {"inconclusive"}
    assert set(verdicts(stacked(PUBLISHED, seeds=1)).values()) == {"inconclusive"}


def test_tau_by_hand():
    assert tau([7, 6, 5, 4, 3, 2, 1]) == pytest.approx(1)
    assert tau([1, 2, 3, 4, 5, 6, 7]) == pytest.approx(-1)
    assert tau([3, 2, 1, 4]) == pytest.approx(0)  # three pairs of six are in order
    assert tau([1, 1, 1]) == 0


def test_order_is_that_of_the_published_accuracies():
    assert "".join(sorted(PUBLISHED, key=PUBLISHED.get, reverse=True)) == ORDER
    (order,) = (v for v in ablations.verdicts(stacked(PUBLISHED)) if v.claim.id == "D7 order")
    assert (order.value, order.n) == (1.0, 3)
    by_full = [TABLE_3[letter][0] for letter in ORDER]  # c < d and f < e: two pairs of 21
    assert tau(by_full) == pytest.approx(1 - 2 * 2 / 21)


def test_full_data_is_judged_beside_few():
    full = stacked({letter: accuracy for letter, (accuracy, _) in TABLE_3.items()}, images=1000)
    ds = xr.concat([stacked(PUBLISHED), full], dim="run")
    found = verdicts(ds)
    assert (found["D7"], found["D7 f-e"], found["D7 f-e full"]) == ("supported", "supported", "contradicted")


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grid(scale, monkeypatch):
    few = stand_in(monkeypatch)
    runs = ablations.grid(Settings(scale=scale))
    tenth = scale in ("cpu", "paper")
    seeds = {run.recipe.seed for run in runs}
    assert len({run.model + repr((run.options, run.data, run.recipe)) for run in runs}) == len(runs)
    assert "".join(map(row_of, runs)) == "".join(ROWS) * len(seeds) * (1 + tenth)
    assert [run.data.train_size for run in runs[:7]] == [few if tenth else runs[0].data.train_size] * 7
    # At equal images seen; the scale's own data, of whatever size, stand for 500 images.
    assert len({run.recipe.epochs * (few if run.data.train_size == few else 500) for run in runs}) == 1
    size = {"image_size": 8, "channels": 1} if scale in ("smoke", "quick") else {"image_size": 32}
    for run in runs[: 7 if scale != "paper" else 0]:
        check_row(create_model(run.model, **size, seed=0, **run.options), ROWS[row_of(run)])


def stand_in(monkeypatch) -> int:
    """No data of the paper scale: 500 images in their place; gives a tenth of them."""
    images = type("Images", (), {"train": range(500)})
    monkeypatch.setattr(ablations, "load", lambda spec: images)
    return 50


def check_row(model, row):
    """Whether a network has the parts that Table 3 says."""
    gated = [module for module in model.modules() if getattr(module, "gate", None) is not None]
    trains, local, attends, there = row.parts
    assert bool(gated) == there
    for attention in gated:
        width = attention.value.weight.shape[0]
        assert attention.gate.requires_grad == trains
        assert attention.gate.tolist() == [1.0 if trains else 0.0] * attention.heads
        assert bool((attention.value.weight == np.eye(width)).all()) == local
        assert {p.requires_grad for name, p in attention.named_parameters() if name != "gate"} == {attends}


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu"])
def test_whole_and_vit_are_shared(scale, monkeypatch):
    stand_in(monkeypatch)
    theirs = sample_efficiency.grid(Settings(scale=scale))
    ours = [run for run in ablations.grid(Settings(scale=scale)) if row_of(run) in "ae"]
    assert all(run in theirs for run in ours)


def test_smoke_run(smoke_run):
    path = smoke_run(ablations.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert ds.row.values.tolist() == list(ROWS)
    assert len(set(ds.nll_clean.values.tolist())) == 7
