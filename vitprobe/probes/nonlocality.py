"""How far attention looks: the nonlocality of every head (d'Ascoli et al. 2021, eq. 8 and Fig. 5)."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, get_args

import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import AttentionSite, Inputs
from vitprobe.names import unknown
from vitprobe.probes.attention import (
    SiteMean,
    grid_positions,
    head_coordinate,
    in_pieces,
    in_single,
    key_positions,
    patch_rows,
    site_positions,
)
from vitprobe.probes.base import FeatureProbe, along_layer


def distances(grid: tuple[int, int], *, device: torch.device | str = "cpu") -> Tensor:
    """Euclidean distance between the patches of a grid `(query, key)` [patches]."""
    return _distances(grid, torch.device(device))


@lru_cache(maxsize=64)
def _distances(grid: tuple[int, int], device: torch.device) -> Tensor:
    positions = grid_positions(grid)
    return _between(positions, positions).float().to(device)


def _between(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.cdist(queries, keys, compute_mode="donot_use_mm_for_euclid_dist")


def site_distances(site: AttentionSite) -> Tensor:
    """Euclidean distance between the tokens of a site `(window or 1, query, key)` [patches]; 0 for no patch."""
    if site.positions is None:
        return distances(site.grid)[None]
    return _between(site_positions(site), key_positions(site)).nan_to_num(0.0).float()


def uniform_nonlocality(grid: tuple[int, int]) -> float:
    """The nonlocality of attention that looks everywhere alike [patches]: 4.14 for 8x8, 7.28 for 14x14."""
    return float(distances(grid).double().mean())


def site_uniform_nonlocality(site: AttentionSite) -> float:
    """The nonlocality of a site whose patches attend to all patches of their window alike [patches]."""
    asking, keys = (~at(site)[..., 0].isnan() for at in (site_positions, key_positions))
    each = (site_distances(site).double() * keys[:, None]).sum(-1) / keys.sum(-1, keepdim=True)
    return float(each[asking].mean())


class Reach:
    """Nonlocality of the maps of any number of sites, whose distances it keeps on the maps' device."""

    def __init__(self) -> None:
        self._apart: dict[str, Tensor] = {}

    def __call__(self, site: AttentionSite, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Nonlocality of each image and head, and the attention that went elsewhere.

        Args:
            site: where the maps are from.
            maps: `(image, window, head, query, key)`.

        Returns:
            Attention-weighted distance [patches], the mean over the queries that are patches and look at some, and
            attention to what is no patch, that over all that are patches `(image, head)`.
        """
        maps = in_single(site, maps)
        if site.name not in self._apart:
            self._apart[site.name] = site_distances(site)[:, None].to(maps)
        apart = self._apart[site.name]
        if site.positions is None and not site.prefix and not site.source.sink:
            # All tokens are patches, and rows sum to one as they are.
            distance = in_pieces(lambda some: (some * apart).sum((-2, -1)).mean(1), maps) / maps.shape[-2]
            return distance, torch.zeros_like(distance)
        rows = patch_rows(site, maps)
        distance = in_pieces(lambda some: (some * apart).sum(-1), rows.patches) / rows.on_patches
        return rows.mean_looking(distance), rows.mean(rows.elsewhere)


class Nonlocality(FeatureProbe):
    """Attention-weighted distance between query and key, by layer and head [patches].

    The mean over query patches of `sum_k A[q, k] |q - k|`, Euclidean, in patches, then over images (d'Ascoli et al.
    2021, eq. 8). Prefix tokens, padding and sinks are no place: they are left out as queries and as keys, rows are
    normalised anew (a query without any attention to patches is left out of the mean), and the attention that patches
    paid to them is `prefix_mass`. GPSA is measured on its gated map, windowed attention inside its windows, and where
    keys are other tokens than queries (pooled, as in PVT, or not, as in LeViT), distances are in patches of the
    queries, each token being in the middle of what it stands for. `uniform_nonlocality` is what attention to all
    patches alike would give there, and `nonlocality_ratio` is over it, so that grids can be compared.
    `layer_nonlocality` is the mean over heads. Standard errors are over images.

    Args:
        inputs: `"layer"`: activations are the layer's own input, as eq. 8 says. `"patch embedding"`: every layer is
            fed the patch embedding, as the published code logs it.
    """

    name = "nonlocality"
    title = "Nonlocality of attention by layer and head"
    references = "d'Ascoli et al. 2021, ConViT, arXiv:2103.10697, eq. 8 and Fig. 5"
    reads = "attention"
    other_keys = True
    summed = ("_distance", "_prefix", "_layer")

    def __init__(self, inputs: Inputs = "layer") -> None:
        if inputs not in get_args(Inputs):
            raise unknown("inputs", inputs, get_args(Inputs))
        self.inputs = inputs

    def config(self) -> dict[str, Any]:
        """What attention saw."""
        return {"inputs": self.inputs}

    def start(self) -> None:
        """Forget everything that was measured."""
        self._reach = Reach()
        self._distance, self._prefix, self._layer = SiteMean(), SiteMean(), SiteMean()

    def update(self, where: AttentionSite, what: Tensor) -> None:
        """Add the maps `(image, window, head, query, key)` of one site for a chunk of images."""
        distance, elsewhere = self._reach(where, what)
        self._distance.add(where, distance)
        self._layer.add(where, distance.mean(1))
        self._prefix.add(where, elsewhere)

    def dataset(self, places: Sequence[AttentionSite]) -> xr.Dataset:
        """The statistics along `layer` and `head`; NaN where a layer has fewer heads."""
        uniform = {site.name: site_uniform_nonlocality(site) for site in places}  # 0 on a grid of one patch
        text = "attention-weighted distance between query and key"
        ds = xr.Dataset(
            self._distance.variables(places, "nonlocality", long_name=text, units="patches")
            | self._distance.variables(
                places,
                "nonlocality_ratio",
                long_name="nonlocality over that of uniform attention",
                units="1",
                scaled=lambda site, values: values / (uniform[site.name] or math.nan),
            )
            | self._layer.variables(
                places, "layer_nonlocality", (), long_name="mean over heads of nonlocality", units="patches"
            )
            | self._prefix.variables(
                places, "prefix_mass", long_name="attention of patches to prefix tokens and sinks", units="1"
            ),
            coords=head_coordinate(places),
        )
        ds["uniform_nonlocality"] = along_layer(
            list(uniform.values()), [], long_name="nonlocality of uniform attention at this layer", units="patches"
        )
        ds["windows"] = along_layer(
            [site.windows for site in places], [], long_name="attention windows in an image", units="1"
        )
        return ds


def nonlocality(model: nn.Module, batches: Iterable[Any], *, inputs: Inputs = "layer", **options: Any) -> xr.Dataset:
    """Attention-weighted distance of every head (d'Ascoli et al. 2021, Fig. 5); see `Nonlocality`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        inputs: what attention sees, `"layer"` (its layer's own input) or `"patch embedding"` (published code).
        **options: `layers`, `prefix`, `forward`, `group` and `progress` of `probe`.

    Returns:
        `nonlocality`, `nonlocality_ratio` and `prefix_mass` (layer, head) and `layer_nonlocality` (layer), each with
        its standard error over images, and `uniform_nonlocality` (layer).
    """
    return Nonlocality(inputs).run(model, batches, **options)
