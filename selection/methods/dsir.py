"""Importance weights on hashed word uni- and bigrams (DSIR, Xie et al. 2023, arXiv 2302.03169).

A word is a run of letters, digits and underscores, or of other marks, in lower case: nltk's WordPunctTokenizer up to
version 3.9. (Version 3.10 uses another regex engine, which counts combining marks as letters.)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal, Self

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.tokens import text_sums
from flatshift.selection.lazy import np
from flatshift.selection.methods.base import (
    Pool,
    Progress,
    Selector,
    Target,
    check_number,
    keyed_uniform,
    require_field,
)
from flatshift.selection.validation import SelectorContext, check_fields, from_settings

_WORDS = re.compile(r"\w+|[^\w\s]+")
_BATCH = 1024
_CACHED_PAIRS = 1 << 20
"""Maximum number of distinct bigrams whose bucket is cached between batches: about 100 MB."""


@dataclass(frozen=True, kw_only=True)
class DSIR:
    """Importance resampling on hashed word uni- and bigrams (DSIR); score −log weight."""

    kind: Literal["dsir"] = "dsir"
    title: ClassVar[str] = "DSIR"
    needs: ClassVar[tuple[str, ...]] = ("texts",)
    buckets: int = 10_000
    """Hash buckets of the n-gram features."""
    resample: bool = False
    """Add seeded Gumbel noise to the log weights, so that the selection is a draw in proportion to the weights, as in
    the paper; the noise is then part of the score. False: the score is −log weight, the selection its plain top-k."""
    hashing: Literal["fast", "sha256"] = "fast"
    """`sha256` uses the same bucket for every n-gram as PyPI's data-selection (slower); `fast` mixes words' hashes."""
    smoothing: float = 1.0
    """Count added to every bucket of both bags (Laplace). data-selection 1.0.3: 0."""
    floor: float = 0.0
    """Added to every bucket's probability after that. data-selection 1.0.3: 1e-8, which makes every n-gram that a small
    target happens to lack cost about as much as ten that it has."""

    def __post_init__(self) -> None:
        check_fields(self, "buckets", least=1, most=2**32 - 1)
        check_fields(self, "smoothing", "floor", least=0)
        if self.smoothing == self.floor == 0:
            raise ValueError(
                "smoothing and floor are both 0, and a bucket that the target lacks has no logarithm; set one"
            )

    def build(self, around: SelectorContext) -> DSIRSelector:
        return from_settings(DSIRSelector, self, around)


class NgramHasher:
    """Hashed word uni- and bigrams, the same on every machine and in every process.

    Each distinct word is hashed once (BLAKE2b); n-grams are then array arithmetic on the words' 64-bit hashes.
    """

    def __init__(self, buckets: int):
        self.buckets = buckets
        self.narrow = np.dtype(np.uint16 if buckets <= 1 << 16 else np.uint32)
        self._table = _WordHashes()

    def batches(self, texts: Sequence[str], start: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield for each batch of texts the buckets of all their n-grams, text after text, and the number of each
        text's."""
        for low in range(start, len(texts), _BATCH):
            words = [_WORDS.findall(text.lower()) for text in texts[low : low + _BATCH]]
            yield self._ngrams(words)

    def _ngrams(self, words: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
        counts = np.array([len(w) for w in words], dtype=np.int64)
        units, pairs = self._buckets(words, counts)
        # Unigrams first within each text, then its bigrams; a bigram never crosses the border of two texts.
        lengths = np.maximum(2 * counts - 1, 0)
        starts = np.cumsum(lengths) - lengths
        text_of = np.repeat(np.arange(len(words)), counts)
        place = np.arange(len(units)) - (np.cumsum(counts) - counts)[text_of]
        out = np.empty(int(lengths.sum()), dtype=np.int64)
        out[starts[text_of] + place] = units
        inside = _same_text_mask(text_of)
        out[(starts + counts)[text_of[:-1]][inside] + place[:-1][inside]] = pairs
        return out, lengths

    def _buckets(self, words: list[list[str]], counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bucket of every word, and of every pair of neighbours in one text, in reading order."""
        total = int(counts.sum())
        hashes = np.fromiter(map(self._table.__getitem__, chain.from_iterable(words)), dtype=np.uint64, count=total)
        pairs = mix64(mix64(hashes[:-1]) * np.uint64(0x9E3779B97F4A7C15) + hashes[1:])
        inside = _same_text_mask(np.repeat(np.arange(len(words)), counts))
        buckets = np.uint64(self.buckets)
        return mix64(hashes) % buckets, pairs[inside] % buckets


class Sha256Hasher(NgramHasher):
    """Buckets of PyPI's data-selection: SHA-256 of the n-gram's UTF-8 (words joined by a space), as one big-endian
    number, modulo `buckets`. Words are hashed once, bigrams once while they are cached."""

    def __init__(self, buckets: int):
        super().__init__(buckets)
        self._vocabulary = _Vocabulary()
        self._units = np.empty(0, dtype=np.int64)
        self._pairs: dict[int, int] = {}

    def _buckets(self, words: list[list[str]], counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total = int(counts.sum())
        known = self._vocabulary
        numbers = np.fromiter(map(known.__getitem__, chain.from_iterable(words)), dtype=np.int64, count=total)
        if len(known.words) > len(self._units):
            fresh = self._hashed(known.words[len(self._units) :])
            self._units = np.concatenate([self._units, fresh])
        inside = _same_text_mask(np.repeat(np.arange(len(words)), counts))
        keys, back = np.unique((numbers[:-1] << 32 | numbers[1:])[inside], return_inverse=True)
        wanted = keys.tolist()
        found = list(map(self._pairs.get, wanted))
        new = [key for key, bucket in zip(wanted, found, strict=True) if bucket is None]
        if new:
            names = known.words
            fresh = self._hashed([f"{names[key >> 32]} {names[key & 0xFFFFFFFF]}" for key in new])
            if len(self._pairs) + len(new) > _CACHED_PAIRS:
                self._pairs.clear()
            made = dict(zip(new, fresh.tolist(), strict=True))
            self._pairs.update(made)
            found = [made[key] if bucket is None else bucket for key, bucket in zip(wanted, found, strict=True)]
        return self._units[numbers], np.array(found, dtype=np.int64)[back]

    def _hashed(self, grams: list[str]) -> np.ndarray:
        sha256 = hashlib.sha256
        digests = b"".join([sha256(gram.encode("utf-8", "surrogatepass")).digest() for gram in grams])
        limbs = np.frombuffer(digests, dtype=">u4").reshape(-1, 8).astype(np.uint64)
        buckets = np.uint64(self.buckets)
        rest = np.zeros(len(limbs), dtype=np.uint64)
        for limb in limbs.T:  # Horner's rule: 256 bits modulo a number below 2^32, within 64 bits
            rest = ((rest << np.uint64(32)) | limb) % buckets
        return rest.astype(np.int64)


class _WordHashes(dict[str, int]):
    """Table word → 64-bit hash, filled on first use."""

    def __missing__(self, word: str) -> int:
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        value = self[word] = int.from_bytes(digest, "little")
        return value


class _Vocabulary(dict[str, int]):
    """Table word → number in order of appearance; `words` is the inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def __missing__(self, word: str) -> int:
        value = self[word] = len(self.words)
        self.words.append(word)
        return value


def _same_text_mask(text_of: np.ndarray) -> np.ndarray:
    """Return a mask over words except the last: True if the next word is in the same text."""
    return text_of[1:] == text_of[:-1]


def mix64(h: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64: a bijective mixing of 64 bits."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


class DSIRSelector(Selector):
    """Scores by −log w, w = Π p_target(bucket)/p_pool(bucket) over the text's hashed word uni- and bigrams.

    buckets: size of the hashed bag. resample: add Gumbel noise, keyed by seed and id, to log w before negation, so that
    the k smallest scores are a draw without replacement in proportion to w; without it the score is −log w itself.
    smoothing: count added to every bucket of both bags (Laplace). floor: added to every probability after that.
    hashing: "fast" mixes the hashes of words, "sha256" uses the buckets of PyPI's data-selection, whose log weights are
    reproduced with smoothing=0, floor=1e-8. Weights are not divided by length, as in DSIR: drop very short texts
    before. memory_bytes: of n-grams held between the two passes; texts beyond are hashed twice. `log_weights_` holds
    log w in any case.
    """

    def __init__(
        self,
        *,
        buckets: int = 10_000,
        resample: bool = False,
        hashing: str = "fast",
        smoothing: float = 1.0,
        floor: float = 0.0,
        seed: int = 0,
        memory_bytes: int = 1 << 30,
    ):
        self.buckets = buckets
        self.resample = resample
        self.hashing = hashing
        self.smoothing = smoothing
        self.floor = floor
        self.seed = seed
        self.memory_bytes = memory_bytes

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None) -> Self:
        """Compute the log weights; needs texts on both sides."""
        if isinstance(self.buckets, bool) or not isinstance(self.buckets, int) or not 1 <= self.buckets < 1 << 32:
            raise SelectionError(f"buckets must be at least 1 and below 2^32, not {self.buckets!r}")
        if self.hashing not in ("fast", "sha256"):
            raise SelectionError(f'hashing must be "fast" or "sha256", not {self.hashing!r}')
        check_number(self.smoothing, "smoothing", least=0.0)
        check_number(self.floor, "floor", least=0.0)
        if self.smoothing == self.floor == 0:
            raise SelectionError(
                "smoothing and floor are both 0, and a bucket the target lacks has no logarithm; set one"
            )
        pool_texts, target_texts = require_field(pool, target, "texts", "dsir")
        hasher = (NgramHasher if self.hashing == "fast" else Sha256Hasher)(self.buckets)
        wanted = np.zeros(self.buckets)
        for found, _ in hasher.batches(target_texts):
            wanted += np.bincount(found, minlength=self.buckets)
        present = np.zeros(self.buckets)
        kept: list[tuple[np.ndarray, np.ndarray]] = []
        done = remembered = held = 0
        for found, lengths in hasher.batches(pool_texts):
            present += np.bincount(found, minlength=self.buckets)
            done += len(lengths)
            held += len(found) * hasher.narrow.itemsize + lengths.nbytes
            if held <= self.memory_bytes:
                kept.append((found.astype(hasher.narrow), lengths))
                remembered = done
            if progress:
                progress("hashing n-grams", done, len(pool_texts))
        if not wanted.any():
            raise SelectionError("no target text holds a single word; dsir has nothing to compare with")
        gain = self._log_probability(wanted) - self._log_probability(present)
        again = hasher.batches(pool_texts, remembered)
        self.log_weights_ = np.concatenate([text_sums(gain[found], lengths) for found, lengths in chain(kept, again)])
        self.scores_ = -self.log_weights_
        if self.resample:
            # Minus Gumbel noise, as smaller scores are better.
            self.scores_ = self.scores_ + np.log(-np.log(keyed_uniform(pool, self.seed, "dsir gumbel")))
        self.nearest_target_ = None
        self.diagnostics_ = {"ngrams_pool": int(present.sum()), "ngrams_target": int(wanted.sum())}
        return self

    def _log_probability(self, counts: np.ndarray) -> np.ndarray:
        total = max(counts.sum() + self.smoothing * self.buckets, 1e-300)
        return np.log((counts + self.smoothing) / total + self.floor)
