"""Rows of a task for one cell: subsets that a seed fixes, validation and test rows that nothing changes.

Rows, tokenizers and encoded judged rows stay in the memory of a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.cells.rows import split_rows
from experiments.cells.training import kept_tokenizer
from experiments.comparison.plan import StudyCell
from experiments.recipe.config import Recipe
from finetune.data import Example, Row, encode, limit_rows
from finetune.seeds import derive


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
    pool, judged, labels = split_rows(cell.file, recipe.task, cell.rows[1:], cell.judged)
    train = limit_rows(pool, min(cell.rows[0], len(pool)), seed=derive(recipe.train.seed, "limit", "train"))
    tokenizer = kept_tokenizer(recipe.backbone)
    cut = (recipe.train.max_length, recipe.train.truncation, recipe.train.overlong)
    key = (cell.file, cell.judged, recipe.backbone, recipe.task, cut, cell.rows[1:])
    if key not in _JUDGED:
        _JUDGED[key] = _encode(judged, recipe, tokenizer, labels, judged=True)
    encoded = _encode(train, recipe, tokenizer, labels)
    return Material(encoded, _JUDGED[key], labels, tokenizer)


_JUDGED: dict[Any, list[Example]] = {}


def _encode(
    rows: Sequence[Row], recipe: Recipe, tokenizer: Any, labels: tuple[str, ...] | None, *, judged: bool = False
) -> list[Example]:
    train = recipe.train
    return encode(
        rows,
        task=recipe.task,
        tokenizer=tokenizer,
        max_length=train.max_length,
        label_names=labels,
        truncation=train.truncation,
        overlong=None if judged and train.overlong == "drop" else train.overlong,
    ).examples
