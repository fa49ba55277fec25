"""Extra evidence for a peak: choose where to look on some seeds, look there on the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.statistics.intervals import t_quantile
from experiments.statistics.pairs import pairs_of, rises_and_falls
from experiments.statistics.peak import finite_part
from finetune.errors import UserError

CHOOSING = 3
FEWEST_SEEDS = 8


@dataclass(frozen=True)
class Holdout:
    """Two one-sided paired t-tests at a triple that other seeds chose."""

    triple: tuple[int, int, int]
    """Columns of left flank, peak and right flank, chosen on the first three seeds."""
    p_value: float
    """The larger of the two p-values: both sides must fall away."""
    confirmed: bool
    """Both tests reject at the level."""
    seeds: int
    """Seeds that the tests used."""


def holdout_test(curves: np.ndarray, *, level: float = 0.05) -> Holdout:
    """Confirm a peak without the calibration of `peak_test`: no flat curves, no shrinkage, no search on the same seeds.

    curves: [S, J] as for `peak_test`, at least 8 seeds with finite values: three choose the triple, the others judge.
    Both tests must reject at `level`, so false alarms stay below it; the power is lower than that of `peak_test`.

    Raises UserError for fewer than 8 seeds, and as `peak_test` does.
    """
    from scipy.special import stdtr

    table = np.asarray(curves, dtype=np.float64)
    rows, points = finite_part(table)
    if len(rows) < FEWEST_SEEDS:
        raise UserError(f"the check on other seeds needs at least {FEWEST_SEEDS} seeds with values, got {len(rows)}")
    kept = table[np.ix_(rows, points)]
    t = pairs_of(kept[:CHOOSING]).t
    rise, fall = rises_and_falls(t)
    j = int(np.argmax(np.minimum(rise, fall)))
    i, l = int(np.argmax(t[:j, j])), j + 1 + int(np.argmax(t[j + 1 :, j]))
    others = kept[CHOOSING:]
    n = len(others)
    sides = np.stack([others[:, j] - others[:, i], others[:, j] - others[:, l]])
    mean, sd = sides.mean(1), sides.std(1, ddof=1)
    statistic = np.divide(mean * np.sqrt(n), sd, out=np.zeros(2), where=sd > 0)
    p = float(stdtr(n - 1, -statistic).max())
    confirmed = bool((statistic > t_quantile(1 - level, n - 1)).all())
    return Holdout((points[i], points[j], points[l]), p, confirmed, n)
