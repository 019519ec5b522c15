"""How noise of each band of spatial frequencies costs a model its accuracy (Park & Kim 2022, Fig. 2b)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import nn
from tqdm import tqdm

from vitprobe.calling import default_forward, described, described_batches, images_of, replace_tensor, untouched, unwrap
from vitprobe.data.band_noise import NoiseDefinition, band_noise, ring, white_spectrum
from vitprobe.names import unknown
from vitprobe.probes.answers import answers
from vitprobe.probes.base import RunningMean
from vitprobe.probes.objective import drawn
from vitprobe.results import provenance
from vitprobe.seeds import derive_seed

FREQUENCIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Centres of the published bands [pi rad/px]."""
TITLE = "Accuracy under noise of one band of frequencies"
REFERENCES = "Park & Kim 2022, How Do Vision Transformers Work?, arXiv:2202.06709, Fig. 2b"
_RMS = {"corrected": 0.2, "paper": 0.7}

_VARIABLES = {
    "accuracy": ("share of noisy images whose largest output is the label's", "1"),
    "accuracy_drop": ("accuracy on the images themselves minus that on noisy ones", "1"),
    "nll": ("negative log-likelihood of the label, noisy images", "nats"),
}


def noise_by_frequency(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    frequencies: Sequence[float] = FREQUENCIES,
    width: float = 0.1,
    rms: float | None = None,
    definition: NoiseDefinition = "corrected",
    repeats: int = 1,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Accuracy on images with noise of one band of spatial frequencies, by band.

    The noise is added to the images as they are given, after their normalisation, and nothing is clipped. It depends
    on the seed, the band and the number of the image in the pass alone, so that models are compared under the same
    noise: give them the same images in the same order, in batches of any size. The drop is taken image by image; its
    standard error is that of paired differences.

    Args:
        model: any eager PyTorch vision model, also wrapped.
        batches: `(images, labels)` tuples, or mappings with `labels`; labels are class numbers.
        frequencies: centres of the bands, the larger one of the two axes' frequencies [pi rad/px]; 1 is the highest.
        width: of a band [pi rad/px].
        rms: strength of the noise in the units of the normalised images, see `definition`. Unless given, 0.2 for
            `"corrected"` and 0.7 for `"paper"`, the amplitude in a snippet by the authors; that of the published
            figure is not known.
        definition: `"corrected"` gives every band noise of the same root mean square, `rms`; `"paper"` cuts each band
            out of white noise of amplitude `rms` and keeps the real part. The published bands so have unequal power
            (at 224 px and 0.7, root mean squares from 0.11 at 0.1 pi to 0.33 at 0.9 pi with the code's width of
            0.127), which favours models that look at low frequencies.
        repeats: draws of noise for every image, over which it is averaged before anything else.
        seed: of the noise.
        forward: `forward(model, batch)` for models that are called in another way.
        progress: whether a terminal shows a progress bar.

    Returns:
        `accuracy`, `accuracy_drop` and `nll` (frequency), each with its standard error over images, and `rms`, the
        root mean square that the noise had. The attributes hold the same of the images without noise,
        `clean_accuracy` to `clean_nll_se`. Where outputs are not numbers, neither is the accuracy.

    Raises:
        ValueError: if there are no batches or no class numbers, images differ in size, no frequency of the images
            lies in a band, or an option is out of range.
    """
    if repeats < 1 or not len(frequencies):
        raise ValueError(f"repeats={repeats} of {len(frequencies)} frequencies: give at least one of both.")
    if definition not in _RMS:
        raise unknown("definition", definition, _RMS)
    bare, call = unwrap(model), forward or default_forward
    strength = _RMS[definition] if rms is None else rms
    clean = {name: RunningMean() for name in ("accuracy", "nll")}
    noisy = [{name: RunningMean() for name in _VARIABLES} for _ in frequencies]
    powers = [RunningMean() for _ in frequencies]
    shape: tuple[int, ...] | None = None
    with untouched(bare):
        for batch in tqdm(drawn(batches, bare), desc="noise", unit="batch", disable=None if progress else True):
            images = images_of(batch)
            size, channels, height, columns = images.shape
            if shape is None:
                shape = (channels, height, columns)
                for frequency in frequencies:  # a band that the images lack is said before anything is computed
                    ring((height, columns), frequency, width=width, definition=definition)
            elif shape != (channels, height, columns):
                raise ValueError(
                    f"images of {(channels, height, columns)} after images of {shape} (channel, y, x): bands are not "
                    "comparable between sizes; measure each size by itself."
                )
            correct, nll = answers(bare, batch, call)
            spectra = [
                white_spectrum(
                    (size, channels, height, columns),
                    seed=derive_seed(seed, "repeat", repeat),
                    first=clean["nll"].count,
                    definition=definition,
                    device=images.device,
                )
                for repeat in range(repeats)
            ]
            for frequency, means, power in zip(frequencies, noisy, powers, strict=True):
                results = []
                for spectrum in spectra:
                    noise, achieved = band_noise(spectrum, frequency, rms=strength, width=width, definition=definition)
                    results.append(answers(bare, replace_tensor(batch, images, images + noise.to(images.dtype)), call))
                    power.add(achieved.square())
                right, lost = (torch.stack(each).mean(0) for each in zip(*results, strict=True))
                for name, values in zip(_VARIABLES, (right, correct - right, lost), strict=True):
                    means[name].add(values)
            clean["accuracy"].add(correct)
            clean["nll"].add(nll)
    config = {
        "probe": "noise_by_frequency",
        "frequencies": [float(frequency) for frequency in frequencies],
        "width": width,
        "rms": strength,
        "definition": definition,
        "repeats": repeats,
        "seed": seed,
    }
    return _dataset(noisy, powers, config).assign_attrs(
        provenance(
            title=TITLE,
            references=REFERENCES,
            config=config,
            device=next((str(p.device) for p in bare.parameters()), "cpu"),
            seed=seed,
            probe="noise_by_frequency",
            definition=definition,
            width=width,
            repeats=repeats,
            images=clean["nll"].count,
            **described(bare),
            **described_batches(batches),
            **_statistics(clean),
        )
    )


def _statistics(clean: Mapping[str, RunningMean]) -> dict[str, float]:
    said: dict[str, float] = {}
    for name, mean in clean.items():
        said |= {f"clean_{name}": float(mean.mean), f"clean_{name}_se": float(mean.standard_error)}
    return said


def _dataset(
    noisy: Sequence[Mapping[str, RunningMean]],
    powers: Sequence[RunningMean],
    config: Mapping[str, Any],
) -> xr.Dataset:
    variables: dict[str, Any] = {}
    for name, (long_name, units) in _VARIABLES.items():
        for suffix, attribute in (("", "mean"), ("_se", "standard_error")):
            values = [float(getattr(means[name], attribute)) for means in noisy]
            described = f"standard error over images of {name}" if suffix else long_name
            variables[name + suffix] = ("frequency", values, {"long_name": described, "units": units})
    strength = np.sqrt([float(power.mean) for power in powers])
    variables["rms"] = (
        "frequency",
        strength,
        {"long_name": "root mean square of the noise, in units of the normalised images", "units": "1"},
    )
    axis = {"long_name": "centre of the band, the larger one of both axes' frequencies", "units": "pi rad/px"}
    return xr.Dataset(variables, coords={"frequency": ("frequency", np.asarray(config["frequencies"], float), axis)})
