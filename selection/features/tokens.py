"""Texts as token ids of the backbone's own tokenizer, concatenated in one array, in memory or on disk; and their uni-
and bigrams as features: sparse TF-IDF, projected losslessly to the target's span.

A text's component in the span of the M target texts' vectors and the length of the residual give all distances to them
exactly, so a sparse row of a hundred thousand columns becomes M + 2 numbers. If the target has more texts than `dim`,
the span is cut to its strongest directions, and the residuals of pool and target count as orthogonal.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, overload

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np
from flatshift.selection.shards import Arrays, Shard
from flatshift.selection.validation import Settings, bounded

CHUNK = 8192  # texts whose tokens are processed together
_OPEN_SHARDS = 64
_RESIDENT = 1 << 26
"""Bytes of a mapped file read before its pages are released to the system, which would otherwise keep them."""
Tokenize = Callable[[list[str]], Sequence[Sequence[int]]]
"""Function texts → the token ids of each, without special tokens."""


class TokenRows(Sequence[Any]):
    """Tokens of N texts: row i is an integer array. 8 bytes a row in memory, in addition to `flat`.

    flat (T,): all tokens, an array, or one over the file `mapped`, of which at most 64 MiB stay in memory while `parts`
    reads it. ends (N,) int64: end of each text in `flat`. size: vocabulary size, above all tokens. shards: arrays
    `flat` and `ends` of each shard, if a map wrote them.
    """

    def __init__(
        self, flat: Any, ends: Any, size: int, mapped: mmap.mmap | None = None, shards: Sequence[Arrays] | None = None
    ):
        self.shards = shards
        self.flat, self.ends, self.size = flat, np.asarray(ends, dtype=np.int64), int(size)
        self._mapped = mapped

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], size: int) -> TokenRows:
        """Build from rows in memory. Raises SelectionError for a token that is not below `size`."""
        arrays = [np.asarray(row, dtype=np.int64) for row in rows]
        flat = np.concatenate([np.empty(0, np.int64), *arrays])
        if len(flat) and not 0 <= flat.min() <= flat.max() < size:
            raise SelectionError(f"tokens must be between 0 and {size - 1}, and there is {flat.min()} or {flat.max()}")
        return cls(flat.astype(_token_dtype(size)), np.cumsum([len(row) for row in arrays]), size)

    @classmethod
    def spilled(
        cls,
        texts: Sequence[str],
        tokenize: Tokenize,
        size: int,
        path: Path,
        progress: Callable[[int], None] | None = None,
    ) -> TokenRows:
        """Build on disk from texts read a chunk at a time: the file at `path` goes with the rows or the process."""
        dtype, ends, total = _token_dtype(size), [np.empty(0, np.int64)], 0
        try:
            with path.open("wb") as sink:
                for low in range(0, len(texts), CHUNK):
                    part = cls.of(tokenize(list(texts[low : low + CHUNK])), size)
                    sink.write(part.flat.data)
                    ends.append(part.ends + total)
                    total += len(part.flat)
                    if progress:
                        progress(min(low + CHUNK, len(texts)))
            mapped = None
            if total:
                with path.open("rb") as source:
                    mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        flat = np.empty(0, dtype) if mapped is None else np.frombuffer(mapped, dtype)
        return cls(flat, np.concatenate(ends), size, mapped)

    @classmethod
    def of_shards(cls, shards: Sequence[Arrays], size: int) -> TokenRows:
        """Build from the arrays that `tokenise_shard` returned for every shard, which stay where they are."""
        starts, ends = [0], [np.empty(0, np.int64)]
        for shard in shards:
            ends.append(shard["ends"] + starts[-1])
            starts.append(starts[-1] + len(shard["flat"]))
        return cls(_JoinedTokens(shards, np.array(starts)), np.concatenate(ends), size, shards=shards)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, key: int) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> list[Any]: ...
    def __getitem__(self, key: int | slice) -> Any:
        if isinstance(key, slice):
            return [self[i] for i in range(*key.indices(len(self)))]
        key = range(len(self))[key]
        return np.asarray(self.flat[int(self.ends[key - 1]) if key else 0 : int(self.ends[key])])

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text, (N,) int64."""
        return np.diff(self.ends, prepend=0)

    def part(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and lengths of texts [low, high)."""
        start = int(self.ends[low - 1]) if low else 0
        ends = self.ends[low:high]
        return np.asarray(self.flat[start : int(ends[-1]) if len(ends) else start]), np.diff(ends, prepend=start)

    def parts(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the number of the first text, tokens, and lengths of one chunk after another."""
        resident = 0
        for low in range(0, len(self), CHUNK):
            flat, lengths = self.part(low, min(low + CHUNK, len(self)))
            yield low, flat, lengths
            resident += flat.nbytes
            if self._mapped is not None and resident > _RESIDENT and hasattr(mmap, "MADV_DONTNEED"):
                self._mapped.madvise(mmap.MADV_DONTNEED)
                resident = 0

    def take(self, rows: Any) -> TokenRows:
        """Return the rows with these numbers, in memory."""
        return TokenRows.of([self[int(row)] for row in rows], self.size)


class _JoinedTokens:
    """Tokens of all shards, read where they are; `starts`: of each shard, and the end."""

    def __init__(self, shards: Sequence[Arrays], starts: np.ndarray):
        self._starts = starts
        self._open = functools.lru_cache(_OPEN_SHARDS)(lambda number: np.asarray(shards[number]["flat"]))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        first, last = np.searchsorted(self._starts, [span.start, max(span.stop - 1, span.start)], side="right") - 1
        shards = range(int(first), min(int(last) + 1, len(self._starts) - 1))
        parts = [
            self._open(shard)[max(span.start - start, 0) : span.stop - start]
            for shard, start in zip(shards, self._starts[first:].tolist(), strict=False)
        ]
        return np.concatenate(parts or [self._open(0)[:0]])


def tokenise_shard(shard: Shard, tokenizer: Callable[[], tuple[Tokenize, int]]) -> Arrays:
    """Return the tokens of a shard's texts, `flat` and `ends`. tokenizer: returns the function and vocabulary size."""
    tokenize, size = tokenizer()
    flat, ends, total = [np.empty(0, _token_dtype(size))], [np.empty(0, np.int64)], 0
    for low in range(0, len(shard.texts), CHUNK):
        chunk = TokenRows.of(tokenize(list(shard.texts[low : low + CHUNK])), size)
        flat.append(chunk.flat)
        ends.append(chunk.ends + total)
        total += len(chunk.flat)
    return {"flat": np.concatenate(flat), "ends": np.concatenate(ends)}


def _token_dtype(size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)


def text_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum each consecutive run of `lengths` values, 0 for an empty run; roundings are a run's own."""
    return np.bincount(np.repeat(np.arange(len(lengths)), lengths), weights=values, minlength=len(lengths))


def ngram_keys(flat: np.ndarray, lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys (uint64) of all uni- and bigrams of some texts, and the number (int64) of each one's text.

    Unigrams first, then bigrams; a unigram's key is its token, a bigram's is above `size`.
    """
    tokens = flat.astype(np.uint64)
    text_of = np.repeat(np.arange(len(lengths)), lengths)
    same_text = text_of[1:] == text_of[:-1]
    pairs = ((tokens[:-1] + np.uint64(1)) * np.uint64(size) + tokens[1:])[same_text]
    return np.concatenate([tokens, pairs]), np.concatenate([text_of, text_of[1:][same_text]])


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

    def state(self) -> dict[str, np.ndarray]:
        """Return the fitted state as arrays, for `restore`."""
        arrays = {"known": self._known, "idf": self._idf, "columns": self._columns, "basis": self._basis}
        return arrays | {"unknown": np.array([self._unknown])}

    def restore(self, state: Arrays) -> Self:
        """Load a `state` of an embedder with the same tokenizer."""
        self._known, self._idf, self._columns, self._basis, unknown = (
            np.asarray(state[name]) for name in ("known", "idf", "columns", "basis", "unknown")
        )
        self._unknown = float(unknown[0])
        return self

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
        weights = (1.0 + np.log(counts)) * np.where(self._known[index] == keys, self._idf[index], self._unknown)
        norms = np.sqrt(np.bincount(text_of, weights=weights * weights, minlength=texts))
        column = np.minimum(np.searchsorted(self._columns, keys), len(self._columns) - 1)
        in_target = self._columns[column] == keys
        values = weights[in_target] / norms[text_of[in_target]]
        return csr_matrix((values, (text_of[in_target], column[in_target])), shape=(texts, len(self._columns)))
