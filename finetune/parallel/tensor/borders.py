"""Collectives at the border of a tensor-parallel region, each paired with the collective of its gradient.

A tensor at a border is *whole* (equal on every rank), a *summand* (its value is the sum over ranks), or a *part* (a
slice along one dim). A gradient is of the same three kinds:

    function                forward           backward          (forward: value, backward: gradient)
    copy_to_tp              whole → whole     summand → whole   all-reduce in backward ("f" of Megatron-LM)
    reduce_from_tp          summand → whole   whole → whole     all-reduce in forward ("g")
    share_from_tp           whole → whole     whole → summand   no traffic; the first rank passes the gradient on
    gather_tokens           part → whole      summand → part    all-gather; reduce-scatter in backward
    reduce_scatter_tokens   summand → part    part → whole      reduce-scatter; all-gather in backward
    scatter_to_tp           whole → part      part → whole      no traffic; all-gather in backward
    gather_from_tp          part → whole      whole → part      all-gather; no traffic in backward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TOKENS = 1
"""Token dim of hidden states [B, T, D]."""

# torch 2.13 has renamed both
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_Move = Callable[[Tensor, int, dist.ProcessGroup], Tensor]


def copy_to_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x`; all-reduce its gradient, which is a summand on each rank."""
    return _BorderFunction.apply(x, _identity, _all_reduce, 0, group) if x.requires_grad else x


def reduce_from_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over the ranks."""
    return _BorderFunction.apply(x, _all_reduce, _identity, 0, group)


def share_from_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` for a layer that is whole on every rank; its gradient counts once among the summands of a region."""
    return _BorderFunction.apply(x, _identity, _keep_on_first, 0, group) if x.requires_grad else x


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather all tokens of `x` [B, T/t, D] → [B, T, D]; its gradient is a summand on each rank."""
    return _BorderFunction.apply(x, _gather_parts, _reduce_scatter_parts, TOKENS, group)


def reduce_scatter_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens of the sum of `x` [B, T, D] over the ranks → [B, T/t, D]."""
    return _BorderFunction.apply(x, _reduce_scatter_parts, _gather_parts, TOKENS, group)


def scatter_to_tp(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the whole `x` along `dim`."""
    return _BorderFunction.apply(x, _take_part, _gather_parts, dim, group)


def gather_from_tp(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the whole tensor from every rank's part `x` along `dim`; its gradient must be the same on every rank."""
    return _BorderFunction.apply(x, _gather_parts, _take_part, dim, group)


class _BorderFunction(torch.autograd.Function):
    """`move` in forward, `reverse` on the gradient; itself differentiable, so Hessian products pass through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: _Move, reverse: _Move, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = (reverse, move, dim, group)
        return move(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _BorderFunction.apply(grad, *ctx.arguments), None, None, None, None


def _identity(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _keep_on_first(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return torch.zeros_like(x) if dist.get_rank(group) else x.view_as(x)


def _all_reduce(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _take_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    width = _part_size(x, dim, group)
    return x.narrow(dim, dist.get_rank(group) * width, width).contiguous()


def _gather_parts(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    _all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts.chunk(ranks), dim=dim) if dim % x.dim() else parts


def _reduce_scatter_parts(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    width = _part_size(x, dim, group)
    parts = torch.cat(x.split(width, dim=dim)) if dim % x.dim() else x.contiguous()
    shape = list(x.shape)
    shape[dim] = width
    own = x.new_empty(shape)
    _reduce_scatter(own, parts, group=group)
    return own


def _part_size(x: Tensor, dim: int, group: dist.ProcessGroup) -> int:
    ranks = dist.get_world_size(group)
    assert x.shape[dim] % ranks == 0, f"dim {dim} of {tuple(x.shape)} is not a multiple of {ranks} ranks"
    return x.shape[dim] // ranks
