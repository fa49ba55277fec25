"""What a stage of training is to those that drive it: what it is told, how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic import read_json_object
from ..config import Evaluate, Optimizer, Train
from ..digests import DONE
from ..errors import UserError
from ..evaluate.metrics import find_metric
from ..models.anatomy import describe_prefix
from ..parallel.engine import Engine
from ..run_directory import RunDirectory
from .peak_memory import PlannedStep

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from flatshift.regularizers.protocol import Regularizer

    from ..data.batches import TrainingDataLoader
    from ..data.example import Example
    from ..tasks import Task
    from .trace.recording import Recording


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
    best_figure: float | None = None
    """The metric of `train.best` after `best_step`, where it is neither."""


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """What a stage trains and on what, where it writes, and who is told of it."""

    name: str
    """warm-up, fine-tune, …; names its folder in the run directory."""
    task: Task
    batches: TrainingDataLoader
    """`at(step)` gives the micro-batches of an update."""
    dev: Sequence[Example]
    optimizer: Optimizer
    train: Train
    evaluate: Evaluate
    label_names: Sequence[str] | None = None
    """Classes in head order, where a metric of `train.best` asks for them."""
    regularizer: Regularizer
    run: RunDirectory
    seed: int
    recording: Recording | None = None
    """What goes into the run's trace.jsonl at which steps; in one process only."""
    on_step: Callable[[dict[str, Any]], None] | None = None
    """Called after every update with its line of metrics.jsonl."""
    stop: Callable[[], bool] | None = None
    """Asked after every update; True saves a checkpoint and raises Interrupted."""
    callbacks: Sequence[TrainerCallback] = ()
    """Objects of `transformers.TrainerCallback` (`flatshift.finetune.train.callbacks` says which events there are)."""
    track: Callable[[dict[str, Any]], None] | None = None
    """Takes every line of metrics.jsonl, on the main rank (`flatshift.finetune.train.trackers`)."""
    peak_tflops: float | None = None
    """Of one device, for the MFU; by default `train.peak_tflops`."""
    planned: PlannedStep | None = None
    """What was said before step 1, to be put beside what updates take; None: nobody measures that."""
    say: Callable[[str], None] | None = None
    """Told what a CUDA device decided, in lines; by default the run's log."""

    @property
    def folder(self) -> Path:
        """Where the stage's own files lie."""
        return self.run.stage(self.name)


def check_best(train: Train, task: Task) -> None:
    """Raise UserError for a `train.best` that no dev evaluation of `task` has."""
    check_metric(train.best, task, "train.best")


def check_metric(metric: str, task: Task, setting: str) -> None:
    """Raise UserError, beginning with `setting`, for a metric that `task` is not judged by; `auto` and `loss` always
    go."""
    if metric in ("auto", "loss"):
        return
    if metric == "accuracy" and not task.accuracy and "accuracy" not in task.figure_names:
        raise UserError(f"{setting}: accuracy is judged for classification only, not for {task.kind}; take loss")
    if metric not in task.figure_names or find_metric(metric).is_floor:
        known = ", ".join(name for name in task.figure_names if not find_metric(name).is_floor)
        raise UserError(f"{setting}: {metric} is not judged for task.kind: {task.kind} as set; there are {known}")


def full_evaluation_metric(train: Train, task: Task) -> str | None:
    """The metric of `train.best` that takes a whole judgement of the dev rows; None for loss and accuracy."""
    quick = ("auto", "loss", "accuracy") if task.accuracy else ("auto", "loss")
    return None if train.best in quick else train.best


def check_length(engine: Engine, batches: TrainingDataLoader) -> None:
    """Raise UserError for rows longer than the backbone's positions, or than what lies before them leaves of those."""
    limit = engine.position_limit()
    longest = -(-batches.max_length // engine.multiple) * engine.multiple
    if limit is not None and longest > limit:
        padded = f", padded to {longest} for the mesh," if longest > batches.max_length else ""
        raise UserError(
            f"train.max_length: {batches.max_length}{padded} is above {positions_left(limit, engine.model)}"
        )


def positions_left(limit: int, model: Any) -> str:
    """`limit` as in `this backbone's 96 positions`; of `model` only what lies before every text is read."""
    front = describe_prefix(model)
    beside = f"the {limit} positions that this backbone has left beside {front}"
    return beside if front else f"this backbone's {limit} positions"


def finished_result(stage: TrainingStage) -> StageResult | None:
    """How a stage that is done ended; None where there is work left."""
    file = stage.run.path / "stages" / stage.name / DONE
    if not file.is_file():
        return None
    record = read_json_object(file, "target_steps")
    if record["target_steps"] != stage.train.steps:  # asked to go on for longer: continue from its last checkpoint
        return None
    return StageResult(**{name: record[name] for name in StageResult.__dataclass_fields__ if name in record})
