"""Devices of this machine, detected without torch: its CUDA devices, or its cores and memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .throughput import find_device

_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,memory.free,memory.total,name", "--format=csv,noheader,nounits"]
_QUERY_SECONDS = 20.0
# Overhead on a device's free memory: its context and communication buffers, and the allocator's fragmentation.
_CONTEXT_BYTES = int(1.5 * 2**30)
_ALLOCATOR_SHARE = 0.9


@dataclass(frozen=True)
class Devices:
    """Resources available to the ranks on this machine."""

    kind: Literal["cuda", "cpu"]
    count: int
    """CUDA devices, or cores."""
    memory: int | None = None
    """Bytes: free on the fullest CUDA device, or available on this machine for all its processes; None: unknown."""
    limit: int | None = None
    """Bytes that one process may allocate (a resource limit); None: no limit."""
    row: str | None = None
    """Row of `flatshift.finetune.planner.throughput.DEVICES`; None: a device that is not in that table."""

    def each(self, ranks: int) -> int | None:
        """Return the bytes available to each of `ranks` ranks on this machine; None: unknown."""
        if self.kind == "cuda":
            return None if self.memory is None else int(_ALLOCATOR_SHARE * self.memory) - _CONTEXT_BYTES
        bounds = [bound for bound in (self.limit, self.memory and self.memory // ranks) if bound is not None]
        return min(bounds, default=None)


def detect_devices(device: str = "auto") -> Devices:
    """Return the devices that `train.device` selects on this machine."""
    if device != "cpu":
        free, row = _cuda_devices()
        if (name := device.removeprefix("cuda:")).isdecimal():
            number = int(name)
            free = free[number : number + 1]
        if free or device.startswith("cuda"):
            known = [bytes_ for bytes_ in free if bytes_ is not None]
            return Devices("cuda", max(1, len(free)), min(known, default=None), row=row)
    return Devices("cpu", _count_cores(), _machine_memory(), _process_limit())


def _cuda_devices() -> tuple[list[int | None], str | None]:
    """Return the free bytes of each CUDA device visible to this process, in its order, None for one that cannot be
    queried; and the table row of the machine's first device."""
    if "+cpu" in importlib.metadata.version("torch"):
        return [], None
    try:
        run = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return [], None
    return visible_memory(run.stdout, os.environ.get("CUDA_VISIBLE_DEVICES")), _table_row(run.stdout)


def _table_row(table: str) -> str | None:
    first = [cell.strip() for cell in table.partition("\n")[0].split(",", 4)]
    return find_device(first[4], int(first[3]) << 20) if len(first) == 5 and first[3].isdigit() else None


def visible_memory(table: str, chosen: str | None) -> list[int | None]:
    """Return the free bytes of the devices in CUDA_VISIBLE_DEVICES, from nvidia-smi's `index, uuid, memory.free, …` in
    MiB.

    A name missing from the table (a slice of a device) counts with unknown memory; all after a negative one are hidden.
    """
    rows = [[cell.strip() for cell in line.split(",")][:3] for line in table.splitlines() if line.count(",") >= 2]
    free = {name: int(mib) << 20 if mib.isdigit() else None for *names, mib in rows for name in names}
    # a name may be a unique prefix of a device's UUID, as in CUDA_VISIBLE_DEVICES itself
    if chosen is None:
        return [free[index] for index, _, _ in rows]
    found: list[int | None] = []
    for name in (part.strip() for part in chosen.split(",")):
        if not name or name.startswith("-") or (name.isdigit() and name not in free):
            break
        full = [known for known in free if known.startswith(name)] if not name.isdigit() else [name]
        found.append(free[full[0]] if full else None)
    return found


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_memory() -> int | None:
    """Return the total bytes of this machine, or the limit of its container, including memory in use; None: unknown."""
    bounds = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):
        bounds.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return min(bounds, default=None)


def _machine_memory() -> int | None:
    """Return the bytes that processes here can still allocate: of the machine, or of the container if that has less."""
    bounds = []
    with contextlib.suppress(OSError, AttributeError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        bounds += [int(kib) << 10 for kib in re.findall(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most = int((group / "memory.max").read_text(encoding="utf-8"))
        bounds.append(max(0, most - int((group / "memory.current").read_text(encoding="utf-8"))))
    if not bounds and hasattr(os, "sysconf"):
        with contextlib.suppress(OSError, ValueError):
            bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(bounds, default=None)


def _process_limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((limit for limit in soft if limit != resource.RLIM_INFINITY), default=None)
