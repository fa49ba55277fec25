"""SHA-256 digests of a finished run's files, recorded in its `done.json` and checked before any of them is read again.

    RUN/done.json                  {"files": {"eval.json": …, "adapter/adapter_model.safetensors": …}}
    RUN/stages/NAME/done.json      the same for stages/NAME/adapter, along with how the stage ended
    SWEEP/cells/KEY/result.json    {"seal": {"result.json": …, "trace.jsonl": …}}: itself and the cell's files

Files saved by other programs, or not finished, have no such record and pass. Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from .atomic import json_text, read_json_object, write_json
from .errors import UserError, shorten

DONE, FILES = "done.json", "files"
_SEAL = "seal"
_ELSEWHERE = "state"
"""Folder of a run that may be a link to another disk: no command copies or prints what is in it."""


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def adapter_digest(run: Path) -> str:
    """Return the SHA-256 of a run's adapter weights, to identify a measured adapter; "" if there are none."""
    file = run / "adapter" / "adapter_model.safetensors"
    return file_sha256(file) if file.is_file() else ""


def record_digest(record: Mapping[str, object]) -> str:
    """Return the SHA-256 of a JSON record, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def file_digests(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of `files`, keyed by their paths relative to `folder`."""
    return {file.relative_to(folder).as_posix(): file_sha256(file) for file in sorted(files)}


def adapter_file_digests(folder: Path) -> dict[str, str]:
    """Return `file_digests` of all files in `folder`/adapter: everything that loading the adapter depends on."""
    return file_digests(folder, [file for file in (folder / "adapter").glob("*") if file.is_file()])


def write_sealed(file: Path, record: Mapping[str, object], siblings: Iterable[Path] = ()) -> None:
    """Write the JSON `record` with checksums of its own values and of sibling files, for `verify_sealed`."""
    plain = json.loads(json_text(record, allow_nan=False))
    write_json(file, {**plain, _SEAL: {**file_digests(file.parent, siblings), file.name: record_digest(plain)}})


def verify_sealed(file: Path, record: Mapping[str, Any], *, fix: str) -> dict[str, Any]:
    """Return `record`, as read from `file`, without its seal; a record that has none passes. Raises UserError: the
    record, or a file next to it, differs from what `write_sealed` wrote; ends with `fix`."""
    plain = {key: value for key, value in record.items() if key != _SEAL}
    seal = record.get(_SEAL, {file.name: record_digest(plain)})
    if not isinstance(seal, dict) or file.name not in seal:
        raise UserError(f"{file}: {_SEAL!r} is not a mapping of names to SHA-256; {fix}")
    for name, expected in seal.items():
        _check_name(name, file)
        path = file.parent / name
        if (record_digest(plain) if name == file.name else _listed_digest(path, file.name, fix)) != expected:
            raise UserError(f"{path} is not what was saved (SHA-256 in {file.name}); {fix}")
    return plain


def _listed_digest(file: Path, record: str, fix: str) -> str:
    try:
        return file_sha256(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}, but {record} lists it; {fix}") from None


def _check_name(name: str, record: Path) -> None:
    """Raise UserError for a name in `record` by which a stranger's directory reaches files outside it."""
    if (path := PurePosixPath(name)).is_absolute() or ".." in path.parts:
        raise UserError(f"{record}: lists {shorten(name)!r}, which is no file of its directory; take it out")


def check_entries(folder: Path) -> None:
    """Raise UserError for a link that leads out of `folder`, a FIFO, socket or device below it: by such a name a
    stranger's directory could have the user's files printed, copied or uploaded, or wait for ever."""
    root = os.path.realpath(folder)
    for parent, names, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*names, *files)):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:  # another process has removed it
                continue
            own = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
            if stat.S_ISLNK(mode):
                own = Path(os.path.realpath(path)).is_relative_to(root) or path == folder / _ELSEWHERE
            if not own:
                raise UserError(f"{path} is a link or no plain file; put a copy in its place, or remove it")


def check_files(folder: Path, is_required: Callable[[str], bool] = lambda name: True) -> None:
    """Raise UserError if a file of `folder` is missing or differs from `folder`/done.json, and as `check_entries`;
    without done.json all files pass.

    is_required: predicate on names; only these files are compared.
    """
    check_entries(folder)
    record = folder / DONE
    if not record.is_file():
        if record.exists() or record.is_symlink():
            raise UserError(f"{record} is no plain file; restore it, or make the run again")
        return
    recorded = read_json_object(record, FILES)[FILES]
    if not isinstance(recorded, dict) or not all(isinstance(value, str) for value in recorded.values()):
        raise UserError(f"{record}: {FILES!r} is not a mapping of names to SHA-256; restore it, or make the run again")
    for name, expected in recorded.items():
        _check_name(name, record)
        if not is_required(name):
            continue
        actual = _listed_digest(folder / name, DONE, fix="restore it, or make it again")
        if actual != expected:
            raise UserError(
                f"{folder / name} is not what was saved (SHA-256 {actual[:12]}…, in {DONE} {expected[:12]}…); restore "
                "it, or make it again"
            )


def copy_recorded_files(folder: Path, target: Path) -> None:
    """Copy the files in `folder`/done.json, and it, to the directory `target`. Raises UserError as `check_files`."""
    check_files(folder)
    for name in (*read_json_object(folder / DONE, FILES)[FILES], DONE):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)


def check_adapter(directory: Path) -> None:
    """Raise UserError if the adapter in `directory` is of a run and differs from what that run saved."""
    resolved = directory.resolve()
    if resolved.name == "adapter":
        run = directory.parent if directory.name == "adapter" else resolved.parent
        check_files(run, lambda name: name.startswith("adapter/"))
