"""Targets that the pool does not cover, by their potentials g_j and their nearest pool record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flatshift.selection.methods.base import UNITS, ConvertedRows, Progress, scaled_features, squared_distances
from flatshift.selection.methods.neighbours import nearest_rows

_FELLOWS = 2000
_QUANTILE = 0.95
_WORK = 2e10  # limit on multiplications for finding nearest records, except for the minimum number of targets
_FEWEST = 128
_LEAST = 10  # minimum number of targets with distinct features for a typical distance among them


@dataclass(frozen=True)
class Coverage:
    """Targets with the largest g, worst covered first.

    targets (k,), rows (k,) int64: the target and its nearest pool row. g (k,), costs (k,): potential, and cost to that
    row. limit: cost within which 95 % of the targets have their nearest other target; None if fewer than ten differ. A
    target beyond it is `unserved`: no record of the pool comes as near as targets come to one another.
    """

    targets: np.ndarray
    g: np.ndarray
    rows: np.ndarray
    costs: np.ndarray
    limit: float | None

    @property
    def unserved(self) -> np.ndarray:
        """Targets beyond the limit, (k,) bool."""
        return np.zeros(len(self.costs), bool) if self.limit is None else self.costs > self.limit


def target_coverage(
    x: Any, y: np.ndarray, g: np.ndarray, *, cost: str = "sqeuclidean", seed: int = 0, progress: Progress | None = None
) -> Coverage:
    """Find the nearest pool rows of all targets, or in large pools of those with the largest g.

    One pass over x (N, d), read in chunks. y (M, d): target features, g (M,): their potentials, large where coverage is
    bad.
    """
    affordable = int(_WORK / (x.shape[0] * x.shape[1]))
    worst = np.argsort(-np.asarray(g), kind="stable")[: max(_FEWEST, affordable)]
    pool = x if cost == "sqeuclidean" else ConvertedRows(x, lambda rows: scaled_features(rows, cost))
    targets = scaled_features(y, cost)
    nearest = nearest_rows(pool, targets[worst], 1, progress=progress)
    return Coverage(
        targets=worst,
        g=np.asarray(g)[worst],
        rows=nearest.rows[:, 0],
        costs=nearest.squared[:, 0] * UNITS[cost],
        limit=_typical_spacing(targets, UNITS[cost], seed),
    )


def _typical_spacing(y: np.ndarray, unit: float, seed: int) -> float | None:
    """Return the 95 % quantile of targets' costs to their nearest other one, from a seeded sample of many."""
    if len(y) > _FELLOWS:
        y = y[np.sort(np.random.Generator(np.random.PCG64([seed, 0xC0FE])).choice(len(y), _FELLOWS, replace=False))]
    distinct = np.unique(y, axis=0)
    if len(distinct) < _LEAST:
        return None
    costs = squared_distances(distinct - distinct.mean(0))
    np.fill_diagonal(costs, np.inf)
    return float(np.quantile(costs.min(1), _QUANTILE)) * unit
