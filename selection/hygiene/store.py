"""Arrays of one value per row in bounded memory: small ones in memory, large ones in an unnamed file on disk; and their
external sort, sorted runs merged window by window (Knuth, The Art of Computer Programming, volume 3, section 5.4)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sized
from math import inf
from typing import IO, Any, TypeVar

import numpy as np

Batched = TypeVar("Batched", bound=Sized)
_BLOCK = 1 << 18


def block_ranges(count: int) -> Iterator[tuple[int, int]]:
    """Yield (low, high) of consecutive blocks of rows, for processing in constant memory."""
    for low in range(0, count, _BLOCK):
        yield low, min(low + _BLOCK, count)


def bounded_batches(items: Iterable[Batched], total: int, count: float = inf) -> Iterator[list[Batched]]:
    """Yield consecutive items in lists of at most `count`, of at most `total` length (one item may have more)."""
    batch: list[Batched] = []
    size = 0
    for item in items:
        if batch and (size + len(item) > total or len(batch) == count):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += len(item)
    if batch:
        yield batch


class GrowingArray:
    """One-dimensional array built piece by piece. dtype: of the array. limit: bytes held in memory; beyond that the
    array is in a temporary file (in TMPDIR), which is removed with the process, and `array` maps it."""

    def __init__(self, dtype: Any, limit: int = 1 << 19):
        self.dtype = np.dtype(dtype)
        self.limit = limit
        self.length = 0
        self._parts: list[np.ndarray] = []
        self._held = 0
        self._file: IO[bytes] | None = None

    def append(self, values: np.ndarray) -> None:
        """Append values at the end."""
        block = np.ascontiguousarray(values, dtype=self.dtype)
        if not len(block):
            return
        self.length += len(block)
        self._parts.append(block)
        self._held += block.nbytes
        if self._held > self.limit:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="flatshift-")  # noqa: SIM115 - open as long as the array
            for previous in self._parts:
                previous.tofile(self._file)
            self._parts, self._held = [], 0

    def array(self) -> np.ndarray:
        """Return all values so far; writes to the result are kept."""
        if self._file is None:
            self._parts = [np.concatenate(self._parts)] if self._parts else [np.empty(0, self.dtype)]
            return self._parts[0]
        for block in self._parts:
            block.tofile(self._file)
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


Keyed = tuple[np.ndarray, np.ndarray]
"""keys (n,) uint64 and their rows (n,) int64."""

_ROW_BYTES = 48  # bytes per row while a run is sorted: key and row before and after, the order, the sort's workspace


def sort_keys(keyed: Iterable[Keyed], memory: int) -> Iterator[Keyed]:
    """Yield blocks of keys in ascending order, equal ones in the order of their rows. keyed: blocks whose rows ascend,
    also from one block to the next. memory: bytes for sorting a run, without effect on the result."""
    capacity = max(memory // _ROW_BYTES, 1)
    keys, rows = GrowingArray(np.uint64), GrowingArray(np.int64)
    borders = [0]
    for run_keys, run_rows in _sorted_runs(keyed, capacity):
        if borders == [0] and len(run_keys) < capacity:  # the only run
            yield from _split_blocks(run_keys, run_rows)
            return
        keys.append(run_keys)
        rows.append(run_rows)
        borders.append(borders[-1] + len(run_keys))
    for some_keys, some_rows in _merge_runs(keys.array(), rows.array(), borders, max(capacity // len(borders), 1)):
        yield from _split_blocks(some_keys, some_rows)


def _split_blocks(keys: np.ndarray, rows: np.ndarray) -> Iterator[Keyed]:
    for low, high in block_ranges(len(keys)):
        yield keys[low:high], rows[low:high]


def _sorted_runs(keyed: Iterable[Keyed], capacity: int) -> Iterator[Keyed]:
    """Yield sorted runs of `capacity` rows; only the last is shorter."""
    blocks: list[Keyed] = []
    count = 0
    for keys, rows in keyed:
        while count + len(keys) >= capacity:
            room = capacity - count
            blocks.append((keys[:room], rows[:room]))
            yield _sort_blocks(blocks)
            count, keys, rows = 0, keys[room:], rows[room:]
        if len(keys):
            blocks.append((keys, rows))
            count += len(keys)
    if blocks:
        yield _sort_blocks(blocks)


def _sort_blocks(blocks: list[Keyed]) -> Keyed:
    """Merge the blocks of `held`, which is emptied, into one in the order of the keys."""
    keys, rows = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
    blocks.clear()
    order = np.argsort(keys, kind="stable")
    return keys[order], rows[order]


def _merge_runs(keys: np.ndarray, rows: np.ndarray, borders: list[int], window: int) -> Iterator[Keyed]:
    """Merge the runs between `borders`. Each step takes from every run the keys up to the end of the window that ends
    first; if equal keys continue beyond it, later runs keep theirs for a later step."""
    starts, ends = borders[:-1], borders[1:]
    while any(low < end for low, end in zip(starts, ends, strict=True)):
        reach = [min(low + window, end) for low, end in zip(starts, ends, strict=True)]
        beyond = [run for run, end in enumerate(ends) if reach[run] < end]
        if beyond:
            shortest = min(beyond, key=lambda run: (keys[reach[run] - 1], run))
            limit = keys[reach[shortest] - 1]
            for run, low in enumerate(starts):
                if run != shortest:
                    window_keys = keys[low : reach[run]]
                    reach[run] = low + int(window_keys.searchsorted(limit, side="right" if run < shortest else "left"))
        windows = [slice(low, high) for low, high in zip(starts, reach, strict=True)]
        yield _sort_blocks([(keys[span], rows[span]) for span in windows])
        starts = reach
