"""Selection by a model's losses: mean −log p per token, or the gap between two losses.

Perplexity takes low, middle or high losses (middle: Marion et al. 2023, arXiv 2309.04564). The loss gap is that of the
backbone adapted to the target's texts minus that of the backbone as it is: the conditional loss reduction of
CoLoR-filter (Brandfonbrener et al. 2024, arXiv 2406.10670), or Moore and Lewis with the backbone as both models;
divided by the backbone's loss it is the loss drop along a target-aligned path (Yang et al. 2026, arXiv 2605.09404).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import MethodSettings, Pool, Progress, Selector, Target, require_field
from flatshift.selection.validation import bounded

Measure = Callable[[Sequence[str]], Any]
"""Function texts → (len(texts),) mean −log p per token of each; called with batches in file order."""

_BATCH = 1024


@dataclass(frozen=True, kw_only=True)
class Perplexity(MethodSettings):
    """The backbone's own loss on each text: mean −log p per token."""

    kind: Literal["perplexity"] = "perplexity"
    title: ClassVar[str] = "Perplexity"
    needs: ClassVar[tuple[str, ...]] = ("losses",)
    keep: Literal["low", "middle", "high"] = "middle"
    """Texts ranked first; `middle`: by distance from the median rank."""
    max_length: int = bounded(256, minimum=8)
    """Maximum number of tokens per text."""


class PerplexitySelector(Selector):
    """Scores by the mean −log p per token L: L itself ("low"), −L ("high"), or |F(L) − ½| ("middle").

    F is the mid-rank in the pool, so that equal losses score alike and the middle is the median, whatever the tail.
    measure: called for the texts of a pool without `losses`. `losses_` (N,) are the losses used. The target is ignored.
    """

    by_words = False
    keep: str = "middle"
    measure: Measure | None = None

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        if self.keep not in ("low", "middle", "high"):
            raise SelectionError(f'keep must be "low", "middle" or "high", got {self.keep!r}')
        losses = self.losses_ = _measure_losses(pool, target, self.measure, progress)
        if self.keep == "middle":
            ordered = np.sort(losses)
            below, up_to = (np.searchsorted(ordered, losses, side) for side in ("left", "right"))
            self.scores_ = np.abs((below + up_to) / (2.0 * len(losses)) - 0.5)
        else:
            self.scores_ = losses.copy() if self.keep == "low" else -losses
        self.diagnostics_ = {"keep": self.keep, "mean_loss": float(losses.mean()), "median": float(np.median(losses))}


@dataclass(frozen=True, kw_only=True)
class LossGap(MethodSettings):
    """The backbone itself as reference: loss per token of a light adapter trained on the target's texts, minus the
    backbone's own. Two forward passes per pool text."""

    kind: Literal["loss-gap"] = "loss-gap"
    title: ClassVar[str] = "The loss gap"
    needs: ClassVar[tuple[str, ...]] = ("losses",)
    max_length: int = bounded(256, minimum=8)
    """Maximum number of tokens per text."""
    steps: int = bounded(60, minimum=1)
    """Optimizer steps of the adapter on the target's texts."""
    batch_size: int = bounded(16, minimum=1)
    """Texts per optimizer step."""
    lr: float = bounded(3e-3, above=0)
    """Learning rate of the adapter."""
    rank: int = bounded(4, minimum=1)
    """Rank of the adapter."""
    normalised: bool = False
    """Divide the gap by the backbone's own loss, so that texts that it predicts badly do not come first for that."""


class LossGapSelector(Selector):
    """Scores by the gap itself: negative if the adapter predicts a text better than the backbone does.

    measure: texts → (n,) gap in nats per token, called in file order for the texts of a pool without `losses` (gaps).
    """

    measure: Measure | None = None

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        self.scores_ = gaps = _measure_losses(pool, target, self.measure, progress)
        self.diagnostics_ = {"mean_gap": float(gaps.mean()), "median": float(np.median(gaps))}


# The other settings of both are those of `measure`, which the caller makes.
Perplexity.selector, LossGap.selector = PerplexitySelector, LossGapSelector


def _measure_losses(pool: Pool, target: Target, measure: Measure | None, progress: Progress) -> np.ndarray:
    """Return the pool's losses (N,), or those that `measure` gives for its texts."""
    if pool.losses is not None:
        losses = np.asarray(pool.losses, dtype=np.float64)
    elif measure is None:
        raise SelectionError(
            "perplexity needs a loss per row; pass losses= to the pool, or measure= (and texts) to the selector"
        )
    else:
        texts, _ = require_field(pool, target, "texts", "perplexity")
        parts = []
        for low in range(0, len(texts), _BATCH):
            batch = texts[low : low + _BATCH]
            parts.append(np.asarray(measure(batch), dtype=np.float64))
            if parts[-1].shape != (len(batch),):
                raise SelectionError(
                    f"measure must return one number per text, not shape {parts[-1].shape} for {len(batch)} texts"
                )
            progress("measuring perplexity", low + len(batch), len(texts))
        losses = np.concatenate(parts)
    if losses.shape != (len(pool),):
        raise SelectionError(f"losses must have shape ({len(pool)},), not {losses.shape}")
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise SelectionError(
            f"losses: row {int(bad[0])} is {losses[bad[0]]}; a text without a token has none, leave it out"
        )
    return losses
