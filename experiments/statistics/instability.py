"""Unstable training: a peak or lasting rise of the training loss, confirmed by gradient norm or sharpness."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flatshift.experiments.statistics.curve import TABLES, Curve, CurveShape
from flatshift.experiments.statistics.intervals import t_interval
from flatshift.experiments.statistics.peak import PeakTest, checked_peak_test
from flatshift.experiments.statistics.scale import choose_scale
from flatshift.finetune.errors import UserError

SPIKE = 2.0
"""Smallest gradient norm that counts as a spike, as a multiple of that at the left flank of the training peak."""
LASTING = 0.2
"""Smallest lasting rise of the training loss that counts as unstable, as a share of the fall before it."""
ALONG_STEPS = ("step", "steps")
"""Axes that extend training; along any other a rising training loss may be expected, as with more rows."""


@dataclass(frozen=True)
class Instability:
    """Findings on the training side of a curve.

    peak: of the training loss; None if not measured, with too few seeds or points, or without seed differences. spike:
    the training peak has a gradient spike, or sharpness above its threshold. lasting: the training loss rises
    significantly along the steps and does not come back, by at least a fifth of its fall before.
    """

    peak: PeakTest | None
    spike: bool = False
    lasting: bool = False
    evidence: list[str] = field(default_factory=list)

    @property
    def has_peak(self) -> bool:
        """True if the training loss has a peak."""
        return self.peak is not None and self.peak.rejected

    @property
    def unstable(self) -> bool:
        """True if training was unstable: a peak with its spike, or a lasting rise."""
        return self.spike or self.lasting


def find_instability(curve: Curve, *, level: float, draws: int, seed: int) -> Instability:
    """Test the training loss for a peak and, if it has one, examine gradient and sharpness between its flanks.

    Each is examined on its seeds at every point between the flanks (sharpness at the flanks too), at level ÷ points.
    A gradient spike: at least twice the norm at the left flank, and the limit of the seed-paired ratio above 1.
    """
    if curve.train_loss is None:
        return Instability(None, evidence=["Training loss was not measured, so instability cannot be ruled out."])
    scale = choose_scale("training loss", curve.train_loss)
    try:
        peak = checked_peak_test(curve.train_loss, level=level, draws=draws, seed=seed, scale=scale)
    except UserError as error:
        return Instability(None, evidence=[f"Training loss cannot be evaluated: {error}."])
    lasting, rise = _lasting_rise(curve, peak, level)
    if peak.triple is None:
        sentence = (
            f"Training loss has no peak by the same test (p = {peak.p_value:.2g}); one of {peak.detectable.height:.3g} "
            f"at {curve.at(peak.detectable.point)}, where runs scatter most, would be found in 80 % of cases."
        )
        return Instability(peak, lasting=lasting, evidence=[sentence, *rise])
    i, j, l = peak.triple
    means = scale.to(np.delete(curve.train_loss, list(peak.diverged), axis=0)).mean(0)
    mean = {k: scale.back(float(means[k])) for k in (i, j, l)}
    evidence = [
        f"Training loss has a peak too: {mean[i]:.3g} at {curve.at(i)}, {mean[j]:.3g} at {curve.at(j)}, {mean[l]:.3g} "
        f"at {curve.at(l)} (p = {peak.p_value:.2g})."
    ]
    lost = list(peak.diverged)
    tables: dict[str, Any] = {n: np.delete(t, lost, axis=0) for n in TABLES if (t := getattr(curve, n)) is not None}
    curve = replace(curve, **tables)
    findings = (_gradient_finding(curve, peak.triple, level), _sharpness_finding(curve, peak.triple, level))
    recorded = [finding for finding in findings if finding is not None]
    if not recorded:
        evidence.append(
            "Neither gradient norms nor sharpness were recorded there: record one to tell instability apart."
        )
    return Instability(peak, any(hit for hit, _ in recorded), lasting, [*evidence, *(s for _, s in recorded), *rise])


def _lasting_rise(curve: Curve, peak: PeakTest, level: float) -> tuple[bool, list[str]]:
    """Return (unstable, sentences) for a training loss that rises along the steps and does not come back."""
    if curve.axis not in ALONG_STEPS or curve.train_loss is None:
        return False, []
    shape = CurveShape(replace(curve, test=curve.train_loss, metric="training loss", items=None), peak)
    sentence = shape.overfitting(level)
    if sentence is None:
        return False, []
    means = [shape.mean[column] for column in shape.points]
    low = int(np.argmin(means))
    fall, rise = max(means[: low + 1]) - means[low], means[-1] - means[low]
    if rise >= LASTING * fall:
        return True, [f"{sentence} It does not come back: training was unstable."]
    return False, [f"{sentence} That is less than a fifth of its fall before."]


def _gradient_finding(curve: Curve, triple: tuple[int, int, int], level: float) -> tuple[bool, str] | None:
    """Return (spike, sentence); None if not recorded at the left flank and between."""
    if curve.gradient_norm is None:
        return None
    flank, between = triple[0], range(triple[0] + 1, triple[2])
    ratios = {}
    for j in between:
        pair = curve.gradient_norm[:, [flank, j]]
        pair = pair[np.isfinite(pair).all(1) & (pair > 0).all(1)]
        if len(pair) > 1:
            ratios[j] = t_interval(np.log(pair[:, 1] / pair[:, 0]).tolist(), confidence=1 - 2 * level / len(between))
    if not ratios:
        return None
    spiked = max(ratios, key=lambda j: ratios[j].value)
    ratio = ratios[spiked]
    # `exp` overflows above 709.
    value, low, high = (math.exp(min(end or 0.0, 700.0)) for end in (ratio.value, ratio.low, ratio.high))
    spike = value >= SPIKE and low > 1
    return spike, (
        f"The gradient norm at {curve.at(spiked)} is {value:.3g} × that at {curve.at(flank)} ({low:.3g} to "
        f"{high:.3g}): {'a spike' if spike else 'no spike'}."
    )


def _sharpness_finding(curve: Curve, triple: tuple[int, int, int], level: float) -> tuple[bool, str] | None:
    """Return (above its threshold, sentence); None if not recorded between the flanks."""
    if curve.sharpness is None:
        return None
    columns = range(triple[0], triple[2] + 1)
    intervals = {}
    for j in columns:
        values = curve.sharpness[np.isfinite(curve.sharpness[:, j]), j]
        if len(values) > 1:
            intervals[j] = t_interval(values.tolist(), confidence=1 - 2 * level / len(columns))
    if not intervals:
        return None
    sharpest = max(intervals, key=lambda j: intervals[j].low or 0.0)
    value, low = intervals[sharpest].value, intervals[sharpest].low or 0.0
    return low > 1, (
        f"Sharpness × learning rate at {curve.at(sharpest)} is {value:.3g} of its stability threshold (at least "
        f"{low:.3g}): {'above it' if low > 1 else 'not shown to exceed it'}."
    )
