"""Log-likelihoods of candidates after their contexts, token by token, with shared context computed once.

Few-shot examples precede every item, and an item's own words precede each of its candidates: the former are run once
for all items, the latter once per item, and their cached keys and values are repeated. Support for this in a model's
cache is tested: some items are scored both ways first.

A text is tokenised as a whole, and its context is as many of the tokens as the context has by itself, without trailing
blanks, as in lm-eval.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..compute.loss import Head, find_head, head_probe
from ..compute.protocols import LossTask
from ..data.eval_batching import ALONE, EvalBatching
from ..models.anatomy import cache_argument, output_cache
from .generation import pad_rows

_LOGITS = 1 << 26
"""Maximum number of logits in memory at once (one item is always allowed): 256 MiB in float32."""
_FULL = 1024
"""Tokens of a text up to which a batch has all its rows; of longer ones it has fewer, for the same memory."""
_WORTH = 16
"""Minimum number of shared tokens whose keys and values are cached for all items."""


@dataclass(frozen=True)
class Candidate:
    """One text that a model may choose."""

    ids: tuple[int, ...]
    """All its tokens, beginning tokens included."""
    start: int
    """Index of the first token that is scored."""
    label: tuple[int, int]
    """Range of the scored tokens that hold the label itself: [first, end)."""
    bytes: int
    """UTF-8 bytes of the scored text."""


def tokenize_candidates(tokenizer: Any, texts: Sequence[tuple[str, str, str]], begin: Sequence[int]) -> list[Candidate]:
    """Tokenise triples (context, label, text after it) into candidates."""
    moved = []
    for context, label, after in texts:
        bare = context.rstrip()
        moved.append((bare, context[len(bare) :] + label, after))
    plain = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    contexts = list(dict.fromkeys(context for context, _, _ in moved))
    sizes = dict(zip(contexts, map(len, tokenizer(contexts, **plain)["input_ids"]), strict=True))
    whole = tokenizer(["".join(parts) for parts in moved], return_offsets_mapping=True, **plain)
    candidates = []
    for (context, label, after), ids, offsets in zip(moved, whole["input_ids"], whole["offset_mapping"], strict=True):
        size = min(sizes[context], len(ids) - 1)
        if not begin and size == 0:
            size = 1  # the first token cannot be predicted
        low, high = len(context), len(context) + len(label)
        held = [i for i, (a, b) in enumerate(offsets) if i >= size and a < high and b > low]
        span = (held[0] - size, held[-1] + 1 - size) if held else (0, len(ids) - size)
        candidates.append(Candidate((*begin, *ids), len(begin) + size, span, len((label + after).encode())))
    return candidates


def find_ranking_head(model: Any, ids: Sequence[int], inference: EvalBatching, *, task: LossTask) -> Head | None:
    """Return the model's plain head, found with the tokens `ids` of any text; None on a mesh, or if it has none."""
    if inference.share != ALONE:
        return None
    with inference.precision():
        return find_head(model, head_probe({"input_ids": torch.tensor([ids], device=inference.device)}), task=task)


@torch.no_grad()
def score_candidates(
    model: Any,
    items: Sequence[Sequence[Candidate]],
    inference: EvalBatching,
    *,
    head: Head | None = None,
    shared: bool | None = None,
) -> list[list[NDArray[np.float64]]]:
    """Return log p of every scored token of every candidate of every item.

    The model must be in evaluation mode. head: as in `answer_nats`. shared: None tests whether the model's cache can be
    repeated; False scores every candidate separately.
    """
    if shared is None:
        shared = _can_repeat_cache(model, items, inference, head)
    if not shared:
        return _score_separately(model, items, inference)
    scores: list[list[NDArray[np.float64]]] = [[] for _ in items]
    for group in _group_by_prefix(items):
        members = [items[i] for i in group]
        size = min(
            _common_prefix_length([item[0].ids for item in members]), *(_shared_length(item) - 1 for item in members)
        )
        size = size if size >= _WORTH and len(group) > 1 else 0
        cache = None
        if size:
            prefix = torch.tensor([members[0][0].ids[:size]], device=inference.device)
            with inference.precision():
                cache = output_cache(model(input_ids=prefix, use_cache=True, logits_to_keep=1))
        for batch in _item_batches(sorted(group, key=lambda i: -len(items[i][0].ids)), items, model, inference, head):
            batch_scores = _score_after_prefix(model, [items[i] for i in batch], cache, size, inference, head)
            for i, scored in zip(batch, batch_scores, strict=True):
                scores[i] = scored
    return scores


def _group_by_prefix(items: Sequence[Sequence[Candidate]]) -> list[list[int]]:
    """Group items with the same first `2 * _WORTH` tokens; items without such a partner are grouped by number of
    candidates."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault((len(item), *item[0].ids[: 2 * _WORTH]), []).append(i)
    alone = [i for group in groups.values() if len(group) == 1 for i in group]
    partners = [group for group in groups.values() if len(group) > 1]
    for count in sorted({len(items[i]) for i in alone}):
        partners.append([i for i in alone if len(items[i]) == count])
    return partners


def _common_prefix_length(rows: Sequence[Sequence[int]]) -> int:
    first, shortest = rows[0], min(map(len, rows))
    return next((n for n in range(shortest) if any(row[n] != first[n] for row in rows)), shortest)


def _shared_length(item: Sequence[Candidate]) -> int:
    """Return the number of tokens that all candidates of an item share and none of them scores."""
    return min(
        _common_prefix_length([one.ids for one in item]),
        *(one.start for one in item),
        *(len(one.ids) - 1 for one in item),
    )


def _item_batches(
    order: list[int], items: Sequence[Sequence[Candidate]], model: Any, inference: EvalBatching, head: Head | None
) -> list[list[int]]:
    vocabulary, batches, start = int(model.config.get_text_config().vocab_size), [], 0
    while start < len(order):
        item = items[order[start]]
        longest = max(len(one.ids) for one in item)
        rows = inference.batch_size * _FULL // longest
        if head is None:
            rows = min(rows, _LOGITS // (len(item) * (longest - _shared_length(item)) * vocabulary))
        rows = max(1, min(inference.batch_size, rows))
        batches.append(order[start : start + rows])
        start += rows
    return batches


def _score_after_prefix(
    model: Any, items: Sequence[Sequence[Candidate]], cache: Any, size: int, inference: EvalBatching, head: Head | None
) -> list[list[NDArray[np.float64]]]:
    """Score items after `size` shared tokens, which `cache` holds: own words (B, M), then candidates (B·K, C)."""
    owns = [_shared_length(item) for item in items]
    heads = [item[0].ids[size:own] for item, own in zip(items, owns, strict=True)]
    tails = [one.ids[own:] for item, own in zip(items, owns, strict=True) for one in item]
    nats, _ = answer_nats(model, heads, tails, inference, size=size, cache=cache, head=head)
    rows = iter((-nats.double()).cpu().numpy())
    return [
        [next(rows)[one.start - own : len(one.ids) - own] for one in item]
        for item, own in zip(items, owns, strict=True)
    ]


@torch.no_grad()
def answer_nats(
    model: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    inference: EvalBatching,
    *,
    size: int = 0,
    cache: Any = None,
    head: Head | None = None,
) -> tuple[Tensor, Tensor]:
    """Return −log p of every token of B·K answers, K after each of B prompts in turn, each prompt read once: (B·K, C)
    float32, and the mask of real tokens.

    Prompts are padded on the left, answers on the right. cache: of `size` tokens before all prompts. head: the model's
    own (`find_ranking_head`), which computes the logits of real tokens alone, some at a time.
    """
    each = len(answers) // len(prompts)
    ids, mask = pad_rows(prompts, inference.pad_id, left=True)
    written, real = pad_rows(answers, inference.pad_id, left=False)
    positions = size + (mask.cumsum(-1) - 1).clamp_min(0)
    ids, mask, written, real, positions = (t.to(inference.device) for t in (ids, mask, written, real, positions))
    mask = torch.cat([mask.new_ones(len(prompts), size), mask], dim=1)
    repeated = {}
    if cache is not None:
        cache = copy.deepcopy(cache)  # it is repeated in place, and serves other batches too
        cache.batch_repeat_interleave(len(prompts))
        repeated = cache_argument(cache)
    with inference.precision():
        asked = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **repeated
        )
        if not asked.logits.shape[1]:  # with soft tokens PEFT drops as many positions as it added
            raise ValueError("the model gives no logits of the last position alone")
        log_probs = F.log_softmax(asked.logits[:, -1].float(), dim=-1)
        nats = log_probs.new_zeros(written.shape)
        nats[:, 0] = -log_probs.gather(-1, written[:, 0].view(len(prompts), each)).flatten()
        if written.shape[1] > 1:
            after = output_cache(asked)
            after.batch_repeat_interleave(each)
            start = (positions[:, -1:] + 1).repeat_interleave(each, dim=0)
            run = partial(
                model,
                input_ids=written[:, :-1],
                attention_mask=torch.cat([mask.repeat_interleave(each, dim=0), real[:, :-1]], dim=1),
                position_ids=start + torch.arange(written.shape[1] - 1, device=start.device),
                use_cache=True,
                **cache_argument(after),
            )
            targets, is_real = written[:, 1:], real[:, 1:].bool()
            if head is None:
                logits = run().logits[is_real].float()
                nats[:, 1:][is_real] = F.cross_entropy(logits, targets[is_real], reduction="none")
            else:
                entropies = partial(_real_entropies, head=head, targets=targets, is_real=is_real)
                nats[:, 1:][is_real] = head.taken(entropies, run)
    return nats, real


def _real_entropies(hidden: Tensor, head: Head, targets: Tensor, is_real: Tensor) -> Tensor:
    return head.cross_entropies(hidden[is_real], targets[is_real])


def _score_separately(
    model: Any, items: Sequence[Sequence[Candidate]], inference: EvalBatching
) -> list[list[NDArray[np.float64]]]:
    """Score every candidate as a separate sequence, the longest first."""
    flat = [one for item in items for one in item]
    order = sorted(range(len(flat)), key=lambda i: -len(flat[i].ids))
    scores: dict[int, NDArray[np.float64]] = {}
    vocabulary, start = int(model.config.get_text_config().vocab_size), 0
    while start < len(order):
        rows = max(1, min(inference.batch_size, _LOGITS // (len(flat[order[start]].ids) * vocabulary)))
        batch = order[start : start + rows]
        ids, mask = pad_rows([flat[i].ids for i in batch], inference.pad_id, left=False)
        ids, mask = ids.to(inference.device), mask.to(inference.device)
        with inference.precision():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        nats = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        for i, row in zip(batch, (-nats.double()).view(len(batch), -1).cpu().numpy(), strict=True):
            scores[i] = row[flat[i].start - 1 : len(flat[i].ids) - 1]
        start += rows
    rows_ = iter(range(len(flat)))
    return [[scores[next(rows_)] for _ in item] for item in items]


def _can_repeat_cache(
    model: Any, items: Sequence[Sequence[Candidate]], inference: EvalBatching, head: Head | None
) -> bool:
    """True if both ways agree on the shortest, middle and longest item of the largest group together, so that padding
    is included."""
    if getattr(model, "soft_tokens", 0):
        return False
    group = sorted(max(_group_by_prefix(items), key=lambda one: len(list(one))), key=lambda i: len(items[i][0].ids))
    if any(_shared_length(items[i]) < 1 for i in range(len(items))):
        return False
    probe = [items[i] for i in dict.fromkeys((group[0], group[len(group) // 2], group[-1]))]
    alone = _score_separately(model, probe, inference)
    try:
        both = score_candidates(model, probe, inference, head=head, shared=True)
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError):
        return False
    exact = inference.autocast_dtype is None and next(model.parameters()).dtype == torch.float32
    tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3} if exact else {"rtol": 2e-2, "atol": 5e-2}
    return all(
        np.allclose(a.sum(), b.sum(), **tolerance)
        for one, other in zip(alone, both, strict=True)
        for a, b in zip(one, other, strict=True)
    )
