"""Importance weights on hashed word uni- and bigrams (DSIR, Xie et al. 2023, arXiv 2302.03169).

A word is a run of letters, digits and underscores, or of other marks, in lower case: nltk's WordPunctTokenizer up to
version 3.9. (Version 3.10 uses another regex engine, which counts combining marks as letters.)
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.tokens import text_sums
from flatshift.selection.hashing import WordHashes, mix64
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import MethodSettings, Pool, Progress, Selector, Target
from flatshift.selection.shards import Arrays, Shard, ShardMap
from flatshift.selection.validation import bounded

_WORDS = re.compile(r"\w+|[^\w\s]+")
_BATCH = 1024
_CACHED_PAIRS = 1 << 20  # maximum number of distinct bigrams whose bucket is cached between batches: about 100 MB


@dataclass(frozen=True, kw_only=True)
class DSIR(MethodSettings):
    """Importance resampling on hashed word uni- and bigrams (DSIR); score −log weight."""

    kind: Literal["dsir"] = "dsir"
    title: ClassVar[str] = "DSIR"
    needs: ClassVar[tuple[str, ...]] = ("texts",)
    buckets: int = bounded(10_000, minimum=1, maximum=2**32 - 1)
    """Hash buckets of the n-gram features."""
    resample: bool = False
    """Add seeded Gumbel noise to the log weights, so that the selection is a draw in proportion to the weights, as in
    the paper; the noise is then part of the score. False: the score is −log weight, the selection its plain top-k."""
    hashing: Literal["fast", "sha256"] = "fast"
    """`sha256` uses the same bucket for every n-gram as PyPI's data-selection (slower); `fast` mixes words' hashes."""
    smoothing: float = bounded(1.0, minimum=0)
    """Count added to every bucket of both bags (Laplace). data-selection 1.0.3: 0."""
    floor: float = bounded(0.0, minimum=0)
    """Added to every bucket's probability after that. data-selection 1.0.3: 1e-8, which makes every n-gram that a small
    target happens to lack cost about as much as ten that it has."""

    def check(self) -> None:
        super().check()
        if self.smoothing == self.floor == 0:
            raise SelectionError(
                "smoothing and floor are both 0, and a bucket that the target lacks has no logarithm; set one"
            )


class NgramHasher:
    """Hashed word uni- and bigrams, the same on every machine and in every process.

    Each distinct word is hashed once (BLAKE2b); n-grams are then array arithmetic on the words' 64-bit hashes.
    """

    def __init__(self, buckets: int):
        self.buckets = buckets
        self.narrow = np.dtype(np.uint16 if buckets <= 1 << 16 else np.uint32)
        self._hashes = WordHashes()

    def batches(self, texts: Sequence[str], start: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield for each batch the buckets of all n-grams, text after text, and the number of each text's."""
        for low in range(start, len(texts), _BATCH):
            words = [_WORDS.findall(text.lower()) for text in texts[low : low + _BATCH]]
            counts = np.array([len(text) for text in words], dtype=np.int64)
            text_of = np.repeat(np.arange(len(words)), counts)
            has_next = text_of[1:] == text_of[:-1]  # a bigram never crosses the border of two texts
            unigrams, bigrams = self._buckets(words, has_next)
            # Unigrams first within each text, then its bigrams.
            lengths = np.maximum(2 * counts - 1, 0)
            starts = np.cumsum(lengths) - lengths
            position = np.arange(len(unigrams)) - (np.cumsum(counts) - counts)[text_of]
            ngrams = np.empty(int(lengths.sum()), dtype=np.int64)
            ngrams[starts[text_of] + position] = unigrams
            ngrams[(starts + counts)[text_of[:-1]][has_next] + position[:-1][has_next]] = bigrams
            yield ngrams, lengths

    def _buckets(self, words: list[list[str]], has_next: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bucket of every word, and of every pair of a word that `has_next` in its text with the next."""
        hashes, _ = self._hashes.codes(words)
        pairs = mix64(mix64(hashes[:-1]) * np.uint64(0x9E3779B97F4A7C15) + hashes[1:])
        buckets = np.uint64(self.buckets)
        return mix64(hashes) % buckets, pairs[has_next] % buckets


class Sha256Hasher(NgramHasher):
    """Buckets of PyPI's data-selection: SHA-256 of the n-gram's UTF-8 (words joined by a space), as one big-endian
    number, modulo `buckets`. Words are hashed once, bigrams once while they are cached."""

    def __init__(self, buckets: int):
        super().__init__(buckets)
        self._vocabulary = _Vocabulary()
        self._unigrams = np.empty(0, dtype=np.int64)
        self._bigrams: dict[int, int] = {}

    def _buckets(self, words: list[list[str]], has_next: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        vocabulary = self._vocabulary
        numbers = np.fromiter(map(vocabulary.__getitem__, chain.from_iterable(words)), dtype=np.int64)
        if len(vocabulary.words) > len(self._unigrams):
            self._unigrams = np.concatenate([self._unigrams, self._hash(vocabulary.words[len(self._unigrams) :])])
        keys, inverse = np.unique((numbers[:-1] << 32 | numbers[1:])[has_next], return_inverse=True)
        pairs = keys.tolist()
        # One dict lookup per pair; the cache may be cleared before the new ones are added.
        buckets = {pair: self._bigrams.get(pair, -1) for pair in pairs}
        new = [pair for pair, bucket in buckets.items() if bucket < 0]
        if new:
            names = vocabulary.words
            hashed = self._hash([f"{names[pair >> 32]} {names[pair & 0xFFFFFFFF]}" for pair in new])
            if len(self._bigrams) + len(new) > _CACHED_PAIRS:
                self._bigrams.clear()
            self._bigrams.update(zip(new, hashed.tolist(), strict=True))
            buckets.update(zip(new, hashed.tolist(), strict=True))
        return self._unigrams[numbers], np.fromiter(buckets.values(), np.int64, len(pairs))[inverse]

    def _hash(self, ngrams: list[str]) -> np.ndarray:
        """Return the bucket of each n-gram, (n,) int64."""
        digests = b"".join([hashlib.sha256(ngram.encode("utf-8", "surrogatepass")).digest() for ngram in ngrams])
        limbs = np.frombuffer(digests, dtype=">u4").reshape(-1, 8).astype(np.uint64)
        buckets = np.uint64(self.buckets)
        remainder = np.zeros(len(limbs), dtype=np.uint64)
        for limb in limbs.T:  # Horner's rule: 256 bits modulo a number below 2^32, within 64 bits
            remainder = ((remainder << np.uint64(32)) | limb) % buckets
        return remainder.astype(np.int64)


class _Vocabulary(dict[str, int]):
    """Table word → number in order of appearance; `words` is the inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def __missing__(self, word: str) -> int:
        value = self[word] = len(self.words)
        self.words.append(word)
        return value


class DSIRSelector(Selector, DSIR):
    """Scores by −log w, w = Π p_target(bucket)/p_pool(bucket) over the text's hashed word uni- and bigrams.

    resample: add Gumbel noise, keyed by seed and id, to log w before negation, so that the k smallest scores are a draw
    without replacement in proportion to w. hashing: "sha256" uses the buckets of PyPI's data-selection, whose log
    weights are reproduced with smoothing=0, floor=1e-8. Weights are not divided by length, as in DSIR: drop very short
    texts before. memory_bytes: of n-grams cached between the two passes; texts beyond are hashed twice. `log_weights_`
    holds log w in any case. Needs texts on both sides.
    """

    seed: int = 0
    memory_bytes: int = 1 << 30

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        pool_texts, target_texts = self._sides(pool, target)
        hasher = _build_hasher(self.hashing, self.buckets)
        target_counts = np.zeros(self.buckets)
        for ngrams, _ in hasher.batches(target_texts):
            target_counts += np.bincount(ngrams, minlength=self.buckets)
        if not target_counts.any():
            raise SelectionError("no target text holds a single word; dsir has nothing to compare with")
        if pool.shards is None:
            pool_counts = self._weigh_texts(pool_texts, hasher, target_counts, progress)
        else:
            pool_counts = self._weigh_shards(pool.shards, target_counts)
        self.scores_ = -self.log_weights_
        if self.resample:
            # Minus Gumbel noise, as smaller scores are better.
            self.scores_ = self.scores_ + np.log(-np.log(pool.draw(self.seed, "dsir gumbel")))
        self.diagnostics_ = {"ngrams_pool": int(pool_counts.sum()), "ngrams_target": int(target_counts.sum())}

    def _weigh_texts(
        self, texts: Sequence[str], hasher: NgramHasher, target_counts: np.ndarray, progress: Progress
    ) -> np.ndarray:
        """Set `log_weights_` and return the pool's count of every bucket."""
        pool_counts = np.zeros(self.buckets)
        cache: list[tuple[np.ndarray, np.ndarray]] = []
        done = cached_texts = cache_bytes = 0
        for ngrams, lengths in hasher.batches(texts):
            pool_counts += np.bincount(ngrams, minlength=self.buckets)
            done += len(lengths)
            cache_bytes += len(ngrams) * hasher.narrow.itemsize + lengths.nbytes
            if cache_bytes <= self.memory_bytes:
                cache.append((ngrams.astype(hasher.narrow), lengths))
                cached_texts = done
            progress("hashing n-grams", done, len(texts))
        gain = self._log_probability(target_counts) - self._log_probability(pool_counts)
        batches = chain(cache, hasher.batches(texts, cached_texts))
        self.log_weights_ = np.concatenate([text_sums(gain[ngrams], lengths) for ngrams, lengths in batches])
        return pool_counts

    def _weigh_shards(self, shards: ShardMap, target_counts: np.ndarray) -> np.ndarray:
        """Do the same as `_weigh_texts` by shards, whose n-grams are stored between the two passes."""
        counted = shards("n-grams", functools.partial(_count_ngrams, hashing=self.hashing, buckets=self.buckets))
        pool_counts = sum((part["counts"] for part in counted), np.zeros(self.buckets))
        gain = self._log_probability(target_counts) - self._log_probability(pool_counts)
        weighed = shards("weights", _sum_gains, inputs={"gain": gain}, earlier=counted)
        self.log_weights_ = np.concatenate([part["log_weights"] for part in weighed])
        return pool_counts

    def _log_probability(self, counts: np.ndarray) -> np.ndarray:
        total = max(counts.sum() + self.smoothing * self.buckets, 1e-300)
        return np.log((counts + self.smoothing) / total + self.floor)


def _build_hasher(hashing: str, buckets: int) -> NgramHasher:
    return NgramHasher(buckets) if hashing == "fast" else Sha256Hasher(buckets)


_shard_hasher = functools.cache(_build_hasher)
"""Hasher of a process' shards, which share its table of words."""


def _count_ngrams(shard: Shard, *, hashing: str, buckets: int) -> Arrays:
    """Return the buckets of a shard's n-grams, the number of each text's, and the count of every bucket."""
    hasher = _shard_hasher(hashing, buckets)
    counts = np.zeros(buckets)
    every = [np.empty(0, hasher.narrow)]
    lengths = [np.empty(0, np.int64)]
    for ngrams, some_lengths in hasher.batches(shard.texts):
        counts += np.bincount(ngrams, minlength=buckets)
        every.append(ngrams.astype(hasher.narrow))
        lengths.append(some_lengths)
    return {"counts": counts, "ngrams": np.concatenate(every), "lengths": np.concatenate(lengths)}


def _sum_gains(shard: Shard) -> Arrays:
    """Return the log weight of each text of a shard that `_count_ngrams` counted."""
    gain, ngrams, lengths = np.asarray(shard.inputs["gain"]), shard.earlier["ngrams"], shard.earlier["lengths"]
    ends = np.cumsum(lengths)
    sums = [np.empty(0)]
    for low in range(0, len(lengths), _BATCH):
        some_lengths = np.asarray(lengths[low : low + _BATCH])
        some = ngrams[int(ends[low] - lengths[low]) : int(ends[min(low + _BATCH, len(ends)) - 1])]
        sums.append(text_sums(gain[some], some_lengths))
    return {"log_weights": np.concatenate(sums)}
