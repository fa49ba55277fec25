"""GOT-D in several steps: after each part of the budget the transport problem is solved on the shifted mixture.

Entropic transport is convex in the pool's weights, so the linear prediction that one-shot GOT-D minimises is
optimistic, most of all for small budgets: all k rows come from one place, and what the first of them mended the others
mend again. Here the share λ of the selection in the mixture is fixed, and with U_r what r rounds have chosen,

    w_0 = a ,    w_r = (1 − λ) a + λ · uniform(U_r) ,    U_{r+1} = U_r ∪ {the k/R smallest unchosen s^{w_r}} .

ε stays what it was at w_0, in units of cost. Part of the target is held out. At each round the budget is also filled at
once from the current solution, and the answer is the filling whose mixture is nearest to the held-out target: all
rounds up to there count, the later ones do not, and the result is never worse there than one-shot GOT-D. Comparing
selections of the full size keeps the growth of U_r, which dilutes any selection, out of the comparison. All rounds are
run, because the first step after U_1 often overshoots. (science.md §4.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from selection.methods.base import UNITS, Pool, Progress, Target, keyed_uniform, need, placed, unit_weights
from selection.transport.problem import finite_rows
from selection.transport.solver import Potentials

Solve = Callable[..., Potentials]
"""(x, y, a, b, relative epsilon, progress) -> Potentials."""


@dataclass(frozen=True)
class Rounds:
    """`scores` (N,) rank the rows: round by round, then the unchosen ones. `gradients` (N,): each row's calibrated
    gradient at the mixture that chose it, the last one's for rows never chosen. `batches`: rows of each round in rank
    order. `held_out`: OT_ε to the held-out target of the mixture with the whole budget, filled at each round; empty
    where nothing was held out."""

    first: Potentials
    scores: np.ndarray
    gradients: np.ndarray
    nearest: np.ndarray
    batches: list[np.ndarray]
    held_out: list[float]
    worst_error: float
    converged: bool

    def diagnostics(self) -> dict[str, Any]:
        """What the manifest tells of the rounds; overrides the first solution's error and verdict with the worst."""
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
) -> Rounds:
    """Choose `budget` rows in up to `rounds` parts; the arguments are those of `GotDSelector`."""
    x, target_features = need(pool, target, "features", "gotd")
    y = np.asarray(target_features)
    if y.ndim == 2 and y.dtype.kind == "f":
        finite_rows(y, "target", 0)  # here, where rows still have the caller's numbers; the solver checks the rest
    b = None if target.weights is None else np.asarray(target.weights, dtype=np.float64)
    kept, held = _hold_out(target, holdout, seed)

    def side(rows: np.ndarray) -> tuple[Any, Any]:
        return y[rows], None if b is None else b[rows]

    first = solve(x, *_order(side(kept), pool.weights), epsilon, progress)
    a = unit_weights(pool.weights, len(pool))
    absolute = first.epsilon
    kept_cost = _row_costs(x, *side(kept), cost)
    held_cost = _row_costs(x, *side(held), cost) if len(held) else None

    def at(chosen: np.ndarray, rows: np.ndarray, costs: np.ndarray) -> Potentials:
        weights = (1.0 - mixture) * a
        weights[chosen] += mixture / chosen.sum()
        return solve(x, *_order(side(rows), weights), absolute / max(float(weights @ costs), 1e-300), progress)

    solutions = [first]
    chosen = np.zeros(len(pool), dtype=bool)
    fillings: list[np.ndarray] = []
    held_values: list[float] = []
    edges = np.linspace(0, budget, min(rounds, budget) + 1).round().astype(int).tolist()
    for low, high in pairwise(edges):
        if fillings:
            solutions.append(at(chosen, kept, kept_cost))
        fillings.append(np.argsort(np.where(chosen, np.inf, solutions[-1].scores), kind="stable")[: budget - low])
        if held_cost is not None:
            filled = chosen.copy()
            filled[fillings[-1]] = True
            held_values.append(at(filled, held, held_cost).dual_value)
        chosen[fillings[-1][: high - low]] = True
    best = int(np.argmin(held_values)) if held_values else len(fillings) - 1
    batches = [fillings[r][: edges[r + 1] - edges[r]] for r in range(best)] + [fillings[best]]
    solutions = solutions[: best + 1]
    chosen = np.zeros(len(pool), dtype=bool)
    chosen[np.concatenate(batches)] = True
    gradients = solutions[-1].scores.copy()
    for batch, solution in zip(batches, solutions, strict=True):
        gradients[batch] = solution.scores[batch]
    nearest = solutions[0].nearest
    assert nearest is not None
    return Rounds(
        first=first,
        scores=_in_order(gradients, batches, chosen),
        gradients=gradients,
        nearest=kept[nearest],
        batches=batches,
        held_out=held_values,
        worst_error=max(solution.marginal_error for solution in solutions),
        converged=all(solution.converged for solution in solutions),
    )


def _order(side: tuple[Any, Any], weights: Any) -> tuple[Any, Any, Any]:
    """(y, a, b) as `solve` takes them."""
    return side[0], weights, side[1]


def _hold_out(target: Target, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers kept and held out, both sorted; fewer than two rows are never held out, nor more than all but two."""
    count = round(share * len(target))
    if count < 2 or len(target) - count < 2:
        return np.arange(len(target)), np.empty(0, dtype=np.int64)
    order = np.argsort(keyed_uniform(target, seed, "gotd held-out target"), kind="stable")
    return np.sort(order[count:]), np.sort(order[:count])


def _row_costs(x: Any, y: np.ndarray, b: np.ndarray | None, cost: str, step: int = 16_384) -> np.ndarray:
    """(N,): Σ_j b_j c(x_i, y_j); the mean cost of any pool weights is w @ this.

    Squared distances: |x_i − ȳ|² + Σ_j b_j |y_j − ȳ|². Cosine costs: half of these for rows of length one.
    """
    rows = placed(y, cost)
    weights = unit_weights(b, len(rows))
    centre = weights @ rows
    spread = float(weights @ ((rows - centre) ** 2).sum(1))
    out = np.empty(x.shape[0])
    for low in range(0, len(out), step):
        part = placed(x[low : low + step], cost) - centre
        out[low : low + step] = np.einsum("ij,ij->i", part, part) + spread
    return out * UNITS[cost]


def _in_order(gradients: np.ndarray, batches: list[np.ndarray], chosen: np.ndarray) -> np.ndarray:
    """Scores that rank the batches one after another and the unchosen rows last: later rounds keep their level."""
    scores = gradients.copy()
    floor = scores[~chosen].min(initial=np.inf)
    for batch in reversed(batches):
        top = scores[batch].max()
        if not top < floor:
            scores[batch] = np.minimum(scores[batch] - (top - floor), np.nextafter(floor, -np.inf))
        floor = scores[batch].min()
    return scores
