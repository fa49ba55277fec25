"""Target of a selection, without the rows that a run is evaluated on.

If a run holds rows out by `data.holdout`, they must not be in the target of its warm-up: a selection reads its target
without the same rows, its manifest records the draw, and `check_target` rejects one that saw the run's evaluation rows.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.data.holdout import SPLITS, RowKeys, cut_documents, split_holdout
from flatshift.experiments.data.splits import describe_cut, read_splits
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.pool import Records, read_records, select_settings, target_columns
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.data.config import Columns, Data
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.data.rows import Row, limit_rows
from flatshift.finetune.errors import UserError, is_remote
from flatshift.finetune.seeds import derive_seed


def read_target(recipe: Recipe, console: Console) -> tuple[Records, list[Row]]:
    """Return the target, and the rows of its files that are held out for evaluation.

    Without files of its own the target is the run's training rows, which contain no evaluation row. From its own files
    `data.holdout` holds rows out if the recipe names no training rows: the same ones as a run on these files without
    dev and test files. Raises UserError.
    """
    spec, data = recipe.select, recipe.data
    if spec is None or not spec.target.files:
        rows = read_splits(recipe)  # after holdout and limit, so no evaluation text is seen
        bad = next((row for row in rows.train if not isinstance(row.values.get("text"), str)), None)
        if bad is not None:
            raise UserError(f"{bad.where}: no text of the target; name select.target.files or set data.columns.text")
        return Records(rows.train, rows.skipped, rows.records), []
    # The limit applies after the holdout, as in a run.
    columns = target_columns(recipe)
    records = read_records(replace(spec.target, limit=None), spec, recipe.train.seed, "target", columns)
    held_out: list[Row] = []
    if data.holdout and not data.train.all_files:
        keys = RowKeys(recipe.task.input_format.columns())
        splits = [split for split in SPLITS[1:] if split in data.holdout_splits]
        for row in records.rows:
            keys.add(row, columns)
        cut = cut_documents(records.rows, data.holdout, splits) if recipe.task.traits.splits_documents else None
        if cut is not None:
            held_out = [row for split in splits for row in cut[split]]
            records = replace(records, rows=cut["train"])
            console.say(f"target: {describe_cut(cut, data.holdout)}")
        else:
            try:
                training, _ = split_holdout(keys, data.holdout, splits)
            except UserError:  # nor would a run train on so few
                training = np.arange(len(keys))
            held_out = [records.rows[i] for i in np.setdiff1d(np.arange(len(keys)), training).tolist()]
            records = replace(records, rows=[records.rows[i] for i in training.tolist()])
            console.say(
                f"target: {len(held_out):,} of its {records.total:,} rows are set apart, to evaluate a run on them "
                f"(data.holdout {data.holdout:g})"
            )
            others = [name for name in records.rows[0].record if name not in (columns.text, columns.text2, columns.id)]
            if others and columns.label not in records.rows[0].record:
                console.say(
                    f"target: drawn without labels, as there is no column {columns.label!r}; a run whose label is in "
                    f"{' or '.join(map(repr, others[:4]))} sets other rows apart, so name it in --data.columns.label"
                )
    draw = derive_seed(recipe.train.seed, "limit", "target")
    limited = limit_rows(records.rows, spec.target.limit, seed=draw, setting="select.target.limit")
    return replace(records, rows=limited), held_out


def target_record(recipe: Recipe, skipped: Sequence[str]) -> dict[str, Any]:
    """Return the manifest entry of the target.

    It has its `files` (SHA-256 of each, else its name), the share of their rows that is held out (`apart`), and what
    that draw depends on: the number of bad rows `skipped` before, and the names of `columns`.
    """
    spec, data = select_settings(recipe), recipe.data
    named = bool(spec.target.files)
    share = _held_out_share(data) if not (named and data.train.all_files) else 0.0
    files = spec.target.files if named else data.train.all_files
    columns = _key_columns(target_columns(recipe) if named else data.columns)
    return {"files": _file_digests(files), "apart": share, "skipped": len(skipped), "columns": columns}


def check_target(recipe: Recipe, skipped: Sequence[str]) -> None:
    """Raise UserError for the target of a warm-up that has rows of the recipe's dev or test files, or for one that has
    those that its own `data.holdout` holds out.

    skipped: bad rows of the recipe's files. A selection made without such a record passes.
    """
    spec, data = recipe.select, recipe.data
    evaluated = {"dev": data.dev.files, "test": data.test.files} if recipe.warmup is not None else {}
    sets_apart = bool(data.holdout and data.train.all_files)
    if spec is None or not (sets_apart or any(evaluated.values())):
        return
    if spec.from_ is None:
        record = target_record(recipe, skipped) if spec.target.files else None
        cure = "leave select.target.files out: the target is then the training rows that are not set apart"
    else:
        record = read_json_object(Path(spec.from_) / "manifest.json", "selection").get("target")
        named = zip(("text", "text2", "label"), _key_columns(data.columns), _key_columns(Columns()), strict=True)
        words = [f"--data.columns.{key} {shlex.quote(name)}" for key, name, usual in named if name != usual]
        files = [n if is_remote(n) else min(n, os.path.relpath(n), key=len) for n in data.train.all_files]
        words = ["--target", *map(shlex.quote, files), *words, f"--data.holdout {data.holdout:g}"]
        cure = f"select again with {' '.join(words)}, which sets the same rows apart"
    if not record:
        return
    for split, names in evaluated.items():
        if set(_file_digests(names)) & set(record["files"]):
            again = "select again with another --target" if spec.from_ else "name other texts in select.target.files"
            raise UserError(f"data.{split}.files: the warm-up's target has these rows, which evaluate the run; {again}")
    if not sets_apart:
        return
    own = _file_digests(data.train.all_files)
    if not set(own) & set(record["files"]):
        return
    same_draw = own == record["files"] and data.train.first is None and len(skipped) == record["skipped"]
    same_draw = same_draw and _key_columns(data.columns) == record["columns"]
    if not same_draw or record["apart"] < _held_out_share(data):
        raise UserError(
            f"data.holdout: the selection's target has rows of {data.train.all_files[0]} that are set apart for "
            f"evaluation; {cure}"
        )


def _key_columns(columns: Columns) -> list[str]:
    return [columns.text, columns.text2, columns.label]


def _held_out_share(data: Data) -> float:
    return data.holdout * len(data.splits_to_fill)


def _file_digests(files: Iterable[str]) -> list[str]:
    return [str(entry["sha256"] or entry["path"]) for entry in describe_files(tuple(files))]
