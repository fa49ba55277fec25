"""Uni- and bigrams of the backbone's tokens as features: sparse TF-IDF, projected losslessly to the target's span.

A text's component in the span of the M target texts' vectors and the length of the residual give all distances to them
exactly, so a sparse row of a hundred thousand columns becomes M + 2 numbers. If the target has more texts than `dim`,
the span is cut to its strongest directions, and the residuals of pool and target count as orthogonal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.tokens import CHUNK, Tokenize, TokenRows, ngram_keys
from flatshift.selection.lazy import np
from flatshift.selection.validation import Settings, bounded


@dataclass(frozen=True, kw_only=True)
class TokenNgrams(Settings):
    """Uni- and bigrams of the backbone's tokens, TF-IDF of length 1, in the span of the target's texts. Depends on
    case, spacing and punctuation as the backbone does. Offline, no model."""

    kind: Literal["tokens"] = "tokens"
    dim: int = bounded(512, minimum=1)
    """Directions of the target's span; distances to up to this many target texts are exact."""
    fit_rows: int = bounded(20_000, minimum=1)
    """Pool texts, drawn by seed, for document frequencies."""


class TokenNgramEmbedder:
    """Texts → (n, rank + 2) float32, rank ≤ dim: coordinates in the span of the target's TF-IDF vectors, and the
    residual lengths of pool texts and of target texts.

    tokenize, size: the backbone's tokenizer and its vocabulary. Weights: (1 + log count) · (log((1 + n)/(1 + df)) + 1)
    of each uni- and bigram, scaled to length 1, df over `fit_rows` pool texts drawn by seed and the target's. A text
    without a token is the zero vector. `transform` is for the pool, `transform_target` for the target.
    """

    def __init__(self, tokenize: Tokenize, size: int, *, dim: int = 512, fit_rows: int = 20_000, seed: int = 0):
        self.tokenize, self.size = tokenize, size
        self.dim, self.fit_rows, self.seed = dim, fit_rows, seed

    def fit(self, pool_texts: Sequence[str], target_texts: Sequence[str]) -> Self:
        """Fit document frequencies and the target's span. Raises SelectionError for a target without a token."""
        draw = np.random.Generator(np.random.PCG64([self.seed, 0x70CE5]))
        sample = np.arange(len(pool_texts))
        if len(sample) > self.fit_rows:
            sample = np.sort(draw.choice(sample, self.fit_rows, replace=False))
        pool_keys = [np.empty(0, np.uint64)]
        for low in range(0, len(sample), CHUNK):
            pool_keys.append(self._count([pool_texts[i] for i in sample[low : low + CHUNK].tolist()])[1])
        text_of, keys, counts = self._count(list(target_texts))
        self._known, frequency = np.unique(np.concatenate([*pool_keys, keys]), return_counts=True)
        texts = len(sample) + len(target_texts)
        self._idf = np.log((1.0 + texts) / (1.0 + frequency)) + 1.0
        self._unknown = float(np.log(1.0 + texts) + 1.0)
        if not len(keys):
            raise SelectionError("no target text holds a single token; there is nothing to embed")
        self._columns = np.unique(keys)
        rows = self._weigh(text_of, keys, counts, len(target_texts))
        # Directions from the Gram matrix of the target's rows: M × M, whatever the number of columns.
        values, vectors = np.linalg.eigh((rows @ rows.T).toarray())
        strongest = np.argsort(-values)[: self.dim]
        strongest = strongest[values[strongest] > 1e-10 * values.max()]
        self._basis = np.ascontiguousarray(rows.T @ (vectors[:, strongest] / np.sqrt(values[strongest])))
        return self

    def transform(self, texts: Sequence[str]) -> np.ndarray:
        """Return (n, rank + 2) for texts of the pool."""
        return self._embed(texts, -2)

    def transform_target(self, texts: Sequence[str]) -> np.ndarray:
        """Return (m, rank + 2) for texts of the target."""
        return self._embed(texts, -1)

    @property
    def fingerprint(self) -> str:
        """Digest of the fitted state."""
        digest = hashlib.sha256(str(self.size).encode())
        for array in (self._known, self._idf, self._columns, self._basis):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def _embed(self, texts: Sequence[str], residual_column: int) -> np.ndarray:
        out = np.zeros((len(texts), self._basis.shape[1] + 2), dtype=np.float32)
        for low in range(0, len(texts), CHUNK):
            text_of, keys, counts = self._count(list(texts[low : low + CHUNK]))
            high = min(low + CHUNK, len(texts))
            coordinates = self._weigh(text_of, keys, counts, high - low) @ self._basis
            squared_length = np.bincount(text_of, minlength=high - low) > 0
            out[low:high, :-2] = coordinates
            residual = np.maximum(squared_length - (coordinates * coordinates).sum(1), 0.0)
            out[low:high, residual_column] = np.sqrt(residual)
        return out

    def _count(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return text, key and count of each distinct uni- and bigram of each text, text by text."""
        rows = TokenRows.of(self.tokenize(texts), self.size)
        keys, text_of = ngram_keys(*rows.part(0, len(rows)), self.size)
        order = np.lexsort((keys, text_of))
        keys, text_of = keys[order], text_of[order]
        opens = np.ones(len(keys), dtype=bool)
        opens[1:] = (keys[1:] != keys[:-1]) | (text_of[1:] != text_of[:-1])
        starts = np.flatnonzero(opens)
        return text_of[starts], keys[starts], np.diff(starts, append=len(keys))

    def _weigh(self, text_of: np.ndarray, keys: np.ndarray, counts: np.ndarray, texts: int) -> Any:
        from scipy.sparse import csr_matrix

        index = np.minimum(np.searchsorted(self._known, keys), len(self._known) - 1)
        idf = np.where(self._known[index] == keys, self._idf[index], self._unknown)
        weights = (1.0 + np.log(counts)) * idf
        norms = np.sqrt(np.bincount(text_of, weights=weights * weights, minlength=texts))
        column = np.minimum(np.searchsorted(self._columns, keys), len(self._columns) - 1)
        in_target = self._columns[column] == keys
        values = weights[in_target] / norms[text_of[in_target]]
        return csr_matrix((values, (text_of[in_target], column[in_target])), shape=(texts, len(self._columns)))
