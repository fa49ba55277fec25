"""How often the peak test rejects: many curves at once, deciding as `peak_test` does, without its intervals."""

from __future__ import annotations

import math

import numpy as np

from flatshift.experiments.statistics.pairs import (
    critical_value,
    null_distribution,
    point_pairs,
    point_variances,
    rises_and_falls,
)
from flatshift.experiments.statistics.scale import choose_scale

_SCREEN = 2000
_CLEAR = 5.0


def rejections(
    curves: np.ndarray,
    *,
    level: float = 0.05,
    draws: int = 20_000,
    seed: int = 0,
    metric: str = "",
    items: int | None = None,
) -> np.ndarray:
    """[N] booleans: `peak_test(curves[n]).rejected` for finite `curves` [N, S, J], on the scale that `metric` has.

    A curve whose share of the first 2,000 flat draws lies five standard errors away from `level` is decided by them;
    the others by all draws. The two differ with a probability below 1e-6 for each curve.
    """
    scales = [choose_scale(metric, curve, items) for curve in curves]
    least = max((scale.variance for scale in scales), default=0.0)
    pairs = point_pairs(np.stack([scale.to(curve) for scale, curve in zip(scales, curves, strict=True)]), least)
    rise, fall = rises_and_falls(pairs.t)
    statistics = np.minimum(rise, fall).max(-1)
    variances = point_variances(pairs.variance, pairs.seeds, least)
    flat = null_distribution(pairs.seeds, curves.shape[-1], draws, seed)
    first = min(_SCREEN, draws)
    margin = _CLEAR * math.sqrt(level * (1 - level) / first)
    result = np.zeros(len(curves), dtype=bool)
    for n in np.flatnonzero(statistics > 0):
        share = float((flat.extremes(variances[n], first, least)[0] >= statistics[n]).mean())
        if abs(share - level) > margin:
            result[n] = share < level
        else:
            result[n] = statistics[n] > critical_value(flat.extremes(variances[n], minimum=least)[0], level)
    return result
