"""Evaluation by several processes: each takes some rows of every batch, and their figures come together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Share:
    """This process's part of an evaluation. All processes go through the same batches; the default takes every row."""

    index: int = 0
    """Which data rank this is."""
    width: int = 1
    """How many data ranks there are."""
    multiple: int = 1
    """Pad rows to a multiple of so many tokens (sequence parallelism)."""
    lockstep: bool = False
    """Whether every rank must run as many forward passes as the others (sharded weights are gathered in each)."""
    add: Callable[[np.ndarray], np.ndarray] = _same
    """Sum of an array over the data ranks."""
    union: Callable[[dict[int, Any]], dict[int, Any]] = _same
    """The items of all data ranks, by index."""

    @property
    def part(self) -> tuple[int, int]:
        """(index, width)."""
        return self.index, self.width

    def mine(self, batch: Sequence[int]) -> tuple[list[int], bool]:
        """This rank's items of a batch, and whether they count: a rank without any computes the first for company."""
        items = list(batch[self.index :: self.width])
        return (items, True) if items else (list(batch[:1]), False)


ALONE = Share()
