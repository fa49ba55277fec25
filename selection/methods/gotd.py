"""GOT-D: the samples whose added mass lowers the transport cost from pool to target most (arXiv 2405.02774)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from flatshift.selection.errors import SelectionError
from flatshift.selection.methods.base import (
    Pool,
    Progress,
    Selector,
    Target,
    check_budget,
    check_number,
    require_field,
    unit_weights,
)
from flatshift.selection.validation import SelectorContext, check_fields, from_settings

if TYPE_CHECKING:
    from flatshift.selection.transport.solver import Potentials


def check_transport(settings: Any) -> None:
    """Raise ValueError for settings of the transport solver out of their bounds."""
    check_fields(settings, "epsilon", above=0)
    check_fields(settings, "memory_gib", least=0.001)
    if settings.tolerance is not None and not 0 < settings.tolerance < 2:
        raise ValueError(
            f"tolerance must be between 0 and 2 (an L1 error of probabilities), got {settings.tolerance:g}"
        )


def memory_bytes(gib: float) -> int:
    """Convert the setting `memory_gib` to bytes for a solver. Raises SelectionError."""
    check_number(gib, "memory_gib", above=0.0)
    return int(gib * 2**30)


@dataclass(frozen=True, kw_only=True)
class GotD:
    """Optimal-transport gradients (GOT-D): the samples whose added mass lowers OT(pool, target) most."""

    kind: Literal["gotd"] = "gotd"
    title: ClassVar[str] = "GOT-D"
    needs: ClassVar[tuple[str, ...]] = ("features",)
    epsilon: float = 0.05
    """Entropic regularisation, as a multiple of the exact weighted mean cost over all pairs."""
    tolerance: float | None = None
    """Marginal L1 error to reach; null: 1e-9 up to N·M = 1e7, 1e-3 above."""
    cost: Literal["sqeuclidean", "cosine"] = "sqeuclidean"
    """Squared Euclidean distance of features as given, or 1 − cosine (no feature may be zero)."""
    memory_gib: float = 1.0
    """Memory limit of the solver, in addition to the features, GiB."""
    rounds: int = 1
    """Above 1: choose the budget in this many parts, and solve again on the mixture of pool and selection after each.
    This restores the diversity that a single linear step loses when the selection gets a large share of training. A
    round costs one or two more solves."""
    mixture: float = 0.5
    """Rounds only: the share λ of the selection in (1 − λ)·pool + λ·selection that the later rounds see."""
    holdout: float = 0.25
    """Rounds only: share of the target to hold out; the rounds stop counting after the one whose mixture with the whole
    budget, filled at once, is nearest to the held-out part. 0: all rounds, on the whole target, unchecked."""
    debiased: bool = False
    """Subtract the pool's transport potential to itself: the gradient of the Sinkhorn divergence. Removes the entropic
    bias, a pull to the middle of the target that grows with epsilon. Not together with rounds."""
    self_sample: int = 2000
    """Debiased only: pool rows, drawn by seed, that represent the pool in its potential to itself (exact up to it)."""

    def __post_init__(self) -> None:
        check_transport(self)
        check_fields(self, "rounds", "self_sample", least=1)
        check_fields(self, "mixture", above=0, most=1)
        check_fields(self, "holdout", least=0, most=0.9)
        if self.debiased and self.rounds > 1:
            raise ValueError(f"rounds cannot be {self.rounds} with debiased; set rounds to 1 or debiased to false")

    def build(self, around: SelectorContext) -> GotDSelector:
        return from_settings(GotDSelector, self, around, memory_bytes=memory_bytes(self.memory_gib))


class GotDSelector(Selector):
    """Scores by the calibrated gradient s_i = f_i − Σ_j a_j f_j of OT_ε(pool, target); negative helps.

    epsilon: multiple of the exact weighted mean cost. tolerance: marginal L1 error, None for 1e-9 up to N·M = 1e7 and
    1e-3 above. seed: of the subsample that large pools start from, and of the held-out part. chunk: rows per tile, None
    to choose. memory_bytes: limit for the solver of large pools. `nearest_target_` is the target that receives most of
    a row's mass; `potentials_` the whole solution (of the first round). cost, device, state, group: as in
    `sinkhorn_potentials`, with a group all rows are this process's; in rounds, `state` has a folder for each solve.
    budget: number of rows to be selected, if known; the overlap that the solver measures is then for it.

    rounds above 1: `flatshift.selection.methods.rounds`, with `mixture` and `holdout`; needs `budget`. The scores of a
    round are its calibrated gradients, lowered by a constant if needed to rank before the next round's (a gradient has
    no absolute level); `gradients_` has the original ones.

    debiased: s_i of f − p, p the pool's potential to itself (`flatshift.selection.methods.debias`): the gradient of the
    Sinkhorn divergence OT_ε(pool, target) − ½OT_ε(pool, pool) − ½OT_ε(target, target). self_sample: rows used for p.
    """

    signed = True

    def __init__(
        self,
        *,
        epsilon: float = 0.05,
        tolerance: float | None = None,
        rounds: int = 1,
        mixture: float = 0.5,
        holdout: float = 0.25,
        budget: int | None = None,
        debiased: bool = False,
        self_sample: int = 2000,
        seed: int = 0,
        cost: str = "sqeuclidean",
        chunk: int | None = None,
        memory_bytes: int = 1 << 30,
        device: str = "cpu",
        state: str | None = None,
        group: Any = None,
    ):
        self.epsilon = epsilon
        self.tolerance = tolerance
        self.rounds = rounds
        self.mixture = mixture
        self.holdout = holdout
        self.budget = budget
        self.debiased = debiased
        self.self_sample = self_sample
        self.seed = seed
        self.cost = cost
        self.chunk = chunk
        self.memory_bytes = memory_bytes
        self.device = device
        self.state = state
        self.group = group

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Solve and score; needs features on both sides. Warns (ConvergenceWarning) if the tolerance is not reached."""
        self._check()
        if self.budget is not None and self.group is None:
            check_budget(self.budget, len(pool))
        if self.rounds > 1:
            return self._fit_rounds(pool, target, progress)
        x, y = require_field(pool, target, "features", "gotd")
        self.potentials_ = self._solve(x, y, pool.weights, target.weights, self.epsilon, progress, state=self.state)
        self.scores_ = self.potentials_.scores
        self.nearest_target_ = self.potentials_.nearest
        self.diagnostics_ = self.potentials_.diagnostics()
        if self.debiased:
            from flatshift.selection.methods.debias import self_potential

            found = self_potential(
                pool,
                epsilon=self.potentials_.epsilon,
                sample=self.self_sample,
                seed=self.seed,
                cost=self.cost,
                chunk=self.chunk,
                progress=progress,
            )
            scores = self.potentials_.f - found.p
            self.scores_ = scores - unit_weights(pool.weights, len(pool)) @ scores
            self.diagnostics_ |= {"debiased": True, "self_sample": found.sample, "self_change": found.change}
        return self

    def _fit_rounds(self, pool: Pool, target: Target, progress: Progress | None) -> Self:
        from flatshift.selection.methods.rounds import choose_in_rounds  # imports torch

        if self.debiased:
            raise SelectionError("gotd cannot be debiased over several rounds; set rounds to 1 or debiased to false")
        if self.budget is None:
            raise SelectionError(f"gotd with rounds={self.rounds} shapes one selection; construct it with budget=")
        solves = count(1)  # each solve has its own state folder, numbered in the fixed order of solves

        def solve(*given: Any, **more: Any) -> Potentials:
            state = None if self.state is None else str(Path(self.state) / f"solve-{next(solves):03d}")
            return self._solve(*given, **{**more, "state": state})

        found = choose_in_rounds(
            pool,
            target,
            solve,
            epsilon=self.epsilon,
            budget=self.budget,
            rounds=self.rounds,
            mixture=self.mixture,
            holdout=self.holdout,
            seed=self.seed,
            cost=self.cost,
            progress=progress,
        )
        self.potentials_ = found.first
        self.scores_ = found.scores
        self.gradients_ = found.gradients
        self.nearest_target_ = found.nearest
        self.diagnostics_ = found.first.diagnostics() | found.diagnostics()
        return self

    def _solve(
        self,
        x: Any,
        y: Any,
        a: Any,
        b: Any,
        epsilon: float,
        progress: Progress | None = None,
        held_bytes: int = 0,
        state: str | None = None,
    ) -> Potentials:
        from flatshift.selection.transport.solver import sinkhorn_potentials  # imports torch

        return sinkhorn_potentials(
            x,
            y,
            a=a,
            b=b,
            epsilon=epsilon,
            tolerance=self.tolerance,
            seed=self.seed,
            nearest=True,
            chunk=self.chunk,
            memory_bytes=self.memory_bytes,
            held_bytes=held_bytes,
            progress=progress,
            cost=self.cost,
            budget=self.budget,
            state=state,
            device=self.device,
            group=self.group,
        )

    def _check(self) -> None:
        if self.group is not None and (self.rounds > 1 or self.debiased):
            raise SelectionError("gotd in rounds or debiased is for one process; set rounds to 1, debiased to false")
        for name in ("rounds", "self_sample"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SelectionError(f"{name} must be a whole number of at least 1, not {value!r}")
        check_number(self.mixture, "mixture", above=0.0, most=1.0)
        check_number(self.holdout, "holdout", least=0.0, most=0.9)
