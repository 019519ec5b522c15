"""The study of noise by frequency: verdicts on curves made by hand, bands, strengths, and a run of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

from studies.park_kim import noise
from studies.park_kim.families import grid
from vitprobe.models import create_model
from vitprobe.probes.noise import FREQUENCIES
from vitprobe.published import park_kim_2022

PUBLISHED = park_kim_2022()["noise_freq_delta_acc_pct"]
RESNET, VIT = (-np.array(PUBLISHED[name]) for name in ("ResNet-50", "ViT-Ti"))


def stacked(resnet=RESNET, vit=VIT, *, paper=None, seeds=3, accuracy=60.0, clean=(0.6, 0.6), jitter=0.1) -> xr.Dataset:
    """Runs whose ResNets and ViTs lose so many points at the second strength, and a tenth to thrice of it."""
    rng = np.random.default_rng(0)
    factor = np.array([0.1, 1.0, 2.0, 3.0])[:, None]

    def runs(curves):
        lost = [factor * np.asarray(curve) + rng.normal(0, jitter, (4, 9)) for _ in range(seeds) for curve in curves]
        return (("run", "severity", "frequency"), np.array(lost) / 100)

    return xr.Dataset(
        {"accuracy_drop": runs((resnet, vit)), "accuracy_drop_paper": runs(paper or (resnet, vit))},
        coords={
            "frequency": list(FREQUENCIES),
            "strength": (("run", "severity"), [list(noise.STRENGTHS)] * 2 * seeds),
            "model": ("run", ["resnet_micro", "vit_micro"] * seeds),
            "accuracy": ("run", [accuracy] * 2 * seeds),
            "clean_accuracy": ("run", list(clean) * seeds),
        },
        attrs={"classes": 10},
    )


def words(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in noise.verdicts(ds)}


def test_the_published_curves_support_the_claim_and_cross_where_they_are_said_to():
    found = noise.verdicts(stacked())
    assert {verdict.verdict for verdict in found} == {"supported"}
    low, high = found[1:3]
    assert low.value == pytest.approx((VIT - RESNET)[:5].mean(), abs=0.2)
    assert high.value == pytest.approx((VIT - RESNET)[5:].mean(), abs=0.2)
    (place,) = noise.crossings(np.array(FREQUENCIES), VIT - RESNET)
    # Between 0.5 and 0.6, where the difference goes from 1.27 to -0.33.
    assert place == pytest.approx(0.5 + 0.1 * 1.27 / 1.60)


def test_exchanged_curves_contradict_it_and_noise_is_inconclusive():
    assert set(words(stacked(VIT, RESNET)).values()) == {"contradicted"}
    # Seeds that differ by 0, 3 and -3 points.
    same = stacked(RESNET, RESNET, jitter=0)
    same["accuracy_drop_paper"] += xr.DataArray([0, 0, 0, 0.03, 0, -0.03], dims="run")
    assert words(same)["E15 low"] == words(same)["E15"] == "inconclusive"


def test_a_vit_that_all_noise_costs_more_has_a_tilt_of_its_own():
    found = {verdict.claim.id: verdict for verdict in noise.verdicts(stacked(vit=VIT + 10))}
    assert (found["E15"].verdict, found["E15 high"].verdict) == ("contradicted", "contradicted")
    assert found["E15 tilt"].verdict == "supported"
    assert found["E15 tilt"].value == pytest.approx(found["E15 high"].value - found["E15 low"].value)


def test_the_versions_are_judged_apart():
    # As published by unequal power alone; relative to a ViT that has little to lose, everything costs it more.
    found = words(stacked(VIT, RESNET, paper=(RESNET, VIT)))
    assert (found["E15"], found["E15 equal power"]) == ("supported", "contradicted")
    found = words(stacked(clean=(0.9, 0.2)))
    assert found["E15 equal power"] == "supported"
    assert (found["E15 relative low"], found["E15 relative high"]) == ("supported", "contradicted")


def test_one_seed_and_networks_that_did_not_learn_are_no_evidence():
    assert set(words(stacked(seeds=1)).values()) == {"inconclusive"}
    assert set(words(stacked(accuracy=30.0)).values()) == {"inconclusive"}


def test_the_strength_that_counts_loses_what_the_published_networks_do():
    assert noise.chosen_strength(stacked(), "accuracy_drop") == 1
    assert noise.chosen_strength(stacked(RESNET / 2, VIT / 2), "accuracy_drop") == 2
    assert noise.chosen_strength(stacked(10 * RESNET, 10 * VIT), "accuracy_drop") == 0


def test_a_family_with_fewer_seeds_is_refused():
    with pytest.raises(ValueError, match="2 runs of the ResNet and 3 of the ViT"):
        noise.verdicts(stacked().isel(run=[1, 2, 3, 4, 5]))


def test_small_images_have_a_band_for_each_of_their_frequencies():
    assert noise.bands((8, 8)) == (0.25, 0.5, 0.75, 1.0)
    assert noise.bands((32, 32)) == noise.bands((20, 20)) == FREQUENCIES


def test_both_definitions_have_the_same_power_on_average_and_only_one_in_every_band():
    model = create_model("vit_nano", image_size=8, channels=1, num_classes=10).eval()
    images = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    ds = noise.BothNoises(1).run(model, [(images, torch.zeros(60, dtype=torch.long))] * 2, progress=False)
    assert ds.attrs["images"] == 60
    np.testing.assert_allclose(ds.rms, np.broadcast_to(ds.strength.values[:, None], ds.rms.shape), rtol=1e-5)
    np.testing.assert_allclose((ds.rms_paper**2).mean("frequency") ** 0.5, ds.strength, rtol=0.03)
    # The published rings have 4, 12, 20 and 28 of 64 waves. The 3, 7 and 11 with a -1, -2 or -3 have their
    # mirror images outside of the square (in the next ring); -4 is its own.
    powers = [noise.published_power((8, 8), frequency) for frequency in noise.bands((8, 8))]
    np.testing.assert_allclose(64 * np.array(powers), [4 - 3 / 2, 12 - (7 + 3) / 2, 20 - (11 + 7) / 2, 28 - 11 / 2])
    np.testing.assert_allclose(
        (ds.rms_paper / ds.rms_paper.isel(frequency=-1)) ** 2, np.tile(powers, (4, 1)) / powers[-1], rtol=0.1
    )


def test_smoke(smoke_run):
    wanted = ("resnet_nano", "vit_nano")
    small = replace(noise.STUDY, grid=lambda asked: [run for run in grid(asked) if run.model in wanted])
    path = smoke_run(small)
    ds = xr.load_dataset(path)
    assert ds.accuracy_drop_paper_se.dims == ("run", "severity", "frequency")
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "E15 relative high" in (path.parent / "claims_smoke.md").read_text()
