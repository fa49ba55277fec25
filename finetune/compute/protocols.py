"""Members of a task and of a model on a mesh that the loss and choices of kernels use."""

from __future__ import annotations

from typing import Any, Protocol

import torch
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


class Ranks(Protocol):
    """Processes that the model is spread over."""

    @property
    def size(self) -> int: ...

    def width(self, *axes: str) -> int: ...

    def any(self, flag: bool) -> bool: ...


class MeshModel(Protocol):
    """A model, its device and its ranks (`flatshift.finetune.parallel.engine.Engine`)."""

    @property
    def world(self) -> Ranks: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_main(self) -> bool: ...

    @property
    def peft(self) -> Any: ...

    @property
    def eval_model(self) -> Any: ...

    def reshard(self) -> None: ...
