"""Clusters of rows that share a key (a bucket of an LSH band, a digest), their pairs to compare, and the groups joined
by similar pairs. All in bounded memory: large arrays of one value per row are on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from flatshift.selection.hygiene.store import GrowingArray, Keyed, block_ranges, build_array, sort_keys

WINDOW = 64
"""A row is compared with the first row that has its key and with this many before it. So in a cluster of more than 65
texts that share a key without being similar, some pairs are skipped; they are counted."""
PIECE = 1 << 18  # rows of clusters whose pairs are processed at a time


class DisjointSets:
    """Rows 0 … n−1 in groups that can be joined: union–find in one array.

    parent: (n,) int64, owned by this object: for each row, a row of its group that is no greater; itself for the first.
    """

    def __init__(self, parent: np.ndarray):
        self._parent = parent

    def __len__(self) -> int:
        return len(self._parent)

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the smallest row of each row's group."""
        label = self._parent[rows]
        while True:
            above = self._parent[label]
            if np.array_equal(above, label):
                break
            label = above
        self._parent[rows] = label
        return label

    def join(self, rows: np.ndarray, partners: np.ndarray) -> None:
        """Join the groups of `one[i]` and `other[i]` for every i."""
        edges = np.stack([self.of(rows), self.of(partners)])
        edges = edges[:, edges[0] != edges[1]]
        if not edges.size:
            return
        nodes, index = np.unique(edges, return_inverse=True)
        sources, sinks = index.reshape(2, -1)
        graph = coo_matrix((np.ones(len(sources), np.int8), (sources, sinks)), shape=(len(nodes), len(nodes)))
        _, component = connected_components(graph, directed=False)
        _, index_of_first = np.unique(component, return_index=True)  # nodes are in ascending order
        self._parent[nodes] = nodes[index_of_first][component]


class DuplicateClusters:
    """Rows that share their key with another row. keyed, memory: as for `sort_keys`. rows: (m,) the rows of each
    cluster in ascending order, cluster after cluster. number: (m,) index of each row's cluster, from 0."""

    def __init__(self, keyed: Iterable[Keyed], memory: int):
        rows, number = GrowingArray(np.int64), GrowingArray(np.int64)
        count, tied = 0, False  # clusters so far; True if the waiting row has the key of the one before it
        waiting: Keyed = np.empty(0, np.uint64), np.empty(0, np.int64)
        for block in sort_keys(keyed, memory):
            keys, block_rows = (np.concatenate(pair) for pair in zip(waiting, block, strict=True))
            same = keys[1:] == keys[:-1]
            before = np.append(tied, same)
            shared = before[:-1] | same
            opens = np.cumsum(shared & ~before[:-1])
            rows.append(block_rows[:-1][shared])
            number.append(count - 1 + opens[shared])
            count += int(opens[-1]) if len(opens) else 0
            waiting, tied = (keys[-1:], block_rows[-1:]), bool(before[-1])
        if tied:
            rows.append(waiting[1])
            number.append(np.array([count - 1]))
        self.rows, self.number = rows.array(), number.array()
        self.memory = memory

    def pairs(self, groups: DisjointSets) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the pairs that are not in one group yet: each row with the first of its cluster, then with the one
        before it, two before it, … up to WINDOW. `groups` may grow between two steps."""
        for low, high in self._pieces():
            rows, number, overlap = self._piece(low, high)
            yield from _candidate_pairs(rows, number, overlap, groups)

    def left_out(self, groups: DisjointSets) -> int:
        """Count the pairs that share a key but are neither in one group nor compared, after all of `pairs`."""
        large = [span for span in self._pieces() if self._large(*span).any()]
        apart = (sum(int(self._sizes(*span)[self._large(*span)].sum()) for span in large) - self._together(groups)) // 2
        for low, high in large:
            rows, number, overlap = self._piece(low, high)
            is_large = self._large(low, high)
            selected = np.append(np.full(overlap, is_large[0]), is_large)
            overlap *= int(is_large[0])
            apart -= sum(
                len(pair_rows) for pair_rows, _ in _candidate_pairs(rows[selected], number[selected], overlap, groups)
            )
        return apart

    def _together(self, groups: DisjointSets) -> int:
        """Count the ordered pairs of rows (including each row with itself) that large clusters have in one group."""
        members = 0

        def labelled() -> Iterator[Keyed]:
            nonlocal members
            for low, high in self._pieces():
                index = low + np.flatnonzero(self._large(low, high))
                label = groups.of(self.rows[index]).astype(np.uint64)
                members += len(index)
                yield self.number[index].astype(np.uint64) * np.uint64(len(groups)) + label, index

        clusters = DuplicateClusters(labelled(), self.memory)
        alone = members - len(clusters.rows)
        return alone + sum(int(clusters._sizes(*span).sum()) for span in clusters._pieces())

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for low in range(0, len(self.rows), PIECE):
            yield low, min(low + PIECE, len(self.rows))

    def _piece(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return rows and clusters of [low, high), preceded by `known` earlier rows: the first row and the last WINDOW
        rows of a cluster that straddles the boundary."""
        start = int(np.searchsorted(self.number, self.number[low]))
        before = np.arange(max(start + 1, low - WINDOW), low)
        if start < low:
            before = np.append(start, before)
        index = np.append(before, np.arange(low, high))
        return self.rows[index], self.number[index], len(before)

    def _sizes(self, low: int, high: int) -> np.ndarray:
        """Return the size of the cluster of each of [low, high)."""
        numbers = self.number[low:high]
        return np.searchsorted(self.number, numbers, side="right") - np.searchsorted(self.number, numbers)

    def _large(self, low: int, high: int) -> np.ndarray:
        """Return a mask of [low, high): rows in a cluster too large for all of its pairs to be compared."""
        return np.asarray(self._sizes(low, high) > WINDOW + 1)


def _candidate_pairs(
    rows: np.ndarray, number: np.ndarray, overlap: int, groups: DisjointSets
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the pairs of the rows after the first `known` with earlier rows of their clusters that are to be compared
    and not in one group."""
    start = np.searchsorted(number, number)
    label = groups.of(rows)
    for back in range(WINDOW + 1):
        index = np.arange(overlap, len(rows))
        index = index[index - back > start[overlap:]]
        partner = start[index] if back == 0 else index - back
        apart = label[index] != label[partner]
        if apart.any():
            yield rows[index[apart]], rows[partner[apart]]
            label = groups.of(rows)
        if back == 0 and len(rows):  # skip clusters that have become one group
            mixed = np.zeros(number[-1] - number[0] + 1, dtype=bool)
            mixed[number[label != label[start]] - number[0]] = True
            open_rows = mixed[number - number[0]]
            overlap = int(open_rows[:overlap].sum())
            rows, number, label = rows[open_rows], number[open_rows], label[open_rows]
            start = np.searchsorted(number, number)


def first_matches(
    count: int, keyed: Iterable[Keyed], second: Callable[[np.ndarray], np.ndarray], memory: int
) -> np.ndarray:
    """Return (count,) int64: for each row the first row with the same key and second value, or itself.

    keyed, memory: as for `sort_keys`; rows missing from it match nothing. second: function from rows to values. The
    keys are 64-bit hashes: rows that share one by chance are few, and held in memory.
    """
    first = build_array(count, np.int64, np.arange)
    crowds = DuplicateClusters(keyed, memory)
    met: dict[tuple[int, int], int] = {}
    for low, high in block_ranges(len(crowds.rows)):
        rows, number = crowds.rows[low:high], crowds.number[low:high]
        lead = crowds.rows[np.searchsorted(crowds.number, number)]
        same = second(rows) == second(lead)
        first[rows[same]] = lead[same]
        values = second(rows[~same]).tolist()
        for row, crowd, value in zip(rows[~same].tolist(), number[~same].tolist(), values, strict=True):
            first[row] = met.setdefault((crowd, value), row)
    return first
