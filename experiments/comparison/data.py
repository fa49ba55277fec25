"""Rows of a task for one cell: subsets that a seed fixes, validation and test rows that nothing changes.

Rows, tokenizers and encoded judged rows stay in the memory of a worker.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.comparison.plan import StudyCell
from finetune.config import Classify, Task
from finetune.data import Example, Row, encode, limit_rows, read_rows, required_columns, sort_labels
from finetune.errors import UserError
from finetune.seeds import derive

_SPLIT = "split"


@dataclass(frozen=True)
class Material:
    """What one cell trains on and is judged on."""

    train: list[Example]
    judged: list[Example]
    label_names: tuple[str, ...] | None
    tokenizer: Any


def material(cell: StudyCell) -> Material:
    """Encoded rows of a cell.

    Raises:
        UserError: rows without a `split`, too few of them, or rows that the task cannot take.
    """
    recipe = cell.recipe
    pool, judged, labels = _split(cell.file, recipe.task, cell.rows[1:], cell.judged)
    train = limit_rows(pool, min(cell.rows[0], len(pool)), seed=derive(recipe.train.seed, "limit", "train"))
    tokenizer = _tokenizer(recipe.backbone)
    key = (cell.file, cell.judged, recipe.backbone, recipe.task, recipe.train.max_length, cell.rows[1:])
    if key not in _JUDGED:
        _JUDGED[key] = _encode(judged, recipe.task, tokenizer, recipe.train.max_length, labels)
    encoded = _encode(train, recipe.task, tokenizer, recipe.train.max_length, labels)
    return Material(encoded, _JUDGED[key], labels, tokenizer)


_JUDGED: dict[Any, list[Example]] = {}


@functools.lru_cache(maxsize=8)
def _tokenizer(backbone: str) -> Any:
    from finetune.backbone import load_tokenizer

    return load_tokenizer(backbone)


@functools.lru_cache(maxsize=64)
def _split(
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
    chosen = limit_rows(range(len(train)), validation, seed=derive(0, "comparison", "validation"))
    apart = set(chosen)
    labels = sort_labels(row.values["label"] for row in train) if isinstance(task, Classify) else None
    if isinstance(task, Classify) and task.labels is not None:
        labels = task.labels
    pool = [row for i, row in enumerate(train) if i not in apart]
    if judged == "validation":
        return pool, [train[i] for i in chosen], labels
    limited = limit_rows(tested, min(test, len(tested)), seed=derive(0, "comparison", "test rows"))
    return pool, limited, labels


@functools.lru_cache(maxsize=16)
def _read(file: str, task: Task) -> Sequence[Row]:
    return list(read_rows([file], required=required_columns(task)))


def _encode(
    rows: Sequence[Row], task: Task, tokenizer: Any, max_length: int, labels: tuple[str, ...] | None
) -> list[Example]:
    return encode(rows, task=task, tokenizer=tokenizer, max_length=max_length, label_names=labels).examples
