"""Small problems: the cost in memory, float64, solved for the smaller side: its potential is then the only unknown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from selection.transport.dense import solve_dense
from selection.transport.kernel import Evaluation, Kernel, Streamed
from selection.transport.problem import Problem
from selection.transport.rows import DenseRows, StreamedRows
from selection.transport.settings import Settings, Solved, descend, measured


def exact_bytes(n: int, m: int) -> int:
    """What `solve_exact` holds beside vectors and Newton's matrices: the cost and its kernel."""
    return 16 * n * m + (8 * n * m if m > n else 0)


def solve_exact(problem: Problem, settings: Settings, nearest: bool) -> Solved:
    """Solve to the tolerance; where an overlap is asked for, on to ten times smaller errors until it is seen."""
    n, m = problem.shape
    columns = settings.newton_columns(settings.allowance - exact_bytes(n, m))
    rows = StreamedRows(problem, torch.float64, settings.device).dense()
    flipped = m > n
    kernel = Kernel(_flip(rows, problem) if flipped else rows, settings.epsilon, chunk=settings.chunk)
    final = Streamed(rows, settings.epsilon, chunk=settings.chunk)

    def whole(at: Evaluation) -> Evaluation:
        # Of the flipped problem g is the transform of f: with the rows' marginal exact again the error only shrinks.
        g = at.f if flipped else at.g
        return final.evaluate(g - rows.b @ g, nearest)

    at, iterations = descend(kernel, settings, settings.tolerance, columns)
    solved = Solved(whole(at), iterations + flipped, kernel.passes + 1, "exact", rows.dtype)
    goal = settings.tolerance
    while settings.overlap is not None and solved.at.error <= settings.tolerance and not solved.satisfies(settings):
        left = settings.max_iterations - solved.iterations
        if left <= 0:
            break
        goal = max(0.1 * goal, 1e-13)
        more = solve_dense(
            kernel, at.g, marginal=kernel.rows.b, tolerance=goal, max_iterations=left, newton_columns=columns
        )
        at, answer = more.at, whole(more.at)
        shared = measured(solved.at.f, answer.f, settings.top, problem.team)
        solved = replace(solved, at=answer, overlap=shared, iterations=solved.iterations + more.iterations)
    return solved


def _flip(rows: DenseRows, problem: Problem) -> DenseRows:
    """The same problem with the sides exchanged: tiles 2 x_i·y_j − |x_i|² for target rows j over pool columns i.

    Pool rows of weight 0 are left out: they do not act on the solution.
    """
    index = torch.from_numpy(np.flatnonzero(problem.a)).to(rows.device)
    y_squared = torch.from_numpy((problem.y**2).sum(1)).to(rows.device)
    affinity = rows.affinity[index].T + y_squared.unsqueeze(1) - rows.squared[index]
    return DenseRows(affinity.contiguous(), rows.b, rows.a[index], y_squared)
