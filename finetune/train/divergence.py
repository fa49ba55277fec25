"""Handling of diverging steps: skip them if loss or gradient is not finite, roll back if the loss spikes.

Every decision uses values that are the same on all ranks, before the regularizer learns from the step, so a skipped
step leaves no trace but its row in metrics.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..errors import UserError
from ..launch import watchdog
from ..parallel.engine import Engine
from .checkpointer import Checkpointer
from .data_order import spike_limit
from .deferred_metrics import read_numbers
from .stage import TrainingStage


class Diverged(UserError):
    """Loss or gradient is not finite, or spikes do not end; earlier checkpoints are kept."""


class UpdateRejected(Exception):
    """Raised inside `regularizer.step` so that the regularizer learns nothing from a rejected step."""


@dataclass(frozen=True)
class RejectedUpdate:
    """Reason a step is rejected: its loss or gradient norm is not finite, or the loss is a spike above `limit`."""

    loss: float
    norm: float
    limit: float | None = None


class DivergenceGuard:
    """Checks the steps of one stage (`train.skip_nonfinite`, `train.spikes`); every rank calls it alike."""

    def __init__(self, engine: Engine, keeper: Checkpointer, stage: TrainingStage) -> None:
        self._engine, self._keeper = engine, keeper
        self._run, self._stage, self._train = stage.run, stage.name, stage.train
        train = stage.train
        self.watches = train.skip_nonfinite > 0 or train.spikes is not None
        """True if steps are checked inside the regularizer's step; otherwise a value that is not finite ends the
        stage."""
        self.last_values: dict[str, float] = {}
        """`loss` and `grad_norm` of the step checked last."""

    def check(self, losses: Sequence[torch.Tensor]) -> RejectedUpdate | None:
        """Return the reason to reject the current step; None to accept it. Gradients are unchanged.

        losses: of each pass, the first at the weights themselves.
        """
        numbers = [*losses, self._engine.clip(None)]
        *values, norm = (each[0] for each in read_numbers([number.reshape(1) for number in numbers]))
        norm /= self._engine.loss_scale
        self.last_values = {"loss": values[0], "grad_norm": norm}
        if not all(map(math.isfinite, [*values, norm])):
            return RejectedUpdate(next((value for value in values if not math.isfinite(value)), values[0]), norm)
        if self._train.spikes is None:
            return None
        limit = spike_limit(self._keeper.progress.recent, self._train.spikes)
        # sums over ranks may differ in the last bit, so the ranks agree on one decision
        return RejectedUpdate(values[0], norm, limit) if self._engine.world.any(values[0] > limit) else None

    def step_applied(self) -> None:
        """Record that the current step was applied."""
        state = self._keeper.progress
        state.skipped_in_a_row = 0
        if self._train.spikes is not None:
            state.recent = [*state.recent, self.last_values["loss"]][-self._train.spikes.window :]

    def skip(self, verdict: RejectedUpdate) -> dict[str, Any] | None:
        """Count the step as skipped and return the fields for its row; None if the stage must roll back instead.

        Raises:
            Diverged: neither is allowed.
        """
        state, spikes = self._keeper.progress, self._train.spikes
        number = state.step + 1
        if verdict.limit is None and state.skipped_in_a_row < self._train.skip_nonfinite:
            state.step = number
            state.skipped += 1
            state.skipped_in_a_row += 1
            self._run.log(
                f"warning: {self._stage}: step {number} is skipped, its {_non_finite_part(verdict)} is not a "
                "finite number "
                f"({state.skipped} so far)"
            )
            return {"skipped": True, "skipped_updates": state.skipped}
        if spikes is None or len(state.rewinds) >= spikes.most:
            self.refuse(number, verdict)
        return None

    def roll_back(self, verdict: RejectedUpdate, *, reattach: Callable[[], None]) -> dict[str, Any]:
        """Roll back to the checkpoint before a spike, skip the batches around it, and return the row that records it.

        reattach: resets the regularizer to its state before the first step.
        """
        number, attempt = self._keeper.progress.step + 1, self._keeper.attempt
        spike = {"loss": _finite_or_none(verdict.loss), "limit": _finite_or_none(verdict.limit)}
        with watchdog.no_progress_timeout("going back"):
            if not self._keeper.rewind({"step": number, **spike}, reattach=reattach):
                self.refuse(number, verdict)
        state = self._keeper.progress
        first, stop = next(part for part in state.skipped_ranges if part[1] > state.step)
        above = f" is above {verdict.limit:.4g}" if verdict.limit is not None else ""
        self._run.log(
            f"warning: {self._stage}: spike in step {number}, its loss {verdict.loss:.4g}{above}; back to step "
            f"{state.step}, without batches {first} to {stop - 1}"
        )
        line = {"attempt": attempt, "step": number, **spike, "tokens": state.tokens}
        return {**line, "rewound_to": state.step, "left_out": state.skipped_ranges}

    def raise_if_not_finite(self, number: int, line: Mapping[str, Any]) -> None:
        """Raise Diverged if the `loss` or `grad_norm` of step `number` is not finite."""
        if not (math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])):
            self.refuse(number, RejectedUpdate(line["loss"], line["grad_norm"]))

    def refuse(self, number: int, verdict: RejectedUpdate) -> NoReturn:
        """Raise Diverged for step `number`."""
        state, saved = self._keeper.progress, self._keeper.saved_step
        kept = f"the checkpoint of step {saved} is kept" if saved >= 0 else "no checkpoint was due yet"
        if verdict.limit is not None:
            what = f"the loss at step {number}, {verdict.loss:.4g}, is a spike above {verdict.limit:.4g}"
        else:
            what = f"the {_non_finite_part(verdict)} at step {number} is not a finite number"
        tried = []
        if verdict.limit is None and state.skipped_in_a_row:
            tried.append(f"{state.skipped_in_a_row} steps in a row were skipped before it")
        if state.rewinds:
            tried.append(f"the stage went back {len(state.rewinds)} times")
        message = (
            f"{self._stage}: {what} ({'; '.join([*tried, kept])}); lower optimizer.lr, set optimizer.clip, or look at "
            "the rows of this step"
        )
        self._run.log(f"error: {message}")
        raise Diverged(message)


def _non_finite_part(verdict: RejectedUpdate) -> str:
    return "gradient" if math.isfinite(verdict.loss) else "loss"


def _finite_or_none(value: float | None) -> float | None:
    """Return None for a non-finite number, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None
