"""How far the warm-up moved the backbone towards the target: perplexity of the target's own texts, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.config import Recipe
from experiments.preparing import read_splits
from finetune.adapter import attach_adapter, load_adapter
from finetune.backbone import load_backbone, load_tokenizer, resolve_device
from finetune.config import LanguageModel
from finetune.data import encode, limit_rows
from finetune.evaluate import evaluate
from finetune.seeds import derive

_ROWS = 500
"""Rows of each split that are read; enough for an interval of a few per cent."""


def text_perplexity(recipe: Recipe, adapter: Path | None) -> dict[str, dict[str, Any]]:
    """Perplexity and bits per byte of the dev and test texts as plain text, labels unseen.

    adapter: a warm-up adapter's directory, or None for the cold backbone.
    Returns {split: {metric: {value, low, high, n}}}, at most 500 rows a split, the same ones for every seed.
    """
    task = LanguageModel(pack=False)
    rows = read_splits(recipe)
    splits = {name: split for name, split in (("dev", rows.dev), ("test", rows.test)) if split}
    if not splits:
        return {}
    tokenizer = load_tokenizer(recipe.backbone)
    model: Any = load_backbone(
        recipe.backbone,
        task=task,
        label_names=None,
        precision=recipe.train.precision,
        device=resolve_device(recipe.train.device),
    )
    if adapter is not None:
        model = attach_adapter(model, recipe.adapter, task=task, seed=recipe.train.seed)
        load_adapter(model, adapter)
    result = {}
    for name, split in splits.items():
        subset = limit_rows(split, min(_ROWS, len(split)), seed=derive(0, "shift", name))
        encoded = encode(subset, task=task, tokenizer=tokenizer, max_length=recipe.train.max_length)
        result[name] = evaluate(
            model, tokenizer, encoded.examples, task=task, config=recipe.eval, seed=derive(0, "shift", name)
        )
    return result
