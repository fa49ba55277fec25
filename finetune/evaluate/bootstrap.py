"""Percentile bootstrap over items, vectorised: `{"value", "low", "high", "n"}` for any statistic of a test set.

Items (documents, examples) are resampled with replacement, never tokens: the tokens of one document are not
independent. Efron & Tibshirani, An Introduction to the Bootstrap (1993), §13.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UserError
from ..seeds import numpy_generator

_ELEMENTS = 1 << 22  # numbers of one block of resamples: 32 MiB


class Interval(TypedDict):
    """A figure with its interval. A figure that is not finite is null."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def interval(
    items: Sequence[ArrayLike],
    statistic: Callable[..., NDArray],
    *,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Bootstrap a statistic of arrays that have one entry per item.

    Arguments:
        items: arrays of shape (n,), resampled together.
        statistic: takes them with shape (R, n) and returns (R,), for example
            `lambda nats, tokens: nats.sum(-1) / tokens.sum(-1)`.
        resamples: with 0, the interval is the value alone.
    Raises:
        UserError: no item, or settings out of range.
    """
    arrays = [np.asarray(values, dtype=np.float64) for values in items]
    n = len(arrays[0])
    _check(n, resamples, confidence)
    value = statistic(*(values[None] for values in arrays))[0]
    rng = numpy_generator(seed, "bootstrap")
    block = max(1, _ELEMENTS // n)
    replicates = []
    for start in range(0, resamples, block):
        drawn = rng.integers(0, n, size=(min(block, resamples - start), n))
        replicates.append(statistic(*(values[drawn] for values in arrays)))
    return _interval(value, replicates, confidence, n)


def ratio_interval(
    numerator: ArrayLike,
    denominator: ArrayLike,
    *,
    transform: Callable[[NDArray], NDArray] | None = None,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Bootstrap Σ numerator / Σ denominator, for example nats per token over documents; then `transform` it.

    0/0 is not finite, so null.
    """

    def statistic(top: NDArray, bottom: NDArray) -> NDArray:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = top.sum(-1) / bottom.sum(-1)
            return transform(ratio) if transform else ratio

    return interval([numerator, denominator], statistic, resamples=resamples, confidence=confidence, seed=seed)


def frequency_intervals(
    kinds: ArrayLike,
    statistics: Mapping[str, Callable[[NDArray], NDArray]],
    *,
    num_kinds: int,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Bootstrap statistics that depend only on how many items there are of each kind; all see the same resamples.

    Resampling n items is drawing the counts of their kinds from a multinomial, which costs the number of kinds instead
    of n per resample.

    Arguments:
        kinds: (n,) integers in `range(num_kinds)`, for example cells of a confusion matrix.
        statistics: each takes counts (R, num_kinds) float64 and returns (R,).
    Raises:
        UserError: no item, or settings out of range.
    """
    kinds = np.asarray(kinds, dtype=np.int64)
    n = len(kinds)
    _check(n, resamples, confidence)
    counts = np.bincount(kinds, minlength=num_kinds)
    rng = numpy_generator(seed, "bootstrap")
    block = max(1, _ELEMENTS // num_kinds)
    replicates: dict[str, list[NDArray]] = {name: [] for name in statistics}
    for start in range(0, resamples, block):
        drawn = rng.multinomial(n, counts / n, size=min(block, resamples - start)).astype(np.float64)
        for name, statistic in statistics.items():
            replicates[name].append(statistic(drawn))
    whole = counts[None].astype(np.float64)
    return {
        name: _interval(statistic(whole)[0], replicates[name], confidence, n) for name, statistic in statistics.items()
    }


def _check(n: int, resamples: int, confidence: float) -> None:
    if n == 0:
        raise UserError("there is nothing to evaluate: the split has no examples")
    if resamples < 0:
        raise UserError(f"eval.bootstrap: {resamples} resamples cannot be drawn; give 0 for none, or 1000")
    if not 0.0 < confidence < 1.0:
        raise UserError(f"eval.confidence: {confidence} is not a share; give for example 0.95")


def _interval(value: float, replicates: list[NDArray], confidence: float, n: int) -> Interval:
    drawn = np.concatenate(replicates) if replicates else np.array([value])
    low = high = math.nan
    if np.isfinite(drawn).all():
        tail = (1.0 - confidence) / 2.0
        low, high = np.quantile(drawn, [tail, 1.0 - tail])
    return {"value": _finite(value), "low": _finite(low), "high": _finite(high), "n": n}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
