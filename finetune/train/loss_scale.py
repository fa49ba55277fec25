"""Loss scaling for fp16 (Micikevicius et al. 1710.03740, §3.2): gradients of activations below 6e-8 would be zero.

The loss is multiplied by a power of two before backward and gradients are divided by it afterwards, which changes no
bit of a float32 gradient. Where one of them overflows, the update is computed again from the same rows with half the
scale, so no row is lost and a step means what it means elsewhere; torch's `GradScaler` leaves such updates out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..parallel.layout import local
from .deferred_metrics import read

FIRST = 2.0**16
LARGEST = 2.0**24
GROWTH_EVERY = 2000
"""Updates in a row without an overflow after which the scale is doubled."""


class LossScale:
    """The scale of one stage. Off (1, whatever happens) unless the stage computes in fp16."""

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.value = FIRST if on else 1.0
        self.good = 0
        """Updates in a row without an overflow."""
        self.found: dict[str, float] = {}
        """`loss` and `grad_norm`, not scaled, of the update that was looked at last."""

    def shrink(self) -> bool:
        """Halve the scale after an overflow; False where it is 1 already, and the gradient itself is no number."""
        if self.value <= 1.0:
            return False
        self.value, self.good = self.value / 2, 0
        return True

    def overflows(self, losses: Sequence[Tensor], norm: Callable[[None], Tensor]) -> bool:
        """Whether the scaled gradients, of that global norm, are too large for fp16 while the losses are numbers; the
        scale is halved then. The same on every rank."""
        *values, size = (each[0] for each in read([number.reshape(1) for number in (*losses, norm(None))]))
        self.found = {"loss": values[0], "grad_norm": size / self.value}
        if all(map(math.isfinite, values)) and not math.isfinite(size):
            return self.shrink()
        return False

    def made(self) -> None:
        """An update was made."""
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
                    local(parameter.grad).mul_(1.0 / self.value)

    def state(self) -> dict[str, float]:
        """For a checkpoint; empty where scaling is off."""
        return {"value": self.value, "good": self.good} if self.on else {}

    def restore(self, state: dict[str, float]) -> None:
        """Take over a `state`."""
        if self.on and state:
            self.value, self.good = float(state["value"]), int(state["good"])
