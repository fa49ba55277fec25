"""EleutherAI's lm-evaluation-harness on a run directory: its tasks, the backbone with the run's adapter.

    flatshift eval runs/first --harness hellaswag arc_easy --harness-limit 200

The model is passed on from memory, in one process and in the run's own precision. Every text starts with the tokens
that training put before it, even if the tokenizer alone would add none.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.build import load_model
from flatshift.experiments.workflows.run_parts import check_generative, read_finished_recipe, to_single_process
from flatshift.finetune.atomic import to_json_values, write_json
from flatshift.finetune.compute.numerics import cpu_threads
from flatshift.finetune.compute.precision import autocast_dtype
from flatshift.finetune.data.encoding import SpecialTokens
from flatshift.finetune.errors import UserError, first_error_line
from flatshift.finetune.machine import installed_version
from flatshift.finetune.seeds import derive_seed

RECORD = "harness.json"
_PACKAGES = ("flatshift", "lm-eval", "torch", "transformers", "peft", "datasets")


def run_harness(
    path: Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    include: Path | None = None,
    overrides: Sequence[Branch] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Run tasks of lm-eval on the adapter of a run and write `harness.json` into its directory.

    limit: items of each task; None: all. Metrics of a limited run are not comparable with published ones.
    shots: worked examples before each item; None: the task's own number.
    include: directory with your own task files (YAML). They may name Python functions, which lm-eval runs.
    overrides: another `train.device` than the run's.
    Returns the content of the file: `results` by task and metric, with `versions`, `tasks`, `limit`, `shots`, `seed`
    and `prefix`, the tokens before every text.
    Raises UserError if lm-eval is missing, a task is unknown, or `path` is no finished run of a language model, or one
    of conversations or soft tokens.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("--harness needs the package lm-eval; pip install 'flatshift[harness]'")
    recipe = to_single_process(read_finished_recipe(path, overrides))
    recipe.task.traits.refuse("--harness")
    if recipe.adapter.soft_tokens is not None:
        setting = "soft_tokens" if recipe.adapter.projector is None else "projector"
        raise UserError(
            f"--harness: lm-eval pads prompts on the left, behind what adapter.{setting} puts before every text; "
            "evaluate this run with `flatshift eval RUN_DIR --data FILE`"
        )
    check_generative(recipe.task)
    for name, value in (("limit", limit), ("batch-size", batch_size)):
        if value is not None and value < 1:
            raise UserError(f"--harness-{name}: {value} is too small; give at least 1")
    if include is not None and not include.is_dir():
        raise UserError(f"--harness-include: {include} is no directory; name the one that holds your task files")
    with cpu_threads(recipe.train.threads), _restore_global_generators():
        derived = derive_seed(seed, "harness") % 2**32
        names = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
        options = {"num_fewshot": shots, "limit": limit, "log_samples": False, **dict.fromkeys(names, derived)}
        results, prefix = _run_tasks(recipe, path, tasks, batch_size, include, Console(quiet=quiet), options)
    record = {
        "harness": "lm-eval",
        "versions": {name: installed_version(name) for name in _PACKAGES},
        "tasks": list(tasks),
        "limit": limit,
        "shots": results["n-shot"],
        "seed": seed,
        "prefix": prefix,
        "precision": recipe.train.precision,
        "quantization": recipe.train.quantization,
        "items": results["n-samples"],
        "task_versions": results["versions"],
        "higher_is_better": results["higher_is_better"],
        "results": results["results"],
    }
    record = json.loads(json.dumps(to_json_values(record), ensure_ascii=False, default=str))
    write_json(path / RECORD, record)
    return record


def _run_tasks(
    recipe: Recipe,
    path: Path,
    tasks: Sequence[str],
    batch_size: int,
    include: Path | None,
    console: Console,
    options: dict[str, Any],
) -> tuple[dict[str, Any], list[int]]:
    """Return lm-eval's results, and the tokens before every text; options: of `lm_eval.simple_evaluate`."""
    with _restore_root_logger():
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if include is None else str(include))
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise UserError(
            f"--harness: lm-eval has no task {unknown[0]!r}; `lm-eval ls tasks` lists them, or give your "
            "own by --harness-include DIRECTORY"
        )
    engine, tokenizer = load_model(recipe, recipe.task, None, adapter=path / "adapter")
    tokenizer, prefix = _add_training_prefix(tokenizer, begin=not recipe.task.traits.encoder_decoder)
    console.say(f"lm-eval on {', '.join(tasks)}")
    backend, dtype = "seq2seq" if recipe.task.traits.encoder_decoder else "causal", autocast_dtype(recipe.train)
    model = HFLM(
        pretrained=engine.model, tokenizer=tokenizer, backend=backend, batch_size=batch_size,
        mixed_precision_dtype=dtype,
    )  # fmt: skip
    try:
        return simple_evaluate(model, tasks=list(tasks), task_manager=manager, **options), prefix
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(f"--harness: the data of these tasks cannot be fetched: {first_error_line(error)}") from error


def _add_training_prefix(tokenizer: Any, *, begin: bool) -> tuple[Any, list[int]]:
    own = list(tokenizer("a")["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    prefix = list(SpecialTokens.of(tokenizer, begin=begin).prefix)
    if own != bare or not prefix:
        return tokenizer, prefix
    from tokenizers.processors import Sequence as Processors
    from tokenizers.processors import TemplateProcessing

    changed = copy.deepcopy(tokenizer)
    names = [(changed.convert_ids_to_tokens(token), token) for token in prefix]
    start = " ".join(name for name, _ in names)
    template = TemplateProcessing(single=f"{start} $A", pair=f"{start} $A $B", special_tokens=names)
    backend = changed.backend_tokenizer
    before = backend.post_processor
    backend.post_processor = template if before is None else Processors([before, template])
    if list(changed("a")["input_ids"]) != [*prefix, *bare]:
        raise RuntimeError(f"the tokenizer does not begin a text with {start} as it is set to")
    return changed, prefix


@contextlib.contextmanager
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:], root.level = handlers, level
        logging.getLogger("lm_eval").setLevel(logging.ERROR)


@contextlib.contextmanager
def _restore_global_generators() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def format_record(record: dict[str, Any]) -> str:
    """Format one line per task and metric, with its standard error."""
    lines = []
    for task, figures in record["results"].items():
        for name, value in figures.items():
            if isinstance(value, float) and "_stderr" not in name:
                metric, _, filter_name = name.partition(",")
                error = figures.get(f"{metric}_stderr,{filter_name}")
                spread = f" ± {error:.3g}" if isinstance(error, float) else ""
                label = metric if filter_name == "none" else f"{metric} ({filter_name})"
                lines.append(f"{task}  {label}  {value:.4g}{spread}")
    if record["limit"] is not None:
        lines.append(f"at most {record['limit']} items of each task: not to be compared with published figures")
    return "\n".join(lines)
