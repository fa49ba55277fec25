"""Judge a run directory again: the directory alone is enough.

flatshift eval runs/first --data more.jsonl --json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.data.splits import prepare, prepare_apart
from experiments.recipe.config import Recipe
from experiments.recipe.tree import Branch
from experiments.run.console import Console
from experiments.workflows.build import judge, judge_splits, lay_out, lost_lines, shown
from experiments.workflows.generate import adapted_recipe
from experiments.workflows.initial_adapter import check_run
from finetune.compute.numerics import cpu_threads
from finetune.launch import spawn, watchdog
from finetune.parallel.mesh import World


def evaluate_run(
    path: Path, *, data: Sequence[str] = (), overrides: Sequence[Branch] = (), quiet: bool = False
) -> dict[str, dict[str, Any]]:
    """Evaluate the adapter of a run on its own splits, or on other files as the split `data`.

    overrides: another mesh or device than the run's. On a mesh every rank calls this and gets the same figures.
    Returns {split: {metric: {value, low, high, n}}}.
    Raises UserError if `path` is no run directory or has no adapter yet, its backbone changed, or the rows do not fit.
    """
    recipe = adapted_recipe(path, overrides)
    world = spawn.join(recipe.mesh, recipe.train.device)
    with (
        cpu_threads(recipe.train.threads),
        watchdog.unhurried("evaluating"),
    ):  # the same bits as the run's own eval.json
        if world.is_main:  # reads all weights; the others take its word
            check_run(path, recipe)
        world.wait()
        result = _evaluated(path, recipe, data, Console(quiet=quiet or not world.is_main), world)
    spawn.leave(world)
    return result


def _evaluated(
    path: Path, recipe: Recipe, data: Sequence[str], console: Console, world: World
) -> dict[str, dict[str, Any]]:
    if not data:
        prepared = prepare(recipe)
        engine, tokenizer = lay_out(recipe, recipe.task, prepared.label_names, world=world, adapter=path / "adapter")
        return judge_splits(recipe, engine, tokenizer, prepared, lambda _: None)
    prepared = prepare_apart(recipe, data, run=path)
    console.say(f"data: {len(prepared.test):,} examples")
    for line in lost_lines(prepared, recipe.train.max_length):
        console.say(line)
    engine, tokenizer = lay_out(recipe, recipe.task, prepared.label_names, world=world, adapter=path / "adapter")
    names = prepared.label_names
    return {"data": judge(recipe, engine, tokenizer, prepared.test, task=recipe.task, split="data", label_names=names)}


def render(result: dict[str, dict[str, Any]]) -> str:
    """The result as lines for a person."""
    return "\n".join(f"{split:5} {line}" for split, metrics in result.items() for line in shown(metrics))
