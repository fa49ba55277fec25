"""One directory of cells, one command that writes it: a sweep, a comparison or a study."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import UserError

LOCK = ".lock"


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the directory if need be and be the only command that writes there; a killed one holds nothing.

    Raises UserError that names the process which is at work there.
    """
    out.mkdir(parents=True, exist_ok=True)
    fd = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
            raise UserError(
                f"{out} is being written by another command (process {holder}); wait for its end, or name another --out"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)
