"""What a run can end with besides success. The front door turns each into an exit code."""

from __future__ import annotations

import errno


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


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk, or the user's share of it, had no room left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device had no memory left for what `error` tells of."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()  # torch raises RuntimeError, safetensors its own
    return any(words in text for words in _NO_MEMORY) and not isinstance(error, UserError)


_NO_MEMORY = ("not enough memory", "can't allocate memory", "cannot allocate memory", "cuda out of memory")
