"""Importance weights on hashed word n-grams (DSIR, Xie et al. 2023, arXiv 2302.03169)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Self

import numpy as np

from selection.errors import SelectionError
from selection.methods.base import Pool, Progress, Selector, Target, keyed_uniform, need

_WORDS = re.compile(r"\w+|[^\w\s]+")
_BATCH = 2048


class DSIRSelector(Selector):
    """Scores by −log w, w = Π p_target(bucket)/p_pool(bucket) over the text's hashed word uni- and bigrams.

    buckets: size of the hashed bag. resample: add Gumbel noise, fixed by seed and id, to log w before it is negated
    into the score, so that the k smallest scores are a draw without replacement in proportion to w; without it the
    score is −log w itself. smoothing: count added to every bucket of both bags (Laplace). Weights are not divided by
    length, as in DSIR: drop very short texts before. `log_weights_` holds log w in either case.
    """

    def __init__(self, *, buckets: int = 10_000, resample: bool = False, smoothing: float = 1.0, seed: int = 0):
        self.buckets = buckets
        self.resample = resample
        self.smoothing = smoothing
        self.seed = seed

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Needs texts on both sides."""
        if self.buckets < 1:
            raise SelectionError(f"buckets must be at least 1, not {self.buckets}")
        if not self.smoothing > 0:
            raise SelectionError(f"smoothing must be above 0, not {self.smoothing}")
        pool_texts, target_texts = need(pool, target, "texts", "dsir")
        hasher = NgramHasher(self.buckets)
        wanted = np.zeros(self.buckets)
        for found, _ in hasher.batches(target_texts):
            wanted += np.bincount(found, minlength=self.buckets)
        present = np.zeros(self.buckets)
        kept = []
        done = 0
        for found, lengths in hasher.batches(pool_texts):
            present += np.bincount(found, minlength=self.buckets)
            kept.append((found.astype(hasher.narrow), lengths))
            done += len(lengths)
            if progress:
                progress("hashing n-grams", done, len(pool_texts))
        if not wanted.any():
            raise SelectionError("no target text holds a single word; dsir has nothing to compare with")
        gain = self._log_probability(wanted) - self._log_probability(present)
        self.log_weights_ = np.concatenate([_sums(gain[found], lengths) for found, lengths in kept])
        self.scores_ = -self.log_weights_
        if self.resample:
            self.scores_ = self.scores_ + np.log(-np.log(keyed_uniform(pool, self.seed, "dsir gumbel")))
        self.nearest_target_ = None
        self.diagnostics_ = {"ngrams_pool": int(present.sum()), "ngrams_target": int(wanted.sum())}
        return self

    def _log_probability(self, counts: np.ndarray) -> np.ndarray:
        return np.log(counts + self.smoothing) - np.log(counts.sum() + self.smoothing * self.buckets)


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum of each consecutive run of `lengths` values, 0 for an empty run; a run's sum does not see its neighbours."""
    return np.bincount(np.repeat(np.arange(len(lengths)), lengths), weights=values, minlength=len(lengths))


class NgramHasher:
    """Hashed word uni- and bigrams, the same on every machine and in every process.

    A word is a run of letters, digits and underscores, or of other marks, in lower case. Each distinct word is hashed
    once (BLAKE2b); n-grams are then array arithmetic on the words' 64-bit hashes.
    """

    def __init__(self, buckets: int):
        self.buckets = np.uint64(buckets)
        self.narrow = np.uint16 if buckets <= 1 << 16 else np.uint32 if buckets <= 1 << 32 else np.uint64
        self._table = _WordHashes()

    def batches(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each batch of texts: the buckets of all their n-grams, text after text, and how many each text has."""
        for low in range(0, len(texts), _BATCH):
            words = [_WORDS.findall(text.lower()) for text in texts[low : low + _BATCH]]
            yield self._ngrams(words)

    def _ngrams(self, words: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
        counts = np.array([len(w) for w in words], dtype=np.int64)
        total = int(counts.sum())
        hashes = np.fromiter(map(self._table.__getitem__, chain.from_iterable(words)), dtype=np.uint64, count=total)
        # Unigrams first within each text, then its bigrams; a bigram never crosses the border of two texts.
        lengths = np.maximum(2 * counts - 1, 0)
        starts = np.cumsum(lengths) - lengths
        text_of = np.repeat(np.arange(len(words)), counts)
        place = np.arange(total) - (np.cumsum(counts) - counts)[text_of]
        out = np.empty(int(lengths.sum()), dtype=np.int64)
        out[starts[text_of] + place] = _mix(hashes) % self.buckets
        if total > 1:
            inside = text_of[1:] == text_of[:-1]
            pair = _mix(_mix(hashes[:-1]) * np.uint64(0x9E3779B97F4A7C15) + hashes[1:])
            out[(starts + counts)[text_of[:-1]][inside] + place[:-1][inside]] = (pair % self.buckets)[inside]
        return out, lengths


class _WordHashes(dict[str, int]):
    """word → 64-bit hash, filled on first use."""

    def __missing__(self, word: str) -> int:
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        value = self[word] = int.from_bytes(digest, "little")
        return value


def _mix(h: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: spreads 64 bits over 64 bits, one to one."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))
