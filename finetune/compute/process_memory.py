"""Host memory of this process, as the kernel and the C library count it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PROOF = 1 << 25
"""Bytes of a test allocation that the C library's counter must report to be trusted."""


class _Malloc(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")),
        *((name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")),
    )


@functools.cache
def _mallinfo() -> Any:
    """Return glibc's `mallinfo2`; None if the C library lacks it or another allocator replaces malloc."""
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    found.restype = _Malloc
    before = _allocated_bytes(found())
    held = bytearray(_PROOF)
    return found if _allocated_bytes(found()) - before >= len(held) else None


def _allocated_bytes(told: _Malloc) -> int:
    return int(told.uordblks) + int(told.hblkhd)


def malloc_bytes() -> int | None:
    """Return the bytes that the C library's allocator has in use; None if unknown."""
    found = _mallinfo()
    return None if found is None else _allocated_bytes(found())


def process_bytes(field: str) -> int | None:
    """Return a field of /proc/self/status in bytes: VmRSS (resident), RssAnon (without mapped files), VmHWM (peak
    resident).

    None if the kernel does not report it.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return None


def measure_peaks(work: Callable[[], object], *, every: float = 0.002) -> tuple[int | None, int | None]:
    """Run `work` and return its peak resident bytes (the kernel's high-water mark) and peak bytes in use by malloc.

    malloc is polled every `every` seconds. None for a value that is unknown here.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to the current resident size
    done, highest = threading.Event(), [malloc_bytes()]

    def watch() -> None:
        while not done.wait(every):
            now = malloc_bytes()
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


def available_memory() -> int:
    """Return the bytes of host memory available to this process: of the machine, or within its control group's
    limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        free = min(free, limit - int((group / "memory.current").read_text(encoding="utf-8")))
    return free
