"""Duplicate detection.

Exact: texts that are equal except for case, blanks and Unicode form. Near: MinHash signatures folded into the keys of
LSH bands propose pairs (Broder 1997; Leskovec, Rajaraman & Ullman, chapter 3), exact Jaccard similarity decides,
connected components become groups.

    finder = NearDuplicateGroups(settings, seed=0, memory=1 << 28)
    for batch in batches: finder.sign(batch)        # first pass: band keys only
    finder.propose(alive)
    for batch in batches: finder.collect(batch)     # second pass: shingle sets of the rows that share a band
    first, similarity = finder.resolve()

Memory: `memory` bytes for sorting the keys of a band, plus the batches of texts and of pairs; arrays with a value for
each row are on disk. The result depends on the order of the rows, never on the batches or the memory.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from flatshift.selection.errors import SelectionError
from flatshift.selection.hashing import Shingler, mix64
from flatshift.selection.hygiene import hygiene_config
from flatshift.selection.hygiene.duplicate_clusters import DisjointSets, DuplicateClusters, first_matches
from flatshift.selection.hygiene.store import GrowingArray, Keyed, block_ranges, build_array

_TILE = 1 << 16  # hashes signed at a time: two such arrays fit in the processor's cache


def normalise_text(text: str) -> str:
    """Return the text in lower case, single blanks and Unicode's NFKC form (ligatures and wide letters made plain)."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(text.lower().split())


class ExactDuplicates:
    """Finds equal texts by 128-bit digests: 16 bytes a row on disk. memory: bytes for sorting them.

    With 10⁸ rows the chance of a single wrong match is below 10⁻²².
    """

    def __init__(self, *, memory: int) -> None:
        self.memory = memory
        self._digests = GrowingArray(np.uint64)

    def add(self, normalised: Sequence[str]) -> None:
        """Add the next rows, already normalised."""
        raw = b"".join(
            hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in normalised
        )
        self.add_digests(np.frombuffer(raw, dtype="<u8"))

    def add_digests(self, digests: np.ndarray) -> None:
        """Add the next rows by their `digests`."""
        self._digests.append(digests)

    @property
    def digests(self) -> np.ndarray:
        """Two numbers for each row so far."""
        return self._digests.array()

    def first(self, alive: np.ndarray) -> np.ndarray:
        """Return (N,) int64: for each row the first alive row with its text, or itself.

        alive: (N,) bool; the other rows match nothing.
        """
        digests = self.digests.reshape(-1, 2)
        living = ((digests[rows, 0], rows) for rows in rows_in_blocks(alive))
        return first_matches(len(digests), living, lambda rows: digests[rows, 1], self.memory)


def rows_in_blocks(mask: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows where `mask` (N,) holds, in blocks."""
    for low, high in block_ranges(len(mask)):
        yield low + np.flatnonzero(mask[low:high])


def choose_bands(threshold: float, permutations: int, recall: float) -> tuple[int, int]:
    """Return (bands, rows): the most rows per band for which a pair at `threshold` is proposed with at least `recall`.

    A pair of similarity s shares at least one band with probability 1 − (1 − s^rows)^bands; more rows mean fewer pairs
    to compare. Raises SelectionError if not even one row per band reaches the recall.
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

    The maps use the upper half of well mixed 64-bit shingle hashes, as datasketch's default does on SHA-1.
    """

    def __init__(self, permutations: int, seed: int):
        draw = np.random.Generator(np.random.PCG64(seed))
        self.a = (draw.integers(0, 1 << 31, permutations, dtype=np.uint64) * 2 + 1).astype(np.uint32)
        self.b = draw.integers(0, 1 << 32, permutations, dtype=np.uint64).astype(np.uint32)

    def signatures(self, hashes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return (permutations, n) uint32: the smallest value of each map over each text's shingles. hashes: (S,)
        uint64, text after text. counts: (n,) shingles of each text; a text without any gets the largest value."""
        full = np.flatnonzero(counts)
        out = np.full((len(self.a), len(counts)), np.uint32(0xFFFFFFFF))
        if not len(full):
            return out
        short = (hashes >> np.uint64(32)).astype(np.uint32)
        # A text with more shingles than a tile is split into parts, whose minima are combined at the end.
        parts = -(-counts[full] // _TILE)
        owner = np.repeat(np.arange(len(full)), parts)
        part_starts = np.cumsum(parts) - parts
        starts = (np.cumsum(counts) - counts)[full][owner] + _TILE * (np.arange(len(owner)) - part_starts[owner])
        minima = self._minima(short, starts)
        out[:, full] = minima if len(owner) == len(full) else np.minimum.reduceat(minima, part_starts, axis=1)
        return out

    def _minima(self, short: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return (permutations, len(starts)): minima over the runs that begin at `starts`."""
        minima = np.empty((len(self.a), len(starts)), np.uint32)
        ends = np.append(starts[1:], len(short))
        low = 0
        while low < len(starts):
            high = max(int(np.searchsorted(ends, starts[low] + _TILE, side="right")), low + 1)
            tile = short[starts[low] : ends[high - 1]]
            tile_starts = starts[low:high] - starts[low]
            value = np.empty_like(tile)
            for k in range(len(self.a)):
                np.multiply(tile, self.a[k], out=value)
                value += self.b[k]
                np.minimum.reduceat(value, tile_starts, out=minima[k, low:high])
            low = high
        return minima


def band_keys(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Return (bands, n) uint64: one key for each band of each text; equal keys mean equal values in all its rows.

    signatures: (permutations ≥ bands·rows, n) uint32.
    """
    grid = signatures[: bands * rows].reshape(bands, rows, -1)
    keys = np.zeros((bands, grid.shape[2]), np.uint64)
    for row in range(rows):
        keys = mix64(keys + np.uint64(0x9E3779B97F4A7C15) + grid[:, row])
    return keys


_BATCH = 1 << 20  # shingles compared at a time


class NearDuplicateGroups:
    """Groups of rows whose shingle sets have a Jaccard similarity of at least `settings.threshold`.

    memory: bytes for sorting the keys of a band. Raises SelectionError if the permutations cannot reach the recall.
    """

    def __init__(self, settings: hygiene_config.NearDuplicates, *, seed: int, memory: int):
        self.settings = settings
        self.memory = memory
        self.bands, self.rows = choose_bands(settings.threshold, settings.permutations, settings.recall)
        self._shingler = Shingler(settings.unit, settings.size)
        self._hasher = MinHasher(self.bands * self.rows, seed)
        self._keys = [GrowingArray(np.uint64) for _ in range(self.bands)]
        self._filled = GrowingArray(np.bool_)
        self._sets = _ShingleSets()
        self._seen = 0
        self.diagnostics: dict[str, Any] = {"bands": self.bands, "rows": self.rows}

    def sign(self, normalised: Sequence[str]) -> None:
        """First pass: add the next rows."""
        hashes, counts = self._shingler(normalised)
        self.add_keys(band_keys(self._hasher.signatures(hashes, counts), self.bands, self.rows), counts > 0)

    def add_keys(self, keys: np.ndarray, filled: np.ndarray) -> None:
        """Add the next rows by their `keys`, and a mask of those with a shingle."""
        for store, values in zip(self._keys, keys, strict=True):
            store.append(values)
        self._filled.append(filled)

    @property
    def keys(self) -> np.ndarray:
        """Keys of the rows signed so far, (bands, n) uint64."""
        return np.stack([store.array() for store in self._keys])

    @property
    def filled(self) -> np.ndarray:
        """Mask of the rows signed so far that have a shingle."""
        return self._filled.array()

    def propose(self, alive: np.ndarray) -> None:
        """Find the rows that share a band with another one. alive: (N,) bool, the rows that take part."""
        filled = self.filled
        taking_part = build_array(len(alive), np.bool_, lambda low, high: alive[low:high] & filled[low:high])
        proposed = build_array(len(alive), np.bool_, lambda low, high: False)
        for store in self._keys:
            keys = store.array()
            crowds = DuplicateClusters(((keys[rows], rows) for rows in rows_in_blocks(taking_part)), self.memory)
            for low, high in block_ranges(len(crowds.rows)):
                proposed[crowds.rows[low:high]] = True
        self.choose(proposed)
        self.diagnostics["proposed"] = len(self._proposed)

    def choose(self, proposed: np.ndarray) -> None:
        """Set the rows whose sets are to be collected. proposed: (N,) bool."""
        proposed_rows = GrowingArray(np.int64)
        for rows in rows_in_blocks(proposed):
            proposed_rows.append(rows)
        self._total, self._proposed = len(proposed), proposed_rows.array()

    def proposed(self, first: int, count: int) -> np.ndarray:
        """Return (count,) bool: the proposed among the rows from `first` on."""
        rows = self._proposed[np.searchsorted(self._proposed, first) :] - first
        mask = np.zeros(count, dtype=bool)
        mask[rows] = True
        return mask

    def collect(self, normalised: Sequence[str]) -> None:
        """Second pass: add the same rows again."""
        low, self._seen = self._seen, self._seen + len(normalised)
        span = np.searchsorted(self._proposed, [low, self._seen])
        rows = self._proposed[span[0] : span[1]]
        if len(rows):
            self._sets.append(*self._shingler([normalised[row - low] for row in rows]))

    @property
    def sets(self) -> tuple[np.ndarray, np.ndarray]:
        """The shingles of the sets collected so far, row after row, and the number of each row's."""
        return self._sets.arrays()

    def add_sets(self, values: np.ndarray, sizes: np.ndarray) -> None:
        """Add the `sets` of the next proposed rows."""
        self._sets.extend(values, sizes)

    def resolve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (first, similarity), each (N,): the first row of each row's group (possibly itself), and the exact
        Jaccard similarity with that row (NaN for a row that is its own first).

        If a chain joins two rows, their similarity may be below the threshold.
        """
        first = build_array(self._total, np.int64, np.arange)
        similarity = build_array(self._total, np.float64, lambda low, high: np.nan)
        if len(self._proposed):
            groups = self._groups()
            for low, high in block_ranges(len(self._proposed)):
                rows, index = self._proposed[low:high], np.arange(low, high)
                label = groups.of(index)
                first[rows] = self._proposed[label]
                repeats = label != index
                similarity[rows[repeats]] = self._sets.jaccard(index[repeats], label[repeats])
        return first, similarity

    def _groups(self) -> DisjointSets:
        """Group the C proposed rows, by their index among the proposed."""
        leader = self._sets.equal(self.memory)
        distinct = build_array(len(leader), np.bool_, lambda low, high: leader[low:high] == np.arange(low, high))
        groups = DisjointSets(leader)
        compared = left_out = 0
        for store in self._keys:
            crowds = DuplicateClusters(self._keyed(store.array(), distinct), self.memory)
            for rows, partners in crowds.pairs(groups):
                similar = self._sets.jaccard(rows, partners, floor=self.settings.threshold) >= self.settings.threshold
                groups.join(rows[similar], partners[similar])
                compared += len(rows)
            left_out += crowds.left_out(groups)
        self.diagnostics |= {"compared": compared, "left_out": left_out}
        return groups

    def _keyed(self, keys: np.ndarray, distinct: np.ndarray) -> Iterator[Keyed]:
        """Yield a band's keys of those proposed rows that are `distinct` (C,)."""
        for index in rows_in_blocks(distinct):
            yield keys[self._proposed[index]], index


class _ShingleSets:
    """Sorted shingle sets of some rows, concatenated."""

    def __init__(self) -> None:
        self._values = GrowingArray(np.int64, limit=1 << 24)
        self._borders = GrowingArray(np.int64)
        self._borders.append(np.zeros(1))

    def append(self, hashes: np.ndarray, counts: np.ndarray) -> None:
        """Add the sets of the next rows: hashes (uint64), row after row, and the number of each row's (at least 1)."""
        hashes = hashes >> np.uint64(1)  # 63 bits, so that a shingle may be a column index of a sparse matrix
        sets = [_sort_distinct(group) for group in np.split(hashes, np.cumsum(counts)[:-1])]
        self.extend(np.concatenate(sets), np.array([len(group) for group in sets]))

    def extend(self, values: np.ndarray, sizes: np.ndarray) -> None:
        """Add the next rows by their sets, of these sizes."""
        self._borders.append(self._values.length + np.cumsum(sizes))
        self._values.append(values)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all values, and the size of each set."""
        return self._values.array(), np.diff(self._borders.array())

    def equal(self, memory: int) -> np.ndarray:
        """Return (C,) int64: the first set equal to each set, by size and the sum of its mixed hashes.

        memory: bytes for sorting these sums.
        """
        values, borders = self._values.array(), self._borders.array()
        count = len(borders) - 1
        sums = GrowingArray(np.uint64)
        low = 0
        while low < count:
            high = max(int(np.searchsorted(borders, borders[low] + _BATCH, side="right")) - 1, low + 1)
            mixed = mix64(values[borders[low] : borders[high]].astype(np.uint64))
            sums.append(np.add.reduceat(mixed, borders[low:high] - borders[low]))
            low = high
        added = sums.array()
        keyed = ((added[low:high], np.arange(low, high)) for low, high in block_ranges(count))
        return first_matches(count, keyed, lambda rows: borders[rows + 1] - borders[rows], memory)

    def jaccard(self, rows: np.ndarray, partners: np.ndarray, *, floor: float = 0.0) -> np.ndarray:
        """Return the exact Jaccard similarity of each pair, or its bound by the sizes if that is below `floor`."""
        borders = self._borders.array()
        a, b = borders[rows + 1] - borders[rows], borders[partners + 1] - borders[partners]
        result = np.minimum(a, b) / np.maximum(a, b)
        pairs = np.flatnonzero(result >= floor)
        batch = np.cumsum(a[pairs] + b[pairs]) // _BATCH
        for pairs_of_batch in np.split(pairs, np.flatnonzero(np.diff(batch)) + 1):
            if len(pairs_of_batch):
                shared = self._matrix(rows[pairs_of_batch], a[pairs_of_batch]).multiply(
                    self._matrix(partners[pairs_of_batch], b[pairs_of_batch])
                )
                both = np.diff(csr_matrix(shared).indptr)
                result[pairs_of_batch] = both / (a[pairs_of_batch] + b[pairs_of_batch] - both)
        return result

    def _matrix(self, rows: np.ndarray, sizes: np.ndarray) -> csr_matrix:
        """Return the sets of `rows`, of these sizes, as a sparse 0/1 matrix with a column for each 63-bit hash."""
        pointer = np.append(0, np.cumsum(sizes))
        places = np.repeat(self._borders.array()[rows] - pointer[:-1], sizes) + np.arange(pointer[-1])
        columns = self._values.array()[places]
        shape = (len(rows), int(np.iinfo(np.int64).max))
        matrix = csr_matrix((np.ones(len(columns), np.int8), columns, pointer), shape=shape)
        matrix.has_canonical_format = True  # each set is sorted and has no repetition
        return matrix


def _sort_distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct values in ascending order; np.unique hashes instead, ten times slower for millions."""
    values.sort()
    new = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return values[new]
