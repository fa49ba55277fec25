"""Hashed bags of words as sparse counts: the buckets of scikit-learn's HashingVectorizer, several times faster.

A word is a run of letters, digits and underscores, in lower case; its bucket is |murmur3_32| mod `buckets`. Each
distinct word is hashed once; the rest is array arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

_WORDS = re.compile(r"\w+")
_BATCH = 1024
_REMEMBERED = 1 << 20
"""Distinct words whose bucket is remembered, at most: about 120 MB."""


class WordHasher:
    """texts → CSR counts (len(texts), buckets) float32, rows with sorted columns."""

    def __init__(self, buckets: int):
        self.buckets = buckets
        self._table = _Buckets(buckets)

    def counts(self, texts: Sequence[str]) -> Any:
        """A scipy CSR matrix; element (i, b) is how many words of text i fall into bucket b."""
        from scipy.sparse import csr_matrix

        parts = [self._batch(texts[low : low + _BATCH]) for low in range(0, len(texts), _BATCH)]
        columns, values, lengths = (np.concatenate(part) for part in zip(*parts, strict=True))
        ends = np.concatenate([[0], np.cumsum(lengths)])
        matrix = csr_matrix((values, columns, ends), shape=(len(texts), self.buckets), copy=False)
        matrix.has_sorted_indices = True
        return matrix

    def _batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Buckets, counts, and how many distinct buckets each text has."""
        if len(self._table) > _REMEMBERED:
            self._table.clear()
        words = [_WORDS.findall(text.lower()) for text in texts]
        sizes = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        total = int(sizes.sum())
        buckets = np.fromiter(map(self._table.__getitem__, chain.from_iterable(words)), dtype=np.int64, count=total)
        keys = np.repeat(np.arange(len(words)) * self.buckets, sizes) + buckets
        keys.sort()
        first = np.ones(total, dtype=bool)
        np.not_equal(keys[1:], keys[:-1], out=first[1:])
        starts = np.flatnonzero(first)
        counts = np.diff(starts, append=total).astype(np.float32)
        text_of, column = np.divmod(keys[starts], self.buckets)
        return column.astype(np.int32), counts, np.bincount(text_of, minlength=len(words))


class _Buckets(dict[str, int]):
    """word → bucket, filled on first use."""

    def __init__(self, buckets: int):
        super().__init__()
        from sklearn.utils import murmurhash3_32

        self.buckets = buckets
        self._hash = murmurhash3_32

    def __missing__(self, word: str) -> int:
        value = self[word] = abs(int(self._hash(word.encode("utf-8", "surrogatepass"), 0))) % self.buckets
        return value
