"""Leases on the cells of a directory shared by several hosts: claims that lapse when their owner dies.

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

from flatshift.finetune.errors import UserError

CLAIMS = ".claims"
"""Folder of the claims in a study's directory."""
_CLAIM = re.compile(r"(?P<name>.+)-(?P<number>\d+)")
_HEARTBEATS = 4
"""Within the time after which a claim lapses."""
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
        self._own: dict[str, Path] = {}
        self._observed: dict[Path, tuple[bytes, float]] = {}
        """Claims of others: their last content, and when it was first seen."""
        self._next_check: dict[str, float] = {}
        """Names that another process holds, and when to check again."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)
        self._heartbeat = 0

    def __enter__(self) -> Leases:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()
        for name in list(self._own):
            self.release(name)
        with contextlib.suppress(OSError):  # others may have claims
            self._folder.rmdir()

    def take(self, name: str) -> bool:
        """Claim `name` if it is free or its owner has had no heartbeat for `seconds`; return True if it is ours."""
        if name in self._own:
            return True
        now = self._clock()
        if self._next_check.get(name, now) > now:
            return False
        number, path = self._newest(name)
        if path is not None and not self._is_lapsed(path, now):
            # No need to list the folder again before the next heartbeat.
            self._next_check[name] = now + self._seconds / _HEARTBEATS
            return False
        claim = self._folder / f"{name}-{number + 1}"
        try:
            fd = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except (FileExistsError, FileNotFoundError):  # another was faster, or ended and deleted the folder
            return False
        self._write_heartbeat(fd)
        with self._lock:
            self._own[name] = claim
        self._next_check.pop(name, None)
        # Only now: without any claim in the folder, another process could start again at number 0.
        for old in range(number + 1):
            (self._folder / f"{name}-{old}").unlink(missing_ok=True)
        return True

    def release(self, name: str) -> None:
        """Give up a claim of ours; nothing for any other name."""
        with self._lock:
            path = self._own.pop(name, None)
            if path is not None:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def exclusive(self, name: str, *, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold `name`, waiting as long as another does; `on_wait` is called once with the holder."""
        reported = False
        while not self.take(name):
            if not reported and (path := self._newest(name)[1]) is not None:
                on_wait(claim_holder(path))
                reported = True
            self._next_check.pop(name, None)
            time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            self.release(name)

    def _newest(self, name: str) -> tuple[int, Path | None]:
        """Return the largest number of a claim on `name`, and its file; (−1, None) without one."""
        self._folder.mkdir(parents=True, exist_ok=True)  # a process that ended may have deleted it
        with os.scandir(self._folder) as entries:
            matches = [_CLAIM.fullmatch(entry.name) for entry in entries]
        numbers = [int(match["number"]) for match in matches if match is not None and match["name"] == name]
        if not numbers:
            return -1, None
        return max(numbers), self._folder / f"{name}-{max(numbers)}"

    def _is_lapsed(self, path: Path, now: float) -> bool:
        """Return True if the claim has not changed for `seconds` while this process watched it."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # released in the meantime
            return False
        before, since = self._observed.get(path, (None, now))
        if content != before:
            self._observed[path] = (content, now)
            return False
        return now - since > self._seconds

    def _write_heartbeat(self, fd: int) -> None:
        self._heartbeat += 1
        with os.fdopen(fd, "wb") as file:
            file.write(f"{self._me} {self._heartbeat}\n".encode())

    def _renew(self) -> None:
        while not self._closed.wait(self._seconds / _HEARTBEATS / 2):
            with self._lock:
                claims = list(self._own.items())
            for name, path in claims:
                if not self._renew_claim(name, path):
                    self._lost(name)

    def _renew_claim(self, name: str, path: Path) -> bool:
        """Write a heartbeat; return False if the claim now belongs to another."""
        with self._lock:
            if self._own.get(name) != path:
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
            self._write_heartbeat(fd)
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
    if claims := list_claims(out):
        raise UserError(
            f"{out} is worked on by {claim_holder(claims[0])}, which shares it; add --shared to take part (it takes "
            "over what the dead have left), or name another --out"
        )
