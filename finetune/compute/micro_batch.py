"""Micro-batches: tensors of one forward pass and its loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .capabilities import copy_to_device


@dataclass(frozen=True)
class PreferenceTargets:
    """Targets of a loss over whole answers, for R rows of a micro-batch, each a prompt with one answer.

    Pairs are in the order chosen, rejected, chosen, rejected, …

    signs: (R,) float32: 1 for a chosen or desirable answer, −1 for a rejected or undesirable one.
    lengths: (R,) float32: number of target tokens.
    paired: True if rows are pairs of answers to one prompt.
    mismatched: the same prompts, each with an answer to the prompt of another example of the optimizer step (KTO).
    reference: (R,) float32: log p of each answer under the base model; None: not computed yet, or not needed.
    drift: scalar: divergence from the base model in nats per answer, over the whole optimizer step (KTO's z0).
    """

    signs: Tensor
    lengths: Tensor
    paired: bool
    mismatched: MicroBatch | None = None
    reference: Tensor | None = None
    drift: Tensor | None = None

    def to(self, device: torch.device | str) -> PreferenceTargets:
        """Return a copy on another device."""
        tensors: dict[str, Any] = {
            name: copy_to_device(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, mismatched=None if self.mismatched is None else self.mismatched.to(device), **tensors)


@dataclass(frozen=True)
class MicroBatch:
    """Inputs and labels of one forward pass."""

    inputs: dict[str, Tensor]
    """Model keyword arguments, (B, T) int64: `input_ids`, and `attention_mask` (right padding) or, for packed rows,
    `position_ids` instead. seq2seq adds `decoder_input_ids` (B, T of the decoder), whose padding needs no mask
    because a decoder cannot attend to later positions; rows with feature vectors add `features` (B, K, d) float32.
    The model must not use a cache (`config.use_cache` false): packing relies on it."""
    labels: Tensor
    """(B, T) int64 aligned with `input_ids`, −100 for tokens that are no targets (always at the first token of a
    causal sample), or aligned with `decoder_input_ids`; or classes, (B,) int64; or float32: 0 and 1 of C classes (B,
    C), or standardised targets (B,)."""
    supervised: int
    """Number of labels that the loss sums over: tokens, or examples for classification."""
    samples: int
    """Number of examples."""
    rows: tuple[tuple[int, ...], ...]
    """Indices of the examples in each row."""
    chosen: Tensor | None = None
    """(n,) int64: ascending flat indices, of B·T labels, that the loss sums over. Computed on the host, because
    computing them on the device would synchronise. None: not computed yet."""
    padded: bool | None = None
    """True if a row (for seq2seq: of the encoder) is shorter than the others, also computed on the host; None: not
    computed yet."""
    real: tuple[int, int] | None = None
    """Number of tokens without padding over all sides, and number of token pairs within one sample (of the encoder);
    None: not counted yet."""
    preference: PreferenceTargets | None = None
    """Targets of a loss over whole answers; None for any other loss."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return a copy on another device."""
        inputs = {name: copy_to_device(tensor, device) for name, tensor in self.inputs.items()}
        chosen = None if self.chosen is None else copy_to_device(self.chosen, device)
        preference = None if self.preference is None else self.preference.to(device)
        labels = copy_to_device(self.labels, device)
        return replace(self, inputs=inputs, labels=labels, chosen=chosen, preference=preference)
