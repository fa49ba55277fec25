"""Training loop of one stage: frozen base model, adapter, any mesh, any regularizer, exact resume.

    result = Trainer(model, tokenizer, stage).fit()

Everything that differs from step to step is a pure function of the step (batches, learning rate, dropout seeds, the
regularizer's random draws). A checkpoint therefore holds whole tensors and a step number, and a resumed run on the same
machine, mesh and threads ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flatshift.regularizers.layers.fused import FusedLayers
from flatshift.regularizers.protocol import MetricTensors

from ..atomic import write_json
from ..compute import attention, numerics
from ..compute.capabilities import seeded_rng
from ..compute.fused_loss import choose_loss_kernel
from ..compute.loss import Head, batch_loss, loss_sum
from ..compute.micro_batch import MicroBatch, PreferenceTargets
from ..compute.precision import autocast, infer_precision, tf32_products
from ..config import FACTOR_OPTIMIZERS
from ..data.eval_batching import EvalBatching
from ..data.example import Example
from ..digests import DONE, FILES, adapter_file_digests
from ..errors import Interrupted, UserError
from ..evaluate.evaluator import evaluate
from ..evaluate.metrics import find_metric
from ..evaluate.packing_check import check_packing_isolation
from ..evaluate.preference import point_metrics, score_answers
from ..figures import format_throughput
from ..launch import watchdog
from ..models.compiled import CompiledBlocks
from ..parallel.engine import Engine
from ..parallel.experts import ExpertLoadMeter
from ..run_directory import SPIKE, disk_full_interrupts
from ..seeds import derive_seed
from ..tasks import Task
from .callbacks import Callbacks
from .checkpointer import Checkpointer, TrainingState, batch_index, clone_tensors
from .deferred_metrics import MetricsBuffer, MetricsRow, read_numbers
from .divergence import DivergenceGuard, LossScale, RejectionReason, UpdateRejected
from .optimizer import AdapterOptimizer, GaussNewton
from .out_of_memory import OutOfMemoryHandler, oom_context
from .peak_memory import StepMemoryMeter
from .prefetch import with_prefetch
from .schedule import Schedule
from .stage import StageResult, TrainingStage, check_length, check_metric, finished_result, full_evaluation_metric
from .throughput import ThroughputMeter
from .trace.recorder import Recorder

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase


class Trainer:
    """Trains the adapter of one stage (warm-up or fine-tune).

    On a mesh every rank makes one with its `Engine` and calls `fit`; the main rank writes files. Optimizer, schedule,
    checkpointer and meters are made when `fit` starts (`_set_up`): a finished stage needs none of them.
    """

    def __init__(self, model: PeftModel | Engine, tokenizer: PreTrainedTokenizerBase, stage: TrainingStage) -> None:
        self.engine = model if isinstance(model, Engine) else Engine.alone(model)
        self.tokenizer = tokenizer
        self.train = infer_precision(stage.train, self.engine.model)
        self.stage = replace(stage, train=self.train)
        self.regularizer, self.run, self.device = stage.regularizer, stage.run, self.engine.device
        self.on_step, self.stop = stage.on_step or (lambda row: None), stage.stop or (lambda: False)
        self.log_line = stage.log or stage.run.log
        self.precision = partial(autocast, self.train, self.device)

    @property
    def state(self) -> TrainingState:
        """Step number and everything else that a checkpoint says besides tensors; a rollback replaces it."""
        return self.checkpointer.progress

    def fit(self) -> StageResult:
        """Train for `train.steps` steps; afterwards the model holds the stage's adapter.

        The adapter is the best on dev where there are dev examples, else the last. It is saved in
        `stages/<name>/adapter`; `done.json` next to it says how the stage ended. Training continues from the newest
        valid checkpoint of this stage in the run directory; the adapter of a finished stage is only loaded. The
        regularizer is attached for the stage and detached after it.

        Raises:
            Interrupted: `stop` returned True, Ctrl-C, or a full disk; the next `fit` continues.
            Diverged: loss or gradient is NaN or infinite, or loss spikes continue, for longer than `train` allows;
                nothing of that step is saved.
            UserError: examples longer than the base model's positions, packing that it does not isolate, a checkpoint
                of another adapter, a recording on a mesh.
        """
        check_length(self.engine, self.stage.batches)
        check_metric(self.train.best, self.stage.task, "train.best", self.stage.dev)
        if (result := finished_result(self.stage)) is not None:
            self.engine.load_adapter(self.stage.folder / "adapter")
            return result
        with self._device_settings() as out_of_memory:
            self._set_up(out_of_memory)
            with self._session():
                self._begin()
                while self.state.step < self.train.steps and not self.state.stopped_early:
                    self.callbacks.begin_step()
                    began = time.monotonic()
                    with self.peak_memory.measure_step() if self.peak_memory is not None else contextlib.nullcontext():
                        row = self.step()
                    rates = self.throughput.end_step(time.monotonic() - began)
                    if isinstance(row, RejectionReason):
                        self._flush_metrics()
                        self._roll_back(row)
                    else:
                        self._after_step(row, rates)
                self.save()  # does nothing if the loop has just saved
                self.callbacks.fire("train_end")
            return self._finish()

    def step(self) -> MetricsRow | RejectionReason:
        """Take one optimizer step; returns its metrics row, or the reason to roll back to a checkpoint.

        Whether the step is taken is decided by numbers that are the same on every rank.
        """
        state, engine, task, batches = self.state, self.engine, self.stage.task, self.stage.batches
        step, index = state.step, batch_index(state.step, state.skipped_ranges)
        context = partial(self._forward_context, step)
        engine.heartbeat = partial(watchdog.report_progress, step, self.stage.name)
        engine.dropout_context = partial(self.dropout.forward_pass, step) if self.dropout is not None else None
        count = batches.supervised(index)
        lr = self.lr_scheduler(step)
        targets: Sequence[PreferenceTargets | None] = ()
        if task.has_reference:  # outside the regularizer's step: the reference is the base model as it is
            targets = engine.reference_log_probs(batches.at(index), task=task, head=self.head, precision=self.precision)
        rejected, overflowed = None, True
        while overflowed:  # fp16: the same batch again at a smaller loss scale
            losses: list[torch.Tensor] = []
            engine.loss_scale, overflowed = self.loss_scale.value, False
            self.expert_load.reset()
            try:
                with self.regularizer.step(step, loss_scale=self.loss_scale.value) as passes:
                    for _ in passes:
                        micros: list[MicroBatch] = batches.at(index)
                        if targets:
                            micros = [replace(m, preference=t) for m, t in zip(micros, targets, strict=True)]
                        if self.solver is not None:  # Gauss-Newton: writes its step into the gradients, no backward
                            losses.append(self.solver.compute(engine, micros, count, task=task, context=context))
                            continue
                        with self.throughput.count(micros, head=self.head), self.layers.replace_forwards():
                            losses.append(
                                engine.forward_backward(micros, count, task=task, head=self.head, context=context)
                            )
                        self.optimizer.zero_fixed_grad()  # no norm counts them, and no regularizer moves along them
                    if self.loss_scale.on and (overflowed := self.loss_scale.overflows(losses, engine.clip)):
                        raise UpdateRejected
                    if self.guard.checks_steps and (rejected := self.guard.check(losses)) is not None:
                        raise UpdateRejected
            except UpdateRejected:
                if rejected is not None:
                    return self._skip_step(rejected, lr)
                self.optimizer.zero_grad()
        self.loss_scale.unscale(engine.parameters.values())
        with self.recorder.update(step + 1):
            norm = engine.clip(self.stage.optimizer.clip)
            row = MetricsRow(step + 1, {"loss": None, "tokens": state.tokens + count, "lr": lr, "grad_norm": None})
            row.pending = {"loss": losses[0], "grad_norm": norm}  # of two passes, the first is at the weights
            if self.guard.checks_steps or self.loss_scale.on:  # they have read both already
                row.pending, row.values = {}, row.values | (self.guard.last_values or self.loss_scale.last_values)
            elif self.metrics.reads_are_free:
                row.values, row.pending = row.complete(iter(read_numbers(row.vectors))), {}
                self.guard.raise_if_not_finite(step + 1, row.values)
            self.callbacks.fire("pre_optimizer_step")
            self.optimizer.step(lr)
            self.regularizer.after_optimizer_step(lr)
        state.step += 1
        state.tokens += count
        self.guard.step_applied()
        self.loss_scale.step_applied()
        row.tensors += [self.regularizer.metric_tensors(), *self.expert_load.metric_tensors()]
        return row

    def _after_step(self, row: MetricsRow, rates: MetricTensors) -> None:
        state, train = self.state, self.train
        state.seconds = self._elapsed()
        self._update_callbacks()
        row.values = {"attempt": self.checkpointer.attempt, "step": state.step, "split": "train", **row.values}
        row.tensors.append(rates)
        row.end = {"time_s": round(state.seconds, 4)}
        self.metrics.add(row)
        last = state.step == train.steps
        stop = self._flush_metrics() if self.metrics.reads_are_free else self._flush_metrics_if_due()
        self.callbacks.fire("step_end")
        evaluate_now = self._callback_requests("evaluate")
        if self.stage.dev and (last or evaluate_now or _is_due(train.evaluation_interval, state.step)):
            stop |= self._flush_metrics()
            self.evaluate_dev()
        state.stopped_early |= self._callback_requests("training_stop") and not last
        self.recorder.record(state, self.checkpointer.attempt)
        state.seconds = self._elapsed()
        if self.metrics.reads_are_free:
            stop = self.engine.world.any(self.stop())
        save_now = last or state.stopped_early or _is_due(train.save_every, state.step)
        if stop or save_now or self._callback_requests("save"):
            stop |= self._flush_metrics()
            self.save()
        if stop and not (last or state.stopped_early):
            raise Interrupted(f"{self.stage.name} stopped after step {state.step} of {train.steps}; its state is saved")

    @contextlib.contextmanager
    def _device_settings(self) -> Iterator[OutOfMemoryHandler]:
        train = self.train
        with (
            numerics.cpu_threads(train.threads),
            numerics.deterministic_algorithms(train, self.device),
            tf32_products(train, self.device),
            with_prefetch(self.stage.batches, self.engine, train=train, log=self.log_line) as batches,
            OutOfMemoryHandler(self.engine, self.stage) as out_of_memory,
        ):
            self.stage = replace(self.stage, batches=batches)
            yield out_of_memory

    def _set_up(self, out_of_memory: OutOfMemoryHandler) -> None:
        """Make optimizer, schedule, checkpointer and meters, and find the head whose loss needs no logits."""
        engine, stage, train, batches = self.engine, self.stage, self.train, self.stage.batches
        self.eval_batching = EvalBatching.of(
            self.tokenizer, train, batch_size=stage.evaluate.batch_size, device=engine.device, share=engine.evaluation
        )
        self.metric = full_evaluation_metric(train, stage.task)
        self.lr_scheduler = Schedule.of(train, stage.optimizer, stage.folder)
        self.optimizer = AdapterOptimizer(engine.parameters, stage.optimizer)
        if stage.optimizer.fixed and not engine.world.any(bool(self.optimizer.parameters)):
            raise UserError(f"optimizer.fixed: {', '.join(stage.optimizer.fixed)} leaves nothing that trains")
        if stage.optimizer.kind in FACTOR_OPTIMIZERS and not engine.world.any(bool(self.optimizer.pairs)):
            raise UserError(
                f"optimizer.kind: {stage.optimizer.kind} steps the factors of linear layers, and adapter.targets names "
                "none; take adamw"
            )
        self.solver = (
            GaussNewton(self.optimizer.parameters, decay=stage.optimizer.weight_decay)
            if stage.optimizer.kind == "gauss-newton"
            else None
        )
        # compiled blocks have no dropout
        self.draws = not train.compile and numerics.draws_random_numbers(engine.model)
        self.dropout = engine.dropout(derive_seed(stage.seed, "dropout")) if self.draws else None
        self.loss_scale = LossScale(on=train.precision == "fp16")
        # torch.compile fuses PEFT's forward by itself
        self.layers = CompiledBlocks(engine.model) if train.compile else FusedLayers(engine.model)
        self.checkpointer = Checkpointer(engine, self.optimizer, stage)
        self.guard = DivergenceGuard(engine, self.checkpointer, stage)
        self.metrics = MetricsBuffer(engine.world)
        with self.precision():
            if batches.packed:
                check_packing_isolation(engine.eval_model, agree=engine.world.any)
            head = engine.find_head(batches.at(0)[0].to(self.device).inputs, task=stage.task)
        engine.reshard()
        self.recorder = Recorder(stage, engine, self.optimizer, self.eval_batching, head=head)
        out_of_memory.checkpointer = self.checkpointer
        self.head = choose_loss_kernel(
            engine, head, batches, task=stage.task, train=train, folder=stage.folder, log=self.log_line
        )
        self.throughput = ThroughputMeter(engine, peak_tflops=stage.peak_tflops or train.peak_tflops)
        self.expert_load = ExpertLoadMeter(engine)
        self.peak_memory = StepMemoryMeter(engine.device) if stage.plan is not None else None
        if train.compile:
            with self.precision():
                self.throughput.count_separately(batches.at(0)[0], task=stage.task, head=self.head)
            engine.reshard()
        self.callbacks = Callbacks(
            stage,
            is_main=engine.is_main,
            objects={"model": engine.model, "processing_class": self.tokenizer, "optimizer": self.optimizer.inner},
        )

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """Attach the regularizer and restore the newest checkpoint; detach at the end, whatever happened."""
        engine = self.engine
        self._attach_regularizer()
        try:
            self.checkpointer.restore()
            with (
                numerics.without_input_casts(engine.model, self.train),
                watchdog.progress_timeout(self.stage.name),
                attention.packed_attention(engine.model, engine.device),
            ):
                yield
        except KeyboardInterrupt as error:
            saved = self.checkpointer.saved_step
            then = f"step {saved}, the newest checkpoint" if saved > 0 else "step 0, as there is no checkpoint yet"
            problem = f"{self.stage.name} stopped inside step {self.state.step + 1}; resuming continues from {then}"
            raise Interrupted(problem) from error
        finally:
            self.expert_load.detach()
            self.regularizer.detach()

    def _attach_regularizer(self) -> None:
        self.regularizer.attach(
            self.engine.model,
            seed=derive_seed(self.stage.seed, "regularizer"),
            total_steps=self.train.steps,
            placement=self.engine.placement,
        )

    def _begin(self) -> None:
        """Take over the restored state; record step 0; repeat a dev evaluation that a signal cut off, or make the last
        one of a stage that is to end at the step at which it was interrupted."""
        state, train = self.state, self.train
        self.started = time.monotonic() - state.seconds
        self.engine.model.train()
        self.callbacks.restore(state.callbacks)
        self.loss_scale.restore(state.loss_scale)
        if state.step == 0:
            self.recorder.record(state, self.checkpointer.attempt)
            if train.spikes is not None:
                self.save()  # a rollback needs a checkpoint to return to
        self._update_callbacks()
        self.callbacks.fire("train_begin")
        if state.evaluation_pending or state.step == train.steps:
            if self.stage.dev:
                self.evaluate_dev()
            state.stopped_early |= self._callback_requests("training_stop") and state.step < train.steps
            self.recorder.record(state, self.checkpointer.attempt)
        if state.step == self.lr_scheduler.begin:  # a run that had stopped early is extended
            state.stopped_early, state.misses = False, 0

    @contextlib.contextmanager
    def _forward_context(self, step: int, micro: int) -> Iterator[None]:
        """Autocast, and a seed of (seed, step, micro-batch, rank) for random draws other than dropout (layerdrop)."""
        self.regularizer.on_micro_batch(micro)
        index, width = self.engine.stream
        random: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.draws:
            rank = (index,) if width > 1 else ()
            random = seeded_rng(derive_seed(self.stage.seed, "dropout", step, micro, *rank), self.device)
        with random, self.precision():
            yield

    def _skip_step(self, rejected: RejectionReason, lr: float) -> MetricsRow | RejectionReason:
        """Leave the step out and return its row, or `rejected` where the stage has to roll back."""
        state = self.state
        with self.recorder.update(state.step + 1):
            self.optimizer.zero_grad()
        fields = self.guard.skip(rejected)
        if fields is None:
            return rejected
        values = {"loss": rejected.loss, "tokens": state.tokens, "lr": lr, "grad_norm": rejected.norm, **fields}
        return MetricsRow(state.step, values)

    def _roll_back(self, rejected: RejectionReason) -> None:
        def reattach() -> None:
            self.regularizer.detach()
            self._attach_regularizer()

        row = self.guard.roll_back(rejected, reattach=reattach)
        self.engine.model.train()
        self.state.seconds = self._elapsed()
        self.callbacks.restore(self.state.callbacks)
        self.loss_scale.restore(self.state.loss_scale)
        self._update_callbacks()
        self.log(**row, split=SPIKE, time_s=round(self.state.seconds, 4))

    def log(self, **row: Any) -> dict[str, Any]:
        """Write a row of metrics.jsonl and pass it to trackers and callbacks; rows keep the order of their steps."""
        self.run.log_metrics(self.stage.name, **row)
        tracked = {"stage": self.stage.name, **row}
        if self.stage.track is not None and self.engine.is_main:
            self.stage.track(tracked)
        self.callbacks.report(tracked)
        return tracked

    def _flush_metrics(self) -> bool:
        """Write all buffered rows, as before every checkpoint; True if any rank wants to stop."""
        return self.metrics.flush(lambda row: self.on_step(self.log(**row)), refuse=self.guard.raise_if_not_finite)

    def _flush_metrics_if_due(self) -> bool:
        """Flush every few steps on a device where reading a scalar synchronises.

        The stop flag is reduced over ranks in the same transfer; one process knows it at once.
        """
        state, stop = self.state, self.stop()
        self.metrics.request_stop(stop)
        due = self.metrics.due or bool(self.callbacks.callbacks) or self.recorder.is_due(state)
        now = due or (stop and self.engine.world.size == 1) or state.step == self.train.steps
        return now and self._flush_metrics()

    def _elapsed(self) -> float:
        """Seconds of this stage, earlier attempts included."""
        return time.monotonic() - self.started

    def _update_callbacks(self) -> None:
        state = self.state
        best = state.best_accuracy if self.train.best != "loss" else None
        best = state.best_metric if self.metric is not None else state.best_dev_loss if best is None else best
        self.callbacks.set_position(state.step, tokens=state.tokens, best_step=state.best_step, best=best)

    def _callback_requests(self, action: str) -> bool:
        return bool(self.callbacks.callbacks) and self.engine.world.any(self.callbacks.requests(action))

    def save(self) -> None:
        """Save a checkpoint, unless this step has one."""
        before = self.checkpointer.saved_step
        self.state.callbacks = self.callbacks.states()
        self.state.loss_scale = self.loss_scale.state()
        self.checkpointer.save()
        if self.checkpointer.saved_step != before:
            self.callbacks.fire("save")

    def evaluate_dev(self) -> None:
        """Evaluate the current adapter on dev; keep it if it is the best so far, else count it for `train.patience`."""
        state, stage = self.state, self.stage
        state.evaluation_pending = True
        batching = replace(self.eval_batching, heartbeat=self._dev_heartbeat)
        try:
            with (
                watchdog.no_progress_timeout("dev evaluation"),
                oom_context(f"the dev evaluation after step {state.step}"),
            ):
                metrics: dict[str, Any] = dev_metrics(self.engine, stage.dev, batching, task=stage.task, head=self.head)
                if self.metric is not None:  # of every metric, the same on every rank
                    found = evaluate(
                        self.engine.eval_model, self.tokenizer, stage.dev, task=stage.task.for_evaluation(),
                        config=replace(stage.evaluate, bootstrap=1), inference=batching, label_names=stage.label_names,
                    )  # fmt: skip
                    metrics[self.metric] = found[self.metric]["value"] if self.metric in found else None
        except Interrupted as error:
            self.engine.reshard()
            self.save()
            raise Interrupted(f"{stage.name} {error}; its state is saved") from error
        state.evaluation_pending = False
        row = {"attempt": self.checkpointer.attempt, "step": state.step, "split": "dev", **metrics}
        self.log(**row, tokens=state.tokens, time_s=round(self._elapsed(), 4))
        better = math.isfinite(metrics["loss"]) and self._is_better(metrics)
        if self.engine.world.any(better):  # one answer of all ranks, whose losses may differ in their last bits
            state.best_step, state.best_dev_loss, state.misses = state.step, metrics["loss"], 0
            state.best_accuracy = metrics.get("accuracy")
            state.best_metric = None if self.metric is None else metrics[self.metric]
            state.best = clone_tensors(self.engine.parameters)
            return
        state.misses += 1
        patience, left = self.train.patience, self.train.steps - state.step
        state.stopped_early = patience is not None and state.misses >= patience and left > 0

    def _dev_heartbeat(self, rows: int) -> None:
        """Called after each batch, or generated token, of the dev evaluation: a stop signal ends it on all ranks."""
        self.engine.heartbeat()
        if self.engine.world.any(self.stop()):
            raise Interrupted(f"stopped in the dev evaluation after step {self.state.step}")

    def _is_better(self, metrics: dict[str, Any]) -> bool:
        """True if these dev metrics are the best so far, by `train.best`; loss decides between equal ones."""
        state, lower = self.state, False
        if state.best_dev_loss is None:
            return True
        value = best = None
        if self.metric is not None:
            value, best, lower = metrics[self.metric], state.best_metric, find_metric(self.metric).lower
        elif self.train.best != "loss":
            value, best = metrics.get("accuracy"), state.best_accuracy
        if value == best:
            return metrics["loss"] < state.best_dev_loss
        return best is None if value is None or best is None else bool(value < best) is lower

    def _finish(self) -> StageResult:
        state, stage = self.state, self.stage
        if state.best:
            with torch.no_grad():
                for name, parameter in self.engine.parameters.items():
                    parameter.copy_(state.best[name])
        shared = StageResult.__dataclass_fields__.keys() & vars(state).keys()
        own = {name: getattr(state, name) for name in shared - {"rewinds"}}
        result = StageResult(steps=state.step, rewinds=len(state.rewinds), **own)
        rates = self.throughput.total_rates()
        with disk_full_interrupts(f"saving the adapter of {stage.name}"):
            self.engine.save_adapter(stage.folder / "adapter")
            if self.engine.is_main:
                self.run.sync_metrics(stage.name)
                record = {"target_steps": self.train.steps, **asdict(result), "attempts": self.checkpointer.attempt}
                record["seconds"] = round(state.seconds, 3)
                record["lr"] = self.lr_scheduler(state.step - 1)
                if self.peak_memory is not None and stage.plan is not None:
                    record["plan"] = self.peak_memory.compare(stage.plan)
                digests = adapter_file_digests(stage.folder)
                write_json(stage.folder / DONE, {**record, "rates": rates, FILES: digests})
            self.engine.world.wait()
        unit = stage.task.loss_denominator
        notes = [f"{result.tokens} {'target tokens' if unit == 'tokens' else unit}"]
        notes += [f"{result.skipped} steps skipped"] if result.skipped else []
        notes += [f"rolled back after {result.rewinds} spikes"] if result.rewinds else []
        notes += filter(None, [format_throughput(rates)])
        self.run.log(f"{stage.name}: done after step {result.steps}, {', '.join(notes)}")
        return result


def _is_due(interval: int, step: int) -> bool:
    return bool(interval) and step % interval == 0


@torch.no_grad()
def dev_metrics(
    engine: Engine, examples: Sequence[Example], inference: EvalBatching, *, task: Task, head: Head | None
) -> dict[str, float]:
    """Return the dev metrics: `loss` in nats per target token or example (regress: squared error), not smoothed,
    `accuracy` for classification (multi: of whole sets of classes), and for answers those of
    `flatshift.finetune.evaluate.preference`.

    If reading makes the host wait for the device, everything is read once, at the end. Collective on a mesh.

    head: as found by the stage (`flatshift.finetune.compute.loss.find_head`); a pipeline's stand-in gives logits only.
    """
    model, task_in_evaluation, head = engine.eval_model, task.for_evaluation(), head if engine.runner is None else None
    if task.traits.is_answer_level:
        scores = score_answers(
            model, examples, inference, task=task_in_evaluation, head=head, heartbeat=engine.heartbeat
        )
        engine.reshard()
        return point_metrics(scores)
    sums: list[torch.Tensor] = []  # loss and number of correct answers per batch
    counts: list[int] = []
    with numerics.evaluation_mode(model):
        for micro in inference.batches(examples, task):
            batch = micro.to(engine.device)
            correct = None
            with inference.precision():
                if task_in_evaluation.traits.is_sequence_level:
                    with attention.packed_batch(batch) as inputs:
                        logits = model(**inputs).logits
                    loss = loss_sum(logits, batch.labels, task=task_in_evaluation)
                    if task_in_evaluation.traits.has_accuracy:
                        correct = task_in_evaluation.answered_right(logits, batch.labels).sum()
                else:
                    loss = batch_loss(model, batch, task=task_in_evaluation, head=head)
            if micro.samples:
                sums.append(
                    torch.stack([loss.double(), torch.zeros_like(loss) if correct is None else correct.double()])
                )
                counts.append(batch.supervised)
            engine.heartbeat()
    engine.reshard()
    totals = torch.zeros(3, dtype=torch.float64)  # loss, correct answers, targets
    for pair, count in zip(read_numbers(sums), counts, strict=True):
        totals += torch.tensor([*pair, count], dtype=torch.float64)
    total_loss, total_correct, targets = inference.share.add(totals.numpy()).tolist()
    metrics = {"loss": total_loss / max(targets, 1)}
    return {**metrics, "accuracy": total_correct / max(targets, 1)} if task.traits.has_accuracy else metrics
