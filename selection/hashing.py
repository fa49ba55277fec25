"""Hashes of words and of shingles, runs of `size` characters or words. Array arithmetic, no Python loop.

The same text has the same hashes on every machine and in every process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal

from flatshift.selection.lazy import np

WORDS = re.compile(r"\w+")
_BASE = 0x9E3779B97F4A7C15
_TILE = 1 << 15


def mix64(h: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64: a bijective mixing of 64 bits."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


class WordHashes(dict[str, int]):
    """Table word → number below 2^64, of its UTF-8 by `hash_word` (None: 64-bit BLAKE2b), filled on first use and
    cleared before it exceeds about 100 MB."""

    limit = 1 << 20

    def __init__(self, hash_word: Callable[[bytes], int] | None = None):
        super().__init__()
        self._hash_word = hash_word or _blake2b_hash

    def __missing__(self, word: str) -> int:
        if len(self) >= self.limit:
            self.clear()
        value = self[word] = self._hash_word(word.encode("utf-8", "surrogatepass"))
        return value

    def codes(self, words: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the hashes of all words, text after text (uint64), and the number of each text's (int64)."""
        counts = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        flat = map(self.__getitem__, chain.from_iterable(words))
        return np.fromiter(flat, dtype=np.uint64, count=int(counts.sum())), counts


def _blake2b_hash(word: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little")


class Shingler:
    """Hashed shingles of normalised texts. unit: "char" or "word" (runs of letters, digits and underscores). size:
    units of one shingle; a shorter text is one shingle, a text without units has none."""

    def __init__(self, unit: Literal["char", "word"], size: int):
        self.unit = unit
        self.size = size
        self._words = WordHashes()

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the hashes of all shingles (uint64), text after text, with repeats, and each text's number."""
        if self.unit == "char":
            padded = [text.ljust(self.size, "\0") if text else text for text in texts]
            counts = np.fromiter(map(len, padded), dtype=np.int64, count=len(padded))
            codes = np.frombuffer("".join(padded).encode("utf-32-le", "surrogatepass"), dtype="<u4")
            return window_hashes(codes, counts, self.size)
        words = [WORDS.findall(text) for text in texts]
        padded_words = [text + [""] * (self.size - len(text)) if text else text for text in words]
        codes, counts = self._words.codes(padded_words)
        return window_hashes(codes, counts, self.size)


def window_hashes(codes: np.ndarray, counts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all runs of `size` codes within one text. codes: (T,) unsigned integers, text after text.
    counts: (n,) codes of each text. Returns hashes (uint64) and their (n,) counts."""
    total = len(codes) - size + 1
    window_counts = np.maximum(counts - size + 1, 0)
    if total < 1:
        return np.empty(0, np.uint64), window_counts
    base, hashes = np.uint64(_BASE), np.empty(total, np.uint64)
    for low in range(0, total, _TILE):  # tiles that fit in the processor's cache
        tile = codes[low : min(low + _TILE, total) + size - 1].astype(np.uint64)
        length = len(tile) - size + 1
        rolling = tile[:length].copy()
        for k in range(1, size):
            rolling *= base
            rolling += tile[k : k + length]
        hashes[low : low + length] = mix64(rolling * base)
    if np.count_nonzero(counts) == 1:
        return hashes, window_counts
    starts = np.cumsum(counts) - counts
    change = np.zeros(total + 1, dtype=np.int32)  # +1 at the start of a text's windows, −1 after their end
    np.add.at(change, starts[window_counts > 0], 1)
    np.add.at(change, (starts + window_counts)[window_counts > 0], -1)
    return hashes[np.cumsum(change[:-1]).astype(bool)], window_counts
