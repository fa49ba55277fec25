"""Evaluations of the semi-dual: F(g) = Σ a_i f_g(x_i) + Σ b_j g_j and its gradient b − col(g), col = Pᵀ1.

Two equivalent implementations: `StreamedEvaluator` rereads the rows each time (one GEMM per pass, memory of a chunk);
`StoredKernel` stores E_ij = exp(S_ij − max_j S_ij) at an absorbed g₀, after which a new g costs one read of E: S(g) =
S(g₀) + (g − g₀)/ε, so row sums are E v and column sums v ∘ Eᵀu with v = exp((g − g₀)/ε), u = a/(E v). Row softmax and
column sums are computed from the same tile while it is in cache. Sums over rows are float64.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatshift.selection.transport.blocks import ThreadCrew, flushes_subnormals, tile_ranges
from flatshift.selection.transport.ranks import ProcessTeam
from flatshift.selection.transport.rows import TileSource

TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Bytes of one tile: large enough for GEMM at full speed, on CPUs small enough to stay in cache afterwards."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluation at `g`: `f` (n,), `column` (M,) float64; `value` the dual; `error` the L1 deviation of the target
    marginal; `nearest` (n,) int32, the target with the largest part of each row, if requested."""

    g: Tensor
    f: Tensor
    column: Tensor
    value: float
    error: float
    nearest: Tensor | None = None


def tile_rows(columns: int, dtype: torch.dtype, chunk: int | None, tile_bytes: int = TILE_BYTES["cpu"]) -> int:
    """Return the rows per tile."""
    if chunk is not None:
        return chunk
    return max(16, min(tile_bytes // (columns * dtype.itemsize), max(8192, tile_bytes >> 12)))


def _exponentiate(tile: Tensor, stored: bool = False) -> Tensor:
    """Compute exp(S − rowmax) of a tile S/ln 2 in place; return its row maxima (rows,). stored: see `_exp_in_place`."""
    top = tile.amax(1)
    _exp_in_place(tile.sub_(top.unsqueeze(1)), stored)
    return top


def _exp_in_place(tile: Tensor, stored: bool = False) -> None:
    """Compute exp of S in place, without float32 subnormals: they hold no mass, but many processors are slow on them.
    They are clamped away, unless this thread flushes them to 0 and the tile is `stored` for threads that do not."""
    if tile.dtype == torch.float32 and (stored or not flushes_subnormals()):
        tile.clamp_(min=-115.0)
    tile.exp2_()


def _argmax_columns(tile: Tensor) -> Tensor:
    """Return (rows,) int64: the column of each row's largest entry, the first of equals."""
    if tile.device.type == "cpu":
        return torch.from_numpy(tile.numpy().argmax(1))  # vectorised: a thirteenth of torch's time
    return tile.argmax(1)


def _is_in_float32_range(total: Tensor) -> bool:
    """True if sums of exponentials are so near to one that float32 holds all that matters of their terms."""
    low, high = total.aminmax()
    return bool(low > 2.0**-40) and bool(high < 2.0**40)


class StreamedEvaluator:
    """Evaluates by streaming every row through one GEMM; in a team, every process its own rows.

    tile_bytes: memory of a tile, None to suit the device. on_rows: called as (done, total) after each tile.
    """

    def __init__(
        self,
        rows: TileSource,
        epsilon: float,
        *,
        chunk: int | None = None,
        on_rows: Callable[[int, int], None] | None = None,
        tile_bytes: int | None = None,
        team: ProcessTeam | None = None,
    ):
        self.rows = rows
        self.epsilon = epsilon
        self.passes = 0
        self._team = (team or ProcessTeam()).over(len(rows.a))
        self._crew = ThreadCrew(rows.device)
        allowed = TILE_BYTES.get(rows.device.type, TILE_BYTES["cpu"])
        self._step = tile_rows(len(rows.b), rows.dtype, chunk, min(allowed, tile_bytes or allowed))
        self._on_rows = on_rows

    def evaluate(self, g: Tensor, nearest: bool = False, start: Evaluation | None = None) -> Evaluation:
        """Evaluate F at g in one pass over the rows. `nearest` costs a fiftieth of a pass more.

        start: an evaluation at a g a few ε away. Its f, a log-sum per row, then replaces the row maxima: they need not
        be computed, and the shift by them is a column of the GEMM. Tiles for which it is too far away for float32 use
        their row maxima.
        """
        rows, n, m = self.rows, len(self.rows.a), len(self.rows.b)
        total_rows = self._team.rows_of_all
        rows.prepare(g, self.epsilon)
        f = torch.empty(n, dtype=torch.float64, device=rows.device)
        main_targets = torch.empty(n, dtype=torch.int32, device=rows.device) if nearest else None
        buffers = threading.local()
        per_ln2 = 1.0 / (self.epsilon * math.log(2.0))

        def work(low: int, high: int) -> Tensor:
            if not hasattr(buffers, "tile"):
                buffers.tile = torch.empty(min(self._step, n), m, dtype=rows.dtype, device=rows.device)
            tile: Tensor = buffers.tile[: high - low]
            shift = total = None
            if start is not None:
                shift = ((rows.squared[low:high] - start.f[low:high]) * per_ln2).to(rows.dtype)
                rows.tile(low, high, tile, shift)
                if main_targets is not None:
                    main_targets[low:high] = _argmax_columns(tile)
                _exp_in_place(tile)
                total = tile.sum(1)
            if shift is None or total is None or not _is_in_float32_range(total):
                rows.tile(low, high, tile)
                if main_targets is not None:
                    main_targets[low:high] = _argmax_columns(tile)
                shift = _exponentiate(tile)
                total = tile.sum(1)
            f[low:high] = shift.double() + total.double().log2()
            # n·a keeps the weights near one, where float32 is most accurate, whatever the size of the pool.
            return ((total_rows * rows.a[low:high] / total).to(rows.dtype) @ tile).double()

        tree = self._crew.tree(n, self._step, work, self._on_rows, self._team.first_block)
        self.passes += 1
        f.mul_(-self.epsilon * math.log(2.0)).add_(rows.squared)
        column = self._team.fold(tree) / total_rows
        value = self._team.dot(rows.a.cpu().numpy(), f.cpu().numpy()) + float(rows.b @ g)
        return Evaluation(g, f, column, value, float((column - rows.b).abs().sum()), main_targets)

    def nearest(self, g: Tensor) -> Tensor:
        """Return (n,) int64: the target that receives the largest part of each row. One pass."""
        rows, n = self.rows, len(self.rows.a)
        rows.prepare(g, self.epsilon)
        main_targets = torch.empty(n, dtype=torch.int64, device=rows.device)
        buffer = torch.empty(min(self._step, n), len(rows.b), dtype=rows.dtype, device=rows.device)
        for low, high in tile_ranges(0, n, self._step):
            tile = buffer[: high - low]
            rows.tile(low, high, tile)
            main_targets[low:high] = _argmax_columns(tile)
        return main_targets


class StoredKernel:
    """Stores the exponentiated tiles: after `absorb`, evaluations are matrix-vector products."""

    def __init__(
        self,
        rows: TileSource,
        epsilon: float,
        *,
        chunk: int | None = None,
        on_rows: Callable[[int, int], None] | None = None,
        tile_bytes: int | None = None,
    ):
        self.rows = rows
        self.epsilon = epsilon
        self.passes = 0
        self.store = torch.empty(len(rows.a), len(rows.b), dtype=rows.dtype, device=rows.device)
        self.origin: Tensor | None = None
        self.reach = 20.0 if rows.dtype == torch.float32 else 200.0
        """Largest |g − g₀|/ε before E is recomputed: entries that were flushed to zero must stay negligible."""
        self._step = tile_rows(len(rows.b), rows.dtype, chunk, tile_bytes or TILE_BYTES["cpu"])
        self._base = torch.empty(len(rows.a), dtype=torch.float64, device=rows.device)
        self._on_rows = on_rows
        self._crew = ThreadCrew(rows.device)

    def absorb(self, g: Tensor, epsilon: float | None = None) -> None:
        """Compute E at g (and at a new ε). One GEMM per tile when the rows are streamed."""
        if epsilon is not None:
            self.epsilon = epsilon
        n = len(self.rows.a)
        self.rows.prepare(g, self.epsilon)

        def work(low: int, high: int) -> None:
            tile = self.store[low:high]
            self.rows.tile(low, high, tile)
            self._base[low:high] = _exponentiate(tile, stored=True).double() * math.log(2.0)

        self._crew.each(n, self._step, work, self._on_rows)
        self.passes += 1
        self.origin = g.clone()

    def log_v(self, g: Tensor) -> Tensor:
        """Return (g − g₀)/ε up to a constant; absorb g first if it is out of reach."""
        if self.origin is None:
            self.absorb(g)
        assert self.origin is not None
        log_v = (g - self.origin) / self.epsilon
        if float(log_v.max() - log_v.min()) > 2 * self.reach:
            self.absorb(g)
            return torch.zeros_like(g)
        return log_v

    def scale(self, log_v: Tensor, log_z: Tensor | None = None, omega: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the row sums' logarithm log z (n,) and column sums (M,) for v; one read of E. With `log_z` of the
        previous call and ω > 1 the row update is over-relaxed: log z ← (1 − ω) log z_old + ω log(E v)."""
        rows, n = self.rows, len(self.rows.a)
        shift = float(log_v.max() + log_v.min()) / 2
        v = (log_v - shift).exp()
        narrow = v.to(rows.dtype)
        out = torch.empty(n, dtype=torch.float64, device=rows.device)

        def work(low: int, high: int) -> Tensor:
            tile = self.store[low:high]
            z = (tile @ narrow).double().log_().add_(shift)
            if log_z is not None and omega != 1.0:
                z = z.mul_(omega).add_(log_z[low:high], alpha=1.0 - omega)
            out[low:high] = z
            return ((n * rows.a[low:high] * (shift - z).exp()).to(rows.dtype) @ tile).double()

        column = self._crew.each(n, self._step, work)
        assert column is not None
        return out, v * column / n

    def evaluate(self, g: Tensor) -> Evaluation:
        """Compute exact rows, column sums and dual value at g."""
        log_v = self.log_v(g)
        log_z, column = self.scale(log_v)
        f = self.rows.squared - self.epsilon * (self._base + log_z)
        a, b = self.rows.a, self.rows.b
        return Evaluation(g, f, column, float(a @ f + b @ g), float((column - b).abs().sum()))

    def curvature(self, g: Tensor) -> Tensor:
        """Return H = diag(col) − Σ_i a_i r_i r_iᵀ (M, M) float64 with r_i = softmax(S_i): −ε ∇²F at g."""
        log_v = self.log_v(g)
        log_v = log_v - (log_v.max() + log_v.min()) / 2
        log_z, column = self.scale(log_v)
        n, m = self.store.shape
        gram = torch.zeros(m, m, dtype=torch.float64, device=self.store.device)
        v = log_v.exp()
        for low in range(0, n, 4096):
            tile = self.store[low : low + 4096]
            weight = (n * self.rows.a[low : low + 4096]).sqrt() * (-log_z[low : low + 4096]).exp()
            scaled = tile * weight.to(tile.dtype).unsqueeze(1)
            gram += (scaled.T @ scaled).double()
        gram *= (v / n).unsqueeze(1) * v
        return torch.diag(column) - gram

    def nearest(self, g: Tensor) -> Tensor:
        """Return (n,) int64: the target that receives the largest part of each row."""
        narrow = self.log_v(g).to(self.rows.dtype).exp()
        main_targets = torch.empty(len(self.rows.a), dtype=torch.int64, device=self.store.device)
        for low in range(0, len(main_targets), self._step):
            main_targets[low : low + self._step] = _argmax_columns(self.store[low : low + self._step] * narrow)
        return main_targets
