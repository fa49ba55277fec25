"""Uniform random selection: the control of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flatshift.selection.methods.base import MethodSettings, Pool, Progress, Selector, Target


@dataclass(frozen=True, kw_only=True)
class Random(MethodSettings):
    """A uniform draw by seed: the control of every comparison."""

    kind: Literal["random"] = "random"
    title: ClassVar[str] = "A random draw"


class RandomSelector(Selector, Random):
    """Scores uniform in (0, 1), keyed by seed and id: the same sample draws the same number in any row order. Uses only
    the pool's ids."""

    by_words = False
    seed: int = 0

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        self.scores_ = pool.draw(self.seed, "random selection")
        self.diagnostics_ = {}
