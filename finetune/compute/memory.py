"""Memory without torch: the allocator's environment, figures of this process, and rows of logits computed at once.

Rows of all lengths and a sliced loss fragment memory that is allocated in blocks of fixed size; expandable segments
avoid that. The user's environment takes precedence: `PYTORCH_ALLOC_CONF=expandable_segments:False` turns them off.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables that torch reads, the newest name first."""
WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
_PROOF = 1 << 25
"""Bytes of a test allocation that the C library's counter must report to be trusted."""


_CGROUP = Path("/sys/fs/cgroup")


def cublas_workspace_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that makes cuBLAS reproducible (`train.deterministic`): 32 MiB of workspace per
    stream. cuBLAS reads it at its first product. Empty if the environment sets it already."""
    return {} if WORKSPACES in environment else {WORKSPACES: ":4096:8"}


def expandable_segments_env(environment: Mapping[str, str], *, platform: str = sys.platform) -> dict[str, str]:
    """Return the environment variable that enables expandable segments for a process that may use CUDA.

    Set it before torch is imported. Empty if the environment sets the allocator already, or off Linux, where the driver
    has no such memory. CPU allocations ignore it.
    """
    if platform != "linux" or any(name in environment for name in NAMES):
        return {}
    return {NAMES[0]: "expandable_segments:True"}


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
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    mallinfo.restype = _Malloc
    before = _allocated_bytes(mallinfo())
    proof = bytearray(_PROOF)
    return mallinfo if _allocated_bytes(mallinfo()) - before >= len(proof) else None


def _allocated_bytes(info: _Malloc) -> int:
    return int(info.uordblks) + int(info.hblkhd)


def malloc_bytes() -> int | None:
    """Return the bytes that the C library's allocator has in use; None if unknown."""
    mallinfo = _mallinfo()
    return None if mallinfo is None else _allocated_bytes(mallinfo())


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


def core_wait_s() -> float:
    """Return the seconds that this process's threads have waited for a core so far; 0 if the kernel reports none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        tasks = Path("/proc/self/task").glob("*/schedstat")
        return sum(int(task.read_text(encoding="utf-8").split()[1]) for task in tasks) / 1e9
    return 0.0


@contextlib.contextmanager
def polling(sample: Callable[[], object], *, every: float) -> Iterator[None]:
    """Call `sample` in a thread every `every` seconds inside."""
    done = threading.Event()

    def poll() -> None:
        while not done.wait(every):
            sample()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def measure_peaks(work: Callable[[], object]) -> tuple[int | None, int | None]:
    """Run `work` and return its peak resident bytes (the kernel's high-water mark) and peak bytes in use by malloc.

    malloc is polled every 2 ms. None for a value that is unknown here.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to the current resident size
    highest = [malloc_bytes()]

    def sample() -> None:
        now = malloc_bytes()
        if now is not None:
            highest.append(max(now, highest.pop() or 0))

    with polling(sample, every=0.002):
        work()
    return process_bytes("VmHWM"), highest[-1]


def slice_rows(vocabulary: int, device: str, width: int) -> int:
    """Return the rows of one slice of logits (rows, `vocabulary`) on this kind of device.

    width: bytes per number in the products that compute them.

    A product of few rows streams the whole head through the processor: below 128 rows that dominates, above 256 a CPU
    gains nothing. So a CPU gets 256 rows, fewer if these exceed 2²⁷ bytes, but at least 128; more if 256 rows are below
    2²⁰ logits, to amortise the calls per slice. A GPU gets 2²⁷ logits (`benchmarks.any_machine`).
    """
    if device != "cpu":
        return max((1 << 27) // vocabulary, 128)
    return min(max(256, (1 << 20) // vocabulary), max(128, (1 << 27) // (vocabulary * width)))


def slice_columns(vocabulary: int, device: str) -> int:
    """Return the columns of a slice of logits whose exponentials are computed at once, in float32.

    256 rows of some 4,096 columns stay in a CPU's second-level cache while several passes go over them.
    """
    return -(-vocabulary // max(vocabulary // 4096, 1)) if device == "cpu" else vocabulary


def machine_memory() -> int | None:
    """Return the total bytes of this machine, or the limit of its container, including memory in use; None: unknown."""
    bounds = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):
        bounds.append(int((_CGROUP / "memory.max").read_text(encoding="utf-8")))
    return min(bounds, default=None)


def available_memory() -> int | None:
    """Return the bytes that processes here can still allocate: of the machine, or of the container if that has less."""
    bounds = []
    with contextlib.suppress(OSError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        bounds += [int(kib) << 10 for kib in re.findall(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)]
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        bounds.append(max(0, limit - used))
    return min(bounds) if bounds else machine_memory()
