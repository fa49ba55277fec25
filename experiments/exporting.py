"""What leaves a run: a merged model that plain transformers loads, or an adapter folder ready for a hub.

    flatshift merge runs/first --out merged       # backbone + adapter in one set of weights
    flatshift export runs/first --out adapter     # the adapter, its tokenizer and a card written from the run

Both folders appear whole or not at all, hold safetensors only, and are re-opened before they get their name.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from experiments.config import Recipe
from experiments.judging import build_judged
from experiments.preparing import Prepared, prepare
from experiments.recipe import resume_recipe
from finetune.atomic import replacing_directory, write_text
from finetune.backbone import load_tokenizer, quiet_transformers, resolve_backbone
from finetune.data import iterate_eval
from finetune.errors import UserError
from finetune.rundir import refuse_nonempty


def merge(path: Path, out: Path) -> dict[str, Any]:
    """Write the backbone with the run's adapter folded in, in the backbone's own dtype, to the new directory `out`.

    Folding is done in float32 and rounded once. Returns `{"dtype", "max_logit_difference", "largest_logit", "rows"}`:
    the largest difference between backbone + adapter (float32) and the written model, read back, on rows of the run.
    Raises UserError if `path` is no finished run or `out` is not empty.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    recipe, prepared = _finished(path)
    refuse_nonempty(out)
    exact = _in_float32(recipe)
    model, tokenizer = build_judged(exact, exact.task, prepared.label_names, path / "adapter")
    rows = (prepared.test or prepared.dev or prepared.train)[:8]
    batch = next(iterate_eval(rows, task=exact.task, batch_size=len(rows), pad_id=tokenizer.pad_token_id))
    inputs = {name: tensor.to(next(model.parameters()).device) for name, tensor in batch.inputs.items()}
    model.eval()
    with torch.no_grad():
        before = model(**inputs).logits.float()
        merged = model.merge_and_unload(safe_merge=True)
    dtype = _stored_dtype(recipe)
    merged.config.use_cache = True
    with replacing_directory(out) as temporary:
        with quiet_transformers():
            merged.to(dtype).save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            kind = AutoModelForSequenceClassification if recipe.task.kind == "classify" else AutoModelForCausalLM
            again = kind.from_pretrained(temporary, dtype=dtype, use_safetensors=True).to(before.device).eval()
        with torch.no_grad():
            after = again(**inputs).logits.float()
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "max_logit_difference": float((after - before).abs().max()),
        "largest_logit": float(before.abs().max()),
        "rows": len(rows),
    }


def export(path: Path, out: Path) -> Path:
    """Write adapter, tokenizer and a model card made from the run to the new directory `out`.

    Raises UserError if `path` is no finished run or `out` is not empty.
    """
    recipe = resume_recipe(path).recipe
    _require_adapter(path)
    refuse_nonempty(out)
    with replacing_directory(out) as temporary:
        for file in (path / "adapter").iterdir():
            shutil.copy2(file, temporary / file.name)
        load_tokenizer(recipe.backbone).save_pretrained(temporary)
        write_text(temporary / "README.md", card(path, recipe))
    return out


def card(path: Path, recipe: Recipe) -> str:
    """The model card: what was trained on what, how, and how it was judged, all read from the run directory."""
    evaluation = json.loads((path / "eval.json").read_text(encoding="utf-8"))
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    command = (path / "command.txt").read_text(encoding="utf-8").strip()
    figures = [
        f"| {split} | {name} | {_number(m['value'])} | {_number(m['low'])} to {_number(m['high'])} | {m['n']:,} |"
        for split, metrics in evaluation.items()
        for name, m in metrics.items()
    ]
    inputs = [f"- `{Path(i['path']).name}`: {i['rows']:,} rows, SHA-256 `{i['sha256']}`" for i in manifest["inputs"]]
    adapter = recipe.adapter
    alpha = adapter.alpha if adapter.alpha is not None else 2 * adapter.rank
    lines = [
        "---",
        "library_name: peft",
        f"base_model: {json.dumps(Path(recipe.backbone).name)}",
        "tags: [lora, flatshift]",
        "---",
        "",
        f"# {recipe.task.kind} adapter on {Path(recipe.backbone).name}",
        "",
        f"LoRA of rank {adapter.rank} (alpha {alpha:g}) on {adapter.targets}; regularizer `{recipe.regularizer.kind}`; "
        f"{recipe.train.steps} updates of {recipe.train.batch_size * recipe.train.accumulate} rows, seed "
        f"{recipe.train.seed}" + (f", after a warm-up of {recipe.warmup.steps} updates." if recipe.warmup else "."),
        "",
        f"    {command}",
        "",
        "| split | metric | value | interval over items | items |",
        "|---|---|---|---|---|",
        *figures,
        "",
        "Intervals are bootstrap intervals over items of one run; they say nothing about other seeds.",
        "",
        "## Inputs",
        "",
        *inputs,
    ]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _finished(path: Path) -> tuple[Recipe, Prepared]:
    recipe = resume_recipe(path).recipe
    _require_adapter(path)
    return recipe, prepare(recipe)


def _require_adapter(path: Path) -> None:
    if not (path / "adapter").is_dir() or not (path / "eval.json").is_file():
        raise UserError(f"{path} is not finished; finish it with `flatshift train --resume {path}`")


def _in_float32(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, precision="fp32"))


def _stored_dtype(recipe: Recipe) -> Any:
    """The dtype of the backbone's own weight files: of most of their values."""
    import torch
    from safetensors import safe_open

    sizes: dict[torch.dtype, int] = {}
    for file in resolve_backbone(recipe.backbone).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                tensor = tensors.get_tensor(name)
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=sizes.__getitem__)
