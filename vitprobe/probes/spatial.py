"""What the token-mixing matrices of a network are like: their rank, and how far they look.

The same numbers for attention, convolution and fixed filters: of all attention maps in a forward pass
(`SpatialOperators`), and of any matrices `(query, key)` that `vitprobe.attach.spatial_operator` gives
(`operator_statistics`, `distance_profile`); `vitprobe.probes.filters` gives those of convolutions by their taps.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import AttentionSite
from vitprobe.names import unknown
from vitprobe.probes.attention import SiteMean, head_coordinate, patch_rows
from vitprobe.probes.base import FeatureProbe, along_layer
from vitprobe.probes.cka import jackknife_error
from vitprobe.probes.nonlocality import distances, site_distances, uniform_nonlocality
from vitprobe.ranks import merged
from vitprobe.results import provenance

REFERENCES = "d'Ascoli et al. 2021, arXiv:2103.10697, eq. 8; Zheng et al. 2024, arXiv:2401.12511"
RANK_REFERENCES = (
    "Rudelson & Vershynin 2007, arXiv:math/0503442 (stable rank); Roy & Vetterli 2007, EUSIPCO (effective rank)"
)
TOLERANCE = 0.01  # of a numerical rank: singular values below a hundredth of the largest do not count
GROUPS = 8  # groups of images that the jackknife leaves out in turn, each with a sum of maps
MEMORY = 1 << 31  # bytes of sums of maps that are kept

Maps = Literal["mean", "each"]

RANKS = {
    "stable_rank": "sum of the squared singular values over the largest of them",
    "effective_rank": "exponential of the entropy of the singular values",
    "numerical_rank": "number of singular values above the tolerance times the largest",
}
BIN = {"long_name": "distance from query to key", "units": "patches"}


def rank_statistics(singular: Tensor, tolerance: float) -> dict[str, Tensor]:
    """Three ranks of matrices by their singular values; the same for a multiple of a matrix, and for its transpose.

    Args:
        singular: the singular values `(..., value)`, in any order.
        tolerance: share of the largest that a singular value has to exceed to be counted.

    Returns:
        `stable_rank` (Rudelson & Vershynin 2007), `effective_rank` (Roy & Vetterli 2007) and `numerical_rank` `(...)`;
        of a matrix of zeros NaN, NaN and 0.
    """
    relative = singular / singular.amax(-1, keepdim=True)
    return {
        "stable_rank": relative.square().sum(-1),
        "effective_rank": torch.special.entr(singular / singular.sum(-1, keepdim=True)).sum(-1).exp(),
        "numerical_rank": (relative > tolerance).sum(-1).to(singular.dtype),
    }


def mass_by_distance(weight: Tensor, distance: Tensor) -> dict[str, Tensor]:
    """How weights spread over distances, in rings one patch wide.

    Args:
        weight: not negative `(..., entry)`.
        distance: of each entry `(entry,)` [patches].

    Returns:
        `mass` `(..., bin)`, the share of the weight whose distance rounds to 0, 1, 2, ... (halves up), and
        `mean_distance` `(...)` [patches]; NaN where there is no weight.
    """
    ring = (distance + 0.5).floor().long()
    mass = weight.new_zeros(*weight.shape[:-1], int(ring.max()) + 1).index_add_(-1, ring, weight)
    total = weight.sum(-1)
    return {"mass": mass / total[..., None], "mean_distance": (weight @ distance) / total}


# --- attention in a forward pass --------------------------------------------------------------------


class _Groups:
    """Sums of the maps of every site, apart for groups of images: image i is in group i modulo their number.

    Attributes:
        groups: their number, which is halved while the sums would be too large.
        numbers: in the sum of the maps of all sites.
        sums: of the maps of a site `(group, window, head, query, key)`.
        powers: sums of their squares `(group, head)`.
        images: of a site.
    """

    def __init__(self) -> None:
        self.groups, self.numbers = GROUPS, 0
        self.sums: dict[str, Tensor] = {}
        self.powers: dict[str, Tensor] = {}
        self.images: dict[str, int] = {}

    @property
    def too_large(self) -> bool:
        """Whether even a single group is."""
        return 8 * self.groups * self.numbers > MEMORY

    def add(self, name: str, maps: Tensor) -> None:
        """Add the maps `(image, window, head, query, key)` of a site for a chunk of images."""
        if name not in self.images:
            self.images[name] = 0
            self._make_room(maps[0].numel())
            if not self.too_large:
                self.sums[name] = maps.new_zeros((self.groups, *maps.shape[1:]), dtype=torch.float64)
                self.powers[name] = maps.new_zeros((self.groups, maps.shape[2]), dtype=torch.float64)
        if self.too_large:
            return
        first = self.images[name]
        self.images[name] += len(maps)
        for start in range(min(self.groups, len(maps))):
            mine, group = maps[start :: self.groups], (first + start) % self.groups
            self.sums[name][group] += mine.sum(0)
            self.powers[name][group] += mine.square().sum((0, 1, 3, 4))

    def merge(self, other: "_Groups") -> None:
        """Add the images of another that has the same sites, or one of both has none, after those that are here."""
        if not self.images:
            self.groups, self.numbers = other.groups, other.numbers
        for mine, theirs in ((self.sums, other.sums), (self.powers, other.powers)):
            for name, sums in theirs.items():
                if name in mine:  # the groups go on where those here ended
                    mine[name] += sums.roll(self.images[name], 0).to(mine[name].device)
                else:
                    mine[name] = sums.clone()
        self.images = merged(self.images, other.images)

    def _make_room(self, numbers: int) -> None:
        """Halve the number of groups while the sums of all maps, so many numbers more, would be too large."""
        self.numbers += numbers
        while self.groups > 1 and 8 * self.groups * self.numbers > MEMORY:
            self.groups //= 2
            for kept in (self.sums, self.powers):  # image i is in group i modulo their number
                for name, sums in kept.items():
                    kept[name] = sums.unflatten(0, (2, -1)).sum(0)


class SpatialOperators(FeatureProbe):
    """Rank and reach of attention as a matrix between patches, by layer and head.

    The operator of a head is its map averaged over images: the part of it that does not depend on them, as the
    operator of a convolution does not. `fixed_power` is how much of the maps' power it has, `|E A|^2 / E |A|^2`, free
    of the bias of few images: 1 for maps that are the same for all images. With `maps="each"`, statistics are those
    of each image's map, averaged over images.

    Maps are taken between patches as they are: prefix tokens, padding and sinks are left out, and rows are not
    normalised anew. `mass` is the share of all attention between patches at a distance, and `mean_distance` its mean;
    it is the nonlocality where all patches pay as much to patches. Windows are measured one by one, and ranks averaged
    over them: the patches of a window (`grid_h` by `grid_w`) are the most that a rank can be. Few images leave noise
    in their mean, whose small singular values raise the effective and numerical rank.

    Standard errors of `maps="mean"` are those of the jackknife over eight groups of images, whose sums of maps in
    double precision are all that is kept: 64 bytes for each number in the maps of one image, 89 MB for a ViT-Ti at
    224 pixels, however many the images. Beyond 2 GiB there are fewer groups, and below one group nothing is measured.
    Those of `maps="each"` are over images; no map is kept, but every one is decomposed, which takes a CPU twice as
    long as the pass of a ViT-Ti itself.

    Args:
        maps: `"mean"`, the operator; or `"each"`.
        tolerance: share of the largest singular value that others have to exceed to count in `numerical_rank`.
    """

    name = "spatial_operators"
    title = "Rank and reach of attention between patches by layer and head"
    references = f"{REFERENCES}; {RANK_REFERENCES}"
    reads = "attention"
    summed = ("_each", "_means")

    def __init__(self, maps: Maps = "mean", tolerance: float = TOLERANCE) -> None:
        if maps not in get_args(Maps):
            raise unknown("maps", maps, get_args(Maps))
        check_tolerance(tolerance)
        self.maps = maps
        self.tolerance = tolerance

    def config(self) -> dict[str, Any]:
        """Whose statistics these are, and what counts for the numerical rank."""
        return {"maps": self.maps, "tolerance": self.tolerance}

    def start(self) -> None:
        """Forget everything that was measured."""
        self._each: dict[str, SiteMean] = {}
        self._means = _Groups()

    def update(self, where: AttentionSite, what: Tensor) -> None:
        """Add the maps `(image, window, head, query, key)` of one site for a chunk of images."""
        rows = patch_rows(where, what)
        between = rows.patches if rows.asking is None else rows.patches * rows.asking[:, None, :, None]
        if self.maps == "each":
            for name, values in self._describe(where, between.double()).items():
                self._each.setdefault(name, SiteMean()).add(where, values)
            return
        self._means.add(where.name, between)

    def dataset(self, places: Sequence[AttentionSite]) -> xr.Dataset:
        """The statistics along `layer` and `head`; NaN where a layer has fewer heads or shorter distances."""
        if self._means.too_large:
            raise ValueError(
                f"spatial_operators: the mean maps alone take {8 * self._means.numbers / 2**30:.1f} GiB, where "
                f"{MEMORY / 2**30:.1f} GiB are allowed: give maps='each', which keeps none, or smaller images."
            )
        variables = self._of_means(places) if self.maps == "mean" else self._of_each(places)
        uniform = [_uniform(site) for site in places]
        variables["uniform_mass"] = along_layer(
            [one["mass"][0].numpy() for one in uniform],
            ["bin"],
            long_name="share of uniform attention at this distance",
            units="1",
        )
        variables["uniform_mean_distance"] = along_layer(
            [float(one["mean_distance"]) for one in uniform],
            [],
            long_name="mean_distance of uniform attention",
            units="patches",
        )
        ds = xr.Dataset(variables, head_coordinate(places))
        return ds.assign_coords(bin=("bin", np.arange(ds.sizes["bin"]), BIN))

    def _describe(self, site: AttentionSite, matrices: Tensor) -> dict[str, Tensor]:
        """The statistics `(..., head)` and, by distance, `(..., head, bin)` of `(..., window, head, query, key)`."""
        ranks = rank_statistics(torch.linalg.svdvals(matrices), self.tolerance)
        found = {name: values.nanmean(-2) for name, values in ranks.items()}
        return found | mass_by_distance(matrices.transpose(-4, -3).flatten(-3), _entry_distances(site).to(matrices))

    def _of_each(self, places: Sequence[AttentionSite]) -> dict[str, Any]:
        """The statistics of each image's maps, averaged, with their standard errors."""
        variables: dict[str, Any] = {}
        for name, (dims, long_name, units) in _described_variables("each").items():
            variables |= self._each[name].variables(places, name, dims, long_name=long_name, units=units)
        return variables

    def _of_means(self, places: Sequence[AttentionSite]) -> dict[str, Any]:
        """The statistics of mean maps with their standard errors."""
        values: dict[str, list[np.ndarray]] = {}
        for site in places:
            for name, (value, error) in self._jackknifed(site).items():
                values.setdefault(name, []).append(value)
                values.setdefault(f"{name}_se", []).append(error)
        variables = {}
        for name, (dims, long_name, units) in _described_variables("mean").items():
            variables[name] = along_layer(values[name], dims, long_name=long_name, units=units)
            text = f"standard error over images of {name}"
            variables[f"{name}_se"] = along_layer(values[f"{name}_se"], dims, long_name=text, units=units)
        return variables

    def _jackknifed(self, site: AttentionSite) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Each statistic of a site's mean map and its standard error."""
        kept = self._means
        count = kept.images[site.name]
        sizes = np.array([len(range(group, count, kept.groups)) for group in range(min(kept.groups, count))])
        sums, powers = (one[site.name][: len(sizes)].cpu() for one in (kept.sums, kept.powers))
        total, power = sums.sum(0), powers.sum(0)

        def of_mean(total: Tensor, power: Tensor, count: int) -> dict[str, np.ndarray]:
            found = self._describe(site, total / count)
            found["fixed_power"] = _fixed_power(total, power, count)
            return {name: values.numpy() for name, values in found.items()}

        whole = of_mean(total, power, count)
        if len(sizes) == 1:
            return {name: (value, np.full_like(value, np.nan)) for name, value in whole.items()}
        without = [
            of_mean(total - one, power - its_power, count - int(size))
            for one, its_power, size in zip(sums, powers, sizes, strict=True)
        ]
        return {
            name: (value, jackknife_error(value, np.stack([one[name] for one in without]), sizes))
            for name, value in whole.items()
        }


def spatial_operators(
    model: nn.Module, batches: Iterable[Any], *, maps: Maps = "mean", tolerance: float = TOLERANCE, **options: Any
) -> xr.Dataset:
    """Rank and reach of the attention of every head as a matrix between patches; see `SpatialOperators`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        maps: `"mean"`, of the map averaged over images; or `"each"`, of each image's map, averaged.
        tolerance: share of the largest singular value that others have to exceed to count in `numerical_rank`.
        **options: `layers`, `prefix`, `forward`, `group` and `progress` of `probe`.

    Returns:
        `stable_rank`, `effective_rank`, `numerical_rank`, `mean_distance` and, of the mean map, `fixed_power` (layer,
        head), and `mass` (layer, head, bin), each with its standard error over images; `uniform_mass` (layer, bin) and
        `uniform_mean_distance` (layer).
    """
    return SpatialOperators(maps, tolerance).run(model, batches, **options)


def _described_variables(maps: Maps) -> dict[str, tuple[tuple[str, ...], str, str]]:
    """Dimensions, long name and units of the statistics of attention."""
    whose = "of the mean map" if maps == "mean" else "of each image's map, averaged"
    found: dict[str, tuple[tuple[str, ...], str, str]] = {
        name: (("head",), f"{text}, {whose}", "1") for name, text in RANKS.items()
    }
    found["mean_distance"] = (("head",), f"distance from query to key, weighted by attention, {whose}", "patches")
    found["mass"] = (("head", "bin"), f"share of the attention between patches at this distance, {whose}", "1")
    if maps == "mean":
        found["fixed_power"] = (("head",), "share of the maps' power that is the same for all images", "1")
    return found


def _entry_distances(site: AttentionSite) -> Tensor:
    """The distance of each pair of tokens of each window `(window query key,)` [patches]; 0 for no patch."""
    return site_distances(site).double().expand(site.windows, -1, -1).flatten()


def _uniform(site: AttentionSite) -> dict[str, Tensor]:
    """How attention of every patch to all patches of its window alike spreads over distances."""
    count = site.grid[0] * site.grid[1]
    present = torch.ones(site.windows, count, dtype=torch.float64)
    if site.positions is not None:
        present = torch.from_numpy(~np.isnan(site.positions[..., 0])).double()
    pairs = present[:, :, None] * present[:, None] / present.sum(-1)[:, None, None].clamp_min(1)
    return mass_by_distance(pairs.flatten()[None], _entry_distances(site))


def _fixed_power(total: Tensor, power: Tensor, count: int) -> Tensor:
    """`|E A|^2 / E |A|^2` of each head, by unbiased estimates of both; NaN for one image.

    Args:
        total: sum of the maps `(window, head, query, key)`.
        power: sum of their squares `(head,)`.
        count: how many they are.
    """
    of_mean, mean = (total / count).square().sum((0, 2, 3)), power / count
    if count == 1:
        return torch.full_like(mean, torch.nan)
    # Of n maps, the mean has a share 1/n of what differs between them: E |mean|^2 = ((n - 1) |E A|^2 + E |A|^2) / n.
    return (count * of_mean - mean) / ((count - 1) * mean)


def check_tolerance(tolerance: float) -> None:
    """Refuse a tolerance of the numerical rank that says nothing."""
    # The closed form of convolutions gives squares of singular values, to the rounding of double precision.
    if not 1e-6 <= tolerance < 1:
        raise ValueError(
            f"tolerance={tolerance}: a share of the largest singular value, from 1e-6 to below 1, such as 0.01."
        )


# --- convolutions -----------------------------------------------------------------------------------


def operator_statistics(operator: Tensor, grid: tuple[int, int]) -> xr.Dataset:
    """Rank, mass on each offset, and nonlocality of token-mixing matrices.

    Mass is the share of the entries' absolute values. Nonlocality is the mean over queries of the distance to the
    keys, weighted by absolute values (d'Ascoli et al. 2021, eq. 8, where they are attention); queries that see
    nothing, as some at the border of a shifted image, are left out. Singular values above rounding errors count in
    the matrix rank.

    Args:
        operator: `(query, key)`, `(head, query, key)` or `(layer, head, query, key)`.
        grid: rows and columns of places.

    Returns:
        `mass` (head, y, x) by the key's offset from the query [patches]; `nonlocality` [patches], `matrix_rank`,
        `stable_rank` and `effective_rank` (head); with a dimension `layer` before them if it was given.

    Raises:
        ValueError: if the matrices are not between the places of the grid.
    """
    dims, matrices = _check(operator, grid)
    weight = matrices.abs()
    reach = (weight * distances(grid, device=weight.device)).sum(-1) / weight.sum(-1)
    # The usual bound is above 1 for 196 places in bfloat16, where nothing would count. Roundings of entries alone, each
    # by itself, have a norm of at most the root of the size, half as much.
    places = matrices.shape[-1] if operator.dtype.itemsize > 2 else matrices.shape[-1] ** 0.5
    rounding = places * torch.finfo(operator.dtype).eps
    ranks = rank_statistics(torch.linalg.svdvals(matrices), rounding)
    shares = weight.new_zeros(*weight.shape[:-2], (2 * grid[0] - 1) * (2 * grid[1] - 1))
    shares.index_add_(-1, _offset_index(grid).to(weight.device), weight.flatten(-2))
    shares = (shares / weight.sum((-2, -1))[..., None]).unflatten(-1, (2 * grid[0] - 1, 2 * grid[1] - 1))
    y, x = (np.arange(1 - side, side) for side in grid)
    ds = xr.Dataset(
        {
            "mass": _variable((*dims, "y", "x"), shares, "share of the absolute weights that lies at this offset"),
            "nonlocality": _variable(dims, reach.nanmean(-1), "weighted distance from query to key", "patches"),
            "matrix_rank": _variable(dims, ranks["numerical_rank"].long(), "rank of the matrix"),
            "stable_rank": _variable(dims, ranks["stable_rank"], RANKS["stable_rank"]),
            "effective_rank": _variable(dims, ranks["effective_rank"], RANKS["effective_rank"]),
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
        `mass` (head, bin), the share of the absolute weights in each ring, and `mean_distance` (head) [patches];
        `uniform_mass` (bin) is that of equal weights everywhere; `bin` is the distance, rounded [patches].

    Raises:
        ValueError: if the matrices are not between the places of the grid.
    """
    dims, matrices = _check(operator, grid)
    distance = distances(grid, device=matrices.device).double().flatten()
    found = mass_by_distance(matrices.abs().flatten(-2), distance)
    uniform = mass_by_distance(torch.ones_like(distance), distance)["mass"]
    ds = xr.Dataset(
        {
            "mass": _variable((*dims, "bin"), found["mass"], "share of the absolute weights at this distance"),
            "mean_distance": _variable(
                dims, found["mean_distance"], "distance from query to key, weighted by absolute weights", "patches"
            ),
            "uniform_mass": _variable(("bin",), uniform, "share of the pairs of places at this distance"),
        },
        {"bin": ("bin", np.arange(len(uniform)), BIN)},
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
    if not operator.is_floating_point():
        raise TypeError(f"an operator of {operator.dtype}: give weights in floating point, such as operator.float().")
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
