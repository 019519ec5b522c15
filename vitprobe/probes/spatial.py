"""What the token-mixing matrices of a layer are like: their rank, and where and how far they look.

The same numbers for attention, convolution and fixed filters, from the matrices `(query, key)` that
`vitprobe.attach.spatial_operator` gives.
"""

from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from vitprobe.probes.nonlocality import distances, uniform_nonlocality
from vitprobe.results import provenance

REFERENCES = "d'Ascoli et al. 2021, arXiv:2103.10697, eq. 8; Zheng et al. 2024, arXiv:2401.12511"


def operator_statistics(operator: Tensor, grid: tuple[int, int]) -> xr.Dataset:
    """Rank, mass on each offset, and nonlocality of token-mixing matrices.

    Mass is the share of the entries' absolute values. Nonlocality is the mean over queries of the distance to the
    keys, weighted by absolute values (d'Ascoli et al. 2021, eq. 8, where they are attention); queries that see
    nothing, as some at the border of a shifted image, are left out.

    Args:
        operator: `(query, key)`, `(head, query, key)` or `(layer, head, query, key)`.
        grid: rows and columns of places.

    Returns:
        `mass` (head, y, x) by the key's offset from the query [patches]; `nonlocality` [patches], `matrix_rank` and
        `stable_rank` (head); with a dimension `layer` before them if it was given.

    Raises:
        ValueError: if the matrices are not between the places of the grid.
    """
    dims, matrices = _check(operator, grid)
    weight = matrices.abs()
    reach = (weight * distances(grid, device=weight.device)).sum(-1) / weight.sum(-1)
    singular = torch.linalg.svdvals(matrices)
    rounding = matrices.shape[-1] * torch.finfo(operator.dtype).eps * singular[..., :1]
    shares = weight.new_zeros(*weight.shape[:-2], (2 * grid[0] - 1) * (2 * grid[1] - 1))
    shares.index_add_(-1, _offset_index(grid).to(weight.device), weight.flatten(-2))
    shares = (shares / weight.sum((-2, -1))[..., None]).unflatten(-1, (2 * grid[0] - 1, 2 * grid[1] - 1))
    y, x = (np.arange(1 - side, side) for side in grid)
    ds = xr.Dataset(
        {
            "mass": _variable((*dims, "y", "x"), shares, "share of the absolute weights that lies at this offset"),
            "nonlocality": _variable(dims, reach.nanmean(-1), "weighted distance from query to key", "patches"),
            "matrix_rank": _variable(dims, (singular > rounding).sum(-1), "rank of the matrix"),
            "stable_rank": _variable(
                dims,
                (singular / singular[..., :1]).square().sum(-1),
                "sum of the squared singular values over the largest of them",
            ),
        },
        {
            "y": ("y", y, {"long_name": "rows from the query down to the key", "units": "patches"}),
            "x": ("x", x, {"long_name": "columns from the query right to the key", "units": "patches"}),
            "distance": (("y", "x"), np.hypot(y[:, None], x), {"long_name": "distance", "units": "patches"}),
        },
    )
    return _finished(ds, "operator_statistics", "Rank and reach of token-mixing matrices", grid)


def distance_profile(operator: Tensor, grid: tuple[int, int]) -> xr.Dataset:
    """How the mass of token-mixing matrices falls with the distance from query to key, in rings one patch wide.

    Args:
        operator: `(query, key)`, `(head, query, key)` or `(layer, head, query, key)`.
        grid: rows and columns of places.

    Returns:
        `mass` (head, bin), the share of the absolute weights in each ring, and `uniform_mass` (bin), that of equal
        weights everywhere; `bin` is the distance, rounded [patches].

    Raises:
        ValueError: if the matrices are not between the places of the grid.
    """
    dims, matrices = _check(operator, grid)
    ring = distances(grid, device=matrices.device).round().long().flatten()
    weight = matrices.abs().flatten(-2)
    mass = weight.new_zeros(*weight.shape[:-1], int(ring.max()) + 1).index_add_(-1, ring, weight)
    pairs = ring.bincount() / len(ring)
    ds = xr.Dataset(
        {
            "mass": _variable(
                (*dims, "bin"), mass / weight.sum(-1, keepdim=True), "share of the absolute weights at this distance"
            ),
            "uniform_mass": _variable(("bin",), pairs, "share of the pairs of places at this distance"),
        },
        {"bin": ("bin", np.arange(len(pairs)), {"long_name": "distance from query to key", "units": "patches"})},
    )
    return _finished(ds, "distance_profile", "Mass of token-mixing matrices by distance", grid)


def _check(operator: Tensor, grid: tuple[int, int]) -> tuple[tuple[str, ...], Tensor]:
    """The dimensions before (query, key), and the matrices in double precision with at least a `head`."""
    places = grid[0] * grid[1]
    if not 2 <= operator.ndim <= 4 or tuple(operator.shape[-2:]) != (places, places):
        raise ValueError(
            f"an operator of shape {tuple(operator.shape)} on a grid of {grid[0]}x{grid[1]}: give (query, key), "
            f"(head, query, key) or (layer, head, query, key) with {places} queries and keys, as spatial_operator does."
        )
    matrices = operator.detach().double()
    return ("layer", "head")[4 - max(operator.ndim, 3) :], matrices[None] if operator.ndim == 2 else matrices


def _offset_index(grid: tuple[int, int]) -> Tensor:
    """Where each entry's offset lies among all offsets, row by row `(query key,)`."""
    y, x = (torch.arange(side) for side in grid)
    row, column = y - y[:, None] + grid[0] - 1, x - x[:, None] + grid[1] - 1  # (query, key) along each axis
    index = row[:, None, :, None] * (2 * grid[1] - 1) + column[None, :, None, :]
    return index.flatten()


def _variable(dims: tuple[str, ...], values: Tensor, long_name: str, units: str = "1") -> Any:
    return dims, values.cpu().numpy(), {"long_name": long_name, "units": units}


def _finished(ds: xr.Dataset, name: str, title: str, grid: tuple[int, int]) -> xr.Dataset:
    numbers = {dim: np.arange(ds.sizes[dim]) for dim in ("layer", "head") if dim in ds.dims}
    ds = ds.assign_coords({dim: (dim, number, {"long_name": dim, "units": "1"}) for dim, number in numbers.items()})
    ds.attrs = provenance(
        title=title,
        references=REFERENCES,
        config={"probe": name, "grid": grid},
        probe=name,
        grid_h=grid[0],
        grid_w=grid[1],
        uniform_nonlocality=uniform_nonlocality(grid),
    )
    return ds
