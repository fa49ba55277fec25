"""Export of a run's adapter as a folder for a model hub: plain PEFT files, the tokenizer and a model card; and its
upload.

    flatshift export runs/first --out for-the-hub --base-model org/name --license apache-2.0

The folder is written completely or not at all, holds safetensors only, and names no directory of this machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatshift.experiments.data.splits import read_label_record
from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.workflows.folder_check import ExpectedAnswers, Folder, compare_folder, compute_expected
from flatshift.experiments.workflows.model_card import build_card, published_name, run_title
from flatshift.experiments.workflows.run_parts import awaits_evaluation, check_run
from flatshift.experiments.workflows.saved_tokenizer import (
    RunRows,
    collect_end_tokens,
    read_run_rows,
    read_trained_ends,
    save_generation_settings,
    save_tokenizer,
    set_end_tokens,
)
from flatshift.finetune.adapters.adapter import WEIGHTS
from flatshift.finetune.adapters.saved import SavedAdapter
from flatshift.finetune.atomic import read_json_object, write_json, write_text
from flatshift.finetune.digests import DONE
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.run_directory import RECIPE, check_replaceable, output_directory, resume_command

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
            from flatshift.finetune.adapters.combine import combine_adapters

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
        if recipe.task.is_generative:
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
    own = SavedAdapter.find(str(path), where=str(path))
    if not alone:
        own.require_packing(None, where="--add")
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
    saved = SavedAdapter.find(name, where="--add")
    run = saved.path.parent
    if (run / RECIPE).is_file() and not (run / DONE).exists() and not awaits_evaluation(run, resume_recipe(run).recipe):
        raise UserError(f"--add: {run} is not finished, it has no {DONE}; finish it, or restore that")
    saved.require_backbone(open_backbone(recipe.backbone), where="--add")
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


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
RECORD = "merge.json"


def merge_run(path: Path, out: Path, *, dtype: Dtype = "auto") -> dict[str, Any]:
    """Write the backbone with the run's adapter merged in, to the new directory `out`.

    Merging is done in float64 and rounded once, file by file and some rows at a time: neither the model nor one of its
    files is ever completely in memory. Some rows of every changed weight are then read back and compared with the same
    sum, and the folder is compared with the run (`flatshift.experiments.workflows.folder_check`). An adapter that was
    trained on a quantised backbone (`quantization` of the result) is merged into the float weights, which differ from
    those it was trained on.

    The tokenizer is saved as in `flatshift.experiments.workflows.saved_tokenizer`, and compared with training's own
    tokens. The tokens that training had as the end of an answer also end those of plain `generate`.
    dtype: of the written weights; `auto` keeps the backbone's own, tensor by tensor.
    Returns the content of `merge.json` in `out`: `dtype`, `quantization`; `rounding`, by dtype the `largest` distance
    |round(W + sBA) − (W + sBA)| of any merged weight and the largest `relative` to its row's largest value;
    `largest_rounding`, the relative distance found in the rows that were read back; the result of
    `folder_check.compare`; `tokenized_rows`, the number of rows of the run that the saved tokenizer was compared on;
    `adapter_sha256`.
    Raises UserError if `path` is no finished run, `out` is not empty or in use, the backbone changed or its weights are
    quantised in its own files, the adapter cannot be merged, plain transformers answers differently from the run, or
    the saved tokenizer gives other tokens than training.
    """
    with exclusive_lock(out):
        check_replaceable(out)
        recipe = resume_recipe(path).recipe
        require_foldable(path, recipe)
        labels, ends = read_class_labels(path, recipe), collect_end_tokens(recipe, read_trained_ends(path).values())
        rows = read_available_rows(recipe, labels)
        with compute_expected(path, recipe, labels, rows, ends) as wanted, output_directory(out) as temporary:
            return merge_into(temporary, path, recipe, wanted, rows=rows, wanted_dtype=dtype)


def require_foldable(path: Path, recipe: Recipe) -> None:
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
    _refuse_quantised(recipe)
    SavedAdapter.find(str(path), where=str(path))  # refuses an adapter that fits changed frozen weights


def merge_into(
    folder: Path,
    path: Path,
    recipe: Recipe,
    wanted: ExpectedAnswers,
    *,
    rows: RunRows | None,
    wanted_dtype: Dtype = "auto",
) -> dict[str, Any]:
    """Write the merged model of the run in `path` into the directory `folder`; returns as `merge_run`."""
    labels, ends = read_class_labels(path, recipe), read_trained_ends(path)
    written = write_merged(folder, path, recipe, rows=rows, wanted_dtype=wanted_dtype)
    (compared,) = compare_folder(wanted, recipe, labels, [Folder(folder, written.exact)], ends=list(ends.values()))
    result = {
        "dtype": written.dtype,
        "quantization": recipe.train.quantization,
        "rounding": written.rounding,
        **compared,
        "largest_rounding": written.largest_rounding,
        "tokenized_rows": written.tokenized_rows,
        "adapter_sha256": hashlib.sha256((path / "adapter" / WEIGHTS).read_bytes()).hexdigest(),
    }
    write_json(folder / RECORD, result)
    text = build_card(path, recipe, tokenizer=written.tokenizer, labels=labels, form="merged")
    write_text(folder / "README.md", text)
    return result


@dataclass(frozen=True)
class Merged:
    """A merged model that is written, and not yet compared with the run."""

    dtype: str
    exact: bool
    """In 32 bits."""
    rounding: dict[str, Any]
    largest_rounding: float
    tokenizer: Any
    tokenized_rows: int


def write_merged(
    folder: Path, path: Path, recipe: Recipe, *, rows: RunRows | None, wanted_dtype: Dtype = "auto"
) -> Merged:
    """Write weights, settings and tokenizer of the merged model into `folder`."""
    import torch

    labels, ends = read_class_labels(path, recipe), read_trained_ends(path)
    cast = None if wanted_dtype == "auto" else getattr(torch, wanted_dtype)
    dtype = cast or stored_dtype(recipe)
    rounding, worst = _merge_by_files(recipe, labels, path / "adapter", folder, dtype, cast, list(ends.values()))
    tokenizer, tokenized = save_tokenizer(recipe, folder, rows=rows)
    return Merged(str(dtype).removeprefix("torch."), dtype.itemsize >= 4, rounding, worst, tokenizer, tokenized)


def _merge_by_files(
    recipe: Recipe,
    labels: tuple[str, ...] | None,
    adapter: Path,
    out: Path,
    dtype: Any,
    cast: Any,
    trained: list[int],
) -> tuple[dict[str, Any], float]:
    """Write the weight files, config.json and generation_config.json; returns the roundings of all weights, and the
    largest of the rows read back."""
    import torch

    from flatshift.finetune.adapters.merge import merge_files, read_changes, spot_check
    from flatshift.finetune.models.meta import build_skeleton
    from flatshift.finetune.models.safetensors_index import read_index

    model: Any = build_skeleton(recipe.backbone, task=recipe.task, label_names=labels)
    changes, _ = read_changes(model, adapter)
    merged = merge_files(model, adapter, out, dtype=dtype, cast=cast)
    worst = spot_check(model, out, changes)
    kinds = {entry.dtype for entry in read_index(out).values() if entry.dtype.is_floating_point}
    if not worst <= max(torch.finfo(kind).eps for kind in kinds):
        raise RuntimeError(f"the merged weights differ from backbone + adapter by {worst:.2g} of a row's largest value")
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.use_cache = True
    ends = collect_end_tokens(recipe, trained)
    if recipe.task.is_generative:
        set_end_tokens(model.config, ends)
    model.config.save_pretrained(out)
    if recipe.task.is_generative:
        _keep_older_keys(open_backbone(recipe.backbone).directory / "config.json", out / "config.json")
    if model.can_generate():
        save_generation_settings(recipe, out, ends)
    return merged.rounding.as_json(), worst


_NOT_KEPT = ("auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path")


def _keep_older_keys(before: Path, after: Path) -> None:
    """Restore the keys that transformers reads from a config.json and no longer writes (`n_ctx`, `rope_theta`,
    `rotary_pct`), which other programs need."""
    old, new = read_json_object(before), read_json_object(after)
    for name, value in old.items():
        if isinstance(value, dict) and isinstance(new.get(name), dict):
            new[name] = value | new[name]
        elif name not in _NOT_KEPT:
            new.setdefault(name, value)
    write_json(after, new)


def _refuse_quantised(recipe: Recipe) -> None:
    config = json.loads((open_backbone(recipe.backbone).directory / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config") is not None:
        raise UserError(
            f"backbone {recipe.backbone!r} is quantised in its own files, and an adapter cannot be folded into packed "
            "values exactly; use the adapter as it is (`flatshift export`)"
        )


def stored_dtype(recipe: Recipe) -> Any:
    """Return the dtype of most values in the backbone's own weight files."""
    from flatshift.finetune.models.safetensors_index import read_index

    sizes: dict[Any, int] = {}
    for entry in read_index(open_backbone(recipe.backbone).directory).values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + math.prod(entry.shape)
    return max(sizes, key=sizes.__getitem__)
