"""Leases on the cells of a directory shared by several hosts: claims that lapse when their owner dies.

    with Leases(out / CLAIMS, seconds=60) as leases:
        if leases.take(cell.key):
            ...                     # nobody else does
            leases.release(cell.key)

A claim is a file `NAME-N`, created exclusively, which network file systems support for all their clients (NFS from
version 3 on); locks of one host's kernel are not used. The claim with the largest N is valid. Its owner changes it
several times within `seconds`; a process that has seen no change for so long, by its own clock, takes N + 1. Times of
files and the clocks of other hosts are never compared, so they may be wrong by any amount.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from flatshift.finetune.errors import UserError

CLAIMS = ".claims"
"""Folder of the claims in a study's directory."""
_CLAIM = re.compile(r"(?P<name>.+)-(?P<number>\d+)")
_BEATS = 4
"""Number of heartbeats within the time after which a claim lapses."""
_PAUSE_S = 0.2
SHORTEST_S, LONGEST_S = 1.0, 86_400.0


class Leases:
    """Claims of this process in a folder, renewed by a thread while the context is open.

    seconds: time without a heartbeat after which another's claim lapses. lost: called in that thread with the name of a
    claim that another process has taken over: this process was stalled for longer than `seconds` and must stop.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seconds: float = 60.0,
        lost: Callable[[str], object] = lambda name: os._exit(3),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._seconds, self._lost, self._clock = folder, seconds, lost, clock
        self._me = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}"
        self._held: dict[str, Path] = {}
        self._seen: dict[Path, tuple[bytes, float]] = {}
        """Claims of others: their last content, and when it was first seen."""
        self._later: dict[str, float] = {}
        """Names that another process holds, and when to check again."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)
        self._beat = 0

    def __enter__(self) -> Leases:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for name in list(self._held):
            self.release(name)
        with contextlib.suppress(OSError):  # others may have claims
            self._folder.rmdir()

    def take(self, name: str) -> bool:
        """Claim `name` if it is free or its owner has had no heartbeat for `seconds`; return True if it is ours."""
        if name in self._held:
            return True
        now = self._clock()
        if self._later.get(name, now) > now:
            return False
        number, path = self._newest(name)
        if path is not None and not self._lapsed(path, now):
            # No need to list the folder again before the next heartbeat.
            self._later[name] = now + self._seconds / _BEATS
            return False
        mine = self._folder / f"{name}-{number + 1}"
        try:
            fd = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except (FileExistsError, FileNotFoundError):  # another was faster, or ended and deleted the folder
            return False
        with os.fdopen(fd, "wb") as handle:
            handle.write(self._sign())
        with self._lock:
            self._held[name] = mine
        self._later.pop(name, None)
        # Only now: without any claim in the folder, another process could start again at number 0.
        for old in range(number + 1):
            (self._folder / f"{name}-{old}").unlink(missing_ok=True)
        return True

    def release(self, name: str) -> None:
        """Give up a claim of ours; nothing for any other name."""
        with self._lock:
            path = self._held.pop(name, None)
            if path is not None:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def exclusive(self, name: str, *, waits: Callable[[str], None]) -> Iterator[None]:
        """Hold `name`, waiting as long as another does; `waits` is called once with the holder."""
        told = False
        while not self.take(name):
            if not told and (path := self._newest(name)[1]) is not None:
                waits(claim_holder(path))
                told = True
            self._later.pop(name, None)
            time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            self.release(name)

    def _newest(self, name: str) -> tuple[int, Path | None]:
        """Return the largest number of a claim on `name`, and its file; (−1, None) without one."""
        self._folder.mkdir(parents=True, exist_ok=True)  # a process that ended may have deleted it
        with os.scandir(self._folder) as entries:
            found = [_CLAIM.fullmatch(entry.name) for entry in entries]
        numbers = [int(one["number"]) for one in found if one is not None and one["name"] == name]
        if not numbers:
            return -1, None
        return max(numbers), self._folder / f"{name}-{max(numbers)}"

    def _lapsed(self, path: Path, now: float) -> bool:
        """Return True if the claim has not changed for `seconds` while this process watched it."""
        try:
            words = path.read_bytes()
        except FileNotFoundError:  # released in the meantime
            return False
        before, since = self._seen.get(path, (None, now))
        if words != before:
            self._seen[path] = (words, now)
            return False
        return now - since > self._seconds

    def _sign(self) -> bytes:
        self._beat += 1
        return f"{self._me} {self._beat}\n".encode()

    def _renew(self) -> None:
        while not self._over.wait(self._seconds / _BEATS / 2):
            with self._lock:
                held = list(self._held.items())
            for name, path in held:
                if not self._renewed(name, path):
                    self._lost(name)

    def _renewed(self, name: str, path: Path) -> bool:
        """Write a heartbeat; return False if the claim now belongs to another."""
        with self._lock:
            if self._held.get(name) != path:
                return True
            # The next number exists only if another process saw our claim lapse.
            following = path.with_name(f"{name}-{int(path.name.rpartition('-')[2]) + 1}")
            try:
                if following.exists():
                    return False
                fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
            except FileNotFoundError:
                return False
            except OSError:  # the file system is away: others see no heartbeat, and may take over
                return True
            with os.fdopen(fd, "wb") as handle:
                handle.write(self._sign())
            return True


def claim_holder(claim: Path) -> str:
    """Return the holder of a claim file, `process 12 on host-a`; `somebody` if it is unreadable."""
    try:
        words = claim.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        words = []
    return f"process {words[1]} on {words[0]}" if len(words) >= 2 else "somebody"


def list_claims(out: Path) -> list[Path]:
    """Return the files of all claims in a study's directory, lapsed ones included."""
    return sorted((out / CLAIMS).glob("*-*"))


def check_unclaimed(out: Path) -> None:
    """Raise UserError if hosts that share the study's directory have claims in it."""
    if found := list_claims(out):
        raise UserError(
            f"{out} is worked on by {claim_holder(found[0])}, which shares it; add --shared to take part (it takes "
            "over what "
            "the dead have left), or name another --out"
        )
