"""Intervals for few seeds: Student's t on means and on seed-paired differences. No heavy imports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Interval:
    """Mean with its two-sided interval; `low` and `high` are None below two values (no spread to estimate)."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def excludes_zero(self) -> bool:
        """True if the interval is entirely on one side of zero. That of equal values has no width and excludes nothing,
        as in `paired_p`."""
        width = 0.0 if self.low is None or self.high is None else self.high - self.low
        return width > 1e-9 * abs(self.value) and (self.low or 0.0) * (self.high or 0.0) > 0


def t_quantile(p: float, df: int) -> float:
    """Return the quantile of Student's t with `df` degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(df, p))


def t_interval(
    values: Sequence[float], *, confidence: float = 0.95, bounds: tuple[float, float] | None = None
) -> Interval:
    """Return the mean of `values` ± t·s/√n, the exact interval for independent Gaussian values.

    bounds: possible range of the mean, such as (0, 1) for a share; clipping the interval to it costs no coverage.
    Raises ValueError for no values or a value that is not finite.
    """
    n = len(values)
    if n == 0:
        raise ValueError("t_interval needs at least one value")
    if not all(math.isfinite(v) for v in values):
        raise ValueError("t_interval needs finite values")
    mean, sd = _mean_and_sd(values)
    if n == 1:
        return Interval(mean, None, None, 1)
    half = t_quantile(0.5 + confidence / 2, n - 1) * sd / math.sqrt(n)
    low, high = bounds or (-math.inf, math.inf)
    return Interval(mean, max(mean - half, low), min(mean + half, high), n)


def paired_difference(ours: Mapping[Any, float], base: Mapping[Any, float]) -> Interval | None:
    """Return the 95% t-interval of `ours − base` over the keys (seeds) that both have; None if they share none. Pairing
    removes what a seed does to both (subset, order, initialisation), which is most of the spread."""
    shared = sorted(set(ours) & set(base), key=repr)
    return t_interval([ours[k] - base[k] for k in shared]) if shared else None


def paired_p(differences: Sequence[float]) -> float | None:
    """Return the two-sided p of a paired t-test; None below two differences, or if all are equal but not zero.

    The test divides by their spread: without any it has no p, and 0 would claim a certainty that a few equal values do
    not give. Differences that are all zero give 1.
    """
    from scipy.special import stdtr

    n = len(differences)
    if n < 2:
        return None
    mean, sd = _mean_and_sd(differences)
    if not sd > 1e-9 * max(abs(d) for d in differences):  # no spread beyond rounding errors
        return 1.0 if mean == 0 else None
    return float(2 * stdtr(n - 1, -abs(mean) / (sd / math.sqrt(n))))


def _mean_and_sd(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))


def holm_adjust(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return Holm's step-down adjusted p-values (1979) by name."""
    adjusted, running = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        running = max(running, min(1.0, (len(p_values) - rank) * p))
        adjusted[name] = running
    return adjusted


def detectable_effect(differences: Sequence[float]) -> float | None:
    """Return the effect that a two-sided 5 % test finds with a power of 80 %: (t.975 + t.80)·s_d/√S."""
    n = len(differences)
    if n < 2:
        return None
    return (t_quantile(0.975, n - 1) + t_quantile(0.80, n - 1)) * _mean_and_sd(differences)[1] / math.sqrt(n)


def paired_test(ours: Mapping[Any, float], base: Mapping[Any, float]) -> dict[str, Any] | None:
    """Test ours − base over shared seeds: mean, interval, p, detectable effect, and each seed's difference. If
    `paired_p` has no p, there is no interval either. None without a shared seed."""
    interval = paired_difference(ours, base)
    if interval is None:
        return None
    by_seed = {str(s): ours[s] - base[s] for s in sorted(set(ours) & set(base))}
    differences = list(by_seed.values())
    p, detectable = paired_p(differences), detectable_effect(differences)
    result = {**asdict(interval), "p": p, "detectable": detectable, "by_seed": by_seed}
    if p is None:  # one difference, or several equal ones: no width to estimate
        result |= {"low": None, "high": None, "detectable": None}
    return result


def seed_item_bootstrap(
    differences: Sequence[np.ndarray], *, resamples: int, rng: np.random.Generator
) -> dict[str, float | int]:
    """Return the 95 % percentile interval of the mean of the tables' means, over resampled seeds × test rows, wider by
    t/z·√(S/(S−1)), as that of few resampled seeds is too narrow; never narrower than one over seeds alone.

    differences: for each task (S, n) ours − base, item by item; all with the same seeds in the same order. Each task's
    rows are resampled once for both sides and all seeds, as they are the same rows.
    """
    count = len(differences[0])
    seeds = rng.multinomial(count, np.full(count, 1 / count), size=resamples) / count
    total = np.zeros(resamples)
    for difference in differences:
        n = difference.shape[1]
        items = rng.multinomial(n, np.full(n, 1 / n), size=resamples) / n
        total += np.einsum("rs,si,ri->r", seeds, difference, items, optimize=True)
    wider = t_quantile(0.975, count - 1) / 1.96 * math.sqrt(count / (count - 1))
    mean = float(np.mean([difference.mean() for difference in differences]))
    low, high = mean + wider * (np.quantile(total / len(differences), [0.025, 0.975]) - mean)
    return {"low": float(low), "high": float(high), "resamples": resamples}


def parse_correctness(text: str) -> np.ndarray:
    """Return (n,) float64: right (1) or wrong (0) by test row, from the text of 1 and 0 in a result."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.float64) - 48
