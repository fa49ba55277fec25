"""Context of a run, one object passed from the command to the training loop, and the stages that train in it."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from flatshift.experiments.data.lengths import find_longest_length, format_evaluation_plan
from flatshift.experiments.data.sources import count_source_epochs, format_padding, format_source_epochs
from flatshift.experiments.data.splits import PreparedData, choose_recording, noise_record
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.run.console import Console, Draw, ProgressBar, catch_stop_signals
from flatshift.experiments.workflows.build import LoadedModel, load_model, skipped_rows_summary
from flatshift.experiments.workflows.run_parts import FINE_TUNE, has_custom_init, initial_adapter, save_initial_adapter
from flatshift.finetune.atomic import read_json_object, write_json
from flatshift.finetune.compute.cuda_status import resolve_device
from flatshift.finetune.compute.matmul_rate import peak_rate
from flatshift.finetune.compute.memory import core_wait_s
from flatshift.finetune.compute.numerics import cpu_threads
from flatshift.finetune.config import Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.panel import format_first_batch
from flatshift.finetune.digests import DONE
from flatshift.finetune.figures import compare_plan, format_duration, format_throughput
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.planner.capacity import Capacity, bits_per_label
from flatshift.finetune.planner.devices import Cluster
from flatshift.finetune.planner.footprint import step_passes
from flatshift.finetune.planner.layouts import step_seconds
from flatshift.finetune.planner.memory import condense_plan, memory_plan, mesh_plan_lines, plan_lines, token_seconds
from flatshift.finetune.planner.rules import RuleSettings
from flatshift.finetune.planner.sizes import BackboneSizes
from flatshift.finetune.planner.throughput import find_device
from flatshift.finetune.run_directory import RunDirectory
from flatshift.finetune.seeds import derive_seed
from flatshift.finetune.tasks import Task
from flatshift.finetune.train.checkpointer import resume_step
from flatshift.finetune.train.peak_memory import PlannedStep
from flatshift.finetune.train.schedule import Schedule
from flatshift.finetune.train.stage import StageResult, TrainingStage, check_length
from flatshift.finetune.train.trackers import Trackers, open_trackers
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import build as build_regularizer


class FineTuneProbe(Protocol):
    """Observer of a running fine-tune that measures more than the run's own metrics: called after an optimizer step
    with its row of metrics.jsonl, and after the evaluation of the chosen adapter, which is loaded in `engine`."""

    def step(self, line: Mapping[str, Any]) -> None: ...

    def on_evaluation(self, recipe: Recipe, engine: Engine, tokenizer: Any, prepared: PreparedData) -> None: ...

    def figures(self) -> dict[str, Any]:
        """Return the measurements as JSON values."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Objects shared by all parts of a run, which none of them changes."""

    recipe: Recipe
    run: RunDirectory
    console: Console
    world: ProcessMesh
    """Position of this rank in the recipe's mesh."""
    stop: Callable[[], bool]
    """Returns True if a signal requested a stop."""
    trackers: Trackers
    peak_tflops: float | None = None
    """Peak rate of one device for the MFU; None if no MFU is wanted."""
    cell: bool = False
    """True for a cell of a study: its metrics belong to the study, so the run has no checksums, page or base-model
    metrics."""
    draw: Draw | None = None
    probe: FineTuneProbe | None = None

    def watch(self, label: str, rows: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show an evaluation on the console; it ends at the first batch after a stop signal, on all ranks."""
        return self.console.evaluating(label, rows, stop=lambda: self.world.any(self.stop()))


@contextmanager
def run_context(
    recipe: Recipe,
    run: RunDirectory,
    console: Console,
    world: ProcessMesh | None = None,
    *,
    cell: bool = False,
    draw: Draw | None = None,
    probe: FineTuneProbe | None = None,
) -> Iterator[RunContext]:
    """Open the context of a run on this rank: its threads are set, signals caught and trackers open in the block.

    world: None for a single process.
    """
    world = world or ProcessMesh.alone(resolve_device(recipe.train.device))
    run = dataclasses.replace(run, writes=world.is_main)
    with cpu_threads(recipe.train.threads), catch_stop_signals(console.say) as stop:
        trackers = open_trackers(recipe.tracker, run, config=dataclasses.asdict(recipe), log=console.say)
        try:
            yield RunContext(
                recipe=recipe, run=run, console=console, world=world, stop=stop, trackers=trackers,
                peak_tflops=None if cell else _resolve_peak_tflops(recipe, world, console), cell=cell, draw=draw,
                probe=probe,
            )  # fmt: skip
        finally:
            trackers.close()


def _resolve_peak_tflops(recipe: Recipe, world: ProcessMesh, console: Console) -> float:
    """Return the peak rate of one device, TFLOP/s: from the recipe, else measured."""
    if recipe.train.peak_tflops is not None:
        return recipe.train.peak_tflops
    precision = recipe.train.precision
    peak = peak_rate(str(world.device), precision) / 1e12
    rate = f"{peak:.3g} TFLOP/s" if peak >= 1 else f"{1000 * peak:.3g} GFLOP/s"
    threads = torch.get_num_threads()
    device = f"{threads} thread{'s' if threads > 1 else ''}" if world.device.type == "cpu" else "one device"
    console.detail(f"peak: {rate}, measured: the best {precision} matrix product on {device}; MFU is a share of it")
    return peak


LABEL_NOISE = "label_noise.json"
_FEW_STEPS, _MANY_EPOCHS = 10, 20
"""Steps below which a packed run says why it has so few, and epochs above which a run is warned of."""
_COUNTED_STEPS = 5
"""Updates whose tokens are counted for an estimate of time."""
_BUSY, _LONG_S = 0.1, 30
"""Share of the time that a thread waits for a core, and seconds of training, above which a run warns of it."""
_SHORT_RUN_S = 600
"""Seconds of a training above which a run says how many steps would fit."""


@dataclass(frozen=True)
class StagePlan:
    """Task, data and settings of a stage; everything else is in its run's `RunContext`."""

    name: str
    task: Task
    prepared: PreparedData
    optimizer: Optimizer
    train: Train
    previous: Path | None = None
    """Adapter of the previous stage, which this one continues."""


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
    folder = path / "stages" / plan.name
    adapter, done = folder / "adapter", folder / DONE
    if done.is_file() and read_json_object(done, "target_steps")["target_steps"] == plan.train.steps:
        yield OpenStage(adapter)
        return
    schedule = Schedule.of(plan.train, plan.optimizer, folder)
    if schedule.begin:
        console.say(schedule.line())
    initial = initial_adapter(path, recipe, plan.task, plan.prepared, lambda: open_backbone(recipe.backbone).tokenizer)
    engine, tokenizer = load_model(
        recipe, plan.task, plan.prepared.label_names, world=context.world, log=console.say, initial=initial
    )
    if plan.previous is not None:
        engine.load_adapter(plan.previous, partial=True)
    else:
        save_initial_adapter(path, recipe, engine, console.say)
    settings = _build_training_stage(context, plan, engine, tokenizer)
    with console.task(plan.name, plan.train.steps, "steps") as bar:
        bar(resume_step(context.run.state, stage=plan.name))
        settings = dataclasses.replace(settings, on_step=_make_step_callback(context, plan, bar))
        stage = OpenStage(adapter, Trainer(engine, tokenizer, settings))
        yield stage
    stage.trainer, result = None, stage.result
    assert result is not None
    if context.world.is_main and (comparison := compare_plan(read_json_object(done).get("plan") or {})):
        console.detail(f"{plan.name}: {comparison}")
    if result.skipped or result.rewinds:
        console.say(
            f"{plan.name}: {result.skipped} steps were skipped, {result.rewinds} spikes rolled back (log.txt has them)"
        )
    gc.collect()  # the optimizer's state is held by cycles of hooks
    stage.model = None if has_custom_init(recipe.adapter) else (engine, tokenizer)


def _make_step_callback(context: RunContext, plan: StagePlan, bar: ProgressBar) -> Callable[[dict[str, Any]], None]:
    rate = ""

    def on_step(line: dict[str, Any]) -> None:
        nonlocal rate
        rate = format_throughput(line) or rate
        loss = "left out" if line.get("skipped") else f"loss {line['loss']:.3f}"
        bar(line["step"], ", ".join(filter(None, [loss, rate])))
        if context.probe is not None and plan.name == FINE_TUNE:
            context.probe.step(line)

    return on_step


def _build_training_stage(context: RunContext, plan: StagePlan, engine: Engine, tokenizer: Any) -> TrainingStage:
    """Build the training loop's stage, and report its data, memory and first batch before step 1."""
    recipe, prepared, task, train = context.recipe, plan.prepared, plan.task, plan.train
    log, is_last = context.console.say, plan.name == FINE_TUNE
    seed = derive_seed(train.seed, plan.name)
    multiple = train.max_length if train.compile else engine.multiple  # one shape, so that one graph is compiled
    batches = TrainingDataLoader(
        prepared.train, task=task, batch_size=train.batch_size, accumulate=train.accumulate, seed=seed,
        max_length=train.max_length, pad_id=tokenizer.pad_token_id, share=engine.share, multiple=multiple,
        mixture=prepared.mixture, group=train.group, masking=task.masking(tokenizer),
    )  # fmt: skip
    check_length(engine, batches)
    epochs = count_source_epochs(batches, prepared.mixture, train.steps)
    for line in format_source_epochs(epochs, train.steps, approximate=batches.packed):
        log(line)
    total = sum(source["drawn"] for source in epochs) / sum(source["examples"] for source in epochs)
    setting = "train.steps" if is_last else "warmup.steps"
    if total > _MANY_EPOCHS and not context.cell and recipe.sweep is None:
        steps = math.ceil(3 * train.steps / total)
        log(f"warning: {total:.0f} epochs mostly memorise the rows; 3 epochs are --{setting} {steps:,}")
    if batches.packed and train.steps < _FEW_STEPS:
        pack = "task.pack: false" if is_last else f"warmup.task: {{kind: {task.kind}, pack: false}}"
        log(
            f"note: a packed row holds several of yours, so this is {train.steps} optimizer step"
            f"{'s' * (train.steps != 1)}; for more raise {'train.epochs or ' * is_last}{setting}, or set {pack}"
        )
    context.console.detail(format_padding(batches, train))
    for line in skipped_rows_summary(prepared, train.max_length):
        log(line)
    if prepared.flipped:
        log(f"label noise: {len(prepared.flipped):,} of {len(prepared.train):,} training labels replaced")
    planned = _report_plan(context, plan, engine, batches)
    if is_last and not context.cell:
        classes, seconds = len(prepared.label_names or ()), None if planned is None else planned.seconds
        evaluation = format_evaluation_plan(
            recipe, {"train": prepared.train, "dev": prepared.dev, "test": prepared.test}, classes=classes,
            device=engine.device.type, share=engine.share[1], seconds=seconds,
        )  # fmt: skip
        if evaluation is not None:
            log(evaluation)
    _report_capacity(context, plan, engine, batches)
    if is_last and prepared.flipped and engine.is_main:
        write_json(context.run.path / LABEL_NOISE, noise_record(recipe, prepared))
    new_parameters = getattr(engine.peft.get_base_model(), "new_parameters", ())
    if new_parameters and not task.traits.is_sequence_level:
        log(
            f"the backbone's checkpoint has no masked-LM head: its transform is drawn by train.seed and trains whole, "
            f"its bias stays 0 ({', '.join(new_parameters)})"
        )
    names, units = prepared.label_names, prepared.units
    panel = functools.partial(format_first_batch, batches.at(0)[0], tokenizer, task, label_names=names, units=units)
    context.console.outline([panel(samples=1, width=240)], [panel()])
    return TrainingStage(
        name=plan.name, task=task, batches=batches, dev=prepared.dev if is_last else [], optimizer=plan.optimizer,
        train=train, evaluate=recipe.eval, label_names=names, regularizer=build_regularizer(recipe.regularizer),
        run=context.run, seed=seed, recording=choose_recording(recipe, prepared) if is_last else None,
        stop=context.stop, track=context.trackers.log, peak_tflops=context.peak_tflops, plan=planned, log=log,
        rules=dataclasses.replace(RuleSettings.of(recipe), task=task, train=train, optimizer=plan.optimizer),
    )  # fmt: skip


def _report_plan(
    context: RunContext, plan: StagePlan, engine: Engine, batches: TrainingDataLoader
) -> PlannedStep | None:
    """Report the predicted memory and seconds; returns them, except for a cell or a mesh."""
    recipe, task, train = context.recipe, plan.task, plan.train
    longest, planned, time_lines = task.traits.count_token_rows(train), None, list[str]()
    if not batches.packed and not train.compile:  # rows are padded only to the longest of their batch
        length = min(train.max_length, find_longest_length(plan.prepared.train))
        longest = dataclasses.replace(longest, max_length=length)
    if engine.world.size > 1:
        memory_lines = mesh_plan_lines(engine, mesh=recipe.mesh, train=longest, optimizer=plan.optimizer)
    else:
        optimizer, regularizer = plan.optimizer, recipe.regularizer
        memory = memory_plan(engine.model, train=longest, optimizer=optimizer, task=task, regularizer=regularizer)
        memory_lines = plan_lines(engine.model, train=longest, optimizer=optimizer, plan=memory)
        if not context.cell:  # of a cell nobody reads it
            began, wait_s = time.monotonic(), core_wait_s()
            planned = PlannedStep(memory, _predict_step_seconds(recipe, task, train, engine, batches))
            waited = (core_wait_s() - wait_s) / (time.monotonic() - began) / torch.get_num_threads()
        if planned is not None and planned.seconds is not None:
            cuda = engine.device.type == "cuda"
            basis = "of the longest rows, by the model of `flatshift plan`" if cuda else "one row was timed"
            before = resume_step(context.run.state, stage=plan.name)
            steps = train.steps - before
            count = ("one step" if steps == 1 else f"{steps:,} steps") + (f" after {before:,}" if before else "")
            step, total = (format_duration(n * planned.seconds) for n in (1, steps))
            few = 0 if before or plan.name != FINE_TUNE else int(_SHORT_RUN_S / planned.seconds)
            fitting = f"; --train.steps {few} would take {_SHORT_RUN_S // 60} minutes" if 0 < few < steps else ""
            time_lines = [f"  about {total}: {count} of {step}, {basis}{fitting}"]
            if waited > _BUSY and not cuda and steps * planned.seconds > _LONG_S:
                time_lines.append(
                    f"  other programs are at work: a thread waited for a core {waited:.0%} of the time, and steps may "
                    "take several times as long; end them, or take --train.threads 1"
                )
    context.console.outline([*condense_plan(memory_lines), *time_lines], [*memory_lines, *time_lines])
    return planned


def _report_capacity(context: RunContext, plan: StagePlan, engine: Engine, batches: TrainingDataLoader) -> None:
    """Report the capacity of the adapter compared with the information in the stage's labels.

    Always in the log; on the console if the adapter has less. Only for ranks with whole tensors, which know its size.
    """
    names, mesh = plan.prepared.label_names, context.recipe.mesh
    bits = bits_per_label(plan.task, None if names is None else len(names))
    if bits is None or mesh.tp * mesh.pp * mesh.ep > 1:
        return
    moving = {name: p for name, p in engine.parameters.items() if not plan.optimizer.is_fixed(name)}
    rank, labels, counted = context.recipe.adapter.rank, batches.labels(plan.train.steps), plan.task.loss_denominator
    capacity = Capacity.of(moving, rank=rank, labels=labels, each=bits, counted=counted)
    context.console.outline([capacity.line()] if capacity.ratio < 1 else [], [capacity.line()])


def _predict_step_seconds(
    recipe: Recipe, task: Task, train: Train, engine: Engine, batches: TrainingDataLoader
) -> float | None:
    """Predicted for one CUDA device whose figures are known, and timed on a CPU; None elsewhere, and for a graph, which
    is compiled for its own rows."""
    if engine.device.type != "cuda":
        if train.compile:
            return None
        steps = min(train.steps, _COUNTED_STEPS)
        computed = batches.tokens(steps)[1] / steps
        longest = min(train.max_length, round(computed / train.accumulate))
        repeats, references = step_passes(task, recipe.regularizer)
        return computed * token_seconds(engine.model, longest, train) * (repeats + references / 2)
    properties = torch.cuda.get_device_properties(engine.device)
    name = find_device(properties.name, properties.total_memory)
    if name is None:
        return None
    cluster = Cluster.parse(f"1x{name}")
    sizes = BackboneSizes.read(open_backbone(recipe.backbone).directory, recipe.adapter).under(task)
    settings = RuleSettings(recipe.mesh, train, recipe.adapter, task, regularizer=recipe.regularizer)
    return step_seconds(sizes, cluster, settings)
