"""How far the warm-up moved the backbone towards the target: perplexity of the target's own texts, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.data.splits import read_splits
from experiments.recipe.config import Recipe, warm_up_task
from experiments.workflows.build import Laid, judge, lay_out
from finetune.data.encoding import encode
from finetune.data.rows import limit_rows
from finetune.parallel.mesh import World
from finetune.seeds import derive
from finetune.tasks import LanguageModel, MaskedLM

_ROWS = 500
"""Rows of each split that are read; enough for an interval of a few per cent."""


def text_perplexity(
    recipe: Recipe,
    adapter: Path | None,
    *,
    task: LanguageModel | MaskedLM | None = None,
    only: tuple[str, ...] = ("dev", "test"),
    world: World | None = None,
    model: Laid | None = None,
) -> dict[str, dict[str, Any]]:
    """Perplexity and bits per byte of the dev and test texts as plain text, labels unseen; of an encoder the
    pseudo-perplexity of hidden tokens.

    task: what the warm-up trains, by default as `warm_up_task` says. adapter: a warm-up adapter's directory, or None
    for the cold backbone. only: the splits to judge. world: the recipe's mesh, on which every rank calls this.
    model: what holds the adapter already; else it is laid out.
    Returns {split: {metric: {value, low, high, n}}}, at most 500 rows a split, the same ones for every seed.
    """
    task = task or warm_up_task(recipe)[0]
    if task.pack:
        task = task.altered(pack=False)
    rows = read_splits(recipe)
    splits = {name: split for name, split in (("dev", rows.dev), ("test", rows.test)) if split and name in only}
    if not splits:
        return {}
    engine, tokenizer = model or lay_out(recipe, task, None, world=world, adapter=adapter)
    result = {}
    for name, split in splits.items():
        subset = limit_rows(split, min(_ROWS, len(split)), seed=derive(0, "shift", name))
        encoded = encode(
            subset, task=task, tokenizer=tokenizer, max_length=recipe.train.max_length,
            truncation=recipe.train.truncation, bad_rows="skip",
        )  # fmt: skip
        if not encoded.examples:
            continue
        result[name] = judge(recipe, engine, tokenizer, encoded.examples, task=task, split=name)
    return result
