"""A few thousand rows that stand for a pool of any size and for what was chosen from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from selection.methods.base import unit_weights

_NEAR = 5
"""Rows up to this rank, in multiples of the budget, are sampled as densely as the selection itself: what another
target or another round would choose mostly lies there."""


@dataclass(frozen=True)
class Sample:
    """rows (n,) int64, ascending. stands (n,): records of the pool that each stands for; they sum to N. mass (n,): its
    part of the pool's distribution; they sum to 1. chosen (n,) bool: rows of the selection, all of which stand for
    equally many; `budget` of them."""

    rows: np.ndarray
    stands: np.ndarray
    mass: np.ndarray
    chosen: np.ndarray

    @property
    def budget(self) -> int:
        """Rows that stand for the whole budget."""
        return int(self.chosen.sum())

    def mixture(self, rows: np.ndarray, share: float) -> np.ndarray:
        """(n,): (1 − share)·pool + share·uniform over the sample's rows with these numbers."""
        weights = (1.0 - share) * self.mass
        weights[rows] += share / len(rows)
        return weights


def sample_pool(order: np.ndarray, budget: int, *, weights: np.ndarray | None, size: int, seed: int) -> Sample:
    """All rows where there are at most `size`; else a seeded draw, half of it among the best ranks.

    order (N,): row numbers by rank, the first `budget` of them chosen. weights (N,): the pool's distribution, uniform
    when None. Three strata, each drawn without repeats: the selection, the ranks behind it up to five budgets at the
    same rate, and the rest.
    """
    count = len(order)
    if count <= size:
        taken = [order[:budget], order[budget:]]
        sizes = [budget, count - budget]
    else:
        near = min(count, _NEAR * budget)
        drawn_near = size if near == count else min(near, size // 2)
        drawn = max(1, min(round(drawn_near * budget / near), drawn_near - (near > budget)))
        generator = np.random.Generator(np.random.PCG64([seed, 0xC4EC]))
        strata = [
            (order[:budget], drawn),
            (order[budget:near], drawn_near - drawn),
            (order[near:], size - drawn_near),
        ]
        taken = [generator.choice(rows, min(n, len(rows)), replace=False, shuffle=False) for rows, n in strata]
        sizes = [len(rows) for rows, _ in strata]
    stands = np.concatenate([np.full(len(t), s / max(len(t), 1)) for t, s in zip(taken, sizes, strict=True)])
    rows = np.concatenate(taken)
    chosen = np.arange(len(rows)) < len(taken[0])
    turn = np.argsort(rows, kind="stable")
    rows, stands, chosen = rows[turn], stands[turn], chosen[turn]
    mass = stands if weights is None else stands * np.asarray(weights, dtype=np.float64)[rows]
    return Sample(rows, stands, unit_weights(mass, len(rows)), chosen)
