"""2-D map of pool, selection and target for a selection's report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flatshift.finetune.seeds import derive

if TYPE_CHECKING:
    import pyarrow as pa

_FIT = 4096  # most rows of each side used to fit the axes
_LARGEST = 1e30
"""Features beyond this are scaled by the largest: coordinates are float32, their variances products."""


def project(
    X: np.ndarray, Y: np.ndarray, selected: Sequence[int] | np.ndarray, *, seed: int, max_points: int = 4000
) -> pa.Table:
    """Return principal-axis coordinates of a seeded sample of pool, selection and target.

    X: (N, d) pool features, may be a memmap (only sampled rows are read). Y: (M, d) target features. `selected`: row
    numbers of X, or a mask of length N. The axes are fitted on target and pool with half the weight each, so that a
    small target shapes them as much as a large pool. At most a quarter of `max_points` is target, a quarter selection,
    the rest pool records that were not selected.

    Returns a table with x, y (float32) and kind (pool, target, selection); the schema metadata `flatshift.explained`
    holds the shares of the weighted variance on the two axes. Deterministic in `seed`. Coordinates are in units of the
    features, or of the largest of them if they exceed the float32 range.

    Raises ValueError if the widths differ.
    """
    import pyarrow as pa

    if X.ndim != 2 or Y.ndim != 2 or X.shape[1] != Y.shape[1]:
        raise ValueError(f"pool features {X.shape} and target features {Y.shape} must be N×d and M×d with one d")
    rng = np.random.default_rng(derive(seed, "report map"))

    def sample(rows: np.ndarray, count: int) -> np.ndarray:
        return rows if len(rows) <= count else np.sort(rng.choice(rows, count, replace=False))

    fits = [_rows(X, sample(np.arange(len(X)), _FIT)), _rows(Y, sample(np.arange(len(Y)), _FIT))]
    chosen = np.asarray(selected)
    chosen = np.flatnonzero(chosen) if chosen.dtype == bool else np.unique(chosen.astype(np.int64))
    target = sample(np.arange(len(Y)), max_points // 4)
    shown = sample(chosen, max_points // 4)
    others = sample(np.setdiff1d(np.arange(len(X)), chosen), max_points - len(target) - len(shown))
    parts = [_rows(X, others), _rows(X, shown), _rows(Y, target)]
    if (largest := max(float(np.abs(rows).max(initial=0.0)) for rows in (*fits, *parts))) > _LARGEST:
        fits, parts = [rows / largest for rows in fits], [rows / largest for rows in parts]
    sides = [side for side in fits if len(side)]
    if not sides:
        raise ValueError("nothing to project: pool and target are empty")
    center = np.mean([side.mean(axis=0) for side in sides], axis=0)
    covariance = np.mean([(side - center).T @ (side - center) / len(side) for side in sides], axis=0)
    values, vectors = np.linalg.eigh(covariance)
    axes = vectors[:, ::-1][:, :2]
    # An eigenvector's sign is arbitrary: make the largest component positive.
    axes = axes * np.where(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])] < 0, -1.0, 1.0)
    explained = np.maximum(values[::-1][:2], 0) / max(values.clip(min=0).sum(), np.finfo(float).tiny)
    if axes.shape[1] == 1:  # d = 1: a line
        axes, explained = np.hstack([axes, np.zeros_like(axes)]), np.append(explained, 0.0)

    xy = np.concatenate([(rows - center) @ axes for rows in parts]).astype(np.float32)
    kinds = [kind for rows, kind in zip(parts, ("pool", "selection", "target"), strict=True) for _ in rows]
    table = pa.table({"x": xy[:, 0], "y": xy[:, 1], "kind": kinds})
    return table.replace_schema_metadata({"flatshift.explained": json.dumps([round(float(e), 6) for e in explained])})


def _rows(source: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.asarray(source[rows], dtype=np.float64)
