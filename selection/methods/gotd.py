"""GOT-D: the samples whose added mass lowers the transport cost from pool to target most (arXiv 2405.02774)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flatshift.selection.errors import SelectionError, TooLittleMemory
from flatshift.selection.methods.base import (
    MethodSettings,
    Pool,
    Progress,
    Selector,
    Target,
    check_budget,
    unit_weights,
)
from flatshift.selection.validation import bounded

if TYPE_CHECKING:
    from flatshift.selection.transport.solver import Potentials


@dataclass(frozen=True, kw_only=True)
class TransportSettings(MethodSettings):
    """Settings of methods that solve a transport problem."""

    epsilon: float = bounded(0.05, above=0)
    """Entropic regularisation, as a multiple of the exact weighted mean cost over all pairs of the problem."""
    tolerance: float | None = None
    """Marginal L1 error to reach; null: 1e-9 up to N·M = 1e7, 1e-3 above."""
    cost: Literal["sqeuclidean", "cosine"] = "sqeuclidean"
    """Squared Euclidean distance of features as given, or 1 − cosine (no feature may be zero)."""
    memory_gib: float = bounded(1.0, minimum=0.001)
    """Memory limit of the solver, in addition to the features, GiB."""

    def check(self) -> None:
        super().check()
        if self.tolerance is not None and not 0 < self.tolerance < 2:
            raise SelectionError(
                f"tolerance must be between 0 and 2 (an L1 error of probabilities), got {self.tolerance:g}"
            )


class TransportSelector(Selector, TransportSettings):
    """Base of methods that solve a transport problem. seed: of the subsample that large pools start from. chunk: rows
    per tile, None to choose. device: of the solver."""

    signed = True
    seed: int = 0
    chunk: int | None = None
    device: str = "cpu"

    def _solve(self, x: Any, y: Any, a: Any, b: Any, epsilon: float, **options: Any) -> Potentials:
        """Solve from x, of weights a, to y, of weights b. options: of `sinkhorn_potentials`."""
        from flatshift.selection.transport.solver import sinkhorn_potentials  # imports torch

        return sinkhorn_potentials(
            x, y, a=a, b=b, epsilon=epsilon, tolerance=self.tolerance, seed=self.seed, nearest=True, chunk=self.chunk,
            memory_bytes=int(self.memory_gib * 2**30), cost=self.cost, device=self.device, **options,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GotD(TransportSettings):
    """Optimal-transport gradients (GOT-D): the samples whose added mass lowers OT(pool, target) most."""

    kind: Literal["gotd"] = "gotd"
    title: ClassVar[str] = "GOT-D"
    needs: ClassVar[tuple[str, ...]] = ("features",)
    rounds: int = bounded(1, minimum=1)
    """Above 1: choose the budget in this many parts, and solve again on the mixture of pool and selection after each.
    This restores the diversity that a single linear step loses when the selection gets a large share of training. A
    round costs one or two more solves."""
    mixture: float = bounded(0.5, above=0, maximum=1)
    """Rounds only: the share λ of the selection in (1 − λ)·pool + λ·selection that the later rounds see."""
    holdout: float = bounded(0.25, minimum=0, maximum=0.9)
    """Rounds only: share of the target to hold out; the rounds stop counting after the one whose mixture with the whole
    budget, filled at once, is nearest to the held-out part. 0: all rounds, on the whole target, unchecked."""
    debiased: bool = False
    """Subtract the pool's transport potential to itself: the gradient of the Sinkhorn divergence. Removes the entropic
    bias, a pull to the middle of the target that grows with epsilon. Not together with rounds."""
    self_sample: int = bounded(2000, minimum=1)
    """Debiased only: pool rows, drawn by seed, that represent the pool in its potential to itself (exact up to it)."""

    def check(self) -> None:
        super().check()
        if self.debiased and self.rounds > 1:
            raise SelectionError(f"rounds cannot be {self.rounds} with debiased; set rounds to 1 or debiased to false")
        for name, other, idle in (
            ("mixture", "rounds above 1", self.rounds == 1),
            ("holdout", "rounds above 1", self.rounds == 1),
            ("self_sample", "debiased: true", not self.debiased),
        ):
            if idle and getattr(self, name) != getattr(GotD, name):
                raise SelectionError(f"{name} has no effect without {other}; leave it out, or set {other}")


class GotDSelector(TransportSelector, GotD):
    """Scores by the calibrated gradient s_i = f_i − Σ_j a_j f_j of OT_ε(pool, target); negative helps.

    `fit(pool, target)` returns self, `select(k)` the k best rows. epsilon: multiple of the exact weighted mean cost.
    tolerance: marginal L1 error, None for 1e-9 up to N·M = 1e7 and 1e-3 above. memory_gib: limit of the solver. seed:
    of the subsample that large pools start from, and of the held-out part. chunk: rows per tile, None to choose.
    `nearest_target_` is the target that receives most of a row's mass; `potentials_` the whole solution (of the first
    round). cost, device, state, group: as in `sinkhorn_potentials`, with a group all rows are this process's; in
    rounds, `state` has a folder for each solve. budget: number of rows to be selected, if known; the overlap that the
    solver measures is then for it. Needs features on both sides; warns (ConvergenceWarning) if the tolerance is not
    reached.

    rounds above 1: `flatshift.selection.methods.rounds`, with `mixture` and `holdout`; needs `budget`. The scores of a
    round are its calibrated gradients, lowered by a constant if needed to rank before the next round's (a gradient has
    no absolute level); `gradients_` has the original ones.

    debiased: s_i of f − p, p the pool's potential to itself (`flatshift.selection.methods.debias`): the gradient of the
    Sinkhorn divergence OT_ε(pool, target) − ½OT_ε(pool, pool) − ½OT_ε(target, target). self_sample: rows used for p.
    """

    budget: int | None = None
    state: str | None = None
    group: Any = None

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        if self.group is not None and (self.rounds > 1 or self.debiased):
            raise SelectionError("gotd in rounds or debiased is for one process; set rounds to 1, debiased to false")
        if self.budget is not None and self.group is None:
            check_budget(self.budget, len(pool))
        if self.rounds > 1:
            self._fit_in_rounds(pool, target, progress)
            return
        x, y = self._sides(pool, target)
        solution = self.potentials_ = self._solve(
            x, y, pool.weights, target.weights, self.epsilon, progress=progress, budget=self.budget, state=self.state,
            group=self.group,
        )  # fmt: skip
        self.scores_ = solution.scores
        self.nearest_target_ = solution.nearest
        self.diagnostics_ = solution.diagnostics()
        if self.debiased:
            from flatshift.selection.methods.debias import self_potential

            p, sample, change = self_potential(
                pool, epsilon=solution.epsilon, sample=self.self_sample, seed=self.seed, cost=self.cost,
                chunk=self.chunk, progress=progress,
            )  # fmt: skip
            scores = solution.f - p
            self.scores_ = scores - unit_weights(pool.weights, len(pool)) @ scores
            self.diagnostics_ |= {"debiased": True, "self_sample": sample, "self_change": change}

    def _fit_in_rounds(self, pool: Pool, target: Target, progress: Progress) -> None:
        from flatshift.selection.methods.rounds import choose_in_rounds  # imports torch

        if self.budget is None:
            raise SelectionError(f"gotd with rounds={self.rounds} shapes one selection; construct it with budget=")
        numbers = count(1)  # each solve has its own state folder, numbered in the fixed order of solves

        def solve(*sides_and_epsilon: Any, **options: Any) -> Potentials:
            state = None if self.state is None else str(Path(self.state) / f"solve-{next(numbers):03d}")
            return self._solve(*sides_and_epsilon, progress=progress, budget=self.budget, state=state, **options)

        result = choose_in_rounds(
            pool, target, solve, epsilon=self.epsilon, budget=self.budget, rounds=self.rounds, mixture=self.mixture,
            holdout=self.holdout, seed=self.seed, cost=self.cost,
        )  # fmt: skip
        self.potentials_ = result.one_shot
        self.scores_ = result.scores
        self.gradients_ = result.gradients
        self.nearest_target_ = result.nearest
        self.diagnostics_ = result.one_shot.diagnostics() | result.diagnostics()


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
