"""OT_ε from many mixtures of the same few rows to one target: the kernel is made once, solves start from each other.

The second argument of every value is the target; the self-transport that turns OT_ε into the Sinkhorn divergence
S = OT_ε(w, y) − ½OT_ε(w, w) − ½OT_ε(y, y) is found for all mixtures at once, one GEMM an iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from selection.methods.base import UNITS, placed
from selection.transport.dense import solve_dense
from selection.transport.kernel import Kernel
from selection.transport.problem import pose
from selection.transport.rows import StreamedRows

_TOLERANCE = 1e-6
_ITERATIONS = 5_000
_SELF_ITERATIONS = 2_000
_SELF_TOLERANCE = 1e-7


@dataclass(frozen=True)
class At:
    """At one mixture, in units of cost. value: OT_ε. f (n,), g (M,): potentials. error: L1 of the target marginal."""

    value: float
    f: np.ndarray
    g: np.ndarray
    error: float


class Mixtures:
    """x (n, d), y (M, d): features. epsilon: absolute, in units of cost. Memory: 16·n·M bytes."""

    def __init__(self, x: np.ndarray, y: np.ndarray, *, epsilon: float, cost: str = "sqeuclidean"):
        with torch.inference_mode():
            problem = pose(x, y, None, None, chunk=None, progress=None, cost=cost)
            self._unit = problem.unit
            self._rows = StreamedRows(problem, torch.float64).dense()
            self._kernel = Kernel(self._rows, epsilon / self._unit)

    def at(self, weights: np.ndarray, start: np.ndarray | None = None) -> At:
        """Solve for the mixture `weights` (n,), which sum to 1 and may be 0; start: g (M,) of a solve nearby."""
        unit = self._unit
        with torch.inference_mode():
            self._rows.a = torch.from_numpy(np.ascontiguousarray(weights, dtype=np.float64))
            b = self._rows.b
            g = torch.zeros_like(b) if start is None else torch.from_numpy(start / unit)
            found = solve_dense(self._kernel, g, marginal=b, tolerance=_TOLERANCE, max_iterations=_ITERATIONS).at
            return At(found.value * unit, found.f.numpy() * unit, found.g.numpy() * unit, found.error)


def mean_cost(x: np.ndarray, y: np.ndarray, weights: np.ndarray, cost: str = "sqeuclidean") -> float:
    """Σ_ij w_i c(x_i, y_j) / M: what a relative ε is a multiple of."""
    rows, targets = placed(x, cost), placed(y, cost)
    centre = targets.mean(0)
    rows, targets = rows - centre, targets - centre
    squared = weights @ np.einsum("ij,ij->i", rows, rows) + np.einsum("ij,ij->i", targets, targets).mean()
    return float(squared) * UNITS[cost]


def self_transport(x: np.ndarray, mixtures: np.ndarray, *, epsilon: float, cost: str = "sqeuclidean") -> np.ndarray:
    """(K,): OT_ε(w, w) of each row w of `mixtures` (K, n) over the rows of x (n, d). Memory: 8·n² bytes.

    Both potentials are one function p = −ε log u, u_i = Σ_j w_j K_ij / u_j, and the value is 2 Σ w p.
    """
    points = placed(x, cost)
    points = points - points.mean(0)
    squared = np.einsum("ij,ij->i", points, points)
    kernel = np.maximum(squared[:, None] + squared - 2.0 * (points @ points.T), 0.0)
    np.fill_diagonal(kernel, 0.0)
    np.exp(np.divide(kernel, -epsilon / UNITS[cost], out=kernel), out=kernel)
    weights = np.ascontiguousarray(mixtures.T)
    held = weights > 0
    u = np.ones_like(weights)
    for _ in range(_SELF_ITERATIONS):
        new = kernel @ (weights / u)
        change = float(np.abs(np.log(new[held] / u[held])).max())
        # The plain iteration swings between two points; their geometric mean converges.
        u = np.where(held, np.sqrt(u * new), 1.0)
        if change <= _SELF_TOLERANCE:
            break
    return np.asarray(-2.0 * epsilon * (weights * np.log(u)).sum(0))
