"""Sharpness of the minimum that a run ended in: `flatshift eval RUN_DIR --sharpness`.

Measures the run's adapter on fixed rows of one split, in float32 arithmetic on the weights that the run trained with.
Directions depend on the measurement's seed alone, rows on it and on their number: runs on the same data and backbone
are comparable if `batches` times `train.batch_size` is the same. Writes `sharpness.json` and its charts, and rewrites
the run's report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatshift.experiments.data.splits import prepare_data, prepare_eval_data
from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.recipe.auto import resolve_device_precision
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console, Draw
from flatshift.experiments.workflows.build import format_number, load_model, skipped_rows_summary
from flatshift.experiments.workflows.run_parts import check_run
from flatshift.finetune.atomic import write_json
from flatshift.finetune.compute.loss import add_reference
from flatshift.finetune.compute.numerics import cpu_threads
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.digests import adapter_digest
from flatshift.finetune.errors import UserError
from flatshift.finetune.run_directory import resume_command
from flatshift.finetune.seeds import numpy_generator
from flatshift.finetune.train.trace.curvature import mean_loss
from flatshift.regularizers.config import measure_name
from flatshift.regularizers.layers.frozen import is_quantised
from flatshift.regularizers.sharpness import Sharpness, measure

FILE = "sharpness.json"
SPLITS = ("dev", "test", "train")
"""Splits in order of preference; the first one with rows is used by default."""


def measure_run_sharpness(
    path: Path,
    settings: Sharpness | None = None,
    *,
    batches: int = 2,
    split: str | None = None,
    data: Sequence[str] = (),
    seed: int = 0,
    overrides: Sequence[Branch] = (),
    quiet: bool = False,
    draw: Draw | None = None,
) -> dict[str, Any]:
    """Measure the adapter of a run and write `sharpness.json` there; returns it.

    batches: of `train.batch_size` rows each; fewer if the split has not as many.
    split: dev, test or train; by default the first of dev, test and train that has rows.
    data: files to take rows from instead (the split is called `data`).
    seed: of the choice of rows and of all random directions.
    overrides: another device than the run's, or no mesh; how the rows of `data` are read.
    draw: draws plots/ and report.html of the run again.

    Raises UserError: `path` is no run directory, has no adapter yet, or ran on a mesh; the split has no rows.
    Raises RegularizerError: the model cannot be measured in one of the spaces.
    """
    settings = settings or Sharpness()
    recipe = resolve_device_precision(resume_recipe(path, overrides, other_rows=bool(data)).recipe)
    _check_options(path, recipe, batches, split, data)
    console = Console(quiet=quiet)
    with cpu_threads(recipe.train.threads):
        prepared = prepare_eval_data(recipe, data, run=path) if data else prepare_data(recipe)
        for line in skipped_rows_summary(prepared, recipe.train.max_length) if data else ():
            console.say(line)
        splits = {name: list(getattr(prepared, name)) for name in SPLITS}
        chosen = "test" if data else split or next(name for name in SPLITS if splits[name])
        examples = splits[chosen]
        if not examples:
            raise UserError(f"--sharpness-split {chosen}: the run has no {chosen} rows; name another split, or --data")
        if recipe.task.standardise:
            raise UserError(
                "--sharpness: this run's head was folded back into the targets' own units, which is not the loss that "
                "was trained on; train with task.standardise: false to measure it"
            )
        name = "data" if data else chosen
        count = batches * recipe.train.batch_size
        order = numpy_generator(seed, "sharpness", "rows").permutation(len(examples))[:count]
        rows = [examples[index] for index in sorted(order)]  # the same for every run that draws as many of them
        engine, tokenizer = load_model(recipe, recipe.task, prepared.label_names, adapter=path / "adapter")
        for module in engine.model.modules():  # half precision to float32 is exact; quantised weights stay
            if not (isinstance(module, nn.Linear) and is_quantised(module)):
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    if tensor.dtype in (torch.bfloat16, torch.float16):
                        tensor.data = tensor.data.float()
        micros = [
            micro.to(engine.device)
            for micro in EvalBatching.of(tokenizer, batch_size=recipe.train.batch_size).batches(rows, recipe.task)
        ]
        supervised = sum(micro.supervised for micro in micros)
        head = engine.find_head(micros[0].inputs, task=recipe.task)
        if recipe.task.has_reference:  # computed with the weights before any perturbation
            micros = add_reference(engine.model, micros, task=recipe.task, head=head)
        unit = recipe.task.loss_denominator if recipe.task.loss_denominator != "tokens" else "target tokens"
        console.say(f"sharpness on {len(rows):,} rows of {name} ({supervised:,} {unit})")
        loss = mean_loss(engine.model, micros, task=recipe.task, head=head)
        with console.task("sharpness", settings.passes(), "passes") as bar:
            measured = measure(engine.model, loss, settings, seed=seed, progress=bar)
    record = measured.as_dict()
    metadata = {
        "split": name,
        "rows": len(rows),
        "supervised": supervised,
        "seed": seed,
        "adapter_sha256": adapter_digest(path),
        "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(settings).items()},
        "spaces": record["about"],
    }
    result = {"loss": record["loss"], "measures": record["measures"], "about": metadata, "slices": record["slices"]}
    write_json(path / FILE, result)
    for old in (path / "plots").glob("sharpness-*.svg"):  # of an earlier measurement, maybe of a space not measured now
        old.unlink()
    if draw is not None:
        console.say(f"report: {draw(path)}")
    return result


def _check_options(path: Path, recipe: Recipe, batches: int, split: str | None, data: Sequence[str]) -> None:
    if recipe.mesh.size > 1 or recipe.mesh.auto:
        axes = [axis for axis in ("replicate", "dp", "ep", "tp", "pp", "cp") if getattr(recipe.mesh, axis) > 1]
        flags = " ".join([f"--mesh.{axis} 1" for axis in axes] + ["--mesh.auto false"] * recipe.mesh.auto)
        raise UserError(f"{path} ran on a mesh, and sharpness is measured in one process; add {flags}")
    if not (path / "adapter").is_dir():
        raise UserError(f"{path} has no adapter yet; finish it with `{resume_command(path)}`")
    check_run(path, recipe, rows=not data)
    if batches < 1:
        raise UserError(f"--sharpness-batches: {batches} is not a number ≥ 1")
    if data and split is not None:
        raise UserError("--data and --sharpness-split exclude each other: keep one of them")
    if split is not None and split not in SPLITS:
        raise UserError(f"--sharpness-split: {split!r} is not one of {', '.join(SPLITS)}")


def format_result(result: dict[str, Any]) -> str:
    """Format the measures as lines: `adapter λ_max 12.3 [12.2, 12.4]`."""
    lines = [f"loss {format_number(result['loss'])} on {result['about']['rows']} rows of {result['about']['split']}"]
    for space, measures in result["measures"].items():
        for name, m in measures.items():
            interval = f" [{format_number(m['low'])}, {format_number(m['high'])}]" if m["low"] is not None else ""
            lines.append(f"{space:7} {measure_name(name)}: {format_number(m['value'])}{interval}")
    return "\n".join(lines)
