"""Seed-paired differences between all points of a curve, with shrunken variances; many curves at once.

An array of curves is [..., S, J]: S seeds (runs), J points of the axis. Matrices over pairs are [..., J, J] with
entry [i, j] for "from point i to point j".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PRIOR = 4
"""Weight of the mean variance, in degrees of freedom: a variance of few seeds leans on those of the other points."""

PRIOR_OF_POINTS = 2
"""The same for the variances that the critical value is computed for; less, since one taken for too small raises false
alarms: with nine-fold variance at one point and five seeds a weight of 4 gives up to .057, of 2 up to .054."""


@dataclass(frozen=True)
class Pairs:
    """What the seeds of curves say about each pair of points."""

    seeds: int
    """S."""
    difference: np.ndarray
    """[..., J, J]: mean over seeds of y_j − y_i."""
    variance: np.ndarray
    """[..., J, J]: sample variance over seeds of y_j − y_i."""
    shrunken: np.ndarray
    """[..., J, J]: (4 v̄ + (S − 1) v_ij) / (S + 3) with v̄ the mean over all pairs."""

    @property
    def error(self) -> np.ndarray:
        """[..., J, J]: standard error of `difference` by the shrunken variances; 0 on the diagonal."""
        return np.sqrt(self.shrunken / self.seeds)

    @property
    def t(self) -> np.ndarray:
        """[..., J, J]: difference ÷ error; 0 where seeds do not differ at all, which shows nothing."""
        error = self.error
        return np.divide(self.difference, error, out=np.zeros_like(error), where=error > 0)


def pairs_of(curves: np.ndarray) -> Pairs:
    """Differences, variances and shrunken variances of `curves` [..., S, J] (finite, S ≥ 2, J ≥ 2)."""
    seeds, points = curves.shape[-2:]
    mean = curves.mean(-2)
    centred = curves - mean[..., None, :]
    covariance = np.swapaxes(centred, -1, -2) @ centred / (seeds - 1)
    diagonal = np.diagonal(covariance, axis1=-2, axis2=-1)
    variance = np.maximum(diagonal[..., :, None] + diagonal[..., None, :] - 2 * covariance, 0.0)
    pooled = variance.sum((-2, -1)) / (points * (points - 1))
    shrunken = (PRIOR * pooled[..., None, None] + (seeds - 1) * variance) / (seeds - 1 + PRIOR)
    shrunken[..., np.arange(points), np.arange(points)] = 0.0
    return Pairs(seeds, mean[..., None, :] - mean[..., :, None], variance, shrunken)


def point_variances(variance: np.ndarray, seeds: int) -> np.ndarray:
    """Shrunken variance of each point about its seed's curve, [..., J], from the pair variances [..., J, J], J ≥ 3.

    With independent errors v_ij = σ_i² + σ_j², so Σ_j v_ij = (J − 2) σ_i² + Σ σ²; negative solutions count as 0.
    """
    points = variance.shape[-1]
    total = variance.sum((-2, -1)) / (2 * (points - 1))
    single = np.maximum((variance.sum(-1) - total[..., None]) / (points - 2), 0.0)
    return (PRIOR_OF_POINTS * single.mean(-1, keepdims=True) + (seeds - 1) * single) / (seeds - 1 + PRIOR_OF_POINTS)


def rises_and_falls(t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each point [..., J]: the largest t of a rise to it from the left, and of a fall from it to the right.

    −inf where there is no point on that side.
    """
    points = t.shape[-1]
    before = np.triu(np.ones((points, points), dtype=bool), 1)  # [i, j] with i < j
    rise = np.where(before, t, -np.inf).max(-2)
    fall = np.where(before.T, t, -np.inf).max(-2)  # t[l, j] with l > j is the fall from j to l
    return rise, fall
