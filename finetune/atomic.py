"""Atomic writes of files and directories: temporary name, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .errors import UserError, shorten

_OLD = ".old"


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: str | Path) -> list[Path]:
    """Create `path` and its missing parents durably; return the directories that were created, innermost first."""
    folder, missing = Path(path), []
    while not folder.is_dir() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for created in reversed(missing):
        created.mkdir(exist_ok=True)
        fsync_directory(created.parent)
    return missing


def _fsync_file(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; it replaces `path` on normal exit and is removed on an exception.

    Raises UserError if `path` exists and is not a plain file: a directory, a link, a device or a pipe.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise _replacement_error(path, "a plain file")
    make_directory(path.parent)
    temporary = _temporary_path(path)
    try:
        yield temporary
        _fsync_file(temporary)
        temporary.replace(path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _replacement_error(path: Path, expected: str) -> UserError:
    kind = "a directory" if path.is_dir() else "a file" if path.is_file() else "a special file"
    kind = "a link" if path.is_symlink() else kind
    return UserError(f"{path} is {kind} and is not replaced; name {expected}, or move it away")


@contextlib.contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yield a temporary directory; on normal exit its files are fsynced and it becomes `path`.

    An existing `path` is moved aside first, so a kill leaves either the old or the new directory, or the old one under
    a hidden name that `remove_leftovers` restores; never a mixture.

    Raises UserError if `path` exists and is not a directory: a file, a link (even to a directory, whose target would be
    replaced), a device or a pipe.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise _replacement_error(path, "a directory")
    path = Path(os.path.realpath(path))
    with _staging_directory(path) as temporary:
        yield temporary
        _fsync_tree(temporary)
        aside = temporary.with_suffix(f"{_OLD}.tmp")
        try:
            if path.exists():
                path.replace(aside)
            temporary.replace(path)
            fsync_directory(path.parent)
        finally:
            if path.exists():
                shutil.rmtree(aside, ignore_errors=True)
            elif aside.exists():
                aside.replace(path)


@contextlib.contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """Yield a temporary directory; on normal exit its files are fsynced and it becomes `path`, if that is absent or
    empty.

    Raises FileExistsError if `path` has content by then: another process's files are kept.
    """
    path = Path(os.path.realpath(path))
    with _staging_directory(path) as temporary:
        yield temporary
        _fsync_tree(temporary)
        remove_leftovers(path)
        try:
            temporary.replace(path)  # rename(2) replaces an empty directory and fails on any other
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, "another command has made it meanwhile", str(path)) from None
            raise
        fsync_directory(path.parent)


@contextlib.contextmanager
def _staging_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `path`; remove it at the end unless it was renamed."""
    make_directory(path.parent)
    temporary = _temporary_path(path)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fsync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_dir():
            fsync_directory(path)
        elif path.is_file():
            _fsync_file(path)
    fsync_directory(directory)


def remove_leftovers(directory: str | Path, *, name: str | None = None) -> None:
    """Remove the temporary files that a killed process left directly in `directory`, for the name `name` or for all
    names; restore the name of a directory that was moved aside but not replaced."""
    directory = Path(directory)
    if not directory.is_dir():
        return
    pattern = f".{glob.escape(name)}.{'[0-9a-f]' * 8}" if name is not None else ".*"
    for leftover in sorted({*directory.glob(f"{pattern}.tmp"), *directory.glob(f"{pattern}{_OLD}.tmp")}):
        if leftover.name.endswith(f"{_OLD}.tmp"):
            original = directory / leftover.name[1 : -len(f".12345678{_OLD}.tmp")]
            if not original.exists():
                leftover.replace(original)
                continue
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def has_only_leftovers(directory: str | Path, *, allowed: Iterable[str] = ()) -> bool:
    """True if a directory holds nothing but leftovers of killed writes and the names `allowed`."""
    names = set(allowed)
    return all(
        entry.name in names or (entry.name.startswith(".") and entry.name.endswith(".tmp"))
        for entry in Path(directory).iterdir()
    )


def sync_files(*paths: Path) -> None:
    """Make data appended to those of `paths` that exist durable, including their directory entries."""
    existing = [path for path in paths if path.is_file()]
    for path in existing:
        _fsync_file(path)
    for folder in {path.parent for path in existing}:
        fsync_directory(folder)


def write_text(path: str | Path, text: str) -> None:
    """Atomically write `text` as UTF-8, with unpaired surrogates (from a user's file) as `\\udXXX`."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def json_text(value: Any, **options: Any) -> str:
    """Return `value` as JSON that can be encoded in UTF-8: unescaped, or ASCII-escaped if it has an unpaired surrogate.

    options: keyword arguments of `json.dumps`.
    """
    text = json.dumps(value, ensure_ascii=False, **options)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=True, **options)
    return text


def to_json_values(value: Any) -> Any:
    """Convert arrays, tensors and their scalars to JSON values; non-finite numbers to null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): to_json_values(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_values(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json_object(path: Path, *keys: str, fix: str = "restore it, or make the run again") -> dict[str, Any]:
    """Return the JSON object in `path`, which must have `keys`. Raises UserError: the file is missing or unreadable, is
    not a JSON object, or lacks one of `keys`; ends with `fix`."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {fix}") from None
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise UserError(f"{path}:{line}: not valid JSON; {fix}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object but {shorten(json.dumps(value), 40)}; {fix}")
    if missing := [key for key in keys if key not in value]:
        raise UserError(f"{path}: has no {missing[0]!r}; {fix}")
    return value


def write_json(path: str | Path, value: Any) -> None:
    """Atomically write `value` as indented JSON; NaN and infinities raise ValueError."""
    write_text(path, json_text(value, indent=2, allow_nan=False) + "\n")
