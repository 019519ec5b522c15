"""Synthetic results in, artists out: as many curves, spans, bands and words as the data say."""

import math
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vitprobe import figures, results
from vitprobe.figures.page import interval, models

KINDS = {
    "vit_micro": ["stem", "msa", "mlp", "msa", "mlp"],
    "resnet_micro": ["stem", "conv", "conv", "subsample", "conv", "conv", "conv"],
    "alternet_micro": ["stem", "conv", "msa", "subsample", "conv", "msa"],
}
DESCRIBED = {"long_name": "made up", "units": "1"}
PROBES = ("fourier", "feature_variance", "nonlocality")


def described(dims, values):
    return (dims, values, DESCRIBED)


def one_run(probe: str, model: str = "vit_micro", seed: int = 0, accuracy: float = 60.0) -> xr.Dataset:
    rng = np.random.default_rng([seed, len(model)])
    kinds = KINDS[model] if probe != "nonlocality" else ["msa"] * 3
    n = len(kinds)
    grid = np.where(np.cumsum([kind == "subsample" for kind in kinds]), 4, 8)
    coords = {
        "layer": np.arange(n),
        "layer_name": ("layer", [f"units.{index}" for index in range(n)]),
        "kind": ("layer", kinds),
        "depth": ("layer", np.linspace(0, 1, n)),
        "grid_h": ("layer", grid),
    }
    by_layer = rng.normal(-2.0, 1.0, n)
    if probe == "fourier":
        frequency = np.arange(5) / 4
        curves = by_layer[:, None] * frequency
        curves[np.ix_(grid == 4, [1, 3])] = np.nan  # the smaller grid lacks the odd frequencies
        data = {
            "relative_log_amplitude": described(("layer", "frequency"), curves),
            "high_frequency_amplitude": described("layer", by_layer),
            "high_frequency_amplitude_se": described("layer", np.full(n, 0.05)),
        }
        coords["frequency"] = frequency
    elif probe == "feature_variance":
        data = {
            "variance": described("layer", np.exp(by_layer)),
            "variance_se": described("layer", np.full(n, 0.05)),
            "normalised_variance": described("layer", np.exp(by_layer) / 2),
            "normalised_variance_se": described("layer", np.full(n, 0.05)),
        }
    else:
        data = {
            "nonlocality": described(("layer", "head"), rng.uniform(1, 4, (n, 2))),
            "uniform_nonlocality": described("layer", np.full(n, 4.5)),
        }
        coords["head"] = np.arange(2)
    attributes = results.provenance(title="t", probe=probe, seed=seed, model=model, accuracy=accuracy)
    return xr.Dataset(data, coords, attributes)


def stacked(probe: str, names=tuple(KINDS), seeds: int = 3) -> xr.Dataset:
    runs = [one_run(probe, name, seed, accuracy=60.0 + seed) for name in names for seed in range(seeds)]
    return results.stack_runs(runs)


def panels(figure: Figure) -> list:
    return [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]


def spans(ax) -> list[Rectangle]:
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def note(figure: Figure) -> str:
    return figure.get_supxlabel()


def test_no_torch():
    code = "import sys, vitprobe.figures; print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize(("names", "seeds"), [(["vit_micro"], 1), (list(KINDS), 3), (list(KINDS) * 2, 5)])
def test_every_figure_draws_and_leaves_settings_alone(probe, names, seeds, tmp_path):
    ds = stacked(probe, names[:3], seeds)
    if len(names) > 3:
        again = stacked(probe, names[3:], seeds)
        again["model"] = again.model.str.replace("micro", "ti")
        ds = xr.concat([ds, again], "run", data_vars="all", coords="different", compat="equals", join="outer")
    before = dict(mpl.rcParams)
    figure = figures.draw(ds)
    figures.save_figure(figure, tmp_path / "a.png", dpi=50)
    assert dict(mpl.rcParams) == before
    assert len({ax.get_title() for ax in panels(figure)} - {""}) == len(names)
    assert figure.get_figwidth() <= 7.0


@pytest.mark.parametrize("probe", PROBES)
def test_one_unstacked_run_is_the_stack_of_one(probe, tmp_path):
    alone = figures.save_figure(figures.draw(one_run(probe)), tmp_path / "a.png").read_bytes()
    assert figures.save_figure(figures.draw(stacked(probe, ["vit_micro"], 1)), tmp_path / "b.png").read_bytes() == alone


def test_unknown_probe_and_kind():
    with pytest.raises(ValueError, match=r"unknown probe .*'fuorier'.*Did you mean 'fourier'"):
        figures.draw(one_run("fourier").assign_attrs(probe="fuorier"))
    with pytest.raises(ValueError, match="unknown kind of unit 'attn'"):
        figures.draw(one_run("fourier").assign_coords(kind=("layer", ["attn"] * 5)))


def test_spectra_are_one_curve_per_unit_without_padding_or_foreign_frequencies():
    ds = stacked("fourier")
    figure = figures.fourier(ds)
    for ax, (name, kinds) in zip(panels(figure)[:3], KINDS.items(), strict=True):
        assert len(ax.lines) == len(kinds)
        assert ax.get_xlabel() == "frequency [π]"
        first, last = ax.lines[0], ax.lines[-1]
        np.testing.assert_array_equal(first.get_xdata(), np.arange(5) / 4)
        runs = ds.isel(run=(ds.model == name).values)
        np.testing.assert_allclose(first.get_ydata(), runs.relative_log_amplitude.sel(layer=0).mean("run"))
        assert len(last.get_xdata()) == (3 if "subsample" in kinds else 5)
        assert first.get_color() != last.get_color()
    assert "relative log amplitude" in panels(figure)[0].get_ylabel()
    assert [ax.get_ylabel() for ax in figure.axes if ax.get_label() == "<colorbar>"] == ["depth"]
    limits = {ax.get_ylim() for ax in panels(figure)[:3]}
    assert len(limits) == 1


def test_definition_is_written_under_the_figure():
    assert "Definition: paper." in note(figures.draw(one_run("fourier").assign_attrs(definition="paper")))


@pytest.mark.parametrize("probe", ["fourier", "feature_variance"])
def test_spans_run_from_the_unit_before_and_are_shaded_by_kind(probe):
    figure = figures.draw(stacked(probe))
    for ax, kinds in zip(panels(figure)[-3:], KINDS.values(), strict=True):
        ends = np.linspace(0, 1, len(kinds))
        drawn = spans(ax)
        assert len(drawn) == len(kinds) - 1  # the stem has no width
        np.testing.assert_allclose([span.get_x() for span in drawn], ends[:-1])
        np.testing.assert_allclose([span.get_x() + span.get_width() for span in drawn], ends[1:])
        looks = {}
        for span, kind in zip(drawn, kinds[1:], strict=True):
            looks.setdefault(kind, set()).add((to_hex(span.get_facecolor()), span.get_hatch()))
        assert all(len(look) == 1 for look in looks.values())
        assert len(set.union(*looks.values())) == len(looks)
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["self-attention", "convolution", "MLP", "subsampling"]
    assert not any(ax.get_legend() for ax in panels(figure))


def test_legend_names_only_what_is_there():
    (legend,) = figures.draw(one_run("feature_variance")).legends
    assert [text.get_text() for text in legend.get_texts()] == ["self-attention", "MLP"]


def band(ax) -> np.ndarray:
    """Lowest and highest ordinate of the band at each of its abscissas."""
    (collection,) = [part for part in ax.collections if isinstance(part, PolyCollection)]
    corners = collection.get_paths()[0].vertices
    return np.array([[f(corners[corners[:, 0] == x, 1]) for f in (np.min, np.max)] for x in np.unique(corners[:, 0])])


def test_band_is_the_t_interval_over_seeds():
    ds = stacked("feature_variance", ["vit_micro"], 3)
    (ax,) = panels(figures.feature_variance(ds))
    mean, deviation = ds.variance.mean("run"), ds.variance.std("run", ddof=1)
    quantile = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # closed form of two degrees of freedom
    half_width = quantile * deviation / math.sqrt(3)
    np.testing.assert_allclose(band(ax), np.stack([mean - half_width, mean + half_width], axis=1))
    assert len(ax.lines) == 4  # three seeds and their mean
    np.testing.assert_allclose(ax.lines[-1].get_ydata(), mean)
    low, high = ax.get_ylim()
    assert low < ds.variance.min() < ds.variance.max() < high


def test_band_of_a_single_run_is_the_standard_error_over_images():
    ds = one_run("feature_variance")
    figure = figures.feature_variance(ds)
    (ax,) = panels(figure)
    np.testing.assert_allclose(band(ax), np.stack([ds.variance - 0.05, ds.variance + 0.05], axis=1))
    assert len(ax.lines) == 1
    assert note(figure) == "Band of a single run: standard error over images."


def test_normalised_variance_is_another_variable_and_another_label():
    ds = one_run("feature_variance")
    raw, normalised = (panels(figures.feature_variance(ds, normalised=flag))[0] for flag in (False, True))
    np.testing.assert_allclose(normalised.lines[-1].get_ydata(), ds.normalised_variance)
    assert raw.get_ylabel() != normalised.get_ylabel()
    assert all(ax.get_ylabel().endswith("[1]") for ax in (raw, normalised))


def test_nonlocality_shows_each_head_and_uniform_attention():
    ds = stacked("nonlocality", ["vit_micro"], 3)
    figure = figures.nonlocality(ds)
    (ax,) = panels(figure)
    points = next(part for part in ax.collections if not isinstance(part, PolyCollection))
    assert len(points.get_offsets()) == 3 * 3 * 2
    mean, uniform = ax.lines
    np.testing.assert_allclose(mean.get_ydata(), ds.nonlocality.mean(["run", "head"]))
    assert uniform.get_linestyle() == "--"
    np.testing.assert_allclose(uniform.get_ydata(), 4.5)
    assert ax.get_ylabel() == "nonlocality [patches]"
    assert ax.get_ylim()[0] == 0


def test_titles():
    titles = [model.title for model in models(stacked("fourier"))]
    assert titles == ["ViT micro, 61.0 ± 1.0 %", "ResNet micro, 61.0 ± 1.0 %", "AlterNet micro, 61.0 ± 1.0 %"]
    assert models(one_run("fourier"))[0].title == "ViT micro, 60.0 %"
    bare = one_run("fourier")
    del bare.attrs["accuracy"]
    assert models(bare)[0].title == "ViT micro"
    assert "±: standard deviation over seeds." in note(figures.draw(stacked("fourier")))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("vit_micro", "ViT micro"),
        ("resnet_50", "ResNet 50"),
        ("resnet50", "ResNet50"),
        ("convit_ti", "ConViT Ti"),
        ("convmixer_256_8", "ConvMixer 256 8"),
        ("alternet_micro", "AlterNet micro"),
        ("my_network", "my network"),
    ],
)
def test_pretty(name, written):
    assert figures.pretty(name) == written


def test_interval_of_one_seed_is_unknown():
    mean, half_width = interval(np.array([[1.0, 2.0]]))
    np.testing.assert_array_equal(mean, [1, 2])
    assert np.isnan(half_width).all()


def test_saving(tmp_path, monkeypatch):
    path = figures.save_figure(figures.draw(one_run("fourier")), tmp_path / "new" / "a.png", dpi=50)
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")
    assert b"Software" not in before
    assert figures.save_figure(figures.draw(one_run("fourier")), tmp_path / "b.png", dpi=50).read_bytes() == before
    with pytest.raises(ValueError, match=r"a\.pdf\.png"):
        figures.save_figure(Figure(), tmp_path / "a.pdf")

    def broken(self, target, **_):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", broken)
    with pytest.raises(OSError, match="disk full"):
        figures.save_figure(Figure(), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
