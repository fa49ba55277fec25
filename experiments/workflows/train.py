"""The training workflow: select → warm-up → fine-tune → evaluate → report, into one run directory.

    flatshift train warmup --out runs/first
    flatshift train --resume runs/first

Each part leaves a marker when finished, so that `resume` continues after the last one; inside a stage the loop resumes
from its newest checkpoint.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import yaml

from flatshift.experiments.data.lengths import check_memory, check_positions
from flatshift.experiments.data.sources import check_strict_sources, epochs_to_steps, mixture_record
from flatshift.experiments.data.splits import (
    PreparedData,
    build_check_record,
    build_label_record,
    format_data_checks,
    missing_class_notes,
    prepare_data,
    prepare_warm_up_data,
    sample_split_warning,
)
from flatshift.experiments.recipe import Resolved, list_input_files, resume_recipe
from flatshift.experiments.recipe.auto import resolve_auto
from flatshift.experiments.recipe.resolve import describe_held_out_rows, read_template_file
from flatshift.experiments.recipe.rules import check_recipe
from flatshift.experiments.recipe.schema import Recipe, warm_up_task
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console, Draw
from flatshift.experiments.run.resumable_directory import open_resumable
from flatshift.experiments.select.pool import drop_blank_texts
from flatshift.experiments.select.select import select_into
from flatshift.experiments.select.target import check_target, read_target
from flatshift.experiments.workflows import build, run_parts
from flatshift.experiments.workflows.context import OpenStage, RunContext, StagePlan, open_stage, run_context
from flatshift.finetune import run_directory
from flatshift.finetune.atomic import fsync_directory, read_json_object, write_json, write_text
from flatshift.finetune.data.encoding import find_end_tokens
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.data.labels import fold_units
from flatshift.finetune.data.rows import Row
from flatshift.finetune.digests import DONE, FILES, check_files, copy_recorded_files
from flatshift.finetune.errors import OutOfMemory, UserError
from flatshift.finetune.launch import consistency, spawn, watchdog
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.seeds import derive_seed
from flatshift.finetune.train.schedule import learning_rate


def train(
    resolved: Resolved, out: Path | None = None, *, quiet: bool = False, verbose: bool = False, draw: Draw | None = None
) -> dict[str, Any]:
    """Run a recipe into a new run directory and return its eval.json.

    out: directory to create, by default `runs/DATE-TIME-NAME`. verbose: print plan and first batch in full, as in
    log.txt. draw: draws the page of the finished run.
    Raises UserError for bad input before anything is trained, Interrupted when stopped with resumable state.
    """
    check_recipe(resolved.recipe)
    notes: list[str] = []
    with ExitStack() as stack:
        if out is None:
            out = stack.enter_context(consistency.dated_directory("runs", resolved.name))
        world = stack.enter_context(_join_mesh(resolved.recipe, path=out))
        stack.enter_context(exclusive_lock(out) if world.is_main else nullcontext())
        if world.is_main:
            run_directory.check_replaceable(out, resumable=True)
        # All input errors are found before the directory exists.
        resolved = resolve_auto(resolved, log=notes.append)
        recipe = resolved.recipe
        check_positions(recipe)
        prepared = prepare_data(recipe)
        seed = derive_seed(recipe.train.seed, run_parts.FINE_TUNE)
        counted = epochs_to_steps(resolved, prepared.train, seed=seed)
        if counted is not resolved:
            resolved, recipe = counted, counted.recipe
            if prepared.mixture is not None:  # of one source its line before step 1 has both
                notes.append(f"steps: {recipe.train.steps:,} ({resolved.origins['train.steps']})")
        idle = [f"train.{name}" for name in ("patience", "best") if getattr(recipe.train, name) not in (None, "auto")]
        if idle and not prepared.dev:
            notes.append(f"{' and '.join(idle)} without effect: there are no dev rows (name data.dev.files)")
        elif recipe.train.patience is not None and not 0 < recipe.train.evaluation_interval < recipe.train.steps:
            notes.append("train.patience stops nothing: dev rows are evaluated once, at the end (set train.eval_every)")
        check_strict_sources(recipe, prepared.train, prepared.mixture, seed=seed)
        check_memory(recipe, prepared.train)
        notes += [*describe_held_out_rows(resolved), *sample_split_warning(recipe), *missing_class_notes(prepared)]
        if (kind := recipe.regularizer.kind) != "plain":
            notes.append(f"regularizer: {kind} ({resolved.origins.get('regularizer.kind', 'default')})")
        if recipe.select is not None and recipe.select.from_ is not None:
            check_files(Path(recipe.select.from_))
        check_target(recipe, prepared.skipped)
        manifest = _build_manifest(recipe, prepared)
        if world.is_main:
            manifest["backbone"] = open_backbone(recipe.backbone).record
            run_directory.RunDirectory.create(
                out, recipe_yaml=resolved.to_yaml(), manifest=manifest, texts=read_template_file(recipe)
            )
        world.wait()
        run, console = _open_run(out, world, quiet, verbose, notes)
        try:
            with run_parts.with_resume_hint(out), run_context(recipe, run, console, world, draw=draw) as context:
                return execute_parts(context, prepared)
        except (ValueError, OutOfMemory) as error:  # UserError is a ValueError
            if world.is_main:
                run_parts.discard_failed_run(out, console, error)
            raise


def _open_run(
    path: Path, world: ProcessMesh, quiet: bool, verbose: bool, notes: Sequence[str]
) -> tuple[run_directory.RunDirectory, Console]:
    run = run_directory.RunDirectory(path, writes=world.is_main)
    console = Console(quiet=quiet or not world.is_main, verbose=verbose, log=run.log)
    for line in notes:
        console.say(line)
    return run, console


def _build_manifest(recipe: Recipe, prepared: PreparedData) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "inputs": describe_files(list_input_files(recipe)),
        "backbone": {},
        **build_label_record(prepared),
        "ends": {},
    }
    if recipe.task.traits.is_generative:
        tokenizer = open_backbone(recipe.backbone).tokenizer
        manifest["ends"] = find_end_tokens(prepared.train, tokenizer, max_length=recipe.train.max_length)
    if (template := recipe.task.input_format.template_record()) is not None:
        manifest["chat_template"] = template
    if prepared.mixture is not None:
        manifest["sources"] = mixture_record(prepared.mixture)
    manifest["checks"] = build_check_record(prepared)
    if adapters := run_parts.check_start_adapters(recipe):
        manifest["adapters"] = adapters
    return manifest


@contextmanager
def _join_mesh(recipe: Recipe, *, path: Path) -> Iterator[ProcessMesh]:
    world = spawn.join_mesh(recipe.mesh, recipe.train.device)
    consistency.check_ranks_agree(world, consistency.collect_job_facts(recipe, run=str(path)))
    with watchdog.no_progress_timeout("preparing"):
        yield world
    spawn.destroy_process_group(world)


def resume(
    path: Path,
    overrides: Sequence[Branch] = (),
    *,
    quiet: bool = False,
    verbose: bool = False,
    draw: Draw | None = None,
) -> dict[str, Any]:
    """Resume a run directory exactly where it stopped; a finished one returns at once.

    verbose: as in `train`. draw: draws the page of the finished run, or of one that has none.
    Raises UserError if `path` is no run directory or in use, an input file or the backbone changed, or an override is
    not allowed.
    """
    requested = resume_recipe(path, overrides)
    before = resume_recipe(path).recipe
    check_recipe(requested.recipe)
    run_parts.check_evaluation_changes(path, requested.recipe, before)
    notes: list[str] = []
    with (
        _join_mesh(requested.recipe, path=path) as world,
        exclusive_lock(path, alternative="") if world.is_main else nullcontext(),
    ):
        resolved = resolve_auto(requested, log=notes.append)
        recipe = resolved.recipe
        # The recipe was read before the lock was held: another command may have changed it since.
        if world.is_main:
            if resume_recipe(path, overrides).recipe != requested.recipe:
                raise UserError(f"{path} was changed by another command this moment; run this one again")
            run_directory.RunDirectory.open(path)  # repairs files that a killed process left truncated
        world.wait()
        run_parts.check_steps_not_reduced(path, recipe.train.steps)
        run, console = _open_run(path, world, quiet, verbose, notes)
        if run_parts.is_finished(path, recipe, before, with_page=draw is not None):
            run_parts.check_finished(path)
            result = read_json_object(path / "eval.json")
            console.say(f"{path} is finished: nothing to do")
            return result
        if (note := _describe_schedule_change(recipe, before, path)) is not None:
            console.say(note)
        if world.is_main:  # it alone reads all weights; the other ranks rely on it
            check_files(path)
            run_parts.check_last_checkpoint(path, recipe.train.steps)
            run_parts.check_backbone(path, recipe)
            run_parts.check_inputs_unchanged(path, list_input_files(recipe))
            run_parts.check_adapters_unchanged(path, read_json_object(path / "manifest.json").get("adapters", {}))
            (path / DONE).unlink(missing_ok=True)  # it certifies a finished run
            fsync_directory(path)  # before any file that it lists changes
            write_text(path / "recipe.resolved.yaml", resolved.to_yaml())
            run_directory.add_provenance(path)
        world.wait()
        prepared = prepare_data(recipe)
        if world.is_main and recipe.task != before.task:  # the classes to be ranked
            write_json(path / "manifest.json", read_json_object(path / "manifest.json") | build_label_record(prepared))
        with run_parts.with_resume_hint(path), run_context(recipe, run, console, world, draw=draw) as context:
            return execute_parts(context, prepared)


def _describe_schedule_change(recipe: Recipe, before: Recipe, path: Path) -> str | None:
    done, steps = run_parts.count_steps_done(path), recipe.train.steps
    if steps == before.train.steps or (path / "stages" / run_parts.FINE_TUNE / DONE).is_file() or done >= steps:
        return None
    was, now = (learning_rate(done, steps=r.train.steps, optimizer=recipe.optimizer) for r in (before, recipe))
    return (
        f"learning rate: that of a run of {steps:,} steps from step {done + 1:,} on, {now:.3g} instead of "
        f"{was:.3g} (train.extend is of runs that have ended)"
    )


def execute_parts(context: RunContext, prepared: PreparedData) -> dict[str, Any]:
    """Run every unfinished part; returns eval.json. Collective: every rank of a mesh calls this."""
    recipe, path = context.recipe, context.run.path
    started = time.monotonic()
    context.console.outline(format_data_checks(prepared), format_data_checks(prepared, whole=True))
    previous = None
    if recipe.warmup is not None:
        if recipe.selection is not None:
            _select(context)
        previous = _warm_up(context)
    plan = StagePlan(run_parts.FINE_TUNE, recipe.task, prepared, recipe.optimizer, recipe.train, previous)
    with open_stage(context, plan) as stage:
        if stage.trainer is not None:
            stage.result = stage.trainer.fit()
    result = _evaluate(context, prepared, stage)
    if context.world.is_main:
        write_json(path / "timings.json", {"seconds": round(time.monotonic() - started, 2)})
    if context.world.is_main and not context.cell:  # a cell is covered by the record of its sweep
        write_json(path / DONE, {FILES: run_parts.compute_run_checksums(path)})
        if context.draw is not None:
            context.console.say(f"report: {context.draw(path)}")
    return result


def _select(context: RunContext) -> None:
    recipe = context.recipe
    assert recipe.select is not None
    finished = recipe.select.from_
    directory = context.run.path / "selection"
    if context.world.is_main and not (directory / "manifest.json").is_file():
        # Steps and mesh may change on resume, so the whole recipe cannot identify the selection.
        identity = yaml.safe_dump({"seed": recipe.train.seed, "select": dataclasses.asdict(recipe.select)})
        with (
            run_directory.disk_full_interrupts(f"selecting into {directory}"),
            open_resumable(directory, identity, command=f"`{run_directory.resume_command(context.run.path)}`") as work,
        ):
            if finished is None:
                select_into(recipe, work.directory, context.console, state=work.state)
            else:
                copy_recorded_files(Path(finished), work.directory)
                made = read_json_object(work.directory / "manifest.json", "selection")["selection"]
                readings = f" in {made['budget']:,} readings" if "distinct" in made else ""
                records = made.get("distinct", made["budget"])
                context.console.say(f"selection: {records:,} records{readings}, taken over from {finished}")
    context.world.wait()


def _warm_up(context: RunContext) -> Path:
    recipe, world = context.recipe, context.world
    assert recipe.warmup is not None
    warmup, folder = recipe.warmup, context.run.path / "selection"
    task, reason = warm_up_task(recipe)
    context.console.say(f"warm-up: {task.kind}, {reason}")
    check_settings(RuleSettings(recipe.mesh, recipe.train, recipe.adapter, task))
    columns, files = recipe.data.columns, []
    if (selection := recipe.selection) is not None:
        check_files(folder)
        columns, files = selection.columns, [str(folder / "selected.jsonl")]
    own = _read_own_texts(recipe, context.console) if warmup.own else ()
    prepared = prepare_warm_up_data(recipe, files, columns, task, own)
    settings: dict[str, Any] = {name: getattr(warmup, name) for name in ("steps", "batch_size", "accumulate")}
    settings["group"] = None if task.pack else recipe.train.group
    train = dataclasses.replace(recipe.train, eval_every=0, best="auto", patience=None, **settings)
    plan = StagePlan(run_parts.WARM_UP, task, prepared, dataclasses.replace(recipe.optimizer, lr=warmup.lr), train)
    with open_stage(context, plan) as stage:
        if stage.trainer is not None:
            stage.result = stage.trainer.fit()
    # A sweep cell needs only its own figure; before is the same for all of them.
    for name in ("eval",) if context.cell else ("eval", "before"):
        path = context.run.path / "stages" / run_parts.WARM_UP / f"{name}.json"
        if not path.is_file():
            splits = ("test",) if context.cell else ("dev", "test")
            adapter, model = (stage.adapter, stage.model) if name == "eval" else (None, None)
            figures = build.evaluate_perplexity(
                recipe, adapter, task=task, splits=splits, world=world, model=model, watch=context.watch
            )
            if world.is_main:
                write_json(path, figures)
            world.wait()
        model = stage.model = None  # memory may not hold two
    return stage.adapter


def _read_own_texts(recipe: Recipe, console: Console) -> Sequence[Row]:
    """Return the texts that a selection has as its target, without blank ones; no evaluation row is among them."""
    records, _ = read_target(recipe, console)
    files = recipe.select.target.files if recipe.select is not None else ()
    texts = drop_blank_texts(records, files or recipe.data.train.all_files, "target").rows
    if blank := len(records.rows) - len(texts):
        console.say(f"warm-up: {blank:,} blank texts of the target are left out")
    return texts


def _evaluate(context: RunContext, prepared: PreparedData, stage: OpenStage) -> dict[str, dict[str, Any]]:
    recipe, world, path = context.recipe, context.world, context.run.path
    engine, tokenizer = stage.model or build.load_model(
        recipe, recipe.task, prepared.label_names, world=world, adapter=stage.adapter
    )
    if world.is_main:
        (path / "eval.json").unlink(missing_ok=True)  # from an earlier adapter or other settings
    # The trained head predicts normalised targets; the saved one predicts in the units of the data.
    fold_units(engine.parameters, prepared.units)
    engine.save_adapter(path / "adapter")
    finished = None if context.cell or world.size > 1 else build.FinishedSplits.open(path, recipe)
    is_asked = run_parts.answers_in_text(recipe.task) and recipe.adapter.projector is None and not context.cell
    with watchdog.no_progress_timeout("evaluating"):
        result = build.evaluate_splits(
            recipe, engine, tokenizer, prepared, context.console, watch=context.watch, finished=finished,
            predictions=None if context.cell else path / "predictions.parquet",
            answers=recipe.eval.answers if is_asked and world.size == 1 else 0,
        )  # fmt: skip
        if context.probe is not None:
            context.probe.on_evaluation(recipe, engine, tokenizer, prepared)
    if world.is_main and not recipe.eval.cold:  # from an earlier evaluation
        for name in (build.COLD, build.COLD_ROWS):
            (path / name).unlink(missing_ok=True)
    new_head = recipe.task.traits.is_sequence_level or bool(getattr(engine.peft.get_base_model(), "new_parameters", ()))
    if recipe.eval.cold and (new_head or recipe.adapter.soft_tokens is not None):
        context.console.say("eval.cold: without its trained head or soft tokens this backbone has nothing to evaluate")
    elif recipe.eval.cold and not context.cell:
        del engine, stage.model  # memory may not hold two models
        if finished is None or finished.read("cold") is None:
            base, tokenizer = build.load_model(recipe, recipe.task, prepared.label_names, world=world)
            with watchdog.no_progress_timeout("evaluating the base model"):
                cold = build.evaluate_base_model(recipe, base, tokenizer, prepared, path, watch=context.watch)
            for split, metrics in cold.items():
                rows = max(metric.get("n", 0) for metric in metrics.values())
                context.console.say(
                    f"backbone alone, {rows:,} rows of {split}: {', '.join(build.format_metrics(metrics))}"
                )
            if finished is not None:
                finished.add("cold", cold)
    if world.is_main:
        write_json(path / "eval.json", result)
    if finished is not None:
        finished.delete()
    world.wait()
    return result
