"""Word n-grams of a text hashed into a fixed number of signed counters.

Nothing is fitted, so that any number of machines compute the same features (Weinberger et al. 2009, arXiv 0902.2206).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.pooling import normalise_rows
from flatshift.selection.lazy import np


class HashedNgrams:
    """Callable texts → (n, dim) float32; inner products estimate those of n-gram counts, scaled to norm 1.

    dim: number of counters. longest: words of the longest n-grams. A text without a word is a row of zeros.
    Raises SelectionError for a size below 1.
    """

    def __init__(self, dim: int = 512, longest: int = 2):
        for name, value in (("dim", dim), ("longest", longest)):
            if value < 1:
                raise SelectionError(f"{name} must be at least 1, got {value}")
        self.dim, self.longest = dim, longest

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return normalise_rows(np.asarray(self._counter().transform(texts).todense()))

    def _counter(self) -> Any:
        from sklearn.feature_extraction.text import HashingVectorizer

        return HashingVectorizer(
            n_features=self.dim,
            ngram_range=(1, self.longest),
            token_pattern=r"\w+",
            norm=None,
            dtype=np.float32,
        )
