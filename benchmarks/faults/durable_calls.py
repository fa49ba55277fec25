"""The durable calls of a command, numbered, struck and recorded: the Python side of `durable_calls.c`.

    library = build(folder)                                  # needs a C compiler and Linux
    # in a process that was started with LD_PRELOAD=library:
    with struck(folder / "control", root, mode=KILL, target=17):
        command()

A call changes what is on a disk below `root`: it opens to create or truncate, writes, truncates, syncs, renames, links,
makes or removes. Calls are numbered from 0 over all processes that share the control block.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
VARIABLE = "DURABLE_CALLS"
COUNT, KILL, FULL, IO_ERROR, SHORT, TEAR = range(6)
MODES = {"killed": KILL, "disk full": FULL, "I/O error": IO_ERROR, "short write": SHORT, "killed in a write": TEAR}
KINDS = ("", "open", "write", "truncate", "sync", "rename", "link", "mkdir", "unlink", "rmdir", "sync directory")


class Control(ctypes.Structure):
    """`struct control` of the C side."""

    _fields_ = (
        ("armed", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("target", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("hit", ctypes.c_int64),
        ("root", ctypes.c_char * 2048),
        ("log", ctypes.c_char * 2048),
    )


@dataclass(frozen=True)
class Call:
    """One recorded call. at: offset of a write, size of a truncation, 1 for an open that truncates."""

    kind: str
    path: Path
    other: Path | None
    at: int
    data: bytes
    number: int = -1


def modes_of(call: Call) -> list[str]:
    """The faults that make a difference at a call."""
    modes = ["I/O error"]
    if not call.kind.startswith("sync"):  # a kill loses nothing that the system holds
        modes.append("killed")
    if call.kind in ("open", "write", "mkdir", "link"):
        modes.append("disk full")
    if len(call.data) > 1:
        modes += ["short write", "killed in a write"]
    return modes


def missing() -> str | None:
    """Why calls cannot be struck here; None where they can."""
    if sys.platform != "linux":
        return "needs Linux: calls are struck through LD_PRELOAD"
    return None if shutil.which("cc") else "needs a C compiler (cc)"


def build(folder: Path) -> Path:
    """Compile the library into `folder`."""
    library = folder / "durable_calls.so"
    flags = ["-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    subprocess.run(["cc", *flags], check=True)
    return library


@contextlib.contextmanager
def struck(
    control: Path, root: Path, *, mode: int = COUNT, target: int = -1, log: Path | None = None
) -> Iterator[Control]:
    """Number the calls below `root`, in this process and those that it starts; strike number `target` by `mode`.

    log: file to append every call to. The block that is yielded may be read afterwards too, by any process.
    """
    shared = block(control)
    shared.root, shared.log = str(root.resolve()).encode(), b"" if log is None else str(log).encode()
    shared.mode, shared.target, shared.next, shared.hit = mode, target, 0, -1
    take = ctypes.CDLL(None).durable_calls_control
    os.environ[VARIABLE] = str(control)
    if take(str(control).encode()):
        raise OSError(f"{control}: the control block cannot be mapped")
    shared.armed = 1
    try:
        yield shared
    finally:
        shared.armed = 0
        take(b"")
        os.environ.pop(VARIABLE, None)


def block(control: Path) -> Control:
    """The control block in the file `control`, made if need be."""
    if not control.is_file():
        control.write_bytes(bytes(ctypes.sizeof(Control)))
    with control.open("r+b") as handle:
        return Control.from_buffer(mmap.mmap(handle.fileno(), ctypes.sizeof(Control)))


def read_log(log: Path) -> list[Call]:
    """The recorded calls in order."""
    data, place, calls = log.read_bytes(), 0, []
    head = struct.Struct("=4i2q")
    while place < len(data):
        kind, first, second, number, at, size = head.unpack_from(data, place)
        place += head.size
        path = Path(os.fsdecode(data[place : place + first]))
        place += first
        other = Path(os.fsdecode(data[place : place + second])) if second else None
        place += second
        calls.append(Call(KINDS[kind], path, other, at, data[place : place + size], number))
        place += size
    return calls
