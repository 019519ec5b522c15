"""The study of eigenvalues at the end of warm-up: its grid, its verdicts on spectra made by hand, one small run."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.park_kim import warmup
from studies.park_kim.eigenvalues import measured_epochs
from studies.park_kim.families import grid as families_grid
from vitprobe.models import create_model
from vitprobe.runs import load
from vitprobe.study import Settings

# NEP, APE, and the accuracy in the end, as the paper says that they are.
CLAIMED = {
    warmup.VIT: (0.10, 60.0, 56.0),
    warmup.CLASS_TOKEN: (0.30, 60.0, 50.0),
    warmup.FEW_DATA: (0.30, 60.0, np.nan),
    warmup.FEW_DATA_LONG: (0.30, 60.0, np.nan),
    "patch 2": (0.20, 20.0, np.nan),
    "patch 8": (0.02, 180.0, np.nan),
    "kernel 3": (0.30, 60.0, np.nan),
    "kernel 5": (0.05, 60.0, np.nan),
    "heads 1": (0.20, 60 * 3**0.562, np.nan),
    "heads 12": (0.05, 60 * 4**-0.562, np.nan),
    "head width 16": (0.20, 90.0, np.nan),
    "head width 64": (0.05, 30.0, np.nan),
    warmup.LARGE: (0.10, 30.0, np.nan),
    warmup.OTHER: (0.10, 20.0, np.nan),
    warmup.RESNET: (0.0, 500.0, np.nan),
    warmup.RESNET_OTHER: (0.0, 200.0, np.nan),
}


def number(name: str, prefix: str, own: int) -> int:
    rest = name.removeprefix(f"{prefix} ")
    return int(rest) if rest.isdigit() else own


def stacked(said=CLAIMED, *, seeds=3, warmup_accuracy=35.0, young=15.0) -> xr.Dataset:
    """Networks with given NEP and APE, scattered a little between seeds."""
    rng = np.random.default_rng(0)
    names = [name for _ in range(seeds) for name in said]
    spread = np.exp(rng.normal(0, 0.02, (2, len(names))))
    nep, ape = (np.array([said[name][place] for name in names]) * spread[place] for place in (0, 1))
    signs = np.where(rng.random((len(names), 4, 5)) < nep[:, None, None], -1, 1)
    return xr.Dataset(
        {
            "eigenvalue": (
                ("run", "batch", "rank"),
                signs * ape[:, None, None] * np.exp(rng.normal(0, 0.3, signs.shape)),
            ),
            "nep": ("run", nep),
            "ape": ("run", ape),
        },
        coords={
            "variant": ("run", names),
            "seed": ("run", [seed for seed in range(seeds) for _ in said]),
            "accuracy": ("run", [said[name][2] for name in names] + rng.normal(0, 0.3, len(names))),
            "warmup_accuracy": ("run", [young if name == warmup.FEW_DATA else warmup_accuracy for name in names]),
            "strong": ("run", [int("other" in name) for name in names]),
            "patch_size": ("run", [number(name, "patch", 4) for name in names]),
            "heads": ("run", [number(name, "heads", 3) for name in names]),
            "head_width": ("run", [number(name, "head width", 32) for name in names]),
        },
        attrs={"classes": 10, "data": "cifar10"},
    )


def words(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in warmup.verdicts(ds)}


def test_verdicts_as_published():
    found = words(stacked())
    assert set(found.values()) == {"supported"}
    assert {"E4", "E7", "E8 eigenvalues", "E10", "E11", "E12", "E23"} <= set(found)


def test_verdicts_of_the_opposite():
    opposite = {name: (0.4 - nep, 1000 / ape, 106 - accuracy) for name, (nep, ape, accuracy) in CLAIMED.items()}
    found = words(stacked(opposite))
    assert set(found.values()) == {"contradicted"}


def test_a_loss_without_negative_eigenvalues_decides_nothing_about_their_share():
    convex = {name: (0.0, ape, accuracy) for name, (_, ape, accuracy) in CLAIMED.items()}
    found = words(stacked(convex))
    assert {found[name] for name in ("E4", "E7", "E8 eigenvalues", "E10", "E11")} == {"inconclusive"}
    assert {found[name] for name in ("E7 accuracy", "E10 APE", "E11 heads APE", "E12", "E23")} == {"supported"}


def test_the_exponent_of_the_heads_is_the_slope():
    exact = {verdict.claim.id: verdict for verdict in warmup.verdicts(stacked())}["E11 heads APE"]
    assert exact.value == pytest.approx(-0.562, abs=0.03)
    assert exact.claim.published == "-0.562"


def test_networks_that_had_not_begun_are_no_evidence():
    found = warmup.verdicts(stacked(warmup_accuracy=12.0, young=10.0))
    parts = {verdict.claim.id: verdict for verdict in found}
    assert parts["E12"].verdict == "inconclusive" and "had not begun to learn" in parts["E12"].detail
    assert parts["E7 accuracy"].verdict == "supported"  # which is of the end
    little = {verdict.claim.id: verdict.verdict for verdict in warmup.verdicts(stacked(young=10.0))}
    assert little["E4"] == "supported"  # its few steps are what the claim is about


def test_strong_augmentation_is_told_from_weak_by_the_runs():
    """At the paper's scale the shared networks are the strongly augmented ones."""
    ds = stacked()
    swapped = ds.assign_coords(strong=1 - ds.strong)
    assert words(swapped)["E23"] == "contradicted"


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grid(scale):
    data = {"quick": "digits", "smoke": "digits"}.get(scale, "synthetic:low")
    settings = Settings(scale=scale, data=data, train_size=200, test_size=100, seeds=2)
    named, sizes = warmup.named(settings), warmup.SIZES[scale]
    of_seed = [name for name, run in named if run.recipe.seed == 0]
    assert len(of_seed) == len(set(of_seed)) and [name for name, _ in named] == 2 * of_seed
    assert len({run.key() for run in warmup.grid(settings)}) == len(named)
    runs = dict(named[: len(of_seed)])
    network = runs[warmup.VIT]
    created = create_model(network.model, image_size=32, channels=3, num_classes=10, **network.options)
    assert created.num_prefix_tokens == 0
    assert created.head.in_features == sizes.dim and created.patches.grid == (32 // sizes.patch,) * 2
    attention = created.blocks[0].attention
    assert attention.heads == sizes.own_heads and attention.value.out_features == sizes.dim
    shared = {run.key() for run in families_grid(settings)}
    assert runs[warmup.RESNET].key() in shared
    assert (runs[warmup.VIT].key() in shared) == (scale in ("quick", "cpu"))
    augments = {runs[name].recipe.mixup > 0 for name in (warmup.VIT, warmup.OTHER)}
    assert augments == {True, False}
    few = runs[warmup.FEW_DATA_LONG]
    assert len(load(few.data).train) == 12
    first = measured_epochs(network)[0]
    assert measured_epochs(few)[0] == round(first / warmup.FRACTION) and first == max(1, network.recipe.warmup_epochs)


@pytest.mark.filterwarnings("ignore:.*not converged:UserWarning")  # smoke gives up early
def test_smoke_run_trains_no_further_than_it_measures(smoke_run):
    path = smoke_run(warmup.STUDY, train_size=300)
    ds = xr.load_dataset(path)
    assert set(ds.variant.values) == {name for name, _ in warmup.named(Settings(scale="smoke", seeds=1))}
    assert np.isfinite(ds.eigenvalue).all()
    long = ds.isel(run=int(np.flatnonzero(ds.variant.values == warmup.FEW_DATA_LONG)[0]))
    assert long.train_images == 18 and long.epoch == 17
    assert np.isfinite(ds.accuracy.values).sum() == 2  # of the two networks that are trained to their end
    assert path.with_suffix(".png").stat().st_size > 20_000
