"""Trigram language models over token ids: interpolated modified Kneser–Ney (Chen and Goodman 1998, TR-10-98).

Counting is streaming: the distinct trigrams of every chunk of texts are sorted and merged into runs of doubling size,
as a 64-bit key and a count each. If a model would exceed its memory, the rarest trigrams are dropped, by the same rule
everywhere. All probabilities are array arithmetic over sorted keys; tests have the naive reference.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.tokens import TokenRows

MAX_TOKENS = (1 << 21) - 2  # maximum vocabulary size: three tokens make a key of 63 bits
ROW_BYTES = 40  # memory of one distinct trigram while runs are merged and the model is built


def check_vocabulary(size: int) -> int:
    """Return `size` if three tokens of it fit a key. Raises SelectionError."""
    if size > MAX_TOKENS:
        raise SelectionError(f"a vocabulary of {size:,} tokens is more than the {MAX_TOKENS:,} of a trigram's key")
    return size


def trigram_keys(flat: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
    """Return (T,) uint64: for each token the key of (the two tokens before it, itself); a text begins after two tokens
    `size`."""
    bits = np.uint64(size.bit_length())
    position = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    tokens = flat.astype(np.uint64)
    border = np.uint64(size)
    before = np.where(position >= 1, np.roll(tokens, 1), border)
    earlier = np.where(position >= 2, np.roll(tokens, 2), border)
    return np.asarray((earlier << (bits + bits)) | (before << bits) | tokens)


class TrigramCounts:
    """Distinct trigrams of any number of texts with their counts, in bounded memory.

    maximum: number of distinct trigrams; above it, those seen `dropped` times or less so far are dropped.
    """

    def __init__(self, size: int, maximum: int = 1 << 26):
        self.size, self.maximum = check_vocabulary(size), maximum
        self.tokens = self.dropped = 0
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, flat: np.ndarray, lengths: np.ndarray) -> None:
        """Count the trigrams of some texts."""
        if not len(flat):
            return
        self.add_counts(*np.unique(trigram_keys(flat, lengths, self.size), return_counts=True), len(flat))

    def add_counts(self, keys: np.ndarray, counts: np.ndarray, tokens: int) -> None:
        """Add distinct trigrams, ascending, and their counts in `tokens` tokens."""
        self.tokens += tokens
        self._push(np.asarray(keys), np.asarray(counts))

    def add_all(self, rows: TokenRows) -> TrigramCounts:
        """Count all texts of `rows`; return self."""
        for _, flat, lengths in rows.parts():
            self.add(flat, lengths)
        return self

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys in ascending order (uint64) and their counts (uint32)."""
        while len(self._runs) > 1:
            self._push(*self._runs.pop())
            if len(self._runs) > 1:
                last = self._runs.pop()
                self._runs[-1] = _merge_counts(self._runs[-1], last)
        return self._runs[0] if self._runs else (np.empty(0, np.uint64), np.empty(0, np.uint32))

    def _push(self, keys: np.ndarray, counts: np.ndarray) -> None:
        run = (keys, counts.astype(np.uint32))
        while self._runs and len(self._runs[-1][0]) <= 2 * len(run[0]):
            run = _merge_counts(self._runs.pop(), run)
        self._runs.append(run)
        while sum(len(keys) for keys, _ in self._runs) > self.maximum:
            if len(self._runs) > 1:
                self._runs[-2:] = [_merge_counts(*self._runs[-2:])]
                continue
            self.dropped += 1
            keys, counts = self._runs[0]
            frequent = counts > self.dropped
            self._runs = [(keys[frequent], counts[frequent])]


def _merge_counts(
    left: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    keys = np.concatenate([left[0], right[0]])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = _run_starts(keys)
    counts = np.add.reduceat(np.concatenate([left[1], right[1]])[order], starts) if len(keys) else right[1]
    return keys[starts], counts.astype(np.uint32)


def _run_starts(ordered: np.ndarray) -> np.ndarray:
    """Return the start of each run of equal values."""
    return np.flatnonzero(np.concatenate([np.ones(min(len(ordered), 1), bool), ordered[1:] != ordered[:-1]]))


class KneserNey:
    """Model p(w | u v) of a table of trigram counts, backing off to continuation counts of pairs and single tokens, and
    from these to the uniform distribution over `size` tokens.

    keys, counts: from `TrigramCounts.table`. A model of no text at all is uniform.
    """

    def __init__(self, keys: np.ndarray, counts: np.ndarray, size: int):
        self.size = size
        self._bits = np.uint64(size.bit_length())
        self._mask = np.uint64((1 << int(self._bits)) - 1)
        pair_mask = (self._mask << self._bits) | self._mask
        self._keys = keys
        self._contexts, self._shares, self._rests = _discount_by_context(keys >> self._bits, counts)
        pairs = np.sort(keys & pair_mask)
        starts = _run_starts(pairs)
        followed = np.diff(starts, append=len(pairs))
        self._pairs = pairs[starts]
        pair_contexts, self._pair_shares, rests = _discount_by_context(self._pairs >> self._bits, followed)
        self._pair_rests = np.ones(size + 1)
        self._pair_rests[pair_contexts.astype(np.int64)] = rests
        words = np.sort(self._pairs & self._mask)
        starts = _run_starts(words)
        _, shares, rests = _discount_by_context(np.zeros(len(starts), np.uint64), np.diff(starts, append=len(words)))
        self._single = np.full(size, (rests[0] if len(rests) else 1.0) / size)
        self._single[words[starts].astype(np.int64)] += shares

    @classmethod
    def of(cls, rows: TokenRows, maximum: int = 1 << 26) -> KneserNey:
        """Build the model of some texts; maximum: as in `TrigramCounts`."""
        return cls(*TrigramCounts(rows.size, maximum).add_all(rows).table(), rows.size)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the model as arrays, for `restore`."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    @classmethod
    def restore(cls, arrays: Mapping[str, np.ndarray], size: int) -> KneserNey:
        """Return the model over `size` tokens that has these `arrays`."""
        model = cls(np.empty(0, np.uint64), np.empty(0, np.uint32), size)
        vars(model).update(arrays)
        return model

    @property
    def ngrams(self) -> int:
        """Number of distinct trigrams in the model."""
        return len(self._keys)

    def probability(self, keys: np.ndarray) -> np.ndarray:
        """Return the probabilities (n,) float64 of trigram keys; fastest for sorted keys."""
        pairs = keys & ((self._mask << self._bits) | self._mask)
        words = (keys & self._mask).astype(np.int64)
        context = ((keys >> self._bits) & self._mask).astype(np.int64)
        lower = _look_up(self._pairs, pairs, self._pair_shares, 0.0) + self._pair_rests[context] * self._single[words]
        backoff = _look_up(self._contexts, keys >> self._bits, self._rests, 1.0)
        return np.asarray(_look_up(self._keys, keys, self._shares, 0.0) + backoff * lower)


def _discount_by_context(contexts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Discount counts grouped by ascending context.

    Returns the contexts, each entry's discounted share of its context, and each context's mass for the lower order.
    """
    if not len(counts):
        return np.empty(0, np.uint64), np.empty(0), np.empty(0)
    discount = kneser_ney_discounts(np.bincount(np.minimum(counts, 5).astype(np.int64), minlength=6))
    discounts = discount[np.minimum(counts, 3)]
    starts = _run_starts(contexts)
    total = np.add.reduceat(counts.astype(np.float64), starts)
    sizes = np.diff(starts, append=len(contexts))
    shares = (counts - discounts) / np.repeat(total, sizes)
    return contexts[starts], shares, np.add.reduceat(discounts, starts) / total


def kneser_ney_discounts(spectrum: np.ndarray) -> np.ndarray:
    """Return (4,) discounts of counts of 0, 1, 2 and 3 or more; spectrum[c]: number of entries with the count c.

    Chen and Goodman's estimates; if the spectrum is too thin for one (few texts), half of the count.
    """
    n1, n2, n3, n4 = (float(spectrum[c]) for c in range(1, 5))
    y = n1 / (n1 + 2.0 * n2) if n1 + n2 > 0 else 0.5
    raw = [1.0 - 2.0 * y * n2 / n1 if n1 else 0.5]
    raw.append(2.0 - 3.0 * y * n3 / n2 if n2 else 1.0)
    raw.append(3.0 - 4.0 * y * n4 / n3 if n3 else 1.5)
    return np.array([0.0, *(value if 0.0 < value < c else c / 2.0 for c, value in enumerate(raw, start=1))])


def _look_up(table: np.ndarray, keys: np.ndarray, values: np.ndarray, default: float) -> np.ndarray:
    """Return the value of each key that the ascending table holds, `default` for the others."""
    if not len(table):
        return np.full(len(keys), default)
    index = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[index] == keys, values[index], default)
