"""Exact entropic transport from a pool of any size to a target: `sinkhorn_potentials`.

The problem (gradient form of GOT-D, arXiv 2405.02774, with the solver of arXiv 1605.08527's semi-dual):

    OT_ε(a, b) = min_P ⟨P, C⟩ + ε KL(P | a⊗b)  =  max_g Σ_i a_i f_g(x_i) + Σ_j b_j g_j ,
    f_g(x) = −ε log Σ_j b_j exp((g_j − |x − y_j|²)/ε) ,     ε = epsilon × Σ_ij a_i b_j |x_i − y_j|² .

Only the M numbers g are unknown, whatever the size of the pool. Up to N·M = 1e7 the cost is held in float64 and solved
by `solve_dense`. Beyond, a subsample of the pool is solved first; every full pass then measures the true column sums,
and the subsample is solved again for the marginal that corrects what the pass found (a nonlinear control variate: to
first order a Newton step with the subsample's Hessian). The fixed point is the optimum of the whole pool.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from selection.errors import ConvergenceWarning, SelectionError
from selection.transport.dense import solve_dense
from selection.transport.kernel import Evaluation, Kernel, Streamed
from selection.transport.problem import Problem, Progress, pose
from selection.transport.rows import DenseRows, StreamedRows

EXACT_PAIRS = 10_000_000
"""N·M up to which the cost is held in float64 and the default tolerance is 1e-9 (above: 1e-3)."""


@dataclass(frozen=True)
class Potentials:
    """The solution.

    f: (N,) float64, potential of the pool in units of cost: ∂OT_ε/∂a_i up to a constant, without an ε log a_i term.
    g: (M,) float64, potential of the target, Σ b_j g_j = 0. Large where the pool serves the target badly.
    scores: (N,) float64, s_i = f_i − Σ_j a_j f_j, the calibrated gradient: negative helps, smaller is better.
    nearest: (N,) int64, the target that receives most of each pool row's mass; None unless asked for.
    marginal_error: L1 deviation of the plan's target marginal from b; the pool marginal is exact.
    dual_value: OT_ε itself at convergence. epsilon: absolute, in units of cost. mean_cost: exact weighted mean cost.
    iterations: dense iterations (of the whole problem, or of its subsample). passes: full passes over the pool.
    method: "exact" (float64 cost in memory), "cached" or "streamed". dtype: of the tiles.
    """

    f: np.ndarray
    g: np.ndarray
    scores: np.ndarray
    nearest: np.ndarray | None
    marginal_error: float
    dual_value: float
    epsilon: float
    mean_cost: float
    tolerance: float
    converged: bool
    iterations: int
    passes: int
    method: str
    dtype: str

    def diagnostics(self) -> dict[str, Any]:
        """The scalars, ready for a manifest."""
        arrays = ("f", "g", "scores", "nearest")
        return {name: value for name, value in self.__dict__.items() if name not in arrays}


def sinkhorn_potentials(
    x: Any,
    y: ArrayLike,
    *,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    epsilon: float = 0.05,
    tolerance: float | None = None,
    seed: int = 0,
    nearest: bool = False,
    max_iterations: int = 20_000,
    max_passes: int = 50,
    memory_bytes: int = 1 << 30,
    chunk: int | None = None,
    method: str | None = None,
    progress: Progress | None = None,
) -> Potentials:
    """Potentials of OT_ε between pool rows x (N, d) and target rows y (M, d), squared Euclidean cost as given.

    x: array or memory map, read in chunks. a (N,), b (M,): weights, uniform by default, normalised to sum 1; a_i may
    be 0 (scored, but no part of the distribution). epsilon: multiple of the exact weighted mean cost. tolerance: L1
    error of the target marginal; None is 1e-9 up to N·M = 1e7 and 1e-3 above. seed: of the subsample of large pools.
    nearest: also find each row's main target. max_iterations, max_passes: when either is used up before the
    tolerance, a ConvergenceWarning is given and `converged` is False. memory_bytes: what the large solver may hold
    beside the pool. chunk: rows per tile (None: chosen for cache; the answer does not depend on it). method: None
    chooses by size; "exact", "cached" and "streamed" force one. progress: called as (stage, done, total).

    Raises SelectionError on shapes that do not match, empty or non-finite input, and settings out of range.
    """
    if not (isinstance(epsilon, int | float) and math.isfinite(epsilon) and epsilon > 0):
        raise SelectionError(f"epsilon must be a positive number (a multiple of the mean cost), not {epsilon!r}")
    if tolerance is not None and not (math.isfinite(tolerance) and 0 < tolerance < 2):
        raise SelectionError(f"tolerance must lie between 0 and 2 (an L1 error of probabilities), not {tolerance!r}")
    if chunk is not None and chunk < 1:
        raise SelectionError(f"chunk must be at least 1 row, not {chunk}")
    if method not in (None, "exact", "cached", "streamed"):
        raise SelectionError(f'method must be "exact", "cached" or "streamed", not {method!r}')
    with torch.inference_mode():
        problem = pose(x, y, a, b, chunk=chunk or 16_384, progress=progress)
        n, m = problem.shape
        small = n * m <= EXACT_PAIRS
        wanted = tolerance if tolerance is not None else (1e-9 if small else 1e-3)
        if problem.mean_cost <= 1e-30 * float(problem.x_squared.max() + 1.0):
            return _coincident(problem, wanted, nearest)
        run = _Run(
            problem=problem,
            epsilon=epsilon * problem.mean_cost,
            relative=epsilon,
            tolerance=wanted,
            seed=seed,
            max_iterations=max_iterations,
            max_passes=max_passes,
            memory_bytes=memory_bytes,
            chunk=chunk,
            progress=progress,
        )
        chosen = method or ("exact" if small else "large")
        result = run.exact(nearest) if chosen == "exact" else run.large(chosen, nearest)
    if not result.converged:
        warnings.warn(
            f"optimal transport stopped at a marginal error of {result.marginal_error:.1e}, above the tolerance "
            f"{wanted:.1e}, after {result.iterations} iterations and {result.passes} passes; "
            "raise epsilon, the tolerance or the limits",
            ConvergenceWarning,
            stacklevel=2,
        )
    return result


@dataclass(frozen=True)
class _Run:
    problem: Problem
    epsilon: float
    relative: float
    tolerance: float
    seed: int
    max_iterations: int
    max_passes: int
    memory_bytes: int
    chunk: int | None
    progress: Progress | None

    # ------------------------------------------------------------------------------------------ small: exact

    def exact(self, nearest: bool) -> Potentials:
        """Cost in memory, float64. Solved for the smaller side, whose potential is then the only unknown."""
        problem = self.problem
        n, m = problem.shape
        rows = StreamedRows(problem, torch.float64).dense()
        if m > n:
            kernel = Kernel(_flip(rows, problem), self.epsilon, chunk=self.chunk)
            solved, iterations, passes = self._descend(kernel, self.tolerance)
            # g is the transform of f: with the rows' marginal exact again the error can only have become smaller.
            g = solved.f
            iterations += 1
        else:
            kernel = Kernel(rows, self.epsilon, chunk=self.chunk)
            solved, iterations, passes = self._descend(kernel, self.tolerance)
            g = solved.g
        final = Streamed(rows, self.epsilon, chunk=self.chunk)
        at = final.evaluate(g - final.rows.b @ g)
        found = final.nearest(at.g) if nearest else None
        return self._finish(at, found, iterations, passes + 1, "exact", rows.dtype)

    def _descend(self, kernel: Kernel, tolerance: float) -> tuple[Evaluation, int, int]:
        """Solve at a falling ε (each stage roughly, from the last one's g), then at the real one."""
        g = torch.zeros(len(kernel.rows.b), dtype=torch.float64)
        iterations = 0
        for relative in _schedule(self.relative):
            kernel.absorb(g, relative / self.relative * self.epsilon)
            rough = solve_dense(kernel, g, marginal=kernel.rows.b, tolerance=3e-2, max_iterations=60)
            g = rough.at.g
            iterations += rough.iterations
        kernel.absorb(g, self.epsilon)
        result = solve_dense(
            kernel, g, marginal=kernel.rows.b, tolerance=tolerance, max_iterations=self.max_iterations - iterations
        )
        return result.at, iterations + result.iterations, kernel.passes

    # ------------------------------------------------------------------------------------------ large

    def large(self, chosen: str, nearest: bool) -> Potentials:
        """Solve for the smaller side, then one pass over the pool."""
        problem = self.problem
        n, m = problem.shape
        if m <= n:
            return self._large(chosen, nearest)
        other = replace(self, problem=_exchanged(problem))._large(chosen, False)
        # The other side's row potential is g; with the pool's marginal exact again the error only becomes smaller.
        rows = StreamedRows(problem, torch.float32 if other.dtype == "float32" else torch.float64)
        final = Streamed(rows, self.epsilon, chunk=self.chunk)
        g = torch.from_numpy(other.f)
        at = final.evaluate(g - rows.b @ g)
        found = final.nearest(at.g) if nearest else None
        return self._finish(at, found, other.iterations, other.passes + 1, other.method, rows.dtype)

    def _large(self, chosen: str, nearest: bool) -> Potentials:
        """Subsample, full pass, correction, full pass, …: see the module's docstring."""
        problem = self.problem
        n, m = problem.shape
        dtype = self._precision()
        rows = StreamedRows(problem, dtype)
        cached = n * m * dtype.itemsize <= self.memory_bytes if chosen == "large" else chosen == "cached"
        size = self._sample_size(dtype, cached)
        chosen_rows = rows.dense() if size == n else rows.gather(_stratified(problem.a, size, self.seed))
        sample = Kernel(chosen_rows, self.epsilon)
        start, iterations, _ = self._descend(sample, max(0.1 * self.tolerance, 1e-4))

        stage = [0]

        def on_rows(done: int, total: int) -> None:
            if self.progress:
                self.progress(f"pass {stage[0]}", done, total)

        full: Kernel | Streamed
        full = (Kernel if cached else Streamed)(rows, self.epsilon, chunk=self.chunk, on_rows=on_rows)
        g = start.g
        best: Evaluation | None = None
        ahead: Tensor | None = None  # where the correction of the best point leads
        tried: list[tuple[Tensor, Tensor]] = []
        length = 1.0
        for _ in range(self.max_passes):
            stage[0] += 1
            at = full.evaluate(g)
            slack = 1e-7 * abs(best.value) if best else 0.0
            if best is None or at.value >= best.value - slack or at.error < 0.5 * best.error:
                corrected = best is not None
                best, length = at, 1.0
                if at.error <= self.tolerance:
                    break
                if corrected and isinstance(full, Kernel):
                    # Every row is at hand: iterating on all of them is now cheaper than correcting the subsample again.
                    solved = solve_dense(
                        full,
                        at.g,
                        marginal=rows.b,
                        tolerance=self.tolerance,
                        max_iterations=self.max_iterations - iterations,
                    )
                    best, iterations = solved.at, iterations + solved.iterations
                    break
                ahead, used = self._correct(sample, at)
                iterations += used
                tried.append((at.g, ahead))
                g = _mixed(tried[-6:], rows.b)
            else:
                # Overshot: the correction is an ascent direction, so a shorter step from the best point climbs.
                # Where three of them do not, a plain Sinkhorn step does.
                assert ahead is not None
                length *= 0.3
                del tried[:-1]
                if length < 0.02:
                    ahead, length = best.g + self.epsilon * (rows.b / best.column.clamp_min(1e-300)).log(), 1.0
                g = best.g + length * (ahead - best.g)
            g = best.g + (g - best.g).clamp(-2 * self.epsilon, 2 * self.epsilon)
            g = g - rows.b @ g
        assert best is not None
        found = full.nearest(best.g) if nearest else None
        return self._finish(best, found, iterations, full.passes, "cached" if cached else "streamed", dtype)

    def _sample_size(self, dtype: torch.dtype, cached: bool) -> int:
        """Rows of the subsample, within memory.

        When a pass costs a GEMM over the pool: a tenth of it, at least ten rows per target, more for small ε. When the
        kernel of the pool is held, the subsample only has to find a start.
        """
        n, m = self.problem.shape
        if cached:
            wanted = float(max(5 * m, 5_000))
        else:
            wanted = max(n // 10, 10 * m, 10_000) * min(max(0.01 / self.relative, 1.0), 4.0)
        # Its affinities and its kernel are both held.
        return min(n, max(int(min(wanted, self.memory_bytes / (2 * m * dtype.itemsize))), 1))

    def _correct(self, sample: Kernel, at: Evaluation) -> tuple[Tensor, int]:
        """The g at which the subsample's column sums change by the factor b/col that the full pass asks for."""
        b = sample.rows.b
        here = sample.evaluate(at.g)
        marginal = here.column * (b / at.column.clamp_min(1e-300)).clamp(0.02, 50.0)
        marginal = marginal.clamp_min(1e-12 / len(b))
        marginal = marginal / marginal.sum()
        goal = max(0.02 * at.error, 0.1 * self.tolerance)
        moved = solve_dense(sample, at.g, marginal=marginal, tolerance=goal, max_iterations=200)
        return moved.at.g - b @ moved.at.g, moved.iterations

    def _precision(self) -> torch.dtype:
        """float32 tiles where their rounding, |S|·2⁻²⁴ at the largest logit, stays well below the tolerance."""
        y_norm = math.sqrt(float((self.problem.y**2).sum(1).max()))
        largest = y_norm * (2.0 * math.sqrt(float(self.problem.x_squared.max())) + y_norm) / self.epsilon
        return torch.float32 if largest * 2.0**-24 <= 0.1 * self.tolerance else torch.float64

    def _finish(
        self, at: Evaluation, found: Tensor | None, iterations: int, passes: int, method: str, dtype: torch.dtype
    ) -> Potentials:
        f = at.f.numpy()
        return Potentials(
            f=f,
            g=at.g.numpy(),
            scores=f - self.problem.a @ f,
            nearest=None if found is None else found.numpy(),
            marginal_error=at.error,
            dual_value=at.value,
            epsilon=self.epsilon,
            mean_cost=self.problem.mean_cost,
            tolerance=self.tolerance,
            converged=at.error <= self.tolerance,
            iterations=iterations,
            passes=passes,
            method=method,
            dtype=str(dtype).removeprefix("torch."),
        )


def _schedule(relative: float) -> list[float]:
    """Falling ε before the real one: from 0.05 by thirds, none when the real one is near enough."""
    stages = []
    current = 0.05
    while current > 1.5 * relative:
        stages.append(current)
        current /= 3.0
    return stages


def _flip(rows: DenseRows, problem: Problem) -> DenseRows:
    """The same problem with the sides exchanged: tiles 2 x_i·y_j − |x_i|² for target rows j over pool columns i.

    Pool rows of weight 0 are left out: they do not act on the solution.
    """
    index = torch.from_numpy(np.flatnonzero(problem.a))
    y_squared = torch.from_numpy((problem.y**2).sum(1))
    affinity = rows.affinity[index].T + y_squared.unsqueeze(1) - rows.squared[index]
    return DenseRows(affinity.contiguous(), rows.b, rows.a[index], y_squared)


def _exchanged(problem: Problem) -> Problem:
    """The problem seen from the target: its rows are streamed, the pool's rows of positive weight are the columns."""
    kept = np.flatnonzero(problem.a)
    columns = np.asarray(problem.x, dtype=np.float64)[kept] - problem.centre
    squared = (problem.y * problem.y).sum(1)
    nothing = np.zeros_like(problem.centre)
    return Problem(problem.y, columns, problem.b, problem.a[kept], nothing, squared, problem.mean_cost)


def _mixed(tried: list[tuple[Tensor, Tensor]], b: Tensor) -> Tensor:
    """Anderson's combination of the images G(g_k): weights that sum to 1 and make Σ α_k (G(g_k) − g_k) smallest.

    The subsample errs in the same few slow modes at every correction; the combination learns them.
    """
    images = torch.stack([image for _, image in tried])
    residuals = (images - torch.stack([point for point, _ in tried])) * b.sqrt()
    if len(tried) == 1:
        return images[0]
    steps = residuals[:-1] - residuals[-1]
    gram = steps @ steps.T
    if not float(gram.trace()) > 0.0:
        return images[-1]  # the last correction changed nothing: there is nothing to learn from it
    gram += 1e-10 * gram.trace() * torch.eye(len(gram), dtype=gram.dtype)
    weights = torch.linalg.solve(gram, -(steps @ residuals[-1]))
    return images[-1] + weights @ (images[:-1] - images[-1])


def _stratified(a: np.ndarray, size: int, seed: int) -> np.ndarray:
    """`size` sorted row numbers, one from each of `size` equal slices of the pool's mass; repeats are likely."""
    generator = np.random.Generator(np.random.PCG64([seed, 0x5AB5A3]))
    edges = np.cumsum(a)
    places = (np.arange(size) + generator.random(size)) / size * edges[-1]
    return np.minimum(np.searchsorted(edges, places, side="right"), len(a) - 1)


def _coincident(problem: Problem, tolerance: float, nearest: bool) -> Potentials:
    """All points of positive weight coincide with one another: every potential is 0, no sample helps."""
    n, m = problem.shape
    return Potentials(
        f=problem.x_squared.copy(),
        g=np.zeros(m),
        scores=problem.x_squared - problem.a @ problem.x_squared,
        nearest=np.zeros(n, dtype=np.int64) if nearest else None,
        marginal_error=0.0,
        dual_value=0.0,
        epsilon=0.0,
        mean_cost=0.0,
        tolerance=tolerance,
        converged=True,
        iterations=0,
        passes=1,
        method="exact",
        dtype="float64",
    )


__all__ = ["EXACT_PAIRS", "Potentials", "sinkhorn_potentials"]
