"""External sort of keys under a memory limit: sorted runs on disk, merged window by window (Knuth, The Art of Computer
Programming, volume 3, section 5.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from flatshift.selection.hygiene.store import GrowingArray, block_ranges

Keyed = tuple[np.ndarray, np.ndarray]
"""keys (n,) uint64 and their rows (n,) int64."""

_ROW_BYTES = 48
"""Bytes per row while a run is sorted: key and row before and after, the order, the sort's workspace."""


def sort_keys(keyed: Iterable[Keyed], memory: int) -> Iterator[Keyed]:
    """Yield blocks of keys in ascending order, equal ones in the order of their rows.

    keyed: blocks whose rows ascend, also from one block to the next. memory: bytes for sorting a run. The result is the
    same for any `memory`.
    """
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
    held: list[Keyed] = []
    count = 0
    for keys, rows in keyed:
        while count + len(keys) >= capacity:
            room = capacity - count
            held.append((keys[:room], rows[:room]))
            yield _sort_blocks(held)
            count, keys, rows = 0, keys[room:], rows[room:]
        if len(keys):
            held.append((keys, rows))
            count += len(keys)
    if held:
        yield _sort_blocks(held)


def _sort_blocks(held: list[Keyed]) -> Keyed:
    """Merge the blocks of `held`, which is emptied, into one in the order of the keys."""
    keys, rows = (np.concatenate(part) for part in zip(*held, strict=True))
    held.clear()
    order = np.argsort(keys, kind="stable")
    return keys[order], rows[order]


def _merge_runs(keys: np.ndarray, rows: np.ndarray, borders: list[int], window: int) -> Iterator[Keyed]:
    """Merge the runs between `borders`.

    Each step takes from every run the keys up to the end of the window that ends first; if equal keys continue beyond
    it, later runs keep theirs for a later step.
    """
    at, ends = borders[:-1], borders[1:]
    while any(low < end for low, end in zip(at, ends, strict=True)):
        reach = [min(low + window, end) for low, end in zip(at, ends, strict=True)]
        beyond = [run for run, end in enumerate(ends) if reach[run] < end]
        if beyond:
            least = min(beyond, key=lambda run: (keys[reach[run] - 1], run))
            limit = keys[reach[least] - 1]
            for run, low in enumerate(at):
                if run != least:
                    here = keys[low : reach[run]]
                    reach[run] = low + int(here.searchsorted(limit, side="right" if run < least else "left"))
        some = [slice(low, high) for low, high in zip(at, reach, strict=True)]
        yield _sort_blocks([(keys[part], rows[part]) for part in some])
        at = reach
