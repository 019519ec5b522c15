"""How spread out attention is: the entropy of its rows (Zhai et al. 2023, arXiv:2303.06296)."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import AttentionSite
from vitprobe.probes.attention import (
    Rows,
    SiteMean,
    head_coordinate,
    in_pieces,
    key_positions,
    patch_rows,
    site_positions,
)
from vitprobe.probes.base import FeatureProbe, along_layer


def uniform_entropy(site: AttentionSite) -> float:
    """The entropy of a site whose patches attend to all patches of their window alike [nats]."""
    queries, keys = ((~at(site)[..., 0].isnan()).sum(-1).double() for at in (site_positions, key_positions))
    return float((queries * keys.clamp_min(1).log()).sum() / queries.sum())


class AttentionEntropy(FeatureProbe):
    """Shannon entropy of attention over patches, by layer and head [nats].

    The mean over query patches of `-sum_k A[q, k] log A[q, k]`, then over images. Prefix tokens, padding and sinks are
    left out as queries and as keys, and rows are normalised anew (a query without any attention to patches is left out
    of the mean); windowed attention is measured inside its windows. 0 is attention to a single patch;
    `uniform_entropy`, the logarithm of the number of patches, is attention to all alike, and `entropy_ratio` is over
    it, so that grids can be compared. Standard errors are over images.
    """

    name = "attention_entropy"
    title = "Entropy of attention by layer and head"
    references = (
        "Zhai et al. 2023, Stabilizing Transformer Training by Preventing Attention Entropy Collapse, arXiv:2303.06296"
    )
    reads = "attention"
    other_keys = True
    summed = ("_entropy",)

    def start(self) -> None:
        """Forget everything that was measured."""
        self._entropy = SiteMean()

    def update(self, where: AttentionSite, what: Tensor) -> None:
        """Add the maps `(image, window, head, query, key)` of one site for a chunk of images."""

        def measure(maps: Tensor) -> Tensor:
            rows = patch_rows(where, maps)
            return rows.mean_looking(row_entropy(rows))

        self._entropy.add(where, in_pieces(measure, what))

    def dataset(self, places: Sequence[AttentionSite]) -> xr.Dataset:
        """The statistics along `layer` and `head`; NaN where a layer has fewer heads."""
        ds = xr.Dataset(
            self._entropy.variables(places, "entropy", long_name="entropy of attention over patches", units="nats")
            | self._entropy.variables(
                places,
                "entropy_ratio",
                long_name="entropy over that of uniform attention",
                units="1",
                scaled=lambda site, values: values / (uniform_entropy(site) or math.nan),  # 0 on a grid of one patch
            ),
            coords=head_coordinate(places),
        )
        ds["uniform_entropy"] = along_layer(
            [uniform_entropy(site) for site in places],
            [],
            long_name="entropy of uniform attention at this layer",
            units="nats",
        )
        return ds


def row_entropy(rows: Rows) -> Tensor:
    """Entropy of each row over patches, normalised anew `(image, window, head, query)` [nats]."""
    # With s the sum of a row a: -sum(a/s log(a/s)) = log s - sum(a log a) / s.
    products = rows.patches.log().mul_(rows.patches).nansum(-1)  # 0 log 0 is not a number here
    return rows.on_patches.log() - products / rows.on_patches


def attention_entropy(model: nn.Module, batches: Iterable[Any], **options: Any) -> xr.Dataset:
    """How spread out the attention of every head is; see `AttentionEntropy`.

    Args:
        model: any eager PyTorch vision model.
        batches: images, as `probe` takes them.
        **options: `layers`, `prefix`, `forward`, `group` and `progress` of `probe`.

    Returns:
        `entropy` and `entropy_ratio` (layer, head), each with its standard error over images, and `uniform_entropy`
        (layer).
    """
    return AttentionEntropy().run(model, batches, **options)
