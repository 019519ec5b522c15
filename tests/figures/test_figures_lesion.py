"""Synthetic lesions and masks in, artists out: points, intervals, crosses and words as the data say."""

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from scipy.stats import t

from vitprobe.figures.lesion import lesion
from vitprobe.figures.masking import masking
from vitprobe.figures.page import PALETTE, save_figure
from vitprobe.results import provenance, stack_runs

DESCRIBED = {"long_name": "made up", "units": "1"}
KINDS = {
    "vit_micro": ["stem", "msa", "mlp", "msa", "mlp"],
    "alternet_micro": ["stem", "conv", "msa", "subsample", "conv", "msa"],
}


def attributes(probe, model, seed, **extra):
    return provenance(title="t", probe=probe, seed=seed, model=model, **extra)


def one_lesion(model="vit_micro", seed=0, **extra):
    rng = np.random.default_rng([seed, len(model)])
    kinds = KINDS[model]
    n = len(kinds)
    change = -rng.uniform(0, 0.3, n)
    change[[index for index, kind in enumerate(kinds) if kind in ("stem", "subsample")]] = np.nan
    data = {
        "accuracy_change": ("layer", change, DESCRIBED),
        "accuracy_change_se": ("layer", np.where(np.isnan(change), np.nan, 0.02), DESCRIBED),
        "intact_accuracy": ((), 0.7 + 0.01 * seed, DESCRIBED),
    }
    coords = {
        "layer": np.arange(n),
        "layer_name": ("layer", [f"units.{index}" for index in range(n)]),
        "kind": ("layer", kinds),
        "depth": ("layer", np.linspace(0, 1, n)),
    }
    return xr.Dataset(data, coords, attributes("lesion", model, seed, **extra))


def one_masking(model="vit_micro", seed=0, per="network", masks=("position_codes", "window:3", "mean")):
    rng = np.random.default_rng([seed, len(model)])
    shape = {"mask": len(masks)} | ({} if per == "network" else {"layer": 4})
    change = -rng.uniform(0, 0.3, tuple(shape.values()))
    coords = {"mask": np.arange(len(masks)), "mask_name": ("mask", list(masks))}
    if per != "network":
        change[-1, -1] = np.nan
        coords |= {
            "layer": np.arange(4),
            "layer_name": ("layer", [f"blocks.{index}" for index in range(4)]),
            "depth": ("layer", np.linspace(0, 1, 4)),
        }
    data = {
        "accuracy_change": (tuple(shape), change, DESCRIBED),
        "accuracy_change_se": (tuple(shape), np.full(change.shape, 0.02), DESCRIBED),
    }
    return xr.Dataset(data, coords, attributes("masking", model, seed, per=per))


def stacked(one, names=tuple(KINDS), seeds=3, **options):
    return stack_runs([one(name, seed, **options) for name in names for seed in range(seeds)])


def bars(container):
    """Points `(x, y)` of error bars, and the ends of each bar `(bar, 2, 2)`."""
    line, _, (segments,) = container
    return np.stack(line.get_data(), axis=1), np.array(segments.get_segments())


def note(figure: Figure) -> str:
    return figure.get_supxlabel()


DATASETS = {
    "lesion": (lesion, lambda: one_lesion()),
    "lesions": (lesion, lambda: stacked(one_lesion)),
    "masking": (masking, lambda: one_masking()),
    "maskings": (masking, lambda: stacked(one_masking)),
    "masking by layer": (masking, lambda: one_masking(per="layer")),
    "maskings up to layers": (masking, lambda: stacked(one_masking, per="up_to_layer")),
}


@pytest.mark.parametrize(("draw", "build"), DATASETS.values(), ids=DATASETS)
def test_every_figure_draws_and_leaves_settings_alone(draw, build, tmp_path):
    before = dict(mpl.rcParams)
    ds = build()
    figure = draw(ds)
    first = save_figure(figure, tmp_path / "a.png", dpi=50).read_bytes()
    assert dict(mpl.rcParams) == before
    assert figure.get_figwidth() <= 7.0
    if "run" not in ds.dims:  # one unstacked run is the stack of one
        assert save_figure(draw(stack_runs([ds])), tmp_path / "b.png", dpi=50).read_bytes() == first


def test_a_lesion_is_a_point_in_the_middle_of_its_unit():
    ds = one_lesion()
    figure = lesion(ds)
    (ax,) = figure.axes
    points, segments = bars(ax.containers[0])
    np.testing.assert_allclose(points[:, 0], [1 / 8, 3 / 8, 5 / 8, 7 / 8])
    np.testing.assert_allclose(points[:, 1], 100 * ds.accuracy_change[1:])
    np.testing.assert_allclose(segments[:, 1, 1] - segments[:, 0, 1], 2 * 1.96 * 2.0)
    crosses = [line for line in ax.lines if line.get_marker() == "x"]
    np.testing.assert_array_equal(np.stack(crosses[0].get_data(), 1), [[0, 0]])
    low, high = ax.get_ylim()
    assert low < segments[:, 0, 1].min() and high > max(0, segments[:, 1, 1].max())
    assert ax.get_xlabel() == "depth"
    assert ax.get_ylabel() == "change of accuracy\n[percentage points]"
    assert ax.get_title() == "ViT micro, intact 70.0 %"
    assert note(figure) == "Bars of a single run: 95 % interval over images, paired. ×: not removed."
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["self-attention", "MLP"]


def test_several_seeds_have_t_intervals_and_points_of_their_own():
    ds = stacked(one_lesion)
    figure = lesion(ds)
    assert [ax.get_title() for ax in figure.axes] == ["ViT micro, intact 71.0 %", "Alter" + "Net micro, intact 71.0 %"]
    runs = ds.isel(run=(ds.model == "alternet_micro").values)
    changes = 100 * runs.accuracy_change.transpose("run", "layer").values[:, [1, 2, 4, 5]]
    ax = figure.axes[1]
    points, segments = bars(ax.containers[0])
    np.testing.assert_allclose(points[:, 0], [0.1, 0.3, 0.7, 0.9])
    np.testing.assert_allclose(points[:, 1], changes.mean(0))
    half = t.ppf(0.975, 2) * changes.std(0, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose((segments[:, 1, 1] - segments[:, 0, 1]) / 2, half)
    seeds = ax.collections[-1].get_offsets()
    assert np.isfinite(seeds).all(axis=1).sum() == changes.size
    crosses = [line for line in ax.lines if line.get_marker() == "x"]
    np.testing.assert_allclose(crosses[0].get_xdata(), [0, 0.5])
    assert note(figure) == "Bars: 95 % t interval over 3 seeds; small points: single seeds. ×: not removed."


def test_a_title_that_has_an_accuracy_keeps_it():
    (ax,) = lesion(one_lesion(accuracy=61.25)).axes
    assert ax.get_title() == "ViT micro, 61.2 %"


def test_masks_are_rows_and_models_colours():
    figure = masking(stacked(one_masking, seeds=1))
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["no position codes", "3×3 windows", "mean maps"]
    assert ax.get_xlabel() == "change of accuracy [percentage points]"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ViT micro", "AlterNet micro"]
    for index, (container, name) in enumerate(zip(ax.containers, KINDS, strict=True)):
        points, segments = bars(container)
        np.testing.assert_allclose(points[:, 0], 100 * one_masking(name).accuracy_change)
        np.testing.assert_allclose(points[:, 1], np.arange(3) + (-0.15, 0.15)[index])
        np.testing.assert_allclose(segments[:, 1, 0] - segments[:, 0, 0], 2 * 1.96 * 2.0)
        assert to_hex(container[0].get_color()) == PALETTE[index].lower()
    # The first mask is on top.
    bottom, top = ax.get_ylim()
    assert bottom > top


def test_masks_by_layer_are_lines():
    ds = one_masking(per="up_to_layer")
    figure = masking(ds)
    (ax,) = figure.axes
    lines = [line for line in ax.lines if line.get_label() == "mean"]
    for line, change in zip(lines, ds.accuracy_change.values, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3, 4])
        np.testing.assert_allclose(line.get_ydata(), 100 * change)
    assert ax.get_xlabel() == "first layers masked"
    assert masking(one_masking(per="layer")).axes[0].get_xlabel() == "attention layer masked"
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    first = 100 * float(ds.accuracy_change[0, 0])
    assert np.isclose(band, first - 1.96 * 2).any() and np.isclose(band, first + 1.96 * 2).any()
    assert note(figure) == "Band of a single run: 95 % interval over images, paired."
