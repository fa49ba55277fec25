"""SHA-256 of what a finished run holds, noted in its `done.json` and compared before any of it is read again.

    RUN/done.json                  {"files": {"eval.json": …, "adapter/adapter_model.safetensors": …}}
    RUN/stages/NAME/done.json      the same of stages/NAME/adapter, beside how the stage ended

What was saved by other programs, or is not finished, has no such record and passes. Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from .atomic import read_object
from .errors import UserError

DONE, FILES = "done.json", "files"


def digest(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def record_digest(record: Mapping[str, object]) -> str:
    """SHA-256 of a JSON record, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def sums(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of `files`, which lie somewhere in `folder`, by their names from there."""
    return {file.relative_to(folder).as_posix(): digest(file) for file in sorted(files)}


def adapter_sums(folder: Path) -> dict[str, str]:
    """`sums` of the adapter in `folder`/adapter: all that reading it depends on."""
    return sums(folder, [file for file in (folder / "adapter").glob("*") if file.is_file()])


def check_files(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Raise UserError for a file of `folder` that is missing or not what `folder`/done.json says; without one all pass.

    wanted: which names are looked at.
    """
    record = folder / DONE
    if not record.is_file():
        if record.exists() or record.is_symlink():
            raise UserError(f"{record} is no plain file; restore it, or make the run again")
        return
    noted = read_object(record, FILES)[FILES]
    if not isinstance(noted, dict) or not all(isinstance(value, str) for value in noted.values()):
        raise UserError(f"{record}: {FILES!r} is not a mapping of names to SHA-256; restore it, or make the run again")
    for name, before in noted.items():
        if not wanted(name):
            continue
        file = folder / name
        try:
            now = digest(file)
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}, but {DONE} lists it; restore it, or make it anew") from None
        if now != before:
            raise UserError(
                f"{file} is not what was saved (SHA-256 {now[:12]}…, in {DONE} {before[:12]}…); restore it, or make it "
                "anew"
            )


def check_adapter(directory: Path) -> None:
    """Raise UserError if the adapter in `directory` is a run's and not what it saved (`check_files`)."""
    place = directory.resolve()
    if place.name == "adapter":
        check_files(directory.parent if directory.name == "adapter" else place.parent, _of_adapter)


def _of_adapter(name: str) -> bool:
    return name.startswith("adapter/")
