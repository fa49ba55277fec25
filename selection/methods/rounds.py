"""GOT-D in several steps: after each part of the budget the transport problem is solved on the shifted mixture.

Entropic transport is convex in the pool's weights, so the linear prediction that one-shot GOT-D minimises is
optimistic, most of all for small budgets: all k rows come from one region, and repeat the same improvement. Here the
share λ of the selection in the mixture is fixed, and with U_r the selection after r rounds,

    w_0 = a ,    w_r = (1 − λ) a + λ · uniform(U_r) ,    U_{r+1} = U_r ∪ {the k/R smallest unchosen s^{w_r}} .

ε stays at its value at w_0, in units of cost. Part of the target is held out. At each round the budget is also filled
at once from the current solution, and the result is the filling whose mixture is nearest to the held-out target: all
rounds up to it count, the later ones do not, and the result is never worse there than one-shot GOT-D. Comparing
selections of the full size excludes the growth of U_r, which dilutes any selection, from the comparison. All rounds are
run, because the first step after U_1 often overshoots. (science.md §4.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from flatshift.selection.methods.base import (
    UNITS,
    Pool,
    Progress,
    Target,
    keyed_uniform,
    require_field,
    scaled_features,
    unit_weights,
)
from flatshift.selection.transport.problem import check_finite_rows
from flatshift.selection.transport.solver import Potentials
from flatshift.selection.validation import to_weights

Solve = Callable[..., Potentials]
"""Function (x, y, a, b, relative epsilon, progress, held_bytes=) -> Potentials."""
_HELD = 50
"""Bytes per pool row held during a solve: the first solution (24), two rounds' scores, the weights, two masks."""
_READ_BYTES = 2 << 20
"""Bytes of float64 rows read at a time for averaging costs."""


@dataclass(frozen=True)
class _RoundResult:
    """Result of a round: the rows that fill the budget at its mixture in rank order, and their gradients."""

    filling: np.ndarray
    gradients: np.ndarray
    error: float
    converged: bool


@dataclass(frozen=True)
class RoundsResult:
    """Result of all rounds.

    `scores` (N,) rank the rows: round by round, then the unchosen ones. `gradients` (N,): each row's calibrated
    gradient at the mixture that chose it, the last one's for rows never chosen. `batches`: rows of each round in rank
    order. `held_out`: OT_ε to the held-out target of the mixture with the whole budget, filled at each round; empty if
    nothing was held out.
    """

    first: Potentials
    scores: np.ndarray
    gradients: np.ndarray
    nearest: np.ndarray
    batches: list[np.ndarray]
    held_out: list[float]
    worst_error: float
    converged: bool

    def diagnostics(self) -> dict[str, Any]:
        """Return manifest entries on the rounds; they override the first solution's error and convergence with the
        worst."""
        return {
            "rounds": [len(batch) for batch in self.batches],
            "held_out": self.held_out,
            "helpful": int((self.gradients < 0).sum()),
            "marginal_error": self.worst_error,
            "converged": self.converged,
        }


def choose_in_rounds(
    pool: Pool,
    target: Target,
    solve: Solve,
    *,
    epsilon: float,
    budget: int,
    rounds: int,
    mixture: float,
    holdout: float,
    seed: int,
    cost: str = "sqeuclidean",
    progress: Progress | None = None,
) -> RoundsResult:
    """Choose `budget` rows in up to `rounds` parts; the arguments are those of `GotDSelector`."""
    x, target_features = require_field(pool, target, "features", "gotd")
    y = np.asarray(target_features)
    check_finite_rows(y, "target", 0)  # here, while rows still have the caller's numbers; the solver checks the rest
    b = None if target.weights is None else to_weights(target.weights, "target")
    kept, held = _hold_out(target, holdout, seed)

    def side(rows: np.ndarray) -> tuple[Any, Any]:
        return y[rows], None if b is None else b[rows]

    first = solve(x, *_solve_arguments(side(kept), pool.weights), epsilon, progress)
    assert first.nearest is not None
    absolute, kept_cost = first.epsilon, first.mean_cost
    if absolute == 0.0:  # all points coincide: no row is better than another, at any mixture
        order = np.argsort(first.scores, kind="stable")[:budget]
        return RoundsResult(first, first.scores, first.scores, kept[first.nearest], [order], [], 0.0, True)
    held_cost = _mean_cost(x, None, pool.weights, *side(held), cost) if len(held) else None

    def at(chosen: np.ndarray, rows: np.ndarray, unmixed: float) -> Potentials:
        weights = unit_weights(pool.weights, len(pool))
        weights *= 1.0 - mixture
        picked = np.flatnonzero(chosen)
        weights[picked] += mixture / len(picked)
        mean = (1.0 - mixture) * unmixed + mixture * _mean_cost(x, picked, None, *side(rows), cost)
        relative = absolute / max(mean, 1e-300)
        return solve(x, *_solve_arguments(side(rows), weights), relative, progress, held_bytes=_HELD * len(pool))

    steps: list[_RoundResult] = []
    held_values: list[float] = []
    best, best_scores = 0, first.scores
    scores, error, converged = first.scores, first.marginal_error, first.converged
    chosen = np.zeros(len(pool), dtype=bool)
    edges = np.linspace(0, budget, min(rounds, budget) + 1).round().astype(int).tolist()
    for low, high in pairwise(edges):
        if steps:
            found = at(chosen, kept, kept_cost)
            scores, error, converged = found.scores, found.marginal_error, found.converged
            del found  # its other arrays are as long as the pool
        filling = np.argsort(np.where(chosen, np.inf, scores), kind="stable")[: budget - low].copy()
        steps.append(_RoundResult(filling, scores[filling], error, converged))
        if held_cost is not None:
            filled = chosen.copy()
            filled[filling] = True
            held_values.append(at(filled, held, held_cost).dual_value)
        if held_cost is None or held_values[-1] < min(held_values[:-1], default=np.inf):
            best, best_scores = len(steps) - 1, scores
        chosen[filling[: high - low]] = True
    steps = steps[: best + 1]
    batches = [step.filling[: edges[r + 1] - edges[r]] for r, step in enumerate(steps[:-1])] + [steps[-1].filling]
    gradients = best_scores.copy()
    for batch, step in zip(batches, steps, strict=True):
        gradients[batch] = step.gradients[: len(batch)]
    chosen[:] = False
    chosen[np.concatenate(batches)] = True
    return RoundsResult(
        first=first,
        scores=_rank_by_round(gradients, batches, chosen),
        gradients=gradients,
        nearest=kept[first.nearest],
        batches=batches,
        held_out=held_values,
        worst_error=max(step.error for step in steps),
        converged=all(step.converged for step in steps),
    )


def _solve_arguments(side: tuple[Any, Any], weights: Any) -> tuple[Any, Any, Any]:
    """Return (y, a, b) in the argument order of `solve`."""
    return side[0], weights, side[1]


def _hold_out(target: Target, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row numbers kept and held out, both sorted; at least two rows are held out and two kept, or none held
    out."""
    count = round(share * len(target))
    if count < 2 or len(target) - count < 2:
        return np.arange(len(target)), np.empty(0, dtype=np.int64)
    order = np.argsort(keyed_uniform(target, seed, "gotd held-out target"), kind="stable")
    return np.sort(order[count:]), np.sort(order[:count])


def _mean_cost(x: Any, index: np.ndarray | None, weights: Any, y: np.ndarray, b: np.ndarray | None, cost: str) -> float:
    """Return Σ_ij a_i b_j c(x_i, y_j) over the rows `index` of the pool (None: all), a their `weights` or uniform.

    Squared distances: Σ_i a_i |x_i − ȳ|² + Σ_j b_j |y_j − ȳ|². Cosine costs: half of these for rows of length one.
    """
    rows = scaled_features(y, cost)
    target_weights = unit_weights(b, len(rows))
    centre = target_weights @ rows
    spread = float(target_weights @ ((rows - centre) ** 2).sum(1))
    count = x.shape[0] if index is None else len(index)
    a = unit_weights(weights, count)
    step = max(16, _READ_BYTES // (8 * x.shape[1]))
    total = 0.0
    for low in range(0, count, step):
        part = scaled_features(x[low : low + step] if index is None else x[index[low : low + step]], cost) - centre
        total += float(a[low : low + step] @ np.einsum("ij,ij->i", part, part))
    return UNITS[cost] * (total + spread)


def _rank_by_round(gradients: np.ndarray, batches: list[np.ndarray], chosen: np.ndarray) -> np.ndarray:
    """Return scores that rank the batches one after another and the unchosen rows last: later rounds keep their
    level."""
    scores = gradients.copy()
    floor = scores[~chosen].min(initial=np.inf)
    for batch in reversed(batches):
        top = scores[batch].max()
        if not top < floor:
            scores[batch] = np.minimum(scores[batch] - (top - floor), np.nextafter(floor, -np.inf))
        floor = scores[batch].min()
    return scores
