"""Estimates with their uncertainty, over independent units: seeds, images or batches. No torch here."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def mean_interval(values: ArrayLike, confidence: float = 0.95) -> tuple[float, float, float]:
    """The mean of independent units with its Student t interval.

    Args:
        values: one number per unit `(unit,)`.
        confidence: of the two-sided interval.

    Returns:
        Mean, low and high; one unit has no spread, so its interval is infinite.

    Raises:
        ValueError: if there are no units, one is not finite, or the confidence is no share.
    """
    _require_confidence(confidence)
    units = finite_units(values)
    if np.ptp(units) == 0:  # summing equal numbers would round
        half_width = 0.0 if units.size > 1 else math.inf
        return float(units[0]), float(units[0]) - half_width, float(units[0]) + half_width
    half_width = t_quantile(confidence, units.size) * float(units.std(ddof=1)) / math.sqrt(units.size)
    mean = float(units.mean())
    return mean, mean - half_width, mean + half_width


def bootstrap_interval(
    values: ArrayLike,
    statistic: Callable[[np.ndarray], float],
    *,
    seed: int,
    resamples: int = 9999,
    confidence: float = 0.95,
) -> tuple[float, float, float]:
    """Any statistic of independent units with its bias-corrected and accelerated bootstrap interval.

    Args:
        values: the units along the first axis `(unit, ...)`; whole units are drawn.
        statistic: a number from resampled values, of the same shape.
        seed: of the draws.
        resamples: how many draws.
        confidence: of the two-sided interval.

    Returns:
        Statistic, low and high; one unit has no spread, so its interval is infinite.

    Raises:
        ValueError: if there are no units, one is not finite, or the confidence is no share.
    """
    from scipy.stats import bootstrap

    _require_confidence(confidence)
    units = np.asarray(values, dtype=float)
    if units.ndim == 0 or not len(units):
        raise ValueError(f"values of shape {units.shape} hold no units; give them along the first axis")
    if not np.isfinite(units).all():
        raise ValueError(f"values {units.tolist()} are not all finite; leave out what could not be measured")
    value = float(statistic(units))
    if len(units) == 1:
        return value, -math.inf, math.inf
    drawn: dict[str, Any] = {
        "data": (np.arange(len(units)),),  # whole units are drawn, whatever their shape
        "statistic": lambda index: statistic(units[index]),
        "n_resamples": resamples,
        "confidence_level": confidence,
        "vectorized": False,
    }
    for method in ("BCa", "percentile"):  # BCa has no answer where leaving out a unit changes nothing
        with np.errstate(invalid="ignore", divide="ignore"):
            interval = _quiet(bootstrap, **drawn, method=method, random_state=np.random.default_rng(seed))
        if np.isfinite([interval.low, interval.high]).all():
            break
    return value, float(interval.low), float(interval.high)


def _quiet(bootstrap: Callable[..., Any], **options: Any) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a degenerate BCa interval warns, and is then drawn again
        return bootstrap(**options).confidence_interval


def finite_units(values: ArrayLike) -> np.ndarray:
    """One finite number per independent unit, or an error."""
    units = np.asarray(values, dtype=float)
    if units.ndim != 1 or units.size == 0:
        raise ValueError(f"values have shape {units.shape}; give a list of one number per independent unit")
    if not np.isfinite(units).all():
        raise ValueError(f"values {units.tolist()} are not all finite; leave out what could not be measured")
    return units


def t_quantile(confidence: float, n: int) -> float:
    """How many standard errors of n units the two-sided interval reaches."""
    from scipy.stats import t

    _require_confidence(confidence)
    return float(t.ppf((1 + confidence) / 2, n - 1))


def _require_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} is not between 0 and 1; 95 % is 0.95")
