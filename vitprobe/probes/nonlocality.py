"""How far attention looks: the nonlocality of every head (d'Ascoli et al. 2021, eq. 8 and Fig. 5)."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import AttentionSite
from vitprobe.probes.base import FeatureProbe, RunningMean, along_layer


def distances(grid: tuple[int, int], *, device: torch.device | str = "cpu") -> Tensor:
    """Euclidean distance between the patches of a grid `(query, key)` [patches]."""
    return _distances(grid, torch.device(device))


@lru_cache(maxsize=64)
def _distances(grid: tuple[int, int], device: torch.device) -> Tensor:
    y, x = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    positions = torch.stack([y.flatten(), x.flatten()], dim=-1)
    return torch.cdist(positions, positions, compute_mode="donot_use_mm_for_euclid_dist").float().to(device)


def uniform_nonlocality(grid: tuple[int, int]) -> float:
    """The nonlocality of attention that looks everywhere alike [patches]: 4.14 for 8x8, 7.28 for 14x14."""
    return float(distances(grid).double().mean())


class Nonlocality(FeatureProbe):
    """Attention-weighted distance between query and key, by layer and head [patches].

    The mean over query patches of `sum_k A[q, k] |q - k|`, Euclidean, in patches, then over images (d'Ascoli et al.
    2021, eq. 8). Prefix tokens are no place: they are left out as queries and as keys, rows are normalised anew, and
    the attention that patches paid to them is `prefix_mass`. GPSA is measured on its gated map, windowed attention
    inside its windows. `uniform_nonlocality` is what uniform attention over the same grid would give. Standard
    errors are over images. Activations are the layer's own input (the published code fed the patch embedding to
    every layer).
    """

    name = "nonlocality"
    title = "Nonlocality of attention by layer and head"
    references = "d'Ascoli et al. 2021, ConViT, arXiv:2103.10697, eq. 8 and Fig. 5"
    reads = "attention"

    def start(self) -> None:
        """Forget everything that was measured."""
        self._distance: dict[str, RunningMean] = {}
        self._prefix: dict[str, RunningMean] = {}

    def update(self, where: AttentionSite, what: Tensor) -> None:
        """Add the maps `(image, window, head, query, key)` of one site for a chunk of images."""
        first = where.prefix
        half = what.dtype in (torch.float16, torch.bfloat16)
        what = what.float() if half else what
        maps, prefix = what[..., first:, first:], what[..., first:, :first]
        apart = distances(where.grid, device=maps.device).to(maps.dtype)
        distance = (maps * apart).sum(-1)
        if first or half:  # rows without their prefix, or rounded to half precision, do not sum to one
            distance = distance / maps.sum(-1)
        self._distance.setdefault(where.name, RunningMean()).add(distance.mean((1, 3)))
        self._prefix.setdefault(where.name, RunningMean()).add(prefix.sum(-1).mean((1, 3)))

    def dataset(self, places: Sequence[AttentionSite]) -> xr.Dataset:
        """The statistics along `layer` and `head`; NaN where a layer has fewer heads."""

        def column(statistics: dict[str, RunningMean], attribute: str) -> list[np.ndarray]:
            return [getattr(statistics[site.name], attribute) for site in places]

        heads = max(site.heads for site in places)
        return xr.Dataset(
            {
                "nonlocality": along_layer(
                    column(self._distance, "mean"),
                    ["head"],
                    long_name="attention-weighted distance between query and key",
                    units="patches",
                ),
                "nonlocality_se": along_layer(
                    column(self._distance, "standard_error"),
                    ["head"],
                    long_name="standard error over images of nonlocality",
                    units="patches",
                ),
                "prefix_mass": along_layer(
                    column(self._prefix, "mean"),
                    ["head"],
                    long_name="attention of patches to prefix tokens",
                    units="1",
                ),
                "prefix_mass_se": along_layer(
                    column(self._prefix, "standard_error"),
                    ["head"],
                    long_name="standard error over images of prefix_mass",
                    units="1",
                ),
                "uniform_nonlocality": along_layer(
                    [uniform_nonlocality(site.grid) for site in places],
                    [],
                    long_name="nonlocality of uniform attention on this grid",
                    units="patches",
                ),
                "windows": along_layer(
                    [site.windows for site in places],
                    [],
                    long_name="attention windows in an image",
                    units="1",
                ),
            },
            coords={"head": ("head", np.arange(heads), {"long_name": "head", "units": "1"})},
        )


def nonlocality(model: nn.Module, batches: Iterable[Any], **options: Any) -> xr.Dataset:
    """Attention-weighted distance of every head (d'Ascoli et al. 2021, Fig. 5); see `Nonlocality`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        **options: `layers`, `prefix`, `forward` and `progress` of `probe`.

    Returns:
        `nonlocality` and `prefix_mass` (layer, head), each with its standard error over images, and
        `uniform_nonlocality` (layer).
    """
    return Nonlocality().run(model, batches, **options)
