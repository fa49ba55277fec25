"""Nearest neighbours: each pool row by its squared distance to the nearest target row."""

from __future__ import annotations

from typing import Self

import numpy as np
import torch

from selection.methods.base import Pool, Progress, Selector, Target, need
from selection.transport.kernel import Streamed
from selection.transport.problem import pose
from selection.transport.rows import StreamedRows

_EXACT_FLOPS = 1e11
"""Work up to which neighbours are searched in float64; above, in float32 (distances stay float64)."""


class KNNSelector(Selector):
    """Every pool row counts once; `scores_` is the exact squared distance to `nearest_target_`. Ignores weights.

    chunk: rows per tile, None to choose.
    """

    def __init__(self, *, chunk: int | None = None):
        self.chunk = chunk

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Needs features on both sides."""
        x, y = need(pool, target, "features", "knn")
        problem = pose(x, y, None, None, chunk=self.chunk or 16_384, progress=progress)
        n, m = problem.shape
        dtype = torch.float64 if 2.0 * n * m * x.shape[1] <= _EXACT_FLOPS else torch.float32
        with torch.inference_mode():
            search = Streamed(StreamedRows(problem, dtype), 1.0, chunk=self.chunk)
            # With g = 0 the largest logit (|x|² − cost + constant) is the smallest distance.
            nearest = search.nearest(torch.zeros(m, dtype=torch.float64)).numpy()
        scores = np.empty(n)
        step = self.chunk or 16_384
        for low in range(0, n, step):
            rows = np.asarray(x[low : low + step], dtype=np.float64) - problem.centre
            rows -= problem.y[nearest[low : low + step]]
            scores[low : low + step] = np.einsum("ij,ij->i", rows, rows)
            if progress:
                progress("measuring distances", min(low + step, n), n)
        self.scores_ = scores
        self.nearest_target_ = nearest
        self.diagnostics_ = {"mean_cost": problem.mean_cost}
        return self
