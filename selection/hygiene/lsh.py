"""Near-duplicates: LSH proposes pairs, exact Jaccard similarity decides, connected components become groups.

    finder = NearDuplicates(settings, seed=0)
    for batch in batches: finder.sign(batch)        # first pass: band keys only
    finder.propose(alive)
    for batch in batches: finder.collect(batch)     # second pass: shingle sets of the rows that share a band
    first, similarity = finder.resolve()

Memory: 8 bytes a band and row on disk, and the shingle sets of proposed rows on disk; in memory one band's keys at a
time and a few numbers a row. No text is kept. The result depends on the order of the rows, never on the batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from selection.hygiene import config
from selection.hygiene.groups import Groups, crowds
from selection.hygiene.minhash import MinHasher, band_keys, bands_for
from selection.hygiene.shingles import Shingler, mix
from selection.hygiene.store import Growing

WINDOW = 64
"""In a band, a row is compared with the first row that has its key and with this many before it. So in a crowd of more
than 65 texts that share a key without being similar some pairs are left out; they are counted."""
_BATCH = 1 << 20  # shingles compared at a time


class NearDuplicates:
    """Groups of rows whose shingle sets have a Jaccard similarity of at least `settings.threshold`.

    Raises:
        SelectionError: the permutations cannot reach the recall.
    """

    def __init__(self, settings: config.NearDuplicates, *, seed: int):
        self.settings = settings
        self.bands, self.rows = bands_for(settings.threshold, settings.permutations, settings.recall)
        self._shingler = Shingler(settings.unit, settings.size)
        self._hasher = MinHasher(self.bands * self.rows, seed)
        self._keys = [Growing(np.uint64) for _ in range(self.bands)]
        self._filled = Growing(np.bool_)
        self._sets = _Sets()
        self._seen = 0
        self.diagnostics: dict[str, Any] = {"bands": self.bands, "rows": self.rows}

    def sign(self, normalised: Sequence[str]) -> None:
        """First pass: take the next rows."""
        hashes, counts = self._shingler(normalised)
        keys = band_keys(self._hasher.signatures(hashes, counts), self.bands, self.rows)
        for store, some in zip(self._keys, keys, strict=True):
            store.append(some)
        self._filled.append(counts > 0)

    def propose(self, alive: np.ndarray) -> None:
        """Find the rows that share a band with another one. alive: (N,) bool, the rows that take part."""
        rows = np.flatnonzero(alive & self._filled.array())
        proposed = np.zeros(len(alive), dtype=bool)
        for store in self._keys:
            members, _ = crowds(store.array()[rows], rows)
            proposed[members] = True
        self._total = len(alive)
        self._proposed = np.flatnonzero(proposed)
        self.diagnostics["proposed"] = len(self._proposed)

    def collect(self, normalised: Sequence[str]) -> None:
        """Second pass: take the same rows again."""
        low, self._seen = self._seen, self._seen + len(normalised)
        span = np.searchsorted(self._proposed, [low, self._seen])
        found = self._proposed[span[0] : span[1]]
        if len(found):
            self._sets.append(*self._shingler([normalised[row - low] for row in found]))

    def resolve(self) -> tuple[np.ndarray, np.ndarray]:
        """(first, similarity), each (N,): the first row of each row's group (itself if none is before it), and the
        exact Jaccard similarity with that row (NaN for a row that is its own first).

        Where a chain joins two rows, their similarity may lie below the threshold.
        """
        first = np.arange(self._total)
        similarity = np.full(self._total, np.nan)
        if len(self._proposed):
            label = self._groups()
            first[self._proposed] = self._proposed[label]
            moved = np.flatnonzero(label != np.arange(len(label)))
            similarity[self._proposed[moved]] = self._sets.jaccard(moved, label[moved])
        return first, similarity

    def _groups(self) -> np.ndarray:
        """(C,) for the C proposed rows: the first of each one's group, counted among the proposed."""
        groups = Groups(len(self._proposed))
        leader = self._sets.equal()
        groups.join(np.arange(len(leader)), leader)
        distinct = np.unique(leader)
        compared = left_out = 0
        for store in self._keys:
            members, crowd = crowds(store.array()[self._proposed[distinct]], distinct)
            for one, other in _pairs(members, crowd, groups):
                similar = self._sets.jaccard(one, other, floor=self.settings.threshold) >= self.settings.threshold
                groups.join(one[similar], other[similar])
                compared += len(one)
            left_out += _left_out(members, crowd, groups)
        self.diagnostics |= {"compared": compared, "left_out": left_out}
        return groups.label


def _pairs(members: np.ndarray, crowd: np.ndarray, groups: Groups) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pairs of one band that are still apart: each member with the first of its crowd, then with the one before
    it, two before it, … up to WINDOW. `groups` may grow between two steps."""
    start = np.searchsorted(crowd, crowd)
    for back in range(WINDOW + 1):
        place = np.arange(len(members))
        place = place[place - back > start]
        other = start[place] if back == 0 else place - back
        one, other = members[place], members[other]
        apart = groups.label[one] != groups.label[other]
        if apart.any():
            yield one[apart], other[apart]
        if back == 0 and len(members):  # crowds that are one group by now need no further look
            mixed = np.zeros(crowd[-1] + 1, dtype=bool)
            mixed[crowd[groups.label[members] != groups.label[members[start]]]] = True
            members, crowd = members[mixed[crowd]], crowd[mixed[crowd]]
            start = np.searchsorted(crowd, crowd)


def _left_out(members: np.ndarray, crowd: np.ndarray, groups: Groups) -> int:
    """How many pairs of one band are apart without having been compared."""
    large = (np.bincount(crowd) > WINDOW + 1)[crowd] if len(crowd) else np.zeros(0, dtype=bool)
    if not large.any():
        return 0
    members, crowd = members[large], crowd[large]
    _, sizes = np.unique(crowd, return_counts=True)
    _, joined = np.unique(np.stack([crowd, groups.label[members]]), axis=1, return_counts=True)
    apart = int((sizes.astype(np.int64) ** 2).sum() - (joined.astype(np.int64) ** 2).sum()) // 2
    return apart - sum(len(one) for one, _ in _pairs(members, crowd, groups))


class _Sets:
    """The sets of shingles of some rows, each sorted, one after another."""

    def __init__(self) -> None:
        self._values = Growing(np.int64, limit=1 << 24)
        self._sizes = Growing(np.int64)

    def append(self, hashes: np.ndarray, counts: np.ndarray) -> None:
        """Add the sets of the next rows: hashes (uint64), row after row, and how many each row has (at least 1)."""
        hashes = hashes >> np.uint64(1)  # 63 bits, so that a shingle may be a column of a sparse matrix
        sets = [_sorted_set(part) for part in np.split(hashes, np.cumsum(counts)[:-1])]
        self._sizes.append(np.array([len(part) for part in sets]))
        self._values.append(np.concatenate(sets))

    def equal(self) -> np.ndarray:
        """(C,): the first set that equals each set, by size and the sum of its mixed hashes."""
        values, sizes = self._values.array(), self._sizes.array()
        starts = np.cumsum(sizes) - sizes
        sums = np.empty(len(sizes), np.uint64)
        low = 0
        while low < len(sizes):
            high = max(int(np.searchsorted(starts, starts[low] + _BATCH, side="right")) - 1, low + 1)
            end = starts[high] if high < len(starts) else len(values)
            mixed = mix(values[starts[low] : end].astype(np.uint64))
            sums[low:high] = np.add.reduceat(mixed, starts[low:high] - starts[low])
            low = high
        order = np.lexsort((np.arange(len(sums)), sizes, sums))
        opens = np.ones(len(sums), dtype=bool)
        opens[1:] = (sums[order][1:] != sums[order][:-1]) | (sizes[order][1:] != sizes[order][:-1])
        leader = np.empty(len(sums), np.int64)
        leader[order] = order[np.flatnonzero(opens)[np.cumsum(opens) - 1]]
        return leader

    def jaccard(self, one: np.ndarray, other: np.ndarray, *, floor: float = 0.0) -> np.ndarray:
        """Exact Jaccard similarity of each pair; of a pair whose sizes keep it below `floor`, that upper bound."""
        sizes = self._sizes.array()
        starts = np.cumsum(sizes) - sizes
        a, b = sizes[one], sizes[other]
        result = np.minimum(a, b) / np.maximum(a, b)
        todo = np.flatnonzero(result >= floor)
        batch = np.cumsum(a[todo] + b[todo]) // _BATCH
        for part in np.split(todo, np.flatnonzero(np.diff(batch)) + 1):
            if len(part):
                shared = self._matrix(one[part], starts, sizes).multiply(self._matrix(other[part], starts, sizes))
                both = np.diff(csr_matrix(shared).indptr)
                result[part] = both / (a[part] + b[part] - both)
        return result

    def _matrix(self, rows: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> csr_matrix:
        """The sets of `rows` as a sparse 0/1 matrix with a column for each 63-bit hash."""
        pointer = np.append(0, np.cumsum(sizes[rows]))
        places = np.repeat(starts[rows] - pointer[:-1], sizes[rows]) + np.arange(pointer[-1])
        columns = self._values.array()[places]
        shape = (len(rows), int(np.iinfo(np.int64).max))
        matrix = csr_matrix((np.ones(len(columns), np.int8), columns, pointer), shape=shape)
        matrix.has_canonical_format = True  # each set is sorted and has no repetition
        return matrix


def _sorted_set(values: np.ndarray) -> np.ndarray:
    """The distinct values in ascending order; np.unique hashes instead, ten times slower for millions."""
    values.sort()
    new = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return values[new]
