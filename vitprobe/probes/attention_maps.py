"""Where the heads look: their attention maps (d'Ascoli et al. 2021, Fig. 3, 7, 16 and 17)."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import netCDF4
import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import AttentionSite
from vitprobe.calling import Described, as_batches, images_of
from vitprobe.names import unknown
from vitprobe.probes.attention import Rows, SiteMean, select_keys, site_positions
from vitprobe.probes.base import FeatureProbe, along_layer
from vitprobe.results import provenance, replacing

TITLE = "Attention maps by layer and head"
REFERENCES = "d'Ascoli et al. 2021, ConViT, arXiv:2103.10697, Fig. 3, 7, 16 and 17"
MEMORY = 1 << 30  # bytes of maps that are kept in memory; beyond it they belong in a file

Queries = Literal["middle", "all"] | tuple[int, int]
Images = Literal["mean"] | int | Sequence[int]

_MAPS = ("attention", "prefix_mass")
_LARGE = ("image", "attention")  # what goes into a file batch by batch
_TEXTS = {
    "attention": "attention of the query to each patch",
    "prefix_mass": "attention of the query to prefix tokens and sinks",
    "image": "image as the model was given it",
    "sample": "image in the order of the batches",
    "head": "head",
    "query": "query, row by row",
    "y": "row of the patch",
    "x": "column of the patch",
    "channel": "channel of the image",
    "pixel_y": "row of the pixel",
    "pixel_x": "column of the pixel",
    "query_y": "row of the query",
    "query_x": "column of the query",
}


class AttentionMaps(FeatureProbe):
    """The attention of query patches to all patches, by layer and head, averaged over images or of chosen ones.

    Rows are not normalised anew: what patches pay to prefix tokens and sinks is missing from the map and stands in
    `prefix_mass`. GPSA's map is its gated one; windowed attention's is averaged over the windows. Standard errors of
    the average are over images; the maps of a single image have none. With chosen images, the images themselves are
    the coordinate `image`, as the model was given them.

    At most 1 GiB of maps is kept in memory. More is refused; the function `attention_maps` writes it to a file.

    Args:
        queries: `"middle"`, the patch in the middle of each layer's own grid (a window's for windowed attention), or
            the first after it; row and column of a patch there; or `"all"`.
        images: `"mean"` of all; or those to keep: how many, from the first on, or their places in the order of the
            batches, from 0.
    """

    name = "attention_maps"
    title = TITLE
    references = REFERENCES
    reads = "attention"
    summed = ("_statistics",)

    def __init__(self, queries: Queries = "middle", images: Images = "mean") -> None:
        if isinstance(queries, str) and queries not in ("middle", "all"):
            raise unknown("queries", queries, ("middle", "all"))
        if len(queries) != 2 and not isinstance(queries, str):
            raise ValueError(f"queries={queries!r}: give 'middle', 'all', or the row and column of a patch.")
        self.queries = queries
        self.chosen = _chosen(images)

    def config(self) -> dict[str, Any]:
        """The queries and images asked for."""
        return {"queries": self.queries, "chosen_images": "mean" if self.chosen is None else self.chosen}

    def alone(self) -> str:
        """Chosen images go by their places in one order of the batches."""
        return "" if self.chosen is None else "images= are places in the order of one process's batches"

    def start(self) -> None:
        """Forget everything that was measured."""
        self._statistics = {name: SiteMean() for name in _MAPS}
        self._bytes: dict[str, int] = {}
        self._first = self._count = 0  # of the batch's images, and of all so far
        self._came: dict[str, int] = {}  # images of the batch so far by site
        self._batch: dict[str, dict[str, list[Tensor]]] = {name: {} for name in _MAPS}
        self._images: Tensor | None = None
        self._kept: dict[str, list[np.ndarray]] = {name: [] for name in (*_MAPS, "image")}
        self._pixels: tuple[int, ...] = ()

    def start_batch(self, batch: Any) -> None:
        """Keep the chosen images of a batch."""
        images = images_of(batch)
        self._first, self._count, self._came = self._count, self._count + len(images), {}
        if self.chosen is not None and (here := self._here(0, len(images))):
            self._check_memory("image", images[0].numel())
            self._images = images[here]

    def update(self, where: AttentionSite, what: Tensor) -> None:
        """Add the maps `(image, window, head, query, key)` of one site for a chunk of images."""
        queries = _rows_of(self.queries, where.grid)
        self._check_memory(where.name, where.heads * (queries.stop - queries.start) * where.grid[0] * where.grid[1])
        if self.chosen is not None:
            start = self._came.get(where.name, 0)
            self._came[where.name] = start + len(what)
            if not (here := self._here(start, len(what))):
                return
            what = what[here]
        rows = _grid_rows(where, what, queries)
        found = {"attention": rows.patches.mean(1).unflatten(-1, where.grid), "prefix_mass": rows.elsewhere.mean(1)}
        for name, values in found.items():
            values = values if self.queries == "all" else values.squeeze(2)
            if self.chosen is None:
                self._statistics[name].add(where, values)
            else:
                self._batch[name].setdefault(where.name, []).append(values.float().cpu())

    def end_batch(self) -> None:
        """Put the chosen maps of a batch together."""
        if self._images is None:
            return
        block = {"image": self._images.float().cpu().numpy()}
        block |= {name: _padded([torch.cat(chunks).numpy() for chunks in self._batch[name].values()]) for name in _MAPS}
        self._images, self._batch = None, {name: {} for name in _MAPS}
        self._pixels = block["image"].shape[1:]
        self._keep(block)

    def dataset(self, places: Sequence[AttentionSite]) -> xr.Dataset:
        """The maps along `layer`; NaN where a layer has fewer heads or patches."""
        ds = self._averages(places) if self.chosen is None else self._samples()
        queries = [_places(self.queries, site.grid) for site in places]
        if self.queries == "all":
            padded = along_layer(queries, ("axis", "query"), long_name="", units="1")[1]
            at = _query_coordinates(("layer", "query"), np.moveaxis(padded, 1, 0))
        else:
            at = _query_coordinates(("layer",), np.stack(queries, -1)[:, 0])
        grid = [max(site.grid[axis] for site in places) for axis in (0, 1)]
        sizes = {"head": max(site.heads for site in places), "y": grid[0], "x": grid[1]}
        sizes |= {"query": grid[0] * grid[1]} if self.queries == "all" else {}
        return ds.assign_coords(_numbers(sizes) | at)

    def _averages(self, places: Sequence[AttentionSite]) -> xr.Dataset:
        variables: dict[str, Any] = {}
        for name, dims in self._dims().items():
            variables |= self._statistics[name].variables(places, name, dims, long_name=_TEXTS[name], units="1")
        return xr.Dataset(variables)

    def _samples(self) -> xr.Dataset:
        assert self.chosen is not None
        if self.chosen[-1] >= self._count:
            raise ValueError(
                f"attention_maps: image {self.chosen[-1]} was asked for, but {self._count} images came by: give "
                f"images= below {self._count}, counted from 0, or more batches."
            )
        ds = xr.Dataset({
            name: (self._variable_dims(name), np.concatenate(blocks), _described(name))
            for name, blocks in self._kept.items()
            if blocks
        })
        pixels = dict(zip(self._variable_dims("image")[1:], self._pixels, strict=True))
        ds = ds.assign_coords(sample=("sample", list(self.chosen), _described("sample")), **_numbers(pixels))
        return ds.set_coords([name for name in ds.data_vars if name == "image"])

    def _keep(self, block: Mapping[str, np.ndarray]) -> None:
        """Keep the chosen images of a batch and their maps, `(sample, ...)`."""
        for name, values in block.items():
            self._kept[name].append(values)

    def _dims(self) -> dict[str, tuple[str, ...]]:
        """The dimensions of a site's values."""
        query = ("query",) if self.queries == "all" else ()
        return {"attention": ("head", *query, "y", "x"), "prefix_mass": ("head", *query)}

    def _variable_dims(self, name: str) -> tuple[str, ...]:
        """The dimensions of what is kept of chosen images."""
        if name == "image":
            return ("sample", "channel", "pixel_y", "pixel_x")
        return ("sample", "layer", *self._dims()[name])

    def _here(self, start: int, count: int) -> list[int]:
        """Which of images that follow each other in the batch are chosen, counted from the first of them."""
        assert self.chosen is not None
        first = self._first + start
        return [index - first for index in self.chosen if first <= index < first + count]

    def _check_memory(self, name: str, numbers: int) -> None:
        """Refuse what will not fit: so many numbers per image of a site, or of the images themselves."""
        # The mean and the squares in double precision, or every image in single.
        self._bytes[name] = numbers * (16 if self.chosen is None else 4 * len(self.chosen))
        if (total := sum(self._bytes.values())) > MEMORY:
            advice = "" if self.chosen is None else ", fewer images, or a file: attention_maps(..., path='maps.nc')"
            raise ValueError(
                f"attention_maps: {total / 2**30:.1f} GiB of maps or more would be kept in memory, where "
                f"{MEMORY / 2**30:.1f} GiB are allowed: give one query{advice}."
            )


class _Streamed(AttentionMaps):
    """Writes chosen images and their maps to a file, batch by batch, and keeps the rest."""

    def __init__(self, queries: Queries, images: Images, file: netCDF4.Dataset) -> None:
        super().__init__(queries, images)
        self._file = file

    def _keep(self, block: Mapping[str, np.ndarray]) -> None:
        super()._keep({name: values for name, values in block.items() if name not in _LARGE})
        written = len(self._file.dimensions["sample"]) if "sample" in self._file.dimensions else 0
        for name in _LARGE:
            values = block[name]
            if name not in self._file.variables:
                self._create(name, values.shape[1:])
            self._file.variables[name][written : written + len(values)] = values

    def _create(self, name: str, shape: tuple[int, ...]) -> None:
        dims = self._variable_dims(name)
        for dim, size in zip(dims, (None, *shape), strict=True):  # no size: as many samples as will come
            if dim not in self._file.dimensions:
                self._file.createDimension(dim, size)
        variable = self._file.createVariable(
            name, "f4", dims, zlib=True, complevel=4, shuffle=True, chunksizes=(1, 1, *shape[1:]), fill_value=False
        )
        # A reader takes for a coordinate what another variable says is one.
        variable.setncatts(_described(name) | ({"coordinates": "image"} if name == "attention" else {}))

    def _check_memory(self, name: str, numbers: int) -> None:
        """A file may be large."""


def attention_maps(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    queries: Queries = "middle",
    images: Images = "mean",
    path: str | os.PathLike[str] | None = None,
    **options: Any,
) -> xr.Dataset:
    """Where each head looks from one patch or from all, averaged over images or for chosen ones; see `AttentionMaps`.

    With chosen images, no batch after the last of them is looked at.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        queries: `"middle"` (of each layer's grid), row and column of a patch, or `"all"`.
        images: `"mean"`, how many to keep from the first on, or a list of their places in the order of the batches.
        path: a file `<stem>.nc` for the maps of chosen images, written whole or not at all, and batch by batch, so that
            no more than one batch of maps is in memory.
        **options: `layers`, `prefix`, `forward`, `group` and `progress` of `probe`.

    Returns:
        `attention` (layer, head, y, x) and `prefix_mass` (layer, head), with a dimension `sample` before them for
        chosen images and `query` after `head` for all queries. With a path, opened and not loaded.

    Raises:
        ValueError: if the maps are too many for memory, a query or an image is not there, or a path is given without
            chosen images.
    """
    if path is None:
        probe = AttentionMaps(queries, images)
        some = batches if probe.chosen is None else Described(_until(batches, probe.chosen[-1]), batches)
        return probe.run(model, some, **options)
    path = Path(path)
    if path.suffix != ".nc" or (chosen := _chosen(images)) is None:
        raise ValueError(
            f"path={str(path)!r} with images={images!r}: a file <stem>.nc holds the maps of chosen images; the mean "
            "needs none, so save what is returned."
        )
    with replacing(path) as unfinished:
        with netCDF4.Dataset(unfinished, "w", format="NETCDF4") as file:
            probe = _Streamed(queries, images, file)
            ds = probe.run(model, Described(_until(batches, chosen[-1]), batches), **options)
        encoding = {
            name: {"_FillValue": None} for name, variable in ds.variables.items() if variable.dtype.kind in "if"
        }
        ds.to_netcdf(unfinished, mode="a", engine="netcdf4", encoding=encoding)
    return xr.open_dataset(path, engine="netcdf4")


def operator_map(operator: Tensor, grid: tuple[int, int], *, query: tuple[int, int] | None = None) -> xr.Dataset:
    """Where the token-mixing matrices of one layer look from one place: their rows as images, absolute values.

    Args:
        operator: `(head or channel, query, key)`, as `vitprobe.attach.spatial_operator` gives it.
        grid: rows and columns of places.
        query: row and column of the query; the middle of the grid unless given.

    Returns:
        `attention` (head, y, x).

    Raises:
        ValueError: if the matrices are not between the places of the grid, or the query is none of them.
    """
    places = grid[0] * grid[1]
    if operator.ndim != 3 or tuple(operator.shape[1:]) != (places, places):
        raise ValueError(
            f"an operator of shape {tuple(operator.shape)} on a grid of {grid[0]}x{grid[1]}: give "
            f"(head, query, key) with {places} queries and keys, as spatial_operator does."
        )
    row, column = _place(query, grid)
    rows = operator.detach()[:, row * grid[1] + column].abs().double().unflatten(-1, grid).cpu().numpy()
    described = {"long_name": "absolute weight of each place for the query", "units": "1"}
    ds = xr.Dataset({"attention": (("head", "y", "x"), rows, described)})
    ds.attrs = provenance(
        title=TITLE,
        references=REFERENCES,
        config={"probe": "operator_map", "query": query, "grid": grid},
        probe="attention_maps",
    )
    return ds.assign_coords(
        _numbers(dict(zip(("head", "y", "x"), rows.shape, strict=True)))
        | _query_coordinates((), np.array([row, column]))
    )


def _chosen(images: Images) -> tuple[int, ...] | None:
    """The places of the chosen images, rising; `None` for the mean of all."""
    if isinstance(images, str):
        if images != "mean":
            raise unknown("images", images, ("mean",))
        return None
    chosen = range(images) if isinstance(images, int) else sorted({int(index) for index in images})
    if not chosen or chosen[0] < 0:
        raise ValueError(
            f"images={images!r}: give 'mean', how many images to keep, or a list of their places, counted from 0."
        )
    return tuple(chosen)


def _padded(maps: Sequence[np.ndarray]) -> np.ndarray:
    """The maps `(sample, ...)` of each layer as `(sample, layer, ...)`, NaN where a layer has less than another."""
    shape = tuple(max(sizes) for sizes in zip(*(one.shape[1:] for one in maps), strict=True))
    padded = np.full((len(maps[0]), len(maps), *shape), np.nan, dtype=np.float32)
    for layer, one in enumerate(maps):
        corner: Any = (slice(None), layer, *map(slice, one.shape[1:]))
        padded[corner] = one
    return padded


def _until(batches: Iterable[Any], last: int) -> Iterator[Any]:
    """The batches up to the one that holds the last chosen image."""
    count = 0
    for batch in as_batches(batches):
        yield batch
        count += len(images_of(batch))
        if count > last:
            return


def _rows_of(queries: Queries, grid: tuple[int, int]) -> slice:
    """Which rows of a map between patches are asked for."""
    if queries == "all":
        return slice(0, grid[0] * grid[1])
    row, column = _place(None if queries == "middle" else queries, grid)
    return slice(row * grid[1] + column, row * grid[1] + column + 1)


def _grid_rows(site: AttentionSite, maps: Tensor, queries: slice) -> Rows:
    """The rows of some patches of a site's grid, of the windows that fill it, keys row by row."""
    if site.positions is None:
        first, last = site.prefix, site.prefix + site.grid[0] * site.grid[1]
        return select_keys(site, maps[..., first:last, :][..., queries, :])
    positions = site_positions(site).numpy()
    present = ~np.isnan(positions[..., 0])
    whole = np.flatnonzero(present.sum(1) == site.grid[0] * site.grid[1])
    if not whole.size:
        raise ValueError(
            f"attention_maps: no window of {site.name} holds {site.grid[0]}x{site.grid[1]} patches without padding: "
            "give images of a size that the windows divide."
        )
    # Tokens that are no patch sort last, as NaN does.
    tokens = np.lexsort((positions[whole, :, 1], positions[whole, :, 0]))[:, : site.grid[0] * site.grid[1]]
    order = torch.from_numpy(tokens).to(maps.device)[None, :, None, :]  # (image, window, head, patch)
    asked = maps[:, whole].take_along_dim(order[..., queries, None], 3)
    rows = select_keys(site, asked, present=torch.from_numpy(present[whole]).to(maps.device))
    return replace(rows, patches=rows.patches.take_along_dim(order[..., None, :], 4))


def _places(queries: Queries, grid: tuple[int, int]) -> np.ndarray:
    """Row and column of each query asked for `(2, query)`."""
    rows = _rows_of(queries, grid)
    return np.array(np.unravel_index(np.arange(rows.start, rows.stop), grid))


def _place(query: tuple[int, int] | None, grid: tuple[int, int]) -> tuple[int, int]:
    row, column = (grid[0] // 2, grid[1] // 2) if query is None else query
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(
            f"query={query} is no patch of a grid of {grid[0]}x{grid[1]}: give a row below {grid[0]} and a column "
            f"below {grid[1]}, counted from 0, or none for the middle."
        )
    return row, column


def _described(name: str) -> dict[str, str]:
    return {"long_name": _TEXTS[name], "units": "1"}


def _numbers(sizes: Mapping[str, int]) -> dict[str, Any]:
    """A coordinate that counts from 0 for each dimension."""
    return {dim: (dim, np.arange(size), _described(dim)) for dim, size in sizes.items()}


def _query_coordinates(dims: tuple[str, ...], places: np.ndarray) -> dict[str, Any]:
    """Row and column of the queries `(2, ...)` along the dimensions."""
    return {name: (dims, place, _described(name)) for name, place in zip(("query_y", "query_x"), places, strict=True)}
