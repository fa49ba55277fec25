"""What a stage of training is to those that drive it: the work that it asks for, and how it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from regularizers.layers.fused import FusedLayers

from ..adapters.soft_tokens import before_text
from ..atomic import read_object
from ..compute.loss import Head
from ..compute.numerics import cpu_threads, deterministic
from ..compute.precision import float32_products
from ..config import Optimizer, Train
from ..data.prefetch import fed
from ..errors import UserError
from ..models.compiled import Compiled
from ..parallel.engine import Context, Engine
from ..run_directory import RunDirectory
from .out_of_memory import Shortage
from .throughput import Meter

if TYPE_CHECKING:
    from ..data.batches import Batches, MicroBatch
    from ..tasks import Task


@dataclass(frozen=True)
class StageResult:
    """How a stage ended."""

    steps: int
    """Completed updates."""
    best_step: int | None
    """Update after which dev was best (`train.best`); None without dev rows."""
    best_dev_loss: float | None
    """Dev loss there: nats per supervised token (per example for classification)."""
    tokens: int
    """Supervised tokens seen."""
    stopped_early: bool
    """Whether `train.patience` or a callback ended it."""
    skipped: int = 0
    """Updates left out because their loss or gradient was not a finite number (`train.skip_nonfinite`)."""
    rewinds: int = 0
    """Loss spikes that it went back for (`train.spikes`)."""
    best_accuracy: float | None = None
    """Dev accuracy after `best_step`; None where there are no classes."""


@dataclass(frozen=True)
class Work:
    """One forward and backward pass over the micro-batches of an update, which a stage asks for."""

    engine: Engine
    """Whose parameters are to get the gradients."""
    task: Task
    micros: Sequence[MicroBatch]
    count: int
    """Supervised tokens (examples) of the update, over all ranks: the divisor of its loss."""
    head: Head | None
    """What the loss may be made in slices of (`finetune.compute.loss.find_head`)."""
    context: Context
    """What surrounds the forward pass of each micro-batch."""
    meter: Meter
    """Counts what the engine does."""
    compiled: Compiled | None = None
    """The model's blocks, compiled."""
    fused: FusedLayers | None = None
    """The model's plain LoRA layers, where they may compute in the fused form."""

    def compute(self) -> torch.Tensor:
        """Do it by the engine's `forward_backward`; returns the loss, float32 scalar."""
        nothing = contextlib.nullcontext()
        compiled = self.compiled.working() if self.compiled is not None else nothing
        fused = self.fused.working() if self.fused is not None else nothing
        with self.meter.watching(self.micros, head=self.head), compiled, fused:
            return self.engine.forward_backward(
                self.micros, self.count, task=self.task, head=self.head, context=self.context
            )


@contextlib.contextmanager
def on_device(
    engine: Engine,
    batches: Batches,
    *,
    train: Train,
    optimizer: Optimizer,
    run: RunDirectory,
    stage: str,
    say: Callable[[str], None],
) -> Iterator[tuple[Any, Shortage]]:
    """What the device asks for around a stage: threads, fixed algorithms, float32 products, batches made ahead, and
    what is told when memory runs out. Gives the batches to take, and who must be told of the step."""
    with (
        cpu_threads(train.threads),
        deterministic(train, engine.device),
        float32_products(train, engine.device),
        fed(batches, engine, train=train, say=say) as source,
        Shortage(engine, train=train, optimizer=optimizer, run=run, stage=stage) as short,
    ):
        yield source, short


def check_best(train: Train, task: Task) -> None:
    """Raise UserError for a `train.best` that no dev evaluation of `task` has."""
    if train.best == "accuracy" and not task.accuracy:
        raise UserError(f"train.best: accuracy is judged for classification only, not for {task.kind}; take loss")


def check_length(engine: Engine, batches: Batches) -> None:
    """Raise UserError for rows longer than the backbone's positions, or than what lies before them leaves of those."""
    limit = engine.position_limit()
    longest = -(-batches.max_length // engine.multiple) * engine.multiple
    if limit is not None and longest > limit:
        padded = f", padded to {longest} for the mesh," if longest > batches.max_length else ""
        front = before_text(engine.model)
        left = f"the {limit} positions that this backbone has left beside {front}"
        room = left if front else f"this backbone's {limit} positions"
        raise UserError(f"train.max_length: {batches.max_length}{padded} is above {room}")


def ended(run: RunDirectory, stage: str, train: Train) -> StageResult | None:
    """How a stage that is done ended; None where there is work left."""
    file = run.path / "stages" / stage / "done.json"
    if not file.is_file():
        return None
    record = read_object(file, "target_steps")
    if record["target_steps"] != train.steps:  # asked to go on for longer: continue from its last checkpoint
        return None
    return StageResult(**{name: record[name] for name in StageResult.__dataclass_fields__ if name in record})
