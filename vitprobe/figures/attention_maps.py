"""Where heads look from one query, initialisations or layers below each other (d'Ascoli et al. 2021, Fig. 3 and 7)."""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from vitprobe.figures.map_table import MapRow, map_table
from vitprobe.figures.page import pretty


def attention_maps(ds: xr.Dataset, *, scale: str = "log", query: tuple[int, int] | None = None) -> Figure:
    """The attention of one query as images: a row per run and layer, a column per head, one scale of colours for all.

    The query is boxed, and ticks count patches from it. Of chosen images, each has rows of its own after the image
    itself.

    Args:
        ds: the dataset of `vitprobe.probes.attention_maps` or `operator_map`, of one run or of stacked runs; runs go
            by a coordinate `label`, else by `model`.
        scale: of the colours, `"log"` or `"linear"`.
        query: row and column of the query, where the dataset holds all; the middle of each layer's grid unless given.

    Returns:
        The figure.

    Raises:
        ValueError: if the scale is neither, the query is not in the dataset, or the rows are too many to be read.
    """
    rows = _rows(ds, query)
    return map_table(
        rows,
        column=str(ds["head"].attrs.get("long_name", "head")),
        scale=scale,
        label=str(ds["attention"].attrs.get("long_name", "attention weight")),
        note=_note(ds),
        marks=[1 / row.maps[0].size for row in rows],
    )


def _rows(ds: xr.Dataset, query: tuple[int, int] | None) -> list[MapRow]:
    rows = []
    for run in _along(ds, "run"):
        for sample in _along(run, "sample"):
            first = True
            for layer in _along(sample, "layer"):
                if layer["query_y"].isnull().all():  # a layer that other runs have
                    continue
                layer = _at(layer, query)
                maps = layer["attention"].transpose("head", "y", "x")
                for dim in maps.dims:
                    maps = maps.dropna(dim, how="all")
                chosen = f"image {int(sample['sample'])}" if "sample" in ds.dims else ""
                shown = "image" in layer.coords
                named = [_name(run)] if "run" in ds.dims else []
                named += [chosen] if chosen and not shown else []
                named += [f"layer {int(layer['layer']) + 1}"] if ds.sizes.get("layer", 1) > 1 else []
                image = _image(layer["image"]) if shown and first else None
                origin = (int(layer["query_y"]), int(layer["query_x"]))
                rows.append(MapRow(", ".join(named), maps.values, origin, image, chosen if image is not None else ""))
                first = False
    return rows


def _along(ds: xr.Dataset, dim: str) -> list[xr.Dataset]:
    return [ds.isel({dim: index}) for index in range(ds.sizes[dim])] if dim in ds.dims else [ds]


def _at(layer: xr.Dataset, query: tuple[int, int] | None) -> xr.Dataset:
    """One layer at one query."""
    if "query" not in layer.dims:
        at = (int(layer["query_y"]), int(layer["query_x"]))
        if query not in (None, at):
            raise ValueError(f"query={query}: the dataset holds the maps of {at} alone; measure queries='all'.")
        return layer
    own = layer.isel(query=layer["query_y"].notnull().values)
    height, width = (int(own[name].max()) + 1 for name in ("query_y", "query_x"))
    row, column = (height // 2, width // 2) if query is None else query
    if not (0 <= row < height and 0 <= column < width):
        raise ValueError(f"query={query} is no patch of a grid of {height}x{width}: give a row and a column of it.")
    return own.isel(query=row * width + column)


def _name(run: xr.Dataset) -> str:
    if "label" in run.coords:
        return str(run["label"].item())
    return pretty(str(run["model"].item())) if "model" in run.coords else f"run {int(run['run']) + 1}"


def _image(image: xr.DataArray) -> np.ndarray:
    """The pixels between 0 and 1: models are given normalised images, and the norm is not known here."""
    pixels = image.transpose("pixel_y", "pixel_x", "channel").values.astype(float)
    pixels = pixels if pixels.shape[-1] == 3 else pixels.mean(-1)
    low, high = pixels.min(), pixels.max()
    return (pixels - low) / ((high - low) or 1.0)


def _note(ds: xr.Dataset) -> str:
    said = ["Box: the query. Ticks: rows and columns of patches from it. Triangle: uniform attention."]
    if "sample" in ds.dims:
        said.append("Images: places in the order of the batches, from 0.")
    elif "images" in ds.attrs:
        said.append(f"Mean of {ds.attrs['images']} image{'' if ds.attrs['images'] == 1 else 's'}.")
    return " ".join(said)
