"""Texts as token ids of the backbone's own tokenizer, concatenated in one array, in memory or on disk."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np

CHUNK = 8192  # texts whose tokens are processed together
_RESIDENT = 1 << 26
"""Bytes of a mapped file read before its pages are released to the system, which would otherwise keep them."""
Tokenize = Callable[[list[str]], Sequence[Sequence[int]]]
"""Function texts → the token ids of each, without special tokens."""


class TokenRows(Sequence[Any]):
    """Tokens of N texts: row i is an integer array. 8 bytes a row in memory, in addition to `flat`.

    flat (T,): all tokens, an array, or one over the file `mapped`, of which at most 64 MiB stay in memory while `parts`
    reads it. ends (N,) int64: end of each text in `flat`. size: vocabulary size, above all tokens.
    """

    def __init__(self, flat: Any, ends: Any, size: int, mapped: mmap.mmap | None = None):
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
        """Build on disk from texts read a chunk at a time: the file at `path` is removed with the rows, or with the
        process."""
        dtype, ends, total = _token_dtype(size), [np.empty(0, np.int64)], 0
        try:
            with path.open("wb") as sink:
                for low in range(0, len(texts), CHUNK):
                    chunk = cls.of(tokenize(list(texts[low : low + CHUNK])), size)
                    sink.write(chunk.flat.tobytes())
                    ends.append(chunk.ends + total)
                    total += len(chunk.flat)
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


def _token_dtype(size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)


def text_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum each consecutive run of `lengths` values, 0 for an empty run; rounding in a run does not depend on the
    others."""
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
