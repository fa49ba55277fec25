"""GOT-D in several steps: after each part of the budget the transport problem is solved on the shifted mixture.

Entropic transport is convex in the pool's weights, so the linear prediction that one-shot GOT-D minimises is
optimistic, most of all for small budgets: all k rows come from one region, and repeat the same improvement. Here the
share λ of the selection in the mixture is fixed, and with U_r the selection after r rounds,

    w_0 = a ,    w_r = (1 − λ) a + λ · uniform(U_r) ,    U_{r+1} = U_r ∪ {the k/R smallest unchosen s^{w_r}} .

ε stays at its value at w_0, in units of cost. Part of the target is held out. At each round the budget is also filled
at once from the current solution (so that its size is the same), and the result is the filling whose mixture is nearest
to the held-out target: never worse there than one-shot GOT-D. All rounds are run, because the first step after U_1
often overshoots. (science.md §4.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from flatshift.selection.methods.base import Pool, Target, mean_cost, require_field, unit_weights
from flatshift.selection.transport.problem import check_finite_rows
from flatshift.selection.transport.solver import Potentials
from flatshift.selection.validation import to_weights

Solve = Callable[..., Potentials]
"""Function (x, y, a, b, relative epsilon, held_bytes=) -> Potentials."""
_ROW_BYTES = 50
"""Bytes per pool row held during a solve: the first solution (24), two rounds' scores, the weights, two masks."""


@dataclass(frozen=True)
class _RoundResult:
    """Result of a round: the rows that fill the budget at its mixture in rank order, and their gradients."""

    rows: np.ndarray
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

    one_shot: Potentials
    scores: np.ndarray
    gradients: np.ndarray
    nearest: np.ndarray
    batches: list[np.ndarray]
    held_out: list[float]
    worst_error: float
    converged: bool

    def diagnostics(self) -> dict[str, Any]:
        """Return manifest entries on the rounds; the worst error and convergence override the first's."""
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
) -> RoundsResult:
    """Choose `budget` rows in up to `rounds` parts; the arguments are those of `GotDSelector`."""
    x, target_features = require_field(pool, target, "features", "gotd")
    y = np.asarray(target_features)
    check_finite_rows(y, "target", 0)  # here, while rows still have the caller's numbers; the solver checks the others
    b = None if target.weights is None else to_weights(target.weights, "target")
    training, held_out = _hold_out(target, holdout, seed)

    def side(rows: np.ndarray) -> tuple[Any, Any]:
        return y[rows], None if b is None else b[rows]

    one_shot = solve(x, y[training], pool.weights, side(training)[1], epsilon)
    assert one_shot.nearest is not None
    absolute = one_shot.epsilon
    if absolute == 0.0:  # all points coincide: no row is better than another, at any mixture
        order = np.argsort(one_shot.scores, kind="stable")[:budget]
        return RoundsResult(
            one_shot, one_shot.scores, one_shot.scores, training[one_shot.nearest], [order], [], 0.0, True
        )

    def mean(rows: np.ndarray, weights: Any, index: np.ndarray | None) -> float:
        targets, target_weights = side(rows)
        return mean_cost(x, targets, weights=weights, target_weights=target_weights, index=index, cost=cost)

    pool_cost = {False: one_shot.mean_cost, True: mean(held_out, pool.weights, None) if len(held_out) else 0.0}

    def solve_mixture(chosen: np.ndarray, on_held_out: bool) -> Potentials:
        rows = held_out if on_held_out else training
        weights = unit_weights(pool.weights, len(pool))
        weights *= 1.0 - mixture
        selection = np.flatnonzero(chosen)
        weights[selection] += mixture / len(selection)
        unit = (1.0 - mixture) * pool_cost[on_held_out] + mixture * mean(rows, None, selection)
        targets, target_weights = side(rows)
        relative = absolute / max(unit, 1e-300)
        return solve(x, targets, weights, target_weights, relative, held_bytes=_ROW_BYTES * len(pool))

    results: list[_RoundResult] = []
    held_out_values: list[float] = []
    best, best_scores = 0, one_shot.scores
    scores, error, converged = one_shot.scores, one_shot.marginal_error, one_shot.converged
    chosen = np.zeros(len(pool), dtype=bool)
    edges = np.linspace(0, budget, min(rounds, budget) + 1).round().astype(int).tolist()
    for low, high in pairwise(edges):
        if results:
            solution = solve_mixture(chosen, on_held_out=False)
            scores, error, converged = solution.scores, solution.marginal_error, solution.converged
            del solution  # its other arrays are as long as the pool
        rows = np.argsort(np.where(chosen, np.inf, scores), kind="stable")[: budget - low].copy()
        results.append(_RoundResult(rows, scores[rows], error, converged))
        if len(held_out):
            filled = chosen.copy()
            filled[rows] = True
            held_out_values.append(solve_mixture(filled, on_held_out=True).dual_value)
        if not len(held_out) or held_out_values[-1] < min(held_out_values[:-1], default=np.inf):
            best, best_scores = len(results) - 1, scores
        chosen[rows[: high - low]] = True
    results = results[: best + 1]
    batches = [result.rows[: edges[r + 1] - edges[r]] for r, result in enumerate(results[:-1])] + [results[-1].rows]
    gradients = best_scores.copy()
    for batch, result in zip(batches, results, strict=True):
        gradients[batch] = result.gradients[: len(batch)]
    chosen[:] = False
    chosen[np.concatenate(batches)] = True
    return RoundsResult(
        one_shot=one_shot,
        scores=_rank_by_round(gradients, batches, chosen),
        gradients=gradients,
        nearest=training[one_shot.nearest],
        batches=batches,
        held_out=held_out_values,
        worst_error=max(result.error for result in results),
        converged=all(result.converged for result in results),
    )


def _hold_out(target: Target, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers to train on and those held out, both sorted; at least two of each, or none held out."""
    count = round(share * len(target))
    if count < 2 or len(target) - count < 2:
        return np.arange(len(target)), np.empty(0, dtype=np.int64)
    order = np.argsort(target.draw(seed, "gotd held-out target"), kind="stable")
    return np.sort(order[count:]), np.sort(order[:count])


def _rank_by_round(gradients: np.ndarray, batches: list[np.ndarray], chosen: np.ndarray) -> np.ndarray:
    """Return scores that rank the batches one after another and the others last; later rounds keep their level."""
    scores = gradients.copy()
    floor = scores[~chosen].min(initial=np.inf)
    for batch in reversed(batches):
        top = scores[batch].max()
        if not top < floor:
            scores[batch] = np.minimum(scores[batch] - (top - floor), np.nextafter(floor, -np.inf))
        floor = scores[batch].min()
    return scores
