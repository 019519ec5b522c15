"""Where heads look relative to the query: attention mass by offset, and the mass of a neighbourhood by layer."""

import json

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures.heads import by_layer
from vitprobe.figures.map_table import MapRow, map_table
from vitprobe.names import unknown

LABELS = {"mass": "attention mass at this offset [1]", "mean_weight": "mean attention at this offset [1]"}


def attention_offsets(ds: xr.Dataset, *, variable: str = "mass", scale: str = "log", reach: int = 7) -> Figure:
    """Attention by offset from the query as images: a row per layer, a column per head, one scale of colours for all.

    The box is the neighbourhood that `local_mass` is of, and ticks count patches from the query.

    Args:
        ds: the dataset of `vitprobe.probes.attention_offsets`, of one run.
        variable: `"mass"`, which sums to one, or `"mean_weight"`, the mean over the queries that have the offset.
        scale: of the colours, `"log"` or `"linear"`.
        reach: the farthest offset to draw [patches].

    Returns:
        The figure.

    Raises:
        ValueError: if the variable or the scale is unknown, or the dataset is of several runs.
    """
    if variable not in LABELS:
        raise unknown("variable", variable, LABELS)
    if "run" in ds.dims:
        raise ValueError(f"{ds.sizes['run']} runs: draw one at a time, ds.isel(run=0), or local_mass(ds) for all.")
    ds = ds.sel(offset_y=slice(-reach, reach), offset_x=slice(-reach, reach))
    rows = []
    for index in range(ds.sizes["layer"]):
        maps = ds[variable].isel(layer=index).transpose("head", "offset_y", "offset_x").dropna("head", how="all")
        maps = maps.isel({dim: _present(maps, dim) for dim in ("offset_y", "offset_x")})
        middle = (maps.sizes["offset_y"] // 2, maps.sizes["offset_x"] // 2)
        rows.append(MapRow(f"layer {index + 1}", maps.values, middle))
    side = neighbourhood(ds)
    said = [
        f"Ticks: rows and columns of patches from the query, {reach} at most. Box: its {side}x{side} neighbourhood."
    ]
    if "images" in ds.attrs:
        said.append(f"Mean of {ds.attrs['images']} image{'' if ds.attrs['images'] == 1 else 's'}.")
    return map_table(
        rows,
        column="head",
        scale=scale,
        label=LABELS[variable],
        note=" ".join(said),
        box=side,
    )


def _present(maps: xr.DataArray, dim: str) -> slice:
    """The offsets that a layer has, with those in between that dilated windows do not."""
    others = [other for other in maps.dims if other != dim]
    present = np.flatnonzero(maps.notnull().any(others).values)
    return slice(int(present[0]), int(present[-1]) + 1)


def neighbourhood(ds: xr.Dataset) -> int:
    """Side of the neighbourhood that `local_mass` is of."""
    return int(json.loads(ds.attrs["config"])["neighbourhood"])


def local_mass(ds: xr.Dataset) -> Figure:
    """Attention mass of the neighbourhood of the query of each head by layer, one panel per model.

    Args:
        ds: the dataset of `vitprobe.probes.attention_offsets`, of one run or of stacked runs.

    Returns:
        The figure: a point per head and seed, the mean over heads as a line, and the mass of uniform attention, dashed.
    """
    side = neighbourhood(ds)
    near = (abs(ds["offset_y"]) <= side // 2) & (abs(ds["offset_x"]) <= side // 2)
    ds = ds.assign(uniform_local_mass=ds["uniform_mass"].where(near).sum(("offset_y", "offset_x")))
    return by_layer(ds, "local_mass", "uniform_local_mass", label=f"attention mass within {side}x{side} [1]")
