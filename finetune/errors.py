"""Exceptions that end a run; the command line turns each into an exit code."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from .redaction import redact_urls

SENTENCE = 300
"""Maximum length of an error message shown to the user, in characters."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a command to save and exit with code 3: Ctrl-C, and a scheduler's before a time limit."""
_DISK = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.EREMOTEIO),
    *(errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.ECOMM, errno.EBUSY),
    *(errno.EMFILE, errno.ENFILE),
}
"""Error numbers with which a disk, a network file system or the limit on open files can fail any read or write."""


class UserError(ValueError):
    """Mistake in the user's input: one sentence with what, where (file:line or flag) and the nearest valid fix."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(redact_urls(text) if isinstance(text, str) else text for text in arguments))


class Interrupted(Exception):
    """Stopped from outside (signal, full disk) with everything finished so far kept and resumable."""


class OutOfMemory(MemoryError):
    """A stage ran out of memory; the message has the plan, the measured memory and the settings to change.

    `resumable`: True if a checkpoint or a finished stage was kept (exit code 3), False if nothing had started (2).
    """

    def __init__(self, message: str, *, resumable: bool) -> None:
        super().__init__(message)
        self.resumable = resumable


def system_errno(error: BaseException) -> int | None:
    """Return the errno of `error`, parsed from the messages of safetensors and tokenizers; None if it has none."""
    if isinstance(error, OSError):
        return error.errno
    if type(error).__name__ not in ("SafetensorError", "Exception"):  # tokenizers raises a bare Exception
        return None
    match = re.search(r"\(os error (\d+)\)", str(error))
    if match is None and "No space left" in str(error):
        return errno.ENOSPC
    return int(match[1]) if match is not None else errno.EDQUOT if "quota" in str(error) else None


def is_disk_full(error: BaseException) -> bool:
    """True if the disk, or the user's quota, is full."""
    return system_errno(error) in (errno.ENOSPC, errno.EDQUOT)


def disk_full_error(error: Exception, target: Path) -> Exception:
    """Return a disk-full error that names the path without room: the path in `error` (the destination of a copy), or
    `target` if the error names no path or a temporary file of `target`."""
    code = system_errno(error)
    assert code is not None
    path_named = getattr(error, "filename2", None) or getattr(error, "filename", None)
    is_target = path_named is None or f"{os.sep}.{target.name}." in str(path_named)
    return OSError(code, os.strerror(code), str(target) if is_target else str(path_named))


def describe_disk_error(error: BaseException) -> str | None:
    """Describe the failure if `error` comes from the disk or network file system: it may be temporary, so finished work
    is kept and the same command resumes. None for any other error."""
    code = system_errno(error)
    if code not in _DISK:
        return None
    return "the disk is full" if is_disk_full(error) else f"the disk answered “{os.strerror(code)}”"


def is_remote(name: str | Path) -> bool:
    """True if `name` is the address of a store (`s3://bucket/key`); `Path` has collapsed its two slashes to one."""
    pattern = _ADDRESS_PATH if isinstance(name, Path) else _ADDRESS
    return pattern.match(str(name)) is not None and not str(name).startswith("file:")


def store_address(name: str | Path) -> str:
    """Return the address of a store with both its slashes."""
    return str(name).replace(":/", "://", 1) if isinstance(name, Path) else name


_ADDRESS_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_LOCAL_ADDRESS = re.compile(r"file://(?:localhost)?(/.*)")


def user_path(name: str | Path) -> Path:
    """Return `name` as a path, with a leading `~` or `~user` expanded and `file://` removed.

    Raises UserError for an unknown user, and for the address of a store.
    """
    if is_remote(name):
        raise UserError(f"{name}: a local path is needed here; copy it from the store to this machine first")
    if (local := _LOCAL_ADDRESS.fullmatch(str(name))) is not None:
        from urllib.parse import unquote

        return Path(unquote(local[1]))
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UserError(f"{name}: there is no user of this name; write the path without ~") from None


def first_error_line(error: BaseException) -> str:
    """Return the first line of an exception's message, shortened, or its type's name if the message is empty."""
    text = str(error).strip()
    return shorten(text.splitlines()[0], 160) if text else type(error).__name__


def shorten(text: str, maximum: int = 60) -> str:
    """Return `text` cut to at most `maximum` characters, with an ellipsis in the middle."""
    head = (maximum - 1) * 2 // 3
    return text if len(text) <= maximum else f"{text[:head]}…{text[head + 1 - maximum :]}"


_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Invisible characters that a terminal acts on: control characters except tabs and line ends, bidirectional controls,
and unpaired surrogates, which no terminal accepts."""


def escape_control_characters(text: str) -> str:
    """Escape what would steer a terminal in `text` from a user's file, a name or a model, as in JSON (`\\u001b`), so
    that JSON stays equivalent."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class EscapedStream:
    """Text stream that escapes what would steer a terminal: texts, names and answers come from untrusted sources.

    `unescaped` is the stream for programs that draw with control sequences of their own.
    """

    def __init__(self, stream: TextIO, *, redact: bool = False) -> None:
        """redact: also remove passwords and signatures from addresses."""
        self._stream, self._redact = stream, redact
        self.unescaped: TextIO = getattr(stream, "unescaped", stream)

    def write(self, text: str) -> int:
        return self._stream.write(escape_control_characters(redact_urls(text) if self._redact else text))

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def format_error_message(text: str, maximum: int = SENTENCE) -> str:
    """Return `text` on one line of at most `maximum` characters, control characters escaped.

    In a longer text the longest words (a path, a value) lose their middles first, so the message stays readable.
    """
    line = " ".join("".join(c if c.isprintable() or c.isspace() else ascii(c)[1:-1] for c in text).split())
    for width in (120, 80, 50):
        if len(line) <= maximum:
            return line
        line = " ".join(shorten(word, width) for word in line.split(" "))
    return shorten(line, maximum)


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` reports that the host or a device ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()  # torch raises RuntimeError, safetensors its own exception
    return any(words in text for words in _NO_MEMORY) and not isinstance(error, UserError)


_NO_MEMORY = ("not enough memory", "can't allocate memory", "cannot allocate memory", "cuda out of memory")
