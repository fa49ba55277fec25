"""The fine-tuning journey: select → warm-up → fine-tune → evaluate → report, into one run directory.

    flatshift train warmup --out runs/first
    flatshift train --resume runs/first

Each part leaves a finished marker behind, so that `resume` picks up after the last one; inside a stage the loop
resumes from its newest checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.config import Recipe
from experiments.console import Console
from experiments.interrupts import graceful_stop
from experiments.judging import build_judged, build_model, judge_splits
from experiments.preparing import Prepared, prepare, prepare_texts
from experiments.recipe import Resolved, resume_recipe
from experiments.recipe.tree import Branch
from experiments.selecting import select_into
from experiments.shift import text_perplexity
from finetune.adapter import load_adapter, save_adapter
from finetune.atomic import replacing_directory, write_json, write_text
from finetune.config import LanguageModel, Optimizer, Task, Train
from finetune.data import Batches, describe, first_batch_panel, refuse_leaks
from finetune.errors import UserError
from finetune.loop import train_stage
from finetune.memory import plan_lines
from finetune.numerics import cpu_threads
from finetune.rundir import METRICS, RunDirectory
from finetune.seeds import derive
from regularizers import build as build_regularizer

WARM_UP, FINE_TUNE = "warm-up", "fine-tune"
Stop = Callable[[], bool]


def train(resolved: Resolved, out: Path | None = None, *, quiet: bool = False) -> dict[str, Any]:
    """Run a recipe into a new run directory and return its eval.json.

    out: directory to make, by default `runs/DATE-TIME-NAME`.
    Raises UserError for bad input before anything is trained, Interrupted when stopped with resumable state.
    """
    check_recipe(resolved.recipe)
    out = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{resolved.name}"
    # Everything that can be wrong with the input is found before the directory exists.
    prepared = prepare(resolved.recipe)
    manifest = {"inputs": describe(recipe_inputs(resolved.recipe))}
    run = RunDirectory.create(out, recipe_yaml=resolved.to_yaml(), manifest=manifest)
    console = Console(quiet=quiet, log=run.log)
    try:
        return execute(run, resolved.recipe, prepared, console)
    except ValueError:  # the user's mistakes are of this family; a directory that never trained is not worth keeping
        if not (run.path / METRICS).exists():
            shutil.rmtree(run.path)
        raise


def resume(path: Path, overrides: Sequence[Branch] = (), *, quiet: bool = False) -> dict[str, Any]:
    """Continue a run directory exactly where it stopped; a finished one returns at once.

    Raises UserError if `path` is no run directory, an input file changed, or an override is not allowed.
    """
    resolved = resume_recipe(path, overrides)
    check_recipe(resolved.recipe)
    run = RunDirectory.open(path)
    console = Console(quiet=quiet, log=run.log)
    if is_finished(run.path, resolved.recipe):
        console.say(f"{path} is finished: nothing to do")
        return json.loads((run.path / "eval.json").read_text(encoding="utf-8"))
    _check_inputs(run.path)
    write_text(run.path / "recipe.resolved.yaml", resolved.to_yaml())
    return execute(run, resolved.recipe, prepare(resolved.recipe), console)


def check_recipe(recipe: Recipe) -> None:
    """Refuse what no run can do: a mesh of several devices, a warm-up without data, a regularizer's bad setting."""
    build_regularizer(recipe.regularizer)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"launched as {os.environ['WORLD_SIZE']} processes, but this version trains in one; "
            "start it without a launcher, or with one process"
        )
    for axis, size in dataclasses.asdict(recipe.mesh).items():
        if size != 1:
            raise UserError(f"--mesh.{axis}: {size} devices asked for, but this version trains on one; leave it at 1")
    if recipe.warmup is not None and recipe.select is None:
        raise UserError("the recipe has a `warmup` block but no `select` block: name a pool in select.pool.files")


def is_finished(path: Path, recipe: Recipe) -> bool:
    """Whether every part of the run is there, with as many steps as the recipe asks for."""
    done = path / "stages" / FINE_TUNE / "done.json"
    if not (done.is_file() and (path / "eval.json").is_file() and (path / "report.html").is_file()):
        return False
    return json.loads(done.read_text(encoding="utf-8"))["target_steps"] == recipe.train.steps


def recipe_inputs(recipe: Recipe) -> list[str]:
    """Every input file that the recipe names, once each."""
    files = [*recipe.data.train.files, *recipe.data.dev.files, *recipe.data.test.files]
    if recipe.select is not None:
        files += [*recipe.select.pool.files, *recipe.select.target.files]
    return list(dict.fromkeys(files))


def _check_inputs(path: Path) -> None:
    """A resumed run must read what it read before."""
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    for before in manifest["inputs"]:
        (now,) = describe([before["path"]])
        if now["sha256"] != before["sha256"]:
            raise UserError(f"{before['path']} changed since the run began; restore it or start a new run")


def execute(
    run: RunDirectory, recipe: Recipe, prepared: Prepared, console: Console, *, report: bool = True
) -> dict[str, Any]:
    """Run every part that is not finished yet; returns eval.json."""
    with cpu_threads(recipe.train.threads), graceful_stop(console.say) as stop:
        started = time.monotonic()
        previous = None
        if recipe.warmup is not None:
            _selection(run, recipe, console)
            previous = _warm_up(run, recipe, console, stop, before=report)
        fine_tuned = _stage(
            run,
            recipe,
            console,
            stop,
            name=FINE_TUNE,
            task=recipe.task,
            prepared=prepared,
            optimizer=recipe.optimizer,
            train=recipe.train,
            previous=previous,
        )
        result = _evaluate(run, recipe, prepared, fine_tuned, console)
        write_json(run.path / "timings.json", {"seconds": round(time.monotonic() - started, 2)})
        if report:
            from experiments.report import build_report, write_plots

            write_plots(run.path)
            console.say(f"report: {build_report([run.path], out=run.path / 'report.html')}")
    return result


def _selection(run: RunDirectory, recipe: Recipe, console: Console) -> None:
    directory = run.path / "selection"
    if directory.is_dir():
        return
    with replacing_directory(directory) as temporary:
        select_into(recipe, temporary, console)


def _warm_up(run: RunDirectory, recipe: Recipe, console: Console, stop: Stop, *, before: bool) -> Path:
    """Language modelling on the selection; returns the adapter that fine-tuning continues."""
    assert recipe.warmup is not None
    warmup = recipe.warmup
    task = LanguageModel()
    columns = recipe.select.columns if recipe.select is not None else recipe.data.columns
    prepared = prepare_texts(recipe, [str(run.path / "selection" / "selected.jsonl")], columns, task)
    adapter = _stage(
        run,
        recipe,
        console,
        stop,
        name=WARM_UP,
        task=task,
        prepared=prepared,
        optimizer=dataclasses.replace(recipe.optimizer, lr=warmup.lr),
        train=dataclasses.replace(
            recipe.train,
            steps=warmup.steps,
            batch_size=warmup.batch_size,
            accumulate=warmup.accumulate,
            eval_every=0,
            best="auto",
            patience=None,
        ),
        previous=None,
    )
    # A sweep cell needs only its own figure; before is the same for all of them.
    wanted = {"before": None, "eval": adapter} if before else {"eval": adapter}
    for name, judged in wanted.items():
        path = run.path / "stages" / WARM_UP / f"{name}.json"
        if not path.is_file():
            write_json(path, text_perplexity(recipe, judged, only=("dev", "test") if before else ("test",)))
    return adapter


def _stage(
    run: RunDirectory,
    recipe: Recipe,
    console: Console,
    stop: Stop,
    *,
    name: str,
    task: Task,
    prepared: Prepared,
    optimizer: Optimizer,
    train: Train,
    previous: Path | None,
) -> Path:
    """Train one stage unless it is finished; returns the directory of its adapter."""
    adapter = run.path / "stages" / name / "adapter"
    done = run.path / "stages" / name / "done.json"
    if done.is_file() and json.loads(done.read_text(encoding="utf-8"))["target_steps"] == train.steps:
        return adapter
    seed = derive(train.seed, name)
    model, tokenizer = build_model(recipe, task, prepared.label_names)
    if previous is not None:
        load_adapter(model, previous, partial=True)
    batches = Batches(
        prepared.train,
        task=task,
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        seed=seed,
        max_length=train.max_length,
        pad_id=tokenizer.pad_token_id,
    )
    if batches.packed:
        refuse_leaks(model)
    if prepared.truncated:
        console.say(f"truncated {prepared.truncated:,} samples to train.max_length = {train.max_length} tokens")
    if prepared.skipped:
        console.say(f"skipped {len(prepared.skipped):,} bad rows, first {prepared.skipped[0]}")
    if prepared.flipped:
        console.say(f"label noise: {len(prepared.flipped):,} of {len(prepared.train):,} training labels replaced")
    for line in plan_lines(model, train=train, optimizer=optimizer):
        console.say(line)
    console.say(first_batch_panel(batches.at(0)[0], tokenizer, task, label_names=prepared.label_names))
    with console.task(name, train.steps, "steps") as bar:
        train_stage(
            model,
            tokenizer,
            stage=name,
            task=task,
            batches=batches,
            dev=prepared.dev if name == FINE_TUNE else [],
            optimizer=optimizer,
            train=train,
            evaluate=recipe.eval,
            regularizer=build_regularizer(recipe.regularizer),
            run=run,
            seed=seed,
            label_names=prepared.label_names,
            on_step=lambda m: bar(m["step"], f"loss {m['loss']:.3f}"),
            stop=stop,
        )
    return adapter


def _evaluate(
    run: RunDirectory, recipe: Recipe, prepared: Prepared, adapter: Path, console: Console
) -> dict[str, dict[str, Any]]:
    """Judge the chosen adapter on every split and write adapter/ and eval.json at the top of the run."""
    model, tokenizer = build_judged(recipe, recipe.task, prepared.label_names, adapter)
    save_adapter(model, run.path / "adapter")
    result = judge_splits(recipe, model, tokenizer, prepared, console.say)
    write_json(run.path / "eval.json", result)
    return result


def remove_weights(path: Path) -> None:
    """Drop what only a continued training needs: checkpoints and adapters (sweep cells keep their figures)."""
    for name in ("state", "adapter"):
        shutil.rmtree(path / name, ignore_errors=True)
    for stage in (path / "stages").glob("*/adapter"):
        shutil.rmtree(stage, ignore_errors=True)
