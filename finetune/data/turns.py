"""What the rules of mixing stand on: weights in whole numbers, and whose turn it was so far."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ..errors import UserError

_BLOCK = 1 << 12
"""Places between two counts that are kept."""


def whole_parts(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportions of `weights`.

    Arguments:
        weights: ≥ 0, in any unit; taken as they are written in decimals, so 0.1 is one tenth.
    Raises:
        UserError: a negative weight or one that is no number, or none above zero.
    """
    if not all(0 <= weight < math.inf for weight in weights):
        raise UserError(f"data.train.sources: weights must be numbers ≥ 0, got {', '.join(map(str, weights))}")
    if not any(weights):
        raise UserError("data.train.sources: the weights sum to 0, so there is nothing to train on")
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = Fraction(1, math.lcm(*(weight.denominator for weight in exact)))
    whole = [int(weight / unit) for weight in exact]
    common = math.gcd(*whole)
    return [weight // common for weight in whole]


class Turns:
    """Which of k sources each sample came from, n = 0, 1, 2, …; 4 bytes a sample."""

    def __init__(self, k: int) -> None:
        self._places = array("i")
        self._blocks = [np.zeros(k, dtype=np.int64)]  # counts before every _BLOCK-th place

    def __len__(self) -> int:
        return len(self._places)

    def append(self, source: int) -> None:
        """The next sample is of this source."""
        self._places.append(source)

    def at(self, places: np.ndarray | slice) -> np.ndarray:
        """The sources at these places, int64."""
        return np.frombuffer(self._places, dtype=np.intc)[places].astype(np.int64)

    def counts(self, n: int) -> np.ndarray:
        """How many of the first n samples came from each source, (k,) int64."""
        block = n // _BLOCK
        while len(self._blocks) <= block:
            begin = (len(self._blocks) - 1) * _BLOCK
            self._blocks.append(self._blocks[-1] + self._counted(begin, begin + _BLOCK))
        return self._blocks[block] + self._counted(block * _BLOCK, n)

    def _counted(self, first: int, stop: int) -> np.ndarray:
        return np.bincount(np.array(self._places[first:stop], dtype=np.int64), minlength=len(self._blocks[0]))
