"""Board of a job: short messages between its ranks outside of any collective, for heartbeats and the cause of an end.

It must work while every main thread is blocked, before the process group exists and after it broke. Under our own
launcher it is a local directory (the launcher reads it too, without torch); under torchrun, accelerate launch or a
cluster's launcher it is the job's TCP store, through a separate connection.
"""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from ..errors import UserError

FOLDER = "FLATSHIFT_BOARD"
STORE_SECONDS, CONNECT_SECONDS = 10.0, 60.0
JOIN_SECONDS = 180.0
"""Time that ranks wait for each other at the start; machines may import at very different speeds."""


class RankTimeout(Exception):
    """The board's host does not answer."""


class KeyValueStore(Protocol):
    """Texts by name, shared by all ranks."""

    local: bool
    """True if the launcher reads it too and prints to the user itself."""

    def put(self, key: str, text: str) -> None:
        """Set `key`; raises RankTimeout."""

    def get(self, key: str) -> str | None:
        """Return the text of `key`, None if it is not set; raises RankTimeout."""

    def claim(self, key: str, text: str) -> bool:
        """Set `key` unless it is set; return True if this call set it. Raises RankTimeout."""


class DirectoryKeyValueStore:
    """Board with one file per key in a directory."""

    local = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, key: str, text: str) -> None:
        temporary = self._written(text)
        with _translate_store_errors():
            temporary.replace(self.folder / key)

    def get(self, key: str) -> str | None:
        try:
            return (self.folder / key).read_text(encoding="utf-8")
        except FileNotFoundError:
            if self.folder.is_dir():
                return None
            raise RankTimeout(str(self.folder)) from None

    def claim(self, key: str, text: str) -> bool:
        temporary = self._written(text)
        try:  # a hard link appears with its whole content or not at all, and fails if the key exists
            os.link(temporary, self.folder / key)
        except FileExistsError:
            return False
        except OSError as error:
            raise RankTimeout(str(self.folder)) from error
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _written(self, text: str) -> Path:
        temporary = self.folder / f".{uuid.uuid4().hex}"
        with _translate_store_errors():
            temporary.write_text(text, encoding="utf-8")
        return temporary


class TorchKeyValueStore:
    """Board in a `torch.distributed.Store`, with a prefix for this attempt: torchrun's store outlives a restart."""

    local = False

    def __init__(self, store: Any) -> None:
        self.store = store

    def put(self, key: str, text: str) -> None:
        with _translate_store_errors():
            self.store.set(key, text)

    def get(self, key: str) -> str | None:
        with _translate_store_errors():
            return self.store.get(key).decode() if self.store.check([key]) else None

    def claim(self, key: str, text: str) -> bool:
        with _translate_store_errors():
            # an expected value of "" sets the key only if it is absent
            return self.store.compare_set(key, "", text) == text.encode()


@contextlib.contextmanager
def _translate_store_errors() -> Any:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's store errors are RuntimeErrors
        raise RankTimeout(str(error)) from error


@functools.cache
def job_board() -> KeyValueStore | None:
    """Return the board of this process's job; None if it is not a rank, or the store cannot be reached.

    Connects at most once per process. If no agent hosts the store, rank 0 hosts it from here on.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        return None
    if FOLDER in os.environ:
        return DirectoryKeyValueStore(Path(os.environ[FOLDER]))
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError, OSError, KeyError):
        if not is_store_hosted_by_agent() and os.environ["RANK"] == "0":
            job_store()
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        return TorchKeyValueStore(dist.PrefixStore(f"flatshift/{restart_count()}", store))
    return None


def require_board() -> KeyValueStore:
    """Return the board of this process's job. Raises UserError if it cannot be reached."""
    board = job_board()
    if board is None:
        raise UserError(
            f"rank {os.environ.get('RANK')} cannot reach the other ranks at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')}; look whether rank 0 was started, and at the network"
        )
    return board


@functools.cache
def job_store() -> Any:
    """Return the store that creates the process group; rank 0 hosts it unless torchrun's agent does.

    A free port that our launcher holds open for rank 0 is passed as a file descriptor, so nobody can take it in
    between. Raises RuntimeError (of torch) if the store cannot be reached.
    """
    import torch.distributed as dist

    descriptor = os.environ.get("FLATSHIFT_STORE_FD")
    host = os.environ["RANK"] == "0" and not is_store_hosted_by_agent()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=host,
        timeout=timedelta(seconds=JOIN_SECONDS),
        wait_for_workers=False,
        master_listen_fd=int(descriptor) if host and descriptor else None,
    )
    return dist.PrefixStore(f"flatshift-group/{restart_count()}", store)


def is_store_hosted_by_agent() -> bool:
    """Return True if the launcher itself (torchrun) hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count() -> int:
    """Return the number of times the launcher has restarted this job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
