"""What a network loses without its position codes, or with other attention maps than its own, at test time."""

import fnmatch
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn

from vitprobe.attach import AttentionSite, Intervention, Plan, Watch, plan
from vitprobe.calling import Forward, default_forward, images_of, lent, targets_of, untouched, unwrap, without_caches
from vitprobe.names import unknown
from vitprobe.probes.attention import site_positions
from vitprobe.probes.base import coordinates
from vitprobe.probes.objective import drawn
from vitprobe.probes.paired import Changes, chained, changing, compare, require_size

Per = Literal["network", "layer", "up_to_layer"]
MASKS = ("position_codes", "content", "position", "window:K", "uniform", "mean")
POSITION_CODES = (
    "*pos_embed*", "*position_embed*", "*attention_biases", "*rel_pos_h", "*rel_pos_w",
    # Tables of a bias, and coordinates that a network makes one from: at zero it is the same for all keys.
    "*relative_position_bias_table", "*relative_coords_table", "*rel_coords_log",
    "position", "position.code", "*.source.code.code", "*.position.table",  # vitprobe's own
)  # fmt: skip
"""Names of parameters and buffers that hold position codes in timm, torchvision, transformers and vitprobe."""
UNSEEN = 1e-30
"""A weight that counts as none: networks mask keys by a logit of -100 as well as of minus infinity."""
_ROTARY = ("*rope*", "*rotary*")  # angles: zeros in their place are no missing code
_LAYERS = ("weight", "bias", "running_mean", "running_var")


def masking(
    model: nn.Module,
    batches: Iterable[Any],
    masks: str | Sequence[str],
    *,
    per: Per = "network",
    patterns: str | Sequence[str] = POSITION_CODES,
    prefix: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Accuracy of a trained network with a part of its attention masked, mask by mask.

    All masks see the same images; a change is the mean over images of what an image's answer changes by, and its
    standard error that of paired differences. The masks:

    - `"position_codes"`: absolute position codes and tables of relative position bias are zeros (d'Ascoli et al. 2021,
      Table 5, which leaves the position part of GPSA as it is, as this does). Rotary codes are not masked.
    - `"content"`, `"position"`: the gated maps of GPSA are their position part alone, or their content part alone
      (Table 6: the gates forced to 1, or to 0). Other maps stay.
    - `"window:K"`: of each map only the keys in the K x K window around the query keep their weight, and rows are
      normalised anew, as if attention were local (K odd; Park & Kim 2022, Fig. 7, train such networks). Tokens that
      have no place (class and other prefix tokens, the padding of windows) are seen by all and see all. A row without
      any weight there gives nothing.
    - `"uniform"`: equal attention to all keys that have any weight; those below 1e-30, which the network masks, stay
      out.
    - `"mean"`: the mean map over the images, from a pass of its own over the same batches, in place of each image's
      map: attention that knows no image, head by head and window by window (data specificity).

    Args:
        model: any eager PyTorch vision model, also compiled or wrapped; it is handed back as it was.
        batches: `(images, labels)` tuples, or mappings with `labels`; labels are class numbers. `"mean"` goes through
            them twice.
        masks: which, one after the other.
        per: `"network"` masks all attention maps at once; `"layer"` one after the other; `"up_to_layer"` the first,
            the first two, and so on (Table 6).
        patterns: glob patterns of names of parameters and buffers that are position codes.
        prefix: as in `probe`.
        forward: `forward(model, batch)` for models that are called in another way.
        path: netCDF file that grows with every batch. The same call goes on where an interrupted one stopped; the
            batches have to be the same again, which is checked, and so is, with a `forward`, what the first of them
            gives, since the file knows that by its name alone.
        progress: whether a terminal shows a progress bar.

    Returns:
        `masked_accuracy`, `accuracy_change`, `masked_nll` and `nll_change` along `mask`, and for single layers
        `layer`, and `intact_accuracy` and `intact_nll` of the network as it is, each with its standard error over
        images; NaN where a map cannot be masked, or outputs are not numbers. A change is with the mask minus without.
        The coordinates `masked` and `left_out` say how many maps (or position codes) each mask reached, and which not
        and why.

    Raises:
        ValueError: if there are no batches, no class numbers or nothing to mask, `"mean"` is given batches that can
            be read once only, images differ in size, a mask is unknown, or the file holds another measurement.
    """
    masks = [masks] if isinstance(masks, str) else list(masks)
    if not masks:
        raise ValueError(f"no masks were given: pass some of {', '.join(MASKS)}.")
    for mask in masks:
        _check(mask, per)
    if per not in ("network", "layer", "up_to_layer"):
        raise unknown("per", per, ("network", "layer", "up_to_layer"))
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    bare, call = unwrap(model), forward or default_forward
    codes = _position_codes(bare, patterns) if "position_codes" in masks else []
    means, digits = _mean_maps(bare, batches, call, prefix, path is not None) if "mean" in masks else ({}, "")

    def masked(found: Plan) -> Changes:
        forwards: list[Forward | None] = []
        counts, reasons = [], []
        for mask in masks:
            if mask == "position_codes":
                forwards.append(_without(bare, codes, changing(Intervention(bare, found), call)))
                counts.append(len(codes))
                reasons.append([f"{name}: a rotary code" for name in _rotary(bare)])
                continue
            chosen, why_not = _sites(mask, found)
            edit = partial(_edit, mask, means)
            for group in _groups(found.attentions, chosen, per):
                forwards.append(changing(Intervention(bare, found, sites=group, edit=edit), call) if group else None)
            counts.append(len(chosen))
            reasons.append([*why_not, *found.skipped])
        coords: dict[str, Any] = {
            "mask": ("mask", np.arange(len(masks)), {"long_name": "mask", "units": "1"}),
            "mask_name": ("mask", masks, {"long_name": "what was masked"}),
            "masked": ("mask", counts, {"long_name": "attention maps or position codes reached", "units": "1"}),
            "left_out": ("mask", [json.dumps(each) for each in reasons], {"long_name": "what was not, and why (JSON)"}),
        }
        shape: dict[str, int] = {"mask": len(masks)}
        if per != "network":
            shape["layer"] = len(found.attentions)
            coords |= coordinates(found.attentions)
        attributes = {"per": per} | ({"position_codes": json.dumps(codes)} if codes else {})
        return Changes(forwards, tuple(shape), tuple(shape.values()), coords, attributes)

    options = {"masks": masks, "per": per, "patterns": patterns, "prefix": prefix, "forward": forward}
    return compare(
        bare,
        batches,
        masked,
        word="masked",
        config={"probe": "masking", **options},
        title="Accuracy with a part of attention masked",
        references="d'Ascoli et al. 2021, ConViT, arXiv:2103.10697, Tables 5 and 6; "
        "Park & Kim 2022, How Do Vision Transformers Work?, arXiv:2202.06709, Fig. 7",
        identity={"mean_of": digits},
        prefix=prefix,
        forward=forward,
        path=path,
        progress=progress,
    )


# --- which maps -------------------------------------------------------------------------------------


def _check(mask: str, per: str) -> None:
    """Whether a mask is one."""
    kind, _, size = mask.partition(":")
    if kind == "window":
        if not size.isdecimal() or int(size) % 2 == 0:
            raise ValueError(f"mask {mask!r}: a window around a patch has an odd side, such as window:3.")
    elif mask not in MASKS:
        raise unknown("mask", mask, MASKS)
    if mask == "position_codes" and per != "network":
        raise ValueError(f"position codes belong to no single layer: mask them with per='network', not {per!r}.")


def _sites(mask: str, found: Plan) -> tuple[list[AttentionSite], list[str]]:
    """The attention maps that a mask can be laid on, and why not on others."""
    chosen, reasons = [], []
    for site in found.attentions:
        if mask in ("content", "position") and not site.parts:
            reasons.append(f"{site.name}: no gated sum of content and position")
        elif mask.startswith("window:") and site.keys is not None:
            reasons.append(f"{site.name}: keys are other tokens than queries, which leaves a query none near it")
        else:
            chosen.append(site)
    if not chosen:
        listed = "; ".join([*reasons, *found.skipped]) or "it applies none between patches"
        raise ValueError(f"mask {mask!r}: the forward pass shows no attention map to lay it on ({listed}).")
    return chosen, reasons


def _groups(sites: Sequence[AttentionSite], chosen: Sequence[AttentionSite], per: Per) -> Iterator[list[AttentionSite]]:
    """The maps that are masked together, once per number in the dataset; none where a layer cannot be masked."""
    if per == "network":
        yield list(chosen)
        return
    for index, site in enumerate(sites):
        first = index if per == "layer" else 0
        yield [one for one in sites[first : index + 1] if one in chosen] if site in chosen else []


# --- maps -------------------------------------------------------------------------------------------


def _edit(
    mask: str, means: Mapping[str, Tensor], site: AttentionSite, maps: Tensor, parts: tuple[Tensor, ...]
) -> Tensor:
    """The maps `(image, window, head, query, key)` that a mask puts in the place of a site's."""
    if mask in ("content", "position"):
        content, position = parts
        return position if mask == "content" else content
    if mask == "mean":
        return means[site.name].to(maps).expand_as(maps)
    maps = maps.to(torch.promote_types(maps.dtype, torch.float32))
    if mask == "uniform":
        seen = (maps > UNSEEN).to(maps.dtype)
    else:
        seen = maps * _near(site, int(mask.removeprefix("window:"))).to(maps)[:, None]
    return seen / seen.sum(-1, keepdim=True).clamp_min(torch.finfo(seen.dtype).tiny)


def _near(site: AttentionSite, side: int) -> Tensor:
    """1 where a query sees a key in the window around it, or one has no place, else 0 `(window or 1, query, key)`."""
    places = site_positions(site)
    if site.positions is None:  # those of the patches alone
        places = F.pad(places, (0, 0, site.prefix, 0), value=torch.nan)
    apart = (places[:, :, None] - places[:, None]).abs().amax(-1)
    return (~(apart > side // 2)).to(torch.float32)


def _mean_maps(
    model: nn.Module, batches: Iterable[Any], call: Forward, prefix: int | None, named: bool
) -> tuple[dict[str, Tensor], str]:
    """The mean over images of every map `(window, head, query, key)` by its site, and digits that name the batches."""
    if isinstance(batches, Iterator):
        raise ValueError(
            "mask 'mean' goes through the batches twice, and an iterator can be read once: give a list or a loader."
        )
    sums: dict[str, Tensor] = {}

    def add(site: AttentionSite, maps: Tensor) -> None:
        total = maps.double().sum(0)
        sums[site.name] = sums[site.name] + total if site.name in sums else total

    watch: Watch | None = None
    images, digits = 0, ""
    shape: tuple[int, ...] = ()
    with untouched(model):
        for batch in drawn(batches, model):
            targets_of(batch)  # without labels this pass would be in vain
            here = tuple(images_of(batch).shape[1:])
            shape = shape or here
            require_size(shape, here)
            if watch is None:
                watch = Watch(model, plan(model, batch, prefix=prefix, forward=call), on_attention=add)
            watch(call, model, batch)
            images += len(images_of(batch))
            digits = chained(digits, batch) if named else ""
    return {name: total / images for name, total in sums.items()}, digits


# --- position codes ---------------------------------------------------------------------------------


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of floating point by name."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}


def _like(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _position_codes(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The names of the position codes."""
    named = _named_tensors(model)
    kept = () if patterns != list(POSITION_CODES) else _ROTARY
    codes = [name for name in named if _like(name, patterns) and not _like(name, kept)]
    if not codes:
        # What layers of any kind have is no candidate.
        others = [name for name in named if name.rpartition(".")[2] not in _LAYERS]
        raise ValueError(
            f"mask 'position_codes': no parameter or buffer is called like {', '.join(patterns)}; give patterns= for "
            f"yours. Besides weights, biases and statistics the model has {', '.join(others) or 'none'}."
        )
    return codes


def _rotary(model: nn.Module) -> list[str]:
    return [name for name in _named_tensors(model) if _like(name, _ROTARY)]


def _without(model: nn.Module, codes: Sequence[str], forward: Forward) -> Forward:
    """A way to call the model: with zeros in the place of its position codes, which are never written to."""
    named = _named_tensors(model)
    zeros = {name: torch.zeros_like(named[name]) for name in codes}

    def call(model: nn.Module, batch: Any) -> Any:
        with lent(model, zeros), without_caches(model):
            return forward(model, batch)

    return call
