"""Curve of a sweep: measurements along one axis under several seeds, and its significant rises and falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flatshift.experiments.statistics.emc import EPSILON
from flatshift.experiments.statistics.intervals import t_quantile
from flatshift.experiments.statistics.pairs import point_pairs
from flatshift.experiments.statistics.peak import PeakTest, normalise_curves, select_finite
from flatshift.experiments.statistics.scale import MetricScale, choose_scale
from flatshift.finetune.errors import UserError

Lost = Literal["diverged", "failed", "stopped early", "ended early", "had no value"]
"""Fate of runs without values; `ended early`: some diverged, some stopped; `had no value`: some finished."""
TABLES = ("test", "train_error", "train_loss", "gradient_norm", "sharpness")


@dataclass(frozen=True, eq=False, kw_only=True)
class Curve:
    """Measurements [S, J]: row s is one seed at all J points; NaN or infinity if a run diverged or was not measured.

    fit, metric, unit, lost: names in sentences of `train_error`, of `test`, of its unit, and of runs without values.
    Raises UserError if a table does not fit the axis or has other seeds than `test`, or if the axis does not ascend.
    """

    axis: str
    values: Sequence[float]
    """[J]: ascending positions on the axis."""
    test: np.ndarray
    """[S, J]: metric to test, smaller is better, measured on held-out rows."""
    train_error: np.ndarray | None = None
    """[S, J]: share of wrong training examples or tokens; places the interpolation threshold."""
    train_loss: np.ndarray | None = None
    gradient_norm: np.ndarray | None = None
    sharpness: np.ndarray | None = None
    """[S, J]: (preconditioned) sharpness × learning rate ÷ its stability threshold (2 for gradient descent, 38 for Adam
    with β₁ = 0.9); above 1 a quadratic diverges."""
    fit: str = "training error"
    metric: str = "test error"
    unit: str = ""
    items: int | None = None
    """Items behind each error rate of `test`; None: unknown, or not a rate."""
    epsilon: float = EPSILON
    """Mean training error up to which training data count as fitted."""
    training: bool = False
    """True if `test` is the training loss itself: a peak of it is unstable training, never double descent."""
    lost: Lost = "diverged"
    planned: int | None = None
    """Number of seeds in the plan if cells are still missing; None: all cells have ended."""

    def __post_init__(self) -> None:
        try:
            x = np.asarray(self.values, dtype=np.float64)
        except (ValueError, TypeError):
            raise UserError(f"curve over {self.axis}: the positions must be numbers, got {self.values!r}") from None
        if x.ndim != 1 or not np.isfinite(x).all() or (np.diff(x) <= 0).any():
            raise UserError(f"curve over {self.axis}: the positions must be numbers that ascend")
        for name in TABLES:
            table = getattr(self, name)
            if table is None:
                continue
            table = np.asarray(table, dtype=np.float64)
            if table.ndim != 2 or table.shape[1] != len(x):
                raise UserError(
                    f"curve over {self.axis}: {name} must be a table [seeds, {len(x)}], got shape {list(table.shape)}"
                )
            if len(table) != len(self.test):
                raise UserError(
                    f"curve over {self.axis}: {name} has {len(table)} seeds and test {len(self.test)}; row by row they "
                    "must be the same seeds"
                )
            object.__setattr__(self, name, table)

    @property
    def scale(self) -> MetricScale:
        """Scale on which `test` is tested, chosen by its `metric`."""
        return choose_scale(self.metric, self.test, self.items)

    def at(self, point: int) -> str:
        """Format a point for sentences: `rank 16`."""
        return f"{self.axis} {self.values[point]:g}"

    def lost_sentence(self) -> str | None:
        """Return `2 of 5 seeds diverged at step 64 to 256.`, or `at rank 1 and 128`; None if every run has values."""
        missing = ~np.isfinite(self.test)
        if not missing.any():
            return None
        points = np.flatnonzero(missing.any(0)).tolist()
        names = [f"{self.values[j]:g}" for j in points]
        if len(names) > 1 and points[-1] - points[0] == len(points) - 1:  # every point between the first and the last
            places = f"{names[0]} to {names[-1]}"
        else:
            places = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        return f"{int(missing.any(1).sum())} of {len(missing)} seeds {self.lost} at {self.axis} {places}."

    def amount(self, value: float) -> str:
        """Format a value of `test` with its unit, for sentences."""
        return f"{value:.3g} {self.unit}".rstrip()


@dataclass(frozen=True)
class SignificantChange:
    """Significant difference between the columns `start` and `end` of a curve; levels: means at both."""

    curve: Curve
    start: int
    end: int
    levels: tuple[float, float]
    t: float
    critical: float

    @property
    def size(self) -> float:
        """Absolute difference of the means."""
        return abs(self.levels[1] - self.levels[0])

    def sentence(self, verb: str) -> str:
        """Return `Test error VERB from 0.4 at rank 1 to 0.2 at rank 8 (t = 9, critical 3.4).`"""
        curve = self.curve
        return (
            f"{capitalise(curve.metric)} {verb} from {curve.amount(self.levels[0])} at {curve.at(self.start)} to "
            f"{curve.amount(self.levels[1])} at {curve.at(self.end)} (t = {self.t:.3g}, critical {self.critical:.3g})."
        )


class CurveShape:
    """Rises and falls between the points of the peak test.

    The critical value is that of the largest rise anywhere on a flat curve; the largest fall has the same one. So
    whichever pair is shown, a curve without any rise (fall) shows one with probability at most the test's level.
    """

    def __init__(self, curve: Curve, test: PeakTest):
        """Compare the points of `curve.test`, whose peak test is `test`."""
        rows, columns = select_finite(curve.test)
        values = curve.scale.to(curve.test[np.ix_(rows, columns)])
        moved, self._unit = normalise_curves(values)
        self._pairs = point_pairs(moved, curve.scale.least(self._unit))
        self._t, self._means = self._pairs.t, values.mean(0)
        self.curve, self.test, self.points = curve, test, test.points
        self.mean = {j: curve.scale.back(z) for j, z in zip(test.points, self._means.tolist(), strict=True)}
        """Mean over seeds by column, taken on the curve's scale."""

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
        sentence = self._step(low, last, self._t[low, last]).sentence("rises")
        if top == last:
            return f"{sentence} It is highest at the end."
        return (
            f"{sentence} From its highest point, {self.curve.at(self.points[top])}, it falls by no more than "
            f"{self.curve.amount(back(means[top]) - back(means[top] - limits.max()))} (one-sided "
            f"{percents(level)[1]}% limit), less than its rise of "
            f"{self.curve.amount(back(means[top]) - back(means[low]))}."
        )

    def _clearest(self, t: np.ndarray, offset: int = 0) -> SignificantChange | None:
        left, right = np.triu_indices(len(t), 1)
        if not len(left):
            return None
        best = int(np.argmax(t[left, right]))
        value = float(t[left[best], right[best]])
        if value <= self.test.critical:
            return None
        return self._step(offset + int(left[best]), offset + int(right[best]), value)

    def _step(self, left: int, right: int, t: float) -> SignificantChange:
        start, end = self.points[left], self.points[right]
        levels = self.mean[start], self.mean[end]
        return SignificantChange(self.curve, start, end, levels, float(t), self.test.critical)


def percents(level: float) -> tuple[str, str]:
    """Format a test's level, with two digits, and what it leaves, in per cent: 0.0234 → (`2.3`, `97.7`)."""
    rounded = float(f"{100 * level:.2g}")
    return f"{rounded:g}", f"{100 - rounded:.10g}"


def capitalise(sentence: str) -> str:
    """Return the text with its first letter upper case and all others unchanged."""
    return sentence[:1].upper() + sentence[1:]
