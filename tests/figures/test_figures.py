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
from vitprobe.figures.loss_landscape import rises
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


# --- the loss landscape and the trajectory ----------------------------------------------------------


def landscape(directions: str = "random", *, points: int = 5, low: float = -1.0, pairs: int = 1, **attributes):
    """A paraboloid, whose height is known everywhere."""
    steps = np.linspace(low, 1.0, points)
    x, y = np.meshgrid(steps, steps)
    nll = 0.5 + np.stack([(1 + pair) * (x**2 + 2 * y**2) for pair in range(pairs)])
    dims = ("direction_pair", "y", "x")
    coords = {axis: (axis, steps, {"long_name": f"steps along {axis}, scaled", "units": "1"}) for axis in ("x", "y")}
    attributes = {"images": 7, "directions": directions, "batch_norm": "kept", "complete": 1, **attributes}
    return xr.Dataset(
        {"nll": described(dims, nll), "l2_sum_of_norms": described(dims, np.full_like(nll, 10.0))},
        {
            **coords,
            "direction_pair": np.arange(pairs),
            "plane": ("direction_pair", [f"plane{pair}" for pair in range(pairs)]),
        },
        results.provenance(title="t", probe="loss_landscape", **attributes),
    )


def colorbar_labels(figure: Figure) -> list[str]:
    return [ax.get_ylabel() for ax in figure.axes if ax.get_label() == "<colorbar>"]


def words(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_landscape_is_one_row_per_pair_and_one_column_per_loss():
    figure = figures.draw(landscape(pairs=2, normalisation="li"))
    assert len(panels(figure)) == 4
    assert [ax.get_title() for ax in panels(figure)][:2] == ["NLL", "NLL + 0.05 · sum of norms"]
    assert panels(figure)[2].get_xlabel() == "steps along x"
    assert set(colorbar_labels(figure)) == {"rise from the centre [nats]"}
    assert note(figure) == "7 images, the same for all cells. Normalisation: li."
    assert not any(words(ax) for ax in panels(figure))


@pytest.mark.parametrize("height", [{"points": 4}, {"low": 0.5}])
def test_without_a_centre_the_lowest_cell_is_the_reference(height):
    ds = landscape(**height)
    parts = rises(ds)
    assert all(float(values.min()) == 0 for values in parts.values())
    assert set(colorbar_labels(figures.draw(ds))) == {"rise from the lowest cell [nats]"}


def test_the_reference_is_the_centre():
    ds = landscape()
    ds["nll"] = ds.nll - ds.nll.x  # lower than the centre on one side
    values = rises(ds)["NLL"]
    assert values.sel(x=0, y=0).item() == 0 and float(values.min()) < 0


def test_cells_without_a_number_stay_empty_and_are_counted(tmp_path):
    ds = landscape(points=7, complete=0)
    ds["nll"] = ds.nll.where(ds.y < 0.5)
    for draw in (figures.loss_landscape, figures.loss_surface):
        figure = draw(ds)
        figures.save_figure(figure, tmp_path / "a.png", dpi=50)
        assert "Unfinished. 14 of 49 cells without a number." in note(figure)
    ds["nll"] = ds.nll.where(ds.y < -0.5)  # the centre is not done
    assert set(colorbar_labels(figures.draw(ds))) == {"rise from the lowest cell [nats]"}
    with pytest.raises(ValueError, match="no cell of this landscape has a number"):
        figures.draw(ds.assign(nll=ds.nll * np.nan))


def test_eigenvectors_are_labelled_by_their_eigenvalues():
    ds = landscape("eigenvectors", eigenvalue_x=12.34, eigenvalue_y=-5.0)
    ax = panels(figures.draw(ds))[0]
    assert ax.get_xlabel().replace("\N{NO-BREAK SPACE}", " ") == "steps along x (λ = 12.3 nats)"
    assert "λ = -5 nats" in ax.get_ylabel().replace("\N{NO-BREAK SPACE}", " ")
    assert "Normalisation" not in note(figures.draw(ds))


def test_checkpoints_are_marked_where_they_lie():
    ds = landscape("checkpoints", points=7, low=-0.5)
    ax = panels(figures.draw(ds))[0]
    assert {text.get_text(): text.xy for text in ax.texts} == {
        "model": (0, 0),
        "checkpoint 1": (1, 0),
        "checkpoint 2": (0, 1),
    }
    line = ds.sel(y=0).drop_vars("y")
    (ax,) = figures.draw(line).axes
    assert words(ax) == ["model", "checkpoint 1"]
    np.testing.assert_allclose(ax.lines[0].get_ydata(), line.x**2)


def test_surface_has_one_facet_between_cells():
    figure = figures.loss_surface(landscape(pairs=2), elevation=15, azimuth=15)
    assert len(figure.axes) == 4
    for ax in figure.axes:
        assert (ax.elev, ax.azim) == (15, 15)
        assert len(ax.collections[0].get_facecolor()) == 16
        assert ax.get_zlabel() == "rise from the centre [nats]"
    with pytest.raises(ValueError, match="a line has no surface"):
        figures.loss_surface(landscape().sel(y=0))


def test_landscapes_are_drawn_run_by_run():
    ds = results.stack_runs([landscape(), landscape()], model=["a", "b"])
    with pytest.raises(ValueError, match=r"ds\.isel\(run=0\)"):
        figures.draw(ds)
    assert figures.draw(ds.isel(run=0)).axes


def trajectory(model: str = "vit_micro", steps: int = 4, turn: float = 1.0, pairs: int = 1) -> xr.Dataset:
    """A spiral into the model, which is the last checkpoint."""
    radius = np.linspace(1, 0, steps)
    angle = np.where(radius > 0, turn * (1 - radius), np.nan)
    both = ("direction_pair", "epoch")
    place = np.nan_to_num(angle)
    along = {name: np.tile(radius * f(place), (pairs, 1)) for name, f in (("along_x", np.cos), ("along_y", np.sin))}
    return xr.Dataset(
        {
            "radius": described("epoch", radius),
            "angle": described("epoch", angle),
            **{
                name: (both, values, {"long_name": f"steps {name}, scaled", "units": "1"})
                for name, values in along.items()
            },
            "off_plane": described(both, np.tile(np.append(np.linspace(0.1, 0.4, steps - 1), np.nan), (pairs, 1))),
        },
        {
            "epoch": np.arange(steps),
            "direction_pair": np.arange(pairs),
            "plane": ("direction_pair", [f"plane{pair}" for pair in range(pairs)]),
        },
        results.provenance(title="t", probe="trajectory", model=model),
    )


def test_trajectory_is_its_radius_and_angle_and_its_path():
    ds = trajectory()
    figure = figures.draw(ds)
    polar, plane = figure.axes
    path, ring = polar.lines
    np.testing.assert_allclose(path.get_ydata(), ds.radius)
    np.testing.assert_allclose(path.get_xdata(), [*ds.angle[:-1], 0])
    np.testing.assert_allclose([ring.get_xdata(), ring.get_ydata()], [[0], [1]])
    np.testing.assert_allclose(plane.lines[0].get_xydata(), np.stack([ds.along_x[0], ds.along_y[0]], axis=1))
    assert plane.get_xlabel() == "steps along_x"
    assert polar.get_thetamax() == 90
    assert figures.draw(trajectory(turn=3.0)).axes[0].get_thetamax() == 180
    assert note(figure) == "Outside the plane: 10 to 40 % of the squared distance from the model."


def test_runs_of_one_model_share_a_colour(tmp_path):
    names = ["vit_micro", "vit_micro", "resnet_micro"]
    ds = results.stack_runs([trajectory(name, steps) for name, steps in zip(names, (4, 6, 5), strict=True)])
    figure = figures.draw(ds)
    figures.save_figure(figure, tmp_path / "a.png", dpi=50)
    for ax in figure.axes:
        paths = [line for line in ax.lines if len(line.get_xdata()) > 1]
        assert [len(line.get_xdata()) for line in paths] == [4, 6, 5]
        first, second, third = (line.get_color() for line in paths)
        assert first == second != third
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ViT micro", "ResNet micro"]
    with pytest.raises(ValueError, match="a landscape is that of one run"):
        figures.trajectory(ds, landscape())


def test_trajectory_over_the_landscape_of_the_same_plane(tmp_path):
    ds, below = trajectory(pairs=2), landscape(pairs=2)
    figure = figures.trajectory(ds, below.isel(direction_pair=[0]))
    figures.save_figure(figure, tmp_path / "a.png", dpi=50)
    assert colorbar_labels(figure) == ["NLL: rise from the centre [nats]"]
    plane = figure.axes[1]
    assert plane.get_xlabel() == "steps along x"
    # The contours lie where the loss says: the level of a point is the paraboloid's.
    filled = plane.collections[0]
    assert filled.levels[-1] == pytest.approx(3.0)
    with pytest.raises(ValueError, match=r"is of the plane plane1, the trajectory of plane0"):
        figures.trajectory(ds.isel(direction_pair=[0]), below.isel(direction_pair=[1]))


def test_trajectory_along_a_line_is_drawn_over_epochs():
    ds = trajectory().drop_vars("along_y")
    plane = figures.draw(ds).axes[1]
    np.testing.assert_allclose(plane.lines[0].get_xydata(), np.stack([ds.epoch, ds.along_x[0]], axis=1))
    assert (plane.get_xlabel(), plane.get_ylabel()) == ("epoch", "steps along_x, scaled")
