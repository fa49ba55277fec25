"""GOT-D with negative examples: towards the target, away from texts that must not be learnt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from flatshift.selection.errors import SelectionError, TooLittleMemory
from flatshift.selection.methods.base import Pool, Progress, Selector, Target, check_number, require_field
from flatshift.selection.methods.gotd import check_transport, memory_bytes
from flatshift.selection.validation import SelectorContext, check_fields, from_settings

if TYPE_CHECKING:
    from flatshift.selection.transport.solver import Potentials


@dataclass(frozen=True, kw_only=True)
class GotDContrast:
    """GOT-D towards the target and away from negative examples (`select.negative.files`). Score: attract · the target's
    calibrated gradient − repel · the negatives'. The minus sign is inferred, as the paper gives none: a row is chosen
    if its mass would move the pool away from the negatives."""

    kind: Literal["gotd-contrast"] = "gotd-contrast"
    title: ClassVar[str] = "GOT-D with negatives"
    needs: ClassVar[tuple[str, ...]] = ("features", "negative")
    epsilon: float = 0.05
    """Entropic regularisation of both problems, as a multiple of each one's own mean cost."""
    tolerance: float | None = None
    """Marginal L1 error to reach; null: 1e-9 up to N·M = 1e7, 1e-3 above."""
    cost: Literal["sqeuclidean", "cosine"] = "sqeuclidean"
    """Squared Euclidean distance of features as given, or 1 − cosine (no feature may be zero)."""
    memory_gib: float = 1.0
    """Memory limit of the solver, in addition to the features, GiB."""
    attract: float = 1.0
    """Weight of the target's gradient; 0: only away from the negatives, as in the paper's detoxification study."""
    repel: float = 1.0
    """Weight of the negatives' gradient."""

    def __post_init__(self) -> None:
        check_transport(self)
        check_fields(self, "attract", "repel", least=0)
        if self.attract == self.repel == 0:
            raise ValueError("repel and attract are both 0, which scores nothing; make one of them positive")

    def build(self, around: SelectorContext) -> GotDContrastSelector:
        return from_settings(GotDContrastSelector, self, around, memory_bytes=memory_bytes(self.memory_gib))


class GotDContrastSelector(Selector):
    """Scores by attract · s_i(target) − repel · s_i(negative), s the calibrated gradient of OT_ε from the pool.

    s_i(negative) > 0 means that more mass on row i moves the pool away from the negatives; such rows get the smaller
    scores. The paper (arXiv 2405.02774 §3.1) only says that toxic text served "as the negative target"; the sign is
    inferred from its purpose. attract = 0 is that variant. Both gradients are in units of cost on the same features, so
    that equal weights are comparable. `nearest_target_` and `potentials_` are the target's; `away_` (N,) s(negative).
    The other parameters are those of `GotDSelector`.
    """

    signed = True

    def __init__(
        self,
        *,
        epsilon: float = 0.05,
        tolerance: float | None = None,
        attract: float = 1.0,
        repel: float = 1.0,
        seed: int = 0,
        cost: str = "sqeuclidean",
        chunk: int | None = None,
        memory_bytes: int = 1 << 30,
        device: str = "cpu",
    ):
        self.epsilon = epsilon
        self.tolerance = tolerance
        self.attract = attract
        self.repel = repel
        self.seed = seed
        self.cost = cost
        self.chunk = chunk
        self.memory_bytes = memory_bytes
        self.device = device

    def fit(
        self, pool: Pool, target: Target, *, negative: Target | None = None, progress: Progress | None = None
    ) -> Self:
        """Score the pool; needs features on all three sides. Warns (ConvergenceWarning) if a tolerance is not
        reached."""
        check_number(self.attract, "attract", least=0.0)
        check_number(self.repel, "repel", least=0.0)
        if self.attract == self.repel == 0:
            raise SelectionError("attract and repel are both 0, which scores nothing; make one of them positive")
        if negative is None:
            raise SelectionError("gotd-contrast needs negative examples; pass negative= to fit")
        x, y = require_field(pool, target, "features", "gotd-contrast")
        if negative.features is None:
            raise SelectionError("gotd-contrast works on features, and the negative has none; pass features= to it")
        towards = self._solve(pool, x, target, y, progress)
        try:
            away = self._solve(pool, x, negative, negative.features, progress)
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
        return self

    def _solve(self, pool: Pool, x: Any, side: Target, y: Any, progress: Progress | None) -> Potentials:
        from flatshift.selection.transport.solver import sinkhorn_potentials  # imports torch

        return sinkhorn_potentials(
            x,
            y,
            a=pool.weights,
            b=side.weights,
            epsilon=self.epsilon,
            tolerance=self.tolerance,
            seed=self.seed,
            nearest=True,
            chunk=self.chunk,
            memory_bytes=self.memory_bytes,
            progress=progress,
            cost=self.cost,
            device=self.device,
        )
