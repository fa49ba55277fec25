"""Selection by length alone: a control for methods that favour long or short texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import Pool, Progress, Selector, Target, keyed_uniform, require_field
from flatshift.selection.validation import SelectorContext, from_settings

_BINS = 10
_BATCH = 8192


@dataclass(frozen=True, kw_only=True)
class Length:
    """Selection by length alone: the control for methods that favour long or short texts."""

    kind: Literal["length"] = "length"
    title: ClassVar[str] = "Length"
    needs: ClassVar[tuple[str, ...]] = ("texts",)
    prefer: Literal["long", "short", "target"] = "target"
    """`target`: a seeded draw whose lengths follow the target's (in tenths of its distribution)."""
    unit: Literal["words", "characters"] = "words"
    """Unit of length."""

    def build(self, around: SelectorContext) -> LengthSelector:
        return from_settings(LengthSelector, self, around)


class LengthSelector(Selector):
    """Longest first, shortest first, or a draw whose lengths follow the target's.

    prefer "long" scores by −length, "short" by length. "target" bins lengths at the target's deciles, its minimum and
    its maximum, and draws rows without repeats in proportion to (target share + ½/M)/(pool share) of their bin, by seed
    and id: the length-matched random control. unit: "words" (runs of anything but white space) or "characters".
    `lengths_` (N,) int64.
    """

    by_words = False

    def __init__(self, *, prefer: str = "target", unit: str = "words", seed: int = 0):
        self.prefer = prefer
        self.unit = unit
        self.seed = seed

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Score by length; needs texts on both sides."""
        if self.prefer not in ("long", "short", "target"):
            raise SelectionError(f'prefer must be "long", "short" or "target", not {self.prefer!r}')
        if self.unit not in ("words", "characters"):
            raise SelectionError(f'unit must be "words" or "characters", not {self.unit!r}')
        texts, wanted = require_field(pool, target, "texts", "length")
        lengths = self._lengths(texts, progress)
        self.lengths_ = lengths
        if self.prefer == "target":
            aims = self._lengths(wanted, None)
            # Quantiles that occur as lengths, so that a bin is never empty between two integers.
            cuts = np.quantile(aims, np.arange(_BINS) / _BINS, method="higher")
            edges = np.unique(np.append(cuts, aims.max() + 1))
            have, want = (np.searchsorted(edges, values, side="right") for values in (lengths, aims))
            share = np.bincount(want, minlength=len(edges) + 1) + 0.5
            weight = share / np.maximum(np.bincount(have, minlength=len(edges) + 1), 1)
            draw = keyed_uniform(pool, self.seed, "length draw")
            self.scores_ = -np.log(weight[have]) + np.log(-np.log(draw))
        else:
            self.scores_ = (-lengths if self.prefer == "long" else lengths).astype(np.float64)
        self.nearest_target_ = None
        self.diagnostics_ = {"prefer": self.prefer, "unit": self.unit, "median_length": float(np.median(lengths))}
        return self

    def _lengths(self, texts: Sequence[str], progress: Progress | None) -> np.ndarray:
        measure = len if self.unit == "characters" else _count_words
        out = np.empty(len(texts), dtype=np.int64)
        for low in range(0, len(texts), _BATCH):
            batch = texts[low : low + _BATCH]
            out[low : low + len(batch)] = [measure(text) for text in batch]
            if progress:
                progress("measuring lengths", low + len(batch), len(texts))
        return out


def _count_words(text: str) -> int:
    return len(text.split())
