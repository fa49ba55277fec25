"""Judge a run directory again: the directory alone is enough.

flatshift eval runs/first --data more.jsonl --json
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.config import Recipe
from experiments.console import Console
from experiments.judging import build_judged, judge, judge_splits, shown
from experiments.preparing import prepare
from experiments.recipe import resume_recipe
from finetune.config import Data, Files
from finetune.errors import UserError
from finetune.numerics import cpu_threads


def evaluate_run(path: Path, *, data: Sequence[str] = (), quiet: bool = False) -> dict[str, dict[str, Any]]:
    """Evaluate the adapter of a run on its own splits, or on other files as the split `data`.

    Returns {split: {metric: {value, low, high, n}}}.
    Raises UserError if `path` is no run directory or has no adapter yet, or the rows do not fit.
    """
    recipe = resume_recipe(path).recipe
    if not (path / "adapter").is_dir():
        raise UserError(f"{path} has no adapter yet; finish it with `flatshift train --resume {path}`")
    with cpu_threads(recipe.train.threads):  # the same bits as the run's own eval.json
        return _evaluated(path, recipe, data, Console(quiet=quiet))


def _evaluated(path: Path, recipe: Recipe, data: Sequence[str], console: Console) -> dict[str, dict[str, Any]]:
    if not data:
        prepared = prepare(recipe)
        model, tokenizer = build_judged(recipe, recipe.task, prepared.label_names, path / "adapter")
        return judge_splits(recipe, model, tokenizer, prepared, lambda _: None)
    files = Files(files=tuple(data))
    prepared = prepare(dataclasses.replace(recipe, data=dataclasses.replace(_only_train(recipe.data), test=files)))
    console.say(f"data: {len(prepared.test):,} examples")
    model, tokenizer = build_judged(recipe, recipe.task, prepared.label_names, path / "adapter")
    names = prepared.label_names
    return {"data": judge(recipe, model, tokenizer, prepared.test, task=recipe.task, split="data", label_names=names)}


def _only_train(data: Data) -> Data:
    return dataclasses.replace(data, dev=Files(), test=Files())


def render(result: dict[str, dict[str, Any]]) -> str:
    """The result as lines for a person."""
    return "\n".join(f"{split:5} {line}" for split, metrics in result.items() for line in shown(metrics))
