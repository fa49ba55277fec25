"""Evaluations of the semi-dual: F(g) = Σ a_i f_g(x_i) + Σ b_j g_j and its gradient b − col(g), col = Pᵀ1.

Two ways with one meaning: `Streamed` rereads the rows each time (one GEMM per pass, memory of a chunk);
`Kernel` keeps E_ij = exp(S_ij − max_j S_ij) at an absorbed g₀, after which a new g costs one read of E:
S(g) = S(g₀) + (g − g₀)/ε, so row sums are E v and column sums v ∘ Eᵀu with v = exp((g − g₀)/ε), u = a/(E v).
Row softmax and column sums come from the same tile while it is in cache. Sums over rows are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selection.transport.rows import Rows

_TILE_BYTES = 4 << 20
"""Bytes of one tile: large enough for GEMM to run at full speed, small enough to stay in cache behind it."""


@dataclass(frozen=True)
class Evaluation:
    """`f` (n,), `column` (M,) float64 at `g`; `value` the dual; `error` the L1 deviation of the target marginal."""

    g: Tensor
    f: Tensor
    column: Tensor
    value: float
    error: float


def tile_rows(columns: int, dtype: torch.dtype, chunk: int | None) -> int:
    """Rows per tile."""
    if chunk is not None:
        return chunk
    return max(16, min(8192, _TILE_BYTES // (columns * dtype.itemsize)))


def _exponentiate(tile: Tensor) -> Tensor:
    """In place: exp(S − rowmax); returns the row maxima (rows, 1)."""
    top = tile.amax(1, keepdim=True)
    tile.sub_(top)
    if tile.dtype == torch.float32:
        tile.clamp_(min=-80.0)  # below that float32 is subnormal: no mass, and slow on many processors
    tile.exp_()
    return top


def _conclude(g: Tensor, f: Tensor, column: Tensor, a: Tensor, b: Tensor) -> Evaluation:
    value = float(a @ f + b @ g)
    return Evaluation(g, f, column, value, float((column - b).abs().sum()))


class Streamed:
    """Evaluates by streaming every row through one GEMM."""

    def __init__(
        self,
        rows: Rows,
        epsilon: float,
        *,
        chunk: int | None = None,
        on_rows: Callable[[int, int], None] | None = None,
    ):
        self.rows = rows
        self.epsilon = epsilon
        self.passes = 0
        self._step = tile_rows(len(rows.b), rows.dtype, chunk)
        self._on_rows = on_rows

    def evaluate(self, g: Tensor) -> Evaluation:
        """One pass over the rows."""
        rows, n, m = self.rows, len(self.rows.a), len(self.rows.b)
        rows.prepare(g, self.epsilon)
        buffer = torch.empty(min(self._step, n), m, dtype=rows.dtype)
        f = torch.empty(n, dtype=torch.float64)
        column = torch.zeros(m, dtype=torch.float64)
        ones = torch.ones(m, dtype=rows.dtype)
        for low in range(0, n, self._step):
            high = min(low + self._step, n)
            tile = buffer[: high - low]
            rows.tile(low, high, tile)
            top = _exponentiate(tile)
            total = tile @ ones
            f[low:high] = top.squeeze(1).double() + total.double().log()
            # n·a keeps the weights near one, where float32 is at its best, whatever the size of the pool.
            column += ((n * rows.a[low:high] / total).to(rows.dtype) @ tile).double()
            if self._on_rows:
                self._on_rows(high, n)
        self.passes += 1
        f.mul_(-self.epsilon).add_(rows.squared)
        return _conclude(g, f, column / n, rows.a, rows.b)

    def nearest(self, g: Tensor) -> Tensor:
        """(n,) int64: the target that receives the largest part of each row. One pass."""
        return _nearest(self.rows, g, self.epsilon, self._step)


def _nearest(rows: Rows, g: Tensor, epsilon: float, step: int) -> Tensor:
    n = len(rows.a)
    rows.prepare(g, epsilon)
    found = torch.empty(n, dtype=torch.int64)
    buffer = torch.empty(min(step, n), len(rows.b), dtype=rows.dtype)
    for low in range(0, n, step):
        high = min(low + step, n)
        tile = buffer[: high - low]
        rows.tile(low, high, tile)
        torch.argmax(tile, dim=1, out=found[low:high])
    return found


class Kernel:
    """Keeps the exponentiated tiles: after `absorb`, evaluations are matrix-vector products."""

    def __init__(
        self,
        rows: Rows,
        epsilon: float,
        *,
        chunk: int | None = None,
        on_rows: Callable[[int, int], None] | None = None,
    ):
        self.rows = rows
        self.epsilon = epsilon
        self.passes = 0
        self.store = torch.empty(len(rows.a), len(rows.b), dtype=rows.dtype)
        self.origin: Tensor | None = None
        self.reach = 20.0 if rows.dtype == torch.float32 else 200.0
        """Largest |g − g₀|/ε before E is computed anew: entries that were flushed to zero must stay negligible."""
        self._step = tile_rows(len(rows.b), rows.dtype, chunk)
        self._base = torch.empty(len(rows.a), dtype=torch.float64)
        self._on_rows = on_rows

    def absorb(self, g: Tensor, epsilon: float | None = None) -> None:
        """Compute E at g (and at a new ε). One GEMM per tile when the rows are streamed."""
        if epsilon is not None:
            self.epsilon = epsilon
        n = len(self.rows.a)
        self.rows.prepare(g, self.epsilon)
        for low in range(0, n, self._step):
            high = min(low + self._step, n)
            tile = self.store[low:high]
            self.rows.tile(low, high, tile)
            self._base[low:high] = _exponentiate(tile).squeeze(1).double()
            if self._on_rows:
                self._on_rows(high, n)
        self.passes += 1
        self.origin = g.clone()

    def log_v(self, g: Tensor) -> Tensor:
        """(g − g₀)/ε up to a constant; absorbs g first where it lies out of reach."""
        if self.origin is None:
            self.absorb(g)
        assert self.origin is not None
        log_v = (g - self.origin) / self.epsilon
        if float(log_v.max() - log_v.min()) > 2 * self.reach:
            self.absorb(g)
            return torch.zeros_like(g)
        return log_v

    def scale(self, log_v: Tensor, log_z: Tensor | None = None, omega: float = 1.0) -> tuple[Tensor, Tensor]:
        """Row sums' logarithm log z (n,) and column sums (M,) for v; one read of E.

        With `log_z` of the previous call and ω > 1 the row update is over-relaxed:
        log z ← (1 − ω) log z_old + ω log(E v).
        """
        rows, n = self.rows, len(self.rows.a)
        shift = float(log_v.max() + log_v.min()) / 2
        v = (log_v - shift).exp()
        narrow = v.to(rows.dtype)
        out = torch.empty(n, dtype=torch.float64)
        column = torch.zeros(len(v), dtype=torch.float64)
        for low in range(0, n, self._step):
            high = min(low + self._step, n)
            tile = self.store[low:high]
            z = (tile @ narrow).double().log_().add_(shift)
            if log_z is not None and omega != 1.0:
                z = z.mul_(omega).add_(log_z[low:high], alpha=1.0 - omega)
            out[low:high] = z
            column += ((n * rows.a[low:high] * (shift - z).exp()).to(rows.dtype) @ tile).double()
        return out, v * column / n

    def evaluate(self, g: Tensor) -> Evaluation:
        """Exact rows, column sums and dual value at g."""
        log_v = self.log_v(g)
        log_z, column = self.scale(log_v)
        f = self.rows.squared - self.epsilon * (self._base + log_z)
        return _conclude(g, f, column, self.rows.a, self.rows.b)

    def curvature(self, g: Tensor) -> Tensor:
        """H = diag(col) − Σ_i a_i r_i r_iᵀ (M, M) float64 with r_i = softmax(S_i): −ε ∇²F at g."""
        log_v = self.log_v(g)
        log_v = log_v - (log_v.max() + log_v.min()) / 2
        log_z, column = self.scale(log_v)
        n, m = self.store.shape
        gram = torch.zeros(m, m, dtype=torch.float64)
        v = log_v.exp()
        for low in range(0, n, 4096):
            tile = self.store[low : low + 4096]
            weight = (n * self.rows.a[low : low + 4096]).sqrt() * (-log_z[low : low + 4096]).exp()
            scaled = tile * weight.to(tile.dtype).unsqueeze(1)
            gram += (scaled.T @ scaled).double()
        gram *= (v / n).unsqueeze(1) * v
        return torch.diag(column) - gram

    def nearest(self, g: Tensor) -> Tensor:
        """(n,) int64: the target that receives the largest part of each row."""
        narrow = self.log_v(g).to(self.rows.dtype).exp()
        found = torch.empty(len(self.rows.a), dtype=torch.int64)
        for low in range(0, len(found), self._step):
            torch.argmax(self.store[low : low + self._step] * narrow, dim=1, out=found[low : low + self._step])
        return found
