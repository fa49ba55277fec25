"""Arrays of one value per row: small ones in memory, large ones in an unnamed file on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

_BLOCK = 1 << 18


def block_ranges(count: int) -> Iterator[tuple[int, int]]:
    """Yield (low, high) of consecutive blocks of rows, for processing in constant memory."""
    for low in range(0, count, _BLOCK):
        yield low, min(low + _BLOCK, count)


class GrowingArray:
    """One-dimensional array built piece by piece.

    dtype: of the array. limit: bytes held in memory; beyond that the array is in a temporary file (in TMPDIR), which is
    removed with the process, and `array` maps it.
    """

    def __init__(self, dtype: Any, limit: int = 1 << 19):
        self.dtype = np.dtype(dtype)
        self.limit = limit
        self.length = 0
        self._parts: list[np.ndarray] = []
        self._held = 0
        self._file: IO[bytes] | None = None

    def append(self, values: np.ndarray) -> None:
        """Append values at the end."""
        part = np.ascontiguousarray(values, dtype=self.dtype)
        if not len(part):
            return
        self.length += len(part)
        self._parts.append(part)
        self._held += part.nbytes
        if self._held > self.limit:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="flatshift-")  # noqa: SIM115 - open as long as the array
            for held in self._parts:
                held.tofile(self._file)
            self._parts, self._held = [], 0

    def array(self) -> np.ndarray:
        """Return all values so far; writes to the result are kept."""
        if self._file is None:
            self._parts = [np.concatenate(self._parts)] if self._parts else [np.empty(0, self.dtype)]
            return self._parts[0]
        for held in self._parts:
            held.tofile(self._file)
        self._parts, self._held = [], 0
        self._file.flush()
        return np.asarray(np.memmap(self._file, dtype=self.dtype, mode="r+", shape=(self.length,)))


def build_array(count: int, dtype: Any, make: Callable[[int, int], Any]) -> np.ndarray:
    """Build a writable array of `count` values; `make(low, high)` returns those of a block, or one for all of it.

    The file of a large array is written here and not through the map, so that a full disk raises OSError.
    """
    out = GrowingArray(dtype)
    for low, high in block_ranges(count):
        out.append(np.broadcast_to(make(low, high), high - low))
    return out.array()
