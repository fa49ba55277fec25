"""Exact duplicates: texts that are equal but for case, blanks and Unicode form."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence

import numpy as np

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
