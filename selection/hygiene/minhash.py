"""MinHash signatures of texts, folded into the keys of LSH bands (Broder 1997; Leskovec, Rajaraman & Ullman, chapter
3)."""

from __future__ import annotations

import numpy as np

from flatshift.selection.errors import SelectionError
from flatshift.selection.hygiene.shingles import mix64

_TILE = 1 << 16  # hashes processed at a time: two such arrays fit in the processor's cache


def choose_bands(threshold: float, permutations: int, recall: float) -> tuple[int, int]:
    """Return (bands, rows): the most rows per band for which a pair at `threshold` has at least `recall` of being
    proposed.

    A pair of similarity s shares at least one band with probability 1 − (1 − s^rows)^bands; more rows mean fewer pairs
    to compare.

    Raises:
        SelectionError: not even one row per band reaches the recall.
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
        """Return (permutations, n) uint32: the smallest value of each map over each text's shingles.

        hashes: (S,) uint64, text after text. counts: (n,) shingles of each text; a text without any gets the largest
        value everywhere.
        """
        full = np.flatnonzero(counts)
        out = np.full((len(self.a), len(counts)), np.uint32(0xFFFFFFFF))
        if not len(full):
            return out
        short = (hashes >> np.uint64(32)).astype(np.uint32)
        # A text with more shingles than a tile is split into parts, whose minima are combined at the end.
        parts = -(-counts[full] // _TILE)
        owner = np.repeat(np.arange(len(full)), parts)
        first = np.cumsum(parts) - parts
        starts = (np.cumsum(counts) - counts)[full][owner] + _TILE * (np.arange(len(owner)) - first[owner])
        minima = self._minima(short, starts)
        out[:, full] = minima if len(owner) == len(full) else np.minimum.reduceat(minima, first, axis=1)
        return out

    def _minima(self, short: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return (permutations, len(starts)): minima over the runs that begin at `starts`."""
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
    """Return (bands, n) uint64: one key for each band of each text; equal keys mean equal values in all of the band's
    rows.

    signatures: (permutations ≥ bands·rows, n) uint32.
    """
    grid = signatures[: bands * rows].reshape(bands, rows, -1)
    keys = np.zeros((bands, grid.shape[2]), np.uint64)
    for row in range(rows):
        keys = mix64(keys + np.uint64(0x9E3779B97F4A7C15) + grid[:, row])
    return keys
