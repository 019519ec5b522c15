"""Reliability diagrams: what is drawn is what was measured."""

from itertools import pairwise

import numpy as np
import pytest
import xarray as xr
from matplotlib.patches import Rectangle
from scipy.stats import t

from vitprobe.figures.calibration import calibration
from vitprobe.figures.page import style
from vitprobe.results import stack_runs

SHARE = np.array([0.0, 0.1, 0.4, 0.5])
ACCURACY = np.array([np.nan, 0.5, 0.6, 0.7])
CONFIDENCE = np.array([np.nan, 0.4, 0.65, 0.9])


def one_run(model="vit_micro", seed=0, **attrs) -> xr.Dataset:
    """Four bins, of which the first is empty and the second under-confident."""
    accuracy = ACCURACY + 0.01 * seed
    by_bin = {
        "bin_accuracy": accuracy,
        "bin_accuracy_low": accuracy - 0.1,
        "bin_accuracy_high": accuracy + 0.05,
        "bin_confidence": CONFIDENCE,
        "share_correct": np.nan_to_num(SHARE * accuracy),
        "share_wrong": np.nan_to_num(SHARE * (1 - accuracy)),
    }
    overall = {"top1": 0.64, "ece": 0.13, "ece_low": 0.1, "ece_high": 0.2, "nll": 1.5, "nll_se": 0.25}
    overall |= {"ecse": 0.11, "ecse_low": -0.02, "ecse_high": 0.2}
    overall |= {"temperature": 2.0, "temperature_low": 1.5, "temperature_high": 2.5}
    return xr.Dataset(
        {name: ("bin", values) for name, values in by_bin.items()}
        | {name: ((), value + 0.01 * seed) for name, value in overall.items()},
        coords={
            "bin": np.arange(4),
            "bin_low": ("bin", np.arange(4) / 4),
            "bin_high": ("bin", np.arange(1, 5) / 4),
        },
        attrs={"probe": "calibration", "definition": "corrected", "model": model, "seed": seed} | attrs,
    )


def bars(ax) -> dict[str, list[Rectangle]]:
    containers = (container for container in ax.containers if hasattr(container, "patches"))
    return {container.get_label(): list(container.patches) for container in containers}


def spans(rectangles) -> np.ndarray:
    """Bottom and top of the bars."""
    return np.array([(bar.get_y(), bar.get_y() + bar.get_height()) for bar in rectangles])


def error_bars(ax) -> np.ndarray:
    """Abscissa, low and high end of every error bar."""
    (segments,) = (container[2][0].get_segments() for container in ax.containers if not hasattr(container, "patches"))
    return np.array([(segment[0, 0], *segment[:, 1]) for segment in segments])


def test_bars_are_the_accuracies_and_gaps_reach_to_the_confidence():
    upper, lower = calibration(one_run()).axes
    drawn = bars(upper)
    np.testing.assert_allclose(spans(drawn["accuracy"])[1:], [(0, 0.5), (0, 0.6), (0, 0.7)])
    np.testing.assert_allclose(spans(drawn["gap to confidence"])[1:], [(0.5, 0.4), (0.6, 0.65), (0.7, 0.9)])
    assert [bar.get_x() for bar in drawn["accuracy"]] == [0, 0.25, 0.5, 0.75]
    assert {bar.get_width() for bar in drawn["accuracy"]} == {0.25}
    np.testing.assert_allclose(error_bars(upper), [(0.375, 0.4, 0.55), (0.625, 0.5, 0.65), (0.875, 0.6, 0.75)])
    (diagonal,) = (line for line in upper.lines if line.get_label() == "calibrated")
    np.testing.assert_array_equal(diagonal.get_xydata(), [(0, 0), (1, 1)])
    assert upper.get_ylim() == (0, 1)
    histogram = bars(lower)
    np.testing.assert_allclose(spans(histogram["right predictions"])[:, 1], SHARE * np.nan_to_num(ACCURACY))
    np.testing.assert_allclose(spans(histogram["wrong predictions"])[:, 1], SHARE)
    assert (upper.get_ylabel(), lower.get_ylabel(), lower.get_xlabel()) == (
        "accuracy [%]",
        "share of images [%]",
        "confidence",
    )


def test_numbers_of_a_single_run_have_their_intervals():
    figure = calibration(one_run())
    upper, lower = figure.axes
    assert upper.get_title() == "ViT micro, 64.0 %"
    assert lower.get_title("left").splitlines() == [
        "ECE 13.0 [10.0, 20.0] %",
        "ECSE +11.0 [−2.0, +20.0] %",
        "NLL 1.500 ± 0.250 nats",
        "best T 2.00 [1.50, 2.50]",
    ]
    assert figure.get_supxlabel().splitlines()[-1] == "Definition: corrected, 4 bins."
    assert calibration(one_run(model="", definition="paper")).axes[0].get_title() == "accuracy 64.0 %"


def test_seeds_are_averaged_and_their_spread_is_the_error_bar():
    runs = [one_run(model, seed) for model in ("vit_micro", "resnet_micro") for seed in range(3)]
    runs[4]["bin_accuracy"][1] = np.nan  # the bin is empty in one seed, and in all but one of the next
    for run in runs[4:]:
        run["bin_accuracy"][2] = np.nan
    figure = calibration(stack_runs(runs))
    first, second, lower, _ = figure.axes
    assert (first.get_title(), second.get_title()) == ("ViT micro, 65.0 ± 1.0 %", "ResNet micro, 65.0 ± 1.0 %")
    np.testing.assert_allclose(spans(bars(first)["accuracy"])[1:, 1], ACCURACY[1:] + 0.01)
    half_width = t.ppf(0.975, 2) * 0.01 / np.sqrt(3)
    np.testing.assert_allclose(error_bars(first)[0], (0.375, 0.51 - half_width, 0.51 + half_width))
    np.testing.assert_allclose(spans(bars(second)["accuracy"])[1:, 1], [0.51, 0.6, 0.71])
    half_width = t.ppf(0.975, 1) * 0.02 / np.sqrt(2) / np.sqrt(2)
    np.testing.assert_allclose(error_bars(second)[0], (0.375, 0.51 - half_width, 0.51 + half_width))
    assert error_bars(second)[:, 0].tolist() == [0.375, 0.875]  # no interval of one seed
    assert lower.get_title("left").splitlines()[:2] == ["ECE 14.0 ± 1.0 %", "ECSE +12.0 ± 1.0 %"]
    assert figure.get_supxlabel().startswith("Error bars: 95 % t interval over 3 seeds")
    assert len({ax.get_ylim() for ax in figure.axes[2:]}) == 1


@pytest.mark.parametrize("count", [1, 3, 6])
def test_nothing_overlaps_or_is_cut_off(count):
    names = ["vit_micro", "resnet_micro", "alternet_micro", "convit_ti", "resnext_50", "mixer_s16"][:count]
    figure = calibration(stack_runs([one_run(name) for name in names]))
    with style():
        figure.draw_without_rendering()
    upper, lower = figure.axes[:count], figure.axes[count:]
    numbers = [ax._left_title.get_window_extent() for ax in lower]
    for box in (*numbers, figure.legends[0].get_window_extent(), figure._supxlabel.get_window_extent()):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
    assert all(left.x1 < right.x0 for left, right in pairwise(numbers))
    for box, above, below in zip(numbers, upper, lower, strict=True):
        assert below.bbox.y1 < box.y0 < box.y1 < above.bbox.y0
    assert figure.get_figwidth() <= 7.0
