"""Where tiles of −cost come from: a GEMM over streamed rows, or a matrix already in memory.

Both give, for rows [low, high), the tile

    S_ij = (2 x_i·y_j − |y_j|² + g_j)/ε + log b_j  =  (|x_i|² − c_ij + g_j)/ε + log b_j,

so that  f_i = |x_i|² − ε log Σ_j exp(S_ij)  and softmax_j(S_i) is row i of the transport plan over a_i.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from selection.transport.problem import Problem


class Rows(Protocol):
    """A source of tiles; `a` (n,) and `squared` (n,) float64 are the rows' weights and squared norms."""

    a: Tensor
    b: Tensor
    squared: Tensor
    dtype: torch.dtype

    def prepare(self, g: Tensor, epsilon: float) -> None:
        """Fix g (M,) float64 and ε for the tiles to come."""

    def tile(self, low: int, high: int, out: Tensor) -> None:
        """Write S for rows [low, high) into `out` (high − low, M)."""


class StreamedRows:
    """Tiles by one GEMM each, from rows read on demand. Memory: one chunk."""

    def __init__(self, problem: Problem, dtype: torch.dtype):
        self.x: Any = problem.x
        self.a = torch.from_numpy(problem.a)
        self.b = torch.from_numpy(problem.b)
        self.squared = torch.from_numpy(problem.x_squared)
        self.dtype = dtype
        self._y = torch.from_numpy(problem.y)
        self._y_squared = (self._y * self._y).sum(1)
        self._log_b = self.b.log()
        numpy_type = np.float32 if dtype == torch.float32 else np.float64
        # Subtract in the wider of the two types: a float64 pool far from the origin must not be rounded first.
        self._read_type = np.float64 if self.x.dtype.kind in "iu" or self.x.dtype.itemsize > 4 else numpy_type
        self._centre = problem.centre.astype(self._read_type)

    def read(self, low: int, high: int) -> Tensor:
        """Centred rows (high − low, d) in the working type."""
        return self._centred(self.x[low:high])

    def gather(self, index: np.ndarray) -> DenseRows:
        """The rows `index` (sorted, repeats allowed) with equal weights, their dot products held in memory."""
        n = len(index)
        weights = torch.full((n,), 1.0 / n, dtype=torch.float64)
        return self._dense(self._centred(self.x[index]), weights, self.squared[torch.from_numpy(index)])

    def dense(self) -> DenseRows:
        """All rows, held in memory."""
        return self._dense(self.read(0, len(self.a)), self.a, self.squared)

    def _centred(self, rows: Any) -> Tensor:
        own: np.ndarray = np.array(rows, dtype=self._read_type)
        np.subtract(own, self._centre, out=own)
        return torch.from_numpy(own).to(self.dtype)

    def _dense(self, rows: Tensor, a: Tensor, squared: Tensor) -> DenseRows:
        affinity = torch.addmm((-self._y_squared).to(self.dtype), rows, (2.0 * self._y).T.to(self.dtype))
        return DenseRows(affinity, a, self.b, squared)

    def prepare(self, g: Tensor, epsilon: float) -> None:
        self._bias = ((g - self._y_squared) / epsilon + self._log_b).to(self.dtype)
        self._right = (self._y * (2.0 / epsilon)).T.to(self.dtype).contiguous()

    def tile(self, low: int, high: int, out: Tensor) -> None:
        torch.addmm(self._bias, self.read(low, high), self._right, out=out)


class DenseRows:
    """Tiles from a stored matrix D_ij = 2 x_i·y_j − |y_j|² (n, M): what a changing ε or many iterations want."""

    def __init__(self, affinity: Tensor, a: Tensor, b: Tensor, squared: Tensor):
        self.affinity = affinity
        self.a = a
        self.b = b
        self.squared = squared
        self.dtype = affinity.dtype
        self._log_b = b.log()

    def prepare(self, g: Tensor, epsilon: float) -> None:
        self._scale = 1.0 / epsilon
        self._bias = (g / epsilon + self._log_b).to(self.dtype)

    def tile(self, low: int, high: int, out: Tensor) -> None:
        torch.add(self._bias, self.affinity[low:high], alpha=self._scale, out=out)
