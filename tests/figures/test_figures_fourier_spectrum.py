"""Spectra as images and changes as bars: every pixel and bar is a number of the dataset, and labels say of what."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_hex

from vitprobe.figures import save_figure
from vitprobe.figures.feature_variance import feature_variance
from vitprobe.figures.fourier import fourier
from vitprobe.figures.fourier_spectrum import fourier_spectrum
from vitprobe.figures.unit_changes import COLORS, unit_changes
from vitprobe.results import provenance, stack_runs

DESCRIBED = {"long_name": "made up", "units": "1"}


def coordinates(kinds, grids) -> dict:
    n = len(kinds)
    return {
        "layer": np.arange(n),
        "layer_name": ("layer", [f"units.{index}" for index in range(n)]),
        "kind": ("layer", list(kinds)),
        "depth": ("layer", np.linspace(0, 1, n)),
        "grid_h": ("layer", [grid[0] for grid in grids]),
        "grid_w": ("layer", [grid[1] for grid in grids]),
    }


def spectrum(*grids, model="vit_micro", seed=0, error=0.02) -> xr.Dataset:
    """Random spectra, with the symmetry of those of real maps, as the probe pads them."""
    rng = np.random.default_rng([seed, len(grids)])
    most = np.array(grids).max(0)
    axes = [np.arange(-(side // 2), (side + 1) // 2) for side in most]
    values = np.full((len(grids), *most), np.nan)
    for panel, (h, w) in zip(values, grids, strict=True):
        for y in range(-(h // 2), (h + 1) // 2):
            for x in range(-(w // 2), (w + 1) // 2):
                up, left = (h // 2 - y) % h - h // 2, (w // 2 - x) % w - w // 2  # where -y, -x stands
                there = panel[up + most[0] // 2, left + most[1] // 2]
                new = rng.normal() if np.isnan(there) else there
                panel[y + most[0] // 2, x + most[1] // 2] = new
    dims = ("layer", "y", "x")
    data = {
        "relative_log_amplitude": (dims, values, DESCRIBED),
        "relative_log_amplitude_se": (dims, np.where(np.isnan(values), np.nan, error), DESCRIBED),
    }
    coords = coordinates(["stem", *["msa", "mlp"] * 20][: len(grids)], grids) | {"y": axes[0], "x": axes[1]}
    return xr.Dataset(data, coords, provenance(title="t", probe="fourier_spectrum", model=model, seed=seed))


def changes(kinds, values, errors, *, seed=0, name="high_frequency_amplitude", **attributes) -> xr.Dataset:
    data = {
        f"{name}_change": ("layer", np.array(values, float), DESCRIBED),
        f"{name}_change_se": ("layer", np.array(errors, float), DESCRIBED),
    }
    said = provenance(title="t", probe="fourier", seed=seed, model="vit_micro", **attributes)
    return xr.Dataset(data, coordinates(kinds, [(4, 4)] * len(kinds)), said)


def panels(figure) -> list:
    return [ax for ax in figure.axes if ax.get_label() != "<colorbar>" and ax.axison]


@pytest.mark.parametrize("grid", [(4, 4), (5, 5), (4, 6), (1, 8)])
def test_every_pixel_lies_at_its_frequency(grid):
    ds = spectrum((6, 8), grid)
    ax = panels(fourier_spectrum(ds))[1]
    (image,) = ax.images
    left, right, bottom, top = image.get_extent()
    shown = np.asarray(image.get_array())
    assert shown.shape == tuple(side + 1 - side % 2 for side in grid)  # an even side's highest frequency twice
    for row, y in enumerate(np.linspace(bottom, top, 2 * len(shown) + 1)[1::2]):
        for column, x in enumerate(np.linspace(left, right, 2 * shown.shape[1] + 1)[1::2]):
            periods = np.array([y, x]) * grid / 2
            assert periods == pytest.approx(periods.round())
            inside = (periods.round().astype(int) + np.array(grid) // 2) % grid - np.array(grid) // 2
            wanted = ds.relative_log_amplitude.sel(layer=1, y=inside[0], x=inside[1])
            assert shown[row, column] == float(wanted)
    assert ax.get_xlim() == ax.get_ylim() == (-1, 1)


def test_one_scale_of_colours_with_words(tmp_path):
    ds = spectrum((8, 8), (8, 8), (4, 4))
    figure = fourier_spectrum(ds)
    save_figure(figure, tmp_path / "a.png", dpi=50)
    limits = {ax.images[0].get_clim() for ax in panels(figure)}
    assert limits == {(float(ds.relative_log_amplitude.min()), float(ds.relative_log_amplitude.max()))}
    (bar,) = [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]
    assert "relative log amplitude" in bar.get_ylabel()
    assert [ax.get_title() for ax in panels(figure)] == ["1: stem", "2: attention", "3: MLP"]
    assert panels(figure)[0].get_title("left").strip() == "ViT micro"
    assert {ax.get_xlabel() for ax in panels(figure)} == {"x [π rad/patch]"}
    assert panels(figure)[0].get_ylabel() == "y [π rad/patch]"
    assert figure.get_supxlabel() == "Standard errors over images within ± 0.02."
    assert fourier_spectrum(spectrum((2, 2), error=np.nan)).get_supxlabel() == ""  # of one image


@pytest.mark.parametrize(
    ("units", "numbers"),
    [(12, range(1, 13)), (25, [1, 3, 5, 8, 10, 12, 14, 16, 18, 21, 23, 25])],
)
def test_units_are_the_first_the_last_and_evenly_spaced_ones(units, numbers):
    figure = fourier_spectrum(spectrum(*[(4, 4)] * units))
    assert [int(ax.get_title().partition(":")[0]) for ax in panels(figure)] == list(numbers)
    assert ("Not all units are shown" in figure.get_supxlabel()) is (units > 12)
    assert figure.get_figwidth() <= 7


def test_a_single_position_has_no_spectrum():
    figure = fourier_spectrum(spectrum((4, 4), (1, 1)))
    assert [ax.get_title() for ax in panels(figure)] == ["1: stem"]


def test_models_stand_below_each_other_as_means_over_seeds(tmp_path):
    runs = [spectrum(*[(4, 4)] * 8, model="vit_micro", seed=seed) for seed in range(3)]
    runs += [spectrum((6, 6), (2, 2), model="resnet_micro", seed=seed) for seed in range(3)]
    figure = fourier_spectrum(stack_runs(runs))
    save_figure(figure, tmp_path / "a.png", dpi=30)
    shown = panels(figure)
    assert [title for ax in shown if (title := ax.get_title("left").strip())] == ["ViT micro", "ResNet micro"]
    assert len(shown) == 6 + 2
    mean = np.mean([run.relative_log_amplitude.isel(layer=0) for run in runs[:3]], axis=0)
    np.testing.assert_allclose(np.asarray(shown[0].images[0].get_array())[:-1, :-1], mean)
    assert "Mean over 3 seeds. 95 % t intervals over seeds within" in figure.get_supxlabel().replace("\n", " ")


def heights(ax) -> dict[int, float]:
    return {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in ax.patches}


def test_bars_are_the_changes_in_the_colour_of_their_kind(tmp_path):
    kinds = ["stem", "msa", "mlp", "msa", "mlp", "subsample", "conv"]
    values = [np.nan, -1.0, 0.5, -0.1, -0.3, np.nan, 0.2]
    errors = [np.nan, 0.2, 0.2, 0.2, 0.1, np.nan, 0.2]
    figure = unit_changes(changes(kinds, values, errors))
    save_figure(figure, tmp_path / "a.png", dpi=50)
    (ax,) = panels(figure)
    assert heights(ax) == {2: -1.0, 3: 0.5, 4: -0.1, 5: -0.3, 7: 0.2}
    for bar in ax.patches:
        unit = round(bar.get_x() + bar.get_width() / 2) - 1
        assert to_hex(bar.get_facecolor()) == COLORS[kinds[unit]].lower()
        assert (bar.get_alpha() < 1) is (abs(values[unit]) < 1.96 * errors[unit])
    assert ax.get_title() == "ViT micro\n↓ attention 2 of 2, MLP 1 of 2, conv. 0 of 1"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["self-attention", "convolution", "MLP"]
    lines = ax.containers[-1].lines[2][0].get_segments()
    np.testing.assert_allclose(
        np.ptp([line[:, 1] for line in lines], axis=1), 2 * 1.96 * np.array(errors)[[1, 2, 3, 4, 6]]
    )


def test_intervals_over_seeds_are_students():
    runs = [
        changes(["stem", "msa"], [np.nan, value], [np.nan, 1e-9], seed=seed) for seed, value in enumerate([1, 2, 3])
    ]
    figure = unit_changes(stack_runs(runs))
    (ax,) = panels(figure)
    (line,) = ax.containers[-1].lines[2][0].get_segments()
    half_width = 0.95 / np.sqrt(2 * 0.975 * 0.025) / np.sqrt(3)  # closed form of two degrees of freedom
    np.testing.assert_allclose(line[:, 1], [2 - half_width, 2 + half_width])
    assert ax.patches[0].get_alpha() < 1  # the interval holds zero, whatever the errors over images
    assert "3 seeds" in figure.get_supxlabel()


def test_variances_have_a_row_each_and_options_stand_in_the_labels():
    kinds = ["stem", "msa"]
    both = [
        changes(kinds, [np.nan, 1], [np.nan, 0], name=name, over="images")
        for name in ("variance", "normalised_variance")
    ]
    labels = [ax.get_ylabel() for ax in panels(unit_changes(xr.merge(both, combine_attrs="override", compat="equals")))]
    assert labels == ["change of variance\nover images [1]", "change of variance\nover images\n/ mean square [1]"]
    mean = unit_changes(changes(kinds, [np.nan, 1], [np.nan, 0], average="log of mean"))
    assert panels(mean)[0].get_ylabel().startswith("change of relative log mean\namplitude")


def test_what_has_no_changes_is_refused():
    with pytest.raises(ValueError, match="'fourier_spectrum' holds none of high_frequency_amplitude_change"):
        unit_changes(spectrum((4, 4)))
    with pytest.raises(ValueError, match=r"unknown kind of unit 'mlpp'\. Did you mean 'mlp'"):
        unit_changes(changes(["mlpp"], [1.0], [0.1]))


@pytest.mark.parametrize(
    ("said", "amplitude", "frequency"),
    [
        ({}, "relative log amplitude", "frequency [π]"),
        ({"average": "mean of log", "along": "diagonal"}, "relative log amplitude", "frequency [π]"),
        ({"average": "log of mean", "along": "radius"}, "relative log mean amplitude", "radial frequency [π]"),
    ],
)
def test_fourier_says_what_was_averaged_and_along_what(said, amplitude, frequency):
    ds = changes(["stem", "msa"], [np.nan, 1], [np.nan, 0.1], **said)
    ds["relative_log_amplitude"] = (("layer", "frequency"), [[0.0, -1.0], [0.0, -2.0]], DESCRIBED)
    ds["high_frequency_amplitude"] = ("layer", [-1.0, -2.0], DESCRIBED)
    ds["high_frequency_amplitude_se"] = ("layer", [0.1, 0.1], DESCRIBED)
    above, below = panels(fourier(ds.assign_coords(frequency=[0.0, 1.0])))
    assert above.get_xlabel() == frequency
    assert above.get_ylabel() == f"{amplitude}\n[natural log]"
    assert below.get_ylabel() == f"{amplitude}\nat high frequency [natural log]"


@pytest.mark.parametrize(
    ("said", "label"), [({}, "feature-map"), ({"over": "positions"}, "feature-map"), ({"over": "images"}, "images")]
)
def test_feature_variance_says_over_what(said, label):
    ds = changes(["stem", "msa"], [np.nan, 1], [np.nan, 0.1], **said)
    for name in ("variance", "normalised_variance"):
        ds[name], ds[f"{name}_se"] = ("layer", [1.0, 2.0], DESCRIBED), ("layer", [0.1, 0.1], DESCRIBED)
    for normalised in (False, True):
        (ax,) = panels(feature_variance(ds, normalised=normalised))
        assert label in ax.get_ylabel()
