"""Loss scaling for fp16 (Micikevicius et al. 1710.03740, §3.2): gradients of activations below 6e-8 would be zero.

The loss is multiplied by a power of two before backward and gradients are divided by it afterwards, which changes no
bit of a float32 gradient. If one of them overflows, the step is repeated on the same rows with half the scale, so no
row is lost and a step has the same meaning as in other precisions; torch's `GradScaler` skips such steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..parallel.layout import local_part
from .deferred_metrics import read_numbers

FIRST = 2.0**16
LARGEST = 2.0**24
GROWTH_EVERY = 2000
"""Consecutive steps without an overflow after which the scale is doubled."""


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

    def overflows(self, losses: Sequence[Tensor], norm: Callable[[None], Tensor]) -> bool:
        """Return True, and halve the scale, if the scaled gradients overflow fp16 while the losses are finite.

        norm: returns the global norm of the scaled gradients. The result is the same on every rank.
        """
        *values, size = (each[0] for each in read_numbers([number.reshape(1) for number in (*losses, norm(None))]))
        self.last_values = {"loss": values[0], "grad_norm": size / self.value}
        if all(map(math.isfinite, values)) and not math.isfinite(size):
            return self.shrink()
        return False

    def step_applied(self) -> None:
        """Record that a step was applied; double the scale when due."""
        if not self.on:
            return
        self.good += 1
        if self.good >= GROWTH_EVERY:
            self.value, self.good = min(2 * self.value, LARGEST), 0

    @torch.no_grad()
    def undo(self, parameters: Iterable[Tensor]) -> None:
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
