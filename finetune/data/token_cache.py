"""On-disk cache of encoded rows, keyed by the content they were made from.

An entry is a directory of column files (`flatshift.finetune.data.columns`) with an `about.json` that holds size and
CRC-32 of each. Its name is a digest of everything that the tokens depend on, so an entry never becomes stale: changed
inputs have another name. Entries are written atomically. An entry that does not match its checksums is rebuilt.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..atomic import atomic_directory
from ..cache_directory import ABOUT, ENTRY, cache_limit, prune_cache
from .files import file_digest
from .formats import HUB
from .remote import DataFile

_COMMIT = re.compile(r"@[0-9a-f]{40}(:|$)")
_FILES = "files"


class CacheError(Exception):
    """The cache directory cannot be written to; says where and why."""


class _InputError(Exception):
    """Wrapper that carries an OSError from reading the input past the handler for errors of the cache itself."""


class DamagedEntry(Exception):
    """An entry differs from what was written."""


class CachedTokens(NamedTuple):
    """A cache entry with its metadata, and notes for the user on how it was obtained."""

    folder: Path
    metadata: dict[str, Any]
    notes: list[str]


class TokenCache:
    """Cache entries in one directory, safe for concurrent runs and ranks."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str, build: Callable[[Path], dict[str, Any]]) -> CachedTokens:
        """Return the entry of `key`; one that is missing or damaged is built by one process while the others wait.

        build: writes the entry's files into the given directory and returns its metadata. Raises CacheError if the
        directory cannot be written to, and whatever `build` raises.
        """
        try:
            return self._get(key, build)
        except _InputError as carrier:
            cause = carrier.__cause__
            assert cause is not None
            raise cause from None
        except OSError as error:
            raise CacheError(f"{self.root}: {error.strerror or error}") from error

    def _get(self, key: str, build: Callable[[Path], dict[str, Any]]) -> CachedTokens:
        folder = self.root / f"{ENTRY}{key}"
        with contextlib.suppress(DamagedEntry, FileNotFoundError):  # checked again below, under the lock
            if folder.is_dir():
                return CachedTokens(folder, _verify_entry(folder), [f"token cache: read from {folder}"])
        self.root.mkdir(parents=True, exist_ok=True)
        with _lock_file(self.root / f".{ENTRY}{key}.lock") as locked:
            notes = []
            try:
                if folder.is_dir():
                    return CachedTokens(folder, _verify_entry(folder), [f"token cache: read from {folder}"])
            except (DamagedEntry, FileNotFoundError) as error:
                notes.append(f"token cache: {folder} is damaged ({error}) and was made again")
            if locked:  # without a lock, a temporary directory may be another process's work
                for leftover in self.root.glob(f".{ENTRY}{key}.*.tmp"):  # left by a process that was killed
                    shutil.rmtree(leftover, ignore_errors=True)
            with atomic_directory(folder) as temporary:
                try:
                    metadata = build(temporary)
                except OSError as error:
                    raise _InputError(error) from error
                files = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
                sums = {str(path.relative_to(temporary)): _compute_checksum(path) for path in files}
                (temporary / ABOUT).write_text(json.dumps({**metadata, _FILES: sums}), encoding="utf-8")
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            notes.append(f"token cache: kept in {folder} ({size / 2**20:,.1f} MiB)")
            removed = prune_cache(self.root, limit=cache_limit(), current=folder)
            if removed:
                notes.append(f"token cache: {removed} older entries made room")
            return CachedTokens(folder, metadata, notes)


def content_key(path: DataFile) -> str | None:
    """Return an identifier of an input's content: the SHA-256 of a file or directory, or the name of a hub data set
    with commit; None for a hub data set given by branch or without revision, whose changes cannot be detected."""
    name = str(path)
    if name.startswith(HUB):
        return name if _COMMIT.search(name) else None
    return file_digest(path)[0]


def _verify_entry(folder: Path) -> dict[str, Any]:
    """Return the metadata in about.json. Raises DamagedEntry if it, or a file, is not as written; FileNotFoundError."""
    try:
        metadata = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        sums = metadata.pop(_FILES)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedEntry(f"{ABOUT} is no description of an entry") from error
    for name, expected in sums.items():
        if _compute_checksum(folder / name) != expected:
            raise DamagedEntry(f"{name} is not what was written")
    with contextlib.suppress(OSError):
        os.utime(folder / ABOUT)  # mark as recently used, for pruning
    return dict(metadata)


def _compute_checksum(path: Path) -> list[int]:
    """Return size and CRC-32 of a file: enough to detect disk errors and interrupted copies."""
    size = crc = 0
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


@contextlib.contextmanager
def _lock_file(path: Path) -> Iterator[bool]:
    """Hold a file lock that is released when the process ends; yields False if the system has no locks. Then several
    processes may build the entry, and the last one to finish replaces it atomically."""
    with path.open("a") as handle:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        except (ImportError, OSError):
            yield False
        else:
            yield True
