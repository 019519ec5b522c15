"""How a model's accuracy stands corrupted images (Hendrycks & Dietterich 2019; Park & Kim 2022)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from torch import nn
from tqdm import tqdm

from vitprobe.calling import default_forward, described, to_model, untouched, unwrap
from vitprobe.data.corruption import ALL_CORRUPTIONS, CORRUPTIONS, GROUPS, SEVERITIES, Corruptions, GeneratedCorruptions
from vitprobe.data.images import ImageData
from vitprobe.intervals import mean_interval
from vitprobe.probes.answers import answers
from vitprobe.probes.base import RunningMean
from vitprobe.results import provenance

TITLE = "Accuracy on corrupted images"
REFERENCES = (
    "Hendrycks & Dietterich 2019, Benchmarking Neural Network Robustness, arXiv:1903.12261; Park & Kim 2022, "
    "arXiv:2202.06709"
)
_BOTH = ("corruption", "severity")


def corruption_robustness(
    model: nn.Module,
    source: Corruptions | ImageData,
    *,
    types: Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    batch_size: int = 128,
    reference_error: Mapping[str, float] | xr.Dataset | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Accuracy on every kind and severity of corruption, and its mean, with intervals over the images.

    Robustness in Park & Kim 2022 is `mean_accuracy`, the plain mean over fifteen corruptions and five severities. The
    mean corruption error of Hendrycks & Dietterich 2019 sets each corruption's error in relation to that of a
    reference model first. All sets are of the same images, so images and not sets are the independent units: the
    intervals are Student t intervals over images, each image's value being its mean over the sets.

    Args:
        model: any eager PyTorch vision model, also wrapped.
        source: `vitprobe.data.GeneratedCorruptions(data)`, or `vitprobe.data.read_corruptions(folder, ...)`; a data
            set alone stands for the former of its test images.
        types: the corruptions; the fifteen of the published means unless given.
        severities: 1 to 5.
        batch_size: images per batch.
        reference_error: for the mean corruption error: the error of a reference model by corruption, a share, the mean
            over the same severities, such as one of `vitprobe.data.ALEXNET_ERRORS`; or the dataset of this function on
            another model. It counts as known exactly.
        forward: `forward(model, batch)` for models that are called in another way.
        progress: whether a terminal shows a progress bar.

    Returns:
        `accuracy` and `nll` (corruption, severity), each with its standard error over images; with a reference
        `relative_error` (corruption). The attributes hold `mean_accuracy` and, with a reference, `mce`, where 1 is the
        reference, each with its standard error and 95 % interval, `mean_accuracy_se` to `mce_high`. Where outputs are
        not numbers, neither is the accuracy of that set, nor a mean over it.

    Raises:
        TypeError: if the source is none.
        ValueError: for unknown corruptions or severities, labels that the model lacks, or a reference that does not
            fit.
    """
    if isinstance(source, ImageData):
        source = GeneratedCorruptions(source)
    if not isinstance(source, Corruptions):
        raise TypeError(
            f"source is a {type(source).__name__}: give a data set, or "
            "vitprobe.data.read_corruptions('CIFAR-10-C', mean=..., std=...)."
        )
    chosen = CORRUPTIONS if types is None else tuple(types)
    if (
        isinstance(types, str)
        or not chosen
        or not severities
        or any(len(set(x)) < len(x) for x in (chosen, severities))
    ):
        raise ValueError(f"types={types!r} and severities={severities!r}: give lists of one or more, each once.")
    for name in chosen:
        source.check(name, *severities)
    reference = None if reference_error is None else _reference(reference_error, chosen, severities)
    bare, call = unwrap(model), forward or default_forward
    sets = [(name, severity) for name in chosen for severity in severities]
    correct = np.zeros((len(sets), source.images))
    lost = [RunningMean() for _ in sets]
    with untouched(bare):
        progress_bar = tqdm(sets, desc="corruption", unit="set", disable=None if progress else True)
        for row, nll, (name, severity) in zip(correct, lost, progress_bar, strict=True):
            for batch in source.batches(name, severity, batch_size=batch_size):
                right, of_label = answers(bare, to_model(batch, bare), call)
                row[nll.count : nll.count + len(right)] = right.cpu().numpy()
                nll.add(of_label)
    config = {
        "probe": "corruption_robustness",
        "types": list(chosen),
        "severities": list(severities),
        "source": source.config(),
        "reference_error": None if reference is None else dict(zip(chosen, reference.tolist(), strict=True)),
    }
    by_set = correct.reshape(len(chosen), len(severities), -1)
    ds, said = _dataset(by_set, lost, chosen, severities, reference)
    return ds.assign_attrs(
        provenance(
            title=TITLE,
            references=REFERENCES,
            config=config,
            device=next((str(p.device) for p in bare.parameters()), "cpu"),
            probe="corruption_robustness",
            images=source.images,
            **described(bare),
        )
        | said
    )


def _reference(given: Mapping[str, float] | xr.Dataset, types: Sequence[str], severities: Sequence[int]) -> np.ndarray:
    """The errors of the reference model `(corruption,)`."""
    if isinstance(given, xr.Dataset):
        names = [str(name) for name in given["corruption_name"].values]
        known = {name: 1 - given["accuracy"].isel(corruption=row) for row, name in enumerate(names)}
        try:
            errors = [float(known[name].sel(severity=list(severities)).mean()) for name in types]
        except KeyError as error:
            raise ValueError(
                f"reference_error was not measured on {error}: measure it on types={list(types)} and "
                f"severities={list(severities)}."
            ) from error
    else:
        if missing := sorted(set(types) - set(given)):
            raise ValueError(f"reference_error lacks {', '.join(missing)}: give an error for every corruption.")
        errors = [float(given[name]) for name in types]
    if not all(0 < error <= 1 for error in errors):
        raise ValueError(f"reference_error={errors}: errors are shares, above 0 and at most 1, not percentages.")
    return np.array(errors)


def _dataset(
    correct: np.ndarray,
    lost: Sequence[RunningMean],
    types: Sequence[str],
    severities: Sequence[int],
    reference: np.ndarray | None,
) -> tuple[xr.Dataset, dict[str, float]]:
    """Variables and attributes from answers `(corruption, severity, image)`."""
    shape, images = correct.shape[:2], correct.shape[2]
    accuracy = correct.mean(axis=2)
    nll = np.array([float(mean.mean) for mean in lost]).reshape(shape)
    nll_se = np.array([float(mean.standard_error) for mean in lost]).reshape(shape)
    accuracy_se = np.sqrt(accuracy * (1 - accuracy) / (images - 1)) if images > 1 else np.full(shape, np.nan)
    variables: dict[str, Any] = {}

    def add(name: str, dims: Sequence[str], values: np.ndarray, errors: np.ndarray, long_name: str, units: str) -> None:
        described = {"long_name": f"standard error over images of {name}", "units": units}
        variables[name] = (dims, values, {"long_name": long_name, "units": units})
        variables[f"{name}_se"] = (dims, errors, described)

    add("accuracy", _BOTH, accuracy, accuracy_se, "share of images whose largest output is the label's", "1")
    add("nll", _BOTH, nll, nll_se, "negative log-likelihood of the label", "nats")
    said = _mean("mean_accuracy", correct.mean(axis=(0, 1)))
    if reference is not None:
        relative = (1 - correct.mean(axis=1)) / reference[:, None]  # (corruption, image)
        se = relative.std(axis=1, ddof=1) / math.sqrt(images) if images > 1 else np.full(len(types), np.nan)
        add("relative_error", _BOTH[:1], relative.mean(axis=1), se, "error over that of the reference model", "1")
        said |= _mean("mce", relative.mean(axis=0))
    # Numbered by the list of all corruptions, so that runs on different ones can be stacked.
    numbers = [ALL_CORRUPTIONS.index(name) for name in types]
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    coords: dict[str, Any] = {
        "corruption": ("corruption", numbers, {"long_name": "number of the corruption", "units": "1"}),
        "corruption_name": ("corruption", list(types), {"long_name": "kind of corruption"}),
        "group": ("corruption", [group_of[name] for name in types], {"long_name": "group of corruptions"}),
        "severity": ("severity", list(severities), {"long_name": "severity of the corruption", "units": "1"}),
    }
    return xr.Dataset(variables, coords), said


def _mean(name: str, by_image: np.ndarray) -> dict[str, float]:
    """The mean over images, with its standard error and interval; NaN where an answer is."""
    if np.isnan(by_image).any():
        return dict.fromkeys((name, f"{name}_se", f"{name}_low", f"{name}_high"), math.nan)
    mean, low, high = mean_interval(by_image)
    se = float(by_image.std(ddof=1)) / math.sqrt(len(by_image)) if len(by_image) > 1 else math.nan
    return {name: mean, f"{name}_se": se, f"{name}_low": low, f"{name}_high": high}
