"""Classification heads: loss and predictions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ..config import Classify
from ..data.batches import iterate_eval
from ..data.encoding import Example
from .mode import forward_precision
from .share import ALONE, Share


@torch.no_grad()
def class_scores(
    model: torch.nn.Module,
    examples: Sequence[Example],
    *,
    batch_size: int,
    pad_id: int,
    device: torch.device | str = "cpu",
    autocast_dtype: torch.dtype | None = None,
    share: Share = ALONE,
) -> tuple[np.ndarray, np.ndarray]:
    """Cross entropy in nats (N,) float64 and predicted class (N,) int64 of each example, in their order."""
    nats, predicted = np.zeros(len(examples)), np.zeros(len(examples), dtype=np.int64)
    for micro in iterate_eval(
        examples,
        task=Classify(),
        batch_size=batch_size,
        pad_id=pad_id,
        share=share.part,
        multiple=share.multiple,
    ):
        batch = micro.to(device)
        with forward_precision(device, autocast_dtype):
            logits = model(**batch.inputs).logits.float()
        if not micro.samples:
            continue
        index = [row[0] for row in micro.rows]
        nats[index] = F.cross_entropy(logits, batch.labels, reduction="none").double().cpu().numpy()
        predicted[index] = logits.argmax(-1).cpu().numpy()
    return share.add(nats), share.add(predicted)
