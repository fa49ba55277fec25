"""Mixture of several sources into one stream of samples in exact proportions, without state between steps.

Tijdeman's rule ("The chairman assignment problem", Discrete Mathematics 32, 1980) decides the source of sample n. With
shares w_1 … w_k that sum to 1, and c_i(n) the samples of source i among the first n,

    |c_i(n) − n w_i| ≤ 1 − 1/(2k − 2)   for every n and i,

which is optimal. (The common rule, taking the source that lags most, does not keep it below 1.) The j-th sample of
source i (j = 0, 1, …) gets a release time, before which it would be too early (n w_i − j ≥ 1/(2k − 2)), and a deadline,
after which it is late; the earliest deadline is served first. All arithmetic is on integers, so it is the same on every
machine; the sequence repeats at the smallest n for which all n w_i are integers.

`TokenProportions` mixes by tokens instead of samples.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import count
from typing import Literal

import numpy as np

from ..errors import UserError
from ..seeds import numpy_generator

_FARTHEST = 1e9
"""Maximum ratio of the weights of two sources: as many samples as a long run has."""
_BLOCK = 1 << 12


def to_integer_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the proportions of `weights` (≥ 0, in any unit; read as written in decimals, so
    0.1 is exactly one tenth).

    Raises UserError for a weight that is negative or not a number, no weight above zero, or two that are too far apart.
    """
    if not all(0 <= weight < math.inf for weight in weights):
        raise UserError(f"data.train.sources: weights must be numbers ≥ 0, got {', '.join(map(str, weights))}")
    if not any(weights):
        raise UserError("data.train.sources: the weights sum to 0, so there is nothing to train on")
    minimum, maximum = min(weight for weight in weights if weight), max(weights)
    if minimum < maximum / _FARTHEST:
        raise UserError(
            f"data.train.sources: weights {minimum:g} and {maximum:g} are more than {_FARTHEST:.0e} times apart, and "
            "one of them would never come; give it weight 0, or more"
        )
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = Fraction(1, math.lcm(*(weight.denominator for weight in exact)))
    whole = [int(weight / unit) for weight in exact]
    common = math.gcd(*whole)
    return [weight // common for weight in whole]


class _Proportions(ABC):
    """Source of the n-th sample, n = 0, 1, 2, …, of k sources; 4 bytes per sample."""

    def __init__(self, weights: Sequence[float]) -> None:
        """weights: ≥ 0, in any unit. Raises UserError as `to_integer_weights`."""
        self.parts = to_integer_weights(weights)
        self._total_weight = sum(self.parts)
        self._served = [0] * len(weights)
        self._order = array("i")
        self._blocks = [np.zeros(len(weights), dtype=np.int64)]  # counts before every _BLOCK-th sample

    @property
    def shares(self) -> list[float]:
        """Shares of the sources; they sum to 1."""
        return [part / self._total_weight for part in self.parts]

    @abstractmethod
    def _extend(self, stop: int) -> None:
        """Determine the sources of the first `stop` samples."""

    def sources(self, first: int, stop: int) -> np.ndarray:
        """Return the sources of samples first ≤ n < stop, (stop − first,) int64."""
        if stop <= first:
            return np.empty(0, dtype=np.int64)
        self._extend(stop)
        return np.array(self._order[first:stop], dtype=np.int64)

    def counts(self, n: int) -> np.ndarray:
        """Return the number of samples of each source among the first n, (k,) int64."""
        self._extend(n)
        block = n // _BLOCK
        while len(self._blocks) <= block:
            begin = (len(self._blocks) - 1) * _BLOCK
            self._blocks.append(self._blocks[-1] + self._count(begin, begin + _BLOCK))
        return self._blocks[block] + self._count(block * _BLOCK, n)

    def _count(self, first: int, stop: int) -> np.ndarray:
        return np.bincount(np.array(self._order[first:stop], dtype=np.int64), minlength=len(self.parts))


class SampleProportions(_Proportions):
    """Sources in proportions of samples, with the period Σ parts."""

    def __init__(self, weights: Sequence[float]) -> None:
        super().__init__(weights)
        self.period = self._total_weight
        self._ready: list[tuple[int, int]] = []
        # 2k − 2 for k sources with nonzero weight; 2 for a single source, for which any value works
        self._slack = max(2 * sum(part > 0 for part in self.parts) - 2, 2)
        self._waiting = [(self._release(i, 0), i) for i, part in enumerate(self.parts) if part]
        heapq.heapify(self._waiting)

    def sources(self, first: int, stop: int) -> np.ndarray:
        if stop <= first:
            return np.empty(0, dtype=np.int64)
        self._extend(min(stop, self.period))
        return np.frombuffer(self._order, dtype=np.intc)[np.arange(first, stop) % self.period].astype(np.int64)

    def counts(self, n: int) -> np.ndarray:
        rounds, remainder = divmod(n, self.period)
        return super().counts(remainder) + rounds * np.array(self.parts)

    def _release(self, source: int, sample: int) -> int:
        """Return the first n, from 1, with n w − sample ≥ 1/(2k − 2)."""
        return -(-self.period * (sample * self._slack + 1) // (self.parts[source] * self._slack))

    def _deadline(self, source: int, sample: int) -> int:
        """Return the last n with n w − sample ≤ 1 − 1/(2k − 2)."""
        return self.period * ((sample + 1) * self._slack - 1) // (self.parts[source] * self._slack)

    def _extend(self, stop: int) -> None:
        for n in range(len(self._order) + 1, stop + 1):
            while self._waiting and self._waiting[0][0] <= n:
                _, source = heapq.heappop(self._waiting)
                heapq.heappush(self._ready, (self._deadline(source, self._served[source]), source))
            _, source = heapq.heappop(self._ready)
            self._order.append(source)
            self._served[source] += 1
            heapq.heappush(self._waiting, (self._release(source, self._served[source]), source))


_AT_ONCE = 1 << 12
"""Lengths converted to Python integers at a time; these take ten times the memory of the array."""
Lengths = Callable[[int], np.ndarray]
"""Function that returns the tokens of each sample of a source's epoch e, in the order of that epoch, (size,)."""


class TokenProportions(_Proportions):
    """Sources in proportions of tokens.

    Samples differ in length, so Tijdeman's rule, which counts samples, does not control tokens. This is WF²Q, a rule
    for sharing a network link among packets (Bennett & Zhang, "WF²Q: Worst-case Fair Weighted Fair Queueing", INFOCOM
    1996). With shares w_1 … w_k that sum to 1, T(n) the tokens of the first n samples, c_i(n) those of source i among
    them, L_i its longest sample and L the longest of all,

        −L ≤ c_i(n) − T(n) w_i ≤ (1 − w_i) L_i   for every n and i.

    A sample with S tokens of its source before it is eligible once T w_i ≥ S; of the eligible ones, the one with the
    smallest end (S + its length) / w_i is next. All arithmetic is on integers, the same on every machine.

    The sequence never repeats, because every epoch has its own order: reaching sample n takes 4 bytes and a few
    microseconds for each sample before it, once.
    """

    def __init__(self, weights: Sequence[float], lengths: Sequence[Lengths]) -> None:
        """lengths: of each source; every sample has at least one token. Raises UserError as `to_integer_weights`."""
        super().__init__(weights)
        self._common = math.lcm(*(part for part in self.parts if part))
        self._scale = [self._common // part if part else 0 for part in self.parts]  # 1 / w_i in integer units
        self._lengths = [_iter_lengths(epoch_lengths) for epoch_lengths in lengths]
        self._total = 0
        # (T at which the next sample becomes eligible, source); times are scaled to integers
        self._waiting = [(0, i) for i, part in enumerate(self.parts) if part]
        self._ready: list[tuple[int, int, int]] = []  # (end of the sample, source, its length)

    def _extend(self, stop: int) -> None:
        while len(self._order) < stop:
            while self._waiting and self._waiting[0][0] * self._total_weight <= self._total * self._common:
                _, source = heapq.heappop(self._waiting)
                length = next(self._lengths[source])
                heapq.heappush(self._ready, ((self._served[source] + length) * self._scale[source], source, length))
            _, source, length = heapq.heappop(self._ready)
            self._order.append(source)
            self._served[source] += length
            self._total += length
            heapq.heappush(self._waiting, (self._served[source] * self._scale[source], source))


def _iter_lengths(lengths: Lengths) -> Iterator[int]:
    for e in count():
        epoch = lengths(e)
        for begin in range(0, len(epoch), _AT_ONCE):
            yield from epoch[begin : begin + _AT_ONCE].tolist()


class EpochSampler:
    """Endless samples of one source: every epoch has all of them, in its own order."""

    def __init__(self, size: int, seed: int, *names: str) -> None:
        self.size = size
        self._seed, self._names = seed, names
        self._orders: dict[int, np.ndarray] = {}

    def order(self, e: int) -> np.ndarray:
        """Return the samples of epoch e, (size,) int64: a permutation keyed by derive(seed, "order", *names, e)."""
        if e not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k == e - 1}
            self._orders[e] = numpy_generator(self._seed, "order", *self._names, e).permutation(self.size)
        return self._orders[e]

    def draw(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return samples first ≤ n < stop and the epoch of each, both (stop − first,) int64."""
        epochs, positions = np.divmod(np.arange(first, stop), self.size)
        samples = np.empty_like(positions)
        for e in range(first // self.size, -(-stop // self.size)):
            low, high = max(e * self.size - first, 0), (e + 1) * self.size - first
            samples[low:high] = self.order(e)[positions[low:high]]
        return samples, epochs

    def counts(self, n: int) -> np.ndarray:
        """Return the number of samples of each source among the first n: all of the only one."""
        return np.array([n])

    @property
    def epoch_size(self) -> float:
        return self.size


@dataclass(frozen=True)
class Mixture:
    """Composition of a stage's examples, which are concatenated by source."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    sizes: tuple[int, ...]
    """Number of examples of each source, at least one; else UserError."""
    strict: frozenset[str] = frozenset()
    """Sources that must not start a second epoch (`when_over: refuse`)."""
    weigh: Literal["rows", "tokens"] = "rows"
    """Unit of the weights: samples, or their tokens."""

    def __post_init__(self) -> None:
        for name, size in zip(self.names, self.sizes, strict=True):
            if size < 1:
                raise UserError(f"data.train.sources.{name} has no usable row; give it rows, or weight 0")


class MixtureSampler:
    """Endless samples of a mixture; each source has its own epochs."""

    def __init__(self, mixture: Mixture, seed: int, lengths: np.ndarray | None = None) -> None:
        """lengths: tokens of each example, (N,), if weights are shares of tokens. Raises UserError for invalid
        weights."""
        self.mixture = mixture
        self._sources = [
            EpochSampler(size, seed, name) for name, size in zip(mixture.names, mixture.sizes, strict=True)
        ]
        self._starts = np.concatenate([[0], np.cumsum(mixture.sizes)])
        self._proportions: SampleProportions | TokenProportions = SampleProportions(mixture.weights)
        self._means = [1.0] * len(mixture.sizes)
        if mixture.weigh == "tokens":
            assert lengths is not None
            parts = np.split(lengths, self._starts[1:-1])
            self._means = [float(part.mean()) for part in parts]
            ordered = [partial(_epoch_lengths, part, source) for part, source in zip(parts, self._sources, strict=True)]
            self._proportions = TokenProportions(mixture.weights, ordered)

    def draw(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return samples and epochs as `EpochSampler.draw`, over the examples of all sources."""
        source_of = self._proportions.sources(first, stop)
        counts = self._proportions.counts(first)
        samples, epochs = np.empty_like(source_of), np.empty_like(source_of)
        for i, source in enumerate(self._sources):
            own = np.flatnonzero(source_of == i)
            if len(own):
                begin = int(counts[i])
                samples[own], epochs[own] = source.draw(begin, begin + len(own))
                samples[own] += self._starts[i]
        return samples, epochs

    def counts(self, n: int) -> np.ndarray:
        """Return the number of samples of each source among the first n, (k,) int64."""
        return self._proportions.counts(n)

    @property
    def shares(self) -> list[float]:
        """Each source's share of the samples; on average if weights are shares of tokens."""
        rates = [share / mean for share, mean in zip(self._proportions.shares, self._means, strict=True)]
        return [rate / sum(rates) for rate in rates]

    @property
    def epoch_size(self) -> float:
        """Number of samples until the first source starts its second epoch; on average if weights are shares of
        tokens."""
        return min(size / share for size, share in zip(self.mixture.sizes, self.shares, strict=True) if share)


def _epoch_lengths(lengths: np.ndarray, source: EpochSampler, e: int) -> np.ndarray:
    return np.asarray(lengths[source.order(e)])
