"""The pool's entropic transport potential to itself, from a subsample: the term that debiased GOT-D subtracts.

For OT_ε(α, α) both potentials are one function p, the fixed point of the N×N problem

    p(x_i) = −ε log Σ_j a_j exp((p(x_j) − |x_i − x_j|²)/ε) .

A uniform subsample T of rows with positive weight represents the *other* rows, and the row's own term, which in high
dimension outweighs all others, is kept separate at its true weight a_i (else rows in T, with a match at distance zero
that the others lack, would rank by membership in the sample):

    u_i = A_i + a_i/u_i ,  u = exp(−p/ε) ,  A_i = (1 − a_i) Σ_{j∈T, j≠i} w_j exp((p_j − c_ij)/ε) ,

so u_i = (A_i + √(A_i² + 4 a_i))/2. With T = all rows this is the exact equation.
"""

from __future__ import annotations

import numpy as np

from flatshift.selection.methods.base import UNITS, Pool, Progress, scaled_features, squared_distances, unit_weights
from flatshift.selection.validation import feature_matrix

_TOLERANCE = 1e-10
_MAX_ITERATIONS = 5_000


def self_potential(
    pool: Pool,
    *,
    epsilon: float,
    sample: int,
    seed: int,
    cost: str = "sqeuclidean",
    chunk: int | None = None,
    progress: Progress | None = None,
) -> tuple[np.ndarray, int, float]:
    """Return p (N,) for every row of `pool` in units of `cost`, the number of rows it was solved on, and the last step
    in units of ε.

    epsilon: absolute, in units of `cost`. sample: maximum number of rows to solve on. Memory: sample² + chunk·sample.
    Expects features and weights that the transport solver has already checked.
    """
    x = feature_matrix(pool.features, "pool")
    n = len(pool)
    if epsilon <= 0.0:  # all points coincide
        return np.zeros(n), 0, 0.0
    a = unit_weights(pool.weights, n)
    sampled = np.flatnonzero(a > 0)
    if len(sampled) > sample:
        order = np.argsort(pool.draw(seed, "gotd self-transport")[sampled], kind="stable")
        sampled = np.sort(sampled[order[:sample]])
    # All below is in squared distances; a cosine cost is half of them between rows of length one.
    epsilon = epsilon / UNITS[cost]
    points = scaled_features(x[sampled], cost)
    centre = points.mean(0)
    points = points - centre
    squared = np.einsum("ij,ij->i", points, points)
    own = a[sampled]
    weights = own / own.sum()

    kernel = squared_distances(points)
    np.fill_diagonal(kernel, np.inf)
    np.exp(np.divide(kernel, -epsilon, out=kernel), out=kernel)
    # The other rows' mass 1 − a_i is spread over Σ_{j≠i} w_j = 1 − w_i.
    others = (1.0 - own) / np.maximum(1.0 - weights, 1e-300)
    p = np.zeros(len(sampled))
    change = np.inf
    for _ in range(_MAX_ITERATIONS):
        total = others * (kernel @ (weights * np.exp(p / epsilon)))
        new = -epsilon * np.log(0.5 * (total + np.sqrt(total * total + 4.0 * own)))
        change = float(np.abs(new - p).max()) / epsilon
        p = 0.5 * (p + new)  # the plain iteration oscillates; averaging with the last point converges
        if change <= _TOLERANCE:
            break
    out = np.empty(n)
    sample_index = np.full(n, -1)
    sample_index[sampled] = np.arange(len(sampled))
    bias = p / epsilon + np.log(weights) - squared / epsilon
    step = chunk or max(256, min(8192, (32 << 20) // (8 * len(sampled))))
    for low in range(0, n, step):
        rows = scaled_features(x[low : low + step], cost)
        out[low : low + step] = _extend_potential(
            rows - centre, points, bias, weights, sample_index[low : low + step], a[low : low + step], epsilon
        )
        if progress:
            progress("transport of the pool to itself", min(low + step, n), n)
    return out * UNITS[cost], len(sampled), change


def _extend_potential(
    rows: np.ndarray,
    points: np.ndarray,
    bias: np.ndarray,
    weights: np.ndarray,
    sample_index: np.ndarray,
    own: np.ndarray,
    epsilon: float,
) -> np.ndarray:
    """Return p at `rows` (B, d) from the sample; in logarithms: far rows of weight 0 have no own term."""
    logits = rows @ points.T
    logits *= 2.0 / epsilon
    logits += bias
    in_sample = np.flatnonzero(sample_index >= 0)
    logits[in_sample, sample_index[in_sample]] = -np.inf
    others = np.ones(len(rows))
    others[in_sample] -= weights[sample_index[in_sample]]
    top = logits.max(1)
    # A sample of one row has no others: log 0 = −∞, and only the own term remains.
    safe = np.where(np.isfinite(top), top, 0.0)
    logits -= safe[:, None]
    np.exp(logits, out=logits)
    with np.errstate(divide="ignore"):
        total = np.log(logits.sum(1)) + safe - np.einsum("ij,ij->i", rows, rows) / epsilon
        total += np.log(1.0 - own) - np.log(np.maximum(others, 1e-300))
        half = 0.5 * np.logaddexp(2.0 * total, np.log(4.0 * own))
    return -epsilon * (np.logaddexp(total, half) - np.log(2.0))
