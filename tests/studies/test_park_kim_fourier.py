"""The study of Fourier amplitudes: the published curves at their true frequencies, its panels, and a run of it."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from studies.park_kim import fourier
from studies.park_kim.families import LOOKS, grid
from studies.park_kim.profiles import Published, rows
from vitprobe.published import park_kim_2022


@pytest.mark.parametrize(("curve", "side"), [(0, 56), (4, 28), (8, 14), (16, 7)])
def test_published_curves_end_where_their_maps_do(curve, side):
    given = park_kim_2022()["fourier_resnet50_imagenet"][curve]
    frequency, values = fourier.published_spectrum(given)
    # The frequencies of a transform of so many pixels, the Nyquist frequency of an even number left out.
    waves = np.fft.rfftfreq(side)[: (side + 1) // 2]
    np.testing.assert_allclose(frequency, 2 * waves, atol=0.001)
    assert values[-1] == given[-1][1]


def test_published_networks_know_their_units():
    resnet = Published("ResNet-50", "ImageNet", np.zeros(17))
    # 3, 4, 6 and 3 blocks, of which the first of all stages but the first changes the grid.
    assert [i for i, kind in enumerate(resnet.kinds) if kind == "subsample"] == list(np.cumsum([3, 4, 6]) + 1)
    assert resnet.kinds.count("conv") == 13
    vit = Published("ViT-Ti", "ImageNet", np.zeros(25))
    assert (vit.kinds[:3], len(vit.kinds), vit.kinds[-1]) == (["stem", "msa", "mlp"], 25, "mlp")
    assert {resnet.family, vit.family} <= set(LOOKS)


def test_families_stand_beside_the_published_network_of_their_row():
    names = ["resnet_micro", "vit_micro", "swin_micro"]
    ds = xr.Dataset(
        coords={"model": ("run", names), "layer_name": (("run", "layer"), [["a"]] * 3), "layer": [0], "run": [0, 1, 2]}
    )
    published = [Published("ResNet-50", "", np.zeros(17)), Published("ViT-Ti", "", np.zeros(25))]
    titles = [[getattr(one, "name", None) or one.title for one in row] for row in rows(ds, published)]
    assert titles == [["ResNet-50", "ResNet micro"], ["ViT-Ti", "ViT micro", "Swin micro"]]
    assert len(rows(ds.isel(run=[1]), published)) == 1


def test_smoke(smoke_run):
    wanted = ("resnet_nano", "vit_nano")
    small = replace(fourier.STUDY, grid=lambda asked: [run for run in grid(asked) if run.model in wanted])
    path = smoke_run(small)
    figure = fourier.draw(xr.load_dataset(path))
    # Two networks and two published ones, each with its spectra and its profile.
    titles = [ax.get_title().partition("\n")[0] for ax in figure.get_axes() if ax.get_title()]
    assert titles == ["ResNet-50", "ResNet nano", "ViT-Ti", "ViT nano"] * 2
    published = figure.get_axes()[0].lines
    assert len(published) == 17 and published[0].get_xdata()[-1] == pytest.approx(27 / 28)
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "E14 conv resnet_nano" in (path.parent / "claims_smoke.md").read_text()
