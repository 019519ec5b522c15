"""Synthetic results of the robustness probes in, artists out."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import PolyCollection

from vitprobe import figures, results
from vitprobe.figures.corruption import corruption_robustness
from vitprobe.figures.noise import noise_by_frequency

DESCRIBED = {"long_name": "made up", "units": "1"}
FREQUENCIES = np.arange(1, 10) / 10
KINDS = ("gaussian_noise", "shot_noise", "fog", "brightness", "contrast", "pixelate", "jpeg_compression")


def noise(seed=0, definition="corrected"):
    rng = np.random.default_rng(seed)
    variables = {
        "accuracy_drop": rng.uniform(0, 0.3, 9),
        "accuracy_drop_se": np.full(9, 0.01),
        "rms": np.full(9, 0.2) if definition == "corrected" else np.linspace(0.1, 0.3, 9),
    }
    return xr.Dataset(
        {name: ("frequency", values, DESCRIBED) for name, values in variables.items()},
        {"frequency": FREQUENCIES},
        results.provenance(title="t", probe="noise_by_frequency", definition=definition),
    )


def corruption(seed=0, kinds=KINDS, **attributes):
    accuracy = np.random.default_rng(seed).uniform(0.2, 0.9, (len(kinds), 5))
    return xr.Dataset(
        {
            "accuracy": (("corruption", "severity"), accuracy, DESCRIBED),
            "accuracy_se": (("corruption", "severity"), np.full(accuracy.shape, 0.02), DESCRIBED),
        },
        {
            "corruption": [KINDS.index(kind) for kind in kinds],
            "corruption_name": ("corruption", list(kinds)),
            "severity": np.arange(1, 6),
        },
        results.provenance(
            title="t",
            probe="corruption_robustness",
            mean_accuracy=0.5 + 0.01 * seed,
            mean_accuracy_low=0.45,
            mean_accuracy_high=0.55,
            **attributes,
        ),
    )


def legend(figure):
    (box,) = figure.legends
    return [text.get_text() for text in box.get_texts()]


def test_noise_of_a_single_run(tmp_path):
    ds = noise()
    figure = noise_by_frequency(ds.assign_attrs(model="resnet_20"))
    top, bottom = figure.axes
    drop, zero = top.lines
    np.testing.assert_allclose(drop.get_xydata(), np.stack([FREQUENCIES, 100 * ds.accuracy_drop], axis=1))
    np.testing.assert_allclose(zero.get_ydata(), 0)
    (band,) = (part for part in top.collections if isinstance(part, PolyCollection))
    corners = band.get_paths()[0].vertices
    at_first = corners[corners[:, 0] == 0.1, 1]
    np.testing.assert_allclose([at_first.min(), at_first.max()], 100 * float(ds.accuracy_drop[0]) + np.array([-1, 1]))
    np.testing.assert_allclose(bottom.lines[0].get_ydata(), 0.2)
    assert legend(figure) == ["ResNet 20"]
    assert top.get_ylabel().endswith("[percentage points]") and bottom.get_xlabel().endswith("[π rad/px]")
    assert figure.get_supxlabel() == "Band of a single run: standard error over images. Definition: corrected."
    figures.save_figure(figure, tmp_path / "a.png", dpi=50)


def test_noise_of_many_runs_is_a_line_per_model():
    runs = results.stack_runs([noise(seed) for seed in range(5)], model=["vit_ti", "vit_ti", "vit_ti", "a", "a"])
    figure = noise_by_frequency(runs)
    top, bottom = figure.axes
    assert legend(figure) == ["ViT Ti", "a"]
    means = [line.get_ydata() for line in top.lines if line.get_label() == "mean"]
    np.testing.assert_allclose(means[0], 100 * runs.accuracy_drop[:3].mean("run"))
    np.testing.assert_allclose(means[1], 100 * runs.accuracy_drop[3:].mean("run"))
    assert len(bottom.lines) == 1  # the same noise for all
    assert "over up to 3 seeds" in figure.get_supxlabel()


def test_published_bands_show_their_unequal_power():
    figure = noise_by_frequency(noise(definition="paper"))
    np.testing.assert_allclose(figure.axes[1].lines[0].get_ydata(), np.linspace(0.1, 0.3, 9), atol=1e-6)
    assert "Definition: paper." in figure.get_supxlabel()
    assert not figure.legends  # no name, no legend


@pytest.mark.parametrize("kinds", [KINDS, KINDS[:2]])
def test_a_panel_for_each_corruption(kinds, tmp_path):
    ds = corruption(kinds=kinds, mce=0.8, mce_low=0.75, mce_high=0.85)
    figure = corruption_robustness(ds.assign_attrs(model="vit_ti"))
    titles = ["Gaussian noise", "shot noise", "fog", "brightness", "contrast", "pixelate", "JPEG compression"]
    assert [ax.get_title() for ax in figure.axes] == titles[: len(kinds)]
    for ax, accuracy in zip(figure.axes, ds.accuracy, strict=True):
        (line,) = ax.lines
        np.testing.assert_allclose(line.get_xydata(), np.stack([np.arange(1, 6), 100 * accuracy], axis=1))
    named = [ax.get_xlabel() for ax in figure.axes]
    assert named == [""] * (len(kinds) - min(5, len(kinds))) + ["severity"] * min(5, len(kinds))
    assert legend(figure) == ["ViT Ti: mean 50.0 (45.0 to 55.0) %, mCE 0.800 (0.750 to 0.850)"]
    assert "In brackets: 95 % interval over images." in figure.get_supxlabel()
    figures.save_figure(figure, tmp_path / "a.png", dpi=50)


def test_runs_that_lack_a_corruption():
    runs = [corruption(0), corruption(1), corruption(2, KINDS[2:4])]
    stacked = results.stack_runs(runs, model=["vit_ti", "vit_ti", "resnet_20"])
    figure = corruption_robustness(stacked)
    means = [[line for line in ax.lines if line.get_label() == "mean"] for ax in figure.axes]
    assert [len(lines) for lines in means] == [1, 1, 2, 2, 1, 1, 1]
    np.testing.assert_allclose(means[2][1].get_ydata(), 100 * runs[2].accuracy[0])
    np.testing.assert_allclose(means[0][0].get_ydata(), 100 * stacked.accuracy[:2, 0].mean("run"))
    first, second = legend(figure)
    assert first == "ViT Ti: mean 50.5 ± 0.7 %" and second == "ResNet 20: mean 52.0 (45.0 to 55.0) %"
