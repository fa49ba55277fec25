"""Nearest neighbours: scores each pool row by its squared distance to the nearest target row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flatshift.selection.methods.base import MethodSettings, Pool, Progress, Selector, Target


@dataclass(frozen=True, kw_only=True)
class KNN(MethodSettings):
    """Nearest neighbours of the target, each sample at most once (score: squared distance to its nearest target)."""

    kind: Literal["knn"] = "knn"
    title: ClassVar[str] = "kNN"
    needs: ClassVar[tuple[str, ...]] = ("features",)


class KNNSelector(Selector, KNN):
    """Scores every pool row once; `scores_` is the exact squared distance to `nearest_target_`. Needs features on both
    sides; ignores weights.

    The same selection as TAPT/c and vector stores, without the duplicates from several targets. chunk: rows per tile,
    None to choose.
    """

    chunk: int | None = None

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        from flatshift.selection.methods.neighbours import nearest_rows  # imports torch

        x, y = self._sides(pool, target)
        nearest = nearest_rows(x, y, 0, chunk=self.chunk, progress=progress)
        self.scores_ = nearest.row_squared
        self.nearest_target_ = nearest.row_nearest
        self.diagnostics_ = {"mean_squared_distance": float(nearest.row_squared.mean())}
