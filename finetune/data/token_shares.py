"""Several sources in exact proportions of tokens: which of them each sample comes from.

Samples are of unlike lengths, so the rule of `finetune.data.mixture`, which counts them, says nothing of tokens. This
is WF²Q, which shares a line among packets (Bennett & Zhang, "WF²Q: Worst-case Fair Weighted Fair Queueing", INFOCOM
1996). With shares w_1 … w_k that sum to 1, T(n) the tokens of the first n samples, c_i(n) those of source i among them,
L_i its longest sample and L the longest of all,

    −L ≤ c_i(n) − T(n) w_i ≤ (1 − w_i) L_i   for every n and i.

A sample with S tokens of its source before it may not come before T w_i ≥ S; of those that may, the one comes whose
end, (S + its length) / w_i, is the earliest. Everything is computed in whole numbers, the same on every machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np

from .turns import Turns, whole_parts

_BLOCK = 1 << 12
"""Lengths that are Python numbers at once, ten times as large as in their array."""
Lengths = Callable[[int], np.ndarray]
"""The tokens of each sample of epoch e of a source, in the order of that epoch, (size,)."""


class TokenProportions:
    """Which of k sources the n-th sample comes from, n = 0, 1, 2, …, so that tokens are in proportion.

    The sequence never repeats, as every epoch has an order of its own: to ask for sample n takes 4 bytes and a few
    microseconds for each sample up to it, once.
    """

    def __init__(self, weights: Sequence[float], lengths: Sequence[Lengths]) -> None:
        """
        Arguments:
            weights: as of `finetune.data.mixture.Proportions`.
            lengths: of each source; every sample has a token.
        Raises:
            UserError: as `whole_parts`.
        """
        self.parts = whole_parts(weights)
        self._whole = sum(self.parts)
        self._common = math.lcm(*(part for part in self.parts if part))
        self._scale = [self._common // part if part else 0 for part in self.parts]  # 1 / w_i, in units of all
        self._lengths = [_endless(one) for one in lengths]
        self._turns = Turns(len(self.parts))
        self._total = 0
        self._served = [0] * len(self.parts)  # tokens
        self._waiting = [(0, i) for i, part in enumerate(self.parts) if part]  # by where the next sample may begin
        self._ready: list[tuple[int, int, int]] = []  # by where it would end, with its length

    @property
    def shares(self) -> list[float]:
        """The proportions of tokens; they sum to 1."""
        return [part / self._whole for part in self.parts]

    def sources(self, first: int, stop: int) -> np.ndarray:
        """The sources of samples first ≤ n < stop, (stop − first,) int64."""
        self._extend(stop)
        return self._turns.at(slice(first, stop)) if first < stop else np.empty(0, dtype=np.int64)

    def counts(self, n: int) -> np.ndarray:
        """How many of the first n samples come from each source, (k,) int64."""
        self._extend(n)
        return self._turns.counts(n)

    def _extend(self, stop: int) -> None:
        while len(self._turns) < stop:
            while self._waiting and self._waiting[0][0] * self._whole <= self._total * self._common:
                _, source = heapq.heappop(self._waiting)
                length = next(self._lengths[source])
                heapq.heappush(self._ready, ((self._served[source] + length) * self._scale[source], source, length))
            _, source, length = heapq.heappop(self._ready)
            self._turns.append(source)
            self._served[source] += length
            self._total += length
            heapq.heappush(self._waiting, (self._served[source] * self._scale[source], source))


def _endless(lengths: Lengths) -> Iterator[int]:
    for e in count():
        epoch = lengths(e)
        for begin in range(0, len(epoch), _BLOCK):
            yield from epoch[begin : begin + _BLOCK].tolist()
