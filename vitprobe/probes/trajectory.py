"""The path of the weights in training (Park & Kim 2022, arXiv v1, Fig. 1; Li et al. 2018, section 7)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.calling import described, with_weights
from vitprobe.curvature import (
    Checkpoint,
    Directions,
    Normalisation,
    as_directions,
    norm,
    path_of,
    principal_directions,
    random_directions,
    require_random,
)
from vitprobe.names import unknown
from vitprobe.probes.landscape import plane_name
from vitprobe.results import provenance


def trajectory(
    model: nn.Module,
    checkpoints: Sequence[Checkpoint],
    *,
    epochs: Sequence[float] | None = None,
    directions: Literal["pca", "random"] | Directions | Checkpoint | Sequence[Checkpoint] = "pca",
    pairs: int = 1,
    normalisation: Normalisation = "li",
    seed: int = 0,
) -> xr.Dataset:
    """The path of the weights to a trained model: how far away, how straight, and where on a plane.

    With the differences `d_t = w_t - w` from the trained model, `radius` is `|d_t| / |d_0|` and `angle` the angle
    between `d_t` and `d_0`: on the straight line from the start it is zero. The model itself lies in no direction, so
    a checkpoint that equals it has no angle. On the plane of the loss landscape each checkpoint has the coordinates of
    the nearest point, and the share of `|d_t|^2` that lies outside the plane is said with them: it is nearly all for
    random directions, which see little of any path. Sums are in double precision; buffers do not count.

    Args:
        model: the end of the path, in which the landscape is centred; any PyTorch model, also wrapped.
        checkpoints: two or more modules or state dicts, in order; the first is the start. The model may be the last.
        epochs: when each was; numbered from 0 unless given.
        directions: the axes of the plane: `"pca"`, see `vitprobe.curvature.principal_directions`; or, as in
            `loss_landscape`, `"random"`, one or two other checkpoints, or `vitprobe.curvature.Directions`.
        pairs: pairs of random directions.
        normalisation: of random directions.
        seed: of random directions; they are those that `loss_landscape` draws.

    Returns:
        `radius` and `angle` [rad] (epoch); `along_x`, `along_y` (on a plane) and `off_plane` (direction_pair, epoch).
        The attribute `initial_distance` is `|d_0|`. The coordinate `plane` is that of the landscape of the same plane.

    Raises:
        ValueError: if there are fewer than two checkpoints, names or shapes differ from the model's, the first is the
            model itself, or an option has no meaning here.
    """
    bare = with_weights(model)
    path = path_of(bare, checkpoints)
    epochs = range(len(path)) if epochs is None else epochs
    if len(epochs) != len(path):
        raise ValueError(f"{len(epochs)} epochs for {len(path)} checkpoints: give one number for each.")
    weights = {name: p.detach() for name, p in bare.named_parameters()}
    end = _flat(weights, weights)
    start = _flat(path[0], weights) - end
    initial = norm(start)
    if initial == 0:
        raise ValueError("the first checkpoint is the model itself: give the start of its training first.")
    planes = _planes(bare, checkpoints, directions, pairs, normalisation, seed)
    radius, angle = np.empty(len(path)), np.empty(len(path))
    along = np.empty((len(planes[0].axes), len(planes), len(path)))
    off_plane = np.empty((len(planes), len(path)))
    for t, state in enumerate(path):
        difference = _flat(state, weights) - end
        radius[t] = norm(difference) / initial
        angle[t] = _angle(difference, start)
    for pair, plane in enumerate(planes):
        axes = torch.stack([_flat(axis, weights) for axis in plane.axes])
        # Also for a direction of zero, or two of the same line.
        inverse = torch.linalg.pinv(axes @ axes.T, rtol=1e-12, hermitian=True)
        for t, state in enumerate(path):
            difference = _flat(state, weights) - end
            coordinates = inverse @ (axes @ difference)
            along[:, pair, t] = coordinates.cpu()
            length = norm(difference)
            off_plane[pair, t] = (norm(difference - coordinates @ axes) / length) ** 2 if length else math.nan
    return _dataset(bare, planes, radius, angle, along, off_plane, epochs=epochs, initial=initial, seed=seed)


def _planes(
    model: nn.Module,
    checkpoints: Sequence[Checkpoint],
    directions: Literal["pca", "random"] | Directions | Checkpoint | Sequence[Checkpoint],
    pairs: int,
    normalisation: Normalisation,
    seed: int,
) -> list[Directions]:
    if not isinstance(directions, str):
        planes = [as_directions(model, directions)]
    elif directions == "pca":
        planes = [principal_directions(model, checkpoints)]
    elif directions == "random":
        return [random_directions(model, normalisation=normalisation, seed=seed, pair=pair) for pair in range(pairs)]
    else:
        raise unknown("directions", directions, ("pca", "random"))
    require_random(False, pairs, normalisation)
    return planes


def _flat(named: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
    """The parameters as one vector in double precision `(parameter,)`."""
    return torch.cat([named[name].double().flatten() for name in weights])


def _angle(a: Tensor, b: Tensor) -> float:
    """Between two vectors [rad], by their sum and difference: the arccosine loses half the digits near 0 and pi."""
    length_a, length_b = norm(a), norm(b)
    if length_a == 0 or length_b == 0:
        return math.nan
    a, b = a / length_a, b / length_b
    return 2 * math.atan2(norm(a - b), norm(a + b))


def _dataset(
    model: nn.Module,
    planes: Sequence[Directions],
    radius: np.ndarray,
    angle: np.ndarray,
    along: np.ndarray,
    off_plane: np.ndarray,
    *,
    epochs: Sequence[float],
    initial: float,
    seed: int,
) -> xr.Dataset:
    plane, both = planes[0], ("direction_pair", "epoch")
    what = "plane" if len(plane.axes) == 2 else "line"
    variables: dict[str, tuple[Any, np.ndarray, str, str]] = {
        "radius": ("epoch", radius, "distance from the model, over that of the start", "1"),
        "angle": ("epoch", angle, "angle to the start, seen from the model", "rad"),
    }
    for axis, (name, values) in enumerate(zip("xy", along, strict=False)):
        variables[f"along_{name}"] = (both, values, plane.label(axis), "1")
    variables["off_plane"] = (both, off_plane, f"share of the squared distance outside the {what}", "1")
    return xr.Dataset(
        {
            name: (dims, values, {"long_name": long_name, "units": units})
            for name, (dims, values, long_name, units) in variables.items()
        },
        coords={
            "epoch": ("epoch", np.asarray(epochs), {"long_name": "epoch of the checkpoint", "units": "1"}),
            "direction_pair": (
                "direction_pair",
                np.arange(len(planes)),
                {"long_name": "pair of directions", "units": "1"},
            ),
            "plane": (
                "direction_pair",
                [plane_name(model, one) for one in planes],
                {"long_name": "digits that tell planes apart"},
            ),
        },
        attrs=provenance(
            title="Training trajectory",
            references="Park & Kim 2022, arXiv:2202.06709v1, Fig. 1; Li et al. 2018, arXiv:1712.09913, section 7",
            config={
                "probe": "trajectory",
                "directions": plane.kind,
                "pairs": len(planes),
                "normalisation": plane.facts.get("normalisation"),
                "checkpoints": len(radius),
            },
            device=next(model.parameters()).device,
            seed=seed,
            **{
                "probe": "trajectory",
                "directions": plane.kind,
                **described(model),
                "initial_distance": initial,
                **plane.facts,
            },
        ),
    )
