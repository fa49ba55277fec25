"""GOT-D with negative examples: towards the target, away from texts that must not be learnt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flatshift.selection.errors import SelectionError, TooLittleMemory
from flatshift.selection.methods.base import Pool, Progress, Target
from flatshift.selection.methods.gotd import TransportSelector, TransportSettings
from flatshift.selection.validation import bounded


@dataclass(frozen=True, kw_only=True)
class GotDContrast(TransportSettings):
    """GOT-D towards the target and away from negative examples (`select.negative.files`). Score: attract · the target's
    calibrated gradient − repel · the negatives'. The minus sign is inferred, as the paper gives none: a row is chosen
    if its mass would move the pool away from the negatives."""

    kind: Literal["gotd-contrast"] = "gotd-contrast"
    title: ClassVar[str] = "GOT-D with negatives"
    needs: ClassVar[tuple[str, ...]] = ("features", "negative")
    attract: float = bounded(1.0, minimum=0)
    """Weight of the target's gradient; 0: only away from the negatives, as in the paper's detoxification study."""
    repel: float = bounded(1.0, minimum=0)
    """Weight of the negatives' gradient."""

    def check(self) -> None:
        super().check()
        if self.attract == self.repel == 0:
            raise SelectionError("repel and attract are both 0, which scores nothing; make one of them positive")


class GotDContrastSelector(TransportSelector, GotDContrast):
    """Scores by attract · s_i(target) − repel · s_i(negative), s the calibrated gradient of OT_ε from the pool.

    s_i(negative) > 0 means that more mass on row i moves the pool away from the negatives; such rows get the smaller
    scores. The paper (arXiv 2405.02774 §3.1) only says that toxic text served "as the negative target"; the sign is
    inferred from its purpose. attract = 0 is that variant. Both gradients are in units of cost on the same features, so
    that equal weights are comparable. `nearest_target_` and `potentials_` are the target's; `away_` (N,) s(negative).
    `fit` takes `negative`, a Target; needs features on all three sides. Warns (ConvergenceWarning) if a tolerance is
    not reached.
    """

    def _fit(self, pool: Pool, target: Target, progress: Progress, negative: Target | None = None) -> None:
        if negative is None:
            raise SelectionError("gotd-contrast needs negative examples; pass negative= to fit")
        x, y = self._sides(pool, target)
        if negative.features is None:
            raise SelectionError("gotd-contrast works on features, and the negative has none; pass features= to it")
        towards = self._solve(x, y, pool.weights, target.weights, self.epsilon, progress=progress)
        try:
            away = self._solve(x, negative.features, pool.weights, negative.weights, self.epsilon, progress=progress)
        except TooLittleMemory:
            raise
        except SelectionError as error:
            raise SelectionError(f"with the negative as target: {error}") from None
        self.potentials_ = towards
        self.scores_ = self.attract * towards.scores - self.repel * away.scores
        self.away_ = away.scores
        self.nearest_target_ = towards.nearest
        self.diagnostics_ = towards.diagnostics() | {
            "attract": self.attract,
            "repel": self.repel,
            "negative_marginal_error": away.marginal_error,
            "negative_mean_cost": away.mean_cost,
            "converged": towards.converged and away.converged,
        }
