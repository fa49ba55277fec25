"""Attention masks made of what the host knows of the rows, for devices that it must not wait for.

transformers looks into every mask, and into positions, for whether anything is masked and whether rows hold several
samples; on a GPU each look waits for the device. The host made the rows and knows: of rows of one sample each whether
any is padded, and of packed ones that they are. A causal model that is padded on the right needs no mask for it: what
lies behind a token is out of its sight anyway, and nobody supervises the padding. So its attention is the kernel's own
causal one, without a mask of T².

`known` puts its mask function in the place of those in transformers' registry; outside of `reading`, as in
evaluation and generation, it is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .capabilities import capabilities


@dataclass(frozen=True)
class Rows:
    """What is known of the rows under way."""

    padded: bool
    """Whether any is shorter than the others, on the right."""
    positions: Tensor | None
    """(B, T) int64 of packed rows, from 0 again for each sample; None: a sample a row."""


_READ: ContextVar[Rows | None] = ContextVar("rows under way", default=None)
_ASKED: ContextVar[bool] = ContextVar("whether masks are made here", default=False)


@contextlib.contextmanager
def known(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, masks of `model` are made of what `reading` says, where looking into them would wait for `device`.

    A backbone with another kind of mask than those of `sdpa` and `eager` attention keeps its own way.
    """
    changed: dict[str, Any] = {}
    if not capabilities(device).reads_masks:
        from transformers.masking_utils import (
            ALL_MASK_ATTENTION_FUNCTIONS,
            AttentionMaskInterface,
            eager_mask,
            sdpa_mask,
        )

        registry: Any = ALL_MASK_ATTENTION_FUNCTIONS
        configs = (getattr(module, "config", None) for module in model.modules())
        names = {str(getattr(config, "_attn_implementation", None)) for config in configs} & set(registry)
        if all(registry[name] in (sdpa_mask, eager_mask) for name in names):
            changed = {name: registry[name] for name in names}
    for name, usual in changed.items():
        AttentionMaskInterface.register(name, partial(_mask, usual))
    token = _ASKED.set(bool(changed))
    try:
        yield
    finally:
        _ASKED.reset(token)
        for name, usual in changed.items():
            AttentionMaskInterface.register(name, usual)


@contextlib.contextmanager
def reading(batch: Any) -> Iterator[dict[str, Tensor]]:
    """Inside runs the forward pass of `batch` (`finetune.train.loss.Batch`); gives the model's keyword arguments for
    it."""
    inputs: dict[str, Tensor] = batch.inputs
    padded = getattr(batch, "padded", None)
    if padded is None or not _ASKED.get():
        yield inputs
        return
    positions = inputs.get("position_ids")
    if getattr(inputs.get("attention_mask"), "ndim", 2) > 2:  # said already, in a form that transformers hands through
        yield inputs
        return
    if positions is not None:  # given in any case: without it transformers would look for samples in the positions
        inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    token = _READ.set(Rows(padded, positions))
    try:
        yield inputs
    finally:
        _READ.reset(token)


def _mask(usual: Callable[..., Tensor | None], **how: Any) -> Tensor | None:
    """transformers' mask function, by the `usual` one: which keys each query sees, bool (B, 1, T, T) (of `eager` what
    is added to their scores); None: those that the kernel shows it anyway."""
    from transformers.masking_utils import causal_mask_function, packed_sequence_compatibility_function

    rows = _READ.get()
    if rows is None or how.get("attention_mask") is None:
        return usual(**how)
    if rows.positions is not None:
        sample = torch.diff(rows.positions, prepend=rows.positions[:, :1] - 1, dim=-1).ne(1).cumsum(-1)
        how["mask_function"] = packed_sequence_compatibility_function(how["mask_function"], rows.positions, sample)
        return usual(**{**how, "attention_mask": None, "allow_is_causal_skip": False})
    behind = how.get("allow_is_causal_skip", True) and how["mask_function"] is causal_mask_function
    if behind or not rows.padded:
        return usual(**{**how, "attention_mask": None})
    return usual(**{**how, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
