"""The target of a selection, without the rows that a run is judged on.

Where a run sets rows apart by `data.holdout`, the target of its warm-up must not have them: a selection reads its
target less the same draw, its manifest tells which, and `check_target` refuses one that saw what the run judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.data.holdout import SPLITS, RowKeys, cut_documents, set_apart
from flatshift.experiments.data.splits import cut_line, read_splits
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.pool import Records, read_records
from flatshift.finetune.atomic import read_object
from flatshift.finetune.config import Columns, Data
from flatshift.finetune.data.files import describe
from flatshift.finetune.data.rows import Row, limit_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive


def read_target(recipe: Recipe, console: Console) -> tuple[Records, list[Row]]:
    """The target, and the rows of its files that are set apart for judging.

    Without files of its own the target is the run's training rows, which hold no judged row. Of its own files
    `data.holdout` sets rows apart where the recipe names no training rows: those that a run on these files does, which
    names neither dev nor test rows. Raises UserError.
    """
    spec, data = recipe.select, recipe.data
    assert spec is not None
    if not spec.target.files:
        return _training_rows(recipe), []
    found = read_records(replace(spec.target, limit=None), spec, recipe.train.seed, "target")
    apart: list[Row] = []
    if data.holdout and not data.train.all_files:
        keys = RowKeys()
        for row in found.rows:
            keys.add(row, spec.columns)
        cut = cut_documents(found.rows, data.holdout, SPLITS[1:]) if recipe.task.documents else None
        if cut is not None:
            apart = [row for split in SPLITS[1:] for row in cut[split]]
            found = replace(found, rows=cut["train"])
            console.say(f"target: {cut_line(cut, data.holdout)}")
        else:
            try:
                kept, _ = set_apart(keys, data.holdout)
            except UserError:  # nor would a run train on so few
                kept = np.arange(len(keys))
            apart = [found.rows[i] for i in np.setdiff1d(np.arange(len(keys)), kept).tolist()]
            found = replace(found, rows=[found.rows[i] for i in kept.tolist()])
            console.say(
                f"target: {len(apart):,} of its {found.total:,} rows are set apart, for a run on them to judge by "
                f"(data.holdout {data.holdout:g})"
            )
    limited = limit_rows(found.rows, spec.target.limit, seed=derive(recipe.train.seed, "limit", "target"))
    return replace(found, rows=limited), apart


def _training_rows(recipe: Recipe) -> Records:
    """The run's own training rows as the target: after holdout and limit, so no judged text is seen."""
    rows = read_splits(recipe)
    without = next((row for row in rows.train if not isinstance(row.values.get("text"), str)), None)
    if without is not None:
        raise UserError(f"{without.where}: no text to select for; name select.target.files or set data.columns.text")
    return Records(rows.train, rows.skipped, rows.records)


def target_record(recipe: Recipe, skipped: Sequence[str]) -> dict[str, Any]:
    """What a manifest tells of the target: its `files` (SHA-256 of each, else its name), the share of their rows that
    is set `apart`, and what that draw depends on: how many bad rows were `skipped` before, and the names of `columns`.
    """
    spec, data = recipe.select, recipe.data
    assert spec is not None
    named = bool(spec.target.files)
    apart = _share_apart(data) if not (named and data.train.all_files) else 0.0
    files = spec.target.files if named else data.train.all_files
    columns = _keys(spec.columns if named else data.columns)
    return {"files": _contents(files), "apart": apart, "skipped": len(skipped), "columns": columns}


def check_target(recipe: Recipe, skipped: Sequence[str]) -> None:
    """Refuse a selection whose target has rows that the recipe's own `data.holdout` sets apart for judging.

    skipped: bad rows of the recipe's files. A selection that was made without such a record passes. Raises UserError.
    """
    spec, data = recipe.select, recipe.data
    if spec is None or not data.holdout or not data.train.all_files:
        return
    if spec.from_ is None:
        seen = target_record(recipe, skipped) if spec.target.files else None
        cure = "leave select.target.files out: the target is then the training rows that are not set apart"
    else:
        seen = read_object(Path(spec.from_) / "manifest.json", "selection").get("target")
        files = " ".join(data.train.all_files)
        cure = f"select anew with --target {files} --data.holdout {data.holdout:g}, which sets the same rows apart"
    if not seen:
        return
    own = _contents(data.train.all_files)
    if not set(own) & set(seen["files"]):
        return
    same_draw = own == seen["files"] and data.train.first is None and len(skipped) == seen["skipped"]
    same_draw = same_draw and _keys(data.columns) == seen["columns"]
    if not same_draw or seen["apart"] < _share_apart(data):
        raise UserError(
            f"data.holdout: the selection's target has rows of {data.train.all_files[0]} that are set apart for "
            f"judging; {cure}"
        )


def _keys(columns: Columns) -> list[str]:
    """Names of the columns by which copies and classes are known."""
    return [columns.text, columns.text2, columns.label]


def _share_apart(data: Data) -> float:
    """Share of the training rows that no training sees, for dev and test together."""
    return data.holdout * sum(not split.files for split in (data.dev, data.test))


def _contents(files: Iterable[str]) -> list[str]:
    return [str(one["sha256"] or one["path"]) for one in describe(tuple(files))]
