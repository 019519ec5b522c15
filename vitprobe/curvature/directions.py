"""Directions through the weights: random and normalised, between checkpoints, along a training (Li et al. 2018)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from vitprobe.calling import unwrap
from vitprobe.names import unknown
from vitprobe.seeds import derive_seed

Normalisation = Literal["li", "paper", "layer", "none"]
NORMALISATIONS = ("li", "paper", "layer", "none")
AXES = ("x", "y")

Checkpoint = nn.Module | Mapping[str, Tensor]
"""Other weights of a model: a module like it, or its state dict."""

# Below this share of the sum of squares a principal direction is rounding of single precision.
ROUNDING = 1e-12
LISTED = 8  # names that an error lists


@dataclass(frozen=True)
class Directions:
    """Axes through a model's weights: one for a line, two for a plane.

    The loss landscape and the trajectory both take it, and so show the same plane.

    Attributes:
        kind: what the axes are, in a word.
        axes: for each axis what a step of one adds to the parameters and buffers, by name; what is not named stays.
        labels: for each axis what a step along it is, in words; of themselves if left out.
        facts: text and numbers about the axes, which become attributes of datasets.
    """

    kind: str
    axes: tuple[Mapping[str, Tensor], ...]
    labels: tuple[str, ...] = ()
    facts: Mapping[str, str | int | float] = field(default_factory=dict)

    def label(self, axis: int) -> str:
        """What a step along an axis is."""
        return self.labels[axis] if self.labels else f"steps along direction {AXES[axis]}"


def as_directions(model: nn.Module, given: "Directions | Checkpoint | Sequence[Checkpoint]") -> Directions:
    """Directions that fit a model, from ready ones or from one or two other checkpoints.

    Args:
        model: whose weights are the centre, unwrapped.
        given: directions; or one or two checkpoints, each at a step of one along its axis.

    Returns:
        The directions; every parameter is named in them, on its own device.

    Raises:
        TypeError: if they are of another kind.
        ValueError: if there are not one or two axes, or names or shapes differ from the model's.
    """
    if isinstance(given, Directions):
        directions = given
    else:
        several = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        if not all(isinstance(one, nn.Module | Mapping) for one in several):
            raise TypeError(
                f"directions are a name, one or two checkpoints (modules or state dicts), or vitprobe.curvature."
                f"Directions, not {', '.join(type(one).__name__ for one in several)}."
            )
        directions = checkpoint_directions(model, several)
    if len(directions.axes) not in (1, 2):
        raise ValueError(f"{len(directions.axes)} directions: give one for a line or two for a plane.")
    own = movable(model)
    names = [*dict(model.named_parameters()), *(name for axis in directions.axes for name in axis)]
    axes = []
    for number, axis in enumerate(directions.axes):
        _require_fit(f"direction {AXES[number]}", axis, own, own)
        given_axis = {name: axis[name].detach().to(own[name]) for name in axis}
        axes.append({name: given_axis.get(name, torch.zeros_like(own[name])) for name in dict.fromkeys(names)})
    return Directions(directions.kind, tuple(axes), directions.labels, directions.facts)


def require_random(drawn: bool, pairs: int, normalisation: str) -> None:
    """That options of random directions go with random directions.

    Args:
        drawn: whether random directions are to be drawn.
        pairs: how many pairs of them.
        normalisation: theirs.

    Raises:
        ValueError: if either is given although none are drawn.
    """
    if not drawn and (pairs != 1 or normalisation != "li"):
        raise ValueError(
            f"pairs={pairs} and normalisation={normalisation!r} are options of directions='random': leave them out "
            "with other directions, which have lengths of their own."
        )


def random_directions(
    model: nn.Module, *, normalisation: Normalisation = "li", seed: int = 0, pair: int = 0, dimensions: int = 2
) -> Directions:
    """One of the pairs of random directions that the loss landscape draws; see `random_direction`.

    Args:
        model: whose weights are the centre, unwrapped.
        normalisation: how the directions are scaled to the weights.
        seed: of the directions.
        pair: which of the pairs.
        dimensions: 2 for a plane, 1 for a line.

    Returns:
        The directions.
    """
    weights = dict(model.named_parameters())
    axes = AXES[:dimensions]
    return Directions(
        "random",
        tuple(
            random_direction(
                weights,
                normalisation=normalisation,
                generator=torch.Generator().manual_seed(derive_seed(seed, "direction", pair, axis)),
            )
            for axis in axes
        ),
        tuple(f"steps along direction {axis}, normalised by {normalisation!r}" for axis in axes),
        {"normalisation": normalisation},
    )


def checkpoint_directions(model: nn.Module, checkpoints: Sequence[Checkpoint]) -> Directions:
    """Directions to one or two other checkpoints, which lie at a step of one along each.

    Floating-point buffers (statistics of batch norm) move too, so that a step of one is the checkpoint whole.

    Args:
        model: whose weights are the centre, unwrapped.
        checkpoints: one or two modules or state dicts.

    Returns:
        The directions.

    Raises:
        ValueError: if names or shapes differ from the model's.
    """
    own = movable(model)
    numbers = range(1, len(checkpoints) + 1)
    states = [
        state_of(model, checkpoint, f"checkpoint {n}") for n, checkpoint in zip(numbers, checkpoints, strict=True)
    ]
    return Directions(
        "checkpoints",
        tuple({name: state[name] - tensor.detach() for name, tensor in own.items()} for state in states),
        tuple(f"share of the way to checkpoint {number}" for number in numbers),
    )


def principal_directions(model: nn.Module, checkpoints: Sequence[Checkpoint], *, centred: bool = False) -> Directions:
    """The two directions from a model along which the checkpoints of its training spread most (Li et al. 2018, sec. 7).

    They are the first two right singular vectors of the matrix with the rows `w_t - w`: of all planes through the
    model theirs leaves the least of the rows outside. The authors' released code subtracts the mean of the rows
    first (`centred=True`), which makes it the plane of most variance. Each direction has length one, and the sign
    that puts its farthest checkpoint on the positive side. Checkpoints on a straight line have no second direction:
    it is zero then. Principal components of any walk, also of a random one, look smooth (Antognini & Sohl-Dickstein
    2018), so see what share they explain.

    Args:
        model: whose weights are the centre, the end of the training.
        checkpoints: two or more modules or state dicts.
        centred: subtract the mean of the rows first.

    Returns:
        The directions; the facts `explained_x` and `explained_y` are their shares of the sum of squares.

    Raises:
        ValueError: if there are fewer than two checkpoints, names or shapes differ, or nothing differs from the model.
    """
    bare = unwrap(model)
    weights = {name: p.detach() for name, p in bare.named_parameters()}
    states = path_of(bare, checkpoints)

    def rows(name: str) -> Tensor:
        differences = torch.stack([state[name].double() - weights[name].double() for state in states]).flatten(1)
        return differences - differences.mean(0) if centred else differences

    # The checkpoints are few and the weights many: the singular vectors follow from the rows' inner products.
    gram = torch.zeros(len(states), len(states), dtype=torch.float64)
    for name in weights:
        gram += (matrix := rows(name)).matmul(matrix.T).cpu()
    total = float(gram.trace())
    if total == 0:
        raise ValueError("no checkpoint differs from the model: give those of the training that led to it.")
    values, vectors = torch.linalg.eigh(gram)
    axes, explained = [], []
    for value, vector in zip(values.flip(0)[:2], vectors.flip(1).T[:2], strict=True):
        share = float(value) / total
        explained.append(max(share, 0.0))
        sign = vector[vector.abs().argmax()].sign()
        coefficients = sign * vector / value.sqrt() if share > ROUNDING else torch.zeros_like(vector)
        axes.append({name: (coefficients.to(w.device) @ rows(name)).view_as(w).to(w) for name, w in weights.items()})
    return Directions(
        "pca",
        tuple(axes),
        ("length along principal direction 1", "length along principal direction 2"),
        {"explained_x": explained[0], "explained_y": explained[1], "centred": int(centred)},
    )


def random_direction(
    weights: Mapping[str, Tensor], *, normalisation: Normalisation, generator: torch.Generator
) -> dict[str, Tensor]:
    """A Gaussian direction for every weight tensor, scaled to the weights.

    - `"li"`: every filter (the slice of a tensor at one output) gets the length of the weights' filter; tensors with
      less than two dimensions get zero.
    - `"paper"`: Park & Kim's published code, which takes lengths along the first axis instead, so that every
      (input, y, x) column over all outputs is matched; tensors with less than two dimensions, and position codes, get
      zero.
    - `"layer"`: every tensor gets the length of the weights' tensor, also biases and norms.
    - `"none"`: the Gaussian itself; tensors with less than two dimensions get zero.

    Args:
        weights: by name, where the landscape is centred.
        normalisation: one of the above.
        generator: of the Gaussian numbers, on the CPU.

    Returns:
        One tensor for each weight.

    Raises:
        ValueError: for an unknown normalisation.
    """
    if normalisation not in NORMALISATIONS:
        raise unknown("normalisation", normalisation, NORMALISATIONS)
    direction = {}
    for name, weight in ((name, weight.detach()) for name, weight in weights.items()):
        # Drawn for every tensor, also where it is not used: normalisations of one seed share their numbers.
        draw = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
        direction[name] = _scale(name, draw, weight, normalisation)
    return direction


def _scale(name: str, draw: Tensor, weight: Tensor, normalisation: Normalisation) -> Tensor:
    if normalisation == "layer":
        return draw * (vector_norm(weight) / vector_norm(draw).clamp_min(1e-30))
    if weight.ndim < 2:
        return torch.zeros_like(weight)
    if normalisation == "none":
        return draw
    if normalisation == "paper":
        if "pos_embed" in name or "relative_position" in name:
            return torch.zeros_like(weight)
        return draw * _length(weight, (0,)) / (_length(draw, (0,)) + 1e-7)
    rest = tuple(range(1, weight.ndim))
    return draw * _length(weight, rest) / _length(draw, rest).clamp_min(1e-30)


def _length(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return vector_norm(x, dim=axes, keepdim=True)


def movable(model: nn.Module) -> dict[str, Tensor]:
    """What directions may move: a model's parameters, and those buffers of its state dict that are floating-point."""
    state = model.state_dict()
    buffers = {name: b for name, b in model.named_buffers() if name in state and b.is_floating_point()}
    return {**dict(model.named_parameters()), **buffers}


def state_of(model: nn.Module, checkpoint: Checkpoint, what: str) -> dict[str, Tensor]:
    """The movable tensors of a checkpoint, by the model's names and where the model's are.

    Args:
        model: the model, unwrapped.
        checkpoint: a module like it, or a state dict.
        what: the checkpoint in words, for errors.

    Returns:
        The tensors.

    Raises:
        ValueError: if names or shapes differ from the model's.
    """
    state = unwrap(checkpoint).state_dict() if isinstance(checkpoint, nn.Module) else checkpoint
    own = movable(model)
    _require_fit(what, state, own, model.state_dict(), whole=True)
    return {name: state[name].detach().to(tensor) for name, tensor in own.items()}


def path_of(model: nn.Module, checkpoints: Sequence[Checkpoint]) -> list[dict[str, Tensor]]:
    """The movable tensors of every checkpoint of a training; see `state_of`.

    Args:
        model: the model, unwrapped.
        checkpoints: two or more, in order.

    Returns:
        One mapping for each.

    Raises:
        ValueError: if there are fewer than two, or names or shapes differ from the model's.
    """
    if isinstance(checkpoints, nn.Module | Mapping) or len(checkpoints) < 2:
        raise ValueError("a training is two checkpoints or more: give a list of modules or state dicts, in order.")
    return [state_of(model, checkpoint, f"checkpoint {number}") for number, checkpoint in enumerate(checkpoints)]


def _require_fit(
    what: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor], known: Mapping[str, Tensor], whole: bool = False
) -> None:
    """That names are known and shapes are the model's; `whole` asks for all of them."""
    problems = {
        "missing": [name for name in own if whole and name not in given],
        "unknown": [name for name in given if name not in known],
        "other shape": [
            f"{name} {tuple(given[name].shape)} instead of {tuple(tensor.shape)}"
            for name, tensor in own.items()
            if name in given and given[name].shape != tensor.shape
        ],
    }
    if any(problems.values()):
        listing = "; ".join(
            f"{kind}: {', '.join(names[:LISTED])}" + f" and {len(names) - LISTED} more" * (len(names) > LISTED)
            for kind, names in problems.items()
            if names
        )
        raise ValueError(f"{what} does not fit the model. {listing}.")
