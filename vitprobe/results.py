"""Results on disk: one measurement is one flat xarray `Dataset`, one family of dimensions, one netCDF-4 file.

What is the same for all runs is an attribute, what differs is a coordinate along `run`, and a file needs
nothing of vitprobe to be read: `xarray.load_dataset(path).variance.to_dataframe().dropna().reset_index()`.
No torch here.
"""

import contextlib
import dataclasses
import datetime
import enum
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, overload

import numpy as np
import pandas as pd
import xarray as xr

SCHEMA = 1
DIMENSIONS = (
    "run", "layer", "layer_other", "head", "query", "key", "rank", "batch", "sample", "frequency",
    "direction_pair", "x", "y", "bin", "epoch", "mask", "corruption", "severity", "offset_y", "offset_x", "channel",
    "pixel_y", "pixel_x",
)  # fmt: skip

_PROVENANCE = (
    "Conventions", "title", "references", "source", "history", "vitprobe_schema", "git_commit", "versions",
    "device", "config",
)  # fmt: skip
_RECORDED_VERSIONS = ("torch", "torchvision", "numpy", "xarray", "netCDF4")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# xarray and HDF5 give these a meaning of their own: they vanish, or change the numbers, on the way back.
_RESERVED = {
    "scale_factor", "add_offset", "missing_value", "coordinates", "dtype", "calendar", "grid_mapping",
    "bounds", "CLASS", "NAME", "DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST",
}  # fmt: skip
# xarray turns numbers with these units into time differences.
_TIME_UNITS = {"days", "hours", "minutes", "seconds", "milliseconds", "microseconds", "nanoseconds"}
_PACKAGE = Path(__file__).resolve().parent
_INT64 = np.iinfo(np.int64)
_COMPRESS_ABOVE = 64 * 1024  # bytes; below this the filter's own bookkeeping makes the file larger


# --- provenance -------------------------------------------------------------------------------------


def provenance(
    *,
    title: str,
    references: str = "",
    config: Any = None,
    device: object = "",
    seed: int | None = None,
    **extra: str | int | float,
) -> dict[str, str | int | float]:
    """Global attributes that say what a dataset is and what made it; text and numbers only.

    The time stands in `history` and nowhere else, so that the difference of two files shows just that.

    Args:
        title: what was measured, in words.
        references: where the measurement is defined (DOI or arXiv).
        config: everything that was set; stored as JSON text by `to_json`.
        device: where the numbers were computed.
        seed: the run's seed; left out if None.
        **extra: further attributes, e.g. `probe="fourier"`.

    Returns:
        The attributes, for `Dataset.attrs`.

    Raises:
        ValueError: if an extra attribute has the name of one written here.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    # Names and not paths: a machine's folders are nobody's business.
    command = shlex.join([PurePath(sys.argv[0]).name or "python", *map(_without_folders, sys.argv[1:])])
    attributes: dict[str, str | int | float] = {
        "Conventions": "CF-1.12",
        "title": title,
        "references": references,
        "source": f"vitprobe {_version('vitprobe') or '(not installed)'}",
        "history": f"{now} {command}",
        "vitprobe_schema": SCHEMA,
        "git_commit": git_commit(),
        "versions": json.dumps(_versions(), sort_keys=True),
        "device": str(device),
        "config": to_json({} if config is None else config),
    }
    if seed is not None:
        attributes["seed"] = seed
    if clash := sorted(attributes.keys() & extra.keys()):
        raise ValueError(f"provenance writes {', '.join(clash)} itself; rename these extra attributes")
    attributes |= extra
    for key, value in attributes.items():
        _check_attribute("the dataset", key, value)
    return attributes


def _without_folders(argument: str) -> str:
    """A command's argument with the last part only of every absolute path in it, also after `=`, `:` or `,`."""
    return re.sub(r"(^|[=:,])(?!//)[/~][^,]*/(?=[^,/])", r"\1", argument)  # an address, tcp://, is no path


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions() -> dict[str, str]:
    found = {package: _version(package) for package in _RECORDED_VERSIONS}
    return {"python": platform.python_version()} | {package: v for package, v in found.items() if v}


@functools.cache
def git_commit(package: Path = _PACKAGE) -> str:
    """The commit of the source tree that `package` lies in: `<sha>`, `<sha>-dirty`, or `""` outside git.

    Dirty means that the package or the studies differ from the commit; rewritten results do not count.

    Args:
        package: the folder of the package.

    Returns:
        The commit; `""` whenever git is missing, fails, or does not track the package.
    """
    # A commit hook sets GIT_DIR and its like, which would answer for another tree.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        done = subprocess.run(
            command, cwd=package, env=environment, check=True, capture_output=True, text=True, timeout=20
        )
        return done.stdout.strip()

    try:
        # Fails in a virtual environment that lies inside somebody else's repository.
        git("ls-files", "--error-unmatch", "--", "__init__.py")
        sha = git("rev-parse", "HEAD")
        return sha + ("-dirty" if git("status", "--porcelain", "--", ".", ":(top)studies") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


# --- JSON and hashes --------------------------------------------------------------------------------


def to_json(value: Any) -> str:
    """JSON text of a configuration, the same in every process: keys sorted, nothing by its `repr`.

    A dataclass is its fields and, under `"class"`, its `module.qualname`; a callable is its
    `module.qualname`; a set is sorted; not-a-number and the infinities, which JSON lacks, are text.

    Args:
        value: dataclasses, mappings, sequences, sets, text, numbers, paths, enums, dtypes, callables.

    Returns:
        The text, on one line.
    """
    return json.dumps(_plain(value, name_of), sort_keys=True)


def config_hash(config: Any) -> str:
    """Sixteen hexadecimal digits that name a configuration, in any order of its keys and any process.

    Args:
        config: as in `to_json`, but callables must be importable: two lambdas have one name.

    Returns:
        The first 64 bits of the SHA-256 of its JSON text.
    """
    text = json.dumps(_plain(config, _importable), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(what: str, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Where two configurations differ, in words; inner mappings field by field.

    Args:
        what: what they configure, e.g. `"recipe"`; stands before each field, with a dot.
        saved: the one that was.
        asked: the one that is now.

    Returns:
        One text for each field that differs; none if they are equal.
    """
    absent = "(absent)"
    listing = []
    for key in {**saved, **asked}:
        was, now, name = saved.get(key, absent), asked.get(key, absent), f"{what}.{key}" if what else key
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            listing += differences(name, was, now)
        elif was != now:
            listing.append(f"{name} was {was!r} and is now {now!r}")
    return listing


def _plain(value: Any, name: Callable[[Any], str]) -> Any:
    def recur(item: Any) -> Any:
        return _plain(item, name)

    match value:
        case enum.Enum():
            return f"{_qualname(type(value))}.{value.name}"
        case np.generic() | np.ndarray():
            return recur(value.tolist())
        case None | bool() | int() | str():
            return value
        case float():
            return value if np.isfinite(value) else str(value)
        case PurePath():
            return value.as_posix()
        case Mapping():
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise TypeError(f"keys of a configuration are text, not {wrong[0]!r}; type str(key)")
            return {str(key): recur(item) for key, item in value.items()}
        case list() | tuple() | range():
            return [recur(item) for item in value]
        case set() | frozenset():
            return sorted((recur(item) for item in value), key=json.dumps)
        case functools.partial():
            return {
                "partial": recur(value.func),
                "args": recur(value.args),
                "keywords": recur(value.keywords),
            }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: recur(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": _qualname(type(value))} | fields
    if isinstance(value, np.dtype) or (type(value).__module__, type(value).__name__) in _TORCH_NAMES:
        return str(value)
    if callable(value):
        return name(value)
    raise TypeError(
        f"a {_qualname(type(value))} has no place in a configuration; give text, numbers, dataclasses, "
        "dicts, lists or functions"
    )


_TORCH_NAMES = {("torch", "dtype"), ("torch", "device"), ("torch", "memory_format")}


def name_of(value: Any) -> str:
    """The `module.qualname` of a function or class, as a configuration has it."""
    return _qualname(value if hasattr(value, "__qualname__") else type(value))


def _qualname(value: Any) -> str:
    module = getattr(value, "__module__", None)
    return f"{module}.{value.__qualname__}" if module else value.__qualname__


def _importable(value: Any) -> str:
    text = name_of(value)
    owner = getattr(value, "__self__", None)  # of a bound method; of a built-in function, its module or class
    bound = not (owner is None or isinstance(owner, type | types.ModuleType))
    if "<" in text or bound or not hasattr(value, "__qualname__"):
        raise TypeError(
            f"{text} cannot be told from another one of that name; define a function at the top of a module "
            "and give that, so that the configuration has a hash"
        )
    return text


def plain_name(name: str) -> str:
    """A name as a part of file names: `"timm:pit_ti"` is `timm-pit_ti`."""
    return re.sub(r"[^\w.-]", "-", name)


def cache_folder() -> Path:
    """`$VITPROBE_CACHE`, or `vitprobe` in the user's cache folder."""
    return Path(os.environ.get("VITPROBE_CACHE") or "~/.cache/vitprobe").expanduser()


# --- the schema -------------------------------------------------------------------------------------


def check(ds: xr.Dataset) -> None:
    """Whether a dataset keeps the schema, before the disk is touched.

    Args:
        ds: the dataset to be saved.

    Raises:
        TypeError: if a variable or attribute holds what netCDF would lose, change or refuse.
        ValueError: if a dimension, name, unit or description is missing or unknown.
    """
    if not isinstance(ds, xr.Dataset):
        raise TypeError(f"a result is an xarray.Dataset, not a {type(ds).__name__}; type array.to_dataset(name=...)")
    for key in _PROVENANCE:
        if key not in ds.attrs and key not in ds.coords:
            raise ValueError(f"attribute {key!r} is missing; type ds.attrs.update(vitprobe.results.provenance(...))")
    if (schema := ds.attrs.get("vitprobe_schema")) != SCHEMA:
        raise ValueError(f"attribute 'vitprobe_schema' is {schema!r}; this vitprobe writes schema {SCHEMA}")
    _check_attributes("the dataset", ds.attrs)
    _check_dimensions(ds)
    for name, variable in ds.variables.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"variable {name!r}: names are letters, digits and underscores; a layer's name is a value "
                "of the coordinate layer_name"
            )
        _check_values(name, variable)
        _check_attributes(f"variable {name!r}", variable.attrs)
        units = str(variable.attrs.get("units", ""))
        if units in _TIME_UNITS or " since " in units:
            raise ValueError(f"variable {name!r}: readers turn units {units!r} into dates; for seconds write 's'")
    for name in ds.data_vars:
        text = _is_text(ds[name].variable)
        for key in ("long_name",) if text else ("long_name", "units"):
            if not ds[name].attrs.get(key):
                raise ValueError(
                    f"variable {name!r} has no {key}; type ds[{name!r}].attrs[{key!r}] = ... "
                    "(units of a pure number: '1')"
                )


def _check_dimensions(ds: xr.Dataset) -> None:
    if not ds.data_vars:
        raise ValueError("the dataset holds no variable: nothing was measured")
    for dim, size in ds.sizes.items():
        if dim not in DIMENSIONS:
            raise ValueError(f"dimension {dim!r} is not one of {', '.join(DIMENSIONS)}; type ds.rename({dim}=...)")
        if size == 0:
            raise ValueError(f"dimension {dim!r} is empty: nothing was measured")
        if isinstance(ds.indexes.get(dim), pd.MultiIndex):
            raise TypeError(f"dimension {dim!r} is a MultiIndex, which netCDF lacks; type ds.unstack({dim!r})")
        if dim not in ds.coords or ds[dim].dtype.kind not in "iuf":
            raise ValueError(
                f"dimension {dim!r} has no numbers; type ds.assign_coords({dim}=range({size})), "
                "and keep text in a coordinate of another name along it"
            )
    # A coordinate may have dimensions of its own: the image that a map belongs to.
    spanned = {dim for array in ds.data_vars.values() for dim in array.dims}
    if all(set(array.dims) != spanned for array in ds.data_vars.values()):
        dims = {name: array.dims for name, array in ds.data_vars.items()}
        raise ValueError(
            f"no variable spans all dimensions {tuple(ds.sizes)}, so to_dataframe() would invent rows; "
            f"save one dataset per family of dimensions. Here: {dims}"
        )


def _check_values(name: str, variable: xr.Variable) -> None:
    if _is_text(variable):
        for text in np.ravel(variable.to_numpy()):
            _check_text(f"variable {name!r}", str(text))
        return
    advice = {
        "b": "cast to int8 and say flag_meanings, or use text",
        "c": "store amplitude and phase",
        "S": "type .astype(str)",
        "O": "type .astype(str), with '' for what is missing",
        "M": "write the time as text in an attribute",
        "m": "write a float with units 's'",
    }
    dtype = variable.dtype
    kind = dtype.kind if isinstance(dtype, np.dtype) else "O"
    if kind not in "iu" and dtype not in (np.float32, np.float64):
        fix = advice.get(kind, "cast to float32 or float64")
        raise TypeError(f"variable {name!r} is {dtype}, not int, float32, float64 or text; {fix}")


def _is_text(variable: xr.Variable) -> bool:
    dtype = variable.dtype
    if not isinstance(dtype, np.dtype):  # pandas keeps types of its own
        return isinstance(dtype, pd.StringDtype)
    if dtype.kind in "UT":
        return True
    return dtype.kind == "O" and all(isinstance(value, str) for value in np.ravel(variable.to_numpy()))


def _check_attributes(owner: str, attributes: Mapping[Any, Any]) -> None:
    for key, value in attributes.items():
        _check_attribute(owner, key, value)


def _check_attribute(owner: str, key: Any, value: Any) -> None:
    where = f"attribute {key!r} of {owner}"
    if not isinstance(key, str) or not _NAME.fullmatch(key):
        raise ValueError(f"{where}: names are letters, digits and underscores, the first a letter")
    if key in _RESERVED:
        raise ValueError(f"{where}: xarray and HDF5 keep this name for themselves; choose another")
    if isinstance(value, str):
        _check_text(where, value)
    elif isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        if not _INT64.min <= int(value) <= _INT64.max:
            raise TypeError(f"{where} is {value}, beyond 64 bits; write it as text")
    elif not isinstance(value, (float, np.float32)):
        raise TypeError(
            f"{where} is a {type(value).__name__}: {value!r}; attributes are text and numbers, so type "
            f"vitprobe.results.to_json(...) for structures, text for the rest, and leave out what is missing"
        )


def _check_text(where: str, text: str) -> None:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{where} holds a NUL or half a surrogate pair, which netCDF text cannot: {text!r}")


# --- files ------------------------------------------------------------------------------------------


@overload
def save(ds: xr.Dataset, path: str | os.PathLike[str]) -> Path: ...
@overload
def save(ds: xr.DataTree, path: str | os.PathLike[str]) -> list[Path]: ...
def save(ds: xr.Dataset | xr.DataTree, path: str | os.PathLike[str]) -> Path | list[Path]:
    """Write a dataset to one netCDF-4 file, whole or not at all; equal datasets give equal bytes.

    Args:
        ds: the dataset; or a tree of them, of which each child becomes a flat file `<stem>_<child>.nc`.
        path: the file, `<stem>.nc`; missing folders are made.

    Returns:
        The path written; for a tree, the paths in the order of its children.

    Raises:
        ValueError: if the name does not end in `.nc`, or a tree has more than one level.
    """
    path = Path(path)
    if path.suffix != ".nc":
        raise ValueError(f"{path}: results are netCDF files; type {path.name}.nc")
    if not isinstance(ds, xr.DataTree):
        check(ds)
        _write(ds, path)
        return path
    if ds.data_vars or not ds.children or any(child.children for child in ds.children.values()):
        raise ValueError("a tree of results has one dataset per child and nothing above or below; save the parts")
    parts = {path.with_stem(f"{path.stem}_{name}"): child.to_dataset() for name, child in ds.children.items()}
    for part in parts.values():
        check(part)
    for part_path, part in parts.items():
        _write(part, part_path)
    return list(parts)


def _write(ds: xr.Dataset, path: Path) -> None:
    ds = ds.drop_encoding()  # what a file was once read with is not what it should be written with
    encoding: dict[Any, dict[str, Any]] = {}
    for name, variable in ds.variables.items():
        if _is_text(variable):
            continue  # text under a compression filter crashes netCDF4
        encoding[name] = {}
        if name in ds.coords or not variable.isnull().any():
            encoding[name]["_FillValue"] = None  # CF allows none on coordinates; xarray writes one everywhere
        if variable.nbytes > _COMPRESS_ABOVE:
            encoding[name] |= {"zlib": True, "complevel": 4, "shuffle": True}
    with replacing(path) as unfinished:
        ds.to_netcdf(unfinished, engine="netcdf4", format="NETCDF4", encoding=encoding)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` if all goes well; else the file that was there stays whole.

    Args:
        path: the file; missing folders are made.

    Yields:
        Another path in the same folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> xr.Dataset:
    """Read a result into memory and let go of its file.

    Args:
        path: a file that `save` wrote.

    Returns:
        The dataset.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not netCDF, or not of this schema.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no result at {path}; run the study that makes it, or check the path")
    try:
        ds = xr.load_dataset(path, engine="netcdf4")
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole netCDF file ({error}); delete it and run its study again") from error
    if (schema := ds.attrs.get("vitprobe_schema")) != SCHEMA:
        raise ValueError(
            f"{path} has vitprobe_schema {schema!r}, this vitprobe reads {SCHEMA}; use the version it names "
            f"as its source ({ds.attrs.get('source', 'none')!r}), or xarray.load_dataset to read it as it is"
        )
    return ds


# --- runs -------------------------------------------------------------------------------------------


def stack_runs(datasets: Iterable[xr.Dataset], **coords: Sequence[Any]) -> xr.Dataset:
    """Put the same measurement of several runs into one dataset along the dimension `run`.

    Models of different depth are joined on the integer `layer` (and likewise on every other dimension):
    numbers are padded with NaN, so padded integers become float64, and text with `""`. Coordinates along a
    dimension, such as `layer_name`, `kind` and `depth`, become `(run, layer)`. Attributes which are equal
    in all stay attributes; those which differ become coordinates along `run`; the lines of `history` are
    gathered.

    Args:
        datasets: one per run.
        **coords: what tells the runs apart, one value each, e.g. `model=["vit_ti", "resnet_50"]`.

    Returns:
        The stacked dataset, `run` numbered from 0.

    Raises:
        ValueError: if there is nothing to stack, a length is wrong, or runs disagree on what a variable is.
    """
    datasets = list(datasets)
    if not datasets:
        raise ValueError("no datasets to stack; give one per run")
    if any("run" in ds.dims for ds in datasets):
        raise ValueError("a dataset has a dimension 'run' already; stack the datasets of single runs")
    for name, values in coords.items():
        if isinstance(values, str) or len(values) != len(datasets):
            raise ValueError(f"{name}={values!r}: give a list, one value for each of {len(datasets)} runs")
    attributes, differing = _common_attributes(datasets)
    for name, values in differing.items():
        if name in coords and list(coords[name]) == list(values):
            continue
        if name in coords or any(name in ds.variables for ds in datasets):
            raise ValueError(
                f"attribute {name!r} differs between runs ({values}) and its name is taken by a variable or "
                "an argument; rename one of the two"
            )
    _check_same_variables(datasets)
    # Coordinates other than the indexes travel as variables, so that each run keeps its own.
    labels = {name for ds in datasets for name in ds.coords if name not in ds.dims}
    flat = [ds.reset_coords().assign_attrs({}) for ds in datasets]
    text = {name for ds in flat for name in ds.data_vars if _is_text(ds[name].variable)}
    stacked = xr.concat(
        flat,
        dim="run",
        data_vars="all",
        coords="minimal",
        compat="equals",
        join="outer",
        fill_value={name: "" for name in text} if text else {},
        combine_attrs="override",
    )
    stacked = stacked.set_coords(labels).assign({name: stacked[name].astype(str) for name in text})
    told_apart: dict[str, Any] = {name: ("run", list(values)) for name, values in (differing | coords).items()}
    stacked = stacked.assign_coords({"run": np.arange(len(datasets)), **told_apart})
    stacked.attrs = attributes
    return stacked


def _common_attributes(datasets: Sequence[xr.Dataset]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    common: dict[str, Any] = {}
    differing: dict[str, list[Any]] = {}
    for key in dict.fromkeys(str(key) for ds in datasets for key in ds.attrs):
        values = [ds.attrs.get(key) for ds in datasets]
        if key == "history":
            lines = [line for value in values for line in str(value or "").splitlines()]
            common[key] = "\n".join(dict.fromkeys(lines))
        elif all(value == values[0] or (value != value and values[0] != values[0]) for value in values):
            common[key] = values[0]
        elif any(isinstance(value, str) for value in values):
            differing[key] = ["" if value is None else str(value) for value in values]
        else:
            differing[key] = [np.nan if value is None else value for value in values]
    return common, differing


def _check_same_variables(datasets: Sequence[xr.Dataset]) -> None:
    seen: dict[Any, tuple[int, xr.Variable]] = {}
    for run, ds in enumerate(datasets):
        for name, array in ds.variables.items():
            first_run, first = seen.setdefault(name, (run, array))
            if first.attrs != array.attrs or set(first.dims) != set(array.dims):
                raise ValueError(
                    f"variable {name!r} is not the same in run {first_run} ({first.dims}, {first.attrs}) "
                    f"and run {run} ({array.dims}, {array.attrs}); stack like with like"
                )
