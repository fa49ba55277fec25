"""Verdict on a curve: double descent, instability, overfitting, mixed, monotone or undecided, with evidence.

Each kind must be earned by tests; a curve that earns none is `undecided`, with a sentence on what would decide it.
Every test has its own level; the verdict `double descent` needs five findings at once, so it is wrong less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flatshift.experiments.statistics.curve import Curve, CurveShape, capitalise, percents
from flatshift.experiments.statistics.emc import Crossing, find_crossing
from flatshift.experiments.statistics.instability import Instability, find_instability
from flatshift.experiments.statistics.intervals import t_interval
from flatshift.experiments.statistics.peak import (
    HOLDOUT_SEEDS,
    HoldoutResult,
    PeakTest,
    TooFewSeeds,
    check_points,
    checked_peak_test,
    holdout_test,
    seeds_needed,
)
from flatshift.finetune.errors import UserError

Kind = Literal["double descent", "instability", "overfitting", "mixed", "monotone", "undecided"]
TOLERANCE = 0.2
"""Largest peak that monotone allows by default, as a share of the whole fall."""


@dataclass(frozen=True)
class CurveVerdict:
    """Verdict on a curve and the evidence for it.

    evidence: sentences with the numbers that led to `kind`, what was missing, and what would decide. peak, train_peak:
    of the test error and the training loss; None if not measured, with too few seeds or points, or seeds that do not
    differ. crossing: of ε by the mean training error. holdout: confirmation on other seeds, from eight on, if the peak
    test rejects. seeds_needed: to find a peak as high as the largest hump with a power of 80 %; None beyond 100, or if
    not computed.
    """

    kind: Kind
    evidence: tuple[str, ...]
    peak: PeakTest | None = None
    train_peak: PeakTest | None = None
    crossing: Crossing | None = None
    holdout: HoldoutResult | None = None
    seeds_needed: int | None = None


def determine_verdict(
    curve: Curve, *, level: float = 0.05, delta: float | None = None, draws: int = 20_000, seed: int = 0
) -> CurveVerdict:
    """Determine the verdict of one curve.

    - double descent: the test error has a peak, a significant fall to the left of it, no peak of the training loss, the
      interpolation threshold is inside the peak's location set or between it and the next point, and training data
      fitted at the peak stay fitted while the test error falls.
    - instability: the training loss has a peak, where the gradient norm at least doubles or the sharpness exceeds its
      stability threshold; or, along the steps, it rises permanently by at least a fifth of its previous fall.
    - overfitting: the test error rises significantly from its lowest point to the end and does not come back.
    - mixed: the first and one of the next two together.
    - monotone: the test error falls significantly from the first to the last point, never rises significantly, and
      every peak above `delta` is excluded.

    A curve of the training loss itself (`Curve.training`) can be instability, monotone or undecided only. level: of
    each test. delta: height of a peak that would matter, in units of the test error; None: a fifth of the whole fall.
    draws, seed: as for `peak_test`. Raises UserError for more than 10 points (`peak.thin` chooses them), or level,
    delta or ε out of bounds. Too few seeds or points, and seeds that do not differ, are no error: the verdict is
    undecided, with the reason.
    """
    check_points(len(curve.values))
    if not 0 < level < 0.5:
        raise UserError(f"determine_verdict: level must be between 0 and 0.5, got {level}")
    if delta is not None and not delta > 0:
        raise UserError(f"determine_verdict: delta must be positive, got {delta}")
    try:
        peak = checked_peak_test(curve.test, level=level, draws=draws, seed=seed, scale=curve.scale)
    except UserError as error:
        crossing = _find_threshold(curve, np.flatnonzero(~np.isfinite(curve.test).all(1)), range(len(curve.values)))
        reason = error.message_for(curve.planned) if isinstance(error, TooFewSeeds) else str(error)
        sentences = [capitalise(reason) + ".", curve.lost_sentence(), _no_peak_reason(curve, crossing)]
        return CurveVerdict("undecided", tuple(filter(None, sentences)), crossing=crossing)
    bump = find_instability(curve, level=level, draws=draws, seed=seed)
    crossing = _find_threshold(curve, peak.diverged, peak.points)
    findings = _CurveFindings(curve, peak, CurveShape(curve, peak), bump, crossing, level)
    if curve.training:
        kind, evidence = findings.decide_training(delta)
    else:
        kind, evidence = findings.decide_with_peak() if peak.rejected else findings.decide_without_peak(delta)
    holdout = None
    if peak.rejected and peak.seeds >= HOLDOUT_SEEDS:
        holdout = holdout_test(curve.scale.to(curve.test), level=level)
        verb = "confirm it" if holdout.confirmed else "do not confirm it"
        evidence.append(
            f"Chosen on 3 seeds and tested on the other {holdout.seeds}, two paired t-tests {verb} "
            f"(p = {holdout.p_value:.2g})."
        )
    if (scale_sentence := curve.scale.sentence()) is not None:
        evidence.append(scale_sentence)
    if (lost := curve.lost_sentence()) is not None:
        points = [curve.at(j) for j in range(len(curve.values)) if j not in peak.points]
        evidence.append(lost)
        if points:
            evidence.append(f"Left out, since most seeds have no value there: {', '.join(points)}.")
        if peak.diverged:
            evidence.append(f"The verdict is about the other {peak.seeds} seeds.")
    return CurveVerdict(kind, tuple(evidence), peak, bump.peak, crossing, holdout, findings.seeds_needed)


def _find_threshold(curve: Curve, diverged: Sequence[int] | np.ndarray, points: Sequence[int]) -> Crossing | None:
    """Find the threshold on the seeds and points of the peak test; None if not measured there."""
    if curve.train_error is None or len(points) < 2:
        return None
    errors = np.delete(curve.train_error, list(diverged), axis=0)[:, list(points)]
    if not np.isfinite(errors).all(1).any():
        return None
    return find_crossing([curve.values[j] for j in points], errors, curve.epsilon)


def _no_peak_reason(curve: Curve, crossing: Crossing | None) -> str | None:
    """Return a sentence if the axis cannot show an interpolation peak, else None."""
    if crossing is None or crossing.value is not None or crossing.fitted == "some" or curve.training:
        return None
    limit = f"point has a mean {curve.fit} of at most {curve.epsilon:g}"
    reason = f"so this axis cannot show a peak of interpolation; it needs values of {curve.axis} at which"
    if crossing.fitted == "all":
        return f"Every {limit}, the smallest value included, {reason} training data are not fitted."
    return f"No {limit}, {reason} it is reached."


@dataclass
class _CurveFindings:
    """Findings on one curve, and the verdicts they earn."""

    curve: Curve
    peak: PeakTest
    shape: CurveShape
    bump: Instability
    crossing: Crossing | None
    level: float
    seeds_needed: int | None = None

    def decide_with_peak(self) -> tuple[Kind, list[str]]:
        """Return the verdict for a test error with a peak."""
        evidence = [self._peak_sentence()]
        assert self.peak.triple is not None
        descent = self.shape.fall_before(self.peak.triple[1])
        evidence.append(
            descent.sentence("first falls")
            if descent
            else f"No significant fall to the left of the peak: a first descent needs smaller values of "
            f"{self.curve.axis}, or more seeds."
        )
        at_peak, sentence = self._threshold_sentence()
        unfitted = self._unfitted_sentence()
        evidence += filter(None, [sentence, *self.bump.evidence, unfitted])
        classic = descent is not None and at_peak and unfitted is None
        rise = self.shape.rise_after(self.peak.triple[2])
        if classic and (self.bump.has_peak or self.bump.lasting):
            training = "the training loss peaks too" if self.bump.has_peak else "training was unstable too"
            return "mixed", [*evidence, f"The peak is where interpolation predicts it, but {training}."]
        if classic and rise is not None:
            return "mixed", [*evidence, rise.sentence("after its second descent rises again")]
        if classic and self.bump.peak is not None:
            return "double descent", evidence
        if self.bump.unstable:
            return "instability", evidence
        return "undecided", [*evidence, "A peak, but not every finding that a name for it needs."]

    def decide_without_peak(self, delta: float | None) -> tuple[Kind, list[str]]:
        """Return the verdict for a test error without a peak that these seeds can show."""
        overfit = self.shape.overfitting(self.level)
        evidence = [] if overfit is None else [overfit]
        last = [*self.bump.evidence, *self._nothing_sentences()]
        humps = self._hump_sentences()
        if self.bump.unstable:  # data that are not fitted any more after a lasting rise are not overfitted
            return ("mixed" if overfit and self.bump.spike else "instability"), [*evidence, *last]
        if self.bump.has_peak:
            return "undecided", [*evidence, *last, *humps]
        if overfit:
            return "overfitting", [*evidence, *last]
        monotone, sentences = self._fall(delta)
        return ("monotone", [*sentences, *last]) if monotone else ("undecided", [*sentences, *last, *humps])

    def decide_training(self, delta: float | None) -> tuple[Kind, list[str]]:
        """Return the verdict for a curve of the training loss itself."""
        evidence = list(self.bump.evidence)
        if self.bump.unstable:
            return "instability", evidence
        if self.bump.has_peak:
            return "undecided", [*evidence, "A bump of the training loss, but no spike that says it was unstable."]
        monotone, sentences = self._fall(delta)
        evidence += sentences
        return ("monotone", evidence) if monotone else ("undecided", [*evidence, *self._hump_sentences()])

    def _fall(self, delta: float | None) -> tuple[bool, list[str]]:
        """Return (True if the curve falls and every peak that matters is excluded, sentences)."""
        fall = self.shape.fall_to_the_end()
        if fall is None or self.shape.largest_rise() is not None:
            return False, []
        allowed = TOLERANCE * fall.size if delta is None else delta
        monotone = self.peak.ceiling <= allowed
        ceiling, limit = self.curve.amount(self.peak.ceiling), self.curve.amount(allowed)
        sentence = (
            f"No peak that matters: any above {ceiling} is excluded (one-sided {percents(self.level)[1]}% "
            f"limit), and only {limit} or more would matter."
            if monotone
            else f"A peak of up to {ceiling} is not excluded; called monotone below {limit}."
        )
        return monotone, [fall.sentence("falls"), sentence]

    def _peak_sentence(self) -> str:
        curve, peak = self.curve, self.peak
        assert peak.triple is not None
        i, j, l = peak.triple
        mean = self.shape.mean
        location = " to ".join(dict.fromkeys(f"{curve.values[peak.location[end]]:g}" for end in (0, -1)))
        return (
            f"{capitalise(curve.metric)} has a peak at {curve.at(j)}: {curve.amount(mean[i])} at {curve.at(i)}, "
            f"{curve.amount(mean[j])} at {curve.at(j)}, {curve.amount(mean[l])} at {curve.at(l)}; height "
            f"{curve.amount(peak.height.estimate)} ({peak.height.low:.3g} to {peak.height.high:.3g}), located at "
            f"{curve.axis} {location} (T = {peak.statistic:.3g}, critical {peak.critical:.3g}, p = {peak.p_value:.2g}, "
            f"{peak.seeds} seeds)."
        )

    def _threshold_sentence(self) -> tuple[bool, str]:
        """Return (True if the interpolation threshold is at the peak, sentence)."""
        curve, crossing = self.curve, self.crossing
        if crossing is None:
            return False, "Training error was not measured, so the interpolation threshold is unknown."
        if crossing.value is None:
            return False, _no_peak_reason(curve, crossing) or (
                f"Mean {curve.fit} is at most {curve.epsilon:g} at some points only, in no order: no one threshold."
            )
        points = self.peak.points
        first, last = points.index(self.peak.location[0]), points.index(self.peak.location[-1])
        low, high = curve.values[points[max(first - 1, 0)]], curve.values[points[min(last + 1, len(points) - 1)]]
        at_peak = low <= crossing.value <= high
        span = "" if crossing.low is None or crossing.high is None else f" ({crossing.low:.3g} to {crossing.high:.3g})"
        return at_peak, (
            f"Mean {curve.fit} crosses {curve.epsilon:g} at {curve.axis} {crossing.value:.3g}{span}, "
            f"{'inside' if at_peak else 'outside'} the peak's location with its neighbours ({low:g} to {high:g})."
        )

    def _unfitted_sentence(self) -> str | None:
        """Return a sentence if the fall after the peak coincides with training data no longer fitted; None otherwise.
        Applies only if the training error fell towards the peak: along rows it rises, and the left is fitted."""
        curve, triple = self.curve, self.peak.triple
        if curve.train_error is None or triple is None:
            return None
        _, j, l = triple
        errors = self._train_errors([self.peak.points[0], j, l])
        if len(errors) < 2:
            return None
        first, top, right = errors.mean(0)
        rise = t_interval((errors[:, 2] - errors[:, 1]).tolist(), confidence=1 - 2 * self.level)
        if not (first > top and right > curve.epsilon and rise.low is not None and rise.low > 0):
            return None
        return (
            f"{capitalise(curve.fit)} rises again from {top:.3g} at {curve.at(j)} to {right:.3g} at {curve.at(l)} (by "
            f"at least {rise.low:.2g}): data are fitted less there, so that fall is no second descent of what "
            "interpolates."
        )

    def _train_errors(self, points: Sequence[int]) -> np.ndarray:
        """Return [S, points]: training errors of the tested seeds that have all of them."""
        assert self.curve.train_error is not None
        errors = np.delete(self.curve.train_error, list(self.peak.diverged), axis=0)[:, list(points)]
        return errors[np.isfinite(errors).all(1)]

    def _open_end_sentence(self) -> str | None:
        """Return a sentence if the right end is not fitted again, though points before it are; None otherwise."""
        curve, points = self.curve, self.peak.points
        if self.crossing is None or self.crossing.rising or self.crossing.fitted != "some":
            return None
        errors = self._train_errors(points)
        mean = errors.mean(0)
        if len(errors) < 2 or mean[-1] <= curve.epsilon:
            return None
        last = t_interval(errors[:, -1].tolist(), confidence=1 - 2 * self.level)
        sentence = f"Mean {curve.fit} is above {curve.epsilon:g} again at {curve.at(points[-1])}: {mean[-1]:.3g}"
        if last.low is not None and last.low > curve.epsilon:
            return f"{sentence} (at least {last.low:.3g}). The axis does not end with fitted data."
        return f"{sentence} (not significantly). That the axis ends with fitted data is not shown."

    def _nothing_sentences(self) -> list[str]:
        """Describe the missing peak, the smallest one that would be found, and if the axis can show one at all."""
        curve, peak, detectable = self.curve, self.peak, self.peak.detectable
        reason = _no_peak_reason(curve, self.crossing) or self._open_end_sentence()
        return [
            f"No peak of {curve.metric} at the {percents(peak.level)[0]}% level (T = {peak.statistic:.3g}, critical "
            f"{peak.critical:.3g}, p = {peak.p_value:.2g}). {peak.seeds} seeds and {len(peak.points)} points find a "
            f"peak of {curve.amount(detectable.height)} ({detectable.sd:.2g} standard deviations of one run) at "
            f"{curve.at(detectable.point)}, where runs scatter most, in 80 % of cases; of "
            f"{curve.amount(detectable.even)} if all points scattered alike.",
            *([reason] if reason else []),
        ]

    def _hump_sentences(self) -> list[str]:
        """Describe the height of the largest hump, and how many seeds would show it."""
        curve, peak = self.curve, self.peak
        if not (peak.sd > 0 and peak.height.estimate > 0):
            return []
        self.seeds_needed = seeds_needed(peak.hump, len(peak.points), level=peak.level)
        hump = f"The largest hump measures {curve.amount(peak.height.estimate)} (0 to {peak.height.high:.3g})"
        if self.seeds_needed is None:
            return [f"{hump}; if that is its true height, more than 100 seeds would be needed to show it."]
        if self.seeds_needed > peak.seeds:
            return [f"{hump}; if that is its true height, {self.seeds_needed} seeds would show it."]
        return [f"{hump}."]
