"""CPU and installed packages of this machine, and child Python processes on it. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def cpu_info() -> tuple[str, tuple[str, ...]]:
    """Return the CPU's model and, where the system reports them, its instruction flags, sorted."""
    info: dict[str, str] = {}
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    model = info.get("model name") or platform.processor() or platform.machine()
    return model, tuple(sorted(set(info.get("flags", info.get("Features", "")).split())))


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def without_cwd_imports() -> Iterator[None]:
    """Keep Python processes started inside from importing from the current directory, where a user's `finetune.py` or
    `random.py` may shadow a module: as `python -P`, which multiprocessing does not pass to its children."""
    variable = "PYTHONSAFEPATH"
    previous = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[variable]
        else:
            os.environ[variable] = previous
