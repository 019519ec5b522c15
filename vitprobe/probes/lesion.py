"""What a network loses with each of its units: the lesion study (Park & Kim 2022, Fig. 10b and App. D.4)."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import xarray as xr
from torch import nn

from vitprobe.attach import Intervention, Plan, Unit, removal
from vitprobe.calling import default_forward, unwrap
from vitprobe.names import unknown
from vitprobe.probes.base import coordinates
from vitprobe.probes.paired import Changes, changing, compare

Remove = Literal["branch", "convolution"]


def lesion(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    remove: Remove = "branch",
    layers: str | Sequence[str] = "auto",
    prefix: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Accuracy of a trained network without one of its units, unit by unit (Park & Kim 2022, Fig. 10b and App. D.4).

    Nothing is trained again, and batch norm keeps its statistics. All units see the same images; a change is the
    mean over images of what an image's answer changes by, and its standard error that of paired differences. The
    paper's ordinate is `accuracy_change` in percentage points.

    What is removed stands in the coordinate `removed`:

    - `"residual branch"`: the addition that closes the unit gives its stream alone. Where the skip connection is a
      convolution (stages of a ResNet) that stays.
    - `"bypassed"`: a unit without a skip connection that keeps the shape gives what the unit before gave.
    - `"1 convolution"` and so on: see `remove`.
    - `"kept: ..."` with the reason; its numbers are NaN.

    Args:
        model: any eager PyTorch vision model, also compiled or wrapped; it is handed back as it was.
        batches: `(images, labels)` tuples, or mappings with `labels`; labels are class numbers.
        remove: `"branch"`, the unit's whole branch. `"convolution"`, the paper's way for ResNets, which it does not
            spell out further: convolutions with a spatial kernel give back what they take, and the rest of the branch
            (1x1 convolutions, norms, activation functions) stays. Convolutions that change the grid or the width
            are kept. Attention and MLPs lose their branch, so that networks of both can be compared.
        layers: as in `probe`.
        prefix: as in `probe`.
        forward: `forward(model, batch)` for models that are called in another way.
        path: netCDF file that grows with every batch. The same call goes on where an interrupted one stopped; the
            batches have to be the same again, which is checked, and so is, with a `forward`, what the first of them
            gives, since the file knows that by its name alone.
        progress: whether a terminal shows a progress bar.

    Returns:
        `lesioned_accuracy`, `accuracy_change`, `lesioned_nll` and `nll_change` (layer), and `intact_accuracy` and
        `intact_nll` of the whole network, each with its standard error over images. A change is with the lesion minus
        without: a loss of accuracy is negative. Where outputs are not numbers, neither is the accuracy.

    Raises:
        ValueError: if there are no batches, no class numbers or nothing that can be removed, images differ in size,
            an option is unknown, or the file holds another measurement.
    """
    if remove not in ("branch", "convolution"):
        raise unknown("remove", remove, ("branch", "convolution"))
    bare, call = unwrap(model), forward or default_forward

    def lesions(found: Plan) -> Changes:
        removed, forwards = [], []
        for unit in found.units:
            text, options = _lesion(unit, found, remove)
            removed.append(text)
            forwards.append(changing(Intervention(bare, found, **options), call) if options else None)
        if not any(forwards):
            reasons = "; ".join(f"{unit.name}: {text}" for unit, text in zip(found.units, removed, strict=True))
            raise ValueError(
                f"lesion: no unit can be removed ({reasons or 'the forward pass shows none'}): name modules that keep "
                'the shape of what they take with layers=["blocks.*"] or the like.'
            )
        coords = {**coordinates(found.units), "removed": ("layer", removed, {"long_name": "what was removed"})}
        return Changes(forwards, ("layer",), (len(forwards),), coords, {"remove": remove})

    return compare(
        model,
        batches,
        lesions,
        word="lesioned",
        config={"probe": "lesion", "remove": remove, "layers": layers, "prefix": prefix, "forward": forward},
        title="Accuracy without one unit",
        references="Park & Kim 2022, How Do Vision Transformers Work?, arXiv:2202.06709, Fig. 10b and App. D.4",
        layers=layers,
        prefix=prefix,
        forward=forward,
        path=path,
        progress=progress,
    )


def _lesion(unit: Unit, found: Plan, remove: Remove) -> tuple[str, dict[str, Any]]:
    """What is removed of a unit, in words, and as an intervention; nothing if it is kept."""
    if remove == "convolution" and unit.kind not in ("msa", "mlp"):
        count = len(unit.convolutions)
        if unit.kind == "stem" or not count:
            return "kept: a stem, or no convolution with a spatial kernel that keeps the shape", {}
        before = found.units[unit.index - 1]
        changes = (before.layout.grid, before.channels) != (unit.layout.grid, unit.channels)
        text = "1 convolution" if count == 1 else f"{count} convolutions"
        return text + ("; what changes the shape is kept" if changes else ""), {"convolutions": [unit]}
    how = removal(unit, found)
    if how is None:
        return "kept: no skip connection, and the shape changes", {}
    return {"branch": "residual branch", "bypass": "bypassed"}[how], {"without": [unit]}
