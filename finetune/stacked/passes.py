"""Which micro-batches go forward together, and how their rows become one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.encoding import IGNORE

if TYPE_CHECKING:
    from ..data.micro_batch import MicroBatch

TOKENS = {"cpu": 1024, "cuda": 1 << 16}
"""Tokens of one pass: enough that a product is worth its call, few enough that a CPU's caches hold what it makes."""
SHARED_TOKENS = {"cpu": 2048, "cuda": 1 << 16}
"""The same where a pass computes some rows once for several cells, which is worth more than what the caches lose."""
_CALLS = {"cpu": 256, "cuda": 8192}
"""What a pass costs besides its tokens, in tokens: its calls."""
_LONGEST = 8
"""How many times `SHARED_TOKENS` a pass may hold where most of its cost is shared."""


def split(
    shapes: Sequence[tuple[int, int]], *, device: str, same: Sequence[int] | None = None, shared: float = 0.0
) -> list[list[int]]:
    """Indices of micro-batches by pass, of least cost: tokens with padding, and `_CALLS` more for each pass.

    Neighbours in the order of width share a pass of at most `TOKENS` tokens, or what costs as much as `SHARED_TOKENS`
    where some have rows in common; a larger micro-batch has one of its own.

    Args:
        shapes: (rows, width) of each micro-batch.
        same: micro-batches of one number have the same rows.
        shared: the share of a token's cost that is paid once for all of the same rows in a pass.
    """
    kinds = range(len(shapes)) if same is None else same
    limits = SHARED_TOKENS if shared and len(set(kinds)) < len(shapes) else TOKENS
    limit, calls = limits.get(device, limits["cuda"]), _CALLS.get(device, _CALLS["cuda"])
    order = sorted(range(len(shapes)), key=lambda i: (-shapes[i][1], kinds[i], i))
    best: list[tuple[float, int]] = [(0.0, 0)]  # cost of the first j in order, and where their last pass begins
    for j in range(1, len(order) + 1):
        rows, distinct, found = 0, 0, (math.inf, j - 1)
        for i in range(j - 1, -1, -1):
            rows += shapes[order[i]][0]
            if i == j - 1 or kinds[order[i]] != kinds[order[i + 1]]:
                distinct += shapes[order[i]][0]
            width = shapes[order[i]][1]  # the first is the widest
            tokens = ((1 - shared) * rows + shared * distinct) * width
            if (tokens > limit or rows * width > _LONGEST * limit) and i < j - 1:
                break
            found = min(found, (best[i][0] + calls + tokens, i))
        best.append(found)
    passes, stop = [], len(order)
    while stop:
        start = best[stop][1]
        passes.append(order[start:stop])
        stop = start
    return passes[::-1]


def join(micros: Sequence[MicroBatch], *, pad_id: int) -> tuple[dict[str, Tensor], Tensor]:
    """Model inputs (R, T) and labels of the rows of all `micros`, padded on the right to the widest.

    Where one of them has packed rows, all are told apart by positions alone, and what pads a row is a sample of its own
    that nobody supervises, as in `flatshift.finetune.data.batches`.
    """
    width = max(micro.inputs["input_ids"].shape[1] for micro in micros)
    parts = [dict(micro.inputs) for micro in micros]
    if any("position_ids" in part for part in parts):
        for part in parts:
            mask = part.pop("attention_mask", None)
            if mask is not None:
                part["position_ids"] = _positions(mask)
    names = parts[0].keys()
    inputs = {name: torch.cat([_padded(part[name], name, width, pad_id) for part in parts]) for name in names}
    labels = torch.cat([_padded(micro.labels, "labels", width, pad_id) for micro in micros])
    return inputs, labels


def _positions(mask: Tensor) -> Tensor:
    """0, 1, … for the tokens of each row of a mask (B, T), and again from 0 for its padding."""
    lengths = mask.sum(1, keepdim=True)
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return torch.where(positions < lengths, positions, positions - lengths)


def _padded(values: Tensor, name: str, width: int, pad_id: int) -> Tensor:
    """(B, T) as (B, width); what is given of a whole row stays: classes (B,), or 0 and 1 of several (B, C)."""
    missing = width - values.shape[-1] if values.ndim == 2 and not values.is_floating_point() else 0
    if not missing:
        return values
    if name == "position_ids":
        more = torch.arange(missing, device=values.device).expand(len(values), missing)
        return torch.cat([values, more], 1)
    return F.pad(values, (0, missing), value={"input_ids": pad_id, "labels": IGNORE}.get(name, 0))
