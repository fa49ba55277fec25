"""Selection by a model's loss: low, middle or high mean −log p per token (middle: Marion et al. 2023, arXiv
2309.04564)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import Pool, Progress, Selector, Target, require_field
from flatshift.selection.validation import SelectorContext, check_fields, from_settings

Measure = Callable[[Sequence[str]], Any]
"""Function texts → (len(texts),) mean −log p per token of each; called with batches in file order."""

_BATCH = 1024


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The backbone's own loss on each text: mean −log p per token."""

    kind: Literal["perplexity"] = "perplexity"
    title: ClassVar[str] = "Perplexity"
    needs: ClassVar[tuple[str, ...]] = ("losses",)
    keep: Literal["low", "middle", "high"] = "middle"
    """Texts ranked first; `middle`: by distance from the median rank."""
    max_length: int = 256
    """Maximum number of tokens per text."""

    def __post_init__(self) -> None:
        check_fields(self, "max_length", least=8)

    def build(self, around: SelectorContext) -> PerplexitySelector:
        return from_settings(PerplexitySelector, self, around)


class PerplexitySelector(Selector):
    """Scores by the mean −log p per token L: L itself ("low"), −L ("high"), or |F(L) − ½| ("middle").

    F is the mid-rank in the pool, so that equal losses score alike and the middle is the median, whatever the tail.
    measure: called for the texts of a pool without `losses`. `losses_` (N,) are the losses used. The target is ignored.
    """

    by_words = False

    def __init__(self, *, keep: str = "middle", measure: Measure | None = None):
        self.keep = keep
        self.measure = measure

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Score by the losses; needs the pool's losses, or its texts and `measure`."""
        if self.keep not in ("low", "middle", "high"):
            raise SelectionError(f'keep must be "low", "middle" or "high", not {self.keep!r}')
        losses = self._losses(pool, target, progress)
        bad = np.flatnonzero(~np.isfinite(losses))
        if len(bad):
            raise SelectionError(
                f"losses: row {int(bad[0])} is {losses[bad[0]]}; a text without a token has none, leave it out"
            )
        self.losses_ = losses
        if self.keep == "middle":
            self.scores_ = np.abs(_midranks(losses) - 0.5)
        else:
            self.scores_ = losses.copy() if self.keep == "low" else -losses
        self.nearest_target_ = None
        self.diagnostics_ = {"keep": self.keep, "mean_loss": float(losses.mean()), "median": float(np.median(losses))}
        return self

    def _losses(self, pool: Pool, target: Target, progress: Progress | None) -> np.ndarray:
        if pool.losses is not None:
            losses = np.asarray(pool.losses, dtype=np.float64)
        elif self.measure is None:
            raise SelectionError(
                "perplexity needs a loss per row; pass losses= to the pool, or measure= (and texts) to the selector"
            )
        else:
            texts, _ = require_field(pool, target, "texts", "perplexity")
            parts = []
            for low in range(0, len(texts), _BATCH):
                batch = texts[low : low + _BATCH]
                parts.append(np.asarray(self.measure(batch), dtype=np.float64))
                if parts[-1].shape != (len(batch),):
                    raise SelectionError(
                        f"measure must return one number per text, not shape {parts[-1].shape} for {len(batch)} texts"
                    )
                if progress:
                    progress("measuring perplexity", low + len(batch), len(texts))
            losses = np.concatenate(parts)
        if losses.shape != (len(pool),):
            raise SelectionError(f"losses must have shape ({len(pool)},), not {losses.shape}")
        return losses


def _midranks(values: np.ndarray) -> np.ndarray:
    """Return the share of values below each plus half the share equal to it."""
    ordered = np.sort(values)
    below, upto = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (below + upto) / (2.0 * len(values))
