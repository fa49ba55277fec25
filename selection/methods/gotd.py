"""GOT-D: the samples whose added mass lowers the transport cost from pool to target most (arXiv 2405.02774)."""

from __future__ import annotations

from typing import Self

from selection.methods.base import Pool, Progress, Selector, Target, need
from selection.transport.solver import sinkhorn_potentials


class GotDSelector(Selector):
    """Scores by the calibrated gradient s_i = f_i − Σ_j a_j f_j of OT_ε(pool, target); negative helps.

    epsilon: multiple of the exact weighted mean cost. tolerance: marginal L1 error, None for 1e-9 up to N·M = 1e7 and
    1e-3 above. seed: of the subsample that large pools start from. chunk: rows per tile, None to choose. memory_bytes:
    what the solver of large pools may hold. `nearest_target_` is the target that receives most of a row's mass;
    `potentials_` the whole solution.
    """

    def __init__(
        self,
        *,
        epsilon: float = 0.05,
        tolerance: float | None = None,
        seed: int = 0,
        chunk: int | None = None,
        memory_bytes: int = 1 << 30,
    ):
        self.epsilon = epsilon
        self.tolerance = tolerance
        self.seed = seed
        self.chunk = chunk
        self.memory_bytes = memory_bytes

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Needs features on both sides. Warns (ConvergenceWarning) where the tolerance was not reached."""
        x, y = need(pool, target, "features", "gotd")
        self.potentials_ = sinkhorn_potentials(
            x,
            y,
            a=pool.weights,
            b=target.weights,
            epsilon=self.epsilon,
            tolerance=self.tolerance,
            seed=self.seed,
            nearest=True,
            chunk=self.chunk,
            memory_bytes=self.memory_bytes,
            progress=progress,
        )
        self.scores_ = self.potentials_.scores
        self.nearest_target_ = self.potentials_.nearest
        self.diagnostics_ = self.potentials_.diagnostics()
        return self
