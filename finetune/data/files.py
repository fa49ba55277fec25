"""Expansion of data file names given by users, and their description for a manifest."""

from __future__ import annotations

import contextlib
import difflib
import glob
import hashlib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import UserError, is_remote, user_path
from . import formats, remote
from .remote import DataFile, RemoteFile


def expand_files(files: Sequence[str]) -> list[DataFile]:
    """Return the paths of `files`: paths as given; globs and directories expanded in sorted order; `sample:NAME` for
    shipped samples; `hub:NAME[CONFIG]@REVISION:SPLIT`; and objects for the addresses of a store.

    Raises UserError: a path that does not exist (names the nearest), a glob without a match, a file named twice.
    """
    if isinstance(files, str):
        raise UserError(f"{files!r}: files are a list; write [{files!r}]")
    paths = [path for name in files for path in _expand_one(str(name))]
    keys: set[str] = set()
    for path in paths:
        if formats.has_lone_surrogate(str(path)):
            raise UserError(f"{str(path)!a}: a file whose name is not valid UTF-8; rename it")
        key = str(path) if isinstance(path, RemoteFile) or str(path).startswith(formats.HUB) else str(path.resolve())
        if key in keys:
            raise UserError(f"{path} is named twice in {', '.join(map(str, files))}; name it once")
        keys.add(key)
    return paths


def check_local_files(names: Iterable[str]) -> None:
    """Raise UserError for a name on this machine that `expand_files` refuses, before anything large is imported."""
    for name in names:
        if not is_remote(name):
            expand_files([name])


def _expand_one(name: str) -> Sequence[DataFile]:
    if name.startswith(formats.SAMPLE):
        from ..assets import sample_path

        return [Path(sample_path(name.removeprefix(formats.SAMPLE)))]
    if name.startswith(formats.HUB):
        return [Path(name)]
    if not name:
        raise UserError("'' is no name of a file; leave it out, or name the file")
    if is_remote(name):
        objects, directory = remote.find_objects(name)
        if directory and any(file.name in formats.SAVED_DATASET for file in objects):
            raise UserError(f"{name}: a saved data set is read from a local directory; copy it to this machine first")
        return formats.select_known_format(name, objects) if directory else objects
    path = user_path(name)
    if path.is_symlink() and not path.exists():
        raise UserError(f"{name}: a link to a file that is not there; restore it, or name another")
    if path.exists():
        if not (path.is_file() or path.is_dir()):
            raise UserError(f"{name}: a pipe, socket or device, which cannot be read twice; write it to a file first")
        holds_files = path.is_dir() and not formats.is_saved_dataset(path)
        return formats.select_known_format(str(path), sorted(path.iterdir())) if holds_files else [path]
    if glob.has_magic(name):
        paths = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        matches = sorted(Path(match) for match in paths if Path(match).is_file())
        if not matches:
            raise UserError(f"{name}: no file matches this pattern")
        documents = [match for match in matches if formats.is_document_file(match)]
        if documents and len(documents) < len(matches):
            raise UserError(
                f"{name}: matches {documents[0].name}, a document, and files of records; name either, as "
                f"*{documents[0].suffix}"
            )
        return matches
    if not path.parent.is_dir():
        hint = f" (there is no directory {path.parent})"
    else:
        names = [entry.name for entry in path.parent.iterdir()]
        close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
        hint = f"; did you mean {path.parent / close[0]}?" if close else f"; give {formats.SUPPORTED}"
    raise UserError(f"{name}: no such file{hint}")


def has_named(name: str, label: str) -> bool:
    """Return True if the file that a manifest lists as `label` is one of `name`: itself, a glob, or a directory."""
    return label == name or fnmatch(label, name) or Path(name) in Path(label).parents


def describe_files(files: Sequence[str], contents: Iterable[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Return `path` and the entries of `describe_content` of each file, for a manifest.

    contents: the latter, in the order of the files, where they are known.
    """
    paths = [
        (str(name) if str(name).startswith(formats.SAMPLE) else str(path), path)
        for name in files
        for path in _expand_one(str(name))
    ]
    if contents is None:
        contents = (describe_content(path) for _, path in paths)
    return [{"path": label, **content} for (label, _), content in zip(paths, contents, strict=True)]


def describe_content(path: DataFile) -> dict[str, Any]:
    """Return `sha256, bytes, rows` of a file.

    `rows` counts the records, including bad ones; null for a broken file. A saved data set is hashed file by file in
    name order; a hub data set has no digest or size (null), its revision is part of its name. An object of a store also
    has the `version` that the store reports.
    """
    record: dict[str, Any] = {"sha256": None, "bytes": None, "rows": None}
    if str(path).startswith(formats.HUB):
        return record
    formats.split_suffix(path)
    record["sha256"], record["bytes"] = file_digest(path)
    with contextlib.suppress(formats.BrokenFile):  # with bad_rows: skip, its readable part was used
        record["rows"] = formats.count_records(path)
    if isinstance(path, RemoteFile):
        record["version"] = path.version
    return record


def file_digest(path: DataFile) -> tuple[str, int]:
    """Return SHA-256 and bytes of a file, or of all files of a directory in name order."""
    if isinstance(path, RemoteFile):
        return path.digest()
    parts = sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    size = 0
    for part in parts:
        with part.open("rb") as handle:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
    return digest.hexdigest(), size
