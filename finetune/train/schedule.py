"""Learning rate of every step of a stage, including one that continues after its planned end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ..atomic import read_json_object
from ..config import Extend, Optimizer, Train
from ..digests import DONE


def learning_rate(step: int, *, steps: int, optimizer: Optimizer) -> float:
    """Return the learning rate of the step from `step` to `step + 1` (0 ≤ step < steps).

    The first w = round(warmup · steps) steps rise linearly, lr · (step + 1)/(w + 1). Then, with p = (step − w)/(steps −
    w), `cosine` is lr · (1 + cos πp)/2, `linear` is lr · (1 − p), `constant` stays; zero would be reached right after
    the last step.
    """
    rise = min(round(optimizer.warmup * steps), steps - 1)
    if step < rise:
        return optimizer.lr * (step + 1) / (rise + 1)
    progress = (step - rise) / max(steps - rise, 1)
    if optimizer.schedule == "cosine":
        return optimizer.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    return optimizer.lr * (1.0 - progress) if optimizer.schedule == "linear" else optimizer.lr


@dataclass(frozen=True)
class Schedule:
    """Learning rates by number of completed steps; calling it is like `learning_rate`.

    `begin` is the number of steps of the finished training that is extended (0: none), `planned` its planned number
    (more if it stopped early), `end` the learning rate of its last step.
    """

    optimizer: Optimizer
    steps: int
    extend: Extend = "stretch"
    begin: int = 0
    planned: int = 0
    end: float = 0.0

    @classmethod
    def of(cls, train: Train, optimizer: Optimizer, folder: Path) -> Schedule:
        """Return the schedule of a stage with its files in `folder`."""
        record = read_json_object(folder / DONE) if (folder / DONE).is_file() else {}
        if not record.get("steps") or record["target_steps"] == train.steps:
            return cls(optimizer, train.steps)
        begin, planned = record["steps"], record["target_steps"]
        end = record.get("lr", learning_rate(begin - 1, steps=planned, optimizer=optimizer))
        return cls(optimizer, train.steps, train.extend, begin, planned, end)

    def __call__(self, step: int) -> float:
        if self.extend == "stretch" or not self.begin:
            return learning_rate(step, steps=self.steps, optimizer=self.optimizer)
        if step < self.begin:
            return learning_rate(step, steps=self.planned, optimizer=self.optimizer)
        if self.extend == "keep-end":
            return self.end
        return learning_rate(step - self.begin, steps=self.steps - self.begin, optimizer=self.optimizer)

    def line(self) -> str:
        """Describe the learning rate of the continued training in a sentence."""
        meaning = {
            "stretch": f"that of a run of {self.steps:,} steps",
            "rewarm": "by a schedule of their own",
            "keep-end": "as it ended",
        }
        return (
            f"learning rate: it ended at {self.end:.3g}; steps {self.begin + 1:,} to {self.steps:,} go from "
            f"{self(self.begin):.3g} to {self(self.steps - 1):.3g}, {meaning[self.extend]} "
            f"(train.extend: {self.extend})"
        )
