"""Nearest neighbours: scores each pool row by its squared distance to the nearest target row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from flatshift.selection.methods.base import Pool, Progress, Selector, Target, require_field
from flatshift.selection.validation import SelectorContext, from_settings


@dataclass(frozen=True, kw_only=True)
class KNN:
    """Nearest neighbours of the target, each sample at most once (score: squared distance to its nearest target)."""

    kind: Literal["knn"] = "knn"
    title: ClassVar[str] = "kNN"
    needs: ClassVar[tuple[str, ...]] = ("features",)

    def build(self, around: SelectorContext) -> KNNSelector:
        return from_settings(KNNSelector, self, around)


class KNNSelector(Selector):
    """Scores every pool row once; `scores_` is the exact squared distance to `nearest_target_`. Ignores weights.

    The same selection as TAPT/c and vector stores, without the duplicates from several targets. chunk: rows per tile,
    None to choose.
    """

    def __init__(self, *, chunk: int | None = None):
        self.chunk = chunk

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Find nearest targets; needs features on both sides."""
        from flatshift.selection.methods.neighbours import nearest_rows  # imports torch

        x, y = require_field(pool, target, "features", "knn")
        found = nearest_rows(x, y, 0, chunk=self.chunk, progress=progress)
        self.scores_ = found.row_squared
        self.nearest_target_ = found.row_nearest
        self.diagnostics_ = {"mean_squared_distance": float(found.row_squared.mean())}
        return self
