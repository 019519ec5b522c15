"""What goes to disk comes back, also through netCDF4 alone; what would not is refused before the disk."""

import dataclasses
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import netCDF4
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from vitprobe import results

NAMES = ["stem", "blocks.0.attn", "blöcke.0 mlp λ"]
DESCRIBED = {"long_name": "feature-map variance", "units": "1"}


def dataset(layers: int = 3, **attributes) -> xr.Dataset:
    values = np.arange(layers, dtype=np.float32) / 3
    ds = xr.Dataset(
        {"variance": ("layer", values, DESCRIBED), "count": ("layer", np.arange(layers), DESCRIBED)},
        coords={
            "layer": np.arange(layers),
            "layer_name": ("layer", (NAMES * layers)[:layers]),
            "depth": ("layer", np.linspace(0, 1, layers)),
            "grid_h": ("layer", np.full(layers, 8)),
        },
    )
    return ds.assign_attrs(results.provenance(title="variance", seed=0, **attributes))


def test_no_torch():
    code = "import sys; from vitprobe.results import *; provenance(title='t'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- provenance and JSON ---------------------------------------------------------------------------------


def test_provenance_is_text_and_numbers_and_dated_once():
    attributes = results.provenance(title="t", references="arXiv:2202.06709", config={"b": 1, "a": None}, probe="f")
    assert all(isinstance(value, str | int | float) for value in attributes.values())
    assert attributes["Conventions"] == "CF-1.12"
    assert attributes["vitprobe_schema"] == 1
    assert attributes["config"] == '{"a": null, "b": 1}'
    assert "seed" not in attributes
    assert json.loads(attributes["versions"])["numpy"] == np.__version__
    day = attributes["history"][:10]
    assert [key for key, value in attributes.items() if day in str(value)] == ["history"]
    assert str(Path.cwd()) not in attributes["history"]


def test_provenance_refuses_what_netcdf_loses():
    with pytest.raises(TypeError, match=r"attribute 'sizes' of the dataset is a list.*to_json"):
        results.provenance(title="t", sizes=[1, 2])
    with pytest.raises(ValueError, match="history"):
        results.provenance(title="t", history="mine")


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_git_commit(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    assert not results.git_commit(package)
    _git(tmp_path, "init")
    (package / "__init__.py").write_text("")
    results.git_commit.cache_clear()
    assert not results.git_commit(package)  # a repository that does not track the package is somebody else's
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "one")
    results.git_commit.cache_clear()
    clean = results.git_commit(package)
    assert len(clean) == 40
    (tmp_path / "result.nc").write_text("rewritten results are not dirt")
    results.git_commit.cache_clear()
    assert results.git_commit(package) == clean
    (package / "new.py").write_text("")
    results.git_commit.cache_clear()
    assert results.git_commit(package) == clean + "-dirty"


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float = 0.1
    sizes: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class OtherSettings:
    rate: float = 0.1
    sizes: tuple[int, ...] = (1, 2)


def test_json_names_things_and_never_by_repr():
    got = json.loads(results.to_json({"s": Settings(), "f": np.mean, "t": {"b", "a"}, "x": np.float64("nan")}))
    assert got == {
        "s": {"class": f"{__name__}.Settings", "rate": 0.1, "sizes": [1, 2]},
        "f": "numpy.mean",
        "t": ["a", "b"],
        "x": "nan",
    }
    assert "0x" not in results.to_json([
        lambda: 0,
        partial(np.mean, axis=0),
        _git,
        Path("a/b"),
        np.arange(2),
        int,
    ])
    with pytest.raises(TypeError, match="object has no place in a configuration"):
        results.to_json(object())
    with pytest.raises(TypeError, match="not 1"):
        results.to_json({1: "a"})


def test_hash_ignores_order_and_process_and_nothing_else():
    config = {"b": [1, 2], "a": Settings(), "words": {"x", "y", "z"}}
    here = results.config_hash(config)
    assert here == results.config_hash(dict(reversed(config.items())))
    code = "from vitprobe.results import config_hash; print(config_hash({'c': {'x', 'y', 'z'}, 'a': 1.5}))"
    there = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in "12"
    ]
    assert there == [results.config_hash({"a": 1.5, "c": {"z", "y", "x"}})] * 2
    changed = [Settings(rate=0.2), OtherSettings(), {"rate": 0.1, "sizes": [1, 2]}]
    assert len({results.config_hash(value) for value in [Settings(), *changed]}) == 4


def test_hash_refuses_what_has_no_name_of_its_own():
    for value in (lambda: 0, partial(lambda: 0), [].append):
        with pytest.raises(TypeError, match="top of a module"):
            results.config_hash({"loss": value})
    assert results.config_hash(len) != results.config_hash(sum)


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [None, {"a": 1}, {1}, Path("a"), pd.Timestamp(0), np.True_, True, 2**70, 1j, [[1, 2], [3, 4]], ["a"],
     [1, "a"], [], (1, 2), b"a", np.arange(2), np.float16(1)],
    ids=str,
)  # fmt: skip
def test_attributes_that_do_not_come_back_are_refused_by_name(value):
    for ds in (dataset().assign_attrs(culprit=value), dataset()):
        if "culprit" not in ds.attrs:
            ds.variance.attrs["culprit"] = value
        with pytest.raises(TypeError, match="'culprit'"):
            results.check(ds)


@pytest.mark.parametrize("key", ["_FillValue", "scale_factor", "add_offset", "coordinates", "dtype", "a/b", "CLASS"])
def test_reserved_attribute_names(key):
    ds = dataset()
    ds.variance.attrs[key] = "foo"
    with pytest.raises(ValueError, match=key):
        results.check(ds)


@pytest.mark.parametrize(
    "values",
    [
        np.array([True, False, True]),
        np.zeros(3, np.float16),
        np.zeros(3, complex),
        np.zeros(3, np.longdouble),
        np.array(["a", None, "b"], object),
        np.array([b"a", b"b", b"c"]),
        np.zeros(3, "datetime64[ns]"),
        np.zeros(3, "timedelta64[ns]"),
        pd.Categorical(["a", "b", "a"]),
    ],
    ids=lambda values: str(values.dtype),
)
def test_values_that_do_not_come_back_are_refused(values):
    with pytest.raises(TypeError, match=r"variable 'culprit' is .*; "):
        results.check(dataset().assign(culprit=("layer", values, DESCRIBED)))


def refused(change, error, match):
    with pytest.raises(error, match=match):
        results.check(change(dataset()))


def test_shape_of_a_result():
    refused(lambda ds: ds.variance, TypeError, "to_dataset")
    refused(lambda ds: ds.rename(layer="block"), ValueError, "'block' is not one of run, layer")
    refused(lambda ds: ds.drop_vars("layer"), ValueError, r"assign_coords\(layer=range\(3\)\)")
    refused(lambda ds: ds.assign_coords(layer=NAMES), ValueError, "'layer' has no numbers")
    refused(lambda ds: ds.isel(layer=[]), ValueError, "nothing was measured")
    refused(lambda ds: ds.drop_vars(["variance", "count"]), ValueError, "nothing was measured")
    refused(lambda ds: ds.rename(variance="blocks.0"), ValueError, "layer_name")
    refused(lambda ds: ds.assign(extra=("layer", [1, 2, 3])), ValueError, "'extra' has no long_name")
    refused(lambda ds: ds.assign(t=("layer", [1, 2, 3], DESCRIBED | {"units": "days"})), ValueError, "'s'")
    refused(lambda ds: ds.assign_attrs(title="a\0b"), ValueError, "NUL")
    refused(lambda ds: ds.drop_attrs(), ValueError, "provenance")
    refused(lambda ds: ds.assign_attrs(vitprobe_schema=2), ValueError, "schema")
    refused(
        lambda ds: ds.assign(pair=(("x", "y"), np.zeros((2, 2)), DESCRIBED)).assign_coords(x=[0, 1], y=[0, 1]),
        ValueError,
        "one dataset per family",
    )
    refused(
        lambda ds: xr.Dataset(
            {"a": (("layer", "head"), np.zeros((1, 1)), DESCRIBED)}, {"layer": [0], "head": [0]}, ds.attrs
        ).stack(run=("layer", "head")),
        TypeError,
        "unstack",
    )


# --- there and back --------------------------------------------------------------------------------------


def test_round_trip_through_netcdf4_alone(tmp_path):
    ds = dataset(device="cpu", accuracy=61.5)
    path = results.save(ds, tmp_path / "new" / "folder" / "a.nc")
    with netCDF4.Dataset(path) as file:
        assert file.data_model == "NETCDF4"
        assert not file.groups
        assert list(file["layer_name"][:]) == NAMES
        np.testing.assert_array_equal(file["variance"][:].data, ds.variance)
        assert file["variance"].dtype == np.float32
        assert file["variance"].units == "1"
        assert {key: file.getncattr(key) for key in file.ncattrs()} == ds.attrs
        assert not any("_FillValue" in variable.ncattrs() for variable in file.variables.values())
        assert not any(variable.filters()["zlib"] for variable in file.variables.values())
    xr.testing.assert_identical(results.load(path), ds)


@pytest.mark.skipif(shutil.which("ncdump") is None, reason="ncdump is not installed")
def test_ncdump_reads_it(tmp_path):
    path = results.save(dataset(), tmp_path / "a.nc")
    done = subprocess.run(["ncdump", path], capture_output=True, text=True, check=True)
    assert 'variance:units = "1"' in done.stdout
    assert f'layer_name = "{NAMES[0]}", "{NAMES[1]}"' in done.stdout


def test_fill_value_and_compression_only_where_they_help(tmp_path):
    ds = dataset(20_000)
    ds = ds.assign(holes=("layer", np.where(ds.layer == 1, np.nan, 1.0), DESCRIBED))
    ds["depth"] = ds.depth.where(ds.layer != 2)
    with netCDF4.Dataset(results.save(ds, tmp_path / "a.nc")) as file:
        filled = {name for name, variable in file.variables.items() if "_FillValue" in variable.ncattrs()}
        packed = {name for name, variable in file.variables.items() if variable.filters()["zlib"]}
    assert filled == {"holes"}
    assert packed == {"variance", "count", "holes", "layer", "depth", "grid_h"}
    xr.testing.assert_identical(results.load(tmp_path / "a.nc"), ds)


def test_equal_datasets_give_equal_bytes(tmp_path):
    ds = dataset()
    first, second = (results.save(ds.copy(), tmp_path / f"{name}.nc").read_bytes() for name in "ab")
    again = results.save(results.load(tmp_path / "a.nc"), tmp_path / "c.nc").read_bytes()
    assert first == second == again


def test_stale_encoding_does_not_reach_the_file(tmp_path):
    ds = dataset()
    ds.variance.encoding = {"dtype": "int8", "scale_factor": 10.0}
    ds.layer_name.encoding = {"dtype": "S1", "char_dim_name": "string3"}
    ds.encoding = {"unlimited_dims": {"layer"}}
    path = results.save(ds, tmp_path / "a.nc")
    xr.testing.assert_identical(results.load(path), ds)
    with netCDF4.Dataset(path) as file:
        assert not file.dimensions["layer"].isunlimited()


def test_failed_overwrite_keeps_the_old_file(tmp_path, monkeypatch):
    path = results.save(dataset(), tmp_path / "a.nc")
    before = path.read_bytes()
    with pytest.raises(TypeError, match="culprit"):
        results.save(dataset().assign_attrs(culprit=None), path)

    def half(self, target, **_):
        Path(target).write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(xr.Dataset, "to_netcdf", half)
    with pytest.raises(OSError, match="disk full"):
        results.save(dataset(5), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_overwrite_while_somebody_reads(tmp_path):
    path = results.save(dataset(), tmp_path / "a.nc")
    with xr.open_dataset(path) as reader:
        results.save(dataset(5), path)
        assert reader.variance.load().size == 3
    assert results.load(path).sizes["layer"] == 5


def test_tree_is_one_flat_file_per_child(tmp_path):
    tree = xr.DataTree.from_dict({"fourier": dataset(), "variance": dataset(5)})
    paths = results.save(tree, tmp_path / "mine.nc")
    assert [path.name for path in paths] == ["mine_fourier.nc", "mine_variance.nc"]
    xr.testing.assert_equal(results.load(paths[1]), dataset(5))
    tree["variance"].attrs["culprit"] = None
    with pytest.raises(TypeError, match="culprit"):
        results.save(tree, tmp_path / "other.nc")
    assert not list(tmp_path.glob("other*"))
    with pytest.raises(ValueError, match="one dataset per child"):
        results.save(xr.DataTree.from_dict({"a/b": dataset()}), tmp_path / "deep.nc")


def test_names_of_files(tmp_path):
    with pytest.raises(ValueError, match=r"type vit_0\.5\.nc"):
        results.save(dataset(), tmp_path / "vit_0.5")
    with pytest.raises(FileNotFoundError, match=r"none\.nc"):
        results.load(tmp_path / "none.nc")
    (tmp_path / "text.nc").write_text("not netCDF")
    with pytest.raises(ValueError, match=r"text\.nc is not a whole netCDF file"):
        results.load(tmp_path / "text.nc")
    dataset().assign_attrs(vitprobe_schema=99).to_netcdf(tmp_path / "future.nc")
    with pytest.raises(ValueError, match=r"future\.nc has vitprobe_schema .*99"):
        results.load(tmp_path / "future.nc")


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.floats(width=32).map(np.float32),
    st.integers(0, 9).map(np.int8),
)


@settings(max_examples=60)
@given(
    attributes=st.dictionaries(st.from_regex(r"x_[A-Za-z0-9_]{1,8}", fullmatch=True), TEXT | NUMBERS, max_size=4),
    names=st.lists(TEXT, min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "float64", "int8", "uint8", "int16", "int32", "int64", "uint64"]),
    data=st.data(),
)
def test_anything_check_accepts_comes_back(tmp_path_factory, attributes, names, dtype, data):
    kind = np.dtype(dtype)
    limits = np.iinfo(kind) if kind.kind in "iu" else None
    element = st.integers(limits.min, limits.max) if limits else st.floats(width=8 * kind.itemsize)
    values = np.array(data.draw(st.lists(element, min_size=len(names), max_size=len(names))), dtype=kind)
    ds = xr.Dataset(
        {"value": ("layer", values, DESCRIBED | attributes)},
        coords={"layer": np.arange(len(names)), "layer_name": ("layer", np.array(names, object))},
        attrs=results.provenance(title="t", **attributes),
    )
    back = results.load(results.save(ds, tmp_path_factory.mktemp("round") / "a.nc"))
    xr.testing.assert_identical(back, ds)
    assert back.value.dtype == kind
    assert list(back.layer_name.values) == names


# --- runs ------------------------------------------------------------------------------------------------


def test_stacked_runs_keep_everything(tmp_path):
    shallow = dataset(3, config={"recipe": "a"}, probe="feature_variance")
    deep = dataset(5, config={"recipe": "b"}, probe="feature_variance", device="cuda")
    deep.attrs["history"] = "another day"
    both = results.stack_runs([shallow, deep], model=["resnet", "vit_ti"], accuracy=[60.0, 61.5])
    assert list(both.config.values) == ['{"recipe": "a"}', '{"recipe": "b"}']
    assert list(both.device.values) == ["", "cuda"]
    assert both.attrs["probe"] == "feature_variance"
    assert both.attrs["seed"] == 0
    assert both.attrs["history"].splitlines() == [shallow.attrs["history"], "another day"]
    assert both.layer_name.dims == both.depth.dims == both.grid_h.dims == ("run", "layer")
    assert list(both.layer_name[0].values) == [*NAMES, "", ""]
    assert np.isnan(both.grid_h[0, 3:]).all()
    assert both.variance.attrs == DESCRIBED
    np.testing.assert_array_equal(both.variance[0, :3], shallow.variance)
    np.testing.assert_array_equal(both.variance[1], deep.variance)
    xr.testing.assert_identical(results.load(results.save(both, tmp_path / "a.nc")), both)
    rows = both.variance.to_dataframe().dropna(subset="variance").reset_index()
    assert len(rows) == 8
    assert list(rows[rows.model == "resnet"].layer_name) == NAMES


def test_stacking_saved_runs_is_the_same(tmp_path):
    runs = [dataset(3, probe="p"), dataset(4, probe="q")]
    saved = [results.load(results.save(ds, tmp_path / f"{index}.nc")) for index, ds in enumerate(runs)]
    xr.testing.assert_identical(results.stack_runs(saved), results.stack_runs(runs))
    assert results.stack_runs(saved).layer_name.dtype.kind == "U"


def test_stacking_fills_attributes_that_some_lack():
    both = results.stack_runs([dataset(note="x", decay=0.1), dataset()])
    assert list(both.note.values) == ["x", ""]
    np.testing.assert_array_equal(both.decay, [0.1, np.nan])


def test_stacking_refuses_to_lose_anything():
    with pytest.raises(ValueError, match="no datasets"):
        results.stack_runs([])
    with pytest.raises(ValueError, match="each of 2 runs"):
        results.stack_runs([dataset(), dataset()], model=["vit"])
    with pytest.raises(ValueError, match="already"):
        results.stack_runs([results.stack_runs([dataset()])])
    with pytest.raises(ValueError, match="'probe' differs"):
        results.stack_runs([dataset(probe="a"), dataset(probe="b")], probe=["c", "d"])
    other = dataset()
    other.variance.attrs["units"] = "percent"
    with pytest.raises(ValueError, match="'variance' is not the same"):
        results.stack_runs([dataset(), other])


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        ("/home/me/data", "data"),
        ("~/data/x.nc", "x.nc"),
        ("npz:/a/b/train.npz,/a/b/test.npz", "npz:train.npz,test.npz"),
        ("--out=/tmp/here", "--out=here"),
        ("folder:images/cats", "folder:images/cats"),
        ("park_kim/fourier", "park_kim/fourier"),
        ("0.5", "0.5"),
        ("dask:tcp://10.0.0.1:8786", "dask:tcp://10.0.0.1:8786"),
    ],
)
def test_history_has_the_command_without_the_machines_folders(argument, kept, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/local/bin/vitprobe", "run", argument])
    assert results.provenance(title="t")["history"].split(" ", 1)[1] == f"vitprobe run {kept}"
