"""Gap between two losses: the backbone adapted to the target's texts, minus the backbone as it is.

This is the conditional loss reduction of CoLoR-filter (Brandfonbrener et al. 2024, arXiv 2406.10670), or Moore and
Lewis with the backbone itself as both language models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from flatshift.selection.methods.base import Pool, Progress, Selector, Target
from flatshift.selection.methods.perplexity import Measure, PerplexitySelector
from flatshift.selection.validation import SelectorContext, check_fields, from_settings


@dataclass(frozen=True, kw_only=True)
class LossGap:
    """The backbone itself as reference: loss per token of a light adapter trained on the target's texts, minus the
    backbone's own. Two forward passes per pool text."""

    kind: Literal["loss-gap"] = "loss-gap"
    title: ClassVar[str] = "The loss gap"
    needs: ClassVar[tuple[str, ...]] = ("losses",)
    max_length: int = 256
    """Maximum number of tokens per text."""
    steps: int = 60
    """Optimizer steps of the adapter on the target's texts."""
    batch_size: int = 16
    """Texts per optimizer step."""
    lr: float = 3e-3
    """Learning rate of the adapter."""
    rank: int = 4
    """Rank of the adapter."""

    def __post_init__(self) -> None:
        check_fields(self, "max_length", least=8)
        check_fields(self, "steps", "batch_size", "rank", least=1)
        check_fields(self, "lr", above=0)

    def build(self, around: SelectorContext) -> LossGapSelector:
        return from_settings(LossGapSelector, self, around)


class LossGapSelector(Selector):
    """Scores by the gap itself: negative if the adapter predicts a text better than the backbone does.

    measure: texts → (n,) gap in nats per token, called in file order for the texts of a pool without `losses`.
    """

    def __init__(self, *, measure: Measure | None = None):
        self.measure = measure

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Score by the gap; needs the pool's losses (its gaps), or its texts and `measure`."""
        inner = PerplexitySelector(keep="low", measure=self.measure).fit(pool, target, progress=progress)
        self.scores_ = inner.losses_
        self.nearest_target_ = None
        self.diagnostics_ = {"mean_gap": inner.diagnostics_["mean_loss"], "median": inner.diagnostics_["median"]}
        return self
