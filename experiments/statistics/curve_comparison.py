"""Comparison of two curves on the same seeds: is one below the other, and is its peak lower, higher or moved?

Finding the peak in one curve and reading the other at the same place is not a valid test: the peak was found where its
own errors are large and positive, so any second curve seems lower there. Here the triple of points is taken from the
mean of both curves. If both scatter alike, difference and mean are independent, and the paired t-test at the triple is
as valid as for a triple named beforehand. For the same reason there is a triple only if the mean of both has a peak by
the peak test: flat curves have nothing to be lower or higher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flatshift.experiments.statistics.curve import Curve
from flatshift.experiments.statistics.emc import find_crossing
from flatshift.experiments.statistics.intervals import Interval, paired_p, t_interval
from flatshift.experiments.statistics.peak import PeakTest, highest_between, peak_test
from flatshift.experiments.statistics.scale import MetricScale, choose_scale
from flatshift.finetune.errors import UserError

FEWEST_SEEDS = 3
REMAINS = 0.2
"""Largest share of its height that may be left for a peak to count as removed."""


@dataclass(frozen=True)
class CurveComparison:
    """Result of `compare_curves`; intervals are two-sided, over seeds, at 1 − its level."""

    mean: Interval
    """Mean over the axis of the difference, ours − base."""
    p: float | None
    """Two-sided p of `mean`; None if every seed has the same non-zero difference."""
    points: tuple[Interval, ...]
    """Difference at each position; the intervals are simultaneous (Bonferroni over the positions)."""
    tests: tuple[PeakTest | None, PeakTest | None, PeakTest | None]
    """Peak tests of the mean of both curves, of ours and of base; None with too few seeds."""
    triple: tuple[int, int, int] | None
    """Left flank, peak and right flank of the mean of both curves; None if the peak test finds none in it."""
    peak: Interval | None
    """Height of the peak of ours above the mean of its two flanks, minus that of base."""
    peak_p: float | None
    """Two-sided p of `peak`; None as for `p`, and without a peak."""
    our_height: Interval | None
    """Height of ours at the peak, above the higher of its two flanks."""
    base_height: Interval | None
    locations: tuple[tuple[int, ...], tuple[int, ...]] | None
    """Points that may hold the peak of base, and of ours.

    Searched between the outermost flanks of both, so that neither of two humps is missed, at half the level each. None
    unless both have a peak that is highest there.
    """
    threshold: Interval | None
    """Position where the training error crosses ε, ours ÷ base; None unless every seed crosses it in both curves."""
    seeds: int
    """Number of seeds that are complete in both curves."""

    @property
    def moved(self) -> bool:
        """True if the interval of the threshold ratio excludes 1; that of equal values has no width and excludes
        nothing."""
        low, high = (None, None) if self.threshold is None else (self.threshold.low, self.threshold.high)
        return low is not None and high is not None and high - low > 1e-9 * high and not low <= 1 <= high

    @property
    def removed(self) -> bool:
        """True if the peak is lower by its interval, and the upper limit of what is left at most a fifth of it."""
        lower = self.peak is not None and self.peak.high is not None and self.peak.high < 0
        if not lower or self.our_height is None or self.base_height is None or self.our_height.high is None:
            return False
        return self.our_height.high <= REMAINS * self.base_height.value

    def sentence(self, curve: Curve) -> str:
        """Describe the effect of ours on the peak of base, by the intervals; `curve` is either of the two."""
        sentences = [self._height_sentence(curve), *self._location_sentences(curve), self._position_sentence(curve)]
        return " ".join(sentences)

    def _height_sentence(self, curve: Curve) -> str:
        both, ours, base = self.tests
        if both is None or ours is None or base is None:
            return "Whether it changes a peak cannot be said: too few seeds for the peak test."
        if self.triple is None:
            tests = f"p = {both.p_value:.2g} for the mean of both"
            alone = [name for name, test in (("the base", base), ("this one", ours)) if test.rejected]
            if alone:
                return f"Cannot be said: {' and '.join(alone)} alone has a peak, the mean of both has none ({tests})."
            height = f"{both.detectable.height:.2g} at {curve.at(both.detectable.point)}"
            return f"No peak is shown in either ({tests}; one of {height} in both would be found in 80 % of cases)."
        assert self.peak is not None and self.our_height is not None
        at, change = curve.at(self.triple[1]), _format_interval(self.peak)
        if not self.removed and not self.peak.excludes_zero:
            return f"Whether it lowers the peak at {at} cannot be said: height {change}."
        verb = "removes" if self.removed else "lowers" if self.peak.value < 0 else "raises"
        doubt = ", and is not shown to remove it" if verb == "lowers" else ""
        return (
            f"It {verb} the peak at {at}{doubt}: height {change}, left above its higher flank "
            f"{_format_interval(self.our_height)}."
        )

    def _location_sentences(self, curve: Curve) -> list[str]:
        sentences = []
        _, ours, base = self.tests
        if self.locations is not None:
            before, now = (", ".join(f"{curve.values[j]:g}" for j in columns) for columns in self.locations)
            sentences.append(
                f"That it moves the peak is not shown ({curve.axis} {before}, then {now})."
                if set(self.locations[0]) & set(self.locations[1])
                else f"It moves the peak from {curve.axis} {before} to {now}."
            )
        elif ours is not None and base is not None and ours.rejected and base.rejected:
            sentences.append("Whether it moves the peak cannot be said: between their flanks another point is higher.")
        if self.threshold is not None:
            verb = "moves the interpolation threshold" if self.moved else "is not shown to move the threshold"
            sentences.append(f"It {verb}: position × {_format_interval(self.threshold)}.")
        elif curve.train_error is not None and curve.values[0] > 0 and not curve.training:
            sentences.append("The threshold cannot be compared: not every seed crosses it on the axis.")
        return sentences

    def _position_sentence(self, curve: Curve) -> str:
        """Return the positions at which ours is lower or higher than base, by simultaneous intervals."""
        differences = list(zip(curve.values, self.points, strict=True))
        sides = {
            "lower": [f"{at:g}" for at, d in differences if d.excludes_zero and d.value < 0],
            "higher": [f"{at:g}" for at, d in differences if d.excludes_zero and d.value > 0],
        }
        parts = [f"{side} at {curve.axis} {', '.join(positions)}" for side, positions in sides.items() if positions]
        if not parts:
            return f"At no {curve.axis} alone is it shown to be lower or higher (all intervals at once)."
        return f"It is {' and '.join(parts)} (all intervals at once)."


def compare_curves(ours: Curve, base: Curve, *, level: float = 0.05) -> CurveComparison:
    """Compare `ours` with `base`, each test at `level`: held-out metrics at the same positions, row s the same seed in
    both. Seeds with a value that is not finite anywhere in either curve are left out. Raises UserError for other
    positions, another number of seeds, or fewer than three complete seeds.
    """
    if list(ours.values) != list(base.values) or ours.test.shape != base.test.shape:
        raise UserError(
            f"curves over {ours.axis} can be compared at the same positions and seeds only; got "
            f"{list(ours.test.shape)} and {list(base.test.shape)}"
        )
    complete = np.flatnonzero(np.isfinite(ours.test).all(1) & np.isfinite(base.test).all(1))
    if len(complete) < FEWEST_SEEDS:
        raise UserError(f"{len(complete)} seeds are whole in both curves; a comparison needs {FEWEST_SEEDS}")
    our_values, base_values = ours.test[complete], base.test[complete]
    difference = our_values - base_values
    confidence, each = 1 - level, 1 - level / difference.shape[1]
    means = difference.mean(1).tolist()
    scale = choose_scale(base.metric, np.concatenate([our_values, base_values]), base.items)
    means_of_both = (our_values + base_values) / 2
    both, ours_alone, base_alone = (_try_peak_test(v, scale, level) for v in (means_of_both, our_values, base_values))
    triple = both.triple if both is not None else None
    heights = [] if triple is None else [peak_heights(curve, triple) for curve in (our_values, base_values)]
    gap = (heights[0] - heights[1]).tolist() if heights else None
    return CurveComparison(
        mean=t_interval(means, confidence=confidence),
        p=paired_p(means),
        points=tuple(t_interval(column.tolist(), confidence=each) for column in difference.T),
        tests=(both, ours_alone, base_alone),
        triple=triple,
        peak=None if gap is None else t_interval(gap, confidence=confidence),
        peak_p=None if gap is None else paired_p(gap),
        our_height=None if triple is None else _above_flanks(our_values, triple, confidence),
        base_height=None if triple is None else _above_flanks(base_values, triple, confidence),
        locations=_peak_locations(scale.to(our_values), scale.to(base_values), ours_alone, base_alone, level),
        threshold=_threshold_ratio(ours, base, complete, confidence),
        seeds=len(complete),
    )


def peak_heights(curves: np.ndarray, triple: tuple[int, int, int]) -> np.ndarray:
    """Return [S]: y_j − (y_i + y_l)/2 of each row of `curves` [S, J]."""
    left, middle, right = triple
    return curves[:, middle] - (curves[:, left] + curves[:, right]) / 2


def _above_flanks(curves: np.ndarray, triple: tuple[int, int, int], confidence: float) -> Interval:
    """Return whichever of y_j − y_i and y_j − y_l has the lower mean: a peak is above both flanks."""
    left, middle, right = triple
    sides = [t_interval((curves[:, middle] - curves[:, k]).tolist(), confidence=confidence) for k in (left, right)]
    return min(sides, key=lambda side: side.value)


def _peak_locations(
    our_values: np.ndarray, base_values: np.ndarray, ours: PeakTest | None, base: PeakTest | None, level: float
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if ours is None or base is None or ours.triple is None or base.triple is None:
        return None
    left, right = min(ours.triple[0], base.triple[0]), max(ours.triple[2], base.triple[2])
    before, now = (highest_between(curves, left, right, level=level / 2) for curves in (base_values, our_values))
    return (before, now) if set(before) & set(base.location) and set(now) & set(ours.location) else None


def _try_peak_test(curves: np.ndarray, scale: MetricScale, level: float) -> PeakTest | None:
    """Return the peak test; None with too few seeds or points, or too many points."""
    try:
        return peak_test(curves, level=level, scale=scale)
    except UserError:
        return None


def _format_interval(interval: Interval) -> str:
    return f"{interval.value:.3g}" + ("" if interval.low is None else f" ({interval.low:.3g} to {interval.high:.3g})")


def _threshold_ratio(ours: Curve, base: Curve, whole: np.ndarray, confidence: float) -> Interval | None:
    """Return the ratio of the crossings of ε, from the t-interval of its logarithm over seeds."""
    if ours.train_error is None or base.train_error is None or not ours.values[0] > 0:
        return None
    logs = []
    for seed in whole:
        rows = [(curve, curve.train_error[seed : seed + 1]) for curve in (ours, base) if curve.train_error is not None]
        if not all(np.isfinite(row).all() for _, row in rows):
            return None
        our_value, base_value = (find_crossing(curve.values, row, curve.epsilon).value for curve, row in rows)
        if our_value is None or base_value is None:
            return None
        logs.append(math.log(our_value / base_value))
    ratio = t_interval(logs, confidence=confidence)
    low, high = (None if end is None else math.exp(end) for end in (ratio.low, ratio.high))
    return Interval(math.exp(ratio.value), low, high, ratio.n)
