"""Sources of tiles of −cost: a GEMM over streamed rows, or a matrix already in memory.

Both have, on `device`, the rows' weights `a` (n,) and squared norms `squared` (n,) and the targets' weights `b` (M,).
After `prepare` with g (M,) float64 and ε, `tile` writes S/ln 2 for rows [low, high) into `out` (high − low, M), minus
`shift` (high − low,) if given:

    S_ij = (2 x_i·y_j − |y_j|² + g_j)/ε + log b_j  =  (|x_i|² − c_ij + g_j)/ε + log b_j,

so that  f_i = |x_i|² − ε log Σ_j exp(S_ij)  and softmax_j(S_i) is row i of the transport plan over a_i. exp2 costs a
quarter of exp on CPUs, and the factor is folded into the GEMM's operand.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatshift.selection.transport.blocks import ThreadCrew
from flatshift.selection.transport.problem import ScratchBuffers, TransportProblem, to_aligned_tensor

_PER_LN2 = 1.0 / math.log(2.0)


class StreamedRows:
    """Tiles by one GEMM each, from rows read on demand. Memory: one chunk per thread, into which half-width rows are
    converted on the device that multiplies them.

    A chunk has two additional columns, a one and −shift: so the bias of a target and the shift of a row are part of the
    GEMM, while a pass over the tile would cost a fiftieth of it each.
    """

    def __init__(self, problem: TransportProblem, dtype: torch.dtype, device: torch.device | None = None):
        self.problem = problem
        self.x: Any = problem.x
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self.a = self._here(problem.a)
        self.b = to_aligned_tensor(problem.b).to(self.device)
        self.squared = self._here(problem.x_squared)
        self._y = self._here(problem.y)
        self._y_squared = (self._y * self._y).sum(1)
        self._log_b = self.b.log()
        # Subtract in the wider of the two dtypes: a float64 pool far from the origin must not be rounded first.
        wide = self.x.dtype.kind in "iu" or self.x.dtype.itemsize > 4
        self._read_type = torch.float64 if wide else dtype
        self._centre = self._here(problem.centre).to(self._read_type)
        self._scale = None if problem.scale is None else torch.from_numpy(problem.scale)
        self._scratch = ScratchBuffers()
        self._buffers = threading.local()

    def _here(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _left(self, low: int, high: int, shift: Tensor | None) -> Tensor:
        """Return [centred rows, 1] or [centred rows, 1, −shift] in the working dtype, until this thread's next call."""
        d = len(self._centre)
        buffer: Tensor | None = getattr(self._buffers, "rows", None)
        if buffer is None or len(buffer) < high - low:
            buffer = torch.ones(high - low, d + 2, dtype=self.dtype, device=self.device)
            self._buffers.rows = buffer
        operand = buffer[: high - low]
        rows = operand[:, :d]
        raw = self._scratch.read(self.x, low, high).to(self.device)
        raw_rows = rows.copy_(raw) if self._read_type == self.dtype else raw.to(self._read_type)
        if self._scale is not None:
            raw_rows *= self._scale[low:high].to(raw_rows).unsqueeze(1)
        torch.sub(raw_rows, self._centre, out=rows)
        if shift is None:
            return operand[:, : d + 1]
        torch.neg(shift, out=operand[:, d + 1])
        return operand

    def gather(self, index: np.ndarray, weights: np.ndarray | None = None) -> StreamedRows | None:
        """Gather the rows `index` (this process's, sorted, repeats allowed) of every process in the memory of the first
        one, in their own dtype; return None on the others. weights: one for each, None for equal ones."""
        problem, team = self.problem, self.problem.team
        raw = team.gather_rows(to_aligned_tensor(self.x[index]).numpy(), self.device)
        scale = None if problem.scale is None else team.gather_rows(problem.scale[index], self.device)
        squared = team.gather_rows(problem.x_squared[index], self.device)
        a = None if weights is None else team.gather_rows(weights, self.device)
        if raw is None or squared is None:
            return None
        n = len(raw)
        problem_of_sample = replace(
            problem,
            x=raw,
            a=np.full(n, 1.0 / n) if a is None else a,
            x_squared=squared,
            scale=scale,
            team=type(team)(),
            total=n,
        )
        return StreamedRows(problem_of_sample, self.dtype, self.device)

    def thinned(self, stride: int) -> StreamedRows:
        """Return every `stride`-th row, on the same memory; the weights are scaled to sum 1 again."""
        problem = self.problem
        a = problem.a[::stride]
        thin_problem = replace(
            problem,
            x=problem.x[::stride],
            a=a / a.sum(),
            x_squared=problem.x_squared[::stride],
            scale=None if problem.scale is None else problem.scale[::stride],
            total=len(a),
        )
        return StreamedRows(thin_problem, self.dtype, self.device)

    def dense(self) -> DenseRows:
        """Compute all rows' dot products into memory, one chunk of rows after the other."""
        n, m = len(self.a), len(self.b)
        affinity = torch.empty(n, m, dtype=self.dtype, device=self.device)
        right = torch.cat([2.0 * self._y.T, -self._y_squared.unsqueeze(0)]).to(self.dtype)

        def work(low: int, high: int) -> None:
            torch.mm(self._left(low, high, None), right, out=affinity[low:high])

        ThreadCrew(self.device).each(n, 1024, work)
        return DenseRows(affinity, self.a, self.b, self.squared)

    def prepare(self, g: Tensor, epsilon: float) -> None:
        bias = ((g - self._y_squared) / epsilon + self._log_b) * _PER_LN2
        factor = self._y.T * (2.0 * _PER_LN2 / epsilon)
        self._right = torch.cat([factor, bias.unsqueeze(0), torch.ones_like(bias).unsqueeze(0)]).to(self.dtype)

    def tile(self, low: int, high: int, out: Tensor, shift: Tensor | None = None) -> None:
        operand = self._left(low, high, shift)
        torch.mm(operand, self._right[: operand.shape[1]], out=out)


class DenseRows:
    """Tiles from a stored matrix D_ij = 2 x_i·y_j − |y_j|² (n, M): for a changing ε or many iterations."""

    def __init__(self, affinity: Tensor, a: Tensor, b: Tensor, squared: Tensor):
        self.affinity = affinity
        self.a = a
        self.b = b
        self.squared = squared
        self.dtype = affinity.dtype
        self.device = affinity.device
        self._log_b = b.log()

    def prepare(self, g: Tensor, epsilon: float) -> None:
        self._scale = _PER_LN2 / epsilon
        self._bias = ((g / epsilon + self._log_b) * _PER_LN2).to(self.dtype)

    def tile(self, low: int, high: int, out: Tensor, shift: Tensor | None = None) -> None:
        torch.add(self._bias, self.affinity[low:high], alpha=self._scale, out=out)
        if shift is not None:
            out.sub_(shift.unsqueeze(1))

    def thinned(self, stride: int) -> DenseRows:
        """Return every `stride`-th row, on the same memory; the weights are scaled to sum 1 again."""
        a = self.a[::stride]
        return DenseRows(self.affinity[::stride], a / a.sum(), self.b, self.squared[::stride])


TileSource = StreamedRows | DenseRows
