"""Upload of a finished folder: an export to the model hub; a run, selection, sweep, comparison or feature shards to an
object store.

    flatshift push runs/first s3://bucket/runs/first

The files that mark a folder as finished go last, so that an interrupted upload is not mistaken for a finished folder.
Excluded are files that only a resume needs: checkpoints (`state/`), hidden files and locks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

from flatshift.experiments.results.cells import MARKER
from flatshift.experiments.workflows.export import check_hub_name
from flatshift.experiments.workflows.run_parts import check_finished
from flatshift.finetune.data.upload import RECORD, UploadResult, upload_folder
from flatshift.finetune.digests import DONE, file_sha256
from flatshift.finetune.errors import UserError, first_error_line, shorten
from flatshift.finetune.run_directory import MANIFEST, RECIPE
from flatshift.selection.features import open_directory

_LAST = ("config.json", "adapter_config.json", "result.json", MANIFEST, DONE)
"""Names by which a reader recognises a complete folder, in the order in which they are uploaded."""


def push_to_store(folder: Path, address: str, progress: Callable[[int, int], None] | None = None) -> UploadResult:
    """Upload `folder` to the `address` and compare it there, as in `flatshift.finetune.data.upload`.

    progress: called with the uploaded and the total bytes. Raises UserError for a folder that is not a product of
    Flatshift, not finished, or changed, and as `upload`.
    """
    require_finished(folder)
    names = _files_to_send(folder)
    total = sum((folder / name).stat().st_size for name in names)
    files = [name for name in names if Path(name).name not in _LAST]
    marks = sorted((name for name in names if Path(name).name in _LAST), key=_marker_sort_key)
    groups = [files, *(list(group) for _, group in itertools.groupby(marks, _marker_sort_key))]
    report = None if progress is None else (lambda done: progress(done, total))
    return upload_folder(folder, groups, address, progress=report)


def require_finished(folder: Path) -> None:
    """Raise UserError unless `folder` is a finished product of Flatshift, with all its files unchanged."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; name a run, a selection, a sweep, a comparison, feature shards or an export"
        )
    if (folder / DONE).exists():
        check_finished(folder)
    elif _is_features(folder):
        open_directory(folder, str(folder))
    elif any((folder / name).exists() for name in (RECIPE, MARKER, "state", "stages", "cells", "scores.parquet")):
        raise UserError(f"{folder} is not finished, it has no {DONE}; finish it by its own command, then push it")
    elif (folder / "README.md").is_file():
        files_to_upload(folder)
    elif next(folder.glob("*.npy"), None) is not None:
        raise UserError(
            f"{folder} has shards and no {MANIFEST}; `flatshift.selection.features.write_manifest` writes it"
        )
    else:
        raise UserError(f"{folder} is no run, selection, sweep, directory of feature shards or export; name one")


def _is_features(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and "shards" in manifest


def _files_to_send(folder: Path) -> list[str]:
    names = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.is_dir() and not file.is_symlink():
            continue
        if "state" in name.parts[:-1] or any(segment.startswith(".") for segment in name.parts) or str(name) == RECORD:
            continue
        if file.is_symlink() or not file.is_file():
            raise UserError(f"{file} is a link or no plain file, which a store cannot hold; put the file itself there")
        names.append(name.as_posix())
    return names


def _marker_sort_key(name: str) -> tuple[int, int]:
    """Return the sort key of a marker: deeper ones first, since a stage is finished before its run."""
    return -name.count("/"), _LAST.index(Path(name).name)


_SUFFIXES = {".safetensors", ".json", ".md", ".txt", ".jinja", ".model", ".gguf", ".py", ".tiktoken"}


def push_to_hub(folder: Path, repository: str, *, public: bool = False, message: str | None = None) -> str:
    """Upload `folder` as one commit to `repository` (ORGANISATION/NAME, created if necessary); returns the commit's
    address.

    The sizes of all files, and the SHA-256 of those that the hub stores separately (weights), are then queried and
    compared.
    public: True makes a newly created repository visible to everybody; an existing one keeps its visibility.
    Raises UserError for a folder that is not from `export_run` or `merge`, files of other kinds (such as pickles), a
    name that the hub does not allow, a hub that refuses or cannot be reached, and uploaded files that differ.
    """
    from huggingface_hub import HfApi

    check_hub_name(repository)
    files = files_to_upload(folder)
    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        message = message or f"Upload {folder.resolve().name}"
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
        stored = {file.path: file for file in api.get_paths_info(repository, sorted(files), revision=commit.oid)}
    except Exception as error:  # requests, the hub and its storage raise many kinds
        reason = shorten(first_error_line(error), 160)
        raise UserError(
            f"the model hub did not take it ({reason}); log in with `hf auth login` (a token that may write), and look "
            "whether it can be reached"
        ) from error
    for name, file in files.items():
        large = getattr(stored.get(name), "lfs", None)
        same = getattr(stored.get(name), "size", None) == file.stat().st_size
        if not same or (large is not None and large.sha256 != file_sha256(file)):
            raise UserError(f"{repository}: {name} differs there from the file here; push it again")
    return str(commit.commit_url)


def files_to_upload(folder: Path) -> dict[str, Path]:
    """Return the files to upload, by their names on the hub."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; make one with `flatshift export` or `flatshift merge`")
    if (folder / RECIPE).is_file():
        raise UserError(
            f"{folder} is a run directory, which names files of this machine; push what `export` makes of it"
        )
    if not (folder / "README.md").is_file():
        raise UserError(f"{folder} has no README.md, so it is no folder of `flatshift export` or `flatshift merge`")
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if not file.is_dir()}
    for name, file in files.items():
        if file.is_symlink() or not file.is_file() or (file.suffix not in _SUFFIXES and file.name != "Modelfile"):
            raise UserError(f"{folder}: {name} is nothing that `export` or `merge` makes; take it out of the folder")
    return files
