"""Robustness by accuracy: the line, verdicts on datasets made by hand, the grid, what is corrupted, a smoke run."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

import vitprobe as vp
from studies import outcomes
from studies.park_kim import robustness
from studies.park_kim.families import LOOKS, SCALES, family
from studies.park_kim.families import grid as families_grid
from studies.park_kim.robustness import PATCHES, PUBLISHED, beyond_accuracy, line
from vitprobe.figures import save_figure
from vitprobe.models import create_model
from vitprobe.published import park_kim_2022
from vitprobe.results import load
from vitprobe.runs import Trained
from vitprobe.study import Settings

MODELS = SCALES["cpu"][0]


def stacked(gain: float, beyond: float, *, seeds: int = 3, accuracy: float = 60.0) -> xr.Dataset:
    """Robustness of 0.8 times the accuracy less 5; AlterNet gains accuracy on the ResNet, and has something on top."""
    rng = np.random.default_rng(0)
    rows = [(seed, model) for seed in range(seeds) for model in MODELS]
    own = {model: 3.0 * place for place, model in enumerate(MODELS)}
    own["alternet_micro"] = own["resnet_micro"] + gain
    level = rng.normal(0, 5, seeds)  # what a seed's networks have in common
    clean = np.array([accuracy + level[seed] + own[model] for seed, model in rows])
    top = np.array([beyond if model == "alternet_micro" else 0.0 for _, model in rows])
    robust = 0.8 * clean - 5 + top + rng.normal(0, 0.01, len(rows))
    return xr.Dataset(
        {name: ("run", values) for name, values in {"robustness": robust, "robustness_se": 0 * robust + 1}.items()}
        | {"error_se": ("run", 0 * robust + 1)},
        coords={
            "run": np.arange(len(rows)),
            "seed": ("run", [seed for seed, _ in rows]),
            "model": ("run", [model for _, model in rows]),
            "accuracy": ("run", clean),
            "parameters": ("run", [1000 + 100 * (model == "alternet_micro") for _, model in rows]),
        },
        attrs={"classes": 10, "data": "made", "corrupted_images": 20},
    )


def verdicts(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in robustness.verdicts(ds)}


def test_the_line_is_that_of_least_squares():
    rng = np.random.default_rng(0)
    accuracy, robust = rng.normal(size=(2, 7))
    assert line(accuracy, robust) == pytest.approx(tuple(np.polyfit(accuracy, robust, 1)))
    assert line(np.full(3, 70.0), np.array([1.0, 2.0, 6.0])) == (0.0, 3.0)


def test_beyond_accuracy_of_a_small_case():
    # Through (1, 2) and (3, 6): 2 x, so that 10 is 2 above at 4; with the judged one the line would be another.
    accuracy, robust = np.array([1.0, 4.0, 3.0]), np.array([2.0, 10.0, 6.0])
    assert beyond_accuracy(accuracy, robust, np.array([False, True, False])) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("gain", "beyond", "more_robust", "more_than_accuracy"),
    [
        (5.0, 2.0, "supported", "supported"),
        (5.0, -2.0, "supported", "contradicted"),  # robust because accurate
        (-5.0, 2.0, "contradicted", "supported"),
        (0.0, 0.0, "inconclusive", "inconclusive"),
    ],
)
def test_verdicts(gain, beyond, more_robust, more_than_accuracy):
    found = robustness.verdicts(stacked(gain, beyond))
    assert {v.claim.id: v.verdict for v in found} == {
        "E21 robustness": more_robust,
        "E21 beyond accuracy": more_than_accuracy,
    }
    assert found[0].value == pytest.approx(0.8 * gain + beyond, abs=0.05)
    assert found[1].value == pytest.approx(beyond, abs=0.05)
    assert f"AlterNet is {gain:+.2f} points more accurate" in found[0].detail
    assert "AlterNet 1,100, ResNet 1,000" in found[0].detail


def test_the_order_of_runs_does_not_count():
    ds = stacked(5.0, 2.0)
    first, again = robustness.verdicts(ds), robustness.verdicts(ds.isel(run=slice(None, None, -1)))
    assert [v.value for v in again] == pytest.approx([v.value for v in first])


def test_one_seed_and_networks_that_did_not_learn_are_no_evidence():
    assert set(verdicts(stacked(5.0, 2.0, seeds=1)).values()) == {"inconclusive"}
    # A family that did not learn has no say in the line, and none in the difference between two others.
    ds = stacked(5.0, 2.0)
    ds["accuracy"] = ds.accuracy.where(ds.model != "vit_micro", 20.0)
    assert verdicts(ds) == {"E21 robustness": "supported", "E21 beyond accuracy": "inconclusive"}
    ds["accuracy"] = ds.accuracy.where(ds.model != "alternet_micro", 20.0)
    assert set(verdicts(ds).values()) == {"inconclusive"}


def test_published_values():
    points = park_kim_2022()["acc_vs_robustness_cifar100c"]
    published = {v.claim.id: v.claim.published for v in robustness.verdicts(stacked(5.0, 2.0))}
    assert published["E21 robustness"] == "+1.69 percentage points"
    others = np.array([values for name, values in points.items() if not name.startswith("Alter")])
    predicted = np.polyval(np.polyfit(*others.T, 1), 84.03)
    assert published["E21 beyond accuracy"].startswith(f"{66.67 - predicted:+.2f} percentage points")
    names = {entry.partition(" (")[0] for entry in points}
    assert set(PUBLISHED) <= names == set(robustness.LABELS)
    assert set(PUBLISHED.values()) <= set(LOOKS)


@pytest.mark.parametrize("scale", ["smoke", "quick"])
def test_small_scales_have_images_that_can_be_corrupted(scale):
    runs = robustness.grid(Settings(scale=scale))
    assert {run.data.spec for run in runs} == {"synthetic:low"}
    assert [(run.model, run.recipe.seed) for run in runs] == [
        (run.model, run.recipe.seed) for run in families_grid(Settings(scale=scale, seeds=robustness.SEEDS.get(scale)))
    ]
    assert len({run.key() for run in runs}) == len(runs)


@pytest.mark.parametrize("kind", PATCHES)
def test_the_nano_networks_look_at_8_by_8_patches(kind):
    run = next(run for run in robustness.grid(Settings(scale="smoke", seeds=1)) if family(run.model) == kind)
    grids = []
    model = create_model(run.model, image_size=32, channels=3, num_classes=4, seed=0, **run.options)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d) and module.in_channels == 3:
            module.register_forward_hook(lambda module, inputs, output: grids.append(output.shape[-2:]))
    model.eval()(torch.zeros(1, 3, 32, 32))
    assert grids == [(8, 8)]


def test_images_that_cannot_be_corrupted_are_refused_before_any_training():
    with pytest.raises(ValueError, match=r"digits has images of \(8, 8\) px and 1 channel.*use --data cifar10"):
        robustness.grid(Settings(scale="quick", data="digits"))


class Constant(torch.nn.Module):
    """Whatever it sees, the first class."""

    def forward(self, x):
        return torch.eye(4)[0].expand(len(x), 4)


def test_what_is_corrupted_is_spread_over_the_classes():
    data = vp.load_data("synthetic:low", train_size=8, test_size=40)
    order = data.test.labels.argsort(stable=True)
    in_order = replace(data, test=replace(data.test, images=data.test.images[order], labels=data.test.labels[order]))
    result = Trained(run=None, model=Constant(), data=in_order, history=None, folder=None)
    found = outcomes.robustness(result, images=8, severities=(1,))
    # A quarter of the images is of the first class, whatever is done to them.
    assert found["robustness"][1] == 25.0
    assert found["robustness_se"][1] == pytest.approx(100 * (0.25 * 0.75 / 7) ** 0.5)
    assert np.isnan(outcomes.robustness(result, images=0, severities=(1,))["robustness"][1])


def test_the_lines_leave_alternet_out(tmp_path):
    ds = stacked(9.0, 4.0)
    figure = robustness.draw(ds)
    frame = ds.to_dataframe()
    others = frame[frame.model != "alternet_micro"].groupby("model")[["accuracy", "robustness"]].mean()
    published = [v for k, v in park_kim_2022()["acc_vs_robustness_cifar100c"].items() if not k.startswith("Alter")]
    for ax, points in zip(figure.axes, (others.values.T, np.transpose(published)), strict=True):
        (dashed,) = [one for one in ax.lines if one.get_linestyle() == "--"]
        robust, accuracy = dashed.get_data()
        np.testing.assert_allclose(robust, np.polyval(np.polyfit(*points, 1), accuracy))
        np.testing.assert_allclose(accuracy, ax.get_ylim())
    save_figure(figure, tmp_path / "robustness.png")


def test_smoke_run(smoke_run):
    wanted = ("resnet_nano", "alternet_nano", "vit_nano")
    few = replace(robustness.STUDY, grid=lambda asked: [run for run in robustness.grid(asked) if run.model in wanted])
    path = smoke_run(few, test_size=20)
    assert path.with_suffix(".png").stat().st_size > 20_000
    ds = load(path)
    assert set(ds.model.values.tolist()) == set(wanted)
    assert ((ds.robustness >= 0) & (ds.robustness <= 100)).all() and (ds.robustness_se >= 0).all()
    assert (ds.attrs["corrupted_images"], ds.attrs["severities"]) == (6, "(3,)")
