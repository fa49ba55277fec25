"""What a run can end with besides success. The front door turns each into an exit code."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path

SENTENCE = 300
"""Characters of what a user is told of a mistake, at most."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What asks a command to save and to end with exit code 3: Ctrl-C, and what schedulers send before their time limit."""
_DISK = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.EREMOTEIO),
    *(errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.ECOMM, errno.EBUSY),
    *(errno.EMFILE, errno.ENFILE),
}
"""What a disk, a network file system, or the machine's supply of open files can answer to any read or write."""


class UserError(ValueError):
    """A mistake in the user's input: one sentence with what, where (file:line or flag) and the nearest valid fix."""


class Interrupted(Exception):
    """Stopped from outside (signal, full disk) with everything finished so far kept and resumable."""


class OutOfMemory(MemoryError):
    """A stage ran out of memory; the message has the plan, what was measured and what to change.

    `resumable`: whether a checkpoint or a finished stage is kept (exit code 3), or nothing was begun (2).
    """

    def __init__(self, message: str, *, resumable: bool) -> None:
        super().__init__(message)
        self.resumable = resumable


def system_error(error: BaseException) -> int | None:
    """The operating system's number for `error`, also where safetensors and tokenizers tell it in words; else None."""
    if isinstance(error, OSError):
        return error.errno
    if type(error).__name__ not in ("SafetensorError", "Exception"):  # the latter: tokenizers
        return None
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is None and "No space left" in str(error):
        return errno.ENOSPC
    return int(found[1]) if found is not None else errno.EDQUOT if "quota" in str(error) else None


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk, or the user's share of it, had no room left."""
    return system_error(error) in (errno.ENOSPC, errno.EDQUOT)


def full_at(error: Exception, place: Path) -> Exception:
    """An error of a full disk with the path that has no room: the one that it names, of a copy where it goes, else
    `place`, for what was written to it or to a temporary one of its name."""
    code = system_error(error)
    assert code is not None
    named = getattr(error, "filename2", None) or getattr(error, "filename", None)
    own = named is None or f"{os.sep}.{place.name}." in str(named)
    return OSError(code, os.strerror(code), str(place) if own else str(named))


def disk_trouble(error: BaseException) -> str | None:
    """What the disk (or network file system) has, in words, where `error` comes from it: a cause that may pass, so that
    what was finished is kept and the same command goes on. None for any other error."""
    code = system_error(error)
    if code not in _DISK:
        return None
    return "the disk is full" if is_disk_full(error) else f"the disk answered “{os.strerror(code)}”"


def is_remote(name: str | Path) -> bool:
    """Whether `name` is the address of a store (`s3://bucket/key`); `Path` has made one slash of its two."""
    form = _ADDRESS_PATH if isinstance(name, Path) else _ADDRESS
    return form.match(str(name)) is not None and not str(name).startswith("file:")


def address_of(name: str | Path) -> str:
    """The address of a store with both its slashes."""
    return str(name).replace(":/", "://", 1) if isinstance(name, Path) else name


_ADDRESS_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_LOCAL_ADDRESS = re.compile(r"file://(?:localhost)?(/.*)")


def user_path(name: str | Path) -> Path:
    """`name` as a path, `~` and `~user` in front written out, `file://` removed.

    Raises UserError for a user that there is not, and for the address of a store.
    """
    if is_remote(name):
        raise UserError(f"{name}: a local path is needed here; copy what lies in the store to this machine first")
    if (local := _LOCAL_ADDRESS.fullmatch(str(name))) is not None:
        from urllib.parse import unquote

        return Path(unquote(local[1]))
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UserError(f"{name}: there is no user of this name; write the path without ~") from None


def first_line(error: BaseException) -> str:
    """What an exception of another library says, for a sentence of ours."""
    text = str(error).strip()
    return shortened(text.splitlines()[0], 160) if text else type(error).__name__


def shortened(text: str, most: int = 60) -> str:
    """`text` in at most so many characters: what is too long loses its middle."""
    head = (most - 1) * 2 // 3
    return text if len(text) <= most else f"{text[:head]}…{text[head + 1 - most :]}"


_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Signs that a terminal obeys and nobody sees: control characters but for tabs and line ends, orders to write in the
other direction, and halves of surrogate pairs, which no terminal takes."""


def printable(text: str) -> str:
    """`text` of a user's file, a name or a model as a terminal may have it: what would steer it is escaped as in JSON,
    `\\u001b`, so that JSON stays what it was."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def sentence(text: str, most: int = SENTENCE) -> str:
    """`text` on one line of at most `most` characters, control characters escaped.

    Of a longer one its longest words (a path, a value) lose their middles first: what is wrong stays readable.
    """
    line = " ".join("".join(c if c.isprintable() or c.isspace() else ascii(c)[1:-1] for c in text).split())
    for room in (120, 80, 50):
        if len(line) <= most:
            return line
        line = " ".join(shortened(word, room) for word in line.split(" "))
    return shortened(line, most)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device had no memory left for what `error` tells of."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()  # torch raises RuntimeError, safetensors its own
    return any(words in text for words in _NO_MEMORY) and not isinstance(error, UserError)


_NO_MEMORY = ("not enough memory", "can't allocate memory", "cannot allocate memory", "cuda out of memory")
