"""Child process that answers requests with limits of time and memory, for what a stranger's file makes Python or a
library compute.

    with LimitedProcess(render) as process:
        answer = process.ask(request)     # raises LimitExceeded

It is forked, so it starts in milliseconds with everything imported, and keeps no file open but its end of a socket.
The kernel ends it after some CPU seconds of one request, also inside a single long operation. Requests and answers are
JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

CPU_SECONDS, MEAN_CPU_SECONDS, WALL_SECONDS = 5.0, 0.1, 120.0
"""Limits of one request, and of the mean of many; what this is for takes a millisecond."""
MEMORY = 512 << 20
"""Bytes that the child may allocate beyond the size of its process at the fork."""
MAX_ANSWER = 1 << 28
"""Bytes of an answer."""
_HEADER = struct.Struct("!Q")


class LimitExceeded(Exception):
    """A limit is exceeded; the message is a clause without a subject."""


class LimitedProcess:
    """Child that computes `handler(request)`; use it in one thread at a time, in the process that made it."""

    def __init__(self, handler: Callable[[Any], Any]) -> None:
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which the child has not
            self._pid = os.fork()
        if self._pid == 0:
            _serve(theirs, handler)
        theirs.close()

    def __enter__(self) -> LimitedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Any) -> Any:
        """Return the answer to a request. Raises LimitExceeded, after which the process is of no more use."""
        data = json.dumps(request, default=str).encode()
        try:
            self._socket.sendall(_HEADER.pack(len(data)) + data)
            size = _HEADER.unpack(self._receive(_HEADER.size))[0]
            if size > MAX_ANSWER:
                raise LimitExceeded(f"answers with more than {MAX_ANSWER:,} bytes")
            return json.loads(self._receive(size))
        except (OSError, EOFError):
            raise LimitExceeded(self._describe_end()) from None

    def _receive(self, size: int) -> bytes:
        parts, deadline = [], time.monotonic() + WALL_SECONDS
        while size:
            if not select.select([self._socket], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise LimitExceeded(f"takes more than {WALL_SECONDS:g} s")
            if not (part := self._socket.recv(min(size, 1 << 20))):
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _describe_end(self) -> str:
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
                return f"takes more than {CPU_SECONDS:g} CPU seconds, or {MEAN_CPU_SECONDS:g} on average,"
        return f"takes more than {MEMORY >> 20} MiB, or ends its process"

    def close(self) -> None:
        """End the child."""
        self._socket.close()
        if self._pid and self.owner == os.getpid():
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._pid = 0


def _serve(channel: socket.socket, handler: Callable[[Any], Any]) -> NoReturn:
    """Answer requests until the other end is closed. Never returns, whatever happens: this is a copy of a process."""
    try:
        gc.freeze()
        _confine(channel)
        stream = socket.socket(fileno=3).makefile("rwb")
        allowance = CPU_SECONDS
        while header := stream.read(_HEADER.size):
            request = json.loads(stream.read(_HEADER.unpack(header)[0]))
            signal.setitimer(signal.ITIMER_PROF, allowance)
            start = time.process_time()
            data = json.dumps(handler(request)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            used = time.process_time() - start
            allowance = min(CPU_SECONDS, max(allowance - used, 0) + MEAN_CPU_SECONDS)
            stream.write(_HEADER.pack(len(data)) + data)
            stream.flush()
    finally:
        os._exit(1)


def _confine(channel: socket.socket) -> None:
    """Keep only `channel`, as descriptor 3, and take away memory, files and processes."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the end of the other process ends this one
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    nothing, own = os.open(os.devnull, os.O_RDWR), os.dup(channel.fileno())
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.dup2(own, 3)
    os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0}
    with contextlib.suppress(OSError):  # Linux only
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + MEMORY
    for kind, value in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))
