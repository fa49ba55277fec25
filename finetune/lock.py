"""Exclusive locks on paths: while one command writes to a path, no other does.

    with exclusive_lock(out):
        ...             # inspect existing files, and write

The lock is a file next to the path (`.NAME.lock`), so the path may be moved or replaced as a whole and is copied
without it. The kernel releases it when its process ends in any way; the file is removed at a normal end, and after a
kill by the next command on the path.
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

from .atomic import make_directory, remove_leftovers
from .errors import UserError, disk_full_error, is_disk_full

INSIDE = ".lock"
"""Name of the lock where it has to be inside the directory itself."""
_NONE_KEPT = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_OURS = b"flatshift "
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
_PATIENCE_S = 0.2  # seconds to retry a lock: its owner may be about to exit


@contextlib.contextmanager
def exclusive_lock(path: str | Path, *, alternative: str = "name another --out") -> Iterator[None]:
    """Hold the exclusive lock on `path`, a file or directory that may not exist yet.

    Creates the parent directories, and removes them again if they stay empty; removes temporary files that killed
    writes of `path` left next to it. On a file system without locks, print a warning to stderr once and continue.

    alternative: the alternative suggested in the error message.
    Raises UserError that names the process holding the lock, or if the path cannot be written.
    """
    real = Path(os.path.realpath(path))
    if real.parent.is_dir() and not Path(path).parent.is_dir():  # MISSING/../NAME: no check of `path` would find NAME
        raise UserError(f"{path} leads through a directory that is not there; leave it out of the path")
    created: list[Path] = []
    try:
        fd, lock = _acquire(real, path, alternative, created)
        try:
            if fd is not None:  # without a lock, the leftovers may belong to a running command
                remove_leftovers(real.parent, name=real.name)
            yield
        except Exception as error:
            if not is_disk_full(error):
                raise
            raise disk_full_error(error, Path(path)) from error
        finally:
            if fd is not None:
                with contextlib.suppress(OSError):
                    lock.unlink()  # unlink before unlocking, so that a waiting process sees that its file is stale
                os.close(fd)
    finally:
        for folder in created:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """Yield a new temporary directory and remove it at the end; first remove those of killed processes."""
    root = Path(tempfile.gettempdir())
    for leftover in root.glob(f"{prefix}*"):
        _remove_abandoned(leftover)
    folder = root / f"{prefix}{uuid.uuid4().hex}"
    with exclusive_lock(folder):  # locked before it exists, so no other process finds it without an owner
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove a directory of this user that no process holds; keep it where the file system has no locks to tell."""
    with contextlib.suppress(OSError):
        if os.lstat(folder).st_uid != os.geteuid() or not stat.S_ISDIR(os.lstat(folder).st_mode):
            return
        lock = _lock_path(folder)
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)  # a killed owner leaves the lock file
        try:
            if try_lock(fd) and _is_current_file(fd, lock):
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink()
        finally:
            os.close(fd)


def try_lock(fd: int, *, shared: bool = False) -> bool | None:
    """Try to lock the open file `fd`; return True on success, False if it is held, None without locks there."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NONE_KEPT:
            return None
        raise
    return True


def _acquire(real: Path, path: str | Path, alternative: str, created: list[Path]) -> tuple[int | None, Path]:
    """Open and lock the lock file of `real`; return its descriptor and path. The descriptor is None if the file system
    has no locks. Directories that had to be created are added to `created`."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            created[:] = [*make_directory(real.parent), *created]
            lock = _lock_path(real)
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # a failed command removed the directory it had created
            if time.monotonic() > deadline:
                raise
            continue
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _foreign_lock_error(lock) from None
            if error.errno in _UNWRITABLE:
                problem = f"{error.filename}: {error.strerror}"
                raise UserError(f"{path} cannot be written ({problem}); change that, or take another place") from None
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or not _OURS.startswith(os.pread(fd, len(_OURS), 0).rstrip(b"\0")):
                raise _foreign_lock_error(
                    lock
                )  # our own prefix cut short is what a kill left, zeros are what a power cut left
            free = try_lock(fd)
            if free is False and time.monotonic() > deadline:
                hint = f", or {alternative}" if alternative else ""
                raise UserError(f"{path} is in use by another command ({_describe_holder(fd)}); wait for its end{hint}")
            if free is None:
                _warn_unlocked(real)
                lock.unlink(missing_ok=True)
                os.close(fd)
                return None, lock
            if free and _is_current_file(fd, lock):  # else its last owner has just removed it
                with contextlib.suppress(OSError):  # on a full disk it is held without its owner's name
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, _OURS + f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                return fd, lock
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(0.01)


def _lock_path(real: Path) -> Path:
    """Return the lock file's path: next to `real`, or inside it for a mount point or if its parent is not writable."""
    if real.is_dir() and (os.path.ismount(real) or not os.access(real.parent, os.W_OK)):
        return real / INSIDE
    return real.with_name(f".{real.name}.lock")


def _foreign_lock_error(lock: Path) -> UserError:
    return UserError(f"{lock} has the name of our lock and is something else; move it away")


def _is_current_file(fd: int, lock: Path) -> bool:
    """True if `lock` still names the open file `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(lock))
    except FileNotFoundError:
        return False


def _describe_holder(fd: int) -> str:
    """Describe the process holding the lock; it is unknown if its disk was full."""
    words = os.pread(fd, 300, 0).decode(errors="replace").split()
    if len(words) != 3:
        return "unknown process"
    return f"process {words[1]}" + (f" on {words[2]}" if words[2] != socket.gethostname() else "")


_warned_devices: set[int] = set()


def _warn_unlocked(real: Path) -> None:
    device = real.parent.stat().st_dev
    if device not in _warned_devices:
        _warned_devices.add(device)
        message = f"the file system of {real.parent} keeps no locks: nothing stops a second command on {real.name}"
        print(f"warning: {message}", file=sys.stderr)
