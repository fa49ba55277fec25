"""Rows of a study's task: what subsets are drawn from, and judged rows that nothing changes; kept in memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from flatshift.finetune.data.rows import Row, limit_rows, read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import derive_seed
from flatshift.finetune.tasks import Task

_SPLIT = "split"


@functools.lru_cache(maxsize=64)
def split_rows(
    file: str, task: Task, rows: tuple[int, int, str], judged: str
) -> tuple[list[Row], list[Row], tuple[str, ...] | None]:
    """(rows to draw training subsets from, judged rows, classes); the draws do not depend on any seed of a run.

    Validation rows come out of the training split, so that the official development split, where it serves as test, is
    seen once.
    """
    validation, test, test_split = rows
    found = _read(file, task)
    train = [row for row in found if row.values.get(_SPLIT) == "train"]
    tested = [row for row in found if row.values.get(_SPLIT) == test_split]
    if not train or not tested:
        there = ", ".join(sorted({str(row.values.get(_SPLIT)) for row in found}))
        raise UserError(f"{file}: the column 'split' must mark 'train' and {test_split!r} rows; it has {there}")
    if validation >= len(train):
        raise UserError(f"{file}: {validation} validation rows leave nothing of {len(train)} rows to train on")
    chosen = limit_rows(range(len(train)), validation, seed=derive_seed(0, "comparison", "validation"))
    apart = set(chosen)
    labels = task.class_names(train)
    pool = [row for i, row in enumerate(train) if i not in apart]
    if judged == "validation":
        return pool, [train[i] for i in chosen], labels
    limited = limit_rows(tested, min(test, len(tested)), seed=derive_seed(0, "comparison", "test rows"))
    return pool, limited, labels


@functools.lru_cache(maxsize=16)
def _read(file: str, task: Task) -> Sequence[Row]:
    return list(read_rows([file], required=task.columns(), label=task.read_label))
