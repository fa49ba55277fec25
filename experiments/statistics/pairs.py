"""Seed-paired differences between all points of a curve, with shrunken variances, and their null distribution.

An array of curves is [..., S, J]: S seeds (runs), J points of the axis. Matrices over pairs are [..., J, J] with entry
[i, j] for "from point i to point j".

Critical values are quantiles of the statistics on flat Gaussian curves of as many seeds and points. Their base draws
(standard normal, a fixed seed) are made once for each S and J and reduced to means and covariances; a pattern of
variances only rescales them, so that a new pattern costs milliseconds.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from flatshift.finetune.seeds import numpy_generator

PRIOR = 4
"""Weight of the mean variance, in degrees of freedom: a variance of few seeds is shrunk towards the other points."""

PRIOR_OF_POINTS = 2
"""The same for the variances behind the critical value; smaller, since an underestimate raises false alarms: with
nine-fold variance at one point and five seeds a weight of 4 gives up to .057, of 2 up to .054."""


@dataclass(frozen=True)
class PointPairs:
    """Statistics over `seeds` seeds for each pair of points, each [..., J, J].

    difference, variance: mean and sample variance over seeds of y_j − y_i. shrunken: (4 v̄ + (S − 1) v_ij) / (S + 3)
    with v̄ the mean variance over all pairs.
    """

    seeds: int
    difference: np.ndarray
    variance: np.ndarray
    shrunken: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """[..., J, J]: standard error of `difference` by the shrunken variances; 0 on the diagonal."""
        return np.sqrt(self.shrunken / self.seeds)

    @property
    def t(self) -> np.ndarray:
        """[..., J, J]: difference ÷ error; 0 if seeds do not differ at all, which is no evidence."""
        error = self.error
        return np.divide(self.difference, error, out=np.zeros_like(error), where=error > 0)


def point_pairs(curves: np.ndarray, minimum: float = 0.0) -> PointPairs:
    """Return differences, variances and shrunken variances of `curves` [..., S, J] (finite, S ≥ 2, J ≥ 2). minimum:
    smallest variance of a point, such as the binomial one of n items: v̄ is then at least twice it."""
    seeds, points = curves.shape[-2:]
    mean = curves.mean(-2)
    centred = curves - mean[..., None, :]
    covariance = np.swapaxes(centred, -1, -2) @ centred / (seeds - 1)
    diagonal = np.diagonal(covariance, axis1=-2, axis2=-1)
    variance = np.maximum(diagonal[..., :, None] + diagonal[..., None, :] - 2 * covariance, 0.0)
    pooled = np.maximum(variance.sum((-2, -1)) / (points * (points - 1)), 2 * minimum)
    shrunken = (PRIOR * pooled[..., None, None] + (seeds - 1) * variance) / (seeds - 1 + PRIOR)
    shrunken[..., np.arange(points), np.arange(points)] = 0.0
    return PointPairs(seeds, mean[..., None, :] - mean[..., :, None], variance, shrunken)


def point_variances(variance: np.ndarray, seeds: int, minimum: float = 0.0) -> np.ndarray:
    """Return the shrunken variance of each point about its seed's curve, [..., J], from those of pairs (J ≥ 3).

    With independent errors v_ij = σ_i² + σ_j², so Σ_j v_ij = (J − 2) σ_i² + Σ σ²; negative solutions count as 0. The
    mean that they are shrunk towards is at least `minimum`.
    """
    points = variance.shape[-1]
    total = variance.sum((-2, -1)) / (2 * (points - 1))
    single = np.maximum((variance.sum(-1) - total[..., None]) / (points - 2), 0.0)
    usual = np.maximum(single.mean(-1, keepdims=True), minimum)
    return (PRIOR_OF_POINTS * usual + (seeds - 1) * single) / (seeds - 1 + PRIOR_OF_POINTS)


def rises_and_falls(t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each point [..., J] the largest t of a rise to it from the left, and of a fall from it to the right.
    −inf if there is no point on that side."""
    points = t.shape[-1]
    before = np.triu(np.ones((points, points), dtype=bool), 1)  # [i, j] with i < j
    rise = np.where(before, t, -np.inf).max(-2)
    fall = np.where(before.T, t, -np.inf).max(-2)  # t[l, j] with l > j is the fall from j to l
    return rise, fall


_BLOCK = 2000
"""Draws per block: their arrays fit in the cache of a core."""


class NullDistribution:
    """Draws of flat curves: S seeds, J points, independent errors."""

    def __init__(self, seeds: int, points: int, draws: int, seed: int):
        self.seeds, self.points, self.draws = seeds, points, draws
        self.left, self.right = np.triu_indices(points, 1)
        self._mean = np.empty((points, draws), dtype=np.float32)
        self._own = np.empty((points, draws), dtype=np.float32)
        self._shared = np.empty((len(self.left), draws), dtype=np.float32)
        generator = numpy_generator(seed, "descent", "null", seeds, points)
        for start in range(0, draws, _BLOCK):
            z = generator.standard_normal((min(_BLOCK, draws - start), seeds, points), dtype=np.float32)
            mean = z.mean(1)
            z -= mean[:, None, :]
            covariance = np.swapaxes(z, 1, 2) @ z / np.float32(seeds - 1)
            block = slice(start, start + len(z))
            self._mean[:, block] = mean.T
            self._own[:, block] = np.diagonal(covariance, axis1=1, axis2=2).T
            self._shared[:, block] = covariance[:, self.left, self.right].T

    def extremes(
        self, variances: np.ndarray | None = None, count: int | None = None, minimum: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return max over i < j of t_ij, and of |t_ij|, each [draws], in the first `count` draws (None: all). minimum:
        as for `point_pairs`, in the units of `variances`."""
        sd, pair_minimum = self._sd(variances), _minimum_pair_variance(variances, minimum)
        count = count or self.draws
        rise, both = np.empty(count, dtype=np.float32), np.empty(count, dtype=np.float32)
        for start in range(0, count, _BLOCK):
            block = slice(start, min(start + _BLOCK, count))
            t, variance = self._moments(sd, block, pair_minimum)
            t /= np.sqrt(variance, out=variance)
            np.max(t, axis=0, out=rise[block])
            np.maximum(rise[block], -t.min(0), out=both[block])
        rise *= math.sqrt(self.seeds)
        both *= math.sqrt(self.seeds)
        return rise, both

    def with_unit_shift(
        self, variances: np.ndarray | None = None, count: int | None = None, minimum: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (t, its shift by a true difference of one sd), [pairs, draws], of the first `count` draws (None: all).
        The standard deviation is that of the mean of `variances` [J] (None: all equal)."""
        pair_minimum = _minimum_pair_variance(variances, minimum)
        difference, variance = self._moments(self._sd(variances), slice(count), pair_minimum)
        per_unit = np.sqrt(self.seeds / variance)
        return difference * per_unit, per_unit

    def _sd(self, variances: np.ndarray | None) -> np.ndarray:
        """Return [J, 1]: standard deviations whose squares have a mean of 1."""
        ones = np.ones(self.points) if variances is None else np.asarray(variances)
        return np.sqrt(ones / ones.mean()).astype(np.float32)[:, None]

    def _moments(self, sd: np.ndarray, block: slice, minimum: float) -> tuple[np.ndarray, np.ndarray]:
        """Return [pairs i < j, draws]: mean difference and shrunken variance for points of the given sd [J, 1].
        minimum: variance of a pair that the mean over pairs is raised to."""
        mean, own = self._mean[:, block] * sd, self._own[:, block] * sd**2
        variance = self._shared[:, block] * (-2 * sd[self.left] * sd[self.right])
        variance += own[self.left]
        variance += own[self.right]
        pooled = np.maximum(variance.mean(0), np.float32(minimum))
        variance *= (self.seeds - 1) / (self.seeds - 1 + PRIOR)
        variance += pooled * (PRIOR / (self.seeds - 1 + PRIOR))
        difference = mean[self.right]
        difference -= mean[self.left]
        return difference, variance


def _minimum_pair_variance(variances: np.ndarray | None, minimum: float) -> float:
    """Return the least variance of a pair in units of the mean of `variances`, as in `NullDistribution._sd`."""
    return 0.0 if variances is None or not minimum else 2 * minimum / float(np.mean(variances))


@functools.lru_cache(maxsize=8)
def null_distribution(seeds: int, points: int, draws: int, seed: int) -> NullDistribution:
    """Return the draws for S and J, cached (some 10 MB for 20,000 draws of 10 points)."""
    return NullDistribution(seeds, points, draws, seed)


def p_value(statistic: float, draws: np.ndarray) -> float:
    """Return (1 + number of draws that reach `statistic`) / (1 + number of draws)."""
    return (1 + int((draws >= statistic).sum())) / (1 + len(draws))


def critical_value(draws: np.ndarray, level: float) -> float:
    """Return the value that a statistic must exceed for a p-value of at most `level`; inf with too few draws."""
    allowed = math.floor(level * (len(draws) + 1)) - 1
    if allowed < 0:
        return math.inf
    index = len(draws) - 1 - allowed
    return float(np.partition(draws, index)[index])
