"""Updates that must not be applied: gradients that overflow fp16, losses or gradients that are not finite, and spikes.

Every decision uses values that are the same on all ranks, before the regularizer learns from the step, so a skipped
step leaves no trace but its row in metrics.jsonl.

**fp16** (Micikevicius et al. 1710.03740, §3.2): gradients of activations below 6e-8 would be zero. The loss is
multiplied by a power of two before backward and gradients are divided by it afterwards, which changes no bit of a
float32 gradient. If one of them overflows, the step is repeated on the same rows with half the scale, so no row is lost
and a step has the same meaning as in other precisions; torch's `GradScaler` skips such steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..config import SpikeRecovery
from ..errors import UserError
from ..launch import watchdog
from ..parallel.engine import Engine
from ..parallel.layout import local_part
from .checkpointer import Checkpointer, batch_index
from .deferred_metrics import read_numbers
from .stage import TrainingStage

FIRST = 2.0**16
LARGEST = 2.0**24
GROWTH_EVERY = 2000
"""Consecutive steps without an overflow after which the scale is doubled."""


class Diverged(UserError):
    """Loss or gradient is not finite, or spikes do not end; earlier checkpoints are kept."""


class UpdateRejected(Exception):
    """Raised inside `regularizer.step` so that the regularizer learns nothing from a rejected step."""


@dataclass(frozen=True)
class RejectionReason:
    """Reason a step is rejected: its loss or gradient norm is not finite, or the loss is a spike above `limit`."""

    loss: float
    norm: float
    limit: float | None = None

    @property
    def non_finite_part(self) -> str:
        return "gradient" if math.isfinite(self.loss) else "loss"


class DivergenceGuard:
    """Checks the steps of one stage (`train.skip_nonfinite`, `train.spikes`); every rank calls it alike."""

    def __init__(self, engine: Engine, checkpointer: Checkpointer, stage: TrainingStage) -> None:
        self._engine, self._checkpointer = engine, checkpointer
        self._run, self._stage, self._train = stage.run, stage.name, stage.train
        # otherwise steps are not checked inside the regularizer's step, and a value that is not finite ends the stage
        self.checks_steps = stage.train.skip_nonfinite > 0 or stage.train.spikes is not None
        self.last_values: dict[str, float] = {}
        """`loss` and `grad_norm` of the step checked last."""

    def check(self, losses: Sequence[Tensor]) -> RejectionReason | None:
        """Return the reason to reject the current step; None to accept it. Gradients are unchanged.

        losses: of each pass, the first at the weights themselves.
        """
        values, norm = _read_losses_and_norm(losses, self._engine.clip(None))
        norm /= self._engine.loss_scale
        self.last_values = {"loss": values[0], "grad_norm": norm}
        if not all(map(math.isfinite, [*values, norm])):
            return RejectionReason(next((value for value in values if not math.isfinite(value)), values[0]), norm)
        if self._train.spikes is None:
            return None
        limit = spike_limit(self._checkpointer.progress.recent, self._train.spikes)
        # sums over ranks may differ in the last bit, so the ranks agree on one decision
        return RejectionReason(values[0], norm, limit) if self._engine.world.any(values[0] > limit) else None

    def step_applied(self) -> None:
        """Record that the current step was applied."""
        state = self._checkpointer.progress
        state.skipped_in_a_row = 0
        if self._train.spikes is not None:
            state.recent = [*state.recent, self.last_values["loss"]][-self._train.spikes.window :]

    def skip(self, rejected: RejectionReason) -> dict[str, Any] | None:
        """Count the step as skipped and return the fields for its row; None if the stage must roll back instead. Raises
        Diverged if neither is allowed."""
        state, spikes = self._checkpointer.progress, self._train.spikes
        step = state.step + 1
        if rejected.limit is None and state.skipped_in_a_row < self._train.skip_nonfinite:
            state.step = step
            state.skipped += 1
            state.skipped_in_a_row += 1
            self._run.log(
                f"warning: {self._stage}: step {step} is skipped, its {rejected.non_finite_part} is not a finite "
                f"number ({state.skipped} so far)"
            )
            return {"skipped": True, "skipped_updates": state.skipped}
        if spikes is None or len(state.rewinds) >= spikes.most:
            self.refuse(step, rejected)
        return None

    def roll_back(self, rejected: RejectionReason, *, reattach: Callable[[], None]) -> dict[str, Any]:
        """Roll back to the checkpoint before a spike, skip the batches around it, and return the row that records it.

        reattach: resets the regularizer to its state before the first step.
        """
        step, attempt = self._checkpointer.progress.step + 1, self._checkpointer.attempt
        before = self._checkpointer.progress.skipped_ranges
        spike = {"loss": _finite_or_none(rejected.loss), "limit": _finite_or_none(rejected.limit)}
        with watchdog.no_progress_timeout("going back"):
            if not self._checkpointer.rewind({"step": step, **spike}, reattach=reattach):
                self.refuse(step, rejected)
        state = self._checkpointer.progress
        first = batch_index(state.step, before)
        stop = next(stop for _, stop in state.skipped_ranges if stop > first)
        above = f" is above {rejected.limit:.4g}" if rejected.limit is not None else ""
        self._run.log(
            f"warning: {self._stage}: spike in step {step}, its loss {rejected.loss:.4g}{above}; back to step "
            f"{state.step}, without batches {first} to {stop - 1}"
        )
        row = {"attempt": attempt, "step": step, **spike, "tokens": state.tokens}
        return {**row, "rewound_to": state.step, "left_out": state.skipped_ranges}

    def raise_if_not_finite(self, step: int, row: Mapping[str, Any]) -> None:
        """Raise Diverged if the `loss` or `grad_norm` of step number `step` is not finite."""
        if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
            self.refuse(step, RejectionReason(row["loss"], row["grad_norm"]))

    def refuse(self, step: int, rejected: RejectionReason) -> NoReturn:
        """Raise Diverged for step number `step`."""
        state, saved = self._checkpointer.progress, self._checkpointer.saved_step
        if rejected.limit is not None:
            problem = f"the loss at step {step}, {rejected.loss:.4g}, is a spike above {rejected.limit:.4g}"
        else:
            problem = f"the {rejected.non_finite_part} at step {step} is not a finite number"
        notes = []
        if rejected.limit is None and state.skipped_in_a_row:
            notes.append(f"{state.skipped_in_a_row} steps in a row were skipped before it")
        if state.rewinds:
            notes.append(f"the stage went back {len(state.rewinds)} times")
        notes.append(f"the checkpoint of step {saved} is kept" if saved >= 0 else "no checkpoint was due yet")
        message = (
            f"{self._stage}: {problem} ({'; '.join(notes)}); lower optimizer.lr, set optimizer.clip, or look at the "
            "rows of this step"
        )
        self._run.log(f"error: {message}")
        raise Diverged(message)


class LossScale:
    """Loss scale of one stage. Always 1 unless the stage computes in fp16."""

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.value = FIRST if on else 1.0
        self.good = 0
        """Consecutive steps without an overflow."""
        self.last_values: dict[str, float] = {}
        """Unscaled `loss` and `grad_norm` of the step checked last."""

    def shrink(self) -> bool:
        """Halve the scale after an overflow; return False if it is 1 already and the gradient itself is not finite."""
        if self.value <= 1.0:
            return False
        self.value, self.good = self.value / 2, 0
        return True

    def overflows(self, losses: Sequence[Tensor], clip: Callable[[None], Tensor]) -> bool:
        """Return True, and halve the scale, if the scaled gradients overflow fp16 while the losses are finite.

        clip: returns the global norm of the scaled gradients. The result is the same on every rank.
        """
        values, norm = _read_losses_and_norm(losses, clip(None))
        self.last_values = {"loss": values[0], "grad_norm": norm / self.value}
        return all(map(math.isfinite, values)) and not math.isfinite(norm) and self.shrink()

    def step_applied(self) -> None:
        """Record that a step was applied; double the scale when due."""
        if not self.on:
            return
        self.good += 1
        if self.good >= GROWTH_EVERY:
            self.value, self.good = min(2 * self.value, LARGEST), 0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients of `parameters` (or this rank's parts of them) by the scale, in place."""
        if self.value != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    local_part(parameter.grad).mul_(1.0 / self.value)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint; empty if scaling is off."""
        return {"value": self.value, "good": self.good} if self.on else {}

    def restore(self, state: dict[str, float]) -> None:
        """Restore a `state`."""
        if self.on and state:
            self.value, self.good = float(state["value"]), int(state["good"])


def spike_limit(losses: Sequence[float], spikes: SpikeRecovery) -> float:
    """Return the loss above which the next step is a spike (`flatshift.finetune.config.SpikeRecovery`); infinite before
    a full window.

    losses: of the last steps, at most `spikes.window` of them.
    """
    if len(losses) < spikes.window:
        return math.inf
    median = statistics.median(losses)
    # 1.4826 · MAD estimates the standard deviation; at least 1 %, so that noise on a flat stretch is no spike
    spread = max(1.4826 * statistics.median(abs(loss - median) for loss in losses), abs(median) / 100)
    return median + spikes.threshold * spread


def _read_losses_and_norm(losses: Sequence[Tensor], norm: Tensor) -> tuple[list[float], float]:
    """Read the losses of the passes and the gradient's norm in one transfer."""
    *values, last = (numbers[0] for numbers in read_numbers([number.reshape(1) for number in (*losses, norm)]))
    return values, last


def _finite_or_none(value: float | None) -> float | None:
    """Return None for a non-finite number, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None
