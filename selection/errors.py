"""The errors that bad selection input raises, and the warning of an unfinished solve."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np


class SelectionError(ValueError):
    """A mistake in pool, target, features or settings: one sentence with what, where and the nearest valid fix."""


class BadRow(SelectionError):
    """A row of features that cannot be used: row `row` of the matrix given for `side`.

    told: what is wrong with it. fix: what to do. bad: rows (n, d) → (n,) bool, the rows with that fault, so that a
    caller who filtered or joined rows finds the one in a matrix of its own.
    """

    def __init__(self, side: str, row: int, told: str, fix: str, bad: Callable[[np.ndarray], np.ndarray]):
        super().__init__(f"{side} features: row {row} {told}; {fix}")
        self.side, self.row, self.told, self.fix, self.bad = side, row, told, fix, bad


class TooLittleMemory(SelectionError):
    """The solver's memory cap `given` is below the `needed` bytes for so many rows and targets."""

    def __init__(self, given: int, needed: int, rows: int, targets: int):
        super().__init__(
            f"memory_bytes of {given:,} is too little for {rows:,} rows and {targets:,} targets; "
            f"give at least {needed:,}"
        )
        self.given, self.needed, self.rows, self.targets = given, needed, rows, targets


def is_disk_full(error: OSError) -> bool:
    """Whether the disk, or the user's share of it, had no room left: no mistake in the input, and resumable."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class ConvergenceWarning(UserWarning):
    """The transport solver stopped before its tolerance; the result says how far it got."""
