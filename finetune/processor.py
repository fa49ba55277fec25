"""CPU model and instruction flags of this machine."""

from __future__ import annotations

import functools
import platform
from pathlib import Path


@functools.cache
def cpu_info() -> tuple[str, tuple[str, ...]]:
    """Return the CPU's model and, where the system reports them, its instruction flags, sorted."""
    info: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    except OSError:
        pass  # not Linux
    model = info.get("model name") or platform.processor() or platform.machine()
    return model, tuple(sorted(set(info.get("flags", info.get("Features", "")).split())))
