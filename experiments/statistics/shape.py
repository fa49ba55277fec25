"""Significant rises and falls of a curve, by the critical value of its peak test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flatshift.experiments.statistics.curve import Curve
from flatshift.experiments.statistics.intervals import t_quantile
from flatshift.experiments.statistics.pairs import PointPairs, point_pairs
from flatshift.experiments.statistics.peak import PeakTest, normalise_curves, select_finite


@dataclass(frozen=True)
class SignificantChange:
    """Significant difference between two points of a curve."""

    curve: Curve
    start: int
    """Column of the left point."""
    end: int
    """Column of the right point."""
    levels: tuple[float, float]
    """Means at both."""
    t: float
    critical: float

    @property
    def size(self) -> float:
        """Absolute difference of the means."""
        return abs(self.levels[1] - self.levels[0])

    def sentence(self, verb: str) -> str:
        """Return `Test error VERB from 0.4 at rank 1 to 0.2 at rank 8 (t = 9, critical 3.4).`"""
        curve = self.curve
        subject = curve.metric[:1].upper() + curve.metric[1:]
        return (
            f"{subject} {verb} from {curve.amount(self.levels[0])} at {curve.at(self.start)} to "
            f"{curve.amount(self.levels[1])} at {curve.at(self.end)} (t = {self.t:.3g}, critical {self.critical:.3g})."
        )


class CurveShape:
    """Rises and falls between the points of the peak test.

    The critical value is that of the largest rise anywhere on a flat curve; the largest fall has the same one. So
    whichever pair is shown, a curve without any rise (fall) shows one with probability at most the test's level.
    """

    def __init__(self, curve: Curve, pairs: PointPairs, unit: float, means: np.ndarray, test: PeakTest):
        self.curve, self.test = curve, test
        self.points = test.points
        self.mean = {column: curve.scale.back(z) for column, z in zip(test.points, means.tolist(), strict=True)}
        """Mean over seeds by column, taken on the curve's scale."""
        self._pairs, self._unit, self._means, self._t = pairs, unit, means, pairs.t

    def fall_before(self, column: int) -> SignificantChange | None:
        """Return the clearest significant fall that ends left of `column`."""
        end = self.points.index(column)
        return self._clearest(-self._t[:end, :end])

    def rise_after(self, column: int) -> SignificantChange | None:
        """Return the clearest significant rise from `column` or a later point."""
        start = self.points.index(column)
        return self._clearest(self._t[start:, start:], start)

    def largest_rise(self) -> SignificantChange | None:
        """Return the clearest significant rise anywhere."""
        return self._clearest(self._t)

    def fall_to_the_end(self) -> SignificantChange | None:
        """Return the fall from the first to the last point, if significant."""
        last = len(self.points) - 1
        return self._step(0, last, -self._t[0, last]) if -self._t[0, last] > self.test.critical else None

    def overfitting(self, level: float) -> str | None:
        """Return a sentence if the curve rises from its lowest point to its last and does not come back.

        Not coming back: from the highest later point on, no fall reaches half the rise, and the paired upper limit of
        the largest one is below the whole rise.
        """
        means, back = self._means, self.curve.scale.back
        low, last = int(np.argmin(means)), len(means) - 1
        if low == last or self._t[low, last] <= self.test.critical:
            return None
        top = low + 1 + int(np.argmax(means[low + 1 :]))
        rise = float(means[top] - means[low])
        falls = means[top] - means[top:]
        factor = t_quantile(1 - level, self.test.seeds - 1)
        limits = falls + factor * self._unit * np.sqrt(self._pairs.variance[top, top:] / self.test.seeds)
        if falls.max() > rise / 2 or limits.max() >= rise:
            return None
        found = self._step(low, last, self._t[low, last]).sentence("rises")
        if top == last:
            return f"{found} It is highest at the end."
        return (
            f"{found} From its highest point, {self.curve.at(self.points[top])}, it falls by no more than "
            f"{self.curve.amount(back(means[top]) - back(means[top] - limits.max()))} (one-sided {1 - level:.0%} "
            f"limit), less than its rise of {self.curve.amount(back(means[top]) - back(means[low]))}."
        )

    def _clearest(self, t: np.ndarray, offset: int = 0) -> SignificantChange | None:
        left, right = np.triu_indices(len(t), 1)
        if not len(left):
            return None
        best = int(np.argmax(t[left, right]))
        value = float(t[left[best], right[best]])
        return (
            self._step(offset + int(left[best]), offset + int(right[best]), value)
            if value > self.test.critical
            else None
        )

    def _step(self, left: int, right: int, t: float) -> SignificantChange:
        start, end = self.points[left], self.points[right]
        return SignificantChange(
            self.curve, start, end, (self.mean[start], self.mean[end]), float(t), self.test.critical
        )


def build_shape(curve: Curve, test: PeakTest) -> CurveShape:
    """Return the rises and falls of `curve.test`, whose peak test is `test`."""
    rows, points = select_finite(curve.test)
    kept = curve.scale.to(curve.test[np.ix_(rows, points)])
    moved, unit = normalise_curves(kept)
    return CurveShape(curve, point_pairs(moved, curve.scale.least(unit)), unit, kept.mean(0), test)
