"""What this process holds in host memory, by the kernel and by the C library."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PROOF = 1 << 25
"""Bytes that the C library has to have noticed to be believed."""


class _Malloc(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")),
        *((name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")),
    )


@functools.cache
def _mallinfo() -> Any:
    """The function; None where the C library has none, or another allocator stands before it."""
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    found.restype = _Malloc
    before = _used(found())
    held = bytearray(_PROOF)
    return found if _used(found()) - before >= len(held) else None


def _used(told: _Malloc) -> int:
    return int(told.uordblks) + int(told.hblkhd)


def handed_out() -> int | None:
    """Bytes that the C library's allocator has given to this process and not got back; None where it does not say."""
    found = _mallinfo()
    return None if found is None else _used(found())


def process_bytes(field: str) -> int | None:
    """Of this process by /proc/self/status: VmRSS all that is resident, RssAnon without mapped files, VmHWM the most
    that was resident; None where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return None


def peaks_during(work: Callable[[], object], *, every: float = 0.002) -> tuple[int | None, int | None]:
    """The most that the process held while `work` ran: resident bytes by the kernel's own high-water mark, and bytes
    that the C library had handed out, asked `every` so many seconds; None for what is not known here."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the mark falls to what is resident now
    done, highest = threading.Event(), [handed_out()]

    def watch() -> None:
        while not done.wait(every):
            now = handed_out()
            if now is not None:
                highest.append(max(now, highest.pop() or 0))

    watcher = threading.Thread(target=watch, name="memory handed out", daemon=True)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return process_bytes("VmHWM"), highest[-1]
