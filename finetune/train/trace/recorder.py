"""Recorder of a stage's trace; training is unaffected by it.

Everything is measured at the weights themselves, between two steps, with dropout off and without drawing from a global
generator; gradients and weights are unchanged, bit for bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flatshift.regularizers.config import RegularizerError
from flatshift.regularizers.sharpness.spaces import Loss

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
from ..checkpointer import TrainingState
from ..optimizer import AdapterOptimizer
from ..schedule import Schedule
from ..stage import TrainingStage
from .curvature import mean_loss
from .examples import Recording, score_examples, split_metrics
from .factors import AdaptedLayers, adapter_metrics, global_norm, gradient_norms, is_factor_a, is_factor_b
from .files import ABOUT, recorded_steps, stability_threshold


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
        steps = recorded_steps(recording.record, stage.train.steps)
        self._steps = frozenset(steps)
        self._layers = AdaptedLayers(engine.model) if recording.record.dynamics else None
        self._update: dict[str, float | None] = {}
        metadata = {
            "format": 1,
            "stage": stage.name,
            "steps": list(steps),
            "rows": {split: len(examples) for split, examples in recording.splits.items()},
            "noisy": None if recording.flipped is None else int(recording.flipped.mask.sum()),
            "sharpness_rows": len(recording.curved),
            "stability_threshold": stability_threshold(stage.optimizer.betas[0]),
            "notes": list(self._layers.notes) if self._layers is not None else [],
        }
        with disk_full_interrupts(f"writing {stage.run.path / ABOUT}"):
            write_json(stage.run.path / ABOUT, metadata)

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

    def is_due(self, progress: TrainingState) -> bool:
        """Return True if the state after `progress.step` steps is to be recorded."""
        return self._recording is not None and (progress.step in self._steps or progress.stopped_early)

    def record(self, progress: TrainingState, attempt: int) -> None:
        """Record the state after `progress.step` steps, if it is to be recorded (or the stage ends early)."""
        if self._recording is None or not self.is_due(progress):
            return
        started, stage, step = time.monotonic(), self._stage, progress.step
        with watchdog.no_progress_timeout("recording"):
            metrics = self._metrics(self._recording, step)
        self._run.log_trace(
            stage.name,
            attempt=attempt,
            step=step,
            tokens=progress.tokens,
            lr=Schedule.of(stage.train, stage.optimizer, stage.folder)(step - 1) if step else None,
            time_s=round(progress.seconds, 4),
            record_s=round(time.monotonic() - started, 4),
            **metrics,
        )

    def _metrics(self, recording: Recording, step: int) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        task, head = self._stage.task, self._head
        for split, examples in recording.splits.items():
            scores = score_examples(self._engine.model, examples, self._inference, task=task, head=head)
            metrics |= split_metrics(split, scores, recording.flipped if split == "train" else None)
        if self._layers is not None:
            metrics |= self._update | adapter_metrics(self._layers.factors())
        if step in recording.record.sharpness:
            metrics |= self._curvature(recording.curved, step)
        return metrics

    def _curvature(self, rows: Sequence[Example], step: int) -> dict[str, float | None]:
        from .curvature import FIRST, curvature_metrics, format_rate_line, mean_squared_gradients

        stage, model, parameters = self._stage, self._engine.model, self._engine.parameters
        try:
            if step:
                preconditioner = self._optimizer.preconditioner()
            else:
                losses = [self._loss(stage.batches.at(i)) for i in range(FIRST)]
                squares = mean_squared_gradients(model, losses, parameters=parameters)
                preconditioner = self._optimizer.first_preconditioner(squares)
            metrics = curvature_metrics(
                model,
                self._loss(self._inference.batches(rows, stage.task)),
                parameters=parameters,
                preconditioner=preconditioner,
                seed=derive_seed(stage.seed, "record", "sharpness"),
            )
        except RegularizerError as error:  # a missing metric must not end the run
            self._run.log(f"warning: no curvature of {stage.name} here: {error}")
            return {}
        if not step and (largest := metrics["sharpness.preconditioned"] or 0) > 0:
            (stage.log or self._run.log)(format_rate_line(largest, stage.optimizer, rows=len(rows)))
        return metrics

    def _loss(self, batches: Iterable[MicroBatch]) -> Loss:
        micros = [micro.to(self._engine.device) for micro in batches]
        return mean_loss(self._engine.model, micros, task=self._stage.task, head=self._head)
