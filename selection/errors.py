"""Exceptions of bad selection input, and the warning of an unfinished solve."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class SelectionError(ValueError):
    """A mistake in pool, target, features or settings: one sentence with the problem, its place and the nearest fix."""


class BadRow(SelectionError):
    """An invalid row of features: row `row` of the matrix given for `side`.

    problem: description of the fault. fix: how to repair it. bad: function rows (n, d) → (n,) bool, the rows with that
    fault, so that a caller who filtered or joined rows can find them in another matrix.
    """

    def __init__(self, side: str, row: int, problem: str, fix: str, bad: Callable[[np.ndarray], np.ndarray]):
        super().__init__(f"{side} features: row {row} {problem}; {fix}")
        self.side, self.row, self.problem, self.fix, self.bad = side, row, problem, fix, bad


class TooLittleMemory(SelectionError):
    """The solver's memory `limit` is below the `needed` bytes for so many rows and targets."""

    def __init__(self, limit: int, needed: int, rows: int, targets: int):
        super().__init__(
            f"memory_bytes of {limit:,} is too little for {rows:,} rows and {targets:,} targets; "
            f"give at least {needed:,}"
        )
        self.limit, self.needed, self.rows, self.targets = limit, needed, rows, targets


def is_disk_full(error: OSError) -> bool:
    """True if the disk or the user's quota is full: not a mistake in the input, and resumable."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class ConvergenceWarning(UserWarning):
    """The transport solver stopped before its tolerance; the result reports the error reached."""
