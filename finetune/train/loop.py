"""The training loop of one stage: frozen backbone, adapter, any mesh, any regularizer, exact resume.

Everything that differs from step to step is a pure function of the step (batches, learning rate, dropout seeds, the
regularizer's draws), so a checkpoint holds whole tensors and a step number, and a resumed run on the same machine,
mesh and threads ends with the same bits as one that was never stopped.
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

from ..atomic import write_json
from ..compute import attention
from ..compute.fused_loss import with_kernel
from ..compute.numerics import cpu_threads, deterministic, seeded, uses_dropout, without_input_casts
from ..compute.precision import autocast, float32_products, read_precision
from ..data.eval_batching import EvalBatching
from ..digests import DONE, FILES, adapter_sums
from ..errors import Interrupted
from ..evaluate.evaluator import evaluate
from ..evaluate.metrics import metric_of
from ..figures import rate_text
from ..launch import watchdog
from ..models.compiled import Compiled
from ..parallel.engine import Engine
from ..run_directory import SPIKE, disk_full_interrupts
from ..seeds import derive
from .callbacks import Callbacks
from .checkpointer import Checkpointer, clone
from .data_order import batch_index
from .deferred_metrics import MetricsBuffer, MetricsRow, read
from .dev_loss import dev_figures
from .divergence import Diverged as Diverged  # is told of by its users under this module's name
from .divergence import DivergenceGuard, RejectedUpdate, UpdateRejected
from .loss_scale import LossScale
from .optimizer import AdapterOptimizer, GaussNewton
from .out_of_memory import OutOfMemoryHandler, oom_context
from .peak_memory import UpdateMeter
from .prefetch import with_prefetch
from .schedule import Schedule
from .stage import StageResult as StageResult  # users know these by this module's name
from .stage import TrainingStage as TrainingStage
from .stage import check_best, check_length, ended, judged_apart
from .throughput import ThroughputMeter
from .trace.recorder import Recorder

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    from ..data.micro_batch import MicroBatch, PreferenceTargets


def train_stage(model: PeftModel | Engine, tokenizer: PreTrainedTokenizerBase, stage: TrainingStage) -> StageResult:
    """Train `model`'s adapter for `train.steps` updates; afterwards `model` holds the stage's adapter.

    On a mesh every rank calls this with its `Engine`; the main rank writes.

    The adapter is the best on dev where there are dev rows, else the last; it lies in `stages/<name>/adapter`, and
    `done.json` beside it says how the stage ended. Continues from the newest valid checkpoint of this stage in its run
    directory; a stage that is done is only read back. The regularizer is attached for the stage and detached after it.

    Raises:
        Interrupted: `stop` said so, Ctrl-C, or a full disk; running it again continues.
        Diverged: loss or gradient is NaN or infinite, or spikes go on, for longer than `train` allows; nothing of that
            update is saved.
        UserError: rows longer than the backbone's positions, samples that cannot be packed for it, a checkpoint of
            another adapter, a recording on a mesh.
    """
    engine = model if isinstance(model, Engine) else Engine.alone(model)
    stage = replace(stage, train=read_precision(stage.train, engine.model))
    check_length(engine, stage.batches)
    check_best(stage.train, stage.task)
    if (done := ended(stage)) is not None:
        engine.load_adapter(stage.folder / "adapter")
        return done
    with on_device(engine, stage) as (stage, shortage):
        loop = _Loop(engine, tokenizer, stage, shortage)
        loop.attach()
        try:
            loop.keeper.restore()
            plain = without_input_casts(engine.model, stage.train)
            with plain, watchdog.progress_timeout(stage.name), attention.packed_attention(engine.model, engine.device):
                loop.run_to_end()
        except KeyboardInterrupt as error:
            inside = loop.keeper.progress.step + 1
            raise Interrupted(
                f"{stage.name} stopped inside update {inside}; resuming continues from the newest checkpoint"
            ) from error
        finally:
            stage.regularizer.detach()
        return loop.finish()


@contextlib.contextmanager
def on_device(engine: Engine, stage: TrainingStage) -> Iterator[tuple[TrainingStage, OutOfMemoryHandler]]:
    """What the device asks for around a stage: threads, fixed algorithms, float32 products, batches made ahead, and
    what is told when memory runs out. Gives the stage with the batches to take, and who must be told of the step."""
    train = stage.train
    with (
        cpu_threads(train.threads),
        deterministic(train, engine.device),
        float32_products(train, engine.device),
        with_prefetch(stage.batches, engine, train=train, say=stage.say or stage.run.log) as source,
        OutOfMemoryHandler(engine, stage) as shortage,
    ):
        yield replace(stage, batches=source), shortage


class _Loop:
    """The state of one stage while it runs."""

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, stage: TrainingStage, shortage: OutOfMemoryHandler
    ) -> None:
        from ..evaluate.packing_check import check_packing_isolation

        train, batches = stage.train, stage.batches
        self.engine, self.stage, self.train, self.regularizer = engine, stage, train, stage.regularizer
        self.run, self.device, self.parameters = stage.run, engine.device, engine.parameters
        self.tokenizer = tokenizer
        self.inference = EvalBatching.of(
            tokenizer, train, batch_size=stage.evaluate.batch_size, device=engine.device, share=engine.evaluation
        )
        self.metric = judged_apart(stage.train, stage.task)
        self.schedule = Schedule.of(train, stage.optimizer, stage.folder)
        self.optimizer = AdapterOptimizer(self.parameters, stage.optimizer)
        self.solver = (
            GaussNewton(self.optimizer.parameters, decay=stage.optimizer.weight_decay)
            if stage.optimizer.kind == "gauss-newton"
            else None
        )
        self.random = uses_dropout(engine.model)
        self.dropout = engine.dropout(derive(stage.seed, "dropout")) if self.random else None
        self.scale = LossScale(on=train.precision == "fp16")
        # the compiler fuses PEFT's forward itself
        self.layers = Compiled(engine.model) if train.compile else FusedLayers(engine.model)
        self.keeper = Checkpointer(engine, self.optimizer, stage)
        self.guard = DivergenceGuard(engine, self.keeper, stage)
        self.unread = MetricsBuffer(engine.world)
        self.on_step, self.stop = stage.on_step or (lambda line: None), stage.stop or (lambda: False)
        with self._precision():
            if batches.packed:
                check_packing_isolation(engine.judged, agree=engine.world.any)
            head = engine.find_head(batches.at(0)[0].to(self.device).inputs, task=stage.task)
        engine.reshard()
        self.recorder = Recorder(stage, engine, self.optimizer, self.inference, head=head)
        shortage.keeper = self.keeper
        self.head = with_kernel(
            engine, head, batches, task=stage.task, train=train, folder=stage.folder, say=stage.say or stage.run.log
        )
        self.meter = ThroughputMeter(engine, peak_tflops=stage.peak_tflops or train.peak_tflops)
        self.used = UpdateMeter(engine.device) if stage.planned is not None else None
        if train.compile:
            self.meter.ahead(batches.at(0)[0], task=stage.task, head=self.head, around=self._precision())
            engine.reshard()
        about = {"model": engine.model, "processing_class": tokenizer, "optimizer": self.optimizer.inner}
        self.callbacks = Callbacks(stage, is_main=engine.is_main, about=about)

    def attach(self) -> None:
        """Give the regularizer the model, as before the first step."""
        self.regularizer.attach(
            self.engine.model,
            seed=derive(self.stage.seed, "regularizer"),
            total_steps=self.train.steps,
            placement=self.engine.placement,
        )

    def log(self, **line: Any) -> dict[str, Any]:
        """A line of metrics.jsonl, told to trackers and callbacks too, behind all lines of updates before it."""
        self.run.log_metrics(self.stage.name, **line)
        told = {"stage": self.stage.name, **line}
        if self.stage.track is not None and self.engine.is_main:
            self.stage.track(told)
        self.callbacks.logged(told)
        return told

    # ------------------------------------------------------------------ training

    def run_to_end(self) -> None:
        """Updates until `train.steps`, or the end of patience; the last thing done is a checkpoint."""
        state, train = self.keeper.progress, self.train
        started = time.monotonic() - state.seconds
        self.engine.model.train()
        self.callbacks.restore(state.callbacks)
        self.scale.restore(state.loss_scale)
        if state.step == 0:
            self.recorder.at(state, self.keeper.attempt)
            if train.spikes is not None:
                self.save()  # so that there is something to go back to
        self._now()
        self.callbacks.fire("train_begin")
        if state.unjudged:  # a signal came while it was
            self.judge(started)
            self.recorder.at(state, self.keeper.attempt)
        while state.step < train.steps and not state.stopped_early:
            self.callbacks.step_begin()
            began = time.monotonic()
            with self.used.during() if self.used is not None else contextlib.nullcontext():
                found = self.update()
            rates = self.meter.updated(time.monotonic() - began)
            if isinstance(found, RejectedUpdate):
                self.tell()
                self.go_back(found, started)
                state = self.keeper.progress
                continue
            state.seconds = time.monotonic() - started
            self._now()
            found.told = {"attempt": self.keeper.attempt, "step": state.step, "split": "train", **found.told}
            found.figures.append(rates)
            found.end = {"time_s": round(state.seconds, 4)}
            self.unread.add(found)
            last = state.step == train.steps
            asked = self.tell() if self.unread.at_once else self._told()
            self.callbacks.fire("step_end")
            wanted = self._asked("evaluate")
            if self.stage.dev and (last or wanted or _every(train.evaluation_interval, state.step)):
                asked |= self.tell()
                self.judge(started)
            state.stopped_early |= self._asked("training_stop") and not last
            self.recorder.at(state, self.keeper.attempt)
            state.seconds = time.monotonic() - started
            if self.unread.at_once:
                asked = self.engine.world.any(self.stop())
            due = last or state.stopped_early or _every(train.save_every, state.step)
            if asked or due or self._asked("save"):
                asked |= self.tell()
                self.save()
            if asked and not (last or state.stopped_early):
                where = f"{self.stage.name} stopped after step {state.step} of {train.steps}"
                raise Interrupted(f"{where}; its state is saved")
        self.save()  # stopped early or finished in an earlier attempt: already there
        self.callbacks.fire("train_end")

    def _told(self) -> bool:
        """Where a read makes the host wait: lines are told once they are due, and whether to stop is asked with them,
        which one process knows at once."""
        state, asked = self.keeper.progress, self.stop()
        self.unread.ask(asked)
        due = self.unread.due or bool(self.callbacks.callbacks) or self.recorder.wants(state)
        return (due or (asked and self.engine.world.size == 1) or state.step == self.train.steps) and self.tell()

    def tell(self) -> bool:
        """Write the lines of all updates that were made, before anything is saved; whether a rank asked to stop."""
        return self.unread.tell(lambda line: self.on_step(self.log(**line)), refuse=self.guard.refuse_broken)

    def _now(self) -> None:
        state = self.keeper.progress
        best = state.best_accuracy if self.train.best != "loss" else None
        best = state.best_figure if self.metric is not None else state.best_dev_loss if best is None else best
        self.callbacks.at(state.step, tokens=state.tokens, best_step=state.best_step, best=best)

    def _asked(self, what: str) -> bool:
        """Whether a callback asks for it, on any rank."""
        return bool(self.callbacks.callbacks) and self.engine.world.any(self.callbacks.asks(what))

    def save(self) -> None:
        """A checkpoint, unless there is one of this step."""
        before = self.keeper.saved_step
        self.keeper.progress.callbacks = self.callbacks.states()
        self.keeper.progress.loss_scale = self.scale.state()
        self.keeper.save()
        if self.keeper.saved_step != before:
            self.callbacks.fire("save")

    def update(self) -> MetricsRow | RejectedUpdate:
        """One optimizer update; returns its line of metrics.jsonl, or that the stage is to roll back to a checkpoint.

        Whether it is made at all is decided by figures that are the same on every rank.
        """
        state, engine = self.keeper.progress, self.engine
        step, place, task = state.step, batch_index(state.step, state.left_out), self.stage.task
        context = partial(self._context, step)
        engine.beat = partial(watchdog.progress, step, self.stage.name)
        engine.draws = partial(self.dropout.during, step) if self.dropout is not None else None
        count = self.stage.batches.supervised(place)
        rate = self.schedule(step)
        sides: Sequence[PreferenceTargets | None] = ()
        if task.has_reference:
            micros = self.stage.batches.at(place)
            sides = engine.reference_log_probs(micros, task=task, head=self.head, precision=self._precision)
        verdict, overflowed = None, True
        while overflowed:
            losses: list[torch.Tensor] = []
            engine.loss_scale, overflowed = self.scale.value, False
            try:
                with self.regularizer.step(step, loss_scale=self.scale.value) as passes:
                    for _ in passes:
                        micros = self._micros(place, sides)
                        if self.solver is not None:
                            losses.append(self.solver.compute(engine, micros, count, task=task, context=context))
                            continue
                        with self.meter.watching(micros, head=self.head), self.layers.working():
                            losses.append(
                                engine.forward_backward(micros, count, task=task, head=self.head, context=context)
                            )
                    if self.scale.on and (overflowed := self.scale.overflows(losses, engine.clip)):
                        raise UpdateRejected
                    if self.guard.watches and (verdict := self.guard.judge(losses)) is not None:
                        raise UpdateRejected
            except UpdateRejected:
                if verdict is not None:
                    return self.undo(verdict, rate)
                self.optimizer.drop_gradients()
        self.scale.undo(self.parameters.values())
        self.optimizer.leave_fixed()
        with self.recorder.update(step + 1):
            norm = engine.clip(self.stage.optimizer.clip)
            line = MetricsRow(step + 1, {"loss": None, "tokens": state.tokens + count, "lr": rate, "grad_norm": None})
            line.scalars = {"loss": losses[0], "grad_norm": norm}  # of two passes, the first is at the weights
            if self.guard.watches or self.scale.on:  # read already
                line.scalars, line.told = {}, line.told | (self.guard.found or self.scale.found)
            elif self.unread.at_once:
                line.told, line.scalars = line.complete(iter(read(line.vectors))), {}
                self.guard.refuse_broken(step + 1, line.told)
            self.callbacks.fire("pre_optimizer_step")
            self.optimizer.step(rate)
            self.regularizer.after_optimizer_step(rate)
        state.step += 1
        state.tokens += count
        self.guard.made()
        self.scale.made()
        line.figures.append(self.regularizer.figures())
        return line

    def _micros(self, place: int, sides: Sequence[PreferenceTargets | None]) -> list[MicroBatch]:
        """The micro-batches of an update, with what is known of their answers, if anything is."""
        micros: list[MicroBatch] = self.stage.batches.at(place)
        return [replace(micro, sides=known) for micro, known in zip(micros, sides, strict=True)] if sides else micros

    def undo(self, verdict: RejectedUpdate, rate: float) -> MetricsRow | RejectedUpdate:
        """Leave the update out and return its line, or the verdict where the stage is to go back."""
        with self.recorder.update(self.keeper.progress.step + 1):
            self.optimizer.drop_gradients()
        said = self.guard.skip(verdict)
        if said is None:
            return verdict
        state = self.keeper.progress
        return MetricsRow(
            state.step, {"loss": verdict.loss, "tokens": state.tokens, "lr": rate, "grad_norm": verdict.norm, **said}
        )

    def go_back(self, verdict: RejectedUpdate, started: float) -> None:
        """To the checkpoint before a spike."""

        def reattach() -> None:
            self.regularizer.detach()
            self.attach()

        line = self.guard.go_back(verdict, reattach=reattach)
        self.engine.model.train()
        self.keeper.progress.seconds = time.monotonic() - started
        self.callbacks.restore(self.keeper.progress.callbacks)
        self.scale.restore(self.keeper.progress.loss_scale)
        self._now()
        self.log(**line, split=SPIKE, time_s=round(self.keeper.progress.seconds, 4))

    @contextlib.contextmanager
    def _context(self, step: int, micro: int) -> Iterator[None]:
        """Precision, and a seed of (seed, step, micro-batch, rank) for draws that are no dropout (blocks left out)."""
        self.regularizer.on_micro_batch(micro)
        index, width = self.engine.stream
        who = (index,) if width > 1 else ()
        draws = seeded(derive(self.stage.seed, "dropout", step, micro, *who), self.device) if self.random else None
        with draws or contextlib.nullcontext(), self._precision():
            yield

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return autocast(self.train, self.device)

    # ------------------------------------------------------------------ dev and end

    def judge(self, started: float) -> None:
        """Dev loss of the live adapter; keep it if it is the best so far, count a miss otherwise."""
        state = self.keeper.progress
        state.unjudged = True
        try:
            with (
                watchdog.no_progress_timeout("dev evaluation"),
                oom_context(f"the dev evaluation after update {state.step}"),
            ):
                figures = dev_figures(
                    self.engine,
                    self.stage.dev,
                    replace(self.inference, beat=self._heard),
                    task=self.stage.task,
                    head=self.head,
                )
                if self.metric is not None:
                    figures[self.metric] = self._whole_judgement()[self.metric]["value"]
        except Interrupted as error:
            self.engine.reshard()
            self.save()
            raise Interrupted(f"{self.stage.name} {error}; its state is saved") from error
        state.unjudged = False
        line = {"attempt": self.keeper.attempt, "step": state.step, "split": "dev", **figures, "tokens": state.tokens}
        self.log(**line, time_s=round(time.monotonic() - started, 4))
        if math.isfinite(figures["loss"]) and self._better(figures):
            state.best_step, state.best_dev_loss, state.misses = state.step, figures["loss"], 0
            state.best_accuracy = figures.get("accuracy")
            state.best_figure = None if self.metric is None else figures[self.metric]
            state.best = clone(self.parameters)
            return
        state.misses += 1
        state.stopped_early = self.train.patience is not None and state.misses >= self.train.patience

    def _heard(self, rows: int) -> None:
        """A batch of the dev evaluation, or a token, is done: a signal to stop ends it on all ranks."""
        self.engine.beat()
        if self.engine.world.any(self.stop()):
            raise Interrupted(f"stopped in the dev evaluation after step {self.keeper.progress.step}")

    def _whole_judgement(self) -> dict[str, Any]:
        """Every figure of the live adapter on dev; the same on every rank."""
        return dict(
            evaluate(
                self.engine.judged,
                self.tokenizer,
                self.stage.dev,
                task=self.stage.task.judged(),
                config=replace(self.stage.evaluate, bootstrap=1),
                inference=replace(self.inference, beat=self._heard),
                label_names=self.stage.label_names,
            )
        )

    def _better(self, figures: dict[str, Any]) -> bool:
        """Whether these dev figures beat the best so far, by `train.best`."""
        state = self.keeper.progress
        if state.best_dev_loss is None:
            return True
        if self.metric is not None:
            found, best = figures[self.metric], state.best_figure
            if found != best and (found is None or best is None):
                return best is None
            if found != best:
                return bool(found < best) is metric_of(self.metric).lower
            return figures["loss"] < state.best_dev_loss
        accuracy, before = figures.get("accuracy"), state.best_accuracy
        if self.train.best != "loss" and accuracy is not None and before is not None and accuracy != before:
            return accuracy > before
        return figures["loss"] < state.best_dev_loss

    def finish(self) -> StageResult:
        """Put the best adapter into the model, save it, and mark the stage as done."""
        state = self.keeper.progress
        if state.best:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(state.best[name])
        result = StageResult(
            state.step,
            state.best_step,
            state.best_dev_loss,
            state.tokens,
            state.stopped_early,
            state.skipped,
            len(state.rewinds),
            state.best_accuracy,
            state.best_figure,
        )
        rates = self.meter.whole()
        folder = self.stage.folder
        with disk_full_interrupts(f"saving the adapter of {self.stage.name}"):
            self.engine.save_adapter(folder / "adapter")
            if self.engine.is_main:
                self.run.sync_metrics(self.stage.name)
                told = {"target_steps": self.train.steps, **asdict(result), "attempts": self.keeper.attempt}
                told["seconds"] = round(state.seconds, 3)
                told["lr"] = self.schedule(state.step - 1)
                if self.used is not None and self.stage.planned is not None:
                    told["plan"] = self.used.beside(self.stage.planned)
                write_json(folder / DONE, {**told, "rates": rates, FILES: adapter_sums(folder)})
            self.engine.world.wait()
        mishaps = [f"{result.skipped} updates left out"] if result.skipped else []
        mishaps += [f"rolled back after {result.rewinds} spikes"] if result.rewinds else []
        counted = self.stage.task.loss_denominator
        learnt = f"{result.tokens} {'supervised tokens' if counted == 'tokens' else counted}"
        line = ", ".join([learnt, *mishaps, *filter(None, [rate_text(rates)])])
        self.run.log(f"{self.stage.name}: done after step {result.steps}, {line}")
        return result


def _every(updates: int, step: int) -> bool:
    """Whether `step` is one of every so many `updates`; 0: never."""
    return bool(updates) and step % updates == 0
