"""Learning rate as a pure function of the step, so that resuming needs nothing but the step."""

from __future__ import annotations

import math

from ..config import Optimizer


def learning_rate(step: int, *, steps: int, optimizer: Optimizer) -> float:
    """Learning rate of the update from `step` to `step + 1` (0 ≤ step < steps).

    The first w = round(warmup · steps) updates rise linearly, lr · (step + 1)/(w + 1). Then, with
    p = (step − w)/(steps − w), `cosine` is lr · (1 + cos πp)/2, `linear` is lr · (1 − p), `constant` stays; zero would
    come right after the last update.
    """
    rise = min(round(optimizer.warmup * steps), steps - 1)
    if step < rise:
        return optimizer.lr * (step + 1) / (rise + 1)
    progress = (step - rise) / max(steps - rise, 1)
    if optimizer.schedule == "cosine":
        return optimizer.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    if optimizer.schedule == "linear":
        return optimizer.lr * (1.0 - progress)
    return optimizer.lr
