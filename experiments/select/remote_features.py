"""The user's own features in an object store, copied to a disk from which their rows are mapped.

`select.cache`/features-KEY/ holds a copy. For a directory of shards KEY is the SHA-256 of its manifest, and the copy's
own `manifest.json` is written last, after every shard was verified against it; for a single `.npy` KEY is a hash of its
address and version. An interrupted copy of shards resumes, and a complete one is reused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flatshift.experiments.run.console import Console
from flatshift.finetune.atomic import fsync_directory, make_directory, read_json_object, write_json
from flatshift.finetune.data.remote import BLOCK, RemoteFile, find_objects
from flatshift.finetune.digests import file_sha256
from flatshift.finetune.errors import UserError, user_path
from flatshift.finetune.lock import exclusive_lock
from flatshift.selection.errors import SelectionError
from flatshift.selection.features import open_directory
from flatshift.selection.features.directory import MANIFEST, read_manifest

_SOURCE = "source.json"
"""File next to a single array: its source and its SHA-256."""


class LocalCopy(NamedTuple):
    """Path of copied features, and their record in the selection's manifest: `path, sha256, bytes, version`, for a
    directory those of its manifest, and `shards`."""

    path: Path
    record: dict[str, Any]


def copy_features(address: str, cache: str, flag: str, console: Console) -> LocalCopy:
    """Copy the array or directory of shards at `address` to this machine's disk, below the directory `cache`.

    Raises UserError for a missing object, a shard that differs from its manifest or a store that refuses access, and
    SelectionError for a manifest that cannot be used.
    """
    address = address.rstrip("/")
    make_directory(user_path(cache))
    copy = _copy_array if address.endswith(".npy") else _copy_shard_directory
    return copy(address, user_path(cache), flag, console)


def _copy_array(address: str, root: Path, flag: str, console: Console) -> LocalCopy:
    source = _find_object(address, flag)
    with source.open():  # fixes the version that every later read must see
        version = source.version
    key = hashlib.sha256(json.dumps([address, source.size, version], sort_keys=True).encode()).hexdigest()[:40]
    folder = root / f"features-{key}"
    file, record = folder / source.name, folder / _SOURCE
    with exclusive_lock(folder, instead="another select.cache"):
        make_directory(folder)
        if not (version and file.is_file() and record.is_file()):  # no version: a copy cannot be recognised
            (folder / f".{file.name}.part").unlink(missing_ok=True)  # nothing identifies the source of a partial copy
            with console.task(f"copy {flag.removeprefix('--')}, MiB", (source.size or 0) >> 20) as bar:
                sha256 = _copy_object(source, file, lambda done: bar(done >> 20))
            write_json(record, {"path": address, "sha256": sha256, "bytes": file.stat().st_size})
        known = read_json_object(record, "sha256", "bytes", fix=f"delete {folder}, it is copied again")
        if file_sha256(file) != known["sha256"]:
            raise UserError(f"{flag}: {file} is no longer the copy of {address}; delete {folder}, it is copied again")
    return LocalCopy(file, {"path": address, "sha256": known["sha256"], "bytes": known["bytes"], "version": version})


def _copy_shard_directory(address: str, root: Path, flag: str, console: Console) -> LocalCopy:
    try:
        source = _find_object(f"{address}/{MANIFEST}", flag)
    except UserError as error:
        raise UserError(f"{error} (a directory of shards has one, a single array's address ends with .npy)") from error
    with source.open() as handle:
        content = handle.read()
    sha256 = hashlib.sha256(content).hexdigest()
    folder = root / f"features-{sha256[:40]}"
    with exclusive_lock(folder, instead="another select.cache"):
        make_directory(folder)
        complete = (folder / MANIFEST).is_file()
        file = folder / (MANIFEST if complete else f".{MANIFEST}.part")
        if not complete:
            file.write_bytes(content)
        manifest = read_manifest(file, flag)
        if not complete:
            _copy_shards(address, manifest, folder, flag, console)
            file.replace(folder / MANIFEST)
            fsync_directory(folder)
        try:
            open_directory(folder, flag)
        except SelectionError as error:
            (folder / MANIFEST).unlink()
            if not complete:
                raise
            for damaged in (*folder.glob("*.npy"), *folder.glob("*.ids")):
                damaged.unlink()
            raise UserError(
                f"{flag}: the copy of {address} in {folder} was damaged and is removed ({error}); start again"
            ) from None
    record = {"path": address, "sha256": sha256, "bytes": len(content), "version": source.version}
    return LocalCopy(folder, record | {"shards": len(manifest["shards"]), "rows": manifest["rows"]})


def _copy_shards(address: str, manifest: dict[str, Any], folder: Path, flag: str, console: Console) -> None:
    files = [(shard["file"], shard["sha256"]) for shard in manifest["shards"]]
    if manifest["ids"]:
        files += [(Path(shard["file"]).with_suffix(".ids").name, shard["ids_sha256"]) for shard in manifest["shards"]]
    with console.task(f"copy {flag.removeprefix('--')}", len(files), "files") as bar:
        for number, (name, sha256) in enumerate(files, start=1):
            if not (folder / name).is_file():
                source = _find_object(f"{address}/{name}", flag)
                if _copy_object(source, folder / name, lambda done: None, sha256) != sha256:
                    (folder / f".{name}.part").unlink()
                    raise UserError(
                        f"{flag}: {address}/{name} is not what {MANIFEST} says (SHA-256); write it again, then seal "
                        "again, or start again if the copy was cut"
                    )
            bar(number)


def _find_object(address: str, flag: str) -> RemoteFile:
    try:
        files, directory = find_objects(address)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from error.__cause__
    if directory or len(files) != 1:
        raise UserError(f"{flag}: {address} is no single object; name a .npy file, or a directory with {MANIFEST}")
    return files[0]


def _copy_object(source: RemoteFile, file: Path, progress: Callable[[int], None], sha256: str | None = None) -> str:
    """Copy an object, resuming after the bytes of an earlier attempt; return its SHA-256.

    The file gets its final name unless the digest differs from `sha256`.
    """
    digest, part = hashlib.sha256(), file.with_name(f".{file.name}.part")
    with part.open("a+b") as out, source.open() as handle:
        out.seek(0)
        while chunk := out.read(BLOCK):
            digest.update(chunk)
        handle.seek(out.tell())
        while chunk := handle.read(BLOCK):
            out.write(chunk)
            digest.update(chunk)
            progress(out.tell())
        out.flush()
        os.fsync(out.fileno())
    if sha256 in (None, digest.hexdigest()):
        part.replace(file)
        fsync_directory(file.parent)
    return digest.hexdigest()
