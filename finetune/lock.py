"""One owner for a path: what one command writes, no other writes meanwhile.

    with owned(out):
        ...             # look at what is there, and write

The lock is a file beside the path (`.NAME.lock`), so what it protects may be moved or replaced as a whole and is copied
without it. The kernel drops it with its process, however that ends; the file goes at a normal end, and a killed
command's with the next one on the path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from .atomic import make_directory, sweep_leftovers
from .errors import UserError, full_at, is_disk_full

INSIDE = ".lock"
"""Name of the lock where it has to lie in the directory itself."""
_NONE_KEPT = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""What file systems without locks say."""
_OURS = b"flatshift "
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
_PATIENCE_S = 0.2
"""How long a lock is asked for: its owner may be at its end."""


@contextlib.contextmanager
def exclusive_lock(path: str | Path, *, instead: str = "name another --out") -> Iterator[None]:
    """Be the only command at work on `path`, a file or directory that may not exist yet.

    Makes the directory that it lies in, and takes it away again if nothing came of it; removes what killed writes left
    of `path` beside it. A file system that keeps no locks is said to be one on stderr, once, and gone on with.

    instead: what else the user can do, for the refusal.
    Raises UserError that names the process at work there; for a place that cannot be written.
    """
    real = Path(os.path.realpath(path))
    made: list[Path] = []
    try:
        fd, lock = _taken(real, path, instead, made)
        try:
            if fd is not None:  # else they may be another's, who is at work
                sweep_leftovers(real.parent, of=real.name)
            yield
        except Exception as error:
            if not is_disk_full(error):
                raise
            raise full_at(error, Path(path)) from error
        finally:
            if fd is not None:
                with contextlib.suppress(OSError):
                    lock.unlink()  # before it is let go of: who waits for it sees that it is no longer the one
                os.close(fd)
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """A new directory among the machine's temporary ones, gone at the end; removes those of killed processes first."""
    there = Path(tempfile.gettempdir())
    for left in there.glob(f"{prefix}*"):
        _remove_abandoned(left)
    folder = there / f"{prefix}{uuid.uuid4().hex}"
    with exclusive_lock(folder):  # held before it exists, so nobody finds it without an owner
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove a directory of this user that no process owns; where locks are not kept, that cannot be known."""
    with contextlib.suppress(OSError):
        if os.lstat(folder).st_uid != os.geteuid() or not stat.S_ISDIR(os.lstat(folder).st_mode):
            return
        lock = _place(folder)
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)  # a killed owner leaves it
        try:
            if taken(fd) and _is_still(fd, lock):
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink()
        finally:
            os.close(fd)


def taken(fd: int, *, shared: bool = False) -> bool | None:
    """Lock the open file `fd` if that is free; whether it was. None: its file system keeps no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NONE_KEPT:
            return None
        raise
    return True


def _taken(real: Path, path: str | Path, instead: str, made: list[Path]) -> tuple[int | None, Path]:
    """The open lock of `real` and where it lies; None where the file system keeps none. made: gets new directories."""
    patience = time.monotonic() + _PATIENCE_S
    while True:
        try:
            made[:] = [*make_directory(real.parent), *made]
            lock = _place(real)
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # a command that failed took away the directory that it had made
            if time.monotonic() > patience:
                raise
            continue
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _foreign(lock) from None
            if error.errno in _UNWRITABLE:
                raise UserError(
                    f"{path} cannot be written ({error.filename}: {error.strerror}); change that, or take another place"
                ) from None
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or not _OURS.startswith(os.pread(fd, len(_OURS), 0).rstrip(b"\0")):
                raise _foreign(lock)  # a part of our own words is what a kill left, zeros are what a power cut left
            free = taken(fd)
            if free is False and time.monotonic() > patience:
                other = f", or {instead}" if instead else ""
                raise UserError(f"{path} is in use by another command ({_holder(fd)}); wait for its end{other}")
            if free is None:
                _say_unlocked(real)
                lock.unlink(missing_ok=True)
                os.close(fd)
                return None, lock
            if free and _is_still(fd, lock):  # else its last owner has just ended
                with contextlib.suppress(OSError):  # a full disk: it is held without a name in it
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, _OURS + f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                return fd, lock
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(0.01)


def _place(real: Path) -> Path:
    """Where the lock of `real` lies: beside it; within a directory whose surroundings are not this command's."""
    if real.is_dir() and (os.path.ismount(real) or not os.access(real.parent, os.W_OK)):
        return real / INSIDE
    return real.with_name(f".{real.name}.lock")


def _foreign(lock: Path) -> UserError:
    return UserError(f"{lock} has the name of our lock and is something else; move it away")


def _is_still(fd: int, lock: Path) -> bool:
    """Whether the open file is the one that its name leads to."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(lock))
    except FileNotFoundError:
        return False


def _holder(fd: int) -> str:
    """Who holds the lock; without a name where its disk was full."""
    words = os.pread(fd, 300, 0).decode(errors="replace").split()
    if len(words) != 3:
        return "unknown process"
    return f"process {words[1]}" + (f" on {words[2]}" if words[2] != socket.gethostname() else "")


_said: set[int] = set()


def _say_unlocked(real: Path) -> None:
    device = real.parent.stat().st_dev
    if device not in _said:
        _said.add(device)
        print(
            f"warning: the file system of {real.parent} keeps no locks: nothing stops a second command on {real.name}",
            file=sys.stderr,
        )
