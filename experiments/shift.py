"""How far the warm-up moved the backbone towards the target: perplexity of the target's own texts, before and after."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from experiments.config import Recipe
from experiments.preparing import prepare
from finetune.adapter import attach_adapter, load_adapter
from finetune.backbone import load_backbone, load_tokenizer, resolve_device
from finetune.config import Files, LanguageModel
from finetune.evaluate import evaluate
from finetune.seeds import derive

_ROWS = 500
"""Rows of each split that are read; enough for an interval of a few per cent."""


def text_perplexity(recipe: Recipe, adapter: Path | None) -> dict[str, dict[str, Any]]:
    """Perplexity and bits per byte of the dev and test texts as plain text, labels unseen.

    adapter: a warm-up adapter's directory, or None for the cold backbone.
    Returns {split: {metric: {value, low, high, n}}}, at most 500 rows a split.
    """
    task = LanguageModel(pack=False)
    data = recipe.data
    splits = {name: getattr(data, name) for name in ("dev", "test") if getattr(data, name).files}
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
    for name, files in splits.items():
        rows = Files(files=files.files, limit=_ROWS)
        # The same rows for every seed and arm: the comparison is between adapters, not between samples.
        fixed = dataclasses.replace(
            recipe,
            train=dataclasses.replace(recipe.train, seed=0),
            data=dataclasses.replace(data, train=rows, dev=Files(), test=Files(), label_noise=0.0),
        )
        examples = prepare(fixed, task=task).train
        result[name] = evaluate(
            model, tokenizer, examples, task=task, config=recipe.eval, seed=derive(recipe.train.seed, "shift", name)
        )
    return result
