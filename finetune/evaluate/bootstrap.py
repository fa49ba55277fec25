"""Percentile bootstrap over examples, vectorised: `{"value", "low", "high", "n"}` for any statistic of a test set.

Examples (or documents) are resampled with replacement, never tokens: the tokens of one document are not independent.
Efron & Tibshirani, An Introduction to the Bootstrap (1993), §13.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UserError
from ..seeds import numpy_generator

_ELEMENTS = 1 << 22  # values of one block of resamples: 32 MiB


class BootstrapInterval(TypedDict):
    """Metric with its interval. A value that is not finite is null; a single row, or no resample, has no interval."""

    value: float | None
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class ResampledMetric:
    """Metric of a split that can be recomputed on any subset or resample of its rows, and compared with another
    model's."""

    rows: NDArray[np.int64]
    """(n,) indices, among the examples of the split, of the rows that it covers, ascending."""
    statistic: Callable[[NDArray[np.int64]], NDArray]
    """Function that takes (R, m) indices into `rows` and returns (R,)."""
    share: bool = False
    """True if it is the fraction of rows that meet a condition (`exact_share_interval`)."""

    @classmethod
    def over(
        cls,
        items: Sequence[ArrayLike],
        statistic: Callable[..., NDArray],
        rows: ArrayLike | None = None,
        *,
        share: bool = False,
    ) -> ResampledMetric:
        """Build from the arguments of `bootstrap_interval`: arrays of n entries, and a statistic of them with shape (R,
        m)."""
        arrays = [np.asarray(values, dtype=np.float64) for values in items]
        indices = np.arange(len(arrays[0])) if rows is None else np.asarray(rows, dtype=np.int64)
        return cls(indices, lambda index: statistic(*(values[index] for values in arrays)), share)

    def renumbered(self, rows: NDArray[np.int64], order: NDArray[np.int64]) -> ResampledMetric:
        """Restrict to its rows numbered `order`, whose indices are now `rows` (ascending in that order)."""
        return ResampledMetric(rows[order], lambda index: self.statistic(order[index]), self.share)


def group_interval(
    figure: ResampledMetric,
    groups: Sequence[NDArray[np.int64]],
    base: ResampledMetric | None = None,
    *,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> BootstrapInterval | None:
    """Bootstrap `figure` over the rows at the indices `groups[0]` of its split; with several groups, its mean over
    them.

    base: subtract this metric of another model, computed on the same resamples of the rows that both cover.
    Returns None if a group has no such row. A single row has no interval.
    """
    _check_settings(1, resamples, confidence)
    values, replicates, total = [], [], 0
    for number, group in enumerate(groups):
        rows = np.intersect1d(figure.rows, group)
        rows = rows if base is None else np.intersect1d(rows, base.rows)
        if not len(rows):
            return None
        ours = np.flatnonzero(np.isin(figure.rows, rows))
        theirs = ours if base is None else np.flatnonzero(np.isin(base.rows, rows))

        def difference(index: NDArray, ours: NDArray = ours, theirs: NDArray = theirs) -> NDArray:
            return figure.statistic(ours[index]) - (0.0 if base is None else base.statistic(theirs[index]))

        value, resampled = _resample(difference, len(rows), resamples, seed, *([str(number)] if number else []))
        values.append(value)
        replicates.append(resampled)
        total += len(rows)
    share = figure.share and base is None and len(groups) == 1
    return _percentile_interval(float(np.mean(values)), np.mean(replicates, axis=0), confidence, total, share=share)


def _resample(
    statistic: Callable[[NDArray], NDArray], n: int, resamples: int, seed: int, *stream: str
) -> tuple[float, NDArray]:
    """Return the statistic, which takes (R, n) indices, of all n examples, and of each resample (the former if there
    are none)."""
    value = statistic(np.arange(n)[None])[0]
    rng = numpy_generator(seed, "bootstrap", *stream)
    block = max(1, _ELEMENTS // n)
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    replicates = [statistic(rng.integers(0, n, size=(size, n))) for size in sizes]
    return value, np.concatenate(replicates) if replicates else np.array([value])


def exact_share_interval(interval: BootstrapInterval, confidence: float) -> BootstrapInterval:
    """Replace the interval of a fraction that is 0 or 1, for which all resamples are equal.

    The new interval is the one that n such examples leave possible: 1 − (α/2)^(1/n) from the end (Clopper & Pearson,
    Biometrika 26, 1934). Any other interval is returned unchanged, and so is that of a single row, which has none.
    """
    value, n = interval["value"], interval["n"]
    if value is None or interval["low"] is None or value not in (0.0, 1.0):
        return interval
    width = 1.0 - ((1.0 - confidence) / 2.0) ** (1.0 / n)
    low, high = (0.0, width) if value == 0.0 else (1.0 - width, 1.0)
    return {"value": value, "low": low, "high": high, "n": n}


def bootstrap_interval(
    items: Sequence[ArrayLike],
    statistic: Callable[..., NDArray],
    *,
    share: bool = False,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> BootstrapInterval:
    """Bootstrap a statistic of arrays that have one entry per example.

    items: arrays of shape (n,), resampled together.
    statistic: takes them with shape (R, n) and returns (R,), for example `lambda nats, tokens: nats.sum(-1) /
    tokens.sum(-1)`.
    share: it is the fraction of examples that meet a condition (`exact_share_interval`).
    resamples: with 0, there is no interval.
    Raises UserError: no example, or settings out of range.
    """
    metric = ResampledMetric.over(items, statistic)
    n = len(metric.rows)
    _check_settings(n, resamples, confidence)
    value, replicates = _resample(metric.statistic, n, resamples, seed)
    return _percentile_interval(value, replicates, confidence, n, share=share)


def ratio_interval(
    numerator: ArrayLike,
    denominator: ArrayLike,
    *,
    transform: Callable[[NDArray], NDArray] | None = None,
    **options: Any,
) -> BootstrapInterval:
    """Bootstrap Σ numerator / Σ denominator, for example nats per token over documents; then `transform` it.

    0/0 is not finite, so null. options: keyword arguments of `bootstrap_interval`.
    """
    return bootstrap_interval([numerator, denominator], ratio_statistic(transform), **options)


def ratio_statistic(transform: Callable[[NDArray], NDArray] | None = None) -> Callable[[NDArray, NDArray], NDArray]:
    """Return a statistic that computes Σ top / Σ bottom along the last dim, then `transform`."""

    def statistic(top: NDArray, bottom: NDArray) -> NDArray:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = top.sum(-1) / bottom.sum(-1)
            return transform(ratio) if transform else ratio

    return statistic


def frequency_intervals(
    kinds: ArrayLike,
    statistics: Mapping[str, Callable[[NDArray], NDArray]],
    *,
    num_kinds: int,
    shares: Collection[str] = (),
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    figures: dict[str, ResampledMetric] | None = None,
) -> dict[str, BootstrapInterval]:
    """Bootstrap statistics that depend only on the number of examples of each kind; all use the same resamples.

    Resampling n examples is equivalent to drawing the counts of their kinds from a multinomial, which costs the number
    of kinds instead of n per resample.

    kinds: (n,) integers in `range(num_kinds)`, for example cells of a confusion matrix.
    statistics: each takes counts (R, num_kinds) float64 and returns (R,).
    shares: names of those that are the fraction of examples that meet a condition (`exact_share_interval`).
    figures: receives each.
    Raises UserError: no example, or settings out of range.
    """
    kinds = np.asarray(kinds, dtype=np.int64)
    n = len(kinds)
    if figures is not None:

        def count_kinds(index: NDArray[np.int64]) -> NDArray:
            shifted = kinds[index] + num_kinds * np.arange(len(index))[:, None]
            counts = np.bincount(shifted.ravel(), minlength=num_kinds * len(index))
            return counts.reshape(len(index), num_kinds).astype(np.float64)

        for name, statistic in statistics.items():
            resampled = lambda index, statistic=statistic: statistic(count_kinds(index))  # noqa: E731
            figures[name] = ResampledMetric(np.arange(n), resampled, name in shares)
    _check_settings(n, resamples, confidence)
    counts = np.bincount(kinds, minlength=num_kinds)
    rng = numpy_generator(seed, "bootstrap")
    block = max(1, _ELEMENTS // num_kinds)
    replicates: dict[str, list[NDArray]] = {name: [] for name in statistics}
    for start in range(0, resamples, block):
        weights = rng.multinomial(n, counts / n, size=min(block, resamples - start)).astype(np.float64)
        for name, statistic in statistics.items():
            replicates[name].append(statistic(weights))
    intervals = {}
    for name, statistic in statistics.items():
        value = statistic(counts[None].astype(np.float64))
        samples = np.concatenate(replicates[name] or [value])
        intervals[name] = _percentile_interval(value[0], samples, confidence, n, share=name in shares)
    return intervals


def _check_settings(n: int, resamples: int, confidence: float) -> None:
    if n == 0:
        raise UserError("there is nothing to evaluate: the split has no examples")
    if resamples < 0:
        raise UserError(f"eval.bootstrap: {resamples} resamples cannot be drawn; give 0 for none, or 1000")
    if not 0.0 < confidence < 1.0:
        raise UserError(f"eval.confidence: {confidence} is not a share; give for example 0.95")


def _percentile_interval(
    value: float, replicates: NDArray, confidence: float, n: int, *, share: bool
) -> BootstrapInterval:
    low = high = math.nan
    if n > 1 and len(replicates) > 1 and np.isfinite(replicates).all() and (share or np.ptp(replicates) > 0):
        tail = (1.0 - confidence) / 2.0
        low, high = np.quantile(replicates, [tail, 1.0 - tail])
    finite = [float(x) if math.isfinite(x) else None for x in (value, low, high)]
    interval: BootstrapInterval = {"value": finite[0], "low": finite[1], "high": finite[2], "n": n}
    return exact_share_interval(interval, confidence) if share else interval
