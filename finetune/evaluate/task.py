"""Members of a task that evaluation uses."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..compute.micro_batch import PreferenceTargets
from ..compute.protocols import LossTask
from ..data.collator import CollatedTask


class EvaluatedTask(LossTask, CollatedTask, Protocol):
    """Loss and batches of a task, rewards of its answers, and settings of generated answers."""

    @property
    def backbone(self) -> str: ...

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    def rewards(self, log_probs: Tensor, sides: PreferenceTargets) -> Tensor: ...
