"""Text generation with a finished run: prompts in, answers out, from the run directory alone.

flatshift generate runs/first --prompt "The enzyme" --data more.jsonl --out answers.jsonl
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.recipe.auto import resolve_device_precision
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.build import load_model
from flatshift.experiments.workflows.run_parts import check_run
from flatshift.finetune.atomic import atomic_file
from flatshift.finetune.compute.numerics import cpu_threads
from flatshift.finetune.config import Mesh
from flatshift.finetune.data.encoding import get_end_token
from flatshift.finetune.data.formats import has_lone_surrogate
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.run_directory import resume_command
from flatshift.finetune.tasks import Task


def check_generative(task: Task) -> None:
    """Raise UserError unless the models of `task` continue a prompt."""
    if not task.traits.is_generative:
        raise UserError(
            f"task.kind: {task.kind} trains a model that writes no text, so there is nothing to generate; evaluate it "
            "on rows of yours with `flatshift eval RUN_DIR --data FILE`"
        )


def generate_from_run(
    path: Path,
    *,
    prompts: Sequence[str] = (),
    data: Sequence[str] = (),
    raw: bool = False,
    decoding: dict[str, Any] | None = None,
    batch_size: int = 16,
    overrides: Sequence[Branch] = (),
    out: Path | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Continue prompts with the adapter of a run, in one process whatever mesh it was trained on.

    prompts: texts for the run's own prompt template; for a chat run, the first turn of a user. data: files whose rows
    fill the template; for a chat run, conversations, whose last answer is left out if present. raw: pass `prompts` to
    the model without a template.
    decoding: fields of `flatshift.finetune.evaluate.generation.Decoding` that differ from its defaults; the run's
        `task.max_new_tokens` is the default where the task has one, and `task.num_beams` where nothing is drawn.
    overrides: another `train.device` than the run's; `data.columns` and `data.bad_rows` of the rows of `data`.
    out: JSONL file to write, whole or not at all.
    Returns a record for each prompt, texts first, then rows in order: `{id, prompt, text, tokens, ended}`; `text` is
    the exact generated text, `tokens` their number, `ended` True if the model closed its answer itself.
    Raises UserError if `path` is no finished run, its task generates no text, `out` exists or is in use, or a prompt is
    not valid Unicode, does not fit, or does not fill a template of several columns.
    """
    with nullcontext() if out is None else exclusive_lock(out):
        if out is not None and out.exists():
            raise UserError(f"--out: {out} exists; name another file or remove it")
        asked = _generate_answers(path, prompts, data, raw, decoding, batch_size, overrides, quiet)
        if out is not None:
            with atomic_file(out) as temporary, temporary.open("w", encoding="utf-8") as stream:
                stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in asked)
        return asked


def _generate_answers(
    path: Path,
    prompts: Sequence[str],
    data: Sequence[str],
    raw: bool,
    decoding: dict[str, Any] | None,
    batch_size: int,
    overrides: Sequence[Branch],
    quiet: bool,
) -> list[dict[str, Any]]:
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.evaluate.generation import Decoding, continue_prompts
    from flatshift.finetune.models.backbone import open_backbone

    recipe = to_single_process(read_finished_recipe(path, overrides, other_rows=bool(data)))
    if recipe.adapter.projector is not None:
        raise UserError(
            f"{path}: its adapter reads features with every row (adapter.projector), and `flatshift generate` hands "
            "none in; evaluate it with `flatshift eval`"
        )
    task = recipe.task
    check_generative(task)
    settings = {"max_new_tokens": task.max_new_tokens, **(decoding or {})}
    if not settings.get("temperature"):
        settings.setdefault("num_beams", task.num_beams or 1)
    try:
        how = Decoding(**settings)
    except ValueError as error:
        raise UserError(f"generate: {error}") from None
    if batch_size < 1:
        raise UserError(f"--batch-size: {batch_size} is too small; give at least 1")
    for number, text in enumerate(prompts, start=1):
        if has_lone_surrogate(text):  # a lone surrogate: Python's stand-in for a byte that is not UTF-8
            raise UserError(f"--prompt {number} is not valid UTF-8; write it in that encoding")
    console = Console(quiet=quiet)
    tokenizer = open_backbone(recipe.backbone).tokenizer
    questions = task.input_format.build_text_prompts(prompts, tokenizer, raw=raw)
    if data:
        skipped: list[str] = []
        found, left_out = task.input_format.build_prompts(
            _read_prompts(recipe, data, skipped), tokenizer, bad_rows=recipe.data.bad_rows
        )
        if skipped := [*skipped, *left_out]:
            console.say(f"skipped {len(skipped):,} bad rows, first {skipped[0]}")
        questions += found
    asked: list[dict[str, Any]] = [{"id": one.id, "prompt": one.text} for one in questions]
    ends = sorted({one.stop for one in questions if one.stop is not None})
    if not asked:
        raise UserError("there is no prompt: give --prompt TEXT, --data FILE, or lines on standard input")

    start = open_backbone(recipe.backbone).decoder_start if task.traits.encoder_decoder else None
    with cpu_threads(recipe.train.threads), console.task("generating", len(asked), "prompts") as bar:
        engine, _ = load_model(recipe, recipe.task, None, adapter=path / "adapter")
        answers = continue_prompts(
            engine.model,
            [one.ids for one in questions],
            how,
            EvalBatching.of(tokenizer, recipe.train, batch_size=batch_size, device=engine.device),
            end=[token for token in (get_end_token(tokenizer), *ends) if token is not None],
            decoder_start=start,
        )
        for done, (place, answer) in enumerate(answers, start=1):
            text = str(tokenizer.decode(answer.ids, skip_special_tokens=True))
            asked[place] |= {"text": text, "tokens": len(answer.ids), "ended": answer.ended}
            bar(done)
    return asked


def _read_prompts(recipe: Recipe, files: Sequence[str], skipped: list[str]) -> list[Row]:
    rows = read_rows(
        files,
        columns=recipe.data.columns,
        required=recipe.task.input_format.columns(),
        bad_rows=recipe.data.bad_rows,
        skipped=skipped,
    )
    return require_rows(rows, files=files, purpose="prompt", skipped=skipped)


def read_finished_recipe(path: Path, overrides: Sequence[Branch] = (), *, other_rows: bool = False) -> Recipe:
    """The recipe of a run that has an adapter, all as it left it; raises UserError otherwise. Arguments as of
    `resume_recipe`."""
    recipe = read_adapted_recipe(path, overrides, other_rows=other_rows)
    check_run(path, recipe)
    return recipe


def read_adapted_recipe(path: Path, overrides: Sequence[Branch] = (), *, other_rows: bool = False) -> Recipe:
    """The recipe of a run that has an adapter, which nobody has compared yet; raises UserError otherwise. Arguments as
    of `resume_recipe`."""
    recipe = resolve_device_precision(resume_recipe(path, overrides, other_rows=other_rows).recipe)
    if (path / "scores.parquet").is_file():
        raise UserError(f"{path} is a selection and has no adapter; `flatshift train warmup --select.from {path}` does")
    if not (path / "adapter").is_dir():
        raise UserError(f"{path} has no adapter yet; finish it with `{resume_command(path)}`")
    return recipe


def to_single_process(recipe: Recipe) -> Recipe:
    """Return the recipe for one process."""
    return dataclasses.replace(recipe, mesh=Mesh())


def format_answers(records: Sequence[dict[str, Any]]) -> str:
    """Format the generated texts, below their prompts if there are several."""
    if len(records) == 1:
        return str(records[0]["text"])
    return "\n\n".join(f"{record['id']}: {record['prompt']}\n→ {record['text'].strip()}" for record in records)
