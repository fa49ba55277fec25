"""Two curves on the same seeds: does one lie below the other, and is a peak lower, higher or elsewhere?

    found = compare_curves(flat, plain)        # two Curves over the same positions, row s the same seed in both
    found.mean, found.peak, found.threshold    # intervals of flat − plain

Looking for the peak in one curve and reading the other at the same place is no test: the peak was found where its own
errors are large and positive, so any second curve seems lower there. Here the triple of points is taken from the mean
of both curves. If both scatter alike, difference and mean are independent, and the paired t-test at the triple holds as
if the triple had been named beforehand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from experiments.descent.curve import Curve
from experiments.descent.emc import crossing
from experiments.descent.pairs import rises_and_falls
from experiments.stats import Interval, paired_p, t_interval
from finetune.errors import UserError

FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Beside:
    """What `compare_curves` found; intervals are two-sided, 95 %, over seeds."""

    mean: Interval
    """Mean over the axis of the difference, ours − base."""
    p: float | None
    """Two-sided p of `mean`; None where every seed has the same difference, which is not zero."""
    points: tuple[Interval, ...]
    """The difference at each position; all intervals hold at once (Bonferroni over the positions)."""
    triple: tuple[int, int, int] | None
    """Left flank, peak and right flank of the mean of both curves; None where that has no peak at all."""
    peak: Interval | None
    """How much higher ours stands at the peak, above the mean of its two flanks, than base does."""
    peak_p: float | None
    """Two-sided p of `peak`; None as for `p`, and without a peak."""
    threshold: Interval | None
    """Position where the training error crosses ε, ours ÷ base, seed by seed; None unless every seed crosses it on the
    axis in both curves."""
    seeds: int
    """Seeds that both curves have whole."""

    @property
    def moved(self) -> bool:
        """Whether the interpolation threshold lies elsewhere, by its interval."""
        found = self.threshold
        return (
            found is not None and found.low is not None and found.high is not None and not found.low <= 1 <= found.high
        )


def compare_curves(ours: Curve, base: Curve, *, confidence: float = 0.95) -> Beside:
    """Compare `ours` with `base`: held-out figures at the same positions, row s the same seed in both.

    Seeds with a value that is not finite anywhere in either curve are left out as a whole.

    Raises:
        UserError: other positions, another number of seeds, or fewer than three whole seeds.
    """
    if list(ours.values) != list(base.values) or ours.test.shape != base.test.shape:
        raise UserError(
            f"curves over {ours.axis} can be compared at the same positions and seeds only; got "
            f"{list(ours.test.shape)} and {list(base.test.shape)}"
        )
    whole = np.flatnonzero(np.isfinite(ours.test).all(1) & np.isfinite(base.test).all(1))
    if len(whole) < FEWEST_SEEDS:
        raise UserError(f"{len(whole)} seeds are whole in both curves; a comparison needs {FEWEST_SEEDS}")
    mine, theirs = ours.test[whole], base.test[whole]
    difference = mine - theirs
    each = 1 - (1 - confidence) / difference.shape[1]
    means = difference.mean(1).tolist()
    triple = common_peak(np.stack([mine, theirs]))
    heights = None if triple is None else (height_at(mine, triple) - height_at(theirs, triple)).tolist()
    return Beside(
        mean=t_interval(means, confidence=confidence),
        p=paired_p(means),
        points=tuple(t_interval(column.tolist(), confidence=each) for column in difference.T),
        triple=triple,
        peak=None if heights is None else t_interval(heights, confidence=confidence),
        peak_p=None if heights is None else paired_p(heights),
        threshold=_threshold(ours, base, whole, confidence),
        seeds=len(whole),
    )


def common_peak(curves: np.ndarray) -> tuple[int, int, int] | None:
    """Left flank, peak and right flank of the mean of `curves` [..., J] over all but the last dim.

    The triple i < j < l with the largest min(y_j − y_i, y_j − y_l); None if the mean is quasi-convex.
    """
    mean = curves.reshape(-1, curves.shape[-1]).mean(0)
    step = mean[None, :] - mean[:, None]  # [i, j]: from i to j
    rise, fall = rises_and_falls(step)
    middle = int(np.argmax(np.minimum(rise, fall)))
    if not min(rise[middle], fall[middle]) > 0:
        return None
    return int(np.argmin(mean[:middle])), middle, middle + 1 + int(np.argmin(mean[middle + 1 :]))


def height_at(curves: np.ndarray, triple: tuple[int, int, int]) -> np.ndarray:
    """[S]: y_j − (y_i + y_l)/2 of each row of `curves` [S, J]."""
    left, middle, right = triple
    return curves[:, middle] - (curves[:, left] + curves[:, right]) / 2


def _threshold(ours: Curve, base: Curve, whole: np.ndarray, confidence: float) -> Interval | None:
    """Ratio of the crossings of ε, from the t-interval of its logarithm over seeds."""
    if ours.train_error is None or base.train_error is None or not ours.values[0] > 0:
        return None
    logs = []
    for seed in whole:
        found = []
        for curve in (ours, base):
            assert curve.train_error is not None
            row = curve.train_error[seed : seed + 1]
            found.append(crossing(curve.values, row, curve.epsilon).value if np.isfinite(row).all() else None)
        if found[0] is None or found[1] is None:
            return None
        logs.append(math.log(found[0] / found[1]))
    ratio = t_interval(logs, confidence=confidence)
    low, high = (None if end is None else math.exp(end) for end in (ratio.low, ratio.high))
    return Interval(math.exp(ratio.value), low, high, ratio.n)
