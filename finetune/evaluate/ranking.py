"""Label ranking by a decoder: the label whose completion is likeliest after the prompt.

The score of a label is the summed log-probability of its whole completion, end-of-sequence token included; so no label
wins by being a prefix of another, and scores are proper log-likelihoods (not divided by length).

Choices of one example share its prompt, so the prompt is run once and its cached keys and values are repeated. Support
for this is tested: examples are scored both ways first, and a model whose results differ (or that has no such cache)
gets every (prompt, choice) pair as a separate sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..compute.loss import Head
from ..compute.protocols import LossTask
from ..data.encoding import iter_chunks
from ..data.eval_batching import ALONE, EvalBatching
from ..data.example import IGNORE, Example
from .answers import prompt_tokens
from .candidates import answer_nats, find_ranking_head
from .perplexity import document_nats

_VECTORS = 1 << 26
"""Bytes of feature vectors (`adapter.projector`) that sequences hold at once: 64 MiB."""


def rank_choices(model: Any, examples: Sequence[Example], inference: EvalBatching, *, task: LossTask) -> np.ndarray:
    """Return the log-likelihood in nats of every choice of every example, (N, K) float64.

    The model must be in evaluation mode (`evaluating`). Each example has K `choices`.
    """
    prompt = prompt_tokens(examples[0])
    has_text_prompt = bool(prompt) and examples[0].features is None
    head = find_ranking_head(model, prompt, inference, task=task) if has_text_prompt else None
    if not _can_repeat_cache(model, examples, inference, task, head):
        return _rank_separately(model, examples, inference, task)
    scores = np.zeros((len(examples), len(examples[0].choices or ())))
    order = sorted(range(len(examples)), key=lambda i: -len(examples[i].input_ids))
    for batch in iter_chunks(order, inference.batch_size):
        index, counts = inference.share.mine(batch)
        batch_scores = _rank_with_shared_prompt(model, [examples[i] for i in index], inference, head)
        if counts:
            scores[index] = batch_scores
        inference.heartbeat(len(batch))
    return inference.share.add(scores)


def _can_repeat_cache(
    model: Any, examples: Sequence[Example], inference: EvalBatching, task: LossTask, head: Head | None
) -> bool:
    """True if both ways agree on the shortest and the longest example together (so that padding is included)."""
    if any(not prompt_tokens(example) or example.features is not None for example in examples):
        return False  # no prompt to share, or one that starts with feature vectors
    by_length = sorted(examples, key=lambda example: len(example.input_ids))
    probe = [by_length[0], by_length[-1]]
    alone = replace(inference.share, index=0, width=1, add=ALONE.add)
    apart = _rank_separately(model, probe, replace(inference, share=alone).without_heartbeat(), task)
    try:
        shared = _rank_with_shared_prompt(model, probe, inference, head)
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError):
        return False
    exact = inference.autocast_dtype is None and next(model.parameters()).dtype == torch.float32
    return bool(np.allclose(shared, apart, rtol=1e-4 if exact else 2e-2, atol=1e-3 if exact else 5e-2))


def _rank_separately(model: Any, examples: Sequence[Example], inference: EvalBatching, task: LossTask) -> np.ndarray:
    """Score every (prompt, choice) pair as a separate sequence; if each has a copy of feature vectors, some examples at
    a time."""
    size, first = len(examples), examples[0]
    if first.features is not None:
        each = sum(len(vector) * vector.itemsize for vector in first.features)
        size = max(1, _VECTORS // (each * len(first.choices or ())))
    parts = range(0, len(examples), size)
    return np.concatenate([_score_pairs(model, examples[i : i + size], inference, task) for i in parts])


def _score_pairs(model: Any, examples: Sequence[Example], inference: EvalBatching, task: LossTask) -> np.ndarray:
    rows = []
    for example in examples:
        prompt = prompt_tokens(example)
        for choice in example.choices or ():
            context = prompt or list(choice[:1])  # the first token of a sequence without prompt cannot be predicted
            rest = list(choice) if prompt else list(choice[1:])
            labels = [IGNORE] * len(context) + rest
            rows.append(Example([*context, *rest], labels, example.id, example.where, features=example.features))
    nats, _ = document_nats(model, rows, inference.spread(len(examples[0].choices or ())), task=task)
    return -nats.reshape(len(examples), -1)


def _rank_with_shared_prompt(
    model: Any, examples: Sequence[Example], inference: EvalBatching, head: Head | None
) -> np.ndarray:
    """Score B examples with K choices each, reading each prompt once, (B, K)."""
    choices = [choice for example in examples for choice in example.choices or ()]
    nats, real = answer_nats(model, [prompt_tokens(example) for example in examples], choices, inference, head=head)
    return -(nats.double() * real).sum(-1).view(len(examples), -1).cpu().numpy()
