"""Build the model that a recipe describes, and judge it: shared by training, `eval`, and the warm-up's before/after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.config import Recipe
from experiments.preparing import Prepared
from finetune.adapter import attach_adapter, load_adapter
from finetune.backbone import load_backbone, load_tokenizer, resolve_device
from finetune.config import Task
from finetune.data import Example
from finetune.evaluate import evaluate
from finetune.seeds import derive


def build_model(recipe: Recipe, task: Task, label_names: tuple[str, ...] | None) -> tuple[Any, Any]:
    """The frozen backbone with a fresh adapter for `task`, and its tokenizer."""
    device = resolve_device(recipe.train.device)
    tokenizer = load_tokenizer(recipe.backbone)
    backbone = load_backbone(
        recipe.backbone, task=task, label_names=label_names, precision=recipe.train.precision, device=device
    )
    return attach_adapter(backbone, recipe.adapter, task=task, seed=recipe.train.seed), tokenizer


def build_judged(
    recipe: Recipe, task: Task, label_names: tuple[str, ...] | None, adapter: Path | None
) -> tuple[Any, Any]:
    """The same with a saved adapter in place; None leaves the fresh one, which changes nothing (B = 0)."""
    model, tokenizer = build_model(recipe, task, label_names)
    if adapter is not None:
        load_adapter(model, adapter)
    return model, tokenizer


def judge(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    task: Task,
    split: str,
    label_names: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """`finetune.evaluate.evaluate` in the recipe's precision, on the model's device, under the split's own seed."""
    import torch

    return evaluate(
        model,
        tokenizer,
        examples,
        task=task,
        config=recipe.eval,
        label_names=label_names,
        seed=derive(recipe.train.seed, "bootstrap", split),
        device=next(model.parameters()).device,
        autocast_dtype=torch.bfloat16 if recipe.train.precision == "bf16" else None,
    )


def judge_splits(
    recipe: Recipe, model: Any, tokenizer: Any, prepared: Prepared, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Every split of a run that has examples, `{split: {metric: {value, low, high, n}}}`: what eval.json holds."""
    splits = {"train": prepared.train[: recipe.eval.train_limit], "dev": prepared.dev, "test": prepared.test}
    result = {}
    for split, examples in splits.items():
        if examples:
            result[split] = judge(
                recipe, model, tokenizer, examples, task=recipe.task, split=split, label_names=prepared.label_names
            )
            say(f"{split}: {', '.join(shown(result[split]))}")
    return result


def shown(metrics: dict[str, Any]) -> list[str]:
    """One text per metric for a person: `accuracy 0.61 [0.57, 0.65]`."""

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.4g}"

    return [
        f"{name} {number(m['value'])}"
        + (f" [{number(m['low'])}, {number(m['high'])}]" if name != "majority_floor" else "")
        for name, m in metrics.items()
    ]
