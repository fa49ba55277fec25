"""How long a sweep still takes: a cell's seconds predicted from rank, steps and tokens, learned as cells finish."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from experiments.sweep.cell import Cell, label_of

_ENOUGH = 4
"""Cells from which on the three coefficients are fitted; before, time is taken as proportional to the tokens."""


def work_of(cell: Cell) -> tuple[float, float, float]:
    """(1, tokens that all updates see at most, those tokens · rank): what the time of a cell is made of."""
    recipe = cell.resolved.recipe
    train, warmup = recipe.train, recipe.warmup
    rows = train.steps * train.batch_size * train.accumulate
    if warmup is not None:
        rows += warmup.steps * warmup.batch_size * warmup.accumulate
    tokens = float(rows * train.max_length)
    return 1.0, tokens, tokens * recipe.adapter.rank


class CostModel:
    """Predicts the seconds of cells.

    A point that has finished cells takes their mean. Others: seconds ≈ a + b·tokens + c·tokens·rank with a, b, c ≥ 0,
    fitted to the relative error of the finished cells.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float]] = []
        self._seconds: list[float] = []
        self._points: dict[str, list[float]] = defaultdict(list)
        self._fitted: tuple[int, tuple[float, float, float]] | None = None

    def observe(self, cell: Cell, seconds: float) -> None:
        """A cell took `seconds`."""
        if seconds > 0:
            self._rows.append(work_of(cell))
            self._seconds.append(seconds)
            self._points[label_of(cell.point)].append(seconds)

    def predict(self, cells: Iterable[Cell]) -> float | None:
        """Seconds of all `cells` together, one after another; None while nothing has finished."""
        if not self._seconds:
            return None
        weights = self._weights()
        total = 0.0
        for cell in cells:
            seen = self._points.get(label_of(cell.point))
            if seen:
                total += sum(seen) / len(seen)
            else:
                total += sum(w * x for w, x in zip(weights, work_of(cell), strict=True))
        return total

    def _weights(self) -> tuple[float, float, float]:
        count = len(self._seconds)
        if self._fitted is None or self._fitted[0] != count:
            self._fitted = (count, self._fit())
        return self._fitted[1]

    def _fit(self) -> tuple[float, float, float]:
        if len(self._seconds) < _ENOUGH:
            return 0.0, sum(self._seconds) / sum(row[1] for row in self._rows), 0.0
        import numpy as np
        from scipy.optimize import nnls

        seconds = np.array(self._seconds)
        relative = np.array(self._rows) / seconds[:, None]
        scale = relative.max(axis=0)  # tokens are millions: columns of one size
        found, _ = nnls(relative / scale, np.ones(len(seconds)))
        a, b, c = (found / scale).tolist()
        return a, b, c
