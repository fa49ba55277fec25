"""Records listed for dropping by another tool: ids, their matches and reasons, looked up among the ids of a pool.

    listed = Listed(memory=1 << 28)
    for batch in batches: listed.add(ids, matches, reasons)
    listed.find(pool_ids)
    cleaned = clean(texts, settings, listed=listed)

Memory does not grow with either side: ids are matched by their 128-bit digests, sorted on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flatshift.selection.hygiene.duplicates import ExactDuplicates
from flatshift.selection.hygiene.store import GrowingArray, block_ranges, build_array

_IDS = 4096


class DropList:
    """Entries of drop lists, matched with a pool. memory: bytes for sorting digests of ids.

    entry: (N,) int64, for each record of the pool the number of its entry, −1 for none; unknown: the numbers of entries
    whose id no record has, ascending. Both are set by `find`.
    """

    entry: np.ndarray
    unknown: np.ndarray

    def __init__(self, *, memory: int):
        self._digests = ExactDuplicates(memory=memory)
        self._matches, self._reasons = _StringArray(), _StringArray()
        self._count = 0

    def __len__(self) -> int:
        """Number of entries so far."""
        return self._count

    def add(self, ids: Sequence[str], matches: Sequence[str], reasons: Sequence[str]) -> None:
        """Add the next entries, each id once; "" for a missing match or reason."""
        self._digests.add(ids)
        self._matches.add(matches)
        self._reasons.add(reasons)
        self._count += len(ids)

    def find(self, ids: Iterable[str]) -> None:
        """Find the entries among the ids of a pool, in file order."""
        held: list[str] = []
        records = 0
        for name in ids:
            held.append(name)
            records += 1
            if len(held) == _IDS:
                self._digests.add(held)
                held = []
        self._digests.add(held)
        count = self._count
        first = self._digests.first(np.broadcast_to(np.True_, count + records))
        unmet = build_array(count, np.bool_, lambda low, high: True)
        self.entry = build_array(records, np.int64, lambda low, high: -1)
        for low, high in block_ranges(records):
            entries = first[count + low : count + high]
            found = np.flatnonzero(entries < count)
            self.entry[low + found] = entries[found]
            unmet[entries[found]] = False
        unknown = GrowingArray(np.int64)
        for low, high in block_ranges(count):
            unknown.append(low + np.flatnonzero(unmet[low:high]))
        self.unknown = unknown.array()

    def told(self, row: int) -> tuple[str | None, str]:
        """Return the match of the listed record in this row (None if missing), and its reason ("" if missing)."""
        entry = int(self.entry[row])
        return self._matches[entry] or None, self._reasons[entry]


class _StringArray:
    """Texts concatenated in one array."""

    def __init__(self) -> None:
        self._bytes, self._borders = GrowingArray(np.uint8), GrowingArray(np.int64)
        self._borders.append(np.zeros(1))

    def add(self, texts: Sequence[str]) -> None:
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._borders.append(self._bytes.length + np.cumsum([len(text) for text in encoded]))
        self._bytes.append(np.frombuffer(b"".join(encoded), np.uint8))

    def __getitem__(self, number: int) -> str:
        low, high = self._borders.array()[number : number + 2]
        return self._bytes.array()[low:high].tobytes().decode("utf-8", "surrogatepass")
