"""The study of Hessian spectra: its grid, its verdicts on spectra made by hand, and one small run of it."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.park_kim import spectra
from studies.park_kim.eigenvalues import doublings
from vitprobe.figures import save_figure
from vitprobe.models import create_model, list_models
from vitprobe.study import Settings

EPOCHS = (1, 3)
CLAIMED = {  # NEP and APE
    "ResNet": (0.0, 500.0), "ViT": (0.2, 50.0), "AlterNet": (0.02, 300.0), "PiT": (0.05, 50.0), "Swin": (0.2, 10.0),
}  # fmt: skip
OPPOSITE = {
    "ResNet": (0.2, 50.0), "ViT": (0.0, 500.0), "AlterNet": (0.4, 300.0), "PiT": (0.1, 500.0), "Swin": (0.0, 2000.0),
}  # fmt: skip
EQUAL = {
    "ResNet": (0.1, 50.0), "ViT": (0.1, 50.0), "AlterNet": (0.05, 50.0), "PiT": (0.1, 50.0), "Swin": (0.1, 50.0),
}  # fmt: skip


def stacked(families=CLAIMED, *, seeds: int = 3, accuracy: float = 60.0, late=None) -> xr.Dataset:
    """Networks with given NEP and APE (scattered a little between seeds) at both epochs; `late` is APE at the last."""
    rng = np.random.default_rng(0)
    names = [name for _ in range(seeds) for name in families]
    spread = np.exp(rng.normal(0, 0.05, (len(names), len(EPOCHS))))
    nep = np.array([[families[name][0]] * len(EPOCHS) for name in names]) * spread
    ape = np.array([[families[name][1]] * len(EPOCHS) for name in names]) * spread
    if late:
        ape[:, -1] = [late[name] * factor for name, factor in zip(names, spread[:, -1], strict=True)]
    signs = np.where(rng.random((len(names), len(EPOCHS), 4, 5)) < nep[..., None, None], -1, 1)
    eigenvalue = signs * ape[..., None, None] * np.exp(rng.normal(0, 0.3, signs.shape))
    small = {f"{name}_{end}": (("run", "epoch"), value * factor) for name, value in (("nep", nep), ("ape", ape))
             for end, factor in (("low", 0.9), ("high", 1.1))}  # fmt: skip
    return xr.Dataset(
        {
            "eigenvalue": (("run", "epoch", "batch", "rank"), eigenvalue),
            "nep": (("run", "epoch"), nep),
            "ape": (("run", "epoch"), ape),
            **small,
        },
        coords={
            "epoch": list(EPOCHS),
            "family": ("run", names),
            "seed": ("run", [seed for seed in range(seeds) for _ in families]),
            "accuracy": ("run", [accuracy] * len(names)),
        },
        attrs={"classes": 10, "batch_size": 16, "weight_decay": 0.05, "augment": "crop", "seed": 0},
    )


def words(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in spectra.verdicts(ds)}


def test_verdicts():
    assert set(words(stacked()).values()) == {"supported"}
    assert set(words(stacked(OPPOSITE)).values()) == {"contradicted"}
    found = words(stacked(EQUAL))
    assert (found["E3"], found["E5"], found["E13"], found["E21 curvature"]) == ("inconclusive",) * 4


def test_stages_are_judged_by_negative_eigenvalues_and_windows_by_large_ones():
    def changed(**families):
        found = words(stacked({**CLAIMED, **families}))
        return found["E13 NEP"], found["E13 APE"], found["E13"]

    # The PiT's large eigenvalues and the Swin's negative ones are not what the claim is about.
    assert changed(PiT=(0.05, 5000.0), Swin=(0.9, 10.0)) == ("supported", "supported", "supported")
    assert changed(PiT=(0.9, 50.0)) == ("contradicted", "supported", "contradicted")
    assert changed(Swin=(0.2, 500.0)) == ("supported", "contradicted", "contradicted")


def test_a_flat_loss_at_warm_up_and_a_sharp_one_later_contradicts_the_whole_and_not_its_part():
    found = words(stacked(late={**dict.fromkeys(CLAIMED, 50.0), "ViT": 500.0}))
    assert (found["E5 epoch 1"], found["E5 epoch 3"], found["E5"]) == ("supported", "contradicted", "contradicted")
    assert found["E3"] == found["E13"] == found["E21 curvature"] == "supported"


def test_ratios_are_doublings_and_differences_are_shares():
    parts = {verdict.claim.id: verdict for verdict in spectra.verdicts(stacked())}
    assert parts["E5 epoch 1"].value == pytest.approx(np.log2(50 / 500), abs=0.2)
    assert parts["E3"].value == pytest.approx(0.2, abs=0.03)
    assert parts["E13 NEP"].value == pytest.approx(0.05 - 0.2, abs=0.03)
    assert parts["E13 APE"].value == pytest.approx(np.log2(10 / 50), abs=0.2)
    assert parts["E21 NEP"].value == pytest.approx(0.02, abs=0.005)
    assert doublings(xr.DataArray([8.0, 2.0])).values.tolist() == [3.0, 1.0]
    assert np.isfinite(doublings(xr.DataArray(0.0)))


def test_seeds_are_paired_by_their_number_and_not_by_their_place():
    ds = stacked(dict.fromkeys(CLAIMED, (0.0, 1.0)))
    ds["ape"] = ds.ape * 0 + xr.DataArray(np.repeat([1.0, 10.0, 100.0], 5), dims="run")  # the same ratio in each seed
    shuffled = ds.isel(run=[14, 0, 7, 3, 12, 5, 9, 1, 10, 2, 6, 13, 8, 4, 11])
    verdict = next(v for v in spectra.verdicts(shuffled) if v.claim.id == "E5 epoch 1")
    assert verdict.value == verdict.low == verdict.high == 0.0


def test_one_seed_and_networks_that_did_not_learn_are_no_evidence():
    assert set(words(stacked(seeds=1)).values()) == {"inconclusive"}
    assert set(words(stacked(accuracy=30.0)).values()) == {"inconclusive"}


def test_the_control_without_attention_takes_the_place_of_the_resnet():
    ds = stacked({**CLAIMED, spectra.BARE: (0.0, 100.0)})
    found = words(ds)
    assert (found["E21 APE"], found["E5"]) == ("contradicted", "supported")


@pytest.mark.parametrize("scale", ["smoke", "quick", "cpu", "paper"])
def test_grids(scale):
    runs = spectra.grid(Settings(scale=scale))
    assert {run.model for run in runs} <= set(list_models())
    families = {spectra.family_of(run) for run in runs}
    assert families == set(spectra.SHOWN) - ({spectra.BARE} if scale != "paper" else set())
    assert len({(spectra.family_of(run), run.recipe.seed) for run in runs}) == len(runs)
    epochs = spectra.measured_epochs(runs[0])
    assert epochs[-1] == runs[0].recipe.epochs and epochs[0] >= runs[0].recipe.warmup_epochs
    assert scale == "smoke" or len(epochs) == 4


def test_the_control_has_the_size_that_the_header_says():
    made = {
        spectra.family_of(run): create_model(run.model, image_size=32, channels=3, num_classes=100, **run.options)
        for run in spectra.grid(Settings(scale="paper", seeds=1))
        if run.model == "alternet50"
    }
    sizes = {name: sum(p.numel() for p in model.parameters()) / 1e6 for name, model in made.items()}
    assert sizes == pytest.approx({"AlterNet": 33.013, spectra.BARE: 28.160}, abs=1e-3)


def test_small_alternets_without_attention_are_the_small_resnets():
    for scale in ("nano", "micro"):
        common = {"image_size": 32, "channels": 3, "num_classes": 10}
        stages = 2 if scale == "nano" else 3
        bare = create_model(f"alternet_{scale}", attentions=(0,) * stages, **common)
        resnet = create_model(f"resnet_{scale}", **common)
        shapes = [[tuple(p.shape) for p in model.parameters()] for model in (bare, resnet)]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("seeds", [1, 3])
def test_figure(tmp_path, seeds):
    ds = stacked(seeds=seeds)
    figure = spectra.draw(ds)
    left, right = figure.axes[:2]
    # The areas of a family's two sides over decades are its shares of negative and positive eigenvalues.
    resnet = [ax.patches[0].get_data() for ax in (left, right)]
    areas = [float((data.values * np.diff(np.log10(data.edges))).sum()) for data in resnet]
    assert areas == pytest.approx([0.0, 1.0])
    assert save_figure(figure, tmp_path / "spectra.png").stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore:.*not converged:UserWarning")  # smoke gives up early
def test_smoke(smoke_run):
    wanted = ("resnet_nano", "vit_nano", "alternet_nano", "pit_nano", "swin_nano")
    small = replace(spectra.STUDY, grid=lambda asked: [run for run in spectra.grid(asked) if run.model in wanted])
    path = smoke_run(small)
    ds = xr.load_dataset(path)
    assert ds.eigenvalue.dims == ("run", "epoch", "batch", "rank") and ds.eigenvalue.shape == (5, 1, 1, 5)
    np.testing.assert_allclose(ds.nep, (ds.eigenvalue < 0).mean(["batch", "rank"]))
    np.testing.assert_allclose(ds.ape, ds.eigenvalue.where(ds.eigenvalue > 0).mean(["batch", "rank"]))
    assert (ds.nep_low <= ds.nep).all() and (ds.nep <= ds.nep_high).all()
    assert len(set(ds.fingerprint.values[:, 0])) == 1  # the same batches for all networks of a seed
    assert (ds.attrs["split"], ds.attrs["batch_size"], ds.attrs["weight_decay"]) == ("train", 16, 0.05)
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert set(ds.family.values) == {"ResNet", "ViT", "AlterNet", "PiT", "Swin"}
    claims = (path.parent / "claims_smoke.md").read_text()
    assert "E13 APE" in claims and "E21 curvature" in claims


def test_only_the_published_pair_is_followed_through_the_training():
    for run in spectra.grid(Settings(scale="quick", seeds=1)):
        expected = [1, 9, 17, 25] if run.model in ("resnet_nano", "vit_nano") else [1]
        assert spectra.epochs_of(run) == expected
