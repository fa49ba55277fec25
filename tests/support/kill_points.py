"""Every point at which a piece of work may be killed, or the disk be full: before each call that opens for writing,
makes, renames or removes something. In a forked child, so nothing of it stays in the process of the test."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

KILLED, REFUSED = 9, 3
_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def kill_points(work: Callable[[Path], object], parent: Path, *, error: int | None = None) -> Iterator[Path]:
    """Do `work` in `parent`/1, `parent`/2, …, killed before its first, second, … call there; yields the directories.

    error: an errno that the call fails with instead, once; `work` may then raise, or go on.
    Ends when `work` came to its end unharmed.
    """
    for number in range(1, 1000):
        directory = parent / str(number)
        child = os.fork()
        if child == 0:
            _begin(work, directory, number, error)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            assert number > 1, "the work wrote nothing"
            return
        assert code in (KILLED, REFUSED), f"call {number}: the work ended with {code}"
        yield directory
    raise AssertionError("too many calls")


def _begin(work: Callable[[Path], object], directory: Path, number: int, error: int | None) -> None:
    seen = [0]

    def look(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (event in _EVENTS or writes) or not str(arguments[0]).startswith(str(directory.parent)):
            return
        seen[0] += 1
        if seen[0] == number:
            if error is None:
                os._exit(KILLED)
            raise OSError(error, os.strerror(error), str(arguments[0]))

    sys.addaudithook(look)
    try:
        work(directory)
    except BaseException:
        if error is None:
            traceback.print_exc()
            os._exit(70)
        os._exit(REFUSED)
    os._exit(0 if seen[0] < number else REFUSED)
