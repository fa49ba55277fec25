"""From a recipe's files to encoded examples: read, subset, add label noise, tokenise. Finds bad input early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.config import Recipe
from finetune.config import Classify, Columns, Completion, Files, Task
from finetune.data import Encoded, Example, Row, class_names, encode, limit_rows, noisy_labels, read_rows
from finetune.errors import UserError
from finetune.seeds import derive


@dataclass(frozen=True)
class Prepared:
    """Encoded examples of each split, and what happened on the way."""

    train: list[Example]
    dev: list[Example]
    test: list[Example]
    label_names: tuple[str, ...] | None
    truncated: int
    skipped: list[str]
    flipped: list[str]
    """ids of the training rows whose label was replaced by noise"""


def prepare(
    recipe: Recipe,
    *,
    task: Task | None = None,
    train_files: Sequence[str] | None = None,
    columns: Columns | None = None,
) -> Prepared:
    """Read and encode a recipe's rows (or, for a warm-up, `train_files` alone under `task`).

    Raises UserError for missing files, columns or labels, empty splits, and labels that do not fit.
    """
    from finetune.backbone import load_tokenizer

    data, seed = recipe.data, recipe.train.seed
    warm_up = train_files is not None
    task = task or recipe.task
    columns = columns or data.columns
    skipped: list[str] = []

    def read(files: Files, name: str) -> list[Row]:
        if not files.files:
            return []
        rows = list(
            read_rows(files.files, columns=columns, required=_required(task), bad_rows=data.bad_rows, skipped=skipped)
        )
        if not rows:
            raise UserError(f"data.{name}: {', '.join(files.files)} has no usable row")
        if files.limit is not None:
            rows = limit_rows(rows, files.limit, seed=derive(seed, "limit", name))
        return rows

    train_source = Files(files=tuple(train_files)) if train_files is not None else data.train
    if not train_source.files:
        raise UserError("data.train.files is empty: name the training rows, for example --data.train.files rows.jsonl")
    train = read(train_source, "train")
    dev, test = ([], []) if warm_up else (read(data.dev, "dev"), read(data.test, "test"))

    labels = class_names(train, task)
    flipped: list[str] = []
    if data.label_noise and not warm_up:
        if labels is None or not all("label" in row.values for row in train):
            raise UserError("data.label_noise needs a task with labels: classify, or completion over labelled rows")
        train, flipped = noisy_labels(train, data.label_noise, labels, seed=derive(seed, "label-noise"))

    tokenizer = load_tokenizer(recipe.backbone)

    def encoded(rows: list[Row]) -> Encoded:
        return encode(rows, task=task, tokenizer=tokenizer, max_length=recipe.train.max_length, label_names=labels)

    parts = [encoded(rows) if rows else None for rows in (train, dev, test)]
    examples = [part.examples if part else [] for part in parts]
    return Prepared(
        *examples,
        label_names=labels,
        truncated=sum(part.truncated for part in parts if part),
        skipped=skipped,
        flipped=flipped,
    )


def _required(task: Task) -> tuple[str, ...]:
    """Columns that every row must have; a completion's columns are whatever its templates name."""
    if isinstance(task, Classify):
        return ("text", "label")
    return () if isinstance(task, Completion) else ("text",)
