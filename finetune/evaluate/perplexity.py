"""Log-likelihood of a language model, document by document, and the metrics derived from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..compute.attention import use_blocked_attention
from ..compute.capabilities import capabilities
from ..compute.loss import Head, align_targets, find_head, head_probe
from ..compute.memory import slice_rows
from ..compute.protocols import LossTask, TraitsTask
from ..data.encoding import IGNORE, Example
from ..data.eval_batching import ALONE, EvalBatching
from ..models.anatomy import vocabulary_size
from .bootstrap import BootstrapInterval, ResampledMetric, ratio_interval, ratio_statistic
from .metrics import metric_functions

LOGITS = 1 << 28
"""Maximum number of logits in memory at once (one sequence is always allowed): 1 GiB in float32."""


def token_nats(values: Tensor, labels: Tensor, task: TraitsTask, *, head: Head | None = None) -> tuple[Tensor, Tensor]:
    """Return −log p of every target token.

    values: logits (B, T, V); position t predicts the token at t + 1 (`traits.causal`; else the label at t). With `head`
    the hidden states (B, T, D) from which it computes logits, for some target tokens at a time.
    labels: (B, T), −100 where there is no target.
    Returns:
        nats (n,) float32, and the row (n,) that each belongs to.
    """
    scores, targets = align_targets(values, labels, task)
    mask = targets != IGNORE
    rows = mask.nonzero()[:, 0]
    scores, targets = scores[mask], targets[mask]
    if head is not None:
        return head.cross_entropies(scores, targets), rows
    size = slice_rows(values.shape[-1], capabilities(values.device).kind, values.element_size())
    slices = [
        F.cross_entropy(part.float(), tokens, reduction="none")
        for part, tokens in zip(scores.split(size), targets.split(size), strict=True)
    ]
    return torch.cat(slices) if slices else scores.new_zeros(0, dtype=torch.float32), rows


@torch.no_grad()
def document_nats(
    model: torch.nn.Module, examples: Sequence[Example], inference: EvalBatching, *, task: LossTask, masked: bool = True
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
    max_tokens = min(LOGITS // vocabulary, capabilities(torch.device(device)).judged_tokens or LOGITS)
    # an encoder has no cache
    options = {} if task.traits.backbone == "encoder" else {"use_cache": False}
    head: Head | None = None
    untested = share == ALONE
    for micro in inference.batches(examples, task, max_tokens=max_tokens):
        batch = micro.to(device)
        if not masked:
            batch = replace(batch, inputs={k: v for k, v in batch.inputs.items() if k != "attention_mask"})
        with inference.precision(), use_blocked_attention(model, device, dtype):
            if untested:
                head, untested = find_head(model, head_probe(batch.inputs), task=task), False
            if head is None:
                logits = model(**batch.inputs, **options).logits
                token_nll, rows = token_nats(logits, batch.labels, task) if micro.samples else (logits, logits)
            else:
                token_nll, rows = head.taken(
                    partial(token_nats, labels=batch.labels, task=task, head=head),
                    partial(model, **batch.inputs, **options),
                )
        if not micro.samples:  # this rank has no example of the batch, and only took part in the collective pass
            continue
        index = np.array([row[0] for row in micro.rows])
        sums = torch.zeros(len(index), dtype=torch.float64, device=token_nll.device).index_add_(
            0, rows, token_nll.double()
        )
        nats[index] = sums.cpu().numpy()
        tokens[index] = torch.bincount(rows, minlength=len(index)).cpu().numpy()
    return share.add(nats), share.add(tokens)


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Scores and sizes of documents; arrays of N."""

    nats: np.ndarray
    """Σ −log p of the target tokens"""
    tokens: np.ndarray
    bytes: np.ndarray
    """UTF-8 bytes of the target tokens"""


@dataclass(frozen=True, kw_only=True)
class DocumentCounts(TokenCounts):
    """Counts and scores of whole documents; arrays of N."""

    words: np.ndarray
    characters: np.ndarray
    """Unicode code points"""

    def metrics(self, *, figures: dict[str, ResampledMetric], **bootstrap: Any) -> dict[str, BootstrapInterval]:
        """Return the metrics computed from "document"; `figures` receives each as a `ResampledMetric`.

        bootstrap: settings of `ratio_interval`.
        """
        metrics = {}
        for name, function in metric_functions("document").items():
            values, counts, transform = function(self)
            figures[name] = ResampledMetric.over([values, counts], ratio_statistic(transform))
            metrics[name] = ratio_interval(values, counts, transform=transform, **bootstrap)
        return metrics


Ratio = tuple[np.ndarray, np.ndarray, Callable[[Any], Any] | None]
"""Σ values / Σ counts, and a transform applied to the ratio."""


def loss(counts: TokenCounts) -> Ratio:
    """Nats per target token."""
    return counts.nats, counts.tokens, None


def perplexity(counts: TokenCounts) -> Ratio:
    """exp of nats per token."""
    return counts.nats, counts.tokens, np.exp


pseudo_perplexity = perplexity


def bits_per_byte(counts: TokenCounts) -> Ratio:
    """nats / ln 2 / UTF-8 bytes of the target text."""
    return counts.nats, counts.bytes * math.log(2.0), None


def word_perplexity(counts: DocumentCounts) -> Ratio:
    """exp of nats per word: the perplexity per token to the power of tokens per word."""
    return counts.nats, counts.words, np.exp


def character_perplexity(counts: DocumentCounts) -> Ratio:
    """exp of nats per code point."""
    return counts.nats, counts.characters, np.exp


def fertility(counts: DocumentCounts) -> Ratio:
    """Tokens per word."""
    return counts.tokens, counts.words, None
