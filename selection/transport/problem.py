"""Transport problem: checked inputs, centred targets, and the exact mean cost in one read of the pool.

Cosine cost is half the squared Euclidean cost between rows of length one: rows are scaled as they are read, everything
downstream uses squared distances, and `unit` converts the result back to cosine costs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from flatshift.selection.errors import BadRow, SelectionError
from flatshift.selection.transport.blocks import BlockSumTree, ThreadCrew
from flatshift.selection.transport.ranks import ProcessTeam
from flatshift.selection.validation import check_no_overflow, check_same_width, feature_matrix, to_weights

COSTS = ("sqeuclidean", "cosine")

_TYPES = {2: torch.float16, 4: torch.float32, 8: torch.float64}

Result = TypeVar("Result")
Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)` while rows are read."""
_READ_BYTES = 4 << 20
"""Bytes of float64 rows read at a time: small enough for the cache while they are checked and summed, large enough that
threads seldom contend for the interpreter."""


class ScratchBuffers(threading.local):
    """Buffers of the calling thread, reused for every tile: fresh memory costs a page fault for each of its pages.

    Allocated by torch, which aligns them: the order of BLAS' sums, and so their last bits, depend on the address.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def rows(self, n: int, d: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised (n, d) buffer, valid until this thread's next call for this dtype."""
        buffer = self._buffers.get(dtype)
        if buffer is None or len(buffer) < n or buffer.shape[1] != d:
            buffer = self._buffers[dtype] = torch.empty(n, d, dtype=dtype)
        return buffer[:n]

    def read(self, x: Any, low: int, high: int) -> Tensor:
        """Read rows [low, high) of x in their own dtype if torch supports it, else float64."""
        array = np.asarray(x[low:high])
        out = self.rows(len(array), array.shape[1], _native_dtype(array))
        out.numpy()[...] = array
        return out

    def widened(self, rows: Tensor) -> Tensor:
        """Convert `rows` to float64. float16 takes two steps, a vector instruction each."""
        for dtype in (torch.float32, torch.float64):
            if rows.dtype.itemsize < dtype.itemsize:
                rows = self.rows(len(rows), rows.shape[1], dtype).copy_(rows)
        return rows


@dataclass(frozen=True)
class TransportProblem:
    """One transport problem, N pool rows by M target rows.

    `x` is anything with `shape` and row slices (an array, a memory map); it is read in chunks and never copied whole.
    `y` (M, d) float64 is already centred: `centre` (d,) must be subtracted from every chunk of `x`. The shift does not
    affect the squared Euclidean cost, and dot products of centred rows do not cancel. `scale` (N,) float64 multiplies
    rows before that (1/|x_i| for cosine), None for 1; `unit` × squared distance = cost. `mean_cost`: weighted mean of
    the squared distances; `mean` (d,): weighted mean of the centred pool rows; `total`: their number; all of all
    processes. In a team `x`, `a`, `x_squared` and `scale` are this process's shard, and `a` sums to the shard's part of
    the mass. `exchanged`: the rows are the target's and the columns the pool's.
    """

    x: Any
    y: np.ndarray
    a: np.ndarray
    b: np.ndarray
    centre: np.ndarray
    x_squared: np.ndarray
    mean_cost: float
    mean: np.ndarray
    scale: np.ndarray | None = None
    unit: float = 1.0
    team: ProcessTeam = field(default_factory=ProcessTeam)
    total: int = 0
    exchanged: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.a), len(self.b)


def pose_problem(
    x: Any,
    y: ArrayLike,
    a: ArrayLike | None,
    b: ArrayLike | None,
    *,
    chunk: int | None,
    progress: Progress | None,
    cost: str = "sqeuclidean",
    team: ProcessTeam | None = None,
) -> TransportProblem:
    """Check everything, read the pool once, return the Problem.

    The mean squared distance Σ_ij a_i b_j |x_i − y_j|² is exact in float64: with targets centred on their weighted mean
    it is Σ_i a_i |x_i|² + Σ_j b_j |y_j|², a sum of non-negative terms. chunk: rows read at a time, None to choose.
    Raises SelectionError, in a team on every process.
    """
    team = team or ProcessTeam()
    x = on_every_member(team, lambda: feature_matrix(x, "pool"))
    team = team.over(len(x))
    checked, sums = on_every_member(team, lambda: _read_pool(x, y, a, b, chunk, progress, cost == "cosine", team))
    team.check_same("target features, their weights or the width of the pool", checked.y, checked.b, checked.x.shape[1])
    if team.size > 1 and len(set(team.gather(a is None))) > 1:
        raise SelectionError("some processes give pool weights and some do not; give them on all or on none")
    total = team.rows_of_all
    mass = team.dot(checked.a, np.ones_like(checked.a))
    if not 0 < mass < np.inf:
        raise SelectionError(f"pool weights sum to {mass}; at least one must be positive")
    weights = checked.a / mass
    with np.errstate(over="ignore", invalid="ignore"):
        rows_part = team.dot(weights, checked.x_squared)
        mean = team.fold(sums).numpy() / mass
        y_squared = np.einsum("ij,ij->i", checked.y, checked.y)
        shift = checked.b @ checked.y  # remainder from rounding the centre
        mean_cost = float(rows_part + checked.b @ y_squared - 2.0 * (shift @ mean))
    check_no_overflow(mean_cost)
    return replace(checked, a=weights, mean_cost=max(mean_cost, 0.0), mean=mean, team=team, total=total)


def on_every_member(team: ProcessTeam, work: Callable[[], Result]) -> Result:
    """Run `work`; if it raises SelectionError on any member, raise that on all."""
    result: Result | None = None
    failure: SelectionError | None = None
    try:
        result = work()
    except SelectionError as error:
        failure = error
    team.agree(failure)
    return cast("Result", result)


def _read_pool(
    x: Any,
    y: ArrayLike,
    a: ArrayLike | None,
    b: ArrayLike | None,
    chunk: int | None,
    progress: Progress | None,
    cosine: bool,
    team: ProcessTeam,
) -> tuple[TransportProblem, BlockSumTree]:
    """Do this process's part of `pose_problem`; return the Problem and the sums of its rows times their weights.
    Weights are not yet scaled to sum 1; `mean` and `mean_cost` are not yet set."""
    target = np.asarray(feature_matrix(y, "target"), dtype=np.float64)
    check_same_width(x, target)
    check_finite_rows(target, "target", 0)
    n, d = x.shape
    pool_weights = _check_weights(a, n, "pool", empty=team.size > 1)
    target_weights = _check_weights(b, target.shape[0], "target")
    target_weights /= target_weights.sum()
    if not target_weights.all():
        row = int(np.flatnonzero(target_weights == 0)[0])
        raise SelectionError(f"target weight {row} is 0; leave target row {row} out instead")
    if cosine:
        target = target * (1.0 / _row_norms(target, "target", 0))[:, None]

    centre = target_weights @ target
    if x.dtype.kind == "f" and x.dtype != np.float64:
        # Rounded to float32, the centre is subtracted from both sides without another rounding.
        centre = centre.astype(np.float32).astype(np.float64)
    target = target - centre
    x_squared = np.empty(n)
    scale = np.empty(n) if cosine else None

    scratch, shift, before = ScratchBuffers(), torch.from_numpy(centre), team.first_row

    def work(low: int, high: int) -> Tensor:
        wide = scratch.widened(scratch.read(x, low, high))
        rows = wide.numpy()
        if scale is not None:
            check_finite_rows(rows, "pool", before + low)
            scale[low:high] = 1.0 / _row_norms(rows, "pool", before + low)
            rows *= scale[low:high, None]
        wide -= shift
        x_squared[low:high] = np.einsum("ij,ij->i", rows, rows)
        if not np.isfinite(x_squared[low:high].sum()):
            check_finite_rows(rows, "pool", before + low)
        return to_aligned_tensor(pool_weights[low:high]) @ wide

    step = chunk or max(16, _READ_BYTES // (8 * d))
    on_rows = (lambda done, count: progress("reading the pool", done, count)) if progress else None
    sums = ThreadCrew(torch.device("cpu")).tree(n, step, work, on_rows, team.first_block)
    unit = 0.5 if cosine else 1.0
    problem = TransportProblem(
        x, target, pool_weights, target_weights, centre, x_squared, 0.0, centre, scale, unit, team, n
    )
    return problem, sums


def to_aligned_tensor(rows: Any) -> Tensor:
    """Copy the rows to a new aligned tensor, in their own dtype if torch supports it, else float64."""
    array = np.asarray(rows)
    copy = torch.empty(array.shape, dtype=_native_dtype(array))
    copy.numpy()[...] = array
    return copy


def _native_dtype(array: np.ndarray) -> torch.dtype:
    is_supported = array.dtype.kind == "f" and array.dtype.itemsize <= 8 and array.dtype.isnative
    return _TYPES[array.dtype.itemsize] if is_supported else torch.float64


def _row_norms(rows: np.ndarray, side: str, offset: int) -> np.ndarray:
    """Return (n,) norms; raise BadRow if one is zero."""
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    bad = np.flatnonzero(~((norms > 0) & np.isfinite(norms)))
    if len(bad):
        problem = "is zero" if norms[bad[0]] == 0 else "is too long"
        raise BadRow(
            side, offset + int(bad[0]), f"{problem}, so it has no cosine", "drop it or rescale", _rows_without_norm
        )
    return norms


def check_finite_rows(rows: np.ndarray, side: str, offset: int) -> None:
    """Raise BadRow naming the first row of `rows` that holds a NaN or an infinity."""
    # One sum clears the usual case: it is finite unless some entry is not, or it overflows, which the slow check sorts
    # out.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(rows.sum()):
            return
    bad = np.flatnonzero(_rows_not_finite(rows))
    if len(bad):
        raise BadRow(side, offset + int(bad[0]), "holds a NaN or an infinity", "drop or mend it", _rows_not_finite)


def _rows_not_finite(rows: np.ndarray) -> np.ndarray:
    """Return (n,) bool: rows with a NaN or an infinity."""
    return np.asarray(~np.isfinite(rows).all(axis=1))


def _rows_without_norm(rows: np.ndarray) -> np.ndarray:
    """Return (n,) bool: rows of length 0, or too long for a float64."""
    wide = np.asarray(rows, dtype=np.float64)
    norms = np.sqrt(np.einsum("ij,ij->i", wide, wide))
    return np.asarray(~((norms > 0) & np.isfinite(norms)))


def _check_weights(value: ArrayLike | None, count: int, side: str, *, empty: bool = False) -> np.ndarray:
    """Check weights without scaling them to sum 1; `empty`: none need be positive (another process may have some)."""
    if value is None:
        return np.ones(count)
    weights = to_weights(value, side)
    if weights.shape != (count,):
        raise SelectionError(f"{side} weights must have shape ({count},), not {weights.shape}")
    if not np.isfinite(weights).all() or (weights < 0).any():
        row = int(np.flatnonzero(~np.isfinite(weights) | (weights < 0))[0])
        raise SelectionError(f"{side} weight {row} is {weights[row]}; weights must be finite and not negative")
    total = weights.sum()
    if not (0 < total < np.inf or (empty and total == 0)):
        raise SelectionError(f"{side} weights sum to {total}; at least one must be positive")
    return weights
