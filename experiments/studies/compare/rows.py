"""The rows of a comparison's tasks: what subsets are drawn from, and judged rows that nothing changes.

A task's file marks its rows by `split`. They are written apart once, beside the cells, so that a cell is a recipe like
any other: `flatshift train` of its recipe.resolved.yaml is the same run.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.recipe.comparison import StudyTask
from experiments.recipe.config import Recipe
from finetune.atomic import write_text
from finetune.config import Files, TrainFiles
from finetune.errors import UserError
from finetune.seeds import derive

_SPLIT = "split"
Judged = Literal["validation", "test"]


@dataclass(frozen=True)
class TaskRows:
    """Records of one task."""

    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    test: list[dict[str, Any]]
    classes: tuple[str, ...] | None
    """Of all training rows, those set apart for validation among them; None for a task without."""

    def write(self, folder: Path) -> None:
        """One file a split."""
        for split in ("train", "validation", "test"):
            lines = [json.dumps(record, ensure_ascii=False, default=str) for record in getattr(self, split)]
            write_text(folder / f"{split}.jsonl", "\n".join(lines) + "\n")

    def lay(self, recipe: Recipe, own: StudyTask, folder: Path, judged: Judged) -> Recipe:
        """`recipe` on these rows, which lie in `folder`: a subset that its seed draws, judged on the rows asked for.

        There is no dev set, so the last step's adapter is taken.
        """
        train = TrainFiles(files=(str(folder / "train.jsonl"),), limit=min(own.train, len(self.train)))
        data = dataclasses.replace(
            recipe.data,
            train=train,
            dev=Files(),
            test=Files(files=(str(folder / f"{judged}.jsonl"),)),
            holdout=0.0,
        )
        task = recipe.task.with_classes(self.classes)
        return dataclasses.replace(recipe, data=data, task=task, eval=dataclasses.replace(recipe.eval, train_limit=0))


def task_rows(file: str, recipe: Recipe, own: StudyTask) -> TaskRows:
    """The rows of a task; the draws do not depend on any seed of a run.

    Validation rows come out of the training split, so that the official development split, where it serves as test, is
    seen once.
    Raises UserError for bad rows, rows without a `split`, or too few of them.
    """
    from finetune.data.rows import limit_rows, read_rows

    task, data = recipe.task, recipe.data
    found = list(
        read_rows(
            [file],
            columns=data.columns,
            required=task.columns(),
            label=task.read_label,
            bad_rows=data.bad_rows,
            skipped=[],
        )
    )
    train = [row for row in found if row.values.get(_SPLIT) == "train"]
    tested = [row for row in found if row.values.get(_SPLIT) == own.test_split]
    if not train or not tested:
        there = ", ".join(sorted({str(row.values.get(_SPLIT)) for row in found}))
        raise UserError(f"{file}: the column 'split' must mark 'train' and {own.test_split!r} rows; it has {there}")
    if own.validation >= len(train):
        raise UserError(f"{file}: {own.validation} validation rows leave nothing of {len(train)} rows to train on")
    chosen = limit_rows(range(len(train)), own.validation, seed=derive(0, "comparison", "validation"))
    apart = set(chosen)
    limited = limit_rows(tested, min(own.test, len(tested)), seed=derive(0, "comparison", "test rows"))
    return TaskRows(
        [row.record for i, row in enumerate(train) if i not in apart],
        [train[i].record for i in chosen],
        [row.record for row in limited],
        task.class_names(train),
    )
