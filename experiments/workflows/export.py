"""Export of a run's adapter as a folder for a model hub: plain PEFT files, the tokenizer and a model card; and its
upload.

    flatshift export runs/first --out for-the-hub --base-model org/name --license apache-2.0

The folder is written completely or not at all, holds safetensors only, and names no directory of this machine.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshift.experiments.data.splits import read_label_record
from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.workflows.folder_check import Folder, compare_folder, compute_expected
from flatshift.experiments.workflows.generation_settings import (
    collect_end_tokens,
    read_trained_ends,
    save_generation_settings,
)
from flatshift.experiments.workflows.model_card import build_card, published_name, run_title
from flatshift.experiments.workflows.run_parts import awaits_evaluation, check_run
from flatshift.experiments.workflows.saved_tokenizer import RunRows, read_run_rows, save_tokenizer
from flatshift.finetune.atomic import write_json, write_text
from flatshift.finetune.digests import DONE, file_sha256
from flatshift.finetune.errors import UserError, first_error_line, shorten
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.run_directory import RECIPE, check_replaceable, output_directory, resume_command

if TYPE_CHECKING:
    from flatshift.finetune.adapters.saved import SavedAdapter


_FILES = ("adapter_model.safetensors", "adapter_config.json")
"""Files of `adapter/` that are exported; any other file in it is not."""


def export_run(
    path: Path, out: Path, *, base_model: str | None = None, license: str | None = None, add: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Write adapter, tokenizer and a model card made from the run to the new directory `out`.

    add: other adapters of the same backbone, `DIR` or `DIR=WEIGHT`; the result is the run's adapter plus their weighted
    sum, exactly, as one adapter whose rank is the sum of the ranks.
    base_model: hub name of the backbone, for a run that had it as a local directory.
    license: of the adapter, by its name on the hub; without it the card asks for one.
    The folder is loaded by plain PEFT and compared with the run; returns the result of `folder_check.compare`, or None
    for an adapter that fits quantised weights only (adapter.init: loftq).
    Raises UserError if `path` is no finished run, `out` is not empty or in use, `base_model` is no hub name, or an
    adapter is not of this backbone.
    """
    with exclusive_lock(out):
        check_replaceable(out)
        return _write_export(path, out, base_model, license, add)


def _write_export(
    path: Path, out: Path, base_model: str | None, license: str | None, add: Sequence[str]
) -> dict[str, Any] | None:
    from flatshift.finetune.adapters.adapter import check_saved, read_adapter

    recipe = resume_recipe(path).recipe
    require_trained(path, recipe)
    own = _open_run_adapter(path, recipe, alone=not add)
    tensors = read_adapter(path / "adapter")
    added = [_parse_weighted_adapter(text, recipe) for text in add]
    checked = recipe.adapter.init != "loftq"
    if base_model is not None:
        _require_hub_name(base_model)
    labels, ends = read_class_labels(path, recipe), read_trained_ends(path)
    rows, stops = read_available_rows(recipe, labels), collect_end_tokens(recipe, ends.values())
    others = [(saved.path, weight) for saved, weight in added]
    with (
        compute_expected(path, recipe, labels, rows, stops, added=others) if checked else nullcontext() as wanted,
        output_directory(out) as temporary,
    ):
        if added:
            from flatshift.finetune.adapters.merge import combine_adapters

            assert own is not None  # `_open_run_adapter` refuses soft tokens here
            combine_adapters([(own, 1.0), *added], temporary)
        else:
            for name in _FILES:
                if (path / "adapter" / name).is_file():
                    shutil.copyfile(path / "adapter" / name, temporary / name)
            check_saved(read_adapter(temporary), tensors)
        settings = json.loads((temporary / "adapter_config.json").read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = base_model or published_name(recipe.backbone)
        write_json(temporary / "adapter_config.json", settings)
        tokenizer, _ = save_tokenizer(recipe, temporary, rows=rows)
        if recipe.task.traits.is_generative:
            save_generation_settings(recipe, temporary, stops)
        compared = None
        if wanted is not None:
            folder = Folder(temporary, exact=True, adapter=True)
            (compared,) = compare_folder(wanted, recipe, labels, [folder], ends=list(ends.values()))
        text = build_card(
            path,
            recipe,
            tokenizer=tokenizer,
            labels=labels,
            base_model=base_model,
            license=license,
            added=[(run_title(saved.path), weight) for saved, weight in added],
            rank=settings.get("r"),
        )
        write_text(temporary / "README.md", text)
    return compared


def read_available_rows(recipe: Recipe, labels: tuple[str, ...] | None) -> RunRows | None:
    """Return rows of the run's files; None for a run whose data is not available here."""
    try:
        return read_run_rows(recipe, labels)
    except (UserError, OSError):
        return None


def _open_run_adapter(path: Path, recipe: Recipe, *, alone: bool) -> SavedAdapter | None:
    """Return the run's adapter; None for soft tokens.

    Raises UserError for an adapter that fits changed frozen weights, and for soft tokens that would be added to.
    """
    from flatshift.finetune.adapters.saved import SavedAdapter

    if recipe.adapter.projector is not None:
        raise UserError(
            f"{path}: PEFT alone would load its soft tokens without the projector (adapter.projector); hand on "
            f"{path / 'adapter'} as it is, docs/adapters.md has the lines that use it"
        )
    if recipe.adapter.soft_tokens is not None:
        if not alone:
            raise UserError(f"--add: {path} holds soft tokens, which are no LoRA adapter; export it without --add")
        return None
    own = SavedAdapter.find(str(path), context=str(path))
    if not alone:
        own.require_packing(None, context="--add")
    return own


def _parse_weighted_adapter(text: str, recipe: Recipe) -> tuple[SavedAdapter, float]:
    """Parse `DIR=WEIGHT` or `DIR` (weight 1) into an adapter of the recipe's backbone and its weight."""
    from flatshift.finetune.adapters.saved import SavedAdapter

    name, _, number = text.rpartition("=") if "=" in text else (text, "", "1")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"--add {text}: {number!r} is no weight; write DIR=0.5, or DIR alone for 1")
    saved = SavedAdapter.find(name, context="--add")
    run = saved.path.parent
    if (run / RECIPE).is_file() and not (run / DONE).exists() and not awaits_evaluation(run, resume_recipe(run).recipe):
        raise UserError(f"--add: {run} is not finished, it has no {DONE}; finish it, or restore that")
    saved.require_backbone(open_backbone(recipe.backbone), context="--add")
    return saved, weight


def require_trained(path: Path, recipe: Recipe) -> None:
    """Raise UserError unless the run directory `path` has the adapter after all its steps, unchanged, and an unchanged
    backbone: every export is verified. A run without evaluation is reported on stderr."""
    lacks = [name for name in ("adapter", "eval.json", DONE) if not (path / name).exists()]
    if lacks and not awaits_evaluation(path, recipe):
        raise UserError(
            f"{path} is not finished, it has no {lacks[0]}; finish it with `{resume_command(path)}`, or restore that"
        )
    check_run(path, recipe)


def read_class_labels(path: Path, recipe: Recipe) -> tuple[str, ...] | None:
    """Return the classes of a run in head order, as in its label record; None for a task without classes."""
    return read_label_record(recipe, path)[0] if recipe.task.has_classes else None


def _require_hub_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--base-model: {name!r} is no name of the model hub; give ORGANISATION/NAME") from error


# ------------------------------------------------------------------------------------------------------------- to a hub


_KINDS = {".safetensors", ".json", ".md", ".txt", ".jinja", ".model", ".gguf", ".py", ".tiktoken"}
_NAMES = {"Modelfile"}


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
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"{repository!r} is no name of the model hub; give ORGANISATION/NAME") from error
    files = files_to_upload(folder)
    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        made = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message or f"Upload {folder.resolve().name}"
        )
        there = {found.path: found for found in api.get_paths_info(repository, sorted(files), revision=made.oid)}
    except Exception as error:  # requests, the hub and its storage raise many kinds
        reason = shorten(first_error_line(error), 160)
        raise UserError(
            f"the model hub did not take it ({reason}); log in with `hf auth login` (a token that may write), and look "
            "whether it can be reached"
        ) from error
    for name, file in files.items():
        found = there.get(name)
        kept = getattr(found, "lfs", None)
        if getattr(found, "size", None) != file.stat().st_size or (
            kept is not None and kept.sha256 != file_sha256(file)
        ):
            raise UserError(f"{repository}: {name} differs there from the file here; push it again")
    return str(made.commit_url)


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
    found = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if not file.is_dir()}
    for name, file in found.items():
        if file.is_symlink() or not file.is_file() or (file.suffix not in _KINDS and file.name not in _NAMES):
            raise UserError(f"{folder}: {name} is nothing that `export` or `merge` makes; take it out of the folder")
    return found
