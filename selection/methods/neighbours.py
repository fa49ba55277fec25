"""Exact nearest pool rows of every target, and densities among rows: one GEMM per tile, nothing N×M in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flatshift.selection.methods.base import Progress
from flatshift.selection.transport.problem import check_finite_rows
from flatshift.selection.validation import check_chunk, check_no_overflow, check_same_width, feature_matrix

_EXACT_FLOPS = 1e11
"""Work up to which products are float64; above, candidates are found in float32 (their distances stay float64)."""


@dataclass(frozen=True)
class NearestRows:
    """Nearest rows in both directions.

    rows (M, K) int64 and squared (M, K) float64: each target's nearest pool rows, nearest first, ties by row.
    row_nearest (N,) int64 and row_squared (N,) float64: each pool row's nearest target, and its squared distance.
    """

    rows: np.ndarray
    squared: np.ndarray
    row_nearest: np.ndarray
    row_squared: np.ndarray


def nearest_rows(
    x: Any,
    y: Any,
    count: int,
    *,
    chunk: int | None = None,
    span: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> NearestRows:
    """Find the `count` (at most N) nearest rows of x (N, d) for each row of y (M, d); 0: only each row's target.

    span: of the rows of x to search for, the whole tiles [low, high); with count 0.

    Raises SelectionError on shapes that do not match and input that is empty, not finite or overflows when squared.
    """
    check_chunk(chunk)
    x = feature_matrix(x, "pool")
    targets = np.asarray(feature_matrix(y, "target"), dtype=np.float64)
    check_same_width(x, targets)
    n, m, d = x.shape[0], len(targets), targets.shape[1]
    check_finite_rows(targets, "target", 0)
    count = min(count, n)
    # Dot products of centred rows do not cancel.
    with np.errstate(over="ignore", invalid="ignore"):
        centre = targets.mean(0)
        targets = targets - centre
    y_squared = np.einsum("ij,ij->i", targets, targets)
    dtype = torch.float64 if 2.0 * n * m * d <= _EXACT_FLOPS else torch.float32
    right = torch.from_numpy(-2.0 * targets.T).to(dtype)
    lift = torch.from_numpy(y_squared).to(dtype)
    furthest, limit = np.sqrt(y_squared.max()), float(np.sqrt(torch.finfo(dtype).max))
    best_squared = torch.empty(m, 0, dtype=dtype)
    best_rows = torch.empty(m, 0, dtype=torch.int64)
    first, last = span or (0, n)
    row_nearest = np.empty(last - first, dtype=np.int64)
    row_squared = np.empty(last - first)
    step = tile_rows(m, chunk)
    for low in range(first, last, step):
        rows = np.asarray(x[low : min(low + step, last)], dtype=np.float64)
        check_finite_rows(rows, "pool", low)
        rows = rows - centre
        squared = np.einsum("ij,ij->i", rows, rows)
        check_no_overflow(0.0 if np.sqrt(squared.max()) + furthest < limit else np.inf)
        tile = torch.addmm(lift, torch.from_numpy(rows).to(dtype), right)
        nearest = tile.argmin(1).numpy()
        own = slice(low - first, low - first + len(rows))
        row_nearest[own] = nearest
        row_squared[own] = np.einsum("ij,ij->i", rows - targets[nearest], rows - targets[nearest])
        if progress:
            progress("searching neighbours", low + len(rows), n)
        if not count:
            continue
        tile += torch.from_numpy(squared).to(dtype).unsqueeze(1)
        index = torch.arange(low, low + len(rows)).expand(m, -1)
        best_squared, best_rows = _k_smallest(
            torch.cat([best_squared, tile.T], 1), torch.cat([best_rows, index], 1), count
        )
    candidates = best_rows.numpy()
    exact = np.empty(candidates.shape)
    for j in range(m):  # recompute distances in float64: a difference of squares would lose near-duplicates
        gap = np.asarray(x[candidates[j]], dtype=np.float64) - centre - targets[j]
        exact[j] = np.einsum("ij,ij->i", gap, gap)
    order = np.lexsort((candidates, exact), axis=1)
    return NearestRows(
        np.take_along_axis(candidates, order, 1), np.take_along_axis(exact, order, 1), row_nearest, row_squared
    )


def tile_rows(targets: int, chunk: int | None = None) -> int:
    """Return the number of pool rows that are compared with all targets at a time."""
    return chunk or max(64, min(8192, (64 << 20) // (8 * targets)))


def _k_smallest(values: torch.Tensor, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` smallest of each row of `values` with their `rows`, in order; ties to the left."""
    if values.shape[1] <= count:
        return values, rows
    worst = torch.kthvalue(values, count, dim=1, keepdim=True).values
    selected = values <= worst
    if int(selected.sum()) == count * len(values):
        return values[selected].reshape(-1, count), rows[selected].reshape(-1, count)
    less = values < worst
    ties = values == worst
    selected = less | (ties & (ties.cumsum(1) <= count - less.sum(1, keepdim=True)))
    return values[selected].reshape(-1, count), rows[selected].reshape(-1, count)


def kernel_densities(
    points: np.ndarray, rows: np.ndarray, sigma: float, *, chunk: int | None = None, progress: Progress | None = None
) -> np.ndarray:
    """Return (R,): for each of `rows` (R,), numbers of points (U, d), Σ_j max(0, 1 − |x_i − x_j|²/σ²) over all points.

    A point counts itself, exactly 1; all are 1 if sigma is 0. R·U·d multiplications.
    """
    if sigma == 0.0:
        return np.ones(len(rows))
    u, d = points.shape
    dtype = torch.float64 if 2.0 * len(rows) * u * d <= _EXACT_FLOPS else torch.float32
    scaled = torch.from_numpy((points - points.mean(0)) / sigma).to(dtype)
    lift = 1.0 - (scaled * scaled).sum(1)
    check_no_overflow(lift.numpy())
    out = torch.empty(len(rows), dtype=torch.float64)
    step = chunk or max(64, min(8192, (64 << 20) // (8 * u)))
    for low in range(0, len(rows), step):
        index = torch.from_numpy(rows[low : low + step])
        tile = torch.addmm(lift, scaled[index], scaled.T, alpha=2.0)
        tile += (lift[index] - 1.0).unsqueeze(1)
        tile.clamp_(0.0, 1.0)
        tile[torch.arange(len(index)), index] = 1.0
        out[low : low + step] = tile.sum(1, dtype=torch.float64)
        if progress:
            progress("measuring density", low + len(index), len(rows))
    return out.numpy()


def raise_local_densities(
    points: np.ndarray,
    neighbours: np.ndarray,
    reach: int,
    sigma: float,
    out: np.ndarray,
    *,
    progress: Progress | None = None,
) -> None:
    """Raise out (U,) to max over targets j of Σ_k max(0, 1 − |x_i − x_k|²/σ²), k over neighbours[j], i over its first
    `reach`: a lower bound of `kernel_densities` over all points. neighbours (M, K): numbers of points (U, d).
    M·reach·K·d products."""
    centred = torch.from_numpy((points - points.mean(0)) / sigma).float()
    squared = (centred * centred).sum(1)
    check_no_overflow(squared.numpy())
    for j, row in enumerate(neighbours):
        index = torch.from_numpy(row)
        rows, norms = centred[index], squared[index]
        tile = torch.addmm(1.0 - norms, rows[:reach], rows.T, alpha=2.0)
        tile -= norms[:reach].unsqueeze(1)
        tile.clamp_(0.0, 1.0)
        tile.fill_diagonal_(1.0)
        np.maximum.at(out, row[:reach], tile.sum(1, dtype=torch.float64).numpy())
        if progress and (j % 64 == 0 or j + 1 == len(neighbours)):
            progress("measuring density", j + 1, len(neighbours))
