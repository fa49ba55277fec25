"""Which ids there were before, in 8 to 16 bytes each instead of the hundred that a set of strings takes; or in a bit
each, where they are but a file's number and a line's."""

from __future__ import annotations

import re

import numpy as np

_BATCH = 1 << 16
_BY_PLACE = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,17})")


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


def looks_unnamed(given: str) -> bool:
    """Whether a record without an id may be named like this: `<file index>-<line>`."""
    return _BY_PLACE.fullmatch(given) is not None


class Unnamed:
    """Which records had no id, a bit for each line of each file.

    imitated: whether a given id looked like the name of such a record; before that none can be like one to come.
    """

    def __init__(self) -> None:
        self.imitated = False
        self._bits: dict[int, bytearray] = {}

    def add(self, file_index: int, line: int) -> None:
        """Note that the record of this line, 0-based, has no id."""
        bits = self._bits.setdefault(file_index, bytearray())
        if line // 8 >= len(bits):
            bits.extend(bytes(line // 8 + 1 - len(bits)))
        bits[line // 8] |= 1 << line % 8

    def named(self, given: str) -> bool:
        """Whether a record noted so far has this name; notes an imitation."""
        if (found := _BY_PLACE.fullmatch(given)) is None:
            return False
        self.imitated = True
        file_index, line = map(int, found.groups())
        bits = self._bits.get(file_index, b"")
        return line // 8 < len(bits) and bool(bits[line // 8] >> line % 8 & 1)
