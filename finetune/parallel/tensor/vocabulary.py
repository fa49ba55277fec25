"""Vocabulary-parallel embedding and output head, and a cross entropy that gathers no logits.

The ranks of a vocabulary are those of tp, which compute the same rows, or those of dp and cp, of which each has rows of
its own (`VocabularySlice.rows_differ`): all of them then compute the rows of one rank after the other, so that the
matrix stays where it is and hidden states travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...compute.capabilities import capabilities
from ...compute.cuda_status import product_dtype
from ...compute.loss import soft_cap
from ...compute.memory import slice_rows
from . import borders

_GATHERED = 1 << 20
"""Logits of a rank that are gathered at once: they exist beside the whole ones, once more inside of gloo."""


@dataclass(frozen=True)
class VocabularySlice:
    """Tokens [start, stop) of `size` for which this rank has the rows of a head or embedding.

    rows_differ: True if each rank of `group` has rows (ids, hidden states) of its own.
    """

    start: int
    stop: int
    size: int
    group: dist.ProcessGroup
    rows_differ: bool = False

    @property
    def widest(self) -> int:
        """The number of tokens of every rank but the last, which may have fewer."""
        return -(-self.size // dist.get_world_size(self.group))

    def cross_entropy(
        self, hidden: Tensor, linear: nn.Linear, targets: Tensor, *, smoothing: float = 0.0, cap: float | None = None
    ) -> Tensor:
        """Return Σ −log softmax(W h + b)[target] over the rows of `hidden` [n, D], float32, W and b frozen and sliced
        by rows.

        This rank has the rows of W of its tokens in `linear`; unless rows differ, `hidden` and `targets` [n] (over the
        whole vocabulary) are equal on every rank of `group`, and so are the result and its gradient. Logits exist for
        one slice of rows and this rank's tokens at a time. Two all-reduces per slice carry the maximum, then the sum of
        exponentials, the target's logit and, with `smoothing`, the sum of logits; one in backward sums the gradient of
        `hidden`. Under autocast the products are in its precision. With `cap` the logits are soft-capped.
        """
        terms = self.cross_entropies(hidden, linear, targets, smoothing=smoothing, cap=cap)
        return terms.sum(dtype=capabilities(hidden.device).sums).float()

    def cross_entropies(
        self, hidden: Tensor, linear: nn.Linear, targets: Tensor, *, smoothing: float = 0.0, cap: float | None = None
    ) -> Tensor:
        """Return the terms of `cross_entropy`, one per row, float32 (n,)."""
        hidden = hidden.to(product_dtype(hidden))
        return _VocabularyCrossEntropies.apply(hidden, targets, linear.weight, linear.bias, self, smoothing, cap)

    def rows_of_ranks(self, *rows: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the rank in `group` and its `rows` (n, …), one rank after the other, those without rows left out."""
        own = dist.get_rank(self.group)
        counts = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64, device=rows[0].device)
        counts[own] = len(rows[0])
        dist.all_reduce(counts, group=self.group)
        for rank, count in enumerate(counts.tolist()):
            if count:
                shared = [t.contiguous() if rank == own else t.new_empty(count, *t.shape[1:]) for t in rows]
                for tensor in shared:
                    dist.broadcast(tensor, group=self.group, group_src=rank)
                yield rank, shared

    def sum_for_each_rank(self, rows: Tensor, summand: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum over all ranks of their `summand` of this rank's `rows` (n, …)."""
        total = summand(rows[:0])
        for rank, (shared,) in self.rows_of_ranks(rows):
            part = summand(shared)
            dist.reduce(part, group=self.group, group_dst=rank)
            if rank == dist.get_rank(self.group):
                total = part
        return total


def split_embedding(embedding: Any, tokens: VocabularySlice) -> None:
    """Make `embedding`, already sliced to `tokens`, look up any token: ids [B, T] → whole [B, T, D]."""
    lookup = embedding.forward

    def summand(ids: Tensor) -> Tensor:
        local = ids - tokens.start
        foreign = (local < 0) | (local >= tokens.stop - tokens.start)
        rows: Tensor = lookup(local.masked_fill(foreign, 0))
        return rows.masked_fill(foreign.unsqueeze(-1), 0.0)

    def forward(input: Tensor) -> Tensor:
        if not tokens.rows_differ:
            return borders.reduce_from_tp(summand(input), tokens.group)
        return tokens.sum_for_each_rank(input.flatten(), summand).unflatten(0, input.shape)

    embedding.num_embeddings = tokens.stop - tokens.start
    embedding.padding_idx = None  # an id of the whole vocabulary; it only stops a gradient, and the embedding is frozen
    embedding.vocabulary = tokens
    embedding.forward = forward


def split_head(linear: Any, tokens: VocabularySlice) -> None:
    """Make `linear`, already sliced to `tokens`, return the logits of the whole vocabulary: [..., D] → [..., V].

    A training loss that temporarily replaces `linear.forward` (`VocabularySlice.cross_entropy`) never gathers them.
    """
    local = linear.forward
    missing = tokens.widest - (tokens.stop - tokens.start)

    def forward(input: Tensor) -> Tensor:
        if tokens.rows_differ:
            rows = input.flatten(0, -2).to(product_dtype(input))
            return _GatheredLogits.apply(rows, linear.weight, linear.bias, tokens).view(*input.shape[:-1], tokens.size)
        logits = local(borders.copy_to_tp(input, tokens.group))
        if missing:  # the last rank has fewer tokens, but all gather as many
            logits = F.pad(logits, (0, missing))
        return borders.gather_from_tp(logits, -1, tokens.group)[..., : tokens.size]

    linear.out_features = tokens.stop - tokens.start
    linear.vocabulary = tokens
    linear.forward = forward


class _GatheredLogits(torch.autograd.Function):
    """The logits of this rank's rows, [n, D] → [n, V], of which every rank computes the part of its tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: VocabularySlice) -> Tensor:
        ctx.weight, ctx.tokens = weight, tokens
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        missing, own = tokens.widest - len(weight), dist.get_rank(tokens.group)
        logits = hidden.new_empty(len(hidden), tokens.size)
        step = slice_rows(tokens.widest, capabilities(hidden.device).kind, hidden.element_size())
        for rank, (rows,) in tokens.rows_of_ranks(hidden):
            done = 0
            for first in range(0, len(rows), step):
                product = F.pad(F.linear(rows[first : first + step], weight, bias), (0, missing))
                for part in product.split(max(_GATHERED // tokens.widest, 1)):
                    parts = None
                    if rank == own:
                        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(tokens.group))]
                    dist.gather(part, parts, group=tokens.group, group_dst=rank)
                    for start, columns in zip(range(0, tokens.size, tokens.widest), parts or (), strict=False):
                        whole = logits[done : done + len(part), start : start + tokens.widest]
                        whole.copy_(columns[:, : whole.shape[1]])
                    done += len(part)
        return logits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight = ctx.tokens, ctx.weight.to(upstream.dtype)
        gradient = tokens.sum_for_each_rank(upstream, lambda rows: rows[:, tokens.start : tokens.stop] @ weight)
        return gradient, None, None, None


class _VocabularyCrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: VocabularySlice,
        smoothing: float,
        cap: float | None,
    ) -> Tensor:
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        if not tokens.rows_differ:
            terms = _sliced_terms(hidden, targets, weight, bias, tokens, smoothing, cap, gradient)
        else:
            terms = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
            # all ranks compute gradients if one does: they share the collectives
            for rank, (rows, chosen) in tokens.rows_of_ranks(hidden, targets):
                summand = None if gradient is None else torch.empty_like(rows)
                shared = _sliced_terms(rows, chosen, weight, bias, tokens, smoothing, cap, summand)
                if summand is not None:
                    dist.reduce(summand, group=tokens.group, group_dst=rank)
                if rank == dist.get_rank(tokens.group):
                    terms, gradient = shared, summand
        ctx.save_for_backward(gradient)
        ctx.tokens = tokens
        return terms

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (summand,) = ctx.saved_tensors
        gradient = summand * upstream[:, None].to(summand.dtype)
        if not ctx.tokens.rows_differ:
            dist.all_reduce(gradient, group=ctx.tokens.group)
        return gradient, None, None, None, None, None, None


def _sliced_terms(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: VocabularySlice,
    smoothing: float,
    cap: float | None,
    gradient: Tensor | None,
) -> Tensor:
    """Return the cross entropy of each row, float32 (n,); write this rank's summand of ∂/∂hidden into `gradient` if
    given. Every rank calls it with the same rows."""
    assert cap is None or not smoothing
    device = capabilities(hidden.device).kind
    step, targets = slice_rows(tokens.widest, device, hidden.element_size()), targets - tokens.start
    terms = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    with torch.autocast(device, enabled=False):
        for first in range(0, len(hidden), step):
            slice_, indices = hidden[first : first + step], targets[first : first + step, None]
            own = ((indices >= 0) & (indices < weight.shape[0])).float()
            indices = indices.clamp(0, weight.shape[0] - 1)
            logits = soft_cap(F.linear(slice_, weight, bias).float(), cap)
            slope = None if cap is None else 1 - (logits / cap).square()
            peak = logits.amax(dim=1, keepdim=True)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=tokens.group)
            logits.sub_(peak)
            columns = [logits.gather(1, indices) * own]
            if smoothing:
                columns.append(logits.sum(dim=1, keepdim=True))
            logits.exp_()
            sums = torch.cat([logits.sum(dim=1, keepdim=True), *columns], dim=1)
            dist.all_reduce(sums, group=tokens.group)
            norm, chosen, *total = sums.split(1, dim=1)
            if smoothing:  # the target's log p is mixed with the mean over the vocabulary
                chosen = (1 - smoothing) * chosen + smoothing / tokens.size * total[0]
            terms[first : first + step] = (norm.log() - chosen)[:, 0]
            if gradient is not None:
                logits.div_(norm).scatter_add_(1, indices, -(1 - smoothing) * own)
                if smoothing:
                    logits.sub_(smoothing / tokens.size)
                if slope is not None:
                    logits.mul_(slope)
                torch.mm(logits.to(weight.dtype), weight, out=gradient[first : first + step])
            del logits, slope  # free this slice before the next one is allocated
    return terms
