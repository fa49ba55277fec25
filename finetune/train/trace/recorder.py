"""Recorder of a stage's trace; training is unaffected by it.

Everything is measured at the weights themselves, between two steps, with dropout off and without drawing from a global
generator; gradients and weights are unchanged, bit for bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...atomic import write_json
from ...compute.loss import Head
from ...compute.micro_batch import MicroBatch
from ...data.eval_batching import EvalBatching
from ...data.example import Example
from ...errors import UserError
from ...launch import watchdog
from ...parallel.engine import Engine
from ...run_directory import disk_full_interrupts
from ...seeds import derive_seed
from ..optimizer import AdapterOptimizer
from ..schedule import Schedule
from .examples import ExampleScores, score_examples, split_metrics
from .factors import AdaptedLayers, adapter_metrics, global_norm, gradient_norms, is_factor_a, is_factor_b
from .files import ABOUT, recorded_steps, trace_metadata
from .recording import Recording

if TYPE_CHECKING:
    from flatshift.regularizers.sharpness.spaces import Loss

    from ..checkpointer import TrainingState
    from ..stage import TrainingStage


class Recorder:
    """Records a `Recording` during one stage; does nothing without one."""

    def __init__(
        self,
        stage: TrainingStage,
        engine: Engine,
        optimizer: AdapterOptimizer,
        inference: EvalBatching,
        *,
        head: Head | None,
    ) -> None:
        """Prepare the trace. Raises UserError on a mesh: whole tensors in one process are required."""
        self._recording = recording = stage.recording
        self._steps: frozenset[int] = frozenset()
        if recording is None:
            return
        if engine.world.size > 1:
            raise UserError(
                "record: a run on a mesh is not recorded; leave every axis of mesh at 1, or leave the block out"
            )
        self._stage, self._engine, self._optimizer = stage, engine, optimizer
        self._head, self._inference, self._run = head, inference, stage.run
        self._steps = frozenset(recorded_steps(recording.record, stage.train.steps))
        self._layers = AdaptedLayers(engine.model) if recording.record.dynamics else None
        self._update: dict[str, float | None] = {}
        notes = self._layers.notes if self._layers is not None else ()
        told = trace_metadata(
            recording, stage=stage.name, steps=stage.train.steps, optimizer=stage.optimizer, notes=notes
        )
        with disk_full_interrupts(f"writing {stage.run.path / ABOUT}"):
            write_json(stage.run.path / ABOUT, told)

    @contextlib.contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Surround clipping and the optimizer's step number `step` (from 1)."""
        self._update = {}
        if step not in self._steps or self._layers is None:
            yield
            return
        parameters = self._engine.parameters
        factors = {name: p for name, p in parameters.items() if is_factor_a(name) or is_factor_b(name)}
        self._update = gradient_norms({name: p.grad for name, p in factors.items() if p.grad is not None})
        before = {name: p.detach().clone() for name, p in factors.items()}
        yield
        moved = global_norm(p.detach() - before[name] for name, p in factors.items())
        self._update["update.relative"] = moved / global_norm(before.values())

    def wants(self, progress: TrainingState) -> bool:
        """Return True if the state after `progress.step` steps is to be recorded."""
        return self._recording is not None and (progress.step in self._steps or progress.stopped_early)

    def at(self, progress: TrainingState, attempt: int) -> None:
        """Record the state after `progress.step` steps, if it is to be recorded (or the stage ends early)."""
        if self._recording is None or not self.wants(progress):
            return
        started = time.monotonic()
        with watchdog.no_progress_timeout("recording"):
            figures = self._figures(self._recording, progress.step)
        last = progress.step - 1
        stage = self._stage
        rate = Schedule.of(stage.train, stage.optimizer, stage.folder)(last) if last >= 0 else None
        self._run.log_trace(
            stage.name,
            attempt=attempt,
            step=progress.step,
            tokens=progress.tokens,
            lr=rate,
            time_s=round(progress.seconds, 4),
            record_s=round(time.monotonic() - started, 4),
            **figures,
        )

    def _figures(self, recording: Recording, step: int) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for split, examples in recording.splits.items():
            figures |= split_metrics(split, self._judge(examples), recording.flipped if split == "train" else None)
        if self._layers is not None:
            figures |= self._update | adapter_metrics(self._layers.factors())
        if step in recording.record.sharpness:
            figures |= self._curvature(recording.curved, step)
        return figures

    def _judge(self, examples: Sequence[Example]) -> ExampleScores:
        return score_examples(self._engine.model, examples, self._inference, task=self._stage.task, head=self._head)

    def _curvature(self, rows: Sequence[Example], step: int) -> dict[str, float | None]:
        from flatshift.regularizers.config import RegularizerError

        from .curvature import FIRST, curvature_metrics, format_rate_line, mean_squared_gradients

        stage, model, parameters = self._stage, self._engine.model, self._engine.parameters
        try:
            if step:
                preconditioner = self._optimizer.preconditioner()
            else:
                first = [self._loss(stage.batches.at(i)) for i in range(FIRST)]
                squares = mean_squared_gradients(model, first, parameters=parameters)
                preconditioner = self._optimizer.first_preconditioner(squares)
            figures = curvature_metrics(
                model,
                self._loss(self._inference.batches(rows, stage.task)),
                parameters=parameters,
                preconditioner=preconditioner,
                seed=derive_seed(stage.seed, "record", "sharpness"),
            )
        except RegularizerError as error:  # a missing metric must not end the run
            self._run.log(f"warning: no curvature of {stage.name} here: {error}")
            return {}
        if not step and (top := figures["sharpness.preconditioned"] or 0) > 0:
            (stage.say or self._run.log)(format_rate_line(top, stage.optimizer, rows=len(rows)))
        return figures

    def _loss(self, batches: Iterable[MicroBatch]) -> Loss:
        from .curvature import mean_loss

        micros = [micro.to(self._engine.device) for micro in batches]
        return mean_loss(self._engine.model, micros, task=self._stage.task, head=self._head)
