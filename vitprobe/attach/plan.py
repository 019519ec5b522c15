"""From a traced forward pass to a plan: what a model shows, and what had to be left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitprobe.attach.parts import AttentionSite, Embedding, Unit
from vitprobe.attach.reading import Reading
from vitprobe.attach.sites import find_sites
from vitprobe.attach.trace import Tracer
from vitprobe.attach.units import find_embedding, find_modules, find_units, unseen_streams
from vitprobe.calling import change_tensors, default_forward, first_images, images_of, logits_of, tensors_of, to_model


@dataclass(frozen=True)
class Plan:
    """What a model shows for batches of one shape: its units, its attention maps, and what had to be left out."""

    units: tuple[Unit, ...]
    attentions: tuple[AttentionSite, ...]
    skipped: tuple[str, ...]
    image: tuple[int, int]
    embedding: Embedding | None = None
    attends: bool = True  # whether activations multiply each other anywhere


def plan(
    model: nn.Module,
    batch: Any,
    *,
    layers: str | Sequence[str] = "auto",
    prefix: int | None = None,
    forward: Any = default_forward,
) -> Plan:
    """Trace one forward pass on two images of a batch and find the model's units and attention maps.

    Args:
        model: the module, unwrapped, in evaluation mode.
        batch: what it is called on.
        layers: `"auto"` finds the units; glob patterns of module paths take those modules' outputs instead (`*` stays
            between two dots: `blocks.*` is the blocks and not what is in them).
        prefix: tokens before the patches, where the inference is wrong.
        forward: calls the model on a batch.

    Returns:
        The plan.
    """
    # A copy, since a model may write to what it is given.
    batch = change_tensors(first_images(to_model(batch, model), 2), torch.clone)
    images = images_of(batch)
    forward(model, batch)  # models that make tables the first time they are called do what they always do the second
    tracer = Tracer(model, [tensor for tensor in tensors_of(batch) if tensor.is_floating_point()], images)
    with tracer.running():
        output = forward(model, batch)
    logits = logits_of(output)
    tracer.trace.output = tracer.node_of(logits)
    image = (images.shape[-2], images.shape[-1])
    reading = Reading(tracer.trace, len(images), image, prefix, _declared_prefix(model))
    units = find_units(reading)
    sites, skipped = find_sites(reading, units)
    returned = [node for tensor in tensors_of(output) if (node := tracer.node_of(tensor)) is not None]
    shown, left_out = units, [*_other_outputs(reading, returned), *unseen_streams(reading, units)]
    if layers != "auto":
        shown, left_out = find_modules(reading, [layers] if isinstance(layers, str) else list(layers))
    return Plan(
        units=tuple(found.unit for found in shown),
        attentions=tuple(sites),
        skipped=(*left_out, *skipped),
        image=image,
        embedding=find_embedding(reading, units),
        attends=bool(sites or skipped) or any(node.op in ("attention", "kernel") for node in tracer.trace.nodes),
    )


def _other_outputs(reading: Reading, returned: Sequence[int]) -> list[str]:
    """That a model returned several maps, of which the one that was taken does not see all layers."""
    taken = reading.trace.output
    if taken is None or not reading.is_map(taken):
        return []
    seen = reading.trace.between(0, taken)
    if not any(reading.is_map(node) for node in returned if node not in seen):
        return []
    return [
        f"of the {len(returned)} tensors that the model returned, one of shape {reading.trace.nodes[taken].shape} was "
        "taken for its output, and layers that lead to others alone are in no unit: forward=lambda m, b: m(b)[-1] "
        "takes the last"
    ]


def _declared_prefix(model: nn.Module) -> int | None:
    """What the model itself says of its prefix tokens (timm's attribute, or a transformers configuration)."""
    if isinstance(declared := getattr(model, "num_prefix_tokens", None), int):
        return declared
    registers = getattr(getattr(model, "config", None), "num_register_tokens", None)
    return registers + 1 if isinstance(registers, int) else None
