"""What is transported: checked inputs, centred targets, and the exact mean cost in one read of the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from selection.errors import SelectionError

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)` while rows are read."""


@dataclass(frozen=True)
class Problem:
    """One transport problem, N pool rows by M target rows.

    `x` is anything with `shape` and row slices (an array, a memory map); it is read in chunks and never copied
    whole. `y` (M, d) float64 is already centred: `centre` (d,) must be subtracted from every chunk of `x`. The squared
    Euclidean cost does not see the shift, and dot products of centred rows do not cancel.
    """

    x: Any
    y: np.ndarray
    a: np.ndarray
    b: np.ndarray
    centre: np.ndarray
    x_squared: np.ndarray
    mean_cost: float

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.a), len(self.b)


def pose(
    x: Any, y: ArrayLike, a: ArrayLike | None, b: ArrayLike | None, *, chunk: int, progress: Progress | None
) -> Problem:
    """Check everything, read the pool once, return the Problem.

    The mean cost Σ_ij a_i b_j |x_i − y_j|² is exact in float64: with targets centred on their weighted mean it is
    Σ_i a_i |x_i|² + Σ_j b_j |y_j|², a sum of non-negative terms. Raises SelectionError.
    """
    x = _matrix(x, "pool")
    target = np.asarray(_matrix(y, "target"), dtype=np.float64)
    if x.shape[1] != target.shape[1]:
        raise SelectionError(
            f"pool features have {x.shape[1]} columns and target features {target.shape[1]}; embed both the same way"
        )
    finite_rows(target, "target", 0)
    pool_weights = _weights(a, x.shape[0], "pool")
    target_weights = _weights(b, target.shape[0], "target")
    if not target_weights.all():
        row = int(np.flatnonzero(target_weights == 0)[0])
        raise SelectionError(f"target weight {row} is 0; leave target row {row} out instead")

    centre = target_weights @ target
    if not np.issubdtype(x.dtype, np.integer) and x.dtype != np.float64:
        # A centre that the pool's own type can hold is subtracted from both sides without a rounding of its own.
        centre = centre.astype(np.float32).astype(np.float64)
    target = target - centre
    x_squared = np.empty(x.shape[0])
    mean = np.zeros(x.shape[1])
    for low in range(0, x.shape[0], chunk):
        rows = np.asarray(x[low : low + chunk], dtype=np.float64)
        finite_rows(rows, "pool", low)
        rows = rows - centre
        x_squared[low : low + chunk] = np.einsum("ij,ij->i", rows, rows)
        mean += pool_weights[low : low + chunk] @ rows
        if progress:
            progress("reading the pool", min(low + chunk, x.shape[0]), x.shape[0])
    y_squared = np.einsum("ij,ij->i", target, target)
    shift = target_weights @ target  # what rounding the centre left over
    mean_cost = float(pool_weights @ x_squared + target_weights @ y_squared - 2.0 * (shift @ mean))
    if not np.isfinite(mean_cost):
        raise SelectionError("features are so large that squared distances overflow; rescale them")
    return Problem(x, target, pool_weights, target_weights, centre, x_squared, max(mean_cost, 0.0))


def finite_rows(rows: np.ndarray, side: str, offset: int) -> None:
    """Raise SelectionError naming the first row of `rows` that holds a NaN or an infinity."""
    # One sum is enough to clear the usual case: it is finite unless some entry is not (or it overflows: then look).
    if np.isfinite(rows.sum()):
        return
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if len(bad):
        raise SelectionError(f"{side} features: row {offset + int(bad[0])} holds a NaN or an infinity; drop or mend it")


def _matrix(value: Any, side: str) -> Any:
    array = value if hasattr(value, "shape") and hasattr(value, "dtype") else np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise SelectionError(f"{side} features must be real numbers, not {array.dtype}")
    if len(array.shape) != 2:
        raise SelectionError(
            f"{side} features must have two dimensions (rows, columns), not shape {tuple(array.shape)}"
        )
    if array.shape[0] == 0 or array.shape[1] == 0:
        raise SelectionError(f"{side} features are empty: shape {tuple(array.shape)}")
    return array


def _weights(value: ArrayLike | None, count: int, side: str) -> np.ndarray:
    if value is None:
        return np.full(count, 1.0 / count)
    weights = np.asarray(value, dtype=np.float64)
    if weights.shape != (count,):
        raise SelectionError(f"{side} weights must have shape ({count},), not {weights.shape}")
    if not np.isfinite(weights).all() or (weights < 0).any():
        row = int(np.flatnonzero(~np.isfinite(weights) | (weights < 0))[0])
        raise SelectionError(f"{side} weight {row} is {weights[row]}; weights must be finite and not negative")
    total = weights.sum()
    if not 0 < total < np.inf:
        raise SelectionError(f"{side} weights sum to {total}; at least one must be positive")
    return weights / total
