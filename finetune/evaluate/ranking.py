"""Label ranking by a decoder: which label's completion is likeliest after the prompt.

The score of a label is the summed log-probability of its whole completion, end-of-sequence token included; so no label
wins by being the beginning of another, and scores are proper log-likelihoods (not divided by length).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..data.encoding import IGNORE, Example
from .generate import prompt_of
from .perplexity import document_nats


def rank_choices(
    model: Any,
    examples: Sequence[Example],
    *,
    batch_size: int,
    pad_id: int,
    device: torch.device | str = "cpu",
    autocast_dtype: torch.dtype | None = None,
) -> np.ndarray:
    """Log-likelihood in nats of every choice of every example, (N, K) float64.

    Every (prompt, choice) pair is a row of its own; rows are batched by length.
    """
    rows = []
    for example in examples:
        prompt = prompt_of(example)
        for choice in example.choices or ():
            context = prompt or list(choice[:1])  # nothing predicts the first token of a row without prompt
            rest = list(choice) if prompt else list(choice[1:])
            rows.append(Example([*context, *rest], [IGNORE] * len(context) + rest, example.id, example.where))
    nats, _ = document_nats(
        model, rows, batch_size=batch_size, pad_id=pad_id, device=device, autocast_dtype=autocast_dtype
    )
    return -nats.reshape(len(examples), -1)
