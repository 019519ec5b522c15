"""Whether a model is right as often as it is sure: reliability, ECE, NLL, Brier score, temperature scaling."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from numpy.polynomial.chebyshev import chebder, chebfit, chebpts2, chebval
from scipy.optimize import brentq
from scipy.stats import binomtest
from torch import Tensor, nn

from vitprobe.intervals import t_quantile
from vitprobe.names import unknown
from vitprobe.probes.base import FeatureProbe, RunningMean
from vitprobe.seeds import derive_seed

Definition = Literal["corrected", "paper"]

SURE = 0.9
"""From which confidence on (exclusive) the published metrics call a prediction confident."""

COLDEST, HOTTEST = 1 / 20, 20.0
"""Between which temperatures the best one is looked for."""

# A function of the logarithm of the temperature is known from its values at this many Chebyshev nodes. With 64, the
# interpolated NLL and confidence are within 1e-4 of the exact ones for the least smooth logits (a thousand classes
# that are all equally far behind) and within 1e-6 for normally distributed ones.
NODES = 64
_NODES = chebpts2(NODES)
_COEFFICIENTS = chebfit(_NODES, np.eye(NODES), NODES - 1)
# What a place of 1 is in the logarithm of the temperature.
_SPAN = math.log(HOTTEST / COLDEST) / 2
# Slopes smaller than this are rounding: the NLL does not depend on the temperature there [nats; where a slope is above
# 1, as a share of the steepest].
FLAT = 1e-10

_BY_BIN = {
    "bin_accuracy": "share of the bin's images whose largest logit is the label's",
    "bin_confidence": "mean confidence of the bin's images",
    "share": "share of all images that are in the bin",
    "share_correct": "share of all images that are in the bin and predicted correctly",
    "share_wrong": "share of all images that are in the bin and predicted wrongly",
}
_OVERALL = {
    "top1": ("share of images whose largest logit is the label's", "1"),
    "top5": ("share of images whose label is among the five largest logits", "1"),
    "nll": ("negative log-likelihood", "nats"),
    "brier": ("Brier score, summed over classes", "1"),
    "entropy": ("entropy of the predicted distribution", "nats"),
    "acc_90": ("accuracy of predictions with confidence above 0.9", "1"),
    "unc_90": ("share of wrong predictions with confidence up to 0.9", "1"),
    "freq_90": ("share of predictions with confidence above 0.9", "1"),
    "ece": ("expected calibration error: mean over images of |confidence - accuracy| of their bin", "1"),
    "ecse": ("signed calibration error, > 0 over-confident: mean of confidence - accuracy of their bin", "1"),
    "temperature": (f"temperature of the smallest NLL, from {COLDEST:g} to {HOTTEST:g}", "1"),
    "nll_scaled": ("negative log-likelihood at that temperature", "nats"),
    "ece_scaled": ("expected calibration error at that temperature", "1"),
    "ecse_scaled": ("signed calibration error at that temperature", "1"),
}
_ENDINGS = {
    "_se": "standard error over images of",
    "_low": "low end of the 95 % interval over images of",
    "_high": "high end of the 95 % interval over images of",
}


class Calibration(FeatureProbe):
    """Whether a model is right as often as it is sure (Guo et al. 2017; Park & Kim 2022).

    The confidence of a prediction is its largest probability. Images are put into equal bins of confidence; in each
    bin the accuracy is compared with the mean confidence. Their difference, weighted by the share of images, is the
    ECE where it is summed without and the ECSE where it is summed with its sign. Sampling alone gives an ECE above
    zero, all the more with few images or many bins. Its interval takes that off: that of the basic bootstrap, which
    mirrors the resamples at the estimate, stretched to the estimate where it ends below. It covers the true ECE of a
    model that is calibrated in every bin, which is 0, in half to two thirds of samples only, and that of others in
    about nine of ten: an interval that leaves out 0 is no proof of miscalibration. A percentile interval, which adds
    the excess once more, never covers the former.

    The targets are class numbers or soft. A soft target counts as itself in the NLL and in the Brier score, and as
    its largest class where predictions are right or wrong.

    The temperature that divides the logits for the smallest NLL is fitted to the same images that it is judged on:
    one parameter, which lowers the NLL by about 1/(2 images). Its interval is that of an M-estimator, symmetric in
    the logarithm; it is not-a-number at the ends of the range, and where the NLL does not depend on the temperature
    (which is then 1). The intervals of ECE and ECSE after scaling hold the temperature fixed.

    Held in memory: sums, and of every image its confidence at the 64 temperatures between which the chosen one is
    interpolated, 0.3 kB whatever the number of classes.

    Args:
        bins: how many.
        definition: of the bins. `"corrected"` counts an image, and its confidence, in the bin above whose lower edge
            and up to whose upper edge its confidence is. `"paper"` does as the published code: it computes the
            confidence in single precision, counts so too, but adds the confidence to the bin from whose lower edge on
            it is, so that a confidence of exactly 1 is counted and not added. A network that is always sure and
            always wrong then has an ECE of 0. Nothing but the bins, and what is above 0.9, depends on it.
        resamples: of the bootstrap over images.
        seed: of its draws.

    Raises:
        ValueError: if an option is out of range.
    """

    name = "calibration"
    title = "Calibration: confidence against accuracy"
    references = (
        "Guo et al. 2017, On Calibration of Modern Neural Networks, arXiv:1706.04599; "
        "Park & Kim 2022, How Do Vision Transformers Work?, arXiv:2202.06709"
    )
    reads = "output"
    summed = ("_soft", "_means", "_curve", "_slope", "_confidence", "_correct", "_log_confidences")

    def __init__(
        self, bins: int = 10, definition: Definition = "corrected", *, resamples: int = 1000, seed: int = 0
    ) -> None:
        for what, given, least in (("bins", bins, 1), ("resamples", resamples, 2)):
            if isinstance(given, bool) or not isinstance(given, int) or given < least:
                raise ValueError(f"{what}={given!r} is not a whole number from {least} on.")
        if definition not in ("corrected", "paper"):
            raise unknown("definition", definition, ("corrected", "paper"))
        self.bins = bins
        self.definition = definition
        self.resamples = resamples
        self.seed = seed

    def start(self) -> None:
        """Forget everything that was measured."""
        self._batches = 0
        self._soft = False
        self._classes = 0
        self._means = {name: RunningMean() for name in ("nll", "brier", "entropy", "top5")}
        self._curve, self._slope = RunningMean(), RunningMean()
        self._confidence: list[np.ndarray] = []
        self._correct: list[np.ndarray] = []
        self._log_confidences: list[np.ndarray] = []

    def update(self, where: Any, what: Tensor) -> None:
        """Add the targets and logits of a batch."""
        logits = _checked_logits(what, f"calibration: batch {self._batches}")
        targets = _as_soft(where, logits, f"calibration: batch {self._batches}")
        if self._classes not in (0, logits.shape[1]):
            raise ValueError(
                f"calibration: batch {self._batches} has logits of {logits.shape[1]} classes, those before had "
                f"{self._classes}: measure them one after the other."
            )
        self._classes = logits.shape[1]
        self._soft |= where.is_floating_point()
        self._batches += 1

        logarithms = logits.double().log_softmax(1)
        probabilities = logarithms.exp()
        label = targets.argmax(1)
        self._means["nll"].add(-(targets * logarithms).sum(1))
        self._means["brier"].add((probabilities - targets).square().sum(1))
        self._means["entropy"].add(-(probabilities * logarithms).sum(1))
        if self._classes > 5:
            self._means["top5"].add((logits.topk(5, 1).indices == label[:, None]).any(1))
        if self.definition == "paper":
            probabilities = logits.float().softmax(1)
        self._confidence.append(probabilities.amax(1).double().cpu().numpy())
        self._correct.append((logits.argmax(1) == label).cpu().numpy())

        curve, slope, log_confidences = _at_nodes(logarithms, targets)
        self._curve.add(curve)
        self._slope.add(slope)
        self._log_confidences.append(log_confidences.float().cpu().numpy())

    def dataset(self, places: Sequence[Any]) -> xr.Dataset:
        """The reliability diagram along `bin`, and the numbers for all images."""
        confidence, correct = np.concatenate(self._confidence), np.concatenate(self._correct)
        by_bin = self._reliability(confidence, correct)
        overall = self._overall(confidence, correct) | self._scaled(correct)
        edges = np.linspace(0, 1, self.bins + 1)
        return xr.Dataset(
            {name: _variable(name, values) for name, values in (by_bin | overall).items()},
            coords={
                "bin": ("bin", np.arange(self.bins), {"long_name": "bin of confidence", "units": "1"}),
                "bin_low": ("bin", edges[:-1], {"long_name": "confidence above which the bin is", "units": "1"}),
                "bin_high": ("bin", edges[1:], {"long_name": "confidence up to which the bin is", "units": "1"}),
            },
            attrs={"targets": "soft" if self._soft else "class numbers"},
        )

    def _reliability(self, confidence: np.ndarray, correct: np.ndarray) -> dict[str, np.ndarray]:
        """Accuracy, confidence and share of every bin."""
        counted, summed = _bins_of(confidence, self.bins, self.definition)
        count = np.bincount(counted, minlength=self.bins)
        right = np.bincount(counted, correct, self.bins)
        found: dict[str, np.ndarray] = {}
        for name, hits, of in (
            ("bin_accuracy", right, count),
            ("share", count, len(correct)),
            ("share_correct", right, len(correct)),
            ("share_wrong", count - right, len(correct)),
        ):
            found[name], found[f"{name}_se"] = _proportion(hits, of)
        wilson = [_wilson(int(hits), int(of)) for hits, of in zip(right, count, strict=True)]
        found["bin_accuracy_low"], found["bin_accuracy_high"] = np.transpose(wilson)

        with np.errstate(invalid="ignore", divide="ignore"):  # a bin without images has no confidence
            mean = np.bincount(summed, confidence, self.bins + 1)[: self.bins] / count
            added = np.where(summed == counted, confidence, 0.0)
            squares = np.bincount(counted, (added - mean[counted]) ** 2, self.bins)
            found["bin_confidence_se"] = np.sqrt(squares / np.where(count > 1, count - 1, np.nan) / count)
        found["bin_confidence"] = np.where(count, mean, np.nan)
        return found

    def _overall(self, confidence: np.ndarray, correct: np.ndarray) -> dict[str, float]:
        """The numbers for all images, at the model's own temperature."""
        found: dict[str, float] = {}
        for name, hits in (
            ("top1", correct),
            ("acc_90", correct[confidence > SURE]),
            ("unc_90", confidence[~correct] <= SURE),
            ("freq_90", confidence > SURE),
        ):
            found[name], found[f"{name}_se"] = map(float, _proportion(hits.sum(), len(hits)))
        for name, running in self._means.items():
            if running.count:
                found[name], found[f"{name}_se"] = float(running.mean), float(running.standard_error)
        return found | self._errors(confidence, correct)

    def _scaled(self, correct: np.ndarray) -> dict[str, float]:
        """The best temperature, and the numbers at it."""
        images = len(correct)
        place, inside = _lowest(self._slope.mean)
        value = _weights(place)
        # An M-estimator's variance: that of the mean slope over the squared curvature.
        half_width = math.nan
        if inside and images > 1:
            curvature = float(self._slope.mean @ _weights(place, 1))
            half_width = t_quantile(0.95, images) * _error_at(self._slope, value) / curvature
        confidence = np.exp(np.minimum(np.concatenate(self._log_confidences) @ value, 0.0))
        if self.definition == "paper":
            confidence = confidence.astype(np.float32).astype(np.float64)
        return {
            "temperature": _temperature(place),
            "temperature_low": _temperature(place - half_width),
            "temperature_high": _temperature(place + half_width),
            "nll_scaled": float(self._curve.mean @ value),
            "nll_scaled_se": _error_at(self._curve, value),
            **self._errors(confidence, correct, "_scaled"),
        }

    def _errors(self, confidence: np.ndarray, correct: np.ndarray, ending: str = "") -> dict[str, float]:
        """ECE and ECSE with their intervals, whole images being drawn; the ending is that of their names."""
        images = len(correct)
        columns = (*_bins_of(confidence, self.bins, self.definition), confidence, correct)

        def both(drawn: Any) -> tuple[float, float]:
            gaps = _gaps(*(column[drawn] for column in columns), bins=self.bins)
            return float(np.abs(gaps).sum()), float(gaps.sum())

        rng = np.random.default_rng(derive_seed(self.seed, "calibration"))
        draws = np.array([both(rng.integers(0, images, images)) for _ in range(self.resamples)])
        found: dict[str, float] = {}
        for error, estimate, drawn, least in zip(("ece", "ecse"), both(slice(None)), draws.T, (0, -1), strict=True):
            name = error + ending
            low, high = 2 * estimate - np.quantile(drawn, [0.975, 0.025])
            # With few images the excess that is taken off can be more than the interval is wide.
            low, high = np.clip([min(low, estimate), max(high, estimate)], least, 1)
            found |= {name: estimate, f"{name}_low": float(low), f"{name}_high": float(high)}
            if images == 1:  # one image has no spread
                found[f"{name}_low"] = found[f"{name}_high"] = math.nan
        return found

    def config(self) -> dict[str, Any]:
        """The options that the numbers depend on."""
        return {"bins": self.bins, "definition": self.definition, "resamples": self.resamples, "seed": self.seed}


def calibration(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    bins: int = 10,
    definition: Definition = "corrected",
    resamples: int = 1000,
    seed: int = 0,
    **options: Any,
) -> xr.Dataset:
    """Whether a model is right as often as it is sure (Guo et al. 2017; Park & Kim 2022); see `Calibration`.

    Args:
        model: any eager PyTorch model that gives logits `(image, class)`.
        batches: images with targets: `(images, targets)`, or mappings with `labels`.
        bins: how many bins of confidence.
        definition: of the bins, `"corrected"` or `"paper"`.
        resamples: of the bootstrap over images.
        seed: of its draws.
        **options: `forward`, `group` and `progress` of `probe`.

    Returns:
        Along `bin`, with the edges `bin_low` and `bin_high`: `bin_accuracy`, `bin_confidence`, and the confidence
        histogram `share`, `share_correct`, `share_wrong`. For all images: `top1`, `top5` (of more than five classes),
        `nll`, `brier`, `entropy`, `acc_90`, `unc_90`, `freq_90`, `ece`, `ecse`, and at the best `temperature`
        `nll_scaled`, `ece_scaled`, `ecse_scaled`. Each has its standard error (`_se`) or interval (`_low`, `_high`).

    Raises:
        ValueError: if there are no targets, logits are not finite, or an option is out of range.
    """
    return Calibration(bins, definition, resamples=resamples, seed=seed).run(model, batches, **options)


# --- what comes in ----------------------------------------------------------------------------------


def _checked_logits(logits: Tensor, batch: str) -> Tensor:
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"{batch} has an output of {tuple(logits.shape)}, not (image, class) with two classes or more: give "
            "forward=lambda model, batch: ... that returns such logits."
        )
    if wrong := int((~logits.isfinite()).any(1).sum()):
        raise ValueError(
            f"{batch} has logits that are not finite, in {wrong} of {len(logits)} images: look at its images and, in "
            "half precision, at the range of the numbers."
        )
    return logits


def _as_soft(targets: Any, logits: Tensor, batch: str) -> Tensor:
    """Targets of either kind as `(image, class)`, in double precision, on the device of the logits."""
    images, classes = logits.shape
    given = f"{targets.dtype} of {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
    wanted = f"{batch} has targets of {given}: give class numbers ({images},), or soft targets ({images}, {classes})"
    if not isinstance(targets, Tensor):
        raise ValueError(f"{wanted} as a tensor.")
    targets = targets.detach().to(logits.device)
    if targets.shape == (images,) and not (targets.is_floating_point() or targets.dtype == torch.bool):
        if targets.min() < 0 or targets.max() >= classes:
            raise ValueError(
                f"{batch} has class numbers from {int(targets.min())} to {int(targets.max())}, the model's {classes} "
                f"classes are 0 to {classes - 1}: leave other images out."
            )
        return F.one_hot(targets.long(), classes).double()
    if targets.shape != (images, classes) or not targets.is_floating_point():
        raise ValueError(f"{wanted} of floating point.")
    soft, total = targets.double(), targets.double().sum(1, keepdim=True)
    # Half precision, which a model may have cast them to, is off by half a percent.
    if not ((soft >= 0).all() and ((total - 1).abs() < 0.02).all()):
        raise ValueError(f"{batch} has soft targets that are no distributions: give shares that sum to 1 in each row.")
    return soft / total


# --- temperature ------------------------------------------------------------------------------------


def _weights(place: float, derivative: int = 0) -> np.ndarray:
    """What interpolates the values at the nodes, or a derivative by the place, as `values @ weights`.

    Args:
        place: the logarithm of the temperature, from -1 at the coldest to 1 at the hottest.
        derivative: its order.

    Returns:
        `(node,)`.
    """
    return np.asarray(chebval(place, chebder(_COEFFICIENTS, derivative)))


def _temperature(place: float) -> float:
    return math.sqrt(COLDEST * HOTTEST) * math.exp(_SPAN * place)


def _at_nodes(logarithms: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NLL, its slope by the place, and logarithm of the confidence, at the temperature of every node.

    Args:
        logarithms: of the probabilities `(image, class)`.
        targets: soft targets `(image, class)`.

    Returns:
        All three `(image, node)`.
    """
    behind = logarithms - logarithms.amax(1, keepdim=True)
    expected = (targets * behind).sum(1)
    curves, slopes, log_confidences = [], [], []
    for node in _NODES:
        inverse = 1 / _temperature(node)
        # The largest is 0: nothing overflows, and the sums are 1 at least.
        weights = (behind * inverse).exp_()
        total = weights.sum(1)
        log_confidences.append(-total.log())
        curves.append(-log_confidences[-1] - inverse * expected)
        slopes.append((expected - weights.mul_(behind).sum(1) / total) * (inverse * _SPAN))
    return torch.stack(curves, 1), torch.stack(slopes, 1), torch.stack(log_confidences, 1)


def _lowest(slope: np.ndarray) -> tuple[float, bool]:
    """Where the slope `(node,)` of the mean NLL is zero, and whether that is inside the range."""
    # The NLL is convex in the inverse temperature, so the slope changes its sign at most once.
    coldest, hottest = slope[[0, -1]] / max(1.0, np.abs(slope).max())
    if max(abs(coldest), abs(hottest)) < FLAT:
        return 0.0, False
    if coldest > -FLAT:
        return -1.0, False
    if hottest < FLAT:
        return 1.0, False
    return float(brentq(lambda place: float(slope @ _weights(place)), -1.0, 1.0, xtol=1e-12)), True


def _error_at(running: RunningMean, weights: np.ndarray) -> float:
    """The standard error of the interpolated mean: variances are as smooth in the temperature as means."""
    return math.sqrt(max(float(running.standard_error**2 @ weights), 0.0)) if running.count > 1 else math.nan


# --- bins -------------------------------------------------------------------------------------------


def _bins_of(confidence: np.ndarray, bins: int, definition: Definition) -> tuple[np.ndarray, np.ndarray]:
    """The bin in which each image is counted, and the one to which its confidence is added (`bins` for none)."""
    edges = np.linspace(0, 1, bins + 1)
    counted = np.searchsorted(edges, confidence, side="left") - 1
    return counted, counted if definition == "corrected" else np.searchsorted(edges, confidence, side="right") - 1


def _gaps(
    counted: np.ndarray, summed: np.ndarray, confidence: np.ndarray, correct: np.ndarray, *, bins: int
) -> np.ndarray:
    """Confidence minus accuracy of every bin times its share of the images; nothing where no image is counted."""
    total = np.bincount(summed, confidence, bins + 1)[:bins]
    right = np.bincount(counted, correct, bins)
    return np.where(np.bincount(counted, minlength=bins), total - right, 0.0) / len(counted)


def _proportion(hits: np.ndarray | float, of: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """A share and its binomial standard error; not-a-number of nothing, and the error of one."""
    of = np.asarray(of, dtype=float)
    share = hits / np.where(of > 0, of, np.nan)
    return share, np.sqrt(share * (1 - share) / np.where(of > 1, of - 1, np.nan))


def _wilson(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, which is wide where images are few, also at 0 and 1."""
    if not of:
        return math.nan, math.nan
    interval = binomtest(hits, of).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


# --- variables --------------------------------------------------------------------------------------


def _variable(name: str, values: np.ndarray | float) -> tuple[tuple[str, ...], Any, dict[str, str]]:
    """A number for all images, or one for each bin, with its description and that of its uncertainty."""
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), "")
    stem = name.removesuffix(ending)
    long_name, units = (_BY_BIN[stem], "1") if stem in _BY_BIN else _OVERALL[stem]
    attributes = {"long_name": f"{_ENDINGS[ending]} {stem}" if ending else long_name, "units": units}
    return ("bin",) * np.ndim(values), values, attributes
