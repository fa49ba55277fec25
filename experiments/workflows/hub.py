"""Upload a folder that `export` or `merge` made to a model hub, and compare what lies there afterwards."""

from __future__ import annotations

import hashlib
from pathlib import Path

from finetune.errors import UserError, first_line, shortened
from finetune.run_directory import RECIPE

_KINDS = {".safetensors", ".json", ".md", ".txt", ".jinja", ".model", ".gguf", ".py", ".tiktoken"}
_NAMES = {"Modelfile"}
_CHUNK = 1 << 24


def push(folder: Path, repository: str, *, public: bool = False, message: str | None = None) -> str:
    """Upload `folder` as one commit to `repository` (ORGANISATION/NAME, made if need be); returns the commit's address.

    Sizes of all files, and SHA-256 of those that the hub keeps apart (weights), are then asked of the hub and compared.
    public: whether everybody may see a repository that is made here; one that is there stays as it is.
    Raises UserError for a folder that is none of `export` or `merge`, files of other kinds (as pickles), a name that
    the hub does not allow, a hub that refuses or cannot be reached, and files that came to lie there otherwise.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"{repository!r} is no name of the model hub; give ORGANISATION/NAME") from error
    files = _files(folder)
    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        made = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message or f"Upload {folder.resolve().name}"
        )
        there = {found.path: found for found in api.get_paths_info(repository, sorted(files), revision=made.oid)}
    except Exception as error:  # of requests, the hub and its storage, each of many kinds
        reason = shortened(first_line(error), 160)
        raise UserError(
            f"the model hub did not take it ({reason}); log in with `hf auth login` (a token that may write), and look "
            "whether it can be reached"
        ) from error
    for name, file in files.items():
        found = there.get(name)
        kept = getattr(found, "lfs", None)
        if getattr(found, "size", None) != file.stat().st_size or (kept is not None and kept.sha256 != _sha256(file)):
            raise UserError(f"{repository}: {name} came to lie there otherwise than it is here; push it again")
    return str(made.commit_url)


def _files(folder: Path) -> dict[str, Path]:
    """What is to be uploaded, by its name there."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; make one with `flatshift export` or `flatshift merge`")
    if (folder / RECIPE).is_file():
        raise UserError(
            f"{folder} is a run directory, which names files of this machine; push what `export` makes of it"
        )
    if not (folder / "README.md").is_file():
        raise UserError(f"{folder} has no README.md, so it is no folder of `flatshift export` or `flatshift merge`")
    found = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if not file.is_dir()}
    for name, file in found.items():
        if file.is_symlink() or not file.is_file() or (file.suffix not in _KINDS and file.name not in _NAMES):
            raise UserError(f"{folder}: {name} is nothing that `export` or `merge` makes; take it out of the folder")
    return found


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()
