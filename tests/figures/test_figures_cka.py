"""CKA as figures: the colours are the numbers, and the marks stand where the units are."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.patches import Rectangle

from vitprobe.figures import save_figure
from vitprobe.figures.cka import cka
from vitprobe.results import stack_runs

RESNET = ["stem", "conv", "conv", "subsample", "conv"]
VIT = ["stem", "msa", "mlp", "msa", "mlp", "msa", "mlp"]


def measured(kinds=RESNET, kinds_other=None, *, seed=0, low=0.1, error=0.02, **attributes) -> xr.Dataset:
    other = kinds if kinds_other is None else kinds_other
    values = np.random.default_rng(seed).uniform(low, 0.9, (len(kinds), len(other)))
    described = {"long_name": "made up", "units": "1"}
    pairs = ("layer", "layer_other")
    coords = {}
    for suffix, side in (("", kinds), ("_other", other)):
        layer = f"layer{suffix}"
        coords[layer] = np.arange(len(side))
        coords[f"layer_name{suffix}"] = (layer, [f"units.{i}" for i in range(len(side))])
        coords[f"kind{suffix}"] = (layer, side)
    data = {"cka": (pairs, values, described), "cka_se": (pairs, np.full_like(values, error), described)}
    return xr.Dataset(data, coords, {"probe": "cka", "estimator": "unbiased"} | attributes)


def panels(figure) -> list:
    return [ax for ax in figure.axes if ax.get_label() != "<colorbar>" and ax.axison]


def drawn(ax) -> np.ndarray:
    return np.asarray(ax.images[0].get_array())


def marks(ax) -> list[dict[str, float]]:
    """The letters over and beside a matrix, and where they stand."""
    top, right = ax.child_axes
    return [
        {
            label.get_text(): float(place)
            for label, place in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True)
        }
        for axis in (top.xaxis, right.yaxis)
    ]


def test_one_matrix_with_its_marks(tmp_path):
    ds = measured(block_structure=0.21, block_structure_se=0.0123, model="resnet_micro")
    figure = cka(ds)
    save_figure(figure, tmp_path / "a.png", dpi=50)
    (ax,) = panels(figure)
    np.testing.assert_array_equal(drawn(ax), ds.cka)
    assert ax.images[0].get_extent() == [-0.5, 4.5, -0.5, 4.5]  # the first unit is at the lower left
    assert ax.images[0].get_clim() == (0, 1)
    assert marks(ax) == [{"E": 0, "P": 3}] * 2
    vertical, horizontal = ax.lines
    assert list(vertical.get_xdata()) == list(horizontal.get_ydata()) == [2.5, 2.5]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "3", "4", "5"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("unit", "unit")
    assert ax.get_title() == "ResNet micro\nblocks +0.210 ± 0.012"
    note = figure.get_supxlabel().replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ")
    assert "HSIC: unbiased. Standard errors over batches up to 0.02." in note
    assert "E: embedding. P: subsampling." in note


def test_strips_show_the_kinds_of_units():
    figure = cka(measured(VIT))
    (ax,) = panels(figure)
    below, beside = ([p for p in ax.patches if isinstance(p, Rectangle)][i : i + 7] for i in (0, 7))
    assert [strip.get_x() for strip in below] == [strip.get_y() for strip in beside] == [i - 0.5 for i in range(7)]
    assert all(strip.get_y() < 0 and strip.get_y() + strip.get_height() == 0 for strip in below)
    looks = [(strip.get_facecolor(), strip.get_hatch()) for strip in below]
    assert looks[1] == looks[3] == looks[5] != looks[2] == looks[4]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["self-attention", "MLP"]
    assert not ax.lines and "P:" not in figure.get_supxlabel()
    with pytest.raises(ValueError, match=r"unknown kind of unit 'mpl'.*Did you mean 'mlp'"):
        cka(measured(["stem", "mpl"]))


def test_units_chosen_by_pattern_have_no_kinds_to_name():
    assert not cka(measured(["module"] * 3)).legends


def test_two_models_have_an_axis_each():
    ds = measured(VIT, RESNET, model_class_other="net.ResNet")
    figure = cka(ds)
    (ax,) = panels(figure)
    np.testing.assert_array_equal(drawn(ax), ds.cka)
    assert drawn(ax).shape == (7, 5)
    assert marks(ax) == [{"E": 0, "P": 3}, {"E": 0}]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("unit of the other model", "unit")
    assert "blocks" not in ax.get_title()
    transposed = ds.transpose("layer_other", "layer")
    np.testing.assert_array_equal(drawn(panels(cka(transposed))[0]), ds.cka)


def test_a_panel_per_run_without_its_padding(tmp_path):
    runs = [
        measured(RESNET, model="resnet_micro", seed=0, low=-0.2),
        measured(VIT, model="vit_micro", seed=1, block_structure=0.1, block_structure_se=0.01),
        measured(VIT, model="vit_micro", seed=2),
        measured(RESNET, model="resnet20", seed=0),
    ]
    for seed, run in zip((0, 1, 2, 0), runs, strict=True):
        run.attrs["seed"] = seed
    figure = cka(stack_runs(runs))
    save_figure(figure, tmp_path / "a.png", dpi=50)
    assert figure.get_figwidth() <= 7.0
    titles = [ax.get_title() for ax in panels(figure)]
    assert titles == ["ResNet micro", "ViT micro, seed 1\nblocks +0.100 ± 0.010", "ViT micro, seed 2", "ResNet20"]
    for ax, run in zip(panels(figure), runs, strict=True):
        np.testing.assert_array_equal(drawn(ax), run.cka)
        assert ax.images[0].get_clim() == (0, 1)
    (bar,) = [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]
    assert bar.get_ylabel() == "CKA [1]"
    labelled = cka(stack_runs(runs[:2]).assign_coords(label=("run", ["before", "after"])))
    assert [ax.get_title().partition("\n")[0] for ax in panels(labelled)] == ["before", "after"]


def test_units_without_a_number_stay_empty(tmp_path):
    ds = measured(RESNET)
    for name in ("cka", "cka_se"):
        ds[name] = ds[name].where((ds.layer != 1) & (ds.layer_other != 1))
    figure = cka(ds)
    save_figure(figure, tmp_path / "a.png", dpi=50)
    assert np.ma.getmaskarray(panels(figure)[0].images[0].get_array()).sum() == 9


def test_a_single_batch_has_no_error_to_state():
    alone = measured(error=np.nan)
    assert "Standard errors" not in cka(alone).get_supxlabel()
    assert "Standard errors over batches up to 0.02." in cka(stack_runs([alone, measured()])).get_supxlabel()


@pytest.mark.parametrize(("units", "numbered"), [(8, range(1, 9)), (13, range(2, 14, 2)), (27, range(5, 28, 5))])
def test_large_matrices_number_every_few_units(units, numbered):
    (ax,) = panels(cka(measured(["stem", *["conv"] * (units - 1)])))
    assert [int(label.get_text()) for label in ax.get_yticklabels()] == list(numbered)
    assert [place + 1 for place in ax.get_yticks()] == list(numbered)
