"""Export of a run as a folder for a model hub: its adapter as plain PEFT files, or merged into its backbone, with the
tokenizer and a model card; and the upload of a finished folder.

    flatshift export runs/first --out for-the-hub --base-model org/name --license apache-2.0
    flatshift merge runs/first --out merged
    flatshift push runs/first s3://bucket/runs/first

An exported folder is written completely or not at all, holds safetensors only, names no directory of this machine, and
is loaded by plain transformers and compared with the run before it gets its name.

The files that mark a folder as finished are uploaded last, so that an interrupted upload is not mistaken for a finished
folder. Excluded are files that only a resume needs: checkpoints (`state/`), hidden files and locks; and what submitit
writes for a study on Slurm (`slurm/`).
"""

from __future__ import annotations

import itertools
import math
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.results.cells import FORECAST, MARKER, SLURM
from flatshift.experiments.workflows import folder_check
from flatshift.experiments.workflows.model_card import build_card, published_name, run_title
from flatshift.experiments.workflows.run_parts import awaits_evaluation, check_finished, check_run
from flatshift.finetune.adapters.adapter import WEIGHTS, check_saved, read_adapter
from flatshift.finetune.adapters.merge import combine_adapters, merge_files, read_changes, spot_check
from flatshift.finetune.adapters.saved import SavedAdapter
from flatshift.finetune.atomic import read_json_object, write_json, write_text
from flatshift.finetune.data.remote import UPLOAD_RECORD, UploadResult, upload_folder
from flatshift.finetune.digests import DONE, adapter_digest, file_sha256
from flatshift.finetune.errors import UserError, first_error_line, shorten, user_path
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.checkpoint import read_index
from flatshift.finetune.models.meta import build_skeleton
from flatshift.finetune.redaction import find_secrets
from flatshift.finetune.run_directory import MANIFEST, RECIPE, check_replaceable, output_directory, resume_command
from flatshift.selection.features import open_directory

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_MERGE_UPLOAD_RECORD = "merge.json"
_REWRITTEN_KEYS = ("auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Keys of the backbone's config.json that a merged model does not take over."""


def export_run(
    path: Path, out: Path, *, base_model: str | None = None, license: str | None = None, add: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Write adapter, tokenizer and a model card made from the run to the new directory `out`.

    add: other adapters of the same backbone, `DIR` or `DIR=WEIGHT`; the result is the run's adapter plus their weighted
    sum, exactly, as one adapter whose rank is the sum of the ranks.
    base_model: hub name of the backbone, for a run that had it as a local directory.
    license: of the adapter, by its name on the hub; without it the card asks for one.
    The folder is loaded by plain PEFT and compared with the run; returns the result of `folder_check.compare_folder`,
    or None for an adapter that fits quantised weights only (adapter.init: loftq).
    Raises UserError if `path` is no finished run, `out` is not empty or in use, `base_model` is no hub name, or an
    adapter is not of this backbone.
    """
    with exclusive_lock(out):
        check_replaceable(out)
        recipe = resume_recipe(path).recipe
        require_trained(path, recipe)
        own = _open_run_adapter(path, recipe, alone=not add)
        tensors = read_adapter(path / "adapter")
        added = [_parse_weighted_adapter(text, recipe) for text in add]
        if base_model is not None:
            check_hub_name(base_model, "--base-model: ")
        run = folder_check.ExportedRun.open(path, recipe)
        others = [(saved.path, weight) for saved, weight in added]
        compares = recipe.adapter.init != "loftq"
        with (
            folder_check.compute_expected(run, added=others) if compares else nullcontext() as expected,
            output_directory(out) as temporary,
        ):
            if added:
                assert own is not None  # `_open_run_adapter` refuses soft tokens here
                combine_adapters([(own, 1.0), *added], temporary)
            else:
                for name in (WEIGHTS, "adapter_config.json"):
                    if (path / "adapter" / name).is_file():
                        shutil.copyfile(path / "adapter" / name, temporary / name)
                check_saved(read_adapter(temporary), tensors)
            settings = read_json_object(temporary / "adapter_config.json")
            settings["base_model_name_or_path"] = base_model or published_name(recipe.backbone)
            write_json(temporary / "adapter_config.json", settings)
            tokenizer, _ = folder_check.save_tokenizer(recipe, temporary, rows=run.rows)
            if recipe.task.traits.is_generative:
                folder_check.save_generation_settings(recipe, temporary, run.ends)
            comparison = None
            if expected is not None:
                (comparison,) = folder_check.compare_folder(
                    run, expected, [folder_check.Folder(temporary, exact=True, adapter=True)]
                )
            card = build_card(
                path, recipe, tokenizer=tokenizer, labels=run.labels, base_model=base_model, license=license,
                added=[(run_title(saved.path), weight) for saved, weight in added], rank=settings.get("r"),
            )  # fmt: skip
            write_text(temporary / "README.md", card)
        return comparison


def _open_run_adapter(path: Path, recipe: Recipe, *, alone: bool) -> SavedAdapter | None:
    """Return the run's adapter; None for soft tokens.

    Raises UserError for an adapter that fits changed frozen weights, and for soft tokens that would be added to.
    """
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
    name, _, number = text.rpartition("=") if "=" in text and not user_path(text).is_dir() else (text, "", "1")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"--add {text}: {number!r} is no weight; write DIR=0.5, or DIR alone for 1")
    saved = SavedAdapter.find(name, context="--add")
    run = saved.path.parent
    if (run / RECIPE).is_file() and not (run / DONE).exists() and not awaits_evaluation(run, resume_recipe(run).recipe):
        raise UserError(f"--add: {run} is not finished, it has no {DONE}; finish it, or restore the file")
    saved.require_backbone(open_backbone(recipe.backbone), context="--add")
    return saved, weight


def require_trained(path: Path, recipe: Recipe) -> None:
    """Raise UserError unless the run directory `path` has the adapter after all its steps, unchanged, and an unchanged
    backbone: every export is verified. A run without evaluation is reported on stderr."""
    missing = [name for name in ("adapter", "eval.json", DONE) if not (path / name).exists()]
    if missing and not awaits_evaluation(path, recipe):
        raise UserError(
            f"{path} is not finished, it has no {missing[0]}; finish it with `{resume_command(path)}`, or restore it"
        )
    check_run(path, recipe)


def check_hub_name(name: str, context: str = "") -> None:
    """Raise UserError, in this context, for a name that the model hub does not allow."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{context}{name!r} is no name of the model hub; give ORGANISATION/NAME") from error


def merge_run(path: Path, out: Path, *, dtype: Dtype = "auto") -> dict[str, Any]:
    """Write the backbone with the run's adapter merged in, to the new directory `out`.

    Merging is done in float64 and rounded once, some rows at a time: no file is ever completely in memory. Some rows of
    every changed weight are then read back and compared with the same sum, and model and tokenizer with the run
    (`flatshift.experiments.workflows.folder_check`). An adapter that was trained on a quantised backbone
    (`quantization` of the result) is merged into the float weights, which differ from those it was trained on. The
    tokens that training had as the end of an answer also end those of plain `generate`.
    dtype: of the written weights; `auto` keeps the backbone's own, tensor by tensor, and is float32 for a regression.
    Returns the content of `merge.json` in `out`: `dtype`, `quantization`; `rounding`, by dtype the `largest` distance
    |round(W + sBA) − (W + sBA)| of any merged weight and the largest `relative` to its row's largest value;
    `largest_rounding`, the relative distance found in the rows that were read back; the result of
    `folder_check.compare_folder` and its `judgement`; `tokenized_rows`, the number of rows of the run that the saved
    tokenizer was compared on; `adapter_sha256`.
    Raises UserError if `path` is no finished run, `out` is not empty or in use, the backbone changed or its weights are
    quantised in its own files, the adapter cannot be merged, plain transformers answers differently from the run, or
    the saved tokenizer gives other tokens than training.
    """
    with exclusive_lock(out):
        check_replaceable(out)
        recipe = resume_recipe(path).recipe
        require_mergeable(path, recipe)
        run = folder_check.ExportedRun.open(path, recipe)
        with folder_check.compute_expected(run) as expected, output_directory(out) as temporary:
            return merge_into(temporary, run, expected, dtype)


def require_mergeable(path: Path, recipe: Recipe) -> None:
    """Raise UserError unless the run in `path` is trained and has an adapter that can be merged into weights."""
    require_trained(path, recipe)
    if recipe.adapter.soft_tokens is not None:
        instead = "take `flatshift export`" if recipe.adapter.projector is None else "use the adapter as it is"
        raise UserError(f"{path}: soft tokens change no weights, so they cannot be merged; {instead}")
    if recipe.adapter.init == "loftq":
        raise UserError(
            f"{path}: its adapter makes up for what quantisation lost (adapter.init: loftq), so it fits the quantised "
            "weights only; use it there, or train without loftq to merge"
        )
    if open_backbone(recipe.backbone).is_quantised:
        raise UserError(
            f"backbone {recipe.backbone!r} is quantised in its own files, and an adapter cannot be folded into packed "
            "values exactly; use the adapter as it is (`flatshift export`)"
        )
    SavedAdapter.find(str(path), context=str(path))  # refuses an adapter that fits changed frozen weights


def merge_into(
    folder: Path, run: folder_check.ExportedRun, expected: folder_check.ExpectedAnswers, dtype: Dtype = "auto"
) -> dict[str, Any]:
    """Write the merged model of the run into the directory `folder`; returns as `merge_run`."""
    merged = write_merged(folder, run, dtype)
    (comparison,) = folder_check.compare_folder(run, expected, [folder_check.Folder(folder, merged.exact)])
    result = {
        "dtype": merged.dtype,
        "quantization": run.recipe.train.quantization,
        "rounding": merged.rounding,
        **comparison,
        "judgement": folder_check.judge_difference(
            merged.dtype, comparison, numbers=run.recipe.task.traits.has_targets
        ),
        "largest_rounding": merged.largest_rounding,
        "tokenized_rows": merged.tokenized_rows,
        "adapter_sha256": adapter_digest(run.path),
    }
    write_json(folder / _MERGE_UPLOAD_RECORD, result)
    card = build_card(run.path, run.recipe, tokenizer=merged.tokenizer, labels=run.labels, form="merged")
    write_text(folder / "README.md", card)
    return result


@dataclass(frozen=True)
class Merged:
    """A merged model that is written, and not yet compared with the run; `exact` if it is in 32 bits."""

    dtype: str
    exact: bool
    rounding: dict[str, Any]
    largest_rounding: float
    tokenizer: Any
    tokenized_rows: int


def write_merged(folder: Path, run: folder_check.ExportedRun, dtype: Dtype = "auto") -> Merged:
    """Write weights, settings and tokenizer of the merged model into `folder`."""
    recipe, adapter = run.recipe, run.path / "adapter"
    if dtype == "auto" and recipe.task.traits.has_targets:  # numbers in the thousands are in steps of 8 in bf16
        dtype = "float32"
    cast = None if dtype == "auto" else getattr(torch, dtype)
    sizes: Counter[torch.dtype] = Counter()
    for entry in read_index(open_backbone(recipe.backbone).directory).values():
        sizes[entry.dtype] += math.prod(entry.shape)
    stored = cast or max(sizes, key=sizes.__getitem__)  # tensors that the backbone lacks get the dtype of most values
    model: Any = build_skeleton(recipe.backbone, task=recipe.task, label_names=run.labels)
    changes, _ = read_changes(model, adapter)
    written = merge_files(model, adapter, folder, dtype=stored, cast=cast)
    largest = spot_check(model, folder, changes)
    dtypes = {entry.dtype for entry in read_index(folder).values() if entry.dtype.is_floating_point}
    if not largest <= max(torch.finfo(each).eps for each in dtypes):
        raise RuntimeError(
            f"the merged weights differ from backbone + adapter by {largest:.2g} of a row's largest value"
        )
    model.config.architectures = [type(model).__name__]
    model.config.dtype = stored
    model.config.use_cache = True
    if recipe.task.traits.is_generative:
        folder_check.set_end_tokens(model.config, run.ends)
    model.config.save_pretrained(folder)
    if recipe.task.traits.is_generative:
        _restore_older_keys(open_backbone(recipe.backbone).directory / "config.json", folder / "config.json")
    if model.can_generate():
        folder_check.save_generation_settings(recipe, folder, run.ends)
    for file in open_backbone(recipe.backbone).directory.glob("*processor_config.json"):
        shutil.copyfile(file, folder / file.name)  # of images, which AutoProcessor reads
    name, saved = str(stored).removeprefix("torch."), folder_check.save_tokenizer(recipe, folder, rows=run.rows)
    return Merged(name, stored.itemsize >= 4, written.rounding.by_dtype, largest, *saved)


def _restore_older_keys(source: Path, target: Path) -> None:
    """Restore the keys that transformers reads from a config.json and no longer writes (`n_ctx`, `rope_theta`,
    `rotary_pct`), which other programs need."""
    old, new = read_json_object(source), read_json_object(target)
    for name, value in old.items():
        if isinstance(value, dict) and isinstance(new.get(name), dict):
            new[name] = value | new[name]
        elif name not in _REWRITTEN_KEYS:
            new.setdefault(name, value)
    write_json(target, new)


_LAST = ("config.json", "adapter_config.json", "result.json", MANIFEST, DONE)
"""Names by which a reader recognises a complete folder, in the order in which they are uploaded."""


def push_to_store(folder: Path, address: str, progress: Callable[[int, int], None] | None = None) -> UploadResult:
    """Upload `folder` to the `address` and compare it there, as in `flatshift.finetune.data.remote`.

    progress: called with the uploaded and the total bytes. Raises UserError for a folder that is not a product of
    Flatshift, not finished, or changed, and as `upload`.
    """
    require_finished(folder)
    names = _files_to_send(folder)
    _check_no_secrets(folder)
    total = sum((folder / name).stat().st_size for name in names)
    groups = [list(group) for _, group in itertools.groupby(sorted(names, key=_upload_order), _upload_order)]
    report = None if progress is None else (lambda done: progress(done, total))
    return upload_folder(folder, groups, address, progress=report)


def _check_no_secrets(folder: Path) -> None:
    """Raise UserError if a record in `folder` holds a password or signature of an address."""
    if (secret := next(find_secrets(folder), None)) is not None:
        command = shlex.join(["flatshift", "doctor", str(folder)])
        raise UserError(
            f"{secret[0]}:{secret[1]} holds a password or signature of an address, which would be uploaded; withdraw "
            f"it where it was issued and make the folder again (`{command}` lists all)"
        )


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
    elif (folder / FORECAST).is_file():
        raise UserError(f"{folder} is a forecast, which has no {DONE} to be compared by; push a run or a study instead")
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
        return "shards" in read_json_object(folder / MANIFEST)
    except UserError:
        return False


def _files_to_send(folder: Path) -> list[str]:
    names = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.is_dir() and not file.is_symlink():
            continue
        is_hidden = any(segment.startswith(".") for segment in name.parts)
        is_of_slurm = file.parent.name == SLURM and (file.parent.parent / "cells").is_dir()
        if is_hidden or is_of_slurm or "state" in name.parts[:-1] or str(name) == UPLOAD_RECORD:
            continue
        if file.is_symlink() or not file.is_file():
            raise UserError(f"{file} is a link or no plain file, which a store cannot hold; put the file itself there")
        names.append(name.as_posix())
    return names


def _upload_order(name: str) -> tuple[float, int]:
    """Return the sort key of a file: markers last, deeper ones first, since a stage is finished before its run."""
    marker = Path(name).name
    return (-name.count("/"), _LAST.index(marker)) if marker in _LAST else (-math.inf, 0)


_SUFFIXES = {".safetensors", ".json", ".md", ".txt", ".jinja", ".model", ".spm", ".codes", ".gguf", ".py", ".tiktoken"}


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
    if "/" not in repository:
        raise UserError(f"{repository!r} does not say whose it is; give ORGANISATION/{repository}")
    files = files_to_upload(folder)
    _check_no_secrets(folder)
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
        kind = "selection's" if (folder / "selected.jsonl").is_file() else "run"
        problem = f"{folder} is a {kind} directory, which names files of this machine"
        raise UserError(f"{problem}; push what `flatshift export` makes of a finished run")
    if not (folder / "README.md").is_file():
        raise UserError(f"{folder} has no README.md, so it is no folder of `flatshift export` or `flatshift merge`")
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if not file.is_dir()}
    for name, file in files.items():
        if file.is_symlink() or not file.is_file() or (file.suffix not in _SUFFIXES and file.name != "Modelfile"):
            raise UserError(f"{folder}: {name} is nothing that `export` or `merge` makes; take it out of the folder")
    return files
