"""Hashing TF-IDF + truncated SVD: the embedder that needs no model and no network.

Words get the same buckets as in scikit-learn's HashingVectorizer, several times faster: a word is a run of letters,
digits and underscores, in lower case; its bucket is |murmur3_32| mod `buckets`. Each distinct word is hashed once.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.pooling import normalise_rows
from flatshift.selection.hashing import WORDS, WordHashes
from flatshift.selection.lazy import np
from flatshift.selection.validation import Settings, bounded

_CHUNK = 4096  # texts counted at a time


@dataclass(frozen=True, kw_only=True)
class TfIdf(Settings):
    """Hashing TF-IDF followed by truncated SVD and L2 normalisation. Offline, no model."""

    kind: Literal["tfidf"] = "tfidf"
    dim: int = bounded(128, minimum=1)
    """Components of the SVD."""
    buckets: int = bounded(2**18, minimum=2)
    """Hash buckets."""
    fit_rows: int = bounded(20_000, minimum=2)
    """Maximum number of texts for fitting document frequencies and SVD: the target's first, then a seeded draw of the
    pool's."""


class TfIdfEmbedder:
    """Hashed bag of words, sublinear TF-IDF, truncated SVD, L2 norm 1. No model, no network, seeded.

    dim: components (fewer, with a warning and in `dim_`, if the texts do not span that many). buckets: hash buckets.
    seed: of the randomised SVD and of the rows it is fitted on. fit_rows: maximum number of texts for that: the
    target's first (up to half of them, by seed), the rest drawn by seed from the pool. Words of no fitted text are
    ignored; a text without others gets the zero vector. Counts are scikit-learn's HashingVectorizer's, weights its
    TfidfTransformer's, components its TruncatedSVD's; texts are read in chunks and never held.
    """

    def __init__(self, *, dim: int = 128, buckets: int = 2**18, seed: int = 0, fit_rows: int = 20_000):
        self.dim = dim
        self.buckets = buckets
        self.seed = seed
        self.fit_rows = fit_rows

    def fit_transform(self, pool_texts: Sequence[str], target_texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Fit on pool and target together; return float32 (N, dim_) and (M, dim_). Raises SelectionError."""
        self.fit(pool_texts, target_texts)
        return self.transform(pool_texts), self.transform(target_texts)

    def fit(self, texts: Sequence[str], target_texts: Sequence[str] = ()) -> Self:
        """Fit on a seeded sample of the pool's `texts` and the target's."""
        self._fit(self.fit_texts(texts, target_texts))
        return self

    def fit_texts(self, texts: Sequence[str], target_texts: Sequence[str] = ()) -> list[str]:
        """Return the texts that `fit` would use: all, or a sample by seed, in file order, the pool's first."""
        if self.dim < 1 or self.buckets < 2 or self.fit_rows < 2:
            raise SelectionError(
                f"dim must be at least 1, buckets and fit_rows at least 2, not {self.dim}, {self.buckets} "
                f"and {self.fit_rows}"
            )
        generator = np.random.Generator(np.random.PCG64([self.seed, 0x7F1DF, 1]))
        from_target = min(len(target_texts), max(self.fit_rows // 2, self.fit_rows - len(texts)))
        pool = _draw_texts(generator, texts, self.fit_rows - from_target)
        return pool + _draw_texts(generator, target_texts, from_target)

    def transform(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 (len(texts), dim_)."""
        if not hasattr(self, "dim_"):
            raise SelectionError("TfIdfEmbedder is not fitted yet; call fit or fit_transform first")
        out = np.empty((len(texts), self.dim_), dtype=np.float32)
        for low in range(0, len(texts), _CHUNK):
            out[low : low + _CHUNK] = self._project(self._hasher.counts(texts[low : low + _CHUNK]))
        return out

    def state(self) -> dict[str, np.ndarray]:
        """Return the fitted state as arrays, for `restore`."""
        return {"used": self._used, "idf": self._idf, "components": self._components}

    def restore(self, state: dict[str, np.ndarray]) -> Self:
        """Load a `state` of an embedder with the same settings."""
        self._used, self._idf, self._components = state["used"], state["idf"], state["components"]
        self.dim_ = self._components.shape[1]
        self._hasher = WordHasher(self.buckets)
        self._column = np.full(self.buckets, -1, dtype=np.int32)
        self._column[self._used] = np.arange(len(self._used), dtype=np.int32)
        return self

    @property
    def fingerprint(self) -> str:
        """Digest of the fitted state: equal exactly if `transform` is."""
        digest = hashlib.sha256(str(self.buckets).encode())
        for array in self.state().values():
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def _fit(self, texts: list[str]) -> None:
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfTransformer

        if not texts:
            raise SelectionError("there are no texts to embed")
        counts = WordHasher(self.buckets).counts(texts)
        if counts.nnz == 0:
            raise SelectionError("no text holds a single word; there is nothing to embed")
        # Empty buckets would have components of 0: without them the SVD has far fewer columns.
        used = np.unique(counts.indices)
        counts = counts[:, used]
        tfidf = TfidfTransformer(sublinear_tf=True).fit(counts)
        dim = min(self.dim, counts.shape[0], len(used))
        if dim < self.dim:
            warnings.warn(
                f"dim {self.dim} is more than these texts span ({counts.shape[0]} texts, {len(used)} distinct words); "
                f"using {dim}",
                UserWarning,
                stacklevel=3,
            )
        generator = np.random.Generator(np.random.PCG64([self.seed, 0x7F1DF]))
        svd = TruncatedSVD(dim, random_state=int(generator.integers(2**31)), n_iter=4)
        svd.fit(tfidf.transform(counts))
        components = np.ascontiguousarray(svd.components_.T, dtype=np.float32)
        self.restore({"used": used, "idf": tfidf.idf_.astype(np.float32), "components": components})

    def _project(self, counts: Any) -> np.ndarray:
        from scipy.sparse import csr_matrix

        column = self._column[counts.indices]
        known = column >= 0
        text_of = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))[known]
        ends = np.concatenate([[0], np.cumsum(np.bincount(text_of, minlength=counts.shape[0]))])
        # The row norm of TF-IDF is omitted: it only scales a row, and rows are scaled to norm 1 at the end.
        weights = (1.0 + np.log(counts.data[known])) * self._idf[column[known]]
        weighted = csr_matrix((weights, column[known], ends), shape=(counts.shape[0], len(self._used)))
        return normalise_rows(weighted @ self._components)


def load_or_fit(path: Path, embedder: TfIdfEmbedder, fit: Callable[[], Any]) -> None:
    """Restore `embedder` from `path` (.npz), or call `fit` and write it there atomically. A broken file is refitted."""
    from flatshift.selection.features.cache import atomic_file

    try:
        with np.load(path, allow_pickle=False) as stored:
            state = {name: stored[name] for name in ("used", "idf", "components")}
            intact = str(stored["fingerprint"]) == embedder.restore(state).fingerprint
    except (OSError, ValueError, KeyError, EOFError, ImportError):
        intact = False
    except Exception as error:  # zipfile.BadZipFile and zlib.error, without importing these modules for a check
        if type(error).__module__ not in ("zipfile", "zlib"):
            raise
        intact = False
    if not intact:
        fit()
        with atomic_file(path) as handle:
            arrays: dict[str, Any] = {"fingerprint": np.array(embedder.fingerprint), **embedder.state()}
            np.savez(handle, **arrays)


def _draw_texts(generator: np.random.Generator, texts: Sequence[str], count: int) -> list[str]:
    if len(texts) <= count:
        return list(texts)
    return [texts[i] for i in np.sort(generator.choice(len(texts), count, replace=False)).tolist()]


_BATCH = 512


class WordHasher:
    """Word counts of texts as CSR (len(texts), buckets) float32, rows with sorted columns."""

    def __init__(self, buckets: int):
        self.buckets = buckets
        from sklearn.utils import murmurhash3_32

        self._table = WordHashes(lambda word: abs(int(murmurhash3_32(word, 0))) % buckets)

    def counts(self, texts: Sequence[str]) -> Any:
        """Return a scipy CSR matrix; element (i, b) is the number of words of text i in bucket b."""
        from scipy.sparse import csr_matrix

        parts = [self._batch(texts[low : low + _BATCH]) for low in range(0, len(texts), _BATCH)]
        columns, values, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        ends = np.concatenate([[0], np.cumsum(lengths)])
        matrix = csr_matrix((values, columns, ends), shape=(len(texts), self.buckets), copy=False)
        matrix.has_sorted_indices = True
        return matrix

    def _batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return buckets, counts, and the number of distinct buckets of each text."""
        words = [WORDS.findall(text.lower()) for text in texts]
        buckets, sizes = self._table.codes(words)
        total = len(buckets)
        keys = np.repeat(np.arange(len(words)) * self.buckets, sizes) + buckets.astype(np.int64)
        keys.sort()
        opens = np.ones(total, dtype=bool)
        np.not_equal(keys[1:], keys[:-1], out=opens[1:])
        starts = np.flatnonzero(opens)
        counts = np.diff(starts, append=total).astype(np.float32)
        text_of, column = np.divmod(keys[starts], self.buckets)
        return column.astype(np.int32), counts, np.bincount(text_of, minlength=len(words))


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
        from sklearn.feature_extraction.text import HashingVectorizer

        counter = HashingVectorizer(
            n_features=self.dim, ngram_range=(1, self.longest), token_pattern=r"\w+", norm=None, dtype=np.float32
        )
        return normalise_rows(np.asarray(counter.transform(texts).todense()))
