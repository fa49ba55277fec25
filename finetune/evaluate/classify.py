"""Heads over whole rows: loss and answers of each example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..data.batches import iterate_eval
from ..data.encoding import Example
from .mode import forward_precision
from .share import ALONE, Share

if TYPE_CHECKING:
    from ..tasks import Task


@torch.no_grad()
def head_scores(
    model: torch.nn.Module,
    examples: Sequence[Example],
    *,
    task: Task,
    batch_size: int,
    pad_id: int,
    device: torch.device | str = "cpu",
    autocast_dtype: torch.dtype | None = None,
    share: Share = ALONE,
) -> tuple[np.ndarray, np.ndarray]:
    """The task's `example_losses` (N,) float64 and the head's outputs (N, C) float64 of the examples, in
    order."""
    losses, outputs = np.zeros(len(examples)), np.zeros((len(examples), 0))
    for micro in iterate_eval(
        examples,
        task=task,
        batch_size=batch_size,
        pad_id=pad_id,
        share=share.part,
        multiple=share.multiple,
    ):
        batch = micro.to(device)
        with forward_precision(device, autocast_dtype):
            logits = model(**batch.inputs).logits.float()
        if not outputs.shape[1]:
            outputs = np.zeros((len(examples), logits.shape[1]))
        if not micro.samples:
            continue
        index = [row[0] for row in micro.rows]
        losses[index] = task.example_losses(logits, batch.labels).double().cpu().numpy()
        outputs[index] = logits.double().cpu().numpy()
    return share.add(losses), share.add(outputs)
