"""Encoded rows on disk, named by the content they were made of.

An entry is a directory of column files (`flatshift.finetune.data.columns`) with an `about.json` that holds the size and
CRC-32 of each. Its name is a digest of all that the tokens depend on, so an entry is never out of date: what changed
has another name. It appears whole or not at all. One that does not match its sums is made again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..atomic import replacing_directory
from ..cache_directory import ABOUT, ENTRY, cache_limit, prune
from .files import file_digest
from .formats import HUB
from .remote import DataFile

_COMMIT = re.compile(r"@[0-9a-f]{40}(:|$)")
_FILES = "files"


class CacheError(Exception):
    """The cache's directory cannot be written to; says where and why."""


class _OfTheInput(Exception):
    """Carries an OSError that reading the input raised past those of the cache itself."""


class Damaged(Exception):
    """An entry that is not what was written."""


@dataclass(frozen=True)
class CachedTokens:
    """An entry, and what is known of it."""

    folder: Path
    about: dict[str, Any]
    notes: list[str]
    """What a user should know about how it was come by."""


class TokenCache:
    """Entries in one directory, for any number of runs and ranks at the same time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str, make: Callable[[Path], dict[str, Any]]) -> CachedTokens:
        """The entry of `key`; one that is not there, or damaged, is made, by one process while the others wait.

        make: writes the entry's files into the directory it is given and returns what is to be known of it.

        Raises:
            CacheError: the directory cannot be written to. And what `make` raises.
        """
        with _named(self.root):
            return self._get(key, make)

    def _get(self, key: str, make: Callable[[Path], dict[str, Any]]) -> CachedTokens:
        folder = self.root / f"{ENTRY}{key}"
        try:
            if folder.is_dir():
                return CachedTokens(folder, _checked(folder), [f"token cache: read from {folder}"])
        except (Damaged, FileNotFoundError):
            pass  # judged again below, where nobody else is at work on it
        self.root.mkdir(parents=True, exist_ok=True)
        with _alone(self.root / f".{ENTRY}{key}.lock") as alone:
            notes = []
            try:
                if folder.is_dir():
                    return CachedTokens(folder, _checked(folder), [f"token cache: read from {folder}"])
            except (Damaged, FileNotFoundError) as error:
                notes.append(f"token cache: {folder} is damaged ({error}) and was made again")
            if alone:  # else a temporary may be another's work
                for leftover in self.root.glob(f".{ENTRY}{key}.*.tmp"):  # of a process that was killed at this
                    shutil.rmtree(leftover, ignore_errors=True)
            with replacing_directory(folder) as temporary:
                try:
                    about = make(temporary)
                except OSError as error:
                    raise _OfTheInput(error) from error
                _seal(temporary, about)
            notes.append(f"token cache: kept in {folder} ({_size(folder) / 2**20:,.1f} MiB)")
            gone = prune(self.root, limit=cache_limit(), keep=folder)
            if gone:
                notes.append(f"token cache: {gone} older entries made room")
            return CachedTokens(folder, about, notes)


def content_name(path: DataFile) -> str | None:
    """What names the content of an input: the SHA-256 of a file or directory, a hub data set with its commit.

    None for a hub data set by a branch or by no revision: nothing tells whether it changed.
    """
    name = str(path)
    if name.startswith(HUB):
        return name if _COMMIT.search(name) else None
    return file_digest(path)[0]


def _seal(folder: Path, about: dict[str, Any]) -> None:
    """Write about.json, with the sums of all files beside it."""
    sums = {str(path.relative_to(folder)): _sum(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / ABOUT).write_text(json.dumps({**about, _FILES: sums}), encoding="utf-8")


def _checked(folder: Path) -> dict[str, Any]:
    """What about.json says. Raises Damaged where it, or a file, is not what was written; FileNotFoundError."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        sums = about.pop(_FILES)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{ABOUT} is no description of an entry") from error
    for name, expected in sums.items():
        if _sum(folder / name) != expected:
            raise Damaged(f"{name} is not what was written")
    with contextlib.suppress(OSError):
        os.utime(folder / ABOUT)  # used now
    return dict(about)


def _sum(path: Path) -> list[int]:
    """Size and CRC-32: enough to find what a disk or a killed copy did."""
    size = crc = 0
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def _named(root: Path) -> Iterator[None]:
    """OSErrors of the cache itself become CacheErrors; those of the input stay what they are."""
    try:
        yield
    except _OfTheInput as carrier:
        cause = carrier.__cause__
        assert cause is not None
        raise cause from None
    except OSError as error:
        raise CacheError(f"{root}: {error.strerror or error}") from error


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Hold a lock that ends with the process; whether there is one. Where the system has none, all go on, and the last
    to write wins whole."""
    with path.open("a") as handle:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        except (ImportError, OSError):
            yield False
        else:
            yield True
