"""What every initialiser leaves behind: a note on the model, and a dataset of what was achieved."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from vitprobe.calling import unwrap
from vitprobe.results import provenance, to_json
from vitprobe.seeds import derive_seed

Values = Sequence[np.ndarray | Tensor | float]


def record(model: nn.Module, name: str, options: Mapping[str, Any], seed: int | None = None) -> str:
    """Add an initialisation to the model's `initialisation`, the JSON text of all that it had, in order.

    Args:
        model: the model.
        name: the initialiser's.
        options: all of its options.
        seed: its seed, if it draws anything.

    Returns:
        The text.
    """
    model = unwrap(model)
    done = json.loads(getattr(model, "initialisation", "[]"))
    done.append(
        {"initializer": name, "options": json.loads(to_json(options))} | ({} if seed is None else {"seed": seed})
    )
    model.initialisation = json.dumps(done)  # type: ignore[assignment]
    return json.dumps(done)


def dataset(
    model: nn.Module,
    name: str,
    variables: Mapping[str, tuple[Values, str, str]],
    *,
    layers: Sequence[str],
    title: str,
    references: str,
    options: Mapping[str, Any],
    seed: int | None = None,
    coords: Mapping[str, tuple[Values, str, str]] | None = None,
    **extra: str | int | float,
) -> xr.Dataset:
    """Record an initialisation and describe it, along `layer`, and `head` where a layer has an array of values.

    Args:
        model: the model.
        name: the initialiser's name.
        variables: for each, the values by layer, a long name and units. NaN where a layer has fewer heads.
        layers: names of the modules.
        title: of the dataset.
        references: its source.
        options: all options of the initialiser.
        seed: its seed.
        coords: as `variables`, for coordinates.
        **extra: further attributes.

    Returns:
        The dataset.
    """
    model = unwrap(model)

    def column(entry: tuple[Values, str, str]) -> tuple[tuple[str, ...], np.ndarray, dict[str, str]]:
        values, long_name, units = entry
        arrays = [np.asarray(value, dtype=np.float64) for value in values]
        padded = np.full((len(arrays), *np.max([array.shape for array in arrays], axis=0).astype(int)), np.nan)
        for index, array in enumerate(arrays):
            corner: Any = (index, *map(slice, array.shape))
            padded[corner] = array
        return ("layer", "head")[: padded.ndim], padded, {"long_name": long_name, "units": units}

    ds = xr.Dataset({key: column(entry) for key, entry in variables.items()})
    ds = ds.assign_coords(
        {key: column(entry) for key, entry in (coords or {}).items()}
        | {
            "layer": ("layer", np.arange(len(layers)), {"long_name": "place in the order of the model"}),
            "layer_name": ("layer", list(layers), {"long_name": "path of the module"}),
        }
    )
    if "head" in ds.dims:
        ds = ds.assign_coords(head=("head", np.arange(ds.sizes["head"]), {"long_name": "head", "units": "1"}))
    ds.attrs = attributes(model, name, title=title, references=references, options=options, seed=seed, **extra)
    return ds


def attributes(
    model: nn.Module,
    name: str,
    *,
    title: str,
    references: str,
    options: Mapping[str, Any],
    seed: int | None,
    **extra: str | int | float,
) -> dict[str, str | int | float]:
    """Record an initialisation and give the attributes that say what was done to which model.

    Args:
        model: the model.
        name: the initialiser's name.
        title: of the dataset.
        references: its source.
        options: all options of the initialiser.
        seed: its seed.
        **extra: further attributes.

    Returns:
        The attributes.
    """
    return provenance(
        title=title,
        references=references,
        config={"initializer": name, **options},
        device=next((str(p.device) for p in model.parameters()), "cpu"),
        seed=seed,
        initializer=name,
        model_class=f"{type(model).__module__}.{type(model).__qualname__}",
        initialisation=record(model, name, options, seed),
        **extra,
    )


def generator(seed: int, *purpose: int | str) -> torch.Generator:
    """A generator on the CPU whose state depends on seed and purpose alone."""
    return torch.Generator("cpu").manual_seed(derive_seed(seed, *purpose))


@torch.no_grad()
def fill_(tensor: Tensor, draw: Callable[[Tensor, torch.Generator], Any], source: torch.Generator) -> None:
    """Let `draw` fill a copy on the CPU in float32, so that all devices get the same numbers, and copy it back."""
    drawn = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    draw(drawn, source)
    tensor.copy_(drawn)
