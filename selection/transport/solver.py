"""Exact entropic transport from a pool of any size to a target: `sinkhorn_potentials`.

The problem (gradient form of GOT-D, arXiv 2405.02774, with the solver of arXiv 1605.08527's semi-dual):

    OT_ε(a, b) = min_P ⟨P, C⟩ + ε KL(P | a⊗b)  =  max_g Σ_i a_i f_g(x_i) + Σ_j b_j g_j ,
    f_g(x) = −ε log Σ_j b_j exp((g_j − c(x, y_j))/ε) ,     ε = epsilon × Σ_ij a_i b_j c(x_i, y_j) ,

c(x, y) = |x − y|² or 1 − cos(x, y). Only the M numbers g are unknown, whatever the size of the pool. Up to N·M = 1e7
the cost is stored in float64, and the problem is solved for the smaller side (`solve_exact`); beyond, a subsample and a
few passes over the pool are used (`large`).
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from flatshift.selection.errors import ConvergenceWarning, SelectionError
from flatshift.selection.transport.dense import solve_dense
from flatshift.selection.transport.kernel import Evaluation, StoredKernel, StreamedEvaluator
from flatshift.selection.transport.large import choose_dtype, exchange_sides, fits_in_memory, solve_large
from flatshift.selection.transport.problem import COSTS, Progress, TransportProblem, pose_problem
from flatshift.selection.transport.ranks import ProcessTeam
from flatshift.selection.transport.rows import DenseRows, StreamedRows
from flatshift.selection.transport.settings import SolverResult, SolverSettings, descend, measure_overlap
from flatshift.selection.validation import check_chunk, is_real, is_whole

EXACT_PAIRS = 10_000_000
"""N·M up to which the cost is stored in float64 and the default tolerance is 1e-9 (above: 1e-3)."""


@dataclass(frozen=True)
class Potentials:
    """Solution of `sinkhorn_potentials`.

    f: (N,) float64, potential of the pool in units of cost: ∂OT_ε/∂a_i up to a constant, without an ε log a_i term.
    g: (M,) float64, potential of the target, Σ b_j g_j = 0. Large if the pool covers the target badly.
    scores: (N,) float64, s_i = f_i − Σ_j a_j f_j, the calibrated gradient: negative helps, smaller is better.
    nearest: (N,) int64, the target that receives most of each pool row's mass; None unless requested.
    marginal_error: L1 deviation of the plan's target marginal from b; the pool marginal is exact.
    dual_value: OT_ε itself at convergence. epsilon: absolute, in units of cost. mean_cost: exact weighted mean cost.
    tolerance: as requested; converged: True if it, and the overlap if one was required, was reached.
    iterations: dense iterations (of the whole problem, or of its subsample). passes: full passes over the pool.
    method: "exact" (float64 cost in memory), "cached" or "streamed". dtype: of the tiles. cost: as given.
    budget: number of rows for the overlaps. overlap: share of the `budget` smallest scores that the last two answers
    have in common (None if there was only one answer, or none was required and the rows are in memory).
    overlap_estimate: the same with the converged selection, as predicted from the next correction (streamed only).
    resumed: passes loaded from `state`.

    In a group f, scores and nearest are this process's rows; all else is the whole pool's.
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
    cost: str = "sqeuclidean"
    budget: int = 0
    overlap: float | None = None
    overlap_estimate: float | None = None
    resumed: int = 0

    def diagnostics(self) -> dict[str, Any]:
        """Return the scalars, ready for a manifest."""
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
    held_bytes: int = 0,
    chunk: int | None = None,
    method: str | None = None,
    progress: Progress | None = None,
    cost: str = "sqeuclidean",
    overlap: float | None = None,
    budget: int | None = None,
    state: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    group: Any = None,
) -> Potentials:
    """Compute the potentials of OT_ε between pool rows x (N, d) and target rows y (M, d), on features as given.

    x: array or memory map, read in chunks. a (N,), b (M,): weights, uniform by default, normalised to sum 1; a_i may be
    0 (scored, but not part of the distribution). epsilon: multiple of the exact weighted mean cost. tolerance: L1 error
    of the target marginal; None is 1e-9 up to N·M = 1e7 and 1e-3 above. seed: of the subsample of large pools.
    nearest: also find each row's main target. max_iterations, max_passes: when either is used up before the tolerance,
    a ConvergenceWarning is given and `converged` is False; corrections between passes, up to 200 iterations each, are
    limited by passes alone. memory_bytes: limit for the solver in addition to the pool,
    its result included, minus held_bytes, which the caller holds. chunk: rows per tile (None: chosen for cache; the
    result does not depend on it). method: None chooses by size; "exact", "cached" and "streamed" force one.
    progress: called as (stage, done, total), rows or iterations.
    cost: "sqeuclidean" or "cosine" (1 − cos).

    overlap: also continue until two successive answers share this part of the `budget` best rows (None: 5 % of the
    pool); with a large tolerance it decides alone. state: directory in which a streaming solve saves its state for
    resuming after a kill (`flatshift.selection.transport.state`); unless method is "streamed", problems that fit into
    memory save none, nor do those with more targets than rows. device: "cpu" or "cuda…", for computing tiles. group: a
    torch.distributed group; then x and a are this process's shard of the pool (shards follow one another by rank), y, b
    and all settings are the same everywhere, and rows are streamed. If shards are whole blocks of
    `flatshift.selection.transport.blocks` and torch has one thread everywhere, the result is bit for bit that of one
    process in a group by itself, whatever the number of processes; memory_bytes then excludes some 56 bytes a row.

    Raises SelectionError on shapes that do not match, empty or non-finite input, and settings out of range.
    """
    device = _check_settings(
        epsilon, tolerance, chunk, method, cost, overlap, max_iterations, max_passes, memory_bytes, held_bytes, device,
        state, group,
    )  # fmt: skip
    # NumPy's narrow floats would lower the precision of everything they multiply.
    epsilon, tolerance = float(epsilon), tolerance if tolerance is None else float(tolerance)
    team = ProcessTeam(group)
    with torch.inference_mode():
        problem = pose_problem(x, y, a, b, chunk=chunk, progress=progress, cost=cost, team=team)
        m, total = len(problem.b), problem.total
        if budget is not None and not (is_whole(budget) and 1 <= budget <= total):
            raise SelectionError(f"budget must be a whole number from 1 to the pool's {total} rows, not {budget!r}")
        small = total * m <= EXACT_PAIRS
        settings = SolverSettings(
            epsilon=epsilon * problem.mean_cost, relative=epsilon,
            tolerance=tolerance if tolerance is not None else (1e-9 if small else 1e-3), seed=seed,
            max_iterations=max_iterations, max_passes=max_passes, memory_bytes=memory_bytes, held_bytes=held_bytes,
            chunk=chunk, progress=progress, overlap=overlap,
            top=int(budget) if budget is not None else max(1, round(0.05 * total)),
            state=Path(state) if state is not None else None, device=device,
        )  # fmt: skip
        team.check_same(
            "settings", replace(settings, progress=None, state=None, device=torch.device("cpu")), method, nearest
        )
        size = max(team.gather(float(problem.x_squared.max()))) + float(problem.centre @ problem.centre)
        if problem.mean_cost <= 1e-30 * size + 1e-290:  # rounding, or lost below the smallest numbers
            return _coincident_potentials(problem, settings, nearest)
        result = _to_potentials(problem, settings, _solve_by_method(problem, settings, method, nearest))
    if not result.converged:
        warnings.warn(_describe_shortfall(result, overlap), ConvergenceWarning, stacklevel=2)
    return result


def _describe_shortfall(result: Potentials, overlap: float | None) -> str:
    missed = f"a marginal error of {result.marginal_error:.1e}, above the tolerance {result.tolerance:.1e}"
    if result.marginal_error <= result.tolerance:
        measured = "none measured" if result.overlap is None else f"{result.overlap:.4f}"
        missed = f"an overlap of {measured} between its answers, below the {overlap:g} asked for"
    return (
        f"optimal transport stopped at {missed}, after {result.iterations} iterations and {result.passes} passes; "
        "raise epsilon, the tolerance or the limits"
    )


def _check_settings(
    epsilon: Any,
    tolerance: float | None,
    chunk: int | None,
    method: str | None,
    cost: str,
    overlap: float | None,
    max_iterations: int,
    max_passes: int,
    memory_bytes: int,
    held_bytes: int,
    device: str | torch.device,
    state: Any,
    group: Any,
) -> torch.device:
    """Return the device; raise SelectionError for settings out of range, alone or together."""
    check_chunk(chunk)
    in_memory = method in ("exact", "cached")
    for name, value, valid, requirement in (
        ("epsilon", epsilon, is_real(epsilon) and epsilon > 0, "be a positive number (a multiple of the mean cost)"),
        (
            "tolerance",
            tolerance,
            tolerance is None or (is_real(tolerance) and 0 < tolerance < 2),
            "be between 0 and 2 (an L1 error of probabilities)",
        ),
        ("method", method, method is None or in_memory or method == "streamed", 'be "exact", "cached" or "streamed"'),
        ("cost", cost, cost in COSTS, 'be "sqeuclidean" or "cosine"'),
        (
            "overlap",
            overlap,
            overlap is None or (is_real(overlap) and 0 < overlap <= 1),
            "be above 0 and at most 1 (a share of the selection)",
        ),
        (
            "max_iterations",
            max_iterations,
            is_whole(max_iterations) and max_iterations >= 1,
            "be a whole number of at least 1",
        ),
        ("max_passes", max_passes, is_whole(max_passes) and max_passes >= 1, "be a whole number of at least 1"),
        ("held_bytes", held_bytes, is_real(held_bytes) and held_bytes >= 0, "not be negative"),
        ("memory_bytes", memory_bytes, is_real(memory_bytes) and memory_bytes > 0, "be positive"),
    ):
        if not valid:
            raise SelectionError(f"{name} must {requirement}, not {value!r}")
    for name, value in (("state", state), ("group", group)):
        if value is not None and in_memory:
            raise SelectionError(
                f'{name} needs method "streamed", or None; method {method!r} reads the pool into memory'
            )
    try:
        requested = torch.device(device)
    except RuntimeError as error:
        raise SelectionError(f'device must be "cpu", "cuda" or "cuda:N", not {device!r}') from error
    if requested.type not in ("cpu", "cuda"):
        raise SelectionError(f'device must be "cpu", "cuda" or "cuda:N", not {device!r} (no float64 sums there)')
    if requested.type == "cuda" and (requested.index or 0) >= torch.cuda.device_count():
        raise SelectionError(f'device {device!r}: {_cuda_unavailable_reason()}; use "cpu"')
    return requested


def _cuda_unavailable_reason() -> str:
    """Return the reason why a requested CUDA device is unavailable, as a clause."""
    count = torch.cuda.device_count()
    if count:
        return f"only {count} CUDA devices are available" if count > 1 else "only cuda:0 is available"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-")):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every CUDA device"
    return "torch is built for CUDA and sees no device; look whether the driver is there and new enough"


def _solve_by_method(
    problem: TransportProblem, settings: SolverSettings, method: str | None, nearest: bool
) -> SolverResult:
    """Solve by the given method, or choose one by size, memory and group; for the smaller side."""
    n, m = problem.shape
    alone = problem.team.group is None
    if method is None and alone and n * m <= EXACT_PAIRS and exact_bytes(n, m) <= settings.allowance:
        method = "exact"
    if method == "exact":
        return solve_exact(problem, settings, nearest)
    dtype = choose_dtype(problem, settings)
    # Unless a method is forced, only a solve that streams the pool's own rows saves a state: the others are short.
    may_store = alone and (settings.state is None or method is None)
    stateless = replace(settings, state=None)
    # Answers are compared on the pool's own rows.
    if m > n and may_store and settings.overlap is None:
        exchanged = exchange_sides(problem)
        stored = method == "cached" or (method is None and fits_in_memory(exchanged, settings, dtype))
        result = solve_large(exchanged, stateless, stored, False)
        # The other side's row potential is g; with the pool's marginal exact again the error only becomes smaller.
        rows = StreamedRows(problem, result.dtype, settings.device)
        g = result.at.f
        at = StreamedEvaluator(rows, settings.epsilon, chunk=settings.chunk).evaluate(g - rows.b @ g, nearest)
        # The overlaps found on the way are about target rows.
        return replace(result, at=at, passes=result.passes + 1, overlap=None, estimate=None)
    stored = method == "cached" or (method is None and may_store and fits_in_memory(problem, settings, dtype))
    return solve_large(problem, stateless if stored else settings, stored, nearest)


def _to_potentials(problem: TransportProblem, settings: SolverSettings, solved: SolverResult) -> Potentials:
    """Convert the result to units of the requested cost, on the host."""
    unit, at = problem.unit, solved.at
    f = at.f.cpu().numpy()
    if unit != 1.0:
        f = f * unit
    return Potentials(
        f=f, g=at.g.cpu().numpy() * unit, scores=f - problem.team.dot(problem.a, f),
        nearest=None if at.nearest is None else at.nearest.cpu().numpy().astype(np.int64), marginal_error=at.error,
        dual_value=at.value * unit, epsilon=settings.epsilon * unit, mean_cost=problem.mean_cost * unit,
        tolerance=settings.tolerance, converged=solved.satisfies(settings), iterations=solved.iterations,
        passes=solved.passes, method=solved.method, dtype=str(solved.dtype).removeprefix("torch."),
        cost="sqeuclidean" if problem.scale is None else "cosine", budget=settings.top, overlap=solved.overlap,
        overlap_estimate=solved.estimate, resumed=solved.resumed,
    )  # fmt: skip


def _coincident_potentials(problem: TransportProblem, settings: SolverSettings, nearest: bool) -> Potentials:
    """Return the solution if all points of positive weight coincide: every potential is 0, no sample helps."""
    n, m = problem.shape
    main_targets = torch.zeros(n, dtype=torch.int64) if nearest else None
    f, g = torch.from_numpy(problem.x_squared), torch.zeros(m, dtype=torch.float64)
    at = Evaluation(g, f, g, 0.0, 0.0, main_targets)
    return _to_potentials(
        replace(problem, mean_cost=0.0),
        replace(settings, epsilon=0.0, overlap=None),
        SolverResult(at, 0, 1, "exact", torch.float64),
    )


def exact_bytes(n: int, m: int) -> int:
    """Return the memory of `solve_exact` without Newton's matrices: the cost, its kernel, some 12 vectors a side."""
    return 16 * n * m + (8 * n * m if m > n else 0) + 100 * (n + m)


def solve_exact(problem: TransportProblem, settings: SolverSettings, nearest: bool) -> SolverResult:
    """Solve to the tolerance; if an overlap is required, continue to ten times smaller errors until it is reached."""
    n, m = problem.shape
    columns = settings.newton_columns(settings.allowance - exact_bytes(n, m))
    rows = StreamedRows(problem, torch.float64, settings.device).dense()
    flipped = m > n
    sides = rows
    if flipped:  # tiles 2 x_i·y_j − |x_i|² for target rows j over pool columns i; rows of weight 0 do not matter
        index = torch.from_numpy(np.flatnonzero(problem.a)).to(rows.device)
        y_squared = torch.from_numpy((problem.y**2).sum(1)).to(rows.device)
        affinity = rows.affinity[index].T.contiguous().add_(y_squared.unsqueeze(1)).sub_(rows.squared[index])
        sides = DenseRows(affinity, rows.b, rows.a[index], y_squared)
    kernel = StoredKernel(sides, settings.epsilon, chunk=settings.chunk)
    final = StreamedEvaluator(rows, settings.epsilon, chunk=settings.chunk)

    def whole(at: Evaluation) -> Evaluation:
        # If flipped, g is the transform of f: with the rows' marginal exact again the error only shrinks.
        g = at.f if flipped else at.g
        return final.evaluate(g - rows.b @ g, nearest)

    at, iterations = descend(kernel, settings, settings.tolerance, columns)
    solved = SolverResult(whole(at), iterations + flipped, kernel.passes + 1, "exact", rows.dtype)
    goal = settings.tolerance
    while settings.overlap is not None and solved.at.error <= settings.tolerance and not solved.satisfies(settings):
        remaining = settings.max_iterations - solved.iterations
        if remaining <= 0:
            break
        goal = max(0.1 * goal, 1e-13)
        at, iterations = solve_dense(
            kernel, at.g, marginal=kernel.rows.b, tolerance=goal, max_iterations=remaining, newton_columns=columns
        )
        answer = whole(at)
        shared = measure_overlap(solved.at.f, answer.f, settings.top, problem.team)
        solved = replace(solved, at=answer, overlap=shared, iterations=solved.iterations + iterations)
    return solved
