"""Selection by nearest neighbours: each row by its distance to its nearest target, or targets in turn.

Greedy round-robin over targets, each of which takes its most similar row that is still free, is the strongest of the
methods that Nayak et al. (2026, arXiv 2602.14696) compare at low budgets, there on gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from flatshift.selection.features.matrix import sendable_rows
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import (
    ConvertedRows,
    MethodSettings,
    Pool,
    Progress,
    Selector,
    Target,
    move_behind,
)
from flatshift.selection.shards import Arrays, Shard
from flatshift.selection.validation import bounded, check_no_overflow


@dataclass(frozen=True, kw_only=True)
class KNN(MethodSettings):
    """Nearest neighbours of the target, each sample at most once (score: squared distance to its nearest target)."""

    kind: Literal["knn"] = "knn"
    title: ClassVar[str] = "kNN"
    needs: ClassVar[tuple[str, ...]] = ("features",)


class KNNSelector(Selector, KNN):
    """Scores every pool row once; `scores_` is the exact squared distance to `nearest_target_`. Needs features on both
    sides; ignores weights.

    The same selection as TAPT/c and vector stores, without duplicates from several targets. chunk: rows per tile.
    """

    chunk: int | None = None

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        from flatshift.selection.methods.neighbours import nearest_rows, tile_rows  # imports torch

        x, y = self._sides(pool, target)
        if pool.shards is None:
            nearest = nearest_rows(x, y, 0, chunk=self.chunk, progress=progress)
            self.scores_, self.nearest_target_ = nearest.row_squared, nearest.row_nearest
        else:
            # Shards of whole tiles: products then have the shapes, and the roundings, of one process.
            step = tile_rows(len(y), self.chunk)
            inputs = {"target": np.asarray(y)}
            if isinstance(x, np.ndarray) and not isinstance(x, np.memmap):  # rows on disk are read where they are
                inputs["pool"] = x
            search = partial(_search_shard, rows=sendable_rows(x, 0, 0 if "pool" in inputs else len(x)), chunk=step)
            parts = pool.shards("neighbours", search, inputs=inputs, align=step)
            self.scores_ = np.concatenate([part["squared"] for part in parts])
            self.nearest_target_ = np.concatenate([part["nearest"] for part in parts])
        self.diagnostics_ = {"mean_squared_distance": float(self.scores_.mean())}


def _search_shard(shard: Shard, *, rows: Any, chunk: int) -> Arrays:
    from flatshift.selection.methods.neighbours import nearest_rows

    x = shard.inputs.get("pool", rows)
    nearest = nearest_rows(x, shard.inputs["target"], 0, chunk=chunk, span=(shard.low, shard.high))
    return {"squared": nearest.row_squared, "nearest": nearest.row_nearest}


@dataclass(frozen=True, kw_only=True)
class RoundRobin(MethodSettings):
    """Each target text in turn takes its most similar record that is left (cosine of features; gradients or others)."""

    kind: Literal["round-robin"] = "round-robin"
    title: ClassVar[str] = "Each target's neighbours in turn"
    needs: ClassVar[tuple[str, ...]] = ("features",)
    neighbours: int = bounded(1000, minimum=1)
    """Maximum number of neighbours of each target; records beyond follow by distance to their nearest target."""


class RoundRobinSelector(Selector, RoundRobin):
    """Scores are the order in which rows are taken: in each round every target, those with the nearer next row first,
    takes its nearest row that is still free; distances are between rows of length one. Rows taken by no target follow
    by the squared distance to their nearest target. A zero row is at distance 1 of all. Needs features on both sides;
    ignores weights. chunk: rows per tile, None to choose."""

    chunk: int | None = None

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        from flatshift.selection.methods.neighbours import nearest_rows  # imports torch

        x, y = self._sides(pool, target)
        x, y = (ConvertedRows(side, _to_unit_length) for side in (x, y))
        nearest = nearest_rows(x, y, self.neighbours, chunk=self.chunk, progress=progress)
        m, k = nearest.rows.shape
        turn_of = np.full(len(pool), -1, dtype=np.int64)
        next_rank = np.zeros(m, dtype=np.int64)
        count = rounds = 0
        active = np.ones(m, dtype=bool)
        while active.any() and count < len(pool):
            for j in np.flatnonzero(active):
                while next_rank[j] < k and turn_of[nearest.rows[j, next_rank[j]]] >= 0:
                    next_rank[j] += 1
                active[j] = next_rank[j] < k
            turn = np.flatnonzero(active)
            next_rows, next_squared = nearest.rows[turn, next_rank[turn]], nearest.squared[turn, next_rank[turn]]
            # The nearest goes first, so that the order of the targets does not matter.
            for j in turn[np.lexsort((next_rows, next_squared))]:
                while next_rank[j] < k and turn_of[row := nearest.rows[j, next_rank[j]]] >= 0:
                    next_rank[j] += 1
                if next_rank[j] < k:
                    turn_of[row], count = count, count + 1
            rounds += bool(len(turn))
        self.scores_ = move_behind(turn_of.astype(np.float64), turn_of < 0, nearest.row_squared)
        self.nearest_target_ = nearest.row_nearest
        self.diagnostics_ = {"taken": count, "turns": rounds}


def _to_unit_length(rows: np.ndarray) -> np.ndarray:
    """Scale rows to length one; zero rows stay zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
        if np.isfinite(rows).all():  # else the search reports the row
            check_no_overflow(lengths)
        return np.asarray(rows / np.where(lengths > 0, lengths, 1.0))
