"""Traits of a kind of task, and members of a task and of a model on a mesh that other modules use. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..config import Train
    from .micro_batch import PreferenceTargets


@dataclass(frozen=True, kw_only=True)
class TaskTraits:
    """Properties of a kind of task that its settings do not change."""

    causal: bool = False
    """True if the output at position t predicts the label at t + 1, so that the first token of an example has no
    prediction."""
    is_sequence_level: bool = False
    """True if a new head predicts for the whole row: labels belong to rows, and the loss is divided by examples."""
    is_answer_level: bool = False
    """True if the loss depends on the log-likelihood of whole answers: it is divided by pairs of answers, or by
    answers."""
    rows_per_example: int = 1
    """Token rows that the model reads per example."""
    backbone: Literal["decoder", "encoder", "any"] = "any"
    """Required kind of backbone (except for `encoder_decoder`)."""
    auto_class: str = "AutoModelForCausalLM"
    """transformers class that loads its models."""
    has_new_head: bool = False
    """True if the checkpoint may lack the head, which is then randomly initialised and fully trained."""
    has_targets: bool = False
    """True if labels are numbers, whose units must be known before rows are encoded."""
    has_accuracy: bool = False
    """True if dev metrics include accuracy, by which the best step can be chosen."""
    masks_tokens: bool = False
    """True if tokens are masked at random each time a row is drawn (`BaseTask.masking`)."""
    takes_soft_tokens: bool = False
    """True if soft tokens may be prepended to its rows."""
    reads_documents: bool = False
    """True if rows are plain documents, whose tokens are all evaluated however long they are."""
    splits_documents: bool = False
    """True if a row that is too long may be split into pieces (`train.overlong: split`)."""
    truncation_side: Literal["left", "right"] = "right"
    """Side from which a text or prompt that is too long is truncated, unless `train.truncation` is set."""
    noise_level: Literal["tokens", "rows"] = "rows"
    """Level at which `data.label_noise` corrupts labels: tokens of encoded rows, or rows."""
    loss_unit: str = "nats per target token"
    """Unit of the loss, for messages."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Incompatible blocks, settings or flags → error message for the user."""

    @property
    def encoder_decoder(self) -> bool:
        """True if an encoder reads the row and a decoder predicts its labels after a start token."""
        return self.auto_class == "AutoModelForSeq2SeqLM"

    @property
    def is_generative(self) -> bool:
        """True if models continue a prompt."""
        return not (self.is_sequence_level or self.backbone == "encoder")

    def count_token_rows(self, train: Train) -> Train:
        """Return `train` with the batch size in token rows that the model reads, for memory estimates."""
        return dataclasses.replace(train, batch_size=train.batch_size * self.rows_per_example)

    def refuse(self, name: str) -> None:
        """Raise UserError if the block, setting or flag `name` is incompatible with the task."""
        if name in self.refusals:
            raise UserError(self.refusals[name])


class TraitsTask(Protocol):
    """Task whose traits alone are used."""

    @property
    def traits(self) -> TaskTraits: ...


class LossTask(TraitsTask, Protocol):
    """Loss of tokens, of whole rows, or of whole answers."""

    @property
    def is_unpaired(self) -> bool: ...

    @property
    def smoothing(self) -> float: ...

    @property
    def dft(self) -> bool: ...

    @property
    def has_reference(self) -> bool: ...

    def example_losses(self, logits: Tensor, labels: Tensor) -> Tensor: ...

    def answer_losses(self, log_probs: Tensor, targets: PreferenceTargets) -> Tensor: ...

    def rewards(self, log_probs: Tensor, targets: PreferenceTargets) -> Tensor: ...


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
