"""Programs that a model wrote, run where they can do no harm: for pass@k, and only where a user asks for it.

A program runs in namespaces of its own (user, network, processes, mounts, IPC): there is no network, not even this
machine's; no process but its own; every file system is read-only but a scratch directory that is gone afterwards. CPU
time, wall time, memory, processes, files and their size are limited. A program that ends before its last line, by
whatever way, has not passed. Where the system has no such namespaces nothing is run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UserError

Outcome = Literal["passed", "failed", "timed out"]
_LAUNCHER = Path(__file__).with_name("sandbox_child.py")
_GRACE_S = 5.0
"""Wall time above the limit before a program is ended: starting an interpreter is not the program's time."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may take."""

    seconds: float = 3.0
    """Wall and CPU time."""
    memory: int = 512 << 20
    """Bytes of address space of each of its processes."""
    processes: int = 4
    """At once, with itself; threads count."""
    file_bytes: int = 1 << 20
    """Bytes of all its files together, and of one."""


def refuse_unless_contained() -> None:
    """Raise UserError where programs cannot be contained on this machine."""
    outcome = run_program("", Limits(seconds=5.0)) if sys.platform == "linux" else "failed"
    if outcome != "passed":
        raise UserError(
            "pass@k runs programs that a model wrote, and this system gives no namespaces to contain them in (Linux "
            "with unprivileged user namespaces); score these generations on one that does"
        )


def run_program(code: str, limits: Limits | None = None) -> Outcome:
    """Run Python `code` to its end; `passed` only if its last line was reached."""
    limits = limits or Limits()
    word = secrets.token_hex(16)
    receiving, sending = os.pipe()
    late, told = False, b""
    with tempfile.TemporaryDirectory(prefix="flatshift-program-") as scratch:
        settings = max(1, round(limits.seconds)), limits.memory, limits.processes, limits.file_bytes
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_LAUNCHER), str(sending), word, scratch, *map(str, settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[sending],
                start_new_session=True,
                env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
            )
        finally:
            os.close(sending)
        try:
            child.communicate(code.encode("utf-8", "replace"), timeout=limits.seconds + _GRACE_S)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            # Ends what a program left running too: its namespace dies with its first process, which dies with this one.
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
            os.set_blocking(receiving, False)
            with contextlib.suppress(BlockingIOError):
                told = os.read(receiving, len(word))
            os.close(receiving)
    if told == word.encode():
        return "passed"
    return "timed out" if late or child.returncode == 124 else "failed"


def run_programs(codes: Sequence[str], limits: Limits | None = None, *, workers: int = 1) -> list[Outcome]:
    """Each of them, `workers` at a time, in order."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda code: run_program(code, limits), codes))
