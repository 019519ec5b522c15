"""Nonlocality and gates over training: closed forms, verdicts on datasets made by hand, the grid, a smoke run."""

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.dascoli import locality
from studies.dascoli.pair import snapshots
from vitprobe.models import create_model
from vitprobe.probes.nonlocality import uniform_nonlocality
from vitprobe.results import load
from vitprobe.study import Settings
from vitprobe.training import Recipe, learning_rate
from vitprobe.training.optimizer import make_optimizer

EPOCHS, MANY = (0, 1, 4, 16), (0, 1, 100, 300)  # of the latter what did not come is evidence
LAYERS, GATED, HEADS = 6, 5, 4


def stacked(
    *,
    vit: np.ndarray | None = None,
    convit: np.ndarray | None = None,
    gates: np.ndarray | None = None,
    seeds: int = 3,
    accuracy: float = 60.0,
    epochs: tuple[int, ...] = EPOCHS,
) -> xr.Dataset:
    """A ViT and a ConViT whose nonlocality `(epoch, layer)` and gates `(epoch, gated layer)` seeds change a little.

    Unless given, the ViT falls in all layers and its upper ones return, the ConViT escapes and stays below, and the
    gates fall, the deeper the further.
    """
    start = np.full(LAYERS, 4.1)
    if vit is None:
        vit = np.array([start, 0.7 * start, 0.6 * start, start * np.linspace(0.5, 0.95, LAYERS)])
    if convit is None:
        convit = 1.8 + np.outer([0, 0.1, 0.2, 0.4], np.ones(LAYERS))
    if gates is None:
        gates = 0.731 - np.outer([0, 0.05, 0.1, 0.2], np.linspace(1, 2, GATED))
    rng = np.random.default_rng(0)
    rows = [(seed, model) for seed in range(seeds) for model in ("vit_micro", "convit_micro")]
    shape = (len(epochs), LAYERS, HEADS)
    far, gate = np.empty((len(rows), *shape)), np.full((len(rows), *shape), np.nan)
    for row, (_, model) in enumerate(rows):
        curve = vit if model == "vit_micro" else convit
        far[row] = curve[..., None] + rng.normal(0, 0.004, shape)
        if model == "convit_micro":
            gate[row, :, :GATED] = gates[..., None] + rng.normal(0, 0.001, (len(epochs), GATED, HEADS))
    decay = np.where([model == "convit_micro" for _, model in rows], 0.73, np.nan)
    names = np.array([[f"blocks.{layer}" for layer in range(LAYERS)]] * len(rows))
    return xr.Dataset(
        {
            "nonlocality": (("run", "epoch", "layer", "head"), far),
            "layer_nonlocality": (("run", "epoch", "layer"), far.mean(-1)),
            "gate": (("run", "epoch", "layer", "head"), gate),
            "gate_by_decay": (("run", "epoch"), np.repeat(decay[:, None], len(epochs), 1)),
            "nonlocality_by_decay": (("run", "epoch"), np.repeat(0 * decay[:, None], len(epochs), 1)),
            "uniform_nonlocality": (("run", "epoch", "layer"), np.full(far.shape[:-1], 4.14)),
            "initial_nonlocality": (("run", "epoch", "layer"), far.mean(-1)[:, :1].repeat(len(epochs), 1)),
        },
        {
            "run": range(len(rows)),
            "epoch": list(epochs),
            "model": ("run", [model for _, model in rows]),
            "seed": ("run", [seed for seed, _ in rows]),
            "accuracy": ("run", [accuracy] * len(rows)),
            "layer_name": (("run", "layer"), names),
        },
        {"classes": 10, "data": "made", "patches": "8 x 8"},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in locality.verdicts(ds)}


# --- closed forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "heads", "expected"), [(14, 9, 2.88), (8, 4, 1.80), (8, 9, 1.98), (8, 16, 2.18), (16, 9, 3.17)]
)
def test_nonlocality_before_training_as_noted(side, heads, expected):
    assert locality.initial_nonlocality((side, side), heads) == pytest.approx(expected, abs=0.005)


def test_nonlocality_before_training_at_its_ends():
    """A share of 0 or no locality is uniform attention; sharp heads look one step aside, or nowhere at the border."""
    uniform = uniform_nonlocality((5, 6))
    assert locality.initial_nonlocality((5, 6), 9, gate=-50) == pytest.approx(uniform)
    assert locality.initial_nonlocality((5, 6), 9, strength=0) == pytest.approx(uniform)
    assert locality.initial_nonlocality((5, 6), 1, strength=50, gate=50) == pytest.approx(0, abs=1e-12)
    # Two heads beyond the square of one are uniform.
    assert locality.initial_nonlocality((5, 6), 3, strength=50, gate=50) == pytest.approx(2 / 3 * uniform)
    # Sharp heads look at the patch nearest to their place.
    offsets = itertools.product((-1, 0, 1), repeat=2)
    steps = [
        math.hypot(min(max(y + dy, 0), 4) - y, min(max(x + dx, 0), 5) - x)
        for dy, dx in offsets
        for y, x in itertools.product(range(5), range(6))
    ]
    assert locality.initial_nonlocality((5, 6), 9, strength=50, gate=50) == pytest.approx(np.mean(steps))


def test_decay_of_matrices_flattens_the_gaussians_and_leaves_the_gates():
    """A step without a gradient, by the optimiser itself."""
    recipe = Recipe(epochs=2, batch_size=10, weight_decay=0.5, lr=0.1, warmup_epochs=0, snapshots=(0, 2))
    for decay in ("all", "matrices"):
        ours = replace(recipe, decay=decay)
        model = create_model("convit_nano", image_size=8, channels=1, seed=0)
        result = SimpleNamespace(
            model=model, at=lambda epoch, model=model: model, data=SimpleNamespace(train=range(40))
        )
        share, reach = locality.decayed(result, ours)
        optimizer = make_optimizer(model, ours)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for step in range(8):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(ours, step, 4)
            optimizer.step()
        attention = next(one for one in model.modules() if getattr(one, "gate", None) is not None)
        gate, strength = attention.gate[0].item(), -attention.position.vector[0, 0].item()
        assert strength < 0.8 and (gate < 0.8) == (decay == "all")
        assert share[-1] == pytest.approx(1 / (1 + math.exp(-gate)), rel=1e-5)
        assert reach[-1] == pytest.approx(locality.initial_nonlocality((4, 4), 4, strength=strength, gate=gate))
        assert reach[-1] > reach[0]


# --- verdicts ---------------------------------------------------------------------------------------


def test_all_as_claimed():
    found = verdicts(stacked())
    assert set(found.values()) == {"supported"}
    assert list(found) == [
        "D3", "D3 fall", "D3 return", "D3 order", "D4", "D4 escape", "D4 below ViT", "D5", "D5 training", "D5 depth",
    ]  # fmt: skip


START = np.full(LAYERS, 4.1)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        # One layer never falls.
        (
            [START, np.array([2, 2, 2, 2, 2, 4.2]), np.array([2, 2, 2, 2, 2, 4.2]), np.array([2, 2, 2, 3, 3, 4.2])],
            {"D3": "contradicted", "D3 fall": "contradicted", "D3 return": "supported", "D3 order": "supported"},
        ),
        # It falls to the end, and the last layer is the most local.
        (
            [START, 0.8 * START, 0.7 * START, START * np.linspace(0.6, 0.5, LAYERS)],
            {"D3": "contradicted", "D3 fall": "supported", "D3 return": "inconclusive", "D3 order": "contradicted"},
        ),
    ],
)
def test_verdicts_on_the_vit(curve, expected):
    found = verdicts(stacked(vit=np.array(curve), epochs=MANY))
    assert {name: found[name] for name in expected} == expected
    found = verdicts(stacked(vit=np.array(curve)))  # too early to say
    short = {name: word if word == "supported" else "inconclusive" for name, word in expected.items()}
    assert {name: found[name] for name in expected} == short


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([-0.5, 0.3, 0.3, 0.3, 0.3], "supported"),  # four of five
        ([-0.5, -0.5, 0.3, 0.3, 0.3], "contradicted"),
    ],
)
def test_four_of_five_layers_must_escape(changes, expected):
    curve = 1.8 + np.outer([0, 0.3, 0.6, 1], [*changes, 0.0])
    assert verdicts(stacked(convit=curve, epochs=MANY))["D4 escape"] == expected
    assert verdicts(stacked(convit=curve))["D4 escape"] == ("supported" if expected == "supported" else "inconclusive")


def test_gated_layers_that_end_above_the_vit_contradict():
    found = verdicts(stacked(convit=1.8 + np.outer([0, 1, 2, 2.3], np.ones(LAYERS))))
    assert (found["D4"], found["D4 escape"], found["D4 below ViT"]) == ("contradicted", "supported", "contradicted")


@pytest.mark.parametrize(
    ("last", "training", "depth"),
    [
        (np.linspace(0.6, 0.5, GATED), "supported", "supported"),
        (np.linspace(0.5, 0.6, GATED), "supported", "contradicted"),
        (np.linspace(0.9, 0.8, GATED), "contradicted", "supported"),
    ],
)
def test_verdicts_on_gates(last, training, depth):
    gates = 0.73 + np.outer([0, 0.1, 0.5, 1], last - 0.73)
    found = verdicts(stacked(gates=gates, epochs=MANY))
    assert (found["D5 training"], found["D5 depth"]) == (training, depth)


def test_what_weight_decay_does_is_not_training():
    """Gates that follow decay exactly show neither a fall nor a rise."""
    ds = stacked(gates=np.outer([0.731, 0.72, 0.70, 0.65], np.ones(GATED)))
    ds["gate_by_decay"][:] = np.array([0.731, 0.72, 0.70, 0.65])
    assert verdicts(ds)["D5 training"] == "inconclusive"


def test_an_escape_that_weight_decay_makes_is_none():
    """Attention that follows decay exactly shows neither an escape nor its contrary."""
    drift = np.array([1.80, 1.81, 1.82, 1.83])
    ds = stacked(convit=np.outer(drift, np.ones(LAYERS)))
    assert verdicts(ds)["D4 escape"] == "supported"
    ds["nonlocality_by_decay"][:] = drift
    assert verdicts(ds)["D4 escape"] == "inconclusive"


def test_no_evidence_from_one_seed_or_without_learning():
    assert set(verdicts(stacked(seeds=1)).values()) == {"inconclusive"}
    assert set(verdicts(stacked(accuracy=30)).values()) == {"inconclusive"}


def test_regained_share():
    upper = np.array([[4.0, 2.0, 3.0], [4.0, 3.0, 2.0], [4.0, 5.0, 6.0]])
    values = np.stack([np.zeros_like(upper), upper], axis=-1)
    np.testing.assert_allclose(locality.regained(values), [0.5, 0, 0])


# --- the study --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grid(scale):
    runs = locality.STUDY.grid(Settings(scale=scale))
    assert len(runs) == len({run.label for run in runs}) == 2 * len({run.recipe.seed for run in runs})
    assert {run.model.partition("_")[0] for run in runs} == {"vit", "convit"}
    assert {run.recipe.snapshots for run in runs} == {tuple(sorted(set(snapshots(runs[0].recipe.epochs))))}
    if scale == "paper":
        return  # building them takes long
    size, channels = (32, 3) if scale == "cpu" else (8, 1)
    models = [create_model(run.model, image_size=size, channels=channels, seed=0, **run.options) for run in runs[:2]]
    assert locality.layout(models[0]) == locality.layout(models[1])


def test_smoke_run(smoke_run):
    """Before training the measured nonlocality is that of the closed form, as far as content is uniform."""
    path = smoke_run(locality.STUDY)
    assert path.with_suffix(".png").stat().st_size > 40_000
    ds = load(path)
    assert ds.epoch.values.tolist() == [0, 1]
    start = ds.isel(epoch=0)
    np.testing.assert_allclose(start.layer_nonlocality, start.initial_nonlocality, rtol=0.03)
    np.testing.assert_allclose(start.gate.isel(run=1, layer=slice(3)), 1 / (1 + math.exp(-1)), atol=1e-5)
    assert start.gate.isel(run=0).isnull().all() and start.gate.isel(run=1, layer=3).isnull().all()
    before, after = ds.gate_by_decay.values[1]
    assert before == pytest.approx(0.7311, abs=1e-4) and 0.73 < after < before
    # Decay flattens and opens gated attention, from where the closed form has it.
    before, after = ds.nonlocality_by_decay.values[1]
    assert before == pytest.approx(start.initial_nonlocality.values[1, 0]) and before < after < before + 0.01
