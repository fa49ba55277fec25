"""Callbacks with the names of transformers' `Trainer`, for stages that are trained from Python.

    TrainingStage(name="fine-tune", ..., callbacks=[EarlyStoppingCallback(early_stopping_patience=3)])

Any `transformers.TrainerCallback` receives these events: `on_train_begin`, `on_step_begin`, `on_pre_optimizer_step`
(gradients are clipped; not for skipped steps), `on_step_end`, `on_log` (after every step and every dev evaluation),
`on_evaluate`, `on_save`, `on_train_end`. The flags it sets in `control` take effect at the end of the step:
`should_training_stop` ends the stage as `train.patience` does, `should_evaluate` evaluates on dev (if there are rows)
and `should_save` writes a checkpoint. Every step is logged anyway.

There are no epochs here (batches are one endless stream) and gradients are dropped right after the optimizer's step, so
`on_epoch_begin`, `on_epoch_end`, `on_optimizer_step`, `on_substep_end` and the events of prediction and of the hub are
never fired; a callback that overrides one of them causes a warning. `should_epoch_stop` is rejected. `args` has only
the attributes of `CallbackArguments`.

On a mesh every rank calls its callbacks, and a request of any of them is carried out by all. A callback with a state
(`ExportableState`) gets it back when the stage is resumed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ..errors import UserError
from ..evaluate.metrics import METRICS, find_metric
from .stage import TrainingStage, full_evaluation_metric

_EVENTS = {
    *("init_end", "train_begin", "step_begin", "pre_optimizer_step", "step_end", "log", "evaluate", "save", "train_end")
}


class CallbackArguments(SimpleNamespace):
    """Attributes of `TrainingArguments` available to callbacks; any other raises an AttributeError.

    `per_device_train_batch_size` is the rows of one micro-batch, over all data ranks together; `eval_strategy` is `no`
    and `load_best_model_at_end` False without dev rows.
    """

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a stage has no TrainingArguments.{name}; its settings are flatshift.finetune.config.Train"
        )


class Callbacks:
    """Fires a stage's events to callbacks and collects their requests."""

    def __init__(self, stage: TrainingStage, *, is_main: bool, objects: Mapping[str, Any]) -> None:
        """Check the callbacks and fire `init_end`.

        objects: `model`, `processing_class` and `optimizer`, passed to every event.
        """
        train, optimizer, has_dev = stage.train, stage.optimizer, bool(stage.dev)
        metric = full_evaluation_metric(train, stage.task)
        metric = metric or ("accuracy" if stage.task.traits.has_accuracy and train.best != "loss" else "loss")
        self.callbacks = list(stage.callbacks)
        self._objects = dict(objects)
        if not self.callbacks:
            return
        from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

        self.control = TrainerControl()
        self.state = TrainerState(
            max_steps=train.steps, logging_steps=1, eval_steps=train.evaluation_interval, save_steps=train.save_every,
            train_batch_size=train.batch_size, is_local_process_zero=is_main, is_world_process_zero=is_main,
        )  # fmt: skip
        self.args = CallbackArguments(
            output_dir=str(stage.run.path), max_steps=train.steps, per_device_train_batch_size=train.batch_size,
            gradient_accumulation_steps=train.accumulate, learning_rate=optimizer.lr,
            weight_decay=optimizer.weight_decay, max_grad_norm=optimizer.clip, seed=train.seed,
            eval_strategy="steps" if has_dev else "no", eval_steps=train.evaluation_interval,
            save_strategy="steps" if train.save_every else "no", save_steps=train.save_every,
            metric_for_best_model=f"eval_{metric}", greater_is_better=not find_metric(metric).lower,
            load_best_model_at_end=has_dev, logging_strategy="steps", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        for callback in self.callbacks:
            if not isinstance(callback, TrainerCallback):
                raise UserError(
                    f"callbacks: {type(callback).__name__} is no transformers.TrainerCallback; derive it from that"
                )
            never_fired = [
                name
                for name, method in vars(TrainerCallback).items()
                if name.startswith("on_")
                and name.removeprefix("on_") not in _EVENTS
                and getattr(type(callback), name) is not method
            ]
            if never_fired:
                text = f"{type(callback).__name__} listens to {', '.join(never_fired)}, which never comes here"
                stage.run.log(f"warning: {text}")
                warnings.warn(text, stacklevel=2)
        self.fire("init_end")

    def fire(self, event: str, **details: Any) -> None:
        """Call every callback for `event` (without `on_`)."""
        for callback in self.callbacks:
            control = getattr(callback, f"on_{event}")(self.args, self.state, self.control, **self._objects, **details)
            if control is not None:
                self.control = control
        if self.callbacks and self.control.should_epoch_stop:
            raise UserError(
                "callbacks: should_epoch_stop has no meaning where there are no epochs; use should_training_stop"
            )

    def set_position(self, step: int, *, tokens: int, best_step: int | None, best: float | None) -> None:
        """Set the current position of the stage."""
        if self.callbacks:
            self.state.global_step, self.state.num_input_tokens_seen = step, tokens
            self.state.best_global_step, self.state.best_metric = best_step, best

    def begin_step(self) -> None:
        """Begin the next step; requests of the last one are cleared."""
        if self.callbacks:
            self.control.should_save = self.control.should_evaluate = self.control.should_log = False
            self.fire("step_begin")

    def report(self, row: Mapping[str, Any]) -> None:
        """Report a row of metrics.jsonl: `loss`, `grad_norm`, `learning_rate` and so on, or `eval_NAME` of metrics."""
        if not self.callbacks:
            return
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k not in ("attempt", "step")}
        if row["split"] == "dev":
            numbers = {f"eval_{name}": value for name, value in numbers.items() if name in METRICS}
        elif "lr" in numbers:
            numbers["learning_rate"] = numbers.pop("lr")
        self.state.log_history.append({**numbers, "step": row["step"]})
        self.fire("log", logs=numbers)
        if row["split"] == "dev":
            self.fire("evaluate", metrics=numbers)

    def requests(self, action: str) -> bool:
        """Return True if a callback has set `control.should_<action>`."""
        return bool(self.callbacks) and bool(getattr(self.control, f"should_{action}"))

    def states(self) -> list[dict[str, Any] | None]:
        """Return the state of each callback, for JSON; None for those without one."""
        states = [callback.state() if hasattr(callback, "state") else None for callback in self.callbacks]
        return [dict(state["attributes"]) if state else None for state in states]

    def restore(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Restore the callbacks' `states`, in the same order."""
        for callback, attributes in zip(self.callbacks, states, strict=False):
            for name, value in (attributes or {}).items():
                setattr(callback, name, value)
