"""Log-likelihood of a language model, document by document, and the metrics derived from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..compute.attention import use_blocked_attention
from ..compute.capabilities import capabilities
from ..compute.loss import Head, align_targets, find_head, head_probe
from ..compute.memory import slice_rows
from ..compute.micro_batch import MicroBatch
from ..data.encoding import IGNORE, Example
from ..data.eval_batching import ALONE, EvalBatching
from ..models.anatomy import vocabulary_size
from .task import EvaluatedTask

LOGITS = 1 << 28
"""Maximum number of logits in memory at once (one sequence is always allowed): 1 GiB in float32."""


def token_nats(
    values: Tensor, labels: Tensor, task: EvaluatedTask, *, linear: torch.nn.Linear | None = None
) -> tuple[Tensor, Tensor]:
    """Return −log p of every target token.

    Args:
        values: logits (B, T, V); position t predicts the token at t + 1 (`task.causal`; else the label at t). With
            `linear` the hidden states (B, T, D) from which it computes logits, for some target tokens at a time.
        labels: (B, T), −100 where there is no target.
    Returns:
        nats (n,) float32, and the row (n,) that each belongs to.
    """
    scores, targets = align_targets(values, labels, task)
    mask = targets != IGNORE
    rows = mask.nonzero()[:, 0]
    scores, wanted = scores[mask], targets[mask]
    vocabulary = values.shape[-1] if linear is None else len(linear.weight)
    size = slice_rows(vocabulary, capabilities(values.device).kind, values.element_size())
    parts = []
    for i in range(0, len(wanted), size):
        part = scores[i : i + size]
        logits = part if linear is None else F.linear(part, linear.weight, linear.bias)
        parts.append(F.cross_entropy(logits.float(), wanted[i : i + size], reduction="none"))
    return torch.cat(parts) if parts else scores.new_zeros(0, dtype=torch.float32), rows


@torch.no_grad()
def document_nats(
    model: torch.nn.Module,
    examples: Sequence[Example],
    inference: EvalBatching,
    *,
    task: EvaluatedTask,
    masked: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the summed −log p of the target tokens of each example, and their number.

    The model must be in evaluation mode (`evaluating`). `task` is the one that encoded the examples; all causal tasks
    are equivalent here. In one process and with a plain head (`flatshift.finetune.compute.loss.find_head`), logits are
    computed for some target tokens at a time.

    masked: pass the model a mask of the padding. A causal model does not need it for tokens before the padding, and
    attends faster without.

    Returns:
        nats (N,) float64 and tokens (N,) int64, in the order of `examples`.
    """
    nats, tokens = np.zeros(len(examples)), np.zeros(len(examples), dtype=np.int64)
    vocabulary = vocabulary_size(model)
    device, dtype, share = inference.device, inference.autocast_dtype, inference.share
    most = min(LOGITS // vocabulary, capabilities(torch.device(device)).judged_tokens or LOGITS)
    head: Head | None = None
    first = share == ALONE
    for micro in inference.batches(examples, task, max_tokens=most):
        batch = micro.to(device)
        if not masked:
            batch = replace(batch, inputs={k: v for k, v in batch.inputs.items() if k != "attention_mask"})
        with inference.precision(), use_blocked_attention(model, device, dtype):
            if first:
                head, first = find_head(model, head_probe(batch.inputs), task=task), False
            if head is None:
                logits = model(**batch.inputs, **_cache_arguments(task)).logits
                each, rows = token_nats(logits, batch.labels, task) if micro.samples else (logits, logits)
            else:
                each, rows = _token_nats_by_head(model, head, batch, task)
        if not micro.samples:  # this rank has no example of the batch, and only took part in the collective pass
            continue
        index = np.array([row[0] for row in micro.rows])
        sums = torch.zeros(len(index), dtype=torch.float64, device=each.device).index_add_(0, rows, each.double())
        nats[index] = sums.cpu().numpy()
        tokens[index] = torch.bincount(rows, minlength=len(index)).cpu().numpy()
    return share.add(nats), share.add(tokens)


def _token_nats_by_head(
    model: torch.nn.Module, head: Head, batch: MicroBatch, task: EvaluatedTask
) -> tuple[Tensor, Tensor]:
    """Compute `token_nats` without ever holding all logits."""
    return head.taken(
        lambda hidden: token_nats(hidden, batch.labels, task, linear=head.linear),
        lambda: model(**batch.inputs, **_cache_arguments(task)),
    )


def _cache_arguments(task: EvaluatedTask) -> dict[str, bool]:
    return {} if task.backbone == "encoder" else {"use_cache": False}  # an encoder has none


Ratio = tuple[np.ndarray, np.ndarray, Callable[[Any], Any] | None]
"""Σ values / Σ counts, and a transform applied to the ratio."""


def loss(nats: np.ndarray, tokens: np.ndarray, size: np.ndarray) -> Ratio:
    """Nats per target token."""
    return nats, tokens, None


def perplexity(nats: np.ndarray, tokens: np.ndarray, size: np.ndarray) -> Ratio:
    """exp of nats per token."""
    return nats, tokens, np.exp


def bits_per_byte(nats: np.ndarray, tokens: np.ndarray, size: np.ndarray) -> Ratio:
    """nats / ln 2 / UTF-8 bytes of the target text."""
    return nats, size * math.log(2.0), None
