"""Writes that either happen whole or not at all: temporary name, fsync, rename."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError, shortened


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_file(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on normal exit it replaces `path`, on an exception it vanishes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        yield temporary
        _fsync_file(temporary)
        temporary.replace(path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_directory(path: str | Path) -> Iterator[Path]:
    """Yield a temporary directory; on normal exit its files are fsynced and it becomes `path`.

    An existing `path` is moved aside first, so a kill leaves the old or the new directory, or a hidden leftover
    (`.NAME.*.tmp`) that `sweep_leftovers` removes; never a mixture.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    temporary.mkdir()
    aside = _temporary(path)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _fsync_file(file)
        fsync_directory(temporary)
        if path.exists():
            path.replace(aside)
        temporary.replace(path)
        fsync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def sweep_leftovers(directory: str | Path) -> None:
    """Remove the temporaries that a killed process left directly in `directory`."""
    directory = Path(directory)
    if directory.is_dir():
        for leftover in directory.glob(".*.tmp"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Atomically write `text` as UTF-8, halves of surrogate pairs (of a user's file) as `\\udXXX`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def json_text(value: Any, **options: Any) -> str:
    """`value` as JSON that UTF-8 can hold: in its own letters, or escaped where it has half of a surrogate pair.

    options: of `json.dumps`.
    """
    text = json.dumps(value, ensure_ascii=False, **options)
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return json.dumps(value, ensure_ascii=True, **options)
    return text


def read_object(path: Path, *keys: str, fix: str = "restore it, or make the run again") -> dict[str, Any]:
    """The JSON object in `path`, which has `keys`.

    Raises:
        UserError: it is missing, cannot be read, is no JSON object, or lacks one of `keys`; ends with `fix`.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {fix}") from None
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise UserError(f"{path}:{line}: not valid JSON; {fix}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object but {shortened(json.dumps(value), 40)}; {fix}")
    if lacks := [key for key in keys if key not in value]:
        raise UserError(f"{path}: has no {lacks[0]!r}; {fix}")
    return value


def write_json(path: str | Path, value: Any) -> None:
    """Atomically write `value` as indented JSON; NaN and infinities are refused."""
    write_text(path, json_text(value, indent=2, allow_nan=False) + "\n")
