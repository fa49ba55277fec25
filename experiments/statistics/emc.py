"""Effective model complexity and the interpolation threshold: the point where the training error crosses ε.

EMC = the largest number of training rows n that a training procedure still fits to a mean error of at most ε (Nakkiran
et al., arXiv:1912.02292); the same crossing along rank or steps is the interpolation threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flatshift.experiments.statistics.intervals import t_quantile
from flatshift.finetune.errors import UserError

Side = Literal["inside", "before", "beyond"]
EPSILON = 0.1


@dataclass(frozen=True)
class Crossing:
    """Crossing of ε by the mean training error along an axis.

    value: position on the axis, interpolated between points (on a log axis if all positions are positive); None: not on
    it. low, high: interval over seeds; None: open, beyond the axis, or there is one seed only. rising: the error rises
    along the axis (as with more rows) or falls (as with more rank or steps). fitted: points with a mean training error
    of at most ε; `some` without a `value`: it falls and rises again, and its monotone fit stays on one side.
    """

    value: float | None
    low: float | None
    high: float | None
    rising: bool
    fitted: Literal["some", "all", "none"]


@dataclass(frozen=True)
class EMC:
    """Largest n that is fitted to a mean training error of at most ε.

    value: rows; None if the answer is outside the tested range. low, high: interval over seeds; None: open. side:
    `before`: even the smallest n is not fitted; `beyond`: the largest n still is. points: (n, mean training error) of
    every n that was evaluated, ascending.
    """

    value: float | None
    low: float | None
    high: float | None
    side: Side
    epsilon: float
    points: tuple[tuple[float, float], ...]

    def __str__(self) -> str:
        tried = self.points[0][0], self.points[-1][0]
        return format_complexity(self.value, self.low, self.high, self.side, tried, unit=" rows")


def format_complexity(
    value: float | None, low: float | None, high: float | None, side: str, tried: tuple[float, float], unit: str = ""
) -> str:
    """Format as `464 (411 to 518)`; open sides end at the fewest and the most rows that were tried."""
    smallest, largest = (f"{round(n):,}" for n in tried)
    if side == "before":
        return f"below {smallest}{unit}"
    if value is None:
        return f"at least {largest}{unit}"
    start = f"below {smallest}" if low is None else f"{round(low):,}"
    end = f"above {largest}" if high is None else f"{round(high):,}"
    return f"{round(value):,}{unit} ({start} to {end})"


def find_crossing(
    values: Sequence[float], train_error: np.ndarray, epsilon: float = EPSILON, *, level: float = 0.05
) -> Crossing:
    """Find where the mean of `train_error` [S, J] (finite rows only) crosses ε along `values` [J].

    The direction (rising or falling error) is that of the monotone fit closer to the means. Interval: one-sided t
    limits of the mean at each point, followed from the fitted end while the upper limit is at most ε, and from the
    other end while the lower limit is above it; stopping at the first failure needs no correction for the number of
    points. Raises UserError for values that do not ascend, a table of another width, no finite row, or ε not in (0, 1).
    """
    x, table = _check_curve(values, train_error, epsilon)
    mean = table.mean(0)
    up, down = _isotonic(mean), _isotonic(mean[::-1])[::-1]
    rising = bool(np.square(up - mean).sum() < np.square(down - mean).sum())
    position = np.log(x) if x[0] > 0 else x
    back = (lambda p: float(np.exp(p))) if x[0] > 0 else float
    if rising:
        value, low, high = _crossing_with_interval(position, table, epsilon, level)
    else:
        value, high, low = _crossing_with_interval(-position[::-1], table[:, ::-1], epsilon, level)
        value, low, high = (None if p is None else -p for p in (value, low, high))
    value, low, high = (None if p is None else back(p) for p in (value, low, high))
    return Crossing(
        value, low, high, rising, "all" if (mean <= epsilon).all() else "none" if (mean > epsilon).all() else "some"
    )


def emc_from_curve(
    n_values: Sequence[float], train_error: np.ndarray, epsilon: float = EPSILON, *, level: float = 0.05
) -> EMC:
    """Return the EMC of a curve over the number of rows: [S, J] training errors at `n_values` [J], made monotone in n.
    Interval and errors as for `find_crossing`."""
    x, table = _check_curve(n_values, train_error, epsilon)
    if x[0] <= 0:
        raise UserError(f"numbers of rows must be positive, got {x[0]:g}")
    ends = _crossing_with_interval(np.log(x), table, epsilon, level)
    value, low, high = (None if p is None else math.exp(p) for p in ends)
    mean = table.mean(0)
    side: Side = "inside" if value is not None else "before" if _isotonic(mean)[0] > epsilon else "beyond"
    return EMC(value, low, high, side, epsilon, tuple(zip(x.tolist(), mean.tolist(), strict=True)))


def effective_model_complexity(
    train_error: Callable[[int, int], float],
    *,
    epsilon: float = EPSILON,
    low: int,
    high: int,
    seeds: Sequence[int],
    resolution: float = 0.1,
) -> EMC:
    """Find the EMC by bisection over n between `low` and `high`; every n is evaluated with all seeds.

    train_error: the training error at n rows under a seed, `train_error(n, seed)`; a run that diverged may return NaN
    or infinity and counts as an error of 1 (it has fitted nothing). resolution: stop when the smallest n that is not
    fitted is at most (1 + resolution) × the largest that is.

    Assumes that the mean error rises with n; the points are returned so that this can be checked. Raises UserError for
    an empty range, no seeds, or ε or resolution out of bounds.
    """
    if not 1 <= low < high:
        raise UserError(f"effective model complexity: needs 1 <= low < high, got {low} and {high}")
    if not seeds:
        raise UserError("effective model complexity: needs at least one seed")
    if not resolution > 0:
        raise UserError(f"effective model complexity: resolution must be positive, got {resolution}")
    _check_epsilon(epsilon)
    tried: dict[int, list[float]] = {}

    def fits(n: int) -> bool:
        tried[n] = [error if math.isfinite(error) else 1.0 for error in (train_error(n, seed) for seed in seeds)]
        return math.fsum(tried[n]) / len(seeds) <= epsilon

    fitted, unfitted = low, high
    if fits(low) and not fits(high):
        while unfitted > fitted + 1 and unfitted > fitted * (1 + resolution):
            middle = min(max(round(math.sqrt(fitted * unfitted)), fitted + 1), unfitted - 1)
            fitted, unfitted = (middle, unfitted) if fits(middle) else (fitted, middle)
    order = sorted(tried)
    if len(order) == 1:  # `low` is not fitted: nothing to interpolate
        return EMC(None, None, None, "before", epsilon, ((float(low), math.fsum(tried[low]) / len(seeds)),))
    return emc_from_curve(order, np.array([tried[n] for n in order]).T, epsilon)


def _check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon < 1:
        raise UserError(f"epsilon must be between 0 and 1, got {epsilon}")


def _check_curve(values: Sequence[float], errors: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    _check_epsilon(epsilon)
    x = np.asarray(values, dtype=np.float64)
    table = np.asarray(errors, dtype=np.float64)
    if x.ndim != 1 or len(x) < 2 or not np.isfinite(x).all() or (np.diff(x) <= 0).any():
        raise UserError("the positions of training errors must be at least two and ascend")
    if table.ndim != 2 or table.shape[1] != len(x):
        raise UserError(f"training errors must be a table [seeds, {len(x)}], got shape {list(table.shape)}")
    table = table[np.isfinite(table).all(1)]
    if not len(table):
        raise UserError("no seed has finite training errors at all points")
    return x, table


def _crossing_with_interval(
    position: np.ndarray, table: np.ndarray, epsilon: float, level: float
) -> tuple[float | None, float | None, float | None]:
    """Return (crossing, low, high) of errors [S, J] that rise along `position`; None for ends not on the axis."""
    mean = table.mean(0)
    value = _interpolate_crossing(position, _isotonic(mean), epsilon)
    n = len(table)
    if n < 2:
        return value, None, None
    half = t_quantile(1 - level / 2, n - 1) * table.std(0, ddof=1) / math.sqrt(n)
    upper = np.maximum.accumulate(mean + half)  # from the left, up to the first failure
    lower = np.minimum.accumulate((mean - half)[::-1])[::-1]  # from the right
    low, high = _interpolate_crossing(position, upper, epsilon), _interpolate_crossing(position, lower, epsilon)
    if value is not None:  # the monotone fit may leave the limits if the means do not ascend
        low, high = None if low is None else min(low, value), None if high is None else max(high, value)
    return value, low, high


def _interpolate_crossing(position: np.ndarray, rising: np.ndarray, epsilon: float) -> float | None:
    """Return where the non-decreasing piecewise-linear curve exceeds ε; None if it does so everywhere or nowhere."""
    if rising[0] > epsilon or rising[-1] <= epsilon:
        return None
    after = int(np.argmax(rising > epsilon))
    below, above = rising[after - 1], rising[after]
    return float(position[after - 1] + (position[after] - position[after - 1]) * (epsilon - below) / (above - below))


def _isotonic(y: np.ndarray) -> np.ndarray:
    """Return the non-decreasing sequence closest to `y` in least squares."""
    from scipy.optimize import isotonic_regression

    return np.asarray(isotonic_regression(y).x)
