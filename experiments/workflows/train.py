"""The training workflow: select → warm-up → fine-tune → evaluate → report, into one run directory.

    flatshift train warmup --out runs/first
    flatshift train --resume runs/first

Each part leaves a marker when finished, so that `resume` continues after the last one; inside a stage the loop resumes
from its newest checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from flatshift.experiments.data.lengths import (
    check_memory,
    check_positions,
    find_longest_length,
    format_evaluation_plan,
)
from flatshift.experiments.data.sources import (
    check_strict_sources,
    count_source_epochs,
    epochs_to_steps,
    format_padding,
    format_source_epochs,
    mixture_record,
)
from flatshift.experiments.data.splits import (
    PreparedData,
    build_check_record,
    build_label_record,
    choose_recording,
    format_data_checks,
    noise_record,
    prepare_data,
    prepare_warm_up_data,
    sample_split_warning,
)
from flatshift.experiments.recipe import Resolved, resume_recipe
from flatshift.experiments.recipe.auto import resolve_auto
from flatshift.experiments.recipe.resolve import describe_held_out_rows, read_template_file
from flatshift.experiments.recipe.rules import check_recipe
from flatshift.experiments.recipe.schema import Recipe, warm_up_task
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console, Draw, ProgressBar
from flatshift.experiments.run.resumable_directory import open_resumable
from flatshift.experiments.select.select import select_into
from flatshift.experiments.select.target import check_target
from flatshift.experiments.workflows.build import (
    COLD,
    COLD_ROWS,
    FinishedSplits,
    LoadedModel,
    evaluate_base_model,
    evaluate_perplexity,
    evaluate_splits,
    format_metrics,
    load_model,
    skipped_rows_summary,
)
from flatshift.experiments.workflows.context import RunContext, run_context
from flatshift.experiments.workflows.initial_adapter import (
    check_backbone,
    check_start_adapters,
    has_custom_init,
    initial_adapter,
    save_initial_adapter,
)
from flatshift.experiments.workflows.run_parts import (
    FINE_TUNE,
    WARM_UP,
    check_evaluation_changes,
    check_finished,
    check_inputs_unchanged,
    check_last_checkpoint,
    check_steps_not_reduced,
    compute_run_checksums,
    count_steps_done,
    discard_failed_run,
    is_finished,
    list_input_files,
    with_resume_hint,
)
from flatshift.finetune.atomic import fsync_directory, read_json_object, write_json, write_text
from flatshift.finetune.config import Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import find_end_tokens
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.data.labels import fold_units
from flatshift.finetune.data.panel import format_first_batch
from flatshift.finetune.digests import DONE, FILES, check_files, copy_recorded_files
from flatshift.finetune.errors import OutOfMemory, UserError
from flatshift.finetune.figures import compare_plan, format_duration, format_throughput
from flatshift.finetune.launch import consistency, spawn, watchdog
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.planner.capacity import Capacity, bits_per_label
from flatshift.finetune.planner.devices import Cluster
from flatshift.finetune.planner.layouts import step_seconds
from flatshift.finetune.planner.memory import condense_plan, memory_plan, mesh_plan_lines, plan_lines, token_seconds
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.planner.sizes import BackboneSizes
from flatshift.finetune.planner.throughput import find_device
from flatshift.finetune.run_directory import (
    RunDirectory,
    add_provenance,
    check_replaceable,
    disk_full_interrupts,
    resume_command,
)
from flatshift.finetune.seeds import derive_seed
from flatshift.finetune.tasks import Task
from flatshift.finetune.train.peak_memory import PlannedStep
from flatshift.finetune.train.schedule import Schedule, learning_rate
from flatshift.finetune.train.stage import StageResult, TrainingStage, check_length
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import build as build_regularizer

_LOOKED_AT = 5
"""Updates whose tokens are counted for an estimate of time."""
LABEL_NOISE, PREDICTIONS = "label_noise.json", "predictions.parquet"


def train(
    resolved: Resolved,
    out: Path | None = None,
    *,
    quiet: bool = False,
    verbose: bool = False,
    draw: Draw | None = None,
) -> dict[str, Any]:
    """Run a recipe into a new run directory and return its eval.json.

    out: directory to create, by default `runs/DATE-TIME-NAME`. verbose: print plan and first batch in full, as in
    log.txt. draw: draws the page of the finished run.
    Raises UserError for bad input before anything is trained, Interrupted when stopped with resumable state.
    """
    check_recipe(resolved.recipe)
    said: list[str] = []
    with ExitStack() as stack:
        if out is None:
            out = stack.enter_context(consistency.dated_directory("runs", resolved.name))
        world = stack.enter_context(_join_mesh(resolved.recipe, path=out))
        stack.enter_context(_lock_run(out, world))
        if world.is_main:
            check_replaceable(out, resumable=True)
        # All input errors are found before the directory exists.
        resolved = resolve_auto(resolved, log=said.append)
        recipe = resolved.recipe
        check_positions(recipe)
        prepared = prepare_data(recipe)
        counted = epochs_to_steps(resolved, prepared.train, seed=derive_seed(recipe.train.seed, FINE_TUNE))
        if counted is not resolved:
            resolved, recipe = counted, counted.recipe
            if prepared.mixture is not None:  # of one source its line before step 1 has both
                said.append(f"steps: {recipe.train.steps:,} ({resolved.origins['train.steps']})")
        check_strict_sources(recipe, prepared.train, prepared.mixture, seed=derive_seed(recipe.train.seed, FINE_TUNE))
        check_memory(recipe, prepared.train)
        said += [*describe_held_out_rows(resolved), *sample_split_warning(recipe)]
        if recipe.regularizer.kind != "plain":
            said.append(
                f"regularizer: {recipe.regularizer.kind} ({resolved.origins.get('regularizer.kind', 'default')})"
            )
        if recipe.select is not None and recipe.select.from_ is not None:
            check_files(Path(recipe.select.from_))
        check_target(recipe, prepared.skipped)
        manifest = _build_manifest(recipe, prepared)
        if world.is_main:
            manifest["backbone"] = open_backbone(recipe.backbone).record
            RunDirectory.create(
                out, recipe_yaml=resolved.to_yaml(), manifest=manifest, texts=read_template_file(recipe)
            )
        world.wait()
        run = RunDirectory(out, writes=world.is_main)
        console = Console(quiet=quiet or not world.is_main, verbose=verbose, log=run.log)
        for line in said:
            console.say(line)
        try:
            with with_resume_hint(out), run_context(recipe, run, console, world, draw=draw) as context:
                return execute_parts(context, prepared)
        except (ValueError, OutOfMemory):  # UserError is a ValueError
            if world.is_main:
                discard_failed_run(run.path, console)
            raise


def _build_manifest(recipe: Recipe, prepared: PreparedData) -> dict[str, Any]:
    """Return manifest.json: the run's inputs and the facts derived from them, such as classes; the caller adds the
    backbone."""
    manifest: dict[str, Any] = {
        "inputs": describe_files(list_input_files(recipe)),
        "backbone": {},
        **build_label_record(prepared),
    }
    tokenizer = open_backbone(recipe.backbone).tokenizer
    length = recipe.train.max_length
    manifest["ends"] = (
        find_end_tokens(prepared.train, tokenizer, max_length=length) if recipe.task.traits.is_generative else {}
    )
    if (template := recipe.task.input_format.template_record()) is not None:
        manifest["chat_template"] = template
    if prepared.mixture is not None:
        manifest["sources"] = mixture_record(prepared.mixture)
    manifest["checks"] = build_check_record(prepared)
    if adapters := check_start_adapters(recipe):
        manifest["adapters"] = adapters
    return manifest


def _lock_run(path: Path, world: ProcessMesh, **refusal: str) -> AbstractContextManager[None]:
    """Lock a run's directory, on the main rank for all."""
    return exclusive_lock(path, **refusal) if world.is_main else nullcontext()


@contextmanager
def _join_mesh(recipe: Recipe, *, path: Path) -> Iterator[ProcessMesh]:
    """Join the recipe's mesh, agreed with the other ranks; yields this process's position, and leaves the mesh at the
    end."""
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
    resolved = found = resume_recipe(path, overrides)
    before = resume_recipe(path).recipe
    check_recipe(resolved.recipe)
    check_evaluation_changes(path, resolved.recipe, before)
    said: list[str] = []
    with _join_mesh(resolved.recipe, path=path) as world, _lock_run(path, world, alternative=""):
        resolved = resolve_auto(resolved, log=said.append)
        # The recipe was read before the lock was held: another command may have changed it since.
        if world.is_main:
            if resume_recipe(path, overrides).recipe != found.recipe:
                raise UserError(f"{path} was changed by another command this moment; run this one again")
            RunDirectory.open(path)  # repairs files that a killed process left truncated
        world.wait()
        check_steps_not_reduced(path, resolved.recipe.train.steps)
        run = RunDirectory(path, writes=world.is_main)
        console = Console(quiet=quiet or not world.is_main, verbose=verbose, log=run.log)
        for line in said:
            console.say(line)
        if is_finished(run.path, resolved.recipe, before, drawn=draw is not None):
            check_finished(run.path)
            result = read_json_object(run.path / "eval.json")
            console.say(f"{path} is finished: nothing to do")
            return result
        check_inputs_unchanged(run.path)
        if (stretched := _describe_schedule_change(resolved.recipe, before, run.path)) is not None:
            console.say(stretched)
        if world.is_main:  # it alone reads all weights; the other ranks rely on it
            check_files(run.path)
            check_last_checkpoint(run.path, resolved.recipe.train.steps)
            check_backbone(run.path, resolved.recipe)
            (run.path / DONE).unlink(missing_ok=True)  # it certifies a finished run
            fsync_directory(run.path)  # before any file that it lists changes
            write_text(run.path / "recipe.resolved.yaml", resolved.to_yaml())
            add_provenance(run.path)
        world.wait()
        prepared = prepare_data(resolved.recipe)
        if world.is_main and resolved.recipe.task != before.task:  # the classes to be ranked
            write_json(path / "manifest.json", read_json_object(path / "manifest.json") | build_label_record(prepared))
        with with_resume_hint(path), run_context(resolved.recipe, run, console, world, draw=draw) as context:
            return execute_parts(context, prepared)


def _describe_schedule_change(recipe: Recipe, before: Recipe, path: Path) -> str | None:
    """Return a sentence on the learning rate of an unfinished run whose number of steps changes."""
    made, steps = count_steps_done(path), recipe.train.steps
    if steps == before.train.steps or (path / "stages" / FINE_TUNE / DONE).is_file() or made >= steps:
        return None
    was, now = (learning_rate(made, steps=one.train.steps, optimizer=recipe.optimizer) for one in (before, recipe))
    return (
        f"learning rate: that of a run of {steps:,} steps from step {made + 1:,} on, {now:.3g} instead of "
        f"{was:.3g} (train.extend is of runs that have ended)"
    )


def execute_parts(context: RunContext, prepared: PreparedData) -> dict[str, Any]:
    """Run every unfinished part; returns eval.json. Collective: every rank of a mesh calls this."""
    run = context.run
    started = time.monotonic()
    context.console.outline(format_data_checks(prepared), format_data_checks(prepared, whole=True))
    warmed = None
    if context.recipe.warmup is not None:
        _select(context)
        warmed = _warm_up(context)
    with open_stage(context, build_fine_tune_plan(context.recipe, prepared, previous=warmed)) as stage:
        if stage.trainer is not None:
            stage.result = stage.trainer.fit()
    result = _evaluate(context, prepared, stage)
    if context.world.is_main:
        write_json(run.path / "timings.json", {"seconds": round(time.monotonic() - started, 2)})
    if context.world.is_main and not context.cell:
        write_json(
            run.path / DONE, {FILES: compute_run_checksums(run.path)}
        )  # a cell is covered by the record of its sweep
        if context.draw is not None:
            context.console.say(f"report: {context.draw(run.path)}")
    return result


def _select(context: RunContext) -> None:
    """Choose the warm-up data, or copy an existing selection, on the main rank; the others wait."""
    recipe = context.recipe
    assert recipe.select is not None
    finished = recipe.select.from_
    directory = context.run.path / "selection"
    if context.world.is_main and not (directory / "manifest.json").is_file():
        # Steps and mesh may change on resume, so the whole recipe cannot identify the selection.
        about = yaml.safe_dump({"seed": recipe.train.seed, "select": dataclasses.asdict(recipe.select)})
        with (
            disk_full_interrupts(f"selecting into {directory}"),
            open_resumable(directory, about, command=f"`{resume_command(context.run.path)}`") as work,
        ):
            if finished is None:
                select_into(recipe, work.directory, context.console, state=work.state)
            else:
                copy_recorded_files(Path(finished), work.directory)
                context.console.say(f"selection: {recipe.select.budget:,} records, taken over from {finished}")
    context.world.wait()


def _warm_up(context: RunContext) -> Path:
    """Train on the language of the selection; returns the adapter that fine-tuning continues."""
    recipe, world = context.recipe, context.world
    assert recipe.warmup is not None
    warmup, folder = recipe.warmup, context.run.path / "selection"
    task, reason = warm_up_task(recipe)
    context.console.say(f"warm-up: {task.kind}, {reason}")
    check_settings(RuleSettings(recipe.mesh, recipe.train, recipe.adapter, task))
    columns = recipe.select.columns if recipe.select is not None else recipe.data.columns
    check_files(folder)
    plan = StagePlan(
        name=WARM_UP,
        task=task,
        prepared=prepare_warm_up_data(recipe, [str(folder / "selected.jsonl")], columns, task),
        optimizer=dataclasses.replace(recipe.optimizer, lr=warmup.lr),
        train=dataclasses.replace(
            recipe.train,
            steps=warmup.steps,
            batch_size=warmup.batch_size,
            accumulate=warmup.accumulate,
            eval_every=0,
            best="auto",
            patience=None,
            group=None if task.pack else recipe.train.group,
        ),
    )
    with open_stage(context, plan) as stage:
        if stage.trainer is not None:
            stage.result = stage.trainer.fit()
    # A sweep cell needs only its own figure; before is the same for all of them.
    for name in ("eval",) if context.cell else ("eval", "before"):
        path = context.run.path / "stages" / WARM_UP / f"{name}.json"
        if not path.is_file():
            only = ("test",) if context.cell else ("dev", "test")
            adapter, model = (stage.adapter, stage.model) if name == "eval" else (None, None)
            figures = evaluate_perplexity(
                recipe, adapter, task=task, only=only, world=world, model=model, watch=context.watch
            )
            if world.is_main:
                write_json(path, figures)
            world.wait()
        model = stage.model = None  # memory may not hold two
    return stage.adapter


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Task, data and settings of a stage; everything else is in its run's `RunContext`."""

    name: str
    task: Task
    prepared: PreparedData
    optimizer: Optimizer
    train: Train
    previous: Path | None = None
    """Adapter of the previous stage, which this one continues."""


def build_fine_tune_plan(recipe: Recipe, prepared: PreparedData, previous: Path | None = None) -> StagePlan:
    """Return the plan of the recipe's own stage, on its own task."""
    return StagePlan(
        name=FINE_TUNE,
        task=recipe.task,
        prepared=prepared,
        optimizer=recipe.optimizer,
        train=recipe.train,
        previous=previous,
    )


@dataclass
class OpenStage:
    """A stage between `open_stage` and its end."""

    adapter: Path
    trainer: Trainer | None = None
    """None where the stage is finished already."""
    result: StageResult | None = None
    """To be set by whoever calls `trainer.fit`."""
    model: LoadedModel | None = None
    """Engine and tokenizer after the stage, for one more use of the loaded base model; None where the stage was
    finished before, or where the adapter's initial values changed the frozen weights (`has_custom_init`)."""


@contextmanager
def open_stage(context: RunContext, plan: StagePlan) -> Iterator[OpenStage]:
    """Load model and data of a stage; the body calls `trainer.fit`; report and free the optimizer's memory afterwards.

    A context manager, so that the training loop runs in the caller's frame.
    """
    recipe, console, path = context.recipe, context.console, context.run.path
    adapter, done = (path / "stages" / plan.name / name for name in ("adapter", DONE))
    if done.is_file() and read_json_object(done, "target_steps")["target_steps"] == plan.train.steps:
        yield OpenStage(adapter)
        return
    schedule = Schedule.of(plan.train, plan.optimizer, path / "stages" / plan.name)
    if schedule.begin:
        console.say(schedule.line())
    begins = initial_adapter(path, recipe, plan.task, plan.prepared, lambda: open_backbone(recipe.backbone).tokenizer)
    engine, tokenizer = load_model(
        recipe,
        plan.task,
        plan.prepared.label_names,
        world=context.world,
        say=console.say,
        beginning=begins,
    )
    if plan.previous is not None:
        engine.load_adapter(plan.previous, partial=True)
    else:
        save_initial_adapter(path, recipe, engine, console.say)
    settings = build_training_stage(context, plan, engine, tokenizer)
    with console.task(plan.name, plan.train.steps, "steps") as bar:
        settings = dataclasses.replace(settings, on_step=_make_step_callback(context, plan, bar))
        stage = OpenStage(adapter, Trainer(engine, tokenizer, settings))
        yield stage
    stage.trainer, result = None, stage.result
    assert result is not None
    if context.world.is_main and (beside := compare_plan(read_json_object(done).get("plan") or {})):
        console.detail(f"{plan.name}: {beside}")
    if result.skipped or result.rewinds:
        console.say(
            f"{plan.name}: {result.skipped} steps were skipped, {result.rewinds} spikes rolled back (log.txt has them)"
        )
    gc.collect()  # the optimizer's state is held by cycles of hooks
    stage.model = None if has_custom_init(recipe.adapter) else (engine, tokenizer)


def _make_step_callback(context: RunContext, plan: StagePlan, bar: ProgressBar) -> Callable[[dict[str, Any]], None]:
    """Return the callback that reports a step's row to the progress bar and the probe."""
    rate = ""

    def on_step(line: dict[str, Any]) -> None:
        nonlocal rate
        rate = format_throughput(line) or rate
        loss = "left out" if line.get("skipped") else f"loss {line['loss']:.3f}"
        bar(line["step"], ", ".join(filter(None, [loss, rate])))
        if context.probe is not None and plan.name == FINE_TUNE:
            context.probe.step(line)

    return on_step


def build_training_stage(context: RunContext, plan: StagePlan, engine: Engine, tokenizer: Any) -> TrainingStage:
    """Build the training loop's stage, and report its data, memory and first batch before step 1."""
    recipe, prepared, task, train = context.recipe, plan.prepared, plan.task, plan.train
    say, last = context.console.say, plan.name == FINE_TUNE
    seed = derive_seed(train.seed, plan.name)
    batches = TrainingDataLoader(
        prepared.train,
        task=task,
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        seed=seed,
        max_length=train.max_length,
        pad_id=tokenizer.pad_token_id,
        share=engine.share,
        multiple=train.max_length if train.compile else engine.multiple,  # one shape, so that one graph is compiled
        mixture=prepared.mixture,
        group=train.group,
        masking=task.masking(tokenizer),
    )
    check_length(engine, batches)
    told = count_source_epochs(batches, prepared.mixture, train.steps)
    for line in format_source_epochs(told, train.steps, approximate=batches.packed):
        say(line)
    context.console.detail(format_padding(batches, train))
    for line in skipped_rows_summary(prepared, train.max_length):
        say(line)
    if prepared.flipped:
        say(f"label noise: {len(prepared.flipped):,} of {len(prepared.train):,} training labels replaced")
    planned, foretold, read = None, list[str](), task.traits.count_token_rows(train)
    if not batches.packed and not train.compile:  # rows are padded only to the longest of their batch
        read = dataclasses.replace(read, max_length=min(train.max_length, find_longest_length(prepared.train)))
    if engine.world.size == 1:
        kind, regularizer = plan.optimizer.kind, recipe.regularizer
        memory = memory_plan(engine.model, train=read, kind=kind, task=task, regularizer=regularizer)
        if not context.cell:  # of a cell nobody reads it
            planned = PlannedStep(memory, _predict_step_seconds(recipe, task, train, engine, batches))
        fits = plan_lines(engine.model, train=read, optimizer=plan.optimizer, plan=memory)
        if planned is not None and planned.seconds is not None:
            of = "of the longest rows, by the model of `flatshift plan`"
            count = "one step" if train.steps == 1 else f"{train.steps:,} steps"
            foretold = [
                f"  about {format_duration(train.steps * planned.seconds)}: {count} of "
                f"{format_duration(planned.seconds)}, "
                f"{of if engine.device.type == 'cuda' else 'one row was timed'}"
            ]
    else:
        fits = mesh_plan_lines(engine, mesh=recipe.mesh, train=read, optimizer=plan.optimizer)
    context.console.outline([*condense_plan(fits), *foretold], [*fits, *foretold])
    if last and not context.cell:
        judged = format_evaluation_plan(
            recipe,
            {"train": prepared.train, "dev": prepared.dev, "test": prepared.test},
            classes=len(prepared.label_names or ()),
            device=engine.device.type,
            share=engine.share[1],
            seconds=None if planned is None else planned.seconds,
        )
        if judged is not None:
            say(judged)
    _report_capacity(context, plan, engine, batches)
    if last and prepared.flipped and engine.is_main:
        write_json(context.run.path / LABEL_NOISE, noise_record(recipe, prepared))
    fresh = getattr(engine.peft.get_base_model(), "new_parameters", ())
    if fresh and not task.traits.is_sequence_level:
        say(
            f"the backbone's checkpoint has no masked-LM head: its transform is drawn by train.seed and trains whole, "
            f"its bias stays 0 ({', '.join(fresh)})"
        )
    first, units = batches.at(0)[0], prepared.units
    panel = functools.partial(format_first_batch, first, tokenizer, task, label_names=prepared.label_names, units=units)
    context.console.outline([panel(samples=1, width=240)], [panel()])
    return TrainingStage(
        name=plan.name,
        task=task,
        batches=batches,
        dev=prepared.dev if last else [],
        optimizer=plan.optimizer,
        train=train,
        evaluate=recipe.eval,
        label_names=prepared.label_names,
        regularizer=build_regularizer(recipe.regularizer),
        run=context.run,
        seed=seed,
        recording=choose_recording(recipe, prepared) if last else None,
        stop=context.stop,
        track=context.trackers.log,
        peak_tflops=context.peak_tflops,
        plan=planned,
        log=say,
    )


def _report_capacity(context: RunContext, plan: StagePlan, engine: Engine, batches: TrainingDataLoader) -> None:
    """Report the capacity of the adapter compared with the information in the stage's labels.

    Always in the log; on the console if the adapter has less. Only for ranks with whole tensors, which know its size.
    """
    names, mesh = plan.prepared.label_names, context.recipe.mesh
    each = bits_per_label(plan.task, None if names is None else len(names))
    if each is None or mesh.tp * mesh.pp > 1:
        return
    found = Capacity.of(
        engine.parameters,
        rank=context.recipe.adapter.rank,
        labels=batches.labels(plan.train.steps),
        each=each,
        counted=plan.task.loss_denominator,
    )
    context.console.outline([found.line()] if found.ratio < 1 else [], [found.line()])


def _predict_step_seconds(
    recipe: Recipe, task: Task, train: Train, engine: Engine, batches: TrainingDataLoader
) -> float | None:
    """Predicted for one CUDA device whose figures are known, and timed on a CPU; None elsewhere, and for a graph, which
    is compiled for its own rows."""
    if engine.device.type != "cuda":
        if train.compile:
            return None
        steps = min(train.steps, _LOOKED_AT)
        computed = batches.tokens(steps)[1] / steps
        longest = min(train.max_length, round(computed / train.accumulate))
        return computed * token_seconds(engine.model, longest, train)
    about = torch.cuda.get_device_properties(engine.device)
    name = find_device(about.name, about.total_memory)
    if name is None:
        return None
    cluster = Cluster.parse(f"1x{name}")
    sizes = BackboneSizes.read(open_backbone(recipe.backbone).directory, recipe.adapter).under(task)
    return step_seconds(sizes, cluster, RuleSettings(recipe.mesh, train, recipe.adapter, task))


def _evaluate(context: RunContext, prepared: PreparedData, trained: OpenStage) -> dict[str, dict[str, Any]]:
    """Judge the chosen adapter on every split and write adapter/ and eval.json at the top of the run."""
    recipe, world = context.recipe, context.world
    engine, tokenizer = trained.model or load_model(
        recipe, recipe.task, prepared.label_names, world=world, adapter=trained.adapter
    )
    if world.is_main:
        (context.run.path / "eval.json").unlink(missing_ok=True)  # from an earlier adapter or other settings
    # The trained head predicts normalised targets; the saved one predicts in the units of the data.
    fold_units(engine.parameters, prepared.units)
    engine.save_adapter(context.run.path / "adapter")
    finished = None if context.cell or world.size > 1 else FinishedSplits.at(context.run.path, recipe)
    with watchdog.no_progress_timeout("evaluating"):
        keep = None if context.cell else context.run.path / PREDICTIONS
        result = evaluate_splits(
            recipe, engine, tokenizer, prepared, context.console, watch=context.watch, keep=keep, finished=finished
        )
        if context.probe is not None:
            context.probe.judged(recipe, engine, tokenizer, prepared)
    if world.is_main and not recipe.eval.cold:  # from an earlier evaluation
        for name in (COLD, COLD_ROWS):
            (context.run.path / name).unlink(missing_ok=True)
    if recipe.eval.cold and (recipe.task.traits.has_new_head or recipe.adapter.soft_tokens is not None):
        context.console.say("eval.cold: without its trained head or soft tokens this backbone has nothing to evaluate")
    elif recipe.eval.cold and not context.cell:
        del engine, trained.model  # memory may not hold two models
        if finished is None or finished.read("cold") is None:
            cold, tokenizer = load_model(recipe, recipe.task, prepared.label_names, world=world)
            with watchdog.no_progress_timeout("evaluating the base model"):
                found = evaluate_base_model(recipe, cold, tokenizer, prepared, context.run.path, watch=context.watch)
            for split, metrics in found.items():
                rows = max(metric.get("n", 0) for metric in metrics.values())
                context.console.say(f"backbone alone, {rows:,} rows of {split}: {', '.join(format_metrics(metrics))}")
            if finished is not None:
                finished.add("cold", found)
    if world.is_main:
        write_json(context.run.path / "eval.json", result)
    if finished is not None:
        finished.drop()
    world.wait()
    return result
