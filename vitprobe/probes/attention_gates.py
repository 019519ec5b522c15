"""How much position decides where a head looks: the gates of GPSA (d'Ascoli et al. 2021, eq. 7 and Fig. 6)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import AttentionSite
from vitprobe.probes.attention import SiteMean, head_coordinate, in_pieces, in_single
from vitprobe.probes.base import FeatureProbe, along_layer
from vitprobe.probes.nonlocality import Reach, site_uniform_nonlocality

# How far a map may be from the gated sum of its parts, in single and in half precision.
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
_PARTS = {"": "the gated map", "content_": "the content map", "position_": "the position map"}


class AttentionGates(FeatureProbe):
    """The share of position in gated positional self-attention, by layer and head, from the maps themselves.

    GPSA's map is `M = (1 - g) A + g B`, with `A` the softmax of content and `B` that of position. The gate is the least
    squares solution of each image, `g = <M - A, B - A> / <B - A, B - A>`, and is the sigmoid of the layer's gating
    parameter, whatever a library calls that; NaN where both parts are the same. Beside it stand the nonlocality of
    the gated map and of both parts, as `Nonlocality` defines it [patches]. Attention that is no gated sum is left out.
    Standard errors are over images.
    """

    name = "attention_gates"
    title = "Gates between content and position by layer and head"
    references = "d'Ascoli et al. 2021, ConViT, arXiv:2103.10697, eq. 7 and Fig. 6"
    reads = "gated attention"
    summed = ("_gate", "_nonlocality", "_refused")

    def start(self) -> None:
        """Forget everything that was measured."""
        self._reach, self._gate = Reach(), SiteMean()
        self._nonlocality = {part: SiteMean() for part in _PARTS}
        self._refused: dict[str, list[float]] = {}  # the worst of a process

    def update(self, where: AttentionSite, what: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add the gated maps and their content and position parts of one site for a chunk of images."""
        half = any(part.dtype in (torch.float16, torch.bfloat16) for part in what)  # under autocast, of the parts
        gated, content, position = (in_single(where, part) for part in what)
        gate = in_pieces(solve_gate, gated, content, position)
        # The layer has gates or has none, whatever the image: the first one tells.
        worst = float(gate_residual(gated[:1], content[:1], position[:1], gate[:1]).max())
        if worst > (HALF_TOLERANCE if half else TOLERANCE):
            self._refused[where.name] = [max(worst, *self._refused.get(where.name, [0.0]))]
        self._gate.add(where, gate)
        for statistic, maps in zip(self._nonlocality.values(), (gated, content, position), strict=True):
            shared = maps.stride(0) == 0  # one map for all images
            distance, _ = self._reach(where, maps[:1] if shared else maps)
            statistic.add(where, distance.expand(len(maps), -1))

    def dataset(self, places: Sequence[AttentionSite]) -> xr.Dataset:
        """The statistics along `layer` and `head`; NaN where a layer has fewer heads."""
        if self._refused:
            worst, name = max((max(found), name) for name, found in self._refused.items())
            raise ValueError(
                f"attention_gates: the map of {name} is {worst:.2g} away from any (1 - g) A + g B of the two softmaxes "
                "found in it, with one g per head: it has no gates. Measure it with Nonlocality."
            )
        variables = self._gate.variables(
            places, "gate", long_name="share of the position map in the attention map", units="1"
        )
        for part, statistic in self._nonlocality.items():
            variables |= statistic.variables(
                places,
                f"{part}nonlocality",
                long_name=f"attention-weighted distance between query and key in {_PARTS[part]}",
                units="patches",
            )
        variables["uniform_nonlocality"] = along_layer(
            [site_uniform_nonlocality(site) for site in places],
            [],
            long_name="nonlocality of uniform attention at this layer",
            units="patches",
        )
        return xr.Dataset(variables, coords=head_coordinate(places))


def solve_gate(gated: Tensor, content: Tensor, position: Tensor) -> Tensor:
    """The `g` of each image and head that brings `(1 - g) content + g position` nearest to the gated map.

    Args:
        gated: the maps `(image, window, head, query, key)`.
        content: their one part.
        position: their other part.

    Returns:
        The gate `(image, head)`, NaN where both parts are the same.
    """
    apart, moved = (position - content).flatten(-2), (gated - content).flatten(-2)
    along, length = (torch.einsum("iwhe,iwhe->ih", one, apart) for one in (moved, apart))
    return along / length


def gate_residual(gated: Tensor, content: Tensor, position: Tensor, gate: Tensor) -> Tensor:
    """The largest weight that `(1 - g) content + g position` leaves of the gated map `(image, head)`."""
    share = gate.nan_to_num()[:, None, :, None, None]
    return (gated - content - share * (position - content)).abs().amax((1, 3, 4))


def attention_gates(model: nn.Module, batches: Iterable[Any], **options: Any) -> xr.Dataset:
    """How much position decides where the heads of a ConViT look (d'Ascoli et al. 2021, Fig. 6); see `AttentionGates`.

    Args:
        model: any eager PyTorch vision model with gated positional self-attention.
        batches: images, as `probe` takes them.
        **options: `layers`, `prefix`, `forward`, `group` and `progress` of `probe`.

    Returns:
        `gate`, `nonlocality`, `content_nonlocality` and `position_nonlocality` (layer, head), each with its standard
        error over images, and `uniform_nonlocality` (layer).
    """
    return AttentionGates().run(model, batches, **options)
