"""Which ids were given before, in 8 to 16 bytes each instead of the hundred that a set of strings takes."""

from __future__ import annotations

import numpy as np

_BATCH = 1 << 16


class Seen:
    """Hashes of ids. The last `batch` of them are compared at once, older ones when the batch is full, and at the end.

    So `add` names a repetition that lies at most `batch` ids back at once; a longer way back it is named later, by
    `add` of another id or by `finish`. What is named is every id whose hash came before: hardly ever another id.
    """

    def __init__(self, batch: int = _BATCH):
        self.batch = batch
        self._fresh: dict[int, tuple[str, str]] = {}
        self._runs: list[np.ndarray] = []

    def add(self, given: str, where: str) -> list[tuple[str, str]]:
        """Note the id `given` at `where`; returns (id, where) of those that are now known to have come before."""
        key = hash(given)
        if key in self._fresh:
            return [(given, where)]
        self._fresh[key] = (given, where)
        return self.finish() if len(self._fresh) >= self.batch else []

    def finish(self) -> list[tuple[str, str]]:
        """Compare what was not compared yet; as `add`."""
        fresh = np.fromiter(self._fresh, dtype=np.int64, count=len(self._fresh))
        fresh.sort()
        again: set[int] = set()
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, fresh), len(run) - 1)
            again.update(fresh[run[place] == fresh].tolist())
        found = [noted for key, noted in self._fresh.items() if key in again]
        self._fresh = {}
        # Runs of one size are merged into one of twice the size: each hash is moved a few times only.
        while self._runs and len(self._runs[-1]) <= len(fresh):
            fresh = np.concatenate([self._runs.pop(), fresh])
            fresh.sort()
        if len(fresh):
            self._runs.append(fresh)
        return found
