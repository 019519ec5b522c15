"""A page for people: figures, values with their uncertainty and provenance of netCDF results, in one HTML file.

The page loads nothing: figures and style sheet are inside it, and there is no script. No torch here.
"""

import base64
import dataclasses
import html
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures import FIGURES, draw, pretty, save_figure
from vitprobe.results import load, plain_name, replacing, save

PAGE = "index.html"
SMALL = 24  # entries: so few have a row each; more are summarised
OPEN = 60  # rows: a longer table is folded
LONGEST = 500  # rows: the file has the others

_SE, _LOW, _HIGH = "_se", "_low", "_high"
_PIXELS = 120  # of the page for an inch of a figure: a quarter more than in print, where its letters are 7 points
_COMMA = ",\N{NO-BREAK SPACE}"
_SHORT = 40  # characters: a longer text along a dimension is a configuration
_MUTE = ("fingerprint", "plane", "model_class")  # coordinates that are text and no name for people
_FACTS = {
    "model": "model",
    "model_class": "class",
    "parameters": "parameters",
    "checkpoint": "weights",
    "data": "data",
    "split": "split",
    "images": "images",
    "image_size": "image size [px]",
    "normalisation_mean": "normalisation mean",
    "normalisation_std": "normalisation std",
    "device": "device",
    "source": "measured by",
    "date": "measured on",
}
_SEVERAL = 6  # different values of a fact that are named


def write_report(
    datasets: Mapping[str, xr.Dataset],
    folder: str | os.PathLike[str],
    *,
    left_out: Mapping[str, str] | None = None,
    drawn_by: Callable[[xr.Dataset], Callable[[xr.Dataset], Figure] | None] = lambda ds: None,
) -> Path:
    """Write measurements as a page, with their files and figures beside it.

    The folder then holds `index.html`, which has all figures inside, and of every measurement `<name>.nc` and, where
    there is a figure for it, `<name>.png`. Each file is replaced whole or not at all, the page last. A figure that
    cannot be drawn costs the page nothing but itself: a warning says why, and so does the page.

    Args:
        datasets: the measurements by name, of one run or of stacked runs, in the order of the page.
        folder: where everything goes; made if missing.
        left_out: what was not measured, and why, beside what the datasets' attributes `left_out` and `skipped` say.
        drawn_by: what draws a dataset that is not to be drawn as its probe's, such as the study that it is of.

    Returns:
        The page.

    Raises:
        TypeError: if a dataset holds what netCDF cannot.
        ValueError: if there are no datasets, two names give one file, or a dataset breaks the schema of results.
    """
    if not datasets:
        raise ValueError("there is nothing to report: give datasets by name, such as {'fourier': ds}.")
    if len({plain_name(name) for name in datasets}) < len(datasets):
        raise ValueError(f"two of the names {list(datasets)} give the same file: rename one.")
    folder = Path(folder)
    for name, ds in datasets.items():
        _keep(ds, folder / f"{plain_name(name)}.nc")
    common = _common(list(datasets.values()))
    sections = [
        _section(plain_name(name), ds, _figure(ds, folder / f"{plain_name(name)}.png", drawn_by(ds)), common)
        for name, ds in datasets.items()
    ]
    page = _page(datasets, sections, common, left_out or {})
    with replacing(folder / PAGE) as unfinished:
        unfinished.write_text(page, encoding="utf-8")
    return folder / PAGE


def _keep(ds: xr.Dataset, path: Path) -> None:
    """Save a dataset, unless the file holds it already."""
    with suppress(FileNotFoundError, ValueError):
        if load(path).identical(ds):
            return
    save(ds, path)


# --- markup -----------------------------------------------------------------------------------------


class _Html(str):
    """Text that is markup already; `_element` escapes all other text."""


def _element(tag: str, *content: str, **attributes: str | int) -> _Html:
    """`<tag attributes>content</tag>`; an underscore at the end of an attribute's name is left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"' for key, value in attributes.items()
    )
    return _Html(f"<{tag}{said}>{_joined(content)}</{tag}>")


def _joined(parts: Iterable[str], between: str = "") -> _Html:
    return _Html(between.join(part if isinstance(part, _Html) else html.escape(part) for part in parts if part))


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of a table.

    Attributes:
        head: what stands over it.
        cells: one text per row.
        text: whether the cells are words, which go to the left, and not numbers.
    """

    head: str
    cells: Sequence[str]
    text: bool = False


def _table(caption: str, columns: Sequence[_Column]) -> _Html:
    """A table that scrolls by itself where it is wider than the page."""
    kinds = [_kind(column) for column in columns]
    head = [_element("th", column.head, scope="col", **kind) for column, kind in zip(columns, kinds, strict=True)]
    rows = [
        _element("tr", *(_element("td", cell, **kind) for cell, kind in zip(cells, kinds, strict=True)))
        for cells in zip(*(column.cells for column in columns), strict=True)
    ]
    table = _element(
        "table",
        _element("caption", caption),
        _element("thead", _element("tr", *head)),
        _element("tbody", *rows),
    )
    return _element("div", table, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _kind(column: _Column) -> dict[str, str | int]:
    if not column.text:
        return {}
    return {"class_": "long text" if max(map(len, column.cells), default=0) > _SHORT else "text"}


def _folded(summary: str, *content: str) -> _Html:
    return _element("details", _element("summary", summary), *content)


# --- numbers ----------------------------------------------------------------------------------------


def number(value: float, error: float = math.nan) -> str:
    """A number for people: rounded to two digits of its standard error, or to four digits of its own without one.

    Args:
        value: the number.
        error: its standard error; not-a-number for none.

    Returns:
        The text, e.g. `"-5.849 ± 0.029"`; a dash for not-a-number.
    """
    value, error = float(value), float(error)
    if not math.isfinite(value):
        return "–" if math.isnan(value) else str(value)
    if not math.isfinite(error) or error <= 0:
        return _alone(value) + (" ± 0" if error == 0 else "")
    decimals, power = _decimals(error), math.floor(math.log10(max(abs(value), error)))
    if decimals + power > 9:
        return f"{value:.10g} ± {error:.1e}"
    if power >= 6 or (power < -3 and decimals > 6):
        value, error, decimals = value / 10.0**power, error / 10.0**power, decimals + power
        return f"({_fixed(value, decimals)} ± {_fixed(error, decimals)})e{power}"
    return f"{_fixed(value, decimals)} ± {_fixed(error, decimals)}"


def _decimals(error: float) -> int:
    """How many decimals show two digits of an error, 0.00996 being 0.010."""
    return 1 - int(f"{error:.1e}".partition("e")[2])


def _alone(value: float) -> str:
    if value == round(value) and abs(value) < 1e15:
        return str(round(value))
    power = math.floor(math.log10(abs(value)))
    return _fixed(value, 3 - power) if -4 < power < 6 else f"{value:.3e}"


def _fixed(value: float, decimals: int) -> str:
    decimals = max(decimals, 0)
    return f"{round(value, decimals) + 0.0:.{decimals}f}"  # + 0.0: what rounds to zero has no sign


def _with_interval(value: float, low: float, high: float) -> str:
    """A number and its interval, rounded to two digits of the interval's half width."""
    half_width = (high - low) / 2
    if half_width <= 0:
        return f"{_alone(value)} [{_alone(low)}, {_alone(high)}]"
    decimals = _decimals(half_width)
    write = f".{max(decimals, 0)}f" if decimals <= 6 and max(abs(low), abs(high)) < 1e6 else ".3e"
    return f"{value:{write}} [{low:{write}}, {high:{write}}]"


def _every_digit(value: Any) -> str:
    """A text as it is, or a number with as many digits as single precision has."""
    if isinstance(value, str | int | np.integer):
        return str(value)
    return "–" if math.isnan(value) else f"{value:.7g}"


def _cell(value: Any, se: float = math.nan, low: float = math.nan, high: float = math.nan) -> str:
    """A value and its uncertainty; an interval says more than a standard error."""
    if isinstance(value, str):
        return value
    if math.isfinite(value) and math.isfinite(low) and math.isfinite(high):
        return _with_interval(float(value), float(low), float(high))
    return number(value, se)


# --- values -----------------------------------------------------------------------------------------


def _measured(ds: xr.Dataset) -> list[str]:
    """The variables that are not the uncertainty of another one."""
    names = [str(name) for name in ds.data_vars]
    return [
        name
        for name in names
        if not any(name.removesuffix(end) in names for end in (_SE, _LOW, _HIGH) if name.endswith(end))
    ]


def _uncertainties(ds: xr.Dataset, name: str) -> dict[str, str]:
    """The variables that say how uncertain one is, by the argument of `_cell` that they are."""
    return {end[1:]: name + end for end in (_SE, _LOW, _HIGH) if name + end in ds.data_vars}


def _is_number(array: xr.DataArray) -> bool:
    return array.dtype.kind in "iuf"


def _dimensions_of_rows(ds: xr.Dataset) -> tuple[str, ...]:
    """What a summary has rows for: runs, and layers or else what the widest variable starts with."""
    widest = max((array.dims for array in ds.data_vars.values()), key=len)
    first = "layer" if "layer" in widest else next((dim for dim in widest if dim != "run"), None)
    return tuple(str(dim) for dim in ("run", first) if dim in widest)


def _families(ds: xr.Dataset) -> dict[tuple[str, ...], list[str]]:
    """The measured variables by their dimensions, of which those of rows come first."""
    rows = _dimensions_of_rows(ds)
    order = [*rows, *(str(dim) for array in ds.data_vars.values() for dim in array.dims)]
    found: dict[tuple[str, ...], list[str]] = {}
    for name in _measured(ds):
        found.setdefault(tuple(dict.fromkeys(dim for dim in order if dim in ds[name].dims)), []).append(name)
    return dict(sorted(found.items(), key=lambda family: len(family[0])))


@dataclasses.dataclass(frozen=True)
class _Places:
    """The entries of a dataset along some dimensions: the rows of a table.

    Attributes:
        ds: the dataset.
        index: the index of every row, by dimension.
    """

    ds: xr.Dataset
    index: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, ds: xr.Dataset, dims: Sequence[str], names: Iterable[str]) -> "_Places":
        """All entries along one dimension; along several those where a variable has a value, not those that pad."""
        there = np.full([ds.sizes[dim] for dim in dims], len(dims) == 1)
        for name in names:
            known = ds[name].notnull() if _is_number(ds[name]) else ds[name] != ""
            there |= known.any([dim for dim in known.dims if dim not in dims]).transpose(*dims).values
        return cls(ds, dict(zip(dims, np.nonzero(there), strict=True)))

    def __len__(self) -> int:
        return len(next(iter(self.index.values())))

    def first(self, count: int) -> "_Places":
        """So many of them."""
        return _Places(self.ds, {dim: index[:count] for dim, index in self.index.items()})

    def take(self, name: str) -> np.ndarray:
        """A variable or coordinate at every place, its other entries along a second axis if there are any."""
        array = self.ds[name]
        here = [dim for dim in self.index if dim in array.dims]
        rest = [dim for dim in array.dims if dim not in self.index]
        taken = array.transpose(*here, *rest).values[tuple(self.index[dim] for dim in here)]
        return taken.reshape(len(self), -1) if rest else taken

    def labels(self, *, numbers: bool) -> list[_Column]:
        """The columns that say which place a row is: its numbers, and the coordinates there.

        Args:
            numbers: whether coordinates that are numbers belong to it, and not names alone.
        """
        columns = []
        for dim in self.index:
            columns.append(self.column(dim))
            for key, array in self.ds.coords.items():
                along = [other for other in self.index if other in array.dims]
                # What lies along several dimensions stands once, behind the last of them.
                if key == dim or set(along) != set(array.dims) or along[-1:] != [dim]:
                    continue
                if self._is_label(str(key), array, numbers):
                    columns.append(self.column(str(key)))
        return columns

    def _is_label(self, key: str, array: xr.DataArray, numbers: bool) -> bool:
        if _is_number(array):
            # The numbers of a run would be repeated on every row of it: runs have a table of their own.
            return key == "seed" or (numbers and array.dims != ("run",))
        return key not in _MUTE and max(map(len, map(str, array.values.ravel()))) <= _SHORT

    def column(self, name: str) -> _Column:
        """A variable or coordinate that has one entry at every place, as it is in the file."""
        head = _joined([_element("code", name), _units(self.ds[name])])
        return _Column(head, [_every_digit(value) for value in self.take(name)], not _is_number(self.ds[name]))

    def values(self, name: str) -> _Column:
        """A variable that has one entry at every place, with its uncertainty."""
        parts = {key: self.take(part) for key, part in _uncertainties(self.ds, name).items()}
        cells = [
            _cell(value, **{key: part[row] for key, part in parts.items()}) for row, value in enumerate(self.take(name))
        ]
        return _Column(_head(self.ds, name), cells, not _is_number(self.ds[name]))

    def summarised(self, name: str) -> list[_Column]:
        """A variable that has many entries at every place: the mean over heads, the first and last, or the extremes.

        The standard error of a mean over heads does not follow from theirs, because they see the same images: their
        range stands beside it instead.
        """
        values = self.take(name)
        rest = [str(dim) for dim in self.ds[name].dims if dim not in self.index]
        known = [np.flatnonzero(np.isfinite(row)) for row in values]
        if rest == ["head"]:
            some = [row[here] for row, here in zip(values, known, strict=True)]
            cells = [f"{number(x.mean())} [{number(x.min())}, {number(x.max())}]" if x.size else "–" for x in some]
            return [_Column(_head(self.ds, name, "mean of heads [lowest, highest]"), cells)]
        if len(rest) == 1:
            ends = {"first": [here[:1] for here in known], "last": [here[-1:] for here in known]}
            picked = {self._entry(rest[0], word, columns): columns for word, columns in ends.items()}
        else:
            picked = {
                f"{word} over {_COMMA.join(rest)}": [
                    here[[pick(row[here])]] if here.size else here for row, here in zip(values, known, strict=True)
                ]
                for word, pick in (("lowest", np.argmin), ("highest", np.argmax))
            }
        parts = {key: self.take(part) for key, part in _uncertainties(self.ds, name).items()}
        columns = []
        for what, entries in picked.items():
            cells = [
                _cell(values[row, entry[0]], **{key: part[row, entry[0]] for key, part in parts.items()})
                if entry.size
                else "–"
                for row, entry in enumerate(entries)
            ]
            # What is relative to its first entry is zero there in every row.
            if set(cells) - {"0", "0 ± 0", "–"}:
                columns.append(_Column(_head(self.ds, name, what), cells))
        return columns

    def _entry(self, dim: str, word: str, entries: Sequence[np.ndarray]) -> str:
        """Which entry of a dimension: its number, if that is the same at every place."""
        numbers = {float(self.ds[dim].values[entry[0]]) for entry in entries if entry.size}
        return f"{dim} {number(numbers.pop())}" if len(numbers) == 1 else f"{word} {dim}"


def _units(array: xr.DataArray) -> str:
    units = str(array.attrs.get("units", "1"))
    return "" if units == "1" else _joined([" ", _element("span", f"[{units}]")])


def _head(ds: xr.Dataset, name: str, what: str = "") -> _Html:
    """What stands over a variable's column: words, which entry, and its name in the file with its units."""
    words = str(ds[name].attrs.get("long_name", name))
    small = _joined([_element("code", _breakable(name)), _units(ds[name])])
    return _joined([_breakable(words), _element("em", what) if what else "", small], "<br>")


def _breakable(text: str) -> _Html:
    """Text whose long names may be broken where their words end."""
    return _Html(html.escape(text).replace("_", "_<wbr>"))


def _summary(ds: xr.Dataset) -> list[_Html]:
    """The tables that a reader sees at once: of the whole, by its places, and of what has dimensions of its own."""
    rows = _dimensions_of_rows(ds)
    families = _families(ds)
    tables = [_whole(ds, families.pop((), []))]
    by_place: dict[tuple[str, ...], list[str]] = {}
    for dims, names in families.items():
        beyond = set(rows) < set(dims) and len(_Places.of(ds, dims, names)) > SMALL
        by_place.setdefault(rows if beyond else dims, []).extend(
            name for name in names if not beyond or _is_number(ds[name])
        )
    for dims, names in by_place.items():
        places = _Places.of(ds, dims, names)
        columns = places.labels(numbers=False)
        for name in names:
            columns += [places.values(name)] if set(ds[name].dims) == set(dims) else places.summarised(name)
        caption = f"By {' and '.join(dims)}"
        table = _table(caption, columns)
        tables.append(table if len(places) <= OPEN else _folded(f"{caption}: {len(places)} rows", table))
    return [table for table in tables if table]


def _whole(ds: xr.Dataset, names: Sequence[str]) -> _Html:
    """The variables without dimensions, and the attributes that have an uncertainty."""
    heads = [_head(ds, name) for name in names]
    cells = [
        _cell(ds[name].item(), **{key: ds[part].item() for key, part in _uncertainties(ds, name).items()})
        for name in names
    ]
    for key, value in ds.attrs.items():
        parts = {end[1:]: ds.attrs.get(key.removesuffix("_mean") + end, math.nan) for end in (_SE, _LOW, _HIGH)}
        if not isinstance(value, str) and not all(map(math.isnan, parts.values())):
            heads.append(_element("code", key))
            cells.append(_cell(value, **parts))
    if not heads:
        return _Html()
    return _table("Overall", [_Column("measure", heads, text=True), _Column("value", cells)])


def _meaning(ds: xr.Dataset) -> str:
    """What the signs in the tables are."""
    said = []
    errors = [str(ds[name].attrs["long_name"]) for name in ds.data_vars if str(name).endswith(_SE)]
    if kinds := sorted({text.replace(":", " of ").partition(" of ")[0] for text in errors}):
        said.append(f"±: {', '.join(kinds)}.")
    elif any(str(key).endswith(_SE) for key in ds.attrs):
        said.append("±: standard error.")
    known = {str(name) for name in (*ds.data_vars, *ds.attrs)}
    if any(name.endswith(_LOW) and name.removesuffix(_LOW) in known for name in known):
        said.append("[low, high]: 95 % interval.")
    return " ".join(said)


def _all_values(ds: xr.Dataset, file: str) -> _Html:
    """Every variable entry by entry, uncertainties as columns of their own."""
    tables: list[str] = []
    if "run" in ds.dims:
        places = _Places.of(ds, ("run",), [str(name) for name in ds.data_vars if "run" in ds[name].dims])
        keys = ["run", *(str(key) for key, array in ds.coords.items() if array.dims == ("run",) and key != "run")]
        tables.append(_table("Runs", [places.column(key) for key in keys]))
    for dims, names in _families(ds).items():
        names = [one for name in names for one in (name, *_uncertainties(ds, name).values())]
        if not dims:
            heads = [_element("code", name) for name in names]
            cells = [_every_digit(ds[name].item()) for name in names]
            tables.append(_table("Overall", [_Column("variable", heads, text=True), _Column("value", cells)]))
            continue
        places = _Places.of(ds, dims, names)
        some = places.first(LONGEST)
        caption = f"By {' and '.join(dims)}"
        if len(some) < len(places):
            caption += f": the first {len(some)} of {len(places)} rows; {file} has all"
        tables.append(_table(caption, [*some.labels(numbers=True), *(some.column(name) for name in names)]))
    return _folded("All values", *tables)


# --- what was measured and how ----------------------------------------------------------------------


def _figure(ds: xr.Dataset, path: Path, own: Callable[[xr.Dataset], Figure] | None) -> _Html:
    """Draw a measurement into its file, and into the page."""
    if own is None and ds.attrs.get("probe") not in FIGURES:
        return _Html()
    try:
        figure = (own or draw)(ds)
        save_figure(figure, path)
    except Exception as error:  # whatever it is, the other measurements have a right to their page
        path.unlink(missing_ok=True)  # an older figure is not one of these values
        reason = f"the figure could not be drawn: {type(error).__name__}: {error}"
        warnings.warn(f"{path.stem}: {reason}", stacklevel=3)
        return _element("p", reason[0].upper() + reason[1:], class_="warning")
    drawn = ", ".join(str(ds[name].attrs.get("long_name", name)) for name in _measured(ds))
    width, height = (round(side * _PIXELS) for side in figure.get_size_inches())
    alternative = html.escape(
        f"{ds.attrs.get('title', path.stem)}: figure of {drawn}. The tables below have the values."
    )
    source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return _element("figure", _Html(f'<img src="{source}" width="{width}" height="{height}" alt="{alternative}">'))


def _section(stem: str, ds: xr.Dataset, figure: _Html, common: Mapping[str, Any]) -> _Html:
    """One measurement: what it is, its figure, its values, and what only it has among its attributes."""
    parts: list[str] = [_element("h2", _title(stem, ds))]
    if references := ds.attrs.get("references"):
        parts.append(_element("p", str(references), class_="references"))
    if options := _options(ds):
        parts.append(_element("p", _joined(options, " · "), class_="options"))
    parts += [figure, *_summary(ds)]
    if meaning := _meaning(ds):
        parts.append(_element("p", meaning, class_="note"))
    parts.append(_all_values(ds, f"{stem}.nc"))
    own = {key: value for key, value in ds.attrs.items() if key not in common}
    if own:
        parts.append(_folded("How this was measured", _attributes(own)))
    files = [f"{stem}.nc", *([f"{stem}.png"] if "<img" in figure else [])]
    parts.append(_element("p", "Files: ", _joined((_element("a", f, href=f) for f in files), ", "), class_="note"))
    return _element("section", *parts, id=stem)


def _title(stem: str, ds: xr.Dataset) -> str:
    return str(ds.attrs.get("title", pretty(stem)))


def _options(ds: xr.Dataset) -> list[_Html]:
    """The definition that was used and every other option, from the dataset's configuration."""
    with suppress(ValueError, TypeError):
        config = json.loads(str(ds.attrs.get("config", "{}")))
        named = {key: value for key, value in config.items() if key not in ("probe", "class") and value is not None}
        plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in named.items()}
        # The definition first: it is what two people who measured "the same" may differ in.
        keys = sorted(plain, key=lambda key: key != "definition")
        return [_joined([f"{key} ", _element("code", plain[key])]) for key in keys if len(plain[key]) <= _SHORT]
    return []


def _common(datasets: Sequence[xr.Dataset]) -> dict[str, Any]:
    """The attributes that are the same in all datasets."""
    first, *others = (ds.attrs for ds in datasets)
    return {key: value for key, value in first.items() if all(key in attrs and attrs[key] == value for attrs in others)}


def _attributes(attributes: Mapping[str, Any]) -> _Html:
    """Attributes as a list of terms; JSON text as its entries."""
    parts = []
    for key, value in attributes.items():
        if value not in ("", "[]", "{}"):
            parts += [_element("dt", _element("code", str(key))), _element("dd", _spelled(str(value)))]
    return _element("dl", *parts, class_="attributes")


def _spelled(text: str) -> str:
    content: Any = None
    if text.startswith(("{", "[")):
        with suppress(ValueError):
            content = json.loads(text)
    if isinstance(content, dict) and not any(isinstance(value, dict | list) for value in content.values()):
        return _joined((f"{key} = {value}" for key, value in content.items()), "<br>")
    if content is not None:
        return _folded(f"{len(text)} characters", _element("pre", json.dumps(content, indent=1, ensure_ascii=False)))
    return _joined(text.splitlines(), "<br>")


def _distinct(datasets: Iterable[xr.Dataset], key: str) -> list[Any]:
    """The different values of what is an attribute of a run, or a coordinate of stacked runs."""
    values: dict[Any, None] = {}
    for ds in datasets:
        if key == "image_size" and "image_height" in ds.attrs:
            values[f"{ds.attrs['image_height']} x {ds.attrs.get('image_width', '?')}"] = None
        elif key == "date":
            stamps = [line.partition(" ")[0] for line in str(ds.attrs.get("history", "")).splitlines()]
            values |= dict.fromkeys(stamp.partition("T")[0] for stamp in stamps)
        elif key in ds.attrs:
            values[ds.attrs[key]] = None
        elif key in ds.coords:
            values |= dict.fromkeys(ds[key].values.ravel().tolist())
    return [value for value in values if value not in ("", None)]


def _facts(datasets: Sequence[xr.Dataset]) -> _Html:
    """What was measured, in a few lines."""
    parts = []
    for key, words in _FACTS.items():
        values = sorted(found) if (found := _distinct(datasets, key)) and key in ("date", "images") else found
        texts = [f"{value:,}" if isinstance(value, int | np.integer) else str(value) for value in values]
        if len(texts) > _SEVERAL:
            texts = [*texts[:_SEVERAL], f"and {len(texts) - _SEVERAL} more"]
        if texts:
            parts.append(_element("div", _element("dt", words), _element("dd", _joined(texts, "<br>"))))
    return _element("dl", *parts, class_="facts")


def _omissions(datasets: Mapping[str, xr.Dataset], left_out: Mapping[str, str]) -> list[_Html]:
    """What was not measured, as terms and reasons."""
    reasons: dict[str, str] = {}
    skipped: dict[str, list[str]] = {}
    for name, ds in datasets.items():
        with suppress(ValueError, AttributeError):
            reasons |= json.loads(str(ds.attrs.get("left_out", "{}")))
        with suppress(ValueError):
            for reason in json.loads(str(ds.attrs.get("skipped", "[]"))):
                skipped.setdefault(str(reason), []).append(name)
    reasons |= left_out
    measured = {*datasets, *(ds.attrs.get("probe") for ds in datasets.values())}
    terms = {
        _joined([_element("code", name)]): str(reason).removeprefix(f"{name}: ")
        for name, reason in reasons.items()
        if name not in measured
    }
    parts = [part for term, reason in terms.items() for part in (_element("dt", term), _element("dd", reason))]
    for reason, names in skipped.items():
        term = _joined(["in ", _joined((_element("code", name) for name in names), ", ")])
        parts += [_element("dt", term), _element("dd", reason)]
    return parts


# --- the page ---------------------------------------------------------------------------------------


def _page(
    datasets: Mapping[str, xr.Dataset],
    sections: Sequence[_Html],
    common: Mapping[str, Any],
    left_out: Mapping[str, str],
) -> str:
    every = list(datasets.values())
    models = [pretty(str(model)) for model in _distinct(every, "model") or _distinct(every, "model_class")]
    what = ", ".join(models) if len(models) <= _SEVERAL else f"{len(models)} models"
    title = f"{what or 'a model'}: vitprobe report"
    entries = [
        _element("li", _element("a", _title(name, ds), href=f"#{plain_name(name)}"), " ", _element("code", name))
        for name, ds in datasets.items()
    ]
    omitted = _omissions(datasets, left_out)
    last = []
    if omitted:
        entries.append(_element("li", _element("a", "Left out", href="#left-out")))
        last.append(
            _element(
                "section", _element("h2", "Left out"), _element("dl", *omitted, class_="attributes"), id="left-out"
            )
        )
    entries.append(_element("li", _element("a", "Provenance", href="#provenance")))
    note = "What all measurements on this page share." if len(datasets) > 1 else ""
    last.append(
        _element("section", _element("h2", "Provenance"), _element("p", note), _attributes(common), id="provenance")
    )
    head = _joined(
        [
            _Html('<meta charset="utf-8">'),
            _Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            _Html('<link rel="icon" href="data:,">'),  # or browsers ask the server for one
            _element("title", title),
            _element("style", _Html(_STYLE)),
        ],
        "\n",
    )
    header = _element("header", _element("h1", what or "A model"), _facts(every))
    contents = _element("nav", _element("h2", "Contents"), _element("ol", *entries), aria_label="Contents")
    body = _joined([header, _element("main", _joined([contents, *sections, *last], "\n"))], "\n")
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --page: #fff; --muted: #57606a; --line: #d5dae0; --link: #0063a0;
  --soft: #f5f7f9; --warning: #a33f00; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e7eb; --page: #15181c; --muted: #a0a9b4; --line: #363c44; --link: #6cbdf0; --soft: #1e2228;
    --warning: #f0a070; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 70rem; color: var(--text); background: var(--page);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 0 0 .5rem; }
a { color: var(--link); }
code, pre { font: .88em ui-monospace, monospace; }
pre { overflow-x: auto; margin: .5rem 0; }
section { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 1.5rem; }
p { margin: .4rem 0; }
.references, .options, .note { color: var(--muted); font-size: .9rem; }
.warning { color: var(--warning); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: .7rem 1.5rem; margin: 0; }
dt { color: var(--muted); font-size: .82rem; }
dd { margin: 0; overflow-wrap: anywhere; }
nav { margin-top: 2rem; padding: 1rem 1.2rem; background: var(--soft); border-radius: .4rem; }
nav h2 { font-size: 1rem; }
nav ol { margin: 0; padding-left: 1.4rem; }
nav code { color: var(--muted); }
figure { margin: 1rem 0; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: .3rem; padding: .5rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .86rem; line-height: 1.35; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
th, td { padding: .22rem 1rem .22rem 0; text-align: right; vertical-align: baseline; }
th:last-child, td:last-child { padding-right: .2rem; }
th { font-weight: 500; vertical-align: bottom; max-width: 12rem; border-bottom: 1px solid var(--text); }
th code, th em { color: var(--muted); font-weight: 400; }
th span { white-space: nowrap; }
td { white-space: nowrap; border-bottom: 1px solid var(--line); }
th:has(br) { min-width: 8rem; }
th.text, td.text { text-align: left; }
td.long { white-space: normal; min-width: 16rem; max-width: 24rem; overflow-wrap: anywhere; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--link); }
.attributes { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .25rem 1.2rem; margin: .6rem 0;
  font-size: .9rem; }
.attributes dt { font-size: inherit; }
.attributes details { margin: 0; }
@media (max-width: 36rem) {
  .facts { grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); }
  .attributes { grid-template-columns: 1fr; gap: 0; }
  .attributes dd { margin-bottom: .5rem; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .scroll { overflow: visible; }
  figure, tr { break-inside: avoid; }
  h2, caption, thead, .references, .options { break-after: avoid; }
  details:not([open]) { display: none; }
}
"""
