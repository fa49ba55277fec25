"""Rows that share a key (a bucket of an LSH band, a digest), which of their pairs are compared, and the groups that
similar pairs join them to. All of it in bounded memory: arrays of one value a row lie on disk where they are large."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from flatshift.selection.hygiene.external_sort import Keyed, sort_keys
from flatshift.selection.hygiene.store import Growing, blocks, made

WINDOW = 64
"""A row is compared with the first row that has its key and with this many before it. So in a crowd of more than 65
texts that share a key without being similar some pairs are left out; they are counted."""
PIECE = 1 << 18
"""Rows of crowds whose pairs are worked on at a time."""


class Groups:
    """Rows 0 … n−1 in groups that are joined: union–find in one array.

    parent: (n,) int64, owned from now on: of each row one of its group that is no greater; itself for the first.
    """

    def __init__(self, parent: np.ndarray):
        self._parent = parent

    def __len__(self) -> int:
        return len(self._parent)

    def of(self, rows: np.ndarray) -> np.ndarray:
        """The smallest row of each one's group."""
        label = self._parent[rows]
        while True:
            above = self._parent[label]
            if np.array_equal(above, label):
                break
            label = above
        self._parent[rows] = label
        return label

    def join(self, one: np.ndarray, other: np.ndarray) -> None:
        """Join the groups of `one[i]` and `other[i]` for every i."""
        edges = np.stack([self.of(one), self.of(other)])
        edges = edges[:, edges[0] != edges[1]]
        if not edges.size:
            return
        nodes, index = np.unique(edges, return_inverse=True)
        left, right = index.reshape(2, -1)
        graph = coo_matrix((np.ones(len(left), np.int8), (left, right)), shape=(len(nodes), len(nodes)))
        _, component = connected_components(graph, directed=False)
        _, first = np.unique(component, return_index=True)  # nodes ascend
        self._parent[nodes] = nodes[first][component]


class DuplicateClusters:
    """The rows that share their key with another one.

    keyed: as of `sort_keys`, `memory` too. rows: (m,) those of each crowd in ascending order, crowd after crowd.
    number: (m,) of each one's crowd, from 0.
    """

    def __init__(self, keyed: Iterable[Keyed], memory: int):
        rows, number = Growing(np.int64), Growing(np.int64)
        count, tied = 0, False  # crowds so far; whether the row that waits has the key of the one before it
        waiting: Keyed = np.empty(0, np.uint64), np.empty(0, np.int64)
        for some in sort_keys(keyed, memory):
            keys, here = (np.concatenate(pair) for pair in zip(waiting, some, strict=True))
            same = keys[1:] == keys[:-1]
            before = np.append(tied, same)
            shared = before[:-1] | same
            opens = np.cumsum(shared & ~before[:-1])
            rows.append(here[:-1][shared])
            number.append(count - 1 + opens[shared])
            count += int(opens[-1]) if len(opens) else 0
            waiting, tied = (keys[-1:], here[-1:]), bool(before[-1])
        if tied:
            rows.append(waiting[1])
            number.append(np.array([count - 1]))
        self.rows, self.number = rows.array(), number.array()
        self.memory = memory

    def pairs(self, groups: Groups) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The pairs that are still apart: each row with the first of its crowd, then with the one before it, two before
        it, … up to WINDOW. `groups` may grow between two steps."""
        for low, high in self._pieces():
            rows, number, known = self._piece(low, high)
            yield from _pairs(rows, number, known, groups)

    def left_out(self, groups: Groups) -> int:
        """How many pairs that share a key are apart without having been compared, once all of `pairs` were."""
        large = [span for span in self._pieces() if self._large(*span).any()]
        apart = (sum(int(self._sizes(*span)[self._large(*span)].sum()) for span in large) - self._together(groups)) // 2
        for low, high in large:
            rows, number, known = self._piece(low, high)
            here = self._large(low, high)
            chosen = np.append(np.full(known, here[0]), here)
            known *= int(here[0])
            apart -= sum(len(one) for one, _ in _pairs(rows[chosen], number[chosen], known, groups))
        return apart

    def _together(self, groups: Groups) -> int:
        """Ordered pairs of rows, of each with itself too, that large crowds have in one group."""
        members = 0

        def labelled() -> Iterator[Keyed]:
            nonlocal members
            for low, high in self._pieces():
                place = low + np.flatnonzero(self._large(low, high))
                label = groups.of(self.rows[place]).astype(np.uint64)
                members += len(place)
                yield self.number[place].astype(np.uint64) * np.uint64(len(groups)) + label, place

        found = DuplicateClusters(labelled(), self.memory)
        alone = members - len(found.rows)
        return alone + sum(int(found._sizes(*span).sum()) for span in found._pieces())

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for low in range(0, len(self.rows), PIECE):
            yield low, min(low + PIECE, len(self.rows))

    def _piece(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Rows and crowds of [low, high), and before them the `known` ones whom a crowd that goes on here is compared
        with: its first and the WINDOW before."""
        start = int(np.searchsorted(self.number, self.number[low]))
        before = np.arange(max(start + 1, low - WINDOW), low)
        if start < low:
            before = np.append(start, before)
        place = np.append(before, np.arange(low, high))
        return self.rows[place], self.number[place], len(before)

    def _sizes(self, low: int, high: int) -> np.ndarray:
        """Of the crowd of each of [low, high)."""
        some = self.number[low:high]
        return np.searchsorted(self.number, some, side="right") - np.searchsorted(self.number, some)

    def _large(self, low: int, high: int) -> np.ndarray:
        """Which of [low, high) are in a crowd too large for all of its pairs to be compared."""
        return np.asarray(self._sizes(low, high) > WINDOW + 1)


def _pairs(rows: np.ndarray, number: np.ndarray, known: int, groups: Groups) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pairs of the rows behind the first `known` with those before them in their crowds, as far as they are
    compared and are apart."""
    start = np.searchsorted(number, number)
    label = groups.of(rows)
    for back in range(WINDOW + 1):
        place = np.arange(known, len(rows))
        place = place[place - back > start[known:]]
        other = start[place] if back == 0 else place - back
        apart = label[place] != label[other]
        if apart.any():
            yield rows[place[apart]], rows[other[apart]]
            label = groups.of(rows)
        if back == 0 and len(rows):  # crowds that are one group by now need no further look
            mixed = np.zeros(number[-1] - number[0] + 1, dtype=bool)
            mixed[number[label != label[start]] - number[0]] = True
            left = mixed[number - number[0]]
            known = int(left[:known].sum())
            rows, number, label = rows[left], number[left], label[left]
            start = np.searchsorted(number, number)


def leaders(count: int, keyed: Iterable[Keyed], second: Callable[[np.ndarray], np.ndarray], memory: int) -> np.ndarray:
    """(count,) int64: for each row the first whose key and second value are its own; itself where none is before it.

    keyed, memory: as of `sort_keys`; rows that are missing there neither match nor are matched. second: values of rows.
    The keys are hashes of 64 bits: rows that share one by chance are few, and held in memory.
    """
    first = made(count, np.int64, np.arange)
    crowds = DuplicateClusters(keyed, memory)
    met: dict[tuple[int, int], int] = {}
    for low, high in blocks(len(crowds.rows)):
        rows, number = crowds.rows[low:high], crowds.number[low:high]
        lead = crowds.rows[np.searchsorted(crowds.number, number)]
        same = second(rows) == second(lead)
        first[rows[same]] = lead[same]
        values = second(rows[~same]).tolist()
        for row, crowd, value in zip(rows[~same].tolist(), number[~same].tolist(), values, strict=True):
            first[row] = met.setdefault((crowd, value), row)
    return first
