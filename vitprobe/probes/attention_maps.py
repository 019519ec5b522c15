"""Where the heads look from one place: their attention maps (d'Ascoli et al. 2021, Fig. 3 and 7)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import AttentionSite
from vitprobe.probes.base import FeatureProbe, RunningMean, along_layer
from vitprobe.results import provenance

TITLE = "Attention maps of one query by layer and head"
REFERENCES = "d'Ascoli et al. 2021, ConViT, arXiv:2103.10697, Fig. 3 and 7"


class AttentionMaps(FeatureProbe):
    """The attention of one query patch to all patches, by layer and head, averaged over images.

    Rows are not normalised anew: what patches pay to prefix tokens is missing from the map and stands in
    `prefix_mass`. GPSA's map is its gated one; windowed attention's is averaged over the windows.

    Args:
        query: row and column of the query on each layer's own grid (a window's for windowed attention); the patch in
            the middle, or the first after it, unless given.
    """

    name = "attention_maps"
    title = TITLE
    references = REFERENCES
    reads = "attention"

    def __init__(self, query: tuple[int, int] | None = None) -> None:
        self.query = query

    def config(self) -> dict[str, Any]:
        """The query asked for."""
        return {"query": self.query}

    def start(self) -> None:
        """Forget everything that was measured."""
        self._maps: dict[str, RunningMean] = {}
        self._prefix: dict[str, RunningMean] = {}

    def update(self, where: AttentionSite, what: Tensor) -> None:
        """Add the maps `(image, window, head, query, key)` of one site for a chunk of images."""
        row, column = _place(self.query, where.grid)
        maps = what[..., where.prefix + row * where.grid[1] + column, :].mean(1)
        patches = maps[..., where.prefix :].unflatten(-1, where.grid)
        self._maps.setdefault(where.name, RunningMean()).add(patches)
        self._prefix.setdefault(where.name, RunningMean()).add(maps[..., : where.prefix].sum(-1))

    def dataset(self, places: Sequence[AttentionSite]) -> xr.Dataset:
        """The maps along `layer`; NaN where a layer has fewer heads or patches."""
        attention = along_layer(
            [self._maps[site.name].mean for site in places],
            ["head", "y", "x"],
            long_name="attention of the query to each patch",
            units="1",
        )
        prefix = along_layer(
            [self._prefix[site.name].mean for site in places],
            ["head"],
            long_name="attention of the query to prefix tokens",
            units="1",
        )
        ds = xr.Dataset({"attention": attention, "prefix_mass": prefix})
        queries = np.array([_place(self.query, site.grid) for site in places])
        return ds.assign_coords(_coords(ds, ("layer",), queries.T))


def attention_maps(
    model: nn.Module, batches: Iterable[Any], *, query: tuple[int, int] | None = None, **options: Any
) -> xr.Dataset:
    """Where each head looks from one patch, averaged over images; see `AttentionMaps`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        query: row and column of the patch; the middle of each layer's grid unless given.
        **options: `layers`, `prefix`, `forward` and `progress` of `probe`.

    Returns:
        `attention` (layer, head, y, x) and `prefix_mass` (layer, head).
    """
    return AttentionMaps(query).run(model, batches, **options)


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
    return ds.assign_coords(_coords(ds, (), np.array([row, column])))


def _place(query: tuple[int, int] | None, grid: tuple[int, int]) -> tuple[int, int]:
    row, column = (grid[0] // 2, grid[1] // 2) if query is None else query
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(
            f"query={query} is no patch of a grid of {grid[0]}x{grid[1]}: give a row below {grid[0]} and a column "
            f"below {grid[1]}, counted from 0, or none for the middle."
        )
    return row, column


def _coords(ds: xr.Dataset, dims: tuple[str, ...], queries: np.ndarray) -> dict[str, Any]:
    """Numbers along the dimensions, and the queries `(2, ...)` along `dims`."""
    names = {"head": "head", "y": "row of the patch", "x": "column of the patch"}
    coords: dict[str, Any] = {
        dim: (dim, np.arange(ds.sizes[dim]), {"long_name": name, "units": "1"}) for dim, name in names.items()
    }
    for dim, which, place in zip("yx", ("row", "column"), queries, strict=True):
        coords[f"query_{dim}"] = (dims, place, {"long_name": f"{which} of the query", "units": "1"})
    return coords
