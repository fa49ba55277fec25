"""Claims that hosts make on the cells of a directory which they share, and lose when they die: leases.

    with Leases(out / CLAIMS, seconds=60) as leases:
        if leases.take(cell.key):
            ...                     # nobody else does
            leases.release(cell.key)

A claim is a file `NAME-N`, made exclusively, which network file systems do for all their clients (NFS from
version 3 on); locks of one host's kernel are not asked. Of several the largest N holds. Its owner changes it several
times within `seconds`; whoever has not seen it change for so long, by a clock of his own, takes N + 1. Times of files
and the clocks of other hosts are never compared, so they may be wrong by any amount.
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
"""The folder of them in a study's directory."""
_CLAIM = re.compile(r"(?P<name>.+)-(?P<number>\d+)")
_BEATS = 4
"""Signs of life within the time after which a claim lapses."""
_PAUSE_S = 0.2
SHORTEST_S, LONGEST_S = 1.0, 86_400.0


class Leases:
    """This process's claims in a folder, renewed by a thread of its own while the context lasts.

    seconds: without a sign of life, after which another's claim lapses. lost: told the name of a claim that somebody
    else has taken over, from that thread: this process was held up for longer than `seconds`, and must not go on.
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
        """Others' claims: what stood in them, and since when."""
        self._later: dict[str, float] = {}
        """Names that another holds, and when to look again."""
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
        """Claim `name` if nobody does, or if whoever does has given no sign of life for so long; whether it is ours."""
        if name in self._held:
            return True
        now = self._clock()
        if self._later.get(name, now) > now:
            return False
        number, path = self._newest(name)
        if path is not None and not self._lapsed(path, now):
            self._later[name] = now + self._seconds / _BEATS
            return False
        mine = self._folder / f"{name}-{number + 1}"
        try:
            fd = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except (FileExistsError, FileNotFoundError):  # another was faster, or ended and took the folder away
            return False
        with os.fdopen(fd, "wb") as handle:
            handle.write(self._sign())
        with self._lock:
            self._held[name] = mine
        self._later.pop(name, None)
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
        """Hold `name`, waiting as long as another does; `waits` is told once who that is."""
        told = False
        while not self.take(name):
            if not told and (path := self._newest(name)[1]) is not None:
                waits(holder(path))
                told = True
            self._later.pop(name, None)
            time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            self.release(name)

    def _newest(self, name: str) -> tuple[int, Path | None]:
        """The largest number of a claim on `name`, and its file; −1 and None: there is none."""
        self._folder.mkdir(parents=True, exist_ok=True)  # who was alone took it away at his end
        with os.scandir(self._folder) as entries:
            found = [_CLAIM.fullmatch(entry.name) for entry in entries]
        numbers = [int(one["number"]) for one in found if one is not None and one["name"] == name]
        if not numbers:
            return -1, None
        return max(numbers), self._folder / f"{name}-{max(numbers)}"

    def _lapsed(self, path: Path, now: float) -> bool:
        """Whether the claim has not changed for `seconds` while this process looked at it."""
        try:
            words = path.read_bytes()
        except FileNotFoundError:  # given up meanwhile
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
        """Give a sign of life; False: the claim is another's now."""
        with self._lock:
            if self._held.get(name) != path:
                return True
            following = path.with_name(f"{name}-{int(path.name.rpartition('-')[2]) + 1}")
            try:
                if following.exists():
                    return False
                fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
            except FileNotFoundError:
                return False
            except OSError:  # the file system is away: others see no sign of life, and may take over
                return True
            with os.fdopen(fd, "wb") as handle:
                handle.write(self._sign())
            return True


def holder(claim: Path) -> str:
    """`process 12 on host-a`, of a claim's file; `somebody` where it says nothing."""
    try:
        words = claim.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        words = []
    return f"process {words[1]} on {words[0]}" if len(words) >= 2 else "somebody"


def claims_of(out: Path) -> list[Path]:
    """The files of all claims in a study's directory, the dead's too."""
    return sorted((out / CLAIMS).glob("*-*"))


def refuse_claims(out: Path) -> None:
    """Raise UserError where hosts that share the study's directory have claims in it."""
    if found := claims_of(out):
        raise UserError(
            f"{out} is worked on by {holder(found[0])}, which shares it; add --shared to take part (it takes over what "
            "the dead have left), or name another --out"
        )
