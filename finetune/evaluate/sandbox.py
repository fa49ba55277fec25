"""Sandbox for programs written by a model, used for pass@k and only if the user asks for it.

The program and its test run in two processes that cannot see each other; the test calls the program through a socket
and gets plain data back. Only the test's process can report `passed`, so nothing that the program does to its own
process (frames, exit codes, descriptors, patched comparisons) counts as passing.

Each process has its own namespaces and a root of its own: Python's library read-only, /dev/null, zero and urandom, and
a small /tmp. It has no network, terminal, /proc, file of the user's or capability, and cannot start processes or make
sockets, shared memory or namespaces. As it is one process, the limit of its address space is that of its memory. CPU
time, wall time, threads and files are limited. On systems without such namespaces nothing is run, unless the user
allows programs without a sandbox.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
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
_END_S = 1.0
"""Wall time for a program to end after its test."""
_TIMED_OUT = 124
"""Exit code of sandbox_child.py."""


@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """Resource limits of a program."""

    seconds: float = 3.0
    """Wall and CPU time."""
    memory: int = 512 << 20
    """Bytes of address space of the program, and of its test; neither has memory outside of it."""
    threads: int = 4
    """Threads at once, including the first."""
    file_bytes: int = 1 << 20
    """Bytes of all its files together, and of each file."""


def check_sandbox_available(*, unsafe: bool = False) -> bool:
    """Return True if this machine can isolate programs. Raises UserError if not, unless the user allows unsafe runs."""
    contained = sys.platform == "linux" and _can_run(contained=True)
    if not contained and not (unsafe and _can_run(contained=False)):
        raise UserError(
            "pass@k runs programs that a model wrote, and this system gives no namespaces to contain them in (Linux "
            "5.12 or later with user namespaces); score these generations on one that does, or add --unsafe-programs "
            "to run them with this user's rights"
        )
    return contained


def _can_run(*, contained: bool) -> bool:
    return run_program("", "assert True", ResourceLimits(seconds=5.0), contained=contained) == "passed"


def run_program(program: str, test: str, limits: ResourceLimits | None = None, *, contained: bool = True) -> Outcome:
    """Run a Python program and its test; `passed` only if both reached their last lines.

    The test has the program's global names. contained: False runs both with this user's rights, under the limits of
    time, memory and files alone.
    """
    limits = limits or ResourceLimits()
    program_end, test_end = socket.socketpair()
    receiving, reporting = os.pipe()
    late = False
    with (
        open(receiving, "rb", buffering=0) as report,  # noqa: PTH123
        tempfile.TemporaryDirectory(prefix="flatshift-program-") as scratch,
        contextlib.ExitStack() as running,
    ):
        with program_end, test_end, open(reporting, "wb"):  # noqa: PTH123
            subject = _start_process(program, [program_end.fileno()], limits, contained, scratch)
            running.callback(_end_process, subject)
            judge = _start_process(test, [test_end.fileno(), reporting], limits, contained, scratch)
            running.callback(_end_process, judge)
        try:
            judge.wait(limits.seconds + _GRACE_S)
            subject.wait(_END_S)
        except subprocess.TimeoutExpired:
            late = judge.returncode is None
        running.close()
        os.set_blocking(receiving, False)
        passed = report.read() == b"passed"
    if passed:
        return "passed"
    return "timed out" if late or _TIMED_OUT in (subject.returncode, judge.returncode) else "failed"


def _start_process(
    source: str, descriptors: list[int], limits: ResourceLimits, contained: bool, scratch: str
) -> subprocess.Popen[bytes]:
    numbers = max(1, round(limits.seconds)), limits.memory, limits.threads, limits.file_bytes
    arguments = int(contained), *numbers, *descriptors
    with tempfile.TemporaryFile() as file:
        file.write(source.encode("utf-8", "replace"))
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LAUNCHER), *map(str, arguments)],
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            cwd=scratch,
            start_new_session=True,
            env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
        )


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process; its namespace dies with its first process, which dies with this one."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_programs(
    programs: Sequence[tuple[str, str]],
    limits: ResourceLimits | None = None,
    *,
    workers: int = 1,
    contained: bool = True,
) -> list[Outcome]:
    """Run all programs with their tests, `workers` at a time; outcomes are in order."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda pair: run_program(pair[0], pair[1], limits, contained=contained), programs))
