"""Controls of every comparison: a uniform draw, and selection by length alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from flatshift.selection.lazy import np
from flatshift.selection.methods.base import MethodSettings, Pool, Progress, Selector, Target

_BINS = 10
_BATCH = 8192


@dataclass(frozen=True, kw_only=True)
class Random(MethodSettings):
    """A uniform draw by seed: the control of every comparison."""

    kind: Literal["random"] = "random"
    title: ClassVar[str] = "A random draw"


class RandomSelector(Selector, Random):
    """Scores uniform in (0, 1), keyed by seed and id: the same in any row order. Uses only the pool's ids."""

    by_words = False
    seed: int = 0

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        self.scores_ = pool.draw(self.seed, "random selection")
        self.diagnostics_ = {}


@dataclass(frozen=True, kw_only=True)
class Length(MethodSettings):
    """Selection by length alone: the control for methods that favour long or short texts."""

    kind: Literal["length"] = "length"
    title: ClassVar[str] = "Length"
    needs: ClassVar[tuple[str, ...]] = ("texts",)
    prefer: Literal["long", "short", "target"] = "target"
    """`target`: a seeded draw whose lengths follow the target's (in tenths of its distribution)."""
    unit: Literal["words", "characters"] = "words"
    """Unit of length."""


class LengthSelector(Selector, Length):
    """Longest first, shortest first, or a draw whose lengths follow the target's.

    prefer "long" scores by −length, "short" by length. "target" bins lengths at the target's deciles, its minimum and
    its maximum, and draws rows without repeats in proportion to (target share + ½/M)/(pool share) of their bin, by seed
    and id: the length-matched random control. unit: "words" (runs of anything but white space) or "characters".
    `lengths_` (N,) int64. Needs texts on both sides.
    """

    by_words = False
    seed: int = 0

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        texts, target_texts = self._sides(pool, target)
        lengths = self.lengths_ = self._lengths(texts, progress)
        if self.prefer == "target":
            target_lengths = self._lengths(target_texts)
            # Quantiles that occur as lengths, so that a bin is never empty between two integers.
            cuts = np.quantile(target_lengths, np.arange(_BINS) / _BINS, method="higher")
            edges = np.unique(np.append(cuts, target_lengths.max() + 1))
            bins, target_bins = (np.searchsorted(edges, values, side="right") for values in (lengths, target_lengths))
            share = np.bincount(target_bins, minlength=len(edges) + 1) + 0.5
            weight = share / np.maximum(np.bincount(bins, minlength=len(edges) + 1), 1)
            draw = pool.draw(self.seed, "length draw")
            self.scores_ = -np.log(weight[bins]) + np.log(-np.log(draw))
        else:
            self.scores_ = (-lengths if self.prefer == "long" else lengths).astype(np.float64)
        self.diagnostics_ = {"prefer": self.prefer, "unit": self.unit, "median_length": float(np.median(lengths))}

    def _lengths(self, texts: Sequence[str], progress: Progress | None = None) -> np.ndarray:
        out = np.empty(len(texts), dtype=np.int64)
        for low in range(0, len(texts), _BATCH):
            batch = texts[low : low + _BATCH]
            out[low : low + len(batch)] = [len(text if self.unit == "characters" else text.split()) for text in batch]
            if progress:
                progress("measuring lengths", low + len(batch), len(texts))
        return out
