"""Duplicates. Exact: texts that are equal but for case, blanks and Unicode form. Near: LSH proposes pairs, exact
Jaccard similarity decides, connected components become groups.

MinHash signatures are folded into the keys of LSH bands (Broder 1997; Leskovec, Rajaraman & Ullman, chapter 3).

    finder = NearDuplicates(settings, seed=0)
    for batch in batches: finder.sign(batch)        # first pass: band keys only
    finder.propose(alive)
    for batch in batches: finder.collect(batch)     # second pass: shingle sets of the rows that share a band
    first, similarity = finder.resolve()

Memory: 8 bytes a band and row on disk, and the shingle sets of proposed rows on disk; in memory one band's keys at a
time and a few numbers a row. No text is kept. The result depends on the order of the rows, never on the batches.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.csgraph import connected_components

from selection.errors import SelectionError
from selection.hygiene import config
from selection.hygiene.shingles import Shingler, mix
from selection.hygiene.store import Growing


def normalise(text: str) -> str:
    """The text in lower case with single blanks, in Unicode's NFKC form (ligatures and wide letters made plain)."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(text.lower().split())


class ExactDuplicates:
    """Finds equal texts by 128-bit digests: 16 bytes a row, nothing else is kept.

    With 10⁸ rows the chance of a single wrong match is below 10⁻²².
    """

    def __init__(self) -> None:
        self._digests = Growing(np.uint64)

    def add(self, normalised: Sequence[str]) -> None:
        """Take the next rows, already normalised."""
        raw = b"".join(
            hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in normalised
        )
        self._digests.append(np.frombuffer(raw, dtype="<u8"))

    def first(self, alive: np.ndarray) -> np.ndarray:
        """(N,) int64: for each row the first living row with its text, itself where there is none before it.

        alive: (N,) bool; the other rows neither match nor are matched.
        """
        digests = self._digests.array().reshape(-1, 2)
        rows = np.flatnonzero(alive)
        first = np.arange(len(digests))
        if not len(rows):
            return first
        high, low = digests[rows, 0], digests[rows, 1]
        order = np.lexsort((rows, low, high))
        new = np.ones(len(rows), dtype=bool)
        new[1:] = (high[order][1:] != high[order][:-1]) | (low[order][1:] != low[order][:-1])
        leader = rows[order][np.flatnonzero(new)[np.cumsum(new) - 1]]
        first[rows[order]] = leader
        return first


class Groups:
    """Rows 0 … n−1, at first each for itself. `label` (n,): the smallest row of each row's group."""

    def __init__(self, n: int):
        self.label = np.arange(n)

    def join(self, one: np.ndarray, other: np.ndarray) -> None:
        """Join the groups of `one[i]` and `other[i]` for every i."""
        edges = np.stack([self.label[one], self.label[other]])
        edges = edges[:, edges[0] != edges[1]]
        if not edges.size:
            return
        nodes, index = np.unique(edges, return_inverse=True)
        left, right = index.reshape(2, -1)
        graph = coo_matrix((np.ones(len(left), np.int8), (left, right)), shape=(len(nodes), len(nodes)))
        _, component = connected_components(graph, directed=False)
        smallest = np.full(component.max() + 1, len(self.label))
        np.minimum.at(smallest, component, nodes)
        parent = np.arange(len(self.label))
        parent[nodes] = smallest[component]
        self.label = parent[self.label]


def crowds(keys: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows that share their key with another one.

    keys, rows: (n,), the rows in ascending order. Returns members, the rows of each such crowd in ascending order,
    crowd after crowd, and the number of each one's crowd, from 0.
    """
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    same = keys[1:] == keys[:-1]
    shared = np.zeros(len(keys), dtype=bool)
    shared[1:] |= same
    shared[:-1] |= same
    opens = np.ones(len(keys), dtype=bool)
    opens[1:] = ~same
    return rows[order][shared], np.cumsum(opens[shared]) - 1


_TILE = 1 << 16  # hashes worked on at a time: two such arrays stay in the processor's cache


def bands_for(threshold: float, permutations: int, recall: float) -> tuple[int, int]:
    """(bands, rows): as many rows a band as leave a pair at `threshold` at least `recall` of being proposed.

    A pair of similarity s shares at least one band with probability 1 − (1 − s^rows)^bands; more rows mean fewer
    pairs to compare.

    Raises:
        SelectionError: not even one row a band reaches the recall.
    """
    for rows in range(permutations, 0, -1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= recall:
            return bands, rows
    best = 1 - (1 - threshold) ** permutations
    raise SelectionError(
        f"near.recall: {permutations} permutations find a pair of similarity {threshold} with chance {best:.3f} at "
        f"most, below {recall}; raise near.permutations or lower near.recall"
    )


class MinHasher:
    """Signatures under `permutations` affine maps h → a·h + b modulo 2³² with odd a, drawn from `seed`.

    The maps work on the upper half of well mixed 64-bit shingle hashes, as datasketch's default does on SHA-1.
    """

    def __init__(self, permutations: int, seed: int):
        draw = np.random.Generator(np.random.PCG64(seed))
        self.a = (draw.integers(0, 1 << 31, permutations, dtype=np.uint64) * 2 + 1).astype(np.uint32)
        self.b = draw.integers(0, 1 << 32, permutations, dtype=np.uint64).astype(np.uint32)

    def signatures(self, hashes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """(permutations, n) uint32: the smallest value of each map over each text's shingles.

        hashes: (S,) uint64, text after text. counts: (n,) shingles of each text; a text without any gets the largest
        value everywhere.
        """
        full = np.flatnonzero(counts)
        out = np.full((len(self.a), len(counts)), np.uint32(0xFFFFFFFF))
        if not len(full):
            return out
        short = (hashes >> np.uint64(32)).astype(np.uint32)
        # A text with more shingles than a tile is cut into parts, whose minima are joined at the end.
        parts = -(-counts[full] // _TILE)
        owner = np.repeat(np.arange(len(full)), parts)
        first = np.cumsum(parts) - parts
        starts = (np.cumsum(counts) - counts)[full][owner] + _TILE * (np.arange(len(owner)) - first[owner])
        minima = self._minima(short, starts)
        out[:, full] = minima if len(owner) == len(full) else np.minimum.reduceat(minima, first, axis=1)
        return out

    def _minima(self, short: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """(permutations, len(starts)): minima over the runs that begin at `starts`."""
        minima = np.empty((len(self.a), len(starts)), np.uint32)
        ends = np.append(starts[1:], len(short))
        low = 0
        while low < len(starts):
            high = max(int(np.searchsorted(ends, starts[low] + _TILE, side="right")), low + 1)
            tile = short[starts[low] : ends[high - 1]]
            inside = starts[low:high] - starts[low]
            value = np.empty_like(tile)
            for k in range(len(self.a)):
                np.multiply(tile, self.a[k], out=value)
                value += self.b[k]
                np.minimum.reduceat(value, inside, out=minima[k, low:high])
            low = high
        return minima


def band_keys(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """(bands, n) uint64: one key for each band of each text; equal keys mean equal values in all of the band's rows.

    signatures: (permutations ≥ bands·rows, n) uint32.
    """
    grid = signatures[: bands * rows].reshape(bands, rows, -1)
    keys = np.zeros((bands, grid.shape[2]), np.uint64)
    for row in range(rows):
        keys = mix(keys + np.uint64(0x9E3779B97F4A7C15) + grid[:, row])
    return keys


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
