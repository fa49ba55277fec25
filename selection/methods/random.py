"""Uniform random selection: the control of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from flatshift.selection.methods.base import Pool, Progress, Selector, Target, keyed_uniform
from flatshift.selection.validation import SelectorContext, from_settings


@dataclass(frozen=True, kw_only=True)
class Random:
    """A uniform draw by seed: the control of every comparison."""

    kind: Literal["random"] = "random"
    title: ClassVar[str] = "A random draw"
    needs: ClassVar[tuple[str, ...]] = ()

    def build(self, around: SelectorContext) -> RandomSelector:
        return from_settings(RandomSelector, self, around)


class RandomSelector(Selector):
    """Scores uniform in (0, 1), keyed by seed and id: the same sample draws the same number in any row order."""

    by_words = False

    def __init__(self, *, seed: int = 0):
        self.seed = seed

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Draw the scores; uses only the pool's ids."""
        self.scores_ = keyed_uniform(pool, self.seed, "random selection")
        self.nearest_target_ = None
        self.diagnostics_ = {}
        return self
