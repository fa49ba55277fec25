"""Members of a task that its loss uses."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .micro_batch import PreferenceTargets


class AlignedTask(Protocol):
    """Relation of outputs and labels."""

    @property
    def causal(self) -> bool: ...


class LossTask(AlignedTask, Protocol):
    """Loss of tokens, of whole rows (`is_sequence_level`), or of whole answers (`by_answer`)."""

    @property
    def is_sequence_level(self) -> bool: ...

    @property
    def encoder_decoder(self) -> bool: ...

    @property
    def smoothing(self) -> float: ...

    @property
    def by_answer(self) -> bool: ...

    @property
    def has_reference(self) -> bool: ...

    def example_losses(self, logits: Tensor, labels: Tensor) -> Tensor: ...

    def answer_losses(self, log_probs: Tensor, sides: PreferenceTargets) -> Tensor: ...
