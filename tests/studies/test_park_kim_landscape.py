"""The study of loss landscapes: rises of bowls in closed form, its verdicts, its grid, and one small run of it."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

sys.path.insert(0, str(Path(__file__).parents[2]))

from studies.park_kim import landscape
from studies.park_kim.families import family
from vitprobe.figures import save_figure
from vitprobe.models import list_models
from vitprobe.study import Settings

FAMILIES = ("ResNet", "ViT", "PiT", "Swin")


def bowls(
    resnet: float, vit: float, *, pit: float = 3.0, swin: float = 1.0, seeds: int = 3, accuracy: float = 60.0,
    weight: float = 4.0,
) -> xr.Dataset:  # fmt: skip
    """Landscapes `height * (x^2 + y^2)`, of heights that scatter a little between seeds and pairs.

    The term of batch norm that does not fit is half of the ResNet's rise; the weight term is the same for both.
    """
    rng = np.random.default_rng(0)
    axis = np.linspace(-1, 1, 21)
    x, y = np.meshgrid(axis, axis)
    families = [*FAMILIES] * seeds
    heights = np.array([resnet, vit, pit, swin] * seeds)[:, None] * np.exp(rng.normal(0, 0.02, (len(families), 2)))
    bowl = 1.0 + heights[..., None, None] * (x**2 + y**2)
    halved = np.where(np.array(families) == "ResNet", 0.5, 1.0)[:, None, None, None]
    dims = ("run", "direction_pair", "y", "x")
    return xr.Dataset(
        {
            "nll": (dims, bowl),
            "nll_reestimated": (dims, 1.0 + halved * (bowl - 1.0)),
            "l2_sum_of_norms": (dims, 100.0 + np.broadcast_to(weight * (x**2 + y**2), bowl.shape)),
        },
        coords={
            "x": axis,
            "y": axis,
            "family": ("run", families),
            "seed": ("run", [seed for seed in range(seeds) for _ in FAMILIES]),
            "network_accuracy": ("run", [accuracy] * len(families)),
        },
        attrs={"classes": 10, "images": 32},
    )


def words(ds: xr.Dataset) -> dict[str, str]:
    return {verdict.claim.id: verdict.verdict for verdict in landscape.verdicts(ds)}


@pytest.mark.parametrize("radius", [0.5, 0.8, 1.0])
def test_the_rise_of_a_bowl_is_its_height_times_the_mean_square_of_the_ring(radius):
    ds = bowls(4.0, 2.0)
    x, y = np.meshgrid(ds["x"], ds["y"])
    inside = np.abs(np.hypot(x, y) - radius) < 0.05 + 1e-9
    ds["nll"] = ds.nll * 0 + 7.0 + 3.0 * xr.DataArray(x**2 + y**2, dims=("y", "x"))
    np.testing.assert_allclose(landscape.rise(ds, "nll", radius), 3.0 * (x**2 + y**2)[inside].mean())
    assert (x**2 + y**2)[inside].mean() == pytest.approx(radius**2, rel=0.06)  # cells are no circle
    np.testing.assert_allclose(landscape.rise(ds, "l2_sum_of_norms", 1.0), 0.05 * 4.0, rtol=0.03)


def test_a_ring_with_a_cell_without_a_number_has_no_rise():
    ds = bowls(4.0, 2.0)
    ds["nll"][0, 0, 10, 20] = np.nan  # x = 1, y = 0
    assert np.isnan(landscape.rise(ds, "nll", 1.0)[0, 0]) and np.isfinite(landscape.rise(ds, "nll", 0.5)[0, 0])
    assert words(ds)["E6"] == "inconclusive"
    assert words(ds)["E6 batch norm re-estimated"] == "inconclusive"  # equal heights, once batch norm fits


@pytest.mark.parametrize(("resnet", "vit", "said"), [(8, 2, "supported"), (2, 8, "contradicted")])
def test_verdicts(resnet, vit, said):
    found = {verdict.claim.id: verdict for verdict in landscape.verdicts(bowls(resnet, vit))}
    assert found["E6"].verdict == said
    assert found["E6"].value == pytest.approx(np.log2(resnet / vit), abs=0.1)
    assert found["E6 batch norm re-estimated"].value == pytest.approx(np.log2(resnet / vit) - 1, abs=0.1)


def test_a_rise_by_batch_norm_that_does_not_fit_shows_beside_it():
    found = words(bowls(3.0, 2.0))
    assert (found["E6"], found["E6 batch norm re-estimated"]) == ("supported", "contradicted")


def test_stages_are_reported_beside_the_vit_and_do_not_decide():
    found = {verdict.claim.id: verdict for verdict in landscape.verdicts(bowls(8.0, 2.0, pit=32.0, swin=1.0))}
    assert (found["E6"].verdict, found["E6 PiT"].verdict, found["E6 Swin"].verdict) == (
        "supported", "contradicted", "supported",
    )  # fmt: skip
    assert found["E6 PiT"].value == pytest.approx(-2.0, abs=0.1)
    assert found["E6 Swin"].value == pytest.approx(3.0, abs=0.1)
    assert "a trained PiT" in found["E6 PiT"].claim.statement and "PiT less" in found["E6 PiT"].claim.statistic


def test_equal_weight_terms_do_not_hide_the_cross_entropy():
    found = words(bowls(8.0, 2.0, weight=1000.0))
    assert (found["E6"], found["E6 weight term"]) == ("supported", "inconclusive")


def test_no_evidence():
    assert set(words(bowls(8, 2, seeds=1)).values()) == {"inconclusive"}
    assert set(words(bowls(8, 2, accuracy=20.0)).values()) == {"inconclusive"}
    falling = bowls(8, 2)
    falling["nll"] = -falling.nll
    assert words(falling)["E6"] == "inconclusive"


@pytest.mark.parametrize("scale", landscape.SIZES)
def test_grids(scale):
    runs = landscape.grid(Settings(scale=scale))
    assert {run.model for run in runs} <= set(list_models())
    assert {family(run.model) for run in runs} == set(landscape.FAMILIES)
    assert len({(run.model, run.recipe.seed) for run in runs}) == len(runs)
    points = landscape.SIZES[scale][2]
    assert points % 2 == 1  # or no cell lies at the centre


def test_figure(tmp_path):
    figure = landscape.draw(bowls(4.0, 2.0))
    drawn = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    assert drawn["ResNet"][-1] == pytest.approx(4.0, rel=0.05) and drawn["ViT"][0] == 0
    assert save_figure(figure, tmp_path / "landscape.png").stat().st_size > 10_000


def test_smoke(smoke_run):
    wanted = ("resnet_nano", "vit_nano", "pit_nano", "swin_nano")
    small = replace(landscape.STUDY, grid=lambda asked: [r for r in landscape.grid(asked) if r.model in wanted])
    ds = xr.load_dataset(path := smoke_run(small))
    resnet, vit = (ds.isel(run=int(np.flatnonzero(ds.family == name)[0])) for name in ("ResNet", "ViT"))
    np.testing.assert_array_equal(vit.nll, vit.nll_reestimated)
    assert (resnet.nll != resnet.nll_reestimated).any()
    assert ds.sizes == {"run": 4, "direction_pair": 1, "y": 5, "x": 5}
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "E6 weight term" in (path.parent / "claims_smoke.md").read_text()
