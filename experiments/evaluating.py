"""Judge a run directory again: the directory alone is enough.

flatshift eval runs/first --data more.jsonl --json
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.console import Console
from experiments.judging import build_judged, judge, shown
from experiments.preparing import prepare
from experiments.recipe import resume_recipe
from finetune.config import Data, Files
from finetune.errors import UserError


def evaluate_run(path: Path, *, data: Sequence[str] = (), quiet: bool = False) -> dict[str, dict[str, Any]]:
    """Evaluate the adapter of a run on its dev and test rows, or on other files as the split `data`.

    Returns {split: {metric: {value, low, high, n}}}.
    Raises UserError if `path` is no run directory, has no adapter yet, or has nothing to judge on.
    """
    recipe = resume_recipe(path).recipe
    if not (path / "adapter").is_dir():
        raise UserError(f"{path} has no adapter yet; finish it with `flatshift train --resume {path}`")
    prepared = prepare(recipe)
    splits = {"dev": prepared.dev, "test": prepared.test}
    if data:
        files = Files(files=tuple(data))
        judged = dataclasses.replace(recipe, data=dataclasses.replace(_only_train(recipe.data), test=files))
        splits = {"data": prepare(judged).test}
    if not any(splits.values()):
        raise UserError(f"{path} has neither dev nor test rows; name some with --data")
    console = Console(quiet=quiet)
    model, tokenizer = build_judged(recipe, recipe.task, prepared.label_names, path / "adapter")
    result = {}
    for split, examples in splits.items():
        if examples:
            console.say(f"{split}: {len(examples):,} examples")
            result[split] = judge(
                recipe, model, tokenizer, examples, task=recipe.task, split=split, label_names=prepared.label_names
            )
    return result


def _only_train(data: Data) -> Data:
    return dataclasses.replace(data, dev=Files(), test=Files())


def render(result: dict[str, dict[str, Any]]) -> str:
    """The result as lines for a person."""
    return "\n".join(f"{split:5} {line}" for split, metrics in result.items() for line in shown(metrics))
