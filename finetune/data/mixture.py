"""Several sources in one stream of samples, in exact proportions, with nothing to remember between steps.

Which source sample n comes from is decided by Tijdeman's rule ("The chairman assignment problem", Discrete Mathematics
32, 1980). With shares w_1 … w_k that sum to 1, and c_i(n) the samples of source i among the first n,

    |c_i(n) − n w_i| ≤ 1 − 1/(2k − 2)   for every n and i,

which no rule can better. (To take the source that lags most behind, as is common, does not keep it under 1.) It is
reached by giving the j-th sample of source i (j = 0, 1, …) a first place, where it is not too early (n w_i − j ≥
1/(2k − 2)), and a last one, before it is late, and by serving the earliest deadline first. Everything is computed in
whole numbers, so it is the same on every machine; the sequence repeats as soon as all n w_i are whole.

Shares of tokens instead of samples are `TokenProportions`.
"""

from __future__ import annotations

import heapq
import math
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
"""Between the weights of two sources: as many samples as a long run has."""
_BLOCK = 1 << 12
"""Places between two counts that are kept."""


def whole_parts(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportions of `weights`.

    Arguments:
        weights: ≥ 0, in any unit; taken as they are written in decimals, so 0.1 is one tenth.
    Raises:
        UserError: a negative weight or one that is no number, none above zero, or two that are too far apart.
    """
    if not all(0 <= weight < math.inf for weight in weights):
        raise UserError(f"data.train.sources: weights must be numbers ≥ 0, got {', '.join(map(str, weights))}")
    if not any(weights):
        raise UserError("data.train.sources: the weights sum to 0, so there is nothing to train on")
    least, most = min(weight for weight in weights if weight), max(weights)
    if least < most / _FARTHEST:
        raise UserError(
            f"data.train.sources: weights {least:g} and {most:g} are more than {_FARTHEST:.0e} times apart, and one of "
            "them would never come; give it weight 0, or more"
        )
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = Fraction(1, math.lcm(*(weight.denominator for weight in exact)))
    whole = [int(weight / unit) for weight in exact]
    common = math.gcd(*whole)
    return [weight // common for weight in whole]


class MixtureSchedule:
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


class Proportions:
    """Which of k sources the n-th sample comes from, n = 0, 1, 2, …"""

    def __init__(self, weights: Sequence[float]) -> None:
        """
        Arguments:
            weights: ≥ 0, in any unit.
        Raises:
            UserError: as `whole_parts`.
        """
        self.parts = whole_parts(weights)
        """Samples of each source in a period."""
        self.period = sum(self.parts)
        self._turns = MixtureSchedule(len(weights))
        self._served = [0] * len(weights)
        self._ready: list[tuple[int, int]] = []
        self._waiting = [(self._release(i, 0), i) for i, part in enumerate(self.parts) if part]
        heapq.heapify(self._waiting)

    @property
    def shares(self) -> list[float]:
        """The proportions; they sum to 1."""
        return [part / self.period for part in self.parts]

    def sources(self, first: int, stop: int) -> np.ndarray:
        """The sources of samples first ≤ n < stop, (stop − first,) int64."""
        if stop <= first:
            return np.empty(0, dtype=np.int64)
        self._extend(min(stop, self.period))
        return self._turns.at(np.arange(first, stop) % self.period)

    def counts(self, n: int) -> np.ndarray:
        """c_i(n): how many of the first n samples come from each source, (k,) int64."""
        rounds, place = divmod(n, self.period)
        self._extend(place)
        return self._turns.counts(place) + rounds * np.array(self.parts)

    @property
    def _slack(self) -> int:
        """2k − 2 over the sources that have a weight; 2 for one alone, where any number does."""
        return max(2 * sum(part > 0 for part in self.parts) - 2, 2)

    def _release(self, source: int, sample: int) -> int:
        """The first n, from 1, with n w − sample ≥ 1/(2k − 2)."""
        slack = self._slack
        return -(-self.period * (sample * slack + 1) // (self.parts[source] * slack))

    def _deadline(self, source: int, sample: int) -> int:
        """The last n with n w − sample ≤ 1 − 1/(2k − 2)."""
        slack = self._slack
        return self.period * ((sample + 1) * slack - 1) // (self.parts[source] * slack)

    def _extend(self, stop: int) -> None:
        for n in range(len(self._turns) + 1, stop + 1):
            while self._waiting and self._waiting[0][0] <= n:
                _, source = heapq.heappop(self._waiting)
                heapq.heappush(self._ready, (self._deadline(source, self._served[source]), source))
            _, source = heapq.heappop(self._ready)
            self._turns.append(source)
            self._served[source] += 1
            heapq.heappush(self._waiting, (self._release(source, self._served[source]), source))


_AT_ONCE = 1 << 12
"""Lengths that are Python numbers at once, ten times as large as in their array."""
Lengths = Callable[[int], np.ndarray]
"""The tokens of each sample of epoch e of a source, in the order of that epoch, (size,)."""


class TokenProportions:
    """Which of k sources the n-th sample comes from, n = 0, 1, 2, …, so that tokens are in proportion.

    Samples are of unlike lengths, so Tijdeman's rule, which counts them, says nothing of tokens. This is WF²Q, which
    shares a line among packets (Bennett & Zhang, "WF²Q: Worst-case Fair Weighted Fair Queueing", INFOCOM 1996). With
    shares w_1 … w_k that sum to 1, T(n) the tokens of the first n samples, c_i(n) those of source i among them, L_i its
    longest sample and L the longest of all,

        −L ≤ c_i(n) − T(n) w_i ≤ (1 − w_i) L_i   for every n and i.

    A sample with S tokens of its source before it may not come before T w_i ≥ S; of those that may, the one comes whose
    end, (S + its length) / w_i, is the earliest. Everything is computed in whole numbers, the same on every machine.

    The sequence never repeats, as every epoch has an order of its own: to ask for sample n takes 4 bytes and a few
    microseconds for each sample up to it, once.
    """

    def __init__(self, weights: Sequence[float], lengths: Sequence[Lengths]) -> None:
        """
        Arguments:
            weights: as of `flatshift.finetune.data.mixture.Proportions`.
            lengths: of each source; every sample has a token.
        Raises:
            UserError: as `whole_parts`.
        """
        self.parts = whole_parts(weights)
        self._whole = sum(self.parts)
        self._common = math.lcm(*(part for part in self.parts if part))
        self._scale = [self._common // part if part else 0 for part in self.parts]  # 1 / w_i, in units of all
        self._lengths = [_endless(one) for one in lengths]
        self._turns = MixtureSchedule(len(self.parts))
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
        for begin in range(0, len(epoch), _AT_ONCE):
            yield from epoch[begin : begin + _AT_ONCE].tolist()


class Epochs:
    """The samples of one source without end: every epoch has them all, in an order of its own."""

    def __init__(self, size: int, seed: int, *names: str) -> None:
        self.size = size
        self._seed, self._names = seed, names
        self._orders: dict[int, np.ndarray] = {}

    def order(self, e: int) -> np.ndarray:
        """The samples of epoch e, (size,) int64: a permutation keyed by derive(seed, "order", *names, e)."""
        if e not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k == e - 1}
            self._orders[e] = numpy_generator(self._seed, "order", *self._names, e).permutation(self.size)
        return self._orders[e]

    def draw(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples first ≤ n < stop and the epoch that each belongs to, both (stop − first,) int64."""
        epochs, places = np.divmod(np.arange(first, stop), self.size)
        drawn = np.empty_like(places)
        for e in range(first // self.size, -(-stop // self.size)):
            low, high = max(e * self.size - first, 0), (e + 1) * self.size - first
            drawn[low:high] = self.order(e)[places[low:high]]
        return drawn, epochs

    def counts(self, n: int) -> np.ndarray:
        """Samples of each source among the first n: here all of one."""
        return np.array([n])

    @property
    def around(self) -> float:
        """After how many samples the first of them comes again, at the earliest on average."""
        return self.size


@dataclass(frozen=True)
class Mixture:
    """How the examples of a stage are made up: those of each source lie one behind another."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    sizes: tuple[int, ...]
    """Examples of each source, at least one."""
    strict: frozenset[str] = frozenset()
    """Sources that may not begin again (`when_over: refuse`)."""
    weigh: Literal["rows", "tokens"] = "rows"
    """What the weights are shares of: samples, or their tokens."""

    def __post_init__(self) -> None:
        """Raises UserError: a source without an example."""
        for name, size in zip(self.names, self.sizes, strict=True):
            if size < 1:
                raise UserError(f"data.train.sources.{name} has no usable row; give it rows, or weight 0")


class Mixed:
    """The samples of a mixture without end. Epochs are those of each source."""

    def __init__(self, mixture: Mixture, seed: int, lengths: np.ndarray | None = None) -> None:
        """
        Arguments:
            lengths: tokens of each example, (N,), where those are weighed.
        Raises:
            UserError: weights that are none.
        """
        self.mixture = mixture
        self._sources = [Epochs(size, seed, name) for name, size in zip(mixture.names, mixture.sizes, strict=True)]
        self._starts = np.concatenate([[0], np.cumsum(mixture.sizes)])
        self._proportions: Proportions | TokenProportions = Proportions(mixture.weights)
        self._means = [1.0] * len(mixture.sizes)
        if mixture.weigh == "tokens":
            assert lengths is not None
            parts = np.split(lengths, self._starts[1:-1])
            self._means = [float(part.mean()) for part in parts]
            ordered = [partial(_ordered, part, source) for part, source in zip(parts, self._sources, strict=True)]
            self._proportions = TokenProportions(mixture.weights, ordered)

    def draw(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """As `Epochs.draw`, over the examples of all sources."""
        source_of = self._proportions.sources(first, stop)
        before = self._proportions.counts(first)
        drawn, epochs = np.empty_like(source_of), np.empty_like(source_of)
        for i, source in enumerate(self._sources):
            mine = np.flatnonzero(source_of == i)
            if len(mine):
                begin = int(before[i])
                drawn[mine], epochs[mine] = source.draw(begin, begin + len(mine))
                drawn[mine] += self._starts[i]
        return drawn, epochs

    def counts(self, n: int) -> np.ndarray:
        """Samples of each source among the first n, (k,) int64."""
        return self._proportions.counts(n)

    @property
    def shares(self) -> list[float]:
        """Each source's share of the samples; where tokens are weighed, on average."""
        rates = [share / mean for share, mean in zip(self._proportions.shares, self._means, strict=True)]
        return [rate / sum(rates) for rate in rates]

    @property
    def around(self) -> float:
        """After how many samples the first source begins again; where tokens are weighed, on average."""
        return min(size / share for size, share in zip(self.mixture.sizes, self.shares, strict=True) if share)


def _ordered(lengths: np.ndarray, source: Epochs, e: int) -> np.ndarray:
    """Tokens of each sample of a source's epoch e, in its order."""
    return np.asarray(lengths[source.order(e)])
