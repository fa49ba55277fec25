"""Peak test of a curve that is valid with few seeds, with the location, height and detectable height of the peak.

H0: the mean curve is quasi-convex (flat, monotone or U-shaped). T = max over i < j < l of min(t_ij, t_jl), with t_ij
the seed-paired t of the rise from i to j and t_jl that of the fall from j to l, both with shrunken variances. T is
compared with the quantile of max over i < j of t_ij on flat Gaussian curves with the points' own shrunken variances: a
steep rise followed by a plateau makes one side of every triple certain, and no quasi-convex curve is worse than that.

Resampling seeds and asking whether the maximum exceeds both sides is not a test: a maximum always exceeds them.

**Seeds added until a verdict stands.** A test that is repeated at 5 % as seeds come in is wrong far more often than in
5 % of cases. Here the level is spent (Lan & DeMets 1983, the function of Pocock's kind): after the share t of all seeds
α·ln(1 + (e − 1)t) may have been used up, and each look tests at what the function grew by since the one before. By
Boole's inequality the chance of a wrong finding at any look is then at most α, however the looks depend on one another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flatshift.experiments.statistics.intervals import t_quantile
from flatshift.experiments.statistics.pairs import (
    NullDistribution,
    PointPairs,
    critical_value,
    null_distribution,
    p_value,
    point_pairs,
    point_variances,
    rises_and_falls,
)
from flatshift.experiments.statistics.scale import MetricScale
from flatshift.finetune.errors import UserError

MOST_POINTS = 10
FEWEST_SEEDS = 5
"""Fewest seeds: with three seeds and a nine-fold variance at one point, false alarms reach .087 at a level of .05; five
keep .054."""
FEWEST_POINTS = 3
POWER = 0.8
_POWER_DRAWS = 2000
"""Flat curves behind a detectable height: its error is then below 1 %."""


class TooFewSeeds(UserError):
    """Error for too few seeds with finite values at all points."""

    def __init__(self, complete: int, total: int) -> None:
        self.complete, self.total = complete, total
        super().__init__(
            f"the peak test needs at least {FEWEST_SEEDS} seeds with finite values at all points, got {complete} of "
            f"{total}: sweep with --seeds {total + FEWEST_SEEDS - complete}"
        )

    def message_for(self, planned: int | None) -> str:
        """Return the message for a plan of `planned` seeds with missing cells: the missing seeds may be enough."""
        if planned is None or self.complete + planned - self.total < FEWEST_SEEDS:
            return str(self)
        return (
            f"{self.complete} of {planned} seeds are finished so far at all points, and the peak test needs "
            f"{FEWEST_SEEDS}; continue with the same command"
        )


@dataclass(frozen=True)
class PeakHeight:
    """Height of a peak above the higher of its two flanks, in the units of the curve. low: 0 if the test does not
    reject. high: inf if the seeds do not differ at all."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class DetectableHeight:
    """Height of a one-point peak found with a power of 80 % by this number of seeds and points.

    Uses the variances of the curve's own points, at the noisiest inner point, the column `point`: runs scatter most
    where an interpolation peak is expected. height: in the units of the curve; inf if the seeds do not differ at all.
    sd: in standard deviations of one run about its seed's curve, pooled over points. even: height if all points
    scattered alike.
    """

    height: float
    sd: float
    point: int
    even: float


@dataclass(frozen=True)
class PeakTest:
    """Result of `peak_test`; indices are columns of its input array."""

    statistic: float
    critical: float
    p_value: float
    rejected: bool
    """True if there is a peak at `level`."""
    triple: tuple[int, int, int] | None
    """Left flank, peak and right flank that attain the statistic; None if not rejected."""
    location: tuple[int, ...]
    """Points that may have the highest mean between the two flanks; () if not rejected."""
    height: PeakHeight
    """Of the highest peak, with a two-sided interval at 1 − `level`."""
    ceiling: float
    """One-sided upper limit of the highest peak's height at 1 − `level`: any existing peak is lower."""
    detectable: DetectableHeight
    sd: float
    """Standard deviation of one run about its seed's curve, pooled over points, on the test's scale."""
    hump: float
    """Estimated height in standard deviations of one run, as if all points scattered alike."""
    seeds: int
    points: tuple[int, ...]
    diverged: tuple[int, ...]
    """Rows (seeds) left out for values that are not finite."""
    level: float


def peak_test(
    curves: np.ndarray, *, level: float = 0.05, draws: int = 20_000, seed: int = 0, scale: MetricScale | None = None
) -> PeakTest:
    """Test the mean of seed-paired curves for a peak.

    curves: [S, J]; row s is one seed at all points, so that subset, label noise and order are shared along a row and
    differ between rows. At most 10 points, named beforehand (`thin` picks them without looking at y). level: false
    alarms among curves without a peak, and 1 − coverage of `location` and `height`. draws: flat curves behind the
    critical value; seed: of those draws. scale: transformation before means are taken, from `scale_of` (None: plain).
    Heights are in the units of the values, above the higher of the flanks; if no peak is found, above the lowest points
    on both sides.

    Diverged runs: a point without a finite value in more than half of the seeds is left out, then every seed that lacks
    one at a remaining point. Complete curves are left, so pairing and the error rate hold; the statement is about runs
    that do not diverge. A diverged run with finite values stays in: its own spread keeps it from making a peak.

    Location: with c' the critical value of max |t_ij| over all pairs of flat curves, a point between the flanks is left
    out if another one between them is higher by more than c' standard errors. All pairs hold at once, so the set misses
    the highest mean between the flanks with probability at most `level`, however the flanks were chosen.

    Height: the lower limit is min(μ_j − μ_i, μ_j − μ_l) of the found triple by the same all-pairs bounds (0 if they
    reach below it). The upper limit is max over triples of min(u_ij, u_jl) with u the exact limits of the paired t: if
    a peak of height H exists, both its differences are at least H, and only if one of these two limits fails can the
    maximum be below H, so two limits share the error and the number of triples does not matter. Raises UserError for
    anything but a table [seeds, points], more than 10 points, or fewer than 5 seeds or 3 points with values.
    """
    table = np.asarray(curves, dtype=np.float64)
    if not 0 < level < 0.5:
        raise UserError(f"peak_test: level must be between 0 and 0.5, got {level}")
    rows, points = select_finite(table)
    scale = scale or MetricScale()
    values = scale.to(table[np.ix_(rows, points)])
    seeds, count = values.shape
    moved, unit = normalise_curves(values)
    minimum = scale.least(unit)
    pairs = point_pairs(moved, minimum)
    flat = null_distribution(seeds, count, draws, seed)
    spread = math.sqrt(float(pairs.variance.sum()) / (2 * count * (count - 1)))
    if spread * unit <= 8 * np.finfo(float).eps * float(np.abs(values).max()):
        spread = 0.0  # seeds differ by rounding only
    t = pairs.t if spread else np.zeros((count, count))
    variances = point_variances(pairs.variance, seeds, minimum) if spread else None
    rising, both = flat.extremes(variances, minimum=minimum)
    threshold = critical_value(rising, level)
    rise, fall = rises_and_falls(t)
    middle = int(np.argmax(np.minimum(rise, fall)))
    statistic = float(min(rise[middle], fall[middle]))
    rejected = statistic > threshold
    triple = _find_flanks(t, middle) if rejected else None
    location = () if triple is None else _location_set(t, triple[0], triple[2], critical_value(both, level))
    estimate, low = _peak_height(pairs, triple, critical_value(both, level / 2)) if spread else (0.0, 0.0)
    detectable = _detectable_heights(flat, threshold, variances, min(_POWER_DRAWS, draws), minimum)
    worst = int(np.argmax(detectable))
    worst_sd = float(detectable[worst])
    even = detectable_sd(seeds, count, level=level, draws=draws, seed=seed)
    sd = spread * unit if spread else math.inf  # seeds without any difference detect nothing, however high
    means = values.mean(0)
    flanks = _flank_levels(means)  # of the inner points
    peak = max(1, min(middle, count - 2))
    if triple is not None:
        flanks[peak - 1] = max(means[triple[0]], means[triple[2]])

    def above(point: int, height: float) -> float:
        return scale.above(float(flanks[point - 1]), height)

    def upper_limit(limit_level: float) -> float:
        limits = _upper_limits(pairs, limit_level).tolist()
        return max(above(j, limit * unit) for j, limit in enumerate(limits, start=1)) if spread else math.inf

    return PeakTest(
        statistic=statistic,
        critical=threshold,
        p_value=p_value(statistic, rising),
        rejected=rejected,
        triple=None if triple is None else (points[triple[0]], points[triple[1]], points[triple[2]]),
        location=tuple(points[j] for j in location),
        height=PeakHeight(above(peak, estimate * unit), above(peak, low * unit), upper_limit(level / 2)),
        ceiling=upper_limit(level),
        detectable=DetectableHeight(
            above(worst + 1, worst_sd * sd), worst_sd, points[worst + 1], above(worst + 1, even * sd)
        ),
        sd=spread * unit,
        hump=estimate * even / (spread * worst_sd) if spread else 0.0,
        seeds=seeds,
        points=tuple(points),
        diverged=tuple(sorted(set(range(len(table))) - set(rows))),
        level=level,
    )


def highest_between(
    curves: np.ndarray, left: int, right: int, *, level: float = 0.05, draws: int = 20_000, seed: int = 0
) -> tuple[int, ...]:
    """Return the columns of `curves` [S, J] strictly between two others that may have the highest mean there.

    Like `PeakTest.location`, which uses the test's own flanks: curves to be compared need common ones. Misses the
    highest with probability at most `level`. All values must be finite.
    """
    moved, _ = normalise_curves(np.asarray(curves, dtype=np.float64))
    pairs = point_pairs(moved)
    seeds, count = moved.shape
    _, both = null_distribution(seeds, count, draws, seed).extremes(point_variances(pairs.variance, seeds))
    return _location_set(pairs.t, left, right, critical_value(both, level))


def checked_peak_test(curves: np.ndarray, *, level: float, draws: int, seed: int, scale: MetricScale) -> PeakTest:
    """Run `peak_test` for a verdict. Raises UserError as it does, and also if the seeds do not differ."""
    test = peak_test(curves, level=level, draws=draws, seed=seed, scale=scale)
    if not test.sd:
        raise UserError("the seeds do not differ, so no test can be made")
    return test


def normalise_curves(curves: np.ndarray) -> tuple[np.ndarray, float]:
    """Return (curves [S, J] minus their first points in units of the largest, that unit): squares stay finite."""
    moved = curves - curves[:, :1]
    unit = float(np.abs(moved).max()) or 1.0
    return moved / unit, unit


def select_finite(curves: np.ndarray) -> tuple[list[int], list[int]]:
    """Return the rows and columns of `curves` [S, J] to test, by the policy for diverged runs in `peak_test`. Raises
    UserError as `peak_test` does."""
    if curves.ndim != 2:
        raise UserError(f"a curve must be a table [seeds, points], got an array of shape {list(curves.shape)}")
    check_points(curves.shape[1])
    good = np.isfinite(curves)
    points = [int(j) for j in np.flatnonzero(2 * good.sum(0) >= max(1, len(curves)))]
    rows = [int(s) for s in np.flatnonzero(good[:, points].all(1))]
    if len(points) < FEWEST_POINTS:
        raise UserError(
            f"the peak test needs at least {FEWEST_POINTS} points with values, got {len(points)} of {curves.shape[1]}"
        )
    if len(rows) < FEWEST_SEEDS:
        raise TooFewSeeds(len(rows), len(curves))
    return rows, points


def check_points(count: int) -> None:
    """Raise UserError if a curve has more points than the test supports."""
    if count > MOST_POINTS:
        raise UserError(
            f"the peak test takes at most {MOST_POINTS} points, got {count}: choose them beforehand, without looking "
            "at the curve (flatshift.experiments.statistics.peak.thin does)"
        )


@functools.lru_cache(maxsize=256)
def detectable_sd(seeds: int, points: int, *, level: float = 0.05, draws: int = 20_000, seed: int = 0) -> float:
    """Return the height, in standard deviations of one run, of a peak that the test finds with a power of 80 %. The
    peak is the middle point, with one low point on either side and equal variances."""
    flat = null_distribution(seeds, points, draws, seed)
    return float(_detectable_heights(flat, critical_value(flat.extremes()[0], level))[(points - 1) // 2 - 1])


def seeds_needed(height_sd: float, points: int, *, level: float = 0.05, maximum: int = 100) -> int | None:
    """Return the smallest number of seeds that finds a peak of `height_sd` standard deviations with a power of 80 %.
    None beyond `maximum` seeds. Uses 2,000 draws for each number tried."""

    def enough(seeds: int) -> bool:
        return detectable_sd(seeds, points, level=level, draws=2000) <= height_sd

    if not height_sd > 0 or not enough(maximum):
        return None
    low, high = FEWEST_SEEDS - 1, maximum  # invariant: `high` is enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def thin(values: Sequence[float], at_most: int = MOST_POINTS) -> tuple[int, ...]:
    """Return indices of at most `at_most` points, spread evenly on a log axis, first and last included.

    values: ascending positions on the axis (steps, ranks, rows); a first value of 0 is allowed. The measurements play
    no part, so the test stays valid. Raises UserError for fewer than 3 requested points or values that do not ascend.
    """
    x = np.asarray(values, dtype=np.float64)
    if at_most < FEWEST_POINTS:
        raise UserError(f"thin: at_most must be at least {FEWEST_POINTS}, got {at_most}")
    if x.ndim != 1 or not np.isfinite(x).all() or (np.diff(x) <= 0).any() or (len(x) and x[0] < 0):
        raise UserError("thin: values must be non-negative and ascend")
    if len(x) <= at_most:
        return tuple(range(len(x)))
    scaled = np.log(x) if x[0] > 0 else np.log1p(x)
    chosen: list[int] = []
    for place, target in enumerate(np.linspace(scaled[0], scaled[-1], at_most)):
        first = chosen[-1] + 1 if chosen else 0
        last = len(x) - (at_most - place)  # leaves a point for every later target
        chosen.append(first + int(np.argmin(np.abs(scaled[first : last + 1] - target))))
    return tuple(chosen)


def _detectable_heights(
    flat: NullDistribution,
    threshold: float,
    variances: np.ndarray | None = None,
    count: int | None = None,
    minimum: float = 0.0,
) -> np.ndarray:
    """Return [J − 2]: for each inner point, the height of a peak there that is found with a power of 80 %.

    In standard deviations of the mean of `variances` [J] (None: all equal), from the first `count` draws; the two
    neighbours are its flanks. For each flat draw the smallest sufficient height follows from the t's: a rise by h moves
    t_ij by h√S/√ṽ_ij.
    """
    t, per_unit = flat.with_unit_shift(variances, count, minimum)
    steps = np.flatnonzero(flat.right == flat.left + 1)  # from each point to the next, in order
    up = (threshold - t[steps[:-1]]) / per_unit[steps[:-1]]
    down = (threshold + t[steps[1:]]) / per_unit[steps[1:]]  # a fall from the peak is minus the rise
    return np.quantile(np.maximum(up, down), POWER, axis=1)


def _find_flanks(t: np.ndarray, middle: int) -> tuple[int, int, int]:
    """Return the middle with the points from which it rises and to which it falls most clearly."""
    left = int(np.argmax(t[:middle, middle]))
    return left, middle, middle + 1 + int(np.argmax(t[middle + 1 :, middle]))


def _location_set(t: np.ndarray, left: int, right: int, threshold: float) -> tuple[int, ...]:
    between = range(left + 1, right)
    return tuple(j for j in between if max(t[j, k] for k in between) <= threshold)


def _peak_height(pairs: PointPairs, triple: tuple[int, int, int] | None, threshold: float) -> tuple[float, float]:
    """Return (estimate, lower limit) of the height of the highest peak."""
    if triple is None:
        rise, fall = rises_and_falls(pairs.difference)
        return max(0.0, float(np.minimum(rise, fall).max())), 0.0
    i, j, l = triple
    differences = np.array([pairs.difference[i, j], pairs.difference[l, j]])
    errors = np.array([pairs.error[i, j], pairs.error[l, j]])
    return float(differences.min()), max(0.0, float((differences - threshold * errors).min()))


def _upper_limits(pairs: PointPairs, level: float) -> np.ndarray:
    """Return [J − 2]: upper limits (0 or more) of the height of a peak at each inner point. The largest is that of the
    highest peak at 1 − level, from exact paired t limits at level/2 each."""
    limits = pairs.difference + t_quantile(1 - level / 2, pairs.seeds - 1) * np.sqrt(pairs.variance / pairs.seeds)
    rise, fall = rises_and_falls(limits)
    return np.maximum(0.0, np.minimum(rise, fall)[1:-1])


def _flank_levels(means: np.ndarray) -> np.ndarray:
    """Return [J − 2]: for each inner point, the higher of the lowest means on its two sides."""
    left = np.minimum.accumulate(means)[:-2]
    right = np.minimum.accumulate(means[::-1])[::-1][2:]
    return np.maximum(left, right)


_CHOOSING = 3
HOLDOUT_SEEDS = 8
"""Fewest seeds for a second peak test: triple chosen on some seeds, confirmed on the others."""


@dataclass(frozen=True)
class HoldoutResult:
    """Two one-sided paired t-tests on `seeds` seeds, at a triple chosen on the first three. triple: columns of left
    flank, peak and right flank. p_value: the larger of the two. confirmed: both reject."""

    triple: tuple[int, int, int]
    p_value: float
    confirmed: bool
    seeds: int


def holdout_test(curves: np.ndarray, *, level: float = 0.05) -> HoldoutResult:
    """Confirm a peak without the calibration of `peak_test`: no flat curves, no shrinkage, no search on the same seeds.

    curves: [S, J] as for `peak_test`, at least 8 seeds with finite values: three choose the triple, the others test it.
    Both tests must reject at `level`, so false alarms stay below it; the power is lower than that of `peak_test`.
    Raises UserError for fewer than 8 seeds, and as `peak_test` does.
    """
    from scipy.special import stdtr

    table = np.asarray(curves, dtype=np.float64)
    rows, points = select_finite(table)
    if len(rows) < HOLDOUT_SEEDS:
        raise UserError(f"the check on other seeds needs at least {HOLDOUT_SEEDS} seeds with values, got {len(rows)}")
    values = table[np.ix_(rows, points)]
    t = point_pairs(values[:_CHOOSING]).t
    i, j, l = _find_flanks(t, int(np.argmax(np.minimum(*rises_and_falls(t)))))
    others = values[_CHOOSING:]
    n = len(others)
    sides = np.stack([others[:, j] - others[:, i], others[:, j] - others[:, l]])
    mean, sd = sides.mean(1), sides.std(1, ddof=1)
    statistic = np.divide(mean * np.sqrt(n), sd, out=np.zeros(2), where=sd > 0)
    p = float(stdtr(n - 1, -statistic).max())
    confirmed = bool((statistic > t_quantile(1 - level, n - 1)).all())
    return HoldoutResult((points[i], points[j], points[l]), p, confirmed, n)


_GROWTH = 1.5


@dataclass(frozen=True)
class InterimLook:
    """Number of seeds at which verdicts are made, and the level of each test there."""

    seeds: int
    level: float


def plan_looks(budget: int, *, level: float = 0.05) -> tuple[InterimLook, ...]:
    """Return looks at 5 seeds, then at half as many again each time, up to `budget` seeds. Raises UserError for a
    budget below 5 seeds, which is too few for the test."""
    if budget < FEWEST_SEEDS:
        raise UserError(f"--until decided: --seeds {budget} is the most to add, and a verdict needs {FEWEST_SEEDS}")
    places = [FEWEST_SEEDS]
    while places[-1] < budget:
        places.append(min(budget, math.ceil(places[-1] * _GROWTH)))
    spent = [level * math.log1p((math.e - 1) * place / budget) for place in places]
    return tuple(
        InterimLook(place, now - before) for place, now, before in zip(places, spent, [0.0, *spent], strict=False)
    )
