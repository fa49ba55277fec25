"""Sandbox for programs written by a model, used for pass@k and only if the user asks for it.

A program runs in its own namespaces (user, network, processes, mounts, IPC): no network, not even localhost; no
processes but its own; every file system is read-only except a scratch directory that is deleted afterwards. CPU time,
wall time, memory, processes, files and their size are limited. A program that ends before its last line, in any way,
has failed. On systems without such namespaces nothing is run.
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
"""Wall time beyond the limit before a program is killed: the interpreter's start does not count as the program's
time."""


@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """Resource limits of a program."""

    seconds: float = 3.0
    """Wall and CPU time."""
    memory: int = 512 << 20
    """Bytes of address space per process."""
    processes: int = 4
    """Processes at once, including the program; threads count."""
    file_bytes: int = 1 << 20
    """Bytes of all its files together, and of each file."""


def check_sandbox_available() -> None:
    """Raise UserError if this machine cannot isolate programs."""
    outcome = run_program("", ResourceLimits(seconds=5.0)) if sys.platform == "linux" else "failed"
    if outcome != "passed":
        raise UserError(
            "pass@k runs programs that a model wrote, and this system gives no namespaces to contain them in (Linux "
            "with unprivileged user namespaces); score these generations on one that does"
        )


def run_program(code: str, limits: ResourceLimits | None = None) -> Outcome:
    """Run Python `code` to its end; `passed` only if its last line was reached."""
    limits = limits or ResourceLimits()
    word = secrets.token_hex(16)  # a secret, which a program cannot guess
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
            # Also ends processes that the program left running: its namespace dies with its first process, which dies
            # with this one.
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


def run_programs(codes: Sequence[str], limits: ResourceLimits | None = None, *, workers: int = 1) -> list[Outcome]:
    """Run all programs, `workers` at a time; outcomes are in order."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda code: run_program(code, limits), codes))
