"""Tables 5 and 6: verdicts on datasets made by hand, the grid, a smoke run against masks made by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.dascoli import ablations, masking
from studies.dascoli.masking import curve, few
from studies.dascoli.pair import convit
from studies.dascoli.pair import seeds as seeds_of
from studies.dascoli.published import TABLE_5
from vitprobe.results import load
from vitprobe.runs import trained
from vitprobe.study import Settings

PUBLISHED = ((72.2 - 38.3, 73.1 - 67.1), (10.8, 38.1, 71.8), (9.6, 20.0, 26.3))


def stacked(
    codes: tuple[float, float] = PUBLISHED[0],
    content: tuple[float, ...] = PUBLISHED[1],
    position: tuple[float, ...] = PUBLISHED[2],
    *,
    seeds: int = 3,
    accuracy: float = 73.0,
    epochs: int = 300,
) -> xr.Dataset:
    """What is lost on average [points]: without position codes by ViT and ConViT, by layers of the ConViT."""
    rows = [(seed, model) for seed in range(seeds) for model in (0, 1)]
    level = np.arange(seeds) - (seeds - 1) / 2

    def by_layer(lost, spread):
        none = np.full(len(lost) + 1, np.nan)
        more = spread * np.arange(1, len(lost) + 1)  # the last layer is plain attention
        values = [[*(-(np.array(lost) + more * level[seed])), np.nan] if model else none for seed, model in rows]
        return ("run", "layer"), np.array(values)

    return xr.Dataset(
        {
            "intact_accuracy": ("run", [accuracy] * len(rows)),
            "codes_change": ("run", [-(codes[model] + 0.2 * model * level[seed]) for seed, model in rows]),
            "content_change": by_layer(content, 0.3),
            "position_change": by_layer(position, 0.1),
            "position_share": by_layer((-0.7, -0.4, -0.1), 0.0),
        },
        coords={
            "run": np.arange(len(rows)),
            "seed": ("run", [seed for seed, _ in rows]),
            "model": ("run", [("vit_micro", "convit_micro")[model] for _, model in rows]),
            "accuracy": ("run", [accuracy] * len(rows)),
            "epochs": ("run", [epochs] * len(rows)),
        },
        attrs={"classes": 10, "data": "made"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in masking.verdicts(ds)}


def test_published_numbers_support_it():
    assert set(verdicts(stacked()).values()) == {"supported"}
    found = {verdict.claim.id: verdict for verdict in masking.verdicts(stacked())}
    assert found["D9"].value == pytest.approx(27.9)
    assert (found["D10 all"].value, found["D10 all"].claim.published) == (pytest.approx(45.5), "45.5 points")
    assert (found["D10 late"].value, found["D10 late"].claim.published) == (pytest.approx(44.3), "44.3 points")
    assert "0.70, 0.40, 0.10" in found["D10 all"].detail
    assert "ViT 73.0 to 39.1 %" in found["D9"].detail
    assert [with_codes - without for with_codes, without in TABLE_5.values()] == pytest.approx(PUBLISHED[0])


@pytest.mark.parametrize(
    ("content", "position", "expected"),
    [
        ((5, 10, 20), (5, 20, 40), ("contradicted", "contradicted", "contradicted")),
        ((40, 40, 50), (0, 5, 20), ("contradicted", "supported", "contradicted")),  # the first layers want it more
        ((0, 10, 20), (5, 10, 20), ("inconclusive", "inconclusive", "supported")),
    ],
)
def test_verdicts_on_layers(content, position, expected):
    found = verdicts(stacked(content=content, position=position))
    assert tuple(found[name] for name in ("D10", "D10 all", "D10 late")) == expected


def test_gates_that_had_no_time_to_move_are_no_evidence_against_content():
    early = verdicts(stacked(content=(5, 10, 20), position=(5, 20, 40), epochs=16))
    assert {early[name] for name in ("D10", "D10 all", "D10 late")} == {"inconclusive"}
    assert verdicts(stacked(epochs=16))["D10"] == "supported"


@pytest.mark.parametrize(
    ("codes", "verdict"), [((20, 5), "supported"), ((5, 20), "contradicted"), ((5, 5), "inconclusive")]
)
def test_verdicts_on_codes(codes, verdict):
    assert verdicts(stacked(codes))["D9"] == verdict


def test_one_seed_and_networks_that_did_not_learn_are_no_evidence():
    assert set(verdicts(stacked(seeds=1)).values()) == {"inconclusive"}
    assert set(verdicts(stacked(accuracy=34.9)).values()) == {"inconclusive"}


def test_first_third():
    assert [few(layers) for layers in (1, 3, 5, 10)] == [1, 1, 2, 3]
    assert curve(stacked().isel(run=[1, 3]), "content").shape == (2, 3)


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_nothing_is_trained_for_it(scale, monkeypatch):
    monkeypatch.setattr(ablations, "load", lambda spec: type("Images", (), {"train": range(500)}))
    others = [run for run in ablations.grid(Settings(scale=scale)) if run.recipe.snapshots]
    assert masking.STUDY.grid(Settings(scale=scale)) == sorted(
        others, key=lambda run: (run.recipe.seed, run.model != others[1].model)
    )


def test_smoke_run(smoke_run, tmp_path):
    path = smoke_run(masking.STUDY)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    gated = [[False] * 4, [True] * 3 + [False]]
    for name in ("content_change", "position_change", "position_change_se", "position_share"):
        assert np.isfinite(ds[name].values).tolist() == gated
    assert np.isfinite(ds.codes_change.values).all()
    # Without a size of the settings, `accuracy` is of all test images; what is masked is drawn beside its own.
    np.testing.assert_allclose(ds.intact_accuracy, ds.accuracy, atol=1e-4)
    # The oracle: gates that are all but 1, or 0, in the first two layers.
    settings = Settings(scale="smoke", train_size=50, test_size=30)
    result = trained(convit(seeds_of(settings)[0], settings), cache=tmp_path / "cache", device="cpu")
    images, labels = result.data.test.images, result.data.test.labels
    inputs = torch.cat([batch for batch, _ in result.data.loader("test")])
    assert len(images) == len(inputs)
    for mask, gate in (("content", 40.0), ("position", -40.0)):
        for block in result.model.local_blocks[:2]:
            torch.nn.init.constant_(block.attention.gate, gate)
        with torch.no_grad():
            accuracy = float((result.model(inputs).argmax(1) == labels).float().mean())
        lost = 100 * accuracy - float(ds.intact_accuracy[1])
        assert float(ds[f"{mask}_change"][1, 1]) == pytest.approx(lost, abs=1e-3)
