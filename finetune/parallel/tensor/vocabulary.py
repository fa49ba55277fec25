"""Vocabulary-parallel embedding and output head, and a cross entropy that gathers no logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...compute.capabilities import capabilities
from ...compute.loss import soft_cap
from ...compute.memory import slice_rows
from . import borders


@dataclass(frozen=True)
class VocabularySlice:
    """Tokens [start, stop) of `size` for which this rank has the rows of a head or embedding."""

    start: int
    stop: int
    size: int
    group: dist.ProcessGroup

    @property
    def widest(self) -> int:
        """The number of tokens of every rank but the last, which may have fewer."""
        return -(-self.size // dist.get_world_size(self.group))

    def cross_entropy(self, hidden: Tensor, linear: nn.Linear, targets: Tensor, *, cap: float | None = None) -> Tensor:
        """Return Σ −log softmax(W h + b)[target] over the rows of `hidden` [n, D], float32, W and b frozen and sliced
        by rows.

        This rank has the rows of W of its tokens in `linear`; `hidden` and `targets` [n] (over the whole vocabulary)
        are equal on every rank of `group`, and so are the result and its gradient. Logits exist for one slice of rows
        and this rank's tokens at a time. Two all-reduces per slice carry the maximum, then the sum of exponentials and
        the target's logit; one in backward sums the gradient of `hidden`. Under autocast the products are in its
        precision. With `cap` the logits are soft-capped.
        """
        terms = self.cross_entropies(hidden, linear, targets, cap=cap)
        return terms.sum(dtype=capabilities(hidden.device).sums).float()

    def cross_entropies(
        self, hidden: Tensor, linear: nn.Linear, targets: Tensor, *, cap: float | None = None
    ) -> Tensor:
        """Return the terms of `cross_entropy`, one per row, float32 (n,)."""
        device = capabilities(hidden.device).kind
        if torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        targets = targets - self.start
        rows = slice_rows(self.widest, device, hidden.element_size())
        return _VocabularyCrossEntropies.apply(hidden, linear.weight, linear.bias, targets, self.group, cap, rows)


def split_embedding(embedding: Any, tokens: VocabularySlice) -> None:
    """Make `embedding`, already sliced to `tokens`, look up any token: ids [B, T] → whole [B, T, D] on every rank."""
    lookup = embedding.forward

    def forward(input: Tensor) -> Tensor:
        local = input - tokens.start
        foreign = (local < 0) | (local >= tokens.stop - tokens.start)
        rows = lookup(local.masked_fill(foreign, 0))
        return borders.reduce_from_tp(rows.masked_fill(foreign.unsqueeze(-1), 0.0), tokens.group)

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
        logits = local(borders.copy_to_tp(input, tokens.group))
        if missing:  # the last rank has fewer tokens, but all gather as many
            logits = F.pad(logits, (0, missing))
        return borders.gather_from_tp(logits, -1, tokens.group)[..., : tokens.size]

    linear.out_features = tokens.stop - tokens.start
    linear.vocabulary = tokens
    linear.forward = forward


class _VocabularyCrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        group: dist.ProcessGroup,
        cap: float | None,
        rows: int,
    ) -> Tensor:
        device = capabilities(hidden.device).kind
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        terms = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        with torch.autocast(device, enabled=False):
            for first in range(0, len(hidden), rows):
                slice_, indices = hidden[first : first + rows], targets[first : first + rows, None]
                own = ((indices >= 0) & (indices < weight.shape[0])).float()
                indices = indices.clamp(0, weight.shape[0] - 1)
                logits = soft_cap(F.linear(slice_, weight, bias).float(), cap)
                slope = None if cap is None else 1 - (logits / cap).square()
                peak = logits.amax(dim=1, keepdim=True)
                dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
                logits.sub_(peak)
                chosen = logits.gather(1, indices) * own
                logits.exp_()
                sums = torch.cat([logits.sum(dim=1, keepdim=True), chosen], dim=1)
                dist.all_reduce(sums, group=group)
                norm, chosen = sums.split(1, dim=1)
                terms[first : first + rows] = (norm.log() - chosen)[:, 0]
                if gradient is not None:
                    logits.div_(norm).scatter_add_(1, indices, -own)
                    if slope is not None:
                        logits.mul_(slope)
                    torch.mm(logits.to(weight.dtype), weight, out=gradient[first : first + rows])
                del logits, slope  # free this slice before the next one is allocated
        ctx.save_for_backward(gradient)
        ctx.group = group
        return terms

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (summand,) = ctx.saved_tensors
        gradient = summand * upstream[:, None].to(summand.dtype)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None, None, None, None, None
