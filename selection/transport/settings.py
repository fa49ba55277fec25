"""Shared parts of all solvers: settings, result, the descent along falling ε, and the convergence of the selection
(overlap@k measured between two answers, or estimated from the next correction)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flatshift.selection.transport.dense import NEWTON_MAX_COLUMNS, solve_dense
from flatshift.selection.transport.kernel import Evaluation, StoredKernel
from flatshift.selection.transport.problem import Progress, TransportProblem
from flatshift.selection.transport.ranks import ProcessTeam

ITERATIONS = "transport iterations"
"""Name of the progress stage that counts iterations, up to their maximum; all others count rows."""


def measure_overlap(scores: Tensor, other_scores: Tensor, k: int, team: ProcessTeam) -> float:
    """Return |TopK(first) ∩ TopK(second)| / k over all rows of the team; ties at a threshold count."""
    limits = team.smallest((scores, k), (other_scores, k))
    both = float(((scores <= limits[0]) & (other_scores <= limits[1])).sum())
    return min(1.0, team.total(both) / k)


@dataclass(frozen=True)
class SelectionThreshold:
    """Threshold τ of the k smallest of `rows` potentials, and the density there, from the ranks k/2 and 3k/2."""

    tau: float
    density: float
    k: int
    rows: int


def find_threshold(f: Tensor, k: int, team: ProcessTeam) -> SelectionThreshold | None:
    """Compute the threshold of f (N,), over all rows of the team; None if all are taken, or those near it equal."""
    total = int(team.total(len(f)))
    if k >= total:
        return None
    low, high = max(1, k // 2), min(total, k + k // 2)
    below, tau, above = team.smallest((f, low), (f, k), (f, high))
    span = above - below
    return SelectionThreshold(tau, (high - low) / total / span, k, total) if span > 0.0 else None


def estimate_overlap(threshold: SelectionThreshold | None, sample: Tensor, moved: Tensor) -> float:
    """Estimate overlap@k of f, whose `threshold` is this, with f after the next correction: 1 − h·E|δ|/(2q) (gotd.md
    §5.7). sample, moved (n,): the potential on a subsample, before and after the next correction. h: density of f at
    the threshold; δ: change of rows near it minus their mean change; q = k/N."""
    if threshold is None or len(sample) < 2:
        return 1.0
    share = len(sample) * threshold.k // threshold.rows
    near = torch.argsort((sample - threshold.tau).abs(), stable=True)[: max(min(200, len(sample)), share)]
    change = (moved - sample)[near]
    spread = float((change - change.mean()).abs().mean())
    return max(0.0, 1.0 - threshold.density * spread * threshold.rows / (2.0 * threshold.k))


@dataclass(frozen=True)
class SolverSettings:
    """Checked settings of one solve. epsilon: absolute, for squared distances; relative: as the user gave it.

    overlap: share of the `top` best rows that two successive answers must have in common, None for no requirement.
    state: directory of a resumable solve, None for none. held_bytes: part of memory_bytes that the caller itself holds.
    """

    epsilon: float
    relative: float
    tolerance: float
    seed: int
    max_iterations: int
    max_passes: int
    memory_bytes: int
    held_bytes: int
    chunk: int | None
    progress: Progress | None
    overlap: float | None
    top: int
    state: Path | None
    device: torch.device

    @property
    def allowance(self) -> int:
        """Bytes left to the solver."""
        return self.memory_bytes - self.held_bytes

    def newton_columns(self, free: float) -> int:
        """Return the targets up to which Newton steps fit in `free` bytes: some six M×M matrices of float64."""
        return min(NEWTON_MAX_COLUMNS, math.isqrt(max(0, int(free)) // 48))


@dataclass(frozen=True)
class SolverResult:
    """Result of a solver.

    `at`: the answer's exact evaluation, with `nearest` if requested. overlap: measured between the last two answers;
    estimate: with the converged selection, as predicted (gotd.md §5.7); resumed: passes read from `state`.
    """

    at: Evaluation
    iterations: int
    passes: int
    method: str
    dtype: torch.dtype
    overlap: float | None = None
    estimate: float | None = None
    resumed: int = 0

    def satisfies(self, settings: SolverSettings) -> bool:
        """True if the requirements on the marginal error and on the overlap are met."""
        enough = settings.overlap is None or (self.overlap is not None and self.overlap >= settings.overlap)
        return self.at.error <= settings.tolerance and enough


def descend(
    kernel: StoredKernel,
    settings: SolverSettings,
    tolerance: float,
    newton_columns: int,
    start: Tensor | None = None,
    inverse: Tensor | None = None,
) -> tuple[Evaluation, int]:
    """Solve at ε falling by thirds from 0.05 (each stage roughly, from the last one's g), then at the real one; also
    return the iterations. start: a g near enough to begin with the real ε. inverse: as in `solve_dense`."""
    b = kernel.rows.b
    g: Tensor = torch.zeros_like(b) if start is None else start
    iterations, relative = 0, 0.05
    while start is None and relative > 1.5 * settings.relative and iterations < settings.max_iterations:
        kernel.absorb(g, relative / settings.relative * settings.epsilon)
        rough, used = solve_dense(
            kernel, g, marginal=b, tolerance=3e-2, max_iterations=min(60, settings.max_iterations - iterations),
            newton_columns=newton_columns, on_iterations=_iteration_progress(settings, iterations),
        )  # fmt: skip
        g = rough.g
        iterations += used
        relative /= 3.0
    kernel.absorb(g, settings.epsilon)
    at, used = solve_dense(
        kernel, g, marginal=b, tolerance=tolerance, max_iterations=settings.max_iterations - iterations,
        newton_columns=newton_columns, inverse=inverse, on_iterations=_iteration_progress(settings, iterations),
    )  # fmt: skip
    return at, iterations + used


def _iteration_progress(settings: SolverSettings, before: int) -> Callable[[int], None] | None:
    """Return a progress callback for iterations that follow `before` others; the total is their maximum."""
    progress, maximum = settings.progress, settings.max_iterations
    if progress is None:
        return None
    return lambda done: progress(ITERATIONS, min(before + done, maximum - 1), maximum)


def free_bytes(problem: TransportProblem, settings: SolverSettings) -> float:
    """Return the memory limit minus the vectors of length N: potentials of two answers, norms, weights, scores,
    sorting. In a group these are not counted: the subsample must not depend on the number of processes."""
    if problem.team.group is not None:
        return settings.allowance
    per_row = 56 + 8 * (problem.scale is not None) + 8 * (settings.overlap is not None)
    return settings.allowance - per_row * len(problem.a)
