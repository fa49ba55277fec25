"""Greedy round-robin over targets: each target in turn takes its most similar row that is still free.

The strongest of the methods that Nayak et al. (2026, arXiv 2602.14696) compare at low budgets, there on gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from flatshift.selection.lazy import np
from flatshift.selection.methods.base import Pool, Progress, Selector, Target, check_number, move_behind, require_field
from flatshift.selection.validation import SelectorContext, check_fields, check_no_overflow, from_settings


@dataclass(frozen=True, kw_only=True)
class RoundRobin:
    """Each target text in turn takes its most similar record that is left (cosine of features; gradients or others)."""

    kind: Literal["round-robin"] = "round-robin"
    title: ClassVar[str] = "Each target's neighbours in turn"
    needs: ClassVar[tuple[str, ...]] = ("features",)
    neighbours: int = 1000
    """Maximum number of neighbours of each target; records beyond follow by distance to their nearest target."""

    def __post_init__(self) -> None:
        check_fields(self, "neighbours", least=1)

    def build(self, around: SelectorContext) -> RoundRobinSelector:
        return from_settings(RoundRobinSelector, self, around)


class RoundRobinSelector(Selector):
    """Scores are round + place: in round r each target, those with the nearer next row first, takes its nearest row
    that is left; distances are between rows of length one. Rows taken by no target follow by the squared distance to
    their nearest target. A zero row is at distance 1 of all. Ignores weights. neighbours, chunk: as elsewhere."""

    def __init__(self, *, neighbours: int = 1000, chunk: int | None = None):
        self.neighbours = neighbours
        self.chunk = chunk

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Assign rows in turns; needs features on both sides."""
        from flatshift.selection.methods.neighbours import nearest_rows  # imports torch

        check_number(self.neighbours, "neighbours", least=1)
        x, y = require_field(pool, target, "features", "round-robin")
        found = nearest_rows(_UnitRows(x), _UnitRows(y), int(self.neighbours), chunk=self.chunk, progress=progress)
        m, k = found.rows.shape
        taken = np.full(len(pool), -1, dtype=np.int64)
        place = np.zeros(m, dtype=np.int64)
        count = rounds = 0
        alive = np.ones(m, dtype=bool)
        while alive.any() and count < len(pool):
            for j in np.flatnonzero(alive):
                while place[j] < k and taken[found.rows[j, place[j]]] >= 0:
                    place[j] += 1
                alive[j] = place[j] < k
            turn = np.flatnonzero(alive)
            # The nearest goes first, so that the order of the targets does not matter.
            for j in turn[np.lexsort((found.rows[turn, place[turn]], found.squared[turn, place[turn]]))]:
                row = found.rows[j, place[j]]
                if taken[row] < 0:
                    taken[row], count = count, count + 1
            rounds += bool(len(turn))
        self.scores_ = move_behind(taken.astype(np.float64), taken < 0, found.row_squared)
        self.nearest_target_ = found.row_nearest
        self.diagnostics_ = {"taken": count, "turns": rounds}
        return self


class _UnitRows:
    """Rows scaled to length one as they are read; zero rows stay zero."""

    def __init__(self, rows: object):
        self._rows = rows
        self.shape, self.dtype = rows.shape, np.dtype(np.float64)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, key: object) -> np.ndarray:
        rows = np.asarray(self._rows[key], dtype=np.float64)  # type: ignore[index]
        with np.errstate(over="ignore", invalid="ignore"):
            lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
            if np.isfinite(rows).all():  # else the search reports the row
                check_no_overflow(lengths)
            return np.asarray(rows / np.where(lengths > 0, lengths, 1.0))

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self[:]
