"""Settings and result of one training stage, and the checks before its first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshift.regularizers.protocol import Regularizer

from ..atomic import read_json_object
from ..config import Evaluate, Optimizer, Train
from ..data.batches import TrainingDataLoader
from ..data.example import Example
from ..digests import DONE
from ..errors import UserError
from ..evaluate.metrics import find_metric, metric_names
from ..models.anatomy import describe_prefix
from ..parallel.engine import Engine
from ..planner.rules import RuleSettings
from ..run_directory import RunDirectory
from ..tasks import Task
from .peak_memory import PlannedStep
from .trace.examples import Recording

if TYPE_CHECKING:
    from transformers import TrainerCallback


@dataclass(frozen=True)
class StageResult:
    """Result of a finished stage.

    `best_step` is the step after which dev was best (`train.best`), None without dev rows; the other `best_` values are
    those after it: `best_dev_loss` in nats per target token (per example for classification), `best_accuracy` where
    there are classes, and `best_metric` where `train.best` is neither loss nor accuracy.
    """

    steps: int
    """Completed optimizer steps."""
    best_step: int | None
    best_dev_loss: float | None
    tokens: int
    """Target tokens seen."""
    stopped_early: bool
    """True if `train.patience` or a callback ended it."""
    skipped: int = 0
    """Steps left out because their loss or gradient was not a finite number (`train.skip_nonfinite`)."""
    rewinds: int = 0
    """Loss spikes that were rolled back (`train.spikes`)."""
    best_accuracy: float | None = None
    best_metric: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """Data, settings, outputs and callbacks of a training stage."""

    name: str
    """warm-up, fine-tune, …; names its folder in the run directory."""
    task: Task
    batches: TrainingDataLoader
    """`at(step)` gives the micro-batches of a step."""
    dev: Sequence[Example]
    optimizer: Optimizer
    train: Train
    evaluate: Evaluate
    label_names: Sequence[str] | None = None
    """Classes in head order, for a metric of `train.best` that needs them."""
    regularizer: Regularizer
    run: RunDirectory
    seed: int
    recording: Recording | None = None
    """Quantities for the run's trace.jsonl and the steps to record; in one process only."""
    on_step: Callable[[dict[str, Any]], None] | None = None
    """Called after every step with its row of metrics.jsonl."""
    stop: Callable[[], bool] | None = None
    """Called after every step; True saves a checkpoint and raises Interrupted."""
    callbacks: Sequence[TrainerCallback] = ()
    """Objects of `transformers.TrainerCallback` (`flatshift.finetune.train.callbacks` says which events there are)."""
    track: Callable[[dict[str, Any]], None] | None = None
    """Receives every row of metrics.jsonl, on the main rank (`flatshift.finetune.train.trackers`)."""
    peak_tflops: float | None = None
    """Peak of one device, for the MFU; default: `train.peak_tflops`."""
    plan: PlannedStep | None = None
    """Plan printed before step 1, to be compared with the measured steps; None: not measured."""
    rules: RuleSettings | None = None
    """Settings that advice about memory must go with."""
    log: Callable[[str], None] | None = None
    """Receives lines on decisions for a CUDA device; default: the run's log."""

    @property
    def folder(self) -> Path:
        """Directory of the stage's own files."""
        return self.run.stage(self.name)


def check_metric(metric: str, task: Task, setting: str, dev: Sequence[Example] = ()) -> None:
    """Raise UserError, beginning with `setting`, for a metric that `task` does not have, or that is of pairs or answers
    where none of the examples `dev` has one; `auto` and `loss` always pass."""
    if metric in ("auto", "loss"):
        return
    if metric == "accuracy" and not task.traits.has_accuracy and "accuracy" not in task.figure_names:
        raise UserError(f"{setting}: accuracy is evaluated for classification only, not for {task.kind}; take loss")
    if metric not in task.figure_names or find_metric(metric).is_floor:
        known = ", ".join(name for name in task.figure_names if not find_metric(name).is_floor)
        raise UserError(f"{setting}: {metric} is not evaluated for task.kind: {task.kind} as set; there are {known}")
    of_answers = metric in metric_names("answers", "seq2seq", "agreement")
    if of_answers and dev and all(example.answer is None for example in dev):
        raise UserError(f"{setting}: {metric} compares answers, and train.max_length cuts off that of every dev row")
    if metric in ("preference_accuracy", "reward_margin") and dev and dev[0].rejected_ids is None:
        raise UserError(f"{setting}: {metric} is of pairs, and dev rows are single answers; take loss")


def full_evaluation_metric(train: Train, task: Task) -> str | None:
    """Return the metric of `train.best` if it needs a full evaluation of the dev examples; None for loss and
    accuracy."""
    quick = ("auto", "loss", "accuracy") if task.traits.has_accuracy else ("auto", "loss")
    return None if train.best in quick else train.best


def check_length(engine: Engine, batches: TrainingDataLoader) -> None:
    """Raise UserError for rows longer than the position limit minus the soft-prompt length."""
    limit = engine.position_limit()
    longest = -(-batches.max_length // engine.multiple) * engine.multiple
    if limit is not None and longest > limit:
        padded = f", padded to {longest} for the mesh," if longest > batches.max_length else ""
        raise UserError(
            f"train.max_length: {batches.max_length}{padded} is above {positions_left(limit, engine.model)}"
        )


def positions_left(limit: int, model: Any) -> str:
    """`limit` as in `this backbone's 96 positions`; of `model` only the soft tokens before every text are read."""
    if prefix := describe_prefix(model):
        return f"the {limit} positions that this backbone has left after {prefix}"
    return f"this backbone's {limit} positions"


def finished_result(stage: TrainingStage) -> StageResult | None:
    """Return the result of a finished stage; None if there are steps left."""
    file = stage.run.path / "stages" / stage.name / DONE
    if not file.is_file():
        return None
    record = read_json_object(file, "target_steps")
    if record["target_steps"] != stage.train.steps:  # asked to go on for longer: continue from its last checkpoint
        return None
    return StageResult(**{name: record[name] for name in StageResult.__dataclass_fields__ if name in record})
